# SPDX-License-Identifier: Apache-2.0
"""The convolutions of ``bbox_head``: features that proposals are read from, and the heat map."""

from __future__ import annotations

import torch
import ttnn

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.tt.convs import Arrays, Table, empty, empty_pairs, map_conv
from tt_perception.runtime.trace import Keep

_ROOT = 'bbox_head'


class HeatMap:
    """``shared_conv`` and ``heatmap_head``.

    ``shared_conv`` runs once over each of the neck's maps, and the second run adds the first
    one's result: with half the input channels, weights of twice as many output channels fit a
    core, and rows are gathered half as often.
    """

    def __init__(self, device, config: NetworkConfig, arrays: Arrays) -> None:
        x, y = config.feature_map_xy
        name, weight, bias = _layer(arrays, 'shared_conv')
        first, second = weight.split(config.neck_channels, dim=1)
        self._first = map_conv(device, name, first, bias, relu=False)
        self._second = map_conv(device, name, second, torch.zeros_like(bias), relu=False,
                                residual=True)
        self._hidden = map_conv(device, *_layer(arrays, 'heatmap_head.0.conv'), relu=True)
        self._logits = map_conv(device, *_layer(arrays, 'heatmap_head.1'), relu=False,
                                out_form='fp32')
        self._memory, self._room = (empty_pairs(device, x * y, config.hidden_channels)
                                    for _ in range(2))
        self._out = empty(device, (x * y, -(-config.num_classes // 16) * 16), ttnn.float32)

    def __call__(self, maps: list, same: Table, keep: Keep):
        """Take the neck's maps; return memory, pairs [cells, 2 * C], and float32 logits
        [cells, classes and padding]."""
        partial = self._first(maps[0], same, self._room)
        memory = self._second(maps[1], same, self._memory, residual=partial)
        keep(f'{_ROOT}.shared_conv', memory)
        hidden = self._hidden(memory, same, self._room)
        logits = self._logits(hidden, same, self._out)
        keep(f'{_ROOT}.heatmap_head', logits)
        return memory, logits


def _layer(arrays: Arrays, name: str) -> tuple[str, torch.Tensor, torch.Tensor]:
    name = f'{_ROOT}.{name}'
    return name, *(torch.from_numpy(arrays[f'{name}.{part}']) for part in ('weight', 'bias'))
