# SPDX-License-Identifier: Apache-2.0
"""A node's process: from its arguments to its exit code, with SIGINT and SIGTERM in between.

Nothing of ROS is imported before the signals are handled, so that a signal during the start ends
the process as quietly as one later.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tt_perception.runtime.threads import let_idle_threads_sleep

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MAX_FAILED_SPINS = 20  # in a row; more mean that the executor itself is broken


class StopSignal:
    """SIGINT and SIGTERM as an event, with no exception at a random place.

    The main thread waits in native code most of the time, where Python's signal handlers do not
    run. So the interpreter writes the signal's number to a socket, and a thread reads it there.

    :ivar event: set by the first signal.
    :ivar wake: called after the event is set, on another thread.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.wake: Callable[[], None] = lambda: None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def install(self) -> None:
        """Take over both signals; call it in the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, name='signals', daemon=True).start()

    def ignore(self) -> None:
        """Ignore further signals; the process is about to end."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _watch(self) -> None:
        while numbers := self._reader.recv(64):
            if any(number in _SIGNALS for number in numbers):
                self.event.set()
                self.wake()


def run_node(node_class: str, args: Sequence[str] | None = None) -> int:
    """Run a managed node until SIGINT, SIGTERM or the end of its context.

    :param node_class: ``module:Class`` of a :class:`tt_perception.ros.lifecycle.ManagedNode`.
    :param args: command line, by default that of the process.
    :returns: exit code: 0 after a signal at any moment, 1 when the node cannot run at all,
        or should start by itself (``autostart``) and cannot.
    """
    let_idle_threads_sleep()
    stop = StopSignal()
    stop.install()
    try:
        code, abandoned = _run(node_class, args, stop)
    finally:
        stop.ignore()
    if abandoned:  # a thread is still inside native code, and would crash in Python's own shutdown
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(node_class: str, args: Sequence[str] | None, stop: StopSignal) -> tuple[int, bool]:
    """Return the exit code, and whether the node left a thread behind."""
    import rclpy
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.signals import SignalHandlerOptions

    module, _, name = node_class.partition(':')
    make_node = getattr(importlib.import_module(module), name)
    if stop.event.is_set():
        return 0, False
    try:
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:  # its class differs between releases
        return _refuse(name, error), False
    node = None
    try:
        try:
            node = make_node(stop=stop.event)
        except Exception as error:
            if not _is_of_rclpy(error):
                raise
            return _refuse(name, error), False
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        # spin_once returns after some work was done, not merely because it was woken.
        stop.wake = lambda: executor.create_task(lambda: None)
        code = _spin(executor, node, stop.event) if node.start() else 1
        node.shut_down()
        stop.wake = lambda: None
        executor.shutdown()
        return code, node.abandoned
    finally:
        if node is not None:
            node.destroy_node()
        rclpy.try_shutdown()


def _refuse(name: str, error: Exception) -> int:
    """Say in one line why a node cannot run with its arguments; return the exit code."""
    sys.stderr.write(f'{name}: wrong arguments: {" ".join(str(error).split())}\n')
    return 1


def _is_of_rclpy(error: Exception) -> bool:
    """Return whether it has one of rclpy's own classes, as a parameter of a wrong type has."""
    return type(error).__module__.split('.')[0] == 'rclpy'


def _spin(executor: Any, node: Any, stop: threading.Event) -> int:
    """Serve the node; an exception out of one callback does not end it."""
    from rclpy.executors import ExternalShutdownException
    failed = 0
    while not stop.is_set() and executor.context.ok():
        try:
            executor.spin_once()
            failed = 0
        except ExternalShutdownException:
            break
        except Exception as error:  # older releases raise here for an impossible transition
            failed += 1
            node.get_logger().error(f'a callback failed: {error}\n{traceback.format_exc()}')
            if failed == _MAX_FAILED_SPINS:
                return 1
    return 0
