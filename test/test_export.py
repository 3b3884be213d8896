# SPDX-License-Identifier: Apache-2.0
"""The exported ONNX file: upstream's form, and the same numbers as the network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
import torch_exporter
from onnx import helper, numpy_helper
from onnx_eval import evaluate
from tiny_nets import OTHER, TINY, grid_of, random_net

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.export import ExportOptions, write_onnx
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.runtime.errors import ArtifactError, ConfigError

NEWER = ExportOptions(fold_sparse_norms=True, do_sort=True, attention_scale='Mul')
# What torch's exporter may use for this network, as the released file's description lists it.
OPERATORS = {
    'Add', 'BatchNormalization', 'Cast', 'Concat', 'Constant', 'ConstantOfShape', 'Conv',
    'ConvTranspose', 'Div', 'Equal', 'Expand', 'Gather', 'GatherElements', 'Gemm', 'MatMul',
    'MaxPool', 'Mul', 'OneHot', 'Pow', 'Range', 'ReduceMax', 'ReduceMean', 'ReduceSum', 'Relu',
    'Reshape', 'ScatterND', 'Shape', 'Sigmoid', 'Slice', 'Softmax', 'Sqrt', 'Sub', 'Tile', 'TopK',
    'Transpose', 'Unsqueeze', 'Where', 'GetIndicePairsImplicitGemm', 'ImplicitGemm'}


@pytest.fixture(scope='module')
def full(tmp_path_factory):
    """A file of the released network's size, as a path and parsed."""
    config = NetworkConfig()
    path = tmp_path_factory.mktemp('full') / 'bevfusion_lidar.onnx'
    write_onnx(random_net(config), path, grid=grid_of(config))
    return path, onnx.load(path)


def exported(tmp_path, config=TINY, options=None, seed=0):
    net = random_net(config, seed)
    path = tmp_path / 'net.onnx'
    write_onnx(net, path, grid=grid_of(config), options=options)
    return net, onnx.load(path)


def attributes(node):
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


# Form of the file

def test_interface_is_that_of_the_release(full):
    model = full[1]

    def signature(values):
        return [(v.name, v.type.tensor_type.elem_type,
                 [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
                for v in values]

    assert signature(model.graph.input) == [
        ('voxels', onnx.TensorProto.FLOAT, ['voxels_num', 10, 4]),
        ('coors', onnx.TensorProto.INT32, ['voxels_num', 3]),
        ('num_points_per_voxel', onnx.TensorProto.INT32, ['voxels_num'])]
    outputs = signature(model.graph.output)
    assert [(name, kind, len(shape)) for name, kind, shape in outputs] == [
        ('bbox_pred', onnx.TensorProto.FLOAT, 2), ('score', onnx.TensorProto.FLOAT, 1),
        ('label_pred', onnx.TensorProto.INT64, 1)]
    assert all(isinstance(size, str) for _, _, shape in outputs for size in shape)
    assert {o.domain: o.version for o in model.opset_import} == {'': 17, 'autoware': 1}
    assert model.ir_version == 10
    assert not model.functions and not model.graph.sparse_initializer


def test_counts_are_those_of_the_release(full):
    path, model = full
    counts = Counter(node.op_type for node in model.graph.node)
    expected = {'GetIndicePairsImplicitGemm': 21, 'ImplicitGemm': 21, 'BatchNormalization': 22,
                'Conv': 33, 'ConvTranspose': 1, 'MatMul': 12, 'Gemm': 2, 'GatherElements': 3,
                'ScatterND': 3, 'OneHot': 2, 'Sigmoid': 2, 'Softmax': 2, 'TopK': 1, 'MaxPool': 1}
    assert {op: counts[op] for op in expected} == expected
    assert set(counts) <= OPERATORS
    assert len(model.graph.initializer) == 203
    # 33.7 MB with the bookkeeping of shapes that torch's exporter adds
    assert 33.3e6 < path.stat().st_size < 33.8e6


def test_initializers_have_the_names_of_the_release(full):
    shapes = {t.name: tuple(t.dims) for t in full[1].graph.initializer}
    kinds = Counter(name.split('_')[0] if name.startswith('onnx::') else name.split('.')[0]
                    for name in shapes)
    assert kinds == {'mod': 144, 'onnx::Conv': 44, 'onnx::MatMul': 8, 'onnx::Add': 6, 'K': 1}
    encoder = 'mod.pts_middle_encoder'
    for name, shape in {
            f'{encoder}.conv_input.0.weight': (16, 3, 3, 3, 4),
            f'{encoder}.encoder_layers.encoder_layer1.0.bn1.running_var': (16,),
            f'{encoder}.encoder_layers.encoder_layer3.2.0.weight': (128, 3, 3, 3, 64),
            f'{encoder}.conv_out.0.weight': (128, 1, 1, 3, 128),
            'mod.pts_neck.deblocks.1.0.weight': (256, 256, 2, 2),
            'mod.bbox_head.shared_conv.weight': (128, 512, 3, 3),
            'mod.bbox_head.decoder.0.self_attn.attn.out_proj.weight': (128, 128),
            'mod.bbox_head.decoder.0.ffn.layers.0.0.bias': (256,),
            'mod.bbox_head.decoder.0.norms.2.weight': (128,),
            'mod.bbox_head.prediction_heads.0.heatmap.1.weight': (5, 64, 1)}.items():
        assert shapes[name] == shape
    k = next(t for t in full[1].graph.initializer if t.name == 'K')
    assert numpy_helper.to_array(k).tolist() == [500]


def test_weights_follow_their_bias_in_the_counters(full):
    numbers = [int(t.name.split('_')[1]) for t in full[1].graph.initializer
               if t.name.startswith('onnx::Conv')]
    assert all(b == a + 1 for a, b in zip(numbers[::2], numbers[1::2], strict=True))


def test_node_names_show_the_modules(full):
    names = {node.name for node in full[1].graph.node}
    assert len(names) == len(full[1].graph.node)
    layer = '/pts_middle_encoder/encoder_layer1'
    assert names >= {
        '/pts_middle_encoder/conv_input/conv_input.0/GetIndicePairsImplicitGemm',
        f'{layer}/encoder_layer1.1/conv2/ImplicitGemm',
        f'{layer}/encoder_layer1.2/encoder_layer1.2.0/GetIndicePairsImplicitGemm',
        '/pts_backbone/blocks.0/blocks.0.0/Conv', '/bbox_head/shared_conv/Conv',
        '/bbox_head/decoder.0/self_attn/attn/MatMul_4', '/Slice', '/Div', '/OneHot'}


def test_sparse_nodes_have_the_attributes_of_the_release(full):
    nodes = full[1].graph.node
    rulebooks = [n for n in nodes if n.op_type == 'GetIndicePairsImplicitGemm']
    gemms = [n for n in nodes if n.op_type == 'ImplicitGemm']
    assert {n.domain for n in rulebooks + gemms} == {'autoware'}
    for node in rulebooks:
        assert [a.name for a in node.attribute] == [
            'algo', 'batch_size', 'dilation', 'is_train', 'ksize', 'out_padding', 'padding',
            'spatial_shape', 'stride', 'subm', 'transpose']
    for node in gemms:
        assert [a.name for a in node.attribute] == [
            'act_alpha', 'act_beta', 'is_subm', 'is_train', 'output_add_scale', 'output_scale']
        assert len(node.input) == 5
    # One chain: each rulebook reads the indices of the one before.
    assert [n.input[0] for n in rulebooks[1:]] == [n.output[0] for n in rulebooks[:-1]]
    a = [attributes(n) for n in rulebooks]
    assert [i for i, values in enumerate(a) if not values['subm']] == [5, 10, 15, 20]
    assert [a[i]['spatial_shape'] for i in (0, 5, 10, 15, 20)] == [
        [1440, 1440, 41], [1440, 1440, 41], [720, 720, 21], [360, 360, 11], [180, 180, 5]]
    assert (a[15]['padding'], a[20]['ksize'], a[20]['stride']) == ([1, 1, 0], [1, 1, 3], [1, 1, 2])


def test_files_of_newer_exporters(tmp_path):
    _, model = exported(tmp_path, options=NEWER)
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts['BatchNormalization'] == 1  # of the transposed convolution
    for node in model.graph.node:
        if node.op_type == 'ImplicitGemm':
            assert len(node.input) == 6
            assert attributes(node)['act_type'] == (not node.name.endswith('conv2/ImplicitGemm'))
        if node.op_type == 'GetIndicePairsImplicitGemm':
            assert [a.name for a in node.attribute][2:5] == ['dilation', 'do_sort', 'is_train']


def test_unfolded_norms_have_their_own_names(tmp_path):
    options = ExportOptions(prefix='', fold_dense_norms=False)
    _, model = exported(tmp_path, options=options)
    assert Counter(n.op_type for n in model.graph.node)['BatchNormalization'] == 38
    names = {t.name for t in model.graph.initializer}
    assert not any(name.startswith(('mod.', 'onnx::Conv')) for name in names)
    assert {'pts_backbone.blocks.0.0.weight', 'pts_backbone.blocks.0.1.running_mean'} <= names


@pytest.mark.parametrize('sort_by_depth', [True, False])
def test_order_of_the_nodes(tmp_path, sort_by_depth):
    _, model = exported(tmp_path, options=ExportOptions(sort_by_depth=sort_by_depth))
    depth, levels = {}, []
    for node in model.graph.node:
        assert all(i in depth or i not in {o for n in model.graph.node for o in n.output}
                   for i in node.input), 'used before it is computed'
        levels.append(1 + max((depth.get(i, -1) for i in node.input), default=-1))
        depth.update(dict.fromkeys(node.output, levels[-1]))
    assert (levels == sorted(levels)) == sort_by_depth
    ops = [node.op_type for node in model.graph.node]
    if sort_by_depth:
        assert set(ops[:ops.count('Constant')]) == {'Constant'}
        at = {node.name: i for i, node in enumerate(model.graph.node)}
        topk = at['/TopK']
        assert at['/bbox_head/decoder.0/cross_attn/attn/MatMul_1'] < topk


@pytest.mark.parametrize('options', [ExportOptions(), NEWER], ids=['release', 'newer'])
def test_passes_the_checker_of_onnx(tmp_path, options):
    _, model = exported(tmp_path, options=options)
    onnx.checker.check_model(model)  # knows the default domain, takes the other for granted


def test_a_net_for_another_grid_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r'voxel_size: found \(64, 32, 24\) cells'):
        write_onnx(random_net(TINY), tmp_path / 'x.onnx', grid=grid_of(OTHER))
    with pytest.raises(ConfigError, match='in_channels: found 4, expected 32'):
        write_onnx(random_net(TINY), tmp_path / 'x.onnx', grid=grid_of(TINY),
                   options=ExportOptions(num_fourier_octaves=4))
    with pytest.raises(ConfigError, match='pooled_classes: found none'):
        write_onnx(random_net(replace(TINY, pooled_classes=())), tmp_path / 'x.onnx',
                   grid=grid_of(TINY))
    assert not (tmp_path / 'x.onnx').exists()


# Numbers

def random_voxels(config, seed, count=60):
    """Return the network's inputs: points, coors (z, y, x), numbers of points."""
    rng = np.random.default_rng(seed)
    x, y, z = config.spatial_shape_xyz
    cells = rng.choice(x * y * (z - 1), count, replace=False)
    coords = np.stack(np.unravel_index(cells, (z - 1, y, x)), axis=1).astype(np.int32)
    num_points = rng.integers(1, 11, count).astype(np.int32)
    points = rng.uniform(-1, 1, (count, 10, config.in_channels)).astype(np.float32)
    points[np.arange(10) >= num_points[:, None]] = 0
    return {'voxels': points, 'coors': coords, 'num_points_per_voxel': num_points}


def columns_by_proposal(proposals, boxes, score, labels):
    return {int(p): (boxes[:, j], score[j], labels[j]) for j, p in enumerate(proposals)}


VARIANTS = {
    'release': (TINY, ExportOptions()),
    'newer': (TINY, NEWER),
    'unfolded': (TINY, ExportOptions(fold_dense_norms=False, sort_by_depth=False)),
    'full sort': (TINY, ExportOptions(fixed_topk=False)),
    'two classes not pooled': (replace(TINY, pooled_classes=(0, 2, 3)), ExportOptions()),
    'older, all pooled': (OTHER, ExportOptions(prefix='')),
    'written by torch': (TINY, None),
}


@pytest.mark.parametrize('name', VARIANTS)
def test_file_and_network_agree(tmp_path, name):
    """Node by node, the file gives the proposals of the network, as a set."""
    config, options = VARIANTS[name]
    if options is None:
        net, path = random_net(config, seed=3), tmp_path / 'torch.onnx'
        torch_exporter.export(net.state_dict(), config, path)
        model = onnx.load(path)
    else:
        net, model = exported(tmp_path, config, options, seed=3)
    inputs = random_voxels(config, seed=5)
    values = evaluate(model, inputs)

    rulebooks = RulebookBuilder(config)(inputs['coors'])
    mean = inputs['voxels'].sum(1) / inputs['num_points_per_voxel'][:, None].astype(np.float32)
    with torch.no_grad():
        blocks = net.forward_blocks(torch.from_numpy(mean[rulebooks.order]), rulebooks)
    topk = next(n for n in model.graph.node if n.op_type == 'TopK')
    found = columns_by_proposal(values[topk.output[1]][0, :config.num_proposals],
                                values['bbox_pred'], values['score'], values['label_pred'])
    wanted = columns_by_proposal(blocks['bbox_head.proposals'].numpy(), *(
        blocks[key].numpy() for key in ('bbox_pred', 'score', 'label_pred')))
    assert found.keys() == wanted.keys() and len(found) == config.num_proposals
    assert len({int(labels) for _, _, labels in wanted.values()}) > 1
    assert max(score for _, score, _ in wanted.values()) > 0.01
    for proposal, (boxes, score, label) in wanted.items():
        np.testing.assert_allclose(found[proposal][0], boxes, rtol=1e-3, atol=2e-4)
        np.testing.assert_allclose(found[proposal][1], score, rtol=1e-3, atol=1e-6)
        assert found[proposal][2] == label


def test_dense_part_runs_in_onnxruntime(tmp_path):
    """What follows the sparse encoder is plain ONNX, and our evaluator reads it rightly."""
    ort = pytest.importorskip('onnxruntime')
    _, model = exported(tmp_path, seed=3)
    values = evaluate(model, random_voxels(TINY, seed=5))
    cut = next(n.output[0] for n in model.graph.node if n.op_type == 'Reshape'
               and values[n.output[0]].shape[2:] == TINY.feature_map_xy)
    needed, nodes = {v.name for v in model.graph.output}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output) and cut not in node.output:
            nodes.insert(0, node)
            needed.update(node.input)
    bev = helper.make_tensor_value_info(cut, onnx.TensorProto.FLOAT, values[cut].shape)
    graph = helper.make_graph(nodes, 'dense', [bev], model.graph.output,
                              [t for t in model.graph.initializer if t.name in needed])
    dense = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)], ir_version=10)
    session = ort.InferenceSession(dense.SerializeToString(), providers=['CPUExecutionProvider'])
    for name, result in zip(('bbox_pred', 'score', 'label_pred'),
                            session.run(None, {cut: values[cut]}), strict=True):
        np.testing.assert_allclose(result, values[name], rtol=1e-3, atol=1e-4)
