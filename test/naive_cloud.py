# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 messages by hand, and a decoder that reads one number at a time."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CODES = {1: 'b', 2: 'B', 3: 'h', 4: 'H', 5: 'i', 6: 'I', 7: 'f', 8: 'd'}
INT8, UINT8, INT16, UINT16, INT32, UINT32, FLOAT32, FLOAT64 = CODES


@dataclass
class Field:
    """A sensor_msgs/msg/PointField."""

    name: str
    offset: int
    datatype: int
    count: int = 1


@dataclass
class Message:
    """A sensor_msgs/msg/PointCloud2, default-constructed unless told otherwise."""

    fields: list[Field] = field(default_factory=list)
    width: int = 0
    height: int = 0
    point_step: int = 0
    row_step: int = 0
    is_bigendian: bool = False
    data: Any = b''


def size_of(datatype: int) -> int:
    """Return the bytes of one number."""
    return struct.calcsize('<' + CODES[datatype])


def packed_fields(*names_and_types: tuple[str, int]) -> list[Field]:
    """Return fields one behind the other without gaps."""
    fields, offset = [], 0
    for name, datatype in names_and_types:
        fields.append(Field(name, offset, datatype))
        offset += size_of(datatype)
    return fields


def cloud_message(fields: list[Field], points: Sequence[Sequence[float]], *, point_step: int = 0,
                  is_bigendian: bool = False) -> Message:
    """Write one row of points, a value for each field."""
    point_step = point_step or max(f.offset + size_of(f.datatype) for f in fields)
    data = bytearray(b'\xa5' * point_step * len(points))
    order = '>' if is_bigendian else '<'
    for i, point in enumerate(points):
        for f, value in zip(fields, point, strict=True):
            value = float(value) if f.datatype >= FLOAT32 else int(value)
            struct.pack_into(order + CODES[f.datatype], data, i * point_step + f.offset, value)
    return Message(fields, len(points), 1, point_step, len(data), is_bigendian, bytes(data))


def xyz_message(points: Sequence[Sequence[float]]) -> Message:
    """Write x, y, z as 12-byte records."""
    return cloud_message(packed_fields(('x', FLOAT32), ('y', FLOAT32), ('z', FLOAT32)), points)


def naive_decode(message: Message, columns: Sequence[str]) -> tuple[np.ndarray, int]:
    """Return the finite points, float32 [n, columns], and how many others there are."""
    data, order = bytes(message.data), '>' if message.is_bigendian else '<'
    row_step = message.row_step or message.width * message.point_step
    by_name = {f.name: f for f in message.fields}
    points, dropped = [], 0
    with np.errstate(over='ignore'):
        for row in range(message.height):
            for column in range(message.width):
                at = row * row_step + column * message.point_step
                point = [np.float32(struct.unpack_from(order + CODES[by_name[name].datatype], data,
                                                       at + by_name[name].offset)[0])
                         for name in columns]
                if all(np.isfinite(point)):
                    points.append(point)
                else:
                    dropped += 1
    return np.array(points, np.float32).reshape(-1, len(columns)), dropped
