# SPDX-License-Identifier: Apache-2.0
"""Reading a rosbag2, without ROS, and playing it over DDS.

A player sends the stored bytes of a message as they are. What it adds is ``/clock``, and one
latched message with all static transforms of the bag before anything else.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tt_perception.runtime.errors import ConfigError, InputError, PerceptionError

_log = logging.getLogger(__name__)

CLOUD_TYPE = 'sensor_msgs/msg/PointCloud2'
TF_TYPE = 'tf2_msgs/msg/TFMessage'
ANSWER_TYPE = 'autoware_perception_msgs/msg/DetectedObjects'

_STORAGE_SUFFIXES = ('.db3', '.mcap')
_TYPE_NAME = re.compile(r'([A-Za-z]\w*)/(?:msg/)?([A-Za-z]\w*)')
_CDR_HEADER_BYTES = 4
_STAMP_END = 12  # of a message that begins with a std_msgs/Header: CDR header, sec, nanosec
_MAX_TIME_NS = 2**31 * 10**9  # of a builtin_interfaces/msg/Time
_DEFAULT_DEPTH = 10
_CLOCK_PERIOD_S = 0.025
_SPIN_S = 0.05  # Ctrl-C cannot interrupt a spin, so spins are short
_SETTLE_S = 0.5  # a peer that we have discovered may discover us a little later
_LOOP_PAUSE_S = 0.1  # a bag of one moment must not be sent as fast as possible
_DELIVERY_S = 2.0
_LONG_GAP_S = 10.0  # worth a word, or the player seems to hang


@dataclass(frozen=True)
class Topic:
    """One recorded topic of one type.

    :ivar type: in the form ``package/msg/Name``, however the bag spells it.
    :ivar qos: as rosbags gives them, one entry a recorded publisher; old bags have none.
    :ivar type_hash: ``RIHS01_...`` of the recorded definition; '' where the bag has none.
    """

    name: str
    type: str
    num_messages: int
    qos: tuple[Any, ...]
    type_hash: str


class BagReader:
    """A rosbag2 in sqlite3 or mcap: a folder, or a single storage file. A context manager.

    :ivar topics: known after it is entered.
    :ivar start_ns: time of the first message, since 1970; ``duration_ns`` lasts to the last one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __enter__(self) -> BagReader:
        """Open the bag.

        :raises InputError: it is missing, damaged, empty, or its messages are not CDR.
        """
        from rosbags.rosbag2 import Reader
        with self._readable():
            self._reader = Reader(self._storage())
            self._reader.open()
        try:
            with self._readable():
                self.topics = self._topics()
            if not self._reader.message_count:
                raise self._refusal('found no messages, expected at least one')
            self.start_ns = self._reader.start_time
            self.duration_ns = self._reader.end_time - 1 - self.start_ns
        except BaseException:
            self._reader.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def messages(self, topics: Collection[Topic],
                 start_ns: int | None = None) -> Iterator[tuple[Topic, int, bytes]]:
        """Yield topic, time of recording (ns since 1970) and serialized message, oldest first.

        :param start_ns: leave out what was recorded before.
        :raises InputError: the rest of the bag cannot be read, or a message is no CDR.
        """
        wanted = {(topic.name, topic.type): topic for topic in topics}
        connections = [c for c in self._reader.connections
                       if (c.topic, _full_type(c.msgtype)) in wanted]
        if not connections:
            return
        count: Counter[str] = Counter()
        messages = self._reader.messages(connections, start=start_ns)
        while True:
            with self._readable():
                connection, time_ns, raw = next(messages, (None, 0, b''))
            if connection is None:
                break
            count[connection.topic] += 1
            name = f'message {count[connection.topic]} of {connection.topic}'
            if not 0 <= time_ns < _MAX_TIME_NS:
                raise self._refusal(f'{name}: found time {time_ns}, expected nanoseconds '
                                    'since 1970')
            if len(raw) < _CDR_HEADER_BYTES or raw[0] != 0:
                raise self._refusal(f'{name}: is no CDR')
            yield wanted[connection.topic, _full_type(connection.msgtype)], time_ns, bytes(raw)
        if start_ns is None:
            self._compare(count, topics)

    def _compare(self, count: Mapping[str, int], topics: Collection[Topic]) -> None:
        """Warn when the storage holds less than the bag says; rosbags does not notice."""
        for topic in topics:
            if count[topic.name] < topic.num_messages:
                _log.warning('%s: found %d messages of %s, expected %d by metadata.yaml',
                             self.path, count[topic.name], topic.name, topic.num_messages)

    def _storage(self) -> Path:
        """Return what rosbags can open: a folder with metadata, or a file."""
        if not self.path.exists():
            raise self._refusal('no such bag; expected a folder with metadata.yaml, or one '
                                '.db3 or .mcap file')
        if not self.path.is_dir() or (self.path / 'metadata.yaml').exists():
            return self.path
        files = [p for p in self.path.iterdir() if p.suffix in _STORAGE_SUFFIXES]
        if len(files) != 1:
            raise self._refusal(f'found no metadata.yaml and {len(files)} storage files; expected '
                                'metadata.yaml, or one .db3 or .mcap file')
        return files[0]

    def _topics(self) -> tuple[Topic, ...]:
        merged: dict[tuple[str, str], Topic] = {}
        for c in self._reader.connections:
            if c.ext.serialization_format != 'cdr':
                raise self._refusal(f'found serialization format {c.ext.serialization_format!r} '
                                    f'on {c.topic}, expected cdr')
            key = c.topic, _full_type(c.msgtype)
            before = merged.get(key, Topic(*key, 0, (), ''))
            merged[key] = Topic(*key, before.num_messages + c.msgcount,
                                (*before.qos, *c.ext.offered_qos_profiles),
                                before.type_hash or c.digest)
        return tuple(merged.values())

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn whatever a damaged file makes the parser raise into one clear line."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = ' '.join(str(error).split()) or type(error).__name__
            raise self._refusal(f'no readable rosbag2: {reason}') from error

    def _refusal(self, text: str) -> InputError:
        return InputError(f'{self.path}: {text}', reason='bag')


def _full_type(name: str) -> str:
    """Return ``package/msg/Name`` also for the ``package/Name`` of old bags."""
    match = _TYPE_NAME.fullmatch(name)
    return f'{match[1]}/msg/{match[2]}' if match else name


def header_stamp_ns(raw: bytes) -> int:
    """Return the stamp of a serialized message that begins with a ``std_msgs/msg/Header``.

    :raises InputError: the message is too short.
    """
    if len(raw) < _STAMP_END:
        raise InputError(f'header: found {len(raw)} bytes, expected at least {_STAMP_END}',
                         reason='bag')
    order = 'little' if raw[1] & 1 else 'big'
    return (int.from_bytes(raw[4:8], order, signed=True) * 10**9
            + int.from_bytes(raw[8:12], order))


@dataclass(frozen=True)
class PlayReport:
    """What a player did.

    :ivar num_messages: topic -> messages sent, ``/clock`` and static transforms not counted.
    :ivar skipped: topic -> why it was not played.
    :ivar num_answered: clouds that were answered, when answers were waited for.
    :ivar unanswered_ns: stamps of the clouds that were not.
    """

    num_messages: Mapping[str, int]
    skipped: Mapping[str, str]
    num_answered: int
    unanswered_ns: tuple[int, ...]


def play(path: str | Path, *, rate: float = 1.0, loop: bool = False, start_offset_s: float = 0.0,
         topics: Collection[str] | None = None, clock: bool = True,
         wait_for: Collection[str] = (), wait_timeout_s: float = 30.0,
         answer_topic: str | None = None, cloud_topic: str | None = None,
         answer_timeout_s: float = 60.0, stop: threading.Event | None = None) -> PlayReport:
    """Play a bag over DDS until its end, or for ever.

    Each topic is published with the reliability, durability, history and depth that it was
    recorded with, reliable and volatile where the bag does not say. All static transforms of the
    bag are sent first, as one latched message. A topic whose message type is not installed, or
    is another one here, is skipped with one warning.

    With ``answer_topic`` time stands still before each cloud, and at the end, until the cloud
    before is answered by a ``DetectedObjects`` of the same stamp. Messages between two clouds
    are not held back, since an answer may need the transforms among them.

    :param rate: 2 is twice as fast as recorded.
    :param start_offset_s: leave out so much of the beginning.
    :param topics: play these only.
    :param clock: publish ``/clock`` before each message and 40 times a second between them; a
        recorded ``/clock`` is then left out.
    :param wait_for: topics that must have a subscriber before the first message.
    :param cloud_topic: where the clouds to be answered are, if there are several topics of them.
    :param answer_timeout_s: play on after so long without an answer.
    :param stop: ends the playing when it is set, from another thread.
    :raises InputError: the bag cannot be read or played.
    :raises ConfigError: a wrong argument.
    :raises PerceptionError: answers are waited for, and nobody listens to the clouds.
    """
    _check_positive('rate', rate)
    _check_positive('answer_timeout_s', answer_timeout_s)
    with BagReader(path) as bag:
        if not 0 <= start_offset_s * 1e9 <= bag.duration_ns:
            raise ConfigError(f'start_offset_s: found {start_offset_s:g}, expected 0 to '
                              f'{bag.duration_ns / 1e9:g}, the duration of {path}')
        selected = _select(bag, topics, clock)
        awaited = set(wait_for)
        if answer_topic is not None:
            cloud_topic = _cloud_topic(selected, cloud_topic)
            awaited.add(cloud_topic)
        with _ros_node('bag_player') as node, closing(
                _Player(bag, node, selected, rate, stop or threading.Event())) as player:
            if clock:
                player.publish_clock_too()
            if answer_topic is not None:
                player.wait_for_answers(answer_topic, cloud_topic, answer_timeout_s)
            player.wait_for_subscribers(awaited, wait_timeout_s)
            player.publish_static()
            player.play(bag.start_ns + round(start_offset_s * 1e9) if start_offset_s else None,
                        loop)
            return player.report()


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f'{name}: found {value:g}, expected a positive number')


def _select(bag: BagReader, names: Collection[str] | None, clock: bool) -> list[Topic]:
    known = {topic.name for topic in bag.topics}
    if names is not None and not set(names) <= known:
        missing = ', '.join(sorted(set(names) - known))
        raise ConfigError(f'topics: found {missing}, expected topics of {bag.path}: '
                          + ', '.join(sorted(known)))
    return [topic for topic in bag.topics
            if (names is None or topic.name in names) and not (clock and topic.name == '/clock')]


def _cloud_topic(topics: Collection[Topic], name: str | None) -> str:
    clouds = sorted({topic.name for topic in topics if topic.type == CLOUD_TYPE})
    if name is None and len(clouds) == 1:
        return clouds[0]
    if name not in clouds:
        raise ConfigError(f'cloud_topic: found {name}, expected one of the topics of type '
                          f'{CLOUD_TYPE}: ' + (', '.join(clouds) or 'there is none'))
    return name


@contextmanager
def _ros_node(name: str) -> Iterator[Any]:
    """Yield a node in a context of its own; signals stay with the caller.

    :raises PerceptionError: ROS cannot start, as with a wrong ``ROS_DOMAIN_ID``.
    """
    import rclpy
    from rclpy.signals import SignalHandlerOptions
    context = rclpy.Context()
    try:
        try:
            rclpy.init(args=[], context=context, signal_handler_options=SignalHandlerOptions.NO)
            node = rclpy.create_node(name, context=context, enable_rosout=False,
                                     start_parameter_services=False)
        except Exception as error:  # its class differs between releases
            raise PerceptionError(
                f'ROS: cannot start: {" ".join(str(error).split())}') from error
        try:
            yield node
        finally:
            node.destroy_node()
    finally:
        context.try_shutdown()


class _Player:
    """Publishers of one bag, and the clock that they follow."""

    def __init__(self, bag: BagReader, node: Any, topics: Collection[Topic], rate: float,
                 stop: threading.Event) -> None:
        self._bag = bag
        self._node = node
        self._rate = rate
        self._stop = stop
        self._skipped: dict[str, str] = {}
        self._num_messages: Counter[str] = Counter()
        self._clock: _Clock | None = None
        self._gate: _Gate | None = None
        self._publishers: dict[Topic, Any] = {}
        self._static: dict[Topic, Any] = {}
        for topic in topics:
            is_static = topic.type == TF_TYPE and topic.name.split('/')[-1] == 'tf_static'
            group = self._static if is_static else self._publishers
            try:
                group[topic] = _make_publisher(node, topic, is_static)
            except _NotPlayableError as error:
                self._skipped[topic.name] = str(error)
                _log.warning('%s: skipped: %s', topic.name, error)
        if not self._publishers and not self._static:
            why = '; '.join(f'{name}: {reason}' for name, reason in self._skipped.items())
            raise InputError(f'{bag.path}: nothing in it can be played: {why or "no topics"}',
                             reason='bag')

    def publish_clock_too(self) -> None:
        """Create the publisher of ``/clock``."""
        self._clock = _Clock(self._node)

    def wait_for_answers(self, answer_topic: str, cloud_topic: str, timeout_s: float) -> None:
        """Let no cloud out before the one before it is answered."""
        clouds = [p for topic, p in self._publishers.items() if topic.name == cloud_topic]
        if not clouds:
            raise InputError(f'{self._bag.path}: {cloud_topic} cannot be played: '
                             + self._skipped[cloud_topic], reason='bag')
        self._gate = _Gate(self._node, answer_topic, clouds[0], timeout_s, self._stop)

    def wait_for_subscribers(self, names: Collection[str], timeout_s: float) -> None:
        """Wait until somebody listens to each of the topics, and answers can arrive.

        :raises PerceptionError: nobody does, and answers are waited for.
        """
        deadline_s = time.monotonic() + timeout_s
        if missing := self._missing_peers(names):
            _log.info('%s; waiting up to %g s', ', '.join(missing), timeout_s)
        while missing := self._missing_peers(names):
            if time.monotonic() > deadline_s:
                text = f'{", ".join(missing)} after {timeout_s:g} s'
                if self._gate is not None:
                    raise PerceptionError(text)
                _log.warning('%s; playing all the same', text)
                return
            if self._stop.wait(_SPIN_S):
                return
        if names:
            self._stop.wait(_SETTLE_S)

    def _missing_peers(self, names: Collection[str]) -> list[str]:
        missing = [f'{name}: no subscriber' for name in sorted(names) if not self._listeners(name)]
        if self._gate is not None and not self._gate.is_connected():
            missing.append(f'{self._gate.topic}: no publisher')
        return missing

    def _listeners(self, name: str) -> int:
        return sum(p.get_subscription_count()
                   for topic, p in (*self._publishers.items(), *self._static.items())
                   if topic.name == name)

    def publish_static(self) -> None:
        """Publish the last transform to each child frame of the whole bag, once and latched."""
        from rclpy.serialization import deserialize_message
        for topic, publisher in self._static.items():
            latest = {}
            for number, (_, _, raw) in enumerate(self._bag.messages([topic]), 1):
                try:
                    message = deserialize_message(raw, publisher.msg_type)
                except Exception as error:  # its class differs between releases
                    raise InputError(f'{self._bag.path}: message {number} of {topic.name} is '
                                     f'no {TF_TYPE}', reason='bag') from error
                latest.update((t.child_frame_id, t) for t in message.transforms)
            publisher.publish(publisher.msg_type(transforms=list(latest.values())))

    def play(self, start_ns: int | None, loop: bool) -> None:
        """Publish everything else; return at the end of the bag, or when told to stop.

        :param start_ns: leave out what was recorded before.
        """
        while True:
            self._play_once(start_ns)
            if not loop or self._stop.wait(_LOOP_PAUSE_S):
                break
        if not self._stop.is_set():
            self._await_delivery()

    def _play_once(self, start_ns: int | None) -> None:
        pace = None
        for topic, time_ns, raw in self._bag.messages(self._publishers, start_ns):
            pace = pace or _Pace(time_ns, self._rate, self._stop, self._clock)
            publisher = self._publishers[topic]
            is_gated = self._gate is not None and publisher is self._gate.clouds
            if is_gated:
                pace.stand_still(self._gate.wait)
            pace.wait_until(time_ns)
            if self._stop.is_set():
                return
            if self._clock is not None:
                self._clock.publish(time_ns)
            if is_gated:
                self._gate.expect(header_stamp_ns(raw))
            publisher.publish(raw)
            self._num_messages[topic.name] += 1
        if self._gate is not None:
            self._gate.wait()

    def _await_delivery(self) -> None:
        """Keep the publishers until subscribers have what was sent; it would be lost with them."""
        from rclpy.duration import Duration
        deadline_s = time.monotonic() + _DELIVERY_S
        for publisher in (*self._publishers.values(), *self._static.values()):
            left_s = max(0.0, deadline_s - time.monotonic())
            publisher.wait_for_all_acked(Duration(seconds=left_s))

    def close(self) -> None:
        """Stop listening to answers; the publishers end with the node."""
        if self._gate is not None:
            self._gate.close()

    def report(self) -> PlayReport:
        """Return what was done so far."""
        answered, unanswered = (self._gate.num_answered, tuple(self._gate.unanswered_ns)
                                ) if self._gate else (0, ())
        return PlayReport(dict(self._num_messages), self._skipped, answered, unanswered)


class _Pace:
    """The time of the bag against the time on the wall.

    :param start_ns: time of the bag now.
    """

    def __init__(self, start_ns: int, rate: float, stop: threading.Event,
                 clock: _Clock | None) -> None:
        self._start_ns = start_ns
        self._start_s = time.monotonic()
        self._rate = rate
        self._stop = stop
        self._clock = clock

    def stand_still(self, function: Callable[[], None]) -> None:
        """Call a function while the time of the bag does not pass."""
        begin_s = time.monotonic()
        function()
        self._start_s += time.monotonic() - begin_s

    def wait_until(self, time_ns: int) -> None:
        """Wait for a time of the bag, with the clock going."""
        due_s = self._start_s + (time_ns - self._start_ns) / 1e9 / self._rate
        if (left_s := due_s - time.monotonic()) > _LONG_GAP_S:
            _log.warning('the next message of the bag comes in %.0f s', left_s)
        while (left_s := due_s - time.monotonic()) > 0:
            if self._stop.wait(min(left_s, _CLOCK_PERIOD_S)):
                return
            now_ns = self._start_ns + round((time.monotonic() - self._start_s) * 1e9 * self._rate)
            if self._clock is not None and now_ns < time_ns:
                self._clock.publish(now_ns)


class _Clock:
    """Publishes ``/clock``."""

    def __init__(self, node: Any) -> None:
        from rosgraph_msgs.msg import Clock
        self._message = Clock()
        self._publisher = node.create_publisher(Clock, '/clock', _DEFAULT_DEPTH)

    def publish(self, time_ns: int) -> None:
        """Publish one time."""
        stamp = self._message.clock
        stamp.sec, stamp.nanosec = divmod(time_ns, 10**9)
        self._publisher.publish(self._message)


class _Gate:
    """Waits for the answer to a cloud.

    :ivar clouds: publisher of the clouds.
    :ivar num_answered: clouds that were answered in time.
    :ivar unanswered_ns: stamps of those that were not.
    """

    def __init__(self, node: Any, topic: str, clouds: Any, timeout_s: float,
                 stop: threading.Event) -> None:
        from rclpy.executors import SingleThreadedExecutor
        self.topic = topic
        self.clouds = clouds
        self.num_answered = 0
        self.unanswered_ns: list[int] = []
        self._node = node
        self._timeout_s = timeout_s
        self._stop = stop
        self._expected_ns: int | None = None
        self._answered: set[int] = set()
        message_class = _message_class(ANSWER_TYPE)
        if message_class is None:
            raise PerceptionError(f'{ANSWER_TYPE}: not installed; answers cannot be received')
        # Only the stamp is wanted: an array of objects takes long to decode in Python.
        self._subscription = node.create_subscription(
            message_class, topic, lambda raw: self._answered.add(header_stamp_ns(raw)),
            _DEFAULT_DEPTH, raw=True)
        self._executor = SingleThreadedExecutor(context=node.context)
        self._executor.add_node(node)

    def is_connected(self) -> bool:
        """Return whether somebody may answer."""
        return self._node.count_publishers(self.topic) > 0

    def expect(self, stamp_ns: int) -> None:
        """Say that a cloud is about to be sent; an older answer does not count."""
        self._answered.clear()
        self._expected_ns = stamp_ns

    def wait(self) -> None:
        """Wait for the answer to the cloud that was sent, if there was one.

        :raises PerceptionError: there is no answer, and nobody listens to the clouds any more.
        """
        if self._expected_ns is None:
            return
        begin_s = time.monotonic()
        while self._expected_ns not in self._answered:
            if self._stop.is_set():
                return
            if time.monotonic() - begin_s > self._timeout_s:
                self._give_up()
                return
            self._executor.spin_once(timeout_sec=_SPIN_S)
        self._expected_ns = None
        self.num_answered += 1

    def close(self) -> None:
        """Stop listening."""
        self._executor.shutdown()

    def _give_up(self) -> None:
        stamp_ns, self._expected_ns = self._expected_ns, None
        self.unanswered_ns.append(stamp_ns)
        seconds, nanoseconds = divmod(stamp_ns, 10**9)
        text = (f'{self.topic}: no answer to cloud {seconds}.{nanoseconds:09d} '
                f'in {self._timeout_s:g} s')
        if not self.clouds.get_subscription_count():
            raise PerceptionError(f'{text}, and nobody listens to {self.clouds.topic_name}')
        _log.warning('%s', text)


class _NotPlayableError(Exception):
    """A topic cannot be published here; the message says why."""


def _message_class(type_name: str) -> Any | None:
    """Return the class of a message type, None when it is not installed."""
    match = _TYPE_NAME.fullmatch(type_name)
    if match is None:
        return None
    try:
        return getattr(importlib.import_module(f'{match[1]}.msg'), match[2], None)
    except ImportError:
        return None


def _make_publisher(node: Any, topic: Topic, is_static: bool) -> Any:
    """Return a publisher of a recorded topic.

    :raises _NotPlayableError: the type is not installed or not the recorded one, or ROS refuses.
    """
    message_class = _message_class(topic.type)
    if message_class is None:
        raise _NotPlayableError(f'message type {topic.type} is not installed')
    try:
        publisher = node.create_publisher(message_class, topic.name,
                                          _publisher_qos(topic, is_static))
    except Exception as error:  # bad names, two types on one topic: each its own class
        raise _NotPlayableError(' '.join(str(error).split())) from error
    here = _type_hash(node, publisher.topic_name)
    if here and topic.type_hash and here != topic.type_hash:
        node.destroy_publisher(publisher)
        raise _NotPlayableError(f'{topic.type} was recorded with another definition: found '
                                f'{topic.type_hash}, expected {here}')
    return publisher


def _type_hash(node: Any, topic_name: str) -> str:
    """Return the hash of our type on a topic; '' on ROS releases that have none."""
    for info in node.get_publishers_info_by_topic(topic_name):
        if info.node_name == node.get_name():
            return str(getattr(info, 'topic_type_hash', ''))
    return ''


def _publisher_qos(topic: Topic, is_static: bool) -> Any:
    """Return the recorded QoS, as far as it is still true when a bag is played.

    Of several recorded publishers the strictest offer counts, since it serves all subscribers.
    Deadline, lifespan and liveliness describe the timing of the live publisher, and are left.
    """
    from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
    from rosbags.interfaces import QosDurability, QosHistory, QosReliability
    if is_static:
        return QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    best_effort = bool(topic.qos) and all(
        q.reliability == QosReliability.BEST_EFFORT for q in topic.qos)
    latched = any(q.durability == QosDurability.TRANSIENT_LOCAL for q in topic.qos)
    keep_all = any(q.history == QosHistory.KEEP_ALL for q in topic.qos)
    # Older releases record depth 0 and an unknown history.
    depth = max((q.depth for q in topic.qos if q.history == QosHistory.KEEP_LAST), default=0)
    return QoSProfile(
        history=HistoryPolicy.KEEP_ALL if keep_all else HistoryPolicy.KEEP_LAST,
        depth=depth or _DEFAULT_DEPTH,
        reliability=ReliabilityPolicy.BEST_EFFORT if best_effort else ReliabilityPolicy.RELIABLE,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE)
