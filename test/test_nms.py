# SPDX-License-Identifier: Apache-2.0
"""Both suppressions against plain loops, and the overlap of boxes against exact geometry."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tt_perception.bevfusion.detections import LABELS
from tt_perception.bevfusion.nms import bev_iou, circle_nms, iou_bev_nms

F32 = np.float32
CAR, TRUCK, BICYCLE, PEDESTRIAN = (LABELS[n] for n in ('CAR', 'TRUCK', 'BICYCLE', 'PEDESTRIAN'))


def box(x=0.0, y=0.0, length=4.0, width=2.0, yaw=0.0):
    return [x, y, 0.0, length, width, 1.5, yaw]


def boxes(*rows):
    return np.array(rows, F32).reshape(-1, 7)


# Exact overlap: all corners inside the other rectangle and all crossings of edges, as fractions,
# and the area of their convex hull. No clipping is involved.

def exact_corners(b):
    x, y, c, s = (Fraction(v) for v in (float(b[0]), float(b[1]), math.cos(b[6]), math.sin(b[6])))
    half_l, half_w = Fraction(float(b[3])) / 2, Fraction(float(b[4])) / 2
    return [(x + c * u - s * v, y + s * u + c * v)
            for u, v in ((half_l, half_w), (-half_l, half_w), (-half_l, -half_w),
                         (half_l, -half_w))]


def cross(o, a, b):
    return (a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0])


def edges(polygon):
    return list(zip(polygon, polygon[1:] + polygon[:1], strict=True))


def hull_area(points):
    points = sorted(set(points))

    def chain(ordered):
        out = []
        for p in ordered:
            while len(out) > 1 and cross(out[-2], out[-1], p) <= 0:
                out.pop()
            out.append(p)
        return out[:-1]

    hull = chain(points) + chain(points[::-1])
    return sum((a[0] * b[1] - b[0] * a[1] for a, b in edges(hull)), Fraction(0)) / 2


def exact_intersection(a, b):
    pa, pb = exact_corners(a), exact_corners(b)
    points = [p for p in pa if all(cross(*e, p) >= 0 for e in edges(pb))]
    points += [p for p in pb if all(cross(*e, p) >= 0 for e in edges(pa))]
    for p, q in edges(pa):
        for r, s in edges(pb):
            d = (q[0] - p[0]) * (s[1] - r[1]) - (q[1] - p[1]) * (s[0] - r[0])
            if d:
                t = Fraction((r[0] - p[0]) * (s[1] - r[1]) - (r[1] - p[1]) * (s[0] - r[0])) / d
                u = Fraction((r[0] - p[0]) * (q[1] - p[1]) - (r[1] - p[1]) * (q[0] - p[0])) / d
                if 0 <= t <= 1 and 0 <= u <= 1:
                    points.append((p[0] + t * (q[0] - p[0]), p[1] + t * (q[1] - p[1])))
    return float(hull_area(points)) if len(set(points)) > 2 else 0.0


def exact_iou(a, b):
    areas = [float(v[3]) * float(v[4]) for v in (a, b)]
    if min(areas) < 1e-6:
        return 0.0
    intersection = exact_intersection(a, b)
    union = sum(areas) - intersection
    if intersection < 1e-6 or union < 0.01:
        return 0.0
    return min(1.0, intersection / union)


POSITION = st.one_of(st.integers(-12, 12).map(lambda i: i / 4), st.floats(-3, 3, width=32))
SIZE = st.one_of(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.floats(0.125, 8, width=32))
YAW = st.one_of(st.sampled_from([0.0, math.pi / 2, -math.pi, math.pi / 4]),
                st.floats(-4, 4, width=32))
BOX = st.tuples(POSITION, POSITION, st.just(0.0), SIZE, SIZE, st.just(1.0), YAW)


@settings(deadline=None, max_examples=300)
@given(BOX, BOX)
def test_overlap_equals_exact_geometry(a, b):
    a, b = boxes(a, b)
    assert bev_iou(a, b) == pytest.approx(exact_iou(a, b), abs=2e-6)
    assert bev_iou(a, b) == pytest.approx(bev_iou(b, a), abs=2e-6)


@pytest.mark.parametrize(('a', 'b', 'iou'), [
    (box(), box(), 1.0),
    (box(), box(x=2), 1 / 3),
    (box(), box(x=4), 0.0),  # touching
    (box(), box(length=2, width=1), 0.25),  # one inside the other
    (box(), box(yaw=math.pi), 1.0),
    (box(), box(yaw=math.pi / 2), 4 / 12),
    (box(length=2), box(length=2, yaw=math.pi / 4), 1 / math.sqrt(2)),  # an octagon in common
    (box(x=100.0, y=-80.0, yaw=0.7), box(x=100.0, y=-80.0, yaw=0.7), 1.0),
    (box(length=1e-3, width=0.9e-3), box(length=1e-3, width=0.9e-3), 0.0),  # area below 1e-6
    (box(length=0.09, width=0.1), box(length=0.09, width=0.1), 0.0),  # union below 0.01
    (box(length=0.2, width=0.1), box(length=0.2, width=0.1), 1.0),
])
def test_overlap_in_known_cases(a, b, iou):
    a, b = boxes(a, b)
    assert bev_iou(a, b) == pytest.approx(iou, abs=1e-6)


def test_turning_and_moving_both_boxes_together_changes_nothing():
    a, b = box(0.5, 0.25, 4.5, 1.8, 0.3), box(1.5, -0.5, 7.0, 2.4, -0.9)
    expected = exact_iou(*np.array([a, b]))
    for turn in np.linspace(-3, 3, 13):
        c, s = math.cos(turn), math.sin(turn)
        moved = [[50 + c * x - s * y, -70 + s * x + c * y, *rest, yaw + turn]
                 for x, y, *rest, yaw in (a, b)]
        assert bev_iou(*np.array(moved)) == pytest.approx(expected, abs=1e-9)


def naive_circle(centers, distance):
    keep = [True] * len(centers)
    for i in range(len(centers)):
        for j in range(i + 1, len(centers)):
            dx, dy = centers[j] - centers[i]
            near = F32(dx * dx) + F32(dy * dy) < F32(distance) * F32(distance)
            if keep[i] and distance > 0 and near:
                keep[j] = False
    return keep


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(POSITION, POSITION), max_size=40),
       st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.75, 2.0, 1e9]))
def test_circle_nms_agrees_with_a_loop(centers, distance):
    centers = np.array(centers, F32).reshape(-1, 2)
    assert circle_nms(centers, distance).tolist() == naive_circle(centers, distance)


def test_centre_exactly_at_the_distance_is_kept():
    centers = np.array([[0, 0], [0.5, 0], [0, np.nextafter(F32(0.5), F32(0))]], F32)
    assert circle_nms(centers, 0.5).tolist() == [True, True, False]


def test_a_suppressed_box_suppresses_nothing_in_circle_nms():
    centers = np.array([[0, 0], [0.4, 0], [0.8, 0]], F32)
    assert circle_nms(centers, 0.5).tolist() == [True, False, True]


@pytest.mark.parametrize('distance', [0.0, -0.5])
def test_distance_of_zero_or_less_suppresses_nothing(distance):
    assert circle_nms(np.zeros((3, 2), F32), distance).all()


def naive_iou_nms(rows, labels, search, threshold):
    keep = []
    for i in range(len(rows)):
        kept = True
        for k in range(i):
            if labels[i] != labels[k] and PEDESTRIAN in (labels[i], labels[k]):
                continue
            dx, dy = (rows[i, :2].astype(np.float64) - rows[k, :2].astype(np.float64))
            if dx * dx + dy * dy > search * search:
                continue
            if exact_iou(rows[k], rows[i]) > threshold:
                kept = False
        keep.append(kept)
    return keep


@settings(deadline=None, max_examples=120)
@given(st.lists(st.tuples(BOX, st.sampled_from([CAR, TRUCK, BICYCLE, PEDESTRIAN])), max_size=9),
       st.sampled_from([0.5, 2.0, 10.0]),
       # No overlap of the boxes drawn is by chance this near to a threshold.
       st.sampled_from([0.100001, 0.3000017, 0.7000013]))
def test_iou_nms_agrees_with_a_loop(objects, search, threshold):
    rows = boxes(*(b for b, _ in objects))
    labels = np.array([label for _, label in objects], np.uint8)
    ious = [exact_iou(rows[i], rows[k]) for i in range(len(rows)) for k in range(i)]
    assume(all(abs(iou - threshold) > 1e-9 for iou in ious))
    assert iou_bev_nms(rows, labels, search, threshold).tolist() == naive_iou_nms(
        rows, labels, search, threshold)


def test_overlap_equal_to_the_threshold_is_kept():
    rows = boxes(box(length=5), box(x=3, length=5))  # 2 m of 8 m in common, exact in binary
    labels = np.full(2, CAR, np.uint8)
    assert iou_bev_nms(rows, labels, 10.0, 0.25).tolist() == [True, True]
    assert iou_bev_nms(rows, labels, 10.0, np.nextafter(0.25, 0)).tolist() == [True, False]


def test_a_dropped_box_still_drops_others_in_iou_nms():
    rows = boxes(box(), box(x=2), box(x=4))
    labels = np.full(3, CAR, np.uint8)
    assert iou_bev_nms(rows, labels, 10.0, 0.1).tolist() == [True, False, False]


def test_centres_exactly_at_the_search_distance_are_compared():
    rows = boxes(box(length=40), box(x=10, length=40))
    labels = np.full(2, CAR, np.uint8)
    assert iou_bev_nms(rows, labels, 10.0, 0.1).tolist() == [True, False]
    assert iou_bev_nms(rows, labels, np.nextafter(10.0, 0), 0.1).tolist() == [True, True]


@pytest.mark.parametrize(('first', 'second', 'kept'), [
    (TRUCK, CAR, False), (CAR, BICYCLE, False), (0, CAR, False), (PEDESTRIAN, PEDESTRIAN, False),
    (PEDESTRIAN, BICYCLE, True), (CAR, PEDESTRIAN, True)])
def test_only_pedestrians_overlap_with_other_classes(first, second, kept):
    labels = np.array([first, second], np.uint8)
    assert iou_bev_nms(boxes(box(), box()), labels, 10.0, 0.1).tolist() == [True, kept]


def test_threshold_zero_keeps_only_what_does_not_overlap():
    """What has no area, here 9e-7 m2 in the middle of another box, overlaps with nothing."""
    rows = boxes(box(), box(x=3.999), box(x=8), box(x=100), box(length=1e-3, width=9e-4))
    assert iou_bev_nms(rows, np.full(5, CAR, np.uint8), 10.0, 0.0).tolist() == [
        True, False, True, True, True]


@pytest.mark.parametrize('n', [0, 1, 24, 31, 32, 33, 500])
def test_any_number_of_boxes(n):
    rng = np.random.default_rng(n)
    center, size = rng.uniform(-20, 20, (n, 2)), rng.uniform(0.5, 12, (n, 2))
    rows = np.column_stack([center, np.zeros(n), size, np.ones(n), rng.normal(size=n)]).astype(F32)
    labels = rng.choice([CAR, TRUCK, PEDESTRIAN], n).astype(np.uint8)
    assert circle_nms(rows[:, :2], 1.5).tolist() == naive_circle(rows[:, :2], 1.5)
    keep = iou_bev_nms(rows, labels, 10.0, 0.1)
    assert keep.shape == (n,)
    assert keep[:1].all()
    if n <= 33:
        assert keep.tolist() == naive_iou_nms(rows, labels, 10.0, 0.1)
