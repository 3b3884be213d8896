# SPDX-License-Identifier: Apache-2.0
"""Weights of the head in the form that its graph takes them: plain arrays, no device.

All matrices are [in, out], float32. A tensor of the graph that is called packed has the columns of
:class:`Packed`, proposals those of :class:`Proposal`.

A head of the attention has up to 16 channels, and a tile 32 columns: the tile of a head holds its
keys in the first half and its values in the second. One tensor serves as keys and as values. Zeros
in the queries' second half keep the values out of the scores, and zeros in the rows of the output
projection drop the keys that were mixed like values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.fold import BOX_BRANCHES, BRANCHES
from tt_perception.runtime.errors import ConfigError

TILE = 32
MAX_HEAD_CHANNELS = TILE // 2
DECODER = 'bbox_head.decoder.0'
PREDICTION = 'bbox_head.prediction_heads.0'


class Proposal:
    """Columns of the proposals, float32 [padded proposals, 32]."""

    LOGIT = 0  # of the heat map
    X, Y, LABEL = 1, 2, 3
    ONE_HOT = 8  # 1.0 in column 8 + label


class Packed:
    """Columns of what the head returns, float32 [padded proposals, 32]."""

    BOX = 0  # the ten rows of bbox_pred, the centre relative to that of the cell
    SCORE = 10
    X, Y, LABEL = 11, 12, 13


MAX_CLASSES = TILE - Proposal.ONE_HOT


@dataclass(frozen=True)
class Linear:
    """A linear layer: ``x @ weight + bias``, weight float32 [in, out], bias float32 [out]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of an attention whose heads are one tile wide.

    :ivar query: to the queries, [C, heads * 32].
    :ivar key_value: to keys and values, [C, heads * 32].
    :ivar out: from the mixed tiles, [heads * 32, C].
    """

    query: Linear
    key_value: Linear
    out: Linear


def check(config: NetworkConfig) -> None:
    """Refuse sizes that the head's layout has no place for.

    :raises ConfigError: heads with more than 16 channels, more than 24 classes.
    """
    head = config.hidden_channels // config.num_heads
    if head > MAX_HEAD_CHANNELS:
        raise ConfigError(f'num_heads: found {head} channels in a head, '
                          f'expected at most {MAX_HEAD_CHANNELS}')
    if config.num_classes > MAX_CLASSES:
        raise ConfigError(f'num_classes: found {config.num_classes}, '
                          f'expected at most {MAX_CLASSES}')


def padded_proposals(config: NetworkConfig) -> int:
    """Return the number of proposals, rounded up to whole tiles."""
    return math.ceil(config.num_proposals / TILE) * TILE


def pair_rows(values: Tensor) -> Tensor:
    """Return float32 [n, C] as pairs, bfloat16 [n, 2 * C]: rounded values, then what is left."""
    high = values.bfloat16()
    return torch.cat([high, (values - high.float()).bfloat16()], dim=1)


def pair_sum(channels: int) -> Tensor:
    """Return the matrix [2 * C, C] that adds both parts of pair rows."""
    return torch.eye(channels).repeat(2, 1)


def linear(arrays: Mapping[str, np.ndarray], name: str) -> Linear:
    """Return a linear layer or a convolution with kernel size 1."""
    weight, bias = (torch.tensor(arrays[f'{name}.{part}']) for part in ('weight', 'bias'))
    return Linear(weight.flatten(1).T.contiguous(), bias)


def class_encoding(arrays: Mapping[str, np.ndarray]) -> Tensor:
    """Return the matrix [32, C] from proposals to the encodings of their classes."""
    layer = linear(arrays, 'bbox_head.class_encoding')
    matrix = torch.zeros(TILE, len(layer.bias))
    matrix[Proposal.ONE_HOT:Proposal.ONE_HOT + len(layer.weight)] = layer.weight + layer.bias
    return matrix


def position_encoding(arrays: Mapping[str, np.ndarray], name: str,
                      config: NetworkConfig) -> Tensor:
    """Return the encodings of all cells, float32 [cells, C], row = x * Y + y.

    :param name: ``self_posembed`` or ``cross_posembed``.
    """
    x, y = config.feature_map_xy
    value = torch.cartesian_prod(torch.arange(x) + 0.5, torch.arange(y) + 0.5).double()
    stem = f'{DECODER}.{name}.position_embedding_head'
    for i, layer in enumerate(linear(arrays, f'{stem}.{j}') for j in (0, 3)):
        value = (value.relu() if i else value) @ layer.weight.double() + layer.bias.double()
    return value.float()


def attention(arrays: Mapping[str, np.ndarray], name: str,
              config: NetworkConfig) -> AttentionWeights:
    """Return the projections of ``self_attn`` or ``cross_attn``."""
    stem = f'{DECODER}.{name}.attn'
    channels, heads = config.hidden_channels, config.num_heads
    query, key, value = (
        _by_head(torch.tensor(np.vstack([weight.T, bias])), heads)
        for weight, bias in zip(np.split(arrays[f'{stem}.in_proj_weight'], 3),
                                np.split(arrays[f'{stem}.in_proj_bias'], 3), strict=True))
    nothing = torch.zeros_like(query)
    query, key_value = (torch.cat(parts, dim=2).flatten(1)
                        for parts in ((query, nothing), (key, value)))
    out = linear(arrays, f'{stem}.out_proj')
    rows = _by_head(out.weight.T, heads)
    rows = torch.cat([torch.zeros_like(rows), rows], dim=2).flatten(1).T.contiguous()
    return AttentionWeights(Linear(query[:channels], query[channels]),
                            Linear(key_value[:channels], key_value[channels]),
                            Linear(rows, out.bias))


def _by_head(columns: Tensor, heads: int) -> Tensor:
    """Return [n, heads * channels] as [n, heads, 16]."""
    columns = columns.unflatten(1, (heads, -1))
    return F.pad(columns, (0, MAX_HEAD_CHANNELS - columns.shape[2]))


def branches(arrays: Mapping[str, np.ndarray],
             config: NetworkConfig) -> tuple[Linear, Linear, Linear]:
    """Return the branches as one first layer and two second layers.

    :returns: C -> branches * width (ReLU follows), then from there to the ten columns of the box,
        and to the logits of the classes, each in the column of its class in the proposals.
    """
    width = config.branch_channels
    first = [linear(arrays, f'{PREDICTION}.{name}.0.conv') for name in BRANCHES]
    box, classes = (Linear(torch.zeros(len(BRANCHES) * width, TILE), torch.zeros(TILE))
                    for _ in range(2))
    column = Packed.BOX
    for i, name in enumerate(BRANCHES):
        second = linear(arrays, f'{PREDICTION}.{name}.1')
        whole, start = (box, column) if name in BOX_BRANCHES else (classes, Proposal.ONE_HOT)
        columns = slice(start, start + len(second.bias))
        whole.weight[i * width:(i + 1) * width, columns] = second.weight
        whole.bias[columns] = second.bias
        column += len(second.bias)
    return (Linear(torch.cat([layer.weight for layer in first], dim=1),
                   torch.cat([layer.bias for layer in first])), box, classes)


def score_column() -> Tensor:
    """Return the matrix [32, 32] that puts the sum over all classes into the score's column."""
    matrix = torch.zeros(TILE, TILE)
    matrix[Proposal.ONE_HOT:, Packed.SCORE] = 1
    return matrix


def place_columns() -> Tensor:
    """Return the matrix [32, 32] that moves x, y and label of proposals to packed columns."""
    matrix = torch.zeros(TILE, TILE)
    for source, target in ((Proposal.X, Packed.X), (Proposal.Y, Packed.Y),
                           (Proposal.LABEL, Packed.LABEL)):
        matrix[source, target] = 1
    return matrix
