# SPDX-License-Identifier: Apache-2.0
"""Builds the ttnn graph at full size and counts what it costs: ``tt_perception check``.

On a mock device or a card, every variant of the graph is run once, so that ttnn checks all
operations and has room for all tensors, and recorded once, see :mod:`tt_perception.runtime.cost`.
For whole frames, the sparse encoder is also counted in two forms of stock operations. Nothing is
timed: all times are what the limits of the card allow.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tt_perception.bevfusion.artifact import resolve
from tt_perception.bevfusion.columns import FrameBuffers
from tt_perception.bevfusion.config import BEVFusionConfig, NetworkConfig
from tt_perception.bevfusion.rulebook import RulebookBuilder, Rulebooks
from tt_perception.bevfusion.seeded import POINTS_PER_VOXEL, grid_of, seeded_cloud
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.bevfusion.weights import NetworkWeights, read_onnx
from tt_perception.runtime.cost import Limits, Operation, recording
from tt_perception.runtime.device import Device, load_ttnn, one_line
from tt_perception.runtime.errors import ConfigError, DeviceError, PerceptionError

if TYPE_CHECKING:
    from tt_perception.bevfusion.tt.accounting import FrameCounts

GOAL_S = 25e-3  # of a frame of GOAL_VOXELS
GOAL_VOXELS = 120_000
STATEMENT = ('Nothing was timed on a card. Times are bytes, FLOPs, gathered rows and cycles over '
             'the limits of the card, by counting.')
SHORT_TABLE = 12  # lines of a variant
_MOCK = 'mock'
_OWN, _STOCK, _STOCK_DENSE = ('own kernel, ttnn.generic_op', 'stock row gather',
                              'stock row gather, level 4 dense')
_COMPUTING = {'GatherConv', 'Peaks', 'linear', 'matmul', 'add', 'subtract', 'multiply', 'relu',
              'sigmoid', 'softmax', 'layer_norm', 'scaled_dot_product_attention'}
_WHY_MOVED = {  # why the graph has operations that compute nothing
    'to_layout': 'rows become tiles, as the matrix unit takes them',
    'embedding': 'rows of the proposals, out of those of all cells',
    'nlp_create_qkv_heads': "each head's columns become a matrix of its own",
    'slice': 'a part of what one product has made at once',
    'concat': 'parts become one tensor, which is read back at once',
    'typecast': 'attention takes bfloat16',
    'reshape': 'rows change their width',
    'mean': 'what all cells share; zeros fill up the last tile',
}
_ROUND_TRIPS = ('Between convolutions, features go through DRAM: the rows that a core gathers '
                'come from others, and L1 is taken by weights, gathered rows and tiles.')
_WHOLE_BUCKETS = ('Stock operations compute all rows of the bucket, the own kernel those of the '
                  'frame. Stock rows are at 5 ns each, missing ones free; own rows, missing ones '
                  'included, at the instructions of the compiled gather loop (--json has them), '
                  'or at their bytes where those take longer.')
_WIDTH = 120


@dataclass(frozen=True)
class Variant:
    """One variant of the graph, counted."""

    name: str
    frame: str
    operations: list[Operation]

    def as_dict(self, limits: Limits) -> dict[str, Any]:
        """Return plain values."""
        return {'variant': self.name, 'frame': self.frame, **_sums(self.operations, limits),
                'operations': [_plain(operation, limits) for operation in self.operations]}


# ---- the command ----

def check(device: str = _MOCK, *, clouds: Sequence[Path] = (),
          weights: str | Path | None = None,
          columns: Sequence[str] | None = None) -> dict[str, Any]:
    """Count the graph, and whole frames.

    :param device: ``mock``, or the number of a card.
    :param clouds: files whose frames are counted beside a seeded cloud of 120,000 voxels.
    :param weights: artifact, see :func:`tt_perception.bevfusion.artifact.resolve`; by default a
        network with random weights.
    :param columns: names of the columns of the files, where they do not say.
    :returns: plain values, ready for JSON.
    :raises ConfigError: an unknown device, or ttnn or the tools of the mock are missing.
    :raises DeviceError: no such card, or ttnn refuses the graph.
    """
    with _opened(device) as opened:  # first: its errors come at once
        network = _random_weights() if weights is None else read_onnx(resolve(weights).onnx)
        frames = list(_frames(network.config, clouds, columns))
        return opened.call(_count, opened, network, frames, device == _MOCK)


@contextmanager
def _opened(name: str) -> Iterator[Device]:
    if name != _MOCK and not name.isdecimal():
        raise ConfigError(f"device: found {name!r}, expected 'mock' or a number")
    if name == _MOCK:
        from tt_perception.runtime.mock import use_mock_p150
        use_mock_p150()
    # The mock has no Ethernet cores to dispatch from.
    with Device(0 if name == _MOCK else int(name),
                dispatch='worker' if name == _MOCK else 'auto') as device:
        yield device


def _random_weights() -> NetworkWeights:
    import torch

    from tt_perception.bevfusion.fold import fold_norms
    from tt_perception.bevfusion.reference import BEVFusionNet
    config = NetworkConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = BEVFusionNet(config).eval().state_dict()
    return NetworkWeights(config, fold_norms({k: v.numpy() for k, v in state.items()}, config))


def _frames(config: NetworkConfig, clouds: Sequence[Path],
            columns: Sequence[str] | None) -> Iterator[FrameCounts]:
    """Yield the counts of the seeded cloud, then those of the files."""
    from tt_perception.bevfusion.cloudfile import as_points
    from tt_perception.bevfusion.densify import Densifier
    from tt_perception.bevfusion.tt.accounting import FrameCounts
    grid = grid_of(config)
    densifier = Densifier(BEVFusionConfig.from_parameters({}).densification, grid)
    voxelizer, builder = Voxelizer(grid), RulebookBuilder(config)

    def rulebooks(points: np.ndarray, time_lag: np.ndarray | None = None) -> Rulebooks:
        return builder(voxelizer(densifier(points, [], time_lag=time_lag).points).coords_zyx)

    points = seeded_cloud(round(GOAL_VOXELS * POINTS_PER_VOXEL))
    if grid.use_intensity:
        points = np.pad(points, ((0, 0), (0, 1)))
    yield FrameCounts.of(f'seeded cloud of {GOAL_VOXELS // 1000},000 voxels', rulebooks(points))
    for path in clouds:
        cloud = as_points(path, use_intensity=grid.use_intensity, columns=columns)
        yield FrameCounts.of(str(path), rulebooks(cloud.points, cloud.time_lag))


# ---- counting, on the device's thread ----

def _count(device: Device, network: NetworkWeights, frames: Sequence[FrameCounts],
           is_mock: bool) -> dict[str, Any]:
    grid_x, grid_y = device.info['grid']
    limits = Limits(cores=grid_x * grid_y)
    graph = _Graph(device, network, limits)
    try:
        variants = [graph.bucket(i, frames[0]) for i in range(len(graph.layouts))]
        variants.append(graph.dense(frames[0]))
        cases = [_case(graph, frame, variants[-1]) for frame in frames]
    finally:
        graph.release()
    return {
        'statement': STATEMENT,
        'device': {'name': 'mock p150' if is_mock else device.name, **device.info},
        'limits': asdict(limits),
        'goal_s': GOAL_S,
        'gathered_rows': _row_costs(limits),
        'variants': [variant.as_dict(limits) for variant in variants],
        'moves': _moves(variants),
        'round_trips': _ROUND_TRIPS,
        'formulations': _WHOLE_BUCKETS,
        'frames': cases,
    }


class _Graph:
    """The graph on a device, recorded: costs of any frame can be asked for."""

    def __init__(self, device: Device, network: NetworkWeights, limits: Limits) -> None:
        from tt_perception.bevfusion.tt.gatherconv import GatherConv
        from tt_perception.bevfusion.tt.graph import BEVFusionGraph
        from tt_perception.bevfusion.tt.peaks import Peaks
        self.limits, self.config = limits, network.config
        self._device, self._arrays = device, network.arrays
        self._own = (GatherConv, Peaks)
        self._graph = BEVFusionGraph(network)
        self.layouts = self._graph.layouts
        with _named('weights and tensors'):
            self._graph.allocate(device.handle)
        self._recordings: dict[str, Any] = {}
        self._stock: dict[tuple[int, bool], list[Operation]] = {}

    def release(self) -> None:
        """Free what the graph has on the device."""
        self._graph.release()

    def bucket_of(self, frame: FrameCounts) -> int:
        """Return the smallest capacity bucket that a frame fits into."""
        return next(i for i, layout in enumerate(self.layouts)
                    if all(rows <= cap for rows, cap in zip(frame.active_rows, layout.capacities,
                                                            strict=False)))

    def bucket(self, index: int, like: FrameCounts) -> Variant:
        """Return the cost of a bucket that is full."""
        layout = self.layouts[index]
        return self.sparse(index, like.filling(layout.capacities, layout.num_out_rows))

    def sparse(self, index: int, frame: FrameCounts) -> Variant:
        """Return the cost of the sparse encoder for a frame."""
        return self._variant(f'sparse_{index}', frame)

    def dense(self, frame: FrameCounts) -> Variant:
        """Return the cost behind the sparse encoder; frames do not differ in it."""
        return replace(self._variant('dense', frame), frame='every frame')

    def _variant(self, name: str, frame: FrameCounts) -> Variant:
        from tt_perception.bevfusion.tt import accounting
        record = self._recorded(name)
        operations: list[Operation] = []
        last = None
        for i, operation in enumerate(record.operations):
            call = record.calls.get(i)
            if call is None:
                operations.append(operation)
            elif isinstance(call.operation, self._own[0]):
                taps = accounting.taps_of(call, operation.block, frame, self.config)
                operations.append(accounting.convolution(call, taps, operation, self.limits))
            elif call is not last:  # the first of its two programs
                operations.append(accounting.peaks(call, record.operations[i:i + 2], self.config))
            last = call
        return Variant(name, frame.name, operations)

    def _recorded(self, name: str) -> Any:
        """Run a variant once, so that all its programs are built, and record it."""
        if name not in self._recordings:
            handle = self._device.handle
            with _named(name):
                self._graph.forward(name)
                _synchronize(handle)
            with recording(handle, self._own) as record:
                self._graph.forward(name, record.mark)
                record.mark('output')
            self._recordings[name] = record
        return self._recordings[name]

    def stock(self, frame: FrameCounts, dense_last_level: bool) -> tuple[list[Operation], int]:
        """Return the operations of a stock encoder for a frame, and the bytes of its inputs."""
        from tt_perception.bevfusion.tt import formulations
        index = self.bucket_of(frame)
        key = index, dense_last_level
        if key not in self._stock:
            handle = self._device.handle
            encoder = formulations.StockEncoder(
                handle, self.config, self._arrays, self.layouts[index], dense_last_level)
            with recording(handle) as record:
                encoder(record.mark)
            self._stock[key] = record.operations, encoder.input_bytes
        operations, input_bytes = self._stock[key]
        gathers = iter(formulations.gathered_rows(frame, dense_last_level))
        return [operation.with_rows(next(gathers)) if operation.gathered_rows else operation
                for operation in operations], input_bytes


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Let an error of ttnn say what was built."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PerceptionError):
            raise
        raise DeviceError(f'{what}: {one_line(error)}') from error


def _synchronize(handle: Any) -> None:
    load_ttnn().synchronize_device(handle)


def _case(graph: _Graph, frame: FrameCounts, dense: Variant) -> dict[str, Any]:
    """Compare the forms of the sparse encoder for one frame."""
    limits, index = graph.limits, graph.bucket_of(frame)
    shapes = FrameBuffers.shapes(graph.layouts[index], graph.config.in_channels)
    upload = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize
                 for shape, dtype in shapes.values())
    own = graph.sparse(index, frame).operations
    forms = [_form(_STOCK, *graph.stock(frame, False), limits),
             _form(_STOCK_DENSE, *graph.stock(frame, True), limits),
             _form(_OWN, own, upload, limits)]
    dense_s = _seconds(dense.operations, limits)
    out_bytes = 4 * dense.operations[-1].shape[-1] * dense.operations[-1].shape[-2]
    read_back_s = out_bytes / limits.upload_bytes_per_s
    for form in forms:
        form['frame_s'] = form['total_s'] + dense_s + read_back_s
    return {
        'frame': frame.name, 'voxels': frame.active_rows[0],
        'active_rows': list(frame.active_rows), 'bucket': list(graph.layouts[index].capacities),
        'present_taps': {name: taps.present for name, taps in frame.tables.items()},
        'formulations': forms, 'dense_s': dense_s, 'read_back_s': read_back_s,
        'floor_s': sum(operation.floor(limits) for operation in (*own, *dense.operations)),
        'frame_s': forms[-1]['frame_s'],
        'is_within_goal': forms[-1]['frame_s'] <= GOAL_S,
    }


def _form(name: str, operations: Sequence[Operation], upload_bytes: int,
          limits: Limits) -> dict[str, Any]:
    """Return the sums of one form of the sparse encoder."""
    upload_s = upload_bytes / limits.upload_bytes_per_s
    rows = sum(operation.gathered_rows for operation in operations)
    rows_s = sum(max(operation.parts(limits)[kind] for kind in ('rows', 'cycles'))
                 for operation in operations)
    sums = _sums(operations, limits)
    return {'formulation': name, **sums, 'rows_s': rows_s,
            'row_ns': 1e9 * rows_s / max(rows, 1), 'upload_bytes': upload_bytes,
            'upload_s': upload_s, 'total_s': upload_s + sums['seconds'],
            'operations': [_plain(operation, limits) for operation in operations]}


def _sums(operations: Sequence[Operation], limits: Limits) -> dict[str, Any]:
    parts = [operation.parts(limits) for operation in operations]
    return {
        'bytes_read': sum(operation.bytes_read for operation in operations),
        'bytes_written': sum(operation.bytes_written for operation in operations),
        'flops': sum(operation.flops for operation in operations),
        'fidelities': sorted({operation.fidelity for operation in operations if operation.flops}),
        'gathered_rows': sum(operation.gathered_rows for operation in operations),
        'dram_s': sum(part['DRAM'] for part in parts),
        'matrix_s': sum(part['matrix'] for part in parts),
        'seconds': _seconds(operations, limits),
        'floor_s': sum(operation.floor(limits) for operation in operations),
        'l1_peak': max(operation.l1_bytes for operation in operations),
        'dram_peak': max(operation.dram_bytes for operation in operations),
    }


def _seconds(operations: Iterable[Operation], limits: Limits) -> float:
    return sum(operation.seconds(limits) for operation in operations)


def _plain(operation: Operation, limits: Limits) -> dict[str, Any]:
    return {**asdict(operation), 'shape': list(operation.shape),
            'seconds': operation.seconds(limits), 'bound': operation.bound(limits)}


def _moves(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return all operations that only bring data into another form, each with its reason."""
    return [{'variant': variant.name, 'block': operation.block, 'operation': operation.name,
             'shape': _shape(operation.shape),
             'bytes': operation.bytes_read + operation.bytes_written,
             'reason': _WHY_MOVED.get(_stem(operation.name), 'not explained')}
            for variant in variants for operation in variant.operations
            if not operation.flops and _stem(operation.name) not in _COMPUTING]


def _stem(name: str) -> str:
    return name.partition(' ')[0]


def _row_costs(limits: Limits) -> dict[str, Any]:
    from tt_perception.bevfusion.tt import accounting
    from tt_perception.runtime.cost import STOCK_ROW_S
    return {'stock_s': STOCK_ROW_S, 'own_cycles': dict(accounting.CYCLES),
            'own_present_s': accounting.CYCLES['present tap'] / limits.clock_hz
            / (2 * limits.cores), 'reason': accounting.__doc__}


# ---- text ----

def table(result: Mapping[str, Any], lines: int | None = SHORT_TABLE) -> str:
    """Return a result as text for people, at most 120 columns wide.

    :param lines: operations of each variant, those that take longest; None for all.
    """
    device, limits = result['device'], result['limits']
    text = [f'{device["name"]}: {device["grid"][0]} x {device["grid"][1]} cores at '
            f'{limits["clock_hz"] / 1e9:g} GHz, DRAM {limits["dram_bytes_per_s"] / 1e9:.0f} GB/s, '
            f'upload {limits["upload_bytes_per_s"] / 1e9:.0f} GB/s',
            *_wrapped(result['statement'])]
    for variant in result['variants']:
        text += ['', *_variant_lines(variant, lines)]
    text += ['', *_move_lines(result), '', *_wrapped(result['formulations'])]
    for frame in result['frames']:
        text += ['', *_frame_lines(frame, result['goal_s'])]
    return '\n'.join(text)


def _fidelities(form: Mapping[str, Any]) -> str:
    return 'HiFi' + '/'.join(name.removeprefix('HiFi') for name in form['fidelities'])


def _wrapped(text: str, indent: str = '') -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _variant_lines(variant: Mapping[str, Any], limit: int | None) -> list[str]:
    """Return the lines of one variant, in the order in which its operations run."""
    operations = variant['operations']
    longest = sorted(operations, key=lambda o: o['seconds'], reverse=True)[:limit]
    shown = [operation for operation in operations if any(operation is o for o in longest)]
    text = [f'{variant["variant"]}: {variant["frame"]}',
            f'  {"block":17} {"operation":21} {"shape":15} {"types":16}{"read":>7}{"write":>7}'
            f'{"GFLOP":>7} {"":5}{"L1":>5}{"us":>7} bound',
            f'  {"":17} {"":21} {"":15} {"":16}{"MB":>7}{"MB":>7}{"":7} {"":5}{"kB":>5}']
    for o in shown:
        text.append(
            f'  {_block(o["block"]):17.17} {o["name"]:21.21} {_shape(o["shape"]):15.15} '
            f'{o["dtypes"]:16.16}{o["bytes_read"] / 1e6:7.1f}{o["bytes_written"] / 1e6:7.1f}'
            f'{o["flops"] / 1e9:7.1f} {o["fidelity"] if o["flops"] else "":5}'
            f'{o["l1_bytes"] / 1e3:5.0f}{o["seconds"] * 1e6:7.1f} {o["bound"]}')
    rest = [operation for operation in operations if not any(operation is o for o in longest)]
    if rest:
        text.append(f'  {len(rest)} more'.ljust(73) + _sum_columns(rest))
    text.append('  sum'.ljust(73) + _sum_columns(operations))
    text.append(f'  sum {variant["seconds"] * 1e3:.2f} ms, floor of the network '
                f'{variant["floor_s"] * 1e3:.2f} ms; peak of DRAM '
                f'{variant["dram_peak"] / 1e9:.2f} GB, of L1 {variant["l1_peak"] / 1e3:.0f} kB '
                'a core')
    return text


def _sum_columns(operations: Sequence[Mapping[str, Any]]) -> str:
    return (f'{sum(o["bytes_read"] for o in operations) / 1e6:8.1f}'
            f'{sum(o["bytes_written"] for o in operations) / 1e6:7.1f}'
            f'{sum(o["flops"] for o in operations) / 1e9:7.1f} {"":10}'
            f'{sum(o["seconds"] for o in operations) * 1e6:7.1f}')


def _block(name: str) -> str:
    """Return the end of a block's name that tells it apart."""
    for prefix in ('pts_middle_encoder.encoder_layers.', 'pts_middle_encoder.', 'pts_backbone.',
                   'bbox_head.'):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _shape(shape: Sequence[int]) -> str:
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return 'x'.join(map(str, shape))


def _move_lines(result: Mapping[str, Any]) -> list[str]:
    text = ['data movement without computation, and why it is there:',
            *_wrapped(result['round_trips'], '  ')]
    for move in result['moves']:
        name = f'{_block(move["block"])}: {_stem(move["operation"])}'
        text.append(f'  {name:45.45} {move["shape"]:11.11} {move["bytes"] / 1e6:6.1f} MB  '
                    f'{move["reason"]:.50}')
    return text


def _frame_lines(frame: Mapping[str, Any], goal_s: float) -> list[str]:
    rows = ', '.join(f'{n:,}' for n in frame['active_rows'])
    bucket = ', '.join(f'{n // 1000}' for n in frame['bucket'])
    text = [frame['frame'],
            f'  {frame["voxels"]:,} voxels; active rows {rows}; bucket ({bucket}) thousand',
            f'  {"sparse encoder":33}{"DRAM":>8}{"":>7}{"matrix":>9}{"":>15}{"gathered":>8}'
            f'{"each":>7}{"":>7}{"upload":>8}{"":>6}{"sum":>7}',
            f'  {"":33}{"GB":>8}{"ms":>7}{"TFLOP":>9}{"ms":>7}{"":8}{"M rows":>8}{"ns":>7}'
            f'{"ms":>7}{"MB":>8}{"ms":>6}{"ms":>7}']
    for form in frame['formulations']:
        moved = (form['bytes_read'] + form['bytes_written']) / 1e9
        text.append(
            f'  {form["formulation"]:33}{moved:8.2f}{form["dram_s"] * 1e3:7.2f}'
            f'{form["flops"] / 1e12:9.2f}{form["matrix_s"] * 1e3:7.2f} '
            f'{_fidelities(form):7}{form["gathered_rows"] / 1e6:8.2f}'
            f'{form["row_ns"]:7.2f}{form["rows_s"] * 1e3:7.2f}{form["upload_bytes"] / 1e6:8.1f}'
            f'{form["upload_s"] * 1e3:6.2f}{form["total_s"] * 1e3:7.2f}')
    text += [f'  {"whole frame":33}behind the encoder {frame["dense_s"] * 1e3:.2f} ms, '
             f'read back {frame["read_back_s"] * 1e3:.2f} ms; floor of the network '
             f'{frame["floor_s"] * 1e3:.2f} ms']
    for form in frame['formulations']:
        verdict = 'within' if form['frame_s'] <= goal_s else 'beyond'
        text.append(f'  {form["formulation"]:33}{form["frame_s"] * 1e3:8.2f} ms, {verdict} '
                    f'{goal_s * 1e3:.0f} ms')
    return text
