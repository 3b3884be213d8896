# SPDX-License-Identifier: Apache-2.0
"""The Python API: what goes in, what is refused, and that a refused frame changes nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tt_perception import BEVFusion
from tt_perception.bevfusion import model as model_module
from tt_perception.bevfusion.cloud import Cloud, decode_cloud
from tt_perception.bevfusion.model import capacity_bucket
from tt_perception.runtime.errors import ArtifactError, ConfigError, InputError, PerceptionError


@pytest.fixture
def artifact(small_artifact):
    return small_artifact


@pytest.fixture
def model(artifact):
    with BEVFusion.from_pretrained(artifact) as model:
        yield model


def cloud(seed: int = 0, num_points: int = 6_000) -> np.ndarray:
    """Return float32 [n, 3] inside the small grid."""
    rng = np.random.default_rng(seed)
    points = rng.uniform((-12, -12, -2.5), (12, 12, 2.0), (num_points, 3))
    points[: num_points // 2, 2] = -1.7 + rng.normal(0, 0.02, num_points // 2)
    return points.astype(np.float32)


def pose(x: float = 0.0, yaw: float = 0.0) -> np.ndarray:
    """Return T_world_from_ego in map coordinates of some kilometres."""
    matrix = np.eye(4)
    matrix[:2, :2] = [[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]]
    matrix[:3, 3] = (5_000.0 + x, -1_200.0, 40.0)
    return matrix


def masked_pose() -> np.ndarray:
    return np.ma.masked_greater(pose(), 1_000)


class Hostile:
    """Raises whatever it likes when it is made an array."""

    def __array__(self, *_, **__):
        raise ZeroDivisionError


def frame(stamp_s: float, x: float = 0.0, **more) -> dict:
    return {'id': 'top', 'timestamp_s': stamp_s, 'T_world_from_ego': pose(x), **more}


def resident_bytes() -> int:
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * os.sysconf('SC_PAGE_SIZE')


def run_here(code: str, artifact) -> str:
    """Run Python code in a process of its own that can import this module; return its output."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.run([sys.executable, '-c', code, str(artifact)], capture_output=True,
                          text=True, check=True, timeout=300,
                          env={**os.environ, 'PYTHONPATH': path}).stdout.strip()


def assert_equal(a, b) -> None:
    for name in ('boxes_xyzlwh_yaw', 'velocities_xy', 'scores', 'labels',
                 'orientation_availability', 'proposal_ids'):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_a_seeded_network_detects_something(model):
    detections = model(cloud())
    assert len(detections) > 3
    assert (np.diff(detections.scores) <= 0).all()
    assert np.isfinite(detections.boxes_xyzlwh_yaw).all()


def test_every_form_of_the_same_points_gives_the_same_bits(model, tmp_path):
    points = cloud()
    expected = model(points)
    with_intensity = np.column_stack([points, np.zeros(len(points), np.float32)])
    with_intensity.tofile(tmp_path / 'cloud.bin')
    np.save(tmp_path / 'cloud.npy', points)
    np.savez(tmp_path / 'cloud.npz', points=points)
    header = (f'VERSION .7\nFIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 1\n'
              f'WIDTH {len(points)}\nHEIGHT 1\nPOINTS {len(points)}\nDATA binary\n')
    (tmp_path / 'cloud.pcd').write_bytes(header.encode() + points.tobytes())
    for form in (points.astype(np.float64), torch.from_numpy(points), points.tolist(),
                 {'x': points[:, 0], 'y': points[:, 1], 'z': points[:, 2]},
                 Cloud(points, 0, len(points), points), with_intensity,
                 *(tmp_path / f'cloud.{kind}' for kind in ('bin', 'npy', 'npz', 'pcd')),
                 str(tmp_path / 'cloud.pcd')):
        assert_equal(model(form), expected)


def test_non_finite_points_are_dropped_and_counted(model):
    points = cloud()
    dirty = np.insert(points, [0, 10, 500], np.float32([np.nan, np.inf, 1.0]), axis=0)
    detections = model(dirty)
    assert_equal(detections, model(points))
    assert detections.meta['num_points_dropped'] == 3


def test_a_time_lag_column_says_that_the_cloud_is_densified(model):
    now, before = cloud(1), cloud(2)
    fused = model(now, sweeps=[{'points': before, 'time_lag_s': 0.1,
                                'T_current_from_sweep': np.eye(4)}])
    lag = np.repeat(np.float32([0, 0.1]), [len(now), len(before)])
    points = np.column_stack([np.concatenate([now, before]), lag])
    assert_equal(model(points, columns=('x', 'y', 'z', 'time_lag')), fused)
    assert fused.meta['num_points_per_sweep'] == [len(now), len(before)]


def test_a_stream_fuses_its_last_sweep_as_given_sweeps_do(model):
    first, second = cloud(1), cloud(2)
    alone = model(first, stream=frame(10.0))
    assert_equal(alone, model(first))
    assert alone.meta['num_sweeps'] == 1
    relative = np.linalg.inv(pose(0.5)) @ pose(0.0)
    fused = model(second, stream=frame(10.1, x=0.5))
    assert fused.meta['num_sweeps'] == 2
    expected = model(second, sweeps=[{'points': first, 'time_lag_s': 10.1 - 10.0,
                                      'T_current_from_sweep': relative}])
    assert fused.meta['num_voxels'] == expected.meta['num_voxels']
    np.testing.assert_allclose(fused.scores, expected.scores, atol=1e-4)


def test_streams_do_not_mix(model):
    model(cloud(1), stream=frame(10.0))
    other = model(cloud(2), stream={**frame(10.1), 'id': 'rear'})
    assert other.meta['num_sweeps'] == 1
    assert model(cloud(3), stream=frame(10.2)).meta['num_sweeps'] == 2


@pytest.mark.parametrize('refused', [
    {'points': cloud(5), 'stream': {'id': 'top', 'timestamp_s': 10.05}},
    {'points': cloud(5), 'stream': {**frame(10.05), 'T_world_from_ego': None}},
    {'points': cloud(5), 'stream': {**frame(10.05), 'T_world_from_ego': np.full((4, 4), np.nan)}},
    {'points': cloud(5), 'stream': {**frame(10.05), 'T_world_from_ego': np.zeros((4, 4))}},
    {'points': cloud(5), 'stream': {**frame(10.05), 'T_world_from_ego': masked_pose()}},
    {'points': cloud(5), 'stream': {**frame(10.05), 'T_world_from_ego': Hostile()}},
    {'points': cloud(5), 'stream': {**frame(float('nan'))}},
    {'points': np.empty((0, 3), np.float32), 'stream': frame(10.05)},
    {'points': np.full((10, 3), np.nan, np.float32), 'stream': frame(10.05)},
    {'points': np.zeros((10, 2), np.float32), 'stream': frame(10.05)},
], ids=['no pose', 'pose None', 'pose NaN', 'pose zero', 'pose masked', 'pose hostile',
        'stamp NaN', 'empty', 'NaN', '2 columns'])
def test_a_refused_frame_leaves_its_stream_as_it_was(model, refused):
    model(cloud(1), stream=frame(10.0))
    with pytest.raises(InputError):
        model(refused['points'], stream=refused['stream'])
    after = model(cloud(2), stream=frame(10.1, x=0.3))
    model.reset_stream()
    model(cloud(1), stream=frame(10.0))
    assert_equal(after, model(cloud(2), stream=frame(10.1, x=0.3)))


def test_a_cloud_outside_of_the_grid_is_refused_and_not_kept(model):
    model(cloud(1), stream=frame(10.0))
    with pytest.raises(InputError, match='voxels') as refusal:
        model(cloud(2) + 500, stream=frame(10.1, reset=True))
    assert refusal.value.reason == 'empty'
    after = model(cloud(3), stream=frame(10.2))
    assert after.meta['num_points_per_sweep'] == [len(cloud(3)), len(cloud(1))]
    model.reset_stream()
    model(cloud(1), stream=frame(10.0))
    assert_equal(after, model(cloud(3), stream=frame(10.2)))


def test_reset_forgets_the_past(model):
    model(cloud(1), stream=frame(10.0))
    assert model(cloud(2), stream=frame(10.1, reset=True)).meta['num_sweeps'] == 1
    model.reset_stream('top')
    assert model(cloud(2), stream=frame(10.2)).meta['num_sweeps'] == 1


def test_there_are_at_most_sixteen_streams(model):
    for i in range(16):
        model(cloud(1, 500), stream={**frame(1.0), 'id': i})
    with pytest.raises(InputError, match='16'):
        model(cloud(1, 500), stream={**frame(1.0), 'id': 'one more'})
    model.reset_stream(3)
    with pytest.raises(InputError, match='pose'):
        model(cloud(1, 500), stream={'id': 'refused', 'timestamp_s': 1.0})
    model(cloud(1, 500), stream={**frame(1.0), 'id': 'one more'})


@pytest.mark.parametrize('stream', [
    7, {}, {'id': 'a'}, {'id': 'a', 'timestamp_s': 'now'}, {'id': 'a', 'timestamp_s': True},
    {'id': [], 'timestamp_s': 1.0},
    {'id': None, 'timestamp_s': 1.0}, {'id': 'a', 'timestamp_s': 1.0, 'pose': None},
])
def test_a_malformed_stream_is_refused(model, stream):
    with pytest.raises(InputError, match='stream|timestamp_s'):
        model(cloud(), stream=stream)


@pytest.mark.parametrize('sweeps', [
    7, [7], [{}], [{'points': cloud(), 'time_lag_s': 0.1}], [cloud()],
    [{'points': cloud(), 'time_lag_s': None, 'T_current_from_sweep': np.eye(4)}],
    [{'points': cloud(), 'time_lag_s': 0.1, 'T_current_from_sweep': np.eye(3)}],
    [{'points': {**dict(zip('xyz', cloud().T, strict=True)), 'time_lag': np.zeros(6_000)},
      'time_lag_s': 0.1, 'T_current_from_sweep': np.eye(4)}],
])
def test_malformed_sweeps_are_refused(model, sweeps):
    with pytest.raises(InputError):
        model(cloud(), sweeps=sweeps)


def test_sweeps_are_read_like_the_cloud_itself(model):
    dirty = np.pad(cloud(), ((0, 0), (0, 2)))
    dirty[:3] = np.nan
    detections = model(dirty, columns=('x', 'y', 'z', 'intensity', 'ring'), sweeps=[
        {'points': dirty, 'time_lag_s': 0.1, 'T_current_from_sweep': np.eye(4)}])
    assert detections.meta['num_points_per_sweep'] == [5_997, 5_997]
    assert detections.meta['num_points_dropped'] == 6


def test_a_stream_and_sweeps_together_are_refused(model):
    with pytest.raises(InputError, match='stream: found sweeps'):
        model(cloud(), sweeps=[], stream=frame(1.0))
    with pytest.raises(InputError, match='stream: found a time_lag'):
        model({**dict(zip('xyz', cloud().T, strict=True)), 'time_lag': np.zeros(6_000)},
              stream=frame(1.0))


def test_thresholds_may_be_given_with_a_call(model):
    usual = model(cloud())
    limits = {'detection_score_thresholds.min_confidence_scores.' + name: [0.4] * 4
              for name in model.config.class_names}
    strict = model(cloud(), **limits)
    assert (strict.scores >= 0.4).all()
    assert len(strict) < len(usual)
    assert_equal(model(cloud()), usual)


@pytest.mark.parametrize(('name', 'value'), [
    ('iou_nms_threshold', 1.5), ('iou_nms_threshold', 'a lot'), ('circle_nms_dist_threshold', -1),
    ('voxel_size', [0.2, 0.2, 0.2]), ('no_such_parameter', 1),
    ('detection_score_thresholds.distance_bin_upper_limits', [50.0, 40.0]),
    ('detection_score_thresholds.min_confidence_scores.CAR', [0.1]),
])
def test_a_wrong_parameter_of_a_call_is_named(model, name, value):
    with pytest.raises(ConfigError, match=name):
        model(cloud(), **{name: value})


@pytest.mark.parametrize(('name', 'value'), [
    ('voxel_size', [0.17, 0, 0.2]), ('voxel_size', [0.17, -0.17, 0.2]),
    ('voxel_size', [0.17, float('nan'), 0.2]), ('voxel_size', [0.17, 0.2]),
    ('point_cloud_range', [1.0, 0, 0, 0, 1, 1]), ('num_proposals', 0), ('num_proposals', '5'),
    ('voxels_num', [1, 5, 10_000_000]), ('no_such_parameter', 1),
])
def test_a_wrong_parameter_at_load_is_named(artifact, name, value):
    with pytest.raises(ConfigError, match=name):
        BEVFusion.from_pretrained(artifact, **{name: value})


def test_parameters_of_another_network_are_refused(artifact):
    with pytest.raises(ArtifactError, match='num_proposals'):
        BEVFusion.from_pretrained(artifact, num_proposals=7)


def test_an_unknown_backend_is_refused(artifact):
    with pytest.raises(ConfigError, match='backend.*cuda'):
        BEVFusion.from_pretrained(artifact, backend='cuda')


def test_a_missing_artifact_is_named(tmp_path):
    with pytest.raises(ArtifactError, match='nowhere'):
        BEVFusion.from_pretrained(tmp_path / 'nowhere')


def test_voxels_beyond_the_limit_are_clipped_and_reported(artifact):
    with BEVFusion.from_pretrained(artifact, voxels_num=[1, 100, 300]) as model:
        meta = model(cloud()).meta
        assert meta['num_voxels'] == 300
        assert meta['num_voxels_clipped'] > 0
        assert meta['is_num_voxels_within_range'] is False
        assert model(cloud(0, 100)).meta['is_num_voxels_within_range'] is True


def test_the_result_is_plain_json_and_says_what_was_done(model):
    points = cloud()
    detections = model(points)
    tree = json.loads(json.dumps(detections.to_dict()))
    assert len(tree['objects']) == len(detections)
    assert tree['objects'][0]['label'] == detections.label_names[0]
    assert {'read', 'densify', 'voxelize', 'rulebook', 'forward', 'postprocess', 'finish',
            'total'} <= tree['timing_ms'].keys()
    stages = sum(ms for name, ms in tree['timing_ms'].items() if name != 'total')
    assert stages <= tree['timing_ms']['total'] * 1.001
    meta = tree['meta']
    assert meta['num_points'] == len(points)
    assert meta['active_rows'][0] == meta['num_voxels']
    assert len(meta['active_rows']) == 5
    assert meta['capacity_bucket'] == 0
    counts = meta['postprocess']
    assert counts['after_iou_nms'] == len(detections) <= counts['after_circle_nms'] \
        <= counts['above_threshold'] <= counts['proposals'] == model.config.num_proposals


@pytest.mark.parametrize(('rows', 'bucket'), [
    ((64_000, 64_000, 32_000, 16_000), 0), ((64_001, 1, 1, 1), 1), ((1, 1, 1, 16_001), 1),
    ((256_000, 256_000, 256_000, 162_000, 5), 2),
])
def test_the_smallest_bucket_that_holds_every_level_is_taken(rows, bucket):
    assert capacity_bucket(rows) == bucket


def test_calls_from_several_threads_give_the_same_bits_as_one_after_the_other(model):
    clouds = [cloud(seed, 3_000) for seed in range(4)]
    expected = [model(points) for points in clouds]
    found: dict[int, list] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        found[i] += [model(clouds[i]) for _ in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert len(found[i]) == 4
        for detections in found[i]:
            assert_equal(detections, expected[i])


def test_close_may_be_repeated_and_ends_the_model(artifact):
    model = BEVFusion.from_pretrained(artifact)
    model.close()
    model.close()
    with pytest.raises(PerceptionError, match='closed'):
        model(cloud())


def test_close_waits_for_the_call_in_flight(artifact):
    model = BEVFusion.from_pretrained(artifact)
    inside, go_on, results = threading.Event(), threading.Event(), []
    forward = model.forward

    def slow_forward(prepared):
        inside.set()
        go_on.wait(10)
        return forward(prepared)

    model.forward = slow_forward
    caller = threading.Thread(target=lambda: results.append(model(cloud())))
    caller.start()
    inside.wait(10)
    closer = threading.Thread(target=model.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go_on.set()
    caller.join()
    closer.join(10)
    assert not closer.is_alive()
    assert len(results[0]) > 0


def test_a_signal_handler_may_close_the_model_inside_a_call(artifact):
    model = BEVFusion.from_pretrained(artifact)
    forward = model.forward

    def close_inside(prepared):
        model.close()
        return forward(prepared)

    model.forward = close_inside
    assert len(model(cloud())) > 0
    with pytest.raises(PerceptionError, match='closed'):
        model(cloud())
    model.close()


def test_a_forked_child_ends_and_is_told_that_the_model_is_not_its_own(artifact):
    code = '''
import os, sys, threading, time
from tt_perception.runtime.threads import let_idle_threads_sleep
let_idle_threads_sleep()
from test_model import cloud
from tt_perception import BEVFusion
from tt_perception.runtime.errors import PerceptionError
model = BEVFusion.from_pretrained(sys.argv[1])
inside, forward = threading.Event(), model.forward
def slow(prepared):
    inside.set()
    time.sleep(0.5)
    return forward(prepared)
model.forward = slow
caller = threading.Thread(target=lambda: model(cloud()))
caller.start()
inside.wait()
child = os.fork()
if child == 0:
    try:
        model(cloud())
    except PerceptionError as error:
        model.close()
        sys.exit(7 if 'another process' in str(error) else 1)
    sys.exit(2)
caller.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(model(cloud())) > 0)
'''
    assert run_here(code, artifact) == '7 True'


def test_the_state_of_the_model_can_be_asked(model, artifact):
    info = model.info
    assert info['backend'] == 'cpu'
    assert info['source'] == str(artifact / 'bevfusion_lidar.onnx')
    json.dumps(info)


def features_of(artifact, **parameters) -> np.ndarray:
    """Return what the network is given for one cloud at 80 km from the map's origin."""
    with BEVFusion.from_pretrained(artifact, **parameters) as model:
        seen = []
        forward = model.forward

        def keep(prepared):
            seen.append(prepared.inputs.features.copy())
            return forward(prepared)

        model.forward = keep
        model(cloud(1), stream={'id': 'top', 'timestamp_s': 1.0,
                                'T_world_from_ego': pose(80_000, 0.7)})
    return seen[0]


def test_strict_float32_moves_the_current_sweep_by_rounding(artifact):
    exact = features_of(artifact)
    strict = features_of(artifact, strict_float32=True)
    assert exact.shape != strict.shape or (exact != strict).any()
    alone = features_of(artifact, strict_float32=True, densification_num_past_frames=0)
    np.testing.assert_array_equal(alone, exact)


def test_warmup_accepts_every_configuration_that_can_run(artifact):
    for parameters in ({'voxels_num': [5_000, 6_000, 7_000]}, {'cloud_capacity': 900},
                       {'use_intensity': False, 'densification_num_past_frames': 0}):
        with BEVFusion.from_pretrained(artifact, **parameters) as model:
            model.warmup()


def test_a_model_that_cannot_be_built_leaves_nothing_to_close(artifact):
    code = ('import sys; from tt_perception import BEVFusion\n'
            'try: BEVFusion.from_pretrained(sys.argv[1], num_proposals=7)\n'
            'except Exception as error: kept = error\n')
    done = subprocess.run([sys.executable, '-c', code, str(artifact)], capture_output=True,
                          text=True, check=True)
    assert done.stderr == ''


def test_models_run_where_nothing_can_be_written(artifact):
    code = ('import sys; from tt_perception import BEVFusion\n'
            'import tt_perception.runtime.jit, numba\n'
            'assert not numba.config.CACHE_DIR\n'
            'from tt_perception.bevfusion.remap import remap_labels')
    subprocess.run([sys.executable, '-c', code], check=True, env={
        **os.environ, 'HOME': '/proc/nowhere', 'XDG_CACHE_HOME': '', 'NUMBA_CACHE_DIR': ''})


def grow(artifact: str) -> int:
    """Run 500 frames; return how many bytes the process has grown since frame 50."""
    clouds = [cloud(seed, 5_000 + 97 * seed) for seed in range(7)]
    with BEVFusion.from_pretrained(artifact) as model:
        sizes = []
        for i in range(500):
            model(clouds[i % 7], stream=frame(i * 0.1, x=0.1 * i))
            sizes.append(resident_bytes())
    # Between frames the allocator holds more or less for reuse; what has leaked never goes away.
    return min(sizes[450:]) - min(sizes[50:100])


def test_five_hundred_frames_allocate_nothing_that_stays(artifact):
    """Host stages and a small network, in a process of their own: no growth after frame 50."""
    code = ('import sys; from tt_perception.runtime.threads import let_idle_threads_sleep\n'
            'let_idle_threads_sleep(); import test_model; print(test_model.grow(sys.argv[1]))')
    assert int(run_here(code, artifact)) < 4_000_000


def test_the_host_stages_allocate_no_large_array(artifact):
    points = cloud(0, 60_000)
    message = SimpleNamespace(
        width=len(points), height=1, point_step=12, row_step=12 * len(points),
        data=points.tobytes(), is_bigendian=False,
        fields=[SimpleNamespace(name=name, offset=4 * i, datatype=7, count=1)
                for i, name in enumerate('xyz')])
    buffer = np.empty_like(points)
    with BEVFusion.from_pretrained(artifact) as model:
        peaks = []

        def forward(prepared):
            peaks.append(tracemalloc.get_traced_memory()[1])
            return model._backend.forward(prepared.inputs, prepared.clock)

        model.forward = forward
        def run(i: int) -> None:
            decoded = decode_cloud(message, use_intensity=False, out=buffer)
            model(decoded, stream=frame(0.1 * i))

        for i in range(5):
            run(i)
        tracemalloc.start()
        for i in range(5, 8):
            tracemalloc.clear_traces()
            run(i)
        tracemalloc.stop()
    assert max(peaks[-3:]) < 100_000  # the cloud alone has 720,000 bytes


# ---- several frames in flight ----

PIPELINES = (0, 1, 2)
HELD_S = 0.2
HELD_MS = 1e3 * HELD_S / 2  # of which as much is seen at least, and nowhere else


class Gate:
    """Holds frames before the network until it is opened.

    :ivar entered: a frame has come so far.
    :ivar prepared: how many frames have gone through the host stages.
    """

    def __init__(self, model: BEVFusion) -> None:
        self.entered = threading.Event()
        self.prepared = 0
        self._opened = threading.Event()
        self._forward, self._prepare = model.forward, model._prepare
        model.forward, model._prepare = self._hold, self._count

    def open(self) -> None:
        """Let all frames through."""
        self._opened.set()

    def _hold(self, prepared):
        self.entered.set()
        assert self._opened.wait(30)
        return self._forward(prepared)

    def _count(self, *args):
        prepared = self._prepare(*args)
        self.prepared += 1
        return prepared


def in_thread(call):
    """Return the result to come of a call on a thread that keeps no process alive."""
    result = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def submit_in_thread(model, seed: int = 0):
    """Return the result to come of a frame whose submission may have to wait."""
    return in_thread(lambda: model(cloud(seed)))


def drive(model, stream_id: str, num_frames: int = 6) -> list:
    """Send a stream without waiting for answers; return all of them."""
    results = [model.submit(cloud(seed, 2_000 + 500 * seed),
                            stream={**frame(10.0 + 0.1 * seed, 0.3 * seed), 'id': stream_id})
               for seed in range(num_frames)]
    return [result.result(60) for result in results]


@pytest.mark.parametrize('pipeline', PIPELINES)
def test_frames_in_flight_give_the_same_bits_as_one_after_the_other(artifact, model, pipeline):
    expected = [model(cloud(seed, 2_000 + 500 * seed), stream=frame(10.0 + 0.1 * seed, 0.3 * seed))
                for seed in range(6)]
    assert {detections.meta['num_sweeps'] for detections in expected} == {1, 2}
    with BEVFusion.from_pretrained(artifact, pipeline=pipeline) as other:
        assert other.info['pipeline'] == pipeline
        for found in (drive(other, 'alone'),
                      *(r.result(60) for r in [in_thread(lambda i=i: drive(other, f'stream {i}'))
                                               for i in range(3)])):
            for a, b in zip(found, expected, strict=True):
                assert_equal(a, b)
                assert a.meta == b.meta


@pytest.mark.parametrize('pipeline', PIPELINES)
def test_results_of_one_thread_come_in_the_order_of_its_calls(artifact, pipeline):
    with BEVFusion.from_pretrained(artifact, pipeline=pipeline) as model:
        forward, finished, threads = model.forward, [], set()

        def uneven(prepared):
            threads.add(threading.get_ident())
            time.sleep(0.03 if len(finished) % 2 == 0 else 0)
            return forward(prepared)

        model.forward = uneven
        results = []
        for i in range(8):
            results.append(model.submit(cloud(i, 1_000)))
            results[-1].add_done_callback(lambda _, i=i: finished.append(i))
        results[-1].result(60)
    assert finished == list(range(8))
    assert len(threads) == 1  # the network has a thread of its own


def test_without_a_pipeline_a_frame_is_prepared_after_the_one_before_is_finished(
        artifact, monkeypatch):
    finishing, finish_on = threading.Event(), threading.Event()
    finish = model_module.finish

    def slow_finish(*args):
        finishing.set()
        assert finish_on.wait(30)
        return finish(*args)

    monkeypatch.setattr(model_module, 'finish', slow_finish)
    with BEVFusion.from_pretrained(artifact, pipeline=0) as model:
        gate = Gate(model)
        first = model.submit(cloud())
        second = submit_in_thread(model)
        assert gate.entered.wait(30)
        time.sleep(HELD_S)
        assert gate.prepared == 1
        gate.open()
        assert finishing.wait(30)
        time.sleep(HELD_S)
        assert gate.prepared == 1
        finish_on.set()
        assert first.result(30).timing_ms['wait'] < HELD_MS
        assert second.result(30).timing_ms['wait'] >= HELD_MS


@pytest.mark.parametrize('pipeline', [1, 2])
def test_with_a_pipeline_one_frame_is_prepared_while_the_one_before_is_in_the_network(
        artifact, pipeline):
    with BEVFusion.from_pretrained(artifact, pipeline=pipeline) as model:
        gate = Gate(model)
        first = model.submit(cloud(0))
        assert gate.entered.wait(30)
        second = model.submit(cloud(1))
        assert gate.prepared == 2 and not first.done() and not second.done()
        third = submit_in_thread(model, 2)
        time.sleep(HELD_S)
        assert gate.prepared == 2
        gate.open()
        waits = [result.result(30).timing_ms for result in (first, second, third)]
    assert waits[0]['wait'] < HELD_MS and waits[0]['wait_network'] < HELD_MS
    assert waits[1]['wait'] < HELD_MS <= waits[1]['wait_network']
    assert waits[2]['wait'] >= HELD_MS
    for timing_ms in waits:
        assert sum(v for k, v in timing_ms.items() if k != 'total') <= timing_ms['total'] * 1.001


@pytest.mark.parametrize('pipeline', PIPELINES)
def test_frames_that_fail_or_are_refused_do_not_starve_the_next_one(artifact, pipeline):
    with BEVFusion.from_pretrained(artifact, pipeline=pipeline) as model:
        expected = model(cloud(1), stream=frame(10.0))
        forward = model.forward

        def fail(prepared):
            raise ValueError('injected')

        def spoil():
            for _ in range(5):
                model.forward = fail
                results = [model.submit(cloud()) for _ in range(3)]
                for result in results:
                    with pytest.raises(ValueError, match='injected'):
                        result.result(30)
                with pytest.raises(InputError):
                    model(cloud() + 500)
                with pytest.raises(InputError):
                    model(cloud(), stream={'id': 'bad', 'timestamp_s': 1.0})
            model.forward = forward
            model.reset_stream()
            return model(cloud(1), stream=frame(10.0))

        assert_equal(in_thread(spoil).result(60), expected)


def test_a_result_cannot_be_cancelled_and_nothing_is_lost_by_the_attempt(artifact):
    with BEVFusion.from_pretrained(artifact, pipeline=1) as model:
        gate = Gate(model)
        results = [model.submit(cloud(i)) for i in range(2)]
        assert [result.cancel() for result in results] == [False, False]
        gate.open()
        assert all(len(result.result(30)) > 0 for result in results)
        assert len(submit_in_thread(model).result(30)) > 0
        closed = in_thread(model.close)
    closed.result(30)


def wait_for_threads_to_end() -> None:
    deadline_s = time.monotonic() + 10
    while alive := [t.name for t in threading.enumerate() if t.name.startswith('bevfusion')]:
        assert time.monotonic() < deadline_s, alive
        time.sleep(0.01)


@pytest.mark.parametrize('pipeline', PIPELINES)
def test_close_waits_for_all_frames_in_flight_and_frees_everything(artifact, pipeline):
    model = BEVFusion.from_pretrained(artifact, pipeline=pipeline)
    gate = Gate(model)
    results = [model.submit(cloud(i)) for i in range(1 + min(pipeline, 1))]
    read, is_inside = model._read, threading.Event()
    model._read = lambda *args: is_inside.set() or read(*args)
    waiting = submit_in_thread(model)  # for a workspace
    assert is_inside.wait(30)
    closed = in_thread(model.close)
    time.sleep(HELD_S)
    assert not closed.done()
    with pytest.raises(PerceptionError, match='closed'):
        model.submit(cloud())
    gate.open()
    closed.result(30)
    assert all(len(result.result(0)) > 0 for result in results)
    assert len(waiting.result(30)) > 0
    assert model._backend._net is None and model._idle_workspaces.empty()
    wait_for_threads_to_end()
    model.close()


def test_close_between_a_frame_and_its_result(artifact):
    with BEVFusion.from_pretrained(artifact, pipeline=1) as model:
        results = [model.submit(cloud(i)) for i in range(2)]
    assert all(len(result.result(0)) > 0 for result in results)


def test_a_callback_of_a_result_may_close_the_model(artifact):
    model = BEVFusion.from_pretrained(artifact, pipeline=1)
    gate, closed = Gate(model), threading.Event()

    def close(_):
        model.close()
        closed.set()

    results = [model.submit(cloud(i)) for i in range(2)]
    results[0].add_done_callback(close)
    gate.open()
    assert closed.wait(30)
    assert all(len(result.result(30)) > 0 for result in results)
    in_thread(model.close).result(30)
    assert model._backend._net is None


def test_ctrl_c_while_waiting_for_a_result_leaves_the_model_usable(artifact):
    with BEVFusion.from_pretrained(artifact, pipeline=1) as model:
        expected = model(cloud(2))
        gate = Gate(model)
        results = [model.submit(cloud(i)) for i in range(2)]
        threading.Timer(0.2, signal.pthread_kill,
                        (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            results[0].result(30)
        threading.Timer(0.2, signal.pthread_kill,
                        (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):  # while waiting for a workspace
            model.submit(cloud(2))
        gate.open()
        assert all(len(result.result(30)) > 0 for result in results)
        assert_equal(submit_in_thread(model, 2).result(30), expected)


@pytest.mark.parametrize('pipeline', [-1, 3, 1.0, True, '1', None])
def test_a_wrong_pipeline_is_refused(artifact, pipeline):
    with pytest.raises(ConfigError, match=f'^pipeline: found {pipeline!r}, expected 0, 1 or 2$'):
        BEVFusion.from_pretrained(artifact, pipeline=pipeline)


def test_a_model_that_cannot_be_built_closes_its_backend(artifact, monkeypatch):
    closed = []
    monkeypatch.setattr(model_module.CpuBackend, 'close', lambda self: closed.append(self))
    monkeypatch.setattr(model_module.CpuBackend, 'new_inputs', lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        BEVFusion.from_pretrained(artifact, backend='cpu')
    assert len(closed) == 1
