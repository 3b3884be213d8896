# SPDX-License-Identifier: Apache-2.0
"""The three files of a model: from the pinned release, a folder, or a file."""

from __future__ import annotations

import hashlib
import socket

import pytest
from tiny_nets import TINY, grid_of, random_net

from tt_perception.bevfusion import artifact
from tt_perception.bevfusion.artifact import Artifact, resolve
from tt_perception.bevfusion.config import BEVFusionConfig, known_parameters, read_parameter_file
from tt_perception.bevfusion.seeded import write_artifact
from tt_perception.bevfusion.weights import check_against, read_onnx
from tt_perception.runtime.errors import ArtifactError

NAMES = ('bevfusion_lidar.onnx', 'ml_package_bevfusion_lidar.param.yaml',
         'detection_class_remapper.param.yaml')


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f'a connection was tried: {args}')

    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / 'model'
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(name)
    return folder


def test_the_release_is_pinned():
    assert artifact.REPO_ID == 'AutowareFoundation/bevfusion'
    assert artifact.REVISION == 'e1bf164b909d3c6c2642012f9b5ee4d827753220'
    assert {name: digest[:8] for name, digest in artifact.SHA256.items()} == dict(
        zip(NAMES, ('5c290879', '866265b9', '928f9eb1'), strict=True))


def test_a_folder_gives_its_three_files(folder):
    expected = Artifact(*(folder / name for name in NAMES), revision=None)
    assert resolve(folder) == resolve(str(folder)) == resolve(f'{folder}/') == expected


def test_a_file_takes_its_siblings(folder):
    (folder / 'mine.onnx').write_text('mine')
    found = resolve(folder / 'mine.onnx')
    assert found.onnx == folder / 'mine.onnx'
    assert found.ml_package == folder / NAMES[1] and found.class_remapper == folder / NAMES[2]


def test_a_path_may_begin_with_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv('HOME', str(folder.parent))
    assert resolve('~/model').onnx == folder / NAMES[0]


@pytest.mark.parametrize('missing', [NAMES[:1], NAMES[1:2], NAMES[1:]])
def test_what_a_folder_lacks_is_named(folder, missing):
    for name in missing:
        (folder / name).unlink()
    with pytest.raises(ArtifactError) as caught:
        resolve(folder)
    assert str(caught.value) == f'{folder}: has no {", ".join(missing)}'


def test_what_is_no_model_is_refused(folder, tmp_path):
    for source, message in (
            (tmp_path / 'absent', f'{tmp_path}/absent: no such file or folder'),
            (tmp_path / 'absent' / 'x.onnx', f'{tmp_path}/absent: no such folder'),
            (folder / 'x.onnx', f'{folder}: has no x.onnx'),
            (folder / NAMES[1], 'expected an artifact folder or an .onnx file'),
            ('someone/bevfusion', 'someone/bevfusion: no such folder, and the only repository '
                                  'with pinned hashes is AutowareFoundation/bevfusion')):
        with pytest.raises(ArtifactError) as caught:
            resolve(source)
        assert message in str(caught.value)


class OddPath:
    def __init__(self, answer):
        self.answer = answer

    def __fspath__(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize('source', [
    5, b'x', [], {}, 0.5, OddPath(b'x'), OddPath(5), OddPath(KeyError('a\nb')),
    '~no_such_user_of_tt/x'])
def test_what_is_no_path_is_refused(source):
    with pytest.raises(ArtifactError, match='^source: found a .* that is no path') as caught:
        resolve(source)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('source', ['x' * 5_000, 'x' * 5_000 + '.onnx', 'a\0b', '\ud800', ''])
def test_paths_that_cannot_be_are_refused(source):
    with pytest.raises(ArtifactError):
        resolve(source)


def test_the_release_comes_from_the_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip('huggingface_hub.constants')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    with pytest.raises(ArtifactError, match=f'{NAMES[0]}, {NAMES[1]}, {NAMES[2]}: not in the'):
        resolve()

    snapshot = (tmp_path / 'models--AutowareFoundation--bevfusion' / 'snapshots'
                / artifact.REVISION)
    snapshot.mkdir(parents=True)
    for name in NAMES:
        (snapshot / name).write_text(name)
    with pytest.raises(ArtifactError, match=f'{NAMES[0]}: found SHA-256 .* expected 5c290879'):
        resolve()

    monkeypatch.setattr(artifact, 'SHA256', {
        name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES})
    expected = Artifact(*(snapshot / name for name in NAMES), revision=artifact.REVISION)
    assert resolve() == resolve('AutowareFoundation/bevfusion') == expected
    assert resolve(local_files_only=True) == expected


def test_an_artifact_of_ours_is_read_as_the_release_is(tmp_path):
    """Three files from one network; the parameter file and the network fit each other only."""
    write_artifact(random_net(TINY), grid_of(TINY), tmp_path / 'mine')
    found = resolve(tmp_path / 'mine')
    weights = read_onnx(found.onnx)
    assert weights.config == TINY
    values = known_parameters({**read_parameter_file(found.ml_package),
                               **read_parameter_file(found.class_remapper)})
    check_against(weights.config, BEVFusionConfig.from_parameters(values))
    with pytest.raises(ArtifactError, match='point_cloud_range, voxel_size: found'):
        check_against(weights.config, BEVFusionConfig.from_parameters({}))
