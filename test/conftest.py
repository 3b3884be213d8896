# SPDX-License-Identifier: Apache-2.0
"""What all tests share: real recordings, and an environment that leaves nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tt_perception.runtime.threads import let_idle_threads_sleep

let_idle_threads_sleep()  # here, because test modules load torch
# A shell that starts this in the background has Ctrl-C ignored, and so would everything below.
signal.signal(signal.SIGINT, signal.default_int_handler)

_CHECKOUT = Path(__file__).resolve().parents[1]


def _data_dir() -> Path:
    return Path(os.environ.get('TT_PERCEPTION_TEST_DATA') or _CHECKOUT.parent / 'shared' / 'data')


@pytest.fixture(scope='session')
def data_dir() -> Path:
    """Return the folder with real recordings, or skip."""
    folder = _data_dir()
    if not folder.is_dir():
        pytest.skip(f'no recordings: TT_PERCEPTION_TEST_DATA names no folder, and {folder} '
                    'does not exist')
    return folder


@pytest.fixture(scope='module')
def one_thread():
    """Let torch use one thread: small networks are slower on several."""
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope='session')
def small_artifact(tmp_path_factory) -> Path:
    """Return an artifact with a small grid, narrow layers and seeded weights."""
    from tt_perception.bevfusion.seeded import (
        grid_of,
        seeded_network,
        small_config,
        write_artifact,
    )
    _, network = small_config()
    folder = tmp_path_factory.mktemp('small_artifact')
    write_artifact(seeded_network(network), grid_of(network), folder)
    return folder


@pytest.fixture(scope='session')
def full_artifact(tmp_path_factory) -> Path:
    """Return an artifact of the released network's size, with seeded weights."""
    from tt_perception.bevfusion.seeded import make_artifact
    folder = tmp_path_factory.mktemp('full_artifact')
    make_artifact(folder, seed=0)
    return folder


@pytest.fixture(scope='module')
def device():
    """Return an open device of the functional simulator, or skip."""
    if not os.environ.get('TT_METAL_SIMULATOR'):
        pytest.skip('TT_METAL_SIMULATOR names no Blackhole functional simulator')
    ttnn = pytest.importorskip('ttnn')
    device = ttnn.open_device(device_id=0, trace_region_size=1 << 20)
    yield device
    ttnn.close_device(device)
