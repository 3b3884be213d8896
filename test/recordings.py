# SPDX-License-Identifier: Apache-2.0
"""Loaders of the recordings in the data folder, independent of the package's own readers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

PERMISSIVE_PCDS = {  # file -> number of points in it
    'velodyne_vlp16_xyzircaedt.pcd': 14_831,
    'hesai_40p.pcd': 56_762,
    'hesai_ot128.pcd': 72_240,
    'hesai_xt32m.pcd': 13_574,
    'hesai_at128.pcd': 10_198,
    'velodyne_vlp32.pcd': 26_216,
    'autoware_ground_segmentation_test.pcd': 65_536,
}


@dataclass(frozen=True)
class ArgoverseSweep:
    """One sweep in the ego frame, with its pose and its boxes.

    :ivar points: float32 [n, 3].
    :ivar intensity: uint8 [n].
    :ivar channel: uint8 [n].
    :ivar quaternion_xyzw, translation_m: pose of the ego frame in the city frame.
    :ivar boxes_xyzlwh_yaw: float64 [m, 7], in the ego frame.
    :ivar track_ids: of the boxes.
    """

    stamp_ns: int
    points: np.ndarray
    intensity: np.ndarray
    channel: np.ndarray
    quaternion_xyzw: np.ndarray
    translation_m: np.ndarray
    boxes_xyzlwh_yaw: np.ndarray
    track_ids: tuple[str, ...]


def argoverse_sweeps(data_dir: Path) -> list[ArgoverseSweep]:
    """Read the two consecutive sweeps, oldest first."""
    from pyarrow import feather
    folder = data_dir / 'noncommercial' / 'av2_two_sweeps'
    poses = feather.read_table(folder / 'city_SE3_egovehicle.feather').to_pydict()
    pose_at = {stamp: i for i, stamp in enumerate(poses['timestamp_ns'])}
    boxes = feather.read_table(folder / 'annotations.feather').to_pydict()
    sweeps = []
    for path in sorted(folder.glob('lidar_*.feather')):
        stamp = int(path.stem.split('_')[1])
        table = feather.read_table(path)
        column = {name: table[name].to_numpy() for name in table.column_names}
        i = pose_at[stamp]
        rows = [j for j, t in enumerate(boxes['timestamp_ns']) if t == stamp]
        yaw = [2 * np.arctan2(boxes['qz'][j], boxes['qw'][j]) for j in rows]
        size = [[boxes[k][j] for k in ('tx_m', 'ty_m', 'tz_m', 'length_m', 'width_m', 'height_m')]
                for j in rows]
        sweeps.append(ArgoverseSweep(
            stamp_ns=stamp,
            points=np.stack([column[k] for k in 'xyz'], 1).astype(np.float32),
            intensity=column['intensity'],
            channel=column['laser_number'],
            quaternion_xyzw=np.array([poses[k][i] for k in ('qx', 'qy', 'qz', 'qw')]),
            translation_m=np.array([poses[k][i] for k in ('tx_m', 'ty_m', 'tz_m')]),
            boxes_xyzlwh_yaw=np.column_stack([np.array(size), yaw]),
            track_ids=tuple(boxes['track_uuid'][j] for j in rows),
        ))
    return sweeps


def nuscenes_points(data_dir: Path) -> np.ndarray:
    """Return the key frame, float32 [34688, 5]: x, y, z, intensity, ring."""
    path, = (data_dir / 'noncommercial' / 'nuscenes_demo').glob('*LIDAR_TOP*.pcd.bin')
    return np.fromfile(path, '<f4').reshape(-1, 5)


def kitti_points(data_dir: Path, frame: str = '000000') -> np.ndarray:
    """Return a full turn, float32 [n, 4]: x, y, z, intensity."""
    path = data_dir / 'noncommercial' / 'kitti_pointpillars' / f'{frame}.bin'
    return np.fromfile(path, '<f4').reshape(-1, 4)
