# SPDX-License-Identifier: Apache-2.0
"""Writes a network as an ONNX file of the form that Autoware's training code exports.

The file has upstream's interface, operators, initializer and node names, so that whatever reads
the released file reads ours too: :mod:`tt_perception.bevfusion.weights`, and TensorRT with
Autoware's plugins.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tt_perception import __version__
from tt_perception.bevfusion.config import GridConfig, NetworkConfig
from tt_perception.bevfusion.fold import BRANCHES, EPSILON, HEAD_EPSILON, fold_norms
from tt_perception.bevfusion.weights import SparseLayer, cell_centres, check_grid, sparse_layers
from tt_perception.runtime.errors import ConfigError

if TYPE_CHECKING:
    from tt_perception.bevfusion.reference import BEVFusionNet

OPSET = 17
CUSTOM_DOMAIN = 'autoware'
TIME_LAG_RANGE_S = (0.0, 0.2)
INTENSITY_RANGE = (0.0, 255.0)
_FIRST_COUNTER = 1001  # exporters number nameless initializers; the number means nothing
_POOL = {'kernel_shape': [3, 3], 'strides': [1, 1], 'pads': [0] * 4, 'ceil_mode': 0}


@dataclass(frozen=True)
class ExportOptions:
    """What differs between files of different exporter versions; defaults are the release's.

    :ivar prefix: in front of the initializer names: ``mod.``, or nothing in older files.
    :ivar fold_sparse_norms: norms inside the filters, with the bias as a sixth input and the
        activation as an attribute, as in newer files.
    :ivar fold_dense_norms: norms of the dense convolutions inside them (but not the one of the
        transposed convolution).
    :ivar do_sort: rulebook nodes carry the attribute of newer files.
    :ivar attention_scale: operator that scales the queries, ``Div`` or ``Mul``.
    :ivar sort_by_depth: nodes in the order of their depth, else in the order of the modules.
    :ivar fixed_topk: the number of proposals is a constant of the TopK, else of the Slice after
        a full sort.
    :ivar num_fourier_octaves: 0 for plain features; else the network gets cosines and sines of
        this many octaves of every feature.
    """

    prefix: str = 'mod.'
    fold_sparse_norms: bool = False
    fold_dense_norms: bool = True
    do_sort: bool = False
    attention_scale: str = 'Div'
    sort_by_depth: bool = True
    fixed_topk: bool = True
    num_fourier_octaves: int = 0


def write_onnx(net: BEVFusionNet, path: str | Path, *, grid: GridConfig,
               options: ExportOptions | None = None) -> None:
    """Write an unfolded network to ``path``; about 34 MB for the sizes of the release.

    :param net: with norms (``folded=False``).
    :param grid: the voxel grid that the network is for.
    :raises ArtifactError: the network is for another grid.
    :raises ConfigError: the network has no such form.
    """
    options = options or ExportOptions()
    config = net.config
    check_grid(config, grid)
    expected = grid.num_features * max(1, 2 * options.num_fourier_octaves)
    if config.in_channels != expected:
        raise ConfigError(f'in_channels: found {config.in_channels}, expected {expected}')
    if not config.pooled_classes:
        raise ConfigError('pooled_classes: found none, expected at least one class')
    state = {name: tensor.detach().cpu().numpy() for name, tensor in net.state_dict().items()}
    model = _Exporter(config, state, grid, options).model()
    Path(path).write_bytes(model.SerializeToString())


class _Graph:
    """Nodes and initializers, with the names that torch's exporter gives."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._used: Counter[str] = Counter()
        self._counter = _FIRST_COUNTER

    def op(self, op: str, inputs: list[str], scope: str = '', *, num_outputs: int = 1,
           domain: str = '', outputs: list[str] | None = None, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or a list of names for several."""
        stem = f'{scope}/{op}'
        name = stem if not self._used[stem] else f'{stem}_{self._used[stem]}'
        self._used[stem] += 1
        outputs = outputs or [f'{name}_output_{i}' for i in range(num_outputs)]
        # make_node writes the attributes in alphabetical order, as upstream's files have them.
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain,
                                           **attributes))
        return outputs[0] if len(outputs) == 1 else outputs

    def constant(self, value: Any, dtype: Any, scope: str = '') -> str:
        """Add a ``Constant`` node."""
        tensor = numpy_helper.from_array(np.array(value, dtype))
        return self.op('Constant', [], scope, value=tensor)

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def initializer(self, name: str, array: np.ndarray) -> str:
        array = np.ascontiguousarray(array)
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def numbered(self, op: str, array: np.ndarray) -> str:
        """Add an initializer whose module name the exporter loses."""
        self._counter += 1
        return self.initializer(f'onnx::{op}_{self._counter - 1}', array)

    def sort_by_depth(self) -> None:
        """Order the nodes by the length of the longest way to them, constants first."""
        depth: dict[str, int] = {}
        keys = {}
        for place, node in enumerate(self.nodes):
            level = 1 + max((depth.get(name, -1) for name in node.input), default=-1)
            depth.update(dict.fromkeys(node.output, level))
            keys[node.name] = (level, node.op_type != 'Constant', place)
        self.nodes.sort(key=lambda node: keys[node.name])


def _sparse_scope(key: str) -> str:
    """Return the scope that torch gives a module of the sparse encoder."""
    scope = stem = ''
    for part in key.replace('.encoder_layers', '').split('.'):
        stem = f'{stem}.{part}' if part.isdigit() else part
        scope += f'/{stem}'
    return scope


class _Exporter:
    """Builds the graph block by block, in the order of the data."""

    def __init__(self, config: NetworkConfig, state: dict[str, np.ndarray], grid: GridConfig,
                 options: ExportOptions) -> None:
        self.config = config
        self.state = state
        self.folded = fold_norms(state, config)
        self.grid = grid
        self.options = options
        self.graph = _Graph()
        self.indices = ''  # out_indices of the last rulebook node
        self.shape = config.spatial_shape_xyz  # of the current sparse level
        self.num_cells = math.prod(config.feature_map_xy)

    def model(self) -> onnx.ModelProto:
        features = self._features()
        self._coordinates()
        features = self._sparse_encoder(features)
        bev = self._neck(*self._backbone(self._to_bev(features)))
        self._head(bev)
        if self.options.sort_by_depth:
            self.graph.sort_by_depth()
        graph = helper.make_graph(self.graph.nodes, 'main_graph', *self._interface(),
                                  initializer=self.graph.initializers)
        return helper.make_model(
            graph, ir_version=10, producer_name='tt_perception', producer_version=__version__,
            opset_imports=[helper.make_opsetid('', OPSET), helper.make_opsetid(CUSTOM_DOMAIN, 1)])

    def _interface(self) -> tuple[list, list]:
        def value(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, shape)

        n = 'voxels_num'
        num_points, num_features = self.grid.max_points_per_voxel, self.grid.num_features
        return (
            [value('voxels', TensorProto.FLOAT, n, num_points, num_features),
             value('coors', TensorProto.INT32, n, 3),
             value('num_points_per_voxel', TensorProto.INT32, n)],
            [value('bbox_pred', TensorProto.FLOAT, 'Concatbbox_pred_dim_0',
                   'Concatbbox_pred_dim_1'),
             value('score', TensorProto.FLOAT, 'ReduceMaxscore_dim_0'),
             value('label_pred', TensorProto.INT64, 'Gatherlabel_pred_dim_0')])

    # Weights

    def _named(self, name: str) -> str:
        return self.graph.initializer(self.options.prefix + name, self.state[name])

    def _norm(self, tensor: str, key: str, scope: str, epsilon: float) -> str:
        parameters = [self._named(f'{key}.{part}')
                      for part in ('weight', 'bias', 'running_mean', 'running_var')]
        return self.graph.op('BatchNormalization', [tensor, *parameters], scope, epsilon=epsilon,
                             momentum=0.9, training_mode=0)

    def _conv(self, tensor: str, key: str, scope: str, *, kernel: tuple[int, ...], stride: int = 1,
              pad: int = 0, norm: tuple[str, str, float] | None = None) -> str:
        """Add a convolution; ``norm`` is (key, scope, epsilon) of the norm behind it."""
        attributes = {'dilations': [1] * len(kernel), 'group': 1, 'kernel_shape': kernel,
                      'pads': [pad] * (2 * len(kernel)), 'strides': [stride] * len(kernel)}
        if norm is None:
            weights = [self._named(f'{key}.weight'), self._named(f'{key}.bias')]
        elif self.options.fold_dense_norms:
            weights = [self.graph.numbered('Conv', self.folded[f'{key}.{part}'])
                       for part in ('weight', 'bias')]
        else:
            weights = [self._named(f'{key}.weight')]
            if f'{key}.bias' in self.state:
                weights.append(self._named(f'{key}.bias'))
        out = self.graph.op('Conv', [tensor, *weights], scope, **attributes)
        if norm is not None and not self.options.fold_dense_norms:
            out = self._norm(out, *norm)
        return out

    # Voxel features and coordinates

    def _features(self) -> str:
        g = self.graph
        total = g.op('ReduceSum', ['voxels', g.ints(1)], keepdims=0)
        count = g.op('Cast', ['num_points_per_voxel'], to=TensorProto.FLOAT)
        mean = g.op('Div', [total, g.op('Reshape', [count, g.ints(-1, 1)])])
        octaves = self.options.num_fourier_octaves
        return self._fourier(mean, octaves) if octaves else mean

    def _fourier(self, features: str, num_octaves: int) -> str:
        g, grid = self.graph, self.grid
        low = list(grid.point_cloud_range[:3])
        high = list(grid.point_cloud_range[3:])
        for bottom, top in [INTENSITY_RANGE] * grid.use_intensity + [TIME_LAG_RANGE_S]:
            low.append(bottom)
            high.append(top)
        low, high = np.array(low, np.float32), np.array(high, np.float32)
        unit = g.op('Sub', [features, g.numbered('Sub', low)])
        unit = g.op('Div', [unit, g.numbered('Div', high - low)])
        column = g.op('Reshape', [unit, g.ints(-1, grid.num_features, 1)])
        phase = g.op('Mul', [column, g.constant(math.pi, np.float32)])
        octaves = 2.0 ** np.arange(num_octaves, dtype=np.float32)
        phase = g.op('Mul', [phase, g.numbered('Mul', octaves)])
        flat = g.op('Reshape', [phase, g.ints(-1, grid.num_features * num_octaves)])
        return g.op('Concat', [g.op('Cos', [flat]), g.op('Sin', [flat])], axis=1)

    def _coordinates(self) -> None:
        """Turn coors (z, y, x) into indices (batch, x, y, z)."""
        g = self.graph
        backwards = g.op('Slice', ['coors', g.ints(-1), g.ints(-(2 ** 63 - 1)), g.ints(-1),
                                   g.ints(-1)])
        xyz = g.op('Cast', [backwards], to=TensorProto.FLOAT)
        rows = g.op('Gather', [g.op('Shape', [xyz]), g.constant(0, np.int64)], axis=0)
        shape = g.op('Concat', [g.op('Unsqueeze', [rows, g.ints(0)]), g.ints(1)], axis=0)
        zero = numpy_helper.from_array(np.zeros(1, np.float32))
        batch = g.op('ConstantOfShape', [shape], value=zero)
        joined = g.op('Concat', [batch, xyz], axis=1)
        self.indices = g.op('Cast', [joined], to=TensorProto.INT32)

    # Sparse encoder

    def _sparse_encoder(self, x: str) -> str:
        g = self.graph
        identity = x
        for conv in sparse_layers():
            if conv.opens_block:
                identity = x
            x = self._sparse_conv(x, conv)
            if conv.closes_block:
                block = _sparse_scope(conv.key).rpartition('/')[0]
                x = g.op('Relu', [g.op('Add', [x, identity], block)], f'{block}/relu')
        return x

    def _sparse_conv(self, x: str, conv: SparseLayer) -> str:
        g, options = self.graph, self.options
        scope, norm_scope = _sparse_scope(conv.key), _sparse_scope(conv.norm)
        sort = {'do_sort': 0} if options.do_sort else {}
        self.indices, *pairs, _ = g.op(
            'GetIndicePairsImplicitGemm', [self.indices], scope, num_outputs=5,
            domain=CUSTOM_DOMAIN, algo=1, batch_size=1, spatial_shape=self.shape,
            ksize=conv.kernel, stride=conv.stride, padding=conv.padding, dilation=[1, 1, 1],
            out_padding=[0, 0, 0], subm=int(conv.subm), transpose=0, is_train=int(not conv.subm),
            **sort)
        if not conv.subm:
            self.shape = tuple((n + 2 * p - k) // s + 1 for n, p, k, s in zip(
                self.shape, conv.padding, conv.kernel, conv.stride, strict=True))
        relu = not conv.closes_block
        if options.fold_sparse_norms:
            weight, bias = (g.initializer(f'{options.prefix}{conv.key}.{part}',
                                          self.folded[f'{conv.key}.{part}'])
                            for part in ('weight', 'bias'))
            inputs, activation = [x, weight, *pairs, bias], {'act_type': int(relu)}
        else:
            inputs, activation = [x, self._named(f'{conv.key}.weight'), *pairs], {}
        x = g.op('ImplicitGemm', inputs, scope, domain=CUSTOM_DOMAIN, is_train=0,
                 is_subm=int(conv.subm), act_alpha=0.0, act_beta=0.0, output_scale=1.0,
                 output_add_scale=0.0, **activation)
        if options.fold_sparse_norms:
            return x
        x = self._norm(x, conv.norm, norm_scope, EPSILON)
        if not relu:
            return x
        place, _, norm = norm_scope.rpartition('/')
        behind = 'relu' if conv.opens_block else f'{norm[:-1]}2'  # the module behind the norm
        return g.op('Relu', [x], f'{place}/{behind}')

    def _to_bev(self, features: str) -> str:
        """Scatter the rows into a dense grid; the vertical cells become channels."""
        g = self.graph
        x, y, z = self.shape
        indices = g.op('Cast', [self.indices], to=TensorProto.INT64)
        columns = [g.op('Gather', [indices, g.constant(k, np.int64)], axis=1) for k in range(4)]
        rows = g.op('Shape', [columns[0]])
        columns = [g.op('Unsqueeze', [g.op('Expand', [column, rows]), g.ints(-1)])
                   for column in columns]
        shape = g.ints(1, x, y, z, self.config.bev_channels)
        zeros = g.op('ConstantOfShape', [shape],
                     value=numpy_helper.from_array(np.zeros(1, np.float32)))
        grid = g.op('ScatterND', [zeros, g.op('Concat', columns, axis=-1), features])
        sizes = g.op('Shape', [g.op('Transpose', [grid], perm=[0, 4, 1, 2, 3])])
        b, c, x, y, z = (g.op('Gather', [sizes, g.constant(k, np.int64)], axis=0)
                         for k in range(5))
        flat = [g.op('Unsqueeze', [size, g.ints(0)]) for size in (b, g.op('Mul', [c, z]), x, y)]
        stacked = g.op('Transpose', [grid], perm=[0, 4, 3, 1, 2])
        return g.op('Reshape', [stacked, g.op('Concat', flat, axis=0)])

    # Backbone and neck

    def _conv_norm_relu(self, x: str, key: str, scope: str, index: int, **conv: Any) -> str:
        norm = (f'{key}.{index + 1}', f'{scope}.{index + 1}', EPSILON)
        x = self._conv(x, f'{key}.{index}', f'{scope}.{index}', norm=norm, **conv)
        return self.graph.op('Relu', [x], f'{scope}.{index + 2}')

    def _backbone(self, x: str) -> tuple[str, str]:
        outputs = []
        for block, stride in ((0, 1), (1, 2)):
            scope = f'/pts_backbone/blocks.{block}/blocks.{block}'
            for layer in range(1 + self.config.backbone_layers):
                x = self._conv_norm_relu(x, f'pts_backbone.blocks.{block}', scope, 3 * layer,
                                         kernel=(3, 3), stride=1 if layer else stride, pad=1)
            outputs.append(x)
        return outputs[0], outputs[1]

    def _neck(self, fine: str, coarse: str) -> str:
        g = self.graph
        fine = self._conv_norm_relu(fine, 'pts_neck.deblocks.0',
                                    '/pts_neck/deblocks.0/deblocks.0', 0, kernel=(1, 1))
        key, scope = 'pts_neck.deblocks.1', '/pts_neck/deblocks.1/deblocks.1'
        coarse = g.op('ConvTranspose', [coarse, self._named(f'{key}.0.weight')], f'{scope}.0',
                      dilations=[1, 1], group=1, kernel_shape=[2, 2], pads=[0] * 4,
                      strides=[2, 2])
        coarse = self._norm(coarse, f'{key}.1', f'{scope}.1', EPSILON)
        coarse = g.op('Relu', [coarse], f'{scope}.2')
        return g.op('Concat', [fine, coarse], '/pts_neck', axis=1)

    # Head

    def _head(self, bev: str) -> None:
        g, config = self.graph, self.config
        features = self._conv(bev, 'bbox_head.shared_conv', '/bbox_head/shared_conv',
                              kernel=(3, 3), pad=1)
        flat = g.op('Reshape', [features, g.ints(1, config.hidden_channels, self.num_cells)])
        heatmap = self._local_maxima(self._heatmap(features))
        heatmap = g.op('Reshape', [heatmap, g.ints(1, config.num_classes, self.num_cells)])
        labels, positions = self._proposals(heatmap)

        across = g.op('Expand', [g.op('Unsqueeze', [positions, g.ints(1)]),
                                 g.ints(1, config.hidden_channels, config.num_proposals)])
        query = g.op('GatherElements', [flat, across], axis=-1)
        one_hot = self._one_hot(labels)
        encoding = self._conv(g.op('Cast', [one_hot], to=TensorProto.FLOAT),
                              'bbox_head.class_encoding', '/bbox_head/class_encoding', kernel=(1,))
        query = g.op('Add', [query, encoding])

        cells = g.constant(cell_centres(config.feature_map_xy), np.float32)
        along = g.op('Expand', [g.op('Unsqueeze', [positions, g.ints(-1)]),
                                g.ints(1, config.num_proposals, 2)])
        query_pos = g.op('GatherElements', [cells, along], axis=1)
        query = self._decoder(query, flat, query_pos, cells)
        branches = self._branches(query, query_pos)
        self._outputs(branches, heatmap, labels, positions)

    def _heatmap(self, features: str) -> str:
        key, scope = 'bbox_head.heatmap_head', '/bbox_head/heatmap_head/heatmap_head'
        x = self._conv(features, f'{key}.0.conv', f'{scope}.0/conv', kernel=(3, 3), pad=1,
                       norm=(f'{key}.0.bn', f'{scope}.0/bn', HEAD_EPSILON))
        x = self.graph.op('Relu', [x], f'{scope}.0/activate')
        x = self._conv(x, f'{key}.1', f'{scope}.1', kernel=(3, 3), pad=1)
        return self.graph.op('Sigmoid', [x])

    def _local_maxima(self, heatmap: str) -> str:
        g, config = self.graph, self.config
        zeros = g.op('ConstantOfShape', [g.op('Shape', [heatmap])],
                     value=numpy_helper.from_array(np.zeros(1, np.float32)))
        if len(config.pooled_classes) == config.num_classes:
            greatest = self._framed(g.op('MaxPool', [heatmap], **_POOL), zeros)
        else:
            greatest = self._pooled_by_class(heatmap, zeros)
        same = g.op('Cast', [g.op('Equal', [heatmap, greatest])], to=TensorProto.FLOAT)
        return g.op('Mul', [heatmap, same])

    def _framed(self, inner: str, zeros: str) -> str:
        """Put the pooled map into the interior of a zero map."""
        g = self.graph

        def cut(tensor: str, begin: int, end: int, axis: int) -> str:
            return g.op('Slice', [tensor, g.ints(begin), g.ints(end), g.ints(axis), g.ints(1)])

        last = 2 ** 63 - 1
        rows = cut(zeros, 1, -1, 2)
        middle = g.op('Concat', [cut(rows, 0, 1, 3), inner, cut(rows, -1, last, 3)], axis=3)
        return g.op('Concat', [cut(zeros, 0, 1, 2), middle, cut(zeros, -1, last, 2)], axis=2)

    def _pooled_by_class(self, heatmap: str, zeros: str) -> str:
        """Pool some classes, take the others as they are."""
        g, config = self.graph, self.config
        x, y = config.feature_map_xy
        pooled = list(config.pooled_classes)
        others = [c for c in range(config.num_classes) if c not in pooled]
        inner = g.op('MaxPool', [g.op('Gather', [heatmap, g.ints(*pooled)], axis=1)], **_POOL)
        inner = g.op('Reshape', [inner, g.ints(len(pooled), x - 2, y - 2)])
        partial = g.op('ScatterND', [zeros, self._sites(pooled, (1, x - 1), (1, y - 1)), inner])
        rest = g.op('Gather', [heatmap, g.ints(*others)], axis=1)
        # An index of one element disappears from the shape, as in torch's indexing.
        shape = (x, y) if len(others) == 1 else (len(others), x, y)
        rest = g.op('Reshape', [rest, g.ints(*shape)])
        sites = self._sites(others, (0, x), (0, y), squeeze=len(others) == 1)
        return g.op('ScatterND', [partial, sites, rest])

    def _sites(self, classes: list[int], rows: tuple[int, int], columns: tuple[int, int],
               squeeze: bool = False) -> str:
        """Return indices (0, class, row, column), int64 [classes, rows, columns, 4].

        :param squeeze: leave out the axis of a single class.
        """
        g = self.graph

        def span(begin: int, end: int) -> str:
            return g.op('Range', [g.constant(v, np.int64) for v in (begin, end, 1)])

        shape = [rows[1] - rows[0], columns[1] - columns[0]]
        if not squeeze:
            shape.insert(0, len(classes))
        parts = [g.constant(0, np.int64),
                 g.op('Reshape', [g.ints(*classes), g.ints(-1, *[1] * (len(shape) - 1))]),
                 g.op('Reshape', [span(*rows), g.ints(-1, 1)]),
                 span(*columns)]
        parts = [g.op('Unsqueeze', [g.op('Expand', [part, g.ints(*shape)]), g.ints(-1)])
                 for part in parts]
        return g.op('Concat', parts, axis=-1)

    def _proposals(self, heatmap: str) -> tuple[str, str]:
        """Return labels and cell positions of the best scores, int64 [1, K] each."""
        g, config = self.graph, self.config
        scores = g.op('Reshape', [heatmap, g.ints(1, -1)])
        if self.options.fixed_topk:
            count = g.initializer('K', np.array([config.num_proposals], np.int64))
        else:
            size = g.op('Gather', [g.op('Shape', [scores]), g.constant(1, np.int64)], axis=0)
            count = g.op('Unsqueeze', [size, g.ints(0)])
        _, order = g.op('TopK', [scores, count], num_outputs=2, axis=-1, largest=1)
        best = g.op('Slice', [order, g.ints(0), g.ints(config.num_proposals), g.ints(-1),
                              g.ints(1)])
        size = g.constant(self.num_cells, np.int64)
        labels = g.op('Div', [best, size])
        return labels, g.op('Sub', [best, g.op('Mul', [labels, size])])

    def _one_hot(self, labels: str) -> str:
        """Return int64 [1, classes, K]."""
        g = self.graph
        depth = g.constant(self.config.num_classes, np.int64)
        hot = g.op('OneHot', [labels, depth, g.ints(0, 1)], axis=-1)
        return g.op('Transpose', [hot], perm=[0, 2, 1])

    def _decoder(self, query: str, features: str, query_pos: str, cells: str) -> str:
        """Return the decoded queries, float32 [1, K, hidden]."""
        g = self.graph
        key, scope = 'bbox_head.decoder.0', '/bbox_head/decoder.0'

        def swap(tensor: str) -> str:
            return g.op('Transpose', [tensor], perm=[0, 2, 1])

        query = swap(query)
        position = swap(self._position(query_pos, 'self_posembed'))
        key_position = swap(self._position(cells, 'cross_posembed'))
        placed = g.op('Add', [query, position], scope)
        query = self._norm_layer(
            g.op('Add', [query, self._attention(placed, placed, 'self_attn')], scope), 0)
        placed = g.op('Add', [query, position], scope)
        memory = g.op('Add', [swap(features), key_position], scope)
        query = self._norm_layer(
            g.op('Add', [query, self._attention(placed, memory, 'cross_attn')], scope), 1)
        hidden = self._linear(query, f'{key}.ffn.layers.0.0', f'{scope}/ffn/layers/layers.0/0')
        hidden = g.op('Relu', [hidden], f'{scope}/ffn/layers/layers.0/1')
        hidden = self._linear(hidden, f'{key}.ffn.layers.1', f'{scope}/ffn/layers/layers.1')
        return swap(self._norm_layer(g.op('Add', [query, hidden], scope), 2))

    def _position(self, points: str, name: str) -> str:
        key = f'bbox_head.decoder.0.{name}.position_embedding_head'
        scope = f'/bbox_head/decoder.0/{name}/position_embedding_head/position_embedding_head'
        x = self.graph.op('Transpose', [points], f'/bbox_head/decoder.0/{name}', perm=[0, 2, 1])
        x = self._conv(x, f'{key}.0', f'{scope}.0', kernel=(1,),
                       norm=(f'{key}.1', f'{scope}.1', HEAD_EPSILON))
        x = self.graph.op('Relu', [x], f'{scope}.2')
        return self._conv(x, f'{key}.3', f'{scope}.3', kernel=(1,))

    def _linear(self, x: str, key: str, scope: str) -> str:
        g = self.graph
        x = g.op('MatMul', [x, g.numbered('MatMul', self.state[f'{key}.weight'].T)], scope)
        return g.op('Add', [self._named(f'{key}.bias'), x], scope)

    def _attention(self, query: str, memory: str, name: str) -> str:
        """Multi-head attention; keys and values are both projections of ``memory``."""
        g, config = self.graph, self.config
        width, heads = config.hidden_channels, config.num_heads
        head_width = width // heads
        key, scope = f'bbox_head.decoder.0.{name}.attn', f'/bbox_head/decoder.0/{name}/attn'
        weights = np.split(self.state[f'{key}.in_proj_weight'], 3)
        biases = np.split(self.state[f'{key}.in_proj_bias'], 3)

        def project(tensor: str, part: int, perm: list[int]) -> str:
            """Return [heads, rows, head width], or its transpose."""
            rows_first = g.op('Transpose', [tensor], scope, perm=[1, 0, 2])
            y = g.op('MatMul', [rows_first, g.numbered('MatMul', weights[part].T)], scope)
            y = g.op('Add', [y, g.numbered('Add', biases[part])], scope)
            y = g.op('Reshape', [y, g.ints(-1, heads, head_width)], scope)
            return g.op('Transpose', [y], scope, perm=perm)

        q = project(query, 0, [1, 0, 2])
        k = project(memory, 1, [1, 2, 0])
        v = project(memory, 2, [1, 0, 2])
        root = math.sqrt(head_width)
        divide = self.options.attention_scale == 'Div'
        scale = g.constant(root if divide else 1 / root, np.float32, scope)
        q = g.op(self.options.attention_scale, [q, scale], scope)
        weight = g.op('Softmax', [g.op('MatMul', [q, k], scope)], scope, axis=-1)
        mixed = g.op('Transpose', [g.op('MatMul', [weight, v], scope)], scope, perm=[1, 0, 2])
        mixed = g.op('Reshape', [mixed, g.ints(-1, width)], scope)
        out = g.op('Gemm', [mixed, self._named(f'{key}.out_proj.weight'),
                            self._named(f'{key}.out_proj.bias')], scope,
                   alpha=1.0, beta=1.0, transB=1)
        return g.op('Reshape', [out, g.ints(1, -1, width)], scope)

    def _norm_layer(self, x: str, index: int) -> str:
        """LayerNorm over the last axis, in its parts."""
        g = self.graph
        key, scope = f'bbox_head.decoder.0.norms.{index}', f'/bbox_head/decoder.0/norms.{index}'
        mean = g.op('ReduceMean', [x], scope, axes=[-1])
        centred = g.op('Sub', [x, mean], scope)
        square = g.op('Pow', [centred, g.constant(2.0, np.float32, scope)], scope)
        variance = g.op('ReduceMean', [square], scope, axes=[-1])
        variance = g.op('Add', [variance, g.constant(HEAD_EPSILON, np.float32, scope)], scope)
        unit = g.op('Div', [centred, g.op('Sqrt', [variance], scope)], scope)
        scaled = g.op('Mul', [unit, self._named(f'{key}.weight')], scope)
        return g.op('Add', [scaled, self._named(f'{key}.bias')], scope)

    def _branches(self, query: str, query_pos: str) -> dict[str, str]:
        """Return what each branch predicts, float32 [1, channels, K]."""
        g = self.graph
        results = {}
        for name in BRANCHES:
            key = f'bbox_head.prediction_heads.0.{name}'
            scope = f'/bbox_head/prediction_heads.0/{name}/{name}'
            x = self._conv(query, f'{key}.0.conv', f'{scope}.0/conv', kernel=(1,),
                           norm=(f'{key}.0.bn', f'{scope}.0/bn', HEAD_EPSILON))
            x = g.op('Relu', [x], f'{scope}.0/activate')
            x = self._conv(x, f'{key}.1', f'{scope}.1', kernel=(1,))
            if name == 'center':
                x = g.op('Add', [x, g.op('Transpose', [query_pos], perm=[0, 2, 1])])
            results[name] = g.op('Concat', [x], axis=-1)
        return results

    def _outputs(self, branches: dict[str, str], heatmap: str, labels: str,
                 positions: str) -> None:
        g, config = self.graph, self.config

        def only_frame(tensor: str, **output: Any) -> str:
            return g.op('Gather', [tensor, g.constant(0, np.int64)], axis=0, **output)

        across = g.op('Expand', [g.op('Unsqueeze', [positions, g.ints(1)]),
                                 g.ints(1, config.num_classes, config.num_proposals)])
        found = g.op('GatherElements', [heatmap, across], axis=-1)
        score = g.op('Mul', [g.op('Sigmoid', [branches['heatmap']]), found])
        hot = g.op('Cast', [self._one_hot(labels)], to=TensorProto.FLOAT)
        score = only_frame(g.op('Mul', [score, hot]))
        g.op('ReduceMax', [score], axes=[0], keepdims=0, outputs=['score'])
        g.op('Concat', [only_frame(branches[name]) for name in BRANCHES[:-1]], axis=0,
             outputs=['bbox_pred'])
        only_frame(labels, outputs=['label_pred'])
