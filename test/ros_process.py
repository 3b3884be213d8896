# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests that talk DDS: an environment of their own, node processes, a client."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
_DOMAINS = 101
PATIENCE_S = 30.0  # for what takes milliseconds on an idle machine


def ros_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which no other test and no other host is seen."""
    profile = str(CHECKOUT / 'config' / 'fastdds_large_messages.xml')
    discovery = ({'ROS_LOCALHOST_ONLY': '1'} if os.environ.get('ROS_DISTRO') == 'humble'
                 else {'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST'})
    return {
        **os.environ,
        'ROS_DOMAIN_ID': str(1 + os.getpid() % _DOMAINS),
        **discovery,
        'FASTDDS_DEFAULT_PROFILES_FILE': profile,
        'FASTRTPS_DEFAULT_PROFILES_FILE': profile,
        'RCUTILS_COLORIZED_OUTPUT': '0',
        'PYTHONPATH': os.pathsep.join(
            p for p in (str(CHECKOUT), str(CHECKOUT / 'test'), os.environ.get('PYTHONPATH')) if p),
        **(extra or {}),
    }


class Process:
    """A process in a group of its own, whose output is kept.

    Use it as a context manager: the group is killed at the end.
    """

    def __init__(self, command: Iterable[str], env: Mapping[str, str] | None = None) -> None:
        """Start it with :func:`ros_environment` and ``env`` on top."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env=ros_environment(env), start_new_session=True)

    def output(self) -> str:
        """Return what it has written so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors='replace')

    def wait_for_output(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until it has written ``text``."""
        wait_until(lambda: text in self.output() or self._process.poll() is not None, timeout_s,
                   lambda: f'no {text!r} in\n{self.output()}')
        assert text in self.output(), f'ended without {text!r}:\n{self.output()}'

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, as a launch file does."""
        self._process.send_signal(number)

    def catches_sigterm(self) -> bool:
        """It has installed its own signal handlers; Python does not catch this one itself."""
        status = Path(f'/proc/{self._process.pid}/status').read_text()
        caught = int(status.split('SigCgt:')[1].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def is_running(self) -> bool:
        """The process has not ended."""
        return self._process.poll() is None

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'still running:\n{self.output()}') from None

    def memory_mb(self) -> float:
        """Return the resident memory."""
        status = Path(f'/proc/{self._process.pid}/status').read_text()
        return int(status.split('VmRSS:')[1].split()[0]) / 1024

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def node_process(main: str, *ros_args: str, namespace: str = '/',
                 env: Mapping[str, str] | None = None, **parameters: Any) -> Process:
    """Start a node.

    :param main: ``module:function`` that runs it, as a console script would.
    :param parameters: of the node; ``__`` stands for a dot in a name.
    """
    module, _, function = main.partition(':')
    code = f'import sys; from {module} import {function}; sys.exit({function}())'
    settings = [part for name, value in parameters.items()
                for part in ('-p', f'{name.replace("__", ".")}:={_yaml(value)}')]
    return Process([sys.executable, '-c', code, '--ros-args', '-r', f'__ns:={namespace}',
                    *settings, *ros_args], env)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S,
               problem: Callable[[], str] = lambda: 'waited in vain') -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, problem()
        time.sleep(0.01)


_namespaces = itertools.count()


def fresh_namespace() -> str:
    """Return a namespace that no other node of this test run has.

    A node of the same name that has only just gone may still be taken for the one under test.
    """
    return f'/t{os.getpid()}_{next(_namespaces)}'


def make_context() -> Any:
    """Return an initialised rclpy context in the environment of :func:`ros_environment`."""
    import rclpy
    for name, value in ros_environment().items():
        if name.startswith(('ROS_', 'FAST')):
            os.environ[name] = value
    context = rclpy.Context()
    rclpy.init(args=[], context=context)
    return context


class Client:
    """A node that speaks to the node under test; it spins on a thread of its own.

    :ivar objects: ``DetectedObjects`` received so far.
    """

    def __init__(self, target: str = '/bevfusion') -> None:
        """Create the client of the node with the full name ``target``."""
        import rclpy
        from autoware_perception_msgs.msg import DetectedObjects
        from diagnostic_msgs.msg import DiagnosticArray
        from lifecycle_msgs.srv import ChangeState, GetState
        from rcl_interfaces.srv import GetParameters, SetParametersAtomically
        from rclpy.executors import SingleThreadedExecutor
        from rclpy.qos import DurabilityPolicy, QoSProfile
        from rosgraph_msgs.msg import Clock
        from sensor_msgs.msg import PointCloud2
        from tf2_msgs.msg import TFMessage

        self.context = make_context()
        self.node = rclpy.create_node('test_client', context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.objects: list[Any] = []
        self._statuses: list[Any] = []
        latched = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self.cloud_publisher = self.node.create_publisher(
            PointCloud2, target + '/input/pointcloud', 10)
        self.tf_publisher = self.node.create_publisher(TFMessage, '/tf', 100)
        self.static_tf_publisher = self.node.create_publisher(TFMessage, '/tf_static', latched)
        self.clock_publisher = self.node.create_publisher(Clock, '/clock', 10)
        self._objects_subscription = self.node.create_subscription(
            DetectedObjects, target + '/output/objects', self.objects.append, 100)
        self.node.create_subscription(DiagnosticArray, '/diagnostics',
                                      lambda array: self._statuses.extend(array.status), 100)
        self._services = {kind: self.node.create_client(kind, f'{target}/{name}')
                          for kind, name in ((ChangeState, 'change_state'),
                                             (GetState, 'get_state'),
                                             (GetParameters, 'get_parameters'),
                                             (SetParametersAtomically,
                                              'set_parameters_atomically'))}
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        from rclpy.executors import ExternalShutdownException
        with contextlib.suppress(ExternalShutdownException):
            self.executor.spin()

    def call(self, service: Any, request: Any, timeout_s: float = PATIENCE_S) -> Any:
        """Call a service of the node under test."""
        client = self._services[service]
        assert client.wait_for_service(timeout_s), f'no service {client.srv_name}'
        done = threading.Event()
        future = client.call_async(request)
        future.add_done_callback(lambda _: done.set())
        assert done.wait(timeout_s), f'no answer from {client.srv_name}'
        return future.result()

    def change_state(self, transition_id: int) -> bool:
        """Request a transition; return whether it succeeded."""
        from lifecycle_msgs.srv import ChangeState
        request = ChangeState.Request()
        request.transition.id = transition_id
        return self.call(ChangeState, request).success

    def state(self) -> str:
        """Return the state of the node under test."""
        from lifecycle_msgs.srv import GetState
        return self.call(GetState, GetState.Request()).current_state.label

    def set_parameters(self, **parameters: Any) -> str:
        """Set parameters together; return why they are refused, '' if they are not."""
        from rcl_interfaces.srv import SetParametersAtomically
        from rclpy.parameter import Parameter
        request = SetParametersAtomically.Request(parameters=[
            Parameter(name.replace('__', '.'), value=value).to_parameter_msg()
            for name, value in parameters.items()])
        result = self.call(SetParametersAtomically, request).result
        return '' if result.successful else result.reason

    def parameter(self, name: str) -> Any:
        """Return the value of a parameter of the node under test."""
        from rcl_interfaces.srv import GetParameters
        from rclpy.parameter import parameter_value_to_python
        response = self.call(GetParameters, GetParameters.Request(names=[name]))
        return parameter_value_to_python(response.values[0])

    def wait_for_match(self) -> None:
        """Wait until clouds go to the node under test and its answers come from it.

        The other side may need a moment longer to know it, see :meth:`send_until`.
        """
        wait_until(lambda: self.cloud_publisher.get_subscription_count() > 0
                   and self._objects_subscription.get_publisher_count() > 0)

    def send_until(self, cloud: Any, condition: Callable[[], Any], every_s: float = 0.2) -> None:
        """Send a cloud again and again until a condition holds."""
        sent_s = -every_s

        def holds() -> Any:
            nonlocal sent_s
            if time.monotonic() - sent_s >= every_s:
                sent_s = time.monotonic()
                self.cloud_publisher.publish(cloud)
            return condition()
        wait_until(holds)

    def statuses(self, task: str) -> list[Any]:
        """Return the diagnostics of one task received so far."""
        return [status for status in list(self._statuses) if status.name.endswith(': ' + task)]

    def wait_for_level(self, task: str, level: int) -> Any:
        """Wait until the newest status of a task has a level; return the status."""
        def newest() -> list[Any]:
            return [s for s in self.statuses(task)[-1:] if s.level == bytes([level])]
        wait_until(newest)
        return self.statuses(task)[-1]

    def counts(self) -> dict[str, int]:
        """Return the newest frame counts of ``/diagnostics``."""
        frames = self.statuses('frames')
        return {v.key: int(v.value) for v in frames[-1].values} if frames else {}

    def wait_for_counts(self, **expected: int) -> dict[str, int]:
        """Wait until the frame counts in ``/diagnostics`` are as expected; return all of them."""
        wanted = {name.replace('__', '.'): value for name, value in expected.items()}
        wait_until(lambda: wanted.items() <= {**dict.fromkeys(wanted, 0), **self.counts()}.items(),
                   problem=lambda: f'found {self.counts()}, expected {wanted}')
        return self.counts()

    def send_transform(self, parent: str, child: str, stamp_ns: int, xyz: Iterable[float] =
                       (0, 0, 0), xyzw: Iterable[float] = (0, 0, 0, 1),
                       static: bool = False) -> None:
        """Publish one transform."""
        from geometry_msgs.msg import TransformStamped
        from tf2_msgs.msg import TFMessage
        stamped = TransformStamped(child_frame_id=child)
        stamped.header.frame_id = parent
        stamped.header.stamp.sec, stamped.header.stamp.nanosec = divmod(stamp_ns, 10**9)
        t, q = stamped.transform.translation, stamped.transform.rotation
        t.x, t.y, t.z = (float(v) for v in xyz)
        q.x, q.y, q.z, q.w = (float(v) for v in xyzw)
        publisher = self.static_tf_publisher if static else self.tf_publisher
        publisher.publish(TFMessage(transforms=[stamped]))

    def close(self) -> None:
        """End the client."""
        self.executor.shutdown()
        self._thread.join()
        self.node.destroy_node()
        self.context.try_shutdown()
