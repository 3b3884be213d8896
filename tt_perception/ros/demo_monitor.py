# SPDX-License-Identifier: Apache-2.0
"""The demo's own node: it hears the clouds that are played and the objects that answer them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tt_perception.bevfusion.detections import Detections3D
from tt_perception.ros.bag import header_stamp_ns
from tt_perception.ros.conversions import stamp_to_ns


@dataclass(frozen=True)
class Answer:
    """One ``DetectedObjects`` message.

    :ivar latency_ms: from the arrival of the cloud here, None when that was not heard.
    """

    stamp_ns: int
    frame_id: str
    detections: Detections3D
    latency_ms: float | None


@dataclass
class Monitor:
    """Subscribes to clouds and objects; a context manager, with a ROS context of its own.

    ROS's environment variables must be set before it is entered. The clouds are subscribed to
    when the first ``/clock`` is heard: a player that waits for a listener must not take this one
    for the node.

    :ivar answers: heard so far, in order of arrival.
    """

    cloud_topic: str
    objects_topic: str
    answers: list[Answer] = field(default_factory=list)

    def __enter__(self) -> Monitor:
        import rclpy
        from autoware_perception_msgs.msg import DetectedObjects
        from rclpy.executors import SingleThreadedExecutor
        from rclpy.qos import QoSProfile
        from rclpy.signals import SignalHandlerOptions
        from rosgraph_msgs.msg import Clock
        self._heard_s: dict[int, float] = {}
        self._hears_clouds = False
        self._context = rclpy.Context()
        rclpy.init(args=[], context=self._context,
                   signal_handler_options=SignalHandlerOptions.NO)
        self._node = rclpy.create_node('demo_monitor', context=self._context)
        self._node.create_subscription(Clock, '/clock', self._on_clock, QoSProfile(depth=1))
        self._node.create_subscription(DetectedObjects, self.objects_topic, self._on_objects,
                                       QoSProfile(depth=50))
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        return self

    def __exit__(self, *_: Any) -> None:
        self._executor.shutdown()
        self._node.destroy_node()
        self._context.try_shutdown()

    def spin(self, timeout_s: float) -> None:
        """Handle what arrives within the time."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left_s)

    def node_is_ready(self, name: str) -> bool:
        """Return whether the node of that name listens to the clouds and announces objects."""
        listens = self._node.get_subscriptions_info_by_topic(self.cloud_topic)
        answers = self._node.get_publishers_info_by_topic(self.objects_topic)
        return all(any(info.node_name == name for info in infos) for infos in (listens, answers))

    def _on_clock(self, _: Any) -> None:
        if not self._hears_clouds:
            from rclpy.qos import QoSProfile, ReliabilityPolicy
            from sensor_msgs.msg import PointCloud2
            self._hears_clouds = True
            publishers = self._node.get_publishers_info_by_topic(self.cloud_topic)
            is_reliable = bool(publishers) and all(
                info.qos_profile.reliability == ReliabilityPolicy.RELIABLE for info in publishers)
            self._node.create_subscription(
                PointCloud2, self.cloud_topic, self._on_cloud, QoSProfile(
                    depth=5, reliability=ReliabilityPolicy.RELIABLE if is_reliable
                    else ReliabilityPolicy.BEST_EFFORT), raw=True)

    def _on_cloud(self, raw: bytes) -> None:
        self._heard_s[header_stamp_ns(raw)] = time.monotonic()

    def _on_objects(self, message: Any) -> None:
        stamp_ns = stamp_to_ns(message.header.stamp)
        heard_s = self._heard_s.pop(stamp_ns, None)
        latency_ms = None if heard_s is None else (time.monotonic() - heard_s) * 1e3
        self.answers.append(Answer(stamp_ns, message.header.frame_id, to_detections(message),
                                   latency_ms))


def to_detections(message: Any) -> Detections3D:
    """Return the objects of a ``DetectedObjects`` message as arrays."""
    count = len(message.objects)
    boxes = np.zeros((count, 7), np.float32)
    labels = np.zeros(count, np.uint8)
    for k, found in enumerate(message.objects):
        pose = found.kinematics.pose_with_covariance.pose
        size = found.shape.dimensions
        boxes[k] = (pose.position.x, pose.position.y, pose.position.z, size.x, size.y, size.z,
                    2 * math.atan2(pose.orientation.z, pose.orientation.w))
        labels[k] = found.classification[0].label if found.classification else 0
    return Detections3D(
        boxes, np.zeros((count, 2), np.float32),
        np.array([o.existence_probability for o in message.objects], np.float32), labels,
        np.array([o.kinematics.orientation_availability for o in message.objects], np.uint8),
        np.arange(count))
