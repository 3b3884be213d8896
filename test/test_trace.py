# SPDX-License-Identifier: Apache-2.0
"""Warm up, capture, write, replay, read; and what is left when any of it fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from fake_ttnn import FakeTtnn, TinyNetwork

from tt_perception.runtime import device as device_module
from tt_perception.runtime.device import Device, device_nodes
from tt_perception.runtime.errors import ConfigError, DeviceError
from tt_perception.runtime.trace import State, TraceRunner

ROOT = Path(__file__).resolve().parents[1]

needs_card = pytest.mark.skipif(not device_nodes(), reason='no card: /dev/tenstorrent is missing')
needs_simulator = pytest.mark.skipif(
    'TT_METAL_SIMULATOR' not in os.environ or 'TT_METAL_SLOW_DISPATCH_MODE' in os.environ,
    reason='no simulator with fast dispatch: TT_METAL_SIMULATOR is not set, or '
           'TT_METAL_SLOW_DISPATCH_MODE is')


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / '0').touch()
    monkeypatch.setattr(device_module, '_NODES', tmp_path)
    monkeypatch.setattr(device_module, '_SYSFS', tmp_path / 'none')
    for name in ('TT_METAL_MOCK_CLUSTER_DESC_PATH', 'TT_METAL_SIMULATOR',
                 'TT_METAL_SLOW_DISPATCH_MODE'):
        monkeypatch.delenv(name, raising=False)
    return FakeTtnn(eth=True).install(monkeypatch)


@pytest.fixture
def device(fake):
    with Device(trace_region_size=1 << 20, close_timeout_s=10) as device:
        yield device


def runner_of(fake, device, traced=True, **arguments):
    network = TinyNetwork(fake, **{k: arguments.pop(k) for k in ('fails', 'error')
                                   if k in arguments})
    return TraceRunner(network, device, traced=traced, timeout_s=10, **arguments), network


def host(fake, rows, value):
    return fake.from_torch(torch.full((rows, 4), float(value)))


# ---- the way it should go ----

def test_all_variants_are_compiled_before_the_first_capture(fake, device):
    progress = []
    fake.calls.clear()
    runner, _ = runner_of(fake, device, on_progress=progress.append)
    assert runner.prepare() is runner
    step = ['double', 'allocate', 'double', 'allocate']
    capture = ['begin_trace_capture', *step, 'end_trace_capture']
    assert fake.calls == ['allocate', 'allocate', *2 * [*step, 'synchronize_device'], *2 * capture]
    assert progress == ['compiling small (1 of 2)', 'compiling large (2 of 2)',
                        'capturing small (1 of 2)', 'capturing large (2 of 2)']


def test_without_traces_nothing_is_captured_and_the_calls_are_the_same(fake, device):
    numbers = []
    for traced in (True, False):
        fake.calls.clear()
        runner, _ = runner_of(fake, device, traced)
        runner.prepare()
        numbers.append(runner.run('large', {'x': host(fake, 4, 3)}))
        assert ('begin_trace_capture' in fake.calls) is traced
        assert ('execute_trace' in fake.calls) is traced
        runner.release()
    for name, factor in (('y', 2), ('z', 4)):
        assert all((n[name] == factor * 3).all() for n in numbers)


@pytest.mark.parametrize('traced', [True, False])
def test_a_frame_writes_replays_and_reads_and_allocates_nothing(fake, device, traced):
    runner, _ = runner_of(fake, device, traced)
    runner.prepare()
    results = []
    for frame in range(3):
        before = device.call(lambda: device.handle.tensors)
        fake.calls.clear()
        runner.write('small', {'x': host(fake, 2, frame)})
        runner.replay('small')
        results.append(runner.read('small'))
        replay = ['execute_trace'] if traced else ['double', 'allocate'] * 2
        assert fake.calls == ['write', *replay, 'synchronize_device', 'read', 'read',
                              'synchronize_device']
        if frame or traced:
            assert device.call(lambda: device.handle.tensors) == before
    assert [float(r['z'][0, 0]) for r in results] == [0, 4, 8]  # each read is a copy of its own


def test_one_output_is_read_as_one_tensor(fake, device):
    runner, network = runner_of(fake, device)
    network.forward = lambda variant, keep: fake.double(network.x[variant])
    runner.prepare()
    assert (runner.run('small', {'x': host(fake, 2, 1)}) == 2).all()


def test_inputs_that_are_not_written_keep_their_content(fake, device):
    runner, _ = runner_of(fake, device)
    runner.prepare()
    runner.run('small', {'x': host(fake, 2, 7)})
    assert (runner.run('small', {})['y'] == 14).all()


def test_its_info_is_plain_values(fake, device):
    runner, _ = runner_of(fake, device)
    assert runner.info == {'state': 'new', 'traced': True, 'variants': ['small', 'large'],
                           'trace_region_size': 1 << 20, 'trace_bytes': {}}
    runner.prepare()
    assert runner.info['state'] == 'captured'
    assert runner.info['trace_bytes'] == {'small': 8192, 'large': 8192}


def test_ttnn_is_called_from_the_devices_thread_only(fake, device):
    runner, _ = runner_of(fake, device)
    runner.prepare()
    fake.threads.clear()
    threads = [threading.Thread(target=runner.run, args=('small', {})) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    runner.release()
    assert len(fake.threads) == 1
    assert fake.threads != {threading.get_ident()}


# ---- what is refused ----

def test_nothing_is_allocated_once_a_trace_is_captured(fake, device):
    runner, _ = runner_of(fake, device)
    assert runner.allocate(lambda handle: handle) is fake.devices[0]
    runner.prepare()
    with pytest.raises(DeviceError, match=(
            '^device 0: nothing can be allocated, found captured, expected new or warm; a replay '
            'would overwrite it$')):
        runner.allocate(lambda handle: fake.from_torch(torch.zeros(1), device=handle))


def test_a_program_that_is_compiled_during_capture_is_an_error_with_the_variants_name(
        fake, device):
    runner, network = runner_of(fake, device)
    network.new_program_in_capture = True
    with pytest.raises(DeviceError, match='capturing small: a program was compiled that'):
        runner.prepare()
    assert not fake.devices[0].traces


def test_calls_in_the_wrong_state(fake, device):
    runner, _ = runner_of(fake, device)
    for call in (lambda: runner.replay('small'), lambda: runner.read('small'),
                 lambda: runner.write('small', {})):
        with pytest.raises(DeviceError, match='found a runner that is new, expected captured'):
            call()
    runner.prepare()
    with pytest.raises(DeviceError, match='is captured, expected new'):
        runner.prepare()
    assert runner.state is State.CAPTURED  # the second attempt has done no harm
    runner.run('small', {})
    runner.release()
    with pytest.raises(DeviceError, match='is released, expected captured'):
        runner.replay('small')
    with pytest.raises(DeviceError, match='is released, expected new'):
        runner.prepare()


def test_outputs_of_another_variant_are_not_read(fake, device):
    runner, _ = runner_of(fake, device)
    runner.prepare()
    with pytest.raises(DeviceError, match='reading small: found outputs of nothing'):
        runner.read('small')
    runner.replay('large')
    with pytest.raises(DeviceError, match='reading small: found outputs of large'):
        runner.read('small')


def test_names_that_the_model_does_not_have(fake, device):
    runner, _ = runner_of(fake, device)
    runner.prepare()
    with pytest.raises(ConfigError, match="variant: found 'huge', expected one of small, large"):
        runner.replay('huge')
    with pytest.raises(ConfigError, match='small: found a, b, expected names among x'):
        runner.write('small', {'b': None, 'a': None, 'x': host(fake, 2, 0)})


@pytest.mark.parametrize('name', ['TT_METAL_MOCK_CLUSTER_DESC_PATH',
                                  'TT_METAL_SLOW_DISPATCH_MODE'])
def test_traces_where_there_are_none(fake, monkeypatch, name):
    monkeypatch.setenv(name, '1')
    with Device() as device:
        with pytest.raises(ConfigError, match='traced: found True, expected False'):
            runner_of(fake, device)
        runner_of(fake, device, traced=False)[0].prepare()


# ---- errors ----

@pytest.mark.parametrize('fails', ['allocate', 'compiling', 'capturing'])
def test_an_error_in_the_graph_releases_everything(fake, device, fails):
    runner, network = runner_of(fake, device, fails=fails)
    where = 'allocating' if fails == 'allocate' else f'{fails} large'
    with pytest.raises(DeviceError, match=f'^device 0: {where} failed: no space$') as caught:
        runner.prepare()
    assert runner.state is State.RELEASED
    assert network.releases == 1
    assert not fake.devices[0].traces
    assert fake.devices[0].capturing is None
    assert fake.devices[0].tensors == 0, 'the error keeps tensors alive'
    assert caught.value.__cause__ is network.error
    # The device is as good as new.
    runner_of(fake, device)[0].prepare().run('small', {})
    device.close()
    assert not fake.open_devices


@pytest.mark.parametrize('error', [TypeError('a bug'), KeyboardInterrupt(), DeviceError('known')])
def test_errors_that_are_not_ttnns_are_not_renamed(fake, device, error):
    runner, network = runner_of(fake, device, fails='capturing', error=error)
    with pytest.raises(type(error)) as caught:
        runner.prepare()
    assert caught.value is error
    assert network.releases == 1
    assert fake.devices[0].tensors == 0


@pytest.mark.parametrize('call', ['begin_trace_capture', 'end_trace_capture',
                                  'synchronize_device'])
def test_an_error_of_ttnn_while_preparing_releases_everything(fake, device, call):
    runner, network = runner_of(fake, device)
    fake.fails[call] = RuntimeError('only 1024B is allocated for trace region.')
    with pytest.raises(DeviceError, match='(compiling|capturing) small failed: only 1024B'):
        runner.prepare()
    assert network.releases == 1
    assert fake.devices[0].tensors == 0


@pytest.mark.parametrize(('call', 'doing'), [
    ('write', 'writing'), ('execute_trace', 'replaying'), ('synchronize_device', 'replaying'),
    ('read', 'reading')])
def test_an_error_in_a_frame_says_where_and_the_next_frame_runs(fake, device, call, doing):
    runner, _ = runner_of(fake, device)
    runner.prepare()
    fake.fails[call] = RuntimeError('TT_THROW @ f.cpp:1: x\ninfo:\nTIMEOUT: hang\nbacktrace:\n')
    with pytest.raises(DeviceError, match=f'^device 0: {doing} small failed: TIMEOUT: hang$'):
        runner.run('small', {'x': host(fake, 2, 1)})
    fake.fails.clear()
    assert (runner.run('small', {'x': host(fake, 2, 1)})['y'] == 2).all()


def test_an_error_in_the_progress_report_releases_everything(fake, device):
    runner, network = runner_of(fake, device, on_progress=lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.prepare()
    assert network.releases == 1


# ---- release and close ----

def test_release_frees_everything_once(fake, device):
    runner, network = runner_of(fake, device)
    runner.prepare()
    runner.run('small', {})
    runner.release()
    runner.release()
    assert network.releases == 1
    assert fake.devices[0].tensors == 0
    assert fake.calls.count('release_trace') == 2
    device.close()
    runner.release()
    assert network.releases == 1


def test_closing_the_device_releases_the_traces_first(fake, device):
    runner, network = runner_of(fake, device)
    runner.prepare()
    device.close()
    assert fake.calls[-3:] == ['release_trace', 'release_trace', 'close_device']
    assert network.releases == 1
    assert runner.state is State.RELEASED
    with pytest.raises(DeviceError, match='device 0: closed'):
        runner.run('small', {})


def test_one_trace_that_cannot_be_released_does_not_keep_the_rest(fake, device, caplog):
    runner, network = runner_of(fake, device)
    runner.prepare()
    fake.devices[0].traces.clear()  # so that the fake's own check at close is content
    fake.fails['release_trace'] = RuntimeError('gone')
    runner.release()
    assert network.releases == 1
    assert caplog.text.count('gone') == 2


def test_a_released_runner_is_not_kept_alive(fake, device):
    runner, _ = runner_of(fake, device)
    runner.prepare()
    runner.release()
    alive = weakref.ref(runner)
    del runner
    gc.collect()
    assert alive() is None


def test_a_replay_that_never_returns(fake, device, caplog):
    runner, network = runner_of(fake, device)
    runner._timeout_s = 0.2
    runner.prepare()
    fake.blocks['synchronize_device'] = threading.Event()
    begin_s = time.monotonic()
    with pytest.raises(DeviceError, match='^device 0: replay did not return within 0.2 s$'):
        runner.replay('small')
    assert device.lost
    with pytest.raises(DeviceError, match='device 0: lost'):
        runner.run('small', {})
    runner.release()
    device.close()
    assert time.monotonic() - begin_s < 5
    assert 'left behind in replay' in caplog.text
    assert network.releases == 0  # its thread may still be using it all
    fake.blocks['synchronize_device'].set()  # it comes back: everything is put away after all
    until_s = time.monotonic() + 10
    while fake.open_devices and time.monotonic() < until_s:
        time.sleep(0.01)
    assert fake.calls[-3:] == ['release_trace', 'release_trace', 'close_device']
    assert network.releases == 1


def test_close_during_a_replay_waits_for_it(fake, device):
    runner, _ = runner_of(fake, device)
    runner.prepare()
    fake.blocks['synchronize_device'] = threading.Event()
    errors = []

    def frame():
        try:
            runner.replay('small')
        except DeviceError as error:
            errors.append(error)

    thread = threading.Thread(target=frame)
    thread.start()
    assert fake.entered.wait(10)
    threading.Timer(0.1, fake.blocks['synchronize_device'].set).start()
    device.close()
    thread.join(10)
    assert not errors
    assert fake.calls[-4:] == ['synchronize_device', 'release_trace', 'release_trace',
                               'close_device']


def test_ctrl_c_while_compiling_ends_soon_and_leaves_nothing(fake, device):
    runner, network = runner_of(fake, device)
    network.seconds = 60.0
    begin_s = time.monotonic()
    threading.Timer(0.2, signal.pthread_kill,
                    (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        runner.prepare()
    assert time.monotonic() - begin_s < 10
    assert network.releases == 1
    assert fake.devices[0].tensors == 0
    device.close()
    assert not fake.open_devices


def test_release_in_another_thread_ends_a_preparation(fake, device):
    runner, network = runner_of(fake, device)
    network.seconds = 60.0
    threading.Timer(0.1, runner.release).start()
    with pytest.raises(DeviceError, match='cancelled'):
        runner.prepare()
    assert network.releases == 1


def test_whoever_loads_can_cancel(fake, device):
    asked = []
    runner = TraceRunner(TinyNetwork(fake), device, traced=True, timeout_s=10,
                         is_cancelled=lambda: asked.append(0) or len(asked) > 3)
    runner._model.seconds = 60.0
    with pytest.raises(DeviceError, match='^device 0: cancelled$'):
        runner.prepare()
    assert len(asked) == 4
    assert runner._model.releases == 1


# ---- on a card, or on the Blackhole functional simulator (tenstorrent/ttsim) ----

PROGRAM = '''
import os, sys, threading, time
import torch
from tt_perception.runtime.device import Device, load_ttnn
from tt_perception.runtime.staging import HostBuffer
from tt_perception.runtime.trace import TraceRunner
ttnn = load_ttnn()

class Tiny:
    """relu(x W) for two numbers of rows, and 2 x."""

    rows = {'small': 32, 'large': 64}

    def variants(self):
        return list(self.rows)

    def allocate(self, device):
        torch.manual_seed(0)
        self.weight = torch.randn(64, 64).bfloat16()
        self.w = ttnn.from_torch(self.weight, layout=ttnn.TILE_LAYOUT, device=device)
        self.x = {name: ttnn.from_torch(torch.zeros(rows, 64).bfloat16(),
                                        layout=ttnn.ROW_MAJOR_LAYOUT, device=device)
                  for name, rows in self.rows.items()}

    def inputs(self, variant):
        return {'x': self.x[variant]}

    def forward(self, variant, keep):
        x = ttnn.to_layout(self.x[variant], ttnn.TILE_LAYOUT)
        return {'y': ttnn.relu(ttnn.matmul(x, self.w)), 'twice': ttnn.add(x, x)}

    def release(self):
        self.w = self.x = None

def opened(**arguments):
    return Device(dispatch='worker', trace_region_size=1 << 20, **arguments)

def prepared(device, traced):
    return TraceRunner(Tiny(), device, traced=traced, timeout_s=60, on_progress=print).prepare()

def buffers(device, runner):
    return {name: device.call(lambda: HostBuffer.like(runner._model.inputs(name)['x']))
            for name in runner.variants}
'''


def run_program(body: str, timeout: float = 300.0) -> str:
    done = subprocess.run([sys.executable, '-W', 'error::RuntimeWarning', '-c', PROGRAM + body],
                          cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FRAMES = '''
frames = int({frames})
with opened() as device:
    eager = {{}}
    for traced in (False, True):
        runner = prepared(device, traced)
        hosts = buffers(device, runner)
        for i in range(frames):
            name = runner.variants[i % 2]
            torch.manual_seed(1000 + i)
            x = torch.randn(runner._model.rows[name], 64)
            hosts[name].torch.copy_(x)
            out = runner.run(name, {{'x': hosts[name]}})
            assert torch.equal(out['twice'], 2 * x.bfloat16()), (traced, i)
            want = torch.relu(x.bfloat16().float() @ runner._model.weight.float())
            assert (out['y'].float() - want).abs().max() < 0.5, (traced, i)
            if traced:
                assert torch.equal(out['y'], eager[i]), i
            else:
                eager[i] = out['y']
        if traced:
            assert min(runner.info['trace_bytes'].values()) > 0
            late = device.call(lambda: ttnn.from_torch(torch.zeros(32, 32), device=device.handle))
            try:
                runner.replay('small')
            except Exception as error:
                assert 'still alive before trace replay' in str(error), error
            else:
                raise AssertionError('a late tensor was not noticed')
            del late
            runner.replay('small')
        del hosts
        runner.release()
'''


@pytest.mark.simulator
@needs_simulator
def test_a_network_is_captured_and_replayed_on_the_simulator():
    output = run_program(FRAMES.format(frames=6))
    assert 'capturing large (2 of 2)' in output


@pytest.mark.device
@needs_card
def test_replays_equal_runs_without_a_trace_over_200_frames():
    run_program(FRAMES.format(frames=200))


@pytest.mark.device
@needs_card
def test_a_card_is_opened_prepared_and_closed_again_and_again():
    run_program('''
for _ in range(3):
    with opened() as device:
        prepared(device, True).run('small', {})
''')


@pytest.mark.device
@needs_card
@pytest.mark.parametrize('during', ['compiling', 'replaying'])
def test_ctrl_c_leaves_the_card_closed_and_usable(during):
    process = subprocess.Popen([sys.executable, '-c', PROGRAM + '''
import logging
logging.basicConfig(level=logging.INFO)
with opened() as device:
    runner = prepared(device, True)
    print('replaying', flush=True)
    while True:
        runner.run('small', {})
'''], cwd=ROOT, env=os.environ | {'PYTHONUNBUFFERED': '1'}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while during not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT
    assert errors.count('device 0: closed') == 1
    run_program('''
with opened() as device:
    prepared(device, True).run('small', {})
''')
