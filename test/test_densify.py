# SPDX-License-Identifier: Apache-2.0
"""Past sweeps land where they belong in the current frame, or the frame is refused unchanged."""

from __future__ import annotations

import threading
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import argoverse_sweeps

from tt_perception.bevfusion.config import BEVFusionConfig
from tt_perception.bevfusion.densify import Densifier, Sweep, SweepCache
from tt_perception.runtime.errors import InputError


def config(**values) -> BEVFusionConfig:
    names = {'past': 'densification_num_past_frames', 'capacity': 'cloud_capacity',
             'intensity': 'use_intensity'}
    return BEVFusionConfig.from_parameters({names.get(k, k): v for k, v in values.items()})


def densifier(**values) -> Densifier:
    settings_ = config(**values)
    return Densifier(settings_.densification, settings_.grid)


def cache(**values) -> SweepCache:
    return SweepCache(config(**values).densification)


def rotation(quaternion_xyzw) -> np.ndarray:
    x, y, z, w = np.asarray(quaternion_xyzw) / np.linalg.norm(quaternion_xyzw)
    return np.array([[1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
                     [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
                     [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)]])


def pose(translation=(0, 0, 0), quaternion_xyzw=(0, 0, 0, 1)) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation(quaternion_xyzw), translation
    return matrix


def yawed(yaw: float, translation=(0, 0, 0)) -> np.ndarray:
    return pose(translation, (0, 0, np.sin(yaw / 2), np.cos(yaw / 2)))


def random_points(n: int, columns: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-120, 120, (n, columns)).astype(np.float32)


def moved(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Return x, y, z after a transform, one point after the other, in float64."""
    return np.array([matrix[:3, :3] @ p[:3].astype(np.float64) + matrix[:3, 3] for p in points])


def refused(reason: str, call, *arguments, **named) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments, **named)
    assert caught.value.reason == reason
    assert '\n' not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize('intensity', [False, True])
def test_rows_are_current_points_and_then_older_ones_with_their_lag(intensity):
    columns = 4 if intensity else 3
    current, *past = (random_points(n, columns, n) for n in (50, 20, 30))
    matrices = [yawed(0.3, (1, 2, 3)), pose((-5, 0, 1), (0.1, -0.2, 0.3, 0.9))]
    cloud = densifier(intensity=intensity)(
        current, [Sweep(p, 0.1 * (k + 1), m) for k, (p, m) in enumerate(zip(past, matrices,
                                                                            strict=True))])
    assert cloud.points.dtype == np.float32
    assert cloud.points.shape == (100, columns + 1)
    assert cloud.num_points_per_sweep == (50, 20, 30)
    assert cloud.num_skipped_sweeps == 0
    expected = np.concatenate([current[:, :3], *map(moved, past, matrices)])
    np.testing.assert_allclose(cloud.points[:, :3], expected, atol=3e-5)
    if intensity:
        np.testing.assert_array_equal(cloud.points[:, 3], np.concatenate([current, *past])[:, 3])
    lags = np.repeat(np.float32([0, 0.1, 0.2]), (50, 20, 30))
    np.testing.assert_array_equal(cloud.points[:, -1], lags)


def test_the_current_sweep_is_copied_to_the_last_bit():
    current = random_points(10_000, 4)
    current[:4] = [[-0.0, 0.0, -0.0, 0], [1e-45, 1e38, -1e-45, 255], [np.nan, 1, 2, 3],
                   [122.39999, -3, 5, 1]]
    cloud = densifier(intensity=True)(current, [Sweep(current, 0.1, yawed(0.1))])
    assert np.array_equal(cloud.points[:10_000, :4].view(np.uint32), current.view(np.uint32))
    assert not np.array_equal(cloud.points[10_000:, :4], current)


def test_points_of_past_sweeps_are_rounded_the_same_on_every_machine():
    current, past = random_points(5_000), random_points(20_000, seed=1)
    matrix = pose((10, -20, 0.5), (0.01, -0.02, 0.3, 0.9))
    moved_points = densifier()(current, [Sweep(past, 0.1, matrix)]).points[5_000:, :3]
    m = matrix.astype(np.float32)
    x, y, z = past.T
    for axis in range(3):
        expected = m[axis, 0] * x + m[axis, 1] * y + m[axis, 2] * z + m[axis, 3]
        np.testing.assert_array_equal(moved_points[:, axis], expected)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2 ** 32)), max_size=4),
       st.integers(1, 6), st.booleans(), st.integers(1, 14))
def test_any_sweeps_against_a_loop(past, num_current, intensity, capacity):
    columns = 4 if intensity else 3
    current = random_points(num_current, columns)
    sweeps = []
    for n, seed in past:
        rng = np.random.default_rng(seed)
        sweeps.append(Sweep(random_points(n, columns, seed), float(rng.uniform(-1, 1)),
                            pose(rng.uniform(-50, 50, 3), rng.normal(size=4))))
    fuse = densifier(intensity=intensity, capacity=capacity)
    if num_current > capacity:
        refused('capacity', fuse, current, sweeps)
        return
    rows, counts = [[*p, 0] for p in current], [num_current]
    for sweep in sweeps:
        if len(rows) + len(sweep.points) > capacity:
            break
        for before, after in zip(sweep.points, moved(sweep.points, sweep.T_current_from_sweep),
                                 strict=True):
            rows.append([*after, *before[3:], sweep.time_lag_s])
        counts.append(len(sweep.points))
    cloud = fuse(current, sweeps)
    assert cloud.num_points_per_sweep == tuple(counts)
    assert cloud.num_skipped_sweeps == len(sweeps) + 1 - len(counts)
    np.testing.assert_allclose(cloud.points, rows, atol=5e-5)


def test_the_first_sweep_that_does_not_fit_ends_the_fusion():
    sweeps = [Sweep(random_points(n), 0.1, np.eye(4)) for n in (40, 20, 10, 1)]
    for capacity, counts in ((171, (100, 40, 20, 10, 1)), (170, (100, 40, 20, 10)),
                             (169, (100, 40, 20)), (139, (100,)), (100, (100,))):
        cloud = densifier(capacity=capacity)(random_points(100), sweeps)
        assert cloud.num_points_per_sweep == counts
        assert cloud.num_skipped_sweeps == 5 - len(counts)
        assert len(cloud.points) == sum(counts)
    message = refused('capacity', densifier(capacity=99), random_points(100), sweeps)
    assert '100' in message
    assert '99' in message


def test_a_cloud_that_is_already_densified_keeps_its_lags():
    points, lags = random_points(30), np.linspace(0, 1, 30, dtype=np.float32)
    fuse = densifier()
    cloud = fuse(points, [], time_lag=lags)
    np.testing.assert_array_equal(cloud.points, np.column_stack([points, lags]))
    assert cloud.num_points_per_sweep == (30,)
    refused('sweeps', fuse, points, [Sweep(points, 0.1, np.eye(4))], time_lag=lags)
    refused('layout', fuse, points, [], time_lag=lags[1:])
    refused('layout', fuse, points, [], time_lag=lags.astype(np.float64))


MIRROR = np.diag([1.0, 1, -1, 1])
BAD_TRANSFORMS = [
    None, 'identity', np.eye(3), np.zeros((4, 4)), np.full((4, 4), np.nan), np.eye(4) * 2, MIRROR,
    [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], yawed(0.1, (np.inf, 0, 0)),
    yawed(0.1, (1e39, 0, 0)), np.eye(4) + 1j, [[1, 0], [0]], np.eye(4) * [1.01, 1, 1, 1],
]


@pytest.mark.parametrize('matrix', BAD_TRANSFORMS)
def test_what_is_no_rigid_transform_is_refused(matrix):
    points = random_points(5)
    message = refused('transform', densifier(), points, [Sweep(points, 0.1, matrix)])
    assert 'T_current_from_sweep' in message
    sweeps = cache()
    if matrix is not None:
        assert 'T_world_from_sensor' in refused('transform', sweeps.push, points, 0.0, matrix)
    assert len(sweeps) == 0


@pytest.mark.parametrize('lag', [None, 'now', np.nan, np.inf, True, [0.1]])
def test_a_lag_that_is_no_number_is_refused(lag):
    points = random_points(5)
    refused('stamp', densifier(), points, [Sweep(points, lag, np.eye(4))])
    refused('stamp', cache().push, points, lag, np.eye(4))


@pytest.mark.parametrize('points', [
    random_points(5, 4), random_points(5).astype(np.float64), random_points(5).reshape(-1),
    random_points(5).tolist(), None])
def test_points_of_another_kind_are_refused(points):
    good = random_points(5)
    refused('layout', densifier(), points, [])
    refused('layout', densifier(), good, [Sweep(points, 0.1, np.eye(4))])
    if getattr(points, 'shape', None) != (5, 4):
        refused('layout', cache().push, points, 0.0, np.eye(4))


def test_an_empty_current_sweep_is_refused_and_an_empty_past_one_is_not():
    points = random_points(5)
    refused('empty', densifier(), points[:0], [])
    cloud = densifier()(points, [Sweep(points[:0], 0.1, np.eye(4)),
                                 Sweep(points, 0.2, np.eye(4))])
    assert cloud.num_points_per_sweep == (5, 0, 5)


def test_strided_and_read_only_points_are_taken():
    points = random_points(50, 6)[:, ::2]
    points.flags.writeable = False
    cloud = densifier()(points, [Sweep(points, 0.1, np.eye(4))])
    np.testing.assert_array_equal(cloud.points[:, :3], np.concatenate([points, points]))


def test_the_buffer_grows_to_the_capacity_and_then_stays():
    fuse, addresses = densifier(capacity=60_000), set()
    for n in [*range(1, 60_000, 700), 60_000, *range(60_000, 0, -5_000)]:
        addresses.add(fuse(random_points(n), []).points.ctypes.data)
    assert len(addresses) < 25
    points, sweep = random_points(30_000), Sweep(random_points(30_000), 0.1, np.eye(4))
    fuse(points, [sweep])
    tracemalloc.start()
    for _ in range(20):
        assert len(fuse(points, [sweep]).points) == 60_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000


def test_the_cache_hands_out_the_newest_sweeps_in_the_current_frame():
    sweeps, clouds = cache(past=3), [random_points(10, seed=k) for k in range(8)]
    poses = [pose((5.0 * k, -k, 0.1 * k), (0, 0, 0.1 * k, 1)) for k in range(8)]
    for k, (cloud, T) in enumerate(zip(clouds, poses, strict=True)):
        seen = sweeps.past_sweeps(0.1 * k, T)
        past = sweeps.push(cloud, 0.1 * k, T)
        older = list(range(k - 1, max(k - 4, -1), -1))
        assert len(past) == len(seen) == len(older)
        assert len(sweeps) == min(k + 1, 3)
        for sweep, same, j in zip(past, seen, older, strict=True):
            np.testing.assert_array_equal(sweep.points, clouds[j])
            np.testing.assert_array_equal(same.points, clouds[j])
            assert sweep.time_lag_s == pytest.approx(0.1 * (k - j))
            np.testing.assert_allclose(sweep.T_current_from_sweep, np.linalg.inv(T) @ poses[j],
                                       atol=1e-12)


def test_the_cache_copies_what_it_keeps():
    sweeps, points = cache(), random_points(10)
    kept = points.copy()
    sweeps.push(points, 0.0, np.eye(4))
    points[:] = 0
    np.testing.assert_array_equal(sweeps.push(points, 0.1, np.eye(4))[0].points, kept)


def test_the_cache_allocates_nothing_once_it_is_warm():
    sweeps, addresses = cache(past=2), set()
    clouds = [random_points(5_000 + 100 * k, seed=k) for k in range(5)]
    for k in range(60):
        for sweep in sweeps.push(clouds[k % 5], 0.1 * k, np.eye(4)):
            addresses.add(sweep.points.ctypes.data)
    assert len(addresses) == 3
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for k in range(20):
        sweeps.push(clouds[k % 5], 0.1 * k, np.eye(4))
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 30_000


def state(sweeps: SweepCache) -> list:
    return [(s.points.tobytes(), s.time_lag_s, s.T_current_from_sweep.tobytes())
            for s in sweeps.past_sweeps(9.0, np.eye(4))]


@pytest.mark.parametrize('reason, arguments', [
    ('no_transform', (random_points(5), 1.0, None)),
    ('transform', (random_points(5), 1.0, MIRROR)),
    ('stamp', (random_points(5), np.nan, np.eye(4))),
    ('layout', (random_points(5).astype(int), 1.0, np.eye(4))),
    ('capacity', (random_points(21), 1.0, np.eye(4))),
])
def test_a_refused_frame_changes_no_state(reason, arguments):
    sweeps = cache(past=1, capacity=20)
    for k in range(3):
        sweeps.push(random_points(10, seed=k), 0.1 * k, yawed(0.1 * k))
    before = state(sweeps)
    for _ in range(4):
        refused(reason, sweeps.push, *arguments)
        assert state(sweeps) == before
    if reason in ('no_transform', 'transform', 'stamp'):
        refused(reason, sweeps.past_sweeps, *arguments[1:])
    # And a later good frame sees the last good one.
    past, = sweeps.push(random_points(10, seed=9), 0.5, yawed(0.5))
    np.testing.assert_array_equal(past.points, random_points(10, seed=2))


def test_without_past_frames_no_pose_is_needed_and_nothing_is_kept():
    sweeps = cache(past=0)
    assert sweeps.push(random_points(5), 0.0, None) == []
    assert sweeps.past_sweeps(0.1, None) == []
    assert len(sweeps) == 0


def test_clear_forgets_all_sweeps():
    sweeps = cache()
    sweeps.push(random_points(5), 0.0, np.eye(4))
    sweeps.clear()
    assert sweeps.push(random_points(6), 0.1, np.eye(4)) == []
    assert len(sweeps.push(random_points(7), 0.2, np.eye(4))[0].points) == 6


def test_as_upstream_order_and_age_of_stamps_are_not_looked_at():
    sweeps = cache()
    sweeps.push(random_points(5), 100.0, np.eye(4))
    past, = sweeps.push(random_points(5), 99.9, np.eye(4))
    assert past.time_lag_s == pytest.approx(-0.1)


def test_float64_poses_keep_the_precision_in_map_coordinates():
    """At 100 km one float32 step is 8 mm; poses in float64 must not show it."""
    sweeps, fuse = cache(), densifier()
    world = random_points(200).astype(np.float64) + [81_000, 43_000, 20]
    poses = [yawed(0.7, (81_000.03, 43_000.07, 20)), yawed(0.72, (81_001.11, 42_999.57, 20.2))]
    clouds = [moved(world, np.linalg.inv(T)).astype(np.float32) for T in poses]
    sweeps.push(clouds[0], 0.0, poses[0])
    cloud = fuse(clouds[1], sweeps.push(clouds[1], 0.1, poses[1]))
    assert np.abs(cloud.points[:200, :3] - cloud.points[200:, :3]).max() < 1e-4


def test_a_static_wall_overlaps_itself_across_two_recorded_sweeps(data_dir):
    """The ego turns by 0.38 degrees between them, which moves walls 30 to 45 m away by 0.2 m."""
    pytest.importorskip('pyarrow')
    first, second = argoverse_sweeps(data_dir)
    sweeps, fuse = cache(), densifier()
    for sweep in (first, second):
        past = sweeps.push(sweep.points, sweep.stamp_ns * 1e-9,
                           pose(sweep.translation_m, sweep.quaternion_xyzw))
    cloud = fuse(second.points, past)
    assert cloud.num_points_per_sweep == (99_466, 99_229)
    np.testing.assert_array_equal(cloud.points[:99_466, :3], second.points)
    assert set(np.unique(cloud.points[:, 3])) == {np.float32(0), np.float32(past[0].time_lag_s)}
    assert past[0].time_lag_s == pytest.approx(0.100196, abs=1e-6)
    for low, high in (((23, -22, 0.5), (26, -19, 3.5)), ((-46, 11, 0.5), (-37, 14, 5))):
        def part(points, low=low, high=high):
            inside = ((points[:, :3] >= low) & (points[:, :3] < high)).all(1)
            return points[inside, :3].astype(np.float64)
        wall = part(second.points)
        normal = np.linalg.svd(wall - wall.mean(0))[2][2]
        offset = np.median(wall @ normal)
        assert np.median(np.abs(wall @ normal - offset)) < 0.05  # it is a wall
        unmoved, fused = part(first.points), part(cloud.points[99_466:])
        assert min(len(wall), len(unmoved), len(fused)) > 200
        assert abs(np.median(unmoved @ normal) - offset) > 0.15
        assert abs(np.median(fused @ normal) - offset) < 0.02


def nearest_float32(value: Fraction) -> np.float32:
    """Round to nearest, ties to even."""
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess,
              np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda c: (abs(Fraction(float(c)) - value), c.view(np.uint32) & 1))


def exact_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return nearest_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def test_strict_float32_rounds_as_multiply_fma_fma_add():
    current, past = random_points(5), random_points(400, seed=2)
    matrix = yawed(0.4, (3.3, -77.7, 0.9)) @ pose((0, 0, 0), (0.02, 0.01, 0, 1))
    strict = densifier(strict_float32=True)(current, [Sweep(past, 0.1, matrix)])
    m = matrix.astype(np.float32)
    expected = []
    for x, y, z in past:
        expected.append([exact_fma(m[a, 2], z, exact_fma(m[a, 1], y, m[a, 0] * x)) + m[a, 3]
                         for a in range(3)])
    np.testing.assert_array_equal(strict.points[5:, :3], np.array(expected, np.float32))
    usual = densifier()(current, [Sweep(past, 0.1, matrix)])
    assert not np.array_equal(usual.points, strict.points)
    np.testing.assert_array_equal(strict.points[:5, :3], current)


def strict_relative(current: np.ndarray, past: np.ndarray) -> np.ndarray:
    """Return float32(W2C) of now times the float32 inverse of float32(W2C) of then."""
    f = np.float32
    now, then = np.linalg.inv(current).astype(f), np.linalg.inv(past).astype(f)
    (a, b, c), (d, e, g), (h, i, j) = then[:3, :3]
    determinant = a * (e * j - g * i) + d * (i * c - j * b) + h * (b * g - c * e)
    adjugate = np.array([[e * j - g * i, i * c - j * b, b * g - c * e],
                         [g * h - d * j, j * a - h * c, c * d - a * g],
                         [d * i - e * h, h * b - i * a, a * e - b * d]], f)
    inverse = np.eye(4, dtype=f)
    inverse[:3, :3] = adjugate * (f(1) / determinant)
    for r in range(3):
        total = f(0)
        for k in range(3):
            total = total + inverse[r, k] * then[k, 3]
        inverse[r, 3] = -total
    product = np.zeros((4, 4), f)
    for r in range(4):
        for s in range(4):
            for k in range(4):
                product[r, s] += now[r, k] * inverse[k, s]
    return product


def test_strict_float32_repeats_the_jitter_of_map_coordinates():
    poses = [yawed(0.7, (81_000.03, 43_000.07, 20)), yawed(0.72, (81_001.11, 42_999.57, 20.2))]
    sweeps, fuse = cache(strict_float32=True), densifier(strict_float32=True)
    sweeps.push(random_points(100), 0.0, poses[0])
    past, = sweeps.push(random_points(100, seed=1), 0.1, poses[1])
    matrix = past.T_current_from_sweep
    assert np.array_equal(matrix, matrix.astype(np.float32))
    # One last bit of map coordinates is 8 mm; nothing else may differ.
    np.testing.assert_allclose(matrix, strict_relative(poses[1], poses[0]), rtol=0, atol=0.0079)
    np.testing.assert_allclose(matrix[:3, :3], strict_relative(poses[1], poses[0])[:3, :3],
                               atol=2e-7)
    exact = np.linalg.inv(poses[1]) @ poses[0]
    assert 1e-4 < np.abs(matrix - exact).max() < 0.05

    current = random_points(100, seed=1)
    itself = fuse(current, [past], T_world_from_current=poses[1]).points[:100, :3]
    expected = moved(current, strict_relative(poses[1], poses[1]).astype(np.float64))
    np.testing.assert_allclose(itself, expected, rtol=0, atol=0.0079)
    shift = np.abs(itself - current).max()
    assert 0 < shift < 0.05
    np.testing.assert_array_equal(
        densifier()(current, [past], T_world_from_current=poses[1]).points[:100, :3], current)


def test_densifiers_of_several_threads_do_not_disturb_each_other():
    current, past = random_points(20_000), random_points(20_000, seed=1)
    matrix = yawed(0.2, (1, 2, 3))
    expected = densifier()(current, [Sweep(past, 0.1, matrix)]).points.copy()
    wrong = []

    def work():
        fuse = densifier()
        for _ in range(20):
            if not np.array_equal(fuse(current, [Sweep(past, 0.1, matrix)]).points, expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
