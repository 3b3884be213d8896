# SPDX-License-Identifier: Apache-2.0
"""``pts_middle_encoder``: sparse convolutions on four levels, into the bird's-eye map.

No step touches more rows than the frame has: the kernels read the number of rows on the device.
The last convolution has a row for every cell of the map and writes it there, zeros where no site
is, so that there is neither a scatter nor anything to clear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import ttnn

from tt_perception.bevfusion.columns import FrameBuffers, TableLayout
from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.tt.convs import (
    Arrays,
    Table,
    empty,
    empty_pairs,
    sparse_conv,
    words,
)
from tt_perception.bevfusion.tt.gatherconv import Target
from tt_perception.runtime.trace import Keep

_ROOT = 'pts_middle_encoder'


@dataclass(frozen=True)
class BucketTensors:
    """What one capacity bucket has on the device.

    :ivar inputs: tensors in the form of :class:`FrameBuffers`, by their names there.
    :ivar rooms: for each level three tensors for its features, [rows, 2 * channels].
    """

    layout: TableLayout
    inputs: dict[str, Any]
    rooms: list[list[Any]]

    @classmethod
    def allocate(cls, device, config: NetworkConfig, layout: TableLayout) -> BucketTensors:
        """Make room for a bucket in the device's DRAM."""
        shapes = {name: shape for name, (shape, _)
                  in FrameBuffers.shapes(layout, config.in_channels).items()}
        inputs = {'features': empty(device, shapes['features'], ttnn.bfloat16),
                  'tables': empty(device, shapes['tables'], ttnn.uint32)}
        # The network is warmed up before a frame is written, and the memory of a card holds
        # anything: no rows are to be found then, and no cell of the map is to have a site.
        for name in ('out_table', 'counts'):
            inputs[name] = words(device, np.zeros(shapes[name], np.uint32))
        rooms = [[empty_pairs(device, layout.rows_of(level), channels) for _ in range(3)]
                 for level, channels in enumerate(config.sparse_channels, 1)]
        return cls(layout, inputs, rooms)

    def table(self, level: int, first_block: int) -> Table:
        """Return the table of as many rows as level 1 to 4 has."""
        return Table(self.inputs['tables'], self.inputs['counts'], level - 1, first_block)


class SparseBlock:
    """Two submanifold convolutions and a way around them."""

    def __init__(self, device, arrays: Arrays, name: str) -> None:
        self.conv1 = sparse_conv(device, arrays, f'{name}.conv1', relu=True)
        self.conv2 = sparse_conv(device, arrays, f'{name}.conv2', relu=True, residual=True)

    def __call__(self, x, table: Table, middle, out):
        """Take rows ``x``, use ``middle``, write and return ``out``."""
        self.conv1(x, table, middle)
        return self.conv2(middle, table, out, residual=x)


class SparseEncoder:
    """Four levels of submanifold blocks; each level halves the grid."""

    def __init__(self, device, config: NetworkConfig, arrays: Arrays) -> None:
        self._config = config
        self._conv_input = sparse_conv(device, arrays, f'{_ROOT}.conv_input.0', relu=True)
        self._blocks, self._down = [], []
        for level in range(1, 5):
            name = self._layer(level)
            self._blocks.append([SparseBlock(device, arrays, f'{name}.{i}') for i in range(2)])
            if level < 4:
                self._down.append(sparse_conv(device, arrays, f'{name}.2.0', relu=True))
        self._conv_out = sparse_conv(device, arrays, f'{_ROOT}.conv_out.0', relu=True,
                                     bias_where_present=True)

    @staticmethod
    def _layer(level: int) -> str:
        return f'{_ROOT}.encoder_layers.encoder_layer{level}'

    def __call__(self, bucket: BucketTensors, cells: Table, bev, keep: Keep):
        """Take a bucket's inputs; write and return the map.

        :param cells: table of the last convolution, a row for every cell (x, y, z).
        :param bev: pairs [X * Y, 2 * Z * C], channel = z * C + c.
        """
        layout = bucket.layout
        table = bucket.table(1, layout.subm[0])
        x = self._conv_input(bucket.inputs['features'], table, bucket.rooms[0][0])
        keep(f'{_ROOT}.conv_input', x)
        for level in range(1, 5):
            first, middle, other = bucket.rooms[level - 1]
            table = bucket.table(level, layout.subm[level - 1])
            for i, (block, out) in enumerate(zip(self._blocks[level - 1], (other, first),
                                                 strict=True)):
                x = block(x, table, middle, out)
                keep(f'{self._layer(level)}.{i}', x)
            if level < 4:
                table = bucket.table(level + 1, layout.down[level - 1])
                x = self._down[level - 1](x, table, bucket.rooms[level][0])
                keep(f'{self._layer(level)}.2', x)
        config = self._config
        size_z = config.level_shapes_xyz[-1][2]
        self._conv_out(x, cells, bev, target=Target(size_z * config.bev_channels,
                                                    rows_per_page=size_z))
        keep(f'{_ROOT}.bev', bev)
        return bev
