# SPDX-License-Identifier: Apache-2.0
"""The network's proposals -> boxes in metres that pass their score thresholds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tt_perception.bevfusion.config import PostprocessConfig
from tt_perception.bevfusion.detections import RawDetections


@dataclass(frozen=True)
class Candidates:
    """Proposals above their thresholds, highest score first, equal scores in proposal order.

    :ivar boxes_xyzlwh_yaw: float32 [n, 7], m and rad, in the frame of the cloud.
    :ivar velocities_xy: float32 [n, 2], m/s.
    :ivar scores: float32 [n].
    :ivar class_ids: int64 [n], index into the class names; may lie outside of them.
    :ivar proposal_ids: int64 [n], column of the network's output.
    :ivar num_non_finite: proposals left out because a value of theirs is NaN or infinite.
    """

    boxes_xyzlwh_yaw: np.ndarray
    velocities_xy: np.ndarray
    scores: np.ndarray
    class_ids: np.ndarray
    proposal_ids: np.ndarray
    num_non_finite: int

    def __len__(self) -> int:
        return len(self.scores)


def decode(raw: RawDetections, config: PostprocessConfig) -> Candidates:
    """Decode, threshold and sort proposals, all in float32 as the CUDA node does.

    A proposal stays when the length of its (sin, cos) reaches its class's threshold, its centre
    is nearer to the origin than the last distance limit, and its score is positive and at least
    the threshold of its class and distance bin. A class index that the configuration does not
    know has no threshold on (sin, cos) and the strictest score threshold of its bin.
    """
    pred = np.asarray(raw.bbox_pred, np.float32)
    score = np.asarray(raw.score, np.float32)
    # A finite but huge output may overflow here; such a proposal is dropped below.
    with np.errstate(over='ignore', invalid='ignore'):
        size = np.exp(pred[3:6])
        x, y = _centres(pred, config)
        finite = np.isfinite(pred).all(0) & np.isfinite(size).all(0) & np.isfinite(score)
        keep = finite & (score > 0) & _above_thresholds(
            x * x + y * y, np.sqrt(pred[6] * pred[6] + pred[7] * pred[7]), score,
            raw.label_pred, config)
    ids = np.flatnonzero(keep)
    ids = ids[np.argsort(-score[ids], kind='stable')]
    boxes = np.empty((len(ids), 7), np.float32)
    boxes[:, 0] = x[ids]
    boxes[:, 1] = y[ids]
    boxes[:, 2] = pred[2, ids]
    boxes[:, 3:6] = size[:, ids].T
    boxes[:, 6] = np.arctan2(pred[6, ids], pred[7, ids])
    return Candidates(
        boxes_xyzlwh_yaw=boxes,
        velocities_xy=np.ascontiguousarray(pred[8:10, ids].T),
        scores=score[ids],
        class_ids=np.asarray(raw.label_pred, np.int64)[ids],
        proposal_ids=ids,
        num_non_finite=len(finite) - int(np.count_nonzero(finite)),
    )


def _centres(pred: np.ndarray, config: PostprocessConfig) -> np.ndarray:
    """Return x and y of every centre (m), [2, K]; the order of the operations matters."""
    edge = np.asarray(config.voxel_size_xy, np.float32)[:, None]
    low = np.asarray(config.range_min_xy, np.float32)[:, None]
    return pred[:2] * np.float32(config.out_size_factor) * edge + low


def _above_thresholds(distance_sq: np.ndarray, yaw_norm: np.ndarray, score: np.ndarray,
                      class_ids: np.ndarray, config: PostprocessConfig) -> np.ndarray:
    """Return bool [K]; see :func:`decode`."""
    num_classes = len(config.class_names)
    known = (class_ids >= 0) & (class_ids < num_classes)
    column = np.where(known, class_ids, num_classes)
    min_norm = np.append(config.yaw_norm_thresholds, np.float32(0))
    strictest = config.min_scores.max(1, keepdims=True)
    min_score = np.concatenate([config.min_scores, strictest], axis=1)
    limit_sq = config.distance_limits_m * config.distance_limits_m
    inside = distance_sq < limit_sq[:, None]
    distance_bin = inside.argmax(0)
    return (inside.any(0) & (yaw_norm >= min_norm[column])
            & (score >= min_score[distance_bin, column]))
