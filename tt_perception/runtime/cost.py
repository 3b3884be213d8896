# SPDX-License-Identifier: Apache-2.0
"""What the operations of a ttnn graph cost, by counting.

A recording lists the programs that a graph enqueues: shapes, types, bytes in DRAM, floating point
operations, memory of the cores. Nothing is timed; :meth:`Operation.seconds` is what the card's
published limits allow.

How it is counted. Every operand in DRAM is read once and every result is written once; what an
operation reads twice for lack of space is not seen. Tiles count whole, padding included, and a
row-major row in multiples of 64 bytes, the smallest read of this DRAM. A row gather
(``embedding``) counts its rows, not its table. Floating point operations are those of the matrix
unit; what the vector unit does is taken to be hidden by the bytes that it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

DRAM_ALIGNMENT = 64  # bytes
PASSES = {'LoFi': 1, 'HiFi2': 2, 'HiFi3': 3, 'HiFi4': 4}  # of the matrix unit over its operands
STOCK_ROW_S = 5e-9  # a row that a stock gather fetches; over the whole chip
_TILE = 32
_BYTES = {'BFLOAT16': 2.0, 'FLOAT32': 4.0, 'UINT32': 4.0, 'INT32': 4.0, 'UINT16': 2.0,
          'UINT8': 1.0, 'BFLOAT8_B': 1.0625, 'BFLOAT4_B': 0.5625}
_SHORT = {'BFLOAT16': 'bf16', 'FLOAT32': 'f32', 'UINT32': 'u32', 'INT32': 'i32',
          'UINT16': 'u16', 'UINT8': 'u8', 'BFLOAT8_B': 'bf8', 'BFLOAT4_B': 'bf4'}
_BLOCK, _OWN = 'block of the network: ', 'operation of our own: '  # marks in a captured graph


@dataclass(frozen=True)
class Limits:
    """What a Blackhole p150 can do at best.

    :ivar cores: Tensix cores of a program.
    :ivar flop_per_cycle: of one core's matrix unit at LoFi.
    :ivar upload_bytes_per_s: from the host to DRAM.
    """

    dram_bytes_per_s: float = 512e9
    upload_bytes_per_s: float = 20e9
    cores: int = 110
    clock_hz: float = 1.35e9
    flop_per_cycle: int = 4096

    def flops_per_s(self, fidelity: str) -> float:
        """Return the rate of the matrix units of all cores."""
        return self.cores * self.clock_hz * self.flop_per_cycle / PASSES[fidelity]


@dataclass(frozen=True)
class Operation:
    """One program, or several of one kind.

    :ivar name: operation of ttnn, and the program that it enqueues where that differs.
    :ivar block: block of the network that it belongs to.
    :ivar shape: of the result.
    :ivar dtypes: of operands and result.
    :ivar bytes_read: from DRAM.
    :ivar bytes_written: to DRAM.
    :ivar flops: of the matrix unit, two for a product and its sum.
    :ivar gathered_rows: rows fetched one by one.
    :ivar row_bytes: of one of them.
    :ivar row_s: time of one of them over the whole chip.
    :ivar cycles: of the busiest core outside the matrix unit, where they are known.
    :ivar l1_bytes: of the core that needs most, buffers of tensors included.
    :ivar dram_bytes: allocated while it runs, weights and inputs included.
    :ivar useful_flops: what the network itself asks for, without padding and repetition.
    :ivar useful_bytes: weights and features once; 0 if it only brings data into another form.
    """

    name: str
    block: str = ''
    shape: tuple[int, ...] = ()
    dtypes: str = ''
    bytes_read: int = 0
    bytes_written: int = 0
    flops: float = 0.0
    fidelity: str = 'HiFi4'
    gathered_rows: int = 0
    row_bytes: int = 0
    row_s: float = 0.0
    cycles: float = 0.0
    l1_bytes: int = 0
    dram_bytes: int = 0
    useful_flops: float = 0.0
    useful_bytes: int = 0

    def parts(self, limits: Limits) -> dict[str, float]:
        """Return the seconds that each resource needs for itself."""
        return {'DRAM': (self.bytes_read + self.bytes_written) / limits.dram_bytes_per_s,
                'matrix': self.flops / limits.flops_per_s(self.fidelity),
                'rows': self.gathered_rows * self.row_s,
                'cycles': self.cycles / limits.clock_hz}

    def seconds(self, limits: Limits) -> float:
        """Return the time at the limits; resources work side by side."""
        return max(self.parts(limits).values())

    def floor(self, limits: Limits) -> float:
        """Return the time of what is useful in it."""
        return max(self.useful_flops / limits.flops_per_s(self.fidelity),
                   self.useful_bytes / limits.dram_bytes_per_s)

    def with_rows(self, rows: int) -> Operation:
        """Return a gather that fetches only as many of its rows."""
        return replace(self, gathered_rows=rows, bytes_read=(
            self.bytes_read - (self.gathered_rows - rows) * self.row_bytes))

    def bound(self, limits: Limits) -> str:
        """Return the resource that takes longest."""
        parts = self.parts(limits)
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class Call:
    """One call of an operation of our own."""

    operation: Any
    args: tuple
    kwargs: Mapping[str, Any]


@dataclass
class Recording:
    """Filled when the block that records ends.

    :ivar operations: in the order in which they ran.
    :ivar calls: what called each of them, for those of our own, by index in ``operations``.
    """

    operations: list[Operation] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)

    @property
    def dram_peak(self) -> int:
        """Bytes of DRAM that are allocated at most, in all banks together."""
        return max((operation.dram_bytes for operation in self.operations), default=0)

    @property
    def l1_peak(self) -> int:
        """Bytes of L1 that one core needs at most."""
        return max((operation.l1_bytes for operation in self.operations), default=0)

    def mark(self, name: str, _tensor: Any = None) -> None:
        """Say that all operations since the last mark were of block ``name``."""
        with _scope(_BLOCK + name):
            pass


@contextmanager
def recording(device, own: Sequence[type] = ()) -> Iterator[Recording]:
    """Record what is called inside the block instead of running it.

    :param own: classes whose instances, when called, run ``generic_op``: ttnn cannot know what
        such a program costs, so the recording says who called it.
    """
    import ttnn
    record, calls = Recording(), []
    base = _allocated(device, ttnn.BufferType.DRAM), _allocated(device, ttnn.BufferType.L1)
    with ExitStack() as stack:
        for kind in own:
            stack.enter_context(patch.object(kind, '__call__', _noting(kind.__call__, calls)))
        with _quiet():
            ttnn.graph.begin_graph_capture(ttnn.graph.RunMode.NO_DISPATCH)
        try:
            yield record
        finally:
            nodes = ttnn.graph.end_graph_capture()
    _Reader(record, calls, *base).read(nodes)


def _noting(call: Callable, calls: list[Call]) -> Callable:
    """Return ``call`` as a method that notes itself before it runs."""
    def noted(self, *args: Any, **kwargs: Any) -> Any:
        calls.append(Call(self, args, kwargs))
        with _scope(f'{_OWN}{len(calls) - 1}'):
            return call(self, *args, **kwargs)
    return noted


@contextmanager
def _scope(name: str) -> Iterator[None]:
    import ttnn
    ttnn.graph.track_function_start(name)
    try:
        yield
    finally:
        ttnn.graph.track_function_end()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep ttnn from warning that a capture in its fast mode has no sub-graphs; none are used."""
    from loguru import logger
    logger.disable('ttnn.graph')
    try:
        yield
    finally:
        logger.enable('ttnn.graph')


def _allocated(device, kind: Any) -> int:
    """Return the bytes allocated in all banks of a kind, or in one bank of L1."""
    import ttnn
    view = ttnn.get_memory_view(device, kind)
    per_bank = view.total_bytes_allocated_per_bank
    return per_bank if kind == ttnn.BufferType.L1 else per_bank * view.num_banks


class _Reader:
    """Walks through a captured graph.

    A graph is a list of nodes in the order of time. Functions have a start and an end; a program
    is a function that says which factory has made it. Its operands follow its start, its result
    its end, several results the functions in between that allocate them. Memory of the cores is
    listed before the end.
    """

    def __init__(self, record: Recording, calls: Sequence[Call], dram_bytes: int,
                 l1_bytes: int) -> None:
        self._record, self._calls = record, calls
        self._dram, self._l1 = dram_bytes, l1_bytes
        self._open: list[str] = []
        self._marked = 0
        self._enter(None)

    def _enter(self, program: Mapping[str, Any] | None) -> None:
        self._program = program
        self._made: list[_Tensor] = []
        self._cores: dict[str, int] = {}
        self._dram_now, self._l1_now = self._dram, self._l1

    def read(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Append the operations of a graph to the recording."""
        by_counter = {node['counter']: node for node in nodes}
        for node in nodes:
            kind, params = node['node_type'], node['params']
            if kind == 'function_start':
                self._start(node, params)
            elif kind == 'function_end':
                self._end(node, by_counter)
            elif kind in ('buffer_allocate', 'buffer_deallocate'):
                self._buffer(params, 1 if kind == 'buffer_allocate' else -1)
            elif kind in ('circular_buffer_allocate', 'dataflow_buffer_allocate',
                          'scratchpad_allocate'):
                self._core_memory(params)

    def _start(self, node: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        name = params['name']
        if name.startswith(_BLOCK):
            self._mark(name.removeprefix(_BLOCK))
        self._open.append(name)
        if 'program_factory_type' in params:
            self._enter(node)

    def _mark(self, block: str) -> None:
        operations = self._record.operations
        operations[self._marked:] = [replace(operation, block=block)
                                     for operation in operations[self._marked:]]
        self._marked = len(operations)

    def _end(self, node: Mapping[str, Any], by_counter: Mapping[int, Mapping[str, Any]]) -> None:
        name, program = self._open.pop(), self._program
        if program is None:
            return
        results = [_Tensor.of(by_counter[i]['params']) for i in node['connections']
                   if by_counter[i]['node_type'] == 'tensor']
        if program['params']['name'] != name:
            self._made += results
            return
        own = [int(outer.removeprefix(_OWN)) for outer in self._open if outer.startswith(_OWN)]
        if own:
            self._record.calls[len(self._record.operations)] = self._calls[own[-1]]
        outer = next((o for o in reversed(self._open) if o.startswith('ttnn')), '')
        inputs = [_Tensor.of(by_counter[i]['params']) for i in program['input_tensors']]
        operation = _operation(name, _arguments(program), inputs, results or self._made)
        self._record.operations.append(replace(
            operation, name=_title(outer, name), dram_bytes=self._dram_now,
            l1_bytes=self._l1_now + max(self._cores.values(), default=0)))
        self._program = None

    def _buffer(self, params: Mapping[str, Any], sign: int) -> None:
        if params['type'] == 'DRAM':
            self._dram += sign * int(params['size'])
        else:
            self._l1 += sign * int(params['max_size_per_bank'])
        if sign > 0:
            self._dram_now, self._l1_now = self._dram, self._l1

    def _core_memory(self, params: Mapping[str, Any]) -> None:
        if '1' in (params.get('globally_allocated'), params.get('borrows_memory')):
            return  # within the buffer of a tensor
        for core in _cores_of(params['core_range_set']):
            self._cores[core] = self._cores.get(core, 0) + int(params['size'])


def _cores_of(ranges: str) -> Iterator[str]:
    """Yield the cores of a text such as ``{[0-0 - 10-9], [0-0 - 0-0]}``."""
    for x0, y0, x1, y1 in re.findall(r'\[(\d+)-(\d+) - (\d+)-(\d+)\]', ranges):
        for x in range(int(x0), int(x1) + 1):
            for y in range(int(y0), int(y1) + 1):
                yield f'{x}-{y}'


@dataclass(frozen=True)
class _Tensor:
    """Shape, type and place of a tensor of a captured graph."""

    shape: tuple[int, ...]
    dtype: str
    is_tiled: bool
    is_in_dram: bool

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> _Tensor:
        return cls(tuple(int(n) for n in re.findall(r'\d+', params['shape'])),
                   params['dtype'].rpartition('::')[2], 'TILE' in params['layout'],
                   'BufferType::DRAM' in params['memory_config'])

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape in whole tiles."""
        return _in_tiles(self.shape) if self.is_tiled else self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in DRAM; of a row-major tensor."""
        return aligned(self.shape[-1] * _BYTES[self.dtype])

    @property
    def dram_bytes(self) -> int:
        """Bytes that move when all of it is read or written; 0 outside DRAM."""
        if not self.is_in_dram:
            return 0
        if self.is_tiled:
            return int(math.prod(self.padded) * _BYTES[self.dtype])
        return math.prod(self.shape[:-1]) * self.row_bytes


def aligned(size: float) -> int:
    """Return the bytes that a row of ``size`` bytes takes in DRAM."""
    return math.ceil(size / DRAM_ALIGNMENT) * DRAM_ALIGNMENT


def _in_tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    *outer, rows, columns = (1, *shape) if len(shape) < 2 else shape
    return (*outer, math.ceil(rows / _TILE) * _TILE, math.ceil(columns / _TILE) * _TILE)


def _arguments(program: Mapping[str, Any]) -> str:
    arguments = program['arguments']
    return arguments if isinstance(arguments, str) else ' '.join(map(str, arguments))


def _title(outer: str, program: str) -> str:
    short = program.removesuffix('Operation').removesuffix('Device')
    stem = outer.rpartition('.')[2]
    same = stem.replace('_', '').lower() == short.lower() or short == 'GenericOp'
    return stem if outer and same else f'{stem} ({short})' if outer else short


def _operation(program: str, arguments: str, inputs: Sequence[_Tensor],
               outputs: Sequence[_Tensor]) -> Operation:
    """Return bytes and FLOPs of a program."""
    fidelity = re.search(r'math_fidelity=(\w+)', arguments)
    counted = Operation(
        name=program, shape=outputs[0].shape if outputs else (), dtypes=_types(inputs, outputs),
        bytes_read=sum(tensor.dram_bytes for tensor in inputs),
        bytes_written=sum(tensor.dram_bytes for tensor in outputs),
        fidelity=fidelity[1] if fidelity else 'HiFi4')
    if program.startswith('Embeddings'):
        indices, table = inputs[:2]
        rows = math.prod(indices.shape)
        return replace(counted, gathered_rows=rows, row_bytes=table.row_bytes, row_s=STOCK_ROW_S,
                       bytes_read=indices.dram_bytes + rows * table.row_bytes)
    if program.startswith('Slice'):
        return replace(counted, bytes_read=min(counted.bytes_read, counted.bytes_written))
    for kind, count in _FLOPS.items():
        if program.startswith(kind):
            flops = count(inputs, outputs[0])
            return replace(counted, flops=flops, useful_flops=flops,
                           useful_bytes=counted.bytes_read + counted.bytes_written)
    return counted


def _types(inputs: Sequence[_Tensor], outputs: Sequence[_Tensor]) -> str:
    def short(tensors: Sequence[_Tensor]) -> str:
        return ' '.join(dict.fromkeys(_SHORT.get(t.dtype, t.dtype.lower()) for t in tensors))
    return f'{short(inputs)} > {short(outputs)}'


def _matmul_flops(inputs: Sequence[_Tensor], out: _Tensor) -> float:
    *rows, columns = out.padded
    inner = math.prod(inputs[0].padded) / math.prod(rows)
    return 2.0 * math.prod(rows) * columns * inner


def _convolution_flops(inputs: Sequence[_Tensor], out: _Tensor) -> float:
    inner = math.prod(inputs[1].shape[:-1])  # taps and input channels
    products = 3 if len(inputs) > 3 else 1  # operands as bfloat16 pairs, lo * lo left out
    return 2.0 * products * math.prod(out.shape[:-1]) * inner * out.shape[-1]


def _attention_flops(inputs: Sequence[_Tensor], out: _Tensor) -> float:
    *_, keys, width = inputs[1].padded
    *outer, queries, _ = out.padded
    return 4.0 * math.prod(outer) * queries * keys * width


_FLOPS: dict[str, Callable[[Sequence[_Tensor], _Tensor], float]] = {
    'Matmul': _matmul_flops,
    'MinimalMatmul': _matmul_flops,
    'Conv': _convolution_flops,
    'SDPA': _attention_flops,
}
