# SPDX-License-Identifier: Apache-2.0
"""The newest message wins: one slot between the executor and the thread that does the work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FrameCounts:
    """What became of the frames so far: each that was received is in exactly one of the others.

    :ivar replaced: overtaken by a newer one before work on it began.
    :ivar discarded: waiting when the node was deactivated, or when time jumped back.
    :ivar answered: a result was published.
    :ivar refused: reason -> frames that were refused for it.
    :ivar failed: an unexpected error ended the work on it.
    :ivar in_progress: waiting in the mailbox, or being worked on.
    :ivar total_ms: sum of the processing times of the answered frames.
    """

    received: int = 0
    replaced: int = 0
    discarded: int = 0
    answered: int = 0
    failed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    total_ms: float = 0.0

    @property
    def in_progress(self) -> int:
        """Frames of which nothing has become yet."""
        return (self.received - self.replaced - self.discarded - self.answered - self.failed
                - sum(self.refused.values()))


class FrameCounter:
    """Counts frames; safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._total_ms = 0.0

    def add(self, name: str) -> None:
        """Count one frame under a name of :class:`FrameCounts`."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + 1

    def add_answered(self, processing_ms: float) -> None:
        """Count one frame that got its answer."""
        with self._lock:
            self._counts['answered'] = self._counts.get('answered', 0) + 1
            self._total_ms += processing_ms

    def add_refused(self, reason: str) -> None:
        """Count one frame that was refused for a reason."""
        with self._lock:
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def counts(self) -> FrameCounts:
        """Return all counts of one moment."""
        with self._lock:
            return FrameCounts(**self._counts, refused=dict(self._refused),
                               total_ms=self._total_ms)


class Mailbox:
    """One slot; a new message replaces the one that waits."""

    def __init__(self, counter: FrameCounter) -> None:
        self._counter = counter
        self._changed = threading.Condition()
        self._message: Any = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """No more messages are taken."""
        return self._closed

    def put(self, message: Any) -> None:
        """Leave a message."""
        with self._changed:
            self._counter.add('received')
            if self._closed:
                self._counter.add('discarded')
                return
            if self._message is not None:
                self._counter.add('replaced')
            self._message = message
            self._changed.notify()

    def take(self) -> Any:
        """Wait for a message; return None when the mailbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._message is not None or self._closed)
            message, self._message = self._message, None
            return message

    def clear(self) -> None:
        """Throw away the message that waits."""
        with self._changed:
            if self._message is not None:
                self._counter.add('discarded')
                self._message = None

    def close(self) -> None:
        """Take no more messages, and let :meth:`take` return; may be repeated."""
        with self._changed:
            self.clear()
            self._closed = True
            self._changed.notify_all()


class Worker:
    """A thread that works on one message after the other until its mailbox is closed.

    :ivar finished: set when the thread has nothing more to do.
    """

    def __init__(self, mailbox: Mailbox, work: Callable[[Any], Future | None],
                 on_failure: Callable[[Exception], None], most_in_flight: int = 1) -> None:
        """Start the thread.

        :param work: begins to answer a message; a future that it returns is done when the answer
            is out.
        :param on_failure: takes the exception that ended the thread, on that thread; no message
            is taken any more.
        :param most_in_flight: a message is taken when fewer than these are being answered.
        """
        self._mailbox = mailbox
        self._work = work
        self._on_failure = on_failure
        self._most_in_flight = most_in_flight
        self.finished = threading.Event()
        # A daemon, so that a call that never returns cannot keep the process alive.
        threading.Thread(target=self._run, name='frames', daemon=True).start()

    def _run(self) -> None:
        in_flight: deque[Future] = deque()
        try:
            while (message := self._mailbox.take()) is not None:
                if (answer := self._work(message)) is not None:
                    in_flight.append(answer)
                    answer.add_done_callback(self._end_if_failed)
                if len(in_flight) == self._most_in_flight:
                    in_flight.popleft().result()
            while in_flight:
                in_flight.popleft().result()
        except Exception as error:  # whatever it is: the node must learn of it
            wait(in_flight)
            self._on_failure(error)
        finally:
            self.finished.set()

    def _end_if_failed(self, answer: Future) -> None:
        """Have the thread, which may be waiting for a message, learn of a failure at once."""
        if answer.exception() is not None:
            self._mailbox.close()
