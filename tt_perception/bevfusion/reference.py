# SPDX-License-Identifier: Apache-2.0
"""The network of BEVFusion-L, lidar only, in PyTorch.

    voxel features [n, features]
      -> pts_middle_encoder   sparse convolutions on four levels; a map in bird's-eye view
      -> pts_backbone         SECOND: the map at two resolutions
      -> pts_neck             FPN: both joined
      -> bbox_head            TransFusion: heat map, proposals, decoder, boxes

Names of modules and weights are those of Autoware's training code. All convolutions have a norm
behind them while a network is trained (``folded=False``); to use it, norms are folded into filters
and biases (``folded=True``, see :mod:`tt_perception.bevfusion.fold`).

The same input gives the same bits as long as torch uses the same number of threads. Where the heat
map has equal values, the proposal with the lower class, then x, then y comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tt_perception.bevfusion.config import NetworkConfig
from tt_perception.bevfusion.fold import BOX_BRANCHES, BRANCHES, EPSILON, HEAD_EPSILON
from tt_perception.bevfusion.sparseconv import Pairs, SparseConvolution
from tt_perception.runtime.errors import ConfigError, InputError

if TYPE_CHECKING:
    from tt_perception.bevfusion.rulebook import Rulebooks


Keep = Callable[[str, Tensor], None]


class BEVFusionNet(nn.Module):
    """The whole network, for one cloud at a time.

    :param folded: without norms; convolutions that had one have a bias instead.
    :raises ConfigError: sizes that do not fit together.
    """

    def __init__(self, config: NetworkConfig, folded: bool = False) -> None:
        super().__init__()
        _check(config)
        self.config = config
        self.folded = folded
        self.pts_middle_encoder = SparseEncoder(config, folded)
        self.pts_backbone = Backbone(config, folded)
        self.pts_neck = Neck(config, folded)
        self.bbox_head = Head(config, folded)

    def forward(self, features: Tensor, rulebooks: Rulebooks) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the network predicts for its proposals.

        :param features: float32 [n, features], one row an active voxel, in the rulebooks' order.
        :returns: bbox_pred float32 [10, K], score float32 [K], label_pred int64 [K]; what is in
            them says :class:`tt_perception.bevfusion.detections.RawDetections`.
        :raises InputError: features of another type or shape.
        """
        return self.run_blocks(features, rulebooks, lambda name, tensor: None)

    def forward_blocks(self, features: Tensor, rulebooks: Rulebooks) -> dict[str, Tensor]:
        """Return the output of every block by its name, the three results included.

        Sparse blocks are [rows, channels], dense ones [1, channels, X, Y].
        ``bbox_head.heatmap_head`` are logits, ``bbox_head.heatmap`` what is left of their sigmoid,
        [classes, X, Y], and ``bbox_head.proposals`` indices into that, flattened, [K]. What
        follows is [K, channels], or [X * Y, channels] for ``cross_posembed``.
        """
        blocks: dict[str, Tensor] = {}
        outputs = self.run_blocks(features, rulebooks, blocks.__setitem__)
        return blocks | dict(zip(('bbox_pred', 'score', 'label_pred'), outputs, strict=True))

    def run_blocks(self, features: Tensor, rulebooks: Rulebooks,
                   keep: Keep) -> tuple[Tensor, Tensor, Tensor]:
        """Do as :meth:`forward`; call ``keep`` with name and output of every block on the way."""
        expected = (rulebooks.num_rows[0], self.config.in_channels)
        if features.dtype != torch.float32 or features.shape != expected:
            raise InputError(f'features: found {features.dtype} {list(features.shape)}, '
                             f'expected torch.float32 {list(expected)}', reason='layout')
        bev = self.pts_middle_encoder(features, rulebooks, keep)
        return self.bbox_head(self.pts_neck(self.pts_backbone(bev, keep), keep), keep)


def _check(config: NetworkConfig) -> None:
    x, y = config.feature_map_xy
    if x < 4 or y < 4 or x % 2 or y % 2:
        raise ConfigError(f'spatial_shape_xyz: found a feature map of {x} x {y} cells, '
                          'expected even numbers from 4')
    if config.num_proposals > config.num_classes * x * y:
        raise ConfigError(f'num_proposals: found {config.num_proposals}, expected at most the '
                          f'{config.num_classes} x {x} x {y} cells of the heat map')
    if config.hidden_channels % config.num_heads:
        raise ConfigError(f'num_heads: found {config.num_heads}, expected a divisor of '
                          f'{config.hidden_channels}')


def _norm(kind: type[nn.Module], channels: int, epsilon: float, folded: bool) -> nn.Module:
    return nn.Identity() if folded else kind(channels, eps=epsilon)


# Sparse encoder; a list of pairs says which rows meet in a convolution


class SparseConv(nn.Module):
    """A sparse convolution; ``weight`` is [C_out, kx, ky, kz, C_in]."""

    def __init__(self, c_in: int, c_out: int, folded: bool,
                 kernel_xyz: tuple[int, int, int] = (3, 3, 3)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c_out, *kernel_xyz, c_in))
        self.bias = nn.Parameter(torch.zeros(c_out)) if folded else None
        nn.init.kaiming_uniform_(self.weight, nonlinearity='relu')

    def forward(self, x: Tensor, pairs: Pairs) -> Tensor:
        return SparseConvolution.apply(x, self.weight, self.bias, pairs)


class SparseConvNorm(nn.Sequential):
    """Sparse convolution, norm, ReLU."""

    def __init__(self, c_in: int, c_out: int, folded: bool, **kwargs) -> None:
        super().__init__(SparseConv(c_in, c_out, folded, **kwargs),
                         _norm(nn.BatchNorm1d, c_out, EPSILON, folded))

    def forward(self, x: Tensor, pairs: Pairs) -> Tensor:
        conv, norm = self
        return norm(conv(x, pairs)).relu_()


class SparseBlock(nn.Module):
    """Two submanifold convolutions and a way around them."""

    def __init__(self, channels: int, folded: bool) -> None:
        super().__init__()
        self.conv1 = SparseConv(channels, channels, folded)
        self.bn1 = _norm(nn.BatchNorm1d, channels, EPSILON, folded)
        self.conv2 = SparseConv(channels, channels, folded)
        self.bn2 = _norm(nn.BatchNorm1d, channels, EPSILON, folded)

    def forward(self, x: Tensor, pairs: Pairs) -> Tensor:
        y = self.bn1(self.conv1(x, pairs)).relu_()
        y = self.bn2(self.conv2(y, pairs))
        y += x
        return y.relu_()


class SparseEncoder(nn.Module):
    """Four levels of submanifold blocks; each level halves the grid."""

    def __init__(self, config: NetworkConfig, folded: bool) -> None:
        super().__init__()
        channels = config.sparse_channels
        self.shape_xyz = config.level_shapes_xyz[-1]
        self.conv_input = SparseConvNorm(config.in_channels, channels[0], folded)
        self.encoder_layers = nn.ModuleDict()
        for level, c in enumerate(channels, 1):
            layer = nn.ModuleList([SparseBlock(c, folded), SparseBlock(c, folded)])
            if level < len(channels):
                layer.append(SparseConvNorm(c, channels[level], folded))
            self.encoder_layers[f'encoder_layer{level}'] = layer
        self.conv_out = SparseConvNorm(channels[-1], config.bev_channels, folded,
                                       kernel_xyz=(1, 1, 3))

    def forward(self, x: Tensor, rulebooks: Rulebooks, keep: Keep) -> Tensor:
        root = 'pts_middle_encoder'
        same = Pairs.of_table(rulebooks.subm[0])
        x = self.conv_input(x, same)
        keep(f'{root}.conv_input', x)
        for level, (name, layer) in enumerate(self.encoder_layers.items()):
            if level:
                same = Pairs.of_table(rulebooks.subm[level])
            for i, block in enumerate(layer):
                x = block(x, same if i < 2 else Pairs.of_table(rulebooks.down[level]))
                keep(f'{root}.encoder_layers.{name}.{i}', x)
        x = self.conv_out(x, Pairs.of_table(rulebooks.out))
        keep(f'{root}.conv_out', x)
        bev = self._to_bev(x, rulebooks.coords_xyz[-1])
        keep(f'{root}.bev', bev)
        return bev

    def _to_bev(self, x: Tensor, coords_xyz: np.ndarray) -> Tensor:
        """Return the map [1, channels * Z, X, Y], channel = c * Z + z, channels last in memory."""
        size_x, size_y, size_z = self.shape_xyz
        site = torch.from_numpy(coords_xyz.astype(np.int64))
        bev = x.new_zeros(size_x, size_y, x.shape[1], size_z)
        bev[site[:, 0], site[:, 1], :, site[:, 2]] = x
        return bev.flatten(2)[None].permute(0, 3, 1, 2)


# Backbone and neck


class Backbone(nn.Module):
    """SECOND: two stages of 3 x 3 convolutions, the second at half the resolution."""

    def __init__(self, config: NetworkConfig, folded: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        c_in = config.bev_channels * config.level_shapes_xyz[-1][2]
        for stride, c_out in zip((1, 2), config.backbone_channels, strict=True):
            layers: list[nn.Module] = []
            for i in range(1 + config.backbone_layers):
                layers += [nn.Conv2d(c_out if i else c_in, c_out, 3, 1 if i else stride, 1,
                                     bias=folded),
                           _norm(nn.BatchNorm2d, c_out, EPSILON, folded),
                           nn.ReLU(inplace=True)]
            self.blocks.append(nn.Sequential(*layers))
            c_in = c_out

    def forward(self, x: Tensor, keep: Keep) -> list[Tensor]:
        outputs = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            keep(f'pts_backbone.blocks.{i}', x)
            outputs.append(x)
        return outputs


class Neck(nn.Module):
    """Brings both stages of the backbone to one resolution and joins them."""

    def __init__(self, config: NetworkConfig, folded: bool) -> None:
        super().__init__()
        c_out = config.neck_channels
        fine, coarse = config.backbone_channels
        self.deblocks = nn.ModuleList(
            nn.Sequential(conv, _norm(nn.BatchNorm2d, c_out, EPSILON, folded),
                          nn.ReLU(inplace=True))
            for conv in (nn.Conv2d(fine, c_out, 1, bias=folded),
                         nn.ConvTranspose2d(coarse, c_out, 2, 2, bias=folded)))

    def forward(self, stages: list[Tensor], keep: Keep) -> Tensor:
        outputs = []
        for i, (deblock, x) in enumerate(zip(self.deblocks, stages, strict=True)):
            outputs.append(deblock(x))
            keep(f'pts_neck.deblocks.{i}', outputs[i])
        joined = torch.cat(outputs, dim=1)
        keep('pts_neck', joined)
        return joined


# Head


class Pointwise(nn.Conv1d):
    """A convolution with kernel size 1, on rows [n, channels]."""

    def __init__(self, c_in: int, c_out: int, bias: bool = True) -> None:
        super().__init__(c_in, c_out, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:, :, 0], self.bias)


class ConvNorm(nn.Module):
    """Convolution, norm, ReLU of the head."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.bn = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu_()


class PositionEmbedding(nn.Module):
    """From positions [n, 2] to features [n, channels]."""

    def __init__(self, channels: int, folded: bool) -> None:
        super().__init__()
        self.position_embedding_head = nn.Sequential(
            Pointwise(2, channels), _norm(nn.BatchNorm1d, channels, HEAD_EPSILON, folded),
            nn.ReLU(inplace=True), Pointwise(channels, channels))

    def forward(self, position: Tensor) -> Tensor:
        return self.position_embedding_head(position)


class Attention(nn.Module):
    """Multi-head attention; keys and values are projections of the same rows."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * channels, channels))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * channels))
        self.out_proj = nn.Linear(channels, channels)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        """Take query [K, C] and memory [n, C]; return [K, C]."""
        channels = query.shape[1]
        w_q, w_kv = self.in_proj_weight.tensor_split([channels])
        b_q, b_kv = self.in_proj_bias.tensor_split([channels])
        q = F.linear(query, w_q, b_q)
        k, v = F.linear(memory, w_kv, b_kv).chunk(2, dim=1)
        q, k, v = (t.unflatten(1, (self.num_heads, -1)).transpose(0, 1)[None] for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)[0]
        return self.out_proj(mixed.transpose(0, 1).flatten(1))


class DecoderLayer(nn.Module):
    """Proposals look at one another, then at the whole map; post-norm."""

    def __init__(self, config: NetworkConfig, folded: bool) -> None:
        super().__init__()
        c = config.hidden_channels
        self.self_attn = nn.ModuleDict({'attn': Attention(c, config.num_heads)})
        self.cross_attn = nn.ModuleDict({'attn': Attention(c, config.num_heads)})
        self.ffn = nn.ModuleDict({'layers': nn.Sequential(
            nn.Sequential(nn.Linear(c, config.ffn_channels), nn.ReLU(inplace=True)),
            nn.Linear(config.ffn_channels, c))})
        self.norms = nn.ModuleList(nn.LayerNorm(c, eps=HEAD_EPSILON) for _ in range(3))
        self.self_posembed = PositionEmbedding(c, folded)
        self.cross_posembed = PositionEmbedding(c, folded)

    def forward(self, query: Tensor, query_pos: Tensor, memory: Tensor, memory_pos: Tensor,
                keep: Keep) -> Tensor:
        """Take query [K, C] at query_pos [K, 2], memory [n, C] at memory_pos [n, 2]."""
        root = 'bbox_head.decoder.0'
        position = self.self_posembed(query_pos)
        keep(f'{root}.self_posembed', position)
        memory_position = self.cross_posembed(memory_pos)
        keep(f'{root}.cross_posembed', memory_position)

        placed = query + position
        query = self.norms[0](query + self.self_attn['attn'](placed, placed))
        keep(f'{root}.norms.0', query)
        query = self.norms[1](query + self.cross_attn['attn'](query + position,
                                                              memory + memory_position))
        keep(f'{root}.norms.1', query)
        query = self.norms[2](query + self.ffn['layers'](query))
        keep(f'{root}.norms.2', query)
        return query


class Head(nn.Module):
    """TransFusion: the best cells of a heat map become proposals, a decoder refines them."""

    def __init__(self, config: NetworkConfig, folded: bool) -> None:
        super().__init__()
        self.config = config
        c = config.hidden_channels
        self.shared_conv = nn.Conv2d(2 * config.neck_channels, c, 3, padding=1)
        self.heatmap_head = nn.Sequential(
            ConvNorm(nn.Conv2d(c, c, 3, padding=1, bias=folded),
                     _norm(nn.BatchNorm2d, c, HEAD_EPSILON, folded)),
            nn.Conv2d(c, config.num_classes, 3, padding=1))
        self.class_encoding = Pointwise(config.num_classes, c)
        self.decoder = nn.ModuleList([DecoderLayer(config, folded)])
        widths = {**BOX_BRANCHES, 'heatmap': config.num_classes}
        self.prediction_heads = nn.ModuleList([nn.ModuleDict({
            name: nn.Sequential(
                ConvNorm(Pointwise(c, config.branch_channels, bias=folded),
                         _norm(nn.BatchNorm1d, config.branch_channels, HEAD_EPSILON, folded)),
                Pointwise(config.branch_channels, widths[name]))
            for name in BRANCHES})])
        x, y = config.feature_map_xy
        centres = torch.cartesian_prod(torch.arange(x) + 0.5, torch.arange(y) + 0.5)
        self.register_buffer('cell_centres', centres, persistent=False)

    def forward(self, x: Tensor, keep: Keep) -> tuple[Tensor, Tensor, Tensor]:
        """Take the map [1, C, X, Y]; return bbox_pred, score, label_pred."""
        config = self.config
        shared = self.shared_conv(x)
        keep('bbox_head.shared_conv', shared)
        logits = self.heatmap_head(shared)
        keep('bbox_head.heatmap_head', logits)
        heatmap = local_maxima(logits[0].sigmoid(), config.pooled_classes)
        keep('bbox_head.heatmap', heatmap)
        proposals = top_k(heatmap.flatten(), config.num_proposals)
        keep('bbox_head.proposals', proposals)

        num_cells = len(self.cell_centres)
        label, cell = proposals // num_cells, proposals % num_cells
        memory = shared[0].permute(1, 2, 0).flatten(0, 1)
        one_hot = F.one_hot(label, config.num_classes).to(memory.dtype)
        query = memory[cell] + self.class_encoding(one_hot)
        keep('bbox_head.query', query)
        query_pos = self.cell_centres[cell]
        query = self.decoder[0](query, query_pos, memory, self.cell_centres, keep)

        out = {name: branch(query) for name, branch in self.prediction_heads[0].items()}
        for name, value in out.items():
            keep(f'bbox_head.prediction_heads.0.{name}', value)
        out['center'] = out['center'] + query_pos
        bbox_pred = torch.cat([out[name] for name in BOX_BRANCHES], dim=1).T.contiguous()
        certainty = out['heatmap'].gather(1, label[:, None])[:, 0].sigmoid()
        return bbox_pred, certainty * heatmap.flatten()[proposals], label


def local_maxima(heatmap: Tensor, pooled_classes: tuple[int, ...]) -> Tensor:
    """Return the heat map with zeros where a cell is not the greatest of its 3 x 3 neighbours.

    The cells on the border of a pooled class become zero, as upstream's do: the map of maxima is
    zero there. Classes that are not pooled stay as they are.

    :param heatmap: [classes, X, Y], positive.
    """
    greatest = heatmap.contiguous().clone()
    pooled = list(pooled_classes)
    greatest[pooled] = F.pad(F.max_pool2d(heatmap[pooled], 3, stride=1), (1, 1, 1, 1))
    return heatmap * (heatmap == greatest)


def top_k(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k greatest values, greatest first, of equal ones the lower."""
    return torch.sort(values, descending=True, stable=True).indices[:k]
