# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the device's graph without a device: it runs on golden functions.

Everything is as on the card, from voxels on: the host's tables and pairs, the graph's code, what
is read back. Only ttnn and the two kernels are functions of torch that round as they do. Backend
``cpu`` says what is right.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import golden_ttnn
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden_gatherconv import join_pairs
from golden_ttnn import Tensor, golden_graph
from recordings import argoverse_sweeps, kitti_points, nuscenes_points
from tiny_nets import numpy_state

from tt_perception.bevfusion.artifact import ONNX
from tt_perception.bevfusion.config import BEVFusionConfig, NetworkConfig
from tt_perception.bevfusion.cpu import CpuInputs
from tt_perception.bevfusion.densify import Densifier, Sweep
from tt_perception.bevfusion.detections import RawDetections
from tt_perception.bevfusion.fold import BOX_BRANCHES, fold_norms
from tt_perception.bevfusion.postprocess import finish
from tt_perception.bevfusion.reference import BEVFusionNet
from tt_perception.bevfusion.seeded import grid_of, seeded_cloud, seeded_network, small_config
from tt_perception.bevfusion.voxelize import Voxelizer, Voxels
from tt_perception.bevfusion.weights import NetworkWeights, read_onnx
from tt_perception.runtime.model import StageClock

SMALL = small_config()[1]
# Sums of a frame's objects are not whole percents: one object of fewer than 100 may be off.
BOUNDS = {'position': 0.05, 'size': 0.05, 'yaw': 0.02, 'score': 0.01}  # m, m, rad


# The graph and the reference side by side


class GoldenNetwork:
    """The graph on golden functions, with the host's side of backend ``tt``."""

    def __init__(self, weights: NetworkWeights, *, pairs: bool = True) -> None:
        with golden_graph(pairs=pairs) as module:
            from tt_perception.bevfusion.tt.backend import Staging, TtInputs
            self._ttnn = sys.modules['ttnn']
            self._module = module
            self._num_proposals = weights.config.num_proposals
            self._graph = module.BEVFusionGraph(weights)
            self._graph.allocate(self._ttnn.Device())
            stagings = queue.SimpleQueue()
            stagings.put(Staging(self._graph.layouts, weights.config.in_channels))
            self.inputs = TtInputs(weights.config, self._graph.layouts, stagings)

    def run(self, keep: Callable[[str, Tensor], None]) -> RawDetections:
        """Run a frame that is in ``inputs``; call ``keep`` with each block on the way."""
        device = self._graph.inputs(self.inputs.variant)
        assert device.keys() == self.inputs.upload.keys()
        for name, buffer in self.inputs.upload.items():
            self._ttnn.copy_host_to_device_tensor(buffer.tensor, device[name])
        self._graph.forward(self.inputs.variant, keep)
        self.inputs.discard()
        packed = self._graph.forward(self._module.DENSE, keep)
        return self._module.unpack(self._ttnn.to_torch(packed).numpy(), self._num_proposals)


@dataclass
class Comparison:
    """What the graph and the reference found in a frame.

    :ivar variant: of the graph.
    :ivar expected: blocks of the reference.
    :ivar found: blocks of the graph, in the form of the reference's.
    :ivar proposals: of the graph, int64 [K], indices as in the reference's block.
    :ivar raw, raw_expected: what is handed to post-processing.
    """

    config: NetworkConfig
    variant: str
    expected: dict[str, torch.Tensor]
    raw: RawDetections
    raw_expected: RawDetections
    proposals: torch.Tensor
    found: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def common(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of common proposals, in the graph's order and in the reference's."""
        here = self.proposals[:, None] == self.expected['bbox_head.proposals']
        return here.nonzero(as_tuple=True)


def compare(network: GoldenNetwork, net: BEVFusionNet, voxels: Voxels) -> Comparison:
    """Run a frame through both."""
    config = net.config
    cpu = CpuInputs(config)
    num_rows = cpu.fill(voxels, StageClock())
    assert network.inputs.fill(voxels, StageClock()) == num_rows
    with torch.inference_mode():
        expected = net.forward_blocks(torch.from_numpy(cpu.features), cpu.rulebooks)
    found: dict[str, torch.Tensor] = {}
    raw = network.run(lambda name, tensor: found.__setitem__(name, in_form_of(
        expected.get(name), tensor.value, name, config)))
    raw_expected = RawDetections(*(expected[name].numpy() for name in (
        'bbox_pred', 'score', 'label_pred')))
    return Comparison(config, network.inputs.variant, expected, raw, raw_expected,
                      found.pop('bbox_head.proposals'), found)


def in_form_of(expected: torch.Tensor, value: torch.Tensor, name: str,
               config: NetworkConfig) -> torch.Tensor:
    """Return a block of the graph in the form of the reference's, a copy."""
    x, y = config.feature_map_xy
    if name == 'bbox_head.proposals':
        columns = value[:config.num_proposals, 1:4].long()
        return (columns[:, 2] * x + columns[:, 0]) * y + columns[:, 1]
    if name == 'bbox_head.heatmap_head':
        return value[:, :config.num_classes].T.reshape(expected.shape).clone()
    if name.startswith('bbox_head.') and name != 'bbox_head.shared_conv':
        return value.flatten(0, -2)[:config.num_proposals].clone()
    rows = join_pairs(value[:len(expected)] if expected.ndim == 2 else value)
    if name.endswith('.bev'):  # z * C + c, and the reference has c * Z + z
        rows = rows.unflatten(1, (-1, config.bev_channels)).transpose(1, 2).flatten(1)
    if expected.ndim == 2:
        return rows[:, :expected.shape[1]].clone()
    return rows.T.reshape(expected.shape).clone()


def correlation(found: torch.Tensor, expected: torch.Tensor) -> float:
    both = torch.stack([found.flatten(), expected.flatten()]).double()
    return float(torch.corrcoef(both)[0, 1])


def block_errors(result: Comparison) -> dict[str, tuple[float, float]]:
    """Return correlation and relative error (root mean square) of every block.

    Blocks with a row for each proposal are compared where both have the proposal.
    """
    ours, theirs = result.common
    values = {}
    for name, found in result.found.items():
        expected = result.expected[name]
        if name.startswith('bbox_head.') and expected.ndim == 2:
            found, expected = found[ours], expected[theirs]
        values[name] = (found, expected)
    box = result.raw.bbox_pred, result.raw_expected.bbox_pred
    for i, name in enumerate(('x', 'y', 'z', 'length', 'width', 'height', 'sin', 'cos', 'vx',
                              'vy')):
        values[f'bbox_pred.{name}'] = (torch.from_numpy(box[0][i])[ours],
                                       torch.from_numpy(box[1][i])[theirs])
    values['score'] = (torch.from_numpy(result.raw.score)[ours],
                       torch.from_numpy(result.raw_expected.score)[theirs])
    return {name: (correlation(found, expected),
                   float((found - expected).norm() / expected.norm()))
            for name, (found, expected) in values.items()}


def differing_proposals(result: Comparison) -> tuple[list[int], list[int]]:
    """Return the proposals that only one side has, and those of them that are no near-ties.

    A near-tie is within two steps of bfloat16 of what decides: the last proposal's value, or the
    greatest of the neighbours', which suppresses it.
    """
    config = result.config
    heat = result.expected['bbox_head.heatmap_head'][0].sigmoid()
    neighbours = F.pad(heat, (1, 1, 1, 1), value=-1.0).unfold(1, 3, 1).unfold(2, 3, 1).flatten(3)
    around = torch.cat([neighbours[..., :4], neighbours[..., 5:]], -1).amax(-1).flatten()
    expected = result.expected['bbox_head.proposals']
    last = result.expected['bbox_head.heatmap'].flatten()[expected].min()
    differing = sorted({*expected.tolist()} ^ {*result.proposals.tolist()})
    cells = heat[0].numel()
    wrong = []
    for index in differing:
        value = heat.flatten()[index]
        limits = [last, around[index]] if index // cells in config.pooled_classes else [last]
        step = 2.0 ** (torch.frexp(value).exponent.item() - 8)
        if min(abs(value - limit) for limit in limits) > 2 * step:
            wrong.append(index)
    return differing, wrong


def object_errors(result: Comparison, config: BEVFusionConfig) -> dict[str, np.ndarray]:
    """Match finished objects of one class, nearest first; return errors, inf without a match."""
    ours, theirs = (finish(raw, config) for raw in (result.raw, result.raw_expected))
    a, b = ours.boxes_xyzlwh_yaw, theirs.boxes_xyzlwh_yaw
    distance = np.linalg.norm(a[:, None, :2] - b[None, :, :2], axis=2)
    distance[ours.labels[:, None] != theirs.labels] = np.inf
    num = max(len(a), len(b))
    errors = {name: np.full(num, np.inf) for name in BOUNDS}
    for k in range(min(len(a), len(b))):
        i, j = np.unravel_index(np.argmin(distance), distance.shape)
        if not np.isfinite(distance[i, j]):
            break
        turn = a[i, 6] - b[j, 6]
        errors['position'][k] = np.abs(a[i, :3] - b[j, :3]).max()
        errors['size'][k] = np.abs(a[i, 3:6] - b[j, 3:6]).max()
        errors['yaw'][k] = abs((turn + np.pi) % (2 * np.pi) - np.pi)
        errors['score'][k] = abs(ours.scores[i] - theirs.scores[j])
        distance[i], distance[:, j] = np.inf, np.inf
    return errors


def share_within_bounds(errors: dict[str, np.ndarray]) -> float:
    return float(np.all([errors[name] <= bound for name, bound in BOUNDS.items()], axis=0).mean())
