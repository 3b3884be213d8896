# SPDX-License-Identifier: Apache-2.0
"""The command: mistakes are one line on stderr and a known exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tt_perception import cli
from tt_perception.bevfusion.detections import Detections3D

SCORE = 'detection_score_thresholds.min_confidence_scores.'


class FakeModel:
    """Finds nothing in any file."""

    info = {'random_weights': True}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __call__(self, path, columns=None):
        return Detections3D(np.zeros((0, 7), np.float32), np.zeros((0, 2), np.float32),
                            np.zeros(0, np.float32), np.zeros(0, np.uint8),
                            np.zeros(0, np.uint8), np.zeros(0, np.int64),
                            meta={'num_points': 5, 'num_voxels': 4}, timing_ms={'total': 1.0})


@pytest.fixture
def given(monkeypatch):
    """Return the keywords that the model is loaded with."""
    found = {}

    class Loader:
        @staticmethod
        def from_pretrained(source=None, *, backend='auto', device_id=0, **parameters):
            found.update(parameters)
            return FakeModel()

    monkeypatch.setattr('tt_perception.BEVFusion', Loader, raising=False)
    return found


def detect(*params):
    return cli.main(['detect', 'a.pcd', *(word for p in params for word in ('--param', p))])


def test_parameters_are_read_as_yaml(given):
    assert detect('iou_nms_threshold=1e-1', 'voxel_size=[0.1, 0.1, 0.2]', 'use_intensity=true',
                  SCORE + 'CAR=[1, 0.5]') == 0
    assert given == {'iou_nms_threshold': 0.1, 'voxel_size': [0.1, 0.1, 0.2],
                     'use_intensity': True, SCORE + 'CAR': [1, 0.5]}


@pytest.mark.parametrize(('param', 'name'), [
    ('backend=cpu', 'backend: unknown'), ('source=x', 'source: unknown'),
    ('cls=1', 'cls: unknown'), ('device_id=1', 'device_id: unknown'), ('=1', ': unknown'),
    ('voxel_size', '--param'), ('voxel_size=2001-99-99', 'voxel_size'),
    ('voxel_size=!!int x', 'voxel_size'), ('voxel_size=' + '[' * 3_000, 'voxel_size'),
    ('voxel_size=&a [*a]', 'voxel_size'), ('num_proposals=' + '9' * 5_000, 'num_proposals'),
], ids=lambda text: text[:30])
def test_wrong_parameters_are_one_line(given, capsys, param, name):
    assert detect(param) == cli.EXIT_FAILED
    message = capsys.readouterr().err
    assert message.count('\n') == 1 and len(message) < 1_500
    assert message.startswith('tt_perception: ') and name in message


@pytest.mark.parametrize('arguments', [
    ['bench', 'host', '--repeat', '0'], ['bench', 'cpu', '--repeat', '-1'],
    ['bench', 'host', '--voxels', '0'], ['bench', 'host', '--voxels', '30', '-5'],
    ['bench', 'host', '--voxels', '257'], ['bench', 'host', '--repeat', '1e3'],
    ['make-artifact', '--seed', '-1', 'x'], ['make-artifact', '--seed', str(10 ** 30), 'x'],
    ['make-artifact', '--seed', 'a', 'x'],
])
def test_numbers_out_of_range_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert 'expected a whole number from' in capsys.readouterr().err.splitlines()[-1]


def test_file_names_need_not_be_utf_8(given, tmp_path):
    """Under a strict stdout, as with most locales."""
    name = os.fsdecode(b'cloud_\xff.pcd')
    program = ('import sys; from tt_perception import cli; import test_cli, tt_perception; '
               'tt_perception.BEVFusion = type("Loader", (), {"from_pretrained": '
               'staticmethod(lambda *a, **k: test_cli.FakeModel())}); '
               'sys.exit(cli.main(sys.argv[1:]))')
    environment = {**os.environ, 'PYTHONIOENCODING': 'utf-8:strict', 'PYTHONPATH': os.pathsep.join(
        (str(Path(__file__).parent), str(Path(__file__).parents[1])))}
    for arguments in (['detect', name], ['detect', '--json', name]):
        done = subprocess.run([sys.executable, '-c', program, *arguments], env=environment,
                              capture_output=True, check=True)
        text = done.stdout.decode()
        if '--json' in arguments:
            assert json.loads(text)['file'] == name
        else:
            assert text.startswith('cloud_\\udcff.pcd: 0 objects, 5 points')


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='there is no /dev/full')
@pytest.mark.parametrize('unbuffered', ['', '1'])
def test_a_full_disk_is_named_by_stdout(unbuffered):
    with open('/dev/full', 'w') as full:
        done = subprocess.run([sys.executable, '-m', 'tt_perception.cli', 'info', '--json'],
                              env={**os.environ, 'PYTHONUNBUFFERED': unbuffered},
                              stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == cli.EXIT_FAILED
    assert done.stderr == 'tt_perception: standard output: No space left on device\n'


@pytest.mark.parametrize('unbuffered', ['', '1'])
def test_a_reader_that_has_had_enough_is_no_error(unbuffered):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, 'w') as pipe:
        done = subprocess.run([sys.executable, '-m', 'tt_perception.cli', 'info'],
                              env={**os.environ, 'PYTHONUNBUFFERED': unbuffered},
                              stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert done.returncode == cli.EXIT_FAILED
    assert done.stderr == ''


def test_a_picture_says_that_the_weights_are_random(given, monkeypatch, tmp_path):
    pytest.importorskip('matplotlib', reason='matplotlib draws the picture')
    np.save(tmp_path / 'cloud.npy', np.ones((5, 3), np.float32))
    seen = []
    monkeypatch.setattr('tt_perception.picture.birds_eye',
                        lambda *_, warning, **__: seen.append(warning))
    for is_random in (True, False):
        monkeypatch.setitem(FakeModel.info, 'random_weights', is_random)
        assert cli.main(['detect', str(tmp_path / 'cloud.npy'), '--plot', 'out.png']) == 0
    assert seen == ['random weights: boxes mean nothing', None]
