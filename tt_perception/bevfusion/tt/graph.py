# SPDX-License-Identifier: Apache-2.0
"""The whole network on one device, as variants that can be captured in traces.

``sparse_0``, ``sparse_1``, ``sparse_2``: features and column tables of one capacity bucket to the
bird's-eye map. ``dense``: the map to one tensor with all that the host needs. The map stays on
the device between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ttnn

from tt_perception.bevfusion.columns import (
    BLOCK_ROWS,
    COUNT_WORDS,
    TableLayout,
    blocks_of,
    map_columns,
)
from tt_perception.bevfusion.config import CAPACITY_BUCKETS, NetworkConfig
from tt_perception.bevfusion.detections import RawDetections
from tt_perception.bevfusion.tt import layout
from tt_perception.bevfusion.tt.backbone import Backbone
from tt_perception.bevfusion.tt.convs import Table, empty, empty_pairs, words
from tt_perception.bevfusion.tt.encoder import BucketTensors, SparseEncoder
from tt_perception.bevfusion.tt.head import Head
from tt_perception.bevfusion.tt.heatmap import HeatMap
from tt_perception.bevfusion.tt.neck import Neck
from tt_perception.bevfusion.tt.peaks import PROPOSAL_COLUMNS, Peaks
from tt_perception.bevfusion.weights import NetworkWeights
from tt_perception.runtime.errors import ConfigError
from tt_perception.runtime.trace import Keep

Capacities = Sequence[tuple[int, int, int, int]]
DENSE = 'dense'
_SPARSE = 'sparse_'
_FINE, _COARSE, _CELLS_XYZ = range(3)  # static counts


def check_network(config: NetworkConfig) -> None:
    """Refuse a network that the kernels cannot run.

    :raises ConfigError: channels of a map that are not whole tiles, or what the head cannot do.
    """
    for name, channels in {'bev_channels': config.bev_channels,
                           'backbone_channels': config.backbone_channels[0],
                           'backbone_channels[1]': config.backbone_channels[1],
                           'neck_channels': config.neck_channels,
                           'hidden_channels': config.hidden_channels}.items():
        if channels % 32:
            raise ConfigError(f'{name}: found {channels}, backend tt expects a multiple of 32')
    layout.check(config)


class BEVFusionGraph:
    """A model for :class:`tt_perception.runtime.trace.TraceRunner`.

    :param capacities: rows of levels 1 to 4 of each bucket, smallest first.
    :raises ConfigError: a network that the kernels cannot run.
    """

    def __init__(self, weights: NetworkWeights, capacities: Capacities = CAPACITY_BUCKETS) -> None:
        check_network(weights.config)
        self.layouts = [TableLayout.of(weights.config, caps) for caps in capacities]
        self._weights = weights
        self._network: _Network | None = None

    def variants(self) -> list[str]:
        """Return the names of all variants."""
        return [f'sparse_{i}' for i in range(len(self.layouts))] + [DENSE]

    def allocate(self, device) -> None:
        """Lay out weights, static tables and room for every variant."""
        self._network = _Network(device, self._weights, self.layouts)

    def inputs(self, variant: str) -> Mapping[str, Any]:
        """Return the tensors that the host writes before a variant runs."""
        return {} if variant == DENSE else self._network.buckets[_index(variant)].inputs

    def forward(self, variant: str, keep: Keep = lambda name, tensor: None):
        """Run a variant; call ``keep`` with name and output of every block on the way.

        :returns: the map, or for ``dense`` float32 [proposals in whole tiles, 32], see
            :func:`unpack`.
        """
        if variant == DENSE:
            return self._network.run_dense(keep)
        return self._network.run_sparse(_index(variant), keep)

    def release(self) -> None:
        """Drop all tensors."""
        self._network = None


def _index(variant: str) -> int:
    return int(variant.removeprefix(_SPARSE))


class _Network:
    """The network's blocks and tensors on one device."""

    def __init__(self, device, weights: NetworkWeights, layouts: Sequence[TableLayout]) -> None:
        config, arrays = weights.config, weights.arrays
        fine = x, y = config.feature_map_xy
        coarse = (x // 2, y // 2)
        size_z = config.level_shapes_xyz[-1][2]
        counts = np.zeros((1, COUNT_WORDS), np.uint32)
        counts[0, :3] = x * y, coarse[0] * coarse[1], x * y * size_z
        self._counts = words(device, counts)

        def table(array: np.ndarray, count_index: int) -> Table:
            return Table(words(device, array), self._counts, count_index)

        self._same = (table(map_columns(fine), _FINE), table(map_columns(coarse), _COARSE))
        self._halving = table(map_columns(fine, stride=2), _COARSE)
        self._cells = (table(map_columns(fine, kernel_size=1), _FINE),
                       table(map_columns(coarse, kernel_size=1), _COARSE))
        self.buckets = [BucketTensors.allocate(device, config, layout) for layout in layouts]
        self._bev = empty_pairs(device, x * y, size_z * config.bev_channels)
        padded = blocks_of(config.num_proposals) * BLOCK_ROWS
        self._proposals = empty(device, (padded, PROPOSAL_COLUMNS), ttnn.float32)
        self._proposal_cells = empty(device, (1, padded), ttnn.uint32)
        self._encoder = SparseEncoder(device, config, arrays)
        self._backbone = Backbone(device, config, arrays)
        self._neck = Neck(device, config, arrays)
        self._heatmap = HeatMap(device, config, arrays)
        self._peaks = Peaks(device, size_x=x, size_y=y, num_classes=config.num_classes,
                            pooled_classes=config.pooled_classes,
                            num_proposals=config.num_proposals)
        self._head = Head(device, config, arrays)

    def run_sparse(self, index: int, keep: Keep):
        """Run the sparse encoder on the inputs of a bucket; return the map."""
        bucket = self.buckets[index]
        cells = Table(bucket.inputs['out_table'], self._counts, _CELLS_XYZ)
        return self._encoder(bucket, cells, self._bev, keep)

    def run_dense(self, keep: Keep):
        """Run everything behind the map; return what is packed for the host."""
        stages = self._backbone(self._bev, self._halving, self._same, keep)
        maps = self._neck(stages, self._cells, keep)
        memory, logits = self._heatmap(maps, self._same[0], keep)
        self._peaks(logits, self._proposals, self._proposal_cells)
        keep('bbox_head.proposals', self._proposals)
        return self._head(memory, self._proposals, self._proposal_cells, keep)


def unpack(packed: np.ndarray, num_proposals: int) -> RawDetections:
    """Return what the head has packed; centres of the cells are added here, in float32.

    :param packed: float32 [proposals or more, 32]: ten rows of boxes, score, x, y, label.
    """
    packed = packed[:num_proposals]
    bbox_pred = np.ascontiguousarray(packed[:, :10].T)
    bbox_pred[:2] += packed[:, 11:13].T + np.float32(0.5)
    return RawDetections(bbox_pred, np.ascontiguousarray(packed[:, 10]),
                         packed[:, 13].astype(np.int64))
