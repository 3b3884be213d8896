# SPDX-License-Identifier: Apache-2.0
"""Host memory that both NumPy and ttnn see, so that an upload allocates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tt_perception.runtime.device import load_ttnn

# NumPy has no bfloat16: its bits are uint16 there.
_TYPES = {'bfloat16': np.uint16, 'float32': np.float32, 'uint32': np.uint32, 'int32': np.int32,
          'uint16': np.uint16, 'uint8': np.uint8}


class HostBuffer:
    """A row-major ttnn host tensor and an array over the same memory.

    ``ttnn.from_torch`` and ``to_torch`` copy. Here the array is written in place, and
    ``ttnn.copy_host_to_device_tensor`` takes ``tensor`` as it is. What was handed over for an
    upload may be written anew when the device has been waited for, not before.

    :param shape: of the tensor.
    :param dtype: ``bfloat16``, ``float32``, ``uint32``, ``int32``, ``uint16`` or ``uint8``.

    ``array`` is the NumPy view (bfloat16 as its bits, uint16), ``torch`` the torch view, which
    rounds what is copied into it to bfloat16; all zero at first.
    """

    def __init__(self, shape: Sequence[int], dtype: str):
        import torch
        ttnn = load_ttnn()
        # torch cannot do much with its unsigned types, but it can carry them to ttnn.
        torch_dtype = getattr(torch, dtype)
        zeros = torch.zeros(tuple(shape), dtype=torch.float32).to(torch_dtype)
        self.tensor = ttnn.from_torch(zeros, dtype=getattr(ttnn, dtype),
                                      layout=ttnn.ROW_MAJOR_LAYOUT)
        shard = self.tensor.host_buffer().get_shard(ttnn.MeshCoordinate(0, 0))
        flat = torch.from_dlpack(shard)  # uint8, and writable, which NumPy's import is not
        self.torch = flat.view(torch_dtype).view(tuple(shape))
        self.array: np.ndarray = flat.numpy().view(_TYPES[dtype]).reshape(tuple(shape))

    @classmethod
    def like(cls, tensor: Any) -> HostBuffer:
        """Return a buffer of the shape and type of a row-major device tensor."""
        return cls(tuple(tensor.shape), tensor.dtype.name.lower())
