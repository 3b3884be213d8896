# SPDX-License-Identifier: Apache-2.0
"""The proposal selection of the Blackhole graph, as a function of torch tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SUPPRESSED = -2 ** 31  # below the key of every float


def order_keys(values: Tensor) -> Tensor:
    """Return int64 numbers in the order of float32 ones; -0.0 and 0.0 become the same."""
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def values_of(keys: Tensor) -> Tensor:
    """Undo :func:`order_keys`."""
    bits = torch.where(keys < 0, -keys - 2 ** 31, keys)
    return bits.to(torch.int32).view(torch.float32)


def golden_peaks(logits: Tensor, *, size_x: int, size_y: int, num_classes: int,
                 pooled_classes: tuple[int, ...], num_proposals: int) -> tuple[Tensor, Tensor]:
    """Return what ``Peaks`` writes: proposals float32 [Kpad, 32] and cells int32 [1, Kpad].

    :param logits: float32 [cells, 16 or 32].
    """
    keys = order_keys(logits[:, :num_classes].T).reshape(num_classes, size_x, size_y)
    pooled = list(pooled_classes)
    survives = torch.ones_like(keys, dtype=torch.bool)
    if pooled:
        inner = keys[pooled].unfold(1, 3, 1).unfold(2, 3, 1).flatten(3).amax(3)
        survives[pooled] = F.pad(inner == keys[pooled, 1:-1, 1:-1], (1, 1, 1, 1))
    keys = torch.where(survives, keys, SUPPRESSED).flatten()
    order = torch.sort(keys, descending=True, stable=True)
    best, indices = order.values[:num_proposals], order.indices[:num_proposals]
    label, cell = indices // (size_x * size_y), indices % (size_x * size_y)

    padded = -(-num_proposals // 32) * 32
    proposals = torch.zeros(padded, 32)
    proposals[:, 0] = -1e4
    rows = proposals[:num_proposals]
    rows[:, 0] = torch.where(best == SUPPRESSED, -1e4, values_of(best))
    rows[:, 1] = cell // size_y
    rows[:, 2] = cell % size_y
    rows[:, 3] = label
    rows.scatter_(1, 8 + label[:, None], 1.0)
    cells = torch.zeros(1, padded, dtype=torch.int32)
    cells[0, :num_proposals] = cell
    return proposals, cells
