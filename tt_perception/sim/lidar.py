# SPDX-License-Identifier: Apache-2.0
"""Spinning lidars: beam tables, exact ray casting, and what a real sensor makes of the result.

The sensor stands upright, so all rays of one azimuth lie in one vertical plane. How far a plane
runs inside the footprint of a solid is worked out once an azimuth; each row then needs only its
slope. Rays meet a solid only where the azimuths that it spans, known in advance, contain them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tt_perception.runtime.jit import kernel
from tt_perception.runtime.pool import shared
from tt_perception.sim.world import ASPHALT_REFLECTANCE, BOX, CYLINDER, PRIMITIVE

NOTHING = -1
COLUMNS_PER_CALL = 32
LEAF_COS_INCIDENCE = 0.7  # leaves hang in all directions


@dataclass(frozen=True)
class Lidar:
    """One sensor model. It spins clockwise, seen from above, and begins behind the vehicle.

    :ivar elevations_deg: of the rows, highest first; row 0 is channel 0.
    :ivar num_columns: azimuth steps of one turn.
    :ivar max_range_m: a ray that meets nothing nearer gives no point.
    :ivar road_range_m: where half of the rays that hit asphalt come back; it sets the sensitivity.
    :ivar range_noise_m: standard deviation.
    :ivar mount_xyz_m: in ``base_link``, which lies on the road under the rear axle.
    """

    name: str
    elevations_deg: tuple[float, ...]
    num_columns: int
    max_range_m: float
    road_range_m: float = 50.0
    range_noise_m: float = 0.02
    fade: float = 0.5  # standard deviation of the logarithm of a signal
    lost: float = 0.005  # part of the rays that never come back
    mount_xyz_m: tuple[float, float, float] = (0.9, 0.0, 1.9)

    @property
    def num_rows(self) -> int:
        """Number of beams."""
        return len(self.elevations_deg)

    @property
    def azimuths(self) -> np.ndarray:
        """Azimuth of each column, rad, counter-clockwise from +x; float64 [columns]."""
        return math.pi - np.arange(self.num_columns) * (2 * math.pi / self.num_columns)


# Vertical fields of view and spacings as the data sheets of the HDL-64E and HDL-32E state them.
LIDARS = {
    64: Lidar('64 rows, +2.0 to -24.8 degrees', tuple(np.linspace(2.0, -24.8, 64)), 2000, 120.0),
    32: Lidar('32 rows, +10.67 to -30.67 degrees', tuple(np.linspace(10.67, -30.67, 32)), 1800,
              100.0),
}


@dataclass(frozen=True)
class Returns:
    """What one turn of the sensor brings back, in firing order: azimuth by azimuth.

    :ivar points: float32 [n, 4], x, y, z in ``base_link`` (m), intensity 0 to 255.
    :ivar channels: uint16 [n], the row of each point.
    :ivar columns: uint16 [n], its azimuth step.
    :ivar object_ids: int32 [n], ``object_id`` of the solid that was hit.
    """

    points: np.ndarray
    channels: np.ndarray
    columns: np.ndarray
    object_ids: np.ndarray


@dataclass(frozen=True)
class Hits:
    """Where each ray ends, [columns, rows]; valid until the next cast.

    :ivar ranges_m: float32, infinite where nothing was hit.
    :ivar solids: int32, index of the solid; ``NOTHING``, or the number of solids for the road.
    :ivar cos_incidence: float32, between ray and surface normal.
    """

    ranges_m: np.ndarray
    solids: np.ndarray
    cos_incidence: np.ndarray


@dataclass
class Scanner:
    """One lidar with its buffers; not for several threads at once."""

    lidar: Lidar
    _hits: Hits = field(init=False)

    def __post_init__(self):
        shape = self.lidar.num_columns, self.lidar.num_rows
        self._hits = Hits(np.empty(shape, np.float32), np.empty(shape, np.int32),
                          np.empty(shape, np.float32))
        elevations = np.deg2rad(np.array(self.lidar.elevations_deg))
        self._rows = np.tan(elevations), np.cos(elevations)
        self._columns = np.cos(self.lidar.azimuths), np.sin(self.lidar.azimuths)
        self._points = np.empty((shape[0] * shape[1], 4), np.float32)
        self._ids = np.empty((3, shape[0] * shape[1]), np.int32)

    def cast(self, solids: np.ndarray, leaf_depth: np.ndarray) -> Hits:
        """Find the nearest hit of every ray, without noise.

        :param solids: PRIMITIVE [m], in the frame of the sensor: origin at the sensor, road at
            ``z = -mount z``.
        :param leaf_depth: float32 [columns, rows], how many mean free paths each ray gets through
            leaves before it hits one.
        """
        lidar, hits = self.lidar, self._hits
        near = np.hypot(*solids['center'][:, :2].T) - np.hypot(*solids['half'][:, :2].T)
        chosen = np.flatnonzero(near < lidar.max_range_m)
        kind, shape = _shapes(solids[chosen])
        first, count = _column_spans(kind, shape, lidar)
        starts, entries = _column_lists(first, count, lidar.num_columns)
        shared().run(_cast_columns, lidar.num_columns, *self._columns, *self._rows, starts,
                     entries, kind, shape, chosen, leaf_depth, -lidar.mount_xyz_m[2], len(solids),
                     lidar.max_range_m, hits.ranges_m, hits.solids, hits.cos_incidence,
                     grain=COLUMNS_PER_CALL)
        return hits

    def scan(self, solids: np.ndarray, T_map_from_base: np.ndarray,
             rng: np.random.Generator) -> Returns:
        """Take one sweep.

        :param solids: PRIMITIVE [m], in the map.
        :param T_map_from_base: float64 4x4; upright: a heading and a place.
        :param rng: noise, drop-out and leaves; the same state gives the same sweep.
        """
        lidar = self.lidar
        shape = lidar.num_columns, lidar.num_rows
        leaf_depth = rng.standard_exponential(shape, np.float32)
        noise = rng.standard_normal((2, *shape), np.float32)
        luck = rng.random(shape, np.float32)
        hits = self.cast(in_sensor_frame(solids, T_map_from_base, lidar), leaf_depth)
        reflectance = np.append(solids['reflectance'], ASPHALT_REFLECTANCE)
        object_ids = np.append(solids['object_id'], np.int32(-1))
        height = lidar.mount_xyz_m[2]
        least_signal = ASPHALT_REFLECTANCE * height / math.hypot(lidar.road_range_m, height) ** 3
        n = _receive(hits.ranges_m, hits.solids, hits.cos_incidence, *self._columns, *self._rows,
                     reflectance, object_ids, noise, luck, least_signal, lidar.fade, lidar.lost,
                     lidar.range_noise_m, np.array(lidar.mount_xyz_m), self._points, self._ids)
        channels, columns, ids = self._ids[:, :n]
        return Returns(self._points[:n].copy(), channels.astype(np.uint16),
                       columns.astype(np.uint16), ids.copy())


def in_sensor_frame(solids: np.ndarray, T_map_from_base: np.ndarray, lidar: Lidar) -> np.ndarray:
    """Return a copy of solids given in the map, with the origin at the sensor."""
    T = np.asarray(T_map_from_base, np.float64)
    moved = solids.copy()
    moved['center'] = (solids['center'] - T[:3, 3]) @ T[:3, :3] - np.array(lidar.mount_xyz_m)
    moved['yaw'] -= math.atan2(T[1, 0], T[0, 0])
    return moved


def _shapes(solids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return kinds uint8 [m] and x, y, z, cos yaw, sin yaw, half edges, free path, [m, 9]."""
    assert solids.dtype == PRIMITIVE
    shape = np.empty((len(solids), 9))
    shape[:, :3] = solids['center']
    shape[:, 3], shape[:, 4] = np.cos(solids['yaw']), np.sin(solids['yaw'])
    shape[:, 5:8] = solids['half']
    shape[:, 8] = solids['free_path']
    return np.ascontiguousarray(solids['kind']), shape


def _column_spans(kind: np.ndarray, shape: np.ndarray, lidar: Lidar):
    """Return the first column that may see each solid, and the number of columns."""
    x, y, c, s, hx, hy = (shape[:, i] for i in (0, 1, 3, 4, 5, 6))
    middle = np.arctan2(y, x)
    # corners of a box; of the square around a round footprint
    round_half = np.maximum(hx, hy)
    half_x, half_y = (np.where(kind == BOX, h, round_half) for h in (hx, hy))
    low = np.zeros(len(kind))
    high = np.zeros(len(kind))
    for u, v in ((1, 1), (1, -1), (-1, -1), (-1, 1)):
        corner_x = x + u * half_x * c - v * half_y * s
        corner_y = y + u * half_x * s + v * half_y * c
        off = (np.arctan2(corner_y, corner_x) - middle + math.pi) % (2 * math.pi) - math.pi
        low = np.minimum(low, off)
        high = np.maximum(high, off)
    step = 2 * math.pi / lidar.num_columns
    first = np.floor((math.pi - (middle + high)) / step).astype(np.int64)
    last = np.ceil((math.pi - (middle + low)) / step).astype(np.int64)
    around = (np.abs(x * c + y * s) <= half_x) & (np.abs(y * c - x * s) <= half_y)
    count = np.where(around, lidar.num_columns, np.minimum(last - first + 1, lidar.num_columns))
    return first % lidar.num_columns, count


@kernel
def _column_lists(first, count, num_columns):
    """Return the solids of each column: those of column c are entries[starts[c]:starts[c + 1]]."""
    starts = np.zeros(num_columns + 1, np.int64)
    for i in range(len(first)):
        for k in range(count[i]):
            starts[(first[i] + k) % num_columns + 1] += 1
    for c in range(num_columns):
        starts[c + 1] += starts[c]
    fill = starts[:-1].copy()
    entries = np.empty(starts[-1], np.int32)
    for i in range(len(first)):
        for k in range(count[i]):
            c = (first[i] + k) % num_columns
            entries[fill[c]] = i
            fill[c] += 1
    return starts, entries


@kernel
def _footprint(kind, s, dx, dy):
    """Return where a plane of azimuth (dx, dy) enters and leaves a footprint, in metres from the
    sensor, and the cosine between plane and the normal at the entry; (1, 0, 0) is a miss."""
    ox = -(s[0] * s[3] + s[1] * s[4])
    oy = -(s[1] * s[3] - s[0] * s[4])
    ux = dx * s[3] + dy * s[4]
    uy = dy * s[3] - dx * s[4]
    if kind == BOX:
        enter, leave, cos_in = -np.inf, np.inf, 0.0
        for o, u, h in ((ox, ux, s[5]), (oy, uy, s[6])):
            if abs(u) < 1e-12:
                if abs(o) > h:
                    return 1.0, 0.0, 0.0
            else:
                near = (-math.copysign(h, u) - o) / u
                far = (math.copysign(h, u) - o) / u
                if near > enter:
                    enter, cos_in = near, abs(u)
                leave = min(leave, far)
        return enter, leave, cos_in
    ax, ay, bx, by = ox / s[5], oy / s[6], ux / s[5], uy / s[6]
    a = bx * bx + by * by
    b = ax * bx + ay * by
    root = b * b - a * (ax * ax + ay * ay - 1.0)
    if root <= 0.0:
        return 1.0, 0.0, 0.0
    root = math.sqrt(root)
    return (-b - root) / a, (-b + root) / a, root  # for a circle, root is the cosine times 1 / r


@kernel
def _meet_upright(enter, leave, cos_in, low, high, slope, cos_el):
    """Return range along the plane and cosine of incidence, for a box or a cylinder."""
    if enter > 0.0:
        z = slope * enter
        if low <= z <= high:
            return enter, cos_in * cos_el
    else:
        z = 0.0
    if z > high and slope < 0.0:
        r = high / slope
    elif z < low and slope > 0.0:
        r = low / slope
    else:
        return np.inf, 0.0
    return (r, abs(slope) * cos_el) if r <= leave else (np.inf, 0.0)


@kernel
def _meet_ellipsoid(s, dx, dy, slope, cos_el, depth):
    """Return range along the plane and cosine of incidence; leaves let a ray in by ``depth``."""
    ox = -(s[0] * s[3] + s[1] * s[4]) / s[5]
    oy = -(s[1] * s[3] - s[0] * s[4]) / s[6]
    oz = -s[2] / s[7]
    ux = (dx * s[3] + dy * s[4]) / s[5]
    uy = (dy * s[3] - dx * s[4]) / s[6]
    uz = slope / s[7]
    a = ux * ux + uy * uy + uz * uz
    b = ox * ux + oy * uy + oz * uz
    root = b * b - a * (ox * ox + oy * oy + oz * oz - 1.0)
    if root <= 0.0:
        return np.inf, 0.0
    root = math.sqrt(root)
    enter = (-b - root) / a
    if enter <= 0.0:
        return np.inf, 0.0
    if s[8] > 0.0:
        r = enter + depth * s[8] * cos_el
        return (r, LEAF_COS_INCIDENCE) if r < (-b + root) / a else (np.inf, 0.0)
    nx = (ox + enter * ux) / s[5]
    ny = (oy + enter * uy) / s[6]
    nz = (oz + enter * uz) / s[7]
    along = nx * ux * s[5] + ny * uy * s[6] + nz * slope
    return enter, abs(along) * cos_el / math.sqrt(nx * nx + ny * ny + nz * nz)


@kernel
def _cast_columns(begin, end, cos_az, sin_az, slopes, cos_el, starts, entries, kinds, shapes,
                  names, leaf_depth, road_z, road, max_range, ranges, solids, cosines):
    rows = len(slopes)
    best = np.empty(rows)  # metres along the plane
    for c in range(begin, end):
        dx, dy = cos_az[c], sin_az[c]
        for k in range(rows):
            best[k] = max_range * cos_el[k]
            solids[c, k] = NOTHING
            r = road_z / slopes[k] if slopes[k] < 0.0 else np.inf
            if r < best[k]:
                best[k] = r
                solids[c, k] = road
                cosines[c, k] = -slopes[k] * cos_el[k]
        for e in range(starts[c], starts[c + 1]):
            i = entries[e]
            s = shapes[i]
            enter, leave, cos_in = _footprint(kinds[i], s, dx, dy)
            if enter > leave or leave <= 0.0:
                continue
            if kinds[i] == CYLINDER:
                cos_in *= s[5]
            enter_or_0 = max(enter, 0.0)
            low, high = s[2] - s[7], s[2] + s[7]
            steepest = high / max(enter, 1e-9) if high > 0.0 else high / leave
            lowest = low / max(enter, 1e-9) if low < 0.0 else low / leave
            for k in range(rows):
                slope = slopes[k]
                if slope > steepest:
                    continue
                if slope < lowest:
                    break
                if enter_or_0 >= best[k]:
                    continue
                if kinds[i] == BOX or kinds[i] == CYLINDER:
                    r, cos_k = _meet_upright(enter, leave, cos_in, low, high, slope, cos_el[k])
                else:
                    r, cos_k = _meet_ellipsoid(s, dx, dy, slope, cos_el[k], leaf_depth[c, k])
                if r < best[k]:
                    best[k] = r
                    solids[c, k] = names[i]
                    cosines[c, k] = cos_k
        for k in range(rows):
            if solids[c, k] == NOTHING:
                ranges[c, k] = np.inf
                cosines[c, k] = 0.0
            else:
                ranges[c, k] = best[k] / cos_el[k]


@kernel
def _receive(ranges, solids, cosines, cos_az, sin_az, slopes, cos_el, reflectance, object_ids,
             noise, luck, least_signal, fade, lost, range_noise, mount, points, ids):
    """Add noise, drop what is too weak, write points and (channel, column, object); return n."""
    n = 0
    columns, rows = ranges.shape
    for c in range(columns):
        for k in range(rows):
            i = solids[c, k]
            if i == NOTHING or luck[c, k] < lost:
                continue
            r = ranges[c, k]
            gain = math.exp(fade * noise[0, c, k])
            if reflectance[i] * cosines[c, k] / (r * r) * gain < least_signal:
                continue
            r += range_noise * noise[1, c, k]
            flat = r * cos_el[k]
            points[n, 0] = flat * cos_az[c] + mount[0]
            points[n, 1] = flat * sin_az[c] + mount[1]
            points[n, 2] = flat * slopes[k] + mount[2]
            bright = reflectance[i] * (0.3 + 0.7 * cosines[c, k]) * (0.8 + 0.2 * min(gain, 2.0))
            points[n, 3] = min(math.floor(255.0 * bright), 255.0)
            ids[0, n] = k
            ids[1, n] = c
            ids[2, n] = object_ids[i]
            n += 1
    return n
