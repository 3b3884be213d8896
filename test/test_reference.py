# SPDX-License-Identifier: Apache-2.0
"""The PyTorch network computes what the definition says, can be trained, and repeats itself."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from dense_oracle import (
    DenseNetwork,
    naive_local_maxima,
    naive_output_sites,
    naive_rulebooks,
    naive_table,
)
from tiny_nets import OTHER, TINY, numpy_state, random_net

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.fold import fold_norms
from tt_perception.bevfusion.peers import spconv_threads
from tt_perception.bevfusion.reference import (
    BEVFusionNet,
    SparseConv,
    local_maxima,
    top_k,
)
from tt_perception.bevfusion.sparseconv import Pairs, SparseConvolution
from tt_perception.runtime.errors import ArtifactError, ConfigError, InputError
from tt_perception.runtime.pool import RowPool

pytestmark = pytest.mark.usefixtures('one_thread')

# kernel, stride, padding, submanifold: the different ones of the network
GEOMETRIES = {
    'submanifold': ((3, 3, 3), (1, 1, 1), (1, 1, 1), True),
    'strided': ((3, 3, 3), (2, 2, 2), (1, 1, 1), False),
    'strided, third': ((3, 3, 3), (2, 2, 2), (1, 1, 0), False),
    'output': ((1, 1, 3), (1, 1, 2), (0, 0, 0), False),
}


def random_sites(shape, count, seed):
    """Return sorted sites int32 [n, 3]: half of them close together, the rest anywhere."""
    rng = np.random.default_rng(seed)
    spread = rng.integers(0, shape, (count // 2, 3))
    centres = rng.integers(0, shape, (6, 3))
    close = centres[rng.integers(0, 6, count - count // 2)] + rng.integers(-2, 3, (
        count - count // 2, 3))
    sites = np.unique(np.concatenate([spread, close]), axis=0)
    return sites[((sites >= 0) & (sites < shape)).all(1)].astype(np.int32)


def frame(config, count=300, seed=0):
    """Return features, rulebooks and sites of a random cloud."""
    sites = random_sites(config.spatial_shape_xyz, count, seed)
    features = torch.randn(len(sites), config.in_channels,
                           generator=torch.Generator().manual_seed(seed))
    return features, naive_rulebooks(sites, config.level_shapes_xyz), sites


@pytest.fixture(scope='module')
def tiny_frame():
    return frame(TINY)


def folded(net):
    """Return the network without norms."""
    state = fold_norms(numpy_state(net), net.config)
    result = BEVFusionNet(net.config, folded=True).eval()
    result.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return result


def by_proposal(blocks):
    """Return blocks with rows of proposals in the order of their cells, not of their scores."""
    order = torch.as_tensor(blocks['bbox_head.proposals']).argsort()
    k = len(order)
    result = {}
    for name, block in blocks.items():
        block = torch.as_tensor(block)
        along = {'bbox_pred': 1}.get(name, 0)
        after = name in ('bbox_pred', 'score', 'label_pred', 'bbox_head.proposals',
                         'bbox_head.query')
        if (after or '.decoder.' in name or '.prediction_heads.' in name) \
                and block.shape[along] == k:
            block = block.index_select(along, order)
        result[name] = block
    return result


def assert_same_blocks(found, expected, tolerance):
    found, expected = by_proposal(found), by_proposal(expected)
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].shape == expected[name].shape, name
        a, b = found[name].double(), expected[name].double()
        if name in ('bbox_head.proposals', 'label_pred'):
            assert torch.equal(a, b), name
        error = (a - b).abs().max() / b.abs().max()
        assert error < tolerance, f'{name}: relative error {error:.1e}'


# The whole network


@pytest.mark.parametrize('config', [TINY, OTHER], ids=['tiny', 'other'])
@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_every_block_equals_dense_network(config, training):
    features, rulebooks, sites = frame(config)
    net = random_net(config).train(training)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        blocks = net.forward_blocks(features, rulebooks)
    expected = DenseNetwork(state, config, training)(features, sites)
    assert_same_blocks(blocks, expected, 1e-4)


def test_training_updates_norms_from_active_rows_only(tiny_frame):
    features, rulebooks, _ = tiny_frame
    net = random_net(TINY).train()
    norm = net.pts_middle_encoder.conv_input[1]
    norm.momentum = 1.0
    seen = []
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        net(features, rulebooks)
    assert len(seen[0]) == rulebooks.num_rows[0]
    torch.testing.assert_close(norm.running_mean, seen[0].mean(0))


def test_results_are_those_of_the_blocks(tiny_frame):
    features, rulebooks, _ = tiny_frame
    net = random_net(TINY)
    with torch.inference_mode():
        blocks = net.forward_blocks(features, rulebooks)
        bbox_pred, score, label_pred = net(features, rulebooks)
    assert bbox_pred.shape == (10, TINY.num_proposals) and bbox_pred.is_contiguous()
    assert score.shape == label_pred.shape == (TINY.num_proposals,)
    assert (bbox_pred.dtype, score.dtype, label_pred.dtype) == (
        torch.float32, torch.float32, torch.int64)
    for name, value in (('bbox_pred', bbox_pred), ('score', score), ('label_pred', label_pred)):
        assert torch.equal(blocks[name], value)


def test_blocks_are_not_written_to_later(tiny_frame):
    features, rulebooks, _ = tiny_frame
    net, copies, given = random_net(TINY), {}, features.clone()

    def keep(name, tensor):
        copies[name] = (tensor, tensor.clone())

    with torch.inference_mode():
        net.run_blocks(features, rulebooks, keep)
    assert torch.equal(features, given)
    for name, (tensor, copy) in copies.items():
        assert torch.equal(tensor, copy), name


def test_features_of_another_type_or_shape_are_refused(tiny_frame):
    features, rulebooks, _ = tiny_frame
    net = random_net(TINY)
    for wrong in (features[1:], features[:, :3], features.double(), features[0]):
        with pytest.raises(InputError, match='^features: found torch'):
            net(wrong, rulebooks)


@pytest.fixture(scope='module')
def release():
    return BEVFusionNet(NetworkConfig())


def test_number_of_parameters_is_the_release(release):
    def count(*names):
        return sum(p.numel() for name in names for p in release.get_submodule(name).parameters())

    assert count('pts_middle_encoder') == 2_693_920
    assert count('pts_backbone') == 4_280_832
    assert count('pts_neck') == 295_936
    assert count('bbox_head.shared_conv', 'bbox_head.heatmap_head',
                 'bbox_head.class_encoding') == 744_197
    assert count('bbox_head.decoder') == 233_088
    assert count('bbox_head.prediction_heads') == 50_895
    assert count('') == 8_298_868


def test_names_and_layouts_of_weights_are_upstreams(release):
    shapes = {name: tuple(t.shape) for name, t in release.state_dict().items()}
    for name, shape in {
            'pts_middle_encoder.conv_input.0.weight': (16, 3, 3, 3, 4),
            'pts_middle_encoder.conv_input.1.running_var': (16,),
            'pts_middle_encoder.encoder_layers.encoder_layer1.0.bn1.weight': (16,),
            'pts_middle_encoder.encoder_layers.encoder_layer3.2.0.weight': (128, 3, 3, 3, 64),
            'pts_middle_encoder.encoder_layers.encoder_layer3.2.1.bias': (128,),
            'pts_middle_encoder.encoder_layers.encoder_layer4.1.conv2.weight':
                (128, 3, 3, 3, 128),
            'pts_middle_encoder.conv_out.0.weight': (128, 1, 1, 3, 128),
            'pts_backbone.blocks.1.0.weight': (256, 128, 3, 3),
            'pts_backbone.blocks.1.16.running_mean': (256,),
            'pts_neck.deblocks.1.0.weight': (256, 256, 2, 2),
            'bbox_head.shared_conv.bias': (128,),
            'bbox_head.class_encoding.weight': (128, 5, 1),
            'bbox_head.decoder.0.self_attn.attn.in_proj_weight': (384, 128),
            'bbox_head.decoder.0.cross_attn.attn.out_proj.bias': (128,),
            'bbox_head.decoder.0.ffn.layers.0.0.weight': (256, 128),
            'bbox_head.decoder.0.ffn.layers.1.bias': (128,),
            'bbox_head.decoder.0.norms.2.weight': (128,),
            'bbox_head.decoder.0.cross_posembed.position_embedding_head.3.weight': (128, 128, 1),
            'bbox_head.prediction_heads.0.center.0.conv.weight': (64, 128, 1),
            'bbox_head.prediction_heads.0.heatmap.1.bias': (5,)}.items():
        assert shapes[name] == shape, name
    assert 'pts_middle_encoder.conv_input.0.bias' not in shapes


def test_feature_map_is_x_by_y_and_channels_are_c_then_z():
    net = random_net(TINY)
    sx, sy, sz = TINY.level_shapes_xyz[-1]
    rows = torch.arange(2 * TINY.bev_channels, dtype=torch.float32).view(2, -1)
    bev = net.pts_middle_encoder._to_bev(rows, np.array([[1, 2, 0], [4, 7, 1]], np.int32))
    assert bev.shape == (1, TINY.bev_channels * sz, sx, sy)
    assert bev.is_contiguous(memory_format=torch.channels_last)  # or convolutions are slow
    assert torch.equal(bev[0, 0::sz, 1, 2], rows[0]) and torch.equal(bev[0, 1::sz, 4, 7], rows[1])
    assert (bev != 0).sum() == (rows != 0).sum()


def test_no_site_on_the_last_level_gives_an_empty_map():
    # The last of 39 cells along z is out of reach of the third strided convolution.
    config = dataclasses.replace(TINY, spatial_shape_xyz=(48, 64, 39))
    sites = np.array([[10, 20, 38], [11, 20, 38]], np.int32)
    rulebooks = naive_rulebooks(sites, config.level_shapes_xyz)
    assert rulebooks.num_rows[3] == rulebooks.num_rows[4] == 0
    with torch.inference_mode():
        blocks = random_net(config).forward_blocks(torch.rand(2, 4), rulebooks)
    assert not blocks['pts_middle_encoder.bev'].any()
    assert blocks['bbox_pred'].isfinite().all()


@pytest.mark.parametrize(('change', 'name'), [
    ({'spatial_shape_xyz': (56, 64, 41)}, 'spatial_shape_xyz'),
    ({'num_proposals': 5 * 6 * 8 + 1}, 'num_proposals'),
    ({'num_heads': 3}, 'num_heads')])
def test_sizes_that_do_not_fit_are_refused(change, name):
    with pytest.raises(ConfigError, match=f'^{name}: found'):
        BEVFusionNet(dataclasses.replace(TINY, **change))


# Sparse convolution


def sparse_case(geometry, c_in=6, c_out=9, shape=(20, 16, 11), count=250):
    """Return a convolution, its features, its table and its sites before and after."""
    kernel, stride, padding, subm = GEOMETRIES[geometry]
    sites = random_sites(shape, count, 1)
    shape_out = [(n + 2 * p - k) // s + 1
                 for n, p, k, s in zip(shape, padding, kernel, stride, strict=True)]
    out = sites if subm else naive_output_sites(sites, shape_out, kernel, stride, padding)
    torch.manual_seed(1)
    conv = SparseConv(c_in, c_out, False, kernel)
    return conv, torch.randn(len(sites), c_in), naive_table(sites, out, kernel, stride,
                                                            padding), sites, out


@pytest.mark.parametrize('geometry', GEOMETRIES)
def test_sparse_convolution_and_its_gradients(geometry):
    conv, x, table, _, _ = sparse_case(geometry)
    # The same sum, for autograd to differentiate: a zero row stands for missing neighbours.
    x1, w1 = x.clone().requires_grad_(), conv.weight.detach().clone().requires_grad_()
    padded = torch.cat([x1, torch.zeros(1, x.shape[1])])[torch.from_numpy(table).long()]
    expected = torch.einsum('nkc,okc->no', padded, w1.flatten(1, 3))
    grad = torch.randn_like(expected)
    expected.backward(grad)

    x2 = x.clone().requires_grad_()
    y = conv(x2, Pairs.of_table(table))
    y.backward(grad)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x2.grad, x1.grad)
    torch.testing.assert_close(conv.weight.grad, w1.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(('rows', 'c_in', 'c_out'), [
    (1, 3, 1), (511, 16, 16), (512, 5, 15), (513, 32, 32), (1500, 17, 48), (700, 64, 80)])
def test_sparse_convolution_of_all_sizes(rows, c_in, c_out):
    rng = np.random.default_rng(rows)
    num_inputs = rows // 2 + 1
    table = rng.integers(-1, num_inputs, (rows, 27)).astype(np.int32)
    table[rng.random(table.shape) < 0.5] = -1
    table[rows // 3] = -1  # a row without neighbours
    x, weight, bias = (torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in (
        (num_inputs, c_in), (c_out, 3, 3, 3, c_in), (c_out,)))
    found = SparseConvolution.apply(x, weight, bias, Pairs.of_table(table))
    padded = torch.cat([x, torch.zeros(1, c_in)]).double()[torch.from_numpy(table).long()]
    expected = bias + torch.einsum('nkc,okc->no', padded, weight.flatten(1, 3).double())
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-5)
    assert torch.equal(found[rows // 3], bias)


def test_sparse_convolution_does_not_depend_on_threads(monkeypatch):
    rng = np.random.default_rng(0)
    table = rng.integers(-1, 3000, (5000, 27)).astype(np.int32)
    x, weight = torch.randn(3000, 32), torch.randn(32, 3, 3, 3, 32)
    results = []
    for threads in (1, 2, 5):
        pool = RowPool(threads)
        monkeypatch.setattr('tt_perception.bevfusion.sparseconv.shared', lambda pool=pool: pool)
        results.append(SparseConvolution.apply(x, weight, None, Pairs.of_table(table)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize('geometry', GEOMETRIES)
def test_sparse_convolution_equals_spconv(geometry):
    spconv = pytest.importorskip('spconv.pytorch', reason='the CPU wheel of spconv is missing')
    from spconv.core import ConvAlgo
    kernel, stride, padding, subm = GEOMETRIES[geometry]
    shape = (20, 16, 11)
    conv, x, table, sites, out = sparse_case(geometry, 16, 32, shape)
    kind = spconv.SubMConv3d if subm else spconv.SparseConv3d
    theirs = kind(16, 32, kernel, stride, padding, bias=False, algo=ConvAlgo.Native)
    indices = np.pad(sites, ((0, 0), (1, 0))).astype(np.int32)
    with torch.no_grad(), spconv_threads(1):  # with more, its rows are not always right
        theirs.weight.copy_(conv.weight)
        result = theirs(spconv.SparseConvTensor(x, torch.from_numpy(indices), shape, 1))
        y = conv(x, Pairs.of_table(table))
    order = np.lexsort(result.indices.numpy().T[::-1])
    np.testing.assert_array_equal(result.indices.numpy()[order][:, 1:], out)
    torch.testing.assert_close(y, result.features[torch.from_numpy(order)], atol=1e-4, rtol=1e-4)


# Norms


def test_folded_network_equals_network_with_norms(tiny_frame):
    features, rulebooks, _ = tiny_frame
    net = random_net(TINY)
    without = folded(net)
    assert not any('running' in name for name in without.state_dict())
    with torch.inference_mode():
        assert_same_blocks(without.forward_blocks(features, rulebooks),
                           net.forward_blocks(features, rulebooks), 1e-4)


def test_folding_leaves_folded_entries_alone():
    state = numpy_state(random_net(TINY))
    once = fold_norms(state, TINY)
    assert set(once) == set(BEVFusionNet(TINY, folded=True).state_dict())
    assert all(array.dtype == np.float32 for array in once.values())
    twice = fold_norms(once, TINY)
    for name, array in once.items():
        np.testing.assert_array_equal(twice[name], array)
    # One folded, the others not, as in the files of the exporter.
    conv, norm = 'pts_backbone.blocks.0.0', 'pts_backbone.blocks.0.1.'
    mixed = {name: array for name, array in state.items() if not name.startswith(norm)}
    mixed.update({f'{conv}.{part}': once[f'{conv}.{part}'] for part in ('weight', 'bias')})
    for name, array in fold_norms(mixed, TINY).items():
        np.testing.assert_array_equal(array, once[name])
    del mixed[f'{conv}.bias']
    with pytest.raises(ArtifactError, match=f'{conv}: found neither'):
        fold_norms(mixed, TINY)


# Proposals


def test_local_maxima_with_plateaus():
    rng = np.random.default_rng(3)
    heatmap = rng.integers(1, 5, (5, 9, 7)).astype(np.float32)  # full of equal neighbours
    for pooled in ((0, 1, 2, 3), (0, 1, 2, 3, 4), (2,)):
        found = local_maxima(torch.from_numpy(heatmap), pooled).numpy()
        np.testing.assert_array_equal(found, naive_local_maxima(heatmap, pooled))


def test_border_of_pooled_classes_is_zero_and_other_classes_are_kept():
    heatmap = torch.full((5, 8, 6), 0.1)
    heatmap[:, 0, 3] = heatmap[:, 4, 5] = 0.9  # maxima on the border
    heatmap[:, 3, 3] = 0.8
    found = local_maxima(heatmap, (0, 1, 2, 3))
    border = found[:4].clone()
    border[:, 1:-1, 1:-1] = 0
    assert not border.any()
    assert torch.equal(found[:4, 3, 3], heatmap[:4, 3, 3])
    assert (found[:4, 2, 3] == 0).all()  # beside a greater one
    assert (found[:4, 6, 1] > 0).all()  # on a plateau every cell is a maximum
    assert torch.equal(found[4], heatmap[4])


def test_top_k_of_equal_values_takes_the_lower_index():
    values = torch.tensor([0., 3., 1., 3., 0., 1., 3., 0.])
    assert top_k(values, 7).tolist() == [1, 3, 6, 2, 5, 0, 4]
    assert top_k(torch.zeros(100_000), 500).tolist() == list(range(500))


# Repeatability


def test_same_input_gives_the_same_bits(tiny_frame):
    features, rulebooks, _ = tiny_frame
    other, other_rulebooks, _ = frame(TINY, 500, 1)
    net = folded(random_net(TINY))
    with torch.inference_mode():
        first = net.forward_blocks(features, rulebooks)
        net(other, other_rulebooks)
        again = net.forward_blocks(features.clone(), rulebooks)
        copy = folded(random_net(TINY)).forward_blocks(features, rulebooks)
    for blocks, name in itertools.product((again, copy), first):
        assert torch.equal(blocks[name], first[name]), name


def test_several_threads_get_the_same_bits():
    net = folded(random_net(TINY))
    frames = [frame(TINY, count, seed)[:2] for seed, count in enumerate((100, 200, 300))]

    def run(item):
        with torch.inference_mode():
            return net(*item)

    alone = [run(item) for item in frames]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run, frames * 4))
    for found, expected in zip(together, alone * 4, strict=True):
        assert all(map(torch.equal, found, expected))


# Training


def loss_of(net, features, rulebooks):
    blocks = net.forward_blocks(features, rulebooks)
    return (blocks['bbox_head.heatmap_head'].square().mean() + blocks['score'].mean()
            + blocks['bbox_pred'].square().mean())


def test_gradients_reach_every_parameter(tiny_frame):
    net = random_net(TINY).train()
    loss_of(net, *tiny_frame[:2]).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A bias in front of a norm has no effect while the norm uses the mean of its input.
        if not name.endswith('position_embedding_head.0.bias'):
            assert parameter.grad.abs().max() > 1e-8, name


def test_gradients_of_two_frames_add_up(tiny_frame):
    frames = [tiny_frame[:2], frame(TINY, 400, 2)[:2]]
    net = random_net(TINY).eval()

    def gradients(losses):
        net.zero_grad()
        sum(losses).backward()
        return [p.grad.clone() for p in net.parameters()]

    apart = [gradients([loss_of(net, *item)]) for item in frames]
    together = gradients([loss_of(net, *item) for item in frames])
    for a, b, both in zip(*apart, together, strict=True):
        torch.testing.assert_close(both, a + b, atol=1e-4, rtol=1e-3)


def test_training_lowers_a_loss(tiny_frame):
    net = random_net(TINY).train()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(net, *tiny_frame[:2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
