# SPDX-License-Identifier: Apache-2.0
"""A simulated drive as a rosbag2, with its truth beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tt_perception.bevfusion.cloud import XYZIRC, point_fields
from tt_perception.runtime.errors import ArtifactError, InputError
from tt_perception.sim.drive import Drive, SimulatedSweep, TrueObjects

CLOUD_TOPIC = '/sensing/lidar/concatenated/pointcloud'
MAP_FRAME, BASE_FRAME, LIDAR_FRAME = 'map', 'base_link', 'lidar_top'
TF_PERIOD_NS = 20_000_000
TF_MARGIN_NS = 100_000_000  # transforms before the first and after the last cloud
TF_DELAY_NS, CLOUD_DELAY_NS = 1_000_000, 45_000_000  # between stamp and recording
_VERSION = 9
_SINGLE_STRONGEST = 1  # Autoware's return type


def truth_path(bag: Path) -> Path:
    """Return where the truth of a simulated bag lies: beside it."""
    return bag.with_name(bag.name + '_truth.json')


def write_bag(path: str | Path, drive: Drive) -> Path:
    """Write a drive as a rosbag2 (sqlite3) and its truth as JSON; return the path of the truth.

    The bag holds the clouds in ``base_link``, ``/tf`` from ``map`` to ``base_link`` at 50 Hz and
    at the stamp of each cloud, and ``/tf_static`` to the lidar. A cloud is recorded some time
    after its stamp and after the transform for it, as in a vehicle.

    :raises InputError: the path exists.
    """
    from rosbags.rosbag2 import Writer
    path = Path(path)
    if path.exists():
        raise InputError(f'{path}: exists; expected the path of a new bag', reason='file')
    truth = []
    with Writer(path, version=_VERSION) as writer:
        messages = _Messages(writer)
        messages.write_lidar_mounts(drive)
        next_tf_ns = drive.start_ns - TF_MARGIN_NS
        for sweep in drive:
            while next_tf_ns < sweep.stamp_ns:
                messages.write_pose(next_tf_ns, drive)
                next_tf_ns += TF_PERIOD_NS
            messages.write_pose(sweep.stamp_ns, drive)
            if next_tf_ns == sweep.stamp_ns:
                next_tf_ns += TF_PERIOD_NS
            messages.write_cloud(sweep)
            truth.append(_truth_of(sweep))
        while next_tf_ns <= sweep.stamp_ns + TF_MARGIN_NS:
            messages.write_pose(next_tf_ns, drive)
            next_tf_ns += TF_PERIOD_NS
    text = json.dumps({'frame_id': BASE_FRAME, 'seed': drive.seed, 'sweeps': truth})
    truth_path(path).write_text(text, encoding='utf-8')
    return truth_path(path)


def read_truth(path: str | Path) -> dict[int, TrueObjects]:
    """Return stamp (ns) -> true objects, as :func:`write_bag` has written them.

    :raises ArtifactError: the file cannot be read, or is something else.
    """
    try:
        tree = json.loads(Path(path).read_text(encoding='utf-8'))
        return {sweep['stamp_ns']: TrueObjects.from_dicts(sweep['objects'])
                for sweep in tree['sweeps']}
    except OSError as error:
        raise ArtifactError(f'{path}: cannot be read: {error.strerror}') from None
    except (ValueError, KeyError, TypeError):
        raise ArtifactError(f'{path}: expected the truth of a simulated drive') from None


def _truth_of(sweep: SimulatedSweep) -> dict[str, Any]:
    return {'stamp_ns': sweep.stamp_ns, 'lidar': sweep.lidar.name,
            'num_points': len(sweep.points), 'T_map_from_base': sweep.T_map_from_base.tolist(),
            'objects': sweep.truth.to_dicts()}


class _Messages:
    """Builds and writes the messages of one bag."""

    def __init__(self, writer: Any):
        from rosbags.typesys import Stores, get_typestore
        self._writer = writer
        self._store = get_typestore(Stores.ROS2_JAZZY)
        self._types = self._store.types
        self._clouds = self._connect(CLOUD_TOPIC, 'sensor_msgs/msg/PointCloud2', depth=5)
        self._tf = self._connect('/tf', 'tf2_msgs/msg/TFMessage', depth=100)
        self._static = self._connect('/tf_static', 'tf2_msgs/msg/TFMessage', depth=1, latched=True)

    def write_lidar_mounts(self, drive: Drive) -> None:
        mount = np.eye(4)
        mount[:3, 3] = drive.lidars[0].mount_xyz_m
        stamp_ns = drive.start_ns - TF_MARGIN_NS
        self._write(self._static, stamp_ns, self._transforms(BASE_FRAME, LIDAR_FRAME, stamp_ns,
                                                             mount))

    def write_pose(self, stamp_ns: int, drive: Drive) -> None:
        pose = drive.pose((stamp_ns - drive.start_ns) * 1e-9)
        self._write(self._tf, stamp_ns + TF_DELAY_NS,
                    self._transforms(MAP_FRAME, BASE_FRAME, stamp_ns, pose))

    def write_cloud(self, sweep: SimulatedSweep) -> None:
        records = np.empty(len(sweep.points), XYZIRC)
        records['x'], records['y'], records['z'], records['intensity'] = sweep.points.T
        records['return_type'] = _SINGLE_STRONGEST
        records['channel'] = sweep.channels
        field = self._types['sensor_msgs/msg/PointField']
        self._write(self._clouds, sweep.stamp_ns + CLOUD_DELAY_NS,
                    self._types['sensor_msgs/msg/PointCloud2'](
                        header=self._header(BASE_FRAME, sweep.stamp_ns), height=1,
                        width=len(records),
                        fields=[field(name=name, offset=offset, datatype=datatype, count=count)
                                for name, offset, datatype, count in point_fields(XYZIRC)],
                        is_bigendian=False, point_step=XYZIRC.itemsize,
                        row_step=records.nbytes, data=records.view(np.uint8), is_dense=True))

    def _connect(self, topic: str, message_type: str, depth: int, latched: bool = False) -> Any:
        from rosbags.interfaces import (
            Qos,
            QosDurability,
            QosHistory,
            QosLiveliness,
            QosReliability,
            QosTime,
        )
        durability = QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE
        qos = Qos(QosHistory.KEEP_LAST, depth, QosReliability.RELIABLE, durability, QosTime(0, 0),
                  QosTime(0, 0), QosLiveliness.AUTOMATIC, QosTime(0, 0), False)
        return self._writer.add_connection(topic, message_type, typestore=self._store,
                                           offered_qos_profiles=[qos])

    def _write(self, connection: Any, recorded_ns: int, message: Any) -> None:
        self._writer.write(connection, recorded_ns,
                           self._store.serialize_cdr(message, connection.msgtype))

    def _header(self, frame_id: str, stamp_ns: int) -> Any:
        time = self._types['builtin_interfaces/msg/Time'](stamp_ns // 10**9, stamp_ns % 10**9)
        return self._types['std_msgs/msg/Header'](stamp=time, frame_id=frame_id)

    def _transforms(self, parent: str, child: str, stamp_ns: int, pose: np.ndarray) -> Any:
        """Return a TFMessage of one transform; ``pose`` turns about z only."""
        half = math.atan2(pose[1, 0], pose[0, 0]) / 2
        transform = self._types['geometry_msgs/msg/Transform'](
            translation=self._types['geometry_msgs/msg/Vector3'](*map(float, pose[:3, 3])),
            rotation=self._types['geometry_msgs/msg/Quaternion'](
                0.0, 0.0, math.sin(half), math.cos(half)))
        return self._types['tf2_msgs/msg/TFMessage'](transforms=[
            self._types['geometry_msgs/msg/TransformStamped'](
                header=self._header(parent, stamp_ns), child_frame_id=child,
                transform=transform)])
