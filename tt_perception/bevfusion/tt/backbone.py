# SPDX-License-Identifier: Apache-2.0
"""``pts_backbone``, SECOND: the map at two resolutions."""

from __future__ import annotations

import torch

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.tt.convs import Arrays, Table, empty_pairs, map_conv
from tt_perception.runtime.trace import Keep

_ROOT = 'pts_backbone'


class Backbone:
    """Two stages of 3 x 3 convolutions, the second at half the resolution."""

    def __init__(self, device, config: NetworkConfig, arrays: Arrays) -> None:
        x, y = config.feature_map_xy
        size_z = config.level_shapes_xyz[-1][2]
        self._stages, self._rooms = [], []
        for stage, channels in enumerate(config.backbone_channels):
            convs = []
            for i in range(1 + config.backbone_layers):
                name = f'{_ROOT}.blocks.{stage}.{3 * i}'
                weight = torch.from_numpy(arrays[f'{name}.weight'])
                if stage == 0 and i == 0:
                    weight = _z_outside(weight, size_z)
                bias = torch.from_numpy(arrays[f'{name}.bias'])
                convs.append(map_conv(device, name, weight, bias, relu=True))
            self._stages.append(convs)
            rows = x * y >> 2 * stage
            self._rooms.append([empty_pairs(device, rows, channels) for _ in range(2)])

    def __call__(self, x, halving: Table, same: tuple[Table, Table], keep: Keep) -> list:
        """Take the map; return the map after each stage.

        :param halving: table of the convolution between the stages.
        :param same: tables of the convolutions within each stage.
        """
        outputs = []
        for stage, (convs, rooms) in enumerate(zip(self._stages, self._rooms, strict=True)):
            for i, conv in enumerate(convs):
                table = halving if stage and i == 0 else same[stage]
                x = conv(x, table, rooms[i % 2])
            keep(f'{_ROOT}.blocks.{stage}', x)
            outputs.append(x)
        return outputs


def _z_outside(weight: torch.Tensor, size_z: int) -> torch.Tensor:
    """Reorder input channels from c * Z + z, as in the artifact, to z * C + c, as in the map."""
    c_out, _, kx, ky = weight.shape
    return weight.reshape(c_out, -1, size_z, kx, ky).transpose(1, 2).reshape(weight.shape)
