# SPDX-License-Identifier: Apache-2.0
"""The mock p150: how it is prepared, and that the runtime works on it with the real ttnn."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tt_perception.runtime import mock
from tt_perception.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ('riscv64-unknown-elf-as', 'riscv64-unknown-elf-ld')

needs_mock = pytest.mark.skipif(
    importlib.util.find_spec('ttnn') is None or not all(map(shutil.which, TOOLS)),
    reason='the mock device needs ttnn (Python 3.10 or 3.12) and the Debian or Ubuntu package '
           'binutils-riscv64-unknown-elf')


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """Leave no choice of a device to the environment of the tests."""
    for name in ('TT_METAL_SIMULATOR', 'TT_METAL_MOCK_CLUSTER_DESC_PATH', 'TT_VISIBLE_DEVICES',
                 'TT_METAL_RUNTIME_ROOT', 'TT_METAL_CACHE', 'TT_METAL_SLOW_DISPATCH_MODE'):
        monkeypatch.delenv(name, raising=False)


# ---- without ttnn ----

@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """As much of an installed ttnn as the preparation looks at, and tools that do nothing."""
    package = tmp_path / 'site' / 'ttnn'
    (package / 'runtime' / 'hw').mkdir(parents=True)
    (package / 'tt_metal' / 'pre-compiled' / '1').mkdir(parents=True)
    (package / '__init__.py').touch()
    image = package / 'tt_metal' / 'pre-compiled' / '1' / 'brisc.elf'
    image.write_bytes(b'\x7fELF..GCC: (tenstorrent/sfpi:7.1.0) 15.1.0\x00..')
    tools = tmp_path / 'tools'
    tools.mkdir()
    for name in TOOLS:
        (tools / name).write_text('#!/bin/sh\nexit 0\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{tools}:/usr/bin:/bin')
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, 'ttnn', raising=False)
    return package


def test_the_preparation_is_laid_once_and_does_not_touch_the_wheel(wheel, tmp_path):
    before = sorted(wheel.rglob('*'))
    cache = tmp_path / 'cache'
    first = mock.environment(cache)
    root = Path(first['TT_METAL_RUNTIME_ROOT'])
    compiler = root / 'runtime/sfpi/compiler/bin/riscv-tt-elf-g++'
    made = compiler.stat().st_mtime_ns
    assert mock.environment(cache) == first
    assert compiler.stat().st_mtime_ns == made
    assert sorted(wheel.rglob('*')) == before
    assert (root / 'runtime' / 'hw').resolve() == wheel / 'runtime' / 'hw'
    assert (root / 'tt_metal').resolve() == wheel / 'tt_metal'
    assert Path(first['TT_METAL_MOCK_CLUSTER_DESC_PATH']).is_file()
    assert not Path(first['TT_METAL_CACHE']).is_relative_to(root)
    assert not [path for path in cache.iterdir() if path.name.startswith('.laying')]


def test_the_stand_in_answers_as_the_compiler_of_the_wheel(wheel, tmp_path):
    root = Path(mock.environment(tmp_path / 'a cache')['TT_METAL_RUNTIME_ROOT'])
    compiler = root / 'runtime/sfpi/compiler/bin/riscv-tt-elf-g++'
    version = subprocess.run([compiler, '--version'], capture_output=True, text=True, check=True)
    assert version.stdout == 'riscv-tt-elf-g++ (tenstorrent/sfpi:7.1.0) 15.1.0\n'
    out, depends = tmp_path / 'x.o', tmp_path / 'x.d'
    subprocess.run([compiler, '-c', 'x.cc', '-MF', depends, '-o', out], check=True)
    assert out.read_bytes() == b''
    assert depends.read_text() == f'{out}:\n'


def test_another_wheel_gets_a_preparation_of_its_own(wheel, tmp_path, monkeypatch):
    one = mock.environment(tmp_path / 'cache')
    monkeypatch.setattr(mock.importlib.metadata, 'version', lambda name: '9.9')
    other = mock.environment(tmp_path / 'cache')
    assert one['TT_METAL_RUNTIME_ROOT'] != other['TT_METAL_RUNTIME_ROOT']
    assert one['TT_METAL_CACHE'] != other['TT_METAL_CACHE']


def test_what_is_there_already_is_not_a_failure(wheel, tmp_path, monkeypatch):
    cache = tmp_path / 'cache'
    rename = Path.rename

    def rename_after_another(new, place):
        shutil.copytree(new, place, symlinks=True)  # as another process would have done
        (place / 'theirs').touch()
        return rename(new, place)

    monkeypatch.setattr(Path, 'rename', rename_after_another)
    place = Path(mock.environment(cache)['TT_METAL_RUNTIME_ROOT']).parent
    assert (place / 'theirs').exists()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize('tool', TOOLS)
def test_missing_tools_are_named_with_their_package(wheel, tmp_path, monkeypatch, tool):
    (tmp_path / 'tools' / tool).unlink()
    monkeypatch.setenv('PATH', str(tmp_path / 'tools'))
    with pytest.raises(ConfigError, match=(
            rf'^mock p150: {tool} not found, expected it on the PATH; install the Debian or '
            r'Ubuntu package binutils-riscv64-unknown-elf$')):
        mock.environment(tmp_path / 'cache')


def test_ttnn_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(mock.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match='mock p150: ttnn is not installed for Python 3'):
        mock.environment(tmp_path)


def test_ttnn_that_was_imported_before(wheel, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ttnn', object())
    with pytest.raises(ConfigError, match='found ttnn already imported'):
        mock.use_mock_p150(tmp_path)


def test_a_simulator_that_is_selected(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv('TT_METAL_SIMULATOR', 'x.so')
    with pytest.raises(ConfigError, match='found TT_METAL_SIMULATOR set, expected it unset'):
        mock.environment(tmp_path)


def test_a_wheel_of_another_make(wheel, tmp_path):
    next(wheel.rglob('brisc.elf')).write_bytes(b'nothing')
    with pytest.raises(ConfigError, match='names its compiler'):
        mock.environment(tmp_path / 'cache')
    assert not list((tmp_path / 'cache').iterdir())


# ---- with ttnn ----

PROGRAM = '''
import torch
from tt_perception.runtime.mock import use_mock_p150
use_mock_p150()
from tt_perception.runtime.device import Device, load_ttnn
from tt_perception.runtime.errors import PerceptionError
from tt_perception.runtime.staging import HostBuffer
from tt_perception.runtime.trace import TraceRunner
'''


def run_program(tmp_path: Path, body: str, *, is_quiet: bool = True) -> str:
    """Run a program in an empty folder, which must stay empty; return what it prints.

    :param is_quiet: nothing may be written to stderr.
    """
    folder = tmp_path / 'working'
    folder.mkdir()
    done = subprocess.run([sys.executable, '-c', PROGRAM + body], cwd=folder, timeout=300,
                          env=os.environ | {'PYTHONPATH': str(ROOT)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir())
    assert not (is_quiet and done.stderr)
    return done.stdout


@needs_mock
def test_a_mock_opens_closes_and_opens_again_in_silence(tmp_path):
    assert run_program(tmp_path, '''
for _ in range(3):
    with Device(dispatch='worker') as device:
        print(device.info['arch'], *device.info['grid'], device.info['dispatch'])
''') == 3 * 'blackhole 11 10 worker\n'


@needs_mock
def test_ethernet_dispatch_is_refused_and_auto_falls_back(tmp_path):
    output = run_program(tmp_path, '''
import warnings
try:
    Device(dispatch='eth')
except PerceptionError as error:
    print(error)
with warnings.catch_warnings(record=True) as caught:
    with Device() as device:
        print(device.info['dispatch'], len(caught), caught[0].message)
try:
    Device(7)
except PerceptionError as error:
    print(error)
''').splitlines()
    assert output[0].startswith('device 0: dispatch on Ethernet cores is refused, ')
    assert output[1].startswith('worker 1 device 0: dispatch on Ethernet cores is refused')
    assert output[1].endswith('; worker cores are used, with a grid of 11x10 cores')
    assert output[2] == ('device 7: found an emulated one, expected one of the devices that ttnn '
                         'sees (id 0)')


@needs_mock
def test_a_network_runs_without_a_trace(tmp_path):
    output = run_program(tmp_path, '''
ttnn = load_ttnn()

class Network:
    def variants(self):
        return ['only']

    def allocate(self, device):
        self.w = ttnn.from_torch(torch.zeros(64, 96), layout=ttnn.TILE_LAYOUT, device=device)
        self.x = ttnn.from_torch(torch.zeros(32, 64), device=device)

    def inputs(self, variant):
        return {'x': self.x}

    def forward(self, variant, keep):
        return ttnn.matmul(ttnn.to_layout(self.x, ttnn.TILE_LAYOUT), self.w)

    def release(self):
        self.w = self.x = None

def main():
    with Device(dispatch='worker', l1_small_size=16384) as device:
        network = Network()
        try:
            TraceRunner(network, device, traced=True, timeout_s=60)
        except PerceptionError as error:
            print(error)
        runner = TraceRunner(network, device, traced=False, timeout_s=60, on_progress=print)
        runner.prepare()
        buffer = HostBuffer.like(network.x)
        for _ in range(3):
            print(*runner.run('only', {'x': buffer}).shape)
        print(runner.info)
    print(runner.state)

main()
''')
    assert output.splitlines() == [
        'traced: found True, expected False: the mock device and slow dispatch cannot capture '
        'traces',
        'compiling only (1 of 1)', '32 96', '32 96', '32 96',
        "{'state': 'captured', 'traced': False, 'variants': ['only'], 'trace_region_size': 0, "
        "'trace_bytes': {}}",
        'State.RELEASED']


@needs_mock
@pytest.mark.parametrize('fails', ['allocate', 'forward'])
def test_an_error_of_ttnn_leaves_the_mock_closed_and_says_one_line(tmp_path, fails):
    output = run_program(tmp_path, f'''
ttnn = load_ttnn()

class Network:
    def variants(self):
        return ['only']

    def allocate(self, device):
        shape = (1 << 20, 1 << 20) if {fails == 'allocate'} else (32, 32)
        self.x = ttnn.allocate_tensor_on_device(ttnn.Shape(shape), ttnn.bfloat16,
                                                ttnn.TILE_LAYOUT, device)
        self.y = ttnn.from_torch(torch.zeros(64, 64), layout=ttnn.TILE_LAYOUT, device=device)

    def inputs(self, variant):
        return {{}}

    def forward(self, variant, keep):
        return ttnn.matmul(self.x, self.y)

    def release(self):
        self.x = self.y = None

def main():
    for _ in range(2):
        with Device(dispatch='worker') as device:
            try:
                TraceRunner(Network(), device, traced=False, timeout_s=60).prepare()
            except PerceptionError as error:
                print(type(error).__name__, error)

main()
''', is_quiet=False)  # ttnn itself reports its failed assertions
    lines = [line for line in output.splitlines() if line.startswith('DeviceError')]
    doing = 'allocating' if fails == 'allocate' else 'compiling only'
    assert len(lines) == 2
    assert all(line.startswith(f'DeviceError device 0: {doing} failed: ') for line in lines)


@needs_mock
def test_ctrl_c_while_compiling_closes_the_mock(tmp_path):
    program = PROGRAM + '''
import logging
logging.basicConfig(level=logging.INFO)
ttnn = load_ttnn()

class Network:
    def variants(self):
        return ['only']

    def allocate(self, device):
        self.x = ttnn.from_torch(torch.zeros(32, 32), layout=ttnn.TILE_LAYOUT, device=device)

    def inputs(self, variant):
        return {}

    def forward(self, variant, keep):
        print('running', flush=True)
        while True:
            keep('sum', ttnn.add(self.x, self.x))

    def release(self):
        self.x = None
        print('released', flush=True)

def main():
    with Device(dispatch='worker') as device:
        TraceRunner(Network(), device, traced=False, timeout_s=60).prepare()

main()
'''
    process = subprocess.Popen([sys.executable, '-c', program], cwd=tmp_path, text=True,
                               env=os.environ | {'PYTHONPATH': str(ROOT)},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == 'running\n', process.stderr.read()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert output == 'released\n'
    assert errors.count('device 0: closed') == 1
    assert errors.endswith('KeyboardInterrupt\n')


@needs_mock
def test_staging_memory_is_shared_with_the_host_tensor(tmp_path):
    run_program(tmp_path, '''
import gc
import numpy as np
ttnn = load_ttnn()
for dtype in ('bfloat16', 'float32', 'uint32', 'int32', 'uint16', 'uint8'):
    buffer = HostBuffer((3, 40), dtype)
    assert buffer.array.shape == tuple(buffer.torch.shape) == tuple(buffer.tensor.shape) == (3, 40)
    assert buffer.tensor.layout == ttnn.ROW_MAJOR_LAYOUT
    assert buffer.tensor.dtype == getattr(ttnn, dtype)
    assert not buffer.array.any()
    for value in (1, 200):
        buffer.torch.copy_(torch.full((3, 40), value))
        assert (buffer.tensor.to_torch().float() == value).all()
        bits = torch.tensor([value]).to(buffer.torch.dtype).view(torch.uint8).numpy()
        assert (buffer.array.reshape(-1)[0:1].view(np.uint8) == bits).all()
    buffer.array[1, 5] = 0
    assert buffer.tensor.to_torch().float().count_nonzero() == 119
    array = buffer.array
    del buffer
    gc.collect()
    assert np.count_nonzero(array) == 119
    del array
''')


@needs_mock
def test_several_processes_prepare_the_mock_at_once(tmp_path):
    program = ('from tt_perception.runtime.mock import environment; '
               'print(environment()["TT_METAL_RUNTIME_ROOT"])')
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'XDG_CACHE_HOME': str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, '-c', program], env=environment, cwd=tmp_path,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for _ in range(4)]
    roots = {process.communicate(timeout=60)[0] for process in processes}
    assert len(roots) == 1
    root = Path(roots.pop().strip())
    assert (root / 'runtime/sfpi/compiler/bin/stub_kernel.o').is_file()
    assert list(root.parent.parent.iterdir()) == [root.parent]
