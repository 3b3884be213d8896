# SPDX-License-Identifier: Apache-2.0
"""The simulated street, its lidar, and what is said to be true of them."""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
import pytest

from tt_perception.runtime.errors import ArtifactError, ConfigError, InputError
from tt_perception.sim.bag import CLOUD_TOPIC, read_truth, truth_path, write_bag
from tt_perception.sim.drive import Drive, TrueObjects, count_points
from tt_perception.sim.lidar import LIDARS, NOTHING, Lidar, Scanner, in_sensor_frame
from tt_perception.sim.world import BOX, CYLINDER, ELLIPSOID, PRIMITIVE, World

SMALL = Lidar('small', tuple(np.linspace(12.0, -26.0, 13)), 180, 60.0)
SEED = 5


# A second, independent way to cast a ray: every ray at every solid, in three dimensions.

def rays_of(lidar: Lidar) -> np.ndarray:
    """Return unit vectors, float64 [columns, rows, 3]; the sensor begins behind, clockwise."""
    azimuth = np.pi - 2 * np.pi * np.arange(lidar.num_columns)[:, None] / lidar.num_columns
    elevation = np.deg2rad(np.array(lidar.elevations_deg))[None, :]
    return np.stack(np.broadcast_arrays(np.cos(azimuth) * np.cos(elevation),
                                        np.sin(azimuth) * np.cos(elevation),
                                        np.sin(elevation)), axis=-1)


def quadric(origin, rays, a_of):
    """Return where rays enter and leave ``a(p, p) = 1``; NaN where they miss."""
    a, b, c = a_of(rays, rays), a_of(rays, origin), a_of(origin, origin) - 1
    with np.errstate(invalid='ignore'):
        root = np.sqrt(b * b - a * c)
    return (-b - root) / a, (-b + root) / a


def meet(solid, rays, depth):
    """Return distance and cosine of incidence of every ray at one solid; inf is a miss."""
    c, s = np.cos(solid['yaw']), np.sin(solid['yaw'])
    to_body = np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
    origin, rays, half = to_body @ -solid['center'], rays @ to_body.T, solid['half']
    if solid['kind'] == ELLIPSOID:
        near, far = quadric(origin, rays, lambda p, q: (p * q / half ** 2).sum(-1))
        with np.errstate(invalid='ignore'):
            missed = ~(near > 0)
        if solid['free_path'] > 0:
            near = near + depth * solid['free_path']
            return np.where(missed | ~(near < far), np.inf, near), np.full(near.shape, 0.7)
        normal = (origin + near[..., None] * rays) / half ** 2
        cosine = -(normal * rays).sum(-1) / np.linalg.norm(normal, axis=-1)
        return np.where(missed, np.inf, near), cosine
    with np.errstate(divide='ignore'):
        planes = np.stack([(-half - origin) / rays, (half - origin) / rays])
    near, far = planes.min(0), planes.max(0)  # per axis
    face = np.abs(rays)
    if solid['kind'] == CYLINDER:
        side = quadric(origin[:2], rays[..., :2], lambda p, q: (p * q).sum(-1) / half[0] ** 2)
        near = np.stack([side[0], near[..., 2]], -1)
        far = np.stack([side[1], far[..., 2]], -1)
        normal = (origin[:2] + side[0][..., None] * rays[..., :2]) / half[0]
        face = np.stack([-(normal * rays[..., :2]).sum(-1), face[..., 2]], -1)
    enter = near.max(-1)
    with np.errstate(invalid='ignore'):
        hit = (enter > 0) & (enter <= far.min(-1))
    axis = near.argmax(-1)[..., None]
    return np.where(hit, enter, np.inf), np.take_along_axis(face, axis, -1)[..., 0]


def brute_force(lidar: Lidar, solids, depth):
    """Return distances, solids and cosines as the scanner's cast does."""
    rays = rays_of(lidar)
    with np.errstate(divide='ignore'):
        road = np.where(rays[..., 2] < 0, -lidar.mount_xyz_m[2] / rays[..., 2], np.inf)
    found = [meet(solid, rays, depth) for solid in solids] + [(road, -rays[..., 2])]
    distance = np.stack([f[0] for f in found])
    nearest = distance.argmin(0)
    best = np.take_along_axis(distance, nearest[None], 0)[0]
    cosine = np.take_along_axis(np.stack([f[1] for f in found]), nearest[None], 0)[0]
    nothing = ~(best < lidar.max_range_m)
    return (np.where(nothing, np.inf, best), np.where(nothing, NOTHING, nearest),
            np.where(nothing, 0, cosine))


def random_solids(rng, count):
    solids = np.zeros(count, PRIMITIVE)
    solids['kind'] = rng.integers(0, 3, count)
    solids['center'] = rng.uniform(-25, 25, (count, 3)) * (1, 1, 0.15)
    solids['yaw'] = rng.uniform(-7, 7, count)
    solids['half'] = rng.uniform(0.1, 6, (count, 3))
    solids['half'][:, 1] = np.where(solids['kind'] == CYLINDER, solids['half'][:, 0],
                                    solids['half'][:, 1])
    leaves = (solids['kind'] == ELLIPSOID) & (rng.random(count) < 0.5)
    solids['free_path'] = np.where(leaves, rng.uniform(0.2, 3, count), 0)
    return solids


def assert_same_hits(lidar, solids, depth):
    hits = Scanner(lidar).cast(solids, depth)
    distance, solid, cosine = brute_force(lidar, solids, depth)
    np.testing.assert_array_equal(hits.solids, solid)
    np.testing.assert_allclose(hits.ranges_m, distance, rtol=1e-5)
    np.testing.assert_allclose(hits.cos_incidence, cosine, atol=1e-4)
    return hits


@pytest.mark.parametrize('seed', range(40))
def test_cast_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    solids = random_solids(rng, int(rng.integers(0, 30)))
    depth = rng.standard_exponential((SMALL.num_columns, SMALL.num_rows), np.float32)
    assert_same_hits(SMALL, solids, depth)


def test_cast_around_and_below_the_sensor():
    """A pavement under the vehicle, a bridge above, a wall behind where the columns begin."""
    solids = np.zeros(4, PRIMITIVE)
    solids['kind'] = BOX
    solids['center'] = [(0, 0, -1.85), (3, 0, 3.0), (-10, 0.3, 0), (0, 0, 0)]
    solids['half'] = [(8, 6, 0.1), (9, 7, 0.5), (0.5, 4, 3), (0.2, 0.2, 0.2)]
    hits = assert_same_hits(SMALL, solids, np.ones((180, 13), np.float32))
    assert set(np.unique(hits.solids)) >= {0, 1, 2}
    assert 3 not in hits.solids  # a ray that begins inside a solid does not see it


def test_cast_of_a_street_equals_brute_force():
    """The real street, seen with few columns."""
    drive = Drive(SEED, 1)
    lidar = dataclasses.replace(LIDARS[64], num_columns=60)
    solids = in_sensor_frame(drive.world.solids(0.0), drive.pose(0.0), lidar)
    depth = np.random.default_rng(0).standard_exponential((60, 64), np.float32)
    hits = assert_same_hits(lidar, solids, depth)
    kinds = solids['kind'][hits.solids[(hits.solids >= 0) & (hits.solids < len(solids))]]
    assert set(kinds) == {BOX, CYLINDER, ELLIPSOID}


def test_returns_thin_out_with_range_and_incidence():
    """Asphalt comes back near the sensor, and half of it at the range that the model states."""
    lidar = LIDARS[64]
    far = dataclasses.replace(lidar, elevations_deg=tuple(
        -np.rad2deg(np.arctan(lidar.mount_xyz_m[2] / np.array([10.0, 25.0, 50.0, 90.0])))[::-1]))
    returns = Scanner(far).scan(np.zeros(0, PRIMITIVE), np.eye(4), np.random.default_rng(0))
    part = np.bincount(returns.channels, minlength=4)[::-1] / lidar.num_columns
    assert part[0] > 0.98
    assert part[1] > 0.9
    assert 0.4 < part[2] < 0.6
    assert part[3] < 0.1
    near = returns.points[returns.channels == 3]
    distance = np.linalg.norm(near[:, :3] - lidar.mount_xyz_m, axis=1)
    assert abs(distance.mean() - np.hypot(10, lidar.mount_xyz_m[2])) < 0.005
    assert 0.8 * lidar.range_noise_m < distance.std() < 1.2 * lidar.range_noise_m


@pytest.fixture(scope='module')
def drive():
    return Drive(SEED, 3)


@pytest.fixture(scope='module')
def sweeps(drive):
    return list(drive)


def in_map(sweep):
    T = sweep.T_map_from_base
    return sweep.points[:, :3].astype(np.float64) @ T[:3, :3].T + T[:3, 3]


def inside(points, box, margin=0.0):
    c, s = np.cos(box[6]), np.sin(box[6])
    body = (points[:, :3] - box[:3]) @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
    return (np.abs(body) <= np.array(box[3:6]) / 2 + margin).all(axis=1)


def test_a_sweep_looks_like_one(sweeps):
    sweep = sweeps[0]
    assert sweep.points.dtype == np.float32 and sweep.points.shape[1] == 4
    assert len(sweep.channels) == len(sweep.object_ids) == len(sweep.points) > 80_000
    assert np.isfinite(sweep.points).all()
    assert sweep.channels.max() == 63 and (np.bincount(sweep.channels) > 0).all()
    intensity = sweep.points[:, 3]
    assert (intensity == np.floor(intensity)).all()
    assert intensity.min() >= 0 and intensity.max() <= 255
    # in firing order: azimuths fall from behind, once around
    offset = sweep.points[:, :2] - np.array(sweep.lidar.mount_xyz_m[:2], np.float32)
    turned = (np.pi - np.arctan2(offset[:, 1], offset[:, 0]) + 0.001) % (2 * np.pi)
    assert (np.diff(turned) > -1e-3).all()


def test_seed_decides_everything(sweeps):
    again = Drive(SEED, 3)[2]  # and not what was taken before
    np.testing.assert_array_equal(again.points, sweeps[2].points)
    np.testing.assert_array_equal(again.object_ids, sweeps[2].object_ids)
    np.testing.assert_array_equal(again.T_map_from_base, sweeps[2].T_map_from_base)
    assert again.truth.to_dicts() == sweeps[2].truth.to_dicts()
    other = Drive(SEED + 1, 3)[2]
    assert other.points.shape != again.points.shape
    assert not np.array_equal(sweeps[0].points[:1000], sweeps[1].points[:1000])


def test_longer_drives_and_other_lidars_see_the_same_street(sweeps):
    longer = Drive(SEED, 40, lidar=LIDARS[32])[1]
    assert longer.channels.max() == 31
    np.testing.assert_allclose(longer.T_map_from_base, sweeps[1].T_map_from_base)
    boxes = {tuple(np.round(box, 6)) for box in sweeps[1].truth.boxes_in_map}
    same = [tuple(np.round(box, 6)) in boxes for box in longer.truth.boxes_in_map]
    assert len(same) > 50 and all(same)


@pytest.mark.parametrize('seed', range(6))
def test_points_of_an_object_lie_in_its_box(seed):
    sweep = Drive(seed, 1)[0]
    hit = 0
    for number, box in zip(sweep.truth.object_ids, sweep.truth.boxes_xyzlwh_yaw,
                           strict=True):
        own = sweep.points[sweep.object_ids == number]
        # five sigma; an end-on ray may carry it all along one axis
        assert inside(own, box, 0.1).all()
        hit += len(own) > 0
    assert hit > 20
    assert set(np.unique(sweep.object_ids)) - {-1} <= set(sweep.truth.object_ids)


def test_counts_are_the_points_inside(sweeps):
    sweep = sweeps[0]
    points = sweep.points[:, :3].astype(np.float64)
    for box, count in zip(sweep.truth.boxes_xyzlwh_yaw, sweep.truth.num_points, strict=True):
        near = points[(np.abs(points - box[:3]) < 20).all(axis=1)]  # only to save time
        assert inside(near, box, -1e-6).sum() <= count <= inside(near, box, 1e-6).sum()
    assert (sweep.truth.num_points > 0).sum() > 30


def test_count_points_of_awkward_input():
    boxes = np.array([[-0.5, 0, 0, 1, 1, 1, 0], [0, 0, 0, 40, 0.2, 1, 1.57],
                      [9, 9, 9, 1, 1, 1, 0]])
    points = np.array([[-1.0, 0.5, 0.5], [0.0, 0.0, 0.0], [0, 19.9, 0], [-3e4, 0, 0]], np.float32)
    np.testing.assert_array_equal(count_points(points, boxes), [2, 2, 0])
    np.testing.assert_array_equal(count_points(points[:0], boxes), [0, 0, 0])
    assert count_points(points, boxes[:0]).shape == (0,)


def test_static_objects_stand_still_in_the_map(sweeps):
    """Walls overlap themselves over sweeps only if points and poses belong together."""
    clouds = [in_map(sweep)[sweep.object_ids == -1] for sweep in (sweeps[0], sweeps[2])]
    moved = np.linalg.norm(sweeps[2].T_map_from_base[:2, 3] - sweeps[0].T_map_from_base[:2, 3])
    assert moved > 1.0
    tall = [cloud[(cloud[:, 2] > 0.5) & (cloud[:, 2] < 2.5)] for cloud in clouds]
    cells = [{tuple(c) for c in np.floor(cloud[:, :2] / 0.25).astype(int)} for cloud in tall]
    near = {(x + i, y + j) for x, y in cells[0] for i in (-1, 0, 1) for j in (-1, 0, 1)}
    overlap = np.mean([cell in near for cell in cells[1]])
    assert overlap > 0.8
    shifted = {(x + 3, y + 3) for x, y in cells[1]}  # by a metre: the number means something
    assert np.mean([cell in near for cell in shifted]) < overlap - 0.2


def test_moving_objects_move_by_velocity_times_time(sweeps):
    first, last = sweeps[0], sweeps[2]
    seconds = (last.stamp_ns - first.stamp_ns) * 1e-9
    assert seconds == pytest.approx(0.2)
    before = {number: i for i, number in enumerate(first.truth.object_ids)}
    moving = standing = 0
    for j, number in enumerate(last.truth.object_ids):
        if number not in before:
            continue
        i = before[number]
        way = last.truth.boxes_in_map[j, :2] - first.truth.boxes_in_map[i, :2]
        # the velocity is given along the axes of base_link, over ground
        R = first.T_map_from_base[:2, :2]
        np.testing.assert_allclose(way, R @ first.truth.velocities_xy[i] * seconds, atol=1e-9)
        np.testing.assert_allclose(last.truth.boxes_in_map[j, 2:],
                                   first.truth.boxes_in_map[i, 2:], atol=1e-9)
        moving += np.linalg.norm(way) > 0.1
        standing += np.linalg.norm(way) == 0
    assert moving > 20 and standing > 20


def test_boxes_in_both_frames_are_the_same_boxes(sweeps):
    sweep = sweeps[1]
    T = sweep.T_map_from_base
    np.testing.assert_allclose(T[:3, :3] @ T[:3, :3].T, np.eye(3), atol=1e-12)
    truth = sweep.truth
    centers = truth.boxes_xyzlwh_yaw[:, :3] @ T[:3, :3].T + T[:3, 3]
    np.testing.assert_allclose(centers, truth.boxes_in_map[:, :3], atol=1e-6)
    heading = np.arctan2(T[1, 0], T[0, 0])
    turned = truth.boxes_xyzlwh_yaw[:, 6] + heading - truth.boxes_in_map[:, 6]
    np.testing.assert_allclose(np.exp(1j * turned), 1, atol=1e-9)
    assert np.abs(truth.boxes_in_map[:, :2]).max() > 300  # map coordinates are not small


@pytest.mark.parametrize('seed', range(8))
def test_the_street_is_plausible(seed):
    world = World(seed)
    names = np.array(world.class_names)
    assert {'CAR', 'BICYCLE', 'PEDESTRIAN'} <= set(names)
    limits = {'CAR': ((3.5, 5.3), (1.6, 2.1), (1.3, 2.1)),
              'TRUCK': ((6, 11), (2.2, 2.7), (2.8, 4)),
              'BUS': ((10, 13), (2.5, 2.7), (2.9, 3.5)),
              'BICYCLE': ((1.6, 2), (0.5, 0.9), (1.5, 2)),
              'PEDESTRIAN': ((0.3, 1), (0.4, 0.9), (1.4, 2.1))}
    for name, size in zip(names, world.sizes_lwh, strict=True):
        assert all(low <= v <= high for v, (low, high) in zip(size, limits[name],
                                                              strict=True))
    boxes = world.boxes(0.0)
    apart = boxes[:, None, :2] - boxes[None, :, :2]
    apart = np.linalg.norm(apart, axis=-1) + np.eye(len(boxes)) * 99
    vehicles = np.isin(names, ('CAR', 'TRUCK', 'BUS'))
    assert apart[np.ix_(vehicles, vehicles)].min() > 1.7  # nobody stands inside another
    ego = world.map_pose(*world.ego_start_xy, 0.0)[:2, 3]
    assert np.linalg.norm(boxes[vehicles, :2] - ego, axis=1).min() > 2.0


def test_all_classes_occur():
    assert {name for seed in range(4) for name in World(seed).class_names} == {
        'CAR', 'TRUCK', 'BUS', 'BICYCLE', 'PEDESTRIAN'}


@pytest.mark.parametrize('call, word', [
    (lambda: Drive(-1, 1), 'seed'),
    (lambda: Drive(0, 0), 'num_sweeps'),
    (lambda: Drive(0, 2, lidar=[SMALL]), 'lidar'),
    (lambda: Drive(0, 1, rate_hz=0.0), 'rate_hz'),
    (lambda: Drive(0, 100_000), 'duration_s'),
])
def test_numbers_out_of_range_are_refused_by_name(call, word):
    with pytest.raises(ConfigError, match=word):
        call()


def test_truth_survives_json(sweeps):
    truth = sweeps[0].truth
    again = TrueObjects.from_dicts(json.loads(json.dumps(truth.to_dicts())))
    np.testing.assert_allclose(again.boxes_xyzlwh_yaw, truth.boxes_xyzlwh_yaw, atol=1e-6)
    np.testing.assert_array_equal(again.num_points, truth.num_points)
    assert again.class_names == truth.class_names
    assert len(TrueObjects.from_dicts([])) == 0


def test_fast_enough_to_be_of_use(drive):
    """Loose on purpose: a busy machine must not fail it, a loop over rays in Python must."""
    drive[0]
    times = []
    for i in range(3):
        begin = time.perf_counter()
        drive[i]
        times.append(time.perf_counter() - begin)
    assert min(times) < 1.0


def test_bag_is_a_recording_of_the_drive(tmp_path):
    """Read back with another package's reader, message by message."""
    pytest.importorskip('rosbags', reason='rosbags writes and reads the bag')
    from rosbags.rosbag2 import Reader
    from rosbags.typesys import Stores, get_typestore
    drive = Drive(SEED, 3, lidar=[LIDARS[64], LIDARS[32], LIDARS[32]])
    path = tmp_path / 'out' / 'drive'
    assert write_bag(path, drive) == truth_path(path)
    store = get_typestore(Stores.ROS2_JAZZY)
    poses, clouds, recorded = {}, [], []
    with Reader(path) as reader:
        assert {c.topic for c in reader.connections} == {CLOUD_TOPIC, '/tf', '/tf_static'}
        for connection, recorded_ns, raw in reader.messages():
            recorded.append(recorded_ns)
            message = store.deserialize_cdr(raw, connection.msgtype)
            if connection.topic == CLOUD_TOPIC:
                clouds.append((recorded_ns, message))
            elif connection.topic == '/tf':
                edge, = message.transforms
                assert (edge.header.frame_id, edge.child_frame_id) == ('map', 'base_link')
                stamp = edge.header.stamp.sec * 10**9 + edge.header.stamp.nanosec
                poses[stamp] = recorded_ns, edge.transform
            else:
                assert message.transforms[0].child_frame_id == 'lidar_top'
                assert message.transforms[0].transform.translation.z == 1.9
    assert recorded == sorted(recorded)
    stamps = sorted(poses)
    assert max(np.diff(stamps)) <= 20_000_000 and min(np.diff(stamps)) > 0
    assert stamps[0] <= drive.start_ns - 10**8 and stamps[-1] >= drive.start_ns + 3 * 10**8
    truth = read_truth(truth_path(path))
    assert len(clouds) == 3
    for i, (recorded_ns, cloud) in enumerate(clouds):
        sweep = drive[i]
        assert cloud.header.frame_id == 'base_link'
        assert cloud.header.stamp.sec * 10**9 + cloud.header.stamp.nanosec == sweep.stamp_ns
        assert [(f.name, f.offset, f.datatype, f.count) for f in cloud.fields] == [
            ('x', 0, 7, 1), ('y', 4, 7, 1), ('z', 8, 7, 1), ('intensity', 12, 2, 1),
            ('return_type', 13, 2, 1), ('channel', 14, 4, 1)]
        assert (cloud.height, cloud.width, cloud.point_step) == (1, len(sweep.points), 16)
        assert len(cloud.data) == cloud.row_step == 16 * cloud.width
        xyz = np.frombuffer(cloud.data.tobytes(), np.float32).reshape(-1, 4)[:, :3]
        np.testing.assert_array_equal(xyz, sweep.points[:, :3])
        rest = np.frombuffer(cloud.data.tobytes(), np.uint8).reshape(-1, 16)
        np.testing.assert_array_equal(rest[:, 12], sweep.points[:, 3])
        np.testing.assert_array_equal(rest[:, 14:].copy().view('<u2')[:, 0], sweep.channels)
        # the transform at exactly this stamp is there, is right, and was there before the cloud
        tf_recorded_ns, tf = poses[sweep.stamp_ns]
        assert tf_recorded_ns < recorded_ns
        q = tf.rotation
        turned = [1 - 2 * q.z ** 2, 2 * q.z * q.w]
        np.testing.assert_allclose(turned, sweep.T_map_from_base[:2, 0], atol=1e-12)
        np.testing.assert_allclose([tf.translation.x, tf.translation.y, tf.translation.z],
                                   sweep.T_map_from_base[:3, 3], atol=1e-9)
        np.testing.assert_array_equal(truth[sweep.stamp_ns].num_points, sweep.truth.num_points)
    with pytest.raises(InputError, match='exists'):
        write_bag(path, drive)


@pytest.mark.parametrize('content', [b'', b'[]', b'{"sweeps": [{}]}', b'\xff\xfe', None])
def test_what_is_no_truth_is_refused(tmp_path, content):
    path = tmp_path / 'x_truth.json'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArtifactError, match='x_truth.json'):
        read_truth(path)
