# SPDX-License-Identifier: Apache-2.0
"""Which rows meet in the sparse convolutions: the gather tables of the 8 distinct rulebooks.

Every level keeps a dense table over its columns of cells along z: a 64-bit word that says which
cells are active, and the row of the first of them. Rows are sorted by x, then y, then z, so the
row of any cell is its column's first row plus the number of active cells below it. Where a
convolution with stride puts its outputs follows from shifts of the same words. Nothing is hashed
or sorted, and only columns that were in use are cleared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from tt_perception.bevfusion.config import MAX_COLUMN_CELLS, NetworkConfig
from tt_perception.runtime.errors import CapacityError, ConfigError, InputError
from tt_perception.runtime.jit import kernel
from tt_perception.runtime.pool import shared

_COLUMNS_PER_CALL = 1024


class Geometry(NamedTuple):
    """A sparse convolution with three kernel offsets along z; x and y are alike."""

    kernel_xy: int
    stride_xy: int
    pad_xy: int
    stride_z: int
    pad_z: int

    @property
    def kernel_volume(self) -> int:
        """Number of kernel offsets."""
        return 3 * self.kernel_xy ** 2


SUBMANIFOLD = Geometry(3, 1, 1, 1, 1)
DOWN = (Geometry(3, 2, 1, 2, 1), Geometry(3, 2, 1, 2, 1), Geometry(3, 2, 1, 2, 0))
OUT = Geometry(1, 1, 0, 2, 0)


@dataclass(frozen=True)
class Rulebooks:
    """The gather tables of all sparse convolutions of one frame.

    Rows of each level are its active sites, sorted by x, then y, then z. An entry of a table is a
    row of the input level, or -1; its column is ``k = (kx * Ky + ky) * Kz + kz``. All arrays are
    views of the builder's buffers, valid until its next call.

    :ivar order: int32 [n]: index of each row of level 1 among the voxels that were given.
    :ivar coords_xyz: int32 [n_level, 3] of levels 1 to 4 and of the output.
    :ivar subm: int32 [n_level, 27] of levels 1 to 4: submanifold convolutions.
    :ivar down: int32 [n_level, 27] of levels 2 to 4: convolutions from the level before.
    :ivar out: int32 [n_out, 3]: the convolution from level 4 to the output.
    """

    order: np.ndarray
    coords_xyz: tuple[np.ndarray, ...]
    subm: tuple[np.ndarray, ...]
    down: tuple[np.ndarray, ...]
    out: np.ndarray

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Active rows of levels 1 to 4 and of the output."""
        return tuple(len(coords) for coords in self.coords_xyz)


class RulebookBuilder:
    """Builds the rulebooks of frames of one network, one frame at a time, in its own buffers."""

    def __init__(self, network: NetworkConfig) -> None:
        """Reserve address space for the largest frame; memory follows as frames need it.

        :raises ConfigError: more cells along z than a word has room for.
        """
        shapes = network.level_shapes_xyz
        if shapes[0][2] > MAX_COLUMN_CELLS:
            raise ConfigError(f'spatial_shape_xyz: found {shapes[0][2]} cells along z, '
                              f'expected at most {MAX_COLUMN_CELLS}')
        caps = network.level_capacities
        self._order = np.empty(caps[0], np.int32)
        self._levels = [_Level(f'level {i + 1}', shape, cap)
                        for i, (shape, cap) in enumerate(zip(shapes, caps))]
        # At most one output per column and level-4 site: the output needs no limit of its own.
        self._output = _Level('output', shapes[4], 2 * caps[3])
        self._subm = [_table(cap, SUBMANIFOLD) for cap in caps]
        self._down = [_table(cap, geometry) for cap, geometry in zip(caps[1:], DOWN)]
        self._out = _table(2 * caps[3], OUT)

    def __call__(self, coords_zyx: np.ndarray) -> Rulebooks:
        """Build the rulebooks of one frame.

        :param coords_zyx: int32 [n, 3], different active cells of level 1.
        :raises InputError: reason ``voxels``: another shape or type, a cell outside of the grid,
            or one that is there twice.
        :raises CapacityError: a level has more active rows than its capacity.
        """
        first = self._levels[0]
        self._check(coords_zyx)
        for level in (*self._levels, self._output):
            level.clear()
        first.activate_cells(coords_zyx)
        if first.number_rows() != len(coords_zyx):
            raise InputError(f'voxels: found {len(coords_zyx) - first.num_rows} cells twice, '
                             'expected different ones', reason='voxels')
        order = self._order[:len(coords_zyx)]
        shared().run(_rows_of_cells, len(coords_zyx), coords_zyx, first.size_y, first.words,
                     first.first_rows, order)
        for source, target, geometry in zip(self._levels, self._levels[1:], DOWN):
            target.activate_outputs(source, geometry)
            target.number_rows()
        self._output.activate_outputs(self._levels[3], OUT)
        self._output.number_rows()
        return Rulebooks(
            order=order,
            coords_xyz=tuple(level.coords_xyz for level in (*self._levels, self._output)),
            subm=tuple(_fill(table, level, level, SUBMANIFOLD)
                       for table, level in zip(self._subm, self._levels)),
            down=tuple(_fill(table, source, target, geometry) for table, source, target, geometry
                       in zip(self._down, self._levels, self._levels[1:], DOWN)),
            out=_fill(self._out, self._levels[3], self._output, OUT))

    def _check(self, coords_zyx: np.ndarray) -> None:
        if coords_zyx.dtype != np.int32 or coords_zyx.ndim != 2 or coords_zyx.shape[1] != 3:
            raise InputError(f'voxels: found {coords_zyx.dtype} {list(coords_zyx.shape)}, '
                             'expected int32 [n, 3]', reason='voxels')
        first = self._levels[0]
        first.check_capacity(len(coords_zyx))
        outside = _first_outside(coords_zyx, *first.shape_xyz)
        if outside >= 0:
            raise InputError(f'voxels: found cell z, y, x {coords_zyx[outside].tolist()}, expected '
                             f'one of {list(reversed(first.shape_xyz))}', reason='voxels')


class _Level:
    """The active sites of one level.

    :ivar words: uint64 [X * Y], active cells of each column, bit z.
    :ivar first_rows: int32 [X * Y], row of the lowest active cell of a column in use.
    :ivar columns: int32 [columns in use], in the order of rows.
    :ivar coords_xyz: int32 [rows, 3].
    """

    def __init__(self, name: str, shape_xyz: tuple[int, int, int], capacity: int) -> None:
        self.name = name
        self.shape_xyz = shape_xyz
        self.size_y = shape_xyz[1]
        self.num_rows = 0
        self._capacity = capacity
        num_columns = shape_xyz[0] * shape_xyz[1]
        self.words = np.zeros(num_columns, np.uint64)
        self.first_rows = np.empty(num_columns, np.int32)
        self._in_use = np.zeros((num_columns + 63) // 64, np.uint64)  # one bit a column
        self._columns = np.empty(num_columns, np.int32)
        self._coords_xyz = np.empty((capacity, 3), np.int32)
        self._num_columns = 0

    @property
    def columns(self) -> np.ndarray:
        return self._columns[:self._num_columns]

    @property
    def coords_xyz(self) -> np.ndarray:
        return self._coords_xyz[:self.num_rows]

    def clear(self) -> None:
        """Forget the sites of the last frame."""
        _clear_columns(self.columns, self.words, self._in_use)
        self._num_columns = self.num_rows = 0

    def activate_cells(self, coords_zyx: np.ndarray) -> None:
        """Activate the given cells; they lie inside the grid."""
        self._num_columns = _activate_cells(coords_zyx, self.size_y, self.words, self._in_use,
                                            self._columns)

    def activate_outputs(self, source: _Level, geometry: Geometry) -> None:
        """Activate every site that an active site of ``source`` reaches."""
        self._num_columns = _activate_outputs(
            source.columns, source.words, source.size_y, geometry, *self.shape_xyz, self.words,
            self._in_use, self._columns)

    def number_rows(self) -> int:
        """Sort the columns in use and give each active site its row; return their number.

        :raises CapacityError: there are too many.
        """
        num_rows = _number_rows(self._in_use, self.words, self._columns, self.first_rows)
        self.check_capacity(num_rows)
        self.num_rows = num_rows
        shared().run(_write_coords, self._num_columns, self.columns, self.words, self.first_rows,
                     self.size_y, self._coords_xyz, grain=_COLUMNS_PER_CALL)
        return num_rows

    def check_capacity(self, num_rows: int) -> None:
        """Refuse more rows than there is room for."""
        if num_rows > self._capacity:
            raise CapacityError(f'sparse {self.name}: found {num_rows} active sites, expected at '
                                f'most {self._capacity}')


def _table(rows: int, geometry: Geometry) -> np.ndarray:
    return np.empty((rows, geometry.kernel_volume), np.int32)


def _fill(table: np.ndarray, source: _Level, target: _Level, geometry: Geometry) -> np.ndarray:
    """Fill the first rows of a gather table and return them."""
    fill = _fill_table if geometry.kernel_xy == 3 else _fill_column_table
    shared().run(fill, len(target.columns), target.columns, target.words, target.first_rows,
                 target.size_y, source.words, source.first_rows, source.shape_xyz[0],
                 source.size_y, geometry, table, grain=_COLUMNS_PER_CALL)
    return table[:target.num_rows]


@intrinsic
def _count_ones(typing_context, word):
    """Return the number of set bits of a uint64."""
    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])
    return types.uint64(types.uint64), generate


@intrinsic
def _lowest_one(typing_context, word):
    """Return the index of the lowest set bit of a uint64 that has one."""
    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))
    return types.uint64(types.uint64), generate


@kernel
def _below(bit):
    """Return a word with all bits below ``bit``."""
    return (np.uint64(1) << np.uint64(bit)) - np.uint64(1)


@kernel
def _first_outside(coords_zyx, size_x, size_y, size_z):
    """Return the index of the first cell outside of the grid, -1 if there is none."""
    for i in range(len(coords_zyx)):
        z, y, x = coords_zyx[i, 0], coords_zyx[i, 1], coords_zyx[i, 2]
        if not (0 <= z < size_z and 0 <= y < size_y and 0 <= x < size_x):
            return i
    return -1


@kernel
def _activate(column, word, words, in_use, columns, num_columns):
    """Add active cells to a column; return the number of columns in use."""
    if words[column] == 0:
        columns[num_columns] = column
        num_columns += 1
        in_use[column >> 6] |= np.uint64(1) << np.uint64(column & 63)
    words[column] |= word
    return num_columns


@kernel
def _activate_cells(coords_zyx, size_y, words, in_use, columns):
    num_columns = 0
    for i in range(len(coords_zyx)):
        column = coords_zyx[i, 2] * size_y + coords_zyx[i, 1]
        num_columns = _activate(column, np.uint64(1) << np.uint64(coords_zyx[i, 0]), words,
                                in_use, columns, num_columns)
    return num_columns


@kernel
def _reached(word, stride, pad, size):
    """Return the active cells along z behind a convolution with three offsets."""
    word <<= np.uint64(pad)
    word |= word >> np.uint64(1) | word >> np.uint64(2)  # any of the three
    if stride == 2:  # keep every other bit and move them together
        word &= np.uint64(0x5555555555555555)
        word = (word | word >> np.uint64(1)) & np.uint64(0x3333333333333333)
        word = (word | word >> np.uint64(2)) & np.uint64(0x0f0f0f0f0f0f0f0f)
        word = (word | word >> np.uint64(4)) & np.uint64(0x00ff00ff00ff00ff)
        word = (word | word >> np.uint64(8)) & np.uint64(0x0000ffff0000ffff)
        word = (word | word >> np.uint64(16)) & np.uint64(0x00000000ffffffff)
    return word & _below(size)


@kernel
def _activate_outputs(source_columns, source_words, source_size_y, geometry, size_x, size_y,
                      size_z, words, in_use, columns):
    kernel_xy, stride, pad, stride_z, pad_z = geometry
    num_columns = 0
    for source in source_columns:
        x, y = source // source_size_y + pad, source % source_size_y + pad
        word = _reached(source_words[source], stride_z, pad_z, size_z)
        if word == 0:
            continue
        for kx in range(kernel_xy):
            if x < kx or (x - kx) % stride or (x - kx) // stride >= size_x:
                continue
            for ky in range(kernel_xy):
                if y < ky or (y - ky) % stride or (y - ky) // stride >= size_y:
                    continue
                column = (x - kx) // stride * size_y + (y - ky) // stride
                num_columns = _activate(column, word, words, in_use, columns, num_columns)
    return num_columns


@kernel
def _number_rows(in_use, words, columns, first_rows):
    """List the columns in use in ascending order and give each its first row."""
    row, found = 0, 0
    for block in range(len(in_use)):
        bits = in_use[block]
        while bits:
            column = (block << 6) + np.int64(_lowest_one(bits))
            bits &= bits - np.uint64(1)
            columns[found] = column
            first_rows[column] = row
            found += 1
            row += np.int64(_count_ones(words[column]))
    return row


@kernel
def _write_coords(begin, end, columns, words, first_rows, size_y, coords_xyz):
    for column in columns[begin:end]:
        row, word = first_rows[column], words[column]
        while word:
            coords_xyz[row, 0] = column // size_y
            coords_xyz[row, 1] = column % size_y
            coords_xyz[row, 2] = _lowest_one(word)
            word &= word - np.uint64(1)
            row += 1


@kernel
def _rows_of_cells(begin, end, coords_zyx, size_y, words, first_rows, order):
    for i in range(begin, end):
        column = coords_zyx[i, 2] * size_y + coords_zyx[i, 1]
        below = words[column] & _below(coords_zyx[i, 0])
        order[first_rows[column] + np.int64(_count_ones(below))] = i


@kernel
def _three_rows(word, first_row, z, table, row, k):
    """Write the rows of bits z to z + 2 of a column to three neighbouring entries."""
    found = first_row + np.int32(_count_ones(word & _below(z)))
    window = word >> np.uint64(z)
    for offset in range(3):
        here = np.int32(window >> np.uint64(offset) & np.uint64(1))
        table[row, k + offset] = found if here else np.int32(-1)
        found += here


@kernel
def _fill_table(begin, end, columns, words, first_rows, size_y, source_words, source_first_rows,
                source_size_x, source_size_y, geometry, table):
    """Fill the table rows of a range of output columns, for a kernel of 3 x 3 x 3."""
    _, stride, pad, stride_z, pad_z = geometry
    near_words = np.empty(9, np.uint64)
    near_rows = np.empty(9, np.int32)
    for column in columns[begin:end]:
        x, y = column // size_y * stride - pad, column % size_y * stride - pad
        for k in range(9):
            near_x, near_y = x + k // 3, y + k % 3
            near_words[k] = 0
            if 0 <= near_x < source_size_x and 0 <= near_y < source_size_y:
                near = near_x * source_size_y + near_y
                near_words[k] = source_words[near] << np.uint64(pad_z)
                near_rows[k] = source_first_rows[near]
        row, word = first_rows[column], words[column]
        while word:
            z = np.int64(_lowest_one(word)) * stride_z
            word &= word - np.uint64(1)
            for k in range(9):
                if near_words[k]:
                    _three_rows(near_words[k], near_rows[k], z, table, row, 3 * k)
                else:
                    table[row, 3 * k] = table[row, 3 * k + 1] = table[row, 3 * k + 2] = -1
            row += 1


@kernel
def _fill_column_table(begin, end, columns, words, first_rows, size_y, source_words,
                       source_first_rows, source_size_x, source_size_y, geometry, table):
    """Do the same for a kernel of 1 x 1 x 3, whose inputs are in the column of the output."""
    stride_z, pad_z = geometry[3], geometry[4]
    for column in columns[begin:end]:
        source = source_words[column] << np.uint64(pad_z)
        row, word = first_rows[column], words[column]
        while word:
            z = np.int64(_lowest_one(word)) * stride_z
            word &= word - np.uint64(1)
            _three_rows(source, source_first_rows[column], z, table, row, 0)
            row += 1


@kernel
def _clear_columns(columns, words, in_use):
    for column in columns:
        words[column] = 0
        in_use[column >> 6] = 0
