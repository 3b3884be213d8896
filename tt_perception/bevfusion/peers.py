# SPDX-License-Identifier: Apache-2.0
"""Other implementations of what the lidar model does, to time it beside them.

Used by :mod:`tt_perception.bevfusion.bench` only. A peer whose package is not installed raises
ImportError when it is made.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tt_perception.bevfusion.config import GridConfig, NetworkConfig
from tt_perception.bevfusion.detections import LABELS

# kernel, stride and padding along x, y, z of the strided convolutions
_STRIDED = (((3, 3, 3), (2, 2, 2), (1, 1, 1)), ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
            ((3, 3, 3), (2, 2, 2), (1, 1, 0)), ((1, 1, 3), (1, 1, 2), (0, 0, 0)))


# NumPy


def structured_reading(message: Any) -> np.ndarray:
    """Read x, y, z of a cloud field by field through a structured type, float32 [n, 3]."""
    offsets = {field.name: field.offset for field in message.fields}
    kind = np.dtype({'names': list('xyz'), 'formats': ['<f4'] * 3,
                     'offsets': [offsets[name] for name in 'xyz'],
                     'itemsize': message.point_step})
    records = np.frombuffer(message.data, kind)
    points = np.stack([records[name] for name in 'xyz'], axis=1)
    return points[np.isfinite(points).all(axis=1)]


def numpy_densify(current: np.ndarray, past: np.ndarray, transform: np.ndarray,
                  lag_s: float) -> np.ndarray:
    """Return two sweeps as one cloud with time lag, float32 [n, 4]."""
    moved = past @ transform[:3, :3].T + transform[:3, 3]
    return np.concatenate([np.pad(current, ((0, 0), (0, 1))),
                           np.pad(moved, ((0, 0), (0, 1)), constant_values=lag_s)]).astype(
                               np.float32)


def numpy_circle_nms(centers_xy: np.ndarray, distance_m: float) -> np.ndarray:
    """Return bool [n]: a kept earlier centre is not nearer than the distance."""
    keep = np.ones(len(centers_xy), bool)
    for i in range(len(centers_xy)):
        if keep[i]:
            offset = centers_xy[i + 1:] - centers_xy[i]
            keep[i + 1:] &= (offset * offset).sum(axis=1) >= distance_m ** 2
    return keep


def numpy_iou_bev_nms(boxes: np.ndarray, labels: np.ndarray, search_distance_m: float,
                      iou_threshold: float) -> np.ndarray:
    """Return bool [n]: no earlier box overlaps by more than the threshold."""
    boxes = boxes.astype(np.float64)
    walks = labels == LABELS['PEDESTRIAN']
    corners = _corners(boxes)
    area = boxes[:, 3] * boxes[:, 4]
    keep = np.ones(len(boxes), bool)
    for i in range(1, len(boxes)):
        offset = boxes[:i, :2] - boxes[i, :2]
        near = np.flatnonzero(((offset * offset).sum(axis=1) <= search_distance_m ** 2)
                              & (walks[:i] == walks[i]))
        if len(near):
            shared = _intersections(boxes[i], corners[i], boxes[near], corners[near])
            iou = shared / (area[near] + area[i] - shared)
            keep[i] = not (iou > iou_threshold).any()
    return keep


def _corners(boxes: np.ndarray) -> np.ndarray:
    """Return the corners of rectangles, counter-clockwise, [n, 4, 2]."""
    half = 0.5 * boxes[:, None, 3:5] * ((1, 1), (-1, 1), (-1, -1), (1, -1))
    cos, sin = np.cos(boxes[:, 6:]), np.sin(boxes[:, 6:])
    return boxes[:, None, :2] + np.stack([half[..., 0] * cos - half[..., 1] * sin,
                                          half[..., 0] * sin + half[..., 1] * cos], axis=2)


def _inside(points: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Return bool [n, m]: points [n, m, 2] in the rectangles of boxes [n, 7]."""
    dx, dy = np.moveaxis(points - boxes[:, None, :2], 2, 0)
    cos, sin = np.cos(boxes[:, 6:]), np.sin(boxes[:, 6:])
    return ((np.abs(dx * cos + dy * sin) <= boxes[:, 3:4] / 2 + 1e-9)
            & (np.abs(dy * cos - dx * sin) <= boxes[:, 4:5] / 2 + 1e-9))


def _intersections(box: np.ndarray, corners: np.ndarray, boxes: np.ndarray,
                   others: np.ndarray) -> np.ndarray:
    """Return the area that a rectangle shares with each of others, [n]."""
    n = len(boxes)
    mine = np.broadcast_to(corners, (n, 4, 2))
    start_a, side_a = mine[:, :, None], (np.roll(corners, -1, 0) - corners)[None, :, None]
    start_b, side_b = others[:, None], (np.roll(others, -1, 1) - others)[:, None]
    gap = start_b - start_a
    cross = side_a[..., 0] * side_b[..., 1] - side_a[..., 1] * side_b[..., 0]
    with np.errstate(divide='ignore', invalid='ignore'):
        t = (gap[..., 0] * side_b[..., 1] - gap[..., 1] * side_b[..., 0]) / cross
        u = (gap[..., 0] * side_a[..., 1] - gap[..., 1] * side_a[..., 0]) / cross
        meets = (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
        crossings = start_a + t[..., None] * side_a
    points = np.concatenate([mine, others, crossings.reshape(n, 16, 2)], axis=1)
    valid = np.concatenate([_inside(mine, boxes), _inside(others, np.broadcast_to(box, (n, 7))),
                            meets.reshape(n, 16)], axis=1)
    count = valid.sum(axis=1)
    points = np.where(valid[..., None], points, 0.0)
    points = points - points.sum(axis=1, keepdims=True) / np.maximum(count, 1)[:, None, None]
    angle = np.where(valid, np.arctan2(points[..., 1], points[..., 0]), np.inf)
    points = np.take_along_axis(points, np.argsort(angle, axis=1)[..., None], axis=1)
    # Behind the last corner the first one stands again, and adds nothing.
    points = np.where(np.arange(24)[None, :, None] < count[:, None, None], points, points[:, :1])
    after = np.roll(points, -1, axis=1)
    return 0.5 * np.abs((points[..., 0] * after[..., 1] - points[..., 1] * after[..., 0]).sum(1))


# spconv


@contextmanager
def spconv_threads(threads: int) -> Iterator[None]:
    """Set the number of threads of spconv's CPU code, which has an OpenMP library of its own.

    With more than one, rows of its results may be wrong.
    """
    import spconv
    libraries = [ctypes.CDLL(str(path)) for path in
                 (Path(spconv.__file__).parents[1] / 'spconv.libs').glob('libgomp*')]
    before = [library.omp_get_max_threads() for library in libraries]
    for library in libraries:
        library.omp_set_num_threads(threads)
    try:
        yield
    finally:
        for library, count in zip(libraries, before, strict=True):
            library.omp_set_num_threads(count)


def spconv_voxelizer(grid: GridConfig) -> Callable[[np.ndarray], int]:
    """Return a function that voxelizes points and returns the number of voxels; no means."""
    from cumm import tensorview as tv
    from spconv.utils import Point2VoxelCPU3d
    generator = Point2VoxelCPU3d(list(grid.voxel_size), list(grid.point_cloud_range),
                                 grid.num_features, grid.max_voxels, grid.max_points_per_voxel)

    def voxelize(points: np.ndarray) -> int:
        return generator.point_to_voxel(tv.from_numpy(points))[0].shape[0]

    return voxelize


def spconv_indice_pairs(network: NetworkConfig) -> Callable[[np.ndarray], list[int]]:
    """Return a function from coords_xyz int32 [n, 3] to the rows of all levels.

    It builds the 8 distinct rulebooks.
    """
    import torch
    from spconv.core import ConvAlgo
    from spconv.pytorch.ops import get_indice_pairs

    def pairs(indices: Any, shape: Sequence[int], kernel: tuple, stride: tuple, padding: tuple,
              subm: bool) -> Any:
        return get_indice_pairs(indices, 1, list(shape), ConvAlgo.Native, list(kernel),
                                list(stride), list(padding), [1] * 3, [0] * 3, subm)[0]

    def build(coords_xyz: np.ndarray) -> list[int]:
        indices = torch.from_numpy(np.pad(coords_xyz, ((0, 0), (1, 0))))
        rows = [len(indices)]
        for shape, strided in zip(network.level_shapes_xyz, _STRIDED, strict=False):
            pairs(indices, shape, (3, 3, 3), (1, 1, 1), (1, 1, 1), True)
            indices = pairs(indices, shape, *strided, False)
            rows.append(len(indices))
        return rows

    return build


def spconv_encoder(network: NetworkConfig, state: dict[str, np.ndarray]) -> Callable[..., Any]:
    """Return the sparse encoder of a folded network: (features, coords_xyz) -> sparse tensor."""
    import spconv.pytorch as spconv
    import torch
    from spconv.core import ConvAlgo

    def conv(name: str, key: str, strided: tuple | None = None) -> Callable[[Any], Any]:
        weight = torch.from_numpy(state[f'pts_middle_encoder.{name}.weight'])
        bias = torch.from_numpy(state[f'pts_middle_encoder.{name}.bias'])
        kernel, stride, padding = strided or ((3, 3, 3), (1, 1, 1), (1, 1, 1))
        kind = spconv.SparseConv3d if strided else spconv.SubMConv3d
        layer = kind(weight.shape[-1], weight.shape[0], kernel, stride, padding, bias=False,
                     indice_key=key, algo=ConvAlgo.Native)
        layer.weight.data = weight

        def apply(x: Any) -> Any:
            y = layer(x)
            return y.replace_feature(y.features.add_(bias))

        return apply

    first = conv('conv_input.0', 'same1')
    levels = []
    for level, strided in enumerate(_STRIDED, 1):
        stem = f'encoder_layers.encoder_layer{level}'
        blocks = [[conv(f'{stem}.{block}.conv{i}', f'same{level}') for i in (1, 2)]
                  for block in (0, 1)]
        down = f'{stem}.2.0' if level < 4 else 'conv_out.0'
        levels.append((blocks, conv(down, f'down{level}', strided)))

    def relu(x: Any) -> Any:
        return x.replace_feature(x.features.relu_())

    def encode(features: Any, coords_xyz: np.ndarray) -> Any:
        indices = torch.from_numpy(np.pad(coords_xyz, ((0, 0), (1, 0))))
        with torch.inference_mode():
            x = relu(first(spconv.SparseConvTensor(features, indices,
                                                   list(network.spatial_shape_xyz), 1)))
            for blocks, down in levels:
                for conv1, conv2 in blocks:
                    y = conv2(relu(conv1(x)))
                    x = relu(y.replace_feature(y.features.add_(x.features)))
                x = relu(down(x))
        return x

    return encode


# onnxruntime


def onnxruntime_dense(net: Any, grid: GridConfig, threads: int) -> Callable[[np.ndarray], list]:
    """Return the dense part of an unfolded network: map float32 [1, C, X, Y] -> outputs.

    It is cut out of the file that :mod:`tt_perception.bevfusion.export` writes.
    """
    import onnx
    import onnxruntime

    from tt_perception.bevfusion.export import write_onnx
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'network.onnx'
        write_onnx(net, path, grid=grid)
        model = onnx.load(path)
    graph = model.graph
    bev = next(node.input[0] for node in graph.node
               if node.name == '/pts_backbone/blocks.0/blocks.0.0/Conv')
    maker = {name: node for node in graph.node for name in node.output}
    needed, wanted = set(), [output.name for output in graph.output]
    while wanted:
        node = maker.get(wanted.pop())
        if node is not None and node.name not in needed:
            needed.add(node.name)
            wanted += [name for name in node.input if name != bev]
    nodes = [node for node in graph.node if node.name in needed]
    used = {name for node in nodes for name in node.input}
    size_z = net.config.level_shapes_xyz[-1][2]
    shape = [1, net.config.bev_channels * size_z, *net.config.feature_map_xy]
    part = onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes, 'dense', [onnx.helper.make_tensor_value_info(bev, onnx.TensorProto.FLOAT,
                                                                shape)],
            list(graph.output), [t for t in graph.initializer if t.name in used]),
        opset_imports=model.opset_import, ir_version=model.ir_version)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(part.SerializeToString(), options,
                                           providers=['CPUExecutionProvider'])
    return lambda x: session.run(['bbox_pred', 'score', 'label_pred'], {bev: x})
