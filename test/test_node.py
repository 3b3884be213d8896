# SPDX-License-Identifier: Apache-2.0
"""The node ``bevfusion`` over DDS, with a model that says what it was given."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip('rclpy')
pytest.importorskip('autoware_perception_msgs.msg')

from fake_bevfusion import FakeNode  # noqa: E402
from lifecycle_msgs.msg import Transition  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402
from rclpy.lifecycle import TransitionCallbackReturn  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402
from ros_process import (  # noqa: E402
    CHECKOUT,
    Client,
    fresh_namespace,
    make_context,
    node_process,
    wait_until,
)
from sensor_msgs.msg import PointCloud2  # noqa: E402

from tt_perception.bevfusion.config import (  # noqa: E402
    PARAMETERS,
    BEVFusionConfig,
    known_parameters,
    read_parameter_file,
    score_parameter,
)
from tt_perception.ros.bevfusion import BEVFusionNode  # noqa: E402
from tt_perception.ros.conversions import cloud_message, stamp_to_ns, xyzirc  # noqa: E402
from tt_perception.ros.parameters import BEVFUSION_UNUSED, source_of  # noqa: E402
from tt_perception.runtime.errors import ConfigError  # noqa: E402

S = 10**9
START_NS = 1_700_000_000 * S
CONFIGURE, CLEANUP = Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_CLEANUP
ACTIVATE, DEACTIVATE = Transition.TRANSITION_ACTIVATE, Transition.TRANSITION_DEACTIVATE


class Running:
    """A node on a thread of this process, and a client that talks to it over DDS."""

    def __init__(self, *arguments: str, node_class: type[FakeNode] = FakeNode,
                 **parameters) -> None:
        self.stop = threading.Event()
        self._context = make_context()
        namespace = fresh_namespace()
        self.name = namespace + '/bevfusion'
        self.node = node_class(
            stop=self.stop, context=self._context, namespace=namespace,
            cli_args=['--ros-args', *arguments],
            parameter_overrides=[Parameter(name.replace('__', '.'), value=value)
                                 for name, value in parameters.items()])
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._executor.spin, daemon=True)
        self._thread.start()
        self.client = Client(self.name)

    @property
    def model(self):
        return self.node._model

    def activate(self) -> None:
        assert self.client.change_state(CONFIGURE)
        assert self.client.change_state(ACTIVATE)
        # Both ends of each topic: what is sent before that may be lost.
        self.client.wait_for_match()
        ends = [self.node._subscription, *getattr(self.node._transforms, '_subscriptions', [])]
        wait_until(lambda: all(end.get_publisher_count() for end in ends)
                   and self.node._publisher.get_subscription_count())

    def send(self, stamp_ns: int = START_NS, num_points: int = 5, frame_id: str = 'base') -> None:
        self.client.cloud_publisher.publish(cloud_message(
            xyzirc(np.ones((num_points, 3))), frame_id=frame_id, stamp_ns=stamp_ns))

    def answers(self, count: int):
        """Wait for a number of answers and return all."""
        wait_until(lambda: len(self.client.objects) >= count,
                   problem=lambda: f'{len(self.client.objects)} of {count} answers; '
                                   f'{self.node.counter.counts()}')
        return self.client.objects

    def counts(self, **expected: int):
        """Wait until the counters are as expected."""
        def found():
            counts = self.node.counter.counts()
            return {**vars(counts), **counts.refused, 'in_progress': counts.in_progress}
        wait_until(lambda: all(found().get(k, 0) == v for k, v in expected.items()), 10,
                   lambda: f'found {found()}, expected {expected}')

    def move(self, first_s: int = 0, last_s: int = 9) -> None:
        """Send transforms: at START_NS + t seconds the ego is at x = t."""
        for second in range(first_s, last_s + 1):
            self.client.send_transform('map', 'base', START_NS + second * S, (second, 2, 3))

    def close(self) -> None:
        self.client.close()
        self._executor.shutdown()
        self._thread.join()
        self.node.shut_down()
        self.node.destroy_node()
        self._context.try_shutdown()


@pytest.fixture
def run():
    running = []

    def start(*arguments: str, **options) -> Running:
        running.append(Running(*arguments, **options))
        return running[-1]

    yield start
    for one in running:
        one.close()


def position(message):
    p = message.objects[0].kinematics.pose_with_covariance.pose.position
    return p.x, p.y, p.z


def was_reset(message) -> bool:
    return message.objects[0].shape.dimensions.y == 2


# ---- the normal case


def test_each_cloud_is_answered_with_its_stamp_and_frame_and_its_pose(run):
    node = run()
    node.activate()
    node.move()
    stamps = [START_NS + S // 2, START_NS + 3 * S // 2 + 1]
    for count, stamp in enumerate(stamps, 1):
        node.send(stamp, num_points=count)
        node.answers(count)
    found = node.client.objects
    assert [stamp_to_ns(m.header.stamp) for m in found] == stamps
    assert [m.header.frame_id for m in found] == ['base', 'base']
    np.testing.assert_allclose([position(m) for m in found], [(0.5, 2, 3), (1.5, 2, 3)], atol=1e-6)
    assert [m.objects[0].shape.dimensions.x for m in found] == [1, 2]
    node.client.wait_for_counts(received=2, answered=2, in_progress=0)
    (first, second) = node.client.statuses('bevfusion_trt')
    assert first.hardware_id == 'bevfusion' and first.level == b'\0'
    assert first.message == 'OK'
    assert [(v.key, v.value) for v in first.values] == [
        ('is_num_voxels_within_range', 'True'), ('num_voxels_clipped', '0'),
        ('num_sweeps_skipped', '0'), ('num_points_dropped', '0'),
        ('postprocess.non_finite', '0'), ('postprocess.unknown_class', '0')]


def test_without_past_sweeps_transforms_are_never_asked_for(run):
    node = run(densification_num_past_frames=0)
    node.activate()
    node.send(frame_id='nowhere')
    assert position(node.answers(1)[0]) == (0, 0, 0)
    wait_until(lambda: node.client.tf_publisher.get_subscription_count() == 0)


def test_topics_have_the_quality_of_service_that_drivers_and_autoware_expect(run):
    node = run()
    node.activate()
    of = node.client.node
    (subscription,) = of.get_subscriptions_info_by_topic(node.name + '/input/pointcloud')
    (publisher,) = of.get_publishers_info_by_topic(node.name + '/output/objects')
    assert subscription.qos_profile.reliability.name == 'BEST_EFFORT'
    assert publisher.qos_profile.reliability.name == 'RELIABLE'
    assert {subscription.qos_profile.durability.name, publisher.qos_profile.durability.name} == {
        'VOLATILE'}
    assert node.node._subscription.qos_profile.depth == 1


def test_D14_reliability_of_the_input_can_be_changed_without_code(run):
    node = run('-r', '~/input/pointcloud:=/points',
               **{'qos_overrides./points.subscription.reliability': 'reliable'})
    assert node.client.change_state(CONFIGURE) and node.client.change_state(ACTIVATE)
    wait_until(lambda: node.client.node.get_subscriptions_info_by_topic('/points'))
    (info,) = node.client.node.get_subscriptions_info_by_topic('/points')
    assert info.qos_profile.reliability.name == 'RELIABLE'


def test_D14_best_effort_drivers_and_listeners_are_served(run):
    from autoware_perception_msgs.msg import DetectedObjects
    from rclpy.qos import qos_profile_sensor_data
    node = run(densification_num_past_frames=0)
    node.activate()
    received = []
    node.client.node.create_subscription(DetectedObjects, node.name + '/output/objects',
                                         received.append, qos_profile_sensor_data)
    driver = node.client.node.create_publisher(PointCloud2, node.name + '/input/pointcloud',
                                               qos_profile_sensor_data)
    wait_until(lambda: driver.get_subscription_count() > 0)
    cloud = cloud_message(xyzirc(np.ones((3, 3))), frame_id='base', stamp_ns=START_NS)

    def has_answer():
        driver.publish(cloud)
        time.sleep(0.05)
        return received
    wait_until(has_answer)


def test_B25_the_newest_cloud_wins_while_the_model_is_busy(run):
    node = run(densification_num_past_frames=0)
    node.activate()
    node.model.delay_s = 0.2
    for n in range(15):
        node.send(START_NS + n * S)
        time.sleep(0.02)
    wait_until(lambda: stamp_to_ns(node.answers(1)[-1].header.stamp) == START_NS + 14 * S)
    counts = node.node.counter.counts()
    assert counts.answered < 8 and counts.replaced + counts.answered == counts.received == 15


# ---- clouds that are refused


def _broken_clouds():
    def cloud(**changes):
        message = cloud_message(xyzirc(np.ones((4, 3))), frame_id='base', stamp_ns=START_NS)
        for name, value in changes.items():
            setattr(message, name, value)
        return message

    good = cloud()
    yield 'A16 no fields', 'layout', PointCloud2()
    yield 'A15 empty', 'empty', cloud_message(xyzirc(np.ones((0, 3))), frame_id='base',
                                              stamp_ns=START_NS)
    yield 'A44 NaN only', 'empty', cloud_message(xyzirc(np.full((3, 3), np.nan)), frame_id='base',
                                                 stamp_ns=START_NS)
    yield 'A04 no z', 'layout', cloud(fields=[f for f in good.fields if f.name != 'z'])
    yield 'A12 width', 'size', cloud(width=5)
    yield 'A12 height', 'size', cloud(height=2)
    yield 'A44 half the bytes', 'size', cloud(data=good.data[:32])
    yield 'A14 absurd size', 'size', cloud(width=0xffffffff, height=0xffffffff)
    yield 'A14 absurd size, no data', 'size', cloud(
        width=0xffffffff, height=0xffffffff, data=good.data[:0])
    yield 'A11 row step', 'size', cloud(row_step=63)
    yield 'A07 point step', 'layout', cloud(point_step=8)


def test_a_broken_cloud_is_counted_and_the_node_stays_active(run, capfd):
    node = run()
    node.activate()
    node.move()
    node.send()
    node.answers(1)
    expected: dict[str, int] = {}
    for name, reason, message in _broken_clouds():
        start_s = time.monotonic()
        node.client.cloud_publisher.publish(message)
        expected[reason] = expected.get(reason, 0) + 1
        node.counts(**expected)
        assert time.monotonic() - start_s < 5, name
    assert 'frame refused' in node.client.wait_for_level('frames', 1).message
    node.send(START_NS + S)
    node.answers(2)
    assert node.client.state() == 'active'
    assert node.model.num_calls == 2  # the model never saw the broken ones
    node.client.wait_for_counts(received=13, answered=2, in_progress=0,
                                **{f'refused__{k}': v for k, v in expected.items()})
    node.client.wait_for_level('frames', 0)
    log = capfd.readouterr().err
    assert 'Traceback' not in log
    for reason, number in expected.items():  # one line of each kind, not one of each cloud
        assert number > 1 and log.count(f'frame refused ({reason})') == 1


def _with(meta, changes):
    """Return ``meta`` with other values; ``postprocess.`` leads to its counts."""
    changed = {**meta, 'postprocess': dict(meta['postprocess'])}
    for key, value in changes.items():
        outer, _, inner = key.rpartition('.')
        (changed[outer] if outer else changed)[inner] = value
    return changed


@pytest.mark.parametrize('changes, message', [
    ({'is_num_voxels_within_range': False, 'num_voxels_clipped': 7},
     'more voxels than the maximum; 7 are left out'),
    ({'num_sweeps_skipped': 2}, '2 past sweeps do not fit into cloud_capacity'),
    ({'postprocess.non_finite': 499}, '499 of 500 proposals are not finite'),
    ({'postprocess.unknown_class': 3}, '3 proposals are of a class without a label'),
    ({'num_points_dropped': 11}, None),  # ordinary: many drivers mark lost returns by NaN
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else '')
def test_A20_a_doubtful_answer_is_a_warning_on_the_cloud_that_has_it(run, capfd, changes,
                                                                     message):
    node = run(densification_num_past_frames=0)
    node.activate()
    good = node.model.meta
    doubtful = _with(good, changes)
    for count, meta in enumerate((good, doubtful, doubtful, good), 1):
        node.model.meta = meta
        node.send()
        node.answers(count)
    wait_until(lambda: len(node.client.statuses('bevfusion_trt')) == 4)
    statuses = node.client.statuses('bevfusion_trt')
    for key, value in changes.items():
        shown = [v.value for s in statuses for v in s.values if v.key == key]
        assert shown[1] == shown[2] == str(value) and shown[0] == shown[3] != str(value)
    log = capfd.readouterr().err
    if message is None:
        assert {s.message for s in statuses} == {'OK'}
        assert not [line for line in log.splitlines() if 'WARN' in line and 'bevfusion]' in line]
    else:
        assert [s.level for s in statuses] == [b'\0', b'\1', b'\1', b'\0']
        assert message in statuses[1].message and statuses[3].message == 'OK'
        assert log.count(message) == 1  # throttled


def test_several_doubts_are_all_in_the_message(run):
    node = run(densification_num_past_frames=0)
    node.activate()
    node.model.meta = _with(node.model.meta, {'num_sweeps_skipped': 1,
                                              'postprocess.non_finite': 500})
    node.send()
    wait_until(lambda: node.client.statuses('bevfusion_trt'))
    (status,) = node.client.statuses('bevfusion_trt')
    assert '1 past sweeps' in status.message and '500 of 500 proposals' in status.message


# ---- transforms


def test_A34_clouds_without_transform_are_refused_until_there_is_one(run, capfd):
    node = run()
    node.activate()
    for n in range(3):
        node.send(START_NS + n)
        node.counts(no_transform=n + 1)
    assert not node.client.objects and node.client.state() == 'active'
    node.move()
    node.send(START_NS + S)
    assert position(node.answers(1)[0])[0] == 1
    assert capfd.readouterr().err.count('frame refused (no_transform)') == 1


def test_D03_a_cloud_that_comes_before_its_transform_is_still_used(run):
    node = run()
    node.activate()
    node.move(last_s=2)
    node.send(START_NS + S)
    node.answers(1)
    node.node.period_s = 5.0  # receive() overwrites it with the time since the last cloud
    node.node._received_s = None
    node.send(START_NS + 4 * S)
    time.sleep(0.1)
    node.counts(in_progress=1)
    assert node.client.state() == 'active'  # services answer while the cloud is held
    node.move(first_s=3)
    assert position(node.answers(2)[1])[0] == 4


def test_a_cloud_is_held_for_one_period_of_the_sensor_only(run):
    node = run()
    node.activate()
    node.move()
    for n in range(4):
        node.send(START_NS + 20 * S + n)
        time.sleep(0.1)
    start_s = time.monotonic()
    node.counts(in_progress=0)
    assert time.monotonic() - start_s < 2
    assert node.node.counter.counts().refused['no_transform'] >= 1


def test_A36_a_stamp_of_another_clock_is_refused_at_once(run, capfd):
    node = run()
    node.activate()
    node.move()
    node.send(543 * S)
    node.counts(no_transform=1)
    assert capfd.readouterr().err.count('frame refused (no_transform)') == 1
    node.send()
    node.answers(1)


def test_D04_frame_names(run):
    node = run()
    node.activate()
    node.move()
    node.send(frame_id='')
    node.counts(no_transform=1)
    node.send(frame_id='/base')
    assert node.answers(1)[0].header.frame_id == '/base'  # the header passes unchanged


def test_A40_a_transform_with_a_zero_quaternion_does_not_count(run):
    node = run()
    node.activate()
    node.client.send_transform('map', 'base', START_NS, xyzw=(0, 0, 0, 0))
    node.send()
    node.counts(no_transform=1)
    node.move()
    node.send()
    node.answers(1)


def test_D21_a_static_transform_from_before_the_start_is_known():
    namespace = fresh_namespace()
    client = Client(namespace + '/bevfusion')
    client.send_transform('map', 'base', 0, (7, 0, 0), static=True)
    with node_process('fake_bevfusion:main', namespace=namespace, autostart=True):
        client.wait_for_match()
        client.send_until(cloud_message(xyzirc(np.ones((4, 3))), frame_id='base',
                                        stamp_ns=START_NS), lambda: client.objects)
        assert position(client.objects[0]) == (7, 0, 0)
    client.close()


# ---- time


def test_D19_clouds_are_processed_without_a_clock(run):
    node = run(use_sim_time=True)
    node.activate()
    node.move()
    node.send()
    node.answers(1)
    node.client.wait_for_counts(answered=1)


def test_D01_a_jump_back_in_time_forgets_transforms_and_sweeps(run):
    from rosgraph_msgs.msg import Clock
    node = run(use_sim_time=True)
    node.activate()

    def set_clock(stamp_ns):
        message = Clock()
        message.clock.sec, message.clock.nanosec = divmod(stamp_ns, S)

        def is_set():
            node.client.clock_publisher.publish(message)
            time.sleep(0.02)
            return node.node.get_clock().now().nanoseconds == stamp_ns
        wait_until(is_set)

    set_clock(START_NS + 9 * S)
    node.move()
    for count, seconds in enumerate((7, 8), 1):
        node.send(START_NS + seconds * S)
        node.answers(count)
    resets_before = node.node._num_jumps
    set_clock(START_NS)
    assert node.node._num_jumps == resets_before + 1
    node.send(START_NS + 8 * S)  # a straggler of the first loop: its transform is gone
    node.counts(no_transform=1)
    node.move(last_s=2)
    for count, seconds in enumerate((1, 2), 3):
        node.send(START_NS + seconds * S)
        node.answers(count)
    assert [was_reset(m) for m in node.client.objects] == [False, False, True, False]


# ---- parameters


@pytest.mark.parametrize('name, value', [
    ('voxel_size', [0.1, 0.0, 0.2]), ('voxel_size', [0.1, -0.1, 0.2]),
    ('voxel_size', [0.1, float('nan'), 0.2]), ('voxel_size', [0.1, 0.1]), ('voxel_size', 'small'),
    ('voxel_size', [True, False, True]), ('cloud_capacity', 'many'), ('cloud_capacity', 1.5),
    ('densification_num_past_frames', -1), ('class_names', 5), ('iou_nms_threshold', 1.5),
    ('image_backbone_onnx_path', 'camera.onnx'), ('model_path', '/no/such/folder'),
    ('backend', 3),
])
def test_A17_a_wrong_parameter_fails_configure_by_name_and_can_be_corrected(run, capfd, name,
                                                                            value):
    node = run(**{name: value})
    assert not node.client.change_state(CONFIGURE)
    assert node.client.state() == 'unconfigured'
    log = capfd.readouterr().err
    assert f'on_configure: {value if name == "model_path" else name}: ' in log
    assert 'Traceback' not in log
    assert node.node._transforms is None and node.model is None and node.node._publisher is None
    default = {'backend': 'auto'}.get(name, PARAMETERS[name].default if name in PARAMETERS else '')
    default = list(default) if isinstance(default, tuple) else default
    assert node.client.set_parameters(**{name: default}) == ''
    assert node.client.change_state(CONFIGURE)


def test_a_whole_number_is_good_for_a_float(run):
    node = run(iou_nms_search_distance_2d=10, voxel_size=[1, 1, 1])
    assert node.client.change_state(CONFIGURE)
    assert node.model.config.grid.voxel_size == (1.0, 1.0, 1.0)


def test_thresholds_change_at_run_time_and_nothing_else_does(run):
    node = run(densification_num_past_frames=0)
    client = node.client
    assert client.set_parameters(cloud_capacity=5) == ''
    assert 'cloud_capacity: found 0, expected at least 1' in client.set_parameters(
        cloud_capacity=0)
    node.activate()
    assert 'cloud_capacity: fixed while the node is configured' in client.set_parameters(
        cloud_capacity=6)
    assert client.parameter('cloud_capacity') == 5
    node.send()
    assert node.answers(1)[0].objects[0].existence_probability == 0.5
    assert client.set_parameters(iou_nms_threshold=0.25) == ''
    node.send()
    assert node.answers(2)[1].objects[0].existence_probability == 0.25
    assert 'iou_nms_threshold: found 2.0, expected at most 1' in client.set_parameters(
        iou_nms_threshold=2.0)
    limits, car = ('detection_score_thresholds.distance_bin_upper_limits',
                   'detection_score_thresholds.min_confidence_scores.CAR')
    assert f'{car}: found 1 values' in client.set_parameters(**{car: [0.5]})
    others = {score_parameter(name).name: [0.5] for name in PARAMETERS['class_names'].default}
    assert client.set_parameters(**{limits: [99.0], **others}) == ''  # together they fit
    assert list(client.parameter(car)) == [0.5]
    assert client.state() == 'active'
    client.change_state(DEACTIVATE)
    client.change_state(CLEANUP)
    assert client.set_parameters(cloud_capacity=7) == ''


def test_parameters_show_what_the_artifact_says_unless_the_user_does(run):
    class OtherArtifact(FakeNode):
        def create_model(self):
            model = super().create_model()
            model.config = BEVFusionConfig.from_parameters({
                'class_names': ('CAR', 'TREE', 'HOUSE'), 'num_proposals': 77,
                **known_parameters(self._settings.given())})
            return model

    node = run(node_class=OtherArtifact, backend='cpu', iou_nms_threshold=0.2, **{
        'detection_score_thresholds__min_confidence_scores__TREE': [0.3, 0.3, 0.3, 0.3]})
    assert node.client.parameter('num_proposals') == 500
    assert node.client.change_state(CONFIGURE)
    assert node.client.parameter('num_proposals') == 77
    assert node.client.parameter('iou_nms_threshold') == 0.2
    assert node.client.parameter('class_names') == ['CAR', 'TREE', 'HOUSE']
    score = 'detection_score_thresholds.min_confidence_scores.'
    assert list(node.client.parameter(score + 'TREE')) == [0.3] * 4
    assert list(node.client.parameter(score + 'HOUSE')) == [0.1] * 4
    assert node.node._per_call == {score + 'TREE': (0.3,) * 4}


AUTOWARE_FILE = """
/**:
  ros__parameters:
    max_camera_lidar_delay: 0.0
    plugins_path: $(find-pkg-share autoware_tensorrt_plugins)/plugins/libautoware.so
    trt_precision: fp16
    cloud_capacity: 2000000
    onnx_path: "$(var model_path)/bevfusion_lidar.onnx"
    engine_path: "$(var model_path)/bevfusion_lidar.engine"
    image_backbone_onnx_path: ""
    image_backbone_engine_path: ""
    image_backbone_trt_precision: ""
    densification_num_past_frames: 0
    densification_world_frame_id: map
    run_image_undistortion: false
    use_compressed_images: false
    circle_nms_dist_threshold: 0.5
    iou_nms_search_distance_2d: 10.0
    iou_nms_threshold: 0.1
    yaw_norm_thresholds: [0.3, 0.3, 0.3, 0.3, 0.0, 0.0, 0.0]
    detection_score_thresholds:
      distance_bin_upper_limits: [50.0, 90.0, 121.0, 200.0]
      min_confidence_scores:
        CAR: [0.2, 0.2, 0.2, 0.2]
        TRAFFIC_CONE: [0.2, 0.2, 0.2, 0.2]
    num_cameras: 0
    d_bound: [1.0, 166.2, 1.4]
    z_bound: [-10.0, 10.0, 20.0]
    img_aug_scale_x: 0.0
    something_new: [1, 2, 3]
"""


def test_parameter_files_of_autoware_load_unchanged(run, tmp_path):
    file = tmp_path / 'bevfusion_lidar.param.yaml'
    file.write_text(AUTOWARE_FILE)
    node = run('--params-file', str(file), model_path=str(tmp_path))
    assert node.client.change_state(CONFIGURE)
    given = node.node._settings.given()
    assert given['detection_score_thresholds.min_confidence_scores.CAR'] == (0.2,) * 4
    assert given['densification_num_past_frames'] == 0
    assert source_of(given['model_path'], given['onnx_path']) == str(
        tmp_path / 'bevfusion_lidar.onnx')
    assert node.client.parameter('trt_precision') == 'fp16'


def test_our_parameter_files_hold_the_defaults():
    ours = read_parameter_file(CHECKOUT / 'config' / 'bevfusion_lidar.param.yaml')
    scores = {score_parameter(name).name for name in PARAMETERS['class_names'].default}
    for name, value in ours.items():
        expected = score_parameter('') if name in scores else PARAMETERS[name]
        assert expected.check(value) == expected.default, name
    of_the_artifact = {'class_names', 'point_cloud_range', 'voxel_size', 'voxels_num',
                       'max_points_per_voxel', 'num_proposals', 'out_size_factor', 'use_intensity',
                       'allow_remapping_by_area_matrix', 'min_area_matrix', 'max_area_matrix'}
    assert set(ours) == set(PARAMETERS) - of_the_artifact | scores
    common = read_parameter_file(CHECKOUT / 'config' / 'common_bevfusion.param.yaml')
    assert common == {k: v for k, v in BEVFUSION_UNUSED.items() if k.startswith('diagnostics.')}


def test_the_launch_file_takes_our_parameter_files():
    text = (CHECKOUT / 'launch' / 'bevfusion.launch.py').read_text()
    files = sorted(path.name for path in (CHECKOUT / 'config').glob('*.yaml'))
    assert sorted(re.findall(r"_config\('(.+?)'\)", text)) == files


def test_the_model_is_where_the_parameters_say():
    assert source_of('', '') is None
    assert source_of('/a', '') == '/a'
    assert source_of('/a', '/b/c.onnx') == '/b/c.onnx'
    assert source_of('/a', '$(var model_path)/c.onnx') == '/a/c.onnx'
    with pytest.raises(ConfigError, match='onnx_path: found'):
        source_of('', '$(var model_path)/c.onnx')
    with pytest.raises(ConfigError, match='model_path: found'):
        source_of('$(var data_path)/bevfusion', '')


# ---- the life of the node


@pytest.mark.parametrize('autostart', [True, False])
def test_a_process_that_cannot_start_by_itself_ends_with_its_reason(autostart):
    """Without autostart it stays, for a lifecycle manager that may correct the parameter."""
    namespace = fresh_namespace()
    client = Client(namespace + '/bevfusion')
    with node_process('fake_bevfusion:main', namespace=namespace, autostart=autostart,
                      model_path='/no/such/folder') as process:
        if not autostart:
            assert not client.change_state(CONFIGURE)
            assert client.state() == 'unconfigured' and process.is_running()
            process.signal(signal.SIGINT)
        assert process.wait() == int(autostart)
        reason = 'on_configure: /no/such/folder: no such file or folder'
        assert process.output().count(reason) == 1 and 'Traceback' not in process.output()
    client.close()


def test_a_missing_message_package_is_said_by_name(run, capfd, monkeypatch):
    node = run()
    monkeypatch.setitem(sys.modules, 'autoware_perception_msgs.msg', None)
    assert not node.client.change_state(CONFIGURE)
    assert 'on_configure: autoware_perception_msgs' in capfd.readouterr().err


def test_a_missing_torch_is_said_by_name(capfd, monkeypatch, small_artifact):
    context = make_context()
    node = BEVFusionNode(context=context, namespace=fresh_namespace(), parameter_overrides=[
        Parameter('model_path', value=str(small_artifact))])
    monkeypatch.setitem(sys.modules, 'torch', None)  # as if it were not installed
    assert node.trigger_configure() == TransitionCallbackReturn.FAILURE
    log = capfd.readouterr().err
    assert re.search('on_configure: .*torch.* not installed', log) and 'Traceback' not in log
    node.destroy_node()
    context.try_shutdown()


def test_D10_C08_a_fault_in_a_frame_takes_the_node_out_of_service_and_it_can_come_back(run, capfd):
    node = run(densification_num_past_frames=0)
    node.activate()
    node.model.fail_at = 3
    model = node.model
    for n in range(3):
        node.send(START_NS + n)
        node.counts(received=n + 1, in_progress=0)
    wait_until(lambda: node.client.state() == 'unconfigured')
    assert model.is_closed and len(node.client.objects) == 2
    assert node.client.wait_for_level('frames', 2).message == 'RuntimeError: injected fault'
    assert 'Traceback' in capfd.readouterr().err
    node.activate()
    node.send(START_NS + 9)
    node.answers(3)
    node.client.wait_for_counts(received=4, answered=3, failed=1, in_progress=0)
    node.client.wait_for_level('frames', 0)


def test_deactivation_finishes_the_cloud_in_progress_and_forgets_the_sweeps(run):
    node = run(densification_num_past_frames=0)
    node.activate()
    node.model.delay_s = 0.5
    node.send(START_NS)
    wait_until(lambda: node.model.num_calls == 1)
    node.send(START_NS + 1)
    node.counts(received=2)
    assert node.client.change_state(DEACTIVATE)
    assert len(node.answers(1)) == 1
    node.counts(answered=1, discarded=1, in_progress=0)
    assert node.model.num_resets == 1
    wait_until(lambda: node.client.cloud_publisher.get_subscription_count() == 0)
    model = node.model
    assert node.client.change_state(CLEANUP) and model.is_closed


def test_lifecycle_cycles_under_load(run):
    node = run(densification_num_past_frames=0)
    is_done = threading.Event()

    def publish():
        while not is_done.wait(0.004):
            node.send()

    publisher = threading.Thread(target=publish)
    publisher.start()
    num_cycles, deadline_s = 0, time.monotonic() + 4
    while time.monotonic() < deadline_s:
        for transition in (CONFIGURE, ACTIVATE, DEACTIVATE, CLEANUP):
            assert node.client.change_state(transition), transition
        num_cycles += 1
    node.activate()
    answered = node.node.counter.counts().answered
    wait_until(lambda: node.node.counter.counts().answered > answered)
    is_done.set()
    publisher.join()
    assert num_cycles >= 3
    assert node.client.change_state(DEACTIVATE)
    counts = node.node.counter.counts()
    assert counts.in_progress == 0 and counts.failed == 0 and not counts.refused
    assert len([t for t in threading.enumerate() if t.name == 'frames']) == 0


def test_build_only_ends_the_process_after_configure(run):
    node = run(build_only=True)
    assert node.client.change_state(CONFIGURE)
    assert node.stop.wait(5)


def test_C07_D15_a_signal_inside_a_frame_ends_the_process_quietly():
    namespace = fresh_namespace()
    client = Client(namespace + '/bevfusion')
    with node_process('fake_bevfusion:main', namespace=namespace, env={'FAKE_DELAY_S': '60'},
                      autostart=True, densification_num_past_frames=0) as process:
        client.wait_for_match()
        client.send_until(cloud_message(xyzirc(np.ones((4, 3))), frame_id='base',
                                        stamp_ns=START_NS),
                          lambda: client.counts().get('received'))
        process.signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert 'Traceback' not in process.output() and 'ERROR' not in process.output()
    client.close()


def test_the_node_gives_what_the_api_gives(small_artifact):
    from tt_perception import BEVFusion
    rng = np.random.default_rng(0)
    namespace = fresh_namespace()
    client = Client(namespace + '/bevfusion')
    with node_process('tt_perception.ros.bevfusion_node:main', namespace=namespace, backend='cpu',
                      model_path=small_artifact, autostart=True) as process, \
            BEVFusion.from_pretrained(small_artifact, backend='cpu') as model:
        process.wait_for_output('active:', 120)
        client.wait_for_match()
        low, high = np.reshape(model.config.grid.point_cloud_range, (2, 3))
        for n in range(3):
            client.objects.clear()
            points = rng.uniform(low, high, (2000 + n, 3)).astype(np.float32)
            stamp_ns = START_NS + n * S // 10
            pose = np.eye(4)
            pose[:3, 3] = n, 0.5, -0.25
            client.send_transform('map', 'base', stamp_ns, pose[:3, 3])
            client.send_until(cloud_message(xyzirc(points), frame_id='base', stamp_ns=stamp_ns),
                              lambda: client.objects, every_s=5)
            expected = model(points, stream={
                'id': 'test', 'timestamp_s': stamp_ns * 1e-9, 'T_world_from_ego': pose})
            (found,) = client.objects
            assert stamp_to_ns(found.header.stamp) == stamp_ns
            assert len(found.objects) == len(expected) > 0
            assert [o.existence_probability for o in found.objects] == expected.scores.tolist()
            places = [o.kinematics.pose_with_covariance.pose.position for o in found.objects]
            assert [[p.x, p.y, p.z] for p in places] == expected.boxes_xyzlwh_yaw[:, :3].tolist()
        assert expected.meta['num_sweeps'] == 2
        process.signal(signal.SIGINT)
        assert process.wait() == 0
        assert 'Traceback' not in process.output()
    client.close()
