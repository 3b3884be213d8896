# SPDX-License-Identifier: Apache-2.0
"""PointCloud2 messages to float32 points.

A cloud is decoded by what its message declares (names, offsets, datatypes, strides, byte order)
or refused with one line that says what was found and what was expected. No assumption is made
about where x, y and z lie in a point record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from tt_perception.runtime.errors import InputError
from tt_perception.runtime.jit import kernel

# sensor_msgs/msg/PointField: constant -> its name and the code of its NumPy type
# One point of Autoware's sensing pipeline, PointXYZIRC.
XYZIRC = np.dtype([('x', np.float32), ('y', np.float32), ('z', np.float32),
                   ('intensity', np.uint8), ('return_type', np.uint8), ('channel', np.uint16)])
_DATATYPES = {
    1: ('INT8', 'i1'), 2: ('UINT8', 'u1'), 3: ('INT16', 'i2'), 4: ('UINT16', 'u2'),
    5: ('INT32', 'i4'), 6: ('UINT32', 'u4'), 7: ('FLOAT32', 'f4'), 8: ('FLOAT64', 'f8'),
}
_DATATYPE_OF = {np.dtype(code): datatype for datatype, (_, code) in _DATATYPES.items()}
_UINT8, _FLOAT32 = 2, 7
_LAYOUTS_KEPT = 64
_FIELDS_SHOWN = 24


def point_fields(record: np.dtype) -> list[tuple[str, int, int, int]]:
    """Return name, offset, datatype and count of the ``PointField`` of each member of a record.

    Gaps between the members stay gaps; a sub-array is a field with a count.
    """
    fields = []
    for name in record.names:
        kind, offset = record.fields[name][:2]
        base, shape = kind.subdtype or (kind, ())
        fields.append((name, offset, _DATATYPE_OF[base.newbyteorder('=')], math.prod(shape)))
    return fields


@dataclass(frozen=True)
class Cloud:
    """The finite points of one message, in message order.

    :ivar points: float32 [n, 3] x, y, z (m), or [n, 4] with intensity; the first rows of
        ``buffer``.
    :ivar num_dropped: points left out because a used value is NaN or infinite.
    :ivar num_received: points in the message.
    :ivar buffer: the array that holds ``points``: ``out``, or a larger new one. Passing it as
        ``out`` the next time saves the allocation.
    """

    points: np.ndarray
    num_dropped: int
    num_received: int
    buffer: np.ndarray


@dataclass(frozen=True)
class CloudLayout:
    """Where the used fields lie in a point record; the same for all clouds of one source.

    :ivar columns: names of the fields, in the order of the decoded columns.
    :ivar formats: NumPy type of each field, with its byte order.
    :ivar offsets: int64 [columns], bytes from the start of a record.
    :ivar point_step: bytes of a record.
    :ivar is_common: x, y, z are little-endian FLOAT32, and intensity, if used, that or UINT8.
    :ivar has_byte_intensity: intensity is used and UINT8.
    """

    columns: tuple[str, ...]
    formats: tuple[np.dtype, ...]
    offsets: np.ndarray
    point_step: int
    is_common: bool
    has_byte_intensity: bool

    @classmethod
    def of(cls, message: Any, *, use_intensity: bool) -> CloudLayout:
        """Return the layout of a message; it is checked once and then kept.

        :raises InputError: reason ``layout``, see :func:`decode_cloud`.
        """
        fields = tuple((str(f.name), int(f.offset), int(f.datatype), int(f.count))
                       for f in message.fields)
        columns = ('x', 'y', 'z', 'intensity') if use_intensity else ('x', 'y', 'z')
        return _checked_layout(fields, int(message.point_step), bool(message.is_bigendian),
                               columns)


def _describe(fields: tuple[tuple, ...]) -> str:
    """Return the fields (name, offset, datatype, count) in words."""
    if not fields:
        return 'no fields'
    words = []
    for name, offset, datatype, count in fields[:_FIELDS_SHOWN]:
        kind = _DATATYPES[datatype][0] if datatype in _DATATYPES else f'datatype {datatype}'
        length = f'[{count}]' if count > 1 else ''
        words.append(f'{name!a} {kind}{length} at byte {offset}')
    return ', '.join(words) + (', ...' if len(fields) > _FIELDS_SHOWN else '')


def _num_bytes(datatype: int, count: int) -> int:
    """Return the bytes of a field; 0 for an unknown datatype, which no used field may have."""
    known = _DATATYPES.get(datatype)
    return np.dtype(known[1]).itemsize * max(count, 1) if known else 0


@lru_cache(maxsize=_LAYOUTS_KEPT)
def _checked_layout(fields: tuple[tuple, ...], point_step: int, is_bigendian: bool,
                    columns: tuple[str, ...]) -> CloudLayout:
    def refusal(problem: str) -> InputError:
        return InputError(
            f'point cloud: {problem}; found {_describe(fields)} in records of {point_step} bytes, '
            f'expected the fields {", ".join(columns)} with one number each', reason='layout')

    for name, offset, datatype, count in fields:
        end = offset + _num_bytes(datatype, count)
        if offset < 0 or end > point_step:
            raise refusal(f'field {name!a} ends at byte {end}, outside its record')
    used = []
    for column in columns:
        same_name = [field for field in fields if field[0] == column]
        if len(same_name) != 1:
            raise refusal(f'field {column!r} is {"there twice" if same_name else "missing"}')
        _, offset, datatype, count = same_name[0]
        if datatype not in _DATATYPES:
            raise refusal(f'field {column!r} has the unknown datatype {datatype}')
        if count > 1:  # 0 stands for 1 in the messages of some drivers
            raise refusal(f'field {column!r} has {count} numbers')
        used.append((offset, datatype, column))
    by_offset = sorted(used)
    for (offset, datatype, first), (start, _, second) in pairwise(by_offset):
        if start < offset + _num_bytes(datatype, 1):
            raise refusal(f'fields {first!r} and {second!r} share bytes')
    offsets = [offset for offset, _, _ in used]
    datatypes = [datatype for _, datatype, _ in used]
    order = '>' if is_bigendian else '<'
    formats = tuple(np.dtype(order + _DATATYPES[datatype][1]) for datatype in datatypes)
    has_byte_intensity = datatypes[3:] == [_UINT8]
    is_common = not is_bigendian and (
        datatypes[:3] == [_FLOAT32] * 3 and datatypes[3:] in ([], [_UINT8], [_FLOAT32]))
    return CloudLayout(columns, formats, np.array(offsets), point_step, is_common,
                       has_byte_intensity)


def decode_cloud(message: Any, *, use_intensity: bool, out: np.ndarray | None = None) -> Cloud:
    """Decode a PointCloud2 into float32 columns x, y, z and, if used, intensity.

    Fields may come in any order, with gaps, in records of any length, in rows with padding, in
    either byte order and as any datatype of ``PointField``; values are converted to float32 and
    not scaled. Fields that are not used may be anything that fits into the record. A ``row_step``
    of 0 means ``width * point_step``. Points with a NaN or infinite used value are dropped and
    counted.

    :param message: has the attributes of ``sensor_msgs/msg/PointCloud2``; ``data`` is bytes,
        ``array.array``, a memoryview or a NumPy array.
    :param use_intensity: decode the field ``intensity`` too.
    :param out: float32 [rows, 3], or [rows, 4] with intensity, C-contiguous: decode into this.
        When it has fewer rows than the message has points, a larger array takes its place, see
        :attr:`Cloud.buffer`.
    :raises InputError: reason ``layout``: a used field is missing, there twice, an array, of
        unknown datatype or overlaps another one, or any field leaves its record; reason ``size``:
        width, height, the steps and the length of ``data`` disagree; reason ``empty``: no points,
        or none that is finite; reason ``buffer``: ``out`` is of another kind.
    """
    layout = CloudLayout.of(message, use_intensity=use_intensity)
    data, width, height, row_step = _checked_data(message, layout.point_step)
    num_received = width * height
    buffer = _checked_buffer(out, num_received, len(layout.columns))
    if layout.is_common:
        kept = _gather_common(data, height, width, row_step, layout.point_step, layout.offsets,
                              layout.has_byte_intensity, buffer)
    else:
        kept = _gather(data, height, width, row_step, layout, buffer)
    if kept == 0:
        raise InputError(f'point cloud: all of {num_received} points are NaN or infinite',
                         reason='empty')
    return Cloud(buffer[:kept], num_received - kept, num_received, buffer)


def warm_up() -> None:
    """Compile what :func:`decode_cloud` needs, so that the first cloud is as fast as others."""
    fields = [SimpleNamespace(name=name, offset=4 * index, datatype=_FLOAT32, count=1)
              for index, name in enumerate(('x', 'y', 'z', 'intensity'))]
    for is_bigendian in (False, True):  # the two ways to decode
        decode_cloud(SimpleNamespace(fields=fields, width=1, height=1, point_step=16, row_step=16,
                                     is_bigendian=is_bigendian, data=bytes(16)),
                     use_intensity=True)


def _checked_data(message: Any, point_step: int) -> tuple[np.ndarray, int, int, int]:
    """Return the bytes as read-only uint8 [length], width, height and the true row step."""
    width, height, row_step = int(message.width), int(message.height), int(message.row_step)
    try:
        length = memoryview(message.data).nbytes
    except TypeError:
        raise InputError(f'point cloud: found data of type {type(message.data).__name__}, '
                         'expected bytes', reason='size') from None
    if width * height == 0 and length == 0:
        raise InputError(f'point cloud: is empty, found width {width}, height {height}',
                         reason='empty')
    packed = width * point_step
    stride = row_step or packed
    if min(width, height) <= 0 or stride < packed or height * stride != length:
        raise InputError(
            f'point cloud: found width {width}, height {height}, point_step {point_step}, '
            f'row_step {row_step} and {length} bytes of data; expected row_step of at least '
            f'{packed} and {height * max(stride, packed)} bytes', reason='size')
    try:
        data = np.frombuffer(message.data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InputError(f'point cloud: data cannot be read as bytes: {error}',
                         reason='size') from None
    # numba compiles anew for writable and for read-only arrays: always show it the same kind.
    data.flags.writeable = False
    return data, width, height, stride


def _checked_buffer(out: np.ndarray | None, rows: int, columns: int) -> np.ndarray:
    """Return ``out``, or a new array when there is none or it is too small."""
    if out is None:
        return np.empty((rows, columns), np.float32)
    if (out.dtype != np.float32 or out.ndim != 2 or out.shape[1] != columns
            or not out.flags.c_contiguous or not out.flags.writeable):
        raise InputError(f'out: found {out.dtype} {list(out.shape)}, expected float32 '
                         f'[rows, {columns}], C-contiguous and writable', reason='buffer')
    if len(out) < rows:  # with slack, so that slowly growing clouds do not allocate each time
        return np.empty((max(rows, len(out) * 3 // 2), columns), np.float32)
    return out


@kernel
def drop_non_finite(points):
    """Move the finite rows of float32 [n, columns] to the front; return how many they are."""
    num_others = 0
    for value in points.reshape(-1):  # without a branch it runs in vector registers
        num_others += value - value != 0
    if num_others == 0:
        return points.shape[0]
    kept = 0
    for row in range(points.shape[0]):
        finite = True
        for column in range(points.shape[1]):
            value = points[row, column]
            points[kept, column] = value
            finite &= value - value == 0
        kept += finite
    return kept


def _gather(data: np.ndarray, height: int, width: int, row_step: int, layout: CloudLayout,
            out: np.ndarray) -> int:
    """Convert the points of any layout; return how many finite ones are in ``out``."""
    rows = out[:height * width]
    columns = rows.reshape(height, width, len(layout.columns))
    strides = (row_step, layout.point_step)
    with np.errstate(over='ignore', invalid='ignore'):  # beyond float32 is infinite: dropped
        for index, (dtype, offset) in enumerate(zip(layout.formats, layout.offsets, strict=True)):
            columns[..., index] = np.ndarray((height, width), dtype, data, offset, strides)
    return drop_non_finite(rows)


@kernel
def _float32_at(data, at):
    # Four byte loads become one unaligned load in the machine code.
    return np.uint32(np.uint32(data[at])
                     | (np.uint32(data[at + np.uintp(1)]) << np.uint32(8))
                     | (np.uint32(data[at + np.uintp(2)]) << np.uint32(16))
                     | (np.uint32(data[at + np.uintp(3)]) << np.uint32(24))).view(np.float32)


@kernel
def _gather_common(data, height, width, row_step, point_step, offsets, has_byte_intensity, out):
    """Do the same in one pass for a common layout, see :attr:`CloudLayout.is_common`.

    Indices are unsigned, for numba looks for negative ones otherwise.
    """
    step = np.uintp(point_step)
    at_x, at_y, at_z = np.uintp(offsets[0]), np.uintp(offsets[1]), np.uintp(offsets[2])
    has_intensity = out.shape[1] > 3
    at_intensity = np.uintp(offsets[out.shape[1] - 1])
    kept = np.uintp(0)
    for row in range(height):
        record = np.uintp(row * row_step)
        for _ in range(width):
            x = _float32_at(data, record + at_x)
            y = _float32_at(data, record + at_y)
            z = _float32_at(data, record + at_z)
            out[kept, 0] = x
            out[kept, 1] = y
            out[kept, 2] = z
            finite = (x - x == 0) & (y - y == 0) & (z - z == 0)
            if has_intensity:
                if has_byte_intensity:
                    intensity = np.float32(data[record + at_intensity])
                else:
                    intensity = _float32_at(data, record + at_intensity)
                out[kept, 3] = intensity
                finite &= intensity - intensity == 0
            kept += np.uintp(finite)
            record += step
    return np.int64(kept)
