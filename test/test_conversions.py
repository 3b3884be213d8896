# SPDX-License-Identifier: Apache-2.0
"""Detections become the messages that Autoware's nodes expect, and arrays become clouds."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip('rclpy')
pytest.importorskip('autoware_perception_msgs.msg')

from autoware_perception_msgs.msg import (  # noqa: E402
    DetectedObjectKinematics,
    DetectedObjects,
    ObjectClassification,
    Shape,
)
from rclpy.serialization import deserialize_message, serialize_message  # noqa: E402
from std_msgs.msg import Header  # noqa: E402

from tt_perception.bevfusion.cloud import decode_cloud  # noqa: E402
from tt_perception.bevfusion.detections import Detections3D  # noqa: E402
from tt_perception.ros.conversions import (  # noqa: E402
    DetectedObjectsWriter,
    cloud_message,
    ns_to_stamp,
    stamp_to_ns,
    xyzirc,
)


def detections(n: int, yaw: float = 0.0, seed: int = 0) -> Detections3D:
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(-50, 50, (n, 7)).astype(np.float32)
    boxes[:, 6] = yaw
    labels = rng.integers(0, 8, n).astype(np.uint8)
    return Detections3D(
        boxes, rng.normal(size=(n, 2)).astype(np.float32),
        np.sort(rng.random(n).astype(np.float32))[::-1], labels,
        (labels < 5).astype(np.uint8), np.arange(n))


def header(frame_id: str = '/lidar', stamp_ns: int = 5) -> Header:
    return Header(frame_id=frame_id, stamp=ns_to_stamp(stamp_ns))


def test_an_object_as_autoware_reads_it():
    found = DetectedObjectsWriter().write(header('base', 1_700_000_000_123_456_789), Detections3D(
        np.array([[10, -2, 0.5, 4.5, 1.8, 1.6, math.radians(30)]], np.float32),
        np.array([[3, 4]], np.float32), np.array([0.75], np.float32), np.array([1], np.uint8),
        np.array([1], np.uint8), np.array([17])))
    assert found.header.frame_id == 'base'
    assert (found.header.stamp.sec, found.header.stamp.nanosec) == (1_700_000_000, 123_456_789)
    (item,) = found.objects
    assert item.existence_probability == 0.75
    (classification,) = item.classification
    assert (classification.label, classification.probability) == (ObjectClassification.CAR, 1.0)
    kinematics = item.kinematics
    assert kinematics.orientation_availability == DetectedObjectKinematics.SIGN_UNKNOWN
    pose = kinematics.pose_with_covariance.pose
    assert (pose.position.x, pose.position.y, pose.position.z) == (10.0, -2.0, 0.5)
    assert (pose.orientation.x, pose.orientation.y) == (0.0, 0.0)
    assert 2 * math.atan2(pose.orientation.z, pose.orientation.w) == pytest.approx(
        math.radians(30), abs=1e-6)
    assert not kinematics.has_position_covariance
    assert not kinematics.pose_with_covariance.covariance.any()
    assert not kinematics.has_twist and not kinematics.has_twist_covariance
    twist = kinematics.twist_with_covariance.twist
    assert (twist.linear.x, twist.linear.y, twist.angular.z) == (0.0, 0.0, 0.0)
    assert item.shape.type == Shape.BOUNDING_BOX and not item.shape.footprint.points
    assert item.shape.dimensions.x == 4.5
    assert item.shape.dimensions.y == pytest.approx(1.8)
    assert item.shape.dimensions.z == pytest.approx(1.6)


@pytest.mark.parametrize('degrees', [0, 30, 90, 180, -90, -179.9, 359, 720])
def test_A40_every_orientation_is_a_unit_rotation_about_z(degrees):
    message = DetectedObjectsWriter().write(header(), detections(1, math.radians(degrees)))
    q = message.objects[0].kinematics.pose_with_covariance.pose.orientation
    assert q.x == q.y == 0 and math.hypot(q.z, q.w) == pytest.approx(1, abs=1e-9)
    turned = 2 * math.atan2(q.z, q.w) - math.radians(degrees)
    assert math.cos(turned) == pytest.approx(1, abs=1e-6)


def test_a_message_used_again_holds_nothing_of_the_one_before():
    writer = DetectedObjectsWriter()
    for n, seed in ((5, 0), (2, 1), (0, 2), (7, 3)):
        found = writer.write(header(stamp_ns=n), detections(n, seed / 3, seed))
        fresh = DetectedObjectsWriter().write(header(stamp_ns=n), detections(n, seed / 3, seed))
        assert len(found.objects) == n
        assert found == fresh
        assert deserialize_message(serialize_message(found), DetectedObjects) == found


@pytest.mark.parametrize('stamp_ns', [0, 1, 10**9 - 1, 10**9, 1_700_000_000_123_456_789])
def test_stamps_are_exact(stamp_ns):
    assert stamp_to_ns(ns_to_stamp(stamp_ns)) == stamp_ns


def test_the_cloud_layout_of_autoware():
    message = cloud_message(xyzirc(np.ones((3, 3))), frame_id='lidar', stamp_ns=10**9 + 5)
    assert [(f.name, f.offset, f.datatype, f.count) for f in message.fields] == [
        ('x', 0, 7, 1), ('y', 4, 7, 1), ('z', 8, 7, 1), ('intensity', 12, 2, 1),
        ('return_type', 13, 2, 1), ('channel', 14, 4, 1)]
    assert (message.height, message.width, message.point_step, message.row_step) == (1, 3, 16, 48)
    assert message.header.frame_id == 'lidar' and stamp_to_ns(message.header.stamp) == 10**9 + 5


def test_points_survive_the_way_into_a_message_and_back():
    points = np.random.default_rng(0).normal(0, 30, (1000, 3)).astype(np.float32)
    message = cloud_message(xyzirc(points, np.arange(1000) % 256), frame_id='', stamp_ns=0)
    found = decode_cloud(message, use_intensity=True).points
    np.testing.assert_array_equal(found[:, :3], points)
    np.testing.assert_array_equal(found[:, 3], np.arange(1000) % 256)


_BASES = ['u1', 'i1', 'u2', 'i2', 'u4', 'i4', 'f4', 'f8']


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(_BASES), st.integers(1, 3), st.integers(0, 5)),
                min_size=0, max_size=5), st.integers(1, 4), st.integers(1, 4), st.booleans(),
       st.randoms(use_true_random=False))
def test_A06_fields_of_any_structured_array_lie_where_the_message_says(extra, height, width,
                                                                       is_big, random):
    order = '>' if is_big else '<'
    columns = [(name, order + 'f4', 1, 0) for name in 'xyz']
    columns += [(f'extra{i}', order + base, count, gap)
                for i, (base, count, gap) in enumerate(extra)]
    random.shuffle(columns)
    names, formats, offsets, end = [], [], [], 0
    for name, base, count, gap in columns:
        names.append(name)
        formats.append((base, (count,)) if count > 1 else base)
        offsets.append(end + gap)
        end += gap + np.dtype(base).itemsize * count
    dtype = np.dtype({'names': names, 'formats': formats, 'offsets': offsets, 'itemsize': end + 3})
    records = np.zeros((height, width), dtype)
    for column, name in enumerate('xyz'):
        records[name] = np.arange(height * width).reshape(height, width) * 3 + column
    message = cloud_message(records, frame_id='a', stamp_ns=0)
    ends = [f.offset for f in message.fields]
    assert ends == sorted(ends) and message.point_step == end + 3
    found = decode_cloud(message, use_intensity=False).points
    np.testing.assert_array_equal(found, np.arange(height * width * 3).reshape(-1, 3))


def test_D05_a_large_cloud_takes_milliseconds():
    records = xyzirc(np.zeros((400_000, 3)))
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        cloud_message(records, frame_id='lidar', stamp_ns=0)
        times_s.append(time.perf_counter() - start_s)
    assert min(times_s) < 0.05
