# SPDX-License-Identifier: Apache-2.0
"""Reads the network out of an ONNX file that Autoware's training code, or ours, exported.

The file is read by its edges. Names of tensors and nodes, counters in names and the order of the
nodes differ between exporter versions; what is computed does not. Starting from the sparse
convolutions, the walk follows the data through every block of the network, takes the sizes from
the weights it meets, and refuses whatever is not the network that
:class:`tt_perception.bevfusion.reference.BEVFusionNet` computes. Operators that only move values
(Reshape, Transpose and the like) are looked through; of these, those are checked that decide what
the axes of the map mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tt_perception.bevfusion.config import BEVFusionConfig, GridConfig, NetworkConfig
from tt_perception.bevfusion.fold import (
    BOX_BRANCHES,
    BRANCHES,
    EPSILON,
    HEAD_EPSILON,
    fold_norms,
)
from tt_perception.bevfusion.onnxgraph import GraphWalk, Node, OnnxGraph
from tt_perception.runtime.errors import ArtifactError

OUT_SIZE_FACTOR = 8  # three levels of stride 2
_INPUTS = ('voxels', 'coors', 'num_points_per_voxel')
_OUTPUTS = ('bbox_pred', 'score', 'label_pred')
_POINT_FEATURES = (4, 5)
_RELU = 1  # act_type of ImplicitGemm
_DECODER = 'bbox_head.decoder.0'


@dataclass(frozen=True)
class NetworkWeights:
    """A network as read from a file.

    :ivar config: its sizes.
    :ivar arrays: float32, names of ``BEVFusionNet(config, folded=True).state_dict()``.
    """

    config: NetworkConfig
    arrays: dict[str, np.ndarray]


def read_onnx(path: str | Path) -> NetworkWeights:
    """Read an ONNX file of the BEVFusion-L topology; every norm is folded.

    Read are all forms that upstream's exporter has written: initializers with and without
    ``mod.``, norms as nodes or folded, sparse convolutions with bias and activation, a heat map
    of which some or all classes keep local maxima only, a TopK with a constant or computed
    number. float16 weights are widened.

    :raises ArtifactError: not an ONNX file, damaged, or another network; the message names the
        node, what was found and what was expected.
    """
    return _Walk(OnnxGraph(path)).read()


def check_against(network: NetworkConfig, config: BEVFusionConfig) -> None:
    """Check that the parameters belong to the network.

    :raises ArtifactError: one does not; the message begins with its name.
    """
    check_grid(network, config.grid)
    for name, found, expected in (
            ('class_names', len(config.class_names), network.num_classes),
            ('num_proposals', config.num_proposals, network.num_proposals),
            ('out_size_factor', config.postprocess.out_size_factor, OUT_SIZE_FACTOR),
            ('use_intensity', config.grid.num_features, network.in_channels)):
        if found != expected:
            what = {'class_names': ' classes', 'use_intensity': ' point features'}.get(name, '')
            raise ArtifactError(f'{name}: found {found}{what} in the parameters, '
                                f'expected {expected} as in the network')


def check_grid(network: NetworkConfig, grid: GridConfig) -> None:
    """Check that the voxel grid is the network's, which has one cell more along z.

    :raises ArtifactError: it is not.
    """
    x, y, z = network.spatial_shape_xyz
    if grid.size_xyz != (x, y, z - 1):
        raise ArtifactError(f'point_cloud_range, voxel_size: found {grid.size_xyz} cells along '
                            f'x, y, z, expected {(x, y, z - 1)} as in the network')


def cell_centres(feature_map_xy: tuple[int, int]) -> np.ndarray:
    """Return the centres of the cells of the feature map, float32 [1, x * y, 2], y fastest."""
    x, y = np.meshgrid(*(np.arange(n, dtype=np.float32) + 0.5 for n in feature_map_xy),
                       indexing='ij')
    return np.stack([x.ravel(), y.ravel()], axis=-1)[None]


@dataclass(frozen=True)
class SparseLayer:
    """One sparse convolution of the network; three sizes are in the order x, y, z.

    :ivar key: name of its weights, without ``.weight``.
    :ivar norm: name of the norm behind it.
    :ivar subm: submanifold: its active sites stay the same.
    :ivar opens_block: the first of the two in a residual block.
    :ivar closes_block: the second; its result is added to what went into the block.
    """

    key: str
    norm: str
    subm: bool = True
    kernel: tuple[int, int, int] = (3, 3, 3)
    stride: tuple[int, int, int] = (1, 1, 1)
    padding: tuple[int, int, int] = (1, 1, 1)
    opens_block: bool = False
    closes_block: bool = False


def sparse_layers() -> list[SparseLayer]:
    """Return the 21 sparse convolutions in the order of the data."""
    root = 'pts_middle_encoder'
    convs = [SparseLayer(f'{root}.conv_input.0', f'{root}.conv_input.1')]
    for level in (1, 2, 3, 4):
        stem = f'{root}.encoder_layers.encoder_layer{level}'
        for block in (0, 1):
            convs += [
                SparseLayer(f'{stem}.{block}.conv1', f'{stem}.{block}.bn1', opens_block=True),
                SparseLayer(f'{stem}.{block}.conv2', f'{stem}.{block}.bn2', closes_block=True)]
        if level < 4:
            convs.append(SparseLayer(f'{stem}.2.0', f'{stem}.2.1', subm=False, stride=(2, 2, 2),
                                    padding=(1, 1, 0 if level == 3 else 1)))
    convs.append(SparseLayer(f'{root}.conv_out.0', f'{root}.conv_out.1', subm=False,
                            kernel=(1, 1, 3), stride=(1, 1, 2), padding=(0, 0, 0)))
    return convs


class _Walk(GraphWalk):
    """Follows the data through the graph; fills :attr:`state` with weights and norms."""

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__(graph)
        self.state: dict[str, np.ndarray] = {}

    def read(self) -> NetworkWeights:
        self._interface()
        features = self._sparse_encoder()
        bev = self._backbone_and_neck(self._to_bev(features))
        self._head(bev)
        config = NetworkConfig(
            num_classes=self.num_classes, num_proposals=self.num_proposals,
            spatial_shape_xyz=self.spatial_shape, in_channels=self.in_channels,
            sparse_channels=tuple(self.sparse_channels), bev_channels=self.bev_channels,
            backbone_channels=self.backbone_channels, backbone_layers=self.backbone_layers,
            neck_channels=self.neck_channels, hidden_channels=self.hidden,
            num_heads=self.num_heads, ffn_channels=self.ffn_channels,
            branch_channels=self.branch_channels, pooled_classes=self.pooled_classes)
        with np.errstate(over='ignore'):  # what overflows is refused by name
            arrays = fold_norms(self.state, config)
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                self.fail(name, 'an overflow with its norm folded', 'float32 numbers')
        return NetworkWeights(config, arrays)

    def norm(self, tensor: str, key: str, width: int, epsilon: float) -> str:
        """Read the norm behind ``tensor``; return its output."""
        node = self.user(tensor, 'BatchNormalization', key, index=0)
        self.attribute(node, 'epsilon', epsilon, 1e-5)
        self.attribute(node, 'training_mode', 0, 0)
        for part, name in zip(('weight', 'bias', 'running_mean', 'running_var'),
                              node.inputs[1:], strict=True):
            self.state[f'{key}.{part}'] = self.weight(name, node, (width,))
        if (self.state[f'{key}.running_var'] < 0).any():
            self.fail(node, 'a negative variance', 'no negative value')
        return node.outputs[0]

    # Interface

    def _interface(self) -> None:
        if not any(node.op == 'ImplicitGemm' for node in self.graph.nodes):
            raise self.graph.error('another model: found no ImplicitGemm node (sparse '
                                   f'convolution), expected {len(sparse_layers())}')
        for kind, found, expected in (('inputs', self.graph.inputs, _INPUTS),
                                      ('outputs', self.graph.outputs, _OUTPUTS)):
            if sorted(found) != sorted(expected):
                self.fail(kind, ', '.join(found), ', '.join(expected))

    def _voxel_features(self, tensor: str) -> None:
        """Check that the first sparse convolution gets the mean of the points of a voxel."""
        where = 'voxel features'
        divide = self.maker(tensor, 'Div', where)
        total, count = self.sources(divide)
        self.expect(where, 'divisor', count, 'num_points_per_voxel')
        node = self.maker(total, 'ReduceSum', where)
        self.expect(node, 'input', self.sources(node)[0], 'voxels')
        self.expect(node, 'axes', self.numbers(node, 1), [1])
        self.attribute(node, 'keepdims', 0, 1)

    def _indices(self, tensor: str) -> None:
        """Check that the first rulebook gets (0, x, y, z), from coors (z, y, x)."""
        node = self.maker(tensor, 'Concat', 'voxel indices')
        self.expect(node, 'inputs', len(node.inputs), 2)
        self.axis(node, 2, 1)
        turned = self.maker(node.inputs[1], 'Slice', 'voxel indices')
        self.expect(turned, 'input', self.graph.source(turned.inputs[0]), 'coors')
        self.expect(turned, 'starts', self.numbers(turned, 1), [-1])
        self.expect(turned, 'steps', self.numbers(turned, 4), [-1])
        if self.numbers(turned, 3) not in ([-1], [1]):
            self.fail(f'{turned}: axes', self.numbers(turned, 3), [-1])

    # Sparse encoder

    def _sparse_encoder(self) -> str:
        """Read the 21 sparse convolutions; return the features of the last."""
        gemms = [node for node in self.graph.nodes if node.op == 'ImplicitGemm']
        self.expect('sparse encoder', 'ImplicitGemm nodes', len(gemms), len(sparse_layers()))
        self.sparse_channels: list[int] = []
        gemm, self.rulebook, self.shape = gemms[0], None, None
        tensor = identity = ''
        for place, conv in enumerate(sparse_layers()):
            if place:
                gemm = self.user(tensor, 'ImplicitGemm', conv.key, index=0)
            if conv.opens_block:
                identity = tensor
            tensor = self._sparse_conv(gemm, conv, identity)
        return tensor

    def _sparse_conv(self, gemm: Node, conv: SparseLayer, identity: str) -> str:
        self._rulebook(gemm, conv)
        self.attribute(gemm, 'is_subm', int(conv.subm))
        for name, value in (('output_scale', 1.0), ('act_beta', 0.0), ('output_add_scale', 0.0)):
            self.attribute(gemm, name, value, value)
        first = not self.sparse_channels
        changes = first or not conv.subm
        width_in = None if first else self.sparse_channels[-1]
        filters = self.weight(gemm.inputs[1], gemm,
                              (None if changes else width_in, *conv.kernel, width_in))
        width = filters.shape[0]
        if first:
            self._check_features(gemm, filters.shape[-1])
        if conv.kernel == (1, 1, 3):
            self.bev_channels = width
        elif changes:
            self.sparse_channels.append(width)
        self.state[f'{conv.key}.weight'] = filters
        tensor = gemm.outputs[0]
        if len(gemm.inputs) > 5 and gemm.inputs[5]:
            self.state[f'{conv.key}.bias'] = self.weight(gemm.inputs[5], gemm, (width,))
        else:
            tensor = self.norm(tensor, conv.norm, width, EPSILON)
        return self._activation(gemm, tensor, conv, identity)

    def _activation(self, gemm: Node, tensor: str, conv: SparseLayer, identity: str) -> str:
        """Follow the sum and the ReLU behind a sparse convolution."""
        activation = gemm.attributes.get('act_type', 0)
        if conv.closes_block:
            self.expect(gemm, 'act_type', activation, 0)
            add = self.user(tensor, 'Add', conv.key)
            self.expect(add, 'identity of the block', self.partner(add, tensor),
                        self.graph.source(identity))
            return self.result(add.outputs[0], 'Relu', conv.key)
        if activation == _RELU and tensor == gemm.outputs[0]:
            return tensor
        self.expect(gemm, 'act_type', activation, 0)
        return self.result(tensor, 'Relu', conv.key)

    def _rulebook(self, gemm: Node, conv: SparseLayer) -> None:
        """Check the rulebook of a sparse convolution, and that it follows the previous one."""
        node = self.maker(gemm.inputs[2], 'GetIndicePairsImplicitGemm', str(gemm))
        self.expect(gemm, 'inputs 2 to 4', gemm.inputs[2:5], node.outputs[1:4])
        if self.rulebook is None:
            self._indices(node.inputs[0])
        else:
            self.expect(node, 'indices', self.sources(node)[0], self.rulebook.outputs[0])
        if self.shape is None:
            self.shape = self.spatial_shape = self._spatial_shape(node)
        for name, value in (('spatial_shape', self.shape), ('ksize', conv.kernel),
                            ('stride', conv.stride), ('padding', conv.padding),
                            ('dilation', (1, 1, 1)), ('out_padding', (0, 0, 0)),
                            ('subm', int(conv.subm)), ('transpose', 0), ('batch_size', 1)):
            self.attribute(node, name, value)
        if not conv.subm:
            self.shape = tuple((n + 2 * p - k) // s + 1 for n, p, k, s in zip(
                self.shape, conv.padding, conv.kernel, conv.stride, strict=True))
            if min(self.shape) < 1:
                self.fail(node, f'spatial shape {node.attributes["spatial_shape"]}',
                          'cells left after the stride')
        self.rulebook = node

    def _spatial_shape(self, node: Node) -> tuple[int, int, int]:
        shape = node.attributes.get('spatial_shape')
        if not (isinstance(shape, tuple) and len(shape) == 3
                and all(isinstance(n, int) and n > 0 for n in shape)):
            self.fail(f'{node}: spatial_shape', shape, 'three positive sizes')
        return shape

    def _check_features(self, gemm: Node, width: int) -> None:
        encoded = any(node is not None and node.op in ('Cos', 'Sin')
                      for node in map(self.graph.producer, self.graph.ancestors(gemm.inputs[0])))
        if encoded or width not in _POINT_FEATURES:
            kind = 'Fourier-encoded ' if encoded else ''
            self.fail(f'{gemm}: input channels', f'{width} {kind}features',
                      '4 or 5 plain ones (x, y, z[, intensity], time lag)')
        self._voxel_features(gemm.inputs[0])
        declared = self.graph.inputs['voxels'][-1:]
        self.expect('voxels', 'point features', declared, (width,))
        self.in_channels = width

    def _to_bev(self, features: str) -> str:
        """Check how the rows become a map with x as height; return the map."""
        where = 'bird\'s-eye map'
        scatter = self.user(features, 'ScatterND', where, index=2)
        if self.rulebook.outputs[0] not in self.graph.ancestors(scatter.inputs[1]):
            self.fail(scatter, 'indices from elsewhere', f'those of {self.rulebook}')
        turns = [node for node, _ in self.graph.direct_users(scatter.outputs[0])
                 if self._leads_to_conv(node)]
        if len(turns) != 1:
            self.fail(f'{scatter}: ways to a Conv', len(turns), 1)
        self.expect(turns[0], 'operator', turns[0].op, 'Transpose')
        self.attribute(turns[0], 'perm', (0, 4, 3, 1, 2))
        return turns[0].outputs[0]

    def _leads_to_conv(self, node: Node) -> bool:
        return any(user.op == 'Conv' for user, _ in self.graph.users(node.outputs[0]))

    # Backbone and neck

    def conv(self, tensor: str, key: str, shape: Sequence[int | None], *, stride: int = 1,
             op: str = 'Conv', **norm: Any) -> str:
        """Read the one convolution behind ``tensor`` with this kernel and stride.

        :param shape: of its weights; padding keeps the size of the map.
        :param norm: see :meth:`read_conv`.
        :return: its output, or that of the norm behind it.
        """
        kernel = tuple(shape[2:])
        rank = len(kernel)

        def fits(node: Node) -> bool:
            weight = self.graph.constant(node.inputs[1]) if node.op == op else None
            return (weight is not None and weight.shape[2:] == kernel
                    and node.attributes.get('strides', rank * (1,)) == rank * (stride,))

        users = self.graph.users(tensor)
        nodes = list(dict.fromkeys(node for node, at in users if at == 0 and fits(node)))
        if len(nodes) != 1:
            found = ', '.join(sorted(node.op for node, _ in users)) or 'nothing'
            size = ' x '.join(map(str, kernel))
            self.fail(f'{key}: after {tensor!r}', f'{found}, {len(nodes)} of which fit',
                      f'one {op} of {size} cells and stride {stride}')
        return self.read_conv(nodes[0], key, shape, stride=stride, **norm)

    def read_conv(self, node: Node, key: str, shape: Sequence[int | None], *, stride: int = 1,
                  norm: str | None = None, epsilon: float = EPSILON) -> str:
        """Read a convolution and the norm behind it, unless the exporter has folded that.

        :param norm: key of the norm, None where the network has none.
        :return: the output of both.
        """
        kernel, transposed = tuple(shape[2:]), node.op == 'ConvTranspose'
        rank, pad = len(kernel), 0 if transposed else kernel[0] // 2
        for name, value in (('kernel_shape', kernel), ('pads', (pad,) * (2 * rank)),
                            ('strides', (stride,) * rank), ('dilations', (1,) * rank),
                            ('output_padding', (0,) * rank), ('group', 1),
                            ('auto_pad', b'NOTSET')):
            self.attribute(node, name, value, value)
        weight = self.state[f'{key}.weight'] = self.weight(node.inputs[1], node, shape)
        width = weight.shape[1 if transposed else 0]
        has_bias = len(node.inputs) > 2 and bool(node.inputs[2])
        if has_bias:
            self.state[f'{key}.bias'] = self.weight(node.inputs[2], node, (width,))
        out = node.outputs[0]
        has_norm = any(user.op == 'BatchNormalization' for user, _ in self.graph.users(out))
        if norm is not None and (has_norm or not has_bias):
            return self.norm(out, norm, width, epsilon)
        if has_norm or not has_bias:
            self.fail(node, 'a norm behind it' if has_norm else 'no bias', 'a bias and no norm')
        return out

    def relu_conv(self, tensor: str, key: str, shape: Sequence[int | None], index: int,
                  **options: Any) -> str:
        """Read a convolution with norm ``index + 1`` and ReLU; return the output."""
        out = self.conv(tensor, f'{key}.{index}', shape, norm=f'{key}.{index + 1}', **options)
        return self.result(out, 'Relu', f'{key}.{index}')

    def width(self, key: str) -> int:
        """Return the output channels of a convolution that has been read."""
        return self.state[f'{key}.weight'].shape[0]

    def _backbone_and_neck(self, bev: str) -> str:
        first, second = 'pts_backbone.blocks.0', 'pts_backbone.blocks.1'
        fine, layers = self._block(bev, first, self.bev_channels * self.shape[2], 1)
        coarse, more = self._block(fine, second, self.width(f'{first}.0'), 2)
        self.backbone_channels = (self.width(f'{first}.0'), self.width(f'{second}.0'))
        self.expect(second, 'convolutions', more, layers)
        self.backbone_layers = layers - 1  # behind the first

        up = 'pts_neck.deblocks'
        fine = self.relu_conv(fine, f'{up}.0', (None, self.backbone_channels[0], 1, 1), 0)
        self.neck_channels = self.width(f'{up}.0.0')
        coarse = self.relu_conv(
            coarse, f'{up}.1', (self.backbone_channels[1], self.neck_channels, 2, 2), 0,
            stride=2, op='ConvTranspose')
        joined = self.user(fine, 'Concat', 'pts_neck')
        self.expect(joined, 'inputs', self.sources(joined),
                    (self.graph.source(fine), self.graph.source(coarse)))
        self.axis(joined, 4, 1)
        return joined.outputs[0]

    def _block(self, tensor: str, key: str, width_in: int, stride: int) -> tuple[str, int]:
        """Read one block of the backbone, up to where only other kernels or strides follow.

        :return: its output, and the number of its convolutions.
        """
        tensor = self.relu_conv(tensor, key, (None, width_in, 3, 3), 0, stride=stride)
        width, layers = self.width(f'{key}.0'), 1
        while self._has_next_layer(tensor):
            tensor = self.relu_conv(tensor, key, (width, width, 3, 3), 3 * layers)
            layers += 1
        return tensor, layers

    def _has_next_layer(self, tensor: str) -> bool:
        return any(node.op == 'Conv' and at == 0 and node.attributes.get('kernel_shape') == (3, 3)
                   and node.attributes.get('strides') == (1, 1)
                   for node, at in self.graph.users(tensor))

    # Head

    def _head(self, bev: str) -> None:
        if any(n < 4 or n % 2 for n in self.shape[:2]):
            self.fail('feature map', '{} x {} cells'.format(*self.shape), 'even sizes from 4')
        features = self.conv(bev, 'bbox_head.shared_conv', (None, 2 * self.neck_channels, 3, 3))
        self.hidden = self.width('bbox_head.shared_conv')
        heatmap = self._local_maxima(self._heatmap(features))
        labels, positions = self._proposals(heatmap)
        query = self._query(features, labels, positions)
        query_pos, embedding, key_embedding = self._position_embeddings(positions)
        query = self._decoder(query, features, embedding, key_embedding)
        self._box_branches(query, query_pos)
        self._score(query, heatmap, labels, positions)
        self.expect('label_pred', 'source', self.graph.source('label_pred'), labels)

    def _heatmap(self, features: str) -> str:
        key = 'bbox_head.heatmap_head'
        out = self.conv(features, f'{key}.0.conv', (self.hidden, self.hidden, 3, 3),
                        norm=f'{key}.0.bn', epsilon=HEAD_EPSILON)
        out = self.conv(self.result(out, 'Relu', key), f'{key}.1', (None, self.hidden, 3, 3))
        self.num_classes = self.width(f'{key}.1')
        return self.result(out, 'Sigmoid', key)

    def _local_maxima(self, heatmap: str) -> str:
        """Check the local maximum filter; take the classes it is for."""
        where = 'local maxima'
        pools = [node for node in self.graph.nodes if node.op == 'MaxPool']
        self.expect(where, 'MaxPool nodes', len(pools), 1)
        pool = pools[0]
        for name, value, default in (('kernel_shape', (3, 3), None), ('strides', (1, 1), (1, 1)),
                                     ('pads', (0,) * 4, (0,) * 4), ('dilations', (1, 1), (1, 1)),
                                     ('ceil_mode', 0, 0), ('auto_pad', b'NOTSET', b'NOTSET')):
            self.attribute(pool, name, value, default)
        self._pooled_classes(self.sources(pool)[0], heatmap)
        equal = self.user(heatmap, 'Equal', where)
        if pool.outputs[0] not in self.graph.ancestors(self.partner(equal, heatmap)):
            self.fail(equal, 'no comparison with the maxima', f'the output of {pool}')
        kept = self.user(equal.outputs[0], 'Mul', where)
        self.expect(kept, 'factor', self.partner(kept, equal.outputs[0]), heatmap)
        return kept.outputs[0]

    def _pooled_classes(self, pooled: str, heatmap: str) -> None:
        every = list(range(self.num_classes))
        if pooled == heatmap:
            self.pooled_classes = tuple(every)
            return
        lists = {}
        for node, at in self.graph.users(heatmap):
            if node.op == 'Gather' and at == 0:
                self.axis(node, 4, 1)
                lists[node.outputs[0]] = self.numbers(node, 1) or []
        if pooled not in lists:
            self.fail(f'local maxima: input {pooled!r}', 'not it', 'classes of the heat map')
        if sorted(c for classes in lists.values() for c in classes) != every:
            self.fail('local maxima: classes', list(lists.values()), f'each of {every} once')
        self.pooled_classes = tuple(sorted(lists[pooled]))

    def _proposals(self, heatmap: str) -> tuple[str, str]:
        """Check the TopK; return the tensors of labels and of cell positions."""
        topk = self.user(heatmap, 'TopK', 'proposals', index=0)
        self.axis(topk, 2, 1)
        self.attribute(topk, 'largest', 1, 1)
        self.attribute(topk, 'sorted', 1, 1)
        count, best = self.number(topk.inputs[1]), topk.outputs[1]
        cut = self.user(best, 'Slice', 'proposals', index=0, optional=True)
        if cut is not None:
            self.expect(cut, 'starts', self.numbers(cut, 1), [0])
            self.expect(cut, 'steps', self.numbers(cut, 4) or [1], [1])
            end = (self.numbers(cut, 2) or [None])[0]
            count = end if count is None else min(count, end or 0)
            best = cut.outputs[0]
        if not isinstance(count, int) or count < 1:
            self.fail(f'{topk}: K', 'no constant' if count is None else count,
                      'a constant number of proposals')
        most = self.num_classes * self.shape[0] * self.shape[1]
        if count > most:
            self.fail(f'{topk}: K', count, f'at most the {most} cells of the heat map')
        self.num_proposals = count
        return self._labels_and_positions(best)

    def _labels_and_positions(self, best: str) -> tuple[str, str]:
        divide = self.user(best, 'Div', 'proposals', index=0)
        labels = divide.outputs[0]
        self._check_num_cells(divide, best)
        subtract = self.user(best, 'Sub', 'proposals', index=0)
        self._check_num_cells(self.maker(self.partner(subtract, best), 'Mul', 'proposals'), labels)
        return labels, subtract.outputs[0]

    def _check_num_cells(self, node: Node, tensor: str) -> None:
        """Check the other operand of a node: the cells of the map, or computed from a shape."""
        cells = self.partner(node, tensor)
        found, expected = self.number(cells), self.shape[0] * self.shape[1]
        makers = map(self.graph.producer, self.graph.ancestors(cells))
        if found is not None or not any(m is not None and m.op == 'Shape' for m in makers):
            self.expect(node, 'cells of a class', found, expected)

    def _query(self, features: str, labels: str, positions: str) -> str:
        """Return the sum of the features of the proposals' cells and of their class."""
        key = 'bbox_head.class_encoding'
        ways = [node for node, at in self.graph.users(labels) if node.op == 'OneHot' and at == 0]
        ways = [node for node in dict.fromkeys(ways) if self._leads_to_conv(node)]
        if len(ways) != 1:
            self.fail(f'{key}: OneHot nodes before a Conv', len(ways), 1)
        self._check_one_hot(ways[0])
        encoding = self.conv(ways[0].outputs[0], key, (self.hidden, self.num_classes, 1))
        add = self.user(encoding, 'Add', key)
        self._check_gather(self.partner(add, encoding), features, positions)
        return add.outputs[0]

    def _check_one_hot(self, node: Node) -> None:
        self.expect(node, 'depth', self.number(node.inputs[1]), self.num_classes)
        self.expect(node, 'values', self.numbers(node, 2), [0, 1])
        self.attribute(node, 'axis', -1, -1)

    def _check_gather(self, tensor: str, data: str, positions: str) -> Node:
        """Check that ``tensor`` is ``data`` at the cells of the proposals."""
        node = self.maker(tensor, 'GatherElements', 'proposals')
        self.expect(node, 'data', self.sources(node)[0], self.graph.source(data))
        if positions not in self.graph.ancestors(node.inputs[1]):
            self.fail(node, 'indices from elsewhere', 'the cells of the proposals')
        return node

    def _position_embeddings(self, positions: str) -> tuple[str, str, str]:
        """Read both position networks; return query positions and both embeddings."""
        where = 'position embeddings'
        cells = query_pos = None
        for node in self.graph.nodes:
            data = self._conv_of_points(node)
            if data is None:
                continue
            maker = self.graph.producer(data)
            if self.graph.constant(data) is not None:
                cells = data
            elif maker is not None and maker.op == 'GatherElements':
                query_pos = data
        if cells is None or query_pos is None:
            self.fail(where, 'not both', 'a Conv on the cells and one on the proposals')
        self._check_gather(query_pos, cells, positions)
        found, centres = self.graph.constant(cells), cell_centres(self.shape[:2])
        if found.size != centres.size or not np.array_equal(found.reshape(centres.shape), centres):
            self.fail(f'{where}: {cells!r}', f'{list(found.shape)} other values',
                      f'centres of {self.shape[0]} x {self.shape[1]} cells, y fastest')
        return (query_pos, self._position_embedding(query_pos, 'self_posembed'),
                self._position_embedding(cells, 'cross_posembed'))

    def _conv_of_points(self, node: Node) -> str | None:
        """Return the input of a convolution over pairs (x, y), None for other nodes."""
        if node.op != 'Conv':
            return None
        weight = self.graph.constant(node.inputs[1])
        if weight is None or weight.shape[1:] != (2, 1):
            return None
        return self.graph.source(node.inputs[0])

    def _position_embedding(self, points: str, name: str) -> str:
        key = f'{_DECODER}.{name}.position_embedding_head'
        out = self.relu_conv(points, key, (self.hidden, 2, 1), 0, epsilon=HEAD_EPSILON)
        return self.conv(out, f'{key}.3', (self.hidden, self.hidden, 1))

    # Decoder

    def _decoder(self, query: str, features: str, embedding: str, key_embedding: str) -> str:
        placed = self._sums(query, embedding)
        memory = self._sums(features, key_embedding)
        # The nodes are in an order of dependence: self-attention is the first of the two.
        softmaxes = [node for node in self.graph.nodes if node.op == 'Softmax']
        self.expect(_DECODER, 'Softmax nodes', len(softmaxes), 2)
        out = self._attention(softmaxes[0], 'self_attn', (placed, placed, placed))
        heads = self.num_heads
        query = self._add_and_norm(query, out, 0)
        placed = self._sums(query, embedding)
        out = self._attention(softmaxes[1], 'cross_attn', (placed, memory, memory))
        self.expect(_DECODER, 'heads of cross_attn', self.num_heads, heads)
        query = self._add_and_norm(query, out, 1)
        key = f'{_DECODER}.ffn.layers'
        out = self.result(self._linear(query, f'{key}.0.0', (self.hidden, None)), 'Relu', key)
        self.ffn_channels = self.width(f'{key}.0.0')
        out = self._linear(out, f'{key}.1', (self.ffn_channels, self.hidden))
        return self._add_and_norm(query, out, 2)

    def _sums(self, a: str, b: str) -> set[str]:
        """Return the outputs of all sums of two tensors, which may differ in layout."""
        pair = {self.graph.source(a), self.graph.source(b)}
        sums = {node.outputs[0] for node, _ in self.graph.users(a)
                if node.op == 'Add' and set(self.sources(node)) == pair}
        if not sums:
            self.fail(f'{_DECODER}: after {a!r}', f'no sum with {b!r}', 'one')
        return sums

    def _attention(self, softmax: Node, name: str, sources: Sequence[set[str]]) -> str:
        """Read an attention layer whose queries, keys and values are projected from ``sources``.

        The three projections are told apart by what they are multiplied with.
        """
        key = f'{_DECODER}.{name}.attn'
        self.axis(softmax, 3, 2)
        product = self.maker(softmax.inputs[0], 'MatMul', key)
        scaled, keys = self.sources(product)
        queries = self._unscaled(scaled, key)
        mixed = self.user(softmax.outputs[0], 'MatMul', key, index=0)
        weights, biases = [], []
        values = self.sources(mixed)[1]
        for tensor, allowed in zip((queries, keys, values), sources, strict=True):
            weight, bias = self._projection(tensor, allowed, key)
            weights.append(weight.T)
            biases.append(bias)
        self.state[f'{key}.in_proj_weight'] = np.concatenate(weights)
        self.state[f'{key}.in_proj_bias'] = np.concatenate(biases)

        out = self.user(mixed.outputs[0], 'Gemm', key, index=0)
        for attribute, value, default in (('transA', 0, 0), ('transB', 1, 0),
                                          ('alpha', 1.0, 1.0), ('beta', 1.0, 1.0)):
            self.attribute(out, attribute, value, default)
        width = self.hidden
        self.state[f'{key}.out_proj.weight'] = self.weight(out.inputs[1], out, (width, width))
        self.state[f'{key}.out_proj.bias'] = self.weight(out.inputs[2], out, (width,))
        return out.outputs[0]

    def _unscaled(self, scaled: str, key: str) -> str:
        """Take the number of heads from the factor 1 / sqrt(head width) on the queries."""
        node = self.graph.producer(scaled)
        if node is None or node.op not in ('Div', 'Mul'):
            self.fail(f'{key}: {scaled!r}', node or 'no node that computes it', 'Div or Mul')
        tensor, factor = self.sources(node)
        if node.op == 'Mul':
            factor, tensor = self._stored_first(node)
        value = self.number(factor)
        if not isinstance(value, float) or not 0 < value < math.inf:
            self.fail(f'{node}: scale', value, 'a positive constant')
        head_width = value ** 2 if node.op == 'Div' else value ** -2
        self.num_heads = round(self.hidden / head_width)
        if not math.isclose(self.num_heads * head_width, self.hidden, rel_tol=1e-4):
            self.fail(f'{node}: scale', value, f'the square root of a divisor of {self.hidden}')
        return tensor

    def _projection(self, tensor: str, sources: set[str],
                    key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return weight [in, out] and bias [out] of the linear map that gives ``tensor``."""
        add = self.maker(tensor, 'Add', key)
        bias, product = self._stored_first(add)
        node = self.maker(product, 'MatMul', key)
        found, weight = self.sources(node)
        if found not in sources:
            self.fail(f'{node}: input', repr(found), ' or '.join(map(repr, sorted(sources))))
        return (self.weight(weight, node, (self.hidden, self.hidden)),
                self.weight(bias, add, (self.hidden,)))

    def _stored_first(self, node: Node) -> tuple[str, str]:
        """Return the stored operand of a node of two operands, and the other."""
        a, b = self.sources(node)
        return (a, b) if self.graph.constant(a) is not None else (b, a)

    def _linear(self, tensor: str, key: str, shape: tuple[int, int | None]) -> str:
        """Read a linear layer, stored as [in, out]; return its output."""
        node = self.user(tensor, 'MatMul', key, index=0)
        weight = self.weight(self.sources(node)[1], node, shape)
        add = self.user(node.outputs[0], 'Add', key)
        bias = self.weight(self.partner(add, node.outputs[0]), add, weight.shape[1:])
        self.state[f'{key}.weight'], self.state[f'{key}.bias'] = weight.T, bias
        return add.outputs[0]

    def _add_and_norm(self, query: str, out: str, index: int) -> str:
        """Read the layer norm of a sum; return its output."""
        key = f'{_DECODER}.norms.{index}'
        sums = self._sums(query, out)
        self.expect(key, f'sums of {query!r} and {out!r}', len(sums), 1)
        tensor = sums.pop()
        mean = self._mean(tensor, key)
        centred = self.user(tensor, 'Sub', key, index=0)
        self.expect(centred, 'operand', self.partner(centred, tensor), mean)
        square = self.user(centred.outputs[0], 'Pow', key, index=0)
        self.expect(square, 'exponent', self.number(self.partner(square, centred.outputs[0])), 2)
        add = self.user(self._mean(square.outputs[0], key), 'Add', key)
        epsilon = self.number(self._stored_first(add)[0])
        if epsilon is None or not math.isclose(epsilon, HEAD_EPSILON, rel_tol=1e-4):
            self.fail(f'{add}: epsilon', epsilon, HEAD_EPSILON)
        root = self.result(add.outputs[0], 'Sqrt', key)
        unit = self.user(centred.outputs[0], 'Div', key, index=0)
        self.expect(unit, 'divisor', self.partner(unit, centred.outputs[0]), root)
        scaled = self.user(unit.outputs[0], 'Mul', key)
        shifted = self.user(scaled.outputs[0], 'Add', key)
        for part, node, operand in (('weight', scaled, unit), ('bias', shifted, scaled)):
            stored = self.partner(node, operand.outputs[0])
            self.state[f'{key}.{part}'] = self.weight(stored, node, (self.hidden,))
        return shifted.outputs[0]

    def _mean(self, tensor: str, key: str) -> str:
        """Check a mean over the last axis; return its output."""
        node = self.user(tensor, 'ReduceMean', key, index=0)
        axes = node.attributes.get('axes', None) or self.numbers(node, 1)
        if axes not in ((-1,), [-1], (2,), [2]):
            self.fail(f'{node}: axes', axes, [-1])
        self.attribute(node, 'keepdims', 1, 1)
        return node.outputs[0]

    # Predictions

    def _box_branches(self, query: str, query_pos: str) -> None:
        """Read the branches of the box in the order in which the last Concat lists them."""
        joined = self.maker('bbox_pred', 'Concat', 'bbox_pred')
        self.expect(joined, 'inputs', len(joined.inputs), len(BOX_BRANCHES))
        self.axis(joined, 2, 0)
        for (name, channels), tensor in zip(BOX_BRANCHES.items(), joined.inputs,
                                            strict=True):
            if name == 'center':
                add = self.maker(tensor, 'Add', name)
                tensor = self.partner(add, query_pos)
            self._branch(query, tensor, name, channels)

    def _branch(self, query: str, tensor: str, name: str, channels: int) -> None:
        """Read the two convolutions that lead from the queries to ``tensor``."""
        key = f'bbox_head.prediction_heads.0.{name}'
        last = self.maker(tensor, 'Conv', key)
        relu = self.maker(last.inputs[0], 'Relu', key)
        before = self.graph.producer(self.graph.source(relu.inputs[0]))
        if before is not None and before.op == 'BatchNormalization':
            before = self.graph.producer(self.graph.source(before.inputs[0]))
        if before is None or before.op != 'Conv':
            self.fail(f'{key}: before {relu}', before or 'nothing', 'Conv')
        self._check_branch_name(last, name)
        self.expect(before, 'input', self.sources(before)[0], self.graph.source(query))
        self.read_conv(before, f'{key}.0.conv', (None, self.hidden, 1), norm=f'{key}.0.bn',
                       epsilon=HEAD_EPSILON)
        width = self.width(f'{key}.0.conv')
        self.branch_channels = getattr(self, 'branch_channels', width)
        self.expect(before, 'output channels', width, self.branch_channels)
        self.read_conv(last, f'{key}.1', (channels, width, 1))

    def _check_branch_name(self, node: Node, name: str) -> None:
        """Refuse a branch that says by its name that it is another one of the same width."""
        others = set(BRANCHES) - {name}
        wrong = others.intersection(node.name.split('/'))
        if wrong:
            self.fail(f'{node}: branch', wrong.pop(), f'{name} by its place in the boxes')

    def _score(self, query: str, heatmap: str, labels: str, positions: str) -> None:
        """Check the score: branch times heat map times class, the greatest of all classes."""
        greatest = self.maker('score', 'ReduceMax', 'score')
        self.expect(greatest, 'axes', greatest.attributes.get('axes'), (0,))
        self.attribute(greatest, 'keepdims', 0, 1)
        outer = self.maker(self.sources(greatest)[0], 'Mul', 'score')
        factors = []
        for tensor in self.sources(outer):
            node = self.graph.producer(tensor)
            inner = node is not None and node.op == 'Mul'
            factors += self.sources(node) if inner else [tensor]
        by_op = {node.op: node for node in map(self.graph.producer, factors) if node is not None}
        if len(factors) != 3 or set(by_op) != {'Sigmoid', 'GatherElements', 'OneHot'}:
            self.fail(f'{outer}: factors', ', '.join(sorted(by_op)),
                      'GatherElements, OneHot, Sigmoid')
        self._check_gather(by_op['GatherElements'].outputs[0], heatmap, positions)
        self._check_one_hot(by_op['OneHot'])
        self.expect(by_op['OneHot'], 'labels', self.sources(by_op['OneHot'])[0], labels)
        sigmoid = by_op['Sigmoid']
        self._branch(query, self.sources(sigmoid)[0], 'heatmap', self.num_classes)
