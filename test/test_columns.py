# SPDX-License-Identifier: Apache-2.0
"""Column tables and pairs: the same inputs as the gather tables, the same values to 16 bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_perception.bevfusion.columns import FrameBuffers, TableLayout, blocks_of, map_columns
from tt_perception.bevfusion.config import CAPACITY_BUCKETS, NetworkConfig
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.seeded import small_config
from tt_perception.bevfusion.sites import SiteLevels

SMALL = small_config()[1]


def buffers(network, capacities=CAPACITY_BUCKETS[-1], num_features=4):
    """Return buffers full of ones: nothing may be left from another frame."""
    layout = TableLayout.of(network, capacities)
    shapes = FrameBuffers.shapes(layout, num_features)
    return FrameBuffers(layout, **{name: np.full(shape, -1).astype(dtype)
                                   for name, (shape, dtype) in shapes.items()})


def fill(into, network, coords_zyx, features):
    sites = SiteLevels(network)
    order = sites.place(coords_zyx)
    into.fill(sites, order, features)
    return order.copy()


def gather_table(words, rows, columns):
    """Decode a column table to input rows [rows, columns * 3], -1 for none."""
    words = words.reshape(-1, columns, 32).transpose(0, 2, 1).reshape(-1, columns)
    assert not words[rows:].any()
    base, taps = words[:rows] >> 3, words[:rows] & 7
    table = np.full((rows, columns, 3), -1)
    for tap in range(3):
        present = taps >> tap & 1 == 1
        before = np.zeros_like(base)
        for earlier in range(tap):
            before += taps >> earlier & 1
        table[..., tap][present] = (base + before)[present]
    return table.reshape(rows, -1)


def random_cells(network, count, seed=0):
    rng = np.random.default_rng(seed)
    x, y, z = network.spatial_shape_xyz
    cells = rng.choice(x * y * (z - 1), count, replace=False)
    return np.stack([cells // (x * y), cells // x % y, cells % x], 1).astype(np.int32)


@given(st.integers(1, 3_000), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_columns_hold_the_gather_tables(count, seed):
    coords_zyx = random_cells(SMALL, count, seed)
    features = np.zeros((count, 4), np.float32)
    found = buffers(SMALL)
    fill(found, SMALL, coords_zyx, features)
    expected = RulebookBuilder(SMALL)(coords_zyx)
    layout = found.layout
    for table, first in zip((*expected.subm, *expected.down), layout.first_blocks, strict=False):
        words = found.tables[first:first + blocks_of(len(table))]
        np.testing.assert_array_equal(gather_table(words, len(table), 9), table)
    np.testing.assert_array_equal(found.counts[0, :4], expected.num_rows[:4])


def test_the_last_table_lists_every_cell():
    coords_zyx = random_cells(SMALL, 2_000)
    found = buffers(SMALL)
    fill(found, SMALL, coords_zyx, np.zeros((2_000, 4), np.float32))
    expected = RulebookBuilder(SMALL)(coords_zyx)
    x, y, z = SMALL.level_shapes_xyz[-1]
    table = gather_table(found.out_table, x * y * z, 1)
    site = expected.coords_xyz[-1]
    row = (site[:, 0] * y + site[:, 1]) * z + site[:, 2]
    np.testing.assert_array_equal(table[row], expected.out)
    rest = np.delete(table, row, axis=0)
    assert (rest == -1).all()


@pytest.mark.parametrize('num_features', [4, 5])
def test_pairs_keep_16_bits_in_the_order_of_the_rows(num_features):
    rng = np.random.default_rng(1)
    coords_zyx = random_cells(SMALL, 500)
    features = rng.normal(0, 50, (500, num_features)).astype(np.float32)
    found = buffers(SMALL, num_features=num_features)
    order = fill(found, SMALL, coords_zyx, features)
    hi, lo = ((half.astype(np.uint32) << 16).view(np.float32).reshape(-1, 16)
              for half in np.hsplit(found.features[:500], 2))
    assert not hi[:, num_features:].any() and not lo[:, num_features:].any()
    value = features[order]
    greatest = abs(value).max(axis=1, keepdims=True)
    assert (abs(hi[:, :num_features] + lo[:, :num_features] - value) <= 2**-16 * greatest).all()
    assert (abs(hi[:, :num_features] - value) <= 2**-7 * greatest).all()
    steps = hi[:, :num_features] / 2.0 ** (np.frexp(greatest * (1 + 2**-7))[1] - 7)
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert (abs(steps) < 128).all()


def test_pairs_of_nothing_are_nothing():
    found = buffers(SMALL)
    fill(found, SMALL, random_cells(SMALL, 5), np.zeros((5, 4), np.float32))
    assert not found.features[:5].any()


def test_a_bucket_never_exceeds_the_network():
    layout = TableLayout.of(SMALL, CAPACITY_BUCKETS[-1])
    assert layout.capacities == SMALL.level_capacities
    full = NetworkConfig()
    for caps in CAPACITY_BUCKETS:
        layout = TableLayout.of(full, caps)
        assert layout.capacities == caps
        assert layout.num_blocks == sum(map(blocks_of, (*caps, *caps[1:])))


def test_networks_of_other_heights():
    network = dataclasses.replace(SMALL, spatial_shape_xyz=(32, 48, 25))
    coords_zyx = random_cells(network, 400)
    found = buffers(network)
    fill(found, network, coords_zyx, np.zeros((400, 4), np.float32))
    expected = RulebookBuilder(network)(coords_zyx)
    first = found.layout.down[2]
    rows = len(expected.down[2])
    table = gather_table(found.tables[first:first + blocks_of(rows)], rows, 9)
    np.testing.assert_array_equal(table, expected.down[2])


@pytest.mark.parametrize('shape', [(4, 6), (18, 18), (10, 7)])
@pytest.mark.parametrize('stride', [1, 2])
def test_map_columns_are_the_taps_of_a_dense_convolution(shape, stride):
    size_x, size_y = shape
    words = map_columns(shape, stride)
    expected = [[(kx * 3 + ky, x * size_y + y)
                 for kx, x in enumerate(range(ox * stride - 1, ox * stride + 2))
                 for ky, y in enumerate(range(oy * stride - 1, oy * stride + 2))
                 if 0 <= x < size_x and 0 <= y < size_y]
                for ox in range(-(-size_x // stride)) for oy in range(-(-size_y // stride))]
    table = gather_table(words, len(expected), 3)
    for row, taps in zip(table, expected, strict=True):
        assert [(k, r) for k, r in enumerate(row) if r >= 0] == taps


def test_map_columns_of_a_pointwise_convolution_have_one_tap():
    words = map_columns((5, 9), kernel_size=1)
    assert words.shape == (2, 32)
    np.testing.assert_array_equal(words.ravel()[:45], np.arange(45) << 3 | 1)
    assert not words.ravel()[45:].any()
