# SPDX-License-Identifier: Apache-2.0
"""From the map and the proposals to boxes and scores, as a ttnn graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import ttnn

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.tt import layout
from tt_perception.bevfusion.tt.decoder import Decoder, Linear, to_device
from tt_perception.bevfusion.tt.layout import TILE, Proposal
from tt_perception.bevfusion.tt.precision import POLICY
from tt_perception.runtime.trace import Keep


class Head:
    """Turns proposals into boxes: queries, one decoder layer, six branches.

    :param arrays: weights by the names of the network without norms, float32.
    :raises ConfigError: heads with more than 16 channels, more than 24 classes.
    """

    def __init__(self, device: ttnn.Device, config: NetworkConfig,
                 arrays: Mapping[str, np.ndarray]) -> None:
        layout.check(config)
        self._rows = layout.padded_proposals(config)
        position = layout.position_encoding(arrays, 'self_posembed', config)
        self._positions = to_device(device, layout.pair_rows(position), ttnn.bfloat16, tiles=False)
        self._pair_sum = Linear(device, layout.pair_sum(config.hidden_channels))
        self._class_encoding = Linear(device, layout.class_encoding(arrays))
        self._decoder = Decoder(device, config, arrays)
        self._branches, self._box, self._classes = (
            Linear.of(device, layer, POLICY['bbox_head.prediction_heads'])
            for layer in layout.branches(arrays, config))
        self._score_column = Linear(device, layout.score_column())
        self._place_columns = Linear(device, layout.place_columns())

    def __call__(self, memory: ttnn.Tensor, proposals: ttnn.Tensor, cells: ttnn.Tensor,
                 keep: Keep = lambda name, tensor: None) -> ttnn.Tensor:
        """Return what the network predicts for its proposals, in one tensor.

        :param memory: the map as pair rows, bfloat16 row-major [cells, 2 * C].
        :param proposals: float32 row-major [padded proposals, 32], see :class:`.layout.Proposal`.
        :param cells: uint32 row-major [1, padded proposals]: the row of each proposal in the map.
        :param keep: is called with name and value of every block on the way.
        :returns: float32 tiles [padded proposals, 32], see :class:`.layout.Packed`.
        """
        proposals = ttnn.to_layout(ttnn.reshape(proposals, [1, 1, self._rows, TILE]),
                                   ttnn.TILE_LAYOUT)
        query = ttnn.add(self._gather(memory, cells), self._class_encoding(proposals))
        keep('bbox_head.query', query)
        position = self._gather(self._positions, cells)
        keep(f'{layout.DECODER}.self_posembed', position)
        return self._predict(self._decoder(query, position, memory, keep), proposals)

    def _gather(self, pairs: ttnn.Tensor, cells: ttnn.Tensor) -> ttnn.Tensor:
        """Return rows of pair rows as float32 tiles [1, 1, padded proposals, C], exact."""
        rows = ttnn.embedding(cells, pairs, layout=ttnn.TILE_LAYOUT)
        return self._pair_sum(ttnn.reshape(rows, [1, 1, self._rows, pairs.shape[1]]))

    def _predict(self, query: ttnn.Tensor, proposals: ttnn.Tensor) -> ttnn.Tensor:
        hidden = self._branches(query, activation='relu')
        # The one-hot columns pick the class of the proposal; nothing else is in its columns.
        certainty = ttnn.multiply(ttnn.sigmoid(self._classes(hidden)), proposals)
        heat = ttnn.sigmoid(ttnn.slice(proposals, [0, 0, 0, Proposal.LOGIT],
                                       [1, 1, self._rows, Proposal.LOGIT + 1]))
        places = ttnn.add(self._score_column(ttnn.multiply(certainty, heat)),
                          self._place_columns(proposals))
        return ttnn.reshape(ttnn.add(self._box(hidden), places), [self._rows, TILE])
