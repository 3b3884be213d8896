# SPDX-License-Identifier: Apache-2.0
"""Class remapping by footprint area, with the limits of the released artifact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_perception.bevfusion.config import BEVFusionConfig, RemapConfig
from tt_perception.bevfusion.detections import LABELS
from tt_perception.bevfusion.remap import remap_labels
from tt_perception.runtime.errors import ConfigError

F32 = np.float32
UNKNOWN, CAR, TRUCK, BUS, TRAILER, PEDESTRIAN, ANIMAL = (
    LABELS[n] for n in ('UNKNOWN', 'CAR', 'TRUCK', 'BUS', 'TRAILER', 'PEDESTRIAN', 'ANIMAL'))


def released_parameters():
    allow, low, high = np.zeros((8, 8), int), np.zeros((8, 8)), np.zeros((8, 8))
    for source, target, least, most in ((CAR, TRUCK, 12.1, 36.0), (CAR, TRAILER, 36.0, 999.999),
                                        (TRUCK, TRAILER, 36.0, 999.999),
                                        (BUS, TRAILER, 36.0, 999.999)):
        allow[source, target], low[source, target], high[source, target] = 1, least, most
    return {'allow_remapping_by_area_matrix': allow.ravel().tolist(),
            'min_area_matrix': low.ravel().tolist(), 'max_area_matrix': high.ravel().tolist()}


RELEASED = BEVFusionConfig.from_parameters(released_parameters()).remap
ABOVE_36 = np.nextafter(F32(36), F32(40))


@pytest.mark.parametrize(('label', 'area', 'expected'), [
    (CAR, F32(12), CAR),
    (CAR, F32(12.1), TRUCK),  # float32 12.1 lies above the float64 limit
    (CAR, np.nextafter(F32(12.1), F32(0)), CAR),
    (CAR, F32(36), TRUCK),  # both ranges hold 36.0: the first column wins
    (CAR, ABOVE_36, TRAILER),
    (CAR, F32(1000), CAR),
    (TRUCK, F32(36), TRAILER),
    (TRUCK, F32(35.9), TRUCK),
    (BUS, F32(500), TRAILER),
    (PEDESTRIAN, F32(500), PEDESTRIAN),
    (UNKNOWN, F32(500), UNKNOWN),
    (ANIMAL, F32(500), ANIMAL),  # outside of an 8 x 8 matrix
])
def test_released_limits(label, area, expected):
    assert remap_labels(np.array([label], np.uint8), np.array([area], F32), RELEASED).tolist() == [
        expected]


def test_the_given_labels_stay_as_they_are():
    labels = np.array([CAR], np.uint8)
    remap_labels(labels, np.array([50], F32), RELEASED)
    assert labels.tolist() == [CAR]


def test_no_objects():
    assert remap_labels(np.empty(0, np.uint8), np.empty(0, F32), RELEASED).shape == (0,)


@pytest.mark.parametrize('value', [math.inf, -math.inf, math.nan])
def test_a_limit_that_is_not_finite_means_the_largest_double(value):
    values = released_parameters()
    index = BUS * 8 + TRAILER
    values['max_area_matrix'][index] = value  # no upper limit
    values['min_area_matrix'][TRUCK * 8 + TRAILER] = value  # never reached
    config = BEVFusionConfig.from_parameters(values).remap
    labels = np.array([BUS, BUS, TRUCK], np.uint8)
    areas = np.array([35.9, 3e38, 50], F32)
    assert remap_labels(labels, areas, config).tolist() == [BUS, TRAILER, TRUCK]


def test_nan_stays_refused_where_it_has_no_meaning():
    with pytest.raises(ConfigError, match='iou_nms_threshold'):
        BEVFusionConfig.from_parameters({'iou_nms_threshold': math.nan})


def naive(label, area, config):
    if label >= len(config.allow):
        return label
    for column in range(len(config.allow)):
        low, high = (limits[label][column] if math.isfinite(limits[label][column])
                     else 1.7976931348623157e308
                     for limits in (config.min_area_m2, config.max_area_m2))
        if config.allow[label][column] and low <= float(area) <= high:
            return column
    return label


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12).flatmap(lambda side: st.tuples(
    st.lists(st.booleans(), min_size=side ** 2, max_size=side ** 2),
    *[st.lists(st.sampled_from([0.0, 1.0, 12.1, 36.0, math.inf, math.nan]),
               min_size=side ** 2, max_size=side ** 2)] * 2)),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from([0.0, 1.0, 12.1, 36.0, 1e30])),
             max_size=12))
def test_agrees_with_a_loop(matrices, objects):
    side = math.isqrt(len(matrices[0]))
    config = RemapConfig(*(np.array(m).reshape(side, side) for m in matrices))
    labels = np.array([label for label, _ in objects], np.uint8)
    areas = np.array([area for _, area in objects], F32)
    assert remap_labels(labels, areas, config).tolist() == [
        naive(label, area, config) for label, area in zip(labels, areas, strict=True)]
