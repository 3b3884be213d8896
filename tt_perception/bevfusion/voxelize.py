# SPDX-License-Identifier: Apache-2.0
"""Hard voxelization with the mean of each voxel's points, in a canonical order.

Upstream numbers voxels by atomic counters, so that which points and voxels survive a limit is
left to chance. Here points are taken in buffer order: voxels are numbered by first appearance,
and the first points of a voxel are kept. The result is the same on every run and with any number
of threads.

Three passes: the cell of each point (parallel over points), the voxel of each cell (one thread:
the order matters), the mean of each voxel (parallel over voxels).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tt_perception.bevfusion.config import GridConfig
from tt_perception.runtime import pool
from tt_perception.runtime.errors import ConfigError, InputError
from tt_perception.runtime.jit import kernel

MAX_CELLS = 2 ** 31  # cell ids are int32

_BLOCK_BITS = 3  # cells are looked up by blocks of 2 x 2 x 2, see _cell_id
_HASH_FACTOR = 0x9E3779B1  # 2^32 over the golden ratio: spreads block numbers over the table
_RUN = 256  # points
_MIN_SLOTS = 1 << 10


@dataclass(frozen=True)
class Voxels:
    """Occupied voxels; the arrays are views of the voxelizer's buffers, valid until its next call.

    :ivar features: float32 [n, F], mean of the points of each voxel (up to the limit of points).
    :ivar coords_zyx: int32 [n, 3], cell along z, y, x.
    :ivar num_points: int32 [n], points in the mean.
    :ivar num_cells_clipped: occupied cells beyond the limit of voxels, dropped with their points.
    :ivar clipped: the limit of voxels was reached; as upstream, already when it is just reached.
    """

    features: np.ndarray
    coords_zyx: np.ndarray
    num_points: np.ndarray
    num_cells_clipped: int
    clipped: bool


class Voxelizer:
    """Turns points into voxels of one grid.

    :raises ConfigError: the grid has more cells than an id can tell apart.
    """

    def __init__(self, grid: GridConfig):
        self._grid = grid
        self._size = np.asarray(grid.size_xyz, np.int32)
        blocks = [(n + 1) // 2 for n in grid.size_xyz]
        cells = blocks[0] * blocks[1] * blocks[2] << _BLOCK_BITS
        if cells > MAX_CELLS:
            raise ConfigError(f'voxel_size: found a grid of {cells} cells, '
                              f'expected at most {MAX_CELLS}')
        self._range_min = grid.range_min
        self._voxel_size = np.asarray(grid.voxel_size, np.float32)
        self._features = np.empty((grid.max_voxels, grid.num_features), np.float32)
        self._coords_zyx = np.empty((grid.max_voxels, 3), np.int32)
        self._num_points = np.empty(grid.max_voxels, np.int32)
        self._slots = np.empty(0, np.int32)
        self._reserve(0)

    def __call__(self, points: np.ndarray) -> Voxels:
        """Voxelize a densified cloud.

        Along each axis a point lies in cell ``floor((p - min) / voxel_size)``, all in float32; it
        is dropped unless that is within the grid. Non-finite points are thus dropped, too.

        :param points: float32 [m, F] with F as the grid has it: x, y, z (m), ..., time lag (s).
        :raises InputError: an array of another type or shape.
        """
        _check(points, self._grid.num_features)
        points = np.require(points, requirements=('C', 'W'))  # one compiled type
        m = len(points)
        slots = self._reserve(m)
        cell_of_point, voxel_of_point = self._cell_of_point[:m], self._voxel_of_point[:m]
        threads = pool.shared()
        threads.run(_find_cells, m, points, self._range_min, self._voxel_size, self._size,
                    cell_of_point)
        occupied = int(_number_cells(
            cell_of_point, self._slots[:slots], 32 + _BLOCK_BITS - (slots - 1).bit_length(),
            self._cell_of_voxel, self._first_point, voxel_of_point))
        n = min(occupied, self._grid.max_voxels)
        threads.run(_average, n, points, voxel_of_point, self._first_point, self._range_min,
                    self._voxel_size, self._grid.max_points_per_voxel, self._features,
                    self._num_points, self._coords_zyx,
                    grain=max(n // threads.threads, pool.ROWS_PER_CALL))
        return Voxels(self._features[:n], self._coords_zyx[:n], self._num_points[:n],
                      num_cells_clipped=occupied - n, clipped=n >= self._grid.max_voxels)

    def _reserve(self, points: int) -> int:
        """Make room for as many points; return the number of hash slots that they need."""
        slots = _MIN_SLOTS
        while slots < points + points // 2:  # at most two thirds full
            slots *= 2
        if slots > len(self._slots):
            self._slots = np.empty(slots, np.int32)
            self._cell_of_point, self._voxel_of_point, self._cell_of_voxel, self._first_point = (
                np.empty(slots, np.int32) for _ in range(4))
        return slots


def _check(points: np.ndarray, features: int) -> None:
    if points.dtype != np.float32 or points.ndim != 2 or points.shape[1] != features:
        raise InputError(f'points: found {points.dtype} {list(points.shape)}, '
                         f'expected float32 [m, {features}]', reason='layout')


@kernel(error_model='numpy')
def _cell(p, low, size):
    """Return the cell of a coordinate along its axis, as float32; it may lie outside the grid."""
    return np.floor((p - low) / size)


@kernel(error_model='numpy')
def _cell_id(x, y, z, blocks_y, blocks_z):
    """Return one number for a cell; the low bits tell the cells of a 2 x 2 x 2 block apart.

    Neighbouring points often fall into neighbouring cells; a block's eight slots share a cache
    line, which makes most look-ups cheap.
    """
    one = np.int32(1)
    block = ((x >> one) * blocks_y + (y >> one)) * blocks_z + (z >> one)
    return np.int32(block << 3 | (x & one) << 2 | (y & one) << 1 | z & one)


@kernel(error_model='numpy')
def _find_cells(begin, end, points, low, size, cells, cell_of_point):
    """Write the cell id of each point, or -1 for a point outside the grid.

    Limits are compared in float32 before the conversion to an integer, which is undefined for
    NaN and huge values. The two inner loops over a short run of points become vector code.
    """
    zero = np.float32(0)
    num_x, num_y, num_z = np.float32(cells[0]), np.float32(cells[1]), np.float32(cells[2])
    blocks_y = np.int32((cells[1] + 1) >> 1)
    blocks_z = np.int32((cells[2] + 1) >> 1)
    xyz = np.empty((3, _RUN), np.float32)
    for start in range(begin, end, _RUN):
        run = points[start:min(start + _RUN, end)]
        ids = cell_of_point[start:min(start + _RUN, end)]
        for axis in range(3):
            for i in range(len(run)):
                xyz[axis, i] = _cell(run[i, axis], low[axis], size[axis])
        for i in range(len(run)):
            x, y, z = xyz[0, i], xyz[1, i], xyz[2, i]
            inside = ((x >= zero) & (x < num_x) & (y >= zero) & (y < num_y)
                      & (z >= zero) & (z < num_z))
            cell = _cell_id(np.int32(x if inside else zero), np.int32(y if inside else zero),
                            np.int32(z if inside else zero), blocks_y, blocks_z)
            ids[i] = cell if inside else np.int32(-1)


@kernel(error_model='numpy')
def _first_slot(cell, shift):
    """Return where to look for a cell first: the hashed block, and in it the cell's own place."""
    block = np.uint32(cell) >> np.uint32(_BLOCK_BITS)
    spread = np.uint32(block * np.uint32(_HASH_FACTOR)) >> np.uint32(shift)
    return np.int64(spread) << _BLOCK_BITS | np.int64(cell & 7)


@kernel(error_model='numpy')
def _number_cells(cell_of_point, slots, shift, cell_of_voxel, first_point, voxel_of_point):
    """Give each point the number of its voxel, or -1; voxels are numbered by first appearance.

    A hash table with linear probing over cell ids; a slot holds a voxel number or -1. Cells
    beyond the limit of voxels are numbered, too, since they are to be counted.

    :param slots: int32 [2 ** (35 - shift)], more than there are points.
    :returns: how many cells are occupied.
    """
    last_slot = len(slots) - 1
    slots[:] = -1
    occupied = np.int32(0)
    for i in range(len(cell_of_point)):
        cell = cell_of_point[i]
        voxel = np.int32(-1)
        if cell >= 0:
            slot = _first_slot(cell, shift)
            voxel = slots[slot]
            while voxel >= 0 and cell_of_voxel[voxel] != cell:
                slot = (slot + 1) & last_slot
                voxel = slots[slot]
            if voxel < 0:
                voxel = occupied
                slots[slot] = voxel
                cell_of_voxel[voxel] = cell
                first_point[voxel] = i
                occupied += np.int32(1)
        voxel_of_point[i] = voxel
    return occupied


@kernel(error_model='numpy')
def _average(begin, end, points, voxel_of_point, first_point, low, size, max_points,
             features, num_points, coords_zyx):
    """Write mean, number of points and coordinates of the voxels of a range.

    Sums run in buffer order and in float32; one division follows.
    """
    for v in range(begin, end):
        first = first_point[v]
        num_points[v] = 0
        for f in range(features.shape[1]):
            features[v, f] = 0
        for axis in range(3):
            coords_zyx[v, 2 - axis] = np.int32(_cell(points[first, axis], low[axis], size[axis]))
    for i in range(first_point[begin], len(voxel_of_point)):
        v = voxel_of_point[i]
        if begin <= v < end:
            count = num_points[v]
            if count < max_points:
                num_points[v] = count + 1
                for f in range(features.shape[1]):
                    features[v, f] += points[i, f]
    for v in range(begin, end):
        count = np.float32(num_points[v])
        for f in range(features.shape[1]):
            features[v, f] /= count
