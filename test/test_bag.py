# SPDX-License-Identifier: Apache-2.0
"""Reading bags of every kind, and playing them over real DDS."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import sys
import threading
import time
from pathlib import Path

import bag_files
import numpy as np
import pytest
from bag_files import CLOUD, STORAGES, STRING, T0, TF, text, write_bag
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ros_process import Process, make_context, wait_until

from tt_perception.ros.bag import BagReader, header_stamp_ns, play
from tt_perception.runtime.errors import ConfigError, InputError, PerceptionError

MS = 10**6
POINTS = np.zeros(300, [('x', '<f4'), ('y', '<f4'), ('z', '<f4'), ('intensity', 'u1'),
                        ('return_type', 'u1'), ('channel', '<u2')])
POINTS['x'] = np.linspace(-50, 50, len(POINTS))
POINTS['channel'] = np.arange(len(POINTS))


def drive():
    """Two clouds, transforms around them, and a static one that is recorded last of all."""
    def pose(t):
        return '/tf', TF, t, bag_files.transforms((t, 'map', 'base_link', (t / 1e18, 2, 0),
                                                   (0, 0, 0.6, 0.8)))
    clouds = [('/points', CLOUD, T0 + k * 100 * MS + 45 * MS,
               bag_files.cloud(T0 + k * 100 * MS, POINTS)) for k in (0, 1)]
    static = ('/tf_static', TF, T0 + 190 * MS,
              bag_files.transforms((T0, 'base_link', 'lidar', (1, 0, 2), (0, 0, 0, 1))))
    return [pose(T0 + 1 * MS), clouds[0], pose(T0 + 101 * MS), clouds[1], static]


def read(path, topics=None):
    with BagReader(path) as bag:
        return [(topic.name, topic.type, t, raw) for topic, t, raw in bag.messages(
            [x for x in bag.topics if topics is None or x.name in topics])]


def refused(path) -> str:
    """Return why a bag is refused, in one line that begins with its path."""
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert caught.value.reason == 'bag'
    assert message.startswith(f'{path}: ')
    assert '\n' not in message
    return message.removeprefix(f'{path}: ')


# Reading.

@pytest.mark.parametrize('storage', STORAGES)
def test_what_is_written_is_read(tmp_path, storage):
    path = write_bag(tmp_path / 'bag', drive(), storage)
    assert read(path) == drive()
    with BagReader(path) as bag:
        assert {t.name: t.num_messages for t in bag.topics} == {
            '/tf': 2, '/points': 2, '/tf_static': 1}
        assert (bag.start_ns, bag.duration_ns) == (T0 + MS, 189 * MS)
    assert read(path, ['/points']) == [m for m in drive() if m[0] == '/points']


@pytest.mark.parametrize('storage', STORAGES)
def test_messages_of_one_moment_keep_their_order(tmp_path, storage):
    messages = [(f'/t{i % 3}', STRING, T0 + i // 50, text(str(i))) for i in range(200)]
    assert read(write_bag(tmp_path / 'bag', messages, storage)) == messages


def test_a_storage_file_is_a_bag(tmp_path):
    for storage, suffix in zip(STORAGES, ('.db3', '.mcap'), strict=True):
        folder = write_bag(tmp_path / storage, drive(), storage)
        (folder / 'metadata.yaml').unlink()
        assert read(folder) == drive()
        assert read(folder / f'{storage}{suffix}') == drive()


@pytest.mark.parametrize('name', ['', 'sample.db3'])
def test_old_schema_without_metadata_or_qos(data_dir, name):
    path = data_dir / 'permissive/bags/image_imu_gps_sample' / name
    with BagReader(path) as bag:
        assert {t.name: t.type for t in bag.topics} == {
            '/text': 'std_msgs/msg/String', '/image': 'sensor_msgs/msg/Image',
            '/image/compressed': 'sensor_msgs/msg/CompressedImage',
            '/fix': 'sensor_msgs/msg/NavSatFix', '/imu': 'sensor_msgs/msg/Imu'}
        assert not any(t.qos or t.type_hash for t in bag.topics)
    assert len(read(path)) == 5


def test_a_bag_of_unknown_types_can_be_read(data_dir):
    messages = read(data_dir / 'permissive/bags/velodyne_vlp16_packets')
    assert [type_name for _, type_name, _, _ in messages] == ['velodyne_msgs/msg/VelodyneScan'] * 4


def test_bags_that_are_none(data_dir, tmp_path):
    bags = data_dir / 'permissive/bags'
    assert 'found no messages' in refused(bags / 'empty_bag')
    assert 'wrong_format' in refused(bags / 'wrong_format_mcap')
    assert 'wrong_format' in refused(bags / 'wrong_format_mcap/wrong_rmw_test_0.mcap')
    assert 'no such bag' in refused(tmp_path / 'missing')
    assert '0 storage files' in refused(tmp_path)
    for name in ('a.mcap', 'b.mcap'):
        (tmp_path / name).touch()
    assert '2 storage files' in refused(tmp_path)
    for name, content in (('a.bag', b'#ROSBAG V2.0\n'), ('b.db3', b''), ('c.mcap', b''),
                          ('d.db3', b'SQLite format 3\0'), ('e.mcap', b'\x89MCAP0\r\n')):
        (tmp_path / name).write_bytes(content)
        assert 'no readable rosbag2' in refused(tmp_path / name)


def test_metadata_that_is_damaged_is_refused(tmp_path):
    for number, content in enumerate((
            '', 'a: [', '[]', 'rosbag2_bagfile_information: 3', '\0',
            'rosbag2_bagfile_information: {version: 99}')):
        folder = write_bag(tmp_path / f'bag{number}', drive())
        (folder / 'metadata.yaml').write_text(content)
        assert 'no readable rosbag2' in refused(folder)


def test_fewer_messages_than_promised_are_reported(tmp_path, caplog):
    folder = write_bag(tmp_path / 'bag', drive())
    with contextlib.closing(sqlite3.connect(folder / 'bag.db3')) as database, database:
        database.execute('DELETE FROM messages WHERE id = 2')
    assert len(read(folder)) == 4
    assert 'found 1 messages of /points, expected 2' in caplog.text


@pytest.mark.parametrize('raw', [b'', b'\0\1\0', b'\7\1\0\0 no CDR'])
def test_bytes_that_are_no_cdr_are_refused(tmp_path, raw):
    path = write_bag(tmp_path / 'bag', [('/a', STRING, T0, text('')), ('/a', STRING, T0 + 1, raw)])
    assert 'message 2 of /a: is no CDR' in refused(path)


@pytest.mark.parametrize('time_ns', [-1, 2**62])
def test_a_time_that_no_message_can_carry_is_refused(tmp_path, time_ns):
    path = write_bag(tmp_path / 'bag', [('/a', STRING, time_ns, text(''))])
    assert f'found time {time_ns}' in refused(path)


@pytest.mark.parametrize('storage', STORAGES)
def test_a_truncated_bag_is_refused_or_read_in_part(tmp_path, storage):
    whole = write_bag(tmp_path / 'bag', drive(), storage)
    file, = (p for p in whole.iterdir() if p.suffix != '.yaml')
    content = file.read_bytes()
    num_refused = 0
    for share in np.linspace(0, 0.99, 23):
        file.write_bytes(content[:int(share * len(content))])
        try:
            read(whole)
        except InputError as error:
            assert error.reason == 'bag'
            num_refused += 1
    assert num_refused > 20


@pytest.mark.parametrize('storage', STORAGES)
def test_a_damaged_bag_raises_nothing_but_input_error(tmp_path, storage):
    whole = write_bag(tmp_path / 'bag', drive(), storage)
    file, = (p for p in whole.iterdir() if p.suffix != '.yaml')
    content = file.read_bytes()

    @settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)),
                    min_size=1, max_size=20))
    def check(changes):
        damaged = bytearray(content)
        for position, value in changes:
            damaged[position] = value
        file.write_bytes(damaged)
        with contextlib.suppress(InputError):
            read(whole)

    check()


def test_stamp_of_a_serialized_header():
    assert header_stamp_ns(drive()[1][3]) == T0
    assert header_stamp_ns(b'\0\0\0\0' + (7).to_bytes(4, 'big') + (9).to_bytes(4, 'big')) == (
        7_000_000_009)
    assert header_stamp_ns(b'\0\1\0\0\xff\xff\xff\xff\0\0\0\0') == -10**9
    with pytest.raises(InputError):
        header_stamp_ns(b'\0\1\0\0\0\0\0\0')


# Playing.

def padded(raw: bytes) -> bytes:
    """Return a serialized message as DDS delivers it: its length a multiple of 4."""
    return raw + bytes(-len(raw) % 4)


class Listener:
    """Receives serialized messages on a thread of its own.

    :ivar heard: (topic, bytes, time of sending in ns), in order of sending.
    """

    def __init__(self, **types: str) -> None:
        import rclpy
        from rclpy.executors import SingleThreadedExecutor
        self._context = make_context()
        self.node = rclpy.create_node('listener', context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._heard: list[tuple[int, str, bytes]] = []
        for name, type_name in types.items():
            self.listen('/' + name, type_name)
        self._thread = threading.Thread(target=self._executor.spin, daemon=True)
        self._thread.start()

    def listen(self, topic: str, type_name: str, latched: bool = False) -> None:
        from rclpy.qos import DurabilityPolicy, QoSProfile
        durability = (DurabilityPolicy.TRANSIENT_LOCAL if latched or topic == '/tf_static'
                      else DurabilityPolicy.VOLATILE)

        def hear(raw, info):
            self._heard.append((info['source_timestamp'], topic, padded(raw)))

        self.node.create_subscription(ros_class(type_name), topic, hear,
                                      QoSProfile(depth=1000, durability=durability), raw=True)
        self._executor.wake()

    @property
    def heard(self) -> list[tuple[str, bytes, int]]:
        return [(topic, raw, sent) for sent, topic, raw in sorted(self._heard)]

    def on(self, topic: str) -> list[bytes]:
        return [raw for name, raw, _ in self.heard if name == topic]

    def clock_ns(self) -> list[int]:
        return [header_stamp_ns(raw) for raw in self.on('/clock')]

    def close(self) -> None:
        self._executor.shutdown()
        self._thread.join()
        self.node.destroy_node()
        self._context.try_shutdown()


def ros_class(type_name: str):
    package, _, name = type_name.split('/')
    module = __import__(f'{package}.msg', fromlist=[name])
    return getattr(module, name)


@pytest.fixture
def listen():
    """Return a function that makes a listener; needs ROS."""
    pytest.importorskip('rclpy')
    made = []

    def make(**types):
        made.append(Listener(**types))
        return made[-1]

    yield make
    for listener in made:
        listener.close()


CLOCK = 'rosgraph_msgs/msg/Clock'


def static_edges(raw: bytes):
    message = bag_files.STORE.deserialize_cdr(raw, TF)
    return {t.child_frame_id: (t.header.frame_id, t.transform.translation.x)
            for t in message.transforms}


@pytest.mark.parametrize('storage', STORAGES)
def test_another_process_hears_what_was_recorded(listen, tmp_path, storage):
    path = write_bag(tmp_path / 'bag', drive(), storage)
    listener = listen(points=CLOUD, tf=TF, tf_static=TF, clock=CLOCK)
    code = ('import sys; from tt_perception.ros.bag import play; '
            "print(play(sys.argv[1], wait_for=['/points', '/tf', '/tf_static']).num_messages)")
    with Process([sys.executable, '-c', code, str(path)]) as player:
        assert player.wait() == 0, player.output()
        assert "{'/tf': 2, '/points': 2}" in player.output()
    wait_until(lambda: len([h for h in listener.heard if h[0] != '/clock']) == 5)
    for topic in ('/points', '/tf'):
        assert listener.on(topic) == [padded(m[3]) for m in drive() if m[0] == topic]
    # Static transforms come first, though this one was recorded last.
    assert next(topic for topic, _, _ in listener.heard if topic != '/clock') == '/tf_static'
    assert static_edges(listener.on('/tf_static')[0]) == {'lidar': ('base_link', 1.0)}
    clock = listener.clock_ns()
    assert clock == sorted(clock)
    assert set(clock) >= {m[2] for m in drive() if m[0] != '/tf_static'}


def test_the_clock_shows_the_time_of_a_message_before_it_is_sent(listen, tmp_path):
    listener = listen(points=CLOUD, tf=TF, clock=CLOCK)
    play(write_bag(tmp_path / 'bag', drive()), wait_for=['/points', '/tf'])
    wait_until(lambda: len(listener.on('/points')) == 2)
    due = {padded(raw): t for _, _, t, raw in drive()}
    now_ns = None
    for topic, raw, _ in listener.heard:
        if topic == '/clock':
            now_ns = header_stamp_ns(raw)
        else:
            assert now_ns == due[raw]


def test_the_clock_goes_on_between_messages(listen, tmp_path):
    times = [T0, T0 + 2_000 * MS]
    path = write_bag(tmp_path / 'bag', [('/a', STRING, t, text('')) for t in times])
    listener = listen(a=STRING, clock=CLOCK)
    play(path, rate=4, wait_for=['/a'])
    wait_until(lambda: listener.clock_ns()[-1:] == times[-1:])
    clock = listener.clock_ns()
    assert clock == sorted(clock)
    assert len(clock) > 6  # 20 on an idle machine
    assert np.diff(clock).max() < 1_000 * MS


def test_without_clock(listen, tmp_path):
    from rosgraph_msgs.msg import Clock  # noqa: F401 - the type of the recorded topic is here
    recorded = bag_files.serialize(CLOCK, bag_files.make(
        CLOCK, clock=bag_files.make('builtin_interfaces/msg/Time', 5, 0)))
    path = write_bag(tmp_path / 'bag', [('/clock', CLOCK, T0, recorded),
                                        ('/a', STRING, T0, text(''))])
    listener = listen(a=STRING, clock=CLOCK)
    assert play(path, clock=False, wait_for=['/a', '/clock']).num_messages == {
        '/clock': 1, '/a': 1}
    wait_until(lambda: listener.clock_ns() == [5 * 10**9])
    assert play(path, wait_for=['/a']).num_messages == {'/a': 1}  # ours instead of the recorded
    wait_until(lambda: listener.clock_ns() == [5 * 10**9, T0])


def test_a_late_listener_gets_the_last_static_transform_of_each_frame(listen, tmp_path):
    static = [('/tf_static', TF, T0 + k, bag_files.transforms(
        (T0, 'base_link', f'sensor{k % 3}', (k, 0, 0), (0, 0, 0, 1)))) for k in range(200)]
    path = write_bag(tmp_path / 'bag', [*static, ('/a', STRING, T0, text(''))])
    listener = listen(a=STRING)
    with playing(path, loop=True):
        wait_until(lambda: listener.on('/a'))
        listener.listen('/tf_static', TF)
        wait_until(lambda: listener.on('/tf_static'))
    assert [static_edges(raw) for raw in listener.on('/tf_static')] == [{
        'sensor0': ('base_link', 198.0), 'sensor1': ('base_link', 199.0),
        'sensor2': ('base_link', 197.0)}]


def test_a_static_message_that_is_no_tf_message_is_refused(listen, tmp_path):
    listen()
    path = write_bag(tmp_path / 'bag', [('/tf_static', TF, T0, b'\0\1\0\0\xff\xff\xff\x7f'),
                                        ('/a', STRING, T0, text(''))])
    with pytest.raises(InputError, match='message 1 of /tf_static is no tf2_msgs'):
        play(path)


@contextlib.contextmanager
def playing(path, **arguments):
    """Play on a thread until the block ends; hand over what the player reports."""
    stop = threading.Event()
    result = []

    def run():
        try:
            result.append(play(path, stop=stop, **arguments))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


def test_a_loop_begins_again_and_time_with_it(listen, tmp_path):
    messages = [('/a', STRING, T0 + k * 20 * MS, text(str(k))) for k in range(3)]
    path = write_bag(tmp_path / 'bag', messages)
    listener = listen(a=STRING, clock=CLOCK)
    with playing(path, loop=True, wait_for=['/a']) as result:
        wait_until(lambda: len(listener.on('/a')) > 6)
        assert not result
    assert listener.on('/a')[:6] == [padded(raw) for *_, raw in messages] * 2
    assert np.count_nonzero(np.diff(listener.clock_ns()) < 0) >= 2
    assert result[0].num_messages['/a'] >= 7


def test_rate_offset_and_choice_of_topics(listen, tmp_path):
    messages = [(f'/{name}', STRING, T0 + k * 200 * MS, text(f'{name}{k}'))
                for k in range(6) for name in 'ab']
    path = write_bag(tmp_path / 'bag', messages)
    listener = listen(a=STRING, b=STRING)
    play(path, rate=20, topics=['/a'], wait_for=['/a'])
    wait_until(lambda: len(listener.on('/a')) == 6)
    report = play(path, rate=2, start_offset_s=0.5, wait_for=['/a', '/b'])
    wait_until(lambda: len(listener.on('/a')) == 9)
    assert report.num_messages == {'/a': 3, '/b': 3}
    assert listener.on('/b') == [padded(text(f'b{k}')) for k in (3, 4, 5)]
    sent = [t for topic, _, t in listener.heard if topic == '/a']
    # 1 s at 20 times and 0.4 s at 2 times the speed; a busy machine makes it longer, not shorter.
    assert 0.04 < (sent[5] - sent[0]) / 1e9 < 0.8
    assert 0.19 < (sent[8] - sent[6]) / 1e9 < 2


def test_the_recorded_qos_is_offered(listen, tmp_path):
    from rclpy.qos import DurabilityPolicy, ReliabilityPolicy
    names = ('plain', 'best_effort', 'latched', 'mixed')
    offered = {
        '/best_effort': [bag_files.qos(best_effort=True, depth=5)],
        '/latched': [bag_files.qos(latched=True, depth=1)],
        '/mixed': [bag_files.qos(best_effort=True), bag_files.qos(latched=True)]}
    path = write_bag(tmp_path / 'bag', [(f'/{n}', STRING, T0, text(n)) for n in names],
                     offered_qos=offered)
    listener = listen()
    with playing(path, loop=True):
        wait_until(lambda: all(listener.node.count_publishers(f'/{n}') for n in names))
        found = {n: listener.node.get_publishers_info_by_topic(f'/{n}')[0].qos_profile
                 for n in names}
        listener.listen('/latched', STRING, latched=True)
        wait_until(lambda: padded(text('latched')) in listener.on('/latched'))
    assert {n: q.reliability == ReliabilityPolicy.RELIABLE for n, q in found.items()} == {
        'plain': True, 'best_effort': False, 'latched': True, 'mixed': True}
    assert {n: q.durability == DurabilityPolicy.TRANSIENT_LOCAL for n, q in found.items()} == {
        'plain': False, 'best_effort': False, 'latched': True, 'mixed': True}


def test_old_schema_bag_is_played(listen, data_dir):
    path = data_dir / 'permissive/bags/image_imu_gps_sample'
    listener = listen(text=STRING, image='sensor_msgs/msg/Image')
    report = play(path, rate=1e9, wait_for=['/text', '/image'])  # months lie between them
    assert set(report.num_messages) == {'/text', '/image', '/image/compressed', '/fix', '/imu'}
    wait_until(lambda: listener.on('/text') and listener.on('/image'))
    assert listener.on('/image') == [padded(raw) for *_, raw in read(path, ['/image'])]


def test_topics_that_cannot_be_played_are_skipped_with_one_line_each(listen, tmp_path, caplog):
    changed = 'int64 data\n', 'RIHS01_' + '0' * 64
    messages = [('/good', STRING, T0, text('good')),
                ('/unknown', 'velodyne_msgs/msg/VelodyneScan', T0, text('')),
                ('/no type', 'no/type/at/all', T0, text('')),
                ('/changed', 'std_msgs/msg/Header', T0, text('')),
                ('/bad//name', STRING, T0, text('')),
                ('/good', TF, T0, bag_files.transforms())]
    definitions = {name: changed for name in (
        'velodyne_msgs/msg/VelodyneScan', 'no/type/at/all', 'std_msgs/msg/Header')}
    path = write_bag(tmp_path / 'bag', messages, definitions=definitions)
    listener = listen(good=STRING)
    report = play(path, wait_for=['/good'])
    wait_until(lambda: listener.on('/good'))
    assert listener.on('/good') == [padded(text('good'))]
    assert report.skipped['/unknown'] == (
        'message type velodyne_msgs/msg/VelodyneScan is not installed')
    assert 'another definition' in report.skipped['/changed']
    assert set(report.skipped) == {'/unknown', '/no type', '/changed', '/bad//name', '/good'}
    lines = [r.getMessage() for r in caplog.records if 'skipped' in r.getMessage()]
    assert len(lines) == 5
    assert not any('\n' in line for line in lines)


def test_static_transforms_alone_are_worth_playing(listen, tmp_path):
    listener = listen(tf_static=TF)
    path = write_bag(tmp_path / 'bag', drive()[-1:])
    assert play(path, wait_for=['/tf_static']).num_messages == {}
    wait_until(lambda: listener.on('/tf_static'))


def test_nothing_to_play_is_refused(listen, data_dir, tmp_path):
    listen()
    with pytest.raises(InputError, match='/velodyne_packets: message type velodyne_msgs/msg/Vel'):
        play(data_dir / 'permissive/bags/velodyne_vlp16_packets')
    for name, reason in (('empty_bag', 'no messages'), ('wrong_format_mcap', 'wrong_format')):
        with pytest.raises(InputError, match=reason):
            play(data_dir / 'permissive/bags' / name)
    with pytest.raises(InputError, match='no such bag'):
        play(tmp_path / 'missing')


@pytest.mark.parametrize(('arguments', 'message'), [
    ({'rate': 0.0}, 'rate: found 0, expected a positive number'),
    ({'rate': float('nan')}, 'rate: found nan'),
    ({'start_offset_s': 0.2}, 'start_offset_s: found 0.2, expected 0 to 0.189'),
    ({'start_offset_s': -1.0}, 'start_offset_s: found -1'),
    ({'topics': ['/points', '/nothing']}, 'topics: found /nothing, expected topics of'),
    ({'answer_topic': '/objects', 'cloud_topic': '/tf'}, 'cloud_topic: found /tf, expected one'),
    ({'answer_topic': '/objects', 'topics': ['/tf']}, 'cloud_topic: found None'),
    ({'answer_topic': '/objects', 'answer_timeout_s': 0.0}, 'answer_timeout_s: found 0'),
])
def test_wrong_arguments(tmp_path, arguments, message):
    path = write_bag(tmp_path / 'bag', drive())
    with pytest.raises(ConfigError) as caught:
        play(path, **arguments)
    assert str(caught.value).startswith(message)


def test_a_wrong_ros_environment_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', 'abc')
    with pytest.raises(PerceptionError, match='^ROS: cannot start: .*ROS_DOMAIN_ID') as caught:
        play(write_bag(tmp_path / 'bag', drive()))
    assert '\n' not in str(caught.value)


def test_several_cloud_topics_need_a_choice(tmp_path):
    path = write_bag(tmp_path / 'bag', [*drive(), ('/other', CLOUD, T0, drive()[1][3])])
    with pytest.raises(ConfigError, match='cloud_topic: found None, expected one .*/other, /poin'):
        play(path, answer_topic='/objects')


def test_nobody_listens(listen, tmp_path, caplog):
    listen()
    path = write_bag(tmp_path / 'bag', drive())
    assert play(path, wait_for=['/points'], wait_timeout_s=0.1).num_messages['/points'] == 2
    assert '/points: no subscriber after 0.1 s; playing all the same' in caplog.text
    with pytest.raises(PerceptionError, match='/points: no subscriber, /objects: no publisher'):
        play(path, answer_topic='/objects', wait_timeout_s=0.1)


class Answerer(Listener):
    """Answers each cloud after a while, with its stamp plus an error.

    :ivar answers: (stamp answered, time of the answer).
    """

    def __init__(self, delay_s=0.15, error_ns=lambda stamp_ns: 0) -> None:
        super().__init__(tf=TF, clock=CLOCK)
        from autoware_perception_msgs.msg import DetectedObjects
        from sensor_msgs.msg import PointCloud2
        publisher = self.node.create_publisher(DetectedObjects, '/objects', 10)
        self.answers = []

        def answer(message, info):
            stamp_ns = message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
            self._heard.append((info['source_timestamp'], '/points', stamp_ns))
            time.sleep(delay_s)
            reply = DetectedObjects(header=message.header)
            answered_ns = stamp_ns + error_ns(stamp_ns)
            reply.header.stamp.sec, reply.header.stamp.nanosec = divmod(answered_ns, 10**9)
            self.answers.append((answered_ns, time.time_ns()))
            publisher.publish(reply)

        self.node.create_subscription(PointCloud2, '/points', answer, 10)
        self._executor.wake()


def many_clouds(count=5):
    """Clouds every 10 ms, each with the transform for it recorded *after* it."""
    for k in range(count):
        t = T0 + k * 10 * MS
        yield '/points', CLOUD, t + MS, bag_files.cloud(t, POINTS)
        yield '/tf', TF, t + 2 * MS, bag_files.transforms(
            (t, 'map', 'base_link', (k, 0, 0), (0, 0, 0, 1)))


@contextlib.contextmanager
def answering(**arguments):
    pytest.importorskip('autoware_perception_msgs')
    answerer = Answerer(**arguments)
    try:
        yield answerer
    finally:
        answerer.close()


def test_no_cloud_is_sent_before_the_one_before_is_answered(tmp_path):
    path = write_bag(tmp_path / 'bag', many_clouds())
    with answering() as node:
        report = play(path, answer_topic='/objects')
        wait_until(lambda: len(node.on('/tf')) == 5)
    assert (report.num_answered, report.unanswered_ns) == (5, ())
    assert report.num_messages == {'/points': 5, '/tf': 5}
    sent = [(stamp, t) for topic, stamp, t in node.heard if topic == '/points']
    assert [stamp for stamp, _ in sent] == [T0 + k * 10 * MS for k in range(5)]
    for (_, answered_at), (_, next_sent_at) in zip(node.answers, sent[1:], strict=False):
        assert answered_at <= next_sent_at
    # The transform that follows a cloud does not wait for the answer, which may need it.
    transforms_sent = [t for topic, _, t in node.heard if topic == '/tf']
    for t, (_, answered_at) in zip(transforms_sent, node.answers, strict=True):
        assert t < answered_at
    clock = node.clock_ns()
    assert clock == sorted(clock)


def test_clouds_without_an_answer_of_their_stamp_are_reported(tmp_path, caplog):
    path = write_bag(tmp_path / 'bag', many_clouds(3))
    wrong = T0 + 10 * MS
    with answering(delay_s=0, error_ns=lambda stamp_ns: 7 if stamp_ns == wrong else 0):
        report = play(path, answer_topic='/objects', answer_timeout_s=1.0)
    assert (report.num_answered, report.unanswered_ns) == (2, (wrong,))
    assert 'no answer to cloud 1700000000.010000000 in 1 s' in caplog.text


def test_a_node_that_is_gone_ends_the_waiting(tmp_path):
    path = write_bag(tmp_path / 'bag', many_clouds(3))
    with answering(delay_s=0, error_ns=lambda stamp_ns: 7) as node, \
            playing(path, answer_topic='/objects', answer_timeout_s=2.0) as result:
        wait_until(lambda: node.answers)
        node.close()
        wait_until(lambda: result)
    assert isinstance(result[0], PerceptionError)
    assert 'nobody listens to /points' in str(result[0])


@pytest.mark.parametrize(('wait_for', 'sign'), [
    ([], 'the next message of the bag comes in 3600 s'),
    (['/a'], '/a: no subscriber; waiting up to 30 s')])
def test_ctrl_c_ends_the_player_at_once(tmp_path, wait_for, sign):
    pytest.importorskip('rclpy')
    path = write_bag(tmp_path / 'bag', [('/a', STRING, T0, text('')),
                                        ('/a', STRING, T0 + 3600 * 10**9, text(''))])
    code = '''import logging, sys
from tt_perception.ros.bag import play
logging.basicConfig(level='INFO')
try:
    play(sys.argv[1], wait_for=sys.argv[2:])
except KeyboardInterrupt:
    print('interrupted')
    sys.exit(130)
'''
    with Process([sys.executable, '-c', code, str(path), *wait_for]) as player:
        player.wait_for_output(sign)
        begin_s = time.monotonic()
        player.signal(signal.SIGINT)
        assert player.wait() == 130
        assert time.monotonic() - begin_s < 5
        assert player.output().splitlines()[-1] == 'interrupted'
        assert 'Traceback' not in player.output()


def test_a_bag_that_breaks_off_is_played_so_far_and_then_refused(listen, tmp_path):
    """Storage of many pages, cut in the middle: rows before the cut still arrive."""
    messages = [('/a', STRING, T0 + k, text('x' * 3000 + str(k))) for k in range(100)]
    path = write_bag(tmp_path / 'bag', messages)
    file = path / 'bag.db3'
    shutil.copy(file, tmp_path / 'whole.db3')
    content = (tmp_path / 'whole.db3').read_bytes()
    file.write_bytes(content[:len(content) * 2 // 3])
    listener = listen(a=STRING)
    with pytest.raises(InputError, match='no readable rosbag2'):
        play(Path(path), wait_for=['/a'])
    assert len(listener.on('/a')) < 100
