# SPDX-License-Identifier: Apache-2.0
"""Decoding of the network's proposals: conventions, thresholds, order, bad values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_perception.bevfusion.config import BEVFusionConfig
from tt_perception.bevfusion.decode import decode
from tt_perception.bevfusion.detections import RawDetections

F32 = np.float32
CONFIG = BEVFusionConfig.from_parameters({}).postprocess
CELL_M = 8 * 0.17
ORIGIN_M = -122.4


def proposals(boxes, scores, classes, *, yaw_norm=1.0) -> RawDetections:
    """Encode boxes [n, 7] (x, y, z, l, w, h, yaw) as a network would learn to."""
    boxes = np.asarray(boxes, np.float64).reshape(-1, 7)
    pred = np.zeros((10, len(boxes)))
    pred[0:2] = (boxes[:, :2].T - ORIGIN_M) / CELL_M
    pred[2] = boxes[:, 2]
    pred[3:6] = np.log(boxes[:, 3:6].T)
    pred[6] = np.sin(boxes[:, 6]) * yaw_norm
    pred[7] = np.cos(boxes[:, 6]) * yaw_norm
    return RawDetections(pred.astype(F32), np.asarray(scores, F32), np.asarray(classes, np.int64))


def car_at(x=10.0, y=5.0, yaw=0.0):
    return [x, y, 0.5, 4.5, 1.8, 1.5, yaw]


@pytest.mark.parametrize('degrees', [0.0, 30.0, 90.0, -179.9])
def test_box_of_known_pose(degrees):
    box = [-37.25, 61.5, -0.75, 4.5, 1.8, 1.6, math.radians(degrees)]
    found = decode(proposals([box], [0.9], [0]), CONFIG)
    np.testing.assert_allclose(found.boxes_xyzlwh_yaw[0], box, rtol=0, atol=5e-5)


@pytest.mark.parametrize('degrees', [0.0, 30.0, 90.0, -179.9])
def test_long_side_of_the_points_is_the_length_along_yaw(degrees):
    """A29, A30: a 4.5 m x 1.8 m cluster turned counter-clockwise fills the box from end to end."""
    turn = np.exp(1j * np.radians(degrees))
    cluster = (np.linspace(-2.25, 2.25, 41)[:, None] + 1j * np.linspace(-0.9, 0.9, 17)).ravel()
    world = cluster * turn + complex(20, -8)
    box = decode(proposals([[20, -8, 0, 4.5, 1.8, 1.5, math.radians(degrees)]], [0.9], [0]),
                 CONFIG).boxes_xyzlwh_yaw[0].astype(np.float64)
    local = (world - complex(box[0], box[1])) * np.exp(-1j * box[6])
    assert np.ptp(local.real) == pytest.approx(box[3], abs=1e-4)
    assert np.ptp(local.imag) == pytest.approx(box[4], abs=1e-4)
    assert box[3] > box[4]


def test_velocity_comes_along():
    raw = proposals([car_at()], [0.9], [0])
    raw.bbox_pred[8:10, 0] = 3.5, -1.25
    np.testing.assert_array_equal(decode(raw, CONFIG).velocities_xy, [[3.5, -1.25]])


def test_centres_follow_the_float32_order_of_operations():
    cells = np.linspace(0, 180, 997).astype(F32)
    raw = proposals([car_at()] * len(cells), [0.9] * len(cells), [0] * len(cells))
    raw.bbox_pred[0] = cells
    raw.bbox_pred[1] = F32(90)
    found = decode(raw, CONFIG)
    expected = [F32(F32(F32(c * F32(8)) * F32(0.17)) + F32(-122.4)) for c in cells]
    np.testing.assert_array_equal(found.boxes_xyzlwh_yaw[:, 0], expected)


@pytest.mark.parametrize(('score', 'kept'), [
    (F32(0.1), True), (np.nextafter(F32(0.1), F32(0)), False), (F32(0), False), (F32(1), True)])
def test_score_at_the_threshold_is_kept(score, kept):
    assert len(decode(proposals([car_at()], [score], [0]), CONFIG)) == kept


def test_score_zero_is_no_object_even_without_threshold():
    config = BEVFusionConfig.from_parameters(
        {'detection_score_thresholds.min_confidence_scores.CAR': (0.0,) * 4}).postprocess
    tiny = np.nextafter(F32(0), F32(1))
    found = decode(proposals([car_at()] * 3, [0.0, -0.5, tiny], [0, 0, 0]), config)
    assert found.proposal_ids.tolist() == [2]


def test_thresholds_depend_on_class_and_distance():
    config = BEVFusionConfig.from_parameters({
        'detection_score_thresholds.distance_bin_upper_limits': (20.0, 40.0),
        'detection_score_thresholds.min_confidence_scores.CAR': (0.2, 0.6),
        'detection_score_thresholds.min_confidence_scores.TRUCK': (0.5, 0.1),
        'detection_score_thresholds.min_confidence_scores.BUS': (0.1, 0.1),
        'detection_score_thresholds.min_confidence_scores.BICYCLE': (0.1, 0.1),
        'detection_score_thresholds.min_confidence_scores.PEDESTRIAN': (0.1, 0.1),
    }).postprocess
    near, far, out = car_at(10, 10), car_at(20, 20), car_at(30, 30)
    raw = proposals([near, far, near, far, out], [0.4] * 5, [0, 0, 1, 1, 0])
    assert sorted(decode(raw, config).proposal_ids) == [0, 3]


@pytest.mark.parametrize('limit', [50.0, 121.0])
def test_distance_exactly_at_a_limit_belongs_to_the_next_bin(limit):
    """A network cell at the origin offset keeps x exact: the grid begins at 0 here."""
    config = BEVFusionConfig.from_parameters({
        'point_cloud_range': (0.0, 0.0, -3.0, 240.0, 240.0, 5.0), 'voxel_size': (0.5, 0.5, 0.2),
        'detection_score_thresholds.distance_bin_upper_limits': (limit,),
        **{f'detection_score_thresholds.min_confidence_scores.{name}': (0.1,)
           for name in CONFIG.class_names}}).postprocess
    raw = proposals([car_at()] * 2, [0.9, 0.9], [0, 0])
    raw.bbox_pred[0] = limit / 4, np.nextafter(F32(limit / 4), F32(0))
    raw.bbox_pred[1] = 0
    assert decode(raw, config).proposal_ids.tolist() == [1]


@pytest.mark.parametrize(('class_id', 'norm', 'kept'), [
    (0, 0.3, True), (0, 0.29, False), (3, 0.31, True), (4, 0.0, True)])
def test_short_sin_cos_vectors_are_dropped_per_class(class_id, norm, kept):
    raw = proposals([car_at()], [0.9], [class_id])
    raw.bbox_pred[6:8, 0] = 0, norm
    assert len(decode(raw, CONFIG)) == kept


def test_equal_scores_keep_the_order_of_the_proposals():
    scores = [0.3, 0.5, 0.3, 0.5, 0.9, 0.3]
    found = decode(proposals([car_at(i) for i in range(6)], scores, [0] * 6), CONFIG)
    assert found.proposal_ids.tolist() == [4, 1, 3, 0, 2, 5]


@pytest.mark.parametrize('class_id', [-1, 5, 2 ** 40, -2 ** 40])
def test_unknown_class_index_passes_by_the_strictest_threshold(class_id):
    """A38: an index that the class list lacks is data, not an exception."""
    config = BEVFusionConfig.from_parameters(
        {'detection_score_thresholds.min_confidence_scores.BUS': (0.4,) * 4}).postprocess
    raw = proposals([car_at()] * 2, [0.39, 0.41], [class_id] * 2, yaw_norm=0.01)
    found = decode(raw, config)
    assert found.proposal_ids.tolist() == [1]
    assert found.class_ids.tolist() == [class_id]


@pytest.mark.parametrize('value', [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('row', [*range(10), 'score'])
def test_non_finite_outputs_are_dropped_and_counted(row, value):
    raw = proposals([car_at(), car_at(40)], [0.9, 0.8], [0, 0])
    if row == 'score':
        raw.score[0] = value
    else:
        raw.bbox_pred[row, 0] = value
    found = decode(raw, CONFIG)
    assert found.num_non_finite == 1
    assert found.proposal_ids.tolist() == [1]
    assert np.isfinite(found.boxes_xyzlwh_yaw).all()


@pytest.mark.filterwarnings('error')
def test_finite_outputs_that_overflow_are_dropped_in_silence():
    raw = proposals([car_at(i) for i in range(4)], [0.9] * 4, [0] * 4)
    raw.bbox_pred[3, 0] = 89  # exp(89) is beyond float32
    raw.bbox_pred[0, 1] = 3e38
    raw.bbox_pred[6:8, 2] = 3e38  # yaw of 45 degrees all the same
    found = decode(raw, CONFIG)
    assert found.proposal_ids.tolist() == [2, 3]
    assert found.num_non_finite == 1
    assert found.boxes_xyzlwh_yaw[0, 6] == pytest.approx(math.pi / 4)


def test_nothing_above_threshold_gives_empty_arrays():
    found = decode(proposals([car_at()], [0.05], [0]), CONFIG)
    assert found.boxes_xyzlwh_yaw.shape == (0, 7)
    assert found.velocities_xy.shape == (0, 2)
    assert len(decode(proposals([], [], []), CONFIG)) == 0


def naive(raw: RawDetections, config) -> list[tuple[int, list[float]]]:
    """Decode proposal by proposal with float32 scalars; return (proposal, box) in final order."""
    found = []
    for j in range(len(raw.score)):
        p, s, label = raw.bbox_pred[:, j], raw.score[j], raw.label_pred[j]
        if not (np.isfinite(p).all() and np.isfinite(s)):
            continue
        with np.errstate(over='ignore'):
            size = np.exp(p[3:6].astype(np.float64)).astype(F32)
        if not np.isfinite(size).all():
            continue
        known = 0 <= label < len(config.class_names)
        norm = np.sqrt(F32(p[6] * p[6]) + F32(p[7] * p[7]))
        if known and norm < config.yaw_norm_thresholds[label]:
            continue
        x, y = (F32(F32(F32(p[i] * F32(8)) * F32(0.17)) + F32(-122.4)) for i in (0, 1))
        distance_sq = F32(x * x) + F32(y * y)
        for limit, row in zip(config.distance_limits_m, config.min_scores, strict=True):
            if distance_sq < F32(limit * limit):
                if s > 0 and s >= (row[label] if known else max(row)):
                    yaw = math.atan2(p[6], p[7])
                    found.append((j, [x, y, p[2], *size, yaw], s))
                break
    found.sort(key=lambda entry: -entry[2])  # Python's sort is stable
    return [(j, box) for j, box, _ in found]


VALUES = st.one_of(
    st.floats(-3, 3, width=32), st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 80.0, 90.0]))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_agrees_with_a_loop_over_proposals(data):
    n = data.draw(st.integers(0, 12))
    cells = st.floats(-20, 200, width=32)
    pred = np.array([[data.draw(cells if row < 2 else VALUES) for _ in range(n)]
                     for row in range(10)], F32).reshape(10, n)
    score = np.array([data.draw(st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.3, 0.7, 1.0, np.nan]))
                      for _ in range(n)], F32)
    label = np.array([data.draw(st.integers(-2, 6)) for _ in range(n)], np.int64)
    config = BEVFusionConfig.from_parameters({
        'detection_score_thresholds.min_confidence_scores.CAR': (0.1, 0.25, 0.3, 0.7),
        'detection_score_thresholds.min_confidence_scores.PEDESTRIAN': (0.0, 0.3, 1.0, 0.1),
    }).postprocess
    raw = RawDetections(pred, score, label)
    found = decode(raw, config)
    expected = naive(raw, config)
    assert found.proposal_ids.tolist() == [j for j, _ in expected]
    # Single-precision exp and atan2 may differ from a correctly rounded one in the last bits.
    np.testing.assert_allclose(found.boxes_xyzlwh_yaw,
                               np.array([box for _, box in expected], F32).reshape(-1, 7),
                               rtol=5e-7, atol=1e-37)
