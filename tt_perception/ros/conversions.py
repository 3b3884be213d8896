# SPDX-License-Identifier: Apache-2.0
"""Arrays to messages. Message to array is :mod:`tt_perception.bevfusion.cloud`."""

from __future__ import annotations

import array
import math
from typing import Any

import numpy as np

from tt_perception.bevfusion.cloud import XYZIRC, point_fields
from tt_perception.bevfusion.detections import Detections3D

_BOUNDING_BOX = 0  # autoware_perception_msgs/msg/Shape


def stamp_to_ns(stamp: Any) -> int:
    """Return a ``builtin_interfaces/msg/Time`` in nanoseconds, whichever library read it."""
    return stamp.sec * 10**9 + stamp.nanosec


def ns_to_stamp(stamp_ns: int) -> Any:
    """Return nanoseconds as a ``builtin_interfaces/msg/Time``."""
    from builtin_interfaces.msg import Time
    return Time(sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)


class DetectedObjectsWriter:
    """Writes detections into one ``DetectedObjects`` message, again and again.

    Building the message of an object costs more than filling it, so the objects are kept.
    """

    def __init__(self) -> None:
        from autoware_perception_msgs.msg import DetectedObjects
        self._message = DetectedObjects()
        self._objects: list[Any] = []

    def write(self, header: Any, detections: Detections3D) -> Any:
        """Return the message, valid until the next call.

        Velocities are not published, and orientations are rotations about z, both as upstream.

        :param header: of the cloud; it passes unchanged.
        """
        while len(self._objects) < len(detections):
            self._objects.append(_empty_object())
        objects = self._objects[:len(detections)]
        for message, box, score, label, orientation in zip(
                objects, detections.boxes_xyzlwh_yaw.tolist(), detections.scores.tolist(),
                detections.labels.tolist(), detections.orientation_availability.tolist(),
                strict=True):
            _fill(message, box, score, label, orientation)
        self._message.header = header
        self._message.objects = objects
        return self._message


def _empty_object() -> Any:
    from autoware_perception_msgs.msg import DetectedObject, ObjectClassification
    return DetectedObject(classification=[ObjectClassification(probability=1.0)])


def _fill(message: Any, box: list[float], score: float, label: int, orientation: int) -> None:
    x, y, z, length, width, height, yaw = box
    message.existence_probability = score
    message.classification[0].label = label
    message.kinematics.orientation_availability = orientation
    pose = message.kinematics.pose_with_covariance.pose
    pose.position.x, pose.position.y, pose.position.z = x, y, z
    pose.orientation.z, pose.orientation.w = math.sin(yaw / 2), math.cos(yaw / 2)
    message.shape.type = _BOUNDING_BOX
    size = message.shape.dimensions
    size.x, size.y, size.z = length, width, height


def xyzirc(points: np.ndarray, intensity: np.ndarray | None = None,
           channel: np.ndarray | None = None) -> np.ndarray:
    """Return float [n, 3] points as :data:`XYZIRC` records; what is not given is 0."""
    records = np.zeros(len(points), XYZIRC)
    records['x'], records['y'], records['z'] = np.asarray(points, np.float32).T
    if intensity is not None:
        records['intensity'] = intensity
    if channel is not None:
        records['channel'] = channel
    return records


def cloud_message(records: np.ndarray, *, frame_id: str, stamp_ns: int) -> Any:
    """Return a ``PointCloud2`` of structured records.

    :param records: structured array [n], or [height, width] for an organised cloud; gaps in its
        dtype become gaps in the message's records, sub-arrays become fields with a count.
    """
    from sensor_msgs.msg import PointCloud2, PointField
    records = np.ascontiguousarray(np.atleast_2d(records))
    dtype = records.dtype
    fields = [PointField(name=name, offset=offset, datatype=datatype, count=count)
              for name, offset, datatype, count in point_fields(dtype)]
    height, width = records.shape
    message = PointCloud2(
        height=height, width=width, fields=fields, point_step=dtype.itemsize,
        row_step=width * dtype.itemsize, is_dense=False,
        is_bigendian=any(dtype.fields[name][0].base.byteorder == '>' for name in dtype.names))
    message.header.frame_id = frame_id
    message.header.stamp = ns_to_stamp(stamp_ns)
    data = array.array('B')  # the only form of the data that no release checks byte by byte
    data.frombytes(memoryview(records.view(np.uint8).reshape(-1)))
    message.data = data
    return message
