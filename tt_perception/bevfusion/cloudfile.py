# SPDX-License-Identifier: Apache-2.0
"""Point cloud files, arrays and tensors to float32 points.

Columns of every source are known by name. ``x``, ``y``, ``z`` (m), ``intensity`` and ``time_lag``
(s, how long before the current sweep a point was measured) are read; others are ignored. A source
that has a ``time_lag`` column is already densified.

========================  =======================================================================
source                    names of its columns
========================  =======================================================================
``.pcd``                  those of its header
structured array          those of its fields
mapping                   its keys, each with one value a point
array [n, 3]              x, y, z
array [n, 4]              x, y, z, intensity
``.bin``                  x, y, z, intensity; with ring behind them if it is named ``*.pcd.bin``
``.npy``                  as the array in it
``.npz``                  as a mapping if it holds x, y and z, else as its array ``points``, else
                          as its only array
========================  =======================================================================

``columns`` names those of arrays, ``.bin``, ``.npy`` and ``.npz`` that differ from the table. More
than 4 columns of an array are not guessed at: the fifth is a ring number in some data sets and a
time in others.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tt_perception.bevfusion.cloud import drop_non_finite
from tt_perception.runtime.errors import InputError
from tt_perception.runtime.jit import kernel

SUFFIXES = ('.pcd', '.bin', '.npy', '.npz')
MAX_FILE_BYTES = 1 << 30  # of a file, and of what it unpacks to
MAX_POINTS = 100_000_000  # of any source
_USED = ('x', 'y', 'z', 'intensity', 'time_lag')
_PLAIN_COLUMNS = {3: _USED[:3], 4: _USED[:4]}
_HINT = "name them, for example columns=('x', 'y', 'z', 'intensity', 'ring')"

_MAX_PCD_HEADER = 1 << 16
_PCD_KEYS = {'VERSION', 'FIELDS', 'SIZE', 'TYPE', 'COUNT', 'WIDTH', 'HEIGHT', 'VIEWPOINT',
             'POINTS', 'DATA'}
_PCD_NEEDED = ('FIELDS', 'SIZE', 'TYPE', 'WIDTH', 'HEIGHT')  # DATA ends the header
_PCD_TYPES = {'F4', 'F8', 'I1', 'I2', 'I4', 'I8', 'U1', 'U2', 'U4', 'U8'}
_MAX_LZF_RATIO = 88  # the longest copy: 264 bytes out of 3


class _Refusal(Exception):
    """What is wrong with a source; becomes an InputError that names the source."""


@dataclass(frozen=True)
class PointArray:
    """The finite points of one source, in its order.

    :ivar points: float32 [n, 3] x, y, z (m), or [n, 4] with intensity; C-contiguous, a copy.
    :ivar time_lag: float32 [n] (s) when the source is already densified, else None.
    :ivar num_dropped: points left out because a used value is NaN or infinite.
    :ivar num_received: points in the source.
    """

    points: np.ndarray
    time_lag: np.ndarray | None
    num_dropped: int
    num_received: int


def read_cloud(path: str | os.PathLike, *,
               columns: Sequence[str] | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Read every point of a file, NaN and infinite ones included.

    Points stay in the frame of the file: a ``VIEWPOINT`` is not applied.

    :param columns: names of the columns where the file does not say, see the module's table.
    :return: float32 [n, columns] and the names of its columns: x, y, z, then intensity and
        time_lag where the file has them.
    :raises InputError: reason ``file``: missing, of another kind, damaged, truncated, or its
        columns cannot be told.
    """
    path = _path(path)
    found = _read(path, columns)
    names = tuple(name for name in _USED if name in found)
    try:
        return _stack(found, names), names
    except _Refusal as refusal:
        raise InputError(f'{path}: {refusal}', reason='file') from None


def as_points(source: Any, *, use_intensity: bool,
              columns: Sequence[str] | None = None) -> PointArray:
    """Return the points of a file, array, tensor or mapping; non-finite ones are dropped.

    What a masked array masks counts as NaN.

    :param source: a path; an array, sequence or tensor [n, columns]; a structured array; or a
        mapping of names to arrays [n]. Numbers of any real type, converted to float32.
    :param use_intensity: the source must have intensity, which is not scaled; otherwise it is
        ignored.
    :param columns: names of the columns where the source does not say, see the module's table.
    :raises InputError: reason ``file`` as :func:`read_cloud`; ``layout`` for another source with
        wrong columns; ``empty``: no points, or none that is finite.
    """
    is_file = isinstance(source, (str, os.PathLike))
    label = _path(source) if is_file else 'points'
    try:
        found = _read(label, columns) if is_file else _columns_of(source, columns)
        names = _USED[:4] if use_intensity else _USED[:3]
        if use_intensity and 'intensity' not in found:
            raise _Refusal(f'found the columns {", ".join(found)}, expected intensity too')
        if 'time_lag' in found:
            names += ('time_lag',)
        values = _stack(found, names)
    except _Refusal as refusal:
        raise InputError(f'{label}: {refusal}', reason='file' if is_file else 'layout') from None
    kept = drop_non_finite(values)
    if kept == 0:
        raise InputError(f'{label}: found {len(values)} points, none of them finite',
                         reason='empty')
    points, time_lag = values[:kept], None
    if 'time_lag' in found:
        points, time_lag = points[:, :-1].copy(), points[:, -1].copy()
    return PointArray(points, time_lag, len(values) - kept, len(values))


def _path(source: Any) -> Path:
    try:
        return Path(source)
    except Exception as error:  # __fspath__ may raise anything
        raise InputError(f'points: found a {type(source).__name__} that is no path: '
                         f'{_line(error)}', reason='file') from None


def _line(error: Exception) -> str:
    return ' '.join(str(error).split()) or type(error).__name__


def _stack(found: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    _check_count(len(found['x']))
    values = np.empty((len(found['x']), len(names)), np.float32)
    with np.errstate(over='ignore', invalid='ignore'):  # beyond float32 is infinite
        for index, name in enumerate(names):
            column = found[name]
            if isinstance(column, np.ma.MaskedArray):
                column = column.astype(np.float32).filled(np.nan)
            values[:, index] = column
    return values


def _check_count(count: int) -> None:
    """Refuse too many points, to be called before anything copies them."""
    if count > MAX_POINTS:
        raise _Refusal(f'found {count} points, expected at most {MAX_POINTS}')


def _places(names: Sequence[str]) -> dict[str, int]:
    """Return where the used columns are among ``names``."""
    for name in _USED:
        count = list(names).count(name)
        if count > 1 or (count == 0 and name in 'xyz'):
            raise _Refusal(f'found the columns {", ".join(map(ascii, names))}, '
                           f'expected {name!r} {"once" if count else "among them"}')
    return {name: list(names).index(name) for name in _USED if name in names}


def _columns_of(source: Any, columns: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Return the used columns of anything that is not a file."""
    if not isinstance(source, Mapping):
        return _columns_of_array(_to_array(source), columns)
    _no_names(columns, 'a mapping')
    names = list(source)
    found = {name: _real(_to_array(source[name]), name) for name in _places(names)}
    shapes = {name: list(values.shape) for name, values in found.items()}
    if any(len(shape) != 1 or shape != shapes['x'] for shape in shapes.values()):
        raise _Refusal(f'found columns of the shapes {shapes}, expected equal lengths [n]')
    return found


def _to_array(source: Any) -> np.ndarray:
    try:
        if all(hasattr(source, name) for name in ('detach', 'cpu', 'numpy')):
            if source.ndim:
                _check_count(len(source))
            tensor = source.detach().cpu()
            try:
                return tensor.numpy()
            except TypeError:  # bfloat16, which NumPy lacks
                return tensor.float().numpy()
        return source if isinstance(source, np.ma.MaskedArray) else np.asarray(source)
    except _Refusal:
        raise
    except Exception as error:  # __array__ may raise anything
        raise _Refusal(f'found a {type(source).__name__} that is no array: {_line(error)}'
                       ) from None


def _real(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype.kind not in 'fiu':
        raise _Refusal(f'found values of type {array.dtype} in {name}, expected real numbers')
    return array


def _columns_of_array(array: np.ndarray, columns: Sequence[str] | None) -> dict[str, np.ndarray]:
    if array.dtype.names is not None:
        _no_names(columns, 'an array with named fields')
        _check_count(array.size)
        flat = array.reshape(-1)
        found = {name: _real(flat[name], name) for name in _places(array.dtype.names)}
        for name, values in found.items():
            if values.ndim != 1:
                raise _Refusal(f'found {values.shape[1:]} numbers in the field {name!r}, '
                               'expected one')
        return found
    _real(array, 'the array')
    if array.ndim != 2:
        raise _Refusal(f'found an array of shape {list(array.shape)}, expected [n, columns]')
    if columns is None:
        columns = _PLAIN_COLUMNS.get(array.shape[1])
        if columns is None:
            raise _Refusal(f'found {array.shape[1]} columns without names, expected 3 or 4; '
                           + _HINT)
    columns = _checked_names(columns)
    if len(columns) != array.shape[1]:
        raise _Refusal(f'found {array.shape[1]} columns and {len(columns)} names for them')
    return {name: array[:, index] for name, index in _places(columns).items()}


def _checked_names(columns: Sequence[str]) -> tuple[str, ...]:
    try:
        names = () if isinstance(columns, str) else tuple(columns)
    except TypeError:
        names = ()
    if not names or not all(isinstance(name, str) for name in names):
        raise _Refusal(f'found columns={columns!r}, expected a sequence of names')
    return names


def _no_names(columns: Sequence[str] | None, source: str) -> None:
    if columns is not None:
        raise _Refusal(f'found columns={columns!r} for {source}, which names its own')


def _read(path: Path, columns: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Return the used columns of a file.

    :raises InputError: reason ``file``.
    """
    try:
        kind = path.suffix.lower()
        if kind not in SUFFIXES:
            raise _Refusal(f'found the suffix {kind!r}, expected one of {", ".join(SUFFIXES)}')
        if not path.is_file():
            raise _Refusal('is a folder or a device, expected a file' if path.exists()
                           else 'no such file')
        size = path.stat().st_size
        if not 0 < size <= MAX_FILE_BYTES:
            raise _Refusal(f'found {size} bytes, expected 1 to {MAX_FILE_BYTES}')
        raw = path.read_bytes()
        if kind == '.pcd':
            _no_names(columns, 'a .pcd file')
            return _columns_of_pcd(raw)
        if kind == '.bin':
            return _columns_of_bin(raw, path.name.lower().endswith('.pcd.bin'), columns)
        if kind == '.npy':
            return _columns_of_array(_array_of_npy(raw), columns)
        return _columns_of_npz(raw, columns)
    except _Refusal as refusal:
        raise InputError(f'{path}: {refusal}', reason='file') from None
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise InputError(f'{path}: cannot be read: {error}', reason='file') from None


def _columns_of_bin(raw: bytes, is_nuscenes: bool,
                    columns: Sequence[str] | None) -> dict[str, np.ndarray]:
    names = columns
    if names is None:
        names = (*_USED[:4], 'ring') if is_nuscenes else _USED[:4]
    names = _checked_names(names)
    if len(raw) % (4 * len(names)):
        raise _Refusal(f'found {len(raw)} bytes, which are no rows of {len(names)} float32 '
                       f'columns; {_HINT}')
    found = _columns_of_array(np.frombuffer(raw, '<f4').reshape(-1, len(names)), names)
    if columns is None and (found['intensity'] < 0).any():
        # Rows of another length put coordinates here; about half of those are negative.
        raise _Refusal(f'found negative intensities, so its rows are not {", ".join(names)}; '
                       + _HINT)
    return found


def _array_of_npy(raw: bytes) -> np.ndarray:
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise _Refusal(f'found .npy version {version}, expected 1.0 or 2.0')
        read_header = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                       else np.lib.format.read_array_header_2_0)
        shape, is_fortran, dtype = read_header(stream)
    except _Refusal:
        raise
    except Exception as error:  # NumPy evaluates the text of the header, so it may be any
        raise _Refusal(f'is no .npy file: {_line(error)}') from None
    count, offset = math.prod(shape), stream.tell()
    is_shape = all(type(side) is int and side >= 0 for side in shape)  # True is an int too
    if dtype.hasobject or dtype.itemsize == 0 or not is_shape:
        raise _Refusal(f'found an array of {dtype}, shape {list(shape)}, expected numbers')
    if count * dtype.itemsize != len(raw) - offset:
        raise _Refusal(f'found {len(raw) - offset} bytes of data, expected '
                       f'{count * dtype.itemsize} for shape {list(shape)}')
    flat = np.frombuffer(raw, dtype, count, offset) if count else np.empty(0, dtype)
    return flat.reshape(shape, order='F' if is_fortran else 'C')


def _columns_of_npz(raw: bytes, columns: Sequence[str] | None) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = {info.filename.removesuffix('.npy'): info for info in archive.infolist()}
            if set(members) >= {'x', 'y', 'z'}:
                wanted = [name for name in members if name in _USED]
            elif 'points' in members or len(members) == 1:
                wanted = ['points' if 'points' in members else next(iter(members))]
            else:
                raise _Refusal(f'found the arrays {", ".join(map(ascii, members)) or "none"}, '
                               "expected 'points', or 'x', 'y' and 'z'")
            unpacked = sum(members[name].file_size for name in wanted)
            if unpacked > MAX_FILE_BYTES:
                raise _Refusal(f'unpacks to {unpacked} bytes, expected at most {MAX_FILE_BYTES}')
            arrays = {name: archive.read(members[name]) for name in wanted}
    except _Refusal:
        raise
    except Exception as error:  # a damaged archive: zip, zlib, struct and more have their own
        raise _Refusal(f'is no .npz file: {_line(error)}') from None
    decoded = {name: _array_of_npy(data) for name, data in arrays.items()}
    if len(decoded) == 1:
        return _columns_of_array(next(iter(decoded.values())), columns)
    return _columns_of(decoded, columns)


@dataclass(frozen=True)
class _PcdHeader:
    """What the header of a PCD file says.

    :ivar dtypes: NumPy type of one number of each field.
    :ivar counts: numbers of each field.
    :ivar data: ``ascii``, ``binary`` or ``binary_compressed``.
    :ivar end: byte where the points begin.
    """

    fields: tuple[str, ...]
    dtypes: tuple[np.dtype, ...]
    counts: tuple[int, ...]
    num_points: int
    data: str
    end: int

    @property
    def record_bytes(self) -> int:
        return sum(self.field_bytes)

    @property
    def field_bytes(self) -> list[int]:
        return [d.itemsize * c for d, c in zip(self.dtypes, self.counts, strict=True)]


def _columns_of_pcd(raw: bytes) -> dict[str, np.ndarray]:
    header = _pcd_header(raw)
    places = _places(header.fields)
    for name, index in places.items():
        if header.counts[index] != 1:
            raise _Refusal(f'found COUNT {header.counts[index]} for {name!r}, expected 1')
    _check_count(header.num_points)
    body = memoryview(raw)[header.end:]
    if header.data == 'ascii':
        return _pcd_ascii(body, header, places)
    if header.data == 'binary_compressed':
        return _pcd_compressed(body, header, places)
    expected = header.num_points * header.record_bytes
    if len(body) != expected:
        raise _Refusal(f'found {len(body)} bytes of points, expected {expected} for '
                       f'{header.num_points} points of {header.record_bytes} bytes')
    if header.num_points == 0:
        return _no_points(header, places)
    return {name: np.ndarray(header.num_points, header.dtypes[index], body,
                             sum(header.field_bytes[:index]), header.record_bytes)
            for name, index in places.items()}


def _no_points(header: _PcdHeader, places: Mapping[str, int]) -> dict[str, np.ndarray]:
    return {name: np.empty(0, header.dtypes[index]) for name, index in places.items()}


def _pcd_header(raw: bytes) -> _PcdHeader:
    lines, end = _pcd_header_lines(raw)
    for key in _PCD_NEEDED:
        if key not in lines:
            raise _Refusal(f'found a PCD header without {key}')
    fields = tuple(lines['FIELDS'])
    sizes, types = lines['SIZE'], lines['TYPE']
    counts = lines.get('COUNT', ['1'] * len(fields))
    if not fields or {len(sizes), len(types), len(counts)} != {len(fields)}:
        raise _Refusal(f'found {len(fields)} FIELDS, {len(sizes)} SIZE, {len(types)} TYPE and '
                       f'{len(counts)} COUNT in the PCD header, expected equal numbers')
    kinds = [kind + size for kind, size in zip(types, sizes, strict=True)]
    for field, kind in zip(fields, kinds, strict=True):
        if kind not in _PCD_TYPES:
            raise _Refusal(f'found TYPE and SIZE {kind!a} of field {field!a} in the PCD header, '
                           f'expected one of {", ".join(sorted(_PCD_TYPES))}')
    width, height = _pcd_number(lines, 'WIDTH'), _pcd_number(lines, 'HEIGHT')
    if 'POINTS' in lines and _pcd_number(lines, 'POINTS') != width * height:
        raise _Refusal(f'found POINTS {lines["POINTS"][0]} in the PCD header, '
                       f'expected WIDTH {width} times HEIGHT {height}')
    data, = lines['DATA'] if len(lines['DATA']) == 1 else ['']
    if data not in ('ascii', 'binary', 'binary_compressed'):
        raise _Refusal(f'found DATA {" ".join(lines["DATA"])!a}, '
                       'expected ascii, binary or binary_compressed')
    return _PcdHeader(fields, tuple(np.dtype('<' + kind.lower()) for kind in kinds),
                      tuple(_natural(count, 'COUNT') for count in counts), width * height, data,
                      end)


def _pcd_header_lines(raw: bytes) -> tuple[dict[str, list[str]], int]:
    """Return the words of each header line by its key, and where the header ends."""
    lines: dict[str, list[str]] = {}
    begin = 0
    while 'DATA' not in lines:
        end = raw.find(b'\n', begin, _MAX_PCD_HEADER)
        if end < 0:
            raise _Refusal('is no PCD file: found no DATA line')
        line = raw[begin:end].decode('ascii', 'replace').split('#')[0]
        key, *words = line.split() or ['']
        begin = end + 1
        if not key:
            continue
        if key not in _PCD_KEYS or key in lines:
            raise _Refusal(f'is no PCD file: found {key[:40]!a} '
                           f'{"twice " if key in lines else ""}in the header')
        lines[key] = words
    return lines, begin


def _pcd_number(lines: Mapping[str, list[str]], key: str) -> int:
    return _natural(' '.join(lines[key]), key)


def _natural(word: str, key: str) -> int:
    if not (word.isascii() and word.isdigit() and len(word) <= 10):
        raise _Refusal(f'found {key} {word[:40]!a} in the PCD header, expected a whole number')
    return int(word)


def _pcd_ascii(body: memoryview, header: _PcdHeader,
               places: Mapping[str, int]) -> dict[str, np.ndarray]:
    numbers = sum(header.counts)
    at_least = header.num_points * 2 * numbers - 1  # a digit each, and a space between them
    if len(body) < at_least:
        raise _Refusal(f'found {len(body)} bytes of points, expected at least {at_least} for '
                       f'{header.num_points} rows of {numbers} numbers')
    try:
        text = str(body, 'ascii')
        rows = (np.loadtxt(io.StringIO(text), np.float64, comments=None, ndmin=2)
                if text.strip() else np.empty((0, numbers)))
    except ValueError as error:
        raise _Refusal(f'found points that are no numbers: {_line(error)}') from None
    if rows.shape != (header.num_points, numbers):
        raise _Refusal(f'found {rows.shape[0]} rows of {rows.shape[1]} numbers, '
                       f'expected {header.num_points} of {numbers}')
    return {name: rows[:, sum(header.counts[:index])] for name, index in places.items()}


def _pcd_compressed(body: memoryview, header: _PcdHeader,
                    places: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Unpack the points, which are stored field by field."""
    expected = header.num_points * header.record_bytes
    packed, unpacked = np.frombuffer(body[:8], '<u4').tolist() if len(body) >= 8 else (0, 0)
    if len(body) != 8 + packed:
        raise _Refusal(f'found {len(body)} bytes of compressed points, expected {8 + packed}')
    if unpacked != expected or unpacked > MAX_FILE_BYTES or unpacked > packed * _MAX_LZF_RATIO:
        raise _Refusal(f'found {packed} compressed bytes said to hold {unpacked}, expected '
                       f'{expected} for {header.num_points} points of {header.record_bytes} bytes')
    data = np.empty(unpacked, np.uint8)
    if _expand_lzf(np.frombuffer(body, np.uint8)[8:], data) != unpacked:
        raise _Refusal('found damaged compressed points')
    if header.num_points == 0:
        return _no_points(header, places)
    return {name: np.ndarray(header.num_points, header.dtypes[index], data,
                             header.num_points * sum(header.field_bytes[:index]))
            for name, index in places.items()}


@kernel
def _expand_lzf(packed, out):
    """Expand LZF data; return the number of bytes written, or -1 when the data is damaged.

    A control byte below 32 starts a run of that many plus one bytes as they are. Any other one
    is a copy of earlier output: 3 bits of length, 13 bits of distance.
    """
    at, end = 0, 0
    while at < packed.size:
        control = np.int64(packed[at])
        at += 1
        if control < 32:
            length = control + 1
            if at + length > packed.size or end + length > out.size:
                return -1
            for i in range(length):
                out[end + i] = packed[at + i]
            at += length
        else:
            length = (control >> 5) + 2
            if length == 9:
                if at >= packed.size:
                    return -1
                length += np.int64(packed[at])
                at += 1
            if at >= packed.size:
                return -1
            source = end - ((control & 31) << 8) - np.int64(packed[at]) - 1
            at += 1
            if source < 0 or end + length > out.size:
                return -1
            for i in range(length):  # byte by byte: the copy may overlap what it writes
                out[end + i] = out[source + i]
        end += length
    return end
