# SPDX-License-Identifier: Apache-2.0
"""Opening and closing a device: which one, with which cores, and closed on every way out."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from fake_ttnn import FakeTtnn

from tt_perception.runtime import device as device_module
from tt_perception.runtime.device import (
    Device,
    device_nodes,
    load_ttnn,
    one_line,
    ttnn_environment,
)
from tt_perception.runtime.errors import ConfigError, DeviceError

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = ['0000:01:00.0', '0000:41:00.0', '0001:02:00.0']

needs_card = pytest.mark.skipif(not device_nodes(), reason='no card: /dev/tenstorrent is missing')


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with two cards, as far as device files go."""
    nodes, sysfs, temporary = (tmp_path / name for name in ('dev', 'sys', 'tmp'))
    for folder in (nodes, sysfs, temporary):
        folder.mkdir()
    for i, address in enumerate(ADDRESSES[:2]):
        (nodes / str(i)).touch()
        (tmp_path / address).mkdir()
        (sysfs / f'tenstorrent!{i}').mkdir()
        (sysfs / f'tenstorrent!{i}' / 'device').symlink_to(tmp_path / address)
    monkeypatch.setattr(device_module, '_NODES', nodes)
    monkeypatch.setattr(device_module, '_SYSFS', sysfs)
    monkeypatch.setattr(device_module.tempfile, 'gettempdir', lambda: str(temporary))
    for name in ('TT_VISIBLE_DEVICES', 'TT_METAL_MOCK_CLUSTER_DESC_PATH', 'TT_METAL_SIMULATOR',
                 'TT_METAL_SLOW_DISPATCH_MODE'):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def fake(machine, monkeypatch):
    return FakeTtnn(eth=True, count=2).install(monkeypatch)


# ---- what is opened ----

def test_it_says_what_it_has_opened_in_plain_values(fake):
    with Device(1, trace_region_size=4096, l1_small_size=64) as device:
        assert device.info == {
            'id': 1, 'arch': 'blackhole', 'grid': (12, 10), 'dispatch': 'eth', 'devices': 2,
            'emulated': False, 'can_trace': True, 'trace_region_size': 4096}
        device.info.clear()
        assert device.info
    assert fake.open_arguments == [{'device_id': 1, 'num_command_queues': 1,
                                    'trace_region_size': 4096, 'l1_small_size': 64}]


def test_auto_takes_ethernet_cores_without_a_word(fake):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with Device() as device:
            assert device.info['dispatch'] == 'eth'


def test_auto_falls_back_to_worker_cores_and_warns(fake):
    fake.eth = False
    with pytest.warns(RuntimeWarning, match=(
            r'^device 0: dispatch on Ethernet cores is refused, No core coordinate found at '
            r'location: \(0, 12, ETH, LOGICAL\); worker cores are used, with a grid of 11x10 '
            r'cores$')) as caught, Device() as device:
        assert device.info['dispatch'] == 'worker'
        assert device.info['grid'] == (11, 10)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_warning_that_is_an_error_closes_the_device(fake):
    fake.eth = False
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(RuntimeWarning):
            Device()
    assert len(fake.devices) == 1 and not fake.open_devices


def test_ethernet_cores_asked_for_and_refused_are_an_error(fake):
    fake.eth = False
    with pytest.raises(DeviceError, match=r"refused, No core .*expected .* 'auto' or 'worker'"):
        Device(dispatch='eth')
    assert not fake.devices


def test_worker_cores_asked_for_are_taken_without_a_word(fake):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with Device(dispatch='worker') as device:
            assert device.info['dispatch'] == 'worker'


@pytest.mark.parametrize(('arguments', 'message'), [
    ({'dispatch': 'both'}, "dispatch: found 'both', expected one of auto, eth, worker"),
    ({'device_id': -1}, 'device_id: found -1, expected 0, 1'),
    ({'device_id': '0'}, "device_id: found '0'"),
    ({'device_id': True}, 'device_id: found True'),
])
def test_wrong_arguments_are_refused_by_name(fake, arguments, message):
    with pytest.raises(ConfigError, match=message):
        Device(**arguments)
    assert not fake.calls


# ---- which card ----

def test_an_id_that_is_not_there(fake, monkeypatch):
    monkeypatch.setenv('TT_VISIBLE_DEVICES', ADDRESSES[0])
    with pytest.raises(DeviceError, match=(
            rf'^device 5: found .*/dev/0, .*/dev/1 with TT_VISIBLE_DEVICES={ADDRESSES[0]}, '
            r'expected one of the devices that ttnn sees \(ids 0 to 1\)$')):
        Device(5)
    assert not fake.devices


def test_a_machine_without_a_card(fake, machine):
    for node in (machine / 'dev').iterdir():
        node.unlink()
    for _ in range(2):
        with pytest.raises(DeviceError, match=(
                r'^device 0: found no .*/dev/\*; expected a Tenstorrent card with its kernel '
                r'driver \(tt-kmd\) loaded$')):
            Device()
        if (machine / 'dev').is_dir():
            (machine / 'dev').rmdir()
    assert not fake.calls


def test_a_card_without_permission(fake, monkeypatch):
    monkeypatch.setattr(device_module.os, 'access', lambda path, mode: False)
    with pytest.raises(DeviceError, match='without permission to read and write'):
        Device()


def test_a_wrong_list_of_visible_devices_says_what_is_taken(fake, monkeypatch):
    monkeypatch.setenv('TT_VISIBLE_DEVICES', '3')
    fake.fails['count'] = RuntimeError('Invalid chip ID in TT_VISIBLE_DEVICES: 3.\n'
                                       'Location: /x.cpp:348\n 1. f()')
    with pytest.raises(DeviceError, match=(
            r'^device 0: Invalid chip ID in TT_VISIBLE_DEVICES: 3\.; found .* with '
            r'TT_VISIBLE_DEVICES=3; expected a PCI address such as 0000:01:00.0 in '
            r'TT_VISIBLE_DEVICES, or nothing$')):
        Device()


@pytest.mark.parametrize(('visible', 'places'), [
    ('', [0, 1]), (' ', [0, 1]), ('0', [0]), ('1', [1]), ('1,0', [0, 1]), ('1,1', [1]),
    ('99', []), ('x', []), (ADDRESSES[1], [1]), ('41:00', [1]), ('0, 0000:41:00.0', [0, 1])])
def test_ids_count_the_visible_cards_by_pci_address(machine, monkeypatch, visible, places):
    monkeypatch.setenv('TT_VISIBLE_DEVICES', visible)
    assert device_module._pci_addresses() == [ADDRESSES[i] for i in places]
    assert os.environ['TT_VISIBLE_DEVICES'] == visible


def test_a_card_in_use_is_refused_with_its_owner(fake):
    holder = Device(0)
    with pytest.raises(DeviceError, match=(
            rf'^device 0: card {ADDRESSES[0]} is in use by process {os.getpid()}; expected')):
        Device(0)
    with Device(1):  # another one is free
        assert len(fake.open_devices) == 2
    holder.close()
    with Device(0):
        pass
    assert not fake.open_devices


def test_a_card_is_free_again_after_it_could_not_be_opened(fake):
    fake.fails['open_device'] = RuntimeError('busy')
    with pytest.raises(DeviceError):
        Device(dispatch='worker')
    del fake.fails['open_device']
    Device().close()


def test_without_a_place_for_the_lock_a_card_is_opened_all_the_same(fake, machine):
    (machine / 'tmp').rmdir()
    with Device():
        assert len(fake.open_devices) == 1


# ---- closing ----

@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_it_is_closed_once_on_every_way_out_of_the_block(fake, error):
    with pytest.raises(error), Device() as device:
        raise error
    device.close()
    assert fake.calls.count('close_device') == 1
    with pytest.raises(DeviceError, match='device 0: closed'):
        device.call(lambda: None)
    with pytest.raises(DeviceError, match='device 0: closed'):
        _ = device.handle


def test_a_device_that_is_forgotten_is_closed(fake):
    device = Device()
    del device
    gc.collect()
    assert fake.calls.count('close_device') == 1


def test_at_exit_what_is_open_is_closed(fake):
    device = Device()
    device_module._close_open_devices()
    assert not fake.open_devices
    device.close()


def test_all_calls_of_ttnn_come_from_one_thread(fake):
    with Device() as device:
        device.call(lambda: fake.synchronize_device(device.handle))
    assert len(fake.threads) == 1
    assert fake.threads != {threading.get_ident()}


def test_an_external_device_is_used_and_never_closed(fake, machine):
    opened = fake.open_device(device_id=1, dispatch_core_config='worker')
    fake.calls.clear()
    for node in (machine / 'dev').iterdir():
        node.unlink()  # what is open needs no search
    released = []

    class Network:
        def release(self):
            released.append(opened.is_open)

    network = Network()
    with Device(external=opened) as device:
        device.release_with(network.release)
        assert device.call(lambda: device.handle) is opened
        assert device.info['id'] == 1
        assert device.info['grid'] == (11, 10)
        assert device.info['dispatch'] == 'external'
    device.close()
    assert released == [True]
    assert opened.is_open
    assert fake.calls == ['count']


def test_what_stands_on_it_is_released_before_it_is_closed_newest_first(fake):
    order = []

    class Network:
        def __init__(self, name):
            self.name = name

        def release(self):
            order.append((self.name, len(fake.open_devices)))
            raise RuntimeError('a bug')

    networks = [Network(i) for i in range(2)]
    with Device() as device:
        for network in networks:
            device.release_with(network.release)
        forgotten = Network('forgotten')
        device.release_with(forgotten.release)
        device.forget(forgotten.release)
        device.forget(forgotten.release)
    assert order == [(1, 1), (0, 1)]
    assert not fake.open_devices


def test_an_error_at_open_is_one_line_and_leaves_nothing_open(fake):
    fake.fails['open_device'] = RuntimeError('TT_THROW @ a.cpp:1: tt::exception\ninfo:\nno '
                                             'hugepages\nbacktrace:\n --- f()\n')
    with pytest.raises(DeviceError, match=(
            r'^device 0: cannot be opened, no hugepages; found .*/dev/0, .*/dev/1$')):
        Device()
    assert not fake.open_devices


def test_an_error_at_close_is_a_line_in_the_log(fake, caplog):
    fake.fails['close_device'] = RuntimeError('TIMEOUT\nbacktrace:')
    device = Device()
    device.close()
    device.close()
    assert 'device 0: cannot be closed, TIMEOUT' in caplog.text


def test_ctrl_c_while_it_opens_leaves_it_closed(fake):
    fake.blocks['open_device'] = threading.Event()

    def interrupt():
        fake.entered.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1)
        fake.blocks['open_device'].set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Device()
    thread.join()
    assert len(fake.devices) == 1
    assert not fake.open_devices


def test_a_device_that_does_not_open_in_time(fake, caplog):
    fake.blocks['open_device'] = threading.Event()
    lost = []
    begin_s = time.monotonic()
    with pytest.raises(DeviceError, match='device 0: open did not return within 0.1 s'):
        Device(open_timeout_s=0.1, on_lost=lost.append)
    assert time.monotonic() - begin_s < 5
    assert lost == ['open did not return within 0.1 s']
    assert 'left behind in open' in caplog.text
    fake.blocks['open_device'].set()  # it opens after all: then it is closed
    until_s = time.monotonic() + 10
    while not fake.calls.count('close_device') and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not fake.open_devices


@pytest.mark.filterwarnings('ignore:.*fork:DeprecationWarning')
def test_a_forked_child_neither_uses_nor_closes_it(fake):
    with Device() as device:
        child = os.fork()
        if child == 0:
            try:
                device.call(lambda: None)
            except DeviceError:
                device.close()
                device_module._close_open_devices()
                os._exit(0 if fake.open_devices else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        device.call(fake.synchronize_device, device.handle)


def test_at_exit_a_thread_that_comes_back_late_is_waited_for():
    # ttnn aborts a process that ends while a thread is inside of it.
    program = '''
import sys, threading, time
sys.path.insert(0, 'test')
from fake_ttnn import FakeTtnn
from tt_perception.runtime.device import Device
from tt_perception.runtime.errors import DeviceError
fake = sys.modules['ttnn'] = FakeTtnn()
fake.blocks['synchronize_device'] = threading.Event()

def main():
    opened = fake.open_device(device_id=0, dispatch_core_config='worker')
    with Device(external=opened) as device:
        class Network:
            def release(self):
                print('released')
        device.release_with(Network().release)
        try:
            device.call(lambda: fake.synchronize_device(opened), timeout_s=0.1)
        except DeviceError as error:
            print(error)
    print('closed')

main()
threading.Timer(0.3, fake.blocks['synchronize_device'].set).start()
'''
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, timeout=60, text=True,
                          capture_output=True, check=True)
    assert done.stdout.splitlines() == [
        'external device: <lambda> did not return within 0.1 s', 'closed', 'released']


# ---- ttnn ----

def test_ttnn_that_is_not_installed(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, 'ttnn', None)
    with pytest.raises(ConfigError, match=(
            r'^ttnn: not installed for Python 3\.\d+; expected ttnn 0\.81\.1, whose wheels are '
            r'for Python 3\.10 and 3\.12$')):
        Device()


@pytest.mark.parametrize(('source', 'message'), [
    ('from ttnn import _ttnn', 'cannot be imported by Python 3'),
    ('import ttnn._ttnn', "No module named 'ttnn._ttnn'"),
    ('raise ImportError("wrong ELF class\\nmore")', 'wrong ELF class more'),
    ('', 'without open_device'),
])
def test_ttnn_that_cannot_be_used(tmp_path, monkeypatch, source, message):
    (tmp_path / 'ttnn').mkdir()
    (tmp_path / 'ttnn' / '__init__.py').write_text(source)
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n == 'ttnn' or n.startswith('ttnn.')]:
        monkeypatch.delitem(sys.modules, name)
    for name in ttnn_environment():
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=f'^ttnn: .*{message}.*expected ttnn 0.81.1'):
        load_ttnn()
    sys.modules.pop('ttnn', None)


def test_ttnn_is_quiet_and_writes_to_the_cache_unless_the_user_says_otherwise(tmp_path):
    (tmp_path / 'ttnn').mkdir()
    (tmp_path / 'ttnn' / '__init__.py').write_text('open_device = 1')
    program = ('import os; from tt_perception.runtime.device import load_ttnn; load_ttnn(2.5); '
               'print(*(f"{k}={v}" for k, v in os.environ.items() if k[:2] in ("TT", "LO")),'
               ' sep=chr(10))')
    environment = {'PATH': os.environ['PATH'], 'PYTHONPATH': f'{tmp_path}:{ROOT}',
                   'XDG_CACHE_HOME': str(tmp_path / 'cache'), 'PYTHONDONTWRITEBYTECODE': '1'}

    def found(**given):
        done = subprocess.run([sys.executable, '-c', program], env=environment | given,
                              capture_output=True, text=True, check=True, cwd=tmp_path)
        return dict(line.split('=', 1) for line in done.stdout.splitlines())

    ours = tmp_path / 'cache' / 'tt_perception' / 'ttnn'
    assert found() == {'TT_METAL_LOGGER_LEVEL': 'error', 'LOGURU_LEVEL': 'WARNING',
                       'TT_METAL_LOGS_PATH': str(ours / 'logs'),
                       'TT_METAL_CACHE': str(ours / 'kernels'),
                       'TT_METAL_TRACE_ALLOC_TRACKING': '1',
                       'TT_METAL_OPERATION_TIMEOUT_SECONDS': '2.5'}
    users = {name: f'mine-{i}' for i, name in enumerate(found())}
    assert found(**users) == users


def test_without_a_home_ttnn_writes_to_the_temporary_folder(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError('no home')

    monkeypatch.setattr(device_module, 'cache_dir', no_home)
    monkeypatch.setattr(device_module.tempfile, 'gettempdir', lambda: str(tmp_path))
    assert ttnn_environment()['TT_METAL_CACHE'].startswith(str(tmp_path))


@pytest.mark.parametrize(('text', 'line'), [
    ('TT_FATAL @ /f.cpp:8: a != b\ninfo:\nToo small.\nMore.\nbacktrace:\n --- f()\n',
     'Too small. More.'),
    ('Chip 7 not found.\nLocation: /f.cpp:12\n 1. tt::umd::f()\n', 'Chip 7 not found.'),
    ('', 'RuntimeError'),
    ('device information: none', 'device information: none'),
])
def test_errors_of_ttnn_lose_their_back_trace(text, line):
    assert one_line(RuntimeError(text)) == line


# ---- with a card ----

@pytest.mark.device
@needs_card
@pytest.mark.filterwarnings('ignore:device 0. dispatch:RuntimeWarning')
def test_a_card_opens_closes_and_opens_again():
    for _ in range(3):
        with Device() as device:
            assert device.info['arch'] == 'blackhole'
            assert device.info['grid'][0] * device.info['grid'][1] >= 110


@pytest.mark.device
@pytest.mark.skipif(len(device_nodes()) < 2, reason='two cards are needed')
def test_two_processes_use_two_cards_at_once():
    program = '''
import sys, torch
from tt_perception.runtime.device import Device, load_ttnn
ttnn = load_ttnn()
with Device(int(sys.argv[1]), dispatch='worker') as device:
    def double():
        x = ttnn.from_torch(torch.ones(64, 64), layout=ttnn.TILE_LAYOUT, device=device.handle)
        return ttnn.to_torch(ttnn.add(x, x))
    for _ in range(20):
        assert (device.call(double, timeout_s=60) == 2).all()
'''
    for _ in range(10):
        processes = [subprocess.Popen([sys.executable, '-c', program, str(i)], cwd=ROOT, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                     for i in range(2)]
        for process in processes:
            output, _ = process.communicate(timeout=180)
            assert process.returncode == 0, output
