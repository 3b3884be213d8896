# SPDX-License-Identifier: Apache-2.0
"""Networks with seeded random weights, and seeded clouds for them.

They stand in for released weights and recordings where there are none: in tests, benchmarks and
demos. What such a network detects means nothing, but it behaves like a trained one: every block
has values of a usual size, some hundred proposals have a score, and boxes have sizes of vehicles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from tt_perception.bevfusion.artifact import CLASS_REMAPPER, ML_PACKAGE, ONNX, RANDOM_WEIGHTS
from tt_perception.bevfusion.config import PARAMETERS, BEVFusionConfig, GridConfig, NetworkConfig
from tt_perception.bevfusion.detections import LABELS
from tt_perception.bevfusion.export import write_onnx
from tt_perception.bevfusion.reference import BEVFusionNet, local_maxima
from tt_perception.bevfusion.rulebook import RulebookBuilder, Rulebooks
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.bevfusion.weights import OUT_SIZE_FACTOR, check_grid
from tt_perception.runtime.errors import ArtifactError, ConfigError

POINTS_PER_VOXEL = 2.375  # of a seeded cloud on the release's grid

# Mean and standard deviation of the biases of the norms. Well above zero, so that most values
# pass the ReLUs: otherwise 30 layers of random weights let single sites outgrow all others, and
# a cloud other than the one for the statistics leaves their range.
_NORM_BIAS = (0.5, 0.2)
_LOGIT_STD = 2.5  # of each class of the heat map
_PEAK_LOGIT = -0.5  # of the last of the peaks that make up half of the proposals

# Mean and standard deviation of the branches' outputs over the proposals.
_BRANCH_STATISTICS = {
    'center': (0.0, 0.4),  # cells
    'height': (-0.8, 0.3),  # m
    'dim': (np.log([4.2, 1.9, 1.6]).tolist(), 0.25),  # log m
    'rot': (0.0, 0.7),
    'vel': (0.0, 2.0),  # m/s
    'heatmap': (1.0, 1.0),  # logits
}

# (from, to): least and greatest area (m2) of the release's class remapper
_REMAPS = {('CAR', 'TRUCK'): (12.1, 36.0), ('CAR', 'TRAILER'): (36.0, 999.999),
           ('TRUCK', 'TRAILER'): (36.0, 999.999), ('BUS', 'TRAILER'): (36.0, 999.999)}
_REMAP_LABELS = 8


# Clouds


def seeded_cloud(num_points: int, seed: int = 0) -> np.ndarray:
    """Return a synthetic street, float32 [num_points, 3]: x, y, z (m), in the order of azimuth.

    Rings on the ground, upright surfaces, and a little clutter. The surroundings grow with the
    number of points, so that a voxel has the same neighbourhood in small and large clouds: on the
    release's grid a voxel stands for about 2.4 points, and levels 2, 3 and 4 of the sparse
    encoder have 0.80, 0.37 and 0.13 times the rows of level 1, as in KITTI's sweeps.
    """
    rng = np.random.default_rng(seed)
    scale = math.sqrt(num_points / 285_000)  # of lengths
    num_ground, num_clutter = round(0.6 * num_points), round(0.0006 * num_points)
    points = np.concatenate([
        _rings(rng, num_ground, 4.3 * scale, 50 * scale, max(2, round(64 * scale))),
        _surfaces(rng, num_points - num_ground - num_clutter, min(115.0, 80 * scale)),
        rng.uniform((-100 * scale, -100 * scale, -2.0), (100 * scale, 100 * scale, 4.5),
                    (num_clutter, 3))])
    azimuth = np.arctan2(points[:, 1], points[:, 0])
    return points[np.argsort(azimuth, kind='stable')].astype(np.float32)


def _rings(rng: np.random.Generator, count: int, nearest_m: float, farthest_m: float,
           num_rings: int) -> np.ndarray:
    """Return the hits of the beams of a lidar on flat ground, float64 [count, 3]."""
    inverse = np.linspace(1 / farthest_m, 1 / nearest_m, num_rings)  # even in tan(elevation)
    radius = (1 + rng.normal(0, 1e-3, count)) / inverse[np.arange(count) % num_rings]
    azimuth = rng.uniform(-np.pi, np.pi, count)
    return np.stack([radius * np.cos(azimuth), radius * np.sin(azimuth),
                     rng.normal(-1.75, 0.03, count)], axis=1)


def _surfaces(rng: np.random.Generator, count: int, reach_m: float) -> np.ndarray:
    """Return points on upright rectangles, float64 [count, 3], at 24.5 points a square metre."""
    length, height, per_m2 = 13.0, 3.0, 24.5
    number = max(1, round(count / (length * height * per_m2)))
    centre = rng.uniform(-reach_m, reach_m, (number, 2))
    heading = rng.integers(0, 2, number) * np.pi / 2 + rng.normal(0, 0.2, number)
    surface = np.arange(count) % number
    along = np.stack([np.cos(heading), np.sin(heading)], axis=1)[surface]
    across = along[:, ::-1] * (-1, 1)
    xy = (centre[surface] + along * rng.uniform(-length / 2, length / 2, (count, 1))
          + across * rng.normal(0, 0.03, (count, 1)))
    return np.column_stack([xy, rng.uniform(-1.7, height - 1.7, count)])


# Networks


def grid_of(config: NetworkConfig) -> GridConfig:
    """Return the grid of the release's voxels that fits a network, its centre at x = y = 0.

    :raises ConfigError: the number of input channels is not that of a point's features.
    """
    (size_x, size_y, size_z), (dx, dy, dz) = (config.spatial_shape_xyz,
                                              PARAMETERS['voxel_size'].default)
    half_x, half_y = round(size_x * dx / 2, 6), round(size_y * dy / 2, 6)
    z_min = PARAMETERS['point_cloud_range'].default[2]
    grid = BEVFusionConfig.from_parameters({
        'point_cloud_range': (-half_x, -half_y, z_min, half_x, half_y,
                              round(z_min + (size_z - 1) * dz, 6)),
        'use_intensity': config.in_channels == 5}).grid
    if grid.num_features != config.in_channels:
        raise ConfigError(f'in_channels: found {config.in_channels}, expected 4 or 5')
    check_grid(config, grid)
    return grid


def small_config() -> tuple[dict[str, Any], NetworkConfig]:
    """Return the parameters and the network of a small grid with narrow layers, for tests.

    The topology is the release's; the grid reaches 12.24 m to each side.
    """
    parameters = {'point_cloud_range': (-12.24, -12.24, -3.0, 12.24, 12.24, 5.0),
                  'num_proposals': 50}
    return parameters, NetworkConfig(
        num_proposals=50, spatial_shape_xyz=(144, 144, 41), sparse_channels=(8, 16, 24, 32),
        bev_channels=32, backbone_channels=(32, 64), neck_channels=64, hidden_channels=32,
        num_heads=4, ffn_channels=64, branch_channels=32)


def seeded_network(config: NetworkConfig | None = None, seed: int = 0, *,
                   grid: GridConfig | None = None) -> BEVFusionNet:
    """Return a network with norms, in evaluation mode, whose random weights fit together.

    A seeded cloud sets the statistics of the norms, then the spread of the heat map, in which no
    class prefers empty places, and that of the boxes.

    :param config: sizes; by default the release's.
    :param grid: the voxel grid; by default :func:`grid_of` the network.
    """
    config = config or NetworkConfig()
    grid = grid or grid_of(config)
    frame = _seeded_frame(config, grid, seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = BEVFusionNet(config).train()
        norms = [m for m in net.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]
        for norm in norms:
            norm.weight.uniform_(0.8, 1.2)
            norm.bias.normal_(*_NORM_BIAS)
            norm.momentum, usual_momentum = 1.0, norm.momentum
        blocks = net.forward_blocks(*frame)
        _calibrate_heatmap(net, blocks)
        net.bbox_head(blocks['pts_neck'], blocks.__setitem__)  # now with the right proposals
        _calibrate_branches(net, blocks)
        for norm in norms:
            norm.momentum = usual_momentum
            norm.num_batches_tracked.zero_()
    return net.eval()


def _seeded_frame(config: NetworkConfig, grid: GridConfig,
                  seed: int) -> tuple[Tensor, Rulebooks]:
    """Return features and rulebooks of a seeded cloud of two sweeps that fills the grid."""
    reach_m = float(min(np.abs(grid.point_cloud_range[:2] + grid.point_cloud_range[3:5])))
    xyz = seeded_cloud(round(285_000 * min(1.0, reach_m / 90) ** 2), seed)
    rng = np.random.default_rng(seed)
    columns = [xyz]
    if grid.use_intensity:
        columns.append(rng.integers(0, 256, (len(xyz), 1)))
    columns.append(rng.choice((0.0, 0.1), (len(xyz), 1)))  # time lag
    voxels = Voxelizer(grid)(np.hstack(columns).astype(np.float32))
    rulebooks = RulebookBuilder(config)(voxels.coords_zyx)
    return torch.from_numpy(voxels.features[rulebooks.order]), rulebooks


def _calibrate_heatmap(net: BEVFusionNet, blocks: dict[str, Tensor]) -> None:
    """Give all classes logits of one spread, and each class a tenth of the proposals."""
    last, config = net.bbox_head.heatmap_head[-1], net.config
    logits = blocks['bbox_head.heatmap_head'][0]
    empty = (blocks['pts_middle_encoder.bev'][0] == 0).all(dim=0)
    scale = _LOGIT_STD / logits.std(dim=(1, 2))
    # Empty places all look alike: no class may have its proposals there.
    scale[logits[:, empty].mean(dim=1) > logits.mean(dim=(1, 2))] *= -1
    logits = logits * scale[:, None, None]
    floor = logits.min() - 1  # local_maxima takes positive values
    peaks = local_maxima(logits - floor, config.pooled_classes).flatten(1) + floor
    wanted = max(1, config.num_proposals // (2 * config.num_classes))
    shift = _PEAK_LOGIT - peaks.sort(dim=1, descending=True).values[:, wanted]
    last.weight *= scale[:, None, None, None]
    last.bias.mul_(scale).add_(shift)


def _calibrate_branches(net: BEVFusionNet, blocks: dict[str, Tensor]) -> None:
    """Set mean and spread of what the branches predict."""
    for name, (mean, std) in _BRANCH_STATISTICS.items():
        out = blocks[f'bbox_head.prediction_heads.0.{name}']
        last = net.bbox_head.prediction_heads[0][name][-1]
        scale = std / out.std(dim=0)
        last.weight *= scale[:, None, None]
        last.bias.sub_(out.mean(dim=0)).mul_(scale).add_(torch.as_tensor(mean))


# Artifacts


def write_artifact(net: BEVFusionNet, grid: GridConfig, folder: str | Path, *,
                   class_names: Sequence[str] | None = None) -> list[Path]:
    """Write an unfolded network as an artifact: the three files of the release, in their form.

    :param folder: is made if it is missing.
    :param class_names: one for each class of the network; by default the release's.
    :returns: the paths of the files.
    :raises ConfigError: another number of class names than classes.
    :raises ArtifactError: the network is for another grid.
    """
    class_names = list(class_names or PARAMETERS['class_names'].default)
    if len(class_names) != net.config.num_classes:
        raise ConfigError(f'class_names: found {len(class_names)}, expected '
                          f'{net.config.num_classes} as in the network')
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(net, folder / ONNX, grid=grid)
    _write_parameters(folder / ML_PACKAGE, _ml_package(net.config, grid, class_names))
    _write_parameters(folder / CLASS_REMAPPER, _class_remapper())
    return [folder / name for name in (ONNX, ML_PACKAGE, CLASS_REMAPPER)]


def make_artifact(folder: str | Path, seed: int = 0) -> list[Path]:
    """Write an artifact of the release's sizes with seeded weights; see :func:`write_artifact`.

    A note beside the files says that the weights are random.

    :raises ArtifactError: the folder holds a network without that note, or cannot be written.
    """
    folder = Path(folder)
    note = folder / RANDOM_WEIGHTS
    if (folder / ONNX).exists() and not note.exists():
        raise ArtifactError(f'{folder / ONNX}: exists and is not random; expected another folder')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(f'Seeded random weights, seed {seed}: what this network detects means '
                        'nothing.\n', encoding='utf-8')
    except OSError as error:
        raise ArtifactError(f'{folder}: cannot be written: {error.strerror}') from None
    net = seeded_network(seed=seed)
    return write_artifact(net, grid_of(net.config), folder)


def _ml_package(config: NetworkConfig, grid: GridConfig,
                class_names: list[str]) -> dict[str, Any]:
    """Return the parameters that belong to the network; those of cameras are there, unused."""
    x_min, y_min, _, x_max, y_max, _ = grid.point_cloud_range
    dx, dy, _ = grid.voxel_size
    cameras = ('num_cameras', 'raw_image_height', 'raw_image_width', 'roi_height', 'roi_width',
               'features_height', 'features_width', 'num_depth_features', 'image_feature_channel')
    return {
        'class_names': class_names,
        'voxels_num': [grid.min_voxels, max(grid.min_voxels, grid.max_voxels // 2),
                       grid.max_voxels],
        'point_cloud_range': list(grid.point_cloud_range),
        'voxel_size': list(grid.voxel_size),
        'num_proposals': config.num_proposals,
        'out_size_factor': OUT_SIZE_FACTOR,
        'max_points_per_voxel': grid.max_points_per_voxel,
        'use_intensity': grid.use_intensity,
        'd_bound': [1.0, 166.2, 1.4],
        'x_bound': [x_min, x_max, 4 * dx],
        'y_bound': [y_min, y_max, 4 * dy],
        'z_bound': [-10.0, 10.0, 20.0],
        **dict.fromkeys(cameras, 0),
    }


def _class_remapper() -> dict[str, Any]:
    matrices = np.zeros((3, _REMAP_LABELS, _REMAP_LABELS))
    for (source, target), (least, greatest) in _REMAPS.items():
        matrices[:, LABELS[source], LABELS[target]] = 1, least, greatest
    allow, least, greatest = matrices.reshape(3, -1)
    return {'allow_remapping_by_area_matrix': allow.astype(int).tolist(),
            'min_area_matrix': least.tolist(), 'max_area_matrix': greatest.tolist()}


def _write_parameters(path: Path, parameters: dict[str, Any]) -> None:
    tree = {'/**': {'ros__parameters': parameters}}
    path.write_text(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=99),
                    encoding='utf-8')
