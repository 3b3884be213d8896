# SPDX-License-Identifier: Apache-2.0
"""A ttnn whose operations are PyTorch functions: the graph of the network runs on it as it is.

Tensors carry ttnn's type and layout, and results are rounded to that type. Besides, operations
round where the chip does:

* The matrix unit and the vector operations that go through its registers take ten bits behind the
  point of a float32 (tf32), the others are cut off; sums are float32.
* The attention works on chunks of keys and keeps scores, weights, sums and the running result in
  bfloat16.

That reproduces the size of the chip's errors, not their bits. What is allocated holds NaN: a graph
that reads what nobody has written shows. Operations, arguments and values of arguments that are
not known here raise.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from golden_gatherconv import BLOCK_ROWS, gather_conv_golden, join_pairs
from golden_peaks import golden_peaks

GRAPH = 'tt_perception.bevfusion.tt'
TILE = 32


# Types


class DataType(enum.Enum):
    """Types of tensors; the value is torch's."""

    BFLOAT16 = torch.bfloat16
    FLOAT32 = torch.float32
    UINT32 = torch.uint32


class Layout(enum.Enum):
    """Layouts of tensors; values are kept alike in both."""

    ROW_MAJOR = 0
    TILE = 1


class CoreCoord(NamedTuple):
    """A core, or the size of a grid."""

    x: int
    y: int


class Device:
    """A p150 of which one column of cores hands out the work."""

    def compute_with_storage_grid_size(self) -> CoreCoord:
        return CoreCoord(11, 10)


class Tensor:
    """A tensor with ttnn's type and layout, on the host (``device`` None) or on a device."""

    def __init__(self, value: torch.Tensor, layout: Layout, device: Device | None) -> None:
        self.value = value
        self.layout = layout
        self.device = device

    @property
    def dtype(self) -> DataType:
        return DataType(self.value.dtype)

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def host_buffer(self) -> SimpleNamespace:
        """Return what gives access to the memory of a host tensor."""
        assert self.device is None, 'the memory of a device cannot be seen'
        memory = self.value.view(torch.uint8).flatten()
        return SimpleNamespace(get_shard=lambda coordinate: memory)


@dataclass(frozen=True)
class ComputeConfig:
    """Settings of the matrix unit; only the exact ones are known here."""

    math_fidelity: str
    math_approx_mode: bool
    fp32_dest_acc_en: bool
    packer_l1_acc: bool

    def __post_init__(self) -> None:
        settings = (self.math_fidelity, self.math_approx_mode, self.fp32_dest_acc_en)
        assert settings == ('HiFi4', False, True), f'unknown settings: {self}'


@dataclass(frozen=True)
class AttentionConfig:
    """How the attention is cut up."""

    compute_with_storage_grid_size: CoreCoord
    q_chunk_size: int
    k_chunk_size: int
    exp_approx_mode: bool


# Roundings


def tf32(values: torch.Tensor) -> torch.Tensor:
    """Return values as the matrix unit takes them, in float32: later bits are cut off."""
    if values.dtype == torch.bfloat16:
        return values.float()
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def bf16(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values rounded to bfloat16, in float32."""
    return values.bfloat16().float()


# Operations, in the order of a frame


def from_torch(value: torch.Tensor, *, dtype: DataType, layout: Layout,
               device: Device | None = None, memory_config: str = 'DRAM') -> Tensor:
    assert value.is_floating_point() == (dtype is not DataType.UINT32), (value.dtype, dtype)
    return Tensor(value.detach().to(dtype.value).clone(), layout, device)


def to_torch(tensor: Tensor) -> torch.Tensor:
    return tensor.value.clone()


def allocate_tensor_on_device(shape: Sequence[int], dtype: DataType, layout: Layout,
                              device: Device, memory_config: str) -> Tensor:
    if dtype is DataType.UINT32:
        value = torch.full(tuple(shape), -1, dtype=torch.int32).view(torch.uint32)
    else:
        value = torch.full(tuple(shape), torch.nan, dtype=dtype.value)
    return Tensor(value, layout, device)


def copy_host_to_device_tensor(host: Tensor, target: Tensor) -> None:
    assert host.device is None and target.device is not None
    assert (host.shape, host.dtype, host.layout) == (target.shape, target.dtype, target.layout)
    target.value.copy_(host.value)


def to_layout(x: Tensor, layout: Layout) -> Tensor:
    return Tensor(x.value.clone(), layout, x.device)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return Tensor(x.value.reshape(shape).clone(), x.layout, x.device)


def slice_of(x: Tensor, begins: Sequence[int], ends: Sequence[int]) -> Tensor:
    assert len(begins) == len(ends) == x.value.ndim
    part = x.value[tuple(map(slice, begins, ends))]
    assert [*part.shape] == [end - begin for begin, end in zip(begins, ends, strict=True)]
    return Tensor(part.clone(), x.layout, x.device)


def embedding(indices: Tensor, table: Tensor, *, layout: Layout) -> Tensor:
    _expect(indices, Layout.ROW_MAJOR, DataType.UINT32)
    _expect(table, Layout.ROW_MAJOR, DataType.BFLOAT16)
    rows = F.embedding(indices.value.view(torch.int32), table.value)
    return Tensor(rows, layout, table.device)


def linear(x: Tensor, weight: Tensor, *, bias: Tensor | None, dtype: DataType,
           activation: str | None, compute_kernel_config: ComputeConfig) -> Tensor:
    _expect(x, Layout.TILE, DataType.FLOAT32, DataType.BFLOAT16)
    _expect(weight, Layout.TILE, DataType.FLOAT32)
    assert activation in (None, 'relu'), activation
    result = tf32(x.value) @ tf32(weight.value)
    if bias is not None:
        _expect(bias, Layout.TILE, DataType.FLOAT32)
        result = tf32(result) + tf32(bias.value)
    if activation == 'relu':
        result = result.relu()
    return _tiles(x, result, dtype)


def add(a: Tensor, b: Tensor) -> Tensor:
    return _elementwise(torch.add, a, b)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return _elementwise(torch.mul, a, b)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    return _elementwise(torch.sub, a, b)


def mean(x: Tensor, *, dim: int, keepdim: bool, compute_kernel_config: ComputeConfig) -> Tensor:
    _expect(x, Layout.TILE, DataType.BFLOAT16)
    return _tiles(x, x.value.float().mean(dim=dim, keepdim=keepdim), x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    _expect(x, Layout.TILE, DataType.FLOAT32)
    return _tiles(x, x.value.sigmoid())


def layer_norm(x: Tensor, *, residual_input_tensor: Tensor, weight: Tensor, bias: Tensor,
               epsilon: float, compute_kernel_config: ComputeConfig) -> Tensor:
    operands = (x, residual_input_tensor, weight, bias)
    for operand in operands:
        _expect(operand, Layout.TILE, DataType.FLOAT32)
    values, residual, scale, shift = (tf32(operand.value) for operand in operands)
    values = tf32(values + residual)
    centred = tf32(values - tf32(values.mean(dim=-1, keepdim=True)))
    spread = tf32(torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon))
    return _tiles(x, tf32(tf32(centred * spread) * scale) + shift)


def nlp_create_qkv_heads(x: Tensor, *, num_heads: int, num_kv_heads: int,
                         transpose_k_heads: bool) -> tuple[Tensor, ...]:
    """Split [1, 1, n, heads * width]; only a lone tensor of queries is known here."""
    assert (num_kv_heads, transpose_k_heads) == (0, False)
    _expect(x, Layout.TILE, DataType.BFLOAT16)
    heads = x.value[0].unflatten(2, (num_heads, -1)).transpose(1, 2)
    return (_tiles(x, heads.contiguous(), x.dtype),)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool,
                                 scale: float, program_config: AttentionConfig,
                                 compute_kernel_config: ComputeConfig,
                                 output_concat_heads: bool) -> Tensor:
    """Take [1, heads, n, width]; return [1, 1, n, heads * width]."""
    assert (is_causal, output_concat_heads, program_config.exp_approx_mode) == (False, True, False)
    for operand in (query, key, value):
        _expect(operand, Layout.TILE, DataType.BFLOAT16)
        assert operand.shape[-1] % TILE == 0, operand.shape
    mixed = attention(query.value.float(), key.value.float(), value.value.float(), scale,
                      program_config.k_chunk_size)
    return _tiles(query, mixed.transpose(1, 2).flatten(2)[None], DataType.BFLOAT16)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
              chunk: int) -> torch.Tensor:
    """Mix values chunk by chunk of keys; what is kept from one to the next is bfloat16."""
    greatest = torch.full((*query.shape[:-1], 1), -3e38)
    total, mixed = torch.zeros_like(greatest), torch.zeros_like(query)
    for keys, values in zip(key.split(chunk, 2), value.split(chunk, 2), strict=True):
        scores = bf16(query @ keys.transpose(2, 3))
        greatest, before = torch.maximum(greatest, scores.amax(3, keepdim=True)), greatest
        weights = bf16(scores.sub_(greatest).mul_(scale).exp_())
        shrink = bf16(((before - greatest) * scale).exp())
        total = bf16(total * shrink + weights.sum(3, keepdim=True))
        mixed = bf16(bf16(mixed * shrink) + bf16(weights @ values))
    return mixed / total


def _expect(x: Tensor, layout: Layout, *dtypes: DataType) -> None:
    assert x.layout is layout and x.dtype in dtypes, (x.layout, x.dtype)
    assert x.device is not None, 'a host tensor'


def _tiles(like: Tensor, value: torch.Tensor, dtype: DataType = DataType.FLOAT32) -> Tensor:
    return Tensor(value.to(dtype.value), Layout.TILE, like.device)


def _elementwise(function, a: Tensor, b: Tensor) -> Tensor:
    """Float32 goes through the vector unit, which takes all of its bits."""
    for operand in (a, b):
        _expect(operand, Layout.TILE, DataType.FLOAT32, DataType.BFLOAT16)
    assert a.dtype is b.dtype, (a.dtype, b.dtype)
    return _tiles(a, function(a.value.float(), b.value.float()), a.dtype)


OPERATIONS = {
    'from_torch': from_torch, 'to_torch': to_torch,
    'allocate_tensor_on_device': allocate_tensor_on_device,
    'copy_host_to_device_tensor': copy_host_to_device_tensor,
    'to_layout': to_layout, 'reshape': reshape, 'slice': slice_of, 'embedding': embedding,
    'linear': linear, 'add': add, 'subtract': subtract, 'multiply': multiply,
    'sigmoid': sigmoid, 'mean': mean, 'layer_norm': layer_norm,
}


def golden_ttnn() -> ModuleType:
    """Return the module; what the graph does not use is not in it."""
    module = ModuleType('ttnn')
    vars(module).update(
        OPERATIONS,
        experimental=SimpleNamespace(nlp_create_qkv_heads=nlp_create_qkv_heads),
        transformer=SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention),
        open_device=lambda **options: Device(),
        Tensor=Tensor, Device=Device, CoreCoord=CoreCoord, Shape=tuple,
        MeshCoordinate=lambda *place: place,
        bfloat16=DataType.BFLOAT16, float32=DataType.FLOAT32, uint32=DataType.UINT32,
        TILE_LAYOUT=Layout.TILE, ROW_MAJOR_LAYOUT=Layout.ROW_MAJOR, DRAM_MEMORY_CONFIG='DRAM',
        MathFidelity=SimpleNamespace(HiFi4='HiFi4'), DataType=DataType,
        WormholeComputeKernelConfig=ComputeConfig, SDPAProgramConfig=AttentionConfig)
    return module


# The two kernels of our own


def gather_conv(op, features: Tensor, table: Tensor, counts: Tensor, count_index: int,
                out: Tensor, *, table_first_block: int = 0, residual: Tensor | None = None,
                target=None) -> Tensor:
    """Do what ``GatherConv.__call__`` does."""
    widths = [(features, 2 * op.channels_in), (table, op.columns * BLOCK_ROWS)]
    assert (residual is not None) == op.residual
    if op.residual:
        widths.append((residual, 2 * op.channels_out))
    for tensor, width in widths:
        assert tensor.shape[1] == width and tensor.layout is Layout.ROW_MAJOR
    assert out is not features, 'rows that are still to be read would be overwritten'
    # Tensors have room for more rows than there are; what is not used need not be converted.
    count = int(counts.value.view(torch.int32)[0, count_index])
    end = table_first_block + -(-count // BLOCK_ROWS)
    words = table.value[table_first_block:end]
    rows = (int(words.view(torch.int32).max()) >> 3) + op.taps if len(words) else 0
    gather_conv_golden(op, features.value[:rows], words, counts.value, count_index, out.value,
                       residual=residual.value if op.residual else None, target=target)
    return out


def plain_gather_conv(op, features: Tensor, *args, residual: Tensor | None = None,
                      **kwargs) -> Tensor:
    """Do the same with weights and values rounded to bfloat16, and no second terms."""
    def plain(pairs: Tensor | None) -> Tensor | None:
        if pairs is None:
            return None
        values = join_pairs(pairs.value).bfloat16()
        return Tensor(torch.cat([values, torch.zeros_like(values)], 1), pairs.layout, pairs.device)

    weight = bf16(sum(op.weight_terms))
    names = ('columns', 'taps', 'relu', 'residual', 'out_form', 'bias_where_present',
             'channels_in', 'channels_out', 'bias')
    rounded = SimpleNamespace(**{name: getattr(op, name) for name in names},
                              weight_terms=(weight, torch.zeros_like(weight)))
    return gather_conv(rounded, plain(features), *args, residual=plain(residual), **kwargs)


def peaks(op, logits: Tensor, proposals: Tensor, cells: Tensor) -> None:
    """Do what ``Peaks.__call__`` does."""
    assert tuple(logits.shape) == (op.size_x * op.size_y, op.width)
    found = golden_peaks(logits.value, size_x=op.size_x, size_y=op.size_y,
                         num_classes=op.num_classes, pooled_classes=op.pooled_classes,
                         num_proposals=op.num_proposals)
    for tensor, value in zip((proposals, cells), found, strict=True):
        assert tensor.shape == value.shape
        tensor.value.copy_(value)


@contextmanager
def golden_graph(*, pairs: bool = True) -> Iterator[ModuleType]:
    """Import the graph anew, on golden functions; yield its module, and put everything back.

    What was made of it stays usable. Imports of ttnn elsewhere see the golden one meanwhile.

    :param pairs: False for plain bfloat16 in all convolutions, to see that this is noticed.
    """
    parent = importlib.import_module(GRAPH.rpartition('.')[0])
    importlib.import_module(GRAPH)  # so that there is something to put back
    kept_package = parent.tt
    kept = {name: module for name, module in sys.modules.items() if _is_swapped(name)}
    for name in kept:
        del sys.modules[name]
    sys.modules['ttnn'] = golden_ttnn()
    try:
        graph = importlib.import_module(f'{GRAPH}.graph')
        convolution = importlib.import_module(f'{GRAPH}.gatherconv').GatherConv
        convolution.__call__ = gather_conv if pairs else plain_gather_conv
        importlib.import_module(f'{GRAPH}.peaks').Peaks.__call__ = peaks
        yield graph
    finally:
        for name in [name for name in sys.modules if _is_swapped(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        parent.tt = kept_package


def _is_swapped(name: str) -> bool:
    return any(name == top or name.startswith(f'{top}.') for top in ('ttnn', GRAPH))
