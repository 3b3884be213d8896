# SPDX-License-Identifier: Apache-2.0
"""A managed node that answers sensor frames with a model, whichever model it is."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from rclpy.clock import Clock, ClockType

from tt_perception.ros.diagnostics import (
    DiagnosticsPublisher,
    Level,
    Throttle,
    frame_report,
    frame_values,
)
from tt_perception.ros.lifecycle import ManagedNode
from tt_perception.ros.mailbox import FrameCounter, Mailbox, Worker
from tt_perception.runtime.errors import InputError

_DIAGNOSTICS_PERIOD_S = 1.0
_REPORT_PERIOD_S = 10.0
_REPEAT_S = 5.0
_FIRST_PERIOD_S, _MIN_PERIOD_S, _MAX_PERIOD_S = 0.1, 0.05, 1.0


class FrameNode(ManagedNode):
    """A node that works on the newest frame of one input.

    A subclass subscribes with :meth:`receive` as the callback after :meth:`start_frames`, begins
    to answer a frame in :meth:`process` and ends it in :meth:`answer`. Everything that is timed
    here uses the steady clock, so it also works under ``use_sim_time`` without a clock.

    :ivar counter: what became of the frames since the node was created.
    :ivar period_s: time between the last two frames, within reasonable limits.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        """See :class:`ManagedNode`."""
        super().__init__(name, **kwargs)
        self.counter = FrameCounter()
        self.period_s = _FIRST_PERIOD_S
        self.diagnostics = DiagnosticsPublisher(self)
        self._throttle = Throttle(_REPEAT_S)
        self._mailbox = Mailbox(self.counter)
        self._worker: Worker | None = None
        self._received_s: float | None = None
        self._last_refusal: str | None = None
        self._reported = self.counter.counts()
        self._reported_s = time.monotonic()
        self.create_timer(_DIAGNOSTICS_PERIOD_S, self._on_timer,
                          clock=Clock(clock_type=ClockType.STEADY_TIME))

    def process(self, message: Any) -> Future:
        """Begin to answer one frame, on the worker's thread; return the result to come.

        :raises InputError: the frame is refused. Any other exception is a fault of the node.
        """
        raise NotImplementedError

    def answer(self, message: Any, result: Any) -> None:
        """Publish what became of one frame, on the thread that has the result."""
        raise NotImplementedError

    def receive(self, message: Any) -> None:
        """Take a frame; the callback of the subscription."""
        now_s = time.monotonic()
        if self._received_s is not None:
            self.period_s = min(max(now_s - self._received_s, _MIN_PERIOD_S), _MAX_PERIOD_S)
        self._received_s = now_s
        self._mailbox.put(message)

    def start_frames(self, most_in_flight: int = 1) -> None:
        """Start the worker.

        :param most_in_flight: frames that are being answered at a time.
        """
        self._received_s = None
        self._reported_s = time.monotonic()
        self._last_refusal = None
        self._mailbox = Mailbox(self.counter)
        self._worker = Worker(self._mailbox, self._work, self.report_fault, most_in_flight)

    def stop_frames(self) -> None:
        """Let the worker finish the frame in progress, and end it; may be repeated."""
        self._mailbox.close()
        if self._worker is not None and self.wait_for(self._worker.finished):
            self._worker = None

    def drop_waiting_frame(self) -> None:
        """Forget the frame that waits for the worker."""
        self._mailbox.clear()

    @property
    def is_stopping(self) -> bool:
        """The worker is to finish its frame without waiting for anything."""
        return self._mailbox.closed

    def warn_throttled(self, kind: str, text: str) -> None:
        """Log a warning, at most once in five seconds for each kind."""
        if self._throttle.ready(kind):
            self.get_logger().warning(text)

    def _work(self, message: Any) -> Future | None:
        start_s = time.perf_counter()
        try:
            result = self.process(message)
        except InputError as error:
            self._refuse(error)
            return None
        except Exception:
            self.counter.add('failed')
            raise
        answered: Future = Future()
        result.add_done_callback(lambda done: self._complete(message, start_s, done, answered))
        return answered

    def _complete(self, message: Any, start_s: float, result: Future, answered: Future) -> None:
        try:
            self.answer(message, result.result())
        except InputError as error:
            self._refuse(error)
        except BaseException as error:  # for the worker, which lets the node know
            self.counter.add('failed')
            answered.set_exception(error)
            return
        else:
            self.counter.add_answered((time.perf_counter() - start_s) * 1e3)
            self._last_refusal = None
        answered.set_result(None)

    def _refuse(self, error: InputError) -> None:
        self.counter.add_refused(error.reason)
        self._last_refusal = f'frame refused ({error.reason}): {error}'
        self.warn_throttled(f'refused.{error.reason}', self._last_refusal)

    def _on_timer(self) -> None:
        counts = self.counter.counts()
        refusal = self._last_refusal
        if self.fault is not None:
            level, message = Level.ERROR, self.fault
        elif not self.is_active:
            level, message = Level.OK, 'not active'
        elif refusal is not None:
            level, message = Level.WARN, refusal
        else:
            level, message = Level.OK, 'OK'
        self.diagnostics.publish(self.get_clock().now().to_msg(), 'frames', level, message,
                                 frame_values(counts))
        if self.is_active and time.monotonic() - self._reported_s >= _REPORT_PERIOD_S:
            self._reported_s = time.monotonic()
            if counts.received != self._reported.received:
                self.get_logger().info(frame_report(counts, self._reported))
            self._reported = counts
