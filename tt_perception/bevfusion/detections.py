# SPDX-License-Identifier: Apache-2.0
"""What comes out of the lidar model: raw proposals of the network, and finished objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# autoware_perception_msgs/msg/ObjectClassification
LABEL_NAMES = ('UNKNOWN', 'CAR', 'TRUCK', 'BUS', 'TRAILER', 'MOTORCYCLE', 'BICYCLE',
               'PEDESTRIAN', 'ANIMAL', 'HAZARD', 'OVER_DRIVABLE', 'UNDER_DRIVABLE')
LABELS = {name: label for label, name in enumerate(LABEL_NAMES)}

# autoware_perception_msgs/msg/DetectedObjectKinematics
ORIENTATION_UNAVAILABLE = 0
ORIENTATION_SIGN_UNKNOWN = 1


@dataclass(frozen=True)
class RawDetections:
    """Outputs of the network, one column a proposal, in the order of its top-k.

    :ivar bbox_pred: float32 [10, K]: center_x, center_y (cells of the feature map), z of the box
        centre (m), log length, log width, log height (m), sin yaw, cos yaw, vx, vy (m/s).
    :ivar score: float32 [K], in [0, 1].
    :ivar label_pred: int64 [K], index into the network's class names.
    """

    bbox_pred: np.ndarray
    score: np.ndarray
    label_pred: np.ndarray


@dataclass(frozen=True)
class Detections3D:
    """Detected objects of one cloud, highest score first, in the frame of the cloud.

    :ivar boxes_xyzlwh_yaw: float32 [n, 7]: centre (m), length, width, height (m),
        yaw (rad, counter-clockwise from +x).
    :ivar velocities_xy: float32 [n, 2], m/s; decoded, not published by the node.
    :ivar scores: float32 [n], existence probability.
    :ivar labels: uint8 [n], ``ObjectClassification`` labels after class remapping.
    :ivar orientation_availability: uint8 [n], as in ``DetectedObjectKinematics``.
    :ivar proposal_ids: int64 [n], column of the network's output that each object came from.
    :ivar meta: counts of this frame: points, sweeps, voxels, active rows per level, capacity
        bucket, and what each stage of post-processing kept.
    :ivar timing_ms: wall time of each stage.
    """

    boxes_xyzlwh_yaw: np.ndarray
    velocities_xy: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    orientation_availability: np.ndarray
    proposal_ids: np.ndarray
    meta: Mapping[str, Any] = field(default_factory=dict)
    timing_ms: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def label_names(self) -> list[str]:
        """Autoware's name of each object's label."""
        return [LABEL_NAMES[label] for label in self.labels]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python values, ready for JSON."""
        return {
            'objects': [
                {
                    'label': LABEL_NAMES[label],
                    'score': float(score),
                    'center_xyz_m': [float(v) for v in box[:3]],
                    'size_lwh_m': [float(v) for v in box[3:6]],
                    'yaw_rad': float(box[6]),
                    'velocity_xy_mps': [float(v) for v in velocity],
                    'orientation_availability': int(orientation),
                    'proposal_id': int(proposal),
                }
                for label, score, box, velocity, orientation, proposal in zip(
                    self.labels, self.scores, self.boxes_xyzlwh_yaw, self.velocities_xy,
                    self.orientation_availability, self.proposal_ids, strict=True)
            ],
            'meta': dict(self.meta),
            'timing_ms': dict(self.timing_ms),
        }
