# SPDX-License-Identifier: Apache-2.0
"""Weights of the reference network in the form of :class:`GatherConv`, and its tensors.

Taps are ordered as the column tables are: column, then place along the last axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import ttnn

from tt_perception.bevfusion.columns import padded_channels
from tt_perception.bevfusion.tt.gatherconv import GatherConv
from tt_perception.bevfusion.tt.precision import precision_of

Arrays = Mapping[str, np.ndarray]


class Table(NamedTuple):
    """A column table on the device, and where its number of rows is.

    :ivar words: uint32 [blocks, columns * 32], maybe with other tables.
    :ivar counts: uint32 [1, 16], read when the convolution runs.
    :ivar count_index: which of the counts is this table's.
    :ivar first_block: of this table in ``words``.
    """

    words: Any
    counts: Any
    count_index: int
    first_block: int = 0


def sparse_conv(device, arrays: Arrays, name: str, **kwargs) -> GatherConv:
    """Return a sparse convolution, from weights [C_out, kx, ky, kz, C_in]."""
    weight = torch.from_numpy(arrays[f'{name}.weight'])
    c_out, kx, ky, kz, c_in = weight.shape
    return _Conv(device, weight.permute(1, 2, 3, 4, 0).reshape(-1, c_in, c_out),
                 torch.from_numpy(arrays[f'{name}.bias']), columns=kx * ky, taps=kz,
                 fidelity=precision_of(name).fidelity, **kwargs)


def map_conv(device, name: str, weight: torch.Tensor, bias: torch.Tensor,
             **kwargs) -> GatherConv:
    """Return a convolution over a map, from weights [C_out, C_in, kx, ky].

    :param name: of the block, which decides the precision.
    """
    c_out, c_in, kx, ky = weight.shape
    return _Conv(device, weight.permute(2, 3, 1, 0).reshape(-1, c_in, c_out), bias,
                 columns=kx, taps=ky, fidelity=precision_of(name).fidelity, **kwargs)


class _Conv(GatherConv):
    """Takes a :class:`Table` in one piece."""

    def __call__(self, features, table: Table, out, **kwargs):
        return super().__call__(features, table.words, table.counts, table.count_index, out,
                                table_first_block=table.first_block, **kwargs)


def empty(device, shape: Sequence[int], dtype):
    """Return a row-major tensor in the device's DRAM."""
    return ttnn.allocate_tensor_on_device(ttnn.Shape(list(shape)), dtype, ttnn.ROW_MAJOR_LAYOUT,
                                          device, ttnn.DRAM_MEMORY_CONFIG)


def empty_pairs(device, rows: int, channels: int):
    """Return room for rows of pairs."""
    return empty(device, (rows, 2 * padded_channels(channels)), ttnn.bfloat16)


def words(device, array: np.ndarray):
    """Return uint32 words on the device."""
    return ttnn.from_torch(torch.from_numpy(array.view(np.int32)).view(torch.uint32),
                           dtype=ttnn.uint32, layout=ttnn.ROW_MAJOR_LAYOUT, device=device,
                           memory_config=ttnn.DRAM_MEMORY_CONFIG)
