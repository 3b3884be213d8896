# SPDX-License-Identifier: Apache-2.0
"""Non-maximum suppression in the bird's-eye view: by centre distance, then by overlap."""

from __future__ import annotations

import math

import numpy as np

from tt_perception.bevfusion.detections import LABELS
from tt_perception.runtime.jit import kernel

_PEDESTRIAN = LABELS['PEDESTRIAN']
_MIN_AREA_M2 = 1e-6
_MIN_UNION_M2 = 0.01
# Pairs that cannot overlap enough are skipped without clipping; this relative margin is far above
# rounding, so that a skipped pair never decides.
_MARGIN = 1e-9
_MAX_CORNERS = 20  # 8 in exact arithmetic; four clips that rounding makes concave give 19


def circle_nms(centers_xy: np.ndarray, distance_m: float) -> np.ndarray:
    """Return bool [n]: False where a kept earlier box has its centre nearer than the distance.

    Greedy and blind to classes; a suppressed box suppresses nothing. Computed in float32.

    :param centers_xy: float32 [n, 2] (m), highest score first.
    :param distance_m: zero or less suppresses nothing.
    """
    keep = np.ones(len(centers_xy), np.bool_)
    if distance_m > 0:
        x, y = np.ascontiguousarray(np.asarray(centers_xy, np.float32).T)
        limit = np.float32(distance_m)
        _suppress_near(x, y, limit * limit, keep)
    return keep


def iou_bev_nms(boxes_xyzlwh_yaw: np.ndarray, labels: np.ndarray, search_distance_m: float,
                iou_threshold: float) -> np.ndarray:
    """Return bool [n]: False where an earlier box overlaps by more than the threshold.

    Every earlier box counts, also one that is dropped itself. Boxes of different labels are
    compared unless one of them is a pedestrian. Computed in float64.

    :param boxes_xyzlwh_yaw: float32 [n, 7] (m, rad), highest score first.
    :param labels: uint8 [n], ``ObjectClassification`` labels.
    :param search_distance_m: boxes with centres farther apart are not compared.
    :param iou_threshold: in [0, 1]; an overlap equal to it is kept.
    """
    keep = np.ones(len(boxes_xyzlwh_yaw), np.bool_)
    boxes = np.ascontiguousarray(boxes_xyzlwh_yaw, np.float64)
    _suppress_overlapping(boxes, np.ascontiguousarray(labels, np.uint8),
                          float(search_distance_m), float(iou_threshold), keep)
    return keep


def bev_iou(box_a: np.ndarray, box_b: np.ndarray) -> float:
    """Return the overlap of two boxes seen from above: intersection over union, in [0, 1].

    It is 0 where an area or the intersection is below 1e-6 m2, or the union below 0.01 m2.

    :param box_a: [7]: x, y, z, length, width, height (m), yaw (rad). So is ``box_b``.
    """
    a, b = (np.ascontiguousarray(box, np.float64) for box in (box_a, box_b))
    return _iou(a, b, np.empty((4, _MAX_CORNERS)))


@kernel
def _suppress_near(x, y, limit_sq, keep):
    for i in range(len(x)):
        if not keep[i]:
            continue
        # No branch, and slices that need no index checks: this loop runs on vector registers.
        later_x, later_y, later = x[i + 1:], y[i + 1:], keep[i + 1:]
        for j in range(len(later)):
            dx = later_x[j] - x[i]
            dy = later_y[j] - y[i]
            later[j] &= dx * dx + dy * dy >= limit_sq


@kernel
def _suppress_overlapping(boxes, labels, search_distance, iou_threshold, keep):
    n = len(boxes)
    scratch = np.empty((4, _MAX_CORNERS))
    x, y = boxes[:, 0].copy(), boxes[:, 1].copy()
    area = boxes[:, 3] * boxes[:, 4]
    radius = 0.5 * (1 + _MARGIN) * np.hypot(boxes[:, 3], boxes[:, 4])
    walks = labels == _PEDESTRIAN
    search_sq = search_distance * search_distance
    least = iou_threshold * (1 - _MARGIN)
    comparable = np.empty(n, np.bool_)
    for i in range(1, n):
        _find_comparable(x[:i], y[:i], area[:i], radius[:i], walks[:i],
                         x[i], y[i], area[i], radius[i], walks[i],
                         search_sq, least, comparable[:i])
        for k in range(i):
            if comparable[k] and _iou(boxes[k], boxes[i], scratch) > iou_threshold:
                keep[i] = False
                break


@kernel
def _find_comparable(x, y, area, radius, walks, x_i, y_i, area_i, radius_i, walks_i,
                     search_sq, least, comparable):
    """Mark the boxes that rules and sizes let overlap with box i; no branch, as above."""
    for k in range(len(x)):
        dx = x_i - x[k]
        dy = y_i - y[k]
        distance_sq = dx * dx + dy * dy
        reach = radius_i + radius[k]
        comparable[k] = ((distance_sq <= search_sq) & (distance_sq <= reach * reach)
                         & (area[k] >= least * area_i) & (area_i >= least * area[k])
                         & (walks_i == walks[k]))


@kernel
def _iou(a, b, scratch):
    area_a = a[3] * a[4]
    area_b = b[3] * b[4]
    if area_a < _MIN_AREA_M2 or area_b < _MIN_AREA_M2:
        return 0.0
    intersection = _intersection_area(a, b, scratch)
    union = area_a + area_b - intersection
    if intersection < _MIN_AREA_M2 or union < _MIN_UNION_M2:
        return 0.0
    return min(1.0, intersection / union)


@kernel
def _intersection_area(a, b, scratch):
    """Clip rectangle ``b``, seen from the frame of ``a``, by the four sides of ``a``.

    :param scratch: float64 [4, _MAX_CORNERS], x and y of two polygons.
    """
    px, py, qx, qy = scratch[0], scratch[1], scratch[2], scratch[3]
    cos_a, sin_a = math.cos(a[6]), math.sin(a[6])
    dx, dy = b[0] - a[0], b[1] - a[1]
    center_x = cos_a * dx + sin_a * dy
    center_y = cos_a * dy - sin_a * dx
    cos_b, sin_b = math.cos(b[6] - a[6]), math.sin(b[6] - a[6])
    along_x, along_y = 0.5 * b[3] * cos_b, 0.5 * b[3] * sin_b
    across_x, across_y = -0.5 * b[4] * sin_b, 0.5 * b[4] * cos_b
    px[0], py[0] = center_x + along_x + across_x, center_y + along_y + across_y
    px[1], py[1] = center_x - along_x + across_x, center_y - along_y + across_y
    px[2], py[2] = center_x - along_x - across_x, center_y - along_y - across_y
    px[3], py[3] = center_x + along_x - across_x, center_y + along_y - across_y
    half_length, half_width = 0.5 * a[3], 0.5 * a[4]
    n = _clip(px, py, 4, 1.0, half_length, qx, qy)
    n = _clip(qx, qy, n, -1.0, half_length, px, py)
    n = _clip(py, px, n, 1.0, half_width, qy, qx)
    n = _clip(qy, qx, n, -1.0, half_width, py, px)
    twice = 0.0
    for i in range(n):
        j = i + 1 if i + 1 < n else 0
        twice += px[i] * py[j] - px[j] * py[i]
    return 0.5 * abs(twice)


@kernel
def _clip(u, v, n, sign, limit, out_u, out_v):
    """Keep the part of a convex polygon with ``sign * u <= limit``; return its corner count."""
    m = 0
    for i in range(n):
        j = i + 1 if i + 1 < n else 0
        depth_i = limit - sign * u[i]
        depth_j = limit - sign * u[j]
        if depth_i >= 0:
            out_u[m], out_v[m] = u[i], v[i]
            m += 1
        if (depth_i >= 0) != (depth_j >= 0):
            out_u[m] = sign * limit
            out_v[m] = v[i] + (v[j] - v[i]) * (depth_i / (depth_i - depth_j))
            m += 1
    return m
