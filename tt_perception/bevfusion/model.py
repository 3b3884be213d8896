# SPDX-License-Identifier: Apache-2.0
"""BEVFusion-L as a Python object: points in, objects out."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tt_perception.bevfusion.artifact import Artifact, resolve
from tt_perception.bevfusion.cloud import Cloud
from tt_perception.bevfusion.cloud import warm_up as warm_up_decoding
from tt_perception.bevfusion.cloudfile import PointArray, as_points
from tt_perception.bevfusion.config import (
    CAPACITY_BUCKETS,
    MAX_STREAMS,
    BEVFusionConfig,
    known_parameters,
    read_parameter_file,
)
from tt_perception.bevfusion.cpu import CpuBackend
from tt_perception.bevfusion.densify import Densifier, Sweep, SweepCache
from tt_perception.bevfusion.detections import Detections3D, RawDetections
from tt_perception.bevfusion.postprocess import finish
from tt_perception.bevfusion.tt.backend import DeviceOptions, TtBackend
from tt_perception.bevfusion.voxelize import Voxelizer, Voxels
from tt_perception.bevfusion.weights import NetworkWeights, check_against, read_onnx
from tt_perception.runtime.device import device_nodes
from tt_perception.runtime.errors import ConfigError, InputError
from tt_perception.runtime.model import Model, StageClock

_log = logging.getLogger(__name__)

BACKENDS = ('auto', 'tt', 'cpu')
PIPELINES = (0, 1, 2)


class Inputs(Protocol):
    """What a backend is given of one frame; it belongs to one frame in flight."""

    def fill(self, voxels: Voxels, clock: StageClock) -> tuple[int, ...]:
        """Take a frame; return the active rows of levels 1 to 4 and of the output."""

    def discard(self) -> None:
        """Let go of a frame that will not run; may be repeated."""


class Backend(Protocol):
    """Where the network runs. ``forward`` is called by one thread at a time."""

    name: str

    def new_inputs(self) -> Inputs:
        """Return the host buffers of one more frame in flight."""

    def forward(self, inputs: Any, clock: StageClock) -> RawDetections:
        """Run the network on a frame; book the stages, the last one as ``forward``."""

    def warmup(self) -> None:
        """Prepare whatever the first frame would wait for."""

    @property
    def info(self) -> dict[str, Any]:
        """What runs, as plain values; ``backend`` is its name."""

    def close(self) -> None:
        """Free everything."""


class _Workspace:
    """The host buffers of one frame in flight, allocated once."""

    def __init__(self, config: BEVFusionConfig, inputs: Inputs) -> None:
        self.densifier = Densifier(config.densification, config.grid)
        self.voxelizer = Voxelizer(config.grid)
        self.inputs = inputs


@dataclass
class _Stream:
    """The past sweeps of one sensor stream."""

    cache: SweepCache
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class Prepared:
    """One frame, ready for the network.

    :ivar inputs: the frame in the backend's form.
    :ivar meta: counts of the host stages.
    :ivar clock: has timed the host stages so far.
    """

    inputs: Inputs
    meta: dict[str, Any]
    clock: StageClock


class _Frame:
    """A prepared frame on its way through the threads, which then give its workspace back.

    :ivar result: what the caller waits for; it cannot be cancelled.
    """

    def __init__(self, prepared: Prepared, config: BEVFusionConfig,
                 workspace: _Workspace) -> None:
        self.prepared = prepared
        self.config = config
        self.workspace = workspace
        self.result: Future[Detections3D] = Future()
        self.result.set_running_or_notify_cancel()
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Take the frame over; true for the first one who asks."""
        return self._claim.acquire(blocking=False)


class BEVFusion(Model):
    """Autoware's lidar detector BEVFusion-L.

    Calls from several threads are safe; the network runs one frame at a time, in the order in
    which frames were prepared. Use it as a context manager, or call :meth:`close`; Python's exit
    does too.
    """

    def __init__(self, weights: NetworkWeights, config: BEVFusionConfig, *,
                 backend: str = 'auto', pipeline: int = 0, artifact: Artifact | None = None,
                 options: DeviceOptions | None = None) -> None:
        """Build a model from loaded weights; :meth:`from_pretrained` is the usual way.

        :raises ConfigError: unknown backend or pipeline, or a wrong option of the device.
        :raises ArtifactError: the weights and the configuration are not of the same network.
        :raises DeviceError: the device cannot be used.
        """
        if backend not in BACKENDS:
            raise ConfigError(f'backend: found {backend!r}, expected one of '
                              + ', '.join(map(repr, BACKENDS)))
        if type(pipeline) is not int or pipeline not in PIPELINES:
            raise ConfigError(f'pipeline: found {pipeline!r}, expected 0, 1 or 2')
        check_against(weights.config, config)
        self.config = config
        self.network = weights.config
        self.pipeline = pipeline
        self._artifact = artifact
        self._streams: dict[str, _Stream] = {}
        self._streams_lock = threading.Lock()
        self._idle_workspaces: queue.LifoQueue[_Workspace] = queue.LifoQueue()
        self._backend = _backend(backend, weights, options or DeviceOptions(), pipeline)
        try:
            # One frame in flight is prepared while the other one is in the network.
            for _ in range(min(pipeline, 1) + 1):
                self._idle_workspaces.put(_Workspace(config, self._backend.new_inputs()))
        except BaseException:
            self._backend.close()
            raise
        self._network_thread = ThreadPoolExecutor(1, 'bevfusion-network')
        self._finish_thread = ThreadPoolExecutor(1, 'bevfusion-finish')
        super().__init__()

    @classmethod
    def from_pretrained(cls, source: str | Path | None = None, *, backend: str = 'auto',
                        pipeline: int = 0, device_id: int = 0, device: Any = None,
                        dispatch: str = 'auto', timeout_s: float = 5.0,
                        is_cancelled: Callable[[], bool] = lambda: False,
                        **parameters: Any) -> BEVFusion:
        """Load an artifact: the released one by default, else a local folder or ``.onnx`` file.

        :param source: None for the pinned release (from the cache, else from the Hub), or a local
            path; a folder holds the three files of the release under their names.
        :param backend: ``tt`` for a card, ``cpu`` for PyTorch, or ``auto``: ``tt`` where a card
            and ttnn are there.
        :param pipeline: 0 works on one frame at a time, from its points to its objects; 1 prepares
            a frame while the one before is in the network; 2 has two sets of upload buffers
            besides. The results are the same.
        :param device_id: which card, in the order of their PCI addresses.
        :param device: an open ttnn device to use instead; it is not closed with the model, and
            nothing else may use it meanwhile, or be allocated on it.
        :param dispatch: what hands out the work on the card: ``eth``, ``worker``, or ``auto``,
            see :class:`tt_perception.runtime.device.Device`.
        :param timeout_s: after this time without an answer the card is given up.
        :param is_cancelled: asked now and then while kernels are compiled, which takes minutes the
            first time; true ends the loading by DeviceError.
        :param parameters: values that win over the artifact's own, by the names of
            :data:`tt_perception.bevfusion.config.PARAMETERS`.
        :raises ArtifactError: a file is missing, damaged, or of another network.
        :raises ConfigError: a wrong parameter.
        :raises DeviceError: the card cannot be used.
        """
        artifact = resolve(source)
        if artifact.has_random_weights:
            _log.warning('%s: random weights: what is detected means nothing', artifact.onnx)
        values = known_parameters({**read_parameter_file(artifact.ml_package),
                                   **read_parameter_file(artifact.class_remapper)})
        config = BEVFusionConfig.from_parameters({**values, **parameters})
        return cls(read_onnx(artifact.onnx), config, backend=backend, pipeline=pipeline,
                   artifact=artifact, options=DeviceOptions(device_id, device, dispatch, timeout_s,
                                                             is_cancelled))

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
        return self.submit(points, sweeps=sweeps, stream=stream, columns=columns,
                           **per_call).result()

    def submit(self, points: Any, *, sweeps: Sequence[Mapping[str, Any]] | None = None,
               stream: Mapping[str, Any] | None = None, columns: Sequence[str] | None = None,
               **per_call: Any) -> Future[Detections3D]:
        """Prepare a frame, and return while the network runs; arguments as in a call.

        Results come in the order of the calls of one thread. With ``pipeline`` 0 a second frame
        waits until the first one is finished, otherwise it is prepared meanwhile. A result cannot
        be cancelled; its callbacks may close the model, but not wait for another frame.

        :raises InputError: the frame is refused; the stream is as it was before.
        :raises ConfigError: a parameter is wrong.
        """
        config = self.config.replace(**per_call) if per_call else self.config
        with self._in_use():
            clock = StageClock()
            cloud = self._read(points, columns)
            clock.lap('read')
            workspace = self._idle_workspaces.get()
            clock.lap('wait')
            frame = None
            try:
                prepared = self._prepare(workspace, cloud, sweeps, stream, columns, clock)
                frame = _Frame(prepared, config, workspace)
                self._enter(frame)
                self._network_thread.submit(self._run_network, frame)
            except BaseException:  # Ctrl-C too, which may come when the frame is handed over
                if frame is None:
                    self._give_back(workspace)
                elif frame.claim():
                    self._give_back(workspace)
                    self._leave(frame)
                raise
            return frame.result

    def _run_network(self, frame: _Frame) -> None:
        if not frame.claim():
            return
        raw: Future[RawDetections] = Future()
        me = threading.get_ident()
        self._enter(me)
        try:
            frame.prepared.clock.lap('wait_network')
            raw.set_result(self.forward(frame.prepared))
        except BaseException as error:  # goes to the caller, whatever it is
            raw.set_exception(error)
        finally:
            self._leave(me)
        try:
            self._finish_thread.submit(self._finish, frame, raw)
        except RuntimeError:  # Python ends, and starts no more work
            self._finish(frame, raw)

    def _finish(self, frame: _Frame, raw: Future[RawDetections]) -> None:
        me = threading.get_ident()
        self._enter(me)  # also for callbacks of the result
        prepared, result = frame.prepared, frame.result
        try:
            try:
                detections = finish(raw.result(), frame.config, prepared.meta, prepared.clock)
            finally:
                self._give_back(frame.workspace)
        except BaseException as error:  # goes to the caller, whatever it is
            result.set_exception(error)
        else:
            result.set_result(detections)
        finally:
            del raw, result  # an error's traceback holds this frame
            self._leave(frame)
            self._leave(me)

    def forward(self, prepared: Prepared) -> RawDetections:
        """Run the network on a prepared frame."""
        return self._backend.forward(prepared.inputs, prepared.clock)

    def _give_back(self, workspace: _Workspace) -> None:
        workspace.inputs.discard()
        self._idle_workspaces.put(workspace)

    def _prepare(self, workspace: _Workspace, cloud: PointArray, sweeps: Any, stream: Any,
                 columns: Any, clock: StageClock) -> Prepared:
        """Run the host stages before the network."""
        if stream is not None:
            if sweeps is not None or cloud.time_lag is not None:
                other = 'sweeps' if sweeps is not None else 'a time_lag column'
                raise InputError(f'stream: found {other} too, expected one of them',
                                 reason='stream')
            with self._stream(stream) as (cache, stamp_s, pose):
                past = cache.past_sweeps(stamp_s, pose)
                is_reset = stream.get('reset', False)
                prepared = self._fill(workspace, cloud, [] if is_reset else past, clock, pose)
                if is_reset:
                    cache.clear()
                cache.push(cloud.points, stamp_s, pose)
            return prepared
        if sweeps is not None and (isinstance(sweeps, (str, bytes, Mapping))
                                   or not isinstance(sweeps, Sequence)):
            raise InputError(f'sweeps: found {type(sweeps).__name__}, expected a list',
                             reason='sweeps')
        past, num_dropped = self._sweeps(sweeps or (), columns)
        prepared = self._fill(workspace, cloud, past, clock)
        prepared.meta['num_points_dropped'] += num_dropped
        return prepared

    def _read(self, points: Any, columns: Sequence[str] | None = None) -> PointArray:
        if isinstance(points, Cloud):
            return PointArray(points.points, None, points.num_dropped, points.num_received)
        return as_points(points, use_intensity=self.config.grid.use_intensity, columns=columns)

    def _fill(self, workspace: _Workspace, cloud: PointArray, past: Sequence[Sweep],
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
        num_rows = workspace.inputs.fill(voxels, clock)
        meta = {
            'num_points': len(dense.points),
            'num_points_per_sweep': list(dense.num_points_per_sweep),
            'num_points_dropped': cloud.num_dropped,
            'num_sweeps': len(dense.num_points_per_sweep),
            'num_sweeps_skipped': dense.num_skipped_sweeps,
            'num_voxels': num_voxels,
            'num_voxels_clipped': voxels.num_cells_clipped,
            'is_num_voxels_within_range': not voxels.clipped,
            'active_rows': list(num_rows),
            'capacity_bucket': capacity_bucket(num_rows),
        }
        return Prepared(workspace.inputs, meta, clock)

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
        self._backend.warmup()
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
            **self._backend.info,
            'pipeline': self.pipeline,
            'class_names': list(self.config.class_names),
            'grid_size_xyz': list(self.config.grid.size_xyz),
            'num_proposals': self.network.num_proposals,
            'level_capacities': list(self.network.level_capacities),
            'closed': self._closed,
        }

    def _release(self) -> None:
        self._network_thread.shutdown(wait=False)
        self._finish_thread.shutdown(wait=False)
        self._backend.close()
        self._streams.clear()
        self._idle_workspaces = queue.LifoQueue()


def _backend(name: str, weights: NetworkWeights, options: DeviceOptions,
             pipeline: int) -> Backend:
    if name == 'tt' or (name == 'auto' and device_nodes() and find_spec('ttnn')):
        return TtBackend(weights, options, num_stagings=max(pipeline, 1))
    return CpuBackend(weights)


def capacity_bucket(num_rows: Sequence[int]) -> int:
    """Return the index of the smallest capacity bucket that holds levels 1 to 4.

    :param num_rows: active rows of levels 1 to 4; further ones are not looked at.
    """
    for index, caps in enumerate(CAPACITY_BUCKETS):
        if all(rows <= cap for rows, cap in zip(num_rows[:4], caps, strict=True)):
            return index
    raise ValueError(f'{tuple(num_rows)} rows are beyond the largest bucket')
