# SPDX-License-Identifier: Apache-2.0
"""How the threads of the numerical libraries behave on a machine that has other work too."""

import os


def let_idle_threads_sleep() -> None:
    """Have OpenMP threads sleep between two tasks instead of spinning.

    On a robot other processes want the cores as well, and a thread that spins at a barrier keeps
    the core from the very thread that it waits for: frames then take ten times as long. Programs
    call this before torch is loaded; what the user has set in ``OMP_WAIT_POLICY`` stays.
    """
    os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
