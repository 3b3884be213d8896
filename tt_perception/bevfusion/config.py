# SPDX-License-Identifier: Apache-2.0
"""Every number of the lidar model: its parameters, its grid, its network, its limits.

The parameters carry the names and meanings of Autoware's ``autoware_bevfusion``, so that its
parameter files configure this package unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tt_perception.bevfusion.detections import LABELS
from tt_perception.runtime.errors import ArtifactError, ConfigError

MAX_VOXELS = 256_000
MAX_COLUMN_CELLS = 63  # the rulebook keeps one column of cells along z in one 64-bit word
MAX_STREAMS = 16
MAX_GRID_CELLS = 2 ** 31 - 1
MAX_PARAMETER_FILE_BYTES = 1 << 20

# Most active rows that a frame may have on levels 1 to 4 of the sparse encoder.
CAPACITY_BUCKETS = (
    (64_000, 64_000, 32_000, 16_000),
    (128_000, 128_000, 64_000, 32_000),
    (256_000, 256_000, 256_000, 162_000),
)


@dataclass(frozen=True)
class Parameter:
    """One parameter: its type, default and range, for files, keywords and the ROS node alike.

    :ivar kind: ``bool``, ``int``, ``float``, ``str``, or one of these with ``[]`` behind it.
    :ivar low: least allowed value, of each element in an array.
    :ivar high: greatest allowed value.
    :ivar size: exact number of elements of an array.
    :ivar choices: the only allowed values.
    :ivar per_call: may change while the model runs, and be given with a single call.
    :ivar allow_nan: NaN is a value too; it has a meaning where the parameter is used.
    """

    name: str
    kind: str
    default: Any
    description: str
    low: float | None = None
    high: float | None = None
    size: int | None = None
    choices: tuple[str, ...] | None = None
    per_call: bool = False
    allow_nan: bool = False

    def check(self, value: Any) -> Any:
        """Return ``value`` as its declared type, lists as tuples.

        :raises ConfigError: when type, size, range or choice is wrong.
        """
        if not self.kind.endswith('[]'):
            return self._check_one(value)
        try:
            is_list = not isinstance(value, (str, bytes, Mapping, Set)) and len(value) >= 0
        except TypeError:  # no length: a number, a generator, an array without dimensions
            is_list = False
        if not is_list:
            raise self._wrong(value, f'a list of {self.kind[:-2]}')
        if self.size is not None and len(value) != self.size:
            raise ConfigError(f'{self.name}: found {len(value)} values, expected {self.size}')
        return tuple(self._check_one(v) for v in value)

    def _check_one(self, value: Any) -> Any:
        kind = self.kind.removesuffix('[]')
        if isinstance(value, np.generic):
            value = value.item()
        if kind == 'float' and isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                raise self._wrong(value, 'a number that a float holds') from None
            if math.isnan(value) and not self.allow_nan:
                raise self._wrong(value, 'a number')
        elif kind == 'int' and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif type(value).__name__ != kind:
            raise self._wrong(value, kind)
        if kind == 'int' and not -2 ** 63 <= value < 2 ** 63:
            raise self._wrong(value, 'a 64-bit integer')
        if self.low is not None and value < self.low:
            raise self._wrong(value, f'at least {self.low}')
        if self.high is not None and value > self.high:
            raise self._wrong(value, f'at most {self.high}')
        if self.choices is not None and value not in self.choices:
            raise self._wrong(value, 'one of ' + ', '.join(map(repr, self.choices)))
        return value

    def _wrong(self, value: Any, expected: str) -> ConfigError:
        return ConfigError(f'{self.name}: found {_shown(value)}, expected {expected}')


def _shown(value: Any) -> str:
    """Return ``repr(value)`` as one line that is not too long."""
    try:
        text = ' '.join(repr(value).split())
    except Exception:  # any of a user's class; ValueError for integers of thousands of digits
        return f'a value of type {type(value).__name__}'
    return text if len(text) <= 120 else text[:117] + '...'


P = Parameter
_REMAP_SIDE = 8
_NO_REMAP = tuple([0] * _REMAP_SIDE ** 2)
_NO_AREA = tuple([0.0] * _REMAP_SIDE ** 2)
_SCORES = 'detection_score_thresholds.min_confidence_scores.'

# Defaults are those of the released lidar-only profile.
PARAMETERS: dict[str, Parameter] = {p.name: p for p in (
    P('class_names', 'str[]', ('CAR', 'TRUCK', 'BUS', 'BICYCLE', 'PEDESTRIAN'),
      'class of each output of the network'),
    P('point_cloud_range', 'float[]', (-122.4, -122.4, -3.0, 122.4, 122.4, 5.0),
      'xmin, ymin, zmin, xmax, ymax, zmax of the voxel grid (m)', size=6),
    P('voxel_size', 'float[]', (0.17, 0.17, 0.2), 'edges of a voxel along x, y, z (m)', size=3),
    P('voxels_num', 'int[]', (1, 128_000, MAX_VOXELS),
      'least, usual and greatest number of voxels', low=1, size=3),
    P('max_points_per_voxel', 'int', 10, 'points of a voxel that count for its mean', low=1,
      high=1_000_000),
    P('num_proposals', 'int', 500, 'proposals of the network', low=1),
    P('out_size_factor', 'int', 8, 'voxels along one side of a cell of the feature map', low=1),
    P('use_intensity', 'bool', False, 'intensity is a feature of a point'),
    P('densification_num_past_frames', 'int', 1, 'past sweeps fused with the current one', low=0,
      high=100),
    P('densification_world_frame_id', 'str', 'map', 'fixed frame that connects the sweeps'),
    P('cloud_capacity', 'int', 2_000_000, 'most points after densification', low=1,
      high=2 ** 31 - 1),
    P('strict_float32', 'bool', False,
      'transform sweeps by the float32 arithmetic of the CUDA node, its rounding included'),
    P('circle_nms_dist_threshold', 'float', 0.5,
      'a box suppresses lower ones with a centre nearer than this (m)', low=0, per_call=True),
    P('iou_nms_search_distance_2d', 'float', 10.0,
      'boxes with centres farther apart are not compared (m)', low=0, per_call=True),
    P('iou_nms_threshold', 'float', 0.1, 'a box with more overlap than this is dropped',
      low=0, high=1, per_call=True),
    P('yaw_norm_thresholds', 'float[]', (0.3, 0.3, 0.3, 0.3, 0.0),
      'least length of (sin, cos) of each class; outside [0, 1) means 0', per_call=True),
    P('detection_score_thresholds.distance_bin_upper_limits', 'float[]',
      (50.0, 90.0, 121.0, 200.0), 'ascending upper limits of the distance bins (m)',
      per_call=True),
    P('allow_remapping_by_area_matrix', 'int[]', _NO_REMAP,
      'row-major square matrix: row label may become column label'),
    P('min_area_matrix', 'float[]', _NO_AREA, 'least area for each remapping (m2)',
      allow_nan=True),
    P('max_area_matrix', 'float[]', _NO_AREA, 'greatest area for each remapping (m2)',
      allow_nan=True),
)}
DEFAULT_MIN_SCORE = 0.1


def score_parameter(class_name: str, num_bins: int = 4) -> Parameter:
    """Return the parameter with one score threshold a distance bin for ``class_name``."""
    return Parameter(_SCORES + class_name, 'float[]', (DEFAULT_MIN_SCORE,) * num_bins,
                     f'least score of {class_name} in each distance bin; outside [0, 1) means 0',
                     per_call=True)


def parameter(name: str) -> Parameter:
    """Return the declaration of ``name``.

    :raises ConfigError: when there is no such parameter.
    """
    if name.startswith(_SCORES):
        return score_parameter(name[len(_SCORES):])
    if name not in PARAMETERS:
        raise ConfigError(f'{name}: unknown parameter; known are ' + ', '.join(PARAMETERS))
    return PARAMETERS[name]


@dataclass(frozen=True)
class GridConfig:
    """The voxel grid. Values are float32 wherever upstream casts them before use."""

    point_cloud_range: tuple[float, ...]
    voxel_size: tuple[float, ...]
    max_points_per_voxel: int
    min_voxels: int
    max_voxels: int
    use_intensity: bool

    @property
    def range_min(self) -> np.ndarray:
        """Lower corner x, y, z (m), float32 [3]."""
        return np.asarray(self.point_cloud_range[:3], np.float32)

    @property
    def size_xyz(self) -> tuple[int, int, int]:
        """Cells along x, y, z; truncated in float32, as upstream does."""
        low = np.asarray(self.point_cloud_range[:3], np.float32)
        high = np.asarray(self.point_cloud_range[3:], np.float32)
        cells = (high - low) / np.asarray(self.voxel_size, np.float32)
        return tuple(int(c) for c in cells)

    @property
    def num_features(self) -> int:
        """Features of a point: x, y, z, intensity if used, time lag."""
        return 5 if self.use_intensity else 4


@dataclass(frozen=True)
class NetworkConfig:
    """Widths and sizes of a network of the BEVFusion-L topology.

    :ivar spatial_shape_xyz: cells of the first sparse level; one more along z than the voxel grid.
    :ivar pooled_classes: classes whose heat map keeps local maxima only.
    """

    num_classes: int = 5
    num_proposals: int = 500
    spatial_shape_xyz: tuple[int, int, int] = (1440, 1440, 41)
    in_channels: int = 4
    sparse_channels: tuple[int, int, int, int] = (16, 32, 64, 128)
    bev_channels: int = 128
    backbone_channels: tuple[int, int] = (128, 256)
    backbone_layers: int = 5
    neck_channels: int = 256
    hidden_channels: int = 128
    num_heads: int = 8
    ffn_channels: int = 256
    branch_channels: int = 64
    pooled_classes: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def level_shapes_xyz(self) -> tuple[tuple[int, int, int], ...]:
        """Cells of the four levels of the sparse encoder and of its output, five shapes."""
        shapes = [tuple(self.spatial_shape_xyz)]
        for pad_z in (1, 1, 0):
            x, y, z = shapes[-1]
            shapes.append(((x - 1) // 2 + 1, (y - 1) // 2 + 1, (z + 2 * pad_z - 3) // 2 + 1))
        x, y, z = shapes[-1]
        shapes.append((x, y, (z - 3) // 2 + 1))
        return tuple(shapes)

    @property
    def feature_map_xy(self) -> tuple[int, int]:
        """Cells of the bird's-eye feature map along x (its height) and y (its width)."""
        return self.level_shapes_xyz[-1][:2]

    @property
    def level_capacities(self) -> tuple[int, int, int, int]:
        """Most active rows on levels 1 to 4; the greatest capacity bucket, or every cell."""
        return tuple(min(cap, math.prod(shape)) for cap, shape in zip(
            CAPACITY_BUCKETS[-1], self.level_shapes_xyz[:4], strict=True))


@dataclass(frozen=True)
class DensificationConfig:
    """How past sweeps are fused with the current one."""

    num_past_frames: int
    world_frame_id: str
    cloud_capacity: int
    strict_float32: bool


@dataclass(frozen=True)
class PostprocessConfig:
    """Thresholds between the network's proposals and the published objects.

    :ivar class_names: network class index -> name.
    :ivar voxel_size_xy: m.
    :ivar range_min_xy: lower corner of the grid (m).
    :ivar min_scores: float32 [bins, classes].
    :ivar distance_limits_m: float32 [bins], ascending.
    :ivar yaw_norm_thresholds: float32 [classes].
    """

    class_names: tuple[str, ...]
    out_size_factor: int
    voxel_size_xy: tuple[float, float]
    range_min_xy: tuple[float, float]
    min_scores: np.ndarray
    distance_limits_m: np.ndarray
    yaw_norm_thresholds: np.ndarray
    circle_nms_dist_threshold: float
    iou_nms_search_distance_2d: float
    iou_nms_threshold: float


@dataclass(frozen=True)
class RemapConfig:
    """Label changes by footprint area; square matrices, row = label found, column = new label."""

    allow: np.ndarray
    min_area_m2: np.ndarray
    max_area_m2: np.ndarray


@dataclass(frozen=True)
class BEVFusionConfig:
    """All parameters of the lidar model, checked. See :func:`from_parameters`."""

    class_names: tuple[str, ...]
    num_proposals: int
    grid: GridConfig
    densification: DensificationConfig
    postprocess: PostprocessConfig
    remap: RemapConfig
    parameters: Mapping[str, Any]

    @classmethod
    def from_parameters(cls, values: Mapping[str, Any]) -> BEVFusionConfig:
        """Build the configuration; what ``values`` leaves out has the profile's default.

        :param values: parameter name -> value, the dotted ROS names.
        :raises ConfigError: unknown name, or wrong type, size, range or combination; a score
            threshold of a class that is not in ``class_names``.
        """
        checked = {name: parameter(name).check(value) for name, value in values.items()}
        v = {name: checked.get(name, p.default) for name, p in PARAMETERS.items()}
        grid = _grid(v)
        postprocess, scores = _postprocess(v, checked)
        return cls(
            class_names=v['class_names'],
            num_proposals=v['num_proposals'],
            grid=grid,
            densification=DensificationConfig(
                v['densification_num_past_frames'], v['densification_world_frame_id'],
                v['cloud_capacity'], v['strict_float32']),
            postprocess=postprocess,
            remap=_remap(v),
            parameters={**v, **scores},
        )

    def replace(self, **per_call: Any) -> BEVFusionConfig:
        """Return a copy with other run-time parameters.

        :raises ConfigError: a name that is unknown or fixed at load time, or a wrong value.
        """
        checked = {}
        for name, value in per_call.items():
            declared = parameter(name)
            if not declared.per_call:
                raise ConfigError(f'{name}: fixed when the model is loaded; cannot change now')
            checked[name] = declared.check(value)
        values = {**self.parameters, **checked}
        postprocess, scores = _postprocess(values, values)
        return replace(self, postprocess=postprocess, parameters={**values, **scores})


def _grid(v: Mapping[str, Any]) -> GridConfig:
    _check_extent(v['point_cloud_range'], v['voxel_size'])
    least, usual, most = v['voxels_num']
    if not least <= usual <= most <= MAX_VOXELS:
        raise ConfigError(f'voxels_num: found {v["voxels_num"]}, '
                          f'expected ascending values up to {MAX_VOXELS}')
    if v['cloud_capacity'] < least:
        raise ConfigError(f'cloud_capacity: found {v["cloud_capacity"]}, expected at least the '
                          f'{least} points that voxels_num asks for')
    grid = GridConfig(v['point_cloud_range'], v['voxel_size'], v['max_points_per_voxel'],
                      least, most, v['use_intensity'])
    if math.prod(grid.size_xyz) > MAX_GRID_CELLS:
        raise ConfigError(f'voxel_size: found {" x ".join(map(str, grid.size_xyz))} voxels in '
                          f'point_cloud_range, expected at most {MAX_GRID_CELLS}')
    if min(grid.size_xyz) < 1:
        raise ConfigError(f'voxel_size: found {v["voxel_size"]}, '
                          'expected at least one voxel in point_cloud_range')
    if grid.size_xyz[2] + 1 > MAX_COLUMN_CELLS:
        raise ConfigError(f'voxel_size: found {grid.size_xyz[2]} cells along z, '
                          f'expected at most {MAX_COLUMN_CELLS - 1}')
    return grid


def _check_extent(point_cloud_range: Sequence[float], voxel_size: Sequence[float]) -> None:
    """Refuse what has no finite number of cells in float32."""
    with np.errstate(all='ignore'):  # what float32 cannot hold is infinite or 0
        corners = np.asarray(point_cloud_range).astype(np.float32)
        edges = np.asarray(voxel_size).astype(np.float32)
        extent = corners[3:] - corners[:3]
        cells = extent / edges
    if not np.isfinite(extent).all():
        raise ConfigError(f'point_cloud_range: found {point_cloud_range}, '
                          'expected finite numbers in float32')
    if not (np.isfinite(edges) & (edges > 0)).all():
        raise ConfigError(f'voxel_size: found {voxel_size}, '
                          'expected finite, positive edges in float32')
    if not (extent > 0).all():
        raise ConfigError(f'point_cloud_range: found {point_cloud_range}, '
                          'expected each minimum below its maximum')
    if not np.isfinite(cells).all():
        raise ConfigError(f'voxel_size: found {voxel_size}, expected a finite number of voxels '
                          'in point_cloud_range')


def _unit_or_zero(values: Sequence[float]) -> np.ndarray:
    """Return float32 values, those outside [0, 1) as 0, as upstream does."""
    array = _float32(values)
    return np.where((array >= 0) & (array < 1), array, np.float32(0))


def _float32(values: Sequence[float]) -> np.ndarray:
    with np.errstate(over='ignore'):  # beyond float32 is infinite
        return np.asarray(values, np.float64).astype(np.float32)


def _postprocess(v: Mapping[str, Any], checked: Mapping[str, Any]):
    names = v['class_names']
    if not names:
        raise ConfigError('class_names: found an empty list, expected at least one class')
    for name in checked:
        if name.startswith(_SCORES) and name[len(_SCORES):] not in names:
            raise ConfigError(f'{name}: no such class, expected one of the class_names '
                              + ', '.join(names))
    yaw_norm = _unit_or_zero(v['yaw_norm_thresholds'])
    if len(yaw_norm) < len(names):
        raise ConfigError(f'yaw_norm_thresholds: found {len(yaw_norm)} values, '
                          f'expected one for each of {len(names)} class_names')
    limits_name = 'detection_score_thresholds.distance_bin_upper_limits'
    limits = v[limits_name]
    if not limits or any(a >= b for a, b in pairwise(limits)):
        raise ConfigError(f'{limits_name}: found {limits}, expected ascending distances')
    scores = {}
    for name in dict.fromkeys(names):
        p = score_parameter(name, len(limits))
        scores[p.name] = checked.get(p.name, p.default)
        if len(scores[p.name]) != len(limits):
            raise ConfigError(f'{p.name}: found {len(scores[p.name])} values, '
                              f'expected one for each of {len(limits)} distance bins')
    return PostprocessConfig(
        class_names=names,
        out_size_factor=v['out_size_factor'],
        voxel_size_xy=v['voxel_size'][:2],
        range_min_xy=v['point_cloud_range'][:2],
        min_scores=np.stack([_unit_or_zero(scores[_SCORES + n]) for n in names], axis=1),
        distance_limits_m=_float32(limits),
        yaw_norm_thresholds=yaw_norm[:len(names)],
        circle_nms_dist_threshold=v['circle_nms_dist_threshold'],
        iou_nms_search_distance_2d=v['iou_nms_search_distance_2d'],
        iou_nms_threshold=v['iou_nms_threshold'],
    ), scores


def _remap(v: Mapping[str, Any]) -> RemapConfig:
    sizes = {name: len(v[name]) for name in (
        'allow_remapping_by_area_matrix', 'min_area_matrix', 'max_area_matrix')}
    side = math.isqrt(sizes['allow_remapping_by_area_matrix'])
    for name, size in sizes.items():
        if size != side * side or side == 0:
            raise ConfigError(f'{name}: found {size} values, expected a square matrix of '
                              f'{side} x {side}' if side else f'{name}: found no values')
    if side > len(LABELS):
        raise ConfigError(f'allow_remapping_by_area_matrix: found {side} labels, '
                          f'expected at most {len(LABELS)}')
    square = [np.asarray(v[name]).reshape(side, side) for name in sizes]
    return RemapConfig(square[0] != 0, square[1].astype(np.float64), square[2].astype(np.float64))


def read_parameter_file(path: str | Path) -> dict[str, Any]:
    """Read a ROS 2 parameter file into dotted names; the node name in it is not looked at.

    :raises ArtifactError: missing file, too large, no YAML, or no ``ros__parameters`` in it.
    """
    try:
        with Path(path).open('rb') as stream:
            raw = stream.read(MAX_PARAMETER_FILE_BYTES + 1)
        text = raw.decode('utf-8')
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no path of a file
        raise ArtifactError(f'{path}: cannot be read: {error}') from None
    if len(raw) > MAX_PARAMETER_FILE_BYTES:
        raise ArtifactError(f'{path}: found more than {MAX_PARAMETER_FILE_BYTES} bytes, '
                            'too many for a parameter file')
    try:
        tree = load_yaml(text)
    except ValueError as error:
        raise ArtifactError(f'{path}: is no YAML: {error}') from None
    flat: dict[str, Any] = {}
    found = _collect(tree, flat)
    if not found:
        raise ArtifactError(f'{path}: has no ros__parameters')
    return flat


class _Loader(yaml.SafeLoader):
    """Without aliases, which ROS refuses in parameter files; with them 1 kB may be endless."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, 'found an alias, expected values', self.peek_event().start_mark)
        return super().compose_node(parent, index)


def load_yaml(text: str) -> Any:
    """Return the plain values of a YAML text, aliases excluded.

    :raises ValueError: with one line that says what is wrong.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError('is nested too deeply') from None
    except Exception as error:  # PyYAML's constructors let those of the converted types through
        raise ValueError(' '.join(str(error).split()) or type(error).__name__) from None


def _collect(tree: Any, flat: dict[str, Any]) -> bool:
    """Flatten every ``ros__parameters`` mapping under ``tree``; return whether one was found."""
    if not isinstance(tree, Mapping):
        return False
    found = False
    for key, value in tree.items():
        if key == 'ros__parameters' and isinstance(value, Mapping):
            _flatten(value, '', flat)
            found = True
        else:
            found |= _collect(value, flat)
    return found


def _flatten(tree: Mapping, prefix: str, flat: dict[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            _flatten(value, f'{prefix}{key}.', flat)
        else:
            flat[f'{prefix}{key}'] = value


def known_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``values`` that the model has; upstream's files hold others too.

    Score thresholds of other classes than those of ``values`` are among the others.

    :raises ConfigError: ``class_names`` is wrong.
    """
    classes = PARAMETERS['class_names']
    names = classes.check(values.get(classes.name, classes.default))
    known = PARAMETERS.keys() | {_SCORES + name for name in names}
    return {name: value for name, value in values.items() if name in known}
