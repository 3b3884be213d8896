# SPDX-License-Identifier: Apache-2.0
"""A bird's-eye picture of one cloud: points, true boxes and detections."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tt_perception.bevfusion.detections import Detections3D
    from tt_perception.sim.drive import TrueObjects

RANDOM_WEIGHTS = 'random weights: boxes mean nothing'  # a warning for the picture
MAX_DETECTIONS, MAX_MEANINGLESS = 150, 60
MAX_LABELS = 12
LABEL_SPACING_M = 5.0
RING_M = 20
HEIGHT_RANGE_M = (-0.5, 4.0)
HEIGHT_COLORS = ('#33507f', '#6486b8', '#45c4b0', '#b4de58', '#ffe9a0', '#ffffff')

_BACKGROUND, _PANEL, _INK, _DIM = '#0a0d12', '#12171f', '#e8ecf1', '#8b97a6'
_TRUTH = '#f4f6f8'
_WARNING = '#ff5c5c'
_CLASS_COLORS = {
    'CAR': '#ffb000', 'TRUCK': '#ff7f50', 'BUS': '#ff4fa3', 'TRAILER': '#e07be0',
    'MOTORCYCLE': '#9dff57', 'BICYCLE': '#4be3a0', 'PEDESTRIAN': '#35c8ff',
}
_OTHER_COLOR = '#c0c0c0'
_EGO_LENGTH, _EGO_WIDTH, _EGO_REAR = 4.6, 1.9, 1.0


def birds_eye(points: np.ndarray, detections: Detections3D | None, truth: TrueObjects | None,
              path: str | Path, *, title: str, warning: str | None = None,
              extent_m: float = 60.0) -> None:
    """Draw a square of ``2 * extent_m`` around the sensor, forward up, into a PNG file.

    :param points: float32 [n, >=3], x, y, z (m).
    :param detections: outlines in the colour of their class, a tick shows the heading; the
        ``MAX_DETECTIONS`` best inside the picture, of which some are named.
    :param truth: thin outlines; boxes without a point in them are dashed.
    :param path: its folder is created.
    :param title: taken literally; bytes of a file name that are no UTF-8 are shown escaped.
    :param warning: a banner across the picture, which says that the detections mean nothing; of
        these only ``MAX_MEANINGLESS`` are drawn, and faintly.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    title = title.encode('utf-8', 'backslashreplace').decode('utf-8')
    figure = Figure(figsize=(12, 12.4), facecolor=_BACKGROUND)
    axes = figure.add_axes((0.065, 0.055, 0.875, 0.87), facecolor=_BACKGROUND)
    _axes_style(axes, extent_m)
    _rings(axes, extent_m)
    colors = _points(axes, points, extent_m)
    handles = _ego(axes)
    summary = [f'{len(points):,} points']
    if truth is not None:
        handles += _truth(axes, truth, extent_m)
        summary.append(f'{int((truth.num_points > 0).sum())} of {len(truth)} true objects hit')
    if detections is not None:
        entries, drawn = _detections(axes, detections, extent_m, faint=warning is not None)
        handles += entries
        summary.append(f'{len(detections)} detections, best {drawn} in view drawn')
    _legend(axes, handles)
    _height_bar(figure, colors)
    figure.text(0.065, 0.965, title, color=_INK, fontsize=17, weight='bold', va='center',
                parse_math=False)
    figure.text(0.065, 0.94, '   '.join(summary), color=_DIM, fontsize=11.5, va='center')
    if warning:
        axes.text(0.5, 0.965, warning, transform=axes.transAxes, ha='center', va='center',
                  color='#ffffff', fontsize=15, weight='bold', zorder=20, bbox={
                      'boxstyle': 'round,pad=0.5', 'facecolor': '#a51d1d', 'alpha': 0.92,
                      'edgecolor': _WARNING})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(str(path), dpi=130, facecolor=_BACKGROUND,
                                         format='png')


# The picture's right is -y and its top is +x, so that the vehicle drives up.


def _axes_style(axes: Axes, extent_m: float) -> None:
    axes.set_xlim(extent_m, -extent_m)
    axes.set_ylim(-extent_m, extent_m)
    axes.set_aspect('equal')
    axes.set_xlabel('y, to the left (m)', color=_DIM, fontsize=11)
    axes.set_ylabel('x, forward (m)', color=_DIM, fontsize=11)
    axes.tick_params(colors=_DIM, labelsize=9.5)
    for spine in axes.spines.values():
        spine.set_color('#2a323d')


def _rings(axes: Axes, extent_m: float) -> None:
    from matplotlib.patches import Circle
    for radius in range(RING_M, int(extent_m * 1.42), RING_M):
        axes.add_patch(Circle((0, 0), radius, fill=False, edgecolor='#33404f', linewidth=0.8,
                              zorder=1))
        if radius < extent_m:
            for angle in (45, 225):
                y, x = radius * np.cos(np.radians(angle)), radius * np.sin(np.radians(angle))
                axes.text(-y, x, f'{radius} m', color='#a9b6c5', fontsize=9.5, ha='center',
                          va='center', zorder=6, bbox={
                              'boxstyle': 'round,pad=0.15', 'facecolor': _BACKGROUND,
                              'edgecolor': 'none', 'alpha': 0.7})


def _points(axes: Axes, points: np.ndarray, extent_m: float):
    """Draw the points, lowest first, and return what maps heights to colours."""
    from matplotlib.colors import LinearSegmentedColormap
    inside = (np.abs(points[:, :2]) <= extent_m).all(axis=1)
    xyz = points[inside, :3]
    xyz = xyz[np.argsort(xyz[:, 2])]
    return axes.scatter(xyz[:, 1], xyz[:, 0], c=xyz[:, 2], s=1.7, alpha=0.6, linewidths=0,
                        zorder=2, cmap=LinearSegmentedColormap.from_list('height', HEIGHT_COLORS),
                        vmin=HEIGHT_RANGE_M[0], vmax=HEIGHT_RANGE_M[1])


def _corners_yx(boxes: np.ndarray) -> np.ndarray:
    """Return the footprints' corners as the picture wants them, y first; [k, 4, 2]."""
    unit = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) / 2
    along = unit[None, :, 0] * boxes[:, None, 3]
    across = unit[None, :, 1] * boxes[:, None, 4]
    c, s = np.cos(boxes[:, None, 6]), np.sin(boxes[:, None, 6])
    return np.stack([boxes[:, None, 1] + s * along + c * across,
                     boxes[:, None, 0] + c * along - s * across], axis=-1)


def _outlines(axes: Axes, boxes: np.ndarray, **style) -> None:
    from matplotlib.collections import PolyCollection
    axes.add_collection(PolyCollection(_corners_yx(boxes), facecolors='none', **style))


def _near(boxes: np.ndarray, extent_m: float) -> np.ndarray:
    return (np.abs(boxes[:, :2]) <= extent_m).all(axis=1)


def _ego(axes: Axes) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Polygon
    low, high, half = -_EGO_REAR, _EGO_LENGTH - _EGO_REAR, _EGO_WIDTH / 2
    axes.add_patch(Polygon([(half, low), (half, high - 1.2), (0, high), (-half, high - 1.2),
                            (-half, low)], facecolor=_INK, edgecolor='black', linewidth=0.6,
                           zorder=8))
    return [Line2D([], [], marker='^', linestyle='', color=_INK, markersize=9,
                   label='ego vehicle')]


def _truth(axes: Axes, truth: TrueObjects, extent_m: float) -> list:
    from matplotlib.lines import Line2D
    near = _near(truth.boxes_xyzlwh_yaw, extent_m)
    for hit, dashes in ((True, 'solid'), (False, (0, (2, 2)))):
        chosen = near & ((truth.num_points > 0) == hit)
        _outlines(axes, truth.boxes_xyzlwh_yaw[chosen], edgecolors=_TRUTH, linewidths=1.0,
                  alpha=0.95 if hit else 0.55, linestyles=dashes, zorder=5)
    return [Line2D([], [], color=_TRUTH, linewidth=1, label='true box'),
            Line2D([], [], color=_TRUTH, linewidth=1, alpha=0.6, linestyle=(0, (2, 2)),
                   label='true box, no point in it')]


def _detections(axes: Axes, detections: Detections3D, extent_m: float,
                faint: bool) -> tuple[list, int]:
    """Return entries of the legend, and how many boxes were drawn."""
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    chosen = np.flatnonzero(_near(detections.boxes_xyzlwh_yaw, extent_m))
    chosen = chosen[np.argsort(-detections.scores[chosen], kind='stable')]
    chosen = chosen[:MAX_MEANINGLESS if faint else MAX_DETECTIONS]
    names = np.array(detections.label_names, dtype=object)[chosen]
    boxes = np.asarray(detections.boxes_xyzlwh_yaw[chosen], np.float64)
    colors = [_CLASS_COLORS.get(name, _OTHER_COLOR) for name in names]
    style = {'linewidths': 1.0, 'alpha': 0.6} if faint else {'linewidths': 1.6, 'alpha': 0.95}
    _outlines(axes, boxes, edgecolors=colors, zorder=4, **style)
    ahead = np.stack([np.sin(boxes[:, 6]), np.cos(boxes[:, 6])], 1)
    front = boxes[:, 1::-1] + ahead * boxes[:, 3:4] / 2
    axes.add_collection(LineCollection(np.stack([front - ahead * boxes[:, 3:4] / 4,
                                                 front + ahead * 0.8], 1),
                                       colors=colors, zorder=4, **style))
    if not faint:
        _name_some(axes, boxes, names, detections.scores[chosen], colors)
    found = dict.fromkeys(detections.label_names)
    shown = [name for name in (*_CLASS_COLORS, *found) if name in found]
    counts = {name: detections.label_names.count(name) for name in shown}
    return [Line2D([], [], color=_CLASS_COLORS.get(name, _OTHER_COLOR), linewidth=2,
                   label=f'detected {name} ({counts[name]})')
            for name in dict.fromkeys(shown)], len(chosen)


def _name_some(axes: Axes, boxes: np.ndarray, names: np.ndarray, scores: np.ndarray,
               colors: list[str]) -> None:
    """Write class and score beside the best boxes, as far as the labels do not collide."""
    labelled: list[np.ndarray] = []
    for box, name, score, color in zip(boxes, names, scores, colors, strict=True):
        if len(labelled) == MAX_LABELS:
            return
        if any(np.hypot(*(box[:2] - other)) < LABEL_SPACING_M for other in labelled):
            continue
        labelled.append(box[:2])
        reach = max(box[3], box[4]) / 2
        axes.text(box[1], box[0] + min(reach, 4) + 0.7, f'{name} {score:.2f}', color=color,
                  fontsize=8.5, ha='center', va='bottom', zorder=9, bbox={
                      'boxstyle': 'round,pad=0.12', 'facecolor': _BACKGROUND,
                      'edgecolor': 'none', 'alpha': 0.65}, clip_on=True)


def _legend(axes: Axes, handles: list) -> None:
    legend = axes.legend(handles=handles, loc='lower left', fontsize=10, facecolor=_PANEL,
                         edgecolor='#2a323d', framealpha=0.9, labelcolor=_INK)
    legend.set_zorder(15)


def _height_bar(figure, colors) -> None:
    bar = figure.colorbar(colors, cax=figure.add_axes((0.955, 0.055, 0.012, 0.25)))
    bar.solids.set_alpha(1)
    bar.set_label('height z (m)', color=_DIM, fontsize=10)
    bar.ax.tick_params(colors=_DIM, labelsize=9)
    bar.outline.set_edgecolor('#2a323d')
