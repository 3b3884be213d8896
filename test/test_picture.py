# SPDX-License-Identifier: Apache-2.0
"""The bird's-eye picture: a file that shows what it was given."""

from __future__ import annotations

import numpy as np
import pytest

from tt_perception.bevfusion.detections import LABELS, Detections3D
from tt_perception.sim.drive import Drive, TrueObjects

pytest.importorskip('matplotlib', reason='matplotlib draws the picture')

from tt_perception.picture import birds_eye  # noqa: E402


def read(path):
    from matplotlib.image import imread
    return imread(str(path))[..., :3]


def detections_of(boxes, labels, scores):
    count = len(boxes)
    return Detections3D(np.asarray(boxes, np.float32).reshape(-1, 7),
                        np.zeros((count, 2), np.float32), np.asarray(scores, np.float32),
                        np.asarray(labels, np.uint8), np.zeros(count, np.uint8),
                        np.arange(count))


NO_DETECTIONS = detections_of([], [], [])
NO_POINTS = np.zeros((0, 4), np.float32)


def test_picture_of_a_sweep(tmp_path):
    sweep = Drive(5, 1)[0]
    seen = np.flatnonzero(sweep.truth.num_points > 5)
    detections = detections_of(
        sweep.truth.boxes_xyzlwh_yaw[seen], [LABELS[sweep.truth.class_names[i]] for i in seen],
        np.linspace(0.9, 0.2, len(seen)))
    path = tmp_path / 'a' / 'picture.png'  # the folder is made
    birds_eye(sweep.points, detections, sweep.truth, path, title='a sweep')
    picture = read(path)
    assert min(picture.shape[:2]) > 1000
    colors = (picture * 255).astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    assert len(np.unique(colors)) > 500
    assert 100_000 < path.stat().st_size < 5_000_000


def bright_rows_and_columns(picture, reference):
    """Return the middle (row, column), 0 to 1, of what differs from the reference."""
    changed = np.abs(picture - reference).max(-1) > 0.3
    rows, columns = np.nonzero(changed)
    return rows.mean() / picture.shape[0], columns.mean() / picture.shape[1]


def test_forward_is_up_and_left_is_left(tmp_path):
    def draw(name, points):
        birds_eye(points, None, None, tmp_path / name, title='same')
        return read(tmp_path / name)[200:]  # below the head lines, which count the points
    rng = np.random.default_rng(0)
    cluster = rng.normal(0, 1, (3000, 4)).astype(np.float32)
    empty = draw('empty.png', NO_POINTS)
    row, column = bright_rows_and_columns(
        draw('ahead.png', cluster + np.float32([40, 0, 2, 0])), empty)
    assert row < 0.3 and 0.4 < column < 0.6
    row, column = bright_rows_and_columns(
        draw('left.png', cluster + np.float32([0, 40, 2, 0])), empty)
    assert 0.3 < row < 0.6 and column < 0.3


def test_a_warning_cannot_be_overlooked(tmp_path):
    """A red banner, not a few dark red pixels."""
    def red(path):
        picture = read(path)
        return ((picture[..., 0] > 0.5) & (picture[..., 1] < 0.3) & (picture[..., 2] < 0.3)).sum()
    birds_eye(NO_POINTS, NO_DETECTIONS, None, tmp_path / 'plain.png', title='x')
    birds_eye(NO_POINTS, NO_DETECTIONS, None, tmp_path / 'warned.png', title='x',
              warning='random weights: boxes mean nothing')
    assert red(tmp_path / 'warned.png') > red(tmp_path / 'plain.png') + 10_000


@pytest.mark.parametrize('truth', [None, TrueObjects.from_dicts([])])
def test_awkward_content(tmp_path, truth):
    """Nothing at all; unknown labels; far more boxes than can be shown; boxes far outside."""
    birds_eye(NO_POINTS, NO_DETECTIONS, truth, tmp_path / 'nothing.png', title='nothing')
    rng = np.random.default_rng(0)
    boxes = rng.uniform(-200, 200, (600, 7))
    detections = detections_of(boxes, rng.integers(0, 12, 600), np.linspace(1, 0, 600))
    birds_eye(rng.normal(0, 30, (100, 3)).astype(np.float32), detections, truth,
              tmp_path / 'many.png', title='many', extent_m=30.0)
    assert (tmp_path / 'many.png').stat().st_size > 20_000


def test_importing_it_leaves_matplotlib_alone():
    import subprocess
    import sys
    code = ("import sys, tt_perception.picture; "
            "assert not any(m.startswith('matplotlib') for m in sys.modules)")
    subprocess.run([sys.executable, '-c', code], check=True)


def test_no_global_state_of_pyplot(tmp_path):
    import sys
    before = 'matplotlib.pyplot' in sys.modules
    birds_eye(NO_POINTS, None, None, tmp_path / 'x.png', title='x')
    assert ('matplotlib.pyplot' in sys.modules) == before


def test_a_title_is_taken_literally(tmp_path):
    """Dollars are no mathematics, and a file name need not be UTF-8."""
    for number, title in enumerate(('cloud_$x$.pcd', 'cloud_$\\frac{$.pcd', 'cloud_\udcff.pcd')):
        birds_eye(NO_POINTS, None, None, tmp_path / f'{number}.png', title=title)
    birds_eye(NO_POINTS, None, None, tmp_path / 'x.png', title='cloud_x.pcd')
    head = [read(tmp_path / name)[:80] for name in ('0.png', 'x.png')]
    wide = [np.flatnonzero((picture > 0.5).any(axis=(0, 2))).max() for picture in head]
    assert wide[0] > wide[1]  # the dollars are there
