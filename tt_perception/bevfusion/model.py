# SPDX-License-Identifier: Apache-2.0
"""BEVFusion-L as a Python object: points in, objects out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tt_perception.bevfusion.artifact import Artifact, resolve
from tt_perception.bevfusion.cloud import Cloud
from tt_perception.bevfusion.cloud import warm_up as warm_up_decoding
from tt_perception.bevfusion.cloudfile import PointArray, as_points
from tt_perception.bevfusion.config import (
    CAPACITY_BUCKETS,
    MAX_STREAMS,
    BEVFusionConfig,
    NetworkConfig,
    known_parameters,
    read_parameter_file,
)
from tt_perception.bevfusion.densify import Densifier, Sweep, SweepCache
from tt_perception.bevfusion.detections import Detections3D, RawDetections
from tt_perception.bevfusion.postprocess import finish
from tt_perception.bevfusion.rulebook import RulebookBuilder, Rulebooks
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.bevfusion.weights import NetworkWeights, check_against, read_onnx
from tt_perception.runtime.errors import ConfigError, InputError
from tt_perception.runtime.model import Model, StageClock

_log = logging.getLogger(__name__)

BACKENDS = ('auto', 'cpu')
_FRAMES_IN_FLIGHT = 2


class CpuBackend:
    """The reference network on the CPU.

    :param weights: of a folded network.
    """

    name = 'cpu'

    def __init__(self, weights: NetworkWeights) -> None:
        try:
            import torch
        except ImportError:
            raise ConfigError("backend: 'cpu' needs torch, which is not installed") from None
        from tt_perception.bevfusion.reference import BEVFusionNet
        self._torch = torch
        self._net = BEVFusionNet(weights.config, folded=True)
        self._net.load_state_dict({k: torch.from_numpy(v) for k, v in weights.arrays.items()})
        self._net.eval()

    def forward(self, features: np.ndarray, rulebooks: Rulebooks) -> RawDetections:
        """Run the network on float32 [n, features] rows in the order of the rulebooks."""
        with self._torch.inference_mode():
            outputs = self._net(self._torch.from_numpy(features), rulebooks)
        return RawDetections(*(output.numpy() for output in outputs))

    def close(self) -> None:
        """Drop the network."""
        self._net = None


class _Workspace:
    """The host buffers of one frame in flight, allocated once."""

    def __init__(self, config: BEVFusionConfig, network: NetworkConfig) -> None:
        self.densifier = Densifier(config.densification, config.grid)
        self.voxelizer = Voxelizer(config.grid)
        self.rulebook_builder = RulebookBuilder(network)
        self.rows = np.empty((network.level_capacities[0], config.grid.num_features), np.float32)


@dataclass
class _Stream:
    """The past sweeps of one sensor stream."""

    cache: SweepCache
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Prepared:
    """One frame, ready for the network.

    :ivar features: float32 [n, F], one row an active voxel, in the order of the rulebooks.
    :ivar rulebooks: gather tables of all sparse convolutions.
    :ivar meta: counts of the host stages.
    :ivar clock: has timed the host stages so far.
    """

    features: np.ndarray
    rulebooks: Rulebooks
    meta: dict[str, Any]
    clock: StageClock


class BEVFusion(Model):
    """Autoware's lidar detector BEVFusion-L.

    Calls from several threads are safe: host stages of two frames overlap, the network runs one
    frame at a time. Use it as a context manager, or call :meth:`close`; Python's exit does too.
    """

    def __init__(self, weights: NetworkWeights, config: BEVFusionConfig, *,
                 backend: str = 'auto', artifact: Artifact | None = None) -> None:
        """Build a model from loaded weights; :meth:`from_pretrained` is the usual way.

        :raises ConfigError: unknown backend.
        :raises ArtifactError: the weights and the configuration are not of the same network.
        """
        if backend not in BACKENDS:
            raise ConfigError(f'backend: found {backend!r}, expected one of '
                              + ', '.join(map(repr, BACKENDS)))
        check_against(weights.config, config)
        self.config = config
        self.network = weights.config
        self._artifact = artifact
        self._backend = CpuBackend(weights)
        self._forward_lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._streams_lock = threading.Lock()
        self._idle_workspaces: list[_Workspace] = []
        self._workspace_slots = threading.BoundedSemaphore(_FRAMES_IN_FLIGHT)
        super().__init__()

    @classmethod
    def from_pretrained(cls, source: str | Path | None = None, *, backend: str = 'auto',
                        **parameters: Any) -> BEVFusion:
        """Load an artifact: the released one by default, else a local folder or ``.onnx`` file.

        :param source: None for the pinned release (from the cache, else from the Hub), or a local
            path; a folder holds the three files of the release under their names.
        :param backend: ``cpu``, or ``auto`` for the best one there is.
        :param parameters: values that win over the artifact's own, by the names of
            :data:`tt_perception.bevfusion.config.PARAMETERS`.
        :raises ArtifactError: a file is missing, damaged, or of another network.
        :raises ConfigError: a wrong parameter.
        """
        artifact = resolve(source)
        if artifact.has_random_weights:
            _log.warning('%s: random weights: what is detected means nothing', artifact.onnx)
        values = known_parameters({**read_parameter_file(artifact.ml_package),
                                   **read_parameter_file(artifact.class_remapper)})
        config = BEVFusionConfig.from_parameters({**values, **parameters})
        return cls(read_onnx(artifact.onnx), config, backend=backend, artifact=artifact)

    def __call__(self, points: Any, *, sweeps: Sequence[Mapping[str, Any]] | None = None,
                 stream: Mapping[str, Any] | None = None, columns: Sequence[str] | None = None,
                 **per_call: Any) -> Detections3D:
        """Detect objects in one cloud.

        :param points: a decoded message (:class:`tt_perception.bevfusion.cloud.Cloud`), or a file,
            an array or a tensor, see :func:`tt_perception.bevfusion.cloudfile.as_points`. A
            ``time_lag`` column says that past sweeps are already fused.
        :param sweeps: past sweeps, each ``{'points', 'time_lag_s', 'T_current_from_sweep'}``.
        :param stream: ``{'id', 'timestamp_s', 'T_world_from_ego'}``: the model keeps the past
            sweeps of this stream itself, as the ROS node does; ``'reset': True`` drops them first.
        :param columns: names of the columns of ``points``, and of the sweeps', where files or
            arrays do not say.
        :param per_call: thresholds for this call only.
        :raises InputError: the frame is refused; the stream is as it was before.
        :raises ConfigError: a parameter is wrong.
        """
        config = self.config.replace(**per_call) if per_call else self.config
        with self._in_use(), self._prepared(points, sweeps, stream, columns) as prepared:
            return finish(self.forward(prepared), config, prepared.meta, prepared.clock)

    @contextmanager
    def _prepared(self, points: Any, sweeps: Any, stream: Any, columns: Any) -> Iterator[Prepared]:
        """Run the host stages before the network; their buffers are free again afterwards."""
        clock = StageClock()
        cloud = self._read(points, columns)
        clock.lap('read')
        with self._workspace() as workspace:
            if stream is not None:
                if sweeps is not None or cloud.time_lag is not None:
                    other = 'sweeps' if sweeps is not None else 'a time_lag column'
                    raise InputError(f'stream: found {other} too, expected one of them',
                                     reason='stream')
                with self._stream(stream) as (cache, stamp_s, pose):
                    past = cache.past_sweeps(stamp_s, pose)
                    is_reset = stream.get('reset', False)
                    prepared = self._prepare(workspace, cloud, [] if is_reset else past, clock,
                                             pose)
                    if is_reset:
                        cache.clear()
                    cache.push(cloud.points, stamp_s, pose)
            else:
                if sweeps is not None and (isinstance(sweeps, (str, bytes, Mapping))
                                           or not isinstance(sweeps, Sequence)):
                    raise InputError(f'sweeps: found {type(sweeps).__name__}, expected a list',
                                     reason='sweeps')
                past, num_dropped = self._sweeps(sweeps or (), columns)
                prepared = self._prepare(workspace, cloud, past, clock)
                prepared.meta['num_points_dropped'] += num_dropped
            yield prepared

    def _read(self, points: Any, columns: Sequence[str] | None = None) -> PointArray:
        if isinstance(points, Cloud):
            return PointArray(points.points, None, points.num_dropped, points.num_received)
        return as_points(points, use_intensity=self.config.grid.use_intensity, columns=columns)

    def _prepare(self, workspace: _Workspace, cloud: PointArray, past: Sequence[Sweep],
                 clock: StageClock, pose: Any = None) -> Prepared:
        past_is_used = self.config.densification.num_past_frames > 0
        dense = workspace.densifier(cloud.points, past, time_lag=cloud.time_lag,
                                    T_world_from_current=pose if past_is_used else None)
        clock.lap('densify')
        voxels = workspace.voxelizer(dense.points)
        num_voxels = len(voxels.num_points)
        if num_voxels < self.config.grid.min_voxels:
            raise InputError(f'cloud: found {num_voxels} voxels inside point_cloud_range, '
                             f'expected at least {self.config.grid.min_voxels}', reason='empty')
        clock.lap('voxelize')
        rulebooks = workspace.rulebook_builder(voxels.coords_zyx)
        features = rulebooks.features_by_row(voxels.features, workspace.rows)
        clock.lap('rulebook')
        meta = {
            'num_points': len(dense.points),
            'num_points_per_sweep': list(dense.num_points_per_sweep),
            'num_points_dropped': cloud.num_dropped,
            'num_sweeps': len(dense.num_points_per_sweep),
            'num_sweeps_skipped': dense.num_skipped_sweeps,
            'num_voxels': num_voxels,
            'num_voxels_clipped': voxels.num_cells_clipped,
            'is_num_voxels_within_range': not voxels.clipped,
            'active_rows': list(rulebooks.num_rows),
            'capacity_bucket': capacity_bucket(rulebooks.num_rows),
        }
        return Prepared(features, rulebooks, meta, clock)

    def forward(self, prepared: Prepared) -> RawDetections:
        """Run the network on a prepared frame."""
        with self._forward_lock:
            raw = self._backend.forward(prepared.features, prepared.rulebooks)
        prepared.clock.lap('forward')
        return raw

    @contextmanager
    def _workspace(self) -> Iterator[_Workspace]:
        with self._workspace_slots:
            try:
                workspace = self._idle_workspaces.pop()
            except IndexError:
                workspace = _Workspace(self.config, self.network)
            try:
                yield workspace
            finally:
                self._idle_workspaces.append(workspace)

    @contextmanager
    def _stream(self, stream: Mapping[str, Any]) -> Iterator[tuple[SweepCache, Any, Any]]:
        """Hold one stream for one frame; yield its cache, the stamp and the pose."""
        known = {'id', 'timestamp_s', 'T_world_from_ego', 'reset'}
        if not isinstance(stream, Mapping) or not {'id', 'timestamp_s'} <= set(stream) <= known:
            found = sorted(map(str, stream)) if isinstance(stream, Mapping) \
                else type(stream).__name__
            raise InputError(f'stream: found {found}, expected a mapping with id, timestamp_s, '
                             'T_world_from_ego and, if wanted, reset', reason='stream')
        if not isinstance(stream['id'], (str, int)):
            raise InputError(f'stream: found id {stream["id"]!r}, expected a text or an integer',
                             reason='stream')
        if not isinstance(stream.get('reset', False), bool):
            raise InputError(f'stream: found reset {stream["reset"]!r}, expected True or False',
                             reason='stream')
        with self._streams_lock:
            held = self._streams.get(stream['id'])
            if held is None:
                if len(self._streams) >= MAX_STREAMS:
                    raise InputError(f'stream: {stream["id"]!r} would be one more than the '
                                     f'{MAX_STREAMS} streams of a model; end one with '
                                     'reset_stream', reason='stream')
                held = self._streams[stream['id']] = _Stream(SweepCache(self.config.densification))
        with held.lock:
            try:
                yield held.cache, stream['timestamp_s'], stream.get('T_world_from_ego')
            except BaseException:
                if len(held.cache) == 0:  # a stream begins with its first frame that is taken
                    with self._streams_lock:
                        self._streams.pop(stream['id'], None)
                raise
            with self._streams_lock:
                self._streams.setdefault(stream['id'], held)

    def reset_stream(self, stream_id: str | None = None) -> None:
        """Forget the past sweeps of one stream, or of all."""
        with self._streams_lock:
            if stream_id is None:
                self._streams.clear()
            else:
                self._streams.pop(stream_id, None)

    def _sweeps(self, sweeps: Sequence[Mapping[str, Any]],
                columns: Sequence[str] | None) -> tuple[list[Sweep], int]:
        """Return the sweeps of a call and how many of their points were dropped."""
        found = [self._sweep(sweep, columns) for sweep in sweeps]
        return [sweep for sweep, _ in found], sum(dropped for _, dropped in found)

    def _sweep(self, sweep: Mapping[str, Any],
               columns: Sequence[str] | None) -> tuple[Sweep, int]:
        expected = {'points', 'time_lag_s', 'T_current_from_sweep'}
        if not isinstance(sweep, Mapping) or set(sweep) != expected:
            found = sorted(map(str, sweep)) if isinstance(sweep, Mapping) \
                else type(sweep).__name__
            raise InputError(f'sweeps: found {found}, expected mappings with {sorted(expected)}',
                             reason='sweeps')
        cloud = self._read(sweep['points'], columns)
        if cloud.time_lag is not None:
            raise InputError('sweeps: found a time_lag column, expected time_lag_s only',
                             reason='sweeps')
        return (Sweep(cloud.points, sweep['time_lag_s'], sweep['T_current_from_sweep']),
                cloud.num_dropped)

    def warmup(self) -> None:
        """Compile the host kernels and run the network once, so that the first frame is fast."""
        warm_up_decoding()
        low, high = np.reshape(self.config.grid.point_cloud_range, (2, 3))
        columns = ('x', 'y', 'z', 'intensity')[:self.config.grid.num_features - 1]
        num_points = min(max(2_000, 4 * self.config.grid.min_voxels),
                         self.config.densification.cloud_capacity)
        points = np.random.default_rng(0).uniform(low, high, (num_points, 3))
        points = np.pad(points, ((0, 0), (0, len(columns) - 3))).astype(np.float32)
        cloud = Cloud(points, 0, len(points), points)
        past = {'points': cloud, 'time_lag_s': 0.1, 'T_current_from_sweep': np.eye(4)}
        self(cloud, sweeps=[past])
        self(points, columns=columns)

    @property
    def info(self) -> dict[str, Any]:
        """What is loaded, as plain values."""
        return {
            'model': 'BEVFusion-L',
            'source': str(self._artifact.onnx) if self._artifact else None,
            'revision': self._artifact.revision if self._artifact else None,
            'random_weights': bool(self._artifact and self._artifact.has_random_weights),
            'backend': self._backend.name,
            'class_names': list(self.config.class_names),
            'grid_size_xyz': list(self.config.grid.size_xyz),
            'num_proposals': self.network.num_proposals,
            'level_capacities': list(self.network.level_capacities),
            'closed': self._closed,
        }

    def _release(self) -> None:
        self._backend.close()
        self._streams.clear()
        self._idle_workspaces.clear()


def capacity_bucket(num_rows: Sequence[int]) -> int:
    """Return the index of the smallest capacity bucket that holds levels 1 to 4.

    :param num_rows: active rows of levels 1 to 4; further ones are not looked at.
    """
    for index, caps in enumerate(CAPACITY_BUCKETS):
        if all(rows <= cap for rows, cap in zip(num_rows[:4], caps, strict=True)):
            return index
    raise ValueError(f'{tuple(num_rows)} rows are beyond the largest bucket')
