# SPDX-License-Identifier: Apache-2.0
"""Folds each batch norm of the network into the convolution before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.runtime.errors import ArtifactError

EPSILON = 1e-3  # of the norms of sparse encoder, backbone and neck
HEAD_EPSILON = 1e-5  # of the norms of the head
BOX_BRANCHES = {'center': 2, 'height': 1, 'dim': 3, 'rot': 2, 'vel': 2}  # and their channels
BRANCHES = (*BOX_BRANCHES, 'heatmap')
_NORM_PARTS = ('weight', 'bias', 'running_mean', 'running_var')


class NormedConv(NamedTuple):
    """A convolution and the norm behind it.

    :ivar conv: name of the convolution in the network's state.
    :ivar norm: name of its norm.
    :ivar epsilon: what the norm adds to the variance.
    :ivar axis: axis of the convolution's weight that runs over its output channels.
    """

    conv: str
    norm: str
    epsilon: float
    axis: int = 0


def normed_convs(config: NetworkConfig) -> list[NormedConv]:
    """Return all convolutions of the network that have a norm, in the order of the data."""
    encoder = 'pts_middle_encoder'
    pairs = [(f'{encoder}.conv_input.0', f'{encoder}.conv_input.1')]
    for level in (1, 2, 3, 4):
        stem = f'{encoder}.encoder_layers.encoder_layer{level}'
        pairs += [(f'{stem}.{block}.conv{i}', f'{stem}.{block}.bn{i}')
                  for block in (0, 1) for i in (1, 2)]
        if level < 4:
            pairs.append((f'{stem}.2.0', f'{stem}.2.1'))
    pairs.append((f'{encoder}.conv_out.0', f'{encoder}.conv_out.1'))
    for block in (0, 1):
        stem = f'pts_backbone.blocks.{block}'
        pairs += [(f'{stem}.{3 * i}', f'{stem}.{3 * i + 1}')
                  for i in range(1 + config.backbone_layers)]
    pairs.append(('pts_neck.deblocks.0.0', 'pts_neck.deblocks.0.1'))
    convs = [NormedConv(conv, norm, EPSILON) for conv, norm in pairs]
    convs.append(NormedConv('pts_neck.deblocks.1.0', 'pts_neck.deblocks.1.1', EPSILON, axis=1))

    head = [('bbox_head.heatmap_head.0.conv', 'bbox_head.heatmap_head.0.bn')]
    for name in ('self_posembed', 'cross_posembed'):
        stem = f'bbox_head.decoder.0.{name}.position_embedding_head'
        head.append((f'{stem}.0', f'{stem}.1'))
    for name in BRANCHES:
        stem = f'bbox_head.prediction_heads.0.{name}.0'
        head.append((f'{stem}.conv', f'{stem}.bn'))
    return convs + [NormedConv(conv, norm, HEAD_EPSILON) for conv, norm in head]


def fold_norms(state: Mapping[str, np.ndarray], config: NetworkConfig) -> dict[str, np.ndarray]:
    """Return the state of the network without norms.

    A norm computes ``(y - mean) / sqrt(var + epsilon) * scale + shift`` of each output channel
    of its convolution, so the convolution can do it: its filters are scaled, and it gets a bias.
    Computed in float64.

    :param state: names of ``BEVFusionNet(config, folded=False)``, in which some or all norms may
        be folded already: their convolution has a bias, and their own entries are missing.
    :returns: float32, names of ``BEVFusionNet(config, folded=True)``.
    :raises ArtifactError: a convolution has neither norm nor bias.
    """
    folded = {name: array for name, array in state.items()
              if not name.endswith('.num_batches_tracked')}
    for conv, norm, epsilon, axis in normed_convs(config):
        weight, bias = folded[f'{conv}.weight'], folded.get(f'{conv}.bias')
        if f'{norm}.running_var' not in folded:
            if bias is None:
                raise ArtifactError(f'{conv}: found neither a bias nor the norm {norm}, '
                                    'expected one of them')
            continue
        scale, shift, mean, var = (np.asarray(folded.pop(f'{norm}.{part}'), np.float64)
                                   for part in _NORM_PARTS)
        scale = scale / np.sqrt(var + epsilon)
        per_channel = [1] * weight.ndim
        per_channel[axis] = -1
        folded[f'{conv}.weight'] = weight * scale.reshape(per_channel)
        folded[f'{conv}.bias'] = shift + ((0 if bias is None else bias) - mean) * scale
    return {name: np.ascontiguousarray(array, np.float32) for name, array in folded.items()}
