# SPDX-License-Identifier: Apache-2.0
"""The three files that make a model: the network and its two parameter files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tt_perception.runtime.errors import ArtifactError
from tt_perception.runtime.hub import fetch

REPO_ID = 'AutowareFoundation/bevfusion'
REVISION = 'e1bf164b909d3c6c2642012f9b5ee4d827753220'  # tag v2.0

ONNX = 'bevfusion_lidar.onnx'
ML_PACKAGE = 'ml_package_bevfusion_lidar.param.yaml'
CLASS_REMAPPER = 'detection_class_remapper.param.yaml'
RANDOM_WEIGHTS = 'RANDOM_WEIGHTS'  # a file of this name beside them says that nothing is learnt
SHA256 = {
    ONNX: '5c29087963bf2c4dc02bf45c29d459303be602d63f9b6adff22a75c9cfb459a6',
    ML_PACKAGE: '866265b9f0fc8c17805c0974339d3c7c4e601c1aa212818971fc650d71782181',
    CLASS_REMAPPER: '928f9eb14ac042d725909f12b2be1532c16b09a683485c5936cf04fb04728520',
}
_REPO_ID_FORM = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')


@dataclass(frozen=True)
class Artifact:
    """Where the files of a model are.

    :ivar onnx: the network.
    :ivar ml_package: parameters that belong to the network: classes, grid, proposals.
    :ivar class_remapper: label changes by footprint area.
    :ivar revision: pinned commit of the Hub, None for local files.
    """

    onnx: Path
    ml_package: Path
    class_remapper: Path
    revision: str | None

    @property
    def has_random_weights(self) -> bool:
        """The network was never trained: what it detects means nothing."""
        return (self.onnx.parent / RANDOM_WEIGHTS).exists()


def resolve(source: str | Path | None = None, *, local_files_only: bool = False) -> Artifact:
    """Find the files of a model. A local path never touches the network.

    :param source: None or the repository's name for the pinned release (cache first, then Hub);
        else a folder that holds the three files under the names of the release, or the path of an
        ``.onnx`` file that has the other two beside it.
    :param local_files_only: never download.
    :raises ArtifactError: a file is missing, damaged or cannot be fetched; nothing known by that
        name.
    """
    path = Path(REPO_ID) if source is None else _path(source)
    if str(path) == REPO_ID:
        paths = fetch(REPO_ID, REVISION, SHA256, local_files_only=local_files_only)
        return Artifact(paths[ONNX], paths[ML_PACKAGE], paths[CLASS_REMAPPER], REVISION)
    try:
        return _find(path, source)
    except OSError as error:
        raise ArtifactError(f'{path}: cannot be read: {error.strerror}') from None


def _path(source: str | os.PathLike) -> Path:
    try:
        return Path(os.fspath(source)).expanduser()
    except Exception as error:  # __fspath__ may raise anything
        raise ArtifactError(f'source: found a {type(source).__name__} that is no path of a folder '
                            f'or file: {" ".join(str(error).split())}') from None


def _find(path: Path, source: str | Path) -> Artifact:
    if path.is_dir():
        return _local(path / ONNX)
    if path.suffix == '.onnx':
        return _local(path)
    if path.exists():
        raise ArtifactError(f'{path}: expected an artifact folder or an .onnx file')
    if isinstance(source, str) and _REPO_ID_FORM.fullmatch(source):
        raise ArtifactError(f'{source}: no such folder, and the only repository with pinned '
                            f'hashes is {REPO_ID}; download others and give their folder')
    raise ArtifactError(f'{path}: no such file or folder')


def _local(onnx: Path) -> Artifact:
    folder = onnx.parent
    files = (onnx, folder / ML_PACKAGE, folder / CLASS_REMAPPER)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ArtifactError(f'{folder}: ' + (f'has no {", ".join(missing)}' if folder.is_dir()
                                             else 'no such folder'))
    return Artifact(*files, revision=None)
