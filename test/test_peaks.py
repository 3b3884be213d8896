# SPDX-License-Identifier: Apache-2.0
"""The proposal selection: its torch form against the reference, its kernels against that form."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from golden_peaks import golden_peaks
from hypothesis import given, settings
from hypothesis import strategies as st

from tt_perception.bevfusion.reference import local_maxima, top_k
from tt_perception.runtime.errors import ConfigError

NAN, INF = float('nan'), float('inf')


@dataclass(frozen=True)
class Case:
    """A map and what is asked of it; ``draw`` makes logits [classes, X, Y] from a generator."""

    name: str
    draw: Callable
    size_x: int = 18
    size_y: int = 18
    num_classes: int = 5
    pooled_classes: tuple[int, ...] = (0, 1, 2, 3)
    num_proposals: int = 50

    @property
    def options(self) -> dict:
        return {name: getattr(self, name) for name in
                ('size_x', 'size_y', 'num_classes', 'pooled_classes', 'num_proposals')}

    def logits(self, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.draw((self.num_classes, self.size_x, self.size_y), generator)


def noise(shape, generator):
    return 2 * torch.randn(shape, generator=generator) - 3


def quantised(shape, generator):
    return noise(shape, generator).round()


def constant(shape, generator):
    return torch.full(shape, -4.6)


def ramp(shape, generator):
    return torch.arange(shape[1] * shape[2]).reshape(1, *shape[1:]).expand(shape) / 64 - 2


def high_border(shape, generator):
    logits = noise(shape, generator)
    framed = logits + 20
    framed[:, 1:-1, 1:-1] = logits[:, 1:-1, 1:-1]
    return framed


def plateaus(shape, generator):
    coarse = torch.randn(shape, generator=generator).round()[:, ::4, ::4]
    return coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :shape[1], :shape[2]]


def choose_from(*values):
    def draw(shape, generator):
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]
    return draw


signed_zeros = choose_from(-0.0, 0.0, -1e-45, 1e-45)
infinities = choose_from(INF, -INF, 3.4028235e38, -3.4028235e38, 0.0, 1.0)

ALL = (0, 1, 2, 3, 4)
CASES = [
    Case('noise', noise),
    Case('ties', quantised),
    Case('few survivors', ramp, pooled_classes=ALL),
    Case('no survivors', ramp, size_x=3, size_y=3, pooled_classes=ALL, num_proposals=45),
    Case('constant', constant, pooled_classes=ALL, num_proposals=64),
    Case('plateaus', plateaus, pooled_classes=ALL, num_proposals=33),
    Case('high border', high_border),
    Case('signed zeros', signed_zeros),
    Case('infinities', infinities),
    Case('one pooled class', noise, pooled_classes=(2,)),
    Case('one class', quantised, num_classes=1, pooled_classes=(0,)),
    Case('last two classes', quantised, pooled_classes=(4, 3), num_proposals=1),
    Case('every logit', quantised, size_x=5, size_y=7, num_proposals=175),
    Case('two pages of classes', noise, num_classes=24, pooled_classes=tuple(range(1, 24, 2))),
    Case('long', noise, size_x=261, size_y=3, num_proposals=100),
    Case('wide', quantised, size_x=4, size_y=301, num_proposals=100),
    Case('two rows a core', noise, size_x=131, size_y=19, num_proposals=300),
]
NAN_CASES = [
    Case('some NaN', choose_from(NAN, 1.0, -1.0, -INF, INF, 0.5)),
    Case('only NaN', choose_from(NAN), pooled_classes=ALL),
    Case('NaN of both signs', lambda shape, generator: torch.randint(
        -2 ** 31, 2 ** 31, shape, generator=generator).to(torch.int32).view(torch.float32)),
]
RELEASE = Case('release', noise, size_x=180, size_y=180, num_proposals=500)


def named(cases):
    return pytest.mark.parametrize('case', cases, ids=lambda case: case.name)


def as_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [classes, X, Y] as rows [cells, 16 or 32]; unused columns would win."""
    rows = torch.full((logits[0].numel(), -(-len(logits) // 16) * 16), 1e9)
    rows[:, :len(logits)] = logits.flatten(1).T
    return rows


def by_reference(heatmap: torch.Tensor, logits: torch.Tensor, case: Case) -> torch.Tensor:
    """Return label, cell and logit of the proposals, [K, 3] float64."""
    heatmap = local_maxima(heatmap, case.pooled_classes) if case.pooled_classes else heatmap
    chosen = top_k(heatmap.flatten(), case.num_proposals)
    logit = torch.where(heatmap.flatten()[chosen] == 0, -1e4, logits.flatten()[chosen].double())
    cells = case.size_x * case.size_y
    return torch.stack([chosen // cells, chosen % cells, logit], 1)


def check_against_reference(logits: torch.Tensor, case: Case) -> None:
    """Compare the golden form with the reference, on positive numbers in the order of logits."""
    places = torch.unique(logits + 0.0, return_inverse=True)[1] + 1.0
    expected = by_reference(places, logits, case)
    proposals, cells = golden_peaks(as_rows(logits), **case.options)
    k = case.num_proposals
    label, cell, logit = expected.T
    assert torch.equal(proposals[:k, 3].double(), label)
    assert torch.equal(cells[0, :k].double(), cell)
    assert torch.equal(proposals[:k, 0].double(), logit)
    assert torch.equal(proposals[:k, 1] * case.size_y + proposals[:k, 2], cells[0, :k].float())
    assert torch.equal(proposals[:k, 8:].argmax(1), label.long())


@named(CASES)
def test_golden_is_the_reference(case):
    check_against_reference(case.logits(), case)


def test_golden_is_the_reference_on_sigmoids():
    logits = (RELEASE.logits(7) * 16).round() / 16
    expected = by_reference(logits.sigmoid(), logits, RELEASE)
    proposals, cells = golden_peaks(as_rows(logits), **RELEASE.options)
    assert torch.equal(cells[0, :500].double(), expected[:, 1])
    assert torch.equal(proposals[:500, 0].double(), expected[:, 2])


@st.composite
def maps(draw):
    size_x, size_y = draw(st.integers(3, 8)), draw(st.integers(3, 8))
    num_classes = draw(st.integers(1, 4))
    pooled = draw(st.sets(st.integers(0, num_classes - 1)))
    total = num_classes * size_x * size_y
    values = draw(st.sampled_from([
        st.floats(allow_nan=False, width=32),
        st.sampled_from([-1.0, -0.0, 0.0, 1.0]),
        st.sampled_from([0.0, 1.0]),
    ]))
    logits = draw(st.lists(values, min_size=total, max_size=total))
    case = Case('drawn', None, size_x, size_y, num_classes, tuple(pooled),
                draw(st.integers(1, total)))
    return torch.tensor(logits).reshape(num_classes, size_x, size_y), case


@given(maps())
@settings(max_examples=200, deadline=None)
def test_golden_is_the_reference_on_drawn_maps(drawn):
    check_against_reference(*drawn)


def test_padding_is_marked():
    case = CASES[0]
    proposals, cells = golden_peaks(as_rows(case.logits()), **case.options)
    assert proposals.shape == (64, 32) and cells.shape == (1, 64)
    assert (proposals[50:, 0] == -1e4).all() and not proposals[50:, 1:].any()
    assert not cells[0, 50:].any()
    assert (proposals[:50, 8:].sum(1) == 1).all() and not proposals[:, 4:8].any()


@named(NAN_CASES)
def test_golden_orders_nan_by_its_bits(case):
    proposals, cells = golden_peaks(as_rows(case.logits()), **case.options)
    logit = proposals[:case.num_proposals, 0].numpy()
    positive_nan = np.isnan(logit) & ~np.signbit(logit)
    assert positive_nan[:positive_nan.sum()].all()  # they come first
    rest = logit[~np.isnan(logit)]
    assert (rest[1:] <= rest[:-1]).all()
    assert cells.min() >= 0 and cells.max() < case.size_x * case.size_y


# Everything below needs ttnn, but no device unless the mark says so.

class Grid:
    """As much of a device as sizes need."""

    def __init__(self, x=11, y=10):
        self.x, self.y = x, y

    def compute_with_storage_grid_size(self):
        return self


class Shaped:
    def __init__(self, *shape):
        self.shape = shape


@pytest.fixture(scope='module')
def peaks():
    pytest.importorskip('ttnn')
    from tt_perception.bevfusion.tt import peaks
    return peaks


@pytest.fixture
def without_device(peaks, monkeypatch):
    monkeypatch.setattr(peaks.ttnn, 'allocate_tensor_on_device', lambda *args: None)
    return peaks


@pytest.mark.parametrize('size_x', [3, 18, 109, 110, 111, 180, 261])
@pytest.mark.parametrize('cores', [1, 7, 64, 110, 130])
def test_strips_cover_every_row_once(peaks, size_x, cores):
    plan = peaks.plan_strips(size_x, cores)
    assert [x for begin, end in plan.ranges for x in range(begin, end)] == list(range(size_x))
    assert len(plan.ranges) == plan.strips <= cores
    assert all(0 < end - begin <= plan.rows for begin, end in plan.ranges)


def test_release_has_two_rows_on_ninety_cores(peaks):
    plan = peaks.plan_strips(180, 11 * 10)
    assert (plan.rows, plan.strips) == (2, 90)


@pytest.mark.parametrize(('change', 'name'), [
    ({'size_x': 2}, 'size_x'),
    ({'size_y': 0}, 'size_y'),
    ({'num_classes': 0, 'pooled_classes': ()}, 'num_classes'),
    ({'num_classes': 25}, 'num_classes'),
    ({'pooled_classes': (0, 5)}, 'pooled_classes'),
    ({'pooled_classes': (-1,)}, 'pooled_classes'),
    ({'num_proposals': 0}, 'num_proposals'),
    ({'num_proposals': 18 * 18 * 5 + 1}, 'num_proposals'),
    ({'size_x': 1000, 'size_y': 1000, 'num_proposals': 5000}, 'num_proposals'),
])
def test_refuses(without_device, change, name):
    with pytest.raises(ConfigError, match=f'^{name}: found .*, expected') as caught:
        without_device.Peaks(Grid(), **{**CASES[0].options, **change})
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(('position', 'name'), [(0, 'logits'), (1, 'proposals'), (2, 'cells')])
def test_refuses_tensors_of_another_shape(without_device, position, name):
    tensors = [Shaped(324, 16), Shaped(64, 32), Shaped(1, 64)]
    tensors[position] = Shaped(64, 64)
    with pytest.raises(ConfigError, match=f'^{name}: found shape'):
        without_device.Peaks(Grid(), **CASES[0].options)(*tensors)


def test_cost_counts_bytes(without_device):
    cost = without_device.Peaks(Grid(), **RELEASE.options).cost()
    halo = 180 + 2 * 89  # each strip of two rows also reads the row before and after it
    lists = 90 * 4032
    assert cost.dram_bytes_read == halo * 180 * 64 + lists
    assert cost.dram_bytes_written == lists + 512 * 33 * 4
    assert 150_000 < cost.estimated_cycles < 250_000
    assert cost.l1_bytes_per_core < 600_000


# On the functional simulator.

class OnDevice:
    """The kernels of one case with their tensors."""

    def __init__(self, module, device, case):
        self.ttnn = module.ttnn
        self.case = case
        self.peaks = module.Peaks(device, **case.options)
        padded = self.peaks.padded_proposals
        self.logits = self._allocate(device, [case.size_x * case.size_y, self.peaks.width])
        self.proposals = self._allocate(device, [padded, 32])
        self.cells = self._allocate(device, [1, padded], self.ttnn.uint32)

    def _allocate(self, device, shape, dtype=None):
        ttnn = self.ttnn
        return ttnn.allocate_tensor_on_device(ttnn.Shape(shape), dtype or ttnn.float32,
                                              ttnn.ROW_MAJOR_LAYOUT, device,
                                              ttnn.DRAM_MEMORY_CONFIG)

    def put(self, logits):
        host = self.ttnn.from_torch(as_rows(logits), layout=self.ttnn.ROW_MAJOR_LAYOUT)
        self.ttnn.copy_host_to_device_tensor(host, self.logits)

    def run(self):
        self.peaks(self.logits, self.proposals, self.cells)

    def check(self, logits):
        """Compare what the tensors hold, bit for bit."""
        proposals, cells = golden_peaks(as_rows(logits), **self.case.options)
        found = self.ttnn.to_torch(self.proposals)
        assert torch.equal(self.ttnn.to_torch(self.cells).int(), cells)
        assert torch.equal(found.view(torch.int32), proposals.view(torch.int32))


@pytest.mark.simulator
@named([*CASES, *NAN_CASES, RELEASE])
def test_kernels(peaks, device, case):
    on_device = OnDevice(peaks, device, case)
    for seed in (0, 1):  # the second call finds the first one's program and its left-overs
        on_device.put(case.logits(seed))
        on_device.run()
        on_device.check(case.logits(seed))


@pytest.mark.simulator
@pytest.mark.parametrize('rows', [5, 18])
def test_kernels_on_few_cores(peaks, device, monkeypatch, rows):
    """The last of four strips is shorter than the others; a single strip has no neighbours."""
    monkeypatch.setattr(peaks, 'plan_strips', lambda size_x, _: peaks.StripPlan(size_x, rows))
    case = CASES[0]
    on_device = OnDevice(peaks, device, case)
    on_device.put(case.logits())
    on_device.run()
    on_device.check(case.logits())


@pytest.mark.simulator
def test_trace_replay(peaks, device):
    if os.environ.get('TT_METAL_SLOW_DISPATCH_MODE'):
        pytest.skip('TT_METAL_SLOW_DISPATCH_MODE is set: slow dispatch has no traces')
    ttnn, case = peaks.ttnn, CASES[1]
    on_device = OnDevice(peaks, device, case)
    on_device.run()
    trace = ttnn.begin_trace_capture(device, cq_id=0)
    on_device.run()
    ttnn.end_trace_capture(device, trace, cq_id=0)
    for seed in (2, 3, 4):
        on_device.put(case.logits(seed))
        ttnn.execute_trace(device, trace, cq_id=0, blocking=True)
        on_device.check(case.logits(seed))
    ttnn.release_trace(device, trace)
