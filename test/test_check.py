# SPDX-License-Identifier: Apache-2.0
"""``tt_perception check``: its costs of our own kernels, its errors, its tables on the mock."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tt_perception import check
from tt_perception.bevfusion.columns import map_columns
from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.tt.accounting import (
    FrameCounts,
    Taps,
    gather_cycles,
    table_of,
    taps_of,
)
from tt_perception.runtime.cost import Call
from tt_perception.runtime.errors import ConfigError, DeviceError

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ('riscv64-unknown-elf-as', 'riscv64-unknown-elf-ld')
CONFIG = NetworkConfig()
ENCODER = 'pts_middle_encoder'

needs_mock = pytest.mark.skipif(
    importlib.util.find_spec('ttnn') is None or not all(map(shutil.which, TOOLS)),
    reason='the mock device needs ttnn (Python 3.10 or 3.12) and the Debian or Ubuntu package '
           'binutils-riscv64-unknown-elf')


# ---- our own kernels ----

@pytest.mark.parametrize(('block', 'expected'), [
    ('conv_input', 'subm_1'), ('conv_input.0', 'subm_1'),
    ('encoder_layers.encoder_layer1.0', 'subm_1'), ('encoder_layers.encoder_layer3.1', 'subm_3'),
    ('encoder_layers.encoder_layer3.2', 'down_4'), ('encoder_layers.encoder_layer1.2.0', 'down_2'),
    ('encoder_layers.encoder_layer4.1.conv2', 'subm_4'), ('conv_out.0', 'out'), ('bev', 'out')])
def test_a_block_reads_one_table(block, expected):
    assert table_of(f'{ENCODER}.{block}') == expected


@pytest.mark.parametrize(('rows_in', 'table', 'kernel'), [
    ((180, 180), (180, 180), 3), ((180, 180), (90, 90), 3), ((90, 90), (90, 90), 3),
    ((180, 180), (180, 180), 1), ((90, 90), (90, 90), 1)])
def test_the_taps_of_a_map_are_those_of_its_table(rows_in, table, kernel):
    words = map_columns(rows_in, rows_in[0] // table[0], kernel)
    call = Call(SimpleNamespace(columns=kernel, taps=kernel),
                (np.empty((rows_in[0] * rows_in[1], 4)), words), {})
    taps = taps_of(call, 'pts_backbone.blocks.1', None, CONFIG)
    assert taps == (table[0] * table[1], kernel ** 2,
                    sum(np.count_nonzero(words & bit) for bit in (1, 2, 4)),
                    np.count_nonzero(words),
                    rows_in[0] * rows_in[1])
    inside = [3 * n - (2 if n == rows_in[0] else 1) for n in table] if kernel == 3 else table
    assert taps.present == inside[0] * inside[1]


def test_the_gather_costs_its_instructions_on_the_busiest_core():
    def conv(channels_in=32, group=9, parts=1):
        return SimpleNamespace(channels_in=channels_in, columns=9, taps=3,
                               plan=SimpleNamespace(group=group, parts=parts))

    rows = 110 * 32
    full = Taps(rows, 27, rows * 27, rows * 9, rows)
    in_full = 32 * (9 * 11 + 27 * 31 + 45) / 2
    assert gather_cycles(conv(), full, 110) == in_full
    empty = full._replace(present=0, columns=0)
    assert gather_cycles(conv(), empty, 110) == 32 * (9 * 17 + 45) / 2
    one_each = full._replace(present=rows * 9)
    assert gather_cycles(conv(), one_each, 110) == 32 * (9 * (11 + 31 + 2 * 17) + 45) / 2
    assert gather_cycles(conv(16), one_each, 110) == 32 * (9 * (11 + 31 + 2 * 56) + 45) / 2
    assert gather_cycles(conv(128, 1), one_each, 110) == 32 * (9 * (36 + 2 * 17) + 45) / 2
    assert gather_cycles(conv(parts=2), full, 110) == pytest.approx(2 * in_full)
    more = full.scaled_to(rows + 32, rows)
    assert gather_cycles(conv(), more, 110) == pytest.approx(2 * in_full)


def test_a_full_bucket_has_the_neighbours_of_its_model():
    tables = {name: Taps(100, 3 if name == 'out' else 27, 450, 250, 80)
              for name in ('subm_1', 'subm_2', 'subm_3', 'subm_4', 'down_2', 'down_3', 'down_4',
                           'out')}
    full = FrameCounts('a', (100,) * 5, tables).filling((6400, 3200, 1600, 320), 640)
    assert full.active_rows == (6400, 3200, 1600, 320, 320)
    assert full.tables['subm_1'] == (6400, 27, 28800, 16000, 6400)
    assert full.tables['down_2'] == (3200, 27, 14400, 8000, 6400)
    assert full.tables['out'] == (320, 3, 1440, 800, 320)


# ---- errors ----

@pytest.mark.parametrize('device', ['card', '-1', ''])
def test_an_unknown_device_is_one_line(device):
    with pytest.raises(ConfigError) as caught:
        check.check(device)
    assert str(caught.value) == f"device: found {device!r}, expected 'mock' or a number"


def test_a_missing_card_is_one_line(monkeypatch):
    for name in ('TT_METAL_MOCK_CLUSTER_DESC_PATH', 'TT_METAL_SIMULATOR'):
        monkeypatch.delenv(name, raising=False)
    if Path('/dev/tenstorrent').exists():
        pytest.skip('there is a card')
    with pytest.raises(DeviceError) as caught:
        check.check('0')
    assert str(caught.value).startswith('device 0: ') and '\n' not in str(caught.value)


# ---- the mock device ----

PROGRAM = '''
import json, sys
from pathlib import Path
from tt_perception.check import check, table
result = check('mock', clouds=[Path(name) for name in sys.argv[1:]])
print(json.dumps([result, table(result), table(result, None)]))
'''


@pytest.fixture(scope='module')
def checked(tmp_path_factory):
    """Return the result for a cloud file, its short and its long table."""
    folder = tmp_path_factory.mktemp('check')
    rng = np.random.default_rng(0)
    np.save(folder / 'cloud.npy', rng.uniform(-20, 20, (3000, 3)).astype(np.float32) * (1, 1, .1))
    done = subprocess.run([sys.executable, '-c', PROGRAM, 'cloud.npy'], cwd=folder, timeout=900,
                          env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@needs_mock
def test_every_variant_is_counted(checked):
    result, _, _ = checked
    assert [v['variant'] for v in result['variants']] == ['sparse_0', 'sparse_1', 'sparse_2',
                                                          'dense']
    for variant in result['variants']:
        own = [o for o in variant['operations'] if o['name'] == 'GatherConv']
        assert len(own) == 21
        assert all(o['flops'] > 0 and o['gathered_rows'] > 0 and o['cycles'] > 0 for o in own)
        assert all(o['block'] for o in variant['operations'])
        assert not any('generic_op' in o['name'] for o in variant['operations'])
        assert variant['seconds'] == pytest.approx(sum(o['seconds']
                                                       for o in variant['operations']))
        assert 0 < variant['floor_s'] < variant['seconds']
        assert variant['l1_peak'] < 1_461_120
        assert variant['dram_peak'] < 32e9
    assert sum('Peaks' in o['name'] for o in result['variants'][-1]['operations']) == 1


@needs_mock
def test_every_movement_has_a_reason(checked):
    result, _, _ = checked
    assert result['moves']
    assert not [move for move in result['moves'] if move['reason'] == 'not explained']


@needs_mock
def test_three_forms_are_compared_for_every_frame(checked):
    result, _, _ = checked
    seeded, file = result['frames']
    assert abs(seeded['voxels'] - 120_000) < 2_000
    assert file['frame'] == 'cloud.npy' and file['bucket'] == [64_000, 64_000, 32_000, 16_000]
    for frame in result['frames']:
        stock, dense, own = frame['formulations']
        assert own['total_s'] < min(stock['total_s'], dense['total_s'])
        assert stock['row_ns'] == pytest.approx(5)
        assert own['row_ns'] < 5
        for form in frame['formulations']:
            assert form['total_s'] >= form['upload_s'] + max(
                form['dram_s'], form['matrix_s'], form['rows_s'])
        assert frame['frame_s'] == pytest.approx(
            own['total_s'] + frame['dense_s'] + frame['read_back_s'])
    assert seeded['formulations'][0]['frame_s'] > result['goal_s']  # stock operations alone


@needs_mock
def test_tables_fit_a_terminal(checked):
    result, short, long = checked
    assert max(map(len, long.splitlines())) <= 120
    assert len(short.splitlines()) < len(long.splitlines())
    assert 'Nothing was timed on a card' in short
    for variant in result['variants']:
        assert f'\n{variant["variant"]}: ' in short
