# SPDX-License-Identifier: Apache-2.0
"""Recordings played from a rosbag2 into the node by separate processes, at full size."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from bag_files import CLOUD, TF, transforms, write_bag
from recordings import PERMISSIVE_PCDS, argoverse_sweeps, kitti_points, nuscenes_points

from tt_perception import BEVFusion
from tt_perception.bevfusion.cloud import decode_cloud
from tt_perception.bevfusion.detections import Detections3D

pytest.importorskip('rclpy', reason='no ROS 2 here')
pytest.importorskip('autoware_perception_msgs.msg', reason='no Autoware messages here')

from rclpy.serialization import serialize_message  # noqa: E402
from ros_process import Client, Process, node_process, wait_until  # noqa: E402

from tt_perception.ros.conversions import cloud_message, stamp_to_ns, xyzirc  # noqa: E402
from tt_perception.ros.tf import TransformBuffer  # noqa: E402

CLOUD_TOPIC = '/sensing/lidar/concatenated/pointcloud'
NODE = 'tt_perception.ros.bevfusion_node:main'
LOAD_S = 120.0


@pytest.fixture(scope='module')
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def play(client: Client, bag, artifact, num_clouds: int, **parameters) -> list:
    """Play a bag into a node of its own; return its answers."""
    client.objects.clear()
    remap = ('-r', f'/bevfusion/input/pointcloud:={CLOUD_TOPIC}')
    with node_process(NODE, *remap, model_path=artifact, backend='cpu', autostart=True,
                      **parameters) as node:
        node.wait_for_output('active:', LOAD_S)
        with Process([sys.executable, '-m', 'tt_perception.cli', 'play', str(bag),
                      '--answer-topic', '/bevfusion/output/objects']) as player:
            assert player.wait(LOAD_S) == 0, player.output()
        wait_until(lambda: len(client.objects) >= num_clouds,
                   problem=lambda: f'{len(client.objects)} answers\n{node.output()}')
    return list(client.objects)


def assert_same_objects(message, detections: Detections3D) -> None:
    """Every number of the message is the API's, to the last bit."""
    assert len(message.objects) == len(detections) > 0
    for i, found in enumerate(message.objects):
        pose = found.kinematics.pose_with_covariance.pose
        size = found.shape.dimensions
        box = detections.boxes_xyzlwh_yaw[i].astype(np.float64)
        assert [pose.position.x, pose.position.y, pose.position.z] == box[:3].tolist()
        assert [size.x, size.y, size.z] == box[3:6].tolist()
        assert (pose.orientation.z, pose.orientation.w) == pytest.approx(
            (np.sin(box[6] / 2), np.cos(box[6] / 2)), abs=1e-15)
        assert found.existence_probability == detections.scores[i]
        assert found.classification[0].label == detections.labels[i]
        assert found.kinematics.orientation_availability == detections.orientation_availability[i]


def test_two_argoverse_sweeps_over_dds_equal_the_api_to_the_last_bit(
        client, data_dir, full_artifact, tmp_path):
    sweeps = argoverse_sweeps(data_dir)
    messages = []
    for sweep in sweeps:
        messages.append(('/tf', TF, sweep.stamp_ns, transforms(
            (sweep.stamp_ns, 'map', 'base_link', sweep.translation_m, sweep.quaternion_xyzw))))
        cloud = cloud_message(xyzirc(sweep.points, sweep.intensity, sweep.channel),
                              frame_id='base_link', stamp_ns=sweep.stamp_ns)
        messages.append((CLOUD_TOPIC, CLOUD, sweep.stamp_ns + 50_000_000,
                         serialize_message(cloud)))
    bag = write_bag(tmp_path / 'bag', messages)
    answers = play(client, bag, full_artifact, 2)

    assert [stamp_to_ns(answer.header.stamp) for answer in answers] \
        == [sweep.stamp_ns for sweep in sweeps]
    assert {answer.header.frame_id for answer in answers} == {'base_link'}
    buffer = TransformBuffer()
    with BEVFusion.from_pretrained(full_artifact, backend='cpu') as model:
        for answer, sweep in zip(answers, sweeps, strict=True):
            buffer.insert('map', 'base_link', sweep.stamp_ns, sweep.translation_m,
                          sweep.quaternion_xyzw)
            detections = model(sweep.points, stream={
                'id': 'ego', 'timestamp_s': sweep.stamp_ns * 1e-9,
                'T_world_from_ego': buffer.lookup_matrix('map', 'base_link', sweep.stamp_ns)})
            assert_same_objects(answer, detections)
    assert detections.meta['num_points_per_sweep'] == [len(s.points) for s in reversed(sweeps)]


def recorded_layouts(data_dir) -> list[tuple[str, np.ndarray]]:
    """Return every recording in the point records that it was recorded with."""
    def named(values: np.ndarray, *names: str) -> np.ndarray:
        return np.ascontiguousarray(values).view([(name, values.dtype) for name in names])[:, 0]

    clouds = [
        ('nuscenes', named(nuscenes_points(data_dir), 'x', 'y', 'z', 'intensity', 'ring')),
        ('kitti', named(kitti_points(data_dir), 'x', 'y', 'z', 'intensity')),
    ]
    folder = data_dir / 'permissive' / 'lidar'
    for name in PERMISSIVE_PCDS:
        raw = (folder / name).read_bytes()
        header, _, body = raw.partition(b'DATA ')
        entries = dict(line.split(None, 1) for line in header.decode().splitlines()
                       if line and not line.startswith('#'))
        kind, _, body = body.partition(b'\n')
        dtype = np.dtype([(field, f'<{letter.lower()}{size}') for field, letter, size in zip(
            entries['FIELDS'].split(), entries['TYPE'].split(), entries['SIZE'].split(),
            strict=True)])
        if kind.strip() == b'ascii':
            values = np.array(body.split(), np.float32).reshape(-1, len(dtype))
            records = named(values, *dtype.names)
        else:
            records = np.frombuffer(body, dtype, count=int(entries['POINTS']))
        clouds.append((name, records.reshape(int(entries['HEIGHT']), int(entries['WIDTH']))))
    return clouds


def test_every_recorded_layout_over_dds_equals_the_api(
        client, data_dir, full_artifact, tmp_path):
    clouds = recorded_layouts(data_dir)
    messages = [cloud_message(records, frame_id=name, stamp_ns=(i + 1) * 10**9)
                for i, (name, records) in enumerate(clouds)]
    bag = write_bag(tmp_path / 'bag', [
        (CLOUD_TOPIC, CLOUD, stamp_to_ns(message.header.stamp), serialize_message(message))
        for message in messages])
    answers = play(client, bag, full_artifact, len(clouds), densification_num_past_frames=0)

    assert [answer.header.frame_id for answer in answers] == [name for name, _ in clouds]
    with BEVFusion.from_pretrained(full_artifact, backend='cpu',
                                   densification_num_past_frames=0) as model:
        for answer, message, (name, records) in zip(answers, messages, clouds,
                                                    strict=True):
            points = np.stack([records[axis].reshape(-1) for axis in 'xyz'], axis=1)
            assert len(decode_cloud(message, use_intensity=False).points) == records.size, name
            assert_same_objects(answer, model(points))
