# SPDX-License-Identifier: Apache-2.0
"""Densification: past sweeps, moved into the frame of the current one, fill up its cloud.

Poses are combined in float64 and the result is cast to float32 once, for the points; the current
sweep is copied as it is. Upstream keeps poses in float32, which in map coordinates of 10 to 100 km
moves every point by millimetres, those of the current sweep too. ``strict_float32`` repeats that
arithmetic for comparisons.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from tt_perception.bevfusion.config import DensificationConfig, GridConfig
from tt_perception.runtime.errors import InputError
from tt_perception.runtime.jit import kernel
from tt_perception.runtime.pool import shared

_ROTATION_TOLERANCE = 1e-3  # of each entry of R^T R
_BOTTOM_ROW_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Sweep:
    """A past sweep.

    :ivar points: float32 [n, 3] x, y, z (m) in its own frame, or [n, 4] with intensity.
    :ivar time_lag_s: how long before the current sweep it was measured.
    :ivar T_current_from_sweep: rigid transform 4x4, float64.
    """

    points: np.ndarray
    time_lag_s: float
    T_current_from_sweep: np.ndarray


@dataclass(frozen=True)
class DensifiedCloud:
    """The fused cloud.

    :ivar points: float32 [m, 4] x, y, z (m), time lag (s), or [m, 5] with intensity before the
        time lag; current sweep first. A view of the Densifier's buffer, valid until its next call.
    :ivar num_points_per_sweep: of the sweeps in it, the current one first.
    :ivar num_skipped_sweeps: past sweeps that did not fit into ``cloud_capacity``.
    """

    points: np.ndarray
    num_points_per_sweep: tuple[int, ...]
    num_skipped_sweeps: int


class Densifier:
    """Fuses sweeps into one buffer, which grows up to ``cloud_capacity`` points and stays.

    Not for several threads at once.
    """

    def __init__(self, config: DensificationConfig, grid: GridConfig) -> None:
        self._capacity = config.cloud_capacity
        self._strict = config.strict_float32
        self._num_columns = grid.num_features - 1
        self._buffer = np.empty((0, grid.num_features), np.float32)

    def __call__(self, current: np.ndarray, past: Sequence[Sweep], *,
                 time_lag: np.ndarray | None = None,
                 T_world_from_current: Any = None) -> DensifiedCloud:
        """Fuse the current sweep with past ones, newest first.

        A past sweep is added as long as all points together are at most ``cloud_capacity``; the
        first that does not fit ends the fusion, as upstream.

        :param current: float32 [n, 3] x, y, z (m), or [n, 4] with intensity, as configured.
        :param time_lag: float32 [n] (s) of a cloud that is already densified; it has no past
            sweeps.
        :param T_world_from_current: pose of the current sweep, 4x4. Only ``strict_float32`` uses
            it: the current sweep then goes through its world-to-sensor matrix times the inverse
            of that. Without it the current sweep is copied.
        :raises InputError: reason ``empty``: no current points; ``capacity``: the current points
            alone are too many; ``transform``: not a finite rigid 4x4 matrix; ``layout``: points
            or lags of another type or shape; ``stamp``: a lag that is no finite number;
            ``sweeps``: past sweeps besides ``time_lag``.
        """
        parts = [(_checked_points(current, 'points', self._num_columns),
                  self._current_matrix(T_world_from_current), 0.0)]
        if len(current) == 0:
            raise InputError('points: found none, expected at least one', reason='empty')
        _check_capacity(len(current), self._capacity)
        if time_lag is not None:
            _check_lags(time_lag, len(current), len(past))
        parts += [(_checked_points(sweep.points, 'sweep', self._num_columns),
                   _checked_transform(sweep.T_current_from_sweep, 'T_current_from_sweep'),
                   _checked_seconds(sweep.time_lag_s, 'time_lag_s')) for sweep in past]

        counts = self._counts_that_fit([len(points) for points, _, _ in parts])
        self._reserve(sum(counts))
        end = 0
        for count, (points, matrix, lag_s) in zip(counts, parts, strict=False):
            self._write(points, matrix, lag_s, self._buffer[end:end + count])
            end += count
        if time_lag is not None:
            self._buffer[:end, -1] = time_lag
        return DensifiedCloud(self._buffer[:end], tuple(counts), len(parts) - len(counts))

    def _current_matrix(self, T_world_from_current: Any) -> np.ndarray | None:
        """Return what moves the current sweep; None stands for the exact identity."""
        if not self._strict or T_world_from_current is None:
            return None
        pose = _checked_transform(T_world_from_current, 'T_world_from_current')
        return _relative_float32(pose, pose)

    def _counts_that_fit(self, counts: list[int]) -> list[int]:
        total = 0
        for index, count in enumerate(counts):
            total += count
            if total > self._capacity:
                return counts[:index]
        return counts

    def _reserve(self, rows: int) -> None:
        if rows > len(self._buffer):  # with slack, so that slowly growing clouds seldom allocate
            rows = min(max(rows, len(self._buffer) * 3 // 2), self._capacity)
            self._buffer = np.empty((rows, self._num_columns + 1), np.float32)

    def _write(self, points: np.ndarray, matrix: np.ndarray | None, lag_s: float,
               out: np.ndarray) -> None:
        lag = np.float32(lag_s)
        if matrix is None:
            shared().run(_copy, len(points), points, lag, out)
        else:
            move = _move_fused if self._strict else _move
            shared().run(move, len(points), points, matrix.astype(np.float32), lag, out)


@dataclass(frozen=True)
class _Kept:
    """A sweep in the cache; ``points`` is a view of one of the cache's buffers."""

    points: np.ndarray
    stamp_s: float
    T_world_from_sensor: np.ndarray


class SweepCache:
    """The past sweeps of one stream, with their poses in the world frame.

    As upstream, neither order nor age of the stamps is looked at: the sweep that came last is the
    current one. With ``num_past_frames`` 0 nothing is kept and no pose is needed. Not for several
    threads at once.
    """

    def __init__(self, config: DensificationConfig) -> None:
        self._num_past = config.num_past_frames
        self._capacity = config.cloud_capacity
        self._relative = _relative_float32 if config.strict_float32 else _relative
        # One sweep more than a frame can see is kept: what the last frame saw stays as it is.
        self._kept: deque[_Kept] = deque(maxlen=self._num_past + 1)  # newest first
        self._buffers: list[np.ndarray | None] = [None] * (self._num_past + 1)
        self._next_buffer = 0

    def __len__(self) -> int:
        """Return how many past sweeps the next frame sees."""
        return min(len(self._kept), self._num_past)

    def past_sweeps(self, stamp_s: float, T_world_from_sensor: Any) -> list[Sweep]:
        """Return the kept sweeps in the frame of a new one, newest first. Nothing changes.

        Their points stay as they are while that new sweep is pushed, and until the next one is.

        :param stamp_s: of the new sweep (s).
        :param T_world_from_sensor: its pose, rigid 4x4; None when it is not known.
        :raises InputError: reason ``no_transform``: a pose is needed; ``transform``: it is not a
            finite rigid 4x4 matrix; ``stamp``: no finite number.
        """
        if self._num_past == 0:
            _checked_seconds(stamp_s, 'timestamp_s')
            return []
        return self._past(*_checked_pose(stamp_s, T_world_from_sensor))

    def push(self, points: np.ndarray, stamp_s: float, T_world_from_sensor: Any) -> list[Sweep]:
        """Keep a copy of a new sweep; return the past ones as :meth:`past_sweeps` does.

        :param points: float32 [n, 3] x, y, z (m), or [n, 4] with intensity, in the sensor frame.
        :raises InputError: as :meth:`past_sweeps`; ``layout``: points of another type or shape;
            ``capacity``: more of them than ``cloud_capacity``. Then nothing is kept.
        """
        if self._num_past == 0:
            return []
        stamp_s, pose = _checked_pose(stamp_s, T_world_from_sensor)
        points = _checked_points(points, 'points')
        _check_capacity(len(points), self._capacity)
        past = self._past(stamp_s, pose)
        index = self._next_buffer
        buffer = self._buffers[index]
        if buffer is None or len(buffer) < len(points) or buffer.shape[1] != points.shape[1]:
            rows = len(points) + len(points) // 4  # slack: no two clouds have the same size
            buffer = self._buffers[index] = np.empty((rows, points.shape[1]), np.float32)
        kept = buffer[:len(points)]
        kept[:] = points
        self._kept.appendleft(_Kept(kept, stamp_s, pose))
        self._next_buffer = (index + 1) % len(self._buffers)
        return past

    def clear(self) -> None:
        """Forget all sweeps; the buffers stay for the next ones."""
        self._kept.clear()

    def _past(self, stamp_s: float, pose: np.ndarray) -> list[Sweep]:
        return [Sweep(kept.points, stamp_s - kept.stamp_s,
                      self._relative(pose, kept.T_world_from_sensor))
                for kept in islice(self._kept, self._num_past)]


def _checked_points(points: np.ndarray, name: str, num_columns: int | None = None) -> np.ndarray:
    """Return a C-contiguous, read-only view or copy: one kind of array for the kernels."""
    if (not isinstance(points, np.ndarray) or points.dtype != np.float32 or points.ndim != 2
            or points.shape[1] not in ((3, 4) if num_columns is None else (num_columns,))):
        found = (f'{points.dtype} {list(points.shape)}' if isinstance(points, np.ndarray)
                 else type(points).__name__)
        raise InputError(f'{name}: found {found}, expected float32 [n, {num_columns or "3 or 4"}]',
                         reason='layout')
    view = np.ascontiguousarray(points).view()
    view.flags.writeable = False
    return view


def _check_capacity(num_points: int, capacity: int) -> None:
    if num_points > capacity:
        raise InputError(f'points: found {num_points}, expected at most {capacity} '
                         '(cloud_capacity)', reason='capacity')


def _check_lags(time_lag: np.ndarray, num_points: int, num_sweeps: int) -> None:
    if num_sweeps:
        raise InputError(f'points: found a time_lag column and {num_sweeps} past sweeps, expected '
                         'only one of them', reason='sweeps')
    if time_lag.dtype != np.float32 or time_lag.shape != (num_points,):
        raise InputError(f'time_lag: found {time_lag.dtype} {list(time_lag.shape)}, expected '
                         f'float32 [{num_points}]', reason='layout')


def _checked_seconds(seconds: Any, name: str) -> float:
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds,
                                                                     (bool, np.timedelta64))
    with contextlib.suppress(OverflowError):  # of an integer beyond all floats
        if is_number and math.isfinite(seconds):
            return float(seconds)
    raise InputError(f'{name}: found {seconds!r:.40}, expected seconds', reason='stamp')


def _checked_pose(stamp_s: Any, T_world_from_sensor: Any) -> tuple[float, np.ndarray]:
    stamp_s = _checked_seconds(stamp_s, 'timestamp_s')
    if T_world_from_sensor is None:
        raise InputError(f'no pose of the sensor at {stamp_s:.6f} s: expected one, because past '
                         'sweeps are fused', reason='no_transform')
    return stamp_s, _checked_transform(T_world_from_sensor, 'T_world_from_sensor')


def _checked_transform(matrix: Any, name: str) -> np.ndarray:
    """Return a rigid transform as float64 4x4, a copy."""
    def refusal(found: str) -> InputError:
        return InputError(f'{name}: found {found}, expected a rigid transform 4x4',
                          reason='transform')
    try:
        array = np.asarray(matrix.detach().cpu() if hasattr(matrix, 'detach') else matrix)
    except Exception:  # whatever the conversion of somebody's object raises
        raise refusal(type(matrix).__name__) from None
    if np.ma.isMaskedArray(matrix):
        raise refusal('a masked array')
    if array.dtype.kind not in 'fiu' or array.shape != (4, 4):
        raise refusal(f'{array.dtype} {list(array.shape)}')
    transform = array.astype(np.float64)
    if not (np.abs(transform) < np.finfo(np.float32).max).all():  # false for NaN too
        raise refusal('NaN, infinite or too large values')
    rotation = transform[:3, :3]
    if np.abs(transform[3] - (0, 0, 0, 1)).max() > _BOTTOM_ROW_TOLERANCE:
        raise refusal(f'the bottom row {transform[3].tolist()}')
    error = np.abs(rotation.T @ rotation - np.eye(3)).max()
    if error > _ROTATION_TOLERANCE:
        raise refusal(f'a rotation that is off by {error:.3g}')
    if np.linalg.det(rotation) < 0:
        raise refusal('a mirror image')
    return transform


def _relative(current: np.ndarray, sweep: np.ndarray) -> np.ndarray:
    """Return T_current_from_sweep of two poses in the world, all float64 4x4."""
    to_current = np.linalg.inv(current[:3, :3])
    relative = np.eye(4)
    relative[:3, :3] = to_current @ sweep[:3, :3]
    relative[:3, 3] = to_current @ (sweep[:3, 3] - current[:3, 3])
    return relative


def _relative_float32(current: np.ndarray, sweep: np.ndarray) -> np.ndarray:
    """Return the same by upstream's arithmetic: float32 values, in a float64 matrix.

    Both world-to-sensor matrices are cast to float32, that of the sweep is inverted as an affine
    matrix, and the two are multiplied, all in float32. Where upstream's compiler fuses operations
    of these 4x4 matrices, an entry may differ in its last bit.
    """
    from_world = _affine_inverse(current).astype(np.float32)
    to_world = _affine_inverse(_affine_inverse(sweep).astype(np.float32))
    product = from_world[:, :1] * to_world[:1]
    for k in range(1, 4):
        product += from_world[:, k:k + 1] * to_world[k:k + 1]
    return product.astype(np.float64)


def _affine_inverse(matrix: np.ndarray) -> np.ndarray:
    """Invert an affine 4x4 matrix by cofactors, in its own precision."""
    a, b, c = matrix[:3, :3].T  # columns
    cofactors = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)])
    inverse = np.eye(4, dtype=matrix.dtype)
    inverse[:3, :3] = cofactors * (matrix.dtype.type(1) / _dot(cofactors[0], a))
    inverse[:3, 3] = [-_dot(row, matrix[:3, 3]) for row in inverse[:3, :3]]
    return inverse


def _dot(u: np.ndarray, v: np.ndarray) -> np.floating:
    """Return the scalar product of two 3-vectors, summed from left to right."""
    return u[0] * v[0] + u[1] * v[1] + u[2] * v[2]


@kernel
def _copy(begin, end, points, lag, out):
    num_columns = points.shape[1]
    for i in range(begin, end):
        for column in range(num_columns):
            out[i, column] = points[i, column]
        out[i, num_columns] = lag


@kernel
def _move(begin, end, points, matrix, lag, out):
    num_columns = points.shape[1]
    for i in range(begin, end):
        x, y, z = points[i, 0], points[i, 1], points[i, 2]
        for axis in range(3):
            out[i, axis] = (matrix[axis, 0] * x + matrix[axis, 1] * y + matrix[axis, 2] * z
                            + matrix[axis, 3])
        for column in range(3, num_columns):
            out[i, column] = points[i, column]
        out[i, num_columns] = lag


@intrinsic
def _fma(typing_context, a, b, c):
    """Return a * b + c of three float32 with one rounding."""
    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)
    return types.float32(types.float32, types.float32, types.float32), generate


@kernel
def _move_fused(begin, end, points, matrix, lag, out):
    """Do the same as :func:`_move` with the roundings of multiply, fma, fma, add."""
    num_columns = points.shape[1]
    for i in range(begin, end):
        x, y, z = points[i, 0], points[i, 1], points[i, 2]
        for axis in range(3):
            value = matrix[axis, 0] * x
            value = _fma(matrix[axis, 1], y, value)
            value = _fma(matrix[axis, 2], z, value)
            out[i, axis] = value + matrix[axis, 3]
        for column in range(3, num_columns):
            out[i, column] = points[i, column]
        out[i, num_columns] = lag
