# SPDX-License-Identifier: Apache-2.0
"""What every loaded model does the same way: it is closed once, and it times its stages."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from tt_perception.runtime.errors import PerceptionError

_log = logging.getLogger(__name__)
_open_models: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _close_open_models() -> None:
    for model in list(_open_models):
        try:
            model.close()
        except Exception:  # the next one must be closed all the same
            _log.exception('%s: cannot be closed', type(model).__name__)


class Model:
    """Base of the models: a context manager that is closed at the latest when Python exits.

    A subclass frees what it holds in :meth:`_release`; ``close`` calls that exactly once, after
    the last call that is inside :meth:`_in_use` has returned. Its constructor calls this one last,
    when there is something to free.
    """

    def __init__(self) -> None:
        self._users = 0
        self._closed = False
        self._released = False
        self._state = threading.Condition()
        _open_models.add(self)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the model open inside the block.

        :raises PerceptionError: when the model is closed.
        """
        with self._state:
            if self._closed:
                raise PerceptionError(f'{type(self).__name__}: the model is closed')
            self._users += 1
        try:
            yield
        finally:
            with self._state:
                self._users -= 1
                self._state.notify_all()

    def close(self) -> None:
        """Wait for the calls in flight and free everything; may be repeated."""
        with self._state:
            if self._closed:
                self._state.wait_for(lambda: self._released)
                return
            self._closed = True
            self._state.wait_for(lambda: self._users == 0)
        _open_models.discard(self)
        try:
            self._release()
        finally:
            with self._state:
                self._released = True
                self._state.notify_all()

    def _release(self) -> None:
        """Free what the model holds."""

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StageClock:
    """Wall time of consecutive stages, in milliseconds."""

    def __init__(self) -> None:
        self.stages_ms: dict[str, float] = {}
        self._last = self._start = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last lap under ``stage``."""
        now = time.perf_counter()
        self.stages_ms[stage] = (now - self._last) * 1e3
        self._last = now

    def total_ms(self) -> float:
        """Return the time since the clock was made."""
        return (time.perf_counter() - self._start) * 1e3
