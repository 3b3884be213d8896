# SPDX-License-Identifier: Apache-2.0
"""The gather convolution of the device in torch: the same tensors in, the same numbers out.

Pure functions on torch tensors, fast enough for whole frames. Numbers agree with the device to its
rounding, not bit for bit; where a value is split into hi and lo, the parts may differ while their
sum agrees.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 32


def join_pairs(rows: Tensor) -> Tensor:
    """Return the float32 values [rows, C] of pair rows [rows, 2 * C]."""
    hi, lo = rows.float().chunk(2, dim=1)
    return hi + lo


def split_pairs(values: Tensor) -> Tensor:
    """Return values [rows, C] as pair rows: hi has 7 bits, in steps that a row has in common."""
    greatest = values.abs().amax(dim=1, keepdim=True).clamp_min(2.0 ** -100)
    step = torch.exp2(torch.floor(torch.log2(greatest * (1 + 2 ** -7))) - 6)
    hi = torch.round(values / step) * step
    return torch.cat([hi, values - hi], dim=1).bfloat16()


def table_rows(table: Tensor, columns: int, taps: int, first_block: int = 0) -> Tensor:
    """Return the input row of each tap, int64 [blocks * 32, columns * taps], -1 where none is.

    :param table: 32-bit words [blocks, columns * 32], ``base << 3 | mask``.
    """
    words = table[first_block:].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(-1, columns, BLOCK_ROWS).transpose(1, 2).reshape(-1, columns)
    base, rows = words >> 3, torch.empty(len(words), columns, taps, dtype=torch.int64)
    for tap in range(taps):
        exists = (words >> tap & 1).bool()
        rows[:, :, tap] = torch.where(exists, base, -1)
        base = base + exists
    return rows.flatten(1)


def target_pages(rows: int, target) -> tuple[Tensor, Tensor]:
    """Return page and slot of output rows 0 to ``rows``, int64 each."""
    row = torch.arange(rows)
    place, slot = row // target.rows_per_page, row % target.rows_per_page
    if target.width is not None:
        place = place // target.width * target.outer + place % target.width * target.inner
    return target.offset + place, slot


def gather_conv_golden(op, features: Tensor, table: Tensor, counts: Tensor, count_index: int,
                       out: Tensor, *, table_first_block: int = 0,
                       residual: Tensor | None = None, target=None) -> Tensor:
    """Do what a :class:`GatherConv` does when it is called, on torch tensors; return ``out``.

    :param op: a GatherConv, or what has its ``columns``, ``taps``, ``relu``, ``residual``,
        ``out_form``, ``bias_where_present``, ``channels_out``, ``weight_terms`` (two float32
        [taps, C_in, C_out]) and ``bias``.
    :param features: bfloat16 pair rows [rows, 2 * C_in].
    :param out: written in place, as far as there are output rows.
    :param target: a Target; None for row r in page r.
    """
    count = int(counts.view(torch.int32).flatten()[count_index])
    rows = table_rows(table, op.columns, op.taps, table_first_block)[:count]
    values = convolve(op, join_pairs(features), rows)
    if op.residual:
        values += join_pairs(residual[:count])
    if op.relu:
        values.clamp_(min=0.0)
    write(op, values, out, target)
    return out


def convolve(op, values: Tensor, rows: Tensor) -> Tensor:
    """Return the sums and the bias, float32 [rows, C_out].

    :param values: float32 [input rows, C_in].
    :param rows: input row of each tap, int64 [output rows, taps], -1 where none is.
    """
    first, second = op.weight_terms
    weight = first + second
    sums = torch.zeros(len(rows), weight.shape[2])
    for tap in range(rows.shape[1]):
        source = rows[:, tap]
        present = (source >= 0).nonzero().flatten()
        if len(present) == len(rows):
            sums.addmm_(values[source], weight[tap])
        elif len(present):
            sums.index_add_(0, present, values[source[present]] @ weight[tap])
    if op.bias_where_present:
        return sums + (rows >= 0).any(dim=1, keepdim=True) * op.bias
    return sums + op.bias


def write(op, values: Tensor, out: Tensor, target=None) -> None:
    """Write float32 [rows, C_out] into pages of ``out`` in the form of ``op``."""
    pairs = op.out_form == 'pairs'
    parts = split_pairs(values).chunk(2, dim=1) if pairs else [values.to(out.dtype)]
    channels = out.shape[-1] // len(parts)
    pages = out.view(-1, out.shape[-1])
    if target is None:
        for i, part in enumerate(parts):
            pages[:len(values), i * channels:i * channels + part.shape[1]] = part
        return
    page, slot = target_pages(len(values), target)
    for i, part in enumerate(parts):
        for s in range(target.rows_per_page):
            here = slot == s
            first = i * channels + target.channel_offset + s * part.shape[1]
            pages[page[here], first:first + part.shape[1]] = part[here]
