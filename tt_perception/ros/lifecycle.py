# SPDX-License-Identifier: Apache-2.0
"""A lifecycle node whose transitions cannot hang, hide an exception, or leave something open."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from rcl_interfaces.msg import ParameterDescriptor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from tt_perception.runtime.errors import PerceptionError

T = TypeVar('T')

_POLL_S = 0.05
_STOP_GRACE_S = 2.0  # ros2 launch sends SIGTERM five seconds after SIGINT
_SUCCESS = TransitionCallbackReturn.SUCCESS
_FAILURE = TransitionCallbackReturn.FAILURE
_ERROR = TransitionCallbackReturn.ERROR


class Stopped(Exception):
    """The process was asked to end while a transition was under way."""


def transition(on_exception: TransitionCallbackReturn) -> Callable:
    """Make a method of :class:`ManagedNode` a transition callback that rclpy cannot mishandle.

    rclpy drops an exception in a transition without a word, and never leaves the transition when
    it returns something else than a ``TransitionCallbackReturn``. Here both are logged, what the
    transition has created is released, and ``on_exception`` is returned. An expected error
    (:class:`PerceptionError`) is one line; any other one comes with its traceback.
    """
    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def guarded(self: ManagedNode, state: LifecycleState) -> TransitionCallbackReturn:
            try:
                result = method(self, state)
                if isinstance(result, TransitionCallbackReturn):
                    return result
                raise TypeError(f'returned {result!r}, expected a TransitionCallbackReturn')
            except Stopped:
                self.get_logger().info(f'{method.__name__}: given up, the process ends')
            except Exception as error:
                self.fault = describe(error)
                self.log_error(method.__name__, error)
            self.undo(method.__name__)
            return on_exception
        return guarded
    return decorate


def describe(error: BaseException) -> str:
    """Return an error as one line; that of an expected one says enough without its class."""
    if isinstance(error, PerceptionError):
        return str(error)
    return ' '.join(f'{type(error).__name__}: {error}'.split())


class ManagedNode(LifecycleNode):
    """Base of the package's nodes.

    A subclass overrides :meth:`configure`, :meth:`activate`, :meth:`deactivate` and
    :meth:`release` as plain methods that raise what goes wrong. The last two are also called after
    half of the first two, and may be repeated. All of them run on the executor's thread.

    :ivar fault: why the node is not working, None if all is well.
    :ivar abandoned: a thread is still inside a call that did not return in time after a signal.
    """

    def __init__(self, name: str, *, stop: threading.Event | None = None, **kwargs: Any) -> None:
        """Create the node, unconfigured.

        :param stop: set when the process is to end; a transition that takes long then gives up.
        :param kwargs: of ``rclpy.lifecycle.LifecycleNode``.
        """
        super().__init__(name, **kwargs)
        self.fault: str | None = None
        self.abandoned = False
        self._stop = stop if stop is not None else threading.Event()
        self._is_configured = False
        self._is_active = False
        self._is_ending = False
        self._fault_arrived = self.create_guard_condition(self._leave_active)
        self._end = self.create_guard_condition(self._stop.set)
        # Before Kilted, rclpy answers an impossible request with an exception in its own callback.
        service = self._service_change_state
        service.callback = _answer_always(service.callback, self.get_logger())
        self._log_handler = _NodeLogHandler(self.get_logger())
        self._library_logger = logging.getLogger('tt_perception')
        self._library_logger.addHandler(self._log_handler)
        self._library_logger.setLevel(logging.INFO)
        self._library_logger.propagate = False  # else it is said twice
        self.declare_parameter('autostart', False, ParameterDescriptor(
            description='configure and activate the node when its process starts, without a '
                        'lifecycle manager; if that fails, the process ends with exit code 1',
            dynamic_typing=True))

    def configure(self) -> None:
        """Read the parameters and prepare everything that takes long."""

    def activate(self) -> None:
        """Start to take input."""

    def deactivate(self) -> None:
        """Take no more input, and finish what is in progress."""

    def release(self) -> None:
        """Close and free what :meth:`configure` has made."""

    @property
    def is_configured(self) -> bool:
        """The node is inactive or active, or on the way there."""
        return self._is_configured

    @property
    def is_active(self) -> bool:
        """The node is active."""
        return self._is_active

    def start(self) -> bool:
        """Configure and activate, if the parameter ``autostart`` says so.

        :returns: False if that failed, for a reason that is in the log; then there may be nobody
            who would try again, and the process is to end.
        """
        autostart = self.get_parameter('autostart').value
        if not isinstance(autostart, bool):
            self.get_logger().error(f'autostart: found {autostart!r}, expected bool')
        if autostart is not True:
            self.get_logger().info('unconfigured and waiting for a lifecycle manager')
            return True
        if self.trigger_configure() == _SUCCESS and not self._is_ending:
            self.trigger_activate()
        return self.fault is None

    def shut_down(self) -> None:
        """Go to the final state from any other, and release everything."""
        try:
            self.trigger_shutdown()
        except RuntimeError:  # rclpy's error for a state that has no such transition
            self._close()

    def request_stop(self) -> None:
        """Let the process end after the transition under way."""
        self._is_ending = True
        self._end.trigger()

    def report_fault(self, error: Exception) -> None:
        """Leave the active state because of an error; callable from any thread.

        The node is deactivated, goes through error processing, which releases everything, and ends
        unconfigured, from where it can be configured again.
        """
        if self.abandoned:  # the process is ending, and what the thread used is gone
            return
        self.fault = describe(error)
        self.log_error('fault', error)
        self._fault_arrived.trigger()

    def log_error(self, where: str, error: Exception) -> None:
        """Log an error, with its traceback if nobody expected it."""
        text = f'{where}: {describe(error)}'
        if not isinstance(error, PerceptionError):
            text += '\n' + ''.join(traceback.format_exception(error))
        self.get_logger().error(text)

    def wait_for(self, finished: threading.Event) -> bool:
        """Wait for another thread; return False if it was abandoned.

        It is, when the process is to end and the thread does not finish soon. A thread that may
        be using an accelerator is waited for: left alone in the middle of an operation, the
        accelerator would have to be reset.
        """
        deadline_s = None
        while not finished.wait(_POLL_S):
            if not self._stop.is_set():
                continue
            if deadline_s is None:
                self.get_logger().info('the process ends as soon as the work in progress has')
                deadline_s = time.monotonic() + _STOP_GRACE_S
            if time.monotonic() > deadline_s and 'ttnn' not in sys.modules:
                self.abandoned = True
                return False
        return True

    def run_stoppable(self, work: Callable[[], T]) -> T:
        """Run ``work`` on another thread and return its result, or raise its exception.

        :raises Stopped: the process is to end, and ``work`` did not finish soon.
        """
        outcome: list[Any] = []
        finished = threading.Event()

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:  # raised again below, on the caller's thread
                outcome.append((None, error))
            finally:
                finished.set()

        threading.Thread(target=run, name='configure', daemon=True).start()
        if not self.wait_for(finished):
            raise Stopped
        result, error = outcome[0]
        if isinstance(error, PerceptionError) and self._stop.is_set():  # it may be due to that
            raise Stopped from error
        if error is not None:
            raise error
        return result

    @transition(on_exception=_FAILURE)
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Go from unconfigured to inactive."""
        self.fault = None
        self._is_configured = True
        try:
            self.configure()
        except ImportError as error:
            raise _import_fault(error) from error
        if self._stop.is_set():
            raise Stopped
        return super().on_configure(state)

    @transition(on_exception=_FAILURE)
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Go from inactive to active."""
        self.fault = None
        self.activate()
        self._is_active = True
        return super().on_activate(state)

    @transition(on_exception=_ERROR)
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Go from active to inactive, or to error processing after a fault."""
        self._is_active = False
        self.deactivate()
        if self.fault is not None:
            return _ERROR
        return super().on_deactivate(state)

    @transition(on_exception=_ERROR)
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Go from inactive to unconfigured."""
        self.release()
        self._is_configured = False
        return super().on_cleanup(state)

    @transition(on_exception=_FAILURE)
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Go from any state to the final one."""
        self._close()
        return super().on_shutdown(state)

    @transition(on_exception=_FAILURE)
    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Release everything and be unconfigured, so that a manager can start again."""
        self._close()
        self.get_logger().error(f'unconfigured after an error: {self.fault}')
        return _SUCCESS

    def undo(self, callback: str) -> None:
        """Release what a transition callback has created before it failed."""
        if callback == 'on_activate':
            self._is_active = False
            self._close_by(self.deactivate)
        elif callback == 'on_configure':
            self._close()

    def _close(self) -> None:
        self._is_active = False
        self._close_by(self.deactivate)
        self._close_by(self.release)
        self._is_configured = False

    def _close_by(self, step: Callable[[], None]) -> None:
        """Run one step of the tear-down; the others follow whatever happens in it."""
        try:
            step()
        except Exception as error:
            self.log_error(step.__name__, error)

    def _leave_active(self) -> None:
        if self._is_active and self.fault is not None:
            self.trigger_deactivate()

    def destroy_node(self) -> None:
        """Destroy the node and give its log handler back."""
        self._library_logger.removeHandler(self._log_handler)
        self._library_logger.propagate = True
        super().destroy_node()


def _import_fault(error: ImportError) -> Exception:
    """Return what to raise instead of ``error``: what is not installed is no bug of ours."""
    if not error.name or error.name.split('.')[0] == __package__.split('.')[0]:
        return error
    if isinstance(error, ModuleNotFoundError):
        return PerceptionError(f'{error.name}: not installed; install it for {sys.executable}')
    return PerceptionError(f'{error.name}: cannot be imported: {" ".join(str(error).split())}')


def _answer_always(callback: Callable, logger: Any) -> Callable:
    """Return a callback of ``change_state`` that says no where the given one raises."""
    def answer(request: Any, response: Any) -> Any:
        try:
            return callback(request, response)
        except RuntimeError as error:  # rclpy's class for this derives from it
            logger.error(f'change_state: {" ".join(str(error).split())}')
            response.success = False
            return response
    return answer


class _NodeLogHandler(logging.Handler):
    """Sends what the package logs to the node's log."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        # rclpy refuses another severity from the same line of code, hence one line for each.
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(text)
        elif record.levelno >= logging.INFO:
            self._logger.info(text)
        else:
            self._logger.debug(text)
