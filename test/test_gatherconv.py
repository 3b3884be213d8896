# SPDX-License-Identifier: Apache-2.0
"""The gather convolution: layouts and L1 on the host, its golden, its kernels on the simulator.

Kernels run on the Blackhole functional simulator (tenstorrent/ttsim):
``TT_METAL_SIMULATOR=... pytest -m simulator test/test_gatherconv.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from golden_gatherconv import (
    gather_conv_golden,
    join_pairs,
    split_pairs,
    table_rows,
    target_pages,
)

from tt_perception.bevfusion.columns import padded_channels
from tt_perception.runtime.errors import ConfigError

PRESENT = 0.45  # part of the taps that exist
EMPTY = 0.1  # part of the rows without any

# C_in, C_out, columns, taps of every convolution of the released network.
NETWORK = [
    (16, 16, 9, 3), (16, 32, 9, 3), (32, 32, 9, 3), (32, 64, 9, 3), (64, 64, 9, 3),
    (64, 128, 9, 3), (128, 128, 9, 3), (128, 128, 1, 3), (256, 128, 3, 3), (128, 128, 3, 3),
    (128, 256, 3, 3), (256, 256, 3, 3), (128, 256, 1, 1), (256, 256, 1, 1), (512, 128, 3, 3),
    (128, 16, 3, 3),
]


@dataclass(frozen=True)
class Case:
    """A convolution and random tensors for it, in the forms of the device."""

    c_in: int
    c_out: int
    columns: int = 9
    taps: int = 3
    count: int = 100
    options: dict = field(default_factory=dict)  # of GatherConv
    capacity: int = 128
    first_block: int = 0
    rows_in: int = 150
    seed: int = 0

    @property
    def name(self):
        options = '-'.join(f'{key}={value}' for key, value in self.options.items())
        return f'{self.c_in}-{self.c_out}-{self.columns}x{self.taps}-{self.count}-{options}'

    @property
    def form(self):
        return self.options.get('out_form', 'pairs')

    def _generator(self, salt):
        return torch.Generator().manual_seed(10 * self.seed + salt)

    def weights(self):
        """The same for all seeds."""
        g = torch.Generator().manual_seed(0)
        scale = (self.columns * self.taps * self.c_in * PRESENT) ** -0.5
        weight = torch.randn(self.columns * self.taps, self.c_in, self.c_out, generator=g) * scale
        return weight, torch.randn(self.c_out, generator=g) * 0.3

    def features(self):
        """Values after a ReLU, rows of different sizes."""
        g = self._generator(1)
        values = torch.zeros(self.rows_in, padded_channels(self.c_in))
        values[:, :self.c_in] = torch.randn(self.rows_in, self.c_in, generator=g).relu()
        return split_pairs(values * torch.randn(self.rows_in, 1, generator=g).exp())

    def residual(self):
        if not self.options.get('residual'):
            return None
        return split_pairs(torch.randn(self.capacity, self.c_out, generator=self._generator(2)))

    def table(self):
        """32-bit words; blocks before the first are full, rows from the count on have no tap."""
        g = self._generator(3)
        rows = self.first_block * 32 + self.capacity
        base = torch.randint(0, self.rows_in - 3, (rows, self.columns), generator=g)
        exists = torch.rand(rows, self.columns, self.taps, generator=g) < PRESENT
        exists[torch.rand(rows, generator=g) < EMPTY] = False
        exists[self.first_block * 32 + self.count:] = False
        mask = (exists * torch.tensor([1, 2, 4])[:self.taps]).sum(dim=2)
        words = torch.where(mask > 0, base << 3 | mask, 0).to(torch.int32)
        return words.view(-1, 32, self.columns).transpose(1, 2).reshape(-1, self.columns * 32)

    def counts(self):
        counts = torch.full((1, 16), 7, dtype=torch.int32)
        counts[0, 3] = self.count
        return counts

    def exact(self):
        """The output rows in float64."""
        weight, bias = self.weights()
        rows = table_rows(self.table(), self.columns, self.taps, self.first_block)[:self.count]
        values = join_pairs(self.features())[:, :self.c_in].double()
        values = torch.cat([values, torch.zeros(1, self.c_in)])  # -1 is the row of zeros
        sums = torch.einsum('rtc,tco->ro', values[rows], weight.double())
        there = (rows >= 0).any(dim=1, keepdim=True)
        sums += bias * (there if self.options.get('bias_where_present') else 1.0)
        if self.options.get('residual'):
            sums += join_pairs(self.residual())[:self.count]
        return sums.relu() if self.options.get('relu', True) else sums

    def values_of(self, out):
        """Values in rows of ``out``, float64."""
        return (join_pairs(out) if self.form == 'pairs' else out).double()


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def like_gather_conv(case):
    """What the golden looks at."""
    weight, bias = case.weights()
    first = weight.bfloat16().float()
    defaults = dict(relu=True, residual=False, out_form='pairs', bias_where_present=False)
    return SimpleNamespace(columns=case.columns, taps=case.taps, channels_out=case.c_out,
                           weight_terms=(first, weight - first), bias=bias,
                           **{**defaults, **case.options})


def by_name(cases):
    return pytest.mark.parametrize('case', cases, ids=lambda case: case.name)


# The golden.

@pytest.mark.parametrize('taps', [1, 2, 3])
def test_golden_decodes_words(taps):
    case = Case(16, 16, columns=2, taps=taps, count=70, capacity=96, first_block=1)
    words, found = case.table(), table_rows(case.table(), 2, taps, 1)
    assert found.shape == (96, 2 * taps)
    for row in range(96):
        for column in range(2):
            word = int(words[1 + row // 32, column * 32 + row % 32])
            following = word >> 3
            for tap in range(taps):
                exists = word >> tap & 1
                assert found[row, column * taps + tap] == (following if exists else -1)
                following += exists


def test_golden_takes_the_highest_base():
    words = torch.tensor([[(2**29 - 4) << 3 | 5] * 32], dtype=torch.int64).to(torch.int32)
    assert table_rows(words.view(torch.uint32), 1, 3)[0].tolist() == [2**29 - 4, -1, 2**29 - 3]


@by_name([
    Case(16, 32),
    Case(32, 16, 1, 3, first_block=2, options=dict(relu=False)),
    Case(32, 32, 3, 3, options=dict(residual=True)),
    Case(32, 32, 1, 1, count=128, options=dict(bias_where_present=True, out_form='fp32')),
    Case(16, 16, 1, 3, count=0, options=dict(out_form='bf16')),
])
def test_golden_convolves(case):
    width = case.c_out * (2 if case.form == 'pairs' else 1)
    dtype = torch.float32 if case.form == 'fp32' else torch.bfloat16
    out = torch.full((case.capacity, width), -7.0, dtype=dtype)
    found = gather_conv_golden(like_gather_conv(case), case.features(), case.table(),
                               case.counts().view(torch.uint32), 3, out,
                               table_first_block=case.first_block, residual=case.residual())
    assert found is out and (out[case.count:] == -7).all()
    limit = 4e-3 if case.form == 'bf16' else 2e-5
    assert relative_error(case.values_of(out[:case.count]), case.exact()) < limit


@pytest.mark.parametrize('target', [
    dict(), dict(offset=5), dict(rows_per_page=2), dict(width=4, outer=16, inner=2, offset=3),
])
def test_golden_places_rows(target):
    target = SimpleNamespace(**{**dict(rows_per_page=1, width=None, outer=0, inner=1, offset=0),
                                **target})
    page, slot = target_pages(20, target)
    for row in range(20):
        place = row // target.rows_per_page
        if target.width is None:
            expected = target.offset + place
        else:
            line, across = divmod(place, target.width)
            expected = target.offset + line * target.outer + across * target.inner
        assert (page[row], slot[row]) == (expected, row % target.rows_per_page)


def test_golden_splits_as_the_kernel_does(gatherconv):
    values = torch.randn(300, 48) * torch.randn(300, 1).exp()
    values[7] = 0.0
    assert torch.equal(split_pairs(values), gatherconv.split_rows(values))


# On the host.

@pytest.fixture(scope='module')
def gatherconv():
    pytest.importorskip('ttnn')
    from tt_perception.bevfusion.tt import gatherconv
    return gatherconv


@pytest.fixture
def without_device(gatherconv, monkeypatch):
    """The module, with weights that stay on the host."""
    monkeypatch.setattr(gatherconv.ttnn, 'from_torch', lambda tensor, **kwargs: tensor)
    return gatherconv


class Grid:
    def compute_with_storage_grid_size(self):
        return SimpleNamespace(x=11, y=10)


class Shaped:
    def __init__(self, *shape):
        self.shape = shape


def conv_of(module, case, **kwargs):
    options = {'relu': True, **case.options, **kwargs}
    device = options.pop('device', Grid())
    return module.GatherConv(device, *case.weights(), columns=case.columns, taps=case.taps,
                             **options)


def significant_bits(values, step):
    return torch.log2((values / step).abs().max() + 1).ceil()


def test_rows_have_seven_bits_in_common_steps(gatherconv):
    values = torch.randn(500, 32) * torch.randn(500, 1).exp()
    values[3] = torch.linspace(127.4, 127.6, 32)  # would round to 128 steps
    hi, lo = gatherconv.split_rows(values).float().chunk(2, dim=1)
    for row in range(len(values)):
        greatest = values[row].abs().max()
        step = 2.0 ** (torch.floor(torch.log2(greatest * (1 + 2**-7))) - 6)
        assert torch.equal(torch.round(hi[row] / step) * step, hi[row])
        assert significant_bits(hi[row], step) <= 7
        assert (hi[row] + lo[row] - values[row]).abs().max() <= greatest * 2**-15


def test_first_terms_have_five_bits_in_steps_of_eight_channels(gatherconv):
    weight = torch.randn(3, 32, 5)
    first, second = gatherconv.split_weight(weight)
    assert torch.equal(first.bfloat16().float(), first)
    assert torch.equal(second.bfloat16().float(), second)
    assert relative_error(first + second, weight) < 5e-5
    for tap in range(3):
        for group in range(0, 32, 8):
            for out in range(5):
                column = first[tap, group:group + 8, out]
                greatest = weight[tap, group:group + 8, out].abs().max()
                step = 2.0 ** (torch.floor(torch.log2(greatest * (1 + 2**-5))) - 4)
                assert torch.equal(torch.round(column / step) * step, column)
                assert significant_bits(column, step) <= 5


@by_name([
    Case(16, 16, options=dict(residual=True)), Case(16, 64, 1, 3), Case(32, 32, 1, 1),
    Case(64, 128, 3, 3, options=dict(residual=True)), Case(5, 20, 1, 3), Case(512, 128, 1, 3),
])
def test_layout_of_weights(without_device, case):
    conv = conv_of(without_device, case)
    weight, bias = case.weights()
    tiles_out, parts = conv.plan.out_tiles, conv.plan.parts
    assert tiles_out * parts * 32 >= conv.channels_out
    tiles = conv._constants.float().view(parts, -1, 32, 32)
    terms = torch.stack(conv.weight_terms)
    assert relative_error(terms.sum(0)[:, :case.c_in, :case.c_out], weight) < 5e-5
    rows_of_tap = max(conv.channels_in // 32, 1)
    for part in range(parts):
        found = iter(tiles[part])
        for tap in range(case.columns * case.taps):
            for row in range(rows_of_tap):
                for term in range(2):
                    for n in range(tiles_out):
                        tile = next(found)
                        column = (part * tiles_out + n) * 32
                        piece = terms[term, tap, row * 32:row * 32 + 32, column:column + 32]
                        height, width = piece.shape
                        assert torch.equal(tile[:height, :width], piece)
                        if height == 16:  # the lo half of the same tile of input
                            assert torch.equal(tile[16:, :width], piece)
                        assert not tile[:, width:].any()
        for n in range(2 * tiles_out):
            tile = next(found)
            column = (part * tiles_out + n) * 32
            expected = torch.zeros(32)
            if n < tiles_out:
                there = bias[column:column + 32]
                expected[:len(there)] = there
            assert torch.equal(tile[0] + tile[8] + tile[16], expected)
            assert not tile[[1, 7, 9, 15, 17, 31]].any()
        if conv.residual:
            for n in range(tiles_out):
                for m in range(2 * tiles_out):
                    tile = next(found)
                    if n != m:
                        assert not tile.any()
                    elif conv.channels_out == 16:
                        pair = torch.arange(32.0)
                        assert torch.equal((pair @ tile)[:16], pair[:16] + pair[16:])
                        assert not tile[:, 16:].any()
                    else:
                        assert torch.equal(tile, torch.eye(32))
        ones = next(found)
        assert ones.sum() == 96 and (ones[:, [0, 8, 16]] == 1).all()
        assert next(found, None) is None


@pytest.mark.parametrize(('c_in', 'c_out', 'columns', 'taps'), NETWORK)
@pytest.mark.parametrize('residual', [False, True])
def test_every_layer_fits_l1(without_device, c_in, c_out, columns, taps, residual):
    case = Case(c_in, c_out, columns, taps, options=dict(residual=residual))
    chosen = conv_of(without_device, case).plan
    assert chosen.l1_bytes <= 1_440_000
    assert chosen.out_tiles * chosen.parts * 32 == max(c_out, 32)
    assert columns * taps % chosen.group == 0


def test_too_much_for_l1(without_device):
    with pytest.raises(ConfigError, match='^weight: found .* bytes of L1 a core, expected'):
        conv_of(without_device, Case(1024, 32, 9, 3))


@pytest.mark.parametrize(('change', 'name'), [
    (dict(taps=4), 'taps'), (dict(columns=8), 'taps'), (dict(taps=0), 'taps'),
    (dict(out_form='int8'), 'out_form'), (dict(fidelity='LoFi'), 'fidelity'),
    (dict(max_cores=0), 'max_cores'),
])
def test_refuses(without_device, change, name):
    options = {'columns': 9, 'taps': 3, 'relu': True, **change}
    with pytest.raises(ConfigError, match=f'^{name}: found .*, expected') as caught:
        without_device.GatherConv(Grid(), *Case(16, 16).weights(), **options)
    assert '\n' not in str(caught.value)


def test_refuses_a_bias_of_another_size(without_device):
    with pytest.raises(ConfigError, match='^weight: found .* bias .*, expected'):
        without_device.GatherConv(Grid(), torch.zeros(27, 16, 16), torch.zeros(8), columns=9,
                                  taps=3, relu=True)


@pytest.mark.parametrize(('change', 'name'), [
    (dict(features=Shaped(64, 16)), 'features'), (dict(table=Shaped(2, 32)), 'table'),
    (dict(out=Shaped(64, 32)), 'out'), (dict(residual=None), 'residual'),
    (dict(residual=Shaped(64, 32)), 'residual'),
    (dict(out=Shaped(64, 128), target=dict(channels=64, channel_offset=48)), 'target'),
    (dict(out=Shaped(64, 128), target=dict(channels=64, channel_offset=8)), 'target'),
])
def test_refuses_tensors(without_device, change, name):
    conv = conv_of(without_device, Case(16, 32, 3, 3, options=dict(residual=True)))
    tensors = dict(features=Shaped(64, 32), table=Shaped(2, 96), out=Shaped(64, 64),
                   residual=Shaped(64, 64), target=None, **{})
    tensors.update(change)
    if tensors['target']:
        tensors['target'] = without_device.Target(**tensors['target'])
    with pytest.raises(ConfigError, match=f'^{name}: found .*, expected'):
        conv(tensors.pop('features'), tensors.pop('table'), Shaped(1, 16), 0,
             tensors.pop('out'), **tensors)


def test_cost_counts(without_device):
    case = Case(64, 128, options=dict(residual=True))
    cost = conv_of(without_device, case).cost(rows=320, present_taps=4000)
    products = 27 * 4 + 1 + 4  # tiles of a block: [hi|lo] of all taps, bias, residual
    assert cost.flops == 10 * products * 2 * 4 * 2 * 32**3  # two terms, four tiles of channels
    assert cost.macs_useful == 4000 * 64 * 128
    assert cost.gathered_rows == 2 * 4000  # two parts
    constants = 27 * 2 * 2 * 2 + 4 + 2 * 4 + 1
    assert cost.dram_bytes_read == (2 * 4000 * 256 + 2 * 2 * 10 * 9 * 128
                                    + 2 * 10 * constants * 2048 + 320 * 512)
    assert cost.dram_bytes_written == 320 * 512
    assert cost.fidelity == 'HiFi2'


# On the functional simulator.

class OnDevice:
    """One case with its tensors on the device."""

    def __init__(self, module, device, case, target=None, pages=None, **kwargs):
        self.ttnn, self.device, self.case = module.ttnn, device, case
        self.conv = conv_of(module, case, device=device, **{'max_cores': 4, **kwargs})
        self.target = None if target is None else module.Target(**target)
        channels = self.conv.page_channels(self.target or module.Target())
        self.shape = (pages or case.capacity, channels * (2 if case.form == 'pairs' else 1))
        self.dtype = torch.float32 if case.form == 'fp32' else torch.bfloat16
        self.tensors = {name: self._upload(value, device)
                        for name, value in self._host(case).items()}

    def _host(self, case):
        values = dict(features=case.features(), table=case.table(), counts=case.counts(),
                      out=torch.full(self.shape, -7.0, dtype=self.dtype))
        return values if case.residual() is None else {**values, 'residual': case.residual()}

    def _upload(self, value, device=None):
        words = {'dtype': self.ttnn.uint32} if value.dtype == torch.int32 else {}
        return self.ttnn.from_torch(value, layout=self.ttnn.ROW_MAJOR_LAYOUT, device=device,
                                    **words)

    def put(self, case):
        """Write another case of the same shapes into the tensors."""
        self.case = case
        for name, value in self._host(case).items():
            self.ttnn.copy_host_to_device_tensor(self._upload(value), self.tensors[name])

    def enqueue(self):
        t = self.tensors
        out = self.conv(t['features'], t['table'], t['counts'], 3, t['out'], target=self.target,
                        table_first_block=self.case.first_block, residual=t.get('residual'))
        assert out is t['out']

    def run(self):
        self.enqueue()
        return self.found()

    def found(self):
        return self.ttnn.to_torch(self.tensors['out'])

    def check(self, found):
        case = self.case
        assert (found[case.count:] == -7).all()
        limit = 2.5e-3 if case.form == 'bf16' else 1e-4
        assert relative_error(case.values_of(found[:case.count]), case.exact()) < limit


@pytest.mark.simulator
@by_name([
    Case(16, 16), Case(16, 16, options=dict(residual=True)), Case(16, 32),
    Case(32, 32, options=dict(residual=True)), Case(32, 64, options=dict(relu=False)),
    Case(64, 64, options=dict(residual=True)), Case(64, 128, 3, 3), Case(128, 128, 1, 3),
    Case(128, 128, 9, 3, count=40, capacity=64, options=dict(residual=True)),
    Case(5, 16, 3, 3), Case(96, 96, 1, 3), Case(32, 32, 1, 1), Case(256, 256, 1, 1),
    Case(256, 256, 3, 3, count=64, capacity=64), Case(512, 128, 3, 3, count=33, capacity=64),
    Case(128, 16, 3, 3, options=dict(out_form='fp32', relu=False)),
    Case(32, 64, 3, 3, options=dict(out_form='fp32', residual=True)),
    Case(32, 64, 3, 3, options=dict(out_form='bf16')),
    Case(64, 64, 1, 3, options=dict(bias_where_present=True)),
    Case(16, 16, 9, 3, options=dict(bias_where_present=True, residual=True)),
    Case(32, 32, 1, 3, first_block=3),
    Case(64, 32, 2, 2, count=128),
])
def test_kernels(gatherconv, device, case):
    on_device = OnDevice(gatherconv, device, case)
    found = on_device.run()
    on_device.check(found)
    assert torch.equal(on_device.run(), found)


@pytest.mark.simulator
def test_numbers_do_not_depend_on_cores(gatherconv, device):
    case = Case(32, 128, 3, 3, count=300, capacity=320)
    first = OnDevice(gatherconv, device, case, max_cores=2).run()
    for cores in (3, 8, None):
        assert torch.equal(OnDevice(gatherconv, device, case, max_cores=cores).run(), first)


@pytest.mark.simulator
def test_agrees_with_the_golden(gatherconv, device):
    case = Case(32, 64, 3, 3, options=dict(residual=True))
    on_device = OnDevice(gatherconv, device, case)
    golden = torch.full(on_device.shape, -7.0, dtype=torch.bfloat16)
    gather_conv_golden(on_device.conv, case.features(), case.table(), case.counts(), 3, golden,
                       residual=case.residual())
    found = on_device.run()[:case.count]
    assert relative_error(join_pairs(found), join_pairs(golden[:case.count])) < 5e-5
    hi = found[:, :64].float()
    step = 2.0 ** (torch.floor(torch.log2(hi.abs().amax(dim=1, keepdim=True))) - 6)
    assert torch.equal(torch.round(hi / step) * step, hi)


@pytest.mark.simulator
@pytest.mark.parametrize('residual', [False, True])
def test_one_program_for_every_count(gatherconv, device, residual):
    case = Case(16, 32, 3, 3, options=dict(residual=residual))
    on_device = OnDevice(gatherconv, device, case)
    on_device.check(on_device.run())
    programs = device.num_program_cache_entries()
    for seed, count in enumerate((0, 1, 31, 32, 33, 96, 128)):
        on_device.put(replace(case, count=count, seed=seed))
        on_device.check(on_device.run())
    assert device.num_program_cache_entries() == programs


@pytest.mark.simulator
def test_layers_of_one_form_share_a_program(gatherconv, device):
    OnDevice(gatherconv, device, Case(16, 16, 1, 3)).run()
    programs = device.num_program_cache_entries()
    other = OnDevice(gatherconv, device, Case(16, 16, 1, 3, seed=5, capacity=256, rows_in=90,
                                              first_block=2, count=200))
    other.check(other.run())
    assert device.num_program_cache_entries() == programs


TARGETS = [
    (Case(32, 32, 1, 3), dict(offset=3), 140),
    (Case(16, 16, 1, 3), dict(rows_per_page=2, channels=64, channel_offset=32), 64),
    (Case(32, 128, 1, 3, count=128, options=dict(bias_where_present=True)),
     dict(rows_per_page=2, channels=256), 64),
    (Case(32, 64, 1, 1), dict(channels=192, channel_offset=64, width=12, outer=48, inner=2,
                              offset=25), 440),
    (Case(32, 32, 1, 1, options=dict(out_form='fp32')), dict(width=7, outer=7), 105),
    (Case(32, 32, 1, 1, options=dict(out_form='bf16')), dict(rows_per_page=3), 34),
]


@pytest.mark.simulator
@pytest.mark.parametrize(('case', 'target', 'pages'), TARGETS)
def test_targets(gatherconv, device, case, target, pages):
    """Every channel of every page, against the golden's places; the others stay."""
    on_device = OnDevice(gatherconv, device, case, target, pages)
    golden = torch.full(on_device.shape, -7.0, dtype=on_device.dtype)
    gather_conv_golden(on_device.conv, case.features(), case.table(), case.counts(), 3, golden,
                       target=on_device.target)
    found = on_device.run()
    untouched = golden == -7
    assert torch.equal(found == -7, untouched)
    found, golden = (case.values_of(torch.where(untouched, 0, rows)) for rows in (found, golden))
    assert relative_error(found, golden) < (2.5e-3 if case.form == 'bf16' else 1e-4)


@pytest.mark.simulator
def test_trace_replay_equals_eager(gatherconv, device):
    if os.environ.get('TT_METAL_SLOW_DISPATCH_MODE'):
        pytest.skip('TT_METAL_SLOW_DISPATCH_MODE is set: slow dispatch has no traces')
    ttnn = gatherconv.ttnn
    case = Case(32, 64, 3, 3, options=dict(residual=True, bias_where_present=True))
    on_device = OnDevice(gatherconv, device, case)
    on_device.run()
    trace = ttnn.begin_trace_capture(device, cq_id=0)
    on_device.enqueue()
    ttnn.end_trace_capture(device, trace, cq_id=0)
    for seed, count in enumerate((100, 0, 1, 128, 57), 1):
        on_device.put(replace(case, count=count, seed=seed))
        ttnn.execute_trace(device, trace, cq_id=0, blocking=True)
        replayed = on_device.found()
        on_device.check(replayed)
        on_device.put(on_device.case)
        assert torch.equal(on_device.run(), replayed)
    ttnn.release_trace(device, trace)
