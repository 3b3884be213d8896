# SPDX-License-Identifier: Apache-2.0
"""The sparse encoder with stock operations of ttnn, for the comparison in ``tt_perception check``.

Not used by the model. As in :class:`SparseEncoder`, features and weights are pairs of bfloat16,
``lo * lo`` is left out, and sums are float32; but hi is the value rounded, so that the matrix unit
rounds more, and all four of its phases are needed.

A convolution gathers the inputs of all 27 taps with ``embedding``, which can tilize what it
writes and serves missing inputs from L1. One row of tiles a tap then has to be turned into one row
of 27 taps, which ``nlp_concat_heads`` does in a single copy (a row-major gather would need two, a
reshape and a tilize). One product follows, with twice the columns: weights ``[hi; hi]`` beside
``[lo; 0]``, whose halves are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import ttnn

from tt_perception.bevfusion.columns import TableLayout, padded_channels
from tt_perception.bevfusion.config import NetworkConfig

if TYPE_CHECKING:
    from tt_perception.bevfusion.tt.accounting import FrameCounts

Keep = Callable[[str, Any], None]
_ROOT = 'pts_middle_encoder'
_TILE = 32
_RELU = (ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU),)


class Level(NamedTuple):
    """Features of one level.

    :ivar values: float32 tiles [1, 1, n, C], for the way around the next block.
    :ivar rows: pairs [1 + n, 2 * C], the first one zero, to be gathered from.
    """

    values: Any
    rows: Any


def pair_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of a product with rows of pairs.

    :param weight: float32 [taps, C_in, C_out].
    :returns: bfloat16 [taps * 2 * C_in, 2 * width], width = C_out in whole tiles. The sum of both
        halves of the product is the convolution.
    """
    taps, c_in, c_out = weight.shape
    hi = weight.bfloat16()
    lo = (weight - hi.float()).bfloat16()
    halves = torch.stack([torch.cat([hi, hi], 1), torch.cat([lo, torch.zeros_like(lo)], 1)], 2)
    padded = F.pad(halves, (0, -c_out % _TILE))
    return padded.reshape(taps * 2 * c_in, -1)


def gather_indices(table: np.ndarray, rows: int) -> np.ndarray:
    """Return a gather table in the form of ``embedding``.

    :param table: int32 [n, taps], -1 where an input is missing.
    :returns: uint32 [1, taps * rows]: row + 1 for each tap and output row, 0 where there is none.
    """
    indices = np.zeros((table.shape[1], rows), np.uint32)
    indices[:, :len(table)] = table.T + 1
    return indices.reshape(1, -1)


def gathered_rows(frame: FrameCounts, dense_last_level: bool) -> list[int]:
    """Return how many rows each ``embedding`` of :class:`StockEncoder` fetches from DRAM.

    Missing inputs come from L1.
    """
    tables = ['subm_1']
    for level in (1, 2, 3, 4):
        if level < 4 or not dense_last_level:
            tables += [f'subm_{level}'] * 4
        if level < 4:
            tables.append(f'down_{level + 1}')
    present = [frame.tables[name].present for name in tables]
    sites, out_sites = frame.active_rows[3:5]
    if dense_last_level:
        return [*present, sites, sites, out_sites]
    return [*present, frame.tables['out'].present, out_sites]


class StockEncoder:
    """The encoder as a graph of stock operations.

    :param arrays: weights by name, of a folded network.
    :param layout: says how many rows each level has room for.
    :param dense_last_level: level 4 as a dense grid, with ``conv3d``.
    """

    def __init__(self, device, config: NetworkConfig, arrays: Mapping[str, np.ndarray],
                 layout: TableLayout, dense_last_level: bool) -> None:
        self._device = device
        self._config = config
        self._arrays = arrays
        self._rows = [layout.rows_of(level) for level in (1, 2, 3, 4)]
        self._is_dense = dense_last_level
        self._kernel_config = ttnn.init_device_compute_kernel_config(
            device.arch(), math_fidelity=ttnn.MathFidelity.HiFi4, fp32_dest_acc_en=True,
            packer_l1_acc=True)
        self._weights: dict[str, tuple] = {}
        self._zero_rows: dict[int, Any] = {}
        self._load()
        # Zeros: on a card these tables are followed, and its memory holds anything.
        self.inputs = {name: self._zeros(shape, dtype)
                       for name, (shape, dtype) in self._input_shapes().items()}
        if dense_last_level:
            present = torch.ones(1 + self._rows[3], _TILE, dtype=torch.bfloat16)
            present[0] = 0
            self._present = self._tensor(present, ttnn.bfloat16, ttnn.ROW_MAJOR_LAYOUT)

    @property
    def input_bytes(self) -> int:
        """What the host writes for a frame; all of it is two or four bytes wide."""
        return sum(math.prod(shape) * (2 if dtype == ttnn.bfloat16 else 4)
                   for shape, dtype in self._input_shapes().values())

    def _input_shapes(self) -> dict[str, tuple[tuple[int, int], Any]]:
        """Return shape and type of what the host writes, by name.

        The tables are in the order of :func:`gather_indices`; ``cells`` has a row of the last
        sparse level for every cell, ``sites`` the output's first input.
        """
        rows, config = self._rows, self._config
        c_in = padded_channels(config.in_channels)
        shapes = {'features': ((1 + rows[0], 2 * c_in), ttnn.bfloat16)}
        for level in range(1, 4 if self._is_dense else 5):
            shapes[f'subm_{level}'] = ((1, 27 * rows[level - 1]), ttnn.uint32)
        for level in (2, 3, 4):
            shapes[f'down_{level}'] = ((1, 27 * rows[level - 1]), ttnn.uint32)
        size = [int(np.prod(shape)) for shape in config.level_shapes_xyz[-2:]]
        if self._is_dense:
            shapes['cells'] = ((1, size[0]), ttnn.uint32)
            shapes['sites'] = ((1, size[1]), ttnn.uint32)
        else:
            shapes['out'] = ((1, 3 * size[1]), ttnn.uint32)
            shapes['sites'] = ((1, size[1]), ttnn.uint32)
        return shapes

    def _load(self) -> None:
        """Bring all weights into the form of their operations."""
        for name in self._sparse_convs():
            weight = torch.from_numpy(self._arrays[f'{name}.weight']).permute(1, 2, 3, 4, 0)
            weight = weight.reshape(-1, *weight.shape[3:])
            c_in = weight.shape[1]
            weight = pair_weight(F.pad(weight, (0, 0, 0, padded_channels(c_in) - c_in)))
            bias = F.pad(torch.from_numpy(self._arrays[f'{name}.bias']),
                         (0, weight.shape[1] - len(self._arrays[f'{name}.bias'])))
            self._weights[name] = (self._tensor(weight, ttnn.bfloat16),
                                   self._tensor(bias[None], ttnn.float32))
        for name in self._dense_convs():
            weight = torch.from_numpy(self._arrays[f'{name}.weight']).permute(0, 4, 1, 2, 3)
            hi = weight.bfloat16().float()
            parts = [self._prepared(part) for part in (hi, weight - hi)]
            bias = torch.from_numpy(self._arrays[f'{name}.bias'])[None].expand(_TILE, -1)
            self._weights[name] = (*parts, self._tensor(bias.contiguous(), ttnn.float32))

    def _prepared(self, weight: torch.Tensor):
        """Return weights [C_out, C_in, kx, ky, kz] in the form of ``conv3d``."""
        host = ttnn.from_torch(weight.contiguous(), dtype=ttnn.float32)
        rows = ttnn.experimental.prepare_conv3d_weights(
            weight_tensor=host, groups=1, C_in_block=_input_block(weight.shape[1],
                                                                  weight.shape[2:]),
            alignment=_TILE, device=self._device)
        return ttnn.to_layout(rows, ttnn.TILE_LAYOUT)

    def _sparse_convs(self) -> list[str]:
        names = [f'{_ROOT}.conv_input.0']
        for level in (1, 2, 3, 4):
            if level < 4 or not self._is_dense:
                names += self._block_convs(level)
            if level < 4:
                names.append(f'{_layer(level)}.2.0')
        return names if self._is_dense else [*names, f'{_ROOT}.conv_out.0']

    def _dense_convs(self) -> list[str]:
        return [*self._block_convs(4), f'{_ROOT}.conv_out.0'] if self._is_dense else []

    @staticmethod
    def _block_convs(level: int) -> list[str]:
        return [f'{_layer(level)}.{block}.conv{i}' for block in (0, 1) for i in (1, 2)]

    def __call__(self, keep: Keep):
        """Return the map, pairs [X * Y, 2 * Z * C], and call ``keep`` behind each convolution."""
        x = Level(None, self.inputs['features'])
        x = self._sparse(f'{_ROOT}.conv_input.0', x.rows, 'subm_1', None, keep)
        for level in (1, 2, 3):
            x = self._blocks(level, x, keep)
            x = self._sparse(f'{_layer(level)}.2.0', x.rows, f'down_{level + 1}', None, keep)
        if self._is_dense:
            return self._dense_end(x, keep)
        x = self._blocks(4, x, keep)
        x = self._sparse(f'{_ROOT}.conv_out.0', x.rows, 'out', None, keep)
        bev = ttnn.embedding(self.inputs['sites'], x.rows, padding_idx=0,
                             embeddings_type=ttnn.EmbeddingsType.PADDED)
        bev = ttnn.reshape(bev, [self._num_cells_xy, -1])
        keep(f'{_ROOT}.bev', bev)
        return bev

    @property
    def _num_cells_xy(self) -> int:
        x, y = self._config.feature_map_xy
        return x * y

    def _blocks(self, level: int, x: Level, keep: Keep) -> Level:
        for block in (0, 1):
            name = f'{_layer(level)}.{block}'
            middle = self._sparse(f'{name}.conv1', x.rows, f'subm_{level}', None, keep)
            x = self._sparse(f'{name}.conv2', middle.rows, f'subm_{level}', x.values, keep)
        return x

    def _sparse(self, name: str, rows, table: str, residual, keep: Keep) -> Level:
        """Convolve, add the way around, ReLU; write rows for the next convolution."""
        indices, (weight, bias) = self.inputs[table], self._weights[name]
        taps = weight.shape[0] // rows.shape[1]
        n = indices.shape[1] // taps
        gathered = ttnn.embedding(indices, rows, layout=ttnn.TILE_LAYOUT, padding_idx=0,
                                  embeddings_type=ttnn.EmbeddingsType.PADDED)
        by_tap = ttnn.reshape(gathered, [1, taps, n, rows.shape[1]])  # a view
        side_by_side = ttnn.experimental.nlp_concat_heads(by_tap)
        ttnn.deallocate(gathered)
        both = ttnn.linear(side_by_side, weight, bias=bias, dtype=ttnn.float32,
                           compute_kernel_config=self._kernel_config)
        ttnn.deallocate(side_by_side)
        c_out, half = len(self._arrays[f'{name}.bias']), both.shape[-1] // 2
        parts = [ttnn.slice(both, [0, 0, 0, begin], [1, 1, n, begin + c_out])
                 for begin in (0, half)]
        if residual is None:
            values = ttnn.add(*parts, activations=_RELU)
        else:
            values = ttnn.add(ttnn.add(*parts), residual, activations=_RELU)
        level = Level(values, self._as_rows(values))
        keep(name, level.rows)
        return level

    def _as_rows(self, values):
        """Return float32 tiles as rows of pairs behind a row of zeros."""
        *_, n, channels = values.shape
        pairs = ttnn.to_layout(_split(values), ttnn.ROW_MAJOR_LAYOUT)
        if channels not in self._zero_rows:
            self._zero_rows[channels] = self._zeros((1, 2 * channels), ttnn.bfloat16)
        zero = self._zero_rows[channels]
        return ttnn.concat([zero, ttnn.reshape(pairs, [n, 2 * channels])], dim=0)

    # Level 4 as a dense grid

    def _dense_end(self, x: Level, keep: Keep):
        """Take rows of level 4; return the map."""
        grid, channels = self._config.level_shapes_xyz[-2], x.values.shape[-1]
        placed = ttnn.embedding(self.inputs['cells'], x.rows, layout=ttnn.TILE_LAYOUT,
                                padding_idx=0, embeddings_type=ttnn.EmbeddingsType.PADDED)
        cells = int(np.prod(grid))
        placed = ttnn.reshape(placed, [1, 1, cells, 2 * channels])
        hi, lo = (ttnn.slice(placed, [0, 0, 0, begin], [1, 1, cells, begin + channels])
                  for begin in (0, channels))
        values = ttnn.add(hi, lo, dtype=ttnn.float32)
        present = self._presence('cells')
        keep(f'{_ROOT}.placed', values)
        for block in (0, 1):
            name = f'{_layer(4)}.{block}'
            middle = self._dense(f'{name}.conv1', values, present, None, keep)
            values = self._dense(f'{name}.conv2', middle, present, values, keep)
        values = self._dense(f'{_ROOT}.conv_out.0', values, self._presence('sites'), None, keep)
        pairs = _split(ttnn.reshape(values, [1, 1, self._num_cells_xy, -1]))
        bev = ttnn.reshape(ttnn.to_layout(pairs, ttnn.ROW_MAJOR_LAYOUT),
                           [self._num_cells_xy, pairs.shape[-1]])
        keep(f'{_ROOT}.bev', bev)
        return bev

    def _presence(self, table: str):
        """Return ones at cells with a site, tiles [1, 1, cells, 1]."""
        ones = ttnn.embedding(self.inputs[table], self._present, layout=ttnn.TILE_LAYOUT,
                              padding_idx=0, embeddings_type=ttnn.EmbeddingsType.PADDED)
        cells = self.inputs[table].shape[1]
        return ttnn.slice(ttnn.reshape(ones, [1, 1, cells, _TILE]), [0, 0, 0, 0],
                          [1, 1, cells, 1])

    def _dense(self, name: str, values, present, residual, keep: Keep):
        """Convolve, add the way around, ReLU, clear cells without a site."""
        hi, lo, bias = self._weights[name]
        size_x, size_y, size_z = self._config.level_shapes_xyz[-2]
        channels = values.shape[-1]
        grid = ttnn.reshape(ttnn.to_layout(values, ttnn.ROW_MAJOR_LAYOUT),
                            [1, size_x, size_y, size_z, channels])
        is_last = residual is None and name.startswith(f'{_ROOT}.conv_out')
        kernel, stride, pad = (((1, 1, 3), (1, 1, 2), (0, 0, 0)) if is_last
                               else ((3, 3, 3), (1, 1, 1), (1, 1, 1)))
        out = ttnn.experimental.conv3d(
            input_tensor=grid, weight_tensor=hi, weight_lo_tensor=lo, bias_tensor=bias,
            dtype=ttnn.float32, output_channels=len(self._arrays[f'{name}.bias']),
            kernel_size=kernel, stride=stride, padding=pad, padding_mode='zeros', groups=1,
            config=self._dense_config(name), compute_kernel_config=self._kernel_config)
        cells = int(np.prod(list(out.shape)[:-1]))
        out = ttnn.to_layout(ttnn.reshape(out, [1, 1, cells, out.shape[-1]]), ttnn.TILE_LAYOUT)
        if residual is not None:
            out = ttnn.add(out, residual)
        out = ttnn.multiply(out, present, input_tensor_a_activations=_RELU)
        keep(name, out)
        return out

    def _dense_config(self, name: str):
        c_out, *kernel, c_in = self._arrays[f'{name}.weight'].shape
        return ttnn.Conv3dConfig(
            weights_dtype=ttnn.float32, T_out_block=1, H_out_block=4, W_out_block=5,
            C_in_block=_input_block(c_in, kernel), C_out_block=c_out,
            compute_with_storage_grid_size=self._device.compute_with_storage_grid_size(),
            enable_fp32_operand_split=True)

    # Tensors

    def _tensor(self, array: torch.Tensor, dtype, layout=ttnn.TILE_LAYOUT):
        return ttnn.from_torch(array, dtype=dtype, layout=layout, device=self._device,
                               memory_config=ttnn.DRAM_MEMORY_CONFIG)

    def _zeros(self, shape: tuple[int, int], dtype):
        return self._tensor(torch.zeros(shape, dtype=torch.int32), dtype, ttnn.ROW_MAJOR_LAYOUT)


def _layer(level: int) -> str:
    return f'{_ROOT}.encoder_layers.encoder_layer{level}'


def _input_block(c_in: int, kernel: Sequence[int]) -> int:
    """Return how many input channels L1 has room for: all of 3 taps, 32 of 27."""
    return c_in if math.prod(kernel) == 3 else _TILE


def _split(values):
    """Return float32 tiles as bfloat16 tiles with twice the columns: hi, then lo."""
    hi = ttnn.typecast(values, ttnn.bfloat16)
    lo = ttnn.subtract(values, hi, dtype=ttnn.bfloat16)
    return ttnn.concat([hi, lo], dim=-1)
