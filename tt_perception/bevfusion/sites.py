# SPDX-License-Identifier: Apache-2.0
"""The active sites of the sparse encoder's levels, and the row that each of them is.

How a level is kept: active sites are grouped into columns along z. A bitmap over (x, y) tells
which columns are occupied; counting its bits up to a column (a rank) gives the column's index in
compact arrays, where a 64-bit mask holds the column's active cells and a number the row of its
lowest site. The row of any site is then a bit test and a count of bits, and since bitmap, columns
and masks are ordered by x, y and z, so are the rows. Everything is computed anew for each frame:
a refused frame leaves nothing behind.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tt_perception.bevfusion.config import MAX_COLUMN_CELLS, NetworkConfig
from tt_perception.runtime import pool
from tt_perception.runtime.errors import CapacityError, ConfigError, InputError
from tt_perception.runtime.jit import kernel


class Geometry(NamedTuple):
    """Kernel, stride and padding of a sparse convolution; x and y are alike, z has 3 taps."""

    kernel_xy: int
    stride_xy: int
    pad_xy: int
    stride_z: int
    pad_z: int


SUBMANIFOLD = Geometry(3, 1, 1, 1, 1)
DOWN = (Geometry(3, 2, 1, 2, 1), Geometry(3, 2, 1, 2, 1), Geometry(3, 2, 1, 2, 0))
OUT = Geometry(1, 1, 0, 2, 0)


class SiteLevels:
    """The sites of levels 1 to 4 and of the output, frame after frame, in the same buffers.

    Buffers have their full size from the start; the system gives memory only to the part that
    frames have used.

    :ivar levels: five, the output last.
    :raises ConfigError: a spatial shape that the encoder cannot have.
    """

    def __init__(self, network: NetworkConfig):
        shapes = network.level_shapes_xyz
        if min(min(shape) for shape in shapes) < 1 or shapes[0][2] > MAX_COLUMN_CELLS:
            raise ConfigError(f'spatial_shape_xyz: found {shapes[0]}, expected at most '
                              f'{MAX_COLUMN_CELLS} cells along z and a cell left on each level; '
                              f'the levels would be {shapes[1:]}')
        capacities = (*network.level_capacities, math.prod(shapes[-1]))
        names = ('level 1', 'level 2', 'level 3', 'level 4', 'output')
        self.levels = [Level(*args) for args in zip(names, shapes, capacities, strict=True)]
        self._order = np.empty(capacities[0], np.int32)

    def place(self, coords_zyx: np.ndarray) -> np.ndarray:
        """Take the voxels of a frame; return which of them each row of level 1 is.

        :param coords_zyx: int32 [n, 3], distinct cells.
        :returns: int32 [n], a view that is valid until the next call.
        :raises InputError: a cell outside the spatial shape, a cell given twice, another shape.
        :raises CapacityError: a level has more active rows than its buffers hold.
        """
        if coords_zyx.dtype != np.int32 or coords_zyx.ndim != 2 or coords_zyx.shape[1] != 3:
            raise InputError(f'coords_zyx: found {coords_zyx.dtype} {list(coords_zyx.shape)}, '
                             'expected int32 [n, 3]', reason='layout')
        coords_zyx = np.require(coords_zyx, requirements=('C', 'W'))  # one compiled type
        order = self.levels[0].place(coords_zyx, self._order)
        for source, target, geometry in zip(self.levels[:4], self.levels[1:], (*DOWN, OUT),
                                            strict=True):
            target.convolve_sites(source, geometry)
        return order

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Active rows of levels 1 to 4 and of the output."""
        return tuple(level.num_rows for level in self.levels)


class Level:
    """The active sites of one level and the index structure over them.

    :ivar bits: uint64 [X, words], bit y % 64 of word y // 64 is set where column (x, y) is.
    :ivar ranks: int32 [X, words], columns before the first one of each word.
    :ivar columns_xy: int32 [columns, 2].
    :ivar masks: uint64 [columns], bit z is set where site (x, y, z) is active. A mask may be 0:
        a strided convolution without padding can leave a column empty.
    :ivar starts: int32 [columns], row of the first site of each column.
    """

    def __init__(self, name: str, shape_xyz: tuple[int, int, int], capacity: int):
        self.name = name
        self.shape_xyz = shape_xyz
        self.capacity = capacity
        x, y, _ = shape_xyz
        words = -(-y // 64)
        self.bits = np.empty((x, words), np.uint64)
        self.ranks = np.empty((x, words), np.int32)
        self.columns_xy = np.empty((x * y, 2), np.int32)
        self.masks = np.empty(x * y, np.uint64)
        self.starts = np.empty(x * y, np.int32)
        self._coords_xyz = np.empty((capacity, 3), np.int32)
        self.num_rows = 0

    @property
    def coords_xyz(self) -> np.ndarray:
        """Active sites, int32 [n, 3]."""
        return self._coords_xyz[:self.num_rows]

    def place(self, coords_zyx: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Take voxels as the active sites; return the voxel of each row, a view of ``order``."""
        n = len(coords_zyx)
        self._check_capacity(n)
        outside = _mark_columns(coords_zyx, *self.shape_xyz, self.bits)
        if outside >= 0:
            raise InputError(f'coords_zyx: found cell {tuple(coords_zyx[outside].tolist())}, '
                             f'expected cells within {self.shape_xyz[::-1]}', reason='layout')
        columns = self._list_columns()
        _mark_cells(coords_zyx, self.bits, self.ranks, self.masks[:columns])
        self._number_rows(columns)
        if self.num_rows != n:
            raise InputError(f'coords_zyx: found {n - self.num_rows} cells given twice, '
                             'expected distinct cells', reason='layout')
        pool.shared().run(_order_rows, n, coords_zyx, self.bits, self.ranks, self.masks,
                          self.starts, order)
        return order[:n]

    def convolve_sites(self, source: Level, geometry: Geometry) -> None:
        """Take as the active sites those that a regular convolution of ``source`` reaches."""
        if geometry.kernel_xy == 1:
            self.bits[:] = source.bits
        else:
            _halve_columns(source.bits, self.shape_xyz[1], self.bits)
        columns = self._list_columns()
        pool.shared().run(_convolve_masks, columns, self.columns_xy, geometry, self.shape_xyz[2],
                          source.bits, source.ranks, source.shape_xyz[1], source.masks,
                          self.masks)
        self._number_rows(columns)

    def _list_columns(self) -> int:
        return int(_list_columns(self.bits, self.ranks, self.columns_xy))

    def _number_rows(self, columns: int) -> None:
        """Give each site its row, from the masks of as many columns."""
        rows = int(_start_rows(self.masks[:columns], self.starts))
        self._check_capacity(rows)
        pool.shared().run(_list_rows, columns, self.columns_xy, self.masks, self.starts,
                          self._coords_xyz)
        self.num_rows = rows

    def _check_capacity(self, rows: int) -> None:
        if rows > self.capacity:
            raise CapacityError(f'{self.name}: found {rows} active rows, '
                                f'expected at most {self.capacity}')


# Compiled part. Masks are uint64 throughout: numba would turn a mix with int64 into float64.

ONE = np.uint64(1)
THREE_TAPS = np.uint64(7)
_EVEN = np.uint64(0x5555555555555555)


@kernel
def count_bits(word):
    """Return how many bits of a uint64 are set; LLVM knows this form as one instruction."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = ((word & np.uint64(0x3333333333333333))
            + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333)))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int32((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel
def _lowest_bit(word):
    """Return the index of the lowest set bit of a uint64 that is not 0."""
    return count_bits((word - ONE) & ~word)


@kernel
def below(index):
    """Return the mask of all bits below ``index``, which is 0 to 63."""
    return (ONE << np.uint64(index)) - ONE


@kernel
def _pack_even_bits(word):
    """Move bits 0, 2, 4, ... of a uint64 to bits 0, 1, 2, ...; the odd ones are dropped."""
    word &= _EVEN
    word = (word | (word >> np.uint64(1))) & np.uint64(0x3333333333333333)
    word = (word | (word >> np.uint64(2))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    word = (word | (word >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
    word = (word | (word >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
    return (word | (word >> np.uint64(16))) & np.uint64(0x00000000FFFFFFFF)


@kernel
def find_column(x, y, size_y, bits, ranks):
    """Return the index of column (x, y), or -1 where none is; x and y may be out of range."""
    if x < 0 or x >= len(bits) or y < 0 or y >= size_y:
        return -1
    word = bits[x, y >> 6]
    if (word >> np.uint64(y & 63)) & ONE:
        return ranks[x, y >> 6] + count_bits(word & below(y & 63))
    return -1


@kernel
def _mark_columns(coords_zyx, size_x, size_y, size_z, bits):
    """Set the bitmap of the columns of all cells; return the first cell out of range, or -1."""
    bits[:] = 0
    for i in range(len(coords_zyx)):
        z, y, x = coords_zyx[i, 0], coords_zyx[i, 1], coords_zyx[i, 2]
        if x < 0 or x >= size_x or y < 0 or y >= size_y or z < 0 or z >= size_z:
            return i
        bits[x, y >> 6] |= ONE << np.uint64(y & 63)
    return -1


@kernel
def _halve_columns(source, size_y, bits):
    """Set the bitmap of a 3 x 3 kernel with stride 2 and padding 1 over another bitmap.

    Output column (x, y) is set where any of the input columns 2x - 1 to 2x + 1, 2y - 1 to 2y + 1
    is.
    """
    size_x, words = bits.shape
    source_x, source_words = source.shape
    for x in range(size_x):
        carry = np.uint64(0)
        for word in range(words):
            pair = np.uint64(0)
            for half in range(2):
                w = 2 * word + half
                near = np.uint64(0)
                if w < source_words:
                    for i in range(max(2 * x - 1, 0), min(2 * x + 2, source_x)):
                        near |= source[i, w]
                spread = near | (near << ONE) | (near >> ONE) | carry
                carry = near >> np.uint64(63)
                pair |= _pack_even_bits(spread) << np.uint64(32 * half)
            bits[x, word] = pair
        if size_y & 63:
            bits[x, words - 1] &= below(size_y & 63)


@kernel
def _list_columns(bits, ranks, columns_xy):
    """Rank the bitmap and list its columns by x, then y; return how many there are."""
    count = np.int32(0)
    for x in range(bits.shape[0]):
        for w in range(bits.shape[1]):
            ranks[x, w] = count
            word = bits[x, w]
            while word:
                columns_xy[count, 0] = x
                columns_xy[count, 1] = (w << 6) + _lowest_bit(word)
                count += np.int32(1)
                word &= word - ONE
    return count


@kernel
def _mark_cells(coords_zyx, bits, ranks, masks):
    """Set the bits of all cells in the masks of their columns."""
    masks[:] = 0
    for i in range(len(coords_zyx)):
        y, x = coords_zyx[i, 1], coords_zyx[i, 2]
        column = ranks[x, y >> 6] + count_bits(bits[x, y >> 6] & below(y & 63))
        masks[column] |= ONE << np.uint64(coords_zyx[i, 0])


@kernel
def _convolve_masks(begin, end, columns_xy, geometry, size_z, source_bits, source_ranks,
                    source_size_y, source_masks, masks):
    """Write the masks of a range of columns: cells from which the kernel reaches an input."""
    kernel_xy, stride_xy, pad_xy, _, pad_z = geometry
    for column in range(begin, end):
        x = columns_xy[column, 0] * stride_xy - pad_xy
        y = columns_xy[column, 1] * stride_xy - pad_xy
        cells = np.uint64(0)
        for i in range(kernel_xy):
            for j in range(kernel_xy):
                near = find_column(x + i, y + j, source_size_y, source_bits, source_ranks)
                if near >= 0:
                    cells |= source_masks[near]
        cells <<= np.uint64(pad_z)  # now output cell z takes input cells 2z, 2z + 1 and 2z + 2
        cells |= (cells >> np.uint64(1)) | (cells >> np.uint64(2))
        masks[column] = _pack_even_bits(cells) & below(size_z)


@kernel
def _start_rows(masks, starts):
    """Write the first row of each column; return the number of rows."""
    rows = np.int32(0)
    for column in range(len(masks)):
        starts[column] = rows
        rows += count_bits(masks[column])
    return rows


@kernel
def _list_rows(begin, end, columns_xy, masks, starts, coords_xyz):
    """Write the sites of a range of columns."""
    for column in range(begin, end):
        row = starts[column]
        cells = masks[column]
        while cells:
            coords_xyz[row, 0] = columns_xy[column, 0]
            coords_xyz[row, 1] = columns_xy[column, 1]
            coords_xyz[row, 2] = _lowest_bit(cells)
            row += 1
            cells &= cells - ONE


@kernel
def _order_rows(begin, end, coords_zyx, bits, ranks, masks, starts, order):
    """Write which of a range of voxels each row is."""
    for i in range(begin, end):
        z, y, x = coords_zyx[i, 0], coords_zyx[i, 1], coords_zyx[i, 2]
        column = ranks[x, y >> 6] + count_bits(bits[x, y >> 6] & below(y & 63))
        order[starts[column] + count_bits(masks[column] & below(z))] = i
