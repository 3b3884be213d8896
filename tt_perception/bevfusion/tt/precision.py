# SPDX-License-Identifier: Apache-2.0
"""Which numbers each block computes with: the one table that decides it.

The choice is the cheapest that keeps 99 of 100 objects within 0.05 m, 0.02 rad and 0.01 in score
of backend ``cpu``; ``tools/precision.py`` measures what others would cost in accuracy. All sums
are float32.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """The numbers of a block.

    :ivar activations: ``pairs`` (two bfloat16, see :mod:`.gatherconv`), ``float32``, of which
        the matrix unit takes the leading 11 bits, or ``bfloat16``.
    :ivar weights: likewise.
    :ivar fidelity: phases of the matrix unit: ``HiFi2`` takes in all bits of pairs, ``HiFi4``
        those of any bfloat16 and of float32's leading bits.
    """

    activations: str
    weights: str
    fidelity: str


_PAIRS = Precision('pairs', 'pairs', 'HiFi2')
_FLOAT = Precision('float32', 'float32', 'HiFi4')

POLICY = {
    # An error made here passes through up to 40 layers, and the heat map picks by it.
    'pts_middle_encoder': _PAIRS,
    'pts_backbone': _PAIRS,
    'pts_neck': _PAIRS,
    'bbox_head.shared_conv': _PAIRS,
    'bbox_head.heatmap_head': _PAIRS,
    # Behind the selection of proposals, an error only moves boxes a little.
    'bbox_head.decoder': _FLOAT,
    'bbox_head.decoder.attention': Precision('bfloat16', 'bfloat16', 'HiFi4'),
    'bbox_head.prediction_heads': _FLOAT,
}


def precision_of(name: str) -> Precision:
    """Return the entry whose name is the longest beginning of a block's or weight's name."""
    return POLICY[max((block for block in POLICY if name.startswith(block)), key=len)]
