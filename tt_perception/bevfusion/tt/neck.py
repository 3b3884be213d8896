# SPDX-License-Identifier: Apache-2.0
"""``pts_neck``, FPN: both stages of the backbone at one resolution."""

from __future__ import annotations

import torch

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.tt.convs import Arrays, Table, empty_pairs, map_conv
from tt_perception.bevfusion.tt.gatherconv import Target
from tt_perception.runtime.trace import Keep

_ROOT = 'pts_neck.deblocks'


class Neck:
    """Two maps that are not joined: the convolution behind takes one after the other.

    The transposed convolution with kernel and stride 2 is four pointwise ones: each input cell
    makes four output cells, and no output cell has a second input.
    """

    def __init__(self, device, config: NetworkConfig, arrays: Arrays) -> None:
        x, y = config.feature_map_xy
        self._width = y // 2
        fine, coarse = (torch.from_numpy(arrays[f'{_ROOT}.{i}.0.weight']) for i in range(2))
        biases = [torch.from_numpy(arrays[f'{_ROOT}.{i}.0.bias']) for i in range(2)]
        self._fine = map_conv(device, _ROOT, fine, biases[0], relu=True)
        coarse = coarse.transpose(0, 1)  # [C_in, C_out, 2, 2] in a transposed convolution
        self._quarters = [
            (i, j, map_conv(device, _ROOT, coarse[:, :, i:i + 1, j:j + 1], biases[1], relu=True))
            for i in range(2) for j in range(2)]
        self._maps = [empty_pairs(device, x * y, config.neck_channels) for _ in range(2)]

    def __call__(self, stages: list, cells: tuple[Table, Table], keep: Keep) -> list:
        """Take the map after each stage; return both at the first one's resolution.

        :param cells: tables of pointwise convolutions over the cells of each stage.
        """
        width, (fine, coarse) = self._width, self._maps
        self._fine(stages[0], cells[0], fine)
        keep(f'{_ROOT}.0', fine)
        for i, j, conv in self._quarters:
            conv(stages[1], cells[1], coarse, target=Target(
                width=width, outer=4 * width, inner=2, offset=i * 2 * width + j))
        keep(f'{_ROOT}.1', coarse)
        return self._maps
