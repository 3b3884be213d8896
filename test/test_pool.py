# SPDX-License-Identifier: Apache-2.0
"""The row pool: every row once, from any thread, and errors reach the caller."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from tt_perception.runtime import pool
from tt_perception.runtime.jit import kernel
from tt_perception.runtime.pool import RowPool


@kernel
def _add(begin, end, amount, out):
    for i in range(begin, end):
        out[i] += amount


def _add_python(begin, end, amount, out):
    out[begin:end] += amount


@pytest.mark.parametrize('add', [_add, _add_python])
@pytest.mark.parametrize('threads', [1, 2, 5])
@pytest.mark.parametrize('n', [0, 1, 4095, 4096, 8192, 8193, 100_003])
def test_every_row_is_computed_once(add, threads, n):
    out = np.zeros(n + 1, np.int64)
    RowPool(threads).run(add, n, 3, out)
    assert (out[:n] == 3).all()
    assert out[n] == 0


def test_ranges_are_contiguous_and_not_empty():
    ranges = []
    RowPool(3).run(lambda begin, end: ranges.append((begin, end)), 100_000)
    ranges.sort()
    assert len(ranges) > 1
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 100_000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert all(begin < end for begin, end in ranges)


def test_few_rows_are_computed_by_the_caller_in_one_call():
    calls = []
    RowPool(4).run(lambda *rows: calls.append((rows, threading.get_ident())),
                   pool.ROWS_PER_CALL - 1)
    assert calls == [((0, pool.ROWS_PER_CALL - 1), threading.get_ident())]


def test_a_small_grain_spreads_few_heavy_rows():
    met = threading.Barrier(2, timeout=20)
    RowPool(2).run(lambda begin, end: met.wait(), 2, grain=1)  # neither part can end alone


def test_several_threads_work_on_one_call():
    met = threading.Barrier(3, timeout=20)
    RowPool(3).run(lambda begin, end: met.wait(), 6, grain=1)


@pytest.mark.parametrize('bad_row', [0, 50_000, 99_999])
def test_an_error_of_a_kernel_reaches_the_caller_after_all_parts_ended(bad_row):
    running = []

    def part(begin, end):
        running.append(begin)
        time.sleep(0.01)
        try:
            if begin <= bad_row < end:
                raise ZeroDivisionError(bad_row)
        finally:
            running.remove(begin)

    rows = RowPool(3)
    with pytest.raises(ZeroDivisionError, match=str(bad_row)):
        rows.run(part, 100_000)
    assert not running
    out = np.zeros(100_000, np.int64)
    rows.run(_add, len(out), 1, out)
    assert (out == 1).all()


def test_callers_in_many_threads_do_not_disturb_or_block_one_another():
    rows = RowPool(3)
    outs = [np.zeros(20_000, np.int64) for _ in range(12)]

    def caller(out):
        for _ in range(100):
            rows.run(_add, len(out), 1, out)

    threads = [threading.Thread(target=caller, args=(out,), daemon=True) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all((out == 100).all() for out in outs)


def test_a_kernel_may_use_the_pool_itself():
    rows = RowPool(2)
    out = np.zeros(100_000, np.int64)
    rows.run(lambda begin, end: rows.run(_add, end - begin, 1, out[begin:end]), len(out))
    assert (out == 1).all()


def test_a_finished_call_leaves_no_reference_to_its_arrays():
    out = np.zeros(100_000, np.int64)
    rows = RowPool(4)
    rows.run(_add, len(out), 1, out)
    alive = weakref.ref(out)
    del out
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:  # a late thread lets go soon
        time.sleep(0.01)
    assert alive() is None


def test_threads_end_with_their_pool():
    rows = RowPool(3)
    rows.run(lambda begin, end: None, 100_000)
    before = threading.active_count()
    del rows
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before - 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before - 2


def test_the_shared_pool_is_one():
    found = []
    threads = [threading.Thread(target=lambda: found.append(pool.shared())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(p is pool.shared() for p in found)


def test_it_works_in_a_forked_child_and_does_not_keep_the_process_alive():
    script = '''
import os, threading
from tt_perception.runtime.pool import RowPool
rows = RowPool(3)
def work():
    met = threading.Barrier(3, timeout=20)
    rows.run(lambda begin, end: met.wait(), 3, grain=1)
work()
child = os.fork()
work()
if child:
    assert os.waitpid(child, 0)[1] == 0
    work()
'''
    subprocess.run([sys.executable, '-W', 'ignore', '-c', script], check=True, timeout=60)
