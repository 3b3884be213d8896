# SPDX-License-Identifier: Apache-2.0
"""From the network's outputs to finished objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tt_perception.bevfusion.config import BEVFusionConfig
from tt_perception.bevfusion.decode import decode
from tt_perception.bevfusion.detections import (
    LABELS,
    ORIENTATION_SIGN_UNKNOWN,
    ORIENTATION_UNAVAILABLE,
    Detections3D,
    RawDetections,
)
from tt_perception.bevfusion.nms import circle_nms, iou_bev_nms
from tt_perception.bevfusion.remap import remap_labels
from tt_perception.runtime.model import StageClock

# Names of network classes that Autoware has a label for.
CLASS_LABELS = {
    **{name: LABELS[name] for name in (
        'UNKNOWN', 'CAR', 'TRUCK', 'BUS', 'TRAILER', 'MOTORCYCLE', 'BICYCLE', 'PEDESTRIAN')},
    'TRAFFIC_CONE': LABELS['HAZARD'],
    'BARRIER': LABELS['HAZARD'],
}
# The front of a long vehicle may be its back; of other objects nothing is said.
_LONG_VEHICLES = [LABELS[name] for name in ('CAR', 'TRUCK', 'BUS', 'TRAILER')]
_ORIENTATION_OF_LABEL = np.full(len(LABELS), ORIENTATION_UNAVAILABLE, np.uint8)
_ORIENTATION_OF_LABEL[_LONG_VEHICLES] = ORIENTATION_SIGN_UNKNOWN


def finish(raw: RawDetections, config: BEVFusionConfig, meta: Mapping[str, Any] | None = None,
           clock: StageClock | None = None) -> Detections3D:
    """Decode, suppress and label the proposals of one cloud.

    ``meta['postprocess']`` counts the ``proposals``, those left ``above_threshold``,
    ``after_circle_nms`` and ``after_iou_nms``, the ``remapped`` labels, the ``non_finite``
    proposals that were dropped, and those above threshold that are UNKNOWN because their class
    index or name is (``unknown_class``).

    :param meta: counts of the stages before.
    :param clock: has timed the stages before; gets ``postprocess``, up to the circle NMS as in
        the CUDA node, and ``finish``, the rest.
    """
    clock = clock or StageClock()
    limits = config.postprocess
    found = decode(raw, limits)
    apart = np.flatnonzero(
        circle_nms(found.boxes_xyzlwh_yaw[:, :2], limits.circle_nms_dist_threshold))
    clock.lap('postprocess')
    labels, known = _labels(found.class_ids, limits.class_names)
    kept = apart[iou_bev_nms(found.boxes_xyzlwh_yaw[apart], labels[apart],
                             limits.iou_nms_search_distance_2d, limits.iou_nms_threshold)]
    boxes = found.boxes_xyzlwh_yaw[kept]
    labels = labels[kept]
    remapped = remap_labels(labels, boxes[:, 3] * boxes[:, 4], config.remap)
    clock.lap('finish')
    counts = {
        'proposals': len(raw.score),
        'above_threshold': len(found),
        'after_circle_nms': len(apart),
        'after_iou_nms': len(kept),
        'remapped': int(np.count_nonzero(remapped != labels)),
        'non_finite': found.num_non_finite,
        'unknown_class': len(found) - int(np.count_nonzero(known)),
    }
    return Detections3D(
        boxes_xyzlwh_yaw=boxes,
        velocities_xy=found.velocities_xy[kept],
        scores=found.scores[kept],
        labels=remapped,
        orientation_availability=_ORIENTATION_OF_LABEL[labels],
        proposal_ids=found.proposal_ids[kept],
        meta={**(meta or {}), 'postprocess': counts},
        timing_ms={**clock.stages_ms, 'total': clock.total_ms()},
    )


def _labels(class_ids: np.ndarray, class_names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 [n] labels, UNKNOWN where there is none, and bool [n]: there is one."""
    # One more entry, for an index outside of the names.
    label_of = np.array([CLASS_LABELS.get(name, 0) for name in class_names] + [0], np.uint8)
    has_label = np.array([name in CLASS_LABELS for name in class_names] + [False])
    inside = (class_ids >= 0) & (class_ids < len(class_names))
    index = np.where(inside, class_ids, len(class_names))
    return label_of[index], has_label[index]
