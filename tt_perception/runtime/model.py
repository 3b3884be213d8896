# SPDX-License-Identifier: Apache-2.0
"""What every loaded model does the same way: it is closed once, and it times its stages."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Hashable, Iterator
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

    A subclass frees what it holds in :meth:`_release`, which is called exactly once, when the
    model is closed and no call is inside :meth:`_in_use`. Its constructor calls this one last,
    when there is something to free. A model belongs to the process that loaded it: a forked child
    can neither use nor close it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._users: list[Hashable] = []  # threads inside a call, and work they have left behind
        self._closed = False
        self._released = False
        self._state = threading.Condition()
        _open_models.add(self)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the model open inside the block.

        :raises PerceptionError: the model is closed, or was loaded in another process.
        """
        name = type(self).__name__
        if os.getpid() != self._pid:
            raise PerceptionError(f'{name}: the model was loaded in another process, '
                                  f'{self._pid}; load it in this one')
        me = threading.get_ident()
        with self._state:
            if self._closed:
                raise PerceptionError(f'{name}: the model is closed')
            self._users.append(me)
        try:
            yield
        finally:
            self._leave(me)

    def _enter(self, user: Hashable) -> None:
        """Keep the model open for one more user, inside a call or for work left behind."""
        with self._state:
            self._users.append(user)

    def _leave(self, user: Hashable) -> None:
        """End what :meth:`_enter` began; the last user of a closed model frees it."""
        with self._state:
            self._users.remove(user)
            is_last = self._closed and not self._users
        if is_last:
            self._release_now()

    def close(self) -> None:
        """Free everything after the calls in flight; may be repeated.

        Returns when that is done, except inside a call (from a signal handler, say): then it is
        done when that call ends.
        """
        if os.getpid() != self._pid:
            return
        with self._state:
            is_first, self._closed = not self._closed, True
            if threading.get_ident() in self._users:
                return
            if not is_first or self._users:
                self._state.wait_for(lambda: self._released)
                return
        self._release_now()

    def _release_now(self) -> None:
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
