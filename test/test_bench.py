# SPDX-License-Identifier: Apache-2.0
"""The benchmark's peers do the same work as the package, and its results are complete."""

from __future__ import annotations

import builtins
import json

import numpy as np
import pytest
import torch

from tt_perception.bevfusion import bench, peers
from tt_perception.bevfusion.cloud import decode_cloud
from tt_perception.bevfusion.config import BEVFusionConfig
from tt_perception.bevfusion.densify import Densifier, Sweep
from tt_perception.bevfusion.fold import fold_norms
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.seeded import grid_of, seeded_cloud, seeded_network, small_config
from tt_perception.bevfusion.voxelize import Voxelizer

pytestmark = pytest.mark.usefixtures('one_thread')
PARAMETERS, SMALL = small_config()


@pytest.fixture(scope='module')
def frame():
    """Return points, voxel coordinates, features and rulebooks of a small cloud."""
    points = np.pad(seeded_cloud(4000), ((0, 0), (0, 1)))
    voxels = Voxelizer(grid_of(SMALL))(points)
    rulebooks = RulebookBuilder(SMALL)(voxels.coords_zyx)
    return points, voxels, torch.from_numpy(voxels.features[rulebooks.order]), rulebooks


@pytest.fixture(scope='module')
def net():
    return seeded_network(SMALL)


def test_numpy_reads_and_fuses_the_same_points():
    cloud = seeded_cloud(1001)
    cloud[7, 1] = np.nan
    message = bench._message(cloud)
    np.testing.assert_array_equal(peers.structured_reading(message),
                                  decode_cloud(message, use_intensity=False).points)
    current, past, move = bench._two_sweeps(seeded_cloud(1001))
    config = BEVFusionConfig.from_parameters({})
    dense = Densifier(config.densification, config.grid)(current, [Sweep(past, 0.1, move)])
    assert dense.num_points_per_sweep == (501, 500)
    np.testing.assert_allclose(peers.numpy_densify(current, past, move, 0.1), dense.points,
                               atol=1e-5)
    np.testing.assert_allclose(dense.points[501:, :3], seeded_cloud(1001)[1::2], atol=1e-4)


def test_numpy_suppresses_the_same_boxes():
    config = BEVFusionConfig.from_parameters({})
    for seed in range(3):
        raw = bench._seeded_proposals(300, seed)
        for ours, theirs in bench._nms_pair(raw, config):
            keep = ours()
            assert 0 < np.count_nonzero(~keep) < len(keep)
            np.testing.assert_array_equal(theirs(), keep)


def test_spconv_builds_the_same_voxels_and_levels(frame):
    pytest.importorskip('spconv', reason='the CPU wheel of spconv is missing')
    points, voxels, _, rulebooks = frame
    assert peers.spconv_voxelizer(grid_of(SMALL))(points) == len(voxels.num_points)
    rows = peers.spconv_indice_pairs(SMALL)(rulebooks.coords_xyz[0])
    assert rows == list(rulebooks.num_rows)


def test_spconv_encodes_the_same_features(frame, net):
    pytest.importorskip('spconv', reason='the CPU wheel of spconv is missing')
    _, _, features, rulebooks = frame
    state = fold_norms({k: v.numpy() for k, v in net.state_dict().items()}, SMALL)
    with peers.spconv_threads(1):
        theirs = peers.spconv_encoder(SMALL, state)(features, rulebooks.coords_xyz[0])
    with torch.inference_mode():
        ours = net.forward_blocks(features, rulebooks)['pts_middle_encoder.conv_out']
    order = np.lexsort(theirs.indices.numpy().T[::-1])
    np.testing.assert_array_equal(theirs.indices.numpy()[order][:, 1:], rulebooks.coords_xyz[-1])
    torch.testing.assert_close(theirs.features[torch.from_numpy(order)], ours, atol=1e-3,
                               rtol=1e-3)


def test_onnxruntime_finds_the_same_proposals(frame, net):
    pytest.importorskip('onnxruntime', reason='onnxruntime is missing')
    _, _, features, rulebooks = frame
    with torch.inference_mode():
        blocks = net.forward_blocks(features, rulebooks)
    dense = peers.onnxruntime_dense(net, grid_of(SMALL), 1)
    bbox_pred, score, label_pred = dense(blocks['pts_middle_encoder.bev'].contiguous().numpy())
    # As a set: proposals of nearly equal scores may change places.
    ours = blocks['bbox_pred'].numpy()
    distance = np.abs(bbox_pred[:, :, None] - ours[:, None]).max(axis=0)
    match = distance.argmin(axis=1)
    assert sorted(match) == list(range(SMALL.num_proposals))
    assert distance.min(axis=1).max() < 2e-3
    np.testing.assert_allclose(score, blocks['score'].numpy()[match], atol=1e-4)
    np.testing.assert_array_equal(label_pred, blocks['label_pred'].numpy()[match])


def test_host_result_is_complete():
    result = bench.bench_host(voxels=(1500,), repeat=2)
    assert json.loads(json.dumps(result)) == result
    case, = result['cases']
    assert case['voxels'] == pytest.approx(1500, rel=0.1)
    stages = {stage['stage']: stage for stage in case['stages']}
    assert list(stages) == ['decode', 'densify', 'voxelize', 'rulebooks', 'circle nms',
                            'overlap nms', 'postprocess']
    for name, stage in stages.items():
        assert stage['ms'] > 0
        if name != 'postprocess' and not result['skipped']:
            assert stage['ratio'] == stage['peer_ms'] / stage['ms']
    assert 'rulebooks' in bench.table(result)


def test_cpu_result_is_complete():
    result = bench.bench_cpu(voxels=(1500,), repeat=1, config=SMALL)
    assert json.loads(json.dumps(result)) == result
    case, = result['cases']
    parts = case['host_ms'] + case['sparse_ms'] + case['dense_ms']
    assert case['total_ms'] == pytest.approx(parts, rel=0.05)
    assert case['blocks_ms'].keys() >= {'voxelize', 'rulebooks', 'pts_middle_encoder.conv_input',
                                        'pts_neck', 'outputs', 'postprocess'}
    assert case['peak_memory_mib'] >= result['memory_without_network_mib'] > 0
    if not result['skipped']:
        peer_ms = case['peers']['dense_ms'] + case['peers']['sparse_ms']
        assert case['ratio'] == pytest.approx(case['total_ms'] / peer_ms)
    assert 'peak memory' in bench.table(result)


def test_missing_peers_are_named(monkeypatch):
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition('.')[0] in ('spconv', 'cumm', 'onnxruntime'):
            raise ImportError(f'No module named {name!r}')
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, '__import__', without)
    result = bench.bench_host(voxels=(1500,), repeat=1)
    assert list(result['skipped']) == ['spconv']
    assert 'not compared: spconv: No module named' in bench.table(result)
    result = bench.bench_cpu(voxels=(1500,), repeat=1, config=SMALL)
    assert set(result['skipped']) == {'spconv', 'onnxruntime'}
    assert result['cases'][0]['peers'] == {} and 'ratio' not in result['cases'][0]


@pytest.mark.slow
def test_the_host_stages_meet_their_targets():
    pytest.importorskip('spconv', reason='the CPU wheel of spconv is missing')
    case, = bench.bench_host(voxels=(120_000,))['cases']
    stages = {stage['stage']: stage for stage in case['stages']}
    assert case['decode_densify_voxelize_ms'] <= 15
    assert stages['rulebooks']['ms'] <= 60
    assert stages['postprocess']['ms'] <= 3
    least = {'voxelize': 2, 'rulebooks': 3, 'circle nms': 3, 'overlap nms': 3}
    assert all(stages[name]['ratio'] >= ratio for name, ratio in least.items())


@pytest.mark.slow
def test_a_frame_on_the_cpu_meets_its_target():
    pytest.importorskip('spconv', reason='the CPU wheel of spconv is missing')
    pytest.importorskip('onnxruntime', reason='onnxruntime is missing')
    case, = bench.bench_cpu(repeat=5)['cases']
    assert case['ratio'] <= 1.3
