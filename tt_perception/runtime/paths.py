# SPDX-License-Identifier: Apache-2.0
"""Where the package finds its own files and may write."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = 'tt_perception'


def cache_dir() -> Path:
    """Return this package's folder in the user's cache, created if it is missing."""
    base = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    folder = Path(base) / _PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def share_dir() -> Path:
    """Return the folder that holds ``config`` and ``launch``.

    The ament index comes first, then the share folder of a pip installation, then the source tree.
    """
    try:
        from ament_index_python.packages import get_package_share_directory
        return Path(get_package_share_directory(_PACKAGE))
    except (ImportError, LookupError, OSError):
        pass  # no ROS installation knows this package: look beside the interpreter and the source
    installed = Path(sys.prefix) / 'share' / _PACKAGE
    source = Path(__file__).resolve().parents[2]
    return source if (source / 'config').is_dir() else installed
