# SPDX-License-Identifier: Apache-2.0
"""The one thread that touches a device, and a way out when it does not come back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any

from tt_perception.runtime.errors import DeviceError

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class DeviceExecutor:
    """Runs calls one after the other on a thread of its own.

    Any thread may call any method at any time. When a call with a limit does not return in time,
    the executor is *lost*: a thread that waits for a device cannot be stopped, so it is left
    behind, all that waits gets :class:`DeviceError`, and so does every later call at once. The
    thread is a daemon and does not keep the process alive. A forked child can use none of it.

    :param name: begins the messages, for example ``device 0``.
    :param on_lost: called once with the reason when the executor is lost, in the thread that
        noticed it; it must not wait for this executor.
    """

    def __init__(self, name: str = 'device', on_lost: Callable[[str], None] | None = None):
        self._name = name
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._changed = threading.Condition()  # of everything below
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._reason = ''  # why it is lost
        self._closed = False
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether a call did not return in time."""
        return bool(self._reason)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one of this executor."""
        return threading.current_thread() is self._thread

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future:
        """Have ``fn(*args)`` called after all that was submitted before; there is no time limit.

        :raises DeviceError: the executor is lost, closed, or belongs to another process.
        """
        return self._enqueue(_Job(fn, args, None)).future

    def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Return ``fn(*args)``, called on the executor's thread.

        What the function raises is raised here. A wait that is ended by Ctrl-C takes the call
        back if it has not begun; one that has begun ends by itself, and the next one follows it.
        On the executor's own thread the function is called at once, without a limit.

        :param timeout_s: limit of the call itself; waiting for its turn does not count.
        :raises DeviceError: it took longer, or the executor is lost, closed or of another
            process.
        """
        if self.is_here and os.getpid() == self._pid:
            return fn(*args)
        job = self._enqueue(_Job(fn, args, timeout_s))
        try:
            self._wait(job)
        except BaseException:
            job.future.cancel()
            raise
        try:
            return job.future.result()
        except CancelledError:
            raise DeviceError(f'{self._name}: closed before the call began') from None
        finally:
            del job  # an error's traceback holds this frame, and with it the arguments

    def close(self, final: Callable[[], Any] | None = None, *,
              timeout_s: float | None = None) -> bool:
        """End the thread after the call in flight; calls that have not begun are cancelled.

        May be called again and from any thread, and never waits longer than the limit. On the
        executor's own thread it returns at once, and the rest follows the current call.

        :param final: what the first caller wants to have called last, on the executor's thread.
        :param timeout_s: by default ``CLOSE_TIMEOUT_S``, and nothing for a thread that is stuck.
        :return: whether the thread has ended, and with it ``final``. A thread that is left
            behind still calls it if it comes back one day.
        """
        if os.getpid() != self._pid:
            return True
        with self._changed:
            if not self._closed:
                self._closed = True
                for job in self._jobs:
                    job.future.cancel()
                self._jobs.clear()
                if final is not None:
                    self._jobs.append(_Job(final, (), None))
                self._changed.notify_all()
            if self.is_here:
                return False
            if timeout_s is None:
                timeout_s = 0 if self.lost and self._running is not None else CLOSE_TIMEOUT_S
            self._changed.wait_for(lambda: self._ended, timeout_s)
            if not self._ended:
                what = self._running.name if self._running else 'its last call'
                self._reason = self._reason or f'{what} did not return within {timeout_s:g} s'
                _log.error('%s: closed without its thread, which is left behind in %s',
                           self._name, what)
            return self._ended

    def _enqueue(self, job: _Job) -> _Job:
        if os.getpid() != self._pid:
            raise DeviceError(f'{self._name}: opened by process {self._pid}, '
                              f'and this is process {os.getpid()}; open it here')
        with self._changed:
            if self.lost:
                raise DeviceError(f'{self._name}: lost, {self._reason}')
            if self._closed:
                raise DeviceError(f'{self._name}: closed')
            self._jobs.append(job)
            self._changed.notify_all()
        return job

    def _wait(self, job: _Job) -> None:
        """Return when a job is done; whoever waits also watches the job that runs."""
        while True:
            with self._changed:
                if job.future.done():
                    return
                # A call that has just come back is not late, whatever the clock says.
                running = self._running if self._running and not self._running.future.done() \
                    else None
                left_s = running.seconds_left() if running else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                self._lose(running)
            if self._on_lost is not None:
                self._call_on_lost()

    def _lose(self, job: _Job) -> None:
        """Give up the thread; with the lock held."""
        self._reason = f'{job.name} did not return within {job.timeout_s:g} s'
        for given_up in (job, *self._jobs):
            given_up.finish(error=DeviceError(f'{self._name}: {self._reason}'))
        self._jobs.clear()
        job.remove_limit()
        self._changed.notify_all()

    def _call_on_lost(self) -> None:
        callback, self._on_lost = self._on_lost, None
        try:
            callback(self._reason)
        except Exception:  # it is a report; the caller must get its DeviceError
            _log.exception('%s: on_lost failed', self._name)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    self._ended = True
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
                if not job.begin():
                    continue
                self._running = job
                self._changed.notify_all()
            job.run()
            with self._changed:
                self._running = None
                self._changed.notify_all()
            del job  # an idle thread must not keep the arguments and the result of the last call


class _Job:
    """One call: what to call, until when, and where its result goes."""

    def __init__(self, fn: Callable[..., Any], args: tuple, timeout_s: float | None):
        self.future: Future = Future()
        self.timeout_s = timeout_s
        self.name = getattr(fn, '__name__', type(fn).__name__).strip('_')
        self._call = (fn, args)
        self._until_s: float | None = None

    def begin(self) -> bool:
        """Start the clock; false for a call that was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return False
        if self.timeout_s is not None:
            self._until_s = time.monotonic() + self.timeout_s
        return True

    def seconds_left(self) -> float | None:
        return None if self._until_s is None else self._until_s - time.monotonic()

    def remove_limit(self) -> None:
        self._until_s = None

    def run(self) -> None:
        fn, args = self._call
        del self._call
        try:
            result = fn(*args)
        except BaseException as error:  # goes to the caller, whatever it is
            self.finish(error=error)
        else:
            self.finish(result)

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Give the caller its result, unless it was given up before."""
        try:
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)
        except InvalidStateError:
            if not self.future.cancelled():
                _log.warning('%s came back after it was given up', self.name)
