# SPDX-License-Identifier: Apache-2.0
"""What `tt_perception info` says of this installation."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from pathlib import Path

from tt_perception import __version__
from tt_perception.runtime.errors import PerceptionError
from tt_perception.runtime.paths import cache_dir, share_dir

_DISTRIBUTIONS = ('numpy', 'numba', 'torch', 'ttnn', 'rosbags')
_MODULES = ('rclpy', 'tf2_ros', 'tf2_msgs', 'autoware_perception_msgs')


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return 'not installed'


def _weights() -> str:
    from tt_perception.bevfusion.artifact import resolve
    try:
        return str(resolve(None, local_files_only=True).onnx.parent)
    except PerceptionError:
        return 'not in the cache'


def environment() -> dict[str, str]:
    """Return name -> value for everything that decides what can be used here."""
    cards = sorted(str(p) for p in Path('/dev/tenstorrent').glob('*'))
    return {
        'tt_perception': __version__,
        'python': platform.python_version(),
        **{name: _version(name) for name in _DISTRIBUTIONS},
        **{name: 'yes' if importlib.util.find_spec(name) else 'not installed'
           for name in _MODULES},
        'tenstorrent cards': ', '.join(cards) or 'none (no /dev/tenstorrent)',
        'backends': 'cpu',
        'released weights': _weights(),
        'share folder': str(share_dir()),
        'cache folder': str(cache_dir()),
    }
