# SPDX-License-Identifier: Apache-2.0
"""The decoder layer of the head as a ttnn graph: proposals look at one another, then at the map.

Rows of proposals are float32 tiles; the matrix unit takes the leading bits of float32 (tf32) and
sums in float32. Both attentions run in bfloat16 with sums in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import ttnn

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.fold import HEAD_EPSILON
from tt_perception.bevfusion.tt import layout
from tt_perception.bevfusion.tt.precision import POLICY, Precision
from tt_perception.runtime.trace import Keep

# The release's 8 heads of 512 queries make 64 units of work, one a core; chunks of 32 queries
# would make 128, two for some cores. Scores of a chunk against 512 keys are 32 tiles in L1.
_QUERY_CHUNK = 64
_KEY_CHUNK = 512


_ROWS = POLICY['bbox_head.decoder']
_ATTENTION = POLICY['bbox_head.decoder.attention']
_ATTENTION_TYPE = getattr(ttnn, _ATTENTION.activations)


def compute_config(precision: Precision) -> ttnn.WormholeComputeKernelConfig:
    """Return the settings of operations on the matrix unit; sums are float32."""
    return ttnn.WormholeComputeKernelConfig(
        math_fidelity=getattr(ttnn.MathFidelity, precision.fidelity), math_approx_mode=False,
        fp32_dest_acc_en=True, packer_l1_acc=True)


class Linear:
    """``x @ weight + bias`` on the device.

    :param bias: may be left out of the layer.
    """

    def __init__(self, device: ttnn.Device, weight: torch.Tensor,
                 bias: torch.Tensor | None = None, precision: Precision = _ROWS) -> None:
        self._weight = to_device(device, weight, getattr(ttnn, precision.weights))
        self._bias = None if bias is None else to_device(device, bias[None])
        self._compute = compute_config(precision)

    @classmethod
    def of(cls, device: ttnn.Device, layer: layout.Linear,
           precision: Precision = _ROWS) -> Linear:
        """Return the device's copy of a layer."""
        return cls(device, layer.weight, layer.bias, precision)

    def __call__(self, x: ttnn.Tensor, dtype: ttnn.DataType = ttnn.float32,
                 activation: str | None = None) -> ttnn.Tensor:
        """Take tiles [..., in]; return tiles [..., out] of type ``dtype``."""
        return ttnn.linear(x, self._weight, bias=self._bias, dtype=dtype, activation=activation,
                           compute_kernel_config=self._compute)


def to_device(device: ttnn.Device, values: torch.Tensor, dtype: ttnn.DataType = ttnn.float32,
              tiles: bool = True) -> ttnn.Tensor:
    """Return a constant of the graph: ``values`` in the device's DRAM."""
    return ttnn.from_torch(values, dtype=dtype, device=device,
                           layout=ttnn.TILE_LAYOUT if tiles else ttnn.ROW_MAJOR_LAYOUT)


class _Attention:
    """Multi-head attention over heads that are one tile wide, see :mod:`.layout`."""

    def __init__(self, device: ttnn.Device, config: NetworkConfig,
                 weights: layout.AttentionWeights) -> None:
        self._heads = config.num_heads
        self._query = Linear.of(device, weights.query)
        self._out = Linear.of(device, weights.out)
        self._out_common = Linear(device, weights.out.weight)
        self._scale = (config.hidden_channels // config.num_heads) ** -0.5
        self._compute = compute_config(_ATTENTION)
        self._program = ttnn.SDPAProgramConfig(
            compute_with_storage_grid_size=device.compute_with_storage_grid_size(),
            q_chunk_size=_QUERY_CHUNK, k_chunk_size=_KEY_CHUNK, exp_approx_mode=False)

    def split(self, x: ttnn.Tensor) -> ttnn.Tensor:
        """Take [1, 1, n, heads * 32]; return [1, heads, n, 32]. Tiles move, none changes."""
        return ttnn.experimental.nlp_create_qkv_heads(
            x, num_heads=self._heads, num_kv_heads=0, transpose_k_heads=False)[0]

    def __call__(self, placed: ttnn.Tensor, key_value: ttnn.Tensor) -> ttnn.Tensor:
        """Return what the queries see, float32 [1, 1, n, C].

        :param placed: queries with their positions, float32 tiles [1, 1, n, C].
        :param key_value: bfloat16 tiles [1, heads, m, 32]; rows that only fill the last tile do
            not count.
        """
        mixed = ttnn.transformer.scaled_dot_product_attention(
            self.split(self._query(placed, _ATTENTION_TYPE)), key_value, key_value,
            is_causal=False, scale=self._scale, program_config=self._program,
            compute_kernel_config=self._compute, output_concat_heads=True)
        return self._out(mixed)

    def project(self, common: ttnn.Tensor) -> ttnn.Tensor:
        """Return what a part that all keys and values have in common adds to the output.

        :param common: tiles [1, 1, 1, heads * 32]; the projection drops the part of the keys.
        """
        return self._out_common(common)


class Decoder:
    """One post-norm layer: self attention, attention to the whole map, two linear layers.

    :param arrays: weights by the names of the network without norms.
    """

    def __init__(self, device: ttnn.Device, config: NetworkConfig,
                 arrays: Mapping[str, np.ndarray]) -> None:
        self._num_proposals = config.num_proposals
        of_proposals, of_map = (layout.attention(arrays, name, config)
                                for name in ('self_attn', 'cross_attn'))
        self._self_attn = _Attention(device, config, of_proposals)
        self._key_value = Linear.of(device, of_proposals.key_value)
        self._cross_attn = _Attention(device, config, of_map)
        self._lay_map_projection(device, config, arrays, of_map.key_value)
        stem = f'{layout.DECODER}.ffn.layers'
        self._widen, self._narrow = (Linear.of(device, layout.linear(arrays, f'{stem}.{name}'))
                                     for name in ('0.0', '1'))
        self._norms = [tuple(to_device(device, torch.tensor(arrays[name])[None])
                             for name in (f'{layout.DECODER}.norms.{i}.weight',
                                          f'{layout.DECODER}.norms.{i}.bias')) for i in range(3)]
        self._compute = compute_config(_ROWS)

    def _lay_map_projection(self, device: ttnn.Device, config: NetworkConfig,
                            arrays: Mapping[str, np.ndarray], layer: layout.Linear) -> None:
        # A product of pair rows with twice the same matrix adds both parts of the pairs.
        self._map_key_value = Linear(device, layer.weight.repeat(2, 1))
        # The positions' part of keys and values is the same in every frame.
        position = layout.position_encoding(arrays, 'cross_posembed', config)
        self._map_position = to_device(device, (position @ layer.weight + layer.bias)[None, None],
                                       _ATTENTION_TYPE)

    def __call__(self, query: ttnn.Tensor, position: ttnn.Tensor, memory: ttnn.Tensor,
                 keep: Keep) -> ttnn.Tensor:
        """Return the refined proposals.

        :param query: float32 tiles [1, 1, padded proposals, C].
        :param position: encodings of their cells, of the same form.
        :param memory: the map as pair rows, bfloat16 row-major [cells, 2 * C].
        :param keep: is called with name and value of every block on the way.
        :returns: like ``query``.
        """
        placed = ttnn.add(query, position)
        change = self._self_attn(placed, self._proposal_keys_values(placed))
        query = self._norm(0, query, change, keep)
        key_value, shift = self._map_keys_values(memory)
        change = ttnn.add(self._cross_attn(ttnn.add(query, position), key_value), shift)
        query = self._norm(1, query, change, keep)
        change = self._narrow(self._widen(query, activation='relu'))
        return self._norm(2, query, change, keep)

    def _proposal_keys_values(self, placed: ttnn.Tensor) -> ttnn.Tensor:
        """Return keys and values of the proposals, without padding, [1, heads, proposals, 32]."""
        whole = self._self_attn.split(self._key_value(placed, _ATTENTION_TYPE))
        _, heads, _, width = whole.shape
        return ttnn.slice(whole, [0, 0, 0, 0], [1, heads, self._num_proposals, width])

    def _map_keys_values(self, memory: ttnn.Tensor) -> tuple[ttnn.Tensor, ttnn.Tensor]:
        """Return keys and values of all cells, bfloat16 [1, heads, cells, 32], less their mean
        over the cells, and what that takes from the attention's output, float32 [1, 1, 1, C].

        The attention rounds its running result once for every chunk of keys, and most of that
        result is what all cells have in common. Without it, the same roundings lose less. A
        softmax does not see what is common to all keys, and the common value passes
        through it as it is.

        Two copies of the map are needed: into tiles, which the matrix unit takes, and sorted by
        heads, as the attention reads them. Both halves of the pairs go through the same copy, as
        a copy of one half alone would move as many bytes.
        """
        cells, width = memory.shape
        tiles = ttnn.to_layout(ttnn.reshape(memory, [1, 1, cells, width]), ttnn.TILE_LAYOUT)
        rows = ttnn.add(self._map_key_value(tiles, _ATTENTION_TYPE), self._map_position)
        mean = ttnn.mean(rows, dim=2, keepdim=True, compute_kernel_config=self._compute)
        return (self._cross_attn.split(ttnn.subtract(rows, mean)),
                self._cross_attn.project(mean))

    def _norm(self, i: int, query: ttnn.Tensor, change: ttnn.Tensor, keep: Keep) -> ttnn.Tensor:
        weight, bias = self._norms[i]
        query = ttnn.layer_norm(change, residual_input_tensor=query, weight=weight, bias=bias,
                                epsilon=HEAD_EPSILON, compute_kernel_config=self._compute)
        keep(f'{layout.DECODER}.norms.{i}', query)
        return query
