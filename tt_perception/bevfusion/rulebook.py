# SPDX-License-Identifier: Apache-2.0
"""The eight gather tables of the sparse encoder: which input row feeds which output row.

The encoder has 21 sparse convolutions but only eight distinct rulebooks: one for the submanifold
convolutions of each of four levels, one for each of the three down-sampling convolutions between
them, and one for the last convolution along z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.sites import (
    DOWN,
    ONE,
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


@dataclass(frozen=True)
class Rulebooks:
    """Sites and gather tables of one frame; views of the builder's buffers, see its call.

    Rows are sorted by x, then y, then z on every level. A table holds, for each output row and
    each kernel offset ``k = (kx * Ky + ky) * Kz + kz``, the row of the input level, or -1.

    :ivar order: int32 [n1], the voxel that each row of level 1 is.
    :ivar coords_xyz: five int32 [n, 3]: levels 1 to 4, then the output of the last convolution.
    :ivar subm: four int32 [n, 27], submanifold 3 x 3 x 3 on levels 1 to 4.
    :ivar down: three int32 [n, 27], rows of levels 2 to 4 from the level before.
    :ivar out: int32 [n_out, 3], output rows from level 4.
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

    def features_by_row(self, features: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Put the features of the voxels into the order of the rows of level 1.

        :param features: float32 [n, F], in the order of the voxels.
        :param out: float32 [n or more, F].
        :returns: the first n rows of ``out``.
        """
        pool.shared().run(_reorder, len(self.order), features, self.order, out)
        return out[:len(self.order)]


class RulebookBuilder:
    """Builds the rulebooks of one network, frame after frame, in the same buffers.

    :raises ConfigError: a spatial shape that the encoder cannot have.
    """

    def __init__(self, network: NetworkConfig):
        self._sites = SiteLevels(network)
        capacities = network.level_capacities
        self._subm = [np.empty((rows, 27), np.int32) for rows in capacities]
        self._down = [np.empty((rows, 27), np.int32) for rows in capacities[1:]]
        self._out = np.empty((math.prod(network.level_shapes_xyz[-1]), 3), np.int32)

    def __call__(self, coords_zyx: np.ndarray) -> Rulebooks:
        """Build all rulebooks; the result is valid until the next call.

        :param coords_zyx: int32 [n, 3], distinct cells.
        :raises InputError: a cell outside the spatial shape, a cell given twice, another shape.
        :raises CapacityError: a level has more active rows than its buffers hold.
        """
        order = self._sites.place(coords_zyx)
        levels = self._sites.levels
        subm = zip(levels[:4], levels[:4], [SUBMANIFOLD] * 4, self._subm, strict=True)
        down = zip(levels[:3], levels[1:4], DOWN, self._down, strict=True)
        return Rulebooks(
            order=order,
            coords_xyz=tuple(level.coords_xyz for level in levels),
            subm=tuple(_gather(*args) for args in subm),
            down=tuple(_gather(*args) for args in down),
            out=_gather(levels[3], levels[4], OUT, self._out),
        )


def _gather(source: Level, target: Level, geometry: Geometry, table: np.ndarray) -> np.ndarray:
    """Fill the gather table of the rows of ``target``; return the view that holds them."""
    pool.shared().run(_find_inputs, target.num_rows, target.coords_xyz, geometry, source.bits,
                      source.ranks, source.shape_xyz[1], source.masks, source.starts, table)
    return table[:target.num_rows]


@kernel
def _find_inputs(begin, end, coords_xyz, geometry, source_bits, source_ranks, source_size_y,
                 source_masks, source_starts, table):
    """Write the input row for each kernel offset of a range of output rows, -1 for none.

    Rows of one column follow each other, so its input columns are looked up once.
    """
    kernel_xy, stride_xy, pad_xy, stride_z, pad_z = geometry
    near_masks = np.zeros(kernel_xy * kernel_xy, np.uint64)
    near_starts = np.zeros(kernel_xy * kernel_xy, np.int32)
    last_x, last_y = np.int32(-1), np.int32(-1)
    for row in range(begin, end):
        x, y = coords_xyz[row, 0], coords_xyz[row, 1]
        if x != last_x or y != last_y:
            last_x, last_y = x, y
            for i in range(kernel_xy):
                for j in range(kernel_xy):
                    near = find_column(x * stride_xy - pad_xy + i, y * stride_xy - pad_xy + j,
                                        source_size_y, source_bits, source_ranks)
                    tap = i * kernel_xy + j
                    near_masks[tap] = 0
                    if near >= 0:
                        near_masks[tap] = source_masks[near] << np.uint64(pad_z)
                        near_starts[tap] = source_starts[near]
        first_z = coords_xyz[row, 2] * stride_z  # padded; the taps are this bit and the next two
        for tap in range(kernel_xy * kernel_xy):
            source = near_starts[tap] + count_bits(near_masks[tap] & below(first_z))
            hits = (near_masks[tap] >> np.uint64(first_z)) & THREE_TAPS
            for k in range(3):
                hit = np.int32((hits >> np.uint64(k)) & ONE)
                table[row, 3 * tap + k] = source if hit else -1
                source += hit


@kernel
def _reorder(begin, end, features, order, out):
    for row in range(begin, end):
        for f in range(features.shape[1]):
            out[row, f] = features[order[row], f]
