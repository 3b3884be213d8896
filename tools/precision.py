# SPDX-License-Identifier: Apache-2.0
"""Measure what each choice of numbers costs in accuracy, by rounding the reference network.

    python tools/precision.py [--weights ARTIFACT] [--clouds N]

Operands and results of convolutions and linear layers are rounded as each choice says; sums stay
float32. Objects are compared with those of the network that rounds nothing. This tells which
choice can meet the bounds; it does not model the matrix unit's sums.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tt_perception.bevfusion.artifact import resolve
from tt_perception.bevfusion.config import BEVFusionConfig
from tt_perception.bevfusion.detections import Detections3D, RawDetections
from tt_perception.bevfusion.fold import fold_norms
from tt_perception.bevfusion.postprocess import finish
from tt_perception.bevfusion.reference import Attention, BEVFusionNet, SparseConv
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.seeded import grid_of, seeded_cloud, seeded_network
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.bevfusion.weights import read_onnx
from tt_perception.runtime.model import StageClock
from tt_perception.runtime.threads import let_idle_threads_sleep

BOUNDS = {'centre (m)': 0.05, 'yaw (rad)': 0.02, 'score': 0.01}
_EXACT = 23


class Rounding(NamedTuple):
    """Explicit bits of mantissa that are left.

    :ivar truncates: operands are cut off, not rounded, as the matrix unit does with float32.
    """

    weights: int = _EXACT
    operands: int = _EXACT
    results: int = _EXACT
    truncates: bool = False


BFLOAT16 = Rounding(7, 7, 7)
TF32 = Rounding(10, 10)
FLOAT32 = Rounding(10, 10, truncates=True)  # as the matrix unit takes it
PAIRS = Rounding(15, 15, 15)
_DECODER = ('bbox_head.decoder', 'bbox_head.prediction_heads')


def only(begin: str | tuple[str, ...], there: Rounding,
         elsewhere: Rounding) -> Callable[[str], Rounding]:
    """Return a choice for the blocks whose names begin so, and one for the others."""
    return lambda name: there if name.startswith(begin) else elsewhere


CHOICES: dict[str, tuple[Callable[[str], Rounding], int]] = {  # and the bits of attention
    'bfloat16 everywhere': (only('', BFLOAT16, BFLOAT16), 7),
    'weights as pairs, activations bfloat16': (only('', Rounding(15, 7, 7), PAIRS), 7),
    'weights bfloat16, activations as pairs': (only('', Rounding(7, 15, 15), PAIRS), 7),
    'float32 tensors, cut to tf32 by the matrix unit': (only('', FLOAT32, FLOAT32), 7),
    'tf32, rounded instead of cut': (only('', TF32, TF32), 7),
    'sparse encoder tf32, rounded; else as chosen': (
        lambda name: TF32 if name.startswith('pts_middle_encoder') else _chosen(name), 7),
    'backbone, neck, heat map tf32, rounded; else as chosen': (
        lambda name: TF32 if not name.startswith(('pts_middle_encoder', *_DECODER))
        else _chosen(name), 7),
    'pairs; decoder and heads bfloat16': (only(_DECODER, BFLOAT16, PAIRS), 7),
    'as chosen: pairs; decoder and heads float32, attention bfloat16': (
        only(_DECODER, FLOAT32, PAIRS), 7),
    'pairs everywhere, attention float32': (only('', PAIRS, PAIRS), _EXACT),
}


def _chosen(name: str) -> Rounding:
    return FLOAT32 if name.startswith(_DECODER) else PAIRS


def keep_bits(values: Tensor, bits: int, truncates: bool = False) -> Tensor:
    """Return float32 values with as many explicit bits of mantissa."""
    if bits >= _EXACT:
        return values
    drop = _EXACT - bits
    raw = values.contiguous().view(torch.int32)
    if not truncates:
        raw = raw + (1 << (drop - 1)) - 1 + (raw >> drop & 1)
    return (raw >> drop << drop).view(torch.float32)


def rounded(net: BEVFusionNet, choice: Callable[[str], Rounding]) -> BEVFusionNet:
    """Return a copy of a folded network that rounds."""
    net = copy.deepcopy(net)
    for name, parameter in net.named_parameters():
        if parameter.ndim > 1:
            bits = choice(name)
            parameter.data.copy_(keep_bits(parameter.data, bits.weights, bits.truncates))
    layers = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear, SparseConv, Attention)
    for name, module in net.named_modules():
        if isinstance(module, layers):
            bits = choice(name)
            module.register_forward_pre_hook(lambda _, args, bits=bits: tuple(
                keep_bits(arg, bits.operands, bits.truncates) if torch.is_tensor(arg) else arg
                for arg in args))
            module.register_forward_hook(
                lambda _, args, out, bits=bits: keep_bits(out, bits.results))
    return net


def attention(bits: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a scaled dot-product attention that rounds its operands and probabilities."""
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (keep_bits(t, bits) for t in (query, key, value))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        weights = keep_bits((scores - scores.amax(-1, keepdim=True)).exp(), bits)
        return keep_bits(weights @ value / weights.sum(-1, keepdim=True), bits)
    return attend


class Frame:
    """A seeded cloud of two sweeps, ready for the network."""

    def __init__(self, net: BEVFusionNet, seed: int) -> None:
        grid = grid_of(net.config)
        rng = np.random.default_rng(seed)
        xyz = seeded_cloud(145_000, seed)
        lag = rng.choice((0.0, 0.1), (len(xyz), 1))
        voxels = Voxelizer(grid)(np.hstack([xyz, lag]).astype(np.float32))
        self.rulebooks = RulebookBuilder(net.config)(voxels.coords_zyx)
        self.features = torch.from_numpy(voxels.features[self.rulebooks.order])
        self.config = BEVFusionConfig.from_parameters({})

    def objects(self, net: BEVFusionNet) -> tuple[Detections3D, set[int]]:
        """Return the objects that a network finds, and the cells of its proposals."""
        with torch.inference_mode():
            blocks = net.forward_blocks(self.features, self.rulebooks)
        raw = RawDetections(*(blocks[k].numpy() for k in ('bbox_pred', 'score', 'label_pred')))
        return (finish(raw, self.config, {}, StageClock()),
                set(blocks['bbox_head.proposals'].tolist()))


def errors(expected: Detections3D, found: Detections3D) -> np.ndarray:
    """Return error of centre, yaw and score of each expected object, float64 [n, 3].

    Its counterpart is the nearest object of the same label; without one the errors are infinite.
    """
    rows = np.full((len(expected), 3), np.inf)
    for row, box, label, score in zip(rows, expected.boxes_xyzlwh_yaw, expected.labels,
                                      expected.scores, strict=True):
        same = np.flatnonzero(found.labels == label)
        if len(same):
            away = np.linalg.norm(found.boxes_xyzlwh_yaw[same, :2] - box[:2], axis=1)
            i = same[away.argmin()]
            turn = found.boxes_xyzlwh_yaw[i, 6] - box[6]
            row[:] = (away.min(), abs((turn + np.pi) % (2 * np.pi) - np.pi),
                      abs(found.scores[i] - score))
    return rows


def measure(net: BEVFusionNet, seeds: Sequence[int]) -> None:
    """Print a line for each choice."""
    frames = [Frame(net, seed) for seed in seeds]
    exact = [frame.objects(net) for frame in frames]
    print(f'{sum(len(objects) for objects, _ in exact)} objects in {len(frames)} seeded clouds\n')
    print('| numbers | objects within bounds | same proposals | '
          + ' | '.join(f'{name}, 99 %' for name in BOUNDS) + ' |\n|---|---|---|---|---|---|')
    usual = F.scaled_dot_product_attention
    for name, (choice, attention_bits) in CHOICES.items():
        other = rounded(net, choice)
        F.scaled_dot_product_attention = attention(attention_bits)
        try:
            found = [frame.objects(other) for frame in frames]
        finally:
            F.scaled_dot_product_attention = usual
        rows = np.concatenate([errors(a[0], b[0]) for a, b in zip(exact, found, strict=True)])
        within = (rows < list(BOUNDS.values())).all(axis=1).mean()
        shared = np.mean([len(a[1] & b[1]) / len(a[1]) for a, b in zip(exact, found, strict=True)])
        print(f'| {name} | {within:.1%} | {shared:.1%} | '
              + ' | '.join(f'{q:.4f}' for q in np.quantile(rows, 0.99, axis=0)) + ' |', flush=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--weights', help='artifact folder or .onnx file; by default seeded ones')
    parser.add_argument('--clouds', type=int, default=2, help='how many seeded clouds')
    args = parser.parse_args()
    let_idle_threads_sleep()
    if args.weights:
        weights = read_onnx(resolve(args.weights).onnx)
        config, arrays = weights.config, weights.arrays
    else:
        seeded = seeded_network()
        config = seeded.config
        arrays = fold_norms({k: v.numpy() for k, v in seeded.state_dict().items()}, config)
    net = BEVFusionNet(config, folded=True)
    net.load_state_dict({k: torch.from_numpy(v) for k, v in arrays.items()})
    measure(net.eval(), range(1, 1 + args.clouds))
    return 0


if __name__ == '__main__':
    sys.exit(main())
