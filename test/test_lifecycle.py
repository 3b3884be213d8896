# SPDX-License-Identifier: Apache-2.0
"""Transitions report what went wrong, leave nothing open, and end when the process is to end."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time

import pytest

pytest.importorskip('rclpy')

from lifecycle_msgs.msg import Transition  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402
from rclpy.lifecycle import TransitionCallbackReturn  # noqa: E402
from ros_process import (  # noqa: E402
    Client,
    fresh_namespace,
    make_context,
    node_process,
    wait_until,
)

from tt_perception.ros import lifecycle  # noqa: E402
from tt_perception.ros.lifecycle import ManagedNode, Stopped, transition  # noqa: E402
from tt_perception.runtime.errors import ArtifactError  # noqa: E402

SUCCESS, FAILURE, ERROR = (TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE,
                           TransitionCallbackReturn.ERROR)


class Node(ManagedNode):
    """Notes what is called, and raises where it is told to."""

    def __init__(self, context, raises: dict[str, Exception] | None = None, **kwargs):
        self.calls: list[str] = []
        self.raises = raises or {}
        super().__init__('managed', context=context, namespace=fresh_namespace(), **kwargs)

    def _note(self, step: str) -> None:
        self.calls.append(step)
        if step in self.raises:
            raise self.raises[step]

    def configure(self):
        self._note('configure')

    def activate(self):
        self._note('activate')

    def deactivate(self):
        self._note('deactivate')

    def release(self):
        self._note('release')

    @property
    def state(self) -> str:
        return self._state_machine.current_state[1]


@pytest.fixture(scope='module')
def context():
    context = make_context()
    yield context
    context.try_shutdown()


@pytest.fixture
def make_node(context):
    nodes = []

    def make(**kwargs):
        nodes.append(Node(context, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.destroy_node()


def test_the_way_through_all_states(make_node):
    node = make_node()
    assert node.trigger_configure() == SUCCESS and node.state == 'inactive' and node.is_configured
    assert node.trigger_activate() == SUCCESS and node.state == 'active' and node.is_active
    assert node.trigger_deactivate() == SUCCESS and node.state == 'inactive' and not node.is_active
    assert node.trigger_cleanup() == SUCCESS and node.state == 'unconfigured'
    assert not node.is_configured
    assert node.calls == ['configure', 'activate', 'deactivate', 'release']
    node.trigger_configure()
    node.trigger_activate()
    node.shut_down()
    assert node.state == 'finalized'
    assert node.calls[-2:] == ['deactivate', 'release']
    node.shut_down()  # nothing happens


@pytest.mark.parametrize('error', [RuntimeError('a bug'), ArtifactError('weights.onnx: is gone')])
@pytest.mark.parametrize('step, result, state, released', [
    ('configure', FAILURE, 'unconfigured', ['deactivate', 'release']),
    ('activate', FAILURE, 'inactive', ['deactivate']),
    ('deactivate', ERROR, 'unconfigured', ['deactivate', 'release']),
    ('release', ERROR, 'unconfigured', ['deactivate', 'release']),
])
def test_D08_an_exception_is_reported_and_undone(make_node, capfd, step, result, state, released,
                                                 error):
    node = make_node(raises={step: error})
    results = [node.trigger_configure()]
    if step != 'configure':
        results.append(node.trigger_activate())
    if step in ('deactivate', 'release'):
        results.append(node.trigger_deactivate())
    if step == 'release':
        results.append(node.trigger_cleanup())
    assert results[-1] == result and set(results[:-1]) <= {SUCCESS}
    assert node.state == state
    assert node.calls[-len(released):] == released
    assert str(error) in node.fault
    log = capfd.readouterr().err
    assert f'on_{step if step != "release" else "cleanup"}: ' in log and str(error) in log
    assert ('Traceback' in log) == isinstance(error, RuntimeError)
    node.raises.clear()
    if state == 'unconfigured':
        assert node.trigger_configure() == SUCCESS and node.fault is None
    assert node.trigger_activate() == SUCCESS and node.state == 'active'
    assert node.fault is None
    assert node.trigger_deactivate() == SUCCESS and node.state == 'inactive'


@pytest.mark.parametrize('returned', [None, True, 'SUCCESS'])
def test_something_else_than_a_result_is_an_error_and_not_a_hang(context, capfd, returned):
    class Wrong(Node):
        @transition(on_exception=FAILURE)
        def on_configure(self, state):
            return returned

    node = Wrong(context)
    assert node.trigger_configure() == FAILURE and node.state == 'unconfigured'
    assert 'expected a TransitionCallbackReturn' in capfd.readouterr().err
    node.destroy_node()


def test_an_exception_while_everything_is_released_does_not_stop_the_rest(make_node):
    node = make_node(raises={'deactivate': ValueError('a'), 'release': ValueError('b')})
    node.trigger_configure()
    node.trigger_activate()
    node.shut_down()
    assert node.state == 'finalized'
    assert node.calls[-2:] == ['deactivate', 'release']


def test_D10_a_fault_on_another_thread_leads_through_error_processing(make_node, context, capfd):
    node = make_node()
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    node.trigger_configure()
    node.trigger_activate()
    threading.Thread(target=node.report_fault, args=(RuntimeError('device lost'),)).start()
    deadline_s = time.monotonic() + 10
    while node.state != 'unconfigured' and time.monotonic() < deadline_s:
        executor.spin_once(timeout_sec=0.1)
    assert node.state == 'unconfigured'
    assert node.calls == ['configure', 'activate', 'deactivate', 'deactivate', 'release']
    assert node.fault == 'RuntimeError: device lost'
    assert 'unconfigured after an error: RuntimeError: device lost' in capfd.readouterr().err
    node.calls.clear()
    assert node.trigger_configure() == SUCCESS and node.trigger_activate() == SUCCESS
    assert node.fault is None
    executor.shutdown()


def test_autostart_configures_and_activates(make_node):
    from rclpy.parameter import Parameter
    node = make_node()
    assert node.start()
    assert node.state == 'unconfigured'
    node = make_node(parameter_overrides=[Parameter('autostart', value=True)])
    assert node.start()
    assert node.state == 'active'


def test_autostart_of_another_type_is_said_and_starts_nothing(make_node, capfd):
    from rclpy.parameter import Parameter
    node = make_node(parameter_overrides=[Parameter('autostart', value=1)])
    assert node.start()
    assert node.state == 'unconfigured'
    assert 'autostart: found 1, expected bool' in capfd.readouterr().err


@pytest.mark.parametrize('step, state, last_call', [
    ('configure', 'unconfigured', 'release'), ('activate', 'inactive', 'deactivate')])
def test_autostart_says_whether_it_failed(make_node, step, state, last_call):
    from rclpy.parameter import Parameter
    node = make_node(parameter_overrides=[Parameter('autostart', value=True)],
                     raises={step: ArtifactError('x: no such file')})
    assert not node.start()
    assert node.state == state
    assert ('activate' in node.calls) is (step == 'activate') and node.calls[-1] == last_call


@pytest.mark.parametrize('error, line', [
    (ModuleNotFoundError("No module named 'torch'", name='torch'), 'torch: not installed; '),
    (ImportError('libx.so: no such file', name='torch._C'),
     'torch._C: cannot be imported: libx.so: no such file'),
])
def test_a_missing_package_is_one_line_and_no_bug(make_node, capfd, error, line):
    node = make_node(raises={'configure': error})
    assert node.trigger_configure() == FAILURE and node.fault.startswith(line)
    log = capfd.readouterr().err
    assert f'on_configure: {line}' in log and 'Traceback' not in log


@pytest.mark.parametrize('error', [
    ImportError('cannot import name', name='tt_perception.runtime'), ImportError('no name')])
def test_an_import_that_fails_inside_this_package_is_a_bug(make_node, capfd, error):
    node = make_node(raises={'configure': error})
    assert node.trigger_configure() == FAILURE
    assert 'Traceback' in capfd.readouterr().err


def test_long_work_hands_on_its_result_and_its_exception(make_node):
    node = make_node()
    assert node.run_stoppable(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        node.run_stoppable(lambda: 1 / 0)


def test_long_work_is_abandoned_when_the_process_is_to_end(make_node, monkeypatch):
    monkeypatch.setattr(lifecycle, '_STOP_GRACE_S', 0.1)
    monkeypatch.delitem(sys.modules, 'ttnn', raising=False)  # of other tests: it is waited for
    stop = threading.Event()
    node = make_node(stop=stop)
    is_released = threading.Event()
    threading.Timer(0.1, stop.set).start()
    start_s = time.monotonic()
    with pytest.raises(Stopped):
        node.run_stoppable(is_released.wait)
    assert node.abandoned and time.monotonic() - start_s < 5
    is_released.set()


def test_C07_an_accelerator_is_waited_for(make_node, monkeypatch):
    monkeypatch.setattr(lifecycle, '_STOP_GRACE_S', 0.05)
    monkeypatch.setitem(sys.modules, 'ttnn', object())
    stop = threading.Event()
    stop.set()
    node = make_node(stop=stop)
    assert node.run_stoppable(lambda: time.sleep(0.5) or 'done') == 'done'
    assert not node.abandoned


def test_what_the_library_logs_is_in_the_nodes_log(make_node, capfd):
    import logging
    make_node()
    logging.getLogger('tt_perception.anything').warning('from the library')
    log = capfd.readouterr().err
    assert 'managed]: from the library' in log and 'WARN' in log


def test_D07_every_transition_in_every_state(make_node, context):
    """Impossible requests are answered with False, and the node still works."""
    node = make_node()
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    client = Client(node.get_fully_qualified_name())
    thread = threading.Thread(target=executor.spin, daemon=True)
    thread.start()
    ids = {name: getattr(Transition, 'TRANSITION_' + name.upper()) for name in (
        'configure', 'cleanup', 'activate', 'deactivate', 'unconfigured_shutdown',
        'inactive_shutdown', 'active_shutdown')}
    allowed = {'unconfigured': {'configure': 'inactive'},
               'inactive': {'activate': 'active', 'cleanup': 'unconfigured'},
               'active': {'deactivate': 'inactive'}}
    ways = {'unconfigured': [], 'inactive': ['configure'], 'active': ['configure', 'activate']}
    back = {'unconfigured': [], 'inactive': ['cleanup'], 'active': ['deactivate', 'cleanup']}
    try:
        for state, (name, number) in itertools.product(allowed, ids.items()):
            if name == f'{state}_shutdown':
                continue  # works, and is the last thing that a node does
            for step in ways[state]:
                assert client.change_state(ids[step])
            is_allowed = name in allowed[state]
            assert client.change_state(number) == is_allowed, (state, name)
            end = allowed[state].get(name, state)
            assert client.state() == end
            for step in back[end]:
                assert client.change_state(ids[step])
        assert not client.change_state(99)
        assert client.change_state(ids['unconfigured_shutdown'])
        assert client.state() == 'finalized'
        assert not client.change_state(ids['configure'])
    finally:
        client.close()
        executor.shutdown()
        thread.join()


def test_D15_D16_both_signals_end_the_process_quietly_at_any_moment():
    """During its start, unconfigured, while a model is loaded, and active."""
    moments = {  # parameters, environment, and the last words before the signal
        'start': ({}, {}, ''),
        'unconfigured': ({}, {}, 'unconfigured and waiting'),
        'configure': ({'autostart': True}, {'FAKE_LOAD_S': '60'}, 'loading'),
        'active': ({'autostart': True}, {}, 'working'),
    }
    cases = list(itertools.product(moments, (signal.SIGINT, signal.SIGTERM)))
    with contextlib.ExitStack() as stack:
        processes = []
        for moment, number in cases:
            parameters, env, _ = moments[moment]
            process = stack.enter_context(node_process('slow_node:main', env=env, **parameters))
            processes.append(process)
            if moment == 'start':
                wait_until(process.catches_sigterm)
                process.signal(number)
        for (moment, number), process in zip(cases, processes, strict=True):
            if moment != 'start':
                process.wait_for_output(moments[moment][2])
                process.signal(number)
        for case, process in zip(cases, processes, strict=True):
            assert process.wait() == 0, (case, process.output())
            for word in ('Traceback', 'ERROR', 'Exception', 'terminate'):
                assert word not in process.output(), (case, process.output())


def test_a_wrong_command_line_is_one_line_and_exit_code_1():
    with node_process('slow_node:main', '--params-file', '/nowhere/at/all.yaml') as process:
        assert process.wait() == 1
        assert 'wrong arguments' in process.output() and 'Traceback' not in process.output()


@pytest.mark.parametrize('name', ['use_sim_time', 'start_type_description_service'])
def test_a_parameter_of_ros_of_a_wrong_type_is_one_line_and_exit_code_1(name):
    if name == 'start_type_description_service':
        pytest.importorskip('rclpy.type_description_service')  # since Iron
    with node_process('slow_node:main', **{name: 'maybe'}) as process:
        assert process.wait() == 1
        assert f"wrong arguments: Trying to set parameter '{name}'" in process.output()
        assert 'Traceback' not in process.output()
