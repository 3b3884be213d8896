# SPDX-License-Identifier: Apache-2.0
"""The transform buffer gives what tf2 gives, by an oracle that works with matrices."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_perception.ros.tf import (
    CACHE_NS,
    ConnectivityFailed,
    ExtrapolationFailed,
    InvalidFrame,
    LookupFailed,
    TransformBuffer,
    TransformError,
    rigid_matrix,
)

S = 10**9
IDENTITY_Q = (0.0, 0.0, 0.0, 1.0)
NO_SHIFT = (0.0, 0.0, 0.0)


def yaw_q(angle: float) -> tuple[float, float, float, float]:
    return 0.0, 0.0, float(np.sin(angle / 2)), float(np.cos(angle / 2))


def rotation_of(axis: np.ndarray, angle: float) -> np.ndarray:
    x, y, z = axis / np.linalg.norm(axis)
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * (k @ k)


def axis_angle(rotation: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the axis and the angle in [0, pi) of a rotation matrix."""
    skew = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0],
                     rotation[1, 0] - rotation[0, 1]]) / 2
    sine = np.linalg.norm(skew)
    return (skew if sine > 0 else np.array([1.0, 0, 0])), np.arctan2(
        sine, (np.trace(rotation) - 1) / 2)


class Oracle:
    """Keeps every transform that was ever sent, and searches all of them at each look-up."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, int, np.ndarray, bool]] = []
        self.frames: set[str] = set()

    def insert(self, parent, child, stamp, axis, angle, shift, is_static):
        matrix = np.eye(4)
        matrix[:3, :3] = rotation_of(axis, angle)
        matrix[:3, 3] = shift
        self.frames |= {parent, child}
        mine = [t for t in self.sent if t[1] == child]
        if is_static or (mine and mine[-1][4]):  # replaces what was there
            self.sent = [t for t in self.sent if t[1] != child]
        elif mine:
            newest = max(t[2] for t in mine)
            if stamp < newest - CACHE_NS:
                return
            self.sent = [t for t in self.sent if t[1] != child or (
                t[2] != stamp and t[2] >= max(newest, stamp) - CACHE_NS)]
        self.sent.append((parent, child, stamp, matrix, is_static))

    def clear(self):
        self.sent = [t for t in self.sent if t[4]]

    def edge(self, child, stamp):
        """Return (parent, matrix), or what is wrong."""
        mine = sorted((t for t in self.sent if t[1] == child), key=lambda t: t[2])
        if not mine:
            return 'unknown' if child not in self.dynamic else 'outside'
        if mine[0][4]:
            return mine[0][0], mine[0][3]
        if stamp == 0:
            return mine[-1][0], mine[-1][3]
        if not mine[0][2] <= stamp <= mine[-1][2]:
            return 'outside'
        before = [t for t in mine if t[2] <= stamp][-1]
        after = [t for t in mine if t[2] >= stamp][0]
        if before is after or before[0] != after[0]:
            return before[0], before[3]
        ratio = (stamp - before[2]) / (after[2] - before[2])
        axis, angle = axis_angle(before[3][:3, :3].T @ after[3][:3, :3])
        matrix = np.eye(4)
        matrix[:3, :3] = before[3][:3, :3] @ rotation_of(axis, ratio * angle)
        matrix[:3, 3] = before[3][:3, 3] + ratio * (after[3][:3, 3] - before[3][:3, 3])
        return before[0], matrix

    dynamic: frozenset = frozenset()

    def chain(self, frame, stamp):
        """Return frame -> matrix towards the root, and why the walk ended."""
        walk = {frame: np.eye(4)}
        while True:
            edge = self.edge(frame, stamp)
            if isinstance(edge, str):
                return walk, edge
            walk[edge[0]] = edge[1] @ walk[frame]
            frame = edge[0]

    def lookup(self, target, source, stamp):
        """Return the matrix, or the class of the error and whether waiting may help."""
        if target == source:
            return np.eye(4)
        if not {target, source} <= self.frames:
            return LookupFailed, True
        latest = self.latest_common_time(target, source)
        if stamp == 0:
            if latest is None:
                return ConnectivityFailed, True
            stamp = latest
        up, up_end = self.chain(source, stamp)
        down, down_end = self.chain(target, stamp)
        common = [frame for frame in up if frame in down]
        if common:
            return np.linalg.inv(down[common[0]]) @ up[common[0]]
        ends = {up_end, down_end} - {'unknown'}
        if not ends:
            return ConnectivityFailed, True
        return ExtrapolationFailed, latest is None or latest < stamp

    def latest_common_time(self, target, source):
        chains = [self.latest_chain(frame) for frame in (source, target)]
        if not set(chains[0]) & set(chains[1]):
            return None
        way = set(chains[0]) ^ set(chains[1])
        newest = [max(t[2] for t in self.sent if t[1] == f) for f in way
                  if any(t[1] == f and not t[4] for t in self.sent)]
        return min((t for t in newest if t), default=0)

    def latest_chain(self, frame):
        chain = [frame]
        while mine := [t for t in self.sent if t[1] == chain[-1]]:
            chain.append(max(mine, key=lambda t: t[2])[0])
        return chain


FRAMES = 'abcdef'
STAMPS = st.integers(0, 14).map(lambda n: n * S)
NUMBERS = st.floats(-50, 50)
INSERT = st.tuples(
    st.just('insert'), st.integers(0, 4), st.integers(1, 5), STAMPS,
    st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda v: np.linalg.norm(v) > 0.1),
    st.floats(-1.5, 1.5), st.tuples(NUMBERS, NUMBERS, NUMBERS),
    st.integers(0, 5).map(lambda n: n == 0))
LOOKUP = st.tuples(st.just('lookup'), st.integers(0, 5), st.integers(0, 5),
                   st.integers(0, 28).map(lambda n: n * S // 2))
CLEAR = st.tuples(st.just('clear'))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.one_of(INSERT, INSERT, INSERT, LOOKUP, LOOKUP, CLEAR), min_size=8, max_size=60))
def test_equals_search_through_everything_sent(steps):
    buffer, oracle = TransformBuffer(), Oracle()
    dynamic: set[str] = set()
    oracle.dynamic = dynamic  # frames that have had a moving parent: known to tf2 for ever
    for step in steps:
        if step[0] == 'clear':
            buffer.clear()
            oracle.clear()
        elif step[0] == 'insert':
            _, parent, child, stamp, axis, angle, shift, is_static = step
            parent = min(parent, child - 1)  # no loops
            axis = np.array(axis)
            q = [*(axis / np.linalg.norm(axis) * np.sin(angle / 2)), np.cos(angle / 2)]
            buffer.insert(FRAMES[parent], FRAMES[child], stamp, shift, q, is_static)
            oracle.insert(FRAMES[parent], FRAMES[child], stamp, axis, angle, shift, is_static)
            (dynamic.discard if is_static else dynamic.add)(FRAMES[child])
        else:
            _, target, source, stamp = step
            expected = oracle.lookup(FRAMES[target], FRAMES[source], stamp)
            if isinstance(expected, tuple):
                with pytest.raises(expected[0]) as caught:
                    buffer.lookup_matrix(FRAMES[target], FRAMES[source], stamp)
                assert caught.value.may_arrive == expected[1]
                assert caught.value.reason == 'no_transform'
            else:
                found = buffer.lookup_matrix(FRAMES[target], FRAMES[source], stamp)
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def moving(speed: float = 1.0, seconds: int = 10) -> TransformBuffer:
    """Return a buffer with ``base`` moving along x of ``map``, and a sensor mounted on it."""
    buffer = TransformBuffer()
    for second in range(1, seconds + 1):
        buffer.insert('map', 'base', second * S, (speed * second, 0, 0), IDENTITY_Q)
    buffer.insert('base', 'lidar', 0, (0, 0, 2), yaw_q(np.pi / 2), is_static=True)
    return buffer


def test_maps_points_of_the_source_to_the_target_at_the_time_between_two_transforms():
    point = np.array([1.0, 0, 0, 1])
    found = moving().lookup_matrix('map', 'lidar', 5 * S // 2) @ point
    np.testing.assert_allclose(found, [2.5, 1, 2, 1], atol=1e-12)


def test_rotation_takes_the_short_way_whatever_the_sign_of_the_quaternion():
    for sign in (1, -1):
        buffer = TransformBuffer()
        buffer.insert('map', 'base', 1 * S, NO_SHIFT, yaw_q(0.0))
        buffer.insert('map', 'base', 2 * S, NO_SHIFT, tuple(sign * v for v in yaw_q(1.0)))
        found = buffer.lookup_matrix('map', 'base', 3 * S // 2)
        assert np.arctan2(found[1, 0], found[0, 0]) == pytest.approx(0.5, abs=1e-12)


def test_nearly_equal_rotations_keep_their_precision():
    buffer = TransformBuffer()
    buffer.insert('map', 'base', 1 * S, NO_SHIFT, yaw_q(0.0))
    buffer.insert('map', 'base', 2 * S, NO_SHIFT, yaw_q(1e-8))
    found = buffer.lookup_matrix('map', 'base', 5 * S // 4)
    assert found[1, 0] == pytest.approx(0.25e-8, rel=1e-6)


def test_too_new_may_arrive_and_too_old_never_does():
    with pytest.raises(ExtrapolationFailed, match="1.0+ s to 10.0+ s .* 'base'") as caught:
        moving().lookup_matrix('map', 'lidar', 11 * S)
    assert caught.value.may_arrive
    with pytest.raises(ExtrapolationFailed) as caught:
        moving().lookup_matrix('map', 'lidar', S // 2)
    assert not caught.value.may_arrive


def test_an_edge_above_the_common_ancestor_is_not_needed():
    buffer = moving()
    buffer.insert('base', 'camera', 0, (1, 0, 0), IDENTITY_Q, is_static=True)
    found = buffer.lookup_matrix('camera', 'lidar', 99 * S)  # map is out of reach at this time
    np.testing.assert_allclose(found[:3, 3], [-1, 0, 2])


def test_errors_tell_unknown_frames_from_separate_trees():
    buffer = moving()
    buffer.insert('world', 'other', 0, NO_SHIFT, IDENTITY_Q, is_static=True)
    with pytest.raises(LookupFailed, match="'nowhere'"):
        buffer.lookup_matrix('map', 'nowhere', 2 * S)
    with pytest.raises(ConnectivityFailed, match="'other' and 'map'"):
        buffer.lookup_matrix('map', 'other', 2 * S)
    with pytest.raises(InvalidFrame):
        buffer.lookup_matrix('map', '', 2 * S)


def test_a_frame_that_is_its_own_ancestor_is_an_error_and_no_endless_loop():
    buffer = TransformBuffer()
    for parent, child in ('ab', 'bc', 'ca'):
        buffer.insert(parent, child, 0, NO_SHIFT, IDENTITY_Q, is_static=True)
    buffer.insert('x', 'y', 0, NO_SHIFT, IDENTITY_Q, is_static=True)
    for stamp in (0, S):
        with pytest.raises(LookupFailed, match='its own ancestor'):
            buffer.lookup_matrix('x', 'a', stamp)


def test_D04_a_leading_slash_is_not_part_of_a_name():
    buffer = TransformBuffer()
    buffer.insert('/map', '/base', S, (1, 2, 3), IDENTITY_Q)
    expected = rigid_matrix((1, 2, 3), IDENTITY_Q)
    for target, source in (('map', 'base'), ('/map', '/base'), ('map', '/base')):
        np.testing.assert_array_equal(buffer.lookup_matrix(target, source, S), expected)


@pytest.mark.parametrize('quaternion', [(0, 0, 0, 0), (0, 0, 0, float('nan')),
                                        (0, 0, float('inf'), 1), (1.7e308,) * 4,
                                        (0, 0, 0, 1e7), (0, 0, 0, -1e-7), (5e-324,) * 4])
def test_A40_a_transform_with_a_bad_quaternion_is_as_good_as_none(quaternion):
    buffer = TransformBuffer()
    problem = buffer.insert('map', 'base', S, NO_SHIFT, quaternion)
    assert "from 'base' to 'map'" in problem and 'expected' in problem
    with pytest.raises(LookupFailed):
        buffer.lookup_matrix('map', 'base', S)


@pytest.mark.parametrize('shift', [1.7e308, -1e13, float('inf'), float('nan')])
def test_a_transform_to_nowhere_is_as_good_as_none(shift):
    buffer = TransformBuffer()
    problem = buffer.insert('map', 'base', S, (0, shift, 0), IDENTITY_Q)
    assert "from 'base' to 'map'" in problem and 'expected' in problem
    with pytest.raises(LookupFailed):
        buffer.lookup_matrix('map', 'base', S)


EXTREME = st.one_of(
    st.sampled_from([0.0, -0.0, 5e-324, -2e-308, 1e-200, 1e-7, 1e-6, 0.5, -1.0, 1e6, 1e12,
                     -1e12, 1e154, 1.7e308, -1.7e308, float('inf'), float('nan')]),
    st.floats())
EXTREME_INSERT = st.tuples(
    st.permutations(FRAMES[:4]), st.sampled_from([-S, 0, 1, S, S + 1, (2**31 - 1) * S]),
    st.tuples(*[EXTREME] * 3), st.tuples(*[EXTREME] * 4), st.booleans())


@settings(deadline=None, max_examples=300)
@given(st.lists(EXTREME_INSERT, max_size=12), st.lists(st.integers(-S, 2 * S), max_size=4))
def test_whatever_was_sent_a_look_up_gives_a_rigid_transform_or_a_transform_error(sent, stamps):
    buffer = TransformBuffer()
    for (parent, child, *_), stamp, shift, quaternion, is_static in sent:
        buffer.insert(parent, child, stamp, shift, quaternion, is_static)
    for target, source, stamp in itertools.product(FRAMES[:4], FRAMES[:4], [0, S, *stamps]):
        try:
            found = buffer.lookup_matrix(target, source, stamp)
        except TransformError:
            continue
        assert np.isfinite(found).all()
        rotation = found[:3, :3]
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), rtol=0, atol=1e-9)
        assert np.linalg.det(rotation) > 0


@pytest.mark.parametrize('parent, child', [('', 'a'), ('a', ''), ('a', 'a'), ('/a', 'a')])
def test_a_transform_without_two_names_is_not_taken(parent, child):
    assert 'two different frame names' in TransformBuffer().insert(
        parent, child, S, NO_SHIFT, IDENTITY_Q)


@pytest.mark.parametrize('scale', [0.5, 0.99, 1.01, 3])
def test_A40_a_quaternion_of_another_length_is_normalised(scale):
    buffer = TransformBuffer()
    assert buffer.insert('map', 'base', S, NO_SHIFT, (0, 0, 0.6 * scale, 0.8 * scale)) is None
    expected = rigid_matrix(NO_SHIFT, (0, 0, 0.6, 0.8))
    np.testing.assert_allclose(buffer.lookup_matrix('map', 'base', S), expected, atol=1e-12)


def test_ten_seconds_are_kept():
    buffer = moving(seconds=30)
    buffer.lookup_matrix('map', 'base', 20 * S)
    with pytest.raises(ExtrapolationFailed):
        buffer.lookup_matrix('map', 'base', 20 * S - 1)
    assert 'more than 10 s before' in buffer.insert('map', 'base', 19 * S, NO_SHIFT, IDENTITY_Q)
    assert len(buffer._edges['base'].stamps) == 11


def test_D01_after_a_jump_back_only_static_transforms_are_known():
    buffer = moving()
    buffer.clear()
    buffer.lookup_matrix('base', 'lidar', 3 * S)
    with pytest.raises(ExtrapolationFailed) as caught:
        buffer.lookup_matrix('map', 'base', 3 * S)
    assert caught.value.may_arrive
    buffer.insert('map', 'base', 1 * S, (5, 0, 0), IDENTITY_Q)
    assert buffer.lookup_matrix('map', 'base', 1 * S)[0, 3] == 5


def test_stamp_zero_is_the_latest_time_that_all_have_in_common():
    buffer = moving()
    buffer.insert('base', 'arm', 4 * S, NO_SHIFT, IDENTITY_Q)
    buffer.insert('base', 'arm', 7 * S, NO_SHIFT, IDENTITY_Q)
    assert buffer.lookup_matrix('map', 'arm', 0)[0, 3] == 7
    assert buffer.lookup_matrix('map', 'lidar', 0)[0, 3] == 10


def test_readers_and_a_writer_at_the_same_time():
    buffer = moving(seconds=2)
    is_done = threading.Event()
    problems: list[object] = []

    def read():
        while not is_done.is_set():
            for stamp in range(1, 40):
                try:
                    found = buffer.lookup_matrix('map', 'base', stamp * S + S // 2)[0, 3]
                except TransformError:
                    continue
                if abs(found - stamp - 0.5) > 1e-9:
                    problems.append((stamp, found))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(20):
        for second in range(1, 40):
            buffer.insert('map', 'base', second * S, (second, 0, 0), IDENTITY_Q)
        buffer.clear()
    is_done.set()
    for reader in readers:
        reader.join()
    assert not problems


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_tf2_where_it_is_installed(seed):
    tf2 = pytest.importorskip('tf2_py')
    from geometry_msgs.msg import TransformStamped
    from rclpy.duration import Duration
    from rclpy.time import Time
    classes = {tf2.LookupException: LookupFailed, tf2.ConnectivityException: ConnectivityFailed,
               tf2.ExtrapolationException: ExtrapolationFailed}
    rng = np.random.default_rng(seed)
    core, buffer = tf2.BufferCore(Duration(seconds=10)), TransformBuffer()

    def send():
        child = int(rng.integers(1, 6))
        parent, child = FRAMES[int(rng.integers(0, child))], FRAMES[child]
        stamp, is_static = int(rng.integers(1, 9 * S)), bool(rng.random() < 0.2)
        shift, q = rng.uniform(-100, 100, 3), rng.normal(size=4) * rng.choice([1, 1, 1, 3, 0])
        message = TransformStamped(child_frame_id=child)
        message.header.frame_id = parent
        message.header.stamp.sec, message.header.stamp.nanosec = divmod(stamp, S)
        for name, value in zip('xyz', shift, strict=True):
            setattr(message.transform.translation, name, float(value))
        for name, value in zip('xyzw', q, strict=True):
            setattr(message.transform.rotation, name, float(value))
        (core.set_transform_static if is_static else core.set_transform)(message, 'test')
        buffer.insert(parent, child, stamp, shift, q, is_static)

    def look_up():
        target, source = rng.choice(list(FRAMES + 'z'), 2, replace=False)
        stamp = int(rng.choice([0, rng.integers(1, 10 * S)]))
        try:
            found = core.lookup_transform_core(target, source, Time(nanoseconds=stamp)).transform
        except tf2.TransformException as error:
            with pytest.raises(classes[type(error)]):
                buffer.lookup_matrix(target, source, stamp)
            return
        t, q = found.translation, found.rotation
        np.testing.assert_allclose(buffer.lookup_matrix(target, source, stamp),
                                   rigid_matrix((t.x, t.y, t.z), (q.x, q.y, q.z, q.w)),
                                   rtol=0, atol=1e-9)

    for _ in range(40):
        choice = rng.random()
        if choice < 0.55:
            send()
        elif choice < 0.57:
            core.clear()
            buffer.clear()
        else:
            look_up()
