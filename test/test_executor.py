# SPDX-License-Identifier: Apache-2.0
"""The device's thread: order, limits, a call that never returns, and every way to close."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest

from tt_perception.runtime.errors import DeviceError
from tt_perception.runtime.executor import DeviceExecutor


@pytest.fixture
def executor():
    executor = DeviceExecutor('device 0')
    yield executor
    executor.close(timeout_s=0)


@pytest.fixture
def release():
    """An event that stuck calls wait for; set at the end, so that their threads go."""
    event = threading.Event()
    yield event
    event.set()


def eventually(condition, seconds=10.0):
    until_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.005)
    return condition()


def interrupt_soon(seconds=0.05):
    """Send Ctrl-C to this process's main thread."""
    threading.Timer(seconds, signal.pthread_kill,
                    (threading.main_thread().ident, signal.SIGINT)).start()


def test_calls_run_one_by_one_on_one_thread_that_is_not_the_callers(executor):
    ran = []

    def work(i):
        ran.append((threading.get_ident(), i, 'begins'))
        time.sleep(0.001)
        ran.append((threading.get_ident(), i, 'ends'))
        return i * i

    threads = [threading.Thread(target=lambda: [executor.call(work, i) for i in range(5)])
               for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [executor.submit(work, i).result(10) for i in range(5)] == [0, 1, 4, 9, 16]
    for thread in threads:
        thread.join(10)
    assert len(ran) == 2 * 25
    assert all(a[1:] == (b[1], 'begins') and b[2] == 'ends'
               for a, b in zip(ran[::2], ran[1::2], strict=True))
    assert {ident for ident, *_ in ran} == {ran[0][0]} != {threading.get_ident()}


@pytest.mark.parametrize('error', [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_what_a_call_raises_reaches_its_caller_and_the_next_one_runs(executor, error):
    def fail():
        raise error('why')

    with pytest.raises(error, match='why'):
        executor.call(fail)
    with pytest.raises(error, match='why'):
        executor.submit(fail).result(10)
    assert executor.call(lambda: 3) == 3


def test_a_call_from_its_own_thread_runs_at_once(executor):
    assert executor.call(lambda: executor.call(lambda: executor.is_here)) is True
    assert not executor.is_here


def test_a_call_that_does_not_return_is_given_up_and_all_later_ones_are_refused(release):
    reasons = []
    executor = DeviceExecutor('device 0', reasons.append)
    pending = []

    def replay():
        pending.append(executor.submit(lambda: None))
        release.wait(60)

    with pytest.raises(DeviceError, match=r'^device 0: replay did not return within 0.1 s$'):
        executor.call(replay, timeout_s=0.1)
    assert executor.lost
    assert reasons == ['replay did not return within 0.1 s']
    with pytest.raises(DeviceError, match='did not return'):
        pending[0].result(0)
    begin_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(DeviceError, match='device 0: lost, replay did not return'):
            executor.call(lambda: None)
        with pytest.raises(DeviceError, match='lost'):
            executor.submit(lambda: None)
    assert not executor.close()
    assert time.monotonic() - begin_s < 1


def test_every_caller_that_waits_learns_that_the_executor_is_lost(executor, release):
    errors = []

    def caller(timeout_s):
        try:
            executor.call(release.wait, 60, timeout_s=timeout_s)
        except DeviceError as error:
            errors.append(error)

    threads = [threading.Thread(target=caller, args=(t,)) for t in (0.2, None, 5.0)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3
    assert len(set(map(id, errors))) == 3


def test_waiting_for_its_turn_does_not_count(executor):
    executor.submit(time.sleep, 0.3)
    assert executor.call(lambda: 5, timeout_s=0.1) == 5


def test_a_failing_report_does_not_hide_the_loss(release, caplog):
    executor = DeviceExecutor('device 0', lambda reason: 1 / 0)
    with pytest.raises(DeviceError, match='did not return'):
        executor.call(release.wait, 60, timeout_s=0.05)
    assert 'on_lost failed' in caplog.text


def test_close_lets_the_running_call_end_cancels_the_rest_and_calls_the_last_one():
    executor = DeviceExecutor()
    ran = []
    started = threading.Event()

    def running():
        started.set()
        time.sleep(0.1)
        ran.append('running')

    first = executor.submit(running)
    second = executor.submit(ran.append, 'pending')
    started.wait(10)
    assert executor.close(lambda: ran.append('final'))
    assert ran == ['running', 'final']
    assert first.done() and second.cancelled()
    with pytest.raises(CancelledError):
        second.result(0)
    for _ in range(2):
        assert executor.close(lambda: ran.append('again'))
        with pytest.raises(DeviceError, match='device: closed'):
            executor.call(lambda: None)
    assert ran == ['running', 'final']


def test_a_caller_whose_turn_never_comes_gets_a_device_error(release):
    executor = DeviceExecutor()
    executor.submit(release.wait, 60)
    errors = []

    def caller():
        try:
            executor.call(lambda: None)
        except DeviceError as error:
            errors.append(str(error))

    thread = threading.Thread(target=caller)
    thread.start()
    time.sleep(0.05)
    closing = threading.Thread(target=executor.close)
    closing.start()
    time.sleep(0.05)
    release.set()
    thread.join(10)
    closing.join(10)
    assert errors == ['device: closed before the call began']


def test_close_from_many_threads_closes_once():
    executor = DeviceExecutor()
    ran = []
    results = []
    executor.submit(time.sleep, 0.1)
    threads = [threading.Thread(
        target=lambda: results.append(executor.close(lambda: ran.append('final'))))
        for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [True] * 8
    assert ran == ['final']


def test_close_inside_a_call_takes_effect_after_it():
    executor = DeviceExecutor()
    ran = []

    def call():
        assert executor.close(lambda: ran.append('final')) is False
        ran.append('call')

    executor.call(call)
    assert executor.close()
    assert ran == ['call', 'final']


def test_close_leaves_a_stuck_thread_behind_and_says_so(release, caplog):
    executor = DeviceExecutor('device 0')
    ran = []
    stuck = executor.submit(release.wait, 60)
    assert eventually(stuck.running)
    begin_s = time.monotonic()
    with caplog.at_level(logging.ERROR):
        assert not executor.close(lambda: ran.append('final'), timeout_s=0.1)
    assert time.monotonic() - begin_s < 2
    assert 'device 0: closed without its thread, which is left behind in wait' in caplog.text
    assert executor.lost
    release.set()  # should it come back after all, the device is closed
    assert eventually(lambda: ran == ['final'])
    assert executor.close()


def test_ctrl_c_while_waiting_leaves_the_executor_usable(executor):
    ran = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_soon()
        executor.call(lambda: (time.sleep(0.3), ran.append('first')))
    assert executor.call(lambda: ran + ['second'], timeout_s=0.2) == ['first', 'second']
    assert not executor.lost


def test_ctrl_c_takes_back_a_call_that_has_not_begun(executor):
    ran = []
    executor.submit(time.sleep, 0.3)
    with pytest.raises(KeyboardInterrupt):
        interrupt_soon()
        executor.call(ran.append, 'never')
    executor.call(lambda: None)
    assert not ran


@pytest.mark.filterwarnings('ignore:.*fork:DeprecationWarning')
def test_a_forked_child_cannot_use_it_and_closes_nothing(executor):
    ran = []
    child = os.fork()
    if child == 0:
        try:
            executor.call(lambda: None)
        except DeviceError as error:
            refused = f'process {os.getppid()}' in str(error)
            os._exit(0 if refused and executor.close(lambda: ran.append(1)) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert executor.call(lambda: 1) == 1


def test_a_finished_call_leaves_no_reference_to_its_arrays(executor):
    alive = []

    def work(x):
        out = x + 1
        alive.extend([weakref.ref(x), weakref.ref(out)])
        return out

    executor.call(work, np.zeros(1000))
    gc.collect()
    assert len(alive) == 2
    assert eventually(lambda: all(ref() is None for ref in alive))
