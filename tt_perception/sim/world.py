# SPDX-License-Identifier: Apache-2.0
"""A street, made up from a seed: scenery that stands, and actors that stand or move.

The *street frame* has x along the street, y to the left, z up, and z = 0 on the road. The *map
frame*, in which everything is given out, is the street frame turned by a seeded heading and moved
to seeded coordinates of some kilometres, as maps have them. Traffic keeps to the right.

Everything solid is made of boxes that stand upright, vertical cylinders and ellipsoids, so that a
ray can be cast at it exactly. An actor is a few of these with one true box around them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tt_perception.runtime.errors import ConfigError

BOX, CYLINDER, ELLIPSOID = 0, 1, 2
SCENERY = -1  # object id of what is no actor

# One solid. ``half``: half the edges of a box; radius twice, half the height of a cylinder; half
# the axes of an ellipsoid. ``free_path``: mean way of a ray through leaves (m), 0 for a solid
# body; ellipsoids only.
PRIMITIVE = np.dtype([('kind', np.uint8), ('center', np.float64, 3), ('yaw', np.float64),
                      ('half', np.float64, 3), ('reflectance', np.float64),
                      ('free_path', np.float64), ('object_id', np.int32)])

CLASS_NAMES = ('CAR', 'TRUCK', 'BUS', 'BICYCLE', 'PEDESTRIAN')

# Cross-section of the street (m), from its middle to one side.
LANE_WIDTH = 3.4
CYCLE_STRIP = 1.7
PARKING_STRIP = 2.3
PAVEMENT = 4.5
KERB_HEIGHT = 0.13

BOX_MARGIN = 0.04  # between a body and its true box, as much as keeps the noise of a lidar inside

SIDE_STREET_HALF_WIDTH = 5.5
SIDE_STREET_LENGTH = 90.0
LEAD_IN = 150.0  # street behind and ahead of the ego vehicle (m)
CLEAR_AROUND_EGO = 11.0  # no vehicle's centre in the ego lane within this distance (m)

ASPHALT_REFLECTANCE = 0.13
PAVEMENT_REFLECTANCE = 0.28
LEAF_REFLECTANCE = 0.35


def _solids(rows: list[tuple]) -> np.ndarray:
    """Return PRIMITIVE [m] from rows ``(kind, center, yaw, half, reflectance, free_path)``."""
    out = np.zeros(len(rows), PRIMITIVE)
    for i, (kind, center, yaw, half, reflectance, free_path) in enumerate(rows):
        out[i] = (kind, center, yaw, half, reflectance, free_path, SCENERY)
    return out


def _box(center, size, reflectance, yaw=0.0):
    return BOX, center, yaw, tuple(s / 2 for s in size), reflectance, 0.0


def _post(x, y, z, radius, height, reflectance):
    """Return a cylinder that stands on z."""
    return CYLINDER, (x, y, z + height / 2), 0.0, (radius, radius, height / 2), reflectance, 0.0


def _blob(center, size, reflectance, yaw=0.0, free_path=0.0):
    return ELLIPSOID, center, yaw, tuple(s / 2 for s in size), reflectance, free_path


def _wheels(length, width, radius, thickness, reflectance, axles):
    return [_box((axle * length, side * (width - thickness) / 2, radius),
                 (2 * radius, thickness, 2 * radius), reflectance)
            for axle in axles for side in (-1, 1)]


def _car(rng):
    """Return the size and solids of a saloon, hatchback or van; x forward, z = 0 on the road."""
    paint = rng.uniform(0.1, 0.7)
    shape = rng.choice(3, p=(0.4, 0.4, 0.2))
    length = (rng.uniform(4.3, 4.9), rng.uniform(3.7, 4.4), rng.uniform(4.5, 5.1))[shape]
    width = rng.uniform(1.7, 1.95)
    height = (rng.uniform(1.4, 1.5), rng.uniform(1.45, 1.7), rng.uniform(1.8, 2.0))[shape]
    # rear end and front end of the cabin, as parts of the length from the centre
    rear, front = ((-0.36, 0.16), (-0.47, 0.18), (-0.5, 0.3))[shape]
    waist = (0.62, 0.6, 0.55)[shape] * height
    cabin = (front - rear) * length
    middle = (front + rear) / 2 * length
    bars = [_box((0, 0, (0.2 + waist) / 2), (length, width, waist - 0.2), paint)]
    for k in range(2):  # two steps stand for sloping windows
        low = waist + (height - waist) * k / 2
        high = waist + (height - waist) * (k + 1) / 2
        bars.append(_box((middle - 0.02 * length * k, 0, (low + high) / 2),
                         (cabin * (1 - 0.14 * k), width * (0.92 - 0.07 * k), high - low),
                         (0.08, paint)[k]))
    wheels = _wheels(length, width, 0.31, 0.2, 0.06, (-0.3, 0.31))
    return (length, width, height), bars + wheels


def _truck(rng):
    length, width = rng.uniform(6.5, 10.5), rng.uniform(2.3, 2.55)
    height = rng.uniform(2.9, 3.7)
    paint, cargo = rng.uniform(0.2, 0.7, 2)
    cab = 1.9
    load = length - cab - 0.4
    return (length, width, height), [
        _box(((length - cab) / 2, 0, (0.45 + height * 0.82) / 2),
             (cab, width * 0.96, height * 0.82 - 0.45), paint),
        _box((-(length - load) / 2, 0, (1.0 + height) / 2), (load, width, height - 1.0), cargo),
        _box((0, 0, 0.8), (length, 0.9, 0.4), 0.1),
        *_wheels(length, width, 0.48, 0.3, 0.06, (-0.36, -0.24, 0.36)),
    ]


def _bus(rng):
    length, width, height = rng.uniform(10.8, 12.4), 2.55, rng.uniform(3.0, 3.3)
    paint = rng.uniform(0.3, 0.7)
    return (length, width, height), [
        _box((0, 0, 0.75), (length, width, 0.9), paint),
        _box((0, 0, 1.7), (length - 0.1, width - 0.06, 1.0), 0.09),
        _box((0, 0, (2.2 + height) / 2), (length, width, height - 2.2), paint),
        *_wheels(length, width, 0.48, 0.3, 0.06, (-0.28, 0.3)),
    ]


def _rider(rng):
    """Return a bicycle with its rider."""
    length, width, height = rng.uniform(1.7, 1.85), 0.62, rng.uniform(1.65, 1.85)
    cloth = rng.uniform(0.1, 0.8)
    wheel = 0.34
    return (length, width, height), [
        *[_box((s * (length / 2 - wheel), 0, wheel), (2 * wheel, 0.05, 1.6 * wheel), 0.1)
          for s in (-1, 1)],
        _box((0, 0, 0.7), (0.9, 0.06, 0.12), 0.3),
        _box((length * 0.25, 0, 1.0), (0.06, width * 0.9, 0.06), 0.2),
        _blob((-0.12, 0.09, 0.68), (0.3, 0.16, 0.75), cloth),
        _blob((0.04, -0.09, 0.72), (0.3, 0.16, 0.7), cloth),
        _blob((0.0, 0, height - 0.53), (0.46, 0.44, 0.66), cloth),
        _blob((0.1, 0, height - 0.13), (0.25, 0.2, 0.26), 0.4),
    ]


def _walker(rng, standing=False):
    height = rng.uniform(1.5, 1.92)
    length, width = (0.42 if standing else rng.uniform(0.5, 0.75)), rng.uniform(0.5, 0.64)
    cloth, trousers = rng.uniform(0.1, 0.8, 2)
    step = length / 2 - 0.15
    hip, neck = 0.5 * height, 0.86 * height
    return (length, width, height), [
        _blob((step, 0.1, 0.56 * hip), (0.22, 0.18, 1.12 * hip), trousers),
        _blob((-step, -0.1, 0.58 * hip), (0.22, 0.18, 1.08 * hip), trousers),
        _blob((0, 0, (hip + neck) / 2), (0.28, 0.44, (neck - hip) * 1.25), cloth),
        _blob((0.02, 0, height - 0.13), (0.22, 0.18, 0.26), 0.4),
        _blob((step * 0.6, 0.5 * width - 0.06, 0.62 * height), (0.2, 0.12, 0.55), cloth),
        _blob((-step * 0.6, 0.06 - 0.5 * width, 0.62 * height), (0.2, 0.12, 0.55), cloth),
    ]


_MAKERS = {'CAR': _car, 'TRUCK': _truck, 'BUS': _bus, 'BICYCLE': _rider, 'PEDESTRIAN': _walker}


@dataclass(frozen=True)
class Actor:
    """One road user; ``xyz_m`` is the middle of its footprint at time 0, in the street frame."""

    class_name: str
    size_lwh_m: tuple[float, float, float]
    solids: np.ndarray
    xyz_m: tuple[float, float, float]
    yaw: float
    speed_mps: float


def turn(xy: np.ndarray, yaw) -> np.ndarray:
    """Return points ``xy`` [..., 2] turned counter-clockwise by ``yaw`` (rad)."""
    c, s = np.cos(yaw), np.sin(yaw)
    return np.stack([c * xy[..., 0] - s * xy[..., 1], s * xy[..., 0] + c * xy[..., 1]], -1)


class World:
    """A street for a drive of ``duration_s``; the same seed gives the same street.

    A longer drive gets a longer street, and finds what a shorter one has in the same places.

    :ivar half_road_m: from the middle of the road to its kerb.
    :ivar ego_speed_mps: speed of the ego lane's traffic, and of the ego vehicle.
    :ivar ego_start_xy: of the ego vehicle at time 0, street frame.
    :ivar class_names: of the actors, one each.
    :ivar sizes_lwh: float64 [k, 3].
    """

    def __init__(self, seed: int, duration_s: float = 2.0):
        if seed < 0:
            raise ConfigError(f'seed: found {seed}, expected at least 0')
        if not 0 <= duration_s <= 600:
            raise ConfigError(f'duration_s: found {duration_s:g}, expected 0 to 600')
        self._seed = seed
        rng = self._rng(0)
        self._origin_xy = rng.uniform(-8_000, 8_000, 2)
        self._heading = rng.uniform(-math.pi, math.pi)
        self._block_m = rng.uniform(85, 115)
        self.num_lanes = int(rng.integers(1, 3))
        self.half_road_m = self.num_lanes * LANE_WIDTH + CYCLE_STRIP + PARKING_STRIP
        self.ego_speed_mps = rng.uniform(7, 13)
        # speed of each lane, of traffic along +x and -x; the ego vehicle is in the outermost
        self._lane_speeds = rng.uniform(7, 15, (2, self.num_lanes))
        self._lane_speeds[0, -1] = self.ego_speed_mps
        # one pace for all who share a line, so that nobody runs into anybody
        self._cycle_speeds = rng.uniform(3.5, 6.0, 2)
        self._walk_speeds = rng.uniform(0.8, 1.7, (2, 2))
        self.ego_start_xy = (rng.uniform(0.3, 0.5) * self._block_m,
                             -(self.num_lanes - 0.5) * LANE_WIDTH)

        scenery: list[tuple] = []
        actors: list[Actor] = []
        for k in self._blocks(duration_s):
            scenery += self._block_scenery(k)
            actors += self._block_actors(k)
        self.actors = tuple(a for a in actors if not self._in_the_way(a))
        self.class_names = tuple(a.class_name for a in self.actors)
        self.sizes_lwh = np.array([a.size_lwh_m for a in self.actors])
        self._start = np.array([a.xyz_m for a in self.actors])
        self._yaw = np.array([a.yaw for a in self.actors])
        self._speed = np.array([a.speed_mps for a in self.actors])
        self._scenery = self._to_map(_solids(scenery))
        self._parts = np.concatenate([a.solids for a in self.actors])
        self._parts['object_id'] = np.repeat(np.arange(len(self.actors)),
                                             [len(a.solids) for a in self.actors])

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *key])

    def _blocks(self, duration_s: float) -> range:
        """Return the numbers of the blocks that the drive, or traffic seen on it, comes from."""
        reach = LEAD_IN + self._lane_speeds.max() * duration_s
        first = self.ego_start_xy[0] - reach
        last = self.ego_start_xy[0] + reach + self.ego_speed_mps * duration_s
        return range(math.floor(first / self._block_m), math.floor(last / self._block_m) + 1)

    def _in_the_way(self, actor: Actor) -> bool:
        x, y = self.ego_start_xy
        return (abs(actor.xyz_m[1] - y) < LANE_WIDTH / 2 and actor.speed_mps > 0
                and abs(actor.xyz_m[0] - x) < CLEAR_AROUND_EGO)

    # What stands still.

    def _block_scenery(self, k: int) -> list[tuple]:
        rng = self._rng(1, k + 100_000)
        start = k * self._block_m
        begin = start + SIDE_STREET_HALF_WIDTH
        end = start + self._block_m - SIDE_STREET_HALF_WIDTH
        rows: list[tuple] = []
        for side in (-1, 1):
            rows += self._frontage(rng, begin, end, side)
            rows += self._street_furniture(rng, begin, end, side)
            rows += self._side_street(rng, start, side)
        return rows

    def _frontage(self, rng, begin: float, end: float, side: int) -> list[tuple]:
        """Return the pavement of one side of a block, its houses, and walls or bushes between."""
        kerb, line = self.half_road_m, self.half_road_m + PAVEMENT
        depth = 18.0
        rows = [_box(((begin + end) / 2, side * (kerb + (PAVEMENT + depth) / 2), -0.5),
                     (end - begin, PAVEMENT + depth, 1.0 + 2 * KERB_HEIGHT),
                     PAVEMENT_REFLECTANCE)]
        x = begin + rng.uniform(1.0, 3.0)
        while x < end - 8:
            width = min(rng.uniform(9, 22), end - 1 - x)
            back = rng.uniform(0, 2.5)
            height, deep = rng.uniform(5, 19), rng.uniform(9, 14)
            bright = rng.uniform(0.2, 0.7)
            rows.append(_box((x + width / 2, side * (line + back + deep / 2), height / 2),
                             (width, deep, height), bright))
            if rng.random() < 0.4:  # a porch or a bay
                rows.append(_box((x + width * rng.uniform(0.25, 0.75), side * (line + back),
                                  1.5), (rng.uniform(1.5, 3), 1.2, 3.0), bright))
            x += width
            gap = rng.choice((0.0, rng.uniform(2.5, 9.0)), p=(0.45, 0.55))
            if gap and x + gap < end:
                rows += self._between_houses(rng, x, gap, side * line)
            x += gap
        return rows

    @staticmethod
    def _between_houses(rng, x: float, gap: float, line: float) -> list[tuple]:
        if rng.random() < 0.5:
            height = rng.uniform(0.9, 2.0)
            return [_box((x + gap / 2, line, KERB_HEIGHT + height / 2), (gap, 0.25, height), 0.4)]
        return [_blob((x + (i + 0.5) * 1.3, line + rng.uniform(-0.2, 0.2), 0.75),
                      (1.6, 1.5, 1.5), LEAF_REFLECTANCE, free_path=0.25)
                for i in range(int(gap / 1.3))]

    def _street_furniture(self, rng, begin: float, end: float, side: int) -> list[tuple]:
        """Return lamps, trees, signs, bins, cabinets and bollards along one kerb."""
        y = side * (self.half_road_m + 0.55)
        rows = []
        trees = rng.random() < 0.7
        x = begin + rng.uniform(2, 6)
        while x < end - 2:
            what = rng.random()
            if what < 0.2:
                rows.append(_post(x, y, KERB_HEIGHT, 0.09, rng.uniform(6, 9), 0.45))
            elif what < 0.6 and trees:
                rows += self._tree(rng, x, y)
            elif what < 0.72:
                rows += [_post(x, y, KERB_HEIGHT, 0.04, 2.8, 0.4),
                         _box((x, y, 2.6), (0.04, 0.65, 0.65), 1.5)]
            elif what < 0.82:
                rows.append(_post(x, y, KERB_HEIGHT, 0.25, 0.95, 0.3))
            elif what < 0.9:
                rows.append(_box((x, y, 0.75), (0.9, 0.4, 1.25), 0.35))
            else:
                rows += [_post(x + 1.2 * i, y, KERB_HEIGHT, 0.08, 0.9, 0.4) for i in range(3)]
            x += rng.uniform(6, 11)
        return rows

    @staticmethod
    def _tree(rng, x: float, y: float) -> list[tuple]:
        trunk, crown = rng.uniform(2.2, 3.2), rng.uniform(2.8, 4.6)
        rows = [_post(x, y, KERB_HEIGHT, rng.uniform(0.1, 0.2), trunk + crown / 3, 0.25)]
        for i in range(2):
            shift = rng.uniform(-0.5, 0.5, 2)
            rows.append(_blob((x + shift[0], y + shift[1], trunk + crown * (0.4 + 0.3 * i)),
                              (crown, crown * rng.uniform(0.8, 1.1), crown * 0.85),
                              LEAF_REFLECTANCE, free_path=rng.uniform(0.4, 0.9)))
        return rows

    def _side_street(self, rng, x: float, side: int) -> list[tuple]:
        """Return what lines the side street at x, behind the houses of the main street."""
        rows = []
        for bank in (-1, 1):
            y = self.half_road_m + PAVEMENT + 18.0
            while y < SIDE_STREET_LENGTH:
                deep, wide, height = rng.uniform(10, 22), 12.0, rng.uniform(5, 14)
                edge = SIDE_STREET_HALF_WIDTH + rng.uniform(2.0, 4.0)
                rows.append(_box((x + bank * (edge + wide / 2), side * (y + deep / 2),
                                  height / 2), (wide, deep, height), rng.uniform(0.2, 0.7)))
                y += deep + rng.choice((0.0, rng.uniform(2, 6)))
        return rows

    # Who uses the street.

    def _block_actors(self, k: int) -> list[Actor]:
        rng = self._rng(2, k + 100_000)
        start = k * self._block_m
        actors: list[Actor] = []
        for direction, way in enumerate((1, -1)):  # traffic along +x is on the side of -y
            actors += self._traffic(rng, start, direction, way)
            actors += self._parked(rng, start, way)
            actors += self._cyclists(rng, start, direction, way)
            actors += self._walkers(rng, start, direction, way)
            actors += self._side_traffic(rng, start, way)
        return actors

    @staticmethod
    def _actor(rng, class_name: str, x, y, yaw, speed=0.0, z=0.0, **style) -> Actor:
        (length, width, height), rows = _MAKERS[class_name](rng, **style)
        size = length + 2 * BOX_MARGIN, width + 2 * BOX_MARGIN, height + BOX_MARGIN
        return Actor(class_name, size, _solids(rows), (x, y, z), yaw, speed)

    def _slots(self, rng, start: float, pitch: float, jitter: float, chance: float) -> list[float]:
        """Return places along a block, at least ``pitch - 2 * jitter`` apart, also over blocks."""
        count = int(self._block_m / pitch)
        places = start + (np.arange(count) + 0.5) * (self._block_m / count)
        places += rng.uniform(-jitter, jitter, count)
        return list(places[rng.random(count) < chance])

    def _traffic(self, rng, start: float, direction: int, way: int) -> list[Actor]:
        actors = []
        for lane in range(self.num_lanes):
            for x in self._slots(rng, start, 24.0, 5.0, 0.5):
                kind = rng.choice(('CAR', 'TRUCK', 'BUS'), p=(0.74, 0.16, 0.1))
                y = -way * ((lane + 0.5) * LANE_WIDTH + rng.uniform(-0.2, 0.2))
                actors.append(self._actor(rng, kind, x, y, 0.0 if way > 0 else math.pi,
                                          self._lane_speeds[direction, lane]))
        return actors

    def _parked(self, rng, start: float, way: int) -> list[Actor]:
        y = -way * (self.half_road_m - PARKING_STRIP / 2 - 0.05)
        begin = start + SIDE_STREET_HALF_WIDTH + 5
        count = int((self._block_m - 2 * SIDE_STREET_HALF_WIDTH - 10) / 6.2)
        taken = np.flatnonzero(rng.random(count) < 0.6)
        return [self._actor(rng, 'CAR', begin + (i + 0.5) * 6.2 + rng.uniform(-0.3, 0.3),
                            y + rng.uniform(-0.1, 0.1),
                            (0.0 if way > 0 else math.pi) + rng.normal(0, 0.025)) for i in taken]

    def _cyclists(self, rng, start: float, direction: int, way: int) -> list[Actor]:
        y = -way * (self.num_lanes * LANE_WIDTH + CYCLE_STRIP / 2)
        return [self._actor(rng, 'BICYCLE', x, y + rng.uniform(-0.3, 0.3),
                            0.0 if way > 0 else math.pi, self._cycle_speeds[direction])
                for x in self._slots(rng, start, 20.0, 7.0, 0.5)]

    def _walkers(self, rng, start: float, direction: int, way: int) -> list[Actor]:
        """Return people who walk along the pavement, alone or by twos, and some who stand."""
        actors = []
        kerb = self.half_road_m
        for row, away in enumerate((1.5, 2.9)):
            heading = 0.0 if row == direction else math.pi
            for x in self._slots(rng, start, 13.0, 4.5, 0.55):
                pair = rng.random() < 0.3
                for aside in (-0.37, 0.37) if pair else (0.0,):
                    actors.append(self._actor(
                        rng, 'PEDESTRIAN', x + rng.uniform(-0.2, 0.2),
                        -way * (kerb + away + aside), heading,
                        self._walk_speeds[direction, row], self._ground_z(x, start)))
        for x in self._slots(rng, start, 30.0, 10.0, 0.5):
            actors.append(self._actor(rng, 'PEDESTRIAN', x, -way * (kerb + 4.0),
                                      rng.uniform(-math.pi, math.pi), 0.0,
                                      self._ground_z(x, start), standing=True))
        return actors

    def _ground_z(self, x: float, start: float) -> float:
        """Return the height of the pavement at x, or of the side street that cuts through it."""
        along = (x - start) % self._block_m
        on_road = min(along, self._block_m - along) < SIDE_STREET_HALF_WIDTH
        return 0.0 if on_road else KERB_HEIGHT

    def _side_traffic(self, rng, x: float, way: int) -> list[Actor]:
        """Return vehicles that wait at the junction, and one that drives away from it."""
        side = -way
        inwards = -side * math.pi / 2
        actors = []
        front = self.half_road_m + 1.5
        for _ in range(int(rng.integers(0, 3))):
            kind = rng.choice(('CAR', 'TRUCK'), p=(0.8, 0.2))
            # the lane to the right of who faces the main street
            waiting = self._actor(rng, kind, x - side * 2.6, 0.0, inwards + rng.normal(0, 0.04))
            y = side * (front + waiting.size_lwh_m[0] / 2)
            actors.append(Actor(waiting.class_name, waiting.size_lwh_m, waiting.solids,
                                (waiting.xyz_m[0], y, 0.0), waiting.yaw, 0.0))
            front += waiting.size_lwh_m[0] + rng.uniform(1.2, 2.5)
        if rng.random() < 0.6:
            actors.append(self._actor(rng, 'CAR', x + side * 2.6,
                                      side * (self.half_road_m + rng.uniform(4, 40)),
                                      -inwards, rng.uniform(4, 9)))
        return actors

    # What is where, in the map frame.

    def map_pose(self, x: float, y: float, yaw: float) -> np.ndarray:
        """Return a pose on the road, given in the street frame, as 4x4 in the map frame."""
        pose = np.eye(4)
        angle = yaw + self._heading
        pose[:2, :2] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        pose[:2, 3] = turn(np.array([x, y]), self._heading) + self._origin_xy
        return pose

    def _to_map(self, solids: np.ndarray) -> np.ndarray:
        solids = solids.copy()
        solids['center'][:, :2] = turn(solids['center'][:, :2], self._heading) + self._origin_xy
        solids['yaw'] += self._heading
        return solids

    def _actor_centers(self, time_s: float) -> np.ndarray:
        """Return the middles of the footprints, street frame, float64 [k, 3]."""
        moved = self._start.copy()
        way = self._speed * time_s
        moved[:, 0] += way * np.cos(self._yaw)
        moved[:, 1] += way * np.sin(self._yaw)
        return moved

    def boxes(self, time_s: float) -> np.ndarray:
        """Return the true boxes, x, y, z (centre), l, w, h, yaw in the map, float64 [k, 7]."""
        center = self._actor_centers(time_s)
        center[:, 2] += self.sizes_lwh[:, 2] / 2
        center[:, :2] = turn(center[:, :2], self._heading) + self._origin_xy
        yaw = (self._yaw + self._heading + math.pi) % (2 * math.pi) - math.pi
        return np.concatenate([center, self.sizes_lwh, yaw[:, None]], axis=1)

    def velocities_xy(self) -> np.ndarray:
        """Return the velocities of the actors, m/s in the map, float64 [k, 2]."""
        ahead = np.stack([self._speed, np.zeros_like(self._speed)], 1)
        return turn(ahead, self._yaw + self._heading)

    def solids(self, time_s: float) -> np.ndarray:
        """Return everything that a ray can hit but the road, in the map, PRIMITIVE [m]."""
        parts = self._parts.copy()
        actor = parts['object_id']
        center = self._actor_centers(time_s)[actor]
        center[:, :2] += turn(parts['center'][:, :2], self._yaw[actor])
        center[:, 2] += parts['center'][:, 2]
        parts['center'] = center
        parts['yaw'] += self._yaw[actor]
        return np.concatenate([self._scenery, self._to_map(parts)])
