# SPDX-License-Identifier: Apache-2.0
"""Run the lidar detector with real kernels on the Blackhole functional simulator.

    TT_METAL_SIMULATOR=.../libttsim_bh.so python tools/simulate.py [blocks] [traces] [node]

``blocks`` compares every block of the network with backend ``cpu``; ``traces`` replays captured
traces over ten frames and two capacity buckets and compares them with the operations run one by
one, bit for bit; ``node`` has the ROS node answer clouds. See docs/simulator.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from tt_perception.bevfusion.config import BEVFusionConfig
    from tt_perception.bevfusion.detections import Detections3D
    from tt_perception.bevfusion.tt.backend import TtInputs
    from tt_perception.bevfusion.voxelize import Voxels
    from tt_perception.bevfusion.weights import NetworkWeights
    from tt_perception.runtime.device import Device

CHECKOUT = Path(__file__).resolve().parents[1]
STEPS = ('blocks', 'traces', 'node')

LEAST_CORRELATION = 0.999
BOUNDS = {'centre': 0.05, 'yaw': 0.02, 'score': 0.01}  # m, rad, 1
# Logits of the heat map that are closer than this may change places among the best ones.
TIE_LOGITS = 0.005

CAPACITIES = ((512, 512, 256, 128), (2048, 2048, 1024, 512))
# Points of the frames; those of up to 250 points fit into the first bucket.
BLOCK_FRAMES = (220, 1000)
TRACE_FRAMES = (100, 1000, 130, 160, 1050, 190, 220, 1100, 1150, 250)
NODE_FRAMES = (150, 180)

TIMEOUT_S = 3600.0  # of whatever takes milliseconds on a card
TRACE_REGION_BYTES = 64 << 20
# Blocks of the reference that the graph has in another form, and where they are compared.
ELSEWHERE = {
    'pts_middle_encoder.conv_out': 'its rows are cells of `pts_middle_encoder.bev`',
    'pts_neck': 'its halves, `pts_neck.deblocks`, are never joined',
    'bbox_head.heatmap': 'only its best cells are looked for: `bbox_head.proposals`',
    'bbox_head.decoder.0.cross_posembed': 'the same in every frame, so it is part of the weights',
    'bbox_head.prediction_heads.0.heatmap': 'a factor of `score`',
    'bbox_pred': 'the branches of `bbox_head.prediction_heads`, joined',
    'label_pred': 'part of the proposals',
}
# Columns of the output.
_BRANCHES = 'bbox_head.prediction_heads.0'
_OUTPUTS = {f'{_BRANCHES}.center': slice(0, 2), f'{_BRANCHES}.height': slice(2, 3),
            f'{_BRANCHES}.dim': slice(3, 6), f'{_BRANCHES}.rot': slice(6, 8),
            f'{_BRANCHES}.vel': slice(8, 10), 'score': slice(10, 11)}


# ---- what is run ----

@dataclass(frozen=True)
class Network:
    """A small network of the release's topology, with seeded weights.

    :ivar artifact: folder in the form of the release.
    """

    artifact: Path
    config: BEVFusionConfig
    weights: NetworkWeights

    @classmethod
    def write(cls, artifact: Path) -> Network:
        """Make it, write it, and read it back as a user's model would be."""
        from tt_perception.bevfusion.config import (
            BEVFusionConfig,
            known_parameters,
            read_parameter_file,
        )
        from tt_perception.bevfusion.seeded import (
            grid_of,
            seeded_network,
            small_config,
            write_artifact,
        )
        from tt_perception.bevfusion.weights import read_onnx
        sizes = small_config()[1]
        onnx, ml_package, remapper = write_artifact(seeded_network(sizes), grid_of(sizes),
                                                    artifact)
        config = BEVFusionConfig.from_parameters(known_parameters(
            {**read_parameter_file(ml_package), **read_parameter_file(remapper)}))
        return cls(artifact, config, read_onnx(onnx))

    def points(self, number: int, seed: int) -> np.ndarray:
        """Return a seeded cloud inside the grid, float32 [n, 3]."""
        from tt_perception.bevfusion.seeded import seeded_cloud
        points = seeded_cloud(number, seed)
        low, high = self.config.grid.point_cloud_range[:2], self.config.grid.point_cloud_range[3:5]
        return points[((points[:, :2] > low) & (points[:, :2] < high)).all(axis=1)]

    def voxels(self, points: np.ndarray) -> Voxels:
        """Return the voxels of one sweep."""
        from tt_perception.bevfusion.voxelize import Voxelizer
        return Voxelizer(self.config.grid)(np.pad(points, ((0, 0), (0, 1))))


class Graph:
    """The network's graph on an open device, and the frames that it is given."""

    def __init__(self, network: Network) -> None:
        from tt_perception.bevfusion.tt.backend import Staging
        from tt_perception.bevfusion.tt.graph import BEVFusionGraph
        self.graph = BEVFusionGraph(network.weights, CAPACITIES)
        self._sizes = network.weights.config
        self._stagings: SimpleQueue = SimpleQueue()
        self._stagings.put(Staging(self.graph.layouts, self._sizes.in_channels))

    def frame(self, voxels: Voxels) -> tuple[TtInputs, tuple[int, ...]]:
        """Return a frame as it is uploaded, and its active rows; to be discarded afterwards."""
        from tt_perception.bevfusion.tt.backend import TtInputs
        from tt_perception.runtime.model import StageClock
        inputs = TtInputs(self._sizes, self.graph.layouts, self._stagings)
        return inputs, inputs.fill(voxels, StageClock())


def open_device() -> Device:
    """Return the simulated chip."""
    from tt_perception.runtime.device import Device
    return Device(dispatch='worker', trace_region_size=TRACE_REGION_BYTES)


# ---- results ----

@dataclass
class Report:
    """Outcome of one step.

    :ivar lines: of a Markdown table.
    :ivar failures: one line each.
    :ivar skipped: why nothing was run.
    """

    title: str
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: str = ''

    def columns(self, *names: str) -> None:
        """Begin a table."""
        self.row(*names)
        self.row(*('---' for _ in names))

    def row(self, *cells: Any) -> None:
        """Add a line."""
        self.lines.append('| ' + ' | '.join(map(str, cells)) + ' |')

    def check(self, holds: bool, otherwise: str) -> None:
        """Note a failure, unless something holds."""
        if not holds:
            self.failures.append(otherwise)
            say(f'FAILED: {otherwise}')

    def markdown(self) -> str:
        """Return the table."""
        body = [f'Skipped: {self.skipped}'] if self.skipped else self.lines
        return '\n'.join([f'### {self.title}', '', *body, *(
            ['', *(f'* FAILED: {text}' for text in self.failures)] if self.failures else [])])


@dataclass(frozen=True)
class Difference:
    """How far a block is from the reference."""

    correlation: float
    relative: float
    greatest: float

    @classmethod
    def of(cls, found: Tensor, expected: Tensor) -> Difference:
        """Compare two tensors of one shape."""
        import torch
        if found.shape != expected.shape:
            raise AssertionError(f'shape: found {tuple(found.shape)}, expected '
                                 f'{tuple(expected.shape)}')
        both = torch.stack([found.flatten().double(), expected.flatten().double()])
        rest = both[0] - both[1]
        return cls(float(torch.corrcoef(both)[0, 1]), float(rest.norm() / both[1].norm()),
                   float(rest.abs().max()))

    def worse(self, other: Difference) -> Difference:
        """Return the worse of both in each measure."""
        return Difference(min(self.correlation, other.correlation),
                          max(self.relative, other.relative), max(self.greatest, other.greatest))


@dataclass
class ObjectDifferences:
    """How far objects are from those of backend ``cpu``.

    :ivar expected: how many there are.
    :ivar within: how many have a partner within all bounds.
    :ivar extra: objects without a partner.
    """

    expected: int
    within: int = 0
    extra: int = 0
    centre: float = 0.0
    yaw: float = 0.0
    score: float = 0.0

    @classmethod
    def of(cls, found: Detections3D, expected: Detections3D) -> ObjectDifferences:
        """Compare each object with the nearest one of its label."""
        result = cls(len(expected))
        left = list(range(len(found)))
        for i in range(len(expected)):
            candidates = [j for j in left if found.labels[j] == expected.labels[i]]
            if not candidates:
                continue
            apart = {j: float(np.linalg.norm(
                found.boxes_xyzlwh_yaw[j, :3] - expected.boxes_xyzlwh_yaw[i, :3]))
                for j in candidates}
            j = min(apart, key=apart.__getitem__)
            left.remove(j)
            turn = float(found.boxes_xyzlwh_yaw[j, 6] - expected.boxes_xyzlwh_yaw[i, 6])
            result._add(apart[j], abs(math.remainder(turn, 2 * math.pi)),
                        abs(float(found.scores[j] - expected.scores[i])))
        result.extra = len(left)
        return result

    def _add(self, centre: float, yaw: float, score: float) -> None:
        self.within += (centre <= BOUNDS['centre'] and yaw <= BOUNDS['yaw']
                        and score <= BOUNDS['score'])
        self.centre, self.yaw, self.score = (max(self.centre, centre), max(self.yaw, yaw),
                                             max(self.score, score))

    @property
    def holds(self) -> bool:
        """All objects are there, within the bounds, and no others."""
        return self.within == self.expected > 0 == self.extra

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        return (f'{self.within} of {self.expected}', f'{self.centre:.4f} m',
                f'{self.yaw:.4f} rad', f'{self.score:.4f}')


_OBJECT_COLUMNS = ('objects within the bounds', 'centre', 'yaw', 'score')


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, flush=True)


# ---- blocks ----

class BlockReader:
    """Reads blocks from the device in the form of the reference.

    :ivar differences: block -> how far it is from the reference.
    :ivar common_proposals: how many of the reference's proposals were found.
    """

    def __init__(self, network: Network, reference: dict[str, Tensor]) -> None:
        self._sizes = network.weights.config
        self._reference = reference
        self._order: list[int] = []  # the reference's row of each proposal
        self.differences: dict[str, Difference] = {}
        self.common_proposals = 0

    def keep(self, name: str, tensor: Any) -> None:
        """Compare the output of a block."""
        import ttnn
        expected = self._reference[name]
        rows = ttnn.to_torch(tensor).float()
        x, y = self._sizes.feature_map_xy
        if name == 'bbox_head.proposals':
            self._match(rows)
            return
        if name == 'bbox_head.heatmap_head':
            found = rows[:, :self._sizes.num_classes].T.reshape(expected.shape)
        elif name == 'pts_middle_encoder.bev':
            size_z = self._sizes.level_shapes_xyz[-1][2]
            found = _joined(rows).view(x, y, size_z, -1).permute(3, 2, 0, 1).reshape(
                expected.shape)
        elif name.startswith('pts_middle_encoder'):
            found = _joined(rows)[:len(expected), :expected.shape[1]]
        elif expected.ndim == 4:
            found = _joined(rows).T.reshape(expected.shape)
        else:
            found = rows.reshape(-1, expected.shape[1])[:len(expected)]
            expected = expected[self._order]
        self._note(name, found, expected)

    def keep_output(self, packed: Tensor) -> None:
        """Compare what the network returns, float32 [proposals in whole tiles, 32]."""
        packed = packed[:len(self._order)]
        for name, columns in _OUTPUTS.items():
            expected = self._reference[name][self._order]
            self._note(name, packed[:, columns].reshape(expected.shape), expected)

    def _note(self, name: str, found: Tensor, expected: Tensor) -> None:
        self.differences[name] = Difference.of(found, expected)
        say(f'  {name}: correlation {self.differences[name].correlation:.7f}')

    def _match(self, rows: Tensor) -> None:
        """Find the reference's place of each proposal; their order may differ."""
        x, y = self._sizes.feature_map_xy
        found = (rows[:, 3] * x * y + rows[:, 1] * y + rows[:, 2]).long()
        expected = self._reference['bbox_head.proposals'].tolist()
        place = {proposal: i for i, proposal in enumerate(expected)}
        found = found[:len(expected)].tolist()
        self._order = [place.get(proposal, 0) for proposal in found]
        self.common_proposals = len(set(found) & set(expected))


def _joined(pairs: Tensor) -> Tensor:
    """Return the values of pair rows [n, 2 * C]."""
    channels = pairs.shape[1] // 2
    return pairs[:, :channels] + pairs[:, channels:]


def run_blocks(network: Network) -> Report:
    """Compare every block with the reference, on a frame of each bucket."""
    report = Report('Blocks, against backend `cpu`')
    device = open_device()
    try:
        graph = Graph(network)
        device.call(lambda: graph.graph.allocate(device.handle))
        readers = [_read_blocks(network, graph, device, points, seed)
                   for seed, points in enumerate(BLOCK_FRAMES)]
        device.call(graph.graph.release)
    finally:
        device.close()
    first, *others = readers
    report.columns('block', 'correlation', 'relative error', 'greatest error')
    for name, difference in first.differences.items():
        for other in others:
            difference = difference.worse(other.differences[name])
        report.row(f'`{name}`', f'{difference.correlation:.7f}', f'{difference.relative:.1e}',
                   f'{difference.greatest:.1e}')
        report.check(difference.correlation >= LEAST_CORRELATION,
                     f'{name}: found correlation {difference.correlation:.6f}, expected at least '
                     f'{LEAST_CORRELATION}')
    number = network.weights.config.num_proposals
    common = [reader.common_proposals for reader in readers]
    report.row('`bbox_head.proposals`',
               ', '.join(f'{n} of {number} the same' for n in common), '', '')
    report.check(min(common) == number, f'proposals: found {common} in common with the '
                 f'reference, expected {number}')
    return report


def _read_blocks(network: Network, graph: Graph, device: Device, num_points: int,
                 seed: int) -> BlockReader:
    """Run one frame, operation by operation, and compare what comes out of each block."""
    from tt_perception.bevfusion.tt.graph import DENSE
    voxels = network.voxels(network.points(num_points, seed))
    reference = reference_blocks(network, voxels)
    inputs, rows = graph.frame(voxels)
    say(f'blocks: {num_points} points, active rows {rows[:4]}, {inputs.variant}')
    reader = BlockReader(network, reference)

    def forward() -> Tensor:
        import ttnn
        for name, buffer in inputs.upload.items():
            ttnn.copy_host_to_device_tensor(buffer.tensor,
                                            graph.graph.inputs(inputs.variant)[name])
        graph.graph.forward(inputs.variant, reader.keep)
        return ttnn.to_torch(graph.graph.forward(DENSE, reader.keep))

    reader.keep_output(device.call(forward))
    inputs.discard()
    missing = reference.keys() - reader.differences.keys() - ELSEWHERE.keys() - {
        'bbox_head.proposals'}
    if missing:
        raise AssertionError(f'blocks: found none named {", ".join(sorted(missing))}')
    return reader


def reference_blocks(network: Network, voxels: Voxels) -> dict[str, Tensor]:
    """Return the output of every block of the reference network."""
    import torch

    from tt_perception.bevfusion.reference import BEVFusionNet
    from tt_perception.bevfusion.rulebook import RulebookBuilder
    net = BEVFusionNet(network.weights.config, folded=True).eval()
    net.load_state_dict({k: torch.from_numpy(v) for k, v in network.weights.arrays.items()})
    rulebooks = RulebookBuilder(network.weights.config)(voxels.coords_zyx)
    with torch.inference_mode():
        return net.forward_blocks(torch.from_numpy(voxels.features[rulebooks.order]), rulebooks)


# ---- traces ----

@dataclass(frozen=True)
class Answer:
    """What the device returns of one frame.

    :ivar map_bits: the bird's-eye map after the sparse encoder.
    :ivar packed: the output, float32 [proposals, 32].
    """

    variant: str
    active_rows: tuple[int, ...]
    map_bits: np.ndarray
    packed: np.ndarray

    def equals(self, other: Answer) -> tuple[bool, bool]:
        """Return whether the maps and the outputs are the same bits."""
        return (np.array_equal(self.map_bits, other.map_bits),
                np.array_equal(self.packed.view(np.uint32), other.packed.view(np.uint32)))


def run_traces(network: Network) -> Report:
    """Replay captured traces over ten frames; each equals the operations run one by one."""
    from tt_perception.runtime.device import can_trace
    report = Report('Traces, against the same operations run one by one')
    if not can_trace():
        report.skipped = ('TT_METAL_SLOW_DISPATCH_MODE is set, and traces need fast dispatch; '
                          'unset it')
        return report
    frames = [network.voxels(network.points(number, seed))
              for seed, number in enumerate(TRACE_FRAMES)]
    device = open_device()
    try:
        eager = list(_answers(network, device, frames, traced=False))
        # The first frame once more: nothing is left over from those between.
        replayed = list(_answers(network, device, [*frames, frames[0]], traced=True))
    finally:
        device.close()
    report.columns('frame', 'active rows of levels 1 to 4', 'bucket', 'map', 'output',
                   'proposals of `cpu`', *_OBJECT_COLUMNS)
    for i, answer in enumerate(replayed):
        frame = i % len(frames)
        number = str(i + 1) if i < len(eager) else '1 again'
        same = answer.equals(eager[frame])
        common, differences = _against_cpu(network, answer, frames[frame], report, number)
        report.row(number, ', '.join(map(str, answer.active_rows[:4])), answer.variant[-1],
                   *('bits equal' if equal else 'DIFFERENT' for equal in same), common,
                   *differences.cells())
        report.check(all(same), f'frame {number}: found a replay with other bits, expected those '
                     'of the operations run one by one')
    report.check(len({answer.variant for answer in replayed}) == len(CAPACITIES),
                 'found frames of one bucket only, expected both')
    report.check(all(not np.array_equal(a.packed, b.packed) for i, a in enumerate(eager)
                     for b in eager[:i]), 'found frames with equal outputs, expected ten')
    return report


def _answers(network: Network, device: Device, frames: Sequence[Voxels],
             traced: bool) -> Iterable[Answer]:
    """Run frames through a runner of their own."""
    import torch

    from tt_perception.bevfusion.tt.graph import DENSE
    from tt_perception.runtime.trace import TraceRunner
    graph = Graph(network)
    runner = TraceRunner(graph.graph, device, traced=traced, timeout_s=TIMEOUT_S,
                         prepare_timeout_s=TIMEOUT_S, on_progress=lambda text: say(f'  {text}'))
    runner.prepare()
    for i, voxels in enumerate(frames, 1):
        start_s = time.monotonic()
        inputs, rows = graph.frame(voxels)
        runner.write(inputs.variant, inputs.upload)
        runner.replay(inputs.variant)
        map_bits = runner.read(inputs.variant).view(torch.int16).numpy()
        runner.replay(DENSE)
        packed = runner.read(DENSE).numpy()
        inputs.discard()
        say(f'traces: {"replay" if traced else "eager"} {i} of {len(frames)}, {inputs.variant}, '
            f'{time.monotonic() - start_s:.0f} s')
        yield Answer(inputs.variant, rows, map_bits, packed)
    runner.release()


def _against_cpu(network: Network, answer: Answer, voxels: Voxels, report: Report,
                 number: str) -> tuple[str, ObjectDifferences]:
    """Compare proposals and objects of a frame with those of the reference, and check them.

    Where the last proposals are too close to tell which ones are the best, others may be taken;
    then all objects change a little, as proposals look at one another, and are not checked.
    """
    from tt_perception.bevfusion.detections import RawDetections
    from tt_perception.bevfusion.postprocess import finish
    from tt_perception.bevfusion.tt.graph import unpack
    blocks = reference_blocks(network, voxels)
    expected = RawDetections(*(blocks[name].numpy()
                               for name in ('bbox_pred', 'score', 'label_pred')))
    found = unpack(answer.packed, network.weights.config.num_proposals)
    differences = ObjectDifferences.of(*(finish(raw, network.config)
                                         for raw in (found, expected)))
    common, gap = _proposals_in_common(network, answer, blocks)
    number_of_all = network.weights.config.num_proposals
    if common == number_of_all:
        report.check(differences.holds, f'frame {number}: found {differences}, expected all '
                     f'objects of backend cpu within {BOUNDS}')
        return f'{common} of {number_of_all}', differences
    report.check(gap <= TIE_LOGITS, f'frame {number}: found proposals that are worse by {gap:.4f} '
                 f'than those of backend cpu, expected at most {TIE_LOGITS} (logits)')
    return f'{common} of {number_of_all}, others {gap:.4f} below', differences


def _proposals_in_common(network: Network, answer: Answer,
                         blocks: dict[str, Tensor]) -> tuple[int, float]:
    """Return how many proposals are the reference's, and how much less likely the others are.

    That is the difference of logits, in the reference's heat map, between its best proposal that
    was left out and the worst one that was taken instead.
    """
    from tt_perception.bevfusion.tt.layout import Packed
    x, y = network.weights.config.feature_map_xy
    rows = answer.packed[:network.weights.config.num_proposals]
    found = {int(n) for n in (rows[:, Packed.LABEL] * x + rows[:, Packed.X]) * y
             + rows[:, Packed.Y]}
    expected = set(blocks['bbox_head.proposals'].tolist())
    logits = blocks['bbox_head.heatmap'].flatten().logit()
    missed, others = (logits[sorted(some)] for some in (expected - found, found - expected))
    gap = float(missed.max() - others.min()) if len(missed) else 0.0
    return len(expected & found), gap


# ---- node ----

STAMPS_NS = (1_700_000_000_000_000_000, 1_700_000_000_100_000_000)
POSES = (((0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)),  # metres; quaternion x, y, z, w
         ((0.6, -0.1, 0.0), (0.0, 0.0, math.sin(0.01), math.cos(0.01))))
FRAME, WORLD = 'base_link', 'map'


def run_node(network: Network) -> Report:
    """Have the node answer two clouds, the second one fused with the first."""
    report = Report('Node, `PointCloud2` in, `DetectedObjects` out')
    for module in ('rclpy', 'autoware_perception_msgs'):
        if find_spec(module) is None:
            report.skipped = f'{module} is not installed'
            return report
    sys.path.insert(0, str(CHECKOUT / 'test'))
    # Small clouds, so that the frames for warming up are small, too.
    parameters = {'densification_num_past_frames': 1, 'cloud_capacity': 400}
    points = [network.points(number, 20 + seed) for seed, number in enumerate(NODE_FRAMES)]
    answers = _ask_node(network, points, parameters)
    on_tt = _ask_model(network, points, backend='tt', timeout_s=TIMEOUT_S, **parameters)
    on_cpu = _ask_model(network, points, backend='cpu', **parameters)
    report.columns('cloud', 'points', 'past sweeps', 'voxels', 'message', *_OBJECT_COLUMNS)
    for i, (answer, found, expected) in enumerate(zip(answers, on_tt, on_cpu, strict=True), 1):
        same = answer == _message(found, STAMPS_NS[i - 1])
        differences = ObjectDifferences.of(found, expected)
        report.row(i, len(points[i - 1]), found.meta['num_sweeps'] - 1, found.meta['num_voxels'],
                   'equal' if same else 'DIFFERENT', *differences.cells())
        report.check(same, f'cloud {i}: found another message than that of the API with backend '
                     'tt, expected an equal one')
        report.check(differences.holds, f'cloud {i}: found {differences}, expected all objects '
                     f'of backend cpu within {BOUNDS}')
    return report


def _ask_node(network: Network, points: Sequence[np.ndarray],
              parameters: dict[str, Any]) -> list[Any]:
    """Return the answers of a node process."""
    from ros_process import Client, node_process, wait_until

    from tt_perception.ros.conversions import cloud_message, xyzirc
    client = Client()
    try:
        with node_process('tt_perception.ros.bevfusion_node:main', model_path=network.artifact,
                          backend='tt', timeout_s=TIMEOUT_S, autostart=True,
                          **parameters) as node:
            say('node: starting')
            node.wait_for_output('active:', TIMEOUT_S)
            say(node.output())
            client.wait_for_match()
            time.sleep(2.0)  # the node may learn of the publishers a little later
            for i, cloud in enumerate(points):
                client.send_transform(WORLD, FRAME, STAMPS_NS[i], *POSES[i])
                client.cloud_publisher.publish(cloud_message(
                    xyzirc(cloud), frame_id=FRAME, stamp_ns=STAMPS_NS[i]))
                wait_until(lambda i=i: len(client.objects) > i or not node.is_running(),
                           TIMEOUT_S, lambda: f'no answer\n{node.output()}')
                if len(client.objects) <= i:
                    raise AssertionError(f'the node has ended:\n{node.output()}')
                say(f'node: answer {i + 1} of {len(points)}, '
                    f'{len(client.objects[i].objects)} objects')
        return client.objects
    finally:
        client.close()


def _ask_model(network: Network, points: Sequence[np.ndarray],
               **options: Any) -> list[Detections3D]:
    """Return the answers of the Python API to the same clouds and poses."""
    from tt_perception import BEVFusion
    from tt_perception.ros.tf import TransformBuffer
    buffer = TransformBuffer()
    answers = []
    with BEVFusion.from_pretrained(network.artifact, **options) as model:
        for cloud, stamp_ns, pose in zip(points, STAMPS_NS, POSES, strict=True):
            buffer.insert(WORLD, FRAME, stamp_ns, *pose)
            answers.append(model(cloud, stream={
                'id': 'ego', 'timestamp_s': stamp_ns * 1e-9,
                'T_world_from_ego': buffer.lookup_matrix(WORLD, FRAME, stamp_ns)}))
            say(f'node: {model.info["backend"]} {len(answers)} of {len(points)}, '
                f'{len(answers[-1])} objects')
    return answers


def _message(detections: Detections3D, stamp_ns: int) -> Any:
    """Return what the node should have published."""
    from std_msgs.msg import Header

    from tt_perception.ros.conversions import DetectedObjectsWriter, ns_to_stamp
    header = Header(frame_id=FRAME, stamp=ns_to_stamp(stamp_ns))
    return DetectedObjectsWriter().write(header, detections)


# ---- the command ----

def reason_to_skip() -> str:
    """Return why there is nothing to run on here, or nothing."""
    simulator = os.environ.get('TT_METAL_SIMULATOR', '')
    if not simulator:
        return 'TT_METAL_SIMULATOR does not name a libttsim_bh.so, see docs/simulator.md'
    for path in (Path(simulator), Path(simulator).with_name('soc_descriptor.yaml')):
        if not path.is_file():
            return f'TT_METAL_SIMULATOR: there is no {path}'
    spec = find_spec('ttnn')
    if spec is None or not spec.submodule_search_locations:
        return f'ttnn is not installed for {sys.executable}'
    package = Path(next(iter(spec.submodule_search_locations)))
    root = Path(os.environ.get('TT_METAL_RUNTIME_ROOT') or package)
    places = (root / 'runtime' / 'sfpi', Path('/opt/tenstorrent/sfpi'))
    if not any((place / 'compiler' / 'bin' / 'riscv-tt-elf-g++').exists() for place in places):
        return f'ttnn has no compiler for kernels: there is no sfpi in {places[0]} or {places[1]}'
    return ''


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('steps', nargs='*', metavar='step', help=', '.join(STEPS)
                        + '; all of them by default')
    parser.add_argument('--markdown', type=Path, metavar='FILE', help='write the tables there too')
    given = parser.parse_args(arguments)
    if unknown := [step for step in given.steps if step not in STEPS]:
        parser.error(f'step: found {", ".join(unknown)}, expected some of {", ".join(STEPS)}')
    if reason := reason_to_skip():
        say(f'skipped: {reason}')
        return 0
    os.environ.setdefault('TT_METAL_DISABLE_SFPLOADMACRO', '1')  # the simulator has none
    sys.path.insert(0, str(CHECKOUT))
    with tempfile.TemporaryDirectory() as folder:
        network = Network.write(Path(folder))
        reports = [_run(step, network) for step in STEPS if step in (given.steps or STEPS)]
    text = '\n\n'.join(report.markdown() for report in reports) + '\n'
    say('\n' + text)
    if given.markdown:
        given.markdown.write_text(text, encoding='utf-8')
    return 1 if any(report.failures for report in reports) else 0


def _run(step: str, network: Network) -> Report:
    run: dict[str, Callable[[Network], Report]] = {
        'blocks': run_blocks, 'traces': run_traces, 'node': run_node}
    report = run[step](network)
    if report.skipped:
        say(f'skipped: {step}: {report.skipped}')
    return report


if __name__ == '__main__':
    sys.exit(main())
