# SPDX-License-Identifier: Apache-2.0
"""Times the stages of the lidar model, each beside another implementation of the same work.

Clouds are seeded, see :func:`tt_perception.bevfusion.seeded.seeded_cloud`. A stage and its peer
take turns, and medians are given, so that both meet the same other work of the machine.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tt_perception.bevfusion import peers
from tt_perception.bevfusion.cloud import XYZIRC, decode_cloud, point_fields
from tt_perception.bevfusion.config import BEVFusionConfig, GridConfig, NetworkConfig
from tt_perception.bevfusion.decode import decode
from tt_perception.bevfusion.densify import Densifier, Sweep
from tt_perception.bevfusion.detections import RawDetections
from tt_perception.bevfusion.fold import fold_norms
from tt_perception.bevfusion.nms import circle_nms, iou_bev_nms
from tt_perception.bevfusion.postprocess import CLASS_LABELS, finish
from tt_perception.bevfusion.reference import BEVFusionNet
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.seeded import POINTS_PER_VOXEL, grid_of, seeded_cloud
from tt_perception.bevfusion.voxelize import Voxelizer

HOST_VOXELS = (30_000, 120_000, 250_000)
CPU_VOXELS = (120_000,)
_LAG_S = 0.1
_PAUSE_S = 0.05  # until the idle threads of the last one no longer spin


def bench_host(voxels: Sequence[int] = HOST_VOXELS, repeat: int = 20,
               seed: int = 0) -> dict[str, Any]:
    """Time the stages before and after the network.

    All points are decoded; half of them then stand for a past sweep.

    :param voxels: sizes of the clouds.
    :param repeat: runs of each stage; the median is given.
    :returns: plain values, ready for JSON.
    """
    result = _result('host', repeat)
    config, network = BEVFusionConfig.from_parameters({}), NetworkConfig()
    host = _Host(config, network,
                 _peer(result, 'spconv', lambda: peers.spconv_voxelizer(config.grid)),
                 _peer(result, 'spconv', lambda: peers.spconv_indice_pairs(network)))
    raw = _seeded_proposals(network.num_proposals, seed)
    for size in voxels:
        cloud = seeded_cloud(round(size * POINTS_PER_VOXEL), seed)
        result['cases'].append(host.case(cloud, raw, repeat))
    return result


class _Host:
    """The stages around the network and their peers, for clouds of several sizes."""

    def __init__(self, config: BEVFusionConfig, network: NetworkConfig,
                 their_voxelizer: Callable | None, their_builder: Callable | None) -> None:
        self._config = config
        self._densifier = Densifier(config.densification, config.grid)
        self._voxelizer = Voxelizer(config.grid)
        self._builder = RulebookBuilder(network)
        self._their_voxelizer = their_voxelizer
        self._their_builder = their_builder

    def case(self, cloud: np.ndarray, raw: RawDetections, repeat: int) -> dict[str, Any]:
        """Time all stages on one cloud and on proposals that have nothing to do with it."""
        message, buffer = _message(cloud), np.empty_like(cloud)
        current, past, move = _two_sweeps(cloud)
        sweeps = [Sweep(past, _LAG_S, move)]
        dense = self._densifier(current, sweeps).points.copy()
        coords_zyx = self._voxelizer(dense).coords_zyx.copy()
        rulebooks = self._builder(coords_zyx)
        coords_xyz, active_rows = rulebooks.coords_xyz[0].copy(), list(rulebooks.num_rows)
        voxelize, build = self._their_voxelizer, self._their_builder
        circle, overlap = _nms_pair(raw, self._config)
        stages = [
            _stage('decode', repeat,
                   lambda: decode_cloud(message, use_intensity=False, out=buffer),
                   'field-by-field structured reading',
                   lambda: peers.structured_reading(message)),
            _stage('densify', repeat, lambda: self._densifier(current, sweeps),
                   'NumPy', lambda: peers.numpy_densify(current, past, move, _LAG_S)),
            _stage('voxelize', repeat, lambda: self._voxelizer(dense),
                   'spconv voxel generator, without means',
                   voxelize and (lambda: voxelize(dense))),
            _stage('rulebooks', repeat, lambda: self._builder(coords_zyx),
                   'spconv indice pairs', build and (lambda: build(coords_xyz))),
            _stage('circle nms', repeat, circle[0], 'NumPy', circle[1]),
            _stage('overlap nms', repeat, overlap[0], 'NumPy', overlap[1]),
            _stage('postprocess', repeat, lambda: finish(raw, self._config)),
        ]
        ms = {stage['stage']: stage['ms'] for stage in stages}
        return {'voxels': len(coords_zyx), 'points': len(cloud), 'active_rows': active_rows,
                'stages': stages,
                'decode_densify_voxelize_ms': ms['decode'] + ms['densify'] + ms['voxelize']}


def bench_cpu(voxels: Sequence[int] = CPU_VOXELS, repeat: int = 20, seed: int = 0,
              config: NetworkConfig | None = None) -> dict[str, Any]:
    """Time a frame on the CPU, from densified points to objects, beside onnxruntime and spconv.

    The peers' time of a frame is that of the same dense layers in onnxruntime plus that of the
    same sparse convolutions in spconv, its rulebooks not counted. spconv is run with one thread
    and with as many as torch, and the faster counts, although with several its rows may be wrong.

    :param voxels: sizes of the clouds.
    :param repeat: frames; medians are given.
    :param config: sizes of the network, by default the release's.
    :returns: plain values, ready for JSON. ``peak_memory_mib`` is that of the whole process,
        before any peer has run; ``memory_without_network_mib`` that before the network was made.
    """
    result = _result('cpu', repeat)
    result['memory_without_network_mib'] = _peak_memory_mib()
    config = config or NetworkConfig()
    grid = grid_of(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unfolded = BEVFusionNet(config).eval()
    state = fold_norms({k: v.numpy() for k, v in unfolded.state_dict().items()}, config)
    net = BEVFusionNet(config, folded=True).eval()
    net.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    for size in voxels:
        points = np.pad(seeded_cloud(round(size * POINTS_PER_VOXEL), seed), ((0, 0), (0, 1)))
        frame = _Frame(net, grid, points)
        frame()
        case = {'voxels': len(frame.features), 'active_rows': list(frame.rulebooks.num_rows),
                'peak_memory_mib': _peak_memory_mib()}
        others = _network_peers(result, unfolded, state, grid, frame)
        total_ms, *their_ms = _median_ms([frame, *others.values()], repeat, _PAUSE_S)
        blocks = {name: statistics.median(lap[-repeat:]) for name, lap in frame.laps.items()}
        sparse_ms = sum(ms for name, ms in blocks.items()
                        if name.startswith('pts_middle_encoder'))
        host_ms = sum(blocks[name] for name in ('voxelize', 'rulebooks', 'postprocess'))
        case.update(blocks_ms=blocks, host_ms=host_ms, sparse_ms=sparse_ms,
                    dense_ms=sum(blocks.values()) - sparse_ms - host_ms, total_ms=total_ms,
                    peers=_peer_times(dict(zip(others, their_ms, strict=True))))
        if {'dense_ms', 'sparse_ms'} <= case['peers'].keys():
            case['ratio'] = total_ms / (case['peers']['dense_ms'] + case['peers']['sparse_ms'])
        result['cases'].append(case)
    return result


class _Frame:
    """Goes from densified points to objects and notes the time of each stage and block (ms).

    :ivar features: of the last run, in the order of its rulebooks.
    """

    def __init__(self, net: BEVFusionNet, grid: GridConfig, points: np.ndarray) -> None:
        self._net = net
        self._points = points
        self._config = BEVFusionConfig.from_parameters({})
        self._voxelizer, self._builder = Voxelizer(grid), RulebookBuilder(net.config)
        self._rows = np.empty((net.config.level_capacities[0], grid.num_features), np.float32)
        self.laps: dict[str, list[float]] = {}

    def __call__(self) -> None:
        self._last = time.perf_counter()
        voxels = self._voxelizer(self._points)
        self._lap('voxelize')
        self.rulebooks = self._builder(voxels.coords_zyx)
        self.features = torch.from_numpy(
            self.rulebooks.features_by_row(voxels.features, self._rows))
        self._lap('rulebooks')
        with torch.inference_mode():
            outputs = self._net.run_blocks(self.features, self.rulebooks, self._lap)
        self._lap('outputs')
        finish(RawDetections(*(output.numpy() for output in outputs)), self._config)
        self._lap('postprocess')

    def _lap(self, name: str, tensor: torch.Tensor | None = None) -> None:
        now = time.perf_counter()
        self.laps.setdefault(name, []).append(1e3 * (now - self._last))
        self._last = now


def _network_peers(result: dict[str, Any], unfolded: BEVFusionNet, state: dict[str, np.ndarray],
                   grid: GridConfig, frame: _Frame) -> dict[str, Callable[[], Any]]:
    """Return the peers that are installed: dense layers, sparse layers with their rulebooks."""
    config, threads = unfolded.config, torch.get_num_threads()
    functions: dict[str, Callable[[], Any]] = {}
    dense = _peer(result, 'onnxruntime',
                  lambda: peers.onnxruntime_dense(unfolded, grid, threads))
    if dense:
        size_z = config.level_shapes_xyz[-1][2]
        bev = np.random.default_rng(0).random(
            (1, config.bev_channels * size_z, *config.feature_map_xy), np.float32)
        functions['dense'] = lambda: dense(bev)
    encoder = _peer(result, 'spconv', lambda: peers.spconv_encoder(config, state))
    if encoder:
        coords_xyz = frame.rulebooks.coords_xyz[0]
        pairs = peers.spconv_indice_pairs(config)

        def with_threads(count: int, function: Callable[..., Any], *args: Any) -> None:
            torch.set_num_threads(count)  # spconv multiplies through torch
            with peers.spconv_threads(count):
                function(*args)
            torch.set_num_threads(threads)

        for count in dict.fromkeys((1, threads)):
            functions[f'sparse_{count}_threads'] = partial(
                with_threads, count, encoder, frame.features, coords_xyz)
            functions[f'pairs_{count}_threads'] = partial(with_threads, count, pairs, coords_xyz)
    return functions


def _peer_times(ms: dict[str, float]) -> dict[str, float]:
    """Return the peers' times, that of spconv without its rulebooks."""
    times = {'dense_ms': ms['dense']} if 'dense' in ms else {}
    sparse = {f'{name}_ms': value - ms[name.replace('sparse', 'pairs')]
              for name, value in ms.items() if name.startswith('sparse')}
    return {**times, **sparse, **({'sparse_ms': min(sparse.values())} if sparse else {})}


def table(result: dict[str, Any]) -> str:
    """Return a result as text for people."""
    machine = result['machine']
    lines = [f'{machine["cpu"]}, {machine["cpus"]} CPUs, load {machine["load"]:.1f}; '
             f'medians of {result["repeat"]} runs in ms']
    for case in result['cases']:
        rows = ', '.join(f'{rows:,}' for rows in case['active_rows'])
        lines += ['', f'{case["voxels"]:,} voxels; active rows {rows}']
        lines += _cpu_lines(case) if result['bench'] == 'cpu' else _host_lines(case)
    lines += [f'not compared: {name}: {reason}' for name, reason in result['skipped'].items()]
    return '\n'.join(lines)


def _host_lines(case: dict[str, Any]) -> list[str]:
    lines = []
    for stage in case['stages']:
        line = f'  {stage["stage"]:14}{stage["ms"]:9.2f}'
        if 'peer_ms' in stage:
            line += f'   {stage["peer_ms"]:9.2f}  {stage["peer"]}: x {stage["ratio"]:.1f}'
        lines.append(line)
    return [*lines, '  decode + densify + voxelize: '
                    f'{case["decode_densify_voxelize_ms"]:.2f}']


def _cpu_lines(case: dict[str, Any]) -> list[str]:
    lines = [f'  {name:52}{ms:9.1f}' for name, ms in case['blocks_ms'].items()]
    lines += [f'  {name:52}{case[key]:9.1f}' for name, key in (
        ('host stages', 'host_ms'), ('sparse', 'sparse_ms'), ('dense', 'dense_ms'),
        ('whole frame', 'total_ms'))]
    lines += [f'  peers: {name:45}{ms:9.1f}' for name, ms in case['peers'].items()]
    if 'ratio' in case:
        lines.append(f'  whole frame over peers: {case["ratio"]:.2f}')
    return [*lines, f'  peak memory: {case["peak_memory_mib"]:.0f} MiB']


# Measuring


def _median_ms(functions: Sequence[Callable[[], Any]], repeat: int,
               pause_s: float = 0.0) -> list[float]:
    """Run functions by turns; return the median of each, the first round not counted."""
    laps: list[list[float]] = [[] for _ in functions]
    for turn in range(repeat + 1):
        for function, lap in zip(functions, laps, strict=True):
            time.sleep(pause_s)
            start = time.perf_counter()
            function()
            if turn:
                lap.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(lap) for lap in laps]


def _stage(name: str, repeat: int, ours: Callable[[], Any], peer: str = '',
           theirs: Callable[[], Any] | None = None) -> dict[str, Any]:
    if theirs is None:
        return {'stage': name, 'ms': _median_ms([ours], repeat)[0]}
    ms, peer_ms = _median_ms([ours, theirs], repeat)
    return {'stage': name, 'ms': ms, 'peer': peer, 'peer_ms': peer_ms, 'ratio': peer_ms / ms}


def _peer(result: dict[str, Any], package: str, make: Callable[[], Any]) -> Any:
    """Return a peer, or None when its package is missing; say so in the result."""
    try:
        return make()
    except ImportError as error:
        result['skipped'][package] = str(error)
        return None


def _result(bench: str, repeat: int) -> dict[str, Any]:
    return {'bench': bench, 'repeat': repeat, 'cases': [], 'skipped': {},
            'machine': {'cpu': _cpu_name(), 'cpus': len(os.sched_getaffinity(0)),
                        'torch_threads': torch.get_num_threads(), 'load': os.getloadavg()[0]}}


def _cpu_name() -> str:
    for line in Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return os.uname().machine


def _peak_memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Inputs


def _message(cloud: np.ndarray) -> SimpleNamespace:
    """Return a cloud as a PointCloud2 in the layout PointXYZIRC."""
    records = np.zeros(len(cloud), XYZIRC)
    for name, column in zip('xyz', cloud.T, strict=True):
        records[name] = column
    fields = [SimpleNamespace(name=name, offset=offset, datatype=datatype, count=count)
              for name, offset, datatype, count in point_fields(XYZIRC)]
    return SimpleNamespace(fields=fields, width=len(cloud), height=1, point_step=XYZIRC.itemsize,
                           row_step=records.nbytes, is_bigendian=False, data=records.tobytes())


def _two_sweeps(cloud: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return every other point, the rest as a past sweep in its own frame, and its transform."""
    angle = 0.01
    move = np.eye(4)
    move[:2, :2] = (np.cos(angle), -np.sin(angle)), (np.sin(angle), np.cos(angle))
    move[:2, 3] = 1.2, 0.1
    past = (cloud[1::2] - move[:3, 3]) @ move[:3, :3]
    return cloud[::2].copy(), past.astype(np.float32), move


def _seeded_proposals(count: int, seed: int) -> RawDetections:
    """Return proposals in pairs on a map of 180 x 180 cells, most of them above threshold."""
    rng = np.random.default_rng(seed)
    center = np.repeat(rng.uniform(5, 175, (2, -(-count // 2))), 2, axis=1)[:, :count]
    center += rng.normal(0, 0.5, center.shape)
    bbox_pred = np.concatenate([
        center, rng.normal(-0.8, 0.3, (1, count)),
        np.log([[4.2], [1.9], [1.6]]) + rng.normal(0, 0.25, (3, count)),
        rng.normal(0, 1, (4, count))])
    return RawDetections(bbox_pred.astype(np.float32), rng.random(count).astype(np.float32),
                         rng.integers(0, 5, count))


def _nms_pair(raw: RawDetections, config: BEVFusionConfig) -> list[tuple[Callable, Callable]]:
    """Return both suppressions, each as ours and in NumPy, on decoded proposals."""
    limits = config.postprocess
    found = decode(raw, limits)
    boxes = found.boxes_xyzlwh_yaw
    near = (np.ascontiguousarray(boxes[:, :2]), limits.circle_nms_dist_threshold)
    labels = np.array([CLASS_LABELS[name] for name in limits.class_names],
                      np.uint8)[found.class_ids]
    over = (boxes, labels, limits.iou_nms_search_distance_2d, limits.iou_nms_threshold)
    return [(lambda: circle_nms(*near), lambda: peers.numpy_circle_nms(*near)),
            (lambda: iou_bev_nms(*over), lambda: peers.numpy_iou_bev_nms(*over))]
