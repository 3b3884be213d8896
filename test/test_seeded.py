# SPDX-License-Identifier: Apache-2.0
"""Seeded networks behave like trained ones and are made again from their seed; clouds likewise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tt_perception.bevfusion.artifact import resolve
from tt_perception.bevfusion.config import (
    BEVFusionConfig,
    NetworkConfig,
    known_parameters,
    read_parameter_file,
)
from tt_perception.bevfusion.detections import LABELS, RawDetections
from tt_perception.bevfusion.fold import fold_norms
from tt_perception.bevfusion.postprocess import finish
from tt_perception.bevfusion.reference import BEVFusionNet
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.seeded import (
    POINTS_PER_VOXEL,
    grid_of,
    make_artifact,
    seeded_cloud,
    seeded_network,
    small_config,
    write_artifact,
)
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.bevfusion.weights import check_against, read_onnx
from tt_perception.runtime.errors import ArtifactError, ConfigError

pytestmark = pytest.mark.usefixtures('one_thread')
PARAMETERS, CONFIG = small_config()
SEEDS = (0, 1, 2)


@pytest.fixture(scope='module')
def nets():
    return {seed: seeded_network(CONFIG, seed) for seed in SEEDS}


def blocks_of(net, num_points, seed):
    """Return all blocks for a seeded cloud without past sweeps."""
    points = np.pad(seeded_cloud(num_points, seed), ((0, 0), (0, 1)))
    voxels = Voxelizer(grid_of(net.config))(points)
    rulebooks = RulebookBuilder(net.config)(voxels.coords_zyx)
    with torch.inference_mode():
        return net.forward_blocks(torch.from_numpy(voxels.features[rulebooks.order]), rulebooks)


# Networks


def test_small_configuration_fits_together():
    config = BEVFusionConfig.from_parameters(PARAMETERS)
    check_against(CONFIG, config)
    assert config.grid == grid_of(CONFIG)
    assert config.grid.size_xyz == (144, 144, 40)
    assert CONFIG.feature_map_xy == (18, 18)


def test_release_grid_belongs_to_the_release_network():
    assert grid_of(NetworkConfig()) == BEVFusionConfig.from_parameters({}).grid
    with_intensity = grid_of(NetworkConfig(in_channels=5))
    assert with_intensity.use_intensity and with_intensity.num_features == 5
    with pytest.raises(ConfigError, match='^in_channels: found 32'):
        grid_of(NetworkConfig(in_channels=32))


def test_same_seed_gives_the_same_network(nets):
    state = torch.random.get_rng_state()
    again = seeded_network(CONFIG, SEEDS[0]).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, tensor in nets[SEEDS[0]].state_dict().items():
        assert torch.equal(again[name], tensor), name
    other = nets[SEEDS[1]].state_dict()
    assert not torch.equal(other['bbox_head.shared_conv.weight'],
                           again['bbox_head.shared_conv.weight'])


def test_network_is_ready_to_be_used_and_to_be_trained(nets):
    net = nets[0]
    assert not net.training and not net.folded
    assert all(p.requires_grad and p.is_leaf and p.grad is None for p in net.parameters())
    norm = net.pts_middle_encoder.conv_input[1]
    assert norm.momentum == torch.nn.BatchNorm1d(1).momentum and norm.num_batches_tracked == 0


# Clouds of other sizes than the one that set the statistics, and of other seeds.
@pytest.mark.parametrize('num_points', [5000, 2500, 1200])
@pytest.mark.parametrize('seed', SEEDS)
def test_heatmap_and_boxes_are_of_usual_sizes(nets, seed, num_points):
    blocks = blocks_of(nets[seed], num_points, 100 + seed)
    logits = blocks['bbox_head.heatmap_head'][0]
    assert (logits.std(dim=(1, 2)) > 2).all()
    assert logits.abs().max() < 60
    score = blocks['score']
    assert (score > 0.1).sum() >= 15 and (score > 0.99).sum() == 0
    # Neither saturated nor on the plateaus of empty places: their order means something.
    proposals = blocks['bbox_head.heatmap'].flatten()[blocks['bbox_head.proposals']]
    assert len(proposals.unique()) == len(proposals)
    assert len(blocks['label_pred'].unique()) >= 4
    sizes = blocks['bbox_pred'][3:6].exp()
    assert sizes.min() > 0.4 and sizes.max() < 14
    assert (blocks['bbox_pred'][6:8].norm(dim=0) > 0.3).float().mean() > 0.6
    assert blocks['bbox_pred'][2].abs().max() < 3


@pytest.mark.parametrize('seed', SEEDS)
def test_objects_come_out(nets, seed):
    blocks = blocks_of(nets[seed], 5000, 100 + seed)
    raw = RawDetections(*(blocks[name].numpy() for name in ('bbox_pred', 'score', 'label_pred')))
    assert 10 <= len(finish(raw, BEVFusionConfig.from_parameters(PARAMETERS))) <= 50


def test_proposals_depend_on_the_cloud(nets):
    a, b = (blocks_of(nets[0], 5000, seed) for seed in (100, 101))
    same = np.intersect1d(a['bbox_head.proposals'], b['bbox_head.proposals'])
    assert len(same) < CONFIG.num_proposals / 2


def test_norms_hold_the_statistics_of_a_cloud(nets):
    blocks = blocks_of(nets[0], 5000, 7)
    for name in ('pts_middle_encoder.conv_out', 'pts_backbone.blocks.1', 'pts_neck.deblocks.1'):
        values = blocks[name]
        assert 0.3 < values.mean() < 1.2 and 0.3 < values.std() < 2.5, name


def test_intensity_and_other_classes():
    config = dataclasses.replace(CONFIG, in_channels=5, num_classes=3, pooled_classes=(0, 1, 2))
    net = seeded_network(config)
    assert net.pts_middle_encoder.conv_input[0].weight.shape[-1] == 5
    assert net.bbox_head.heatmap_head[-1].bias.shape == (3,)


# Artifacts


def test_artifact_is_read_back(nets, tmp_path):
    net = nets[0]
    paths = write_artifact(net, grid_of(CONFIG), tmp_path / 'new' / 'folder')
    artifact = resolve(tmp_path / 'new' / 'folder')
    assert [artifact.onnx, artifact.ml_package, artifact.class_remapper] == paths
    weights = read_onnx(artifact.onnx)
    assert weights.config == CONFIG
    state = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    for name, array in fold_norms(state, CONFIG).items():
        np.testing.assert_allclose(weights.arrays[name], array, rtol=1e-6, atol=1e-7)
    config = BEVFusionConfig.from_parameters(known_parameters(
        {**read_parameter_file(paths[1]), **read_parameter_file(paths[2])}))
    check_against(CONFIG, config)
    assert config.grid == grid_of(CONFIG)


def test_parameter_files_have_the_release_form(nets, tmp_path):
    _, ml_package, class_remapper = write_artifact(nets[0], grid_of(CONFIG), tmp_path)
    values = read_parameter_file(ml_package)
    assert list(values) == [
        'class_names', 'voxels_num', 'point_cloud_range', 'voxel_size', 'num_proposals',
        'out_size_factor', 'max_points_per_voxel', 'use_intensity', 'd_bound', 'x_bound',
        'y_bound', 'z_bound', 'num_cameras', 'raw_image_height', 'raw_image_width', 'roi_height',
        'roi_width', 'features_height', 'features_width', 'num_depth_features',
        'image_feature_channel']
    assert values['class_names'] == ['CAR', 'TRUCK', 'BUS', 'BICYCLE', 'PEDESTRIAN']
    assert values['voxels_num'] == [1, 128000, 256000]
    assert ml_package.read_text().startswith('/**:\n  ros__parameters:\n')
    remap = {name: np.reshape(values, (8, 8))
             for name, values in read_parameter_file(class_remapper).items()}
    allowed = remap['allow_remapping_by_area_matrix']
    assert {(int(a), int(b)) for a, b in np.argwhere(allowed)} == {
        (LABELS['CAR'], LABELS['TRUCK']), (LABELS['CAR'], LABELS['TRAILER']),
        (LABELS['TRUCK'], LABELS['TRAILER']), (LABELS['BUS'], LABELS['TRAILER'])}
    assert remap['min_area_matrix'][1, 2] == 12.1 and remap['max_area_matrix'][1, 2] == 36.0
    assert remap['min_area_matrix'][3, 4] == 36.0 and remap['max_area_matrix'][3, 4] == 999.999
    assert np.count_nonzero(remap['max_area_matrix']) == 4


def test_wrong_artifacts_are_not_written(nets, tmp_path):
    with pytest.raises(ConfigError, match='^class_names: found 2, expected 5'):
        write_artifact(nets[0], grid_of(CONFIG), tmp_path, class_names=('CAR', 'BUS'))
    with pytest.raises(ArtifactError, match='point_cloud_range'):
        write_artifact(nets[0], grid_of(NetworkConfig()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_full_size_artifact(tmp_path, monkeypatch):
    # The weights' values are tested on small networks: calibration of this one takes seconds.
    monkeypatch.setattr('tt_perception.bevfusion.seeded.seeded_network',
                        lambda seed: BEVFusionNet(NetworkConfig()))
    paths = make_artifact(tmp_path, seed=3)
    assert read_onnx(paths[0]).config == NetworkConfig()
    assert paths[0].stat().st_size == pytest.approx(33.7e6, rel=0.02)
    release = BEVFusionConfig.from_parameters({}).parameters
    for name, value in known_parameters(read_parameter_file(paths[1])).items():
        assert value == (list(release[name]) if isinstance(value, list) else release[name]), name


# Clouds


@pytest.mark.parametrize('num_voxels', [30_000, 120_000, 250_000])
def test_cloud_has_the_voxels_and_levels_of_a_recording(num_voxels):
    network = NetworkConfig()
    cloud = seeded_cloud(round(num_voxels * POINTS_PER_VOXEL))
    assert cloud.dtype == np.float32 and cloud.shape == (round(num_voxels * POINTS_PER_VOXEL), 3)
    voxels = Voxelizer(grid_of(network))(np.pad(cloud, ((0, 0), (0, 1))))
    assert len(voxels.num_points) == pytest.approx(num_voxels, rel=0.02) and not voxels.clipped
    rows = RulebookBuilder(network)(voxels.coords_zyx).num_rows
    assert rows[1] / rows[0] == pytest.approx(0.80, abs=0.02)
    assert rows[2] / rows[0] == pytest.approx(0.37, abs=0.015)
    assert rows[3] / rows[0] == pytest.approx(0.135, abs=0.015)


def test_cloud_comes_from_its_seed():
    a = seeded_cloud(2000, 4)
    np.testing.assert_array_equal(seeded_cloud(2000, 4), a)
    assert not np.array_equal(seeded_cloud(2000, 5), a)
    assert np.isfinite(a).all()
    azimuth = np.arctan2(a[:, 1], a[:, 0])
    assert (np.diff(azimuth) > -1e-5).all()
