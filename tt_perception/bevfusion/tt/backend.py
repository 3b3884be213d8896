# SPDX-License-Identifier: Apache-2.0
"""Backend ``tt``: the network as traces on one Blackhole p150."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tt_perception.bevfusion.columns import FrameBuffers, TableLayout
from tt_perception.bevfusion.config import CAPACITY_BUCKETS, NetworkConfig
from tt_perception.bevfusion.detections import RawDetections
from tt_perception.bevfusion.sites import SiteLevels
from tt_perception.bevfusion.tt.precision import POLICY
from tt_perception.bevfusion.voxelize import Voxels
from tt_perception.bevfusion.weights import NetworkWeights
from tt_perception.runtime.device import OPERATION_TIMEOUT_S, Device
from tt_perception.runtime.errors import CapacityError, ConfigError, DeviceError
from tt_perception.runtime.model import StageClock
from tt_perception.runtime.staging import HostBuffer
from tt_perception.runtime.trace import TraceRunner

_log = logging.getLogger(__name__)
_TRACE_REGION_BYTES = 64 << 20
_LONGEST_TIMEOUT_S = 86_400


@dataclass(frozen=True)
class DeviceOptions:
    """Which device, and how it is used.

    :ivar device_id: which card, in the order of their PCI addresses.
    :ivar device: an open ttnn device to use instead; it is not closed here. Nothing else may run
        on it, or be allocated on it, while the backend is open: a trace would overwrite it.
    :ivar dispatch: ``auto``, ``eth`` or ``worker``, see :class:`Device`.
    :ivar timeout_s: after this time without an answer the device is given up.
    :ivar is_cancelled: asked between blocks while kernels are compiled; true ends the loading.
    """

    device_id: int = 0
    device: Any = None
    dispatch: str = 'auto'
    timeout_s: float = 5.0
    is_cancelled: Callable[[], bool] = lambda: False


class Staging:
    """Host memory from which one frame is uploaded, for each capacity bucket."""

    def __init__(self, layouts: list[TableLayout], num_features: int) -> None:
        self._buffers = []
        self._frames = []
        for layout in layouts:
            shapes = FrameBuffers.shapes(layout, num_features)
            buffers = {name: HostBuffer(shape, 'bfloat16' if name == 'features' else 'uint32')
                       for name, (shape, _) in shapes.items()}
            self._buffers.append(buffers)
            self._frames.append(FrameBuffers(layout, **{name: buffer.array for name, buffer
                                                        in buffers.items()}))

    def fill(self, bucket: int, sites: SiteLevels, order: np.ndarray,
             features: np.ndarray) -> dict[str, HostBuffer]:
        """Write a frame; return what is to be uploaded, by the names of a bucket's inputs."""
        self._frames[bucket].fill(sites, order, features)
        return self._buffers[bucket]


class TtInputs:
    """The host side of one frame: its sites, and the staging it occupies until it is uploaded.

    :ivar variant: of the graph, by the frame's capacity bucket.
    :ivar upload: input -> host buffer.
    """

    def __init__(self, network: NetworkConfig, layouts: list[TableLayout],
                 stagings: queue.SimpleQueue[Staging]) -> None:
        self._sites = SiteLevels(network)
        self._layouts = layouts
        self._stagings = stagings
        self._staging: Staging | None = None
        self.variant = ''
        self.upload: dict[str, HostBuffer] = {}

    def fill(self, voxels: Voxels, clock: StageClock) -> tuple[int, ...]:
        """Take a frame; return the active rows of levels 1 to 4 and of the output.

        :raises CapacityError: a level has more active rows than the largest bucket holds.
        """
        order = self._sites.place(voxels.coords_zyx)
        num_rows = self._sites.num_rows
        bucket = self._bucket(num_rows[:4])
        clock.lap('rulebook')
        self._staging = self._stagings.get()
        clock.lap('wait_staging')
        self.upload = self._staging.fill(bucket, self._sites, order, voxels.features)
        self.variant = f'sparse_{bucket}'
        clock.lap('tables')
        return num_rows

    def _bucket(self, num_rows: tuple[int, ...]) -> int:
        """Return the smallest bucket that holds levels 1 to 4."""
        for bucket, layout in enumerate(self._layouts):
            over = [i for i, cap in enumerate(layout.capacities) if num_rows[i] > cap]
            if not over:
                return bucket
        raise CapacityError(f'level {over[0] + 1}: found {num_rows[over[0]]} active rows, '
                            f'expected at most {layout.capacities[over[0]]}')

    def discard(self) -> None:
        """Let the next frame have the staging; may be repeated."""
        staging, self._staging = self._staging, None
        if staging is not None:
            self.upload = {}
            self._stagings.put(staging)


class TtBackend:
    """The network on a card, in traces that one thread replays.

    :param num_stagings: frames that can wait to be uploaded.
    :param capacities: rows of levels 1 to 4 of each capacity bucket, smallest first.
    :raises ConfigError: ttnn is missing, a wrong option, or a network that does not fit.
    :raises DeviceError: there is no such device, or it refuses something.
    """

    name = 'tt'

    def __init__(self, weights: NetworkWeights, options: DeviceOptions, num_stagings: int = 1,
                 capacities=CAPACITY_BUCKETS) -> None:
        if (not isinstance(options.timeout_s, (int, float))
                or not 0 < options.timeout_s <= _LONGEST_TIMEOUT_S):
            raise ConfigError(f'timeout_s: found {options.timeout_s!r}, expected more than 0 and '
                              f'at most {_LONGEST_TIMEOUT_S}')
        self._network = weights.config
        self._timeout_s = options.timeout_s
        self._stagings: queue.SimpleQueue[Staging] = queue.SimpleQueue()
        # ttnn's own limit counts for each operation; ours is to be the one that is met.
        self._device = Device(options.device_id, external=options.device,
                              dispatch=options.dispatch, trace_region_size=_TRACE_REGION_BYTES,
                              operation_timeout_s=max(OPERATION_TIMEOUT_S, 2 * options.timeout_s))
        try:
            if (arch := self._device.info['arch']) != 'blackhole':
                raise DeviceError(f'{self._device.name}: found {arch}, expected blackhole')
            from tt_perception.bevfusion.tt.graph import DENSE, BEVFusionGraph, unpack
            self._dense, self._unpack = DENSE, unpack
            graph = BEVFusionGraph(weights, capacities)
            self._layouts = graph.layouts
            for _ in range(num_stagings):
                self._stagings.put(Staging(graph.layouts, weights.config.in_channels))
            self._runner = TraceRunner(graph, self._device, timeout_s=options.timeout_s,
                                       traced=self._device.info['can_trace'],
                                       on_progress=lambda text: _log.info('%s', text),
                                       is_cancelled=options.is_cancelled)
            self._runner.prepare()
        except BaseException:
            self.close()
            raise

    def new_inputs(self) -> TtInputs:
        """Return the host side of one more frame in flight."""
        return TtInputs(self._network, self._layouts, self._stagings)

    def forward(self, inputs: TtInputs, clock: StageClock) -> RawDetections:
        """Run the network on a frame.

        :raises DeviceError: the device did not answer in time, or failed.
        """
        packed = self._device.call(self._run, inputs, clock, timeout_s=self._timeout_s)
        raw = self._unpack(packed, self._network.num_proposals)
        clock.lap('forward')
        return raw

    def _run(self, inputs: TtInputs, clock: StageClock) -> np.ndarray:
        clock.lap('wait_device')
        runner = self._runner
        runner.write(inputs.variant, inputs.upload)
        clock.lap('upload')
        runner.replay(inputs.variant)
        inputs.discard()
        clock.lap('sparse')
        runner.replay(self._dense)
        clock.lap('dense')
        packed = runner.read(self._dense).numpy()
        clock.lap('read_back')
        return packed

    def warmup(self) -> None:
        """Do nothing: the traces are captured when the backend is made."""

    @property
    def info(self) -> dict[str, Any]:
        """What runs, as plain values."""
        runner = self._runner.info
        return {'backend': self.name,
                'device': self._device.info,
                'capacity_buckets': [list(layout.capacities) for layout in self._layouts],
                'precision': {block: asdict(p) for block, p in POLICY.items()},
                'traced': runner['traced'],
                'trace_bytes': runner['trace_bytes']}

    def close(self) -> None:
        """Release the traces and close the device, if it was opened here."""
        self._device.close()
        while not self._stagings.empty():  # ttnn complains of host memory that outlives it
            self._stagings.get_nowait()
