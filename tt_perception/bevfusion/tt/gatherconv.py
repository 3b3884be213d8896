# SPDX-License-Identifier: Apache-2.0
"""The one convolution kernel of the network: gather, multiply, add, activate, split.

Sparse 3 x 3 x 3, dense 3 x 3 and 1 x 1 convolutions are the same program: each output row gathers
the input rows that a column table names, and multiplies them with the weights of their taps. No
gathered matrix is written to DRAM. How many rows there are is read by the kernels, so that
a captured trace serves every frame that fits the tensors.

Features are *pair rows*: bfloat16 ``[rows, 2 C]``, row-major, a row ``[hi(C) | lo(C)]`` of the
value ``hi + lo``. The matrix unit, as the functional simulator has it, aligns the products of
eight neighbouring channels to the greatest one and rounds them there to 12 bits, an error of
2.5e-4 when hi is simply the value rounded. So hi is a multiple of a step common to the row, less
than 128 steps in size, and the first term of the weights a multiple of a step common to eight
channels, less than 32 steps: their products are exact, and what is rounded is small
(:func:`split_rows`, :func:`split_weight`). Two phases of the matrix unit (HiFi2) take in all bits
of such numbers. Rows made otherwise, with 8 bits in hi, need all four phases (HiFi4).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import ttnn
from torch import Tensor

from tt_perception.bevfusion.columns import BLOCK_ROWS, COUNT_WORDS, padded_channels
from tt_perception.runtime.errors import ConfigError

OUT_FORMS = ('pairs', 'fp32', 'bf16')

_FIDELITIES = ('HiFi2', 'HiFi3', 'HiFi4')
_KERNELS = Path(__file__).parent / 'kernels'
_TILE = 32
_TILE_BYTES = _TILE * _TILE * 2
_DRAM_READ_BYTES = 64
_MAX_PAGES = 1 << 32

# L1 of a core that circular buffers may take; the rest is the firmware's and the kernels'.
_L1_BUDGET_BYTES = 1_440_000
_MAX_GROUP_TAPS = 9
_SUMMED_AT_ONCE = 8  # channels whose products the matrix unit aligns with one another
_HI_BITS = 7
_WEIGHT_BITS = 5
_BIAS_ROWS = (0, 8, 16)  # no two among eight neighbours

(_CB_ROWS, _CB_ROWS_2, _CB_TABLE, _CB_TABLE_2, _CB_TILES, _CB_WEIGHTS, _CB_COUNT, _CB_PRESENT,
 _CB_RESIDUAL, _CB_OUT) = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16)


def _round_to_step(values: Tensor, greatest: Tensor, bits: int) -> Tensor:
    """Round to multiples of a power of two so that ``greatest`` is less than 2^bits of them."""
    exponent = torch.frexp(greatest * (1 + 2 ** -bits)).exponent - bits
    return torch.ldexp(torch.round(torch.ldexp(values, -exponent)), exponent)


def split_rows(values: Tensor) -> Tensor:
    """Return pair rows of float32 ``values`` [rows, C]: bfloat16 [rows, 2 C].

    hi has at most 7 significant bits and one step a row; lo is the rest, in bfloat16. What hi and
    lo lack together is at most 2^-16 of the greatest value of the row.
    """
    values = values.float()
    greatest = values.abs().amax(dim=-1, keepdim=True)
    hi = _round_to_step(values, greatest, _HI_BITS)
    return torch.cat([hi, values - hi], dim=-1).bfloat16()


def split_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return two float32 terms of a weight [taps, C_in, C_out]; both are bfloat16 numbers.

    C_in is a multiple of 8. The first has 5 significant bits and one step for eight neighbouring
    channels of a tap and an output channel; the second is the rest.
    """
    groups = weight.float().unflatten(1, (-1, _SUMMED_AT_ONCE))
    first = _round_to_step(groups, groups.abs().amax(dim=2, keepdim=True), _WEIGHT_BITS)
    second = (groups - first).bfloat16().float()
    return first.flatten(1, 2), second.flatten(1, 2)


@dataclass(frozen=True)
class Target:
    """Where output rows go.

    Row r is slot ``r % rows_per_page`` of place ``q = r // rows_per_page``. Place q is page
    ``offset + q``, or, with a width, page ``offset + q // width * outer + q % width * inner``. A
    row fills channels ``channel_offset + slot * C_out`` and following, of the hi part and (pairs)
    of the lo part, which begins at channel ``channels``.

    :ivar channels: channels of a page (of its hi part); by default those of the rows in it.
    """

    channels: int | None = None
    channel_offset: int = 0
    rows_per_page: int = 1
    width: int | None = None
    outer: int = 0
    inner: int = 1
    offset: int = 0


@dataclass(frozen=True)
class GatherConvCost:
    """What one call does, all cores together.

    :ivar flops: what the matrix unit computes, padding and the terms of the products included.
    :ivar macs_useful: multiply-accumulates of the convolution itself.
    :ivar dram_bytes_read: features as often as they are gathered, tables, weights, residual.
    :ivar dram_bytes_written: output rows.
    :ivar gathered_rows: reads of input rows.
    :ivar l1_bytes_per_core: circular buffers.
    :ivar fidelity: of the matrix unit, by the name that ttnn has for it.
    """

    flops: int
    macs_useful: int
    dram_bytes_read: int
    dram_bytes_written: int
    gathered_rows: int
    l1_bytes_per_core: int
    fidelity: str


@dataclass(frozen=True)
class Plan:
    """How a convolution is laid out over parts of its output channels and in L1.

    :ivar out_tiles: tiles of 32 output channels of a part.
    :ivar parts: parts; cores are divided among them.
    :ivar group: taps gathered before one barrier.
    :ivar buffers: groups that each of the two gathering kernels has room for.
    :ivar pages: pages of each circular buffer by its index.
    :ivar page_bytes: their sizes.
    """

    out_tiles: int
    parts: int
    group: int
    buffers: int
    pages: dict[int, int]
    page_bytes: dict[int, int]

    @property
    def l1_bytes(self) -> int:
        """Bytes of L1 that a core needs."""
        return sum(count * self.page_bytes[index] for index, count in self.pages.items())


@dataclass(frozen=True)
class _Shape:
    """What decides the form of the program."""

    columns: int
    taps: int
    channels_in: int
    channels_out: int
    residual: bool
    out_form: str
    bias_where_present: bool

    @property
    def all_taps(self) -> int:
        return self.columns * self.taps

    @property
    def tap_tiles(self) -> int:
        """Tiles of a gathered row, [hi|lo]."""
        return 2 * self.channels_in // _TILE

    @property
    def tap_weights(self) -> int:
        """Rows of weight tiles of a tap: hi and lo take the same ones."""
        return -(-self.channels_in // _TILE)

    @property
    def all_out_tiles(self) -> int:
        return -(-self.channels_out // _TILE)

    @property
    def table_bytes(self) -> int:
        """Bytes of the words of a block."""
        return self.columns * BLOCK_ROWS * 4

    def zero_bytes(self, group: int) -> int:
        """Bytes of zeros that a gathering kernel keeps: for a column without taps, or a tap."""
        return (1 if group % self.taps else self.taps) * 4 * self.channels_in

    @property
    def out_item(self) -> int:
        return 4 if self.out_form == 'fp32' else 2

    def residual_tiles(self, out_tiles: int) -> int:
        """Tiles of a residual row of a part, [hi|lo]."""
        if not self.residual:
            return 0
        return 1 if self.channels_out < _TILE else 2 * out_tiles

    def constant_tiles(self, out_tiles: int) -> int:
        """Tiles that a core of a part keeps: weights, bias, identities, ones."""
        rows = self.all_taps * self.tap_weights + 1 + (out_tiles if self.residual else 0)
        return rows * 2 * out_tiles + 1


def plan(shape: _Shape, budget_bytes: int = _L1_BUDGET_BYTES) -> Plan:
    """Choose the widest part that fits L1, then the greatest group, double-buffered if it can be.

    :raises ConfigError: nothing fits.
    """
    groups = [g for g in (9, 3, 1) if g <= _MAX_GROUP_TAPS and shape.all_taps % g == 0
              and (g % shape.taps == 0 or g == 1)]
    least = 0
    for out_tiles in (2, 1):
        if shape.all_out_tiles % out_tiles:
            continue
        for buffers in (2, 1):
            for group in groups:
                found = _buffers(shape, out_tiles, group, buffers)
                if found.l1_bytes <= budget_bytes:
                    return found
                least = found.l1_bytes
    raise ConfigError(f'weight: found {shape.all_taps} taps of {shape.channels_in} channels, '
                      f'{least} bytes of L1 a core, expected at most {budget_bytes}')


def _buffers(shape: _Shape, out_tiles: int, group: int, buffers: int) -> Plan:
    residual_tiles = shape.residual_tiles(out_tiles)
    row_tiles = out_tiles * (2 if shape.out_form == 'pairs' else 1)
    scratch_bytes = shape.table_bytes + shape.zero_bytes(group)
    rows = buffers * group * shape.tap_tiles
    pages = {
        _CB_ROWS: rows, _CB_ROWS_2: rows, _CB_TABLE: 1, _CB_TABLE_2: 1,
        _CB_TILES: shape.all_taps * shape.tap_tiles + residual_tiles,
        _CB_WEIGHTS: shape.constant_tiles(out_tiles), _CB_COUNT: 1, _CB_OUT: 2 * row_tiles,
    }
    if shape.bias_where_present:
        pages[_CB_PRESENT] = 2
    if residual_tiles:
        pages[_CB_RESIDUAL] = 2 * residual_tiles
    page_bytes = dict.fromkeys(pages, _TILE_BYTES)
    page_bytes |= {_CB_TABLE: scratch_bytes, _CB_TABLE_2: scratch_bytes,
                   _CB_COUNT: COUNT_WORDS * 4, _CB_OUT: _TILE * _TILE * shape.out_item}
    return Plan(out_tiles, shape.all_out_tiles // out_tiles, group, buffers, pages, page_bytes)


def constant_tiles(shape: _Shape, chosen: Plan, terms: tuple[Tensor, Tensor],
                   bias: Tensor) -> Tensor:
    """Return what cores keep in L1: float32 [parts * tiles a part * 32, 32], tile under tile.

    A part has, for each tap and 32 input channels (16: twice the same 16, as [hi|lo] is one
    tile), the first terms of its output channels and then the second ones; a row of tiles with the
    three terms of the bias in rows 0, 8 and 16; with a residual, rows of tiles that bring its n-th
    tile to the n-th output tile; the tile of ones that meets the bias.

    :param terms: two float32 [taps, channels_in, channels_out].
    :param bias: float32 [channels_out].
    """
    tiles_out, parts = chosen.out_tiles, chosen.parts
    padding = shape.all_out_tiles * _TILE - shape.channels_out

    def by_part(matrix: Tensor) -> Tensor:
        """[R * 32, C_out] -> [parts, R, tiles_out, 32, 32]."""
        padded = F.pad(matrix, (0, padding))
        return padded.view(-1, _TILE, parts, tiles_out, _TILE).permute(2, 0, 3, 1, 4)

    def with_zeros(row: Tensor) -> Tensor:
        return torch.cat([row, torch.zeros_like(row)], dim=2)

    if shape.channels_in < _TILE:
        terms = tuple(torch.cat([term, term], dim=1) for term in terms)
    weights = torch.cat([by_part(term.flatten(0, 1)) for term in terms], dim=2)
    bias_rows = torch.zeros(_TILE, shape.channels_out)
    rest = bias.float()
    for row in _BIAS_ROWS:
        bias_rows[row] = rest.bfloat16().float()
        rest = rest - bias_rows[row]
    ones = torch.zeros(_TILE, _TILE)
    ones[:, _BIAS_ROWS] = 1.0
    pieces = [weights, with_zeros(by_part(bias_rows))]
    if shape.residual:
        identity = torch.eye(_TILE)
        if shape.channels_out < _TILE:
            identity = torch.cat([torch.eye(16), torch.eye(16)]).repeat(1, 2)
            identity[:, 16:] = 0.0
        rows = torch.zeros(1, tiles_out, tiles_out, _TILE, _TILE)
        rows[0, range(tiles_out), range(tiles_out)] = identity
        pieces.append(with_zeros(rows.expand(parts, -1, -1, -1, -1)))
    flat = [piece.flatten(1, 2) for piece in pieces]
    return torch.cat([*flat, ones.expand(parts, 1, -1, -1)], dim=1).reshape(-1, _TILE)


class GatherConv:
    """One convolution with its weights on the device; see the module for the forms of data.

    Channel counts are padded to what rows have (:func:`padded_channels`); padding is zero.

    :param weight: float32 [columns * taps, C_in, C_out], norm folded in.
    :param bias: float32 [C_out].
    :param columns: columns of the table, ``base << 3 | mask`` a word; tap = column * taps + t.
    :param taps: taps of a column, at most 3, consecutive input rows where they exist.
    :param residual: pair rows are added before the ReLU.
    :param out_form: 'pairs', 'fp32' or 'bf16' rows.
    :param bias_where_present: rows without any tap give 0 instead of the bias alone.
    :param fidelity: 'HiFi2' to 'HiFi4'; 'HiFi4' for rows that this kernel has not made.
    :param max_cores: use fewer cores than there are.
    :raises ConfigError: a shape or option that the kernels do not have, or too little L1.
    """

    def __init__(self, device, weight: Tensor, bias: Tensor, *, columns: int, taps: int,
                 relu: bool, residual: bool = False, out_form: str = 'pairs',
                 bias_where_present: bool = False, fidelity: str = 'HiFi2',
                 max_cores: int | None = None):
        if weight.ndim != 3 or bias.shape != weight.shape[2:]:
            raise ConfigError(f'weight: found {list(weight.shape)} with bias {list(bias.shape)}, '
                              'expected [taps, C_in, C_out] and [C_out]')
        if not 1 <= taps <= 3 or weight.shape[0] != columns * taps:
            raise ConfigError(f'taps: found {weight.shape[0]} weights for {columns} columns of '
                              f'{taps} taps, expected columns of 1 to 3 taps, one weight each')
        if out_form not in OUT_FORMS:
            raise ConfigError(f'out_form: found {out_form!r}, expected one of {OUT_FORMS}')
        c_in, c_out = (padded_channels(c) for c in weight.shape[1:])
        if fidelity not in _FIDELITIES:
            raise ConfigError(f'fidelity: found {fidelity!r}, expected one of {_FIDELITIES}')
        self.columns, self.taps, self.relu = columns, taps, relu
        self.residual, self.out_form = residual, out_form
        self.bias_where_present = bias_where_present
        self.channels_in, self.channels_out = c_in, c_out
        self._macs_per_tap = weight.shape[1] * weight.shape[2]
        padding = (0, c_out - weight.shape[2])
        full = F.pad(weight.detach().float(), (*padding, 0, c_in - weight.shape[1]))
        self.weight_terms = split_weight(full)
        self.bias = F.pad(bias.detach().float(), padding)
        self._shape = _Shape(columns, taps, c_in, c_out, residual, out_form, bias_where_present)
        self.plan = plan(self._shape)
        self.fidelity = fidelity
        self._cores = _Cores(device, self.plan.parts, max_cores)
        constants = constant_tiles(self._shape, self.plan, self.weight_terms, self.bias)
        self._constants = ttnn.from_torch(constants.bfloat16(), dtype=ttnn.bfloat16,
                                          layout=ttnn.TILE_LAYOUT, device=device)

    def __call__(self, features, table, counts, count_index: int, out, *,
                 table_first_block: int = 0, residual=None, target: Target | None = None):
        """Compute the output rows into ``out`` and return it; rows beyond the count stay.

        :param features: pair rows [rows, 2 * channels_in].
        :param table: uint32 [blocks, columns * 32].
        :param counts: uint32 [1, 16]; the word at ``count_index`` is how many output rows.
        :param out: row-major, a page as wide as the target says.
        :param table_first_block: where the blocks of these rows begin in the table.
        :param residual: pair rows [rows, 2 * channels_out], where the convolution has one.
        :raises ConfigError: a tensor of another shape, or a residual too many or too few.
        """
        target = target or Target()
        self._check(features, table, out, residual, target)
        extra = [residual] if self.residual else []
        tensors = [features, table, counts, self._constants, *extra, out]
        program = self._program(features, table, counts, count_index, out, table_first_block,
                                residual if self.residual else features, target)
        ttnn.generic_op(tensors, program)
        return out

    @property
    def flops_per_row(self) -> int:
        """What the matrix unit computes for an output row of a whole block."""
        shape, chosen = self._shape, self.plan
        products = shape.all_taps * shape.tap_tiles + 1 + shape.residual_tiles(chosen.out_tiles)
        return 2 * products * 2 * chosen.out_tiles * chosen.parts * _TILE ** 2

    def page_channels(self, target: Target) -> int:
        """Return the channels of a page of the target, of its hi part."""
        return target.channels or self.channels_out * target.rows_per_page

    def cost(self, rows: int, present_taps: int) -> GatherConvCost:
        """Return what a call costs.

        :param rows: output rows.
        :param present_taps: taps that exist, all rows together.
        """
        shape, chosen = self._shape, self.plan
        blocks = -(-rows // BLOCK_ROWS)
        row_bytes = max(4 * self.channels_in, _DRAM_READ_BYTES)
        working = sum(min(blocks, len(cores)) for cores in self._cores.by_part)
        tables = 2 * blocks * chosen.parts * shape.table_bytes
        constants = working * chosen.pages[_CB_WEIGHTS] * _TILE_BYTES
        residual = rows * 4 * self.channels_out if self.residual else 0
        row_out = self.channels_out * shape.out_item * (2 if self.out_form == 'pairs' else 1)
        return GatherConvCost(
            flops=blocks * BLOCK_ROWS * self.flops_per_row,
            macs_useful=present_taps * self._macs_per_tap,
            dram_bytes_read=(present_taps * chosen.parts * row_bytes + tables + constants
                             + residual),
            dram_bytes_written=rows * row_out,
            gathered_rows=present_taps * chosen.parts,
            l1_bytes_per_core=chosen.l1_bytes,
            fidelity=self.fidelity,
        )

    def _check(self, features, table, out, residual, target: Target) -> None:
        pairs = self.out_form == 'pairs'
        widths = [('features', features, 2 * self.channels_in),
                  ('table', table, self.columns * BLOCK_ROWS),
                  ('out', out, self.page_channels(target) * (2 if pairs else 1))]
        if (residual is not None) != self.residual:
            raise ConfigError(f'residual: found {"one" if residual is not None else "none"}, '
                              f'expected {"one" if self.residual else "none"}')
        if self.residual:
            widths.append(('residual', residual, 2 * self.channels_out))
        for name, tensor, width in widths:
            if tensor.shape[-1] != width:
                raise ConfigError(f'{name}: found rows of {tensor.shape[-1]}, expected {width}')
        last = target.channel_offset + self.channels_out * target.rows_per_page
        if last > self.page_channels(target) or target.channel_offset % 16:
            raise ConfigError(f'target: found channels {target.channel_offset} to {last}, '
                              f'expected multiples of 16 up to {self.page_channels(target)}')

    def _program(self, features, table, counts, count_index, out, first_block, residual, target):
        common = self._common(features, table, counts, count_index, out, first_block, residual,
                              target)
        rows = [*_accessor(features), *_accessor(table), *_accessor(counts)]
        compute = ttnn.ComputeConfigDescriptor(
            fp32_dest_acc_en=True, math_fidelity=getattr(ttnn.MathFidelity, self.fidelity))
        parts = (
            ('gather_conv_reader.cpp', ttnn.ReaderConfigDescriptor(),
             [*rows, *_accessor(residual)], common),
            ('gather_conv_writer.cpp', ttnn.WriterConfigDescriptor(),
             [*rows, *_accessor(self._constants), *_accessor(out)], common),
            ('gather_conv_compute.cpp', compute, [], [count_index]),
        )
        named, cores = self._named_arguments(), self._cores.ranges()
        kernels = [ttnn.KernelDescriptor(
            kernel_source=str(_KERNELS / name), core_ranges=cores,
            compile_time_args=compile_time, named_compile_time_args=named,
            runtime_args=self._cores.arguments(), common_runtime_args=values, config=config,
        ) for name, config, compile_time, values in parts]
        return ttnn.ProgramDescriptor(kernels=kernels, semaphores=[],
                                      cbs=self._circular_buffers(cores))

    def _common(self, features, table, counts, count_index, out, first_block, residual, target):
        item = self._shape.out_item
        hi_bytes = target.channel_offset * item
        width = _MAX_PAGES - 1 if target.width is None else target.width
        tensors = features, table, counts, self._constants, out, residual
        return [
            *(tensor.buffer_address() for tensor in tensors),
            count_index, first_block, target.rows_per_page, width,
            0 if target.width is None else target.outer,
            1 if target.width is None else target.inner,
            target.offset, hi_bytes, hi_bytes + self.page_channels(target) * item,
        ]

    def _named_arguments(self) -> list[tuple[str, int]]:
        shape, chosen = self._shape, self.plan
        return [
            ('columns', shape.columns), ('taps', shape.taps), ('group', chosen.group),
            ('tap_tiles', shape.tap_tiles), ('out_tiles', chosen.out_tiles),
            ('channels_out', self.channels_out),
            ('part_channels', min(chosen.out_tiles * _TILE, self.channels_out)),
            ('residual_tiles', shape.residual_tiles(chosen.out_tiles)), ('relu', int(self.relu)),
            ('pairs_out', int(self.out_form == 'pairs')), ('out_item', shape.out_item),
            ('where_present', int(self.bias_where_present)),
        ]

    def _circular_buffers(self, cores) -> list:
        dtypes = {_CB_TABLE: ttnn.uint32, _CB_TABLE_2: ttnn.uint32, _CB_COUNT: ttnn.uint32}
        if self.out_form == 'fp32':
            dtypes[_CB_OUT] = ttnn.float32
        buffers = []
        for index, pages in self.plan.pages.items():
            size = self.plan.page_bytes[index]
            form = ttnn.CBFormatDescriptor(buffer_index=index, page_size=size,
                                           data_format=dtypes.get(index, ttnn.bfloat16))
            buffers.append(ttnn.CBDescriptor(total_size=pages * size, format_descriptors=[form],
                                             core_ranges=cores))
        return buffers


class _Cores:
    """The cores of a device, dealt to the parts in turn."""

    def __init__(self, device, parts: int, limit: int | None):
        grid = device.compute_with_storage_grid_size()
        cores = [(x, y) for y in range(grid.y) for x in range(grid.x)][:limit]
        if len(cores) < parts:
            raise ConfigError(f'max_cores: found {len(cores)} cores, expected one a part, {parts}')
        self.by_part = [cores[part::parts] for part in range(parts)]

    def ranges(self):
        """Return all of them."""
        cores = [ttnn.CoreCoord(*core) for part in self.by_part for core in part]
        return ttnn.CoreRangeSet([ttnn.CoreRange(core, core) for core in cores])

    def arguments(self):
        """Return the run-time arguments of each core: its part, its rank there, of how many."""
        arguments = ttnn.RuntimeArgs()
        for part, cores in enumerate(self.by_part):
            for rank, (x, y) in enumerate(cores):
                arguments[x][y] = [part, rank, len(cores)]
        return arguments


def _accessor(tensor) -> list[int]:
    return list(ttnn.TensorAccessorArgs(tensor).get_compile_time_args())
