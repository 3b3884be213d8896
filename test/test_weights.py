# SPDX-License-Identifier: Apache-2.0
"""Reading ONNX files: every form of the right network is read, everything else is refused."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch_exporter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from tiny_nets import OTHER, TINY, grid_of, numpy_state, random_net

from tt_perception.bevfusion.config import BEVFusionConfig, NetworkConfig
from tt_perception.bevfusion.export import ExportOptions, write_onnx
from tt_perception.bevfusion.fold import fold_norms
from tt_perception.bevfusion.reference import BEVFusionNet
from tt_perception.bevfusion.weights import check_against, read_onnx
from tt_perception.runtime.errors import ArtifactError

VARIANTS = {
    'release': ExportOptions(),
    'no prefix': ExportOptions(prefix=''),
    'sparse norms folded': ExportOptions(fold_sparse_norms=True),
    'dense norms kept': ExportOptions(fold_dense_norms=False),
    'newer': ExportOptions(fold_sparse_norms=True, do_sort=True, attention_scale='Mul'),
    'order of modules': ExportOptions(sort_by_depth=False),
    'full sort': ExportOptions(fixed_topk=False),
}


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    """A file of a small network, parsed, and what is in it."""
    net = random_net(TINY)
    path = tmp_path_factory.mktemp('tiny') / 'tiny.onnx'
    write_onnx(net, path, grid=grid_of(TINY))
    return onnx.load(path), fold_norms(numpy_state(net), TINY)


@pytest.fixture
def changed(tiny, tmp_path):
    """Return a function: change a copy of the small network's file, then read it."""
    def read(change):
        model = onnx.ModelProto()
        model.CopyFrom(tiny[0])
        change(model.graph)
        path = tmp_path / 'changed.onnx'
        path.write_bytes(model.SerializeToString())
        return read_onnx(path)
    return read


def assert_same(weights, config, arrays):
    assert weights.config == config
    assert weights.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        found = weights.arrays[name]
        assert found.dtype == np.float32 and found.flags.c_contiguous and found.flags.writeable
        np.testing.assert_array_equal(found, array, err_msg=name)


def node(graph, name):
    return next(n for n in graph.node if n.name == name)


def nodes(graph, op):
    return [n for n in graph.node if n.op_type == op]


def attribute(n, name):
    return next(a for a in n.attribute if a.name == name)


def tensor(graph, name):
    return next(t for t in graph.initializer if t.name == name)


def set_tensor(graph, name, array):
    tensor(graph, name).CopyFrom(numpy_helper.from_array(array, name))


def constant_of(graph, name):
    """Return the tensor in the Constant node that gives ``name``."""
    maker = next(n for n in graph.node if name in n.output)
    return attribute(maker, 'value').t


# What is read

@pytest.mark.parametrize('config', [TINY, OTHER, replace(TINY, pooled_classes=(1, 4))],
                         ids=['tiny', 'other', 'other classes pooled'])
@pytest.mark.parametrize('variant', VARIANTS)
def test_every_form_gives_the_folded_network(tmp_path, config, variant):
    net, path = random_net(config), tmp_path / 'net.onnx'
    write_onnx(net, path, grid=grid_of(config), options=VARIANTS[variant])
    weights = read_onnx(path)
    assert_same(weights, config, fold_norms(numpy_state(net), config))
    assert weights.arrays.keys() == BEVFusionNet(config, folded=True).state_dict().keys()


def test_full_size_is_read_in_less_than_two_seconds(tmp_path):
    config, path = NetworkConfig(), tmp_path / 'full.onnx'
    net = random_net(config)
    write_onnx(net, path, grid=grid_of(config))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        weights = read_onnx(path)
        times.append(time.perf_counter() - begin)
    assert_same(weights, config, fold_norms(numpy_state(net), config))
    assert min(times) < 2.0


def test_half_precision_weights_are_widened(changed, tiny):
    def halve(graph):
        for t in graph.initializer:
            if t.data_type == onnx.TensorProto.FLOAT:
                array = numpy_helper.to_array(t)
                t.CopyFrom(numpy_helper.from_array(array.astype(np.float16), t.name))

    arrays = changed(halve).arrays
    name = 'pts_backbone.blocks.0.0.weight'
    rounded = tiny[1][name].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(arrays[name], rounded)
    for name, array in tiny[1].items():
        np.testing.assert_allclose(arrays[name], array, rtol=5e-3, atol=5e-3)


def test_half_precision_behind_a_cast_is_widened(changed, tiny):
    name = 'mod.bbox_head.shared_conv.weight'

    def cast(graph):
        array = numpy_helper.to_array(tensor(graph, name))
        set_tensor(graph, name, array.astype(np.float16))
        conv = node(graph, '/bbox_head/shared_conv/Conv')
        conv.input[1] = 'widened'
        graph.node.append(helper.make_node('Cast', [name], ['widened'], to=1))

    key = name.removeprefix('mod.')
    np.testing.assert_array_equal(changed(cast).arrays[key],
                                  tiny[1][key].astype(np.float16).astype(np.float32))


def test_values_outside_raw_data_are_read(changed, tiny):
    def respell(graph):
        for t in graph.initializer:
            array = numpy_helper.to_array(t)
            t.CopyFrom(helper.make_tensor(t.name, t.data_type, array.shape, array.ravel()))

    assert_same(changed(respell), TINY, tiny[1])


def test_names_and_places_mean_nothing(changed, tiny):
    """All names but those of the interface are replaced, and the nodes shuffled."""
    interface = {'voxels', 'coors', 'num_points_per_voxel', 'bbox_pred', 'score', 'label_pred'}

    def scramble(graph):
        new = {}

        def rename(names):
            for i, name in enumerate(names):
                if name not in interface:
                    names[i] = new.setdefault(name, f't{len(new)}')

        for i, n in enumerate(graph.node):
            n.name = f'n{i}'
            rename(n.input)
            rename(n.output)
        for t in graph.initializer:
            t.name = new[t.name]
        mixed = [graph.node[i] for i in np.random.default_rng(0).permutation(len(graph.node))]
        copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in mixed]
        del graph.node[:]
        graph.node.extend(copies)

    assert_same(changed(scramble), TINY, tiny[1])


def test_other_ways_to_write_the_same_are_read(changed, tiny):
    """What torch's exporter writes around the data differs from version to version."""
    def rewrite(graph):
        extra = []

        def add(op, inputs, output, **attributes):
            extra.append(helper.make_node(op, inputs, [output], **attributes))

        for i, n in enumerate(list(graph.node)):
            if n.op_type in ('Reshape', 'Expand') and i % 2:
                # A shape that is computed: where(shape == -1, 1, shape)
                size = n.input[1]
                add('Mul', [size, 'minus'], f'neg{i}')
                add('Equal', [size, f'neg{i}'], f'same{i}')
                add('Where', [f'same{i}', size, size], f'shape{i}')
                n.input[1] = f'shape{i}'
            elif n.op_type in ('Add', 'Mul') and n.output[0] != 'score' and i % 2:
                n.input[:] = [n.input[1], n.input[0]]
            elif n.op_type in ('MatMul', 'Relu', 'GatherElements'):
                # A copy of the layout operators before it
                add('Identity', [n.input[0]], f'same_as{i}')
                n.input[0] = f'same_as{i}'
        # The sum of query and position once for each projection of the self-attention
        attention = '/bbox_head/decoder.0/self_attn/attn/Transpose'
        placed = next(n for n in graph.node if n.name == attention)
        total = next(n for n in graph.node if placed.input[0] in n.output)
        for i, n in enumerate(n for n in graph.node if n.op_type == 'Transpose'
                              and n.input[0] == placed.input[0]):
            add(total.op_type, list(total.input), f'sum{i}')
            n.input[0] = f'sum{i}'
        # Labels twice, and the cells of the map repeated once
        divide = node(graph, '/Div_1')
        add('Div', list(divide.input), 'labels_again')
        next(n for n in nodes(graph, 'Mul') if divide.output[0] in n.input).input[0] \
            = 'labels_again'
        gather = next(n for n in nodes(graph, 'GatherElements')
                      if attribute(n, 'axis').i == 1)
        add('Tile', [gather.input[0], 'once'], 'tiled')
        gather.input[0] = 'tiled'
        for name, values in (('minus', [-1]), ('once', [1, 1, 1])):
            graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        graph.node.extend(extra)

    assert_same(changed(rewrite), TINY, tiny[1])


def test_box_branches_are_told_apart_by_their_place_in_the_box(changed, tiny):
    """rot and vel have equal shapes; without telling names the place in the result decides."""
    def swap(graph):
        box = next(n for n in graph.node if 'bbox_pred' in n.output)
        box.input[3], box.input[4] = box.input[4], box.input[3]
        return box

    def swap_and_rename(graph):
        swap(graph)
        for n in graph.node:
            n.name = n.name.replace('/rot', '/a').replace('/vel', '/b')

    with pytest.raises(ArtifactError, match="branch: found vel, expected rot by its place"):
        changed(swap)
    arrays = changed(swap_and_rename).arrays
    head = 'bbox_head.prediction_heads.0'
    np.testing.assert_array_equal(arrays[f'{head}.rot.1.weight'], tiny[1][f'{head}.vel.1.weight'])
    np.testing.assert_array_equal(arrays[f'{head}.vel.0.conv.bias'],
                                  tiny[1][f'{head}.rot.0.conv.bias'])


@pytest.mark.parametrize('full_sort', [False, True])
def test_a_file_from_torchs_own_exporter_is_read(tmp_path, full_sort):
    net, path = random_net(TINY), tmp_path / 'torch.onnx'
    torch_exporter.export(net.state_dict(), TINY, path, full_sort=full_sort)
    model = onnx.load(path)
    assert {'Where', 'Tile', 'Shape'} <= {n.op_type for n in model.graph.node}
    assert len(model.graph.node) > 700
    weights = read_onnx(path)
    assert weights.config == TINY
    expected = fold_norms(numpy_state(net), TINY)
    assert weights.arrays.keys() == expected.keys()
    for name, array in expected.items():  # torch folds in float32
        np.testing.assert_allclose(weights.arrays[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


# Other networks

def test_fourier_features_are_refused_by_name(tmp_path):
    for config, num_octaves in ((replace(TINY, in_channels=32), 4),
                                (replace(TINY, in_channels=50), 5)):
        path = tmp_path / 'fourier.onnx'
        write_onnx(random_net(config), path, grid=grid_of(config),
                   options=ExportOptions(num_fourier_octaves=num_octaves))
        with pytest.raises(ArtifactError, match=f'found {config.in_channels} Fourier-encoded '
                                                'features, expected 4 or 5 plain'):
            read_onnx(path)


def test_a_computed_number_of_proposals_needs_a_constant_cut(tmp_path):
    path = tmp_path / 'sort.onnx'
    write_onnx(random_net(TINY), path, grid=grid_of(TINY),
               options=ExportOptions(fixed_topk=False))
    model = onnx.load(path)
    topk = nodes(model.graph, 'TopK')[0]
    cut = next(n for n in nodes(model.graph, 'Slice') if topk.output[1] in n.input)
    for n in model.graph.node:
        for i, name in enumerate(n.input):
            if name == cut.output[0]:
                n.input[i] = topk.output[1]
    model.graph.node.remove(cut)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match='TopK .*: K: found no constant'):
        read_onnx(path)


def test_another_model_is_refused(tmp_path):
    x = helper.make_tensor_value_info('x', onnx.TensorProto.FLOAT, [1, 3, 8, 8])
    weight = numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), 'w')
    graph = helper.make_graph(
        [helper.make_node('Conv', ['x', 'w'], ['y'], pads=[1] * 4),
         helper.make_node('Relu', ['y'], ['z'])], 'resnet', [x],
        [helper.make_tensor_value_info('z', onnx.TensorProto.FLOAT, [1, 4, 8, 8])], [weight])
    path = tmp_path / 'resnet.onnx'
    onnx.save(helper.make_model(graph), path)
    with pytest.raises(ArtifactError, match='another model: found no ImplicitGemm node'):
        read_onnx(path)


def set_ints(name, *values):
    def change(n):
        attribute(n, name).ints[:] = values
    return change


def set_int(name, value):
    def change(n):
        attribute(n, name).i = value
    return change


def set_float(name, value):
    def change(n):
        attribute(n, name).f = value
    return change


SPARSE = '/pts_middle_encoder/encoder_layer1/encoder_layer1'
HEAD = '/bbox_head/decoder.0'


@pytest.mark.parametrize('name, change, message', [
    (f'{SPARSE}.0/conv1/GetIndicePairsImplicitGemm', set_ints('spatial_shape', 48, 64, 40),
     'spatial_shape: found (48, 64, 40), expected (48, 64, 41)'),
    (f'{SPARSE}.0/conv1/GetIndicePairsImplicitGemm', set_int('subm', 0),
     'subm: found 0, expected 1'),
    (f'{SPARSE}.2/encoder_layer1.2.0/GetIndicePairsImplicitGemm', set_ints('stride', 1, 1, 1),
     'stride: found (1, 1, 1), expected (2, 2, 2)'),
    ('/pts_middle_encoder/conv_out/conv_out.0/GetIndicePairsImplicitGemm',
     set_ints('padding', 0, 0, 1), 'padding: found (0, 0, 1), expected (0, 0, 0)'),
    (f'{SPARSE}.0/conv1/ImplicitGemm', set_float('output_scale', 2.0),
     'output_scale: found 2.0, expected 1.0'),
    (f'{SPARSE}.0/bn1/BatchNormalization', set_float('epsilon', 1e-5), 'epsilon: found'),
    ('/Transpose_1', set_ints('perm', 0, 4, 3, 2, 1),
     'perm: found (0, 4, 3, 2, 1), expected (0, 4, 3, 1, 2)'),
    ('/pts_backbone/blocks.0/blocks.0.3/Conv', set_ints('pads', 0, 0, 0, 0),
     'pads: found (0, 0, 0, 0), expected (1, 1, 1, 1)'),
    ('/pts_backbone/blocks.1/blocks.1.0/Conv', set_ints('strides', 3, 3),
     'of 3 x 3 cells and stride 2'),
    ('/pts_neck/deblocks.1/deblocks.1.0/ConvTranspose', set_int('group', 2),
     'group: found 2, expected 1'),
    ('/pts_neck/Concat', set_int('axis', 2), 'axis: found 2, expected 1'),
    ('/MaxPool', set_ints('pads', 1, 1, 1, 1),
     'pads: found (1, 1, 1, 1), expected (0, 0, 0, 0)'),
    ('/TopK', set_int('largest', 0), 'largest: found 0, expected 1'),
    (f'{HEAD}/self_attn/attn/Gemm', set_int('transB', 0), 'transB: found 0, expected 1'),
    (f'{HEAD}/self_attn/attn/Softmax', set_int('axis', 1), 'axis: found 1, expected 2'),
    (f'{HEAD}/norms.0/ReduceMean', set_ints('axes', 1), 'axes: found (1,), expected [-1]'),
])
def test_another_attribute_is_refused_by_name(changed, name, change, message):
    with pytest.raises(ArtifactError) as caught:
        changed(lambda graph: change(node(graph, name)))
    assert message in str(caught.value)
    assert name.split('/')[-1] in str(caught.value) or 'blocks.1' in name


def replace_constant(op, index, value, number=0):
    """Change a constant input of the ``number``-th node with an operator."""
    def change(graph):
        n = nodes(graph, op)[number]
        old = constant_of(graph, n.input[index])
        array = np.array(value, helper.tensor_dtype_to_np_dtype(old.data_type))
        graph.initializer.append(numpy_helper.from_array(array, 'replacement'))
        n.input[index] = 'replacement'
    return change


def input_of(name, index, new):
    def change(graph):
        node(graph, name).input[index] = new
    return change


def swap_inputs(name, a, b):
    def change(graph):
        n = node(graph, name)
        n.input[a], n.input[b] = n.input[b], n.input[a]
    return change


def shape_of(name, *shape):
    def change(graph):
        set_tensor(graph, name, np.ones(shape, np.float32))
    return change


@pytest.mark.parametrize('change, message', [
    (shape_of('mod.pts_middle_encoder.conv_out.0.weight', 9, 1, 1, 3, 11),
     "found [9, 1, 1, 3, 11], expected ['any', 1, 1, 3, 10]"),
    (shape_of('mod.pts_middle_encoder.conv_input.1.bias', 5), 'found [5], expected [4]'),
    (shape_of('mod.bbox_head.class_encoding.weight', 16, 6, 1),
     'found [16, 6, 1], expected [16, 5, 1]'),
    (shape_of('mod.bbox_head.prediction_heads.0.dim.1.weight', 2, 7, 1),
     'found [2, 7, 1], expected [3, 7, 1]'),
    (replace_constant('OneHot', 1, 6), 'depth: found 6, expected 5'),
    (replace_constant('Slice', 4, [1]), 'steps: found [1], expected [-1]'),
    (replace_constant('ReduceSum', 1, [2]), 'axes: found [2], expected [1]'),
    (input_of('/Div_1', 1, 'K'), 'cells of a class: found 18, expected 48'),
    (input_of(f'{SPARSE}.0/Add', 1, '/pts_middle_encoder/conv_input/conv_input.0/'
              'ImplicitGemm_output_0'), 'identity of the block'),
    (input_of(f'{SPARSE}.0/conv2/GetIndicePairsImplicitGemm', 0, '/Cast_2_output_0'), 'indices:'),
    (swap_inputs(f'{SPARSE}.0/conv2/ImplicitGemm', 3, 4), 'inputs 2 to 4'),
    (swap_inputs('/pts_neck/Concat', 0, 1), '/pts_neck/Concat'),
    (swap_inputs('/Concat_1', 0, 1), 'Slice'),
    (input_of(f'{HEAD}/cross_attn/attn/Transpose_4', 0, f'{HEAD}/norms.0/Add_1_output_0'),
     'cross_attn'),
])
def test_another_structure_is_refused(changed, change, message):
    with pytest.raises(ArtifactError) as caught:
        changed(change)
    assert message in str(caught.value)
    assert '\n' not in str(caught.value)


def test_maps_whose_width_and_height_are_exchanged_are_refused(changed):
    def exchange(graph):
        gather = next(n for n in nodes(graph, 'GatherElements') if attribute(n, 'axis').i == 1)
        cells = constant_of(graph, gather.input[0])
        array = numpy_helper.to_array(cells)[..., ::-1]
        cells.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), cells.name))

    with pytest.raises(ArtifactError, match='expected centres of 6 x 8 cells, y fastest'):
        changed(exchange)


# Damaged and hostile files

def test_what_is_no_onnx_file_is_refused(tmp_path, tiny):
    whole = tiny[0].SerializeToString()
    path = tmp_path / 'bad.onnx'
    for data in (b'', b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n',
                 np.random.default_rng(0).bytes(5000), b'\0' * 100, whole[:-1],
                 whole[:len(whole) // 2], whole[1:], b'\n' * 1000):
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match='bad.onnx: (no ONNX|another model|damaged)'):
            read_onnx(path)
    with pytest.raises(ArtifactError, match='absent.onnx: cannot be read: No such file'):
        read_onnx(tmp_path / 'absent.onnx')
    with pytest.raises(ArtifactError, match='cannot be read: Is a directory'):
        read_onnx(tmp_path)


def test_a_huge_file_is_refused_without_reading_it(tmp_path):
    path = tmp_path / 'huge.onnx'
    with open(path, 'wb') as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match='found 1099511627776 bytes, expected at most'):
        read_onnx(path)


WEIGHT = 'mod.bbox_head.shared_conv.weight'


def make_external(graph):
    t = tensor(graph, WEIGHT)
    t.ClearField('raw_data')
    t.data_location = onnx.TensorProto.EXTERNAL
    t.external_data.add(key='location', value='../../etc/passwd')


def remove(graph):
    graph.initializer.remove(tensor(graph, WEIGHT))


def declare_huge(graph):
    tensor(graph, WEIGHT).dims[:] = [1 << 40, 1 << 20, 3, 3]


def declare_negative(graph):
    tensor(graph, WEIGHT).dims[:] = [-16, -22, 3, 3]


def make_cycle(graph):
    node(graph, '/pts_backbone/blocks.0/blocks.0.3/Conv').input[0] = \
        '/pts_backbone/blocks.0/blocks.0.5/Relu_output_0'


def cut_all_edges(graph):
    for n in graph.node:
        n.ClearField('input')


def add_subgraph(graph):
    inner = helper.make_graph([], 'inner', [], [])
    graph.node.append(helper.make_node('If', ['voxels'], ['y'], then_branch=inner,
                                       else_branch=inner))


def store(value, dtype):
    def change(graph):
        array = numpy_helper.to_array(tensor(graph, WEIGHT)).astype(dtype)
        if value is not None:
            array[3, 2, 1, 0] = value
        set_tensor(graph, WEIGHT, array)
    return change


def unknown_type(graph):
    tensor(graph, WEIGHT).data_type = 77


def negative_variance(graph):
    name = 'mod.pts_neck.deblocks.1.1.running_var'
    set_tensor(graph, name, -numpy_helper.to_array(tensor(graph, name)))


def overflow(graph):
    norm = 'mod.pts_neck.deblocks.1.1'
    set_tensor(graph, f'{norm}.weight', np.full(11, 3e38, np.float32))
    set_tensor(graph, f'{norm}.running_var', np.zeros(11, np.float32))


def two_producers(graph):
    graph.node.append(helper.make_node('Relu', ['voxels'], ['/Div_output_0']))


def many_layouts(graph):
    """A chain of 5,000 operators that change nothing, more than recursion could follow."""
    for i in range(5_000):
        graph.node.append(helper.make_node(
            'Identity', [f'chain{i}' if i else 'voxels'], [f'chain{i + 1}']))
    node(graph, '/ReduceSum').input[0] = 'chain5000'


@pytest.mark.parametrize('change, message', [
    (make_external, f"tensor '{WEIGHT}' has its data in another file"),
    (remove, f"reads '{WEIGHT}', which nothing in the file gives"),
    (declare_huge, f"tensor '{WEIGHT}': found 3168 values, expected 10376293541461622784"),
    (declare_negative, 'expected no negative size'),
    (make_cycle, 'depends on itself'),
    (cut_all_edges, 'found 0 inputs and 1 outputs, expected 1 and 1'),
    (add_subgraph, "attribute 'else_branch' is neither"),
    (store(None, np.float64), "shared_conv.weight': found float64, expected float32 or float16"),
    (store(None, np.int8), 'found type INT8'),
    (store(np.nan, np.float32), 'no finite number'),
    (store(np.inf, np.float16), 'no finite number'),
    (unknown_type, 'found type 77'),
    (negative_variance, 'a negative variance'),
    (overflow, 'pts_neck.deblocks.1.0.weight: found an overflow'),
    (two_producers, "its output '/Div_output_0' exists already"),
])
def test_damaged_files_are_refused_in_one_line(changed, change, message):
    with pytest.raises(ArtifactError) as caught:
        changed(change)
    assert message in str(caught.value)
    assert str(caught.value).count('\n') == 0 and len(str(caught.value)) < 500


def test_long_chains_are_no_problem(changed, tiny):
    assert_same(changed(many_layouts), TINY, tiny[1])


def assert_network_or_one_clear_error(data, path):
    path.write_bytes(data)
    try:
        weights = read_onnx(path)
    except ArtifactError as error:
        assert str(path) in str(error) and '\n' not in str(error)
        return
    net = BEVFusionNet(weights.config, folded=True)
    shapes = {name: tuple(t.shape) for name, t in net.state_dict().items()}
    assert {name: a.shape for name, a in weights.arrays.items()} == shapes
    assert all(np.isfinite(a).all() for a in weights.arrays.values())


fuzz = settings(deadline=None, max_examples=200,
                suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(data=st.data())
def test_flipped_and_lost_bytes_give_a_network_or_one_clear_error(tiny, tmp_path, data):
    whole = bytearray(tiny[0].SerializeToString())
    # Half of the changes go where the structure is: weights are most of the file.
    structure = whole.index(b'main_graph')
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, structure) | st.integers(0, len(whole) - 1))
        whole[place] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        begin = data.draw(st.integers(0, len(whole)))
        del whole[begin:begin + data.draw(st.integers(1, 300))]
    assert_network_or_one_clear_error(whole, tmp_path / 'flipped.onnx')


@fuzz
@given(data=st.data())
def test_a_changed_graph_gives_a_network_or_one_clear_error(tiny, tmp_path, data):
    model = onnx.ModelProto()
    model.CopyFrom(tiny[0])
    graph = model.graph

    def one_of(values):
        return values[data.draw(st.integers(0, len(values) - 1))]

    numbers = st.sampled_from([-2 ** 63, -1, 0, 1, 2, 2 ** 62])
    names = [name for n in graph.node for name in n.output] + ['', 'voxels', WEIGHT]
    for _ in range(data.draw(st.integers(1, 3))):
        n = one_of([n for n in graph.node if n.attribute and n.input])
        a, t = one_of(n.attribute), one_of(graph.initializer)
        constant = attribute(one_of(nodes(graph, 'Constant')), 'value').t
        change = data.draw(st.sampled_from([
            'read', 'read less', 'read more', 'operator', 'attribute', 'kind', 'number', 'less',
            'more', 'shape', 'type', 'node', 'interface']))
        if change == 'read':
            n.input[data.draw(st.integers(0, len(n.input) - 1))] = one_of(names)
        elif change == 'read less':
            del n.input[data.draw(st.integers(0, len(n.input) - 1))]
        elif change == 'read more':
            n.input.append(one_of(names))
        elif change == 'operator':
            n.op_type = one_of(graph.node).op_type
        elif change == 'attribute':
            n.attribute.remove(a)
        elif change == 'kind':
            a.type = data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8]))
        elif change == 'number':
            a.i = data.draw(numbers)
            a.f = data.draw(st.floats(width=32))
            a.ints[:] = data.draw(st.lists(numbers, max_size=6))
        elif change == 'less':
            del n.output[-1:]
        elif change == 'more':
            n.output.append('one_more')
        elif change == 'shape':
            t.dims[:] = data.draw(st.lists(numbers, max_size=5))
        elif change == 'type':
            constant.data_type = data.draw(st.integers(0, 20))
        elif change == 'node':
            graph.node.remove(n)
        else:
            del one_of([graph.input, graph.output])[-1:]
    assert_network_or_one_clear_error(model.SerializeToString(), tmp_path / 'changed.onnx')


# Parameters

def parameters(**values):
    return BEVFusionConfig.from_parameters({
        'point_cloud_range': [-12.0, -16.0, -10.0, 12.0, 16.0, 10.0],
        'voxel_size': [0.5, 0.5, 0.5], 'num_proposals': 18, **values})


def test_parameters_of_the_network_are_accepted():
    check_against(TINY, parameters())
    check_against(NetworkConfig(), BEVFusionConfig.from_parameters({}))


@pytest.mark.parametrize('values, message', [
    ({'voxel_size': [0.5, 0.5, 1.0]}, r'voxel_size: found \(48, 64, 20\) cells .*'
                                      r'expected \(48, 64, 40\) as in the network'),
    ({'class_names': ['CAR', 'TRUCK'], 'yaw_norm_thresholds': [0.3, 0.3]},
     'class_names: found 2 classes in the parameters, expected 5 as in the network'),
    ({'num_proposals': 500}, 'num_proposals: found 500 in the parameters, expected 18'),
    ({'out_size_factor': 4}, 'out_size_factor: found 4 in the parameters, expected 8'),
    ({'use_intensity': True}, 'use_intensity: found 5 point features in the parameters, '
                              'expected 4'),
])
def test_parameters_of_another_network_are_refused_by_name(values, message):
    with pytest.raises(ArtifactError, match=message):
        check_against(TINY, parameters(**values))
