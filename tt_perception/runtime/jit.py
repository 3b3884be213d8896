# SPDX-License-Identifier: Apache-2.0
"""The one way in which this package compiles kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba

from tt_perception.runtime.paths import cache_dir


def _cache_folder() -> str:
    """Return where machine code is kept, '' where nothing can be written."""
    if numba.config.CACHE_DIR:  # the user's NUMBA_CACHE_DIR
        return numba.config.CACHE_DIR
    try:
        folder = cache_dir() / 'numba'
        folder.mkdir(exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return ''
    return str(folder) if os.access(folder, os.W_OK) else ''


_CACHE_FOLDER = _cache_folder()


def kernel(function: Callable | None = None, **options: Any) -> Any:
    """Compile a function with numba, its machine code kept in the user's cache folder.

    The interpreter lock is released. Kernels that are to run in parallel work on a range of rows,
    see :mod:`tt_perception.runtime.pool`. Without a folder to write to, each process compiles
    anew.

    :param options: of ``numba.njit``.
    """
    def decorate(function: Callable) -> Any:
        before = numba.config.CACHE_DIR  # it is global, and other packages use numba too
        numba.config.CACHE_DIR = _CACHE_FOLDER or before
        try:
            return numba.njit(cache=bool(_CACHE_FOLDER), nogil=True, **options)(function)
        finally:
            numba.config.CACHE_DIR = before
    return decorate if function is None else decorate(function)
