# SPDX-License-Identifier: Apache-2.0
"""Bags for tests, written by rosbags alone: no ROS is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rosbags.interfaces import (
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

STORE = get_typestore(Stores.ROS2_JAZZY)
CLOUD, TF, STRING = 'sensor_msgs/msg/PointCloud2', 'tf2_msgs/msg/TFMessage', 'std_msgs/msg/String'
STORAGES = ('sqlite3', 'mcap')
T0 = 1_700_000_000_000_000_000

_DATATYPES = {'i1': 1, 'u1': 2, 'i2': 3, 'u2': 4, 'i4': 5, 'u4': 6, 'f4': 7, 'f8': 8}


def make(type_name: str, *args: Any, **fields: Any) -> Any:
    """Return a message of rosbags' own classes."""
    return STORE.types[type_name](*args, **fields)


def serialize(type_name: str, message: Any) -> bytes:
    """Return the CDR bytes of a message."""
    return bytes(STORE.serialize_cdr(message, type_name))


def header(stamp_ns: int, frame_id: str) -> Any:
    """Return a header."""
    return make('std_msgs/msg/Header', frame_id=frame_id,
                stamp=make('builtin_interfaces/msg/Time', *divmod(stamp_ns, 10**9)))


def text(data: str) -> bytes:
    """Return a serialized string message."""
    return serialize(STRING, make(STRING, data=data))


def cloud(stamp_ns: int, records: np.ndarray, frame_id: str = 'base_link') -> bytes:
    """Return a serialized cloud of structured records [n] or [height, width]."""
    records = np.ascontiguousarray(np.atleast_2d(records))
    height, width = records.shape
    fields = [make('sensor_msgs/msg/PointField', name=name, offset=offset,
                   datatype=_DATATYPES[kind.base.str[1:]], count=math.prod(kind.shape))
              for name, (kind, offset, *_) in records.dtype.fields.items()]
    return serialize(CLOUD, make(
        CLOUD, header=header(stamp_ns, frame_id), height=height, width=width, fields=fields,
        is_bigendian=any(kind.base.byteorder == '>'
                         for kind, *_ in records.dtype.fields.values()),
        point_step=records.itemsize, row_step=width * records.itemsize,
        data=records.view(np.uint8).reshape(-1), is_dense=True))


def transforms(*edges: tuple[int, str, str, Iterable[float], Iterable[float]]) -> bytes:
    """Return a serialized TFMessage of (stamp_ns, parent, child, xyz, quaternion xyzw)."""
    return serialize(TF, make(TF, transforms=[
        make('geometry_msgs/msg/TransformStamped', header=header(stamp_ns, parent),
             child_frame_id=child, transform=make(
                 'geometry_msgs/msg/Transform',
                 translation=make('geometry_msgs/msg/Vector3', *map(float, xyz)),
                 rotation=make('geometry_msgs/msg/Quaternion', *map(float, xyzw))))
        for stamp_ns, parent, child, xyz, xyzw in edges]))


def qos(*, depth: int = 10, best_effort: bool = False, latched: bool = False) -> Qos:
    """Return a QoS as a recorder would store it."""
    return Qos(QosHistory.KEEP_LAST, depth,
               QosReliability.BEST_EFFORT if best_effort else QosReliability.RELIABLE,
               QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE,
               QosTime(0, 0), QosTime(0, 0), QosLiveliness.AUTOMATIC, QosTime(0, 0), False)


def write_bag(path: Path, messages: Iterable[tuple[str, str, int, bytes]],
              storage: str = 'sqlite3', offered_qos: dict[str, list[Qos]] | None = None,
              definitions: dict[str, tuple[str, str]] | None = None) -> Path:
    """Write serialized messages (topic, type, time of recording in ns, bytes); return the path.

    :param offered_qos: topic -> recorded QoS.
    :param definitions: type -> definition and hash, for types that rosbags does not know.
    """
    with Writer(path, version=9, storage_plugin=StoragePlugin[storage.upper()]) as writer:
        connections: dict[tuple[str, str], Any] = {}
        for topic, type_name, time_ns, raw in messages:
            if (topic, type_name) not in connections:
                msgdef, rihs01 = (definitions or {}).get(type_name, (None, None))
                connections[topic, type_name] = writer.add_connection(
                    topic, type_name, typestore=STORE, msgdef=msgdef, rihs01=rihs01,
                    offered_qos_profiles=(offered_qos or {}).get(topic, []))
            writer.write(connections[topic, type_name], time_ns, raw)
    return path
