# SPDX-License-Identifier: Apache-2.0
"""What the accelerator needs of a frame: features as pairs, and tables of input columns.

All sparse convolutions of this network have three taps along z, and rows are sorted by x, y, z.
So the inputs of one output row that share a column (kx, ky) follow each other: one 32-bit word,
``first row << 3 | which taps exist``, stands for three entries of a gather table. A table is kept
in blocks of 32 output rows, ``[blocks, columns * 32]``, the words of one column side by side; the
rows that fill up the last block have no inputs.

Values travel as pairs of bfloat16: ``hi`` is a multiple of a step that a row has in common, less
than 128 steps in size, as the matrix unit wants it, and ``lo`` is what is left, rounded. Together
they miss at most 2^-16 of the greatest value of the row: 2 mm where coordinates reach 122 m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.sites import (
    DOWN,
    OUT,
    SUBMANIFOLD,
    THREE_TAPS,
    Geometry,
    Level,
    SiteLevels,
    below,
    count_bits,
    find_column,
)
from tt_perception.runtime import pool
from tt_perception.runtime.jit import kernel

BLOCK_ROWS = 32
COLUMNS = 9  # kx * 3 + ky
COUNT_WORDS = 16  # of 4 bytes: the smallest aligned read
HI_BITS = 7  # of the first term of a pair
_GRAIN = pool.ROWS_PER_CALL // BLOCK_ROWS


def blocks_of(rows: int) -> int:
    """Return how many blocks hold as many rows."""
    return -(-rows // BLOCK_ROWS)


def padded_channels(channels: int) -> int:
    """Return the channels of a row of pairs that holds as many.

    Pairs of 16 channels fill one row of a tile and the smallest aligned read; from there on, hi
    and lo fill whole tiles each.
    """
    return 16 if channels <= 16 else -(-channels // 32) * 32


@dataclass(frozen=True)
class TableLayout:
    """Where the column tables of one capacity bucket stand in one array of blocks.

    The order is: submanifold convolutions of levels 1 to 4, then the convolutions down to levels
    2 to 4. The table of the last convolution has an array of its own; it lists all cells.

    :ivar capacities: rows of levels 1 to 4.
    :ivar out_shape_xyz: cells of the sparse encoder's output.
    """

    capacities: tuple[int, int, int, int]
    out_shape_xyz: tuple[int, int, int]

    @classmethod
    def of(cls, network: NetworkConfig, capacities: tuple[int, int, int, int]) -> TableLayout:
        """Return the layout for a network; a bucket never exceeds the network's own capacities."""
        rows = tuple(min(pair) for pair in zip(capacities, network.level_capacities, strict=True))
        return cls(rows, network.level_shapes_xyz[-1])

    @cached_property
    def first_blocks(self) -> tuple[int, ...]:
        """First block of the seven tables, and the number of all blocks."""
        sizes = [blocks_of(rows) for rows in (*self.capacities, *self.capacities[1:])]
        return tuple(int(n) for n in np.cumsum([0, *sizes]))

    @property
    def subm(self) -> tuple[int, ...]:
        """First blocks of the submanifold tables of levels 1 to 4."""
        return self.first_blocks[:4]

    @property
    def down(self) -> tuple[int, ...]:
        """First blocks of the tables down to levels 2 to 4."""
        return self.first_blocks[4:7]

    @property
    def num_blocks(self) -> int:
        """Blocks of all seven tables."""
        return self.first_blocks[7]

    @property
    def num_out_rows(self) -> int:
        """Rows of the output's table, ``(x * Y + y) * Z + z``: every cell has one."""
        return math.prod(self.out_shape_xyz)

    def rows_of(self, level: int) -> int:
        """Return the rows of level 1 to 4 in whole blocks."""
        return blocks_of(self.capacities[level - 1]) * BLOCK_ROWS


@dataclass(frozen=True)
class FrameBuffers:
    """The host arrays of one frame of one capacity bucket, in the form of the device's inputs.

    :ivar features: uint16 [rows of level 1, 2 * C], pairs of bfloat16: hi of all C channels, lo.
    :ivar tables: uint32 [blocks, 9 * 32], see :class:`TableLayout`.
    :ivar out_table: uint32 [blocks of the output, 32].
    :ivar counts: uint32 [1, 16], active rows of levels 1 to 4.
    """

    layout: TableLayout
    features: np.ndarray
    tables: np.ndarray
    out_table: np.ndarray
    counts: np.ndarray

    @classmethod
    def shapes(cls, layout: TableLayout, num_features: int) -> dict[str, tuple[tuple, type]]:
        """Return shape and type of each array, by its name."""
        return {
            'features': ((layout.rows_of(1), 2 * padded_channels(num_features)), np.uint16),
            'tables': ((layout.num_blocks, COLUMNS * BLOCK_ROWS), np.uint32),
            'out_table': ((blocks_of(layout.num_out_rows), BLOCK_ROWS), np.uint32),
            'counts': ((1, COUNT_WORDS), np.uint32),
        }

    def fill(self, sites: SiteLevels, order: np.ndarray, features: np.ndarray) -> None:
        """Write a frame.

        :param sites: the frame's sites; they fit into the layout.
        :param order: int32 [n], the voxel of each row of level 1, see :meth:`SiteLevels.place`.
        :param features: float32 [voxels, F].
        """
        levels, layout = sites.levels, self.layout
        pool.shared().run(_split_pairs, len(order), features, order, self.features)
        for level, first in zip(levels[:4], layout.subm, strict=True):
            self._write(level, level, SUBMANIFOLD, first)
        for source, target, geometry, first in zip(levels[:3], levels[1:4], DOWN, layout.down,
                                                   strict=True):
            self._write(source, target, geometry, first)
        source = levels[3]
        x, y, z = layout.out_shape_xyz
        pool.shared().run(_list_cell_inputs, blocks_of(x * y * z), (x, y, z), OUT, source.bits,
                          source.ranks, source.shape_xyz[1], source.masks, source.starts,
                          self.out_table, grain=_GRAIN)
        self.counts[0, :4] = sites.num_rows[:4]

    def _write(self, source: Level, target: Level, geometry: Geometry, first_block: int) -> None:
        pool.shared().run(_list_inputs, blocks_of(target.num_rows), target.coords_xyz, geometry,
                          source.bits, source.ranks, source.shape_xyz[1], source.masks,
                          source.starts, self.tables[first_block:], grain=_GRAIN)


def map_columns(shape_xy: tuple[int, int], stride: int = 1, kernel_size: int = 3) -> np.ndarray:
    """Return the column table of a dense convolution over a map of cells, row = x * Y + y.

    Columns are along x, taps along y; the map is padded so that stride 1 keeps its size.

    :param kernel_size: 3, or 1 for a table of one column with one tap.
    :returns: uint32 [blocks, kernel_size * 32].
    """
    size_x, size_y = shape_xy
    pad = kernel_size // 2
    out_x, out_y = (np.arange(-(-size // stride)) * stride - pad for size in shape_xy)
    x = out_x[:, None, None] + np.arange(kernel_size)
    first_y = out_y[None, :, None]
    taps = np.zeros(np.broadcast_shapes(x.shape, first_y.shape), np.uint32)
    for tap in range(kernel_size):
        y = first_y + tap
        taps |= (((x >= 0) & (x < size_x) & (y >= 0) & (y < size_y)) << tap).astype(np.uint32)
    base = (x * size_y + np.maximum(first_y, 0)).astype(np.int64)
    words = np.where(taps > 0, base << 3 | taps, 0).reshape(-1, kernel_size).astype(np.uint32)
    words = np.pad(words, ((0, -len(words) % BLOCK_ROWS), (0, 0)))
    blocks = words.reshape(-1, BLOCK_ROWS, kernel_size).transpose(0, 2, 1)
    return np.ascontiguousarray(blocks.reshape(len(blocks), -1))


@kernel
def _bfloat16(bits):
    """Round the bits of a float32 to bfloat16, to nearest even; the low half is zero then."""
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint32((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000))


@kernel
def _split_pairs(begin, end, features, order, pairs):
    """Write a range of rows as [hi | lo]; channels beyond the features are zero."""
    channels = pairs.shape[1] // 2
    for row in range(begin, end):
        pairs[row] = 0
        voxel = order[row]
        greatest = np.float32(0)
        for channel in range(features.shape[1]):
            greatest = max(greatest, abs(features[voxel, channel]))
        exponent = math.frexp(greatest * (1 + 2.0 ** -HI_BITS))[1] - HI_BITS
        step = np.float32(math.ldexp(1.0, exponent))
        for channel in range(features.shape[1]):
            value = features[voxel, channel]
            hi = np.float32(np.rint(value / step) * step)
            lo = np.float32(value - hi)
            pairs[row, channel] = _bfloat16(hi.view(np.uint32)) >> np.uint32(16)
            pairs[row, channels + channel] = _bfloat16(lo.view(np.uint32)) >> np.uint32(16)


@kernel
def _word(column_mask, column_start, first_z):
    """Return first row and existing taps of three cells from ``first_z`` of a column."""
    row = column_start + count_bits(column_mask & below(first_z))
    taps = (column_mask >> np.uint64(first_z)) & THREE_TAPS
    return (np.uint32(row) << np.uint32(3)) | np.uint32(taps) if taps else np.uint32(0)


@kernel
def _list_inputs(begin, end, coords_xyz, geometry, source_bits, source_ranks, source_size_y,
                 source_masks, source_starts, words):
    """Write a range of blocks of a table; rows of one column follow each other."""
    kernel_xy, stride_xy, pad_xy, stride_z, pad_z = geometry
    columns = kernel_xy * kernel_xy
    near_masks = np.zeros(columns, np.uint64)
    near_starts = np.zeros(columns, np.int32)
    last_x, last_y = np.int32(-1), np.int32(-1)
    for block in range(begin, end):
        for r in range(BLOCK_ROWS):
            row = block * BLOCK_ROWS + r
            if row >= len(coords_xyz):
                for column in range(columns):
                    words[block, column * BLOCK_ROWS + r] = 0
                continue
            x, y = coords_xyz[row, 0], coords_xyz[row, 1]
            if x != last_x or y != last_y:
                last_x, last_y = x, y
                for i in range(kernel_xy):
                    for j in range(kernel_xy):
                        near = find_column(x * stride_xy - pad_xy + i, y * stride_xy - pad_xy + j,
                                           source_size_y, source_bits, source_ranks)
                        near_masks[i * kernel_xy + j] = 0
                        if near >= 0:
                            near_masks[i * kernel_xy + j] = source_masks[near] << np.uint64(pad_z)
                            near_starts[i * kernel_xy + j] = source_starts[near]
            first_z = coords_xyz[row, 2] * stride_z
            for column in range(columns):
                words[block, column * BLOCK_ROWS + r] = _word(near_masks[column],
                                                              near_starts[column], first_z)


@kernel
def _list_cell_inputs(begin, end, shape_xyz, geometry, source_bits, source_ranks, source_size_y,
                      source_masks, source_starts, words):
    """Write a range of blocks of the table that has a row for every cell (x, y, z)."""
    size_x, size_y, size_z = shape_xyz
    for block in range(begin, end):
        for r in range(BLOCK_ROWS):
            cell = block * BLOCK_ROWS + r
            word = np.uint32(0)
            if cell < size_x * size_y * size_z:
                x, y = cell // (size_z * size_y), cell // size_z % size_y
                near = find_column(x, y, source_size_y, source_bits, source_ranks)
                if near >= 0:
                    first_z = cell % size_z * geometry.stride_z
                    word = _word(source_masks[near] << np.uint64(geometry.pad_z),
                                 source_starts[near], first_z)
            words[block, r] = word
