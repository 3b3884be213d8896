# SPDX-License-Identifier: Apache-2.0
"""Writes ROS messages as a rosbag2."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tt_perception.ros.conversions import ns_to_stamp


def write_messages(path: Path, messages: Iterable[tuple[str, int, Any]]) -> Path:
    """Write (topic, time of recording in ns, rclpy message) as sqlite3; return the path."""
    from rclpy.serialization import serialize_message
    from rosbags.rosbag2 import Writer
    from rosbags.typesys import Stores, get_typestore
    store = get_typestore(Stores.ROS2_JAZZY)
    with Writer(path, version=9) as writer:
        connections = {}
        for topic, time_ns, message in messages:
            package = type(message).__module__.split('.')[0]
            if topic not in connections:
                connections[topic] = writer.add_connection(
                    topic, f'{package}/msg/{type(message).__name__}', typestore=store)
            writer.write(connections[topic], time_ns, serialize_message(message))
    return path


def transform_message(parent: str, child: str, stamp_ns: int, translation_m: Iterable[float],
                      quaternion_xyzw: Iterable[float]) -> Any:
    """Return a ``TFMessage`` of one transform."""
    from geometry_msgs.msg import TransformStamped
    from tf2_msgs.msg import TFMessage
    stamped = TransformStamped(child_frame_id=child)
    stamped.header.frame_id = parent
    stamped.header.stamp = ns_to_stamp(stamp_ns)
    t, q = stamped.transform.translation, stamped.transform.rotation
    t.x, t.y, t.z = map(float, translation_m)
    q.x, q.y, q.z, q.w = map(float, quaternion_xyzw)
    return TFMessage(transforms=[stamped])
