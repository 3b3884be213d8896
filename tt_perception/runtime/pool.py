# SPDX-License-Identifier: Apache-2.0
"""A small thread pool for compiled kernels that release the GIL and work on ranges of rows.

Numba's own ``parallel=True`` is not used: the threading layer that it falls back to aborts the
process when two threads call compiled functions at once.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

MAX_THREADS = 8
ROWS_PER_CALL = 4096  # fewer rows than this are not worth waking a thread
CALLS_PER_THREAD = 2  # more than one, so that a thread that was held up does not delay the rest


class RowPool:
    """Runs ``kernel(begin, end, *args)`` over parts of a range of rows, in parallel.

    Any number of threads may call :meth:`run` at once. The calling thread works on its own rows
    until none is left and then waits only for parts that another thread is already computing, so
    callers cannot wait for one another in a circle. A kernel must not assume an order of its
    parts, nor that they run in different threads.

    The threads are daemons; they start with the first call that has work for them, and start
    anew in a forked child. They end with the pool.

    :param threads: how many threads work on one call, the caller included; by default the CPUs
        that the process may use, at most ``MAX_THREADS``.
    """

    def __init__(self, threads: int | None = None):
        if threads is None:
            threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
        self.threads = max(int(threads), 1)
        self._queues: dict[int, queue.SimpleQueue] = {}  # of this process, and of its parents

    def run(self, kernel: Callable[..., Any], n: int, *args: Any,
            grain: int = ROWS_PER_CALL) -> None:
        """Call ``kernel(begin, end, *args)`` over disjoint ranges that cover ``[0, n)``.

        Returns when every range is done. With few rows the caller does all the work.

        :param kernel: releases the GIL if it shall run in parallel; its result is not looked at.
        :param n: number of rows; with 0 nothing is called.
        :param grain: least number of rows of one call, where there are as many.
        :raises BaseException: what a kernel raised, the first of them, after all calls ended.
        """
        parts = min(n // grain, self.threads * CALLS_PER_THREAD)
        if self.threads == 1 or parts < 2:
            if n > 0:
                kernel(0, n, *args)
            return
        job = _Job(kernel, n, parts, args)
        helpers = self._helpers()
        for _ in range(min(parts, self.threads) - 1):
            helpers.put(job)
        job.work()
        job.wait()

    def _helpers(self) -> queue.SimpleQueue:
        """Return the queue that the helping threads of this process read; start them if new."""
        pid = os.getpid()
        jobs = self._queues.get(pid)
        if jobs is None:
            mine: queue.SimpleQueue = queue.SimpleQueue()
            jobs = self._queues.setdefault(pid, mine)  # atomic; a lock might be held at a fork
            if jobs is mine:
                for i in range(self.threads - 1):
                    threading.Thread(target=_help, args=(jobs,), name=f'rows-{i}',
                                     daemon=True).start()
                weakref.finalize(self, _dismiss, jobs, self.threads - 1)
        return jobs


class _Job:
    """One call of :meth:`RowPool.run`: hands out parts and notices when all are done."""

    def __init__(self, kernel: Callable[..., Any], n: int, parts: int, args: tuple):
        self._kernel = kernel
        self._args = args
        self._bounds = [n * i // parts for i in range(parts + 1)]
        self._parts = parts
        self._tickets = itertools.count()  # next() of a count is atomic
        self._finished = itertools.count(1)
        self._all_finished = threading.Lock()
        self._all_finished.acquire()
        self._error: BaseException | None = None

    def work(self) -> None:
        """Compute parts until none is left; after an error the rest is skipped."""
        for part in self._tickets:
            if part >= self._parts:
                return
            try:
                if self._error is None:
                    self._kernel(self._bounds[part], self._bounds[part + 1], *self._args)
            except BaseException as error:  # goes to the caller, whichever thread met it
                self._error = self._error or error
            finally:
                if next(self._finished) == self._parts:
                    self._all_finished.release()

    def wait(self) -> None:
        """Wait for the parts that others still compute, then raise what a kernel raised."""
        self._all_finished.acquire()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and with it the arrays of the call


def _help(jobs: queue.SimpleQueue) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job.work()
        del job  # an idle thread must not keep the arrays of the last call


def _dismiss(jobs: queue.SimpleQueue, threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)


_shared: dict[str, RowPool] = {}


def shared() -> RowPool:
    """Return the pool of this process; made at the first call."""
    return _shared.get('pool') or _shared.setdefault('pool', RowPool())
