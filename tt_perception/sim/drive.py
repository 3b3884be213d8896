# SPDX-License-Identifier: Apache-2.0
"""A simulated drive: where the ego vehicle is, what its lidar brings back, and what is true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tt_perception.runtime.errors import ConfigError
from tt_perception.runtime.jit import kernel
from tt_perception.sim.lidar import LIDARS, Lidar, Scanner
from tt_perception.sim.world import World

START_NS = 1_767_258_000_031_000_000  # 2026-01-01 09:00:00.031 UTC
SWAY_M = 0.35  # how far the vehicle swings to either side of the middle of its lane
SWAY_LENGTH_M = 70.0


@dataclass(frozen=True)
class TrueObjects:
    """The road users within range of the sensor, at the stamp of a sweep.

    :ivar boxes_xyzlwh_yaw: float64 [k, 7], in ``base_link``: centre (m), length, width, height
        (m), yaw (rad, counter-clockwise from +x).
    :ivar boxes_in_map: float64 [k, 7], the same boxes in the map.
    :ivar velocities_xy: float64 [k, 2], over ground, along the axes of ``base_link`` (m/s).
    :ivar class_names: Autoware's names.
    :ivar object_ids: int64 [k]; an object keeps its number through a drive.
    :ivar num_points: int64 [k], points of the sweep inside each box.
    """

    boxes_xyzlwh_yaw: np.ndarray
    boxes_in_map: np.ndarray
    velocities_xy: np.ndarray
    class_names: tuple[str, ...]
    object_ids: np.ndarray
    num_points: np.ndarray

    def __len__(self) -> int:
        return len(self.class_names)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one plain dictionary an object, ready for JSON."""
        return [
            {
                'id': int(number),
                'class': name,
                'box_xyzlwh_yaw': [round(float(v), 6) for v in box],
                'box_in_map_xyzlwh_yaw': [round(float(v), 6) for v in box_in_map],
                'velocity_xy_mps': [round(float(v), 6) for v in velocity],
                'num_points': int(count),
            }
            for number, name, box, box_in_map, velocity, count in zip(
                self.object_ids, self.class_names, self.boxes_xyzlwh_yaw, self.boxes_in_map,
                self.velocities_xy, self.num_points, strict=True)
        ]

    @classmethod
    def from_dicts(cls, objects: Sequence[dict[str, Any]]) -> TrueObjects:
        """Undo :meth:`to_dicts`."""
        def column(key: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
            return np.array([o[key] for o in objects], dtype).reshape(-1, *shape)
        return cls(column('box_xyzlwh_yaw', (7,), np.float64),
                   column('box_in_map_xyzlwh_yaw', (7,), np.float64),
                   column('velocity_xy_mps', (2,), np.float64),
                   tuple(o['class'] for o in objects),
                   column('id', (), np.int64), column('num_points', (), np.int64))


@dataclass(frozen=True)
class SimulatedSweep:
    """One turn of the lidar; all of its points belong to the one stamp.

    :ivar stamp_ns: since 1970.
    :ivar T_map_from_base: float64 4x4.
    :ivar points: float32 [n, 4], x, y, z in ``base_link`` (m), intensity 0 to 255.
    :ivar channels: uint16 [n], the row of each point.
    :ivar object_ids: int32 [n], which object gave the point; -1 is none.
    :ivar truth: true boxes at the stamp.
    """

    stamp_ns: int
    lidar: Lidar
    T_map_from_base: np.ndarray
    points: np.ndarray
    channels: np.ndarray
    object_ids: np.ndarray
    truth: TrueObjects


class Drive:
    """A drive down a simulated street, as a sequence of sweeps.

    Everything depends on the seed alone: sweep ``i`` is the same whatever was taken before it,
    and two lidars with one seed see the same street from the same place.

    :param rate_hz: turns of the sensor a second.
    :param lidar: the sensor, or one for each sweep.
    :param start_ns: stamp of sweep 0.
    :raises ConfigError: a number out of range.
    """

    def __init__(self, seed: int, num_sweeps: int, *, rate_hz: float = 10.0,
                 lidar: Lidar | Sequence[Lidar] = LIDARS[64], start_ns: int = START_NS):
        if num_sweeps < 1:
            raise ConfigError(f'num_sweeps: found {num_sweeps}, expected at least 1')
        if not 0 < rate_hz <= 100:
            raise ConfigError(f'rate_hz: found {rate_hz:g}, expected up to 100')
        self.seed = seed
        self.lidars = (lidar,) * num_sweeps if isinstance(lidar, Lidar) else tuple(lidar)
        if len(self.lidars) != num_sweeps:
            raise ConfigError(f'lidar: found {len(self.lidars)}, expected one, or one for each '
                              f'of {num_sweeps} sweeps')
        self.start_ns = start_ns
        self.duration_s = (num_sweeps - 1) / rate_hz
        self.world = World(seed, self.duration_s)
        self._period_s = 1 / rate_hz
        self._phase = np.random.default_rng([seed, 3]).uniform(0, 2 * math.pi)
        self._scanners = {each: Scanner(each) for each in set(self.lidars)}

    def __len__(self) -> int:
        return len(self.lidars)

    def __iter__(self) -> Iterator[SimulatedSweep]:
        return (self[i] for i in range(len(self)))

    def stamp_ns(self, time_s: float) -> int:
        """Return the stamp of a time of the drive."""
        return self.start_ns + round(time_s * 1e9)

    def pose(self, time_s: float) -> np.ndarray:
        """Return the pose of ``base_link`` in the map, float64 4x4."""
        x0, y0 = self.world.ego_start_xy
        x = x0 + self.world.ego_speed_mps * time_s
        wave = 2 * math.pi / SWAY_LENGTH_M
        y = y0 + SWAY_M * math.sin(wave * x + self._phase)
        return self.world.map_pose(x, y, math.atan(
            SWAY_M * wave * math.cos(wave * x + self._phase)))

    def __getitem__(self, i: int) -> SimulatedSweep:
        if not 0 <= i < len(self):
            raise IndexError(f'sweep {i} of {len(self)}')
        time_s = i * self._period_s
        pose = self.pose(time_s)
        lidar = self.lidars[i]
        returns = self._scanners[lidar].scan(self.world.solids(time_s), pose,
                                             np.random.default_rng([self.seed, 4, i]))
        return SimulatedSweep(self.stamp_ns(time_s), lidar, pose, returns.points,
                              returns.channels, returns.object_ids,
                              self._truth(time_s, pose, lidar, returns.points))

    def _truth(self, time_s: float, pose: np.ndarray, lidar: Lidar,
               points: np.ndarray) -> TrueObjects:
        in_map = self.world.boxes(time_s)
        offset = in_map[:, :3] - pose[:3, 3]
        reach = (np.hypot(in_map[:, 3], in_map[:, 4]) / 2 + lidar.max_range_m
                 + math.hypot(*lidar.mount_xyz_m[:2]))
        seen = np.flatnonzero(np.hypot(offset[:, 0], offset[:, 1]) < reach)
        in_map = in_map[seen]
        boxes = in_map.copy()
        boxes[:, :3] = offset[seen] @ pose[:3, :3]
        yaw = in_map[:, 6] - math.atan2(pose[1, 0], pose[0, 0])
        boxes[:, 6] = (yaw + math.pi) % (2 * math.pi) - math.pi
        return TrueObjects(boxes, in_map, self.world.velocities_xy()[seen] @ pose[:2, :2],
                           tuple(self.world.class_names[k] for k in seen), seen,
                           count_points(points, boxes))


def count_points(points: np.ndarray, boxes_xyzlwh_yaw: np.ndarray) -> np.ndarray:
    """Return how many points lie in each box, its faces included; int64 [k].

    :param points: float32 [n, >=3] (m).
    :param boxes_xyzlwh_yaw: float64 [k, 7], in the frame of the points.
    """
    boxes = np.ascontiguousarray(boxes_xyzlwh_yaw, np.float64)
    strip = np.floor(points[:, 0]).astype(np.int16)  # a metre wide
    order = np.argsort(strip, kind='stable')
    reach = np.hypot(boxes[:, 3], boxes[:, 4]) / 2
    begin, end = np.searchsorted(strip[order], np.floor([boxes[:, 0] - reach,
                                                         boxes[:, 0] + reach + 1]))
    counts = np.zeros(len(boxes), np.int64)
    _count_points(np.ascontiguousarray(points[order, :3]), begin, end, boxes, counts)
    return counts


@kernel
def _count_points(points, begin, end, boxes, counts):
    for k in range(len(boxes)):
        x, y, z, length, width, height, yaw = boxes[k]
        c, s = math.cos(yaw), math.sin(yaw)
        for i in range(begin[k], end[k]):
            dx = points[i, 0] - x
            dy = points[i, 1] - y
            if (abs(points[i, 2] - z) <= height / 2 and abs(c * dx + s * dy) <= length / 2
                    and abs(c * dy - s * dx) <= width / 2):
                counts[k] += 1
