# SPDX-License-Identifier: Apache-2.0
"""Backend ``tt`` behind the Python API: frames in flight, errors, a card that hangs, and the end.

On a fake ttnn that does nothing before it is waited for; on the mock p150; and, with the same
programs, on a card or on the Blackhole functional simulator (tenstorrent/ttsim).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from fake_ttnn import FakeTtnn, Tensor

from tt_perception import BEVFusion
from tt_perception.bevfusion import model as model_module
from tt_perception.bevfusion.columns import FrameBuffers, TableLayout, blocks_of
from tt_perception.bevfusion.config import CAPACITY_BUCKETS
from tt_perception.bevfusion.detections import RawDetections
from tt_perception.bevfusion.seeded import grid_of, seeded_network, small_config, write_artifact
from tt_perception.bevfusion.tt import backend as backend_module
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.runtime import device as device_module
from tt_perception.runtime.device import device_nodes
from tt_perception.runtime.errors import CapacityError, ConfigError, DeviceError, InputError
from tt_perception.runtime.model import StageClock
from tt_perception.runtime.staging import HostBuffer

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ('riscv64-unknown-elf-as', 'riscv64-unknown-elf-ld')
CHOICES = ('TT_METAL_SIMULATOR', 'TT_METAL_MOCK_CLUSTER_DESC_PATH', 'TT_VISIBLE_DEVICES',
           'TT_METAL_RUNTIME_ROOT', 'TT_METAL_CACHE', 'TT_METAL_SLOW_DISPATCH_MODE')
PIPELINES = (0, 1, 2)
NUM_POINTS = (3_000, 90_000, 190_000)  # for each capacity bucket
DEVICE_STAGES = {'wait_staging', 'tables', 'wait_network', 'wait_device', 'upload', 'sparse',
                 'dense', 'read_back', 'forward'}

needs_mock = pytest.mark.skipif(
    importlib.util.find_spec('ttnn') is None or not all(map(shutil.which, TOOLS)),
    reason='the mock device needs ttnn (Python 3.10 or 3.12) and the Debian or Ubuntu package '
           'binutils-riscv64-unknown-elf')
needs_card = pytest.mark.skipif(not device_nodes(), reason='no card: /dev/tenstorrent is missing')
needs_simulator = pytest.mark.skipif(
    'TT_METAL_SIMULATOR' not in os.environ or 'TT_METAL_SLOW_DISPATCH_MODE' in os.environ,
    reason='no simulator with fast dispatch: TT_METAL_SIMULATOR is not set, or '
           'TT_METAL_SLOW_DISPATCH_MODE is')


def cloud(bucket: int = 0, seed: int = 0) -> np.ndarray:
    """Return float32 [n, 3] inside the small grid, so many that the frame is of a bucket."""
    points = np.random.default_rng(seed).uniform((-12, -12, -2.5), (12, 12, 4.5),
                                                 (NUM_POINTS[bucket] + 100 * seed, 3))
    return points.astype(np.float32)


def assert_equal(a, b) -> None:
    for name in ('boxes_xyzlwh_yaw', 'scores', 'labels', 'proposal_ids'):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


# ---- on a fake ttnn ----

class LazyTtnn(FakeTtnn):
    """Does nothing before it is waited for: what was to be uploaded is read as late as that."""

    def __init__(self) -> None:
        super().__init__(eth=True)
        self.queue: list = []

    def run(self, device, compute) -> None:
        """Have a graph's computation done, or captured."""
        self.record('run')
        (self.queue if device.capturing is None else device.traces[device.capturing]).append(
            compute)

    def synchronize_device(self, device) -> None:
        super().synchronize_device(device)
        while self.queue:
            self.queue.pop(0)()

    def execute_trace(self, device, trace, *, cq_id, blocking) -> None:
        self.record('execute_trace')
        self.queue += device.traces[trace]

    def copy_host_to_device_tensor(self, host, target) -> None:
        self.record('write')
        self.queue.append(lambda: target.value.copy_(host.value))

    def copy_device_to_host_tensor(self, source, host, *, blocking) -> None:
        self.record('read')
        self.queue.append(lambda: host.value.copy_(source.value))


class FakeHostBuffer(HostBuffer):
    """Memory that numpy and the fake share."""

    def __init__(self, shape, dtype) -> None:
        self.array = np.zeros(shape, np.uint16 if dtype == 'bfloat16' else np.uint32)
        self.tensor = Tensor(torch.from_numpy(self.array.view(_signed(self.array.dtype))))


def _signed(dtype) -> np.dtype:
    return np.dtype(np.int16 if dtype == np.uint16 else np.int32)


class Graph:
    """In place of the network: the objects it finds depend on all words of a frame.

    :ivar fails: what :meth:`allocate` raises.
    """

    fake: LazyTtnn
    fails: BaseException | None = None

    def __init__(self, weights, capacities=CAPACITY_BUCKETS) -> None:
        self._config = weights.config
        self.layouts = [TableLayout.of(weights.config, caps) for caps in capacities]
        self._inputs: list[dict[str, Tensor]] = []

    def variants(self):
        return ['sparse_0', 'sparse_1', 'sparse_2', 'dense']

    def allocate(self, device) -> None:
        if self.fails is not None:
            raise self.fails
        for layout in self.layouts:
            shapes = FrameBuffers.shapes(layout, self._config.in_channels)
            self._inputs.append({
                name: Tensor(torch.from_numpy(np.zeros(shape, _signed(dtype))), device)
                for name, (shape, dtype) in shapes.items()})
        self._map = Tensor(torch.zeros(1, dtype=torch.int64), device)
        self._packed = Tensor(torch.zeros(64, 32), device)
        self._device = device

    def inputs(self, variant):
        return {} if variant == 'dense' else self._inputs[int(variant[-1])]

    def forward(self, variant, keep):
        if variant == 'dense':
            self.fake.run(self._device, self._find_objects)
            return self._packed
        inputs, layout = self.inputs(variant), self.layouts[int(variant[-1])]
        self.fake.run(self._device, lambda: self._digest(inputs, layout))
        return self._map

    def _digest(self, inputs, layout) -> None:
        """Sum up what a frame has written; what lies behind is of other frames."""
        counts = inputs['counts'].value[0, :4].tolist()
        rows = [inputs['features'].value[:counts[0]], inputs['out_table'].value,
                *(inputs['tables'].value[first:first + blocks_of(counts[level])]
                  for level, first in enumerate(layout.subm))]
        self._map.value[0] = sum(int(part.long().sum()) * (i + 1) for i, part in enumerate(rows))

    def _find_objects(self) -> None:
        rng = np.random.default_rng(abs(int(self._map.value[0])))
        packed = rng.uniform(-1, 1, (64, 32))
        packed[:, 10] = rng.uniform(0.3, 1, 64)
        packed[:, 11:13] = rng.integers(0, 18, (64, 2))
        packed[:, 13] = rng.integers(0, 5, 64)
        self._packed.value.copy_(torch.from_numpy(packed))

    def release(self) -> None:
        self._inputs, self._map, self._packed = [], None, None


def unpack(packed: np.ndarray, num_proposals: int) -> RawDetections:
    packed = packed[:num_proposals]
    bbox_pred = np.ascontiguousarray(packed[:, :10].T)
    bbox_pred[:2] += packed[:, 11:13].T
    return RawDetections(bbox_pred, packed[:, 10].copy(), packed[:, 13].astype(np.int64))


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a machine with a card and ttnn in place of this one."""
    (tmp_path / '0').touch()
    monkeypatch.setattr(device_module, '_NODES', tmp_path)
    monkeypatch.setattr(device_module, '_SYSFS', tmp_path / 'none')
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    fake = LazyTtnn().install(monkeypatch)
    module = ModuleType('graph')
    module.DENSE, module.BEVFusionGraph, module.unpack = 'dense', Graph, unpack
    monkeypatch.setitem(sys.modules, 'tt_perception.bevfusion.tt.graph', module)
    monkeypatch.setattr(backend_module, 'HostBuffer', FakeHostBuffer)
    monkeypatch.setattr(Graph, 'fake', fake, raising=False)
    return fake


@pytest.fixture
def load(fake, small_artifact):
    """Return a function that loads a model, which is closed at the end."""
    models = []

    def load(**options) -> BEVFusion:
        models.append(BEVFusion.from_pretrained(small_artifact, backend='tt', **options))
        return models[-1]

    yield load
    for model in models:
        model.close()


def in_thread(call) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def drive(model, stream_id: str = 'top', buckets=(0, 1, 0, 0, 1)) -> list:
    """Send a stream of frames of several buckets without waiting for the answers."""
    results = [model.submit(cloud(bucket, seed), stream={
        'id': stream_id, 'timestamp_s': 10 + 0.1 * seed, 'T_world_from_ego': np.eye(4)})
        for seed, bucket in enumerate(buckets)]
    return [result.result(60) for result in results]


def test_frames_in_flight_give_the_same_bits_as_one_after_the_other(load):
    found = []
    for pipeline in PIPELINES:
        model = load(pipeline=pipeline)
        answers = {'alone': drive(model, 'alone')}
        threads = [in_thread(lambda i=i, model=model, answers=answers: answers.update(
            {i: drive(model, f'stream {i}')})) for i in range(3)]
        for thread in threads:
            thread.join(60)
        assert len(answers) == 4
        found += answers.values()
    assert len({tuple(d.scores) for d in found[0]}) == len(found[0])  # no two frames are alike
    assert {d.meta['capacity_bucket'] for d in found[0]} == {0, 1}
    for answers in found[1:]:
        for a, b in zip(answers, found[0], strict=True):
            assert_equal(a, b)
            assert a.meta == b.meta


def test_each_stage_is_timed(load):
    timing_ms = load(pipeline=1)(cloud()).timing_ms
    assert timing_ms.keys() > DEVICE_STAGES | {'read', 'wait', 'densify', 'voxelize', 'rulebook'}
    assert sum(v for k, v in timing_ms.items() if k != 'total') <= timing_ms['total'] * 1.001


def test_its_info_is_plain_values(load):
    model = load()
    info = json.loads(json.dumps(model.info))
    assert info['backend'] == 'tt' and info['closed'] is False
    assert info['device']['grid'] == [12, 10] and info['device']['dispatch'] == 'eth'
    assert info['capacity_buckets'][0][0] == 64_000 and len(info['capacity_buckets']) == 3
    assert info['precision']['pts_backbone'].keys() == {'activations', 'weights', 'fidelity'}
    assert info['traced'] is True
    assert info['trace_bytes'].keys() == {'sparse_0', 'sparse_1', 'sparse_2', 'dense'}
    model.close()
    assert model.info == {**model.info, 'closed': True, 'backend': 'tt'}


@pytest.mark.parametrize('pipeline', [1, 2])
def test_the_next_frame_is_written_beside_an_upload_where_there_are_two_buffers(
        fake, load, pipeline):
    model = load(pipeline=pipeline)
    prepared, prepare = [], model._prepare
    model._prepare = lambda *args: prepared.append(prepare(*args)) or prepared[-1]
    gate = fake.blocks['synchronize_device'] = threading.Event()
    results = [model.submit(cloud(0, 1))]
    assert fake.entered.wait(10)  # the sparse part waits for the device
    thread = in_thread(lambda: results.append(model.submit(cloud(0, 2))))
    time.sleep(0.4)
    assert len(prepared) == pipeline
    gate.set()
    thread.join(30)
    timings = [result.result(30).timing_ms for result in results]
    assert timings[0]['wait_staging'] < 200 < timings[0]['sparse']
    assert (timings[1]['wait_staging'] > 200) is (pipeline == 1)


@pytest.mark.parametrize('pipeline', PIPELINES)
@pytest.mark.parametrize('call', ['write', 'execute_trace', 'read'])
def test_frames_that_fail_or_are_refused_do_not_starve_the_next_one(fake, load, pipeline, call):
    model = load(pipeline=pipeline, timeout_s=30.0)
    expected = model(cloud(0, 3))
    fill, answers = FrameBuffers.fill, []

    def spoil() -> None:
        fake.fails[call] = RuntimeError('TT_THROW @ f.cpp:1: x\ninfo:\nno answer\nbacktrace:\n')
        for result in [model.submit(cloud()) for _ in range(5)]:
            with pytest.raises(DeviceError, match='^device 0: [a-z]+ (sparse_0|dense) failed: '
                                                  'no answer$'):
                result.result(30)
        fake.fails.clear()
        fake.queue.clear()
        for _ in range(5):  # one that is refused when it already has a buffer
            FrameBuffers.fill = lambda *_: (_ for _ in ()).throw(InputError('refused'))
            try:
                with pytest.raises(InputError, match='refused'):
                    model(cloud())
            finally:
                FrameBuffers.fill = fill
        answers.append(model(cloud(0, 3)))

    in_thread(spoil).join(60)
    assert_equal(answers[0], expected)


def test_close_waits_for_frames_in_flight_and_frees_everything(fake, load):
    model = load(pipeline=2)
    gate = fake.blocks['synchronize_device'] = threading.Event()
    results = [model.submit(cloud(0, seed)) for seed in range(2)]
    assert fake.entered.wait(10)
    closed = in_thread(model.close)
    closed.join(0.2)
    assert closed.is_alive() and fake.open_devices
    gate.set()
    closed.join(30)
    assert not closed.is_alive() and all(result.done() for result in results)
    assert all(len(result.result()) > 0 for result in results)
    assert fake.calls[-5:] == 4 * ['release_trace'] + ['close_device']
    assert not fake.open_devices and fake.devices[0].tensors == 0
    model.close()


def test_a_device_of_the_user_is_not_closed(fake, load):
    device = fake.open_device(device_id=0, dispatch_core_config='worker')
    model = load(device=device)
    model(cloud())
    assert model.info['device']['dispatch'] == 'external'
    model.close()
    assert fake.open_devices == [device] and not device.traces and device.tensors == 0


@pytest.mark.parametrize('error', [RuntimeError('no space'), KeyboardInterrupt(),
                                   ConfigError('hidden_channels: found 48')])
def test_a_model_that_cannot_be_prepared_leaves_the_card_closed(fake, load, monkeypatch, error):
    monkeypatch.setattr(Graph, 'fails', error)
    with pytest.raises(DeviceError if type(error) is RuntimeError else type(error)):
        load()
    assert len(fake.devices) == 1 and not fake.open_devices


def test_a_model_that_cannot_be_built_behind_the_card_leaves_it_closed(fake, load, monkeypatch):
    monkeypatch.setattr(backend_module.TtBackend, 'new_inputs', lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        load(pipeline=1)
    assert len(fake.devices) == 1 and not fake.open_devices


@pytest.mark.parametrize(('name', 'value'), [
    ('dispatch', 'ethernet'), ('dispatch', None), ('device_id', -1), ('device_id', '0'),
    ('timeout_s', 0), ('timeout_s', -1.0), ('timeout_s', float('nan')),
    ('timeout_s', float('inf')), ('timeout_s', 1e300), ('timeout_s', '5'), ('timeout_s', None)])
def test_a_wrong_option_is_named_and_no_card_is_opened(fake, load, name, value):
    with pytest.raises(ConfigError, match=re.escape(f'{name}: found {value!r}, expected ')):
        load(**{name: value})
    assert not fake.devices


def test_auto_takes_the_card_where_there_are_one_and_ttnn(fake, small_artifact, monkeypatch):
    for has_ttnn, expected in ((True, 'tt'), (False, 'cpu')):
        monkeypatch.setattr(model_module, 'find_spec', lambda name, has=has_ttnn: has or None)
        with BEVFusion.from_pretrained(small_artifact) as model:
            assert model.info['backend'] == expected
    monkeypatch.setattr(model_module, 'find_spec', lambda name: True)
    (device_module._NODES / '0').unlink()
    with BEVFusion.from_pretrained(small_artifact) as model:
        assert model.info['backend'] == 'cpu'


@pytest.mark.parametrize('level', [1, 2, 3, 4])
def test_a_frame_over_the_largest_bucket_names_the_level(fake, level):
    _, network = small_config()
    caps = [256_000, 108_864, 14_256, 1_620]
    caps[level - 1] = 100
    layouts = [TableLayout.of(network, tuple(c)) for c in ((50, 50, 50, 50), caps)]
    stagings = backend_module.queue.SimpleQueue()
    stagings.put(object())
    inputs = backend_module.TtInputs(network, layouts, stagings)
    voxels = Voxelizer(grid_of(network))(np.pad(cloud(), ((0, 0), (0, 1))))
    with pytest.raises(CapacityError, match=rf'^level {level}: found \d+ active rows, expected at '
                                            'most 100$'):
        inputs.fill(voxels, StageClock())
    inputs.discard()
    assert stagings.qsize() == 1


# ---- a card that hangs ----

@pytest.fixture
def hanging(fake, load):
    """Return a function that loads a model whose card stops answering after a frame."""
    models, answers = [], threading.Event()

    def load_hanging(**options):
        models.append(load(timeout_s=0.3, **options))
        models[-1](cloud())
        fake.blocks['synchronize_device'] = answers
        return models[-1]

    yield load_hanging
    for model in models:
        model.close()
    assert fake.open_devices
    answers.set()
    deadline_s = time.monotonic() + 10
    while fake.open_devices and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not fake.open_devices  # its thread came back and has put everything away


@pytest.mark.parametrize('pipeline', PIPELINES)
def test_a_card_that_hangs_is_given_up_and_frames_are_refused_at_once(hanging, pipeline):
    model = hanging(pipeline=pipeline)
    begin_s = time.monotonic()
    results = [model.submit(cloud(0, seed)) for seed in range(1 + min(pipeline, 1))]
    for result in results:
        with pytest.raises(DeviceError, match='^device 0: (lost, )?run did not return within '
                                              '0.3 s$'):
            result.result(10)
    assert 0.3 <= time.monotonic() - begin_s < 3
    for _ in range(4):  # more than there are buffers
        begin_s = time.monotonic()
        with pytest.raises(DeviceError, match='^device 0: lost, run did not return'):
            model(cloud())
        assert time.monotonic() - begin_s < 0.3
    begin_s = time.monotonic()
    model.close()
    model.close()
    assert time.monotonic() - begin_s < 3


def test_close_while_a_card_hangs_returns(hanging):
    model = hanging(pipeline=1)
    results = [model.submit(cloud(0, seed)) for seed in range(2)]
    closed = in_thread(model.close)
    closed.join(5)
    assert not closed.is_alive()
    for result in results:
        with pytest.raises(DeviceError):
            result.result(0)


def test_the_node_is_told_of_a_lost_card_by_every_frame_alike(hanging):
    """DeviceError is no InputError: a frame that meets it is a fault, not a refusal."""
    with pytest.raises(DeviceError) as caught:
        hanging()(cloud())
    assert not isinstance(caught.value, InputError) and '\n' not in str(caught.value)


# ---- without a card ----

def test_without_a_card_tt_is_one_line_and_auto_is_the_processor(small_artifact, monkeypatch):
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    if device_nodes():
        pytest.skip('there is a card')
    with pytest.raises(DeviceError) as caught:
        BEVFusion.from_pretrained(small_artifact, backend='tt')
    assert str(caught.value) == (
        'device 0: found no /dev/tenstorrent/*; expected a Tenstorrent card with its kernel '
        'driver (tt-kmd) loaded')
    with BEVFusion.from_pretrained(small_artifact) as model:
        assert model.info['backend'] == 'cpu'


# ---- with ttnn: on the mock, on a card, on the simulator ----

PROGRAM = '''
import functools, json, logging, sys, threading, time, warnings
import numpy as np
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')
warnings.simplefilter('ignore', RuntimeWarning)  # dispatch on Ethernet cores may be refused
if {where!r} == 'mock':
    from tt_perception.runtime.mock import use_mock_p150
    use_mock_p150()
from tt_perception import BEVFusion
from tt_perception.bevfusion import model as model_module
from tt_perception.runtime import device as device_module
from tt_perception.runtime.errors import PerceptionError
if {where!r} == 'simulator':  # small tensors, and time
    model_module.TtBackend = functools.partial(
        model_module.TtBackend, capacities=((512, 512, 512, 512), (1024, 1024, 1024, 1024),
                                            (2048, 2048, 2048, 2048)))
NUM_POINTS = (30, 120, 300) if {where!r} == 'simulator' else {num_points!r}
ARTIFACT = sys.argv[1]

def load(**options):
    if {where!r} == 'simulator':
        options = {{'dispatch': 'worker', 'timeout_s': 3600.0, **options}}
    elif {where!r} == 'mock':
        options = {{'timeout_s': 60.0, **options}}
    return BEVFusion.from_pretrained(ARTIFACT, backend='tt', **options)

def cloud(bucket=0, seed=0):
    low, high = (-12, -12, -2.5), (12, 12, 4.5)
    return np.random.default_rng(seed).uniform(low, high, (NUM_POINTS[bucket], 3)).astype('f4')

def outputs(model, seeds, buckets=3):
    """Return what the network gives for seeded frames of all buckets; None: for nothing."""
    found, forward = [], model.forward
    def keep(prepared):
        found.append(forward(prepared))
        return found[-1]
    model.forward = keep
    for seed in seeds:
        model(cloud(seed % buckets, seed))
    model.forward = forward
    return [[array.tobytes() for array in vars(raw).values()] for raw in found]
'''
WHERE = pytest.mark.parametrize('where', [
    pytest.param('mock', marks=needs_mock),
    pytest.param('card', marks=[needs_card, pytest.mark.device]),
    pytest.param('simulator', marks=[needs_simulator, pytest.mark.simulator])])
WHERE_REAL = pytest.mark.parametrize('where', [
    pytest.param('card', marks=[needs_card, pytest.mark.device]),
    pytest.param('simulator', marks=[needs_simulator, pytest.mark.simulator])])


def environment(where: str) -> dict[str, str]:
    """Return the environment, in which only the simulator keeps the choice of a device."""
    kept = {k: v for k, v in os.environ.items() if where == 'simulator' or k not in CHOICES}
    return {**kept, 'PYTHONPATH': os.pathsep.join([str(ROOT), kept.get('PYTHONPATH', '')]),
            'PYTHONUNBUFFERED': '1'}


def start(where: str, body: str, *arguments, cwd: Path) -> subprocess.Popen:
    """Start a program in an empty folder."""
    program = PROGRAM.format(where=where, num_points=NUM_POINTS) + body
    return subprocess.Popen([sys.executable, '-c', program, *map(str, arguments)], cwd=cwd,
                            env=environment(where), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def run_program(where: str, body: str, *arguments, cwd: Path, timeout_s: float = 900) -> str:
    """Run a program in an empty folder, which stays empty; return what it prints."""
    process = start(where, body, *arguments, cwd=cwd)
    output, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output + errors
    assert not list(cwd.iterdir())
    assert where != 'mock' or not errors
    return output


@needs_mock
def test_the_small_network_runs_on_the_mock(small_artifact, tmp_path):
    """End to end, twice in one process; the numbers mean nothing."""
    output = run_program('mock', '''
for pipeline in (1, 2):
    model = load(pipeline=pipeline)
    results = [model.submit(cloud(bucket)) for bucket in (1, 0, 1)]
    metas = [result.result().meta for result in results]
    variants, forward = [], model.forward
    def keep(prepared):
        variants.append(prepared.inputs.variant)
        return forward(prepared)
    model.forward = keep
    timing_ms = dict([model(cloud(bucket)) for bucket in (0, 1)][0].timing_ms)
    info = model.info
    model.close()
    model.close()
    try:
        model(cloud())
    except PerceptionError as error:
        refusal = str(error)
    print(json.dumps([variants, [m['capacity_bucket'] for m in metas], timing_ms, info, refusal]))
left_open = load(pipeline=1)  # closed when Python exits, after the frames in flight
left_open.warmup()
results = [left_open.submit(cloud()) for _ in range(2)]
results[1].add_done_callback(lambda result: print('last', len(result.result().timing_ms) > 0))
''', small_artifact, cwd=tmp_path)
    found = [json.loads(line) for line in output.splitlines() if line.startswith('[')]
    for pipeline, (variants, buckets, timing_ms, info, refusal) in zip((1, 2), found, strict=True):
        assert variants == ['sparse_0', 'sparse_1'] and buckets == [1, 0, 1]
        assert timing_ms.keys() > DEVICE_STAGES
        assert info['backend'] == 'tt' and info['pipeline'] == pipeline
        assert info['device']['grid'] == [11, 10] and info['device']['dispatch'] == 'worker'
        assert info['capacity_buckets'][1] == [128_000, 108_864, 14_256, 1_620]
        assert info['precision'] and info['trace_bytes'] == {} and info['traced'] is False
        assert refusal == 'BEVFusion: the model is closed'
    assert output.count('compiling dense (4 of 4)') == output.count('device 0: closed') == 3
    assert output.endswith('last True\ndevice 0: closed\n')


@needs_mock
def test_a_network_that_the_kernels_cannot_run_is_refused_by_name(tmp_path):
    network = replace(small_config()[1], hidden_channels=48)
    write_artifact(seeded_network(network), grid_of(network), tmp_path / 'artifact')
    (tmp_path / 'empty').mkdir()
    output = run_program('mock', '''
try:
    load()
except PerceptionError as error:
    print(type(error).__name__, error)
''', tmp_path / 'artifact', cwd=tmp_path / 'empty')
    assert 'ConfigError hidden_channels: found 48, backend tt expects a multiple of 32\n' in output
    assert output.count('device 0: closed') == 1


@needs_mock
def test_the_full_network_runs_in_every_bucket_on_the_mock(tmp_path):
    output = run_program('mock', '''
from tt_perception.bevfusion.config import BEVFusionConfig
from tt_perception.bevfusion.seeded import seeded_cloud
from tt_perception.bevfusion.tt.backend import DeviceOptions
from tt_perception.check import _random_weights
with BEVFusion(_random_weights(), BEVFusionConfig.from_parameters({}), backend='tt', pipeline=1,
               options=DeviceOptions(timeout_s=60.0)) as model:
    results = [model.submit(seeded_cloud(number)) for number in (100_000, 250_000, 340_000)]
    print(json.dumps([result.result().meta for result in results]))
    low, high = np.reshape(model.config.grid.point_cloud_range, (2, 3))
    scattered = np.random.default_rng(0).uniform(low, high, (200_000, 3)).astype(np.float32)
    try:
        model(scattered)
    except PerceptionError as error:
        print(type(error).__name__, error)
    print(len(model(seeded_cloud(50_000)).timing_ms))
''', 'no artifact', cwd=tmp_path)
    lines = output.splitlines()
    metas = json.loads(next(line for line in lines if line.startswith('[')))
    assert [meta['capacity_bucket'] for meta in metas] == [0, 1, 2]
    assert any(line.startswith('CapacityError level 2: found ') for line in lines)


@WHERE
def test_ctrl_c_leaves_the_card_closed_and_usable(small_artifact, tmp_path, where):
    for during in ('compiling sparse_1', 'replaying'):  # the second finds what the first has left
        process = start(where, '''
with load(pipeline=1) as model:
    print('replaying')
    while True:
        results = [model.submit(cloud()) for _ in range(2)]
        results[0].result()
''', small_artifact, cwd=tmp_path)
        while during not in (line := process.stdout.readline()):
            assert line or process.poll() is None, process.stderr.read()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGINT
        assert output.count('device 0: closed') == 1 and errors.endswith('KeyboardInterrupt\n')
    output = run_program(where, '''
with load() as model:
    model(cloud())
''', small_artifact, cwd=tmp_path)
    assert output.count('device 0: closed') == 1


@WHERE_REAL
def test_replays_equal_an_eager_run_bit_for_bit(small_artifact, tmp_path, where):
    output = run_program(where, f'''
found = []
for traced in (False, True):
    device_module.can_trace = lambda traced=traced: traced
    with load(pipeline=1) as model:
        assert model.info['traced'] is traced
        found.append(outputs(model, range({200 if where == 'card' else 3})))
eager, replayed = found
assert len(set(map(str, eager))) == len(eager)
for i, (a, b) in enumerate(zip(eager, replayed, strict=True)):
    assert a == b, i
print('equal')
''', small_artifact, cwd=tmp_path, timeout_s=3600)
    assert 'equal\n' in output and 'capturing dense (4 of 4)' in output


@WHERE_REAL
def test_closed_and_opened_again_it_gives_the_same_bits(small_artifact, tmp_path, where):
    run_program(where, f'''
found = []
for _ in range(2):
    with load() as model:
        found.append(outputs(model, range({6 if where == 'card' else 1})))
assert found[0] == found[1]
''', small_artifact, cwd=tmp_path, timeout_s=3600)


@pytest.mark.device
@pytest.mark.skipif(len(device_nodes()) < 2, reason='fewer than two cards in /dev/tenstorrent')
def test_two_processes_on_two_cards_give_the_same_bits(small_artifact, tmp_path):
    body = '''
import hashlib
with load(device_id=int(sys.argv[2])) as model:
    print('outputs', hashlib.sha256(repr(outputs(model, range(12))).encode()).hexdigest())
'''
    processes = [start('card', body, small_artifact, i, cwd=tmp_path) for i in range(2)]
    found = set()
    for process in processes:
        output, errors = process.communicate(timeout=900)
        assert process.returncode == 0, output + errors
        found.add(next(line for line in output.splitlines() if line.startswith('outputs')))
    assert len(found) == 1
