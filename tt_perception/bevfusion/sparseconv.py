# SPDX-License-Identifier: Apache-2.0
"""Sparse convolution on the CPU, for inference and training.

For each kernel offset, the rows that a gather table pairs are multiplied with the filter of that
offset and added to their output rows. One compiled kernel does all three without storing what it
gathers or multiplies: a tile of a few pairs and some output channels stays in registers. Blocks of
output rows go to the threads of :mod:`tt_perception.runtime.pool`; a row is summed by one thread
in a fixed order, so that the result does not depend on their number. (The same through torch takes
thousands of small parallel operations a frame, at whose barriers a busy machine loses most of its
time.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from torch import Tensor

from tt_perception.runtime.jit import kernel
from tt_perception.runtime.pool import shared

_BLOCK_ROWS = 512
_FLOAT_BYTES = 4

# A tile has as many accumulators as registers hold: 6 x 32 in AVX-512, 6 x 16 in AVX2 and NEON.
_TILE_PAIRS = 6
_MIN_LANES = 16
_LANES = 32 if '+avx512f' in get_host_cpu_features() else _MIN_LANES


@dataclass(frozen=True)
class Pairs:
    """Which input rows add to which output rows of a sparse convolution.

    Pairs are listed by kernel offset, then by output row.

    :ivar inputs: int32 [P], input row of each pair.
    :ivar outputs: int32 [P], output row of each pair.
    :ivar bounds: int64 [blocks + 1, offsets]: where each block of output rows begins in the list
        of an offset; the last row is where the list ends.
    :ivar num_rows: output rows.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    bounds: np.ndarray
    num_rows: int

    @classmethod
    def of_table(cls, table: np.ndarray) -> Pairs:
        """List the pairs of a gather table, int32 [output rows, offsets] of input rows or -1."""
        num_rows, num_offsets = table.shape
        num_blocks = -(-num_rows // _BLOCK_ROWS)
        counts = np.zeros((num_blocks, num_offsets), np.int64)
        shared().run(_count_pairs, num_blocks, table, counts, grain=1)
        ends = counts.T.cumsum().reshape(num_offsets, num_blocks)
        num_pairs = int(counts.sum())
        bounds = np.empty((num_blocks + 1, num_offsets), np.int64)
        bounds[:-1] = (ends - counts.T).T
        bounds[-1] = ends[:, -1] if num_blocks else 0
        inputs, outputs = np.empty(num_pairs, np.int32), np.empty(num_pairs, np.int32)
        shared().run(_list_pairs, num_blocks, table, bounds, inputs, outputs, grain=1)
        return cls(inputs, outputs, bounds, num_rows)


class SparseConvolution(torch.autograd.Function):
    """``y[o] = bias + sum of weight[k] @ x[i]`` over the pairs (i, o) of all kernel offsets k."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs) -> Tensor:
        """Return float32 [rows, C_out].

        :param x: float32 [n, C_in].
        :param weight: [C_out, kx, ky, kz, C_in]; offset ``k = (kx * Ky + ky) * Kz + kz``.
        :param bias: [C_out].
        """
        ctx.save_for_backward(x, weight)
        ctx.pairs = pairs
        c_out, c_in = weight.shape[0], weight.shape[-1]
        padding = (0, -c_out % _MIN_LANES)
        filters = F.pad(weight.detach().flatten(1).T, padding).contiguous()
        shift = F.pad(weight.new_zeros(c_out) if bias is None else bias.detach(), padding)
        y = np.empty((pairs.num_rows, filters.shape[1]), np.float32)
        shared().run(_convolve, len(pairs.bounds) - 1, x.detach().contiguous().numpy(),
                     filters.view(-1, c_in, y.shape[1]).numpy(), shift.numpy(), pairs.inputs,
                     pairs.outputs, pairs.bounds, y, grain=1)
        return torch.from_numpy(y)[:, :c_out].contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        filters = weight.flatten(1, 3).transpose(0, 1)  # [offsets, C_out, C_in]
        grad_x = torch.zeros_like(x) if needs_x else None
        grad_filters = torch.empty_like(filters)
        counts = (ctx.pairs.bounds[-1] - ctx.pairs.bounds[0]).tolist()
        for k, (i, o) in enumerate(zip(torch.from_numpy(ctx.pairs.inputs).split(counts),
                                       torch.from_numpy(ctx.pairs.outputs).split(counts),
                                       strict=True)):
            grads = grad_y.index_select(0, o)
            grad_filters[k] = grads.T @ x.index_select(0, i)
            if needs_x:
                grad_x.index_add_(0, i, grads @ filters[k])
        grad_weight = grad_filters.transpose(0, 1).unflatten(1, weight.shape[1:4])
        return grad_x, grad_weight, grad_y.sum(dim=0) if needs_bias else None, None


@kernel
def _count_pairs(begin, end, table, counts):
    for block in range(begin, end):
        for row in range(block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, len(table))):
            for k in range(table.shape[1]):
                counts[block, k] += table[row, k] >= 0


@kernel
def _list_pairs(begin, end, table, bounds, inputs, outputs):
    for block in range(begin, end):
        free = bounds[block].copy()
        for row in range(block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, len(table))):
            for k in range(table.shape[1]):
                if table[row, k] >= 0:
                    inputs[free[k]] = table[row, k]
                    outputs[free[k]] = row
                    free[k] += 1


@kernel
def _convolve(begin, end, x, filters, bias, inputs, outputs, bounds, y):
    """Compute the rows of some blocks; filters are [offsets, C_in, C_out]."""
    width = y.shape[1]
    wide = width - width % _LANES
    for block in range(begin, end):
        y[block * _BLOCK_ROWS:(block + 1) * _BLOCK_ROWS] = bias
        for k in range(len(filters)):
            first, last = bounds[block, k], bounds[block + 1, k]
            in_tiles = last - (last - first) % _TILE_PAIRS
            for column in range(0, wide, _LANES):
                for pair in range(first, in_tiles, _TILE_PAIRS):
                    _multiply_tile(_TILE_PAIRS, _LANES, x, filters[k], inputs, outputs, pair,
                                   column, y)
                for pair in range(in_tiles, last):
                    _multiply_tile(1, _LANES, x, filters[k], inputs, outputs, pair, column, y)
            for column in range(wide, width, _MIN_LANES):
                for pair in range(first, in_tiles, _TILE_PAIRS):
                    _multiply_tile(_TILE_PAIRS, _MIN_LANES, x, filters[k], inputs, outputs, pair,
                                   column, y)
                for pair in range(in_tiles, last):
                    _multiply_tile(1, _MIN_LANES, x, filters[k], inputs, outputs, pair, column, y)


@intrinsic(prefer_literal=True)
def _multiply_tile(typing_context, num_pairs, lanes, x, weight, inputs, outputs, pair, column, y):
    """Add ``x[inputs[p]] @ weight[:, column:column + lanes]`` to ``y[outputs[p], column:...]``.

    For ``num_pairs`` pairs p from ``pair`` on, whose output rows differ. ``num_pairs`` and
    ``lanes`` are literals; arrays are C-contiguous; nothing is checked.
    """
    tile_pairs, tile_lanes = num_pairs.literal_value, lanes.literal_value

    def generate(context, builder, signature, arguments):
        _, _, x_, weight_, inputs_, outputs_, first, column_, y_ = (
            context.make_array(kind)(context, builder, value)
            if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True))
        c_in = cgutils.unpack_tuple(builder, x_.shape)[1]
        c_out = cgutils.unpack_tuple(builder, y_.shape)[1]
        index, single = ir.IntType(64), ir.FloatType()
        vector = ir.VectorType(single, tile_lanes)
        zero = ir.Constant(index, 0)

        def row(array, rows_, at, length):
            """Return the address of the row that entry ``at`` of a list of rows names."""
            number = builder.sext(builder.load(builder.gep(rows_.data, [at])), index)
            return builder.gep(array.data, [builder.mul(number, length)])

        def vector_at(address):
            return builder.bitcast(address, vector.as_pointer())

        def load(address):
            value = builder.load(vector_at(address))
            value.align = _FLOAT_BYTES
            return value

        pairs = [builder.add(first, ir.Constant(index, p)) for p in range(tile_pairs)]
        rows_in = [row(x_, inputs_, p, c_in) for p in pairs]
        rows_out = [builder.gep(row(y_, outputs_, p, c_out), [column_]) for p in pairs]
        before = [load(address) for address in rows_out]

        entry = builder.block
        loop = builder.append_basic_block('channels')
        done = builder.append_basic_block('done')
        builder.branch(loop)
        builder.position_at_end(loop)
        channel = builder.phi(index)
        channel.add_incoming(zero, entry)
        sums = [builder.phi(vector) for _ in pairs]
        at = builder.add(builder.mul(channel, c_out), column_)
        weights = load(builder.gep(weight_.data, [at]))
        same = ir.Constant(ir.VectorType(ir.IntType(32), tile_lanes), [0] * tile_lanes)
        nothing = ir.Constant(vector, ir.Undefined)
        for total, start, row_in in zip(sums, before, rows_in, strict=True):
            value = builder.load(builder.gep(row_in, [channel]))
            spread = builder.shuffle_vector(
                builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0)), nothing,
                same)
            product = builder.fmul(spread, weights, flags=('contract',))
            total.add_incoming(start, entry)
            total.add_incoming(builder.fadd(total, product, flags=('contract',)), loop)
        following = builder.add(channel, ir.Constant(index, 1))
        channel.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed('<', following, c_in), loop, done)
        builder.position_at_end(done)
        for address, total in zip(rows_out, sums, strict=True):
            builder.store(total.incomings[1][0], vector_at(address)).align = _FLOAT_BYTES
        return context.get_dummy_value()

    return types.none(num_pairs, lanes, x, weight, inputs, outputs, types.int64, types.int64,
                      y), generate
