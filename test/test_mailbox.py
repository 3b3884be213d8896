# SPDX-License-Identifier: Apache-2.0
"""The newest frame wins, and every frame is in exactly one counter."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
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


# ---- several frames in flight ----

class Answers:
    """Takes frames, and answers them when the test says so."""

    def __init__(self, most_in_flight: int = 2) -> None:
        self.counter = FrameCounter()
        self.mailbox = Mailbox(self.counter)
        self.taken: list[Future] = []
        self.errors: list[Exception] = []
        self.worker = Worker(self.mailbox, self._take, self.errors.append, most_in_flight)

    def _take(self, frame) -> Future | None:
        if frame == 'refused':
            self.counter.add_refused('test')
            return None
        self.taken.append(Future())
        return self.taken[-1]

    def put(self, *frames) -> None:
        """Leave frames one after the other, each when the one before is taken."""
        for frame in frames:
            self.mailbox.put(frame)
            self.wait(lambda: self.mailbox._message is None)

    def answer(self, number: int, error: Exception | None = None) -> None:
        self.counter.add('failed' if error else 'answered')
        if error is None:
            self.taken[number].set_result(None)
        else:
            self.taken[number].set_exception(error)

    @staticmethod
    def wait(condition) -> None:
        deadline_s = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.005)


def test_a_frame_is_taken_while_fewer_than_the_most_are_being_answered():
    frames = Answers()
    frames.put('refused', 'a', 'refused', 'b')
    frames.mailbox.put('c')
    frames.mailbox.put('d')
    time.sleep(0.05)
    assert len(frames.taken) == 2
    frames.answer(0)
    frames.wait(lambda: len(frames.taken) == 3)
    frames.mailbox.close()
    assert not frames.worker.finished.wait(0.05)  # two are still being answered
    frames.answer(1)
    assert not frames.worker.finished.wait(0.05)
    frames.answer(2)
    assert frames.worker.finished.wait(5)
    counts = frames.counter.counts()
    assert counts == FrameCounts(received=6, replaced=1, answered=3, refused={'test': 2})
    assert counts.in_progress == 0 and not frames.errors


def test_a_failed_answer_ends_the_worker_without_another_frame():
    frames = Answers()
    frames.put('a')
    frames.answer(0, ValueError('injected'))
    assert frames.worker.finished.wait(5)
    assert [str(error) for error in frames.errors] == ['injected'] and frames.mailbox.closed
    frames.mailbox.put('late')
    assert frames.counter.counts() == FrameCounts(received=2, failed=1, discarded=1)


@pytest.mark.parametrize('failed', [0, 1])
def test_a_failed_answer_is_told_when_the_others_are_out(failed):
    frames = Answers()
    frames.put('a', 'b')
    frames.mailbox.put('waiting')
    frames.answer(failed, ValueError('injected'))
    assert not frames.worker.finished.wait(0.05)
    frames.answer(1 - failed)
    assert frames.worker.finished.wait(5)
    assert [str(error) for error in frames.errors] == ['injected']
    counts = frames.counter.counts()
    assert counts == FrameCounts(received=3, answered=1, failed=1, discarded=1)


@pytest.fixture
def run():
    """Return a function that starts the node, with a model that holds its answers back."""
    pytest.importorskip('rclpy')
    pytest.importorskip('autoware_perception_msgs.msg')
    from fake_bevfusion import FakeModel, FakeNode
    from test_node import Running

    class SlowModel(FakeModel):
        def __init__(self, config) -> None:
            super().__init__(config)
            self.num_submitted = 0
            self.go_on = threading.Event()
            self._thread = ThreadPoolExecutor(1)

        def submit(self, cloud, **arguments) -> Future:
            self.num_submitted += 1
            return self._thread.submit(self._answer, cloud, **arguments)

        def _answer(self, cloud, **arguments):
            assert self.go_on.wait(30)
            return self(cloud, **arguments)

    class SlowNode(FakeNode):
        def create_model(self) -> SlowModel:
            return SlowModel(super().create_model().config)

    running = []

    def start(pipeline: int) -> Running:
        running.append(Running(node_class=SlowNode, pipeline=pipeline,
                               densification_num_past_frames=0))
        running[-1].activate()
        return running[-1]

    yield start
    for one in running:
        if one.model is not None:
            one.model.go_on.set()
        one.close()


STAMPS_NS = [1_700_000_000_000_000_000 + 100_000_000 * i for i in range(5)]


def submit_two(node) -> None:
    """Have two clouds in flight."""
    for i in range(2):
        node.send(STAMPS_NS[i])
        Answers.wait(lambda i=i: node.model.num_submitted == i + 1)


def stamps_ns(node) -> list[int]:
    return [m.header.stamp.sec * 10**9 + m.header.stamp.nanosec for m in node.client.objects]


@pytest.mark.parametrize('pipeline', [1, 2])
def test_the_node_has_two_clouds_in_flight_and_answers_in_order(run, pipeline):
    node = run(pipeline)
    submit_two(node)
    for i in range(2, 5):
        node.send(STAMPS_NS[i])
        node.counts(received=i + 1)
    node.counts(replaced=2, in_progress=3)
    assert node.model.num_submitted == 2 and not node.client.objects
    node.model.go_on.set()
    node.answers(3)
    assert stamps_ns(node) == [STAMPS_NS[0], STAMPS_NS[1], STAMPS_NS[4]]
    assert [m.objects[0].shape.dimensions.z for m in node.client.objects] == [1, 2, 3]
    node.counts(received=5, replaced=2, answered=3, in_progress=0)


def test_without_a_pipeline_the_node_has_one_cloud_in_flight(run):
    node = run(0)
    for i in range(3):
        node.send(STAMPS_NS[i])
        node.counts(received=i + 1)
    node.counts(replaced=1, in_progress=2)
    assert node.model.num_submitted == 1
    node.model.go_on.set()
    node.answers(2)
    assert stamps_ns(node) == [STAMPS_NS[0], STAMPS_NS[2]]


def test_deactivation_waits_for_both_clouds_in_flight(run):
    from lifecycle_msgs.msg import Transition
    node = run(1)
    submit_two(node)
    node.send(STAMPS_NS[2])
    node.counts(received=3)
    answers: list[bool] = []
    changing = threading.Thread(target=lambda: answers.append(
        node.client.change_state(Transition.TRANSITION_DEACTIVATE)))
    changing.start()
    changing.join(0.3)
    assert changing.is_alive() and node.model.num_resets == 0
    node.model.go_on.set()
    changing.join(10)
    assert answers == [True]
    node.answers(2)
    assert stamps_ns(node) == STAMPS_NS[:2]
    node.counts(received=3, answered=2, discarded=1, in_progress=0)
    assert node.model.num_resets == 1 and node.model.num_submitted == 2


@pytest.mark.parametrize('failing', [1, 2])
def test_a_cloud_in_flight_that_fails_takes_the_node_out_of_service(run, failing):
    node = run(1)
    model = node.model
    model.fail_at = failing
    submit_two(node)
    model.go_on.set()
    Answers.wait(lambda: node.client.state() == 'unconfigured')
    assert model.is_closed
    node.counts(received=2, answered=1, failed=1, in_progress=0)
    assert stamps_ns(node) == [STAMPS_NS[2 - failing]]
    node.activate()
    node.model.go_on.set()
    node.send(STAMPS_NS[3])
    node.answers(2)
    node.counts(received=3, answered=2, failed=1, in_progress=0)


def test_one_cloud_that_fails_is_noticed_although_no_other_arrives(run):
    node = run(1)
    node.model.fail_at = 1
    node.model.go_on.set()
    node.send(STAMPS_NS[0])
    Answers.wait(lambda: node.client.state() == 'unconfigured')
    node.counts(received=1, failed=1, in_progress=0)
    assert node.client.wait_for_level('frames', 2).message == 'RuntimeError: injected fault'
