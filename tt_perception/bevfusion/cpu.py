# SPDX-License-Identifier: Apache-2.0
"""Backend ``cpu``: the reference network on the processor."""

from __future__ import annotations

from typing import Any

import numpy as np

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.detections import RawDetections
from tt_perception.bevfusion.rulebook import RulebookBuilder, Rulebooks
from tt_perception.bevfusion.voxelize import Voxels
from tt_perception.bevfusion.weights import NetworkWeights
from tt_perception.runtime.errors import ConfigError
from tt_perception.runtime.model import StageClock


class CpuInputs:
    """What the reference network is given of one frame; its buffers are allocated once.

    :ivar features: float32 [n, F], one row an active voxel, in the order of the rulebooks.
    :ivar rulebooks: gather tables of all sparse convolutions.
    """

    def __init__(self, network: NetworkConfig) -> None:
        self._builder = RulebookBuilder(network)
        self._rows = np.empty((network.level_capacities[0], network.in_channels), np.float32)
        self.features = self._rows[:0]
        self.rulebooks: Rulebooks | None = None

    def fill(self, voxels: Voxels, clock: StageClock) -> tuple[int, ...]:
        """Take a frame; return the active rows of levels 1 to 4 and of the output.

        :raises CapacityError: a level has more active rows than its buffers hold.
        """
        self.rulebooks = self._builder(voxels.coords_zyx)
        self.features = self.rulebooks.features_by_row(voxels.features, self._rows)
        clock.lap('rulebook')
        return self.rulebooks.num_rows

    def discard(self) -> None:
        """Do nothing: the next frame overwrites this one."""


class CpuBackend:
    """The reference network on the CPU.

    :param weights: of a folded network.
    :raises ConfigError: torch is not installed.
    """

    name = 'cpu'

    def __init__(self, weights: NetworkWeights) -> None:
        try:
            import torch
        except ImportError:
            raise ConfigError("backend: 'cpu' needs torch, which is not installed") from None
        from tt_perception.bevfusion.reference import BEVFusionNet
        self._torch = torch
        self._network = weights.config
        self._net = BEVFusionNet(weights.config, folded=True)
        self._net.load_state_dict({k: torch.from_numpy(v) for k, v in weights.arrays.items()})
        self._net.eval()

    def new_inputs(self) -> CpuInputs:
        """Return the buffers of one frame in flight."""
        return CpuInputs(self._network)

    def forward(self, inputs: CpuInputs, clock: StageClock) -> RawDetections:
        """Run the network on a frame."""
        with self._torch.inference_mode():
            outputs = self._net(self._torch.from_numpy(inputs.features), inputs.rulebooks)
        clock.lap('forward')
        return RawDetections(*(output.numpy() for output in outputs))

    def warmup(self) -> None:
        """Do nothing: the first frame warms it up."""

    @property
    def info(self) -> dict[str, Any]:
        """What runs, as plain values."""
        return {'backend': self.name}

    def close(self) -> None:
        """Drop the network."""
        self._net = None
