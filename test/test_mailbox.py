# SPDX-License-Identifier: Apache-2.0
"""The newest frame wins, and every frame is in exactly one counter."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tt_perception.ros.diagnostics import Throttle, frame_report, frame_values
from tt_perception.ros.mailbox import FrameCounter, FrameCounts, Mailbox, Worker


def test_take_gives_the_newest_and_counts_what_it_replaced():
    counter = FrameCounter()
    mailbox = Mailbox(counter)
    for frame in ('a', 'b', 'c'):
        mailbox.put(frame)
    assert mailbox.take() == 'c'
    assert counter.counts() == FrameCounts(received=3, replaced=2)
    assert counter.counts().in_progress == 1


def test_take_waits_for_a_frame():
    mailbox = Mailbox(FrameCounter())
    taken = []
    taker = threading.Thread(target=lambda: taken.append(mailbox.take()))
    taker.start()
    time.sleep(0.05)
    assert not taken
    mailbox.put('a')
    taker.join(5)
    assert taken == ['a']


def test_close_ends_the_wait_and_discards_what_is_left():
    counter = FrameCounter()
    mailbox = Mailbox(counter)
    taken = []
    taker = threading.Thread(target=lambda: taken.append(mailbox.take()))
    taker.start()
    mailbox.close()
    taker.join(5)
    assert taken == [None]
    mailbox.put('late')
    mailbox.close()
    assert mailbox.take() is None and mailbox.closed
    assert counter.counts() == FrameCounts(received=1, discarded=1)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(['put', 'take', 'clear']), max_size=30))
def test_every_frame_is_in_one_counter(steps):
    counter = FrameCounter()
    mailbox = Mailbox(counter)
    waiting, received, taken = None, 0, 0
    for step in steps:
        if step == 'put':
            received += 1
            waiting = received
            mailbox.put(received)
        elif step == 'clear':
            waiting = None
            mailbox.clear()
        elif waiting is not None:
            assert mailbox.take() == waiting
            waiting = None
            taken += 1
            counter.add_answered(1.0)
    counts = counter.counts()
    assert counts.received == received and counts.answered == taken
    assert counts.in_progress == (waiting is not None)
    mailbox.close()
    assert counter.counts().in_progress == 0


def test_B25_a_slow_worker_gets_the_newest_frame_and_never_a_queue():
    counter = FrameCounter()
    mailbox = Mailbox(counter)
    ages_s = []

    def work(sent_s):
        ages_s.append(time.monotonic() - sent_s)
        time.sleep(0.05)
        counter.add_answered(50.0)

    worker = Worker(mailbox, work, lambda error: None)
    for _ in range(60):
        mailbox.put(time.monotonic())
        time.sleep(0.005)
    mailbox.close()
    assert worker.finished.wait(5)
    counts = counter.counts()
    assert counts.in_progress == 0 and counts.received == 60
    assert counts.replaced >= 40
    # The time between two frames plus what a loaded machine adds; a queue would reach 0.3 s.
    assert sorted(ages_s)[len(ages_s) // 2] < 0.05


def test_an_exception_ends_the_worker_and_is_handed_on():
    errors = []
    mailbox = Mailbox(FrameCounter())
    worker = Worker(mailbox, lambda frame: 1 / frame, errors.append)
    mailbox.put(0)
    assert worker.finished.wait(5)
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_report_of_the_time_between_two_moments():
    before = FrameCounts(received=10, answered=8, replaced=2, total_ms=800.0)
    now = FrameCounts(received=110, answered=88, replaced=12, refused={'empty': 9, 'layout': 1},
                      total_ms=2400.0)
    assert frame_report(now, before) == (
        'frames: received 100, answered 80, replaced 10, refused (empty) 9, refused (layout) 1, '
        'mean 20 ms')
    assert frame_values(now)['refused.empty'] == 9
    assert frame_report(now, now) == 'frames: received 0, answered 0, replaced 0'


def test_throttle_is_separate_for_each_kind():
    throttle = Throttle(0.05)
    assert [throttle.ready(kind) for kind in ('a', 'b', 'a', 'b')] == [True, True, False, False]
    time.sleep(0.06)
    assert throttle.ready('a')
