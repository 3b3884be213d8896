# SPDX-License-Identifier: Apache-2.0
"""Voxelization: the same voxels as a naive loop, bit for bit, whatever the points are.

Names with A and a number are cases met by other detectors in the field.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import kitti_points

from tt_perception.bevfusion.config import BEVFusionConfig, GridConfig
from tt_perception.bevfusion.voxelize import Voxelizer, _first_slot, _number_cells
from tt_perception.runtime import pool
from tt_perception.runtime.errors import ConfigError, InputError

SMALL = GridConfig((-1.0, -2.0, -0.5, 1.5, 2.0, 0.5), (0.5, 0.4, 0.25), 3, 1, 7, False)
FULL = BEVFusionConfig.from_parameters({}).grid
F32 = np.float32


def naive(points, grid):
    """Voxelize point by point; return means, coords_zyx, counts and the cells beyond the limit."""
    low, step = grid.range_min, np.asarray(grid.voxel_size, F32)
    cells: dict[tuple, list] = {}
    for point in points:
        with np.errstate(all='ignore'):
            c = np.floor((point[:3] - low) / step)
        if all(0 <= v < size for v, size in zip(c, grid.size_xyz, strict=True)):
            cells.setdefault(tuple(int(v) for v in c[::-1]), []).append(point)
    means, counts = [], []
    for members in cells.values():
        kept = members[:grid.max_points_per_voxel]
        total = np.zeros(points.shape[1], F32)
        for point in kept:
            total = total + point
        means.append(total / F32(len(kept)))
        counts.append(len(kept))
    n = min(len(cells), grid.max_voxels)
    return (np.array(means[:n], F32).reshape(n, points.shape[1]),
            np.array(list(cells)[:n], np.int32).reshape(n, 3),
            np.array(counts[:n], np.int32), len(cells) - n)


def vectorised(points, grid):
    """Do the same as :func:`naive` with sorting, fast enough for whole sweeps."""
    with np.errstate(all='ignore'):
        c = np.floor((points[:, :3] - grid.range_min) / np.asarray(grid.voxel_size, F32))
        inside = ((c >= 0) & (c < grid.size_xyz)).all(1)
    points, zyx = points[inside], c[inside][:, ::-1].astype(np.int32)
    _, first, cell = np.unique(zyx, axis=0, return_index=True, return_inverse=True)
    number = np.argsort(np.argsort(first))[cell.ravel()]  # by first appearance
    order = np.argsort(number, kind='stable')
    count = np.bincount(number)
    rank = np.empty(len(points), int)
    rank[order] = np.arange(len(points)) - np.repeat(np.cumsum(count) - count, count)
    kept = rank < grid.max_points_per_voxel
    means = np.zeros((len(count), points.shape[1]), F32)
    np.add.at(means, number[kept], points[kept])  # one after the other, in buffer order
    count = np.minimum(count, grid.max_points_per_voxel).astype(np.int32)
    n = min(len(count), grid.max_voxels)
    return ((means / count[:, None].astype(F32))[:n], zyx[np.sort(first)][:n], count[:n],
            len(count) - n)


def assert_equal(voxels, expected):
    means, coords_zyx, counts, clipped = expected
    assert voxels.coords_zyx.tolist() == coords_zyx.tolist()
    assert voxels.num_points.tolist() == counts.tolist()
    assert voxels.features.tobytes() == means.tobytes()
    assert voxels.num_cells_clipped == clipped


def copied(voxels):
    return (voxels.features.tobytes(), voxels.coords_zyx.tobytes(), voxels.num_points.tobytes(),
            voxels.num_cells_clipped, voxels.clipped)


def cloud(*xyz):
    """Return points with a time lag of 0."""
    return np.array([[*p, 0] for p in xyz], F32)


def random_cloud(n, rng, spread=1.3):
    """Return points mostly inside the small grid, float32 [n, 4]."""
    points = rng.uniform(-spread, spread, (n, 4)) * [2, 2, 0.6, 0.1]
    return points.astype(F32)


def edges(low, high, step):
    """Return coordinates at which rounding decides: limits, cell borders and their neighbours."""
    borders = [F32(low), F32(high), *(F32(low) + F32(step) * F32(k) for k in range(1, 4))]
    near = [np.nextafter(b, F32(to)) for b in borders for to in (-np.inf, np.inf)]
    wild = [0.0, -0.0, 1e-45, -1e-45, 1e30, -1e30, 3.4e38, np.nan, np.inf, -np.inf, 2.0 ** 31,
            -2.0 ** 31, 2.0 ** 63]
    return [float(v) for v in [*borders, *near, *wild]]


def coordinate(axis):
    low, high = SMALL.point_cloud_range[axis], SMALL.point_cloud_range[axis + 3]
    return st.one_of(
        st.sampled_from(edges(low, high, SMALL.voxel_size[axis])),
        st.floats(low - 0.25, high + 0.25, width=32),
        st.floats(width=32))


@settings(deadline=None, max_examples=300)
@given(rows=st.lists(st.tuples(coordinate(0), coordinate(1), coordinate(2),
                               st.floats(-1, 1, width=32)), max_size=60),
       repeats=st.integers(1, 4), max_points=st.integers(1, 5), max_voxels=st.integers(1, 30))
def test_equals_a_naive_loop(rows, repeats, max_points, max_voxels):
    grid = GridConfig(SMALL.point_cloud_range, SMALL.voxel_size, max_points, 1, max_voxels, False)
    points = np.array(rows * repeats, F32).reshape(-1, 4)
    voxels = Voxelizer(grid)(points)
    assert_equal(voxels, naive(points, grid))
    assert voxels.clipped == (len(voxels.features) >= max_voxels)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2 ** 32 - 1), n=st.integers(0, 3000),
       cells=st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30)),
       intensity=st.booleans())
def test_equals_a_naive_loop_on_other_grids(seed, n, cells, intensity):
    rng = np.random.default_rng(seed)
    step = rng.uniform(0.01, 3, 3).astype(F32).tolist()
    low = rng.uniform(-50, 50, 3)
    high = low + np.array(cells) * step * 1.0001
    grid = GridConfig((*low.tolist(), *high.tolist()), tuple(step), 10, 1, 2000, intensity)
    points = rng.uniform(low - 0.1, high + 0.1, (n, 3))
    points = np.column_stack([points, rng.uniform(0, 255, (n, 2 if intensity else 1))])
    points = points.astype(F32)
    assert_equal(Voxelizer(grid)(points), naive(points, grid))


def test_look_ups_go_round_the_end_of_the_hash_table():
    slots, guard = 64, 8
    shift = 35 - 6
    last_block = [cell for cell in range(10_000)
                  if _first_slot(np.int32(cell), shift) >= slots - 8]
    cells = np.array([*last_block[:30], *last_block[:30]], np.int32)
    table = np.full(slots + guard, -5, np.int32)
    cell_of_voxel, first_point, voxel_of_point = np.empty((3, len(cells)), np.int32)
    assert _number_cells(cells, table[:slots], shift, cell_of_voxel, first_point,
                         voxel_of_point) == 30
    assert voxel_of_point.tolist() == [*range(30), *range(30)]
    assert (table[slots:] == -5).all()


def test_A22_points_at_the_limits_get_a_cell_of_the_grid_or_none():
    grid = GridConfig((-76.8, -76.8, -4.0, 76.8, 76.8, 4.0), (0.32, 0.32, 8.0), 10, 1, 1000, False)
    low, high = F32(-76.8), F32(76.8)
    for x in (F32(76.799995), np.nextafter(high, F32(0)), high, low,
              np.nextafter(low, -F32(np.inf)), F32(-0.0)):
        points = cloud((x, 0, 0), (0, x, 0))
        voxels = Voxelizer(grid)(points)
        assert ((voxels.coords_zyx >= 0) & (voxels.coords_zyx < (1, 480, 480))).all()
        assert_equal(voxels, naive(points, grid))
    assert Voxelizer(grid)(cloud((low, low, -4))).coords_zyx.tolist() == [[0, 0, 0]]
    assert len(Voxelizer(grid)(cloud((high, 0, 0))).features) == 0
    assert Voxelizer(grid)(cloud((-0.0, -0.0, -0.0))).coords_zyx.tolist() == [[0, 240, 240]]


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0 ** 31, 2.0 ** 40])
@pytest.mark.parametrize('axis', [0, 1, 2])
def test_points_that_are_nowhere_are_dropped(bad, axis):
    points = cloud((1, 2, 0), (1, 2, 0), (1, 2, 0))
    points[1, axis] = bad
    voxels = Voxelizer(FULL)(points)
    assert voxels.coords_zyx.tolist() == [[15, 731, 725]]
    assert voxels.num_points.tolist() == [2]


def test_A19_more_cells_than_the_limit_are_clipped_and_counted():
    rng = np.random.default_rng(1)
    points = rng.uniform(-100, 100, (120_000, 4)).astype(F32)
    points[:, 2] *= 0.02
    grid = GridConfig(FULL.point_cloud_range, FULL.voxel_size, 10, 1, 100, False)
    voxels = Voxelizer(grid)(points)
    assert len(voxels.features) == len(voxels.coords_zyx) == len(voxels.num_points) == 100
    assert voxels.clipped
    assert_equal(voxels, vectorised(points, grid))
    assert voxels.num_cells_clipped > 100_000


def test_the_limit_counts_as_reached_when_it_is_just_reached():
    grid = GridConfig(SMALL.point_cloud_range, SMALL.voxel_size, 3, 1, 2, False)
    one, two, three = cloud((0, 0, 0)), cloud((0, 0, 0), (1, 1, 0)), cloud(
        (0, 0, 0), (1, 1, 0), (-1, 1, 0))
    results = [Voxelizer(grid)(points) for points in (one, two, three)]
    assert [v.clipped for v in results] == [False, True, True]
    assert [v.num_cells_clipped for v in results] == [0, 0, 1]


def test_later_points_of_a_kept_voxel_still_count_after_the_limit():
    grid = GridConfig(SMALL.point_cloud_range, SMALL.voxel_size, 3, 1, 1, False)
    voxels = Voxelizer(grid)(cloud((0.1, 0, 0), (1, 1, 0), (0.3, 0, 0)))
    assert voxels.num_points.tolist() == [2]
    assert voxels.features[0, 0] == (F32(0.1) + F32(0.3)) / F32(2)


@pytest.mark.parametrize('count', [1, 2, 31, 33])
def test_A24_a_few_points_give_a_few_voxels(count):
    points = np.random.default_rng(count).uniform(-2, 2, (count, 4)).astype(F32)
    assert_equal(Voxelizer(FULL)(points), naive(points, FULL))


def test_no_point_in_the_grid_gives_no_voxel():
    for points in (np.empty((0, 4), F32), cloud((0, 0, 100), (500, 0, 0))):
        voxels = Voxelizer(FULL)(points)
        assert voxels.features.shape == (0, 4)
        assert voxels.coords_zyx.shape == (0, 3)
        assert not voxels.clipped


def test_A26_the_same_sweep_gives_the_same_bytes_every_time():
    points = random_cloud(60_000, np.random.default_rng(3))  # saturates every voxel
    grid = GridConfig(SMALL.point_cloud_range, SMALL.voxel_size, 10, 1, 100, False)
    voxelizer = Voxelizer(grid)
    runs = {copied(voxelizer(points)) for _ in range(20)}
    assert len(runs) == 1
    assert (voxelizer(points).num_points == 10).all()
    assert_equal(voxelizer(points), vectorised(points, grid))


def test_A27_a_point_at_a_known_place_lights_one_known_voxel():
    # x: (34.085 + 122.4) / 0.17 = 920.5, y: (-17.085 + 122.4) / 0.17 = 619.5, z: 4.1 / 0.2 = 20.5
    voxels = Voxelizer(FULL)(np.array([[34.085, -17.085, 1.1, 0.1]], F32))
    assert voxels.coords_zyx.tolist() == [[20, 619, 920]]
    assert voxels.features.tolist() == np.array([[34.085, -17.085, 1.1, 0.1]], F32).tolist()
    assert voxels.num_points.tolist() == [1]


@pytest.mark.parametrize('threads', [1, 2, 5])
def test_the_number_of_threads_does_not_matter(threads, monkeypatch):
    rng = np.random.default_rng(4)
    points = rng.normal(0, 20, (100_000, 4)).astype(F32)
    points[:, 2] *= 0.05
    monkeypatch.setitem(pool._shared, 'pool', pool.RowPool(threads))
    voxels = Voxelizer(FULL)(points)
    assert len(voxels.features) > 5 * pool.ROWS_PER_CALL
    assert_equal(voxels, vectorised(points, FULL))


def test_a_real_sweep_equals_the_oracle(data_dir):
    points = np.column_stack([kitti_points(data_dir)[:, :3], np.zeros(125_635)]).astype(F32)
    voxels = Voxelizer(FULL)(points)
    assert 30_000 < len(voxels.features) < 40_000
    assert_equal(voxels, vectorised(points, FULL))


def test_frames_do_not_influence_one_another():
    rng = np.random.default_rng(5)
    voxelizer = Voxelizer(SMALL)
    for n in (10, 5000, 0, 1, 20_000, 300, 300):  # buffers grow in between
        points = random_cloud(n, rng)
        assert copied(voxelizer(points)) == copied(Voxelizer(SMALL)(points))


def test_a_view_with_gaps_and_a_read_only_array_are_read_rightly():
    wide = np.random.default_rng(6).normal(0, 5, (500, 8)).astype(F32)
    view = wide[::2, 2:6]
    expected = naive(view.copy(), FULL)
    assert_equal(Voxelizer(FULL)(view), expected)
    fixed = view.copy()
    fixed.flags.writeable = False
    assert_equal(Voxelizer(FULL)(fixed), expected)


@pytest.mark.parametrize('points', [
    np.zeros((5, 3), F32), np.zeros((5, 5), F32), np.zeros(4, F32), np.zeros((5, 4)),
    np.zeros((5, 4), np.int32)])
def test_arrays_of_another_kind_are_refused(points):
    with pytest.raises(InputError, match=r'points: found .*expected float32 \[m, 4\]'):
        Voxelizer(FULL)(points)


def test_a_grid_beyond_the_cell_ids_is_refused():
    huge = GridConfig((-1000, -1000, -5, 1000, 1000, 5), (0.02, 0.02, 0.2), 10, 1, 100, False)
    with pytest.raises(ConfigError, match='voxel_size: found a grid of'):
        Voxelizer(huge)


def test_a_frame_needs_no_new_memory_once_the_buffers_have_grown():
    voxelizer = Voxelizer(FULL)
    points = np.random.default_rng(7).normal(0, 20, (100_000, 4)).astype(F32)
    voxelizer(points)
    tracemalloc.start()
    voxelizer(points)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024
