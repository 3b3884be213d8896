# SPDX-License-Identifier: Apache-2.0
"""The one way in which this package compiles kernels.

``kernel`` is numba's ``njit`` with the interpreter lock released and the machine code kept in the
user's cache folder, so that only the first start of a new version compiles. Kernels that are to
run in parallel work on a range of rows, see :mod:`tt_perception.runtime.pool`.
"""

from __future__ import annotations

import functools

import numba

from tt_perception.runtime.paths import cache_dir

if not numba.config.CACHE_DIR:  # a folder that the user named in NUMBA_CACHE_DIR stays
    numba.config.CACHE_DIR = str(cache_dir() / 'numba')

kernel = functools.partial(numba.njit, cache=True, nogil=True)
