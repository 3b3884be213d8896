# SPDX-License-Identifier: Apache-2.0
"""Proposals from the heat map: local maxima and the exact best K of them, in two programs.

The first program runs on many cores. Each takes a strip of rows of the map, turns its logits into
integers of the same order, suppresses cells that are no local maximum, and writes a sorted list of
its best K candidates to DRAM. The second runs on one core, merges these lists up to K entries and
writes the proposals. Both are data movement kernels with integer code only: the cores that run
them have no floating point unit, and integers are what makes the result exact.

The order: greatest logit first, of equal ones the lower index ``class * cells + cell`` first.
Suppressed cells come after all others, by index; they fill up the list if too few cells survive.
0.0 and -0.0 are equal, and both come out as 0.0. NaN has its place in the order of bit patterns:
before +inf if its sign bit is clear, else after -inf. So a map with NaN still gives K proposals
within the map, and those that are NaN say so in their logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ttnn

from tt_perception.runtime.errors import ConfigError

PROPOSAL_COLUMNS = 32
FIRST_CLASS_COLUMN = 8
SUPPRESSED_LOGIT = -1e4

_KERNELS = Path(__file__).parent / 'kernels'
_SCRATCH = 0  # index of the only circular buffer of a program, its kernel's working memory
_MAX_CLASSES = PROPOSAL_COLUMNS - FIRST_CLASS_COLUMN
_MAX_L1_BYTES = 1_400_000  # of the 1,536 kB of a core; firmware and dispatch take their share
_ALIGNMENT = 64  # of DRAM reads, in bytes
_SPARE_PAGES = 16  # one for each DRAM bank at most: see Pages in peaks.h
_WORD = 4
_ENTRY_BYTES = 8  # rank and index of a candidate

# Instructions of the inner loops, counted in the disassembly of the kernels (GCC 15, -O2). For
# noise on the released map and 90 cores they add up to 105,000 and 97,000; the functional
# simulator, where each core executes one instruction a tick, takes 106,000 and 97,000 ticks.
_PER_CELL = 10  # walk to the next page
_PER_LOGIT = 6  # ranked: load, shift, and-not, exclusive or, add, store
_PER_POOLED = 16  # compared with its neighbours and listed
_PER_FREE = 7  # listed
_PER_SORTED = 80  # counted in 4 digits (28), moved 4 times (13 each)
_PER_STRIP = 9_000  # mostly 1,024 counters of digits, cleared (3) and summed (5)
_PER_PROPOSAL = 100  # taken and written as a row
_PER_ROUND = 12  # one comparison of the tournament, half of them with an exchange
_PER_LIST = 24  # enters the tournament


@dataclass(frozen=True)
class StripPlan:
    """Which rows of a map each core takes.

    :ivar size_x: rows of the map.
    :ivar rows: rows of a strip; the last one may have fewer.
    """

    size_x: int
    rows: int

    @property
    def strips(self) -> int:
        """How many strips there are, which is how many cores work."""
        return -(-self.size_x // self.rows)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First row and end of each strip."""
        starts = range(0, self.size_x, self.rows)
        return [(start, min(start + self.rows, self.size_x)) for start in starts]


def plan_strips(size_x: int, cores: int) -> StripPlan:
    """Return the strips of ``size_x`` rows for at most ``cores`` cores, as small as can be."""
    return StripPlan(size_x, -(-size_x // cores))


@dataclass(frozen=True)
class PeaksCost:
    """What one call costs, by counting.

    :ivar dram_bytes_read: by both programs.
    :ivar dram_bytes_written: by both programs.
    :ivar estimated_cycles: instructions of the busiest core of the first program and of the core
        of the second one, at one a cycle; waiting for memory and for the programs' start is not
        in it. It takes a ninth of the pooled cells for local maxima, as in noise.
    :ivar l1_bytes_per_core: of the program that needs more.
    """

    dram_bytes_read: int
    dram_bytes_written: int
    estimated_cycles: int
    l1_bytes_per_core: int


class Peaks:
    """Selects the proposals of one head.

    :param size_x: rows of the map; cell ``x * size_y + y`` is at row x, column y.
    :param num_classes: classes of the map, at most 24.
    :param pooled_classes: those of which only local maxima survive: cells that are at least as
        great as their eight neighbours, and not on the border of the map. Of the other classes
        all cells survive.
    :param num_proposals: K.
    :raises ConfigError: a map or a K that the kernels cannot serve.
    """

    def __init__(self, device, *, size_x: int, size_y: int, num_classes: int,
                 pooled_classes: Sequence[int], num_proposals: int):
        _check_map(size_x, size_y, num_classes, pooled_classes, num_proposals)
        self.size_x = size_x
        self.size_y = size_y
        self.num_classes = num_classes
        self.pooled_classes = tuple(sorted(set(pooled_classes)))
        self.num_proposals = num_proposals
        self.width = _round_up(num_classes, 16)
        self.padded_proposals = _round_up(num_proposals, 32)
        grid = device.compute_with_storage_grid_size()
        self.plan = plan_strips(size_x, grid.x * grid.y)
        self._cores = [ttnn.CoreCoord(i % grid.x, i // grid.x) for i in range(self.plan.strips)]
        self._keep = min(num_proposals, self.plan.rows * size_y * num_classes)
        self._list_bytes = _round_up((self._keep + 1) * _ENTRY_BYTES, _ALIGNMENT)
        self._local_regions = self._lay_local()
        self._merge_regions = self._lay_merge()
        used = max(self._local_regions.size, self._merge_regions.size)
        if used > _MAX_L1_BYTES:
            raise ConfigError(f'num_proposals: found {num_proposals} on a map of {size_x} x '
                              f'{size_y} x {num_classes} logits, which takes {used} bytes of '
                              f'memory on a core, expected at most {_MAX_L1_BYTES}')
        self._lists = ttnn.allocate_tensor_on_device(
            ttnn.Shape([self.plan.strips, self._list_bytes // _WORD]), ttnn.uint32,
            ttnn.ROW_MAJOR_LAYOUT, device, ttnn.DRAM_MEMORY_CONFIG)

    def __call__(self, logits, proposals, cells) -> None:
        """Select the proposals; all tensors are row-major, interleaved in DRAM.

        :param logits: float32 [cells, 16 or 32], one column a class, the others are not read.
        :param proposals: float32 [Kpad, 32] to be written, Kpad = K rounded up to 32: column 0
            the logit (-1e4 where suppressed or padding), 1 x, 2 y, 3 the class, 8 + class 1.0;
            the rest is 0.
        :param cells: uint32 [1, Kpad] to be written: the cell of each proposal, 0 for padding.
        :raises ConfigError: a tensor of another shape.
        """
        padded = self.padded_proposals
        _check_shape('logits', logits, [self.size_x * self.size_y, self.width])
        _check_shape('proposals', proposals, [padded, PROPOSAL_COLUMNS])
        _check_shape('cells', cells, [1, padded])
        ttnn.generic_op([logits, self._lists], self._local_program(logits))
        ttnn.generic_op([self._lists, proposals, cells], self._merge_program(proposals, cells))

    def cost(self) -> PeaksCost:
        """Return what one call costs."""
        row_bytes = self.size_y * self.width * _WORD
        rows_read = sum(min(end + 1, self.size_x) - max(begin - 1, 0)
                        for begin, end in self.plan.ranges)
        lists_bytes = self.plan.strips * self._list_bytes
        out_bytes = self.padded_proposals * (PROPOSAL_COLUMNS + 1) * _WORD
        return PeaksCost(
            dram_bytes_read=rows_read * row_bytes + lists_bytes,
            dram_bytes_written=lists_bytes + out_bytes,
            estimated_cycles=self._local_cycles() + self._merge_cycles(),
            l1_bytes_per_core=max(self._local_regions.size, self._merge_regions.size),
        )

    def _local_cycles(self) -> int:
        read = (self.plan.rows + 2) * self.size_y
        cells = self.plan.rows * self.size_y
        pooled = cells * len(self.pooled_classes)
        free = cells * self.num_classes - pooled
        return (read * (_PER_CELL + _PER_LOGIT * self.num_classes) + pooled * _PER_POOLED
                + free * _PER_FREE + (free + pooled // 9) * _PER_SORTED + _PER_STRIP)

    def _merge_cycles(self) -> int:
        lists = _tournament_size(self.plan.strips)
        rounds = lists.bit_length() - 1
        return (self.padded_proposals * (_PER_PROPOSAL + rounds * _PER_ROUND)
                + lists * _PER_LIST)

    def _lay_local(self) -> _Regions:
        candidates = self.plan.rows * self.size_y * self.num_classes
        cells = (self.plan.rows + 2) * self.size_y
        entries = max(candidates * _ENTRY_BYTES, self._list_bytes)
        return _Regions(
            (cells + _SPARE_PAGES) * self.width * _WORD,  # logits
            cells * self.num_classes * _WORD,  # their ranks
            entries,  # survivors, then the list
            entries,  # the other side of the sort
            candidates * _WORD,  # indices of suppressed cells
            4 * 256 * _WORD,  # counters of the sort
        )

    def _lay_merge(self) -> _Regions:
        leaves = _tournament_size(self.plan.strips)
        row_bytes = PROPOSAL_COLUMNS * _WORD
        return _Regions(
            (self.plan.strips + _SPARE_PAGES) * self._list_bytes,
            leaves * _WORD,  # where each list stands
            leaves * 3 * _WORD,  # nodes of the tournament
            (self.padded_proposals + _SPARE_PAGES) * row_bytes,
            self.padded_proposals * _WORD,  # cells
        )

    def _local_program(self, logits):
        pooled = sum(1 << c for c in self.pooled_classes)
        arguments = [_SCRATCH, self.size_x, self.size_y, self.num_classes, pooled,
                     self.width * _WORD, self.plan.rows, self._keep, self._list_bytes,
                     *self._local_regions.places[1:], *_accessor(logits),
                     *_accessor(self._lists)]
        addresses = [logits.buffer_address(), self._lists.buffer_address()]
        per_core = [(core, [*addresses, strip]) for strip, core in enumerate(self._cores)]
        return _program('peaks_local.cpp', self._local_regions.size, arguments, per_core)

    def _merge_program(self, proposals, cells):
        tensors = (self._lists, proposals, cells)
        arguments = [_SCRATCH, self.size_x, self.size_y, self.plan.strips,
                     _tournament_size(self.plan.strips), self._list_bytes, self.num_proposals,
                     self.padded_proposals, *self._merge_regions.places[1:]]
        for tensor in tensors:
            arguments += _accessor(tensor)
        addresses = [tensor.buffer_address() for tensor in tensors]
        return _program('peaks_merge.cpp', self._merge_regions.size, arguments,
                        [(self._cores[0], addresses)])


class _Regions:
    """Regions of a core's memory, one behind the other.

    :ivar places: offset of each region from an aligned address.
    :ivar size: bytes to be allocated, which may begin at an address that is not aligned.
    """

    def __init__(self, *sizes: int):
        self.places = []
        end = 0
        for size in sizes:
            self.places.append(end)
            end += _round_up(size, _ALIGNMENT)
        self.size = end + _ALIGNMENT


def _check_map(size_x: int, size_y: int, num_classes: int, pooled_classes: Sequence[int],
               num_proposals: int) -> None:
    for name, size in (('size_x', size_x), ('size_y', size_y)):
        if size < 3:
            raise ConfigError(f'{name}: found {size}, expected at least 3 cells')
    if not 1 <= num_classes <= _MAX_CLASSES:
        raise ConfigError(f'num_classes: found {num_classes}, expected 1 to {_MAX_CLASSES}')
    if not set(pooled_classes) <= set(range(num_classes)):
        raise ConfigError(f'pooled_classes: found {list(pooled_classes)}, '
                          f'expected classes from 0 to {num_classes - 1}')
    logits = size_x * size_y * num_classes
    if not 1 <= num_proposals <= logits:
        raise ConfigError(f'num_proposals: found {num_proposals}, expected 1 to {logits}, '
                          'the logits of the map')


def _check_shape(name: str, tensor, expected: list[int]) -> None:
    if list(tensor.shape) != expected:
        raise ConfigError(f'{name}: found shape {list(tensor.shape)}, expected {expected}')


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _tournament_size(lists: int) -> int:
    """Return ``lists`` rounded up to a power of two."""
    return 1 << (lists - 1).bit_length()


def _accessor(tensor) -> list[int]:
    return list(ttnn.TensorAccessorArgs(tensor).get_compile_time_args())


def _program(source: str, l1_bytes: int, arguments: list[int], per_core: list[tuple]):
    """Return a program of one data movement kernel, with its run-time arguments for each core."""
    cores = ttnn.CoreRangeSet([ttnn.CoreRange(core, core) for core, _ in per_core])
    runtime_arguments = ttnn.RuntimeArgs()
    for core, values in per_core:
        runtime_arguments[core.x][core.y] = values
    form = ttnn.CBFormatDescriptor(buffer_index=_SCRATCH, data_format=ttnn.uint32,
                                   page_size=l1_bytes)
    scratch = ttnn.CBDescriptor(total_size=l1_bytes, core_ranges=cores,
                                format_descriptors=[form])
    kernel = ttnn.KernelDescriptor(
        kernel_source=str(_KERNELS / source),
        source_type=ttnn.KernelDescriptor.SourceType.FILE_PATH,
        core_ranges=cores,
        compile_time_args=arguments,
        runtime_args=runtime_arguments,
        config=ttnn.ReaderConfigDescriptor(),
    )
    return ttnn.ProgramDescriptor(kernels=[kernel], semaphores=[], cbs=[scratch])
