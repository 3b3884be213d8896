# SPDX-License-Identifier: Apache-2.0
"""Transforms between frames at a given time, behind one method.

:func:`create_transforms` returns ``tf2_ros`` where it is installed, and :class:`TransformBuffer`
fed by the same two topics where it is not; both give the same numbers and the same errors. Nothing
here waits: a caller that wants to try again is told when new transforms have arrived.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from tt_perception.ros.conversions import stamp_to_ns
from tt_perception.runtime.errors import InputError

CACHE_NS = 10_000_000_000  # how far behind the newest one a frame's transforms are kept
# Quaternions of a length between these are normalised; others, with inf, say nothing.
_MIN_NORM, _MAX_NORM = 1e-6, 1e6
_MAX_SHIFT_M = 1e12  # further than any place, and far from an overflow along a chain of frames
_TOPIC_DEPTH = 100


class TransformError(InputError):
    """There is no transform at the wanted time.

    :ivar may_arrive: a transform that is still on its way would help.
    """

    may_arrive = False

    def __init__(self, message: str):
        super().__init__(message, reason='no_transform')


class InvalidFrame(TransformError):
    """A frame name is empty."""


class LookupFailed(TransformError):
    """A frame is not known."""

    may_arrive = True


class ConnectivityFailed(TransformError):
    """Two frames are known, and in different trees."""

    may_arrive = True


class ExtrapolationFailed(TransformError):
    """The time is before the oldest or after the newest transform of a frame on the way.

    :param too_new: the latest time that all transforms have in common is before the wanted one.
    """

    def __init__(self, message: str, too_new: bool):
        super().__init__(message)
        self.may_arrive = too_new


class Transforms(Protocol):
    """What the nodes want of a transform library."""

    def lookup_matrix(self, target: str, source: str, stamp_ns: int) -> np.ndarray:
        """Return float64 [4, 4] that maps points in ``source`` to points in ``target``.

        :param stamp_ns: time of the transform; 0 means the latest time that all have in common.
        :raises TransformError: there is none.
        """

    def clear(self) -> None:
        """Forget all transforms but the static ones, because time jumped back."""

    def close(self) -> None:
        """Stop listening; may be repeated."""


def create_transforms(node: Any, on_arrival: Callable[[], None],
                      warn: Callable[[str], None]) -> Transforms:
    """Return a listener on ``/tf`` and ``/tf_static``.

    :param on_arrival: called after transforms have arrived, in the executor's thread.
    :param warn: takes a line about a transform that cannot be used.
    """
    try:
        import tf2_ros
    except ImportError:
        return TransformListener(node, on_arrival, warn)
    return _Tf2Transforms(tf2_ros, node, on_arrival)


def strip_slash(frame: str) -> str:
    """Return a frame name without the leading slash of old drivers."""
    return frame[1:] if frame.startswith('/') else frame


# A rigid transform that maps child to parent: translation (x, y, z), quaternion (x, y, z, w).
_Rigid = tuple[tuple[float, float, float], tuple[float, float, float, float]]
_IDENTITY: _Rigid = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))


def _rotate(q: tuple, v: tuple) -> tuple[float, float, float]:
    x, y, z, w = q
    # v + 2 w (u x v) + 2 u x (u x v) with u the vector part
    cx, cy, cz = y * v[2] - z * v[1], z * v[0] - x * v[2], x * v[1] - y * v[0]
    return (v[0] + 2 * (w * cx + y * cz - z * cy),
            v[1] + 2 * (w * cy + z * cx - x * cz),
            v[2] + 2 * (w * cz + x * cy - y * cx))


def _multiply(a: tuple, b: tuple) -> tuple[float, float, float, float]:
    ax, ay, az, aw = a
    bx, by, bz, bw = b
    return (aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
            aw * bw - ax * bx - ay * by - az * bz)


def _compose(outer: _Rigid, inner: _Rigid) -> _Rigid:
    moved = _rotate(outer[1], inner[0])
    t = outer[0]
    return ((t[0] + moved[0], t[1] + moved[1], t[2] + moved[2]), _multiply(outer[1], inner[1]))


def _invert(rigid: _Rigid) -> _Rigid:
    x, y, z, w = rigid[1]
    back = (-x, -y, -z, w)
    t = _rotate(back, rigid[0])
    return ((-t[0], -t[1], -t[2]), back)


def _interpolate(a: _Rigid, b: _Rigid, ratio: float) -> _Rigid:
    """Return the transform between two: straight line, and rotation at constant speed."""
    translation = tuple(u + ratio * (v - u) for u, v in zip(a[0], b[0], strict=True))
    qa, qb = a[1], b[1]
    if sum(u * v for u, v in zip(qa, qb, strict=True)) < 0:
        qb = tuple(-v for v in qb)
    # The arc tangent keeps its precision for nearly equal rotations; the arc cosine does not.
    angle = 2 * math.atan2(math.dist(qa, qb), math.dist(qa, tuple(-v for v in qb)))
    if angle > 1e-9:
        wa = math.sin((1 - ratio) * angle) / math.sin(angle)
        wb = math.sin(ratio * angle) / math.sin(angle)
    else:
        wa, wb = 1 - ratio, ratio
    q = tuple(wa * u + wb * v for u, v in zip(qa, qb, strict=True))
    norm = math.hypot(*q)
    return translation, tuple(v / norm for v in q)


def rigid_matrix(translation: Iterable[float], quaternion_xyzw: Iterable[float]) -> np.ndarray:
    """Return float64 [4, 4] of a translation (m) and a unit quaternion."""
    x, y, z, w = quaternion_xyzw
    tx, ty, tz = translation
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w), tx],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w), ty],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y), tz],
        [0.0, 0.0, 0.0, 1.0]])


class _Edge:
    """The transforms from one frame to its parents over time, oldest first."""

    def __init__(self, is_static: bool) -> None:
        self.is_static = is_static
        self.stamps: list[int] = []
        self.entries: list[tuple[str, _Rigid]] = []

    def insert(self, stamp_ns: int, parent: str, rigid: _Rigid) -> bool:
        """Add a transform, or replace the one of the same time; return False if it is too old."""
        if self.is_static:
            self.stamps, self.entries = [stamp_ns], [(parent, rigid)]
            return True
        if self.stamps and stamp_ns < self.stamps[-1] - CACHE_NS:
            return False
        at = bisect_left(self.stamps, stamp_ns)
        if at < len(self.stamps) and self.stamps[at] == stamp_ns:
            self.entries[at] = (parent, rigid)
            return True
        self.stamps.insert(at, stamp_ns)
        self.entries.insert(at, (parent, rigid))
        expired = bisect_left(self.stamps, self.stamps[-1] - CACHE_NS)
        del self.stamps[:expired], self.entries[:expired]
        return True

    def find(self, stamp_ns: int) -> tuple[str, _Rigid] | None:
        """Return parent and transform at a time, None if the time is outside what is known."""
        if self.is_static:
            return self.entries[0]
        if not self.stamps:
            return None
        if stamp_ns == 0:
            return self.entries[-1]
        after = bisect_right(self.stamps, stamp_ns)
        if after == 0:
            return None
        parent, rigid = self.entries[after - 1]
        if self.stamps[after - 1] == stamp_ns:
            return parent, rigid
        if after == len(self.stamps):
            return None
        next_parent, next_rigid = self.entries[after]
        if next_parent != parent:  # the frame changes its parent in between: no way from one to
            return parent, rigid  # the other, so the older one holds
        span = self.stamps[after] - self.stamps[after - 1]
        ratio = (stamp_ns - self.stamps[after - 1]) / span
        return parent, _interpolate(rigid, next_rigid, ratio)

    def latest(self) -> tuple[int, str] | None:
        """Return newest time (0 for a static edge) and parent."""
        if not self.entries:
            return None
        return (0 if self.is_static else self.stamps[-1]), self.entries[-1][0]


class TransformBuffer:
    """A tree of frames over the last ten seconds, with the look-up semantics of tf2.

    Safe from several threads.
    """

    def __init__(self) -> None:
        self._edges: dict[str, _Edge] = {}
        self._frames: set[str] = set()
        self._lock = threading.Lock()

    def insert(self, parent: str, child: str, stamp_ns: int, translation: Iterable[float],
               quaternion_xyzw: Iterable[float], is_static: bool = False) -> str | None:
        """Add the transform that maps ``child`` to ``parent``.

        :returns: why the transform was not taken, None if it was.
        """
        parent, child = strip_slash(parent), strip_slash(child)
        translation = tuple(float(v) for v in translation)
        quaternion = tuple(float(v) for v in quaternion_xyzw)
        name = f'transform from {child!r} to {parent!r}'
        if not parent or not child or parent == child:
            return f'{name}: expected two different frame names'
        if not all(math.isfinite(v) for v in (*translation, *quaternion)):
            return f'{name}: found {translation}, {quaternion}, expected finite numbers'
        norm = math.hypot(*quaternion)
        if not _MIN_NORM <= norm <= _MAX_NORM:
            return f'{name}: found a quaternion of length {norm:.3g}, expected 1'
        if max(abs(v) for v in translation) > _MAX_SHIFT_M:
            return f'{name}: found {translation} m, expected at most {_MAX_SHIFT_M:g} m'
        rigid = (translation, tuple(v / norm for v in quaternion))
        with self._lock:
            edge = self._edges.get(child)
            if edge is None or edge.is_static != is_static:
                edge = self._edges[child] = _Edge(is_static)
            self._frames.update((parent, child))
            if not edge.insert(stamp_ns, parent, rigid):
                return (f'{name}: found time {_seconds(stamp_ns)}, more than '
                        f'{CACHE_NS // 10**9} s before the newest, {_seconds(edge.stamps[-1])}')
        return None

    def lookup_matrix(self, target: str, source: str, stamp_ns: int) -> np.ndarray:
        """See :meth:`Transforms.lookup_matrix`."""
        target, source = _checked_frames(target, source)
        if target == source:
            return np.eye(4)
        with self._lock:
            for frame in (target, source):
                if frame not in self._frames:
                    raise LookupFailed(f'frame {frame!r} is not known to TF')
            if stamp_ns == 0:
                stamp_ns = self._latest_common_time(target, source)
            rigid = self._lookup(target, source, stamp_ns)
        return rigid_matrix(*rigid)

    def clear(self) -> None:
        """See :meth:`Transforms.clear`; frame names stay known, as in tf2."""
        with self._lock:
            for edge in self._edges.values():
                if not edge.is_static:
                    edge.stamps.clear()
                    edge.entries.clear()

    def _lookup(self, target: str, source: str, stamp_ns: int) -> _Rigid:
        to_ancestor, stuck = self._walk_up(source, stamp_ns, {target})
        if target in to_ancestor:
            return to_ancestor[target]
        from_target, target_stuck = self._walk_up(target, stamp_ns, to_ancestor)
        common = next((frame for frame in from_target if frame in to_ancestor), None)
        if common is not None:
            return _compose(_invert(from_target[common]), to_ancestor[common])
        if stuck is None and target_stuck is None:
            raise ConnectivityFailed(f'frames {source!r} and {target!r} are not connected by TF')
        stamps = self._edges[stuck or target_stuck].stamps
        known = f'{_seconds(stamps[0])} to {_seconds(stamps[-1])}' if stamps else 'nothing'
        raise ExtrapolationFailed(
            f'no transform from {source!r} to {target!r} at {_seconds(stamp_ns)}: found {known} '
            f'for frame {stuck or target_stuck!r}', self._is_too_new(target, source, stamp_ns))

    def _walk_up(self, frame: str, stamp_ns: int,
                 end: Iterable[str]) -> tuple[dict[str, _Rigid], str | None]:
        """Walk from a frame towards the root, until one of ``end`` is reached.

        :returns: transform from ``frame`` to each frame on the way, nearest first, and the frame
            at which no transform to its parent is valid at this time.
        """
        visited = {frame: _IDENTITY}
        while frame not in end:
            edge = self._edges.get(frame)
            if edge is None:
                break
            found = edge.find(stamp_ns)
            if found is None:
                return visited, frame
            parent, rigid = found
            if parent in visited:
                raise LookupFailed(f'frame {parent!r} is its own ancestor')
            visited[parent] = _compose(rigid, visited[frame])
            frame = parent
        return visited, None

    def _is_too_new(self, target: str, source: str, stamp_ns: int) -> bool:
        try:
            return self._latest_common_time(target, source) < stamp_ns
        except TransformError:
            return True  # nothing is known since the last clear

    def _latest_common_time(self, target: str, source: str) -> int:
        """Return the newest time for which all edges between two frames are known; 0 for any."""
        up, times = self._latest_up(source, {target})
        if target not in up:
            target_up, target_times = self._latest_up(target, set(up))
            common = target_up[-1]
            if common not in up:
                raise ConnectivityFailed(
                    f'frames {source!r} and {target!r} are not connected by TF')
            times = times[:up.index(common)] + target_times
        return min((time for time in times if time != 0), default=0)

    def _latest_up(self, frame: str, end: set[str]) -> tuple[list[str], list[int]]:
        """Return the frames towards the root by the newest parents, and the newest times."""
        frames, times = [frame], []
        while frame not in end:
            edge = self._edges.get(frame)
            newest = edge.latest() if edge is not None else None
            if newest is None:
                break
            time, frame = newest
            if frame in frames:
                raise LookupFailed(f'frame {frame!r} is its own ancestor')
            frames.append(frame)
            times.append(time)
        return frames, times


def _checked_frames(target: str, source: str) -> tuple[str, str]:
    target, source = strip_slash(target), strip_slash(source)
    for frame in (target, source):
        if not frame:
            raise InvalidFrame('frame name: found an empty one, expected a name')
    return target, source


def _seconds(stamp_ns: int) -> str:
    return f'{stamp_ns // 10**9}.{stamp_ns % 10**9:09d} s'


class TransformListener(TransformBuffer):
    """A :class:`TransformBuffer` that two subscriptions fill."""

    def __init__(self, node: Any, on_arrival: Callable[[], None],
                 warn: Callable[[str], None]) -> None:
        """See :func:`create_transforms`."""
        super().__init__()
        from rclpy.qos import DurabilityPolicy, QoSProfile
        from tf2_msgs.msg import TFMessage
        self._node = node
        self._on_arrival = on_arrival
        self._warn = warn
        latched = QoSProfile(depth=_TOPIC_DEPTH, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._subscriptions = [
            node.create_subscription(TFMessage, '/tf', self._on_dynamic,
                                     QoSProfile(depth=_TOPIC_DEPTH)),
            node.create_subscription(TFMessage, '/tf_static', self._on_static, latched),
        ]

    def _on_dynamic(self, message: Any) -> None:
        self._insert_all(message, is_static=False)

    def _on_static(self, message: Any) -> None:
        self._insert_all(message, is_static=True)

    def _insert_all(self, message: Any, is_static: bool) -> None:
        for stamped in message.transforms:
            t, q = stamped.transform.translation, stamped.transform.rotation
            problem = self.insert(stamped.header.frame_id, stamped.child_frame_id,
                                  stamp_to_ns(stamped.header.stamp), (t.x, t.y, t.z),
                                  (q.x, q.y, q.z, q.w), is_static)
            if problem is not None:
                self._warn(problem)
        self._on_arrival()

    def close(self) -> None:
        """See :meth:`Transforms.close`."""
        while self._subscriptions:
            self._node.destroy_subscription(self._subscriptions.pop())


class _Tf2Transforms:
    """``tf2_ros`` behind the interface of :class:`Transforms`."""

    def __init__(self, tf2_ros: Any, node: Any, on_arrival: Callable[[], None]) -> None:
        class NotifyingBuffer(tf2_ros.Buffer):
            def set_transform(self, *args: Any) -> None:
                super().set_transform(*args)
                on_arrival()

            def set_transform_static(self, *args: Any) -> None:
                super().set_transform_static(*args)
                on_arrival()

        self._tf2 = tf2_ros
        # Without node=, so that no service of the buffer outlives a clean-up; a jump of the clock
        # is handled by our node, on every release.
        self._buffer = NotifyingBuffer()
        self._listener = tf2_ros.TransformListener(self._buffer, node)

    def lookup_matrix(self, target: str, source: str, stamp_ns: int) -> np.ndarray:
        """See :meth:`Transforms.lookup_matrix`."""
        from rclpy.time import Time
        target, source = _checked_frames(target, source)
        if target == source:
            return np.eye(4)
        if stamp_ns < 0:  # rclpy has no such time
            raise ExtrapolationFailed(f'time {stamp_ns} ns is before every transform', False)
        tf2 = self._tf2
        try:
            time = Time(nanoseconds=stamp_ns)
            stamped = self._buffer.lookup_transform_core(target, source, time)
        except tf2.LookupException as error:
            raise LookupFailed(_one_line(error)) from None
        except tf2.ConnectivityException as error:
            raise ConnectivityFailed(_one_line(error)) from None
        except tf2.ExtrapolationException as error:
            raise ExtrapolationFailed(_one_line(error),
                                      self._is_too_new(target, source, stamp_ns)) from None
        except tf2.TransformException as error:
            raise TransformError(_one_line(error)) from None
        t, q = stamped.transform.translation, stamped.transform.rotation
        return rigid_matrix((t.x, t.y, t.z), (q.x, q.y, q.z, q.w))

    def _is_too_new(self, target: str, source: str, stamp_ns: int) -> bool:
        try:
            newest = self._buffer.get_latest_common_time(target, source)
        except self._tf2.TransformException:
            return True  # nothing is known since the last clear
        return newest.nanoseconds < stamp_ns

    def clear(self) -> None:
        """See :meth:`Transforms.clear`."""
        self._buffer.clear()

    def close(self) -> None:
        """See :meth:`Transforms.close`."""
        if self._listener is not None:
            self._listener.unregister()
            self._listener = None


def _one_line(error: Exception) -> str:
    return ' '.join(str(error).split())
