# SPDX-License-Identifier: Apache-2.0
"""What the programs of our own cost for a given frame, by counting.

**The time of a gathered row.** A gathering core spends its time on issuing reads, not on waiting:
all reads of a group are under way before it waits once. So a row costs the instructions of the
gather loop, counted in the disassembly of the compiled kernel (GCC 15, -O2), at one a cycle, on
two gathering processors a core:

==============================================  ============
a column of an output row that has no tap       17
any other column                                11
in it, a tap that exists                        31
in it, a tap that is missing                    17
the same, where input rows have 64 bytes        56
where taps are gathered one by one: it exists   36
the same: it is missing                         17
an output row, written in two pieces            45
==============================================  ============

At 110 cores and 1.35 GHz, 31 cycles on 220 processors are 0.1 ns a row over the whole chip; the
stock gather is taken at 5 ns. The bytes of the same rows, at least 64 each, at the limit of DRAM
are counted beside it, and the greater of the two counts. Left out are waits for the matrix unit,
turning rows into tiles inside the kernel, and the start of a program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tt_perception.bevfusion.columns import BLOCK_ROWS, map_columns
from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.rulebook import Rulebooks
from tt_perception.runtime.cost import DRAM_ALIGNMENT, Call, Limits, Operation, aligned

if TYPE_CHECKING:
    from tt_perception.bevfusion.tt.gatherconv import GatherConv
    from tt_perception.bevfusion.tt.peaks import Peaks

CYCLES = {'empty column': 17, 'column': 11, 'present tap': 31, 'missing tap': 17,
          'missing tap, rows of 64 bytes': 56, 'present tap, one by one': 36,
          'missing tap, one by one': 17, 'row written': 45}
_PAIR_BYTES = 4  # hi and lo of one number
_GATHERERS = 2  # processors of a core that gather
_ROOT = 'pts_middle_encoder'
_OUTPUT_LEVELS = {'subm_1': 0, 'subm_2': 1, 'subm_3': 2, 'subm_4': 3, 'down_2': 1, 'down_3': 2,
                  'down_4': 3, 'out': 4}  # index in active_rows


class Taps(NamedTuple):
    """What a table asks for.

    :ivar rows: output rows.
    :ivar taps: entries of a row.
    :ivar present: entries that exist, of all rows together.
    :ivar columns: columns of three entries of which at least one exists, of all rows together.
    :ivar inputs: input rows.
    """

    rows: int
    taps: int
    present: int
    columns: int
    inputs: int

    def scaled_to(self, rows: int, inputs: int) -> Taps:
        """Return as many rows with the same share of entries."""
        scale = rows / max(self.rows, 1)
        return Taps(rows, self.taps, round(self.present * scale), round(self.columns * scale),
                    inputs)


@dataclass(frozen=True)
class FrameCounts:
    """How full the tables of a frame are.

    :ivar active_rows: of levels 1 to 4 and of the output.
    :ivar tables: by name: ``subm_1`` to ``subm_4``, ``down_2`` to ``down_4``, ``out``.
    """

    name: str
    active_rows: tuple[int, ...]
    tables: Mapping[str, Taps]

    @classmethod
    def of(cls, name: str, rulebooks: Rulebooks) -> FrameCounts:
        """Count a frame."""
        named = {f'subm_{level}': table for level, table in enumerate(rulebooks.subm, 1)}
        named |= {f'down_{level}': table for level, table in enumerate(rulebooks.down, 2)}
        named['out'] = rulebooks.out
        inputs = _input_rows(rulebooks.num_rows)
        tables = {key: Taps(*table.shape, int(np.count_nonzero(table >= 0)),
                            int(np.count_nonzero(table.reshape(-1, 3).max(axis=1) >= 0)),
                            inputs[key])
                  for key, table in named.items()}
        return cls(name, rulebooks.num_rows, tables)

    def filling(self, capacities: tuple[int, ...], out_rows: int) -> FrameCounts:
        """Return the counts of a frame that fills a capacity bucket, with neighbours as here."""
        active_rows = (*capacities, min(out_rows, capacities[3]))
        rows = dict(zip(_OUTPUT_LEVELS, (active_rows[i] for i in _OUTPUT_LEVELS.values()),
                        strict=True))
        inputs = _input_rows(active_rows)
        return FrameCounts(f'a full bucket, with as many neighbours a row as {self.name}',
                           active_rows, {key: taps.scaled_to(rows[key], inputs[key])
                                         for key, taps in self.tables.items()})


def _input_rows(active_rows: tuple[int, ...]) -> dict[str, int]:
    """Return how many rows each table points into."""
    return {key: active_rows[level if key.startswith('subm') else level - 1]
            for key, level in _OUTPUT_LEVELS.items()}


def table_of(block: str) -> str:
    """Return the name of the table that the sparse convolutions of a block read."""
    layer = block.removeprefix(f'{_ROOT}.').removeprefix('encoder_layers.')
    if layer.startswith('conv_input'):
        return 'subm_1'
    if not layer.startswith('encoder_layer'):
        return 'out'
    level, part = int(layer[len('encoder_layer')]), layer.split('.')[1]
    return f'down_{level + 1}' if part == '2' else f'subm_{level}'


def taps_of(call: Call, block: str, frame: FrameCounts, config: NetworkConfig) -> Taps:
    """Return what the table of a convolution in a block of the network asks for."""
    conv = call.operation
    if block.startswith(_ROOT):
        taps = frame.tables[table_of(block)]
        x, y, z = config.level_shapes_xyz[-1]
        return taps if table_of(block) != 'out' else taps._replace(rows=x * y * z)
    x, y = config.feature_map_xy
    maps = {math.ceil(w * h / BLOCK_ROWS): (w, h) for w, h in ((x, y), (x // 2, y // 2))}
    source, target = (maps[blocks] for blocks in _map_blocks(call))
    words = map_columns(source, source[0] // target[0], conv.columns)
    present = sum(np.count_nonzero(words & (1 << tap)) for tap in range(3))
    return Taps(target[0] * target[1], conv.columns * conv.taps, int(present),
                int(np.count_nonzero(words)), source[0] * source[1])


def _map_blocks(call: Call) -> tuple[int, int]:
    """Return how many blocks of rows the maps before and behind a convolution have."""
    features, table = call.args[:2]
    return math.ceil(features.shape[0] / BLOCK_ROWS), getattr(table, 'words', table).shape[0]


def convolution(call: Call, taps: Taps, counted: Operation, limits: Limits) -> Operation:
    """Return the cost of a convolution.

    :param counted: what the recording says of its program.
    """
    conv: GatherConv = call.operation
    cost = conv.cost(taps.rows, taps.present)
    row_out = conv.channels_out * {'pairs': 4, 'fp32': 4, 'bf16': 2}[conv.out_form]
    weights = taps.taps * conv.channels_in * conv.channels_out * _PAIR_BYTES
    return replace(
        counted, name='GatherConv', shape=(taps.rows, conv.channels_out),
        bytes_read=cost.dram_bytes_read, bytes_written=cost.dram_bytes_written,
        flops=float(cost.flops), gathered_rows=cost.gathered_rows,
        row_bytes=conv.channels_in * _PAIR_BYTES,
        cycles=gather_cycles(conv, taps, limits.cores), l1_bytes=cost.l1_bytes_per_core,
        useful_flops=2.0 * cost.macs_useful,
        useful_bytes=(taps.inputs * conv.channels_in * _PAIR_BYTES + weights
                      + taps.rows * row_out))


def gather_cycles(conv: GatherConv, taps: Taps, cores: int) -> float:
    """Return the cycles of a gathering processor of the busiest core, see the module.

    A part of the output channels is computed by its own share of the cores, which gather for
    themselves.
    """
    cycles = _loop_cycles(conv, taps) + taps.rows * CYCLES['row written']
    blocks = math.ceil(taps.rows / BLOCK_ROWS)
    busiest = math.ceil(blocks / (cores // conv.plan.parts)) / max(blocks, 1)
    return cycles * busiest / _GATHERERS


def _loop_cycles(conv: GatherConv, taps: Taps) -> int:
    if conv.plan.group % conv.taps:  # not in whole columns
        return (taps.present * CYCLES['present tap, one by one']
                + (taps.rows * taps.taps - taps.present) * CYCLES['missing tap, one by one'])
    is_short = conv.channels_in * _PAIR_BYTES <= DRAM_ALIGNMENT
    missing = CYCLES['missing tap, rows of 64 bytes' if is_short else 'missing tap']
    return ((taps.rows * conv.columns - taps.columns) * CYCLES['empty column']
            + taps.columns * CYCLES['column'] + taps.present * CYCLES['present tap']
            + (taps.columns * conv.taps - taps.present) * missing)


def peaks(call: Call, counted: list[Operation], config: NetworkConfig) -> Operation:
    """Return the cost of the two programs that find the proposals."""
    finder: Peaks = call.operation
    cost = finder.cost()
    x, y = config.feature_map_xy
    useful = x * y * aligned(4 * config.num_classes)
    return replace(counted[0], name='Peaks (2 programs)', shape=counted[-1].shape,
                 bytes_read=cost.dram_bytes_read, bytes_written=cost.dram_bytes_written,
                 cycles=cost.estimated_cycles, l1_bytes=cost.l1_bytes_per_core,
                 dram_bytes=max(operation.dram_bytes for operation in counted),
                 useful_bytes=useful)

