# SPDX-License-Identifier: Apache-2.0
"""Rulebooks: the same tables as naive loops, as spconv and as dense convolution.

Names with A and a number are cases met by other detectors in the field.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import kitti_points

from tt_perception.bevfusion.config import CAPACITY_BUCKETS, BEVFusionConfig, NetworkConfig
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.sites import DOWN, OUT, SUBMANIFOLD
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.runtime import pool
from tt_perception.runtime.errors import CapacityError, ConfigError, InputError

FULL = NetworkConfig()
# As the specification has them: kernel, stride and padding along x, y, z.
STRIDED = (((3, 3, 3), (2, 2, 2), (1, 1, 1)),
           ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
           ((3, 3, 3), (2, 2, 2), (1, 1, 0)),
           ((1, 1, 3), (1, 1, 2), (0, 0, 0)))


def small(*shape_xyz):
    return NetworkConfig(spatial_shape_xyz=shape_xyz)


def random_sites(n, shape_xyz, rng):
    """Return distinct cells in random order, int32 [<= n, 3] along z, y, x."""
    linear = rng.choice(np.prod(shape_xyz), min(n, int(np.prod(shape_xyz))), replace=False)
    return np.stack(np.unravel_index(linear, shape_xyz), 1)[:, ::-1].astype(np.int32)


def surface_sites(n, shape_xyz, rng):
    """Return distinct cells on uneven ground and walls, as a lidar finds them."""
    x, y, z = shape_xyz
    centre = rng.uniform(0.3, 0.7, 2)
    xy = (centre + rng.normal(0, 0.15, (n, 2))) * (x, y)
    height = z * (0.3 + 0.1 * np.sin(xy[:, 0] / 40) + 0.02 * rng.normal(size=n))
    height[::5] = rng.uniform(0, z, len(height[::5]))
    cells = np.floor(np.column_stack([height, xy[:, ::-1]])).astype(np.int32)
    inside = ((cells >= 0) & (cells < (z, y, x))).all(1)
    return rng.permutation(np.unique(cells[inside], axis=0))


def naive(coords_zyx, shapes_xyz):
    """Build everything with dictionaries; return (order, coords, subm, strided) as lists."""
    voxels = {tuple(c[::-1]): i for i, c in enumerate(coords_zyx.tolist())}
    levels = [sorted(voxels)]
    subm, strided = [], []
    for shape, (kernel, stride, padding) in zip(shapes_xyz[1:], STRIDED, strict=True):
        rows = {site: row for row, site in enumerate(levels[-1])}
        taps = list(itertools.product(*map(range, kernel)))
        outputs = sorted({
            out for site in rows for tap in taps
            if (out := _output_of(site, tap, shape, stride, padding)) is not None})
        subm.append([[rows.get(tuple(a + k - 1 for a, k in zip(site, tap, strict=True)), -1)
                      for tap in itertools.product(range(3), repeat=3)] for site in rows])
        strided.append([[rows.get(tuple(
            o * s - p + k for o, s, p, k in zip(out, stride, padding, tap, strict=True)), -1)
            for tap in taps] for out in outputs])
        levels.append(outputs)
    return [voxels[site] for site in levels[0]], levels, subm, strided


def _output_of(site, tap, shape, stride, padding):
    """Return the output site that takes ``site`` through a tap, or None."""
    out = []
    for i, k, size, s, p in zip(site, tap, shape, stride, padding, strict=True):
        o, rest = divmod(i + p - k, s)
        if rest or not 0 <= o < size:
            return None
        out.append(o)
    return tuple(out)


def assert_naive(rulebooks, coords_zyx, network):
    order, levels, subm, strided = naive(coords_zyx, network.level_shapes_xyz)
    assert rulebooks.order.tolist() == order
    assert [c.tolist() for c in rulebooks.coords_xyz] == [[list(s) for s in lv] for lv in levels]
    assert [t.tolist() for t in rulebooks.subm] == subm
    assert [t.tolist() for t in (*rulebooks.down, rulebooks.out)] == strided
    assert rulebooks.num_rows == tuple(map(len, levels))


def copied(rulebooks):
    return [array.tobytes() for array in (rulebooks.order, *rulebooks.coords_xyz, *rulebooks.subm,
                                          *rulebooks.down, rulebooks.out)]


@st.composite
def frames(draw):
    """Return a small network and a few sites in it, many of them on the border or on a seam."""
    shape = (draw(st.integers(1, 9)),
             draw(st.sampled_from([1, 2, 3, 8, 63, 64, 65, 127, 128, 129, 130, 193])),
             draw(st.sampled_from([25, 26, 30, 31, 40, 41, 62, 63])))
    near_seams = [sorted({v for seam in (0, 64, 128, n - 1) for v in range(seam - 2, seam + 3)
                          if 0 <= v < n}) for n in shape]
    axes = [st.one_of(st.sampled_from(near), st.integers(0, n - 1), st.integers(0, min(4, n - 1)))
            for near, n in zip(near_seams, shape, strict=True)]
    sites = draw(st.lists(st.tuples(*axes[::-1]), max_size=70, unique=True))
    return small(*shape), np.array(sites, np.int32).reshape(-1, 3)


@settings(deadline=None, max_examples=150)
@given(frame=frames())
def test_equals_naive_loops(frame):
    network, coords_zyx = frame
    assert_naive(RulebookBuilder(network)(coords_zyx), coords_zyx, network)


@pytest.mark.parametrize('shape', [(16, 12, 25), (5, 66, 30), (7, 3, 41), (2, 130, 63),
                                   (4, 64, 25), (3, 128, 27)])
@pytest.mark.parametrize('density', [0.05, 0.5, 1.0])
def test_equals_naive_loops_when_crowded(shape, density):
    rng = np.random.default_rng(int(density * 100))
    coords_zyx = random_sites(int(np.prod(shape) * density), shape, rng)
    assert_naive(RulebookBuilder(small(*shape))(coords_zyx), coords_zyx, small(*shape))


def vectorised_table(source, target, shape_xyz, kernel, stride, padding):
    """Return the table between two sorted lists of sites, by binary search for each tap."""
    def linear(sites):
        return (sites[:, 0] * shape_xyz[1] + sites[:, 1]) * shape_xyz[2] + sites[:, 2]

    source, target = source.astype(np.int64), target.astype(np.int64)
    ids = linear(source)
    columns = []
    for tap in itertools.product(*map(range, kernel)):
        wanted = target * stride - padding + tap
        found = np.searchsorted(ids, linear(wanted)).clip(0, len(ids) - 1)
        hit = (ids[found] == linear(wanted)) & ((wanted >= 0) & (wanted < shape_xyz)).all(1)
        columns.append(np.where(hit, found, -1))
    return np.stack(columns, 1)


def vectorised_outputs(source, shape_xyz, kernel, stride, padding):
    """Return the sorted sites that a convolution reaches from ``source``."""
    reached = []
    for tap in itertools.product(*map(range, kernel)):
        numerator = source.astype(np.int64) + padding - np.array(tap)
        out = numerator // stride
        reached.append(out[(numerator % stride == 0).all(1) & (out >= 0).all(1)
                           & (out < shape_xyz).all(1)])
    return np.unique(np.concatenate(reached), axis=0)


def assert_vectorised(rulebooks, coords_zyx, network):
    shapes = network.level_shapes_xyz
    assert np.array_equal(coords_zyx[rulebooks.order][:, ::-1], rulebooks.coords_xyz[0])
    assert np.array_equal(rulebooks.coords_xyz[0], np.unique(coords_zyx[:, ::-1], axis=0))
    tables = (*rulebooks.down, rulebooks.out)
    for i, geometry in enumerate(STRIDED):
        source, target = rulebooks.coords_xyz[i:i + 2]
        assert np.array_equal(target, vectorised_outputs(source, shapes[i + 1], *geometry))
        assert np.array_equal(tables[i], vectorised_table(source, target, shapes[i], *geometry))
        assert np.array_equal(rulebooks.subm[i], vectorised_table(
            source, source, shapes[i], (3, 3, 3), (1, 1, 1), (1, 1, 1)))


@pytest.mark.parametrize('make', [random_sites, surface_sites])
def test_full_size_grid_equals_binary_search(make):
    coords_zyx = make(20_000, FULL.spatial_shape_xyz, np.random.default_rng(1))
    assert_vectorised(RulebookBuilder(FULL)(coords_zyx), coords_zyx, FULL)


def test_the_number_of_threads_does_not_matter(monkeypatch):
    coords_zyx = surface_sites(20_000, FULL.spatial_shape_xyz, np.random.default_rng(12))
    builder = RulebookBuilder(FULL)
    expected = copied(builder(coords_zyx))
    for threads in (1, 2, 5):
        monkeypatch.setitem(pool._shared, 'pool', pool.RowPool(threads))
        assert copied(builder(coords_zyx)) == expected


def test_a_real_sweep_equals_binary_search(data_dir):
    points = kitti_points(data_dir).copy()
    points[:, 3] = 0
    coords_zyx = Voxelizer(BEVFusionConfig.from_parameters({}).grid)(points).coords_zyx
    rulebooks = RulebookBuilder(FULL)(coords_zyx)
    assert_vectorised(rulebooks, coords_zyx, FULL)
    share = np.array(rulebooks.num_rows) / len(coords_zyx)
    assert share[1:4] == pytest.approx([0.80, 0.37, 0.13], abs=0.06)  # of such sweeps


def gathered(features, table, weight):
    """Return the sparse convolution by a table; weight [C_out, C_in, kx, ky, kz]."""
    padded = torch.cat([features, torch.zeros(1, features.shape[1], dtype=features.dtype)])
    inputs = padded[torch.from_numpy(table.astype(np.int64))]  # -1 takes the row of zeros
    return torch.einsum('nkc,ock->no', inputs, weight.flatten(2))


def dense(features, coords_xyz, shape_xyz):
    """Return features [n, C] as a dense volume [1, C, x, y, z]."""
    volume = torch.zeros(1, features.shape[1], *shape_xyz, dtype=features.dtype)
    volume[0, :, coords_xyz[:, 0], coords_xyz[:, 1], coords_xyz[:, 2]] = features.T
    return volume


@pytest.mark.parametrize('shape', [(16, 12, 25), (9, 15, 41), (10, 70, 30)])
@pytest.mark.parametrize('density', [0.02, 0.2])
def test_all_eight_convolutions_equal_dense_convolution_at_the_active_sites(shape, density):
    network = small(*shape)
    shapes = network.level_shapes_xyz
    rng = np.random.default_rng(2)
    coords_zyx = random_sites(int(np.prod(shape) * density), shape, rng)
    rulebooks = RulebookBuilder(network)(coords_zyx)
    generator = torch.Generator().manual_seed(3)
    cases = [(i, i, rulebooks.subm[i], ((3, 3, 3), (1, 1, 1), (1, 1, 1))) for i in range(4)]
    cases += [(i, i + 1, table, STRIDED[i])
              for i, table in enumerate((*rulebooks.down, rulebooks.out))]
    assert len(cases) == 8
    for source, target, table, (kernel, stride, padding) in cases:
        sites, outputs = (torch.from_numpy(rulebooks.coords_xyz[i].astype(np.int64))
                          for i in (source, target))
        features = torch.randn(len(sites), 3, generator=generator, dtype=torch.float64)
        weight = torch.randn(5, 3, *kernel, generator=generator, dtype=torch.float64)
        volume = torch.nn.functional.conv3d(dense(features, sites, shapes[source]), weight,
                                            stride=stride, padding=padding)
        assert volume.shape[2:] == shapes[target]
        expected = volume[0, :, outputs[:, 0], outputs[:, 1], outputs[:, 2]].T
        assert (gathered(features, table, weight) - expected).abs().max() < 1e-12
        if source != target:  # the active sites are exactly those that some input reaches
            ones = torch.ones(len(sites), 1, dtype=torch.float64)
            reached = torch.nn.functional.conv3d(
                dense(ones, sites, shapes[source]), torch.ones(1, 1, *kernel).double(),
                stride=stride, padding=padding)[0, 0] > 0.5
            assert torch.equal(reached.nonzero(), outputs)


SPCONV = '''
import sys
import numpy as np, torch
from spconv.core import ConvAlgo
from spconv.pytorch.ops import get_indice_pairs
for path in sys.argv[1:]:
    data = dict(np.load(path))
    for i in range(4):
        sites = torch.from_numpy(data[f'sites{i}'])
        shape = data[f'shape{i}'].tolist()
        for name, subm in ((f'subm{i}', True), (f'strided{i}', False)):
            kernel, stride, padding = data[f'{name}_geometry'].tolist()
            out, pairs, counts = get_indice_pairs(sites, 1, shape, ConvAlgo.Native, kernel,
                                                  stride, padding, [1] * 3, [0] * 3, subm, False)
            data.update({f'{name}_out': out.numpy(), f'{name}_pairs': pairs.numpy(),
                         f'{name}_counts': counts.numpy()})
    np.savez(path, **data)
'''


def table_of_pairs(pairs, counts, num_out, mirrored):
    """Return a gather table from spconv's lists of (input row, output row) for each tap.

    For submanifold convolutions it lists the first half of the taps only; the other half is
    mirrored, and the tap in the middle is each row itself.
    """
    taps = len(counts)
    table = np.full((num_out, taps), -1)
    for k in range(taps):
        source, target = pairs[:, k, :counts[k]]
        table[target, k] = source
        if mirrored:
            table[source, taps - 1 - k] = target
    if mirrored:
        table[:, taps // 2] = np.arange(num_out)
    return table


@pytest.mark.skipif(importlib.util.find_spec('spconv') is None,
                    reason='spconv is not installed')
def test_equals_spconv_on_one_thread(tmp_path):
    rng = np.random.default_rng(4)
    cases = [(FULL, surface_sites(6000, FULL.spatial_shape_xyz, rng), tmp_path / 'full.npz'),
             (small(40, 30, 30), random_sites(6000, (40, 30, 30), rng), tmp_path / 'small.npz')]
    results = []
    for network, coords_zyx, path in cases:
        rulebooks = RulebookBuilder(network)(coords_zyx)
        results.append((rulebooks, path))
        data = {}
        for i, geometry in enumerate(STRIDED):
            sites = rulebooks.coords_xyz[i]
            data[f'sites{i}'] = np.column_stack([np.zeros(len(sites), np.int32), sites])
            data[f'shape{i}'] = np.array(network.level_shapes_xyz[i])
            data[f'subm{i}_geometry'] = np.array([[3] * 3, [1] * 3, [1] * 3])
            data[f'strided{i}_geometry'] = np.array(geometry)
        np.savez(path, **data)
    # On several threads spconv's code for the CPU gives wrong rows.
    subprocess.run([sys.executable, '-c', SPCONV, *(path for _, path in results)], check=True,
                   timeout=120, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    for rulebooks, path in results:
        assert_spconv(rulebooks, np.load(path))


def assert_spconv(rulebooks, found):
    for i, table in enumerate((*rulebooks.down, rulebooks.out)):
        subm = table_of_pairs(found[f'subm{i}_pairs'], found[f'subm{i}_counts'],
                              len(rulebooks.subm[i]), mirrored=True)
        assert np.array_equal(rulebooks.subm[i], subm)
        sites = found[f'strided{i}_out'][:, 1:]
        strided = table_of_pairs(found[f'strided{i}_pairs'], found[f'strided{i}_counts'],
                                 len(sites), mirrored=False)
        row = np.lexsort(sites.T[::-1])  # spconv numbers its output sites by first appearance
        assert np.array_equal(rulebooks.coords_xyz[i + 1], sites[row])
        assert np.array_equal(table, strided[row])


def test_the_geometries_are_those_of_the_specification():
    def unpacked(g):
        return ((g.kernel_xy, g.kernel_xy, 3), (g.stride_xy, g.stride_xy, g.stride_z),
                (g.pad_xy, g.pad_xy, g.pad_z))

    assert tuple(map(unpacked, (*DOWN, OUT))) == STRIDED
    assert unpacked(SUBMANIFOLD) == ((3, 3, 3), (1, 1, 1), (1, 1, 1))


def test_A27_a_voxel_at_a_known_place_is_found_there_on_every_level():
    rulebooks = RulebookBuilder(FULL)(np.array([[40, 601, 902]], np.int32))
    assert rulebooks.order.tolist() == [0]
    assert [c.tolist() for c in rulebooks.coords_xyz] == [
        [[902, 601, 40]],
        [[451, 300, 20], [451, 301, 20]],
        [[225, 150, 10], [225, 151, 10], [226, 150, 10], [226, 151, 10]],
        [[112, 75, 4], [112, 76, 4], [113, 75, 4], [113, 76, 4]],
        [[112, 75, 1], [112, 76, 1], [113, 75, 1], [113, 76, 1]]]
    assert rulebooks.subm[0].tolist() == [[-1] * 13 + [0] + [-1] * 13]
    # (451, 300, 20) takes y = 601 as 2 * 300 - 1 + 2: kx = 1, ky = 2, kz = 1
    assert np.argwhere(rulebooks.down[0] >= 0).tolist() == [[0, 16], [1, 10]]


def test_A26_the_same_frame_gives_the_same_bytes_every_time():
    coords_zyx = surface_sites(10_000, FULL.spatial_shape_xyz, np.random.default_rng(5))
    builder = RulebookBuilder(FULL)
    runs = {tuple(copied(builder(coords_zyx))) for _ in range(20)}
    assert len(runs) == 1


def test_the_order_of_the_voxels_changes_nothing_but_the_order():
    rng = np.random.default_rng(6)
    coords_zyx = surface_sites(3000, FULL.spatial_shape_xyz, rng)
    shuffled = rng.permutation(len(coords_zyx))
    builder = RulebookBuilder(FULL)
    order, *first = copied(builder(coords_zyx))
    _, *second = copied(builder(coords_zyx[shuffled]))
    assert first == second
    assert np.array_equal(shuffled[builder(coords_zyx[shuffled]).order],
                          np.frombuffer(order, np.int32))


@pytest.mark.parametrize('count', [0, 1, 2, 31, 33])
def test_A24_a_few_voxels_give_small_tables(count):
    network = small(30, 30, 41)
    coords_zyx = random_sites(count, (30, 30, 41), np.random.default_rng(count))
    rulebooks = RulebookBuilder(network)(coords_zyx)
    assert_naive(rulebooks, coords_zyx, network)
    assert rulebooks.subm[0].shape == (count, 27)
    assert rulebooks.out.shape[1] == 3


def test_frames_do_not_influence_one_another():
    rng = np.random.default_rng(7)
    shape = (40, 150, 41)
    builder = RulebookBuilder(small(*shape))
    for n in (10, 20_000, 0, 1, 9000, 300, 300):
        coords_zyx = random_sites(n, shape, rng)
        assert copied(builder(coords_zyx)) == copied(RulebookBuilder(small(*shape))(coords_zyx))


class Narrow(NetworkConfig):
    """A network with room for few rows on one level."""

    level = 0
    rows = 0

    @property
    def level_capacities(self):
        caps = [100_000] * 4
        caps[self.level - 1] = self.rows
        return tuple(caps)


def narrow(level, rows):
    config = type('Narrowed', (Narrow,), {'level': level, 'rows': rows})
    return config(spatial_shape_xyz=(40, 30, 41))


@pytest.mark.parametrize('level', [1, 2, 3, 4])
def test_a_level_over_its_capacity_is_refused_by_name_and_the_next_frame_is_right(level):
    shape = (40, 30, 41)
    rng = np.random.default_rng(8)
    crowded, sparse = random_sites(1200, shape, rng), random_sites(15, shape, rng)
    rows = RulebookBuilder(small(*shape))(crowded).num_rows[level - 1]
    expected = copied(RulebookBuilder(small(*shape))(sparse))
    exact = RulebookBuilder(narrow(level, rows))
    assert exact(crowded).num_rows[level - 1] == rows
    builder = RulebookBuilder(narrow(level, rows - 1))
    for _ in range(2):
        with pytest.raises(CapacityError, match=f'^level {level}: found {rows} active rows, '
                                                f'expected at most {rows - 1}$') as caught:
            builder(crowded)
        assert caught.value.reason == 'capacity'
        assert copied(builder(sparse)) == expected


def test_uniform_noise_exceeds_the_capacity_of_level_2():
    coords_zyx = random_sites(100_000, FULL.spatial_shape_xyz, np.random.default_rng(9))
    builder = RulebookBuilder(FULL)
    with pytest.raises(CapacityError, match=f'level 2: found .* {CAPACITY_BUCKETS[-1][1]}'):
        builder(coords_zyx)
    assert builder(coords_zyx[:10]).num_rows[0] == 10


@pytest.mark.parametrize('cell', [(-1, 5, 5), (5, -1, 5), (5, 5, -1), (41, 5, 5), (5, 30, 5),
                                  (5, 5, 40), (2 ** 31 - 1, 5, 5), (5, -2 ** 31, 5),
                                  (64, 5, 5), (5, 64, 5)])
def test_a_cell_out_of_range_is_refused_and_the_next_frame_is_right(cell):
    network = small(40, 30, 41)
    builder = RulebookBuilder(network)
    good = random_sites(200, (40, 30, 41), np.random.default_rng(10))
    with pytest.raises(InputError, match='coords_zyx: found cell'):
        builder(np.concatenate([good, np.array([cell], np.int32)]))
    assert_naive(builder(good), good, network)


def test_a_cell_given_twice_is_refused():
    coords_zyx = np.array([[1, 2, 3], [4, 5, 6], [1, 2, 3]], np.int32)
    with pytest.raises(InputError, match='coords_zyx: found 1 cells given twice'):
        RulebookBuilder(FULL)(coords_zyx)


@pytest.mark.parametrize('coords', [np.zeros((4, 4), np.int32), np.zeros(3, np.int32),
                                    np.zeros((4, 3), np.int64), np.zeros((4, 3), np.float32)])
def test_arrays_of_another_kind_are_refused(coords):
    with pytest.raises(InputError, match=r'coords_zyx: found .*expected int32 \[n, 3\]'):
        RulebookBuilder(FULL)(coords)


@pytest.mark.parametrize('shape', [(10, 10, 64), (10, 10, 24), (0, 10, 41)])
def test_a_shape_that_the_encoder_cannot_have_is_refused(shape):
    with pytest.raises(ConfigError, match='spatial_shape_xyz'):
        RulebookBuilder(small(*shape))


def test_a_frame_needs_no_new_memory():
    builder = RulebookBuilder(FULL)
    coords_zyx = surface_sites(30_000, FULL.spatial_shape_xyz, np.random.default_rng(11))
    builder(coords_zyx)
    tracemalloc.start()
    builder(coords_zyx)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 1024
