# SPDX-License-Identifier: Apache-2.0
"""Change of labels by the size of the footprint, as Autoware's class remapper does it."""

from __future__ import annotations

import numpy as np

from tt_perception.bevfusion.config import RemapConfig


def remap_labels(labels: np.ndarray, areas_m2: np.ndarray, config: RemapConfig) -> np.ndarray:
    """Return each object's new label: the first allowed one whose area limits hold its area.

    Both limits are inclusive and compared in float64; one that is not finite counts as the
    largest float64. A label without such a target, or outside of the matrices, stays.

    :param labels: uint8 [n].
    :param areas_m2: float32 [n], length times width.
    :return: uint8 [n].
    """
    low, high = (np.where(np.isfinite(limits), limits, np.finfo(np.float64).max)
                 for limits in (config.min_area_m2, config.max_area_m2))
    labels = np.asarray(labels, np.uint8)
    inside = np.flatnonzero(labels < len(config.allow))
    row = labels[inside]
    area = areas_m2[inside, None]
    fits = config.allow[row] & (low[row] <= area) & (area <= high[row])
    remapped = labels.copy()
    remapped[inside] = np.where(fits.any(1), fits.argmax(1), row)
    return remapped
