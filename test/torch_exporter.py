# SPDX-License-Identifier: Apache-2.0
"""The network in plain torch modules, as training code writes it, for torch's own ONNX exporter.

Such a file has what ours does not: shapes that are computed, expansions with Where, sums that are
written several times. It shows that the reader follows the data and not our writer's habits.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BOX = {'center': 2, 'height': 1, 'dim': 3, 'rot': 2, 'vel': 2}


class IndicePairs(torch.autograd.Function):
    """Exports a rulebook node; what it computes here only has the right shapes."""

    @staticmethod
    def symbolic(g, indices, shape, kernel, stride, padding, subm):
        return g.op('autoware::GetIndicePairsImplicitGemm', indices, outputs=5, algo_i=1,
                    batch_size_i=1, spatial_shape_i=shape, ksize_i=kernel, stride_i=stride,
                    padding_i=padding, dilation_i=[1, 1, 1], out_padding_i=[0, 0, 0],
                    subm_i=int(subm), transpose_i=0, is_train_i=int(not subm))

    @staticmethod
    def forward(ctx, indices, shape, kernel, stride, padding, subm):
        n, volume = len(indices), int(np.prod(kernel))
        empty = torch.zeros(volume, n, dtype=torch.int32)
        return (indices * 0, empty, empty[:1].T.clone(), empty[0].clone(),
                torch.tensor(n, dtype=torch.int32))


class ImplicitGemm(torch.autograd.Function):
    """Exports a sparse convolution."""

    @staticmethod
    def symbolic(g, x, weight, pairs, mask, order, subm):
        return g.op('autoware::ImplicitGemm', x, weight, pairs, mask, order, is_train_i=0,
                    is_subm_i=int(subm), act_alpha_f=0.0, act_beta_f=0.0, output_scale_f=1.0,
                    output_add_scale_f=0.0)

    @staticmethod
    def forward(ctx, x, weight, pairs, mask, order, subm):
        return torch.rand(pairs.shape[1], weight.shape[0])


class Sparse(nn.Module):
    def __init__(self, c_in, c_out, kernel=(3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1),
                 subm=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(c_out, *kernel, c_in))
        self.arguments = list(kernel), list(stride), list(padding), subm

    def forward(self, x, indices, shape):
        kernel, stride, padding, subm = self.arguments
        indices, pairs, mask, order, _ = IndicePairs.apply(indices, shape, *self.arguments)
        x = ImplicitGemm.apply(x, self.weight, pairs, mask, order, subm)
        if not subm:
            shape = [(n + 2 * p - k) // s + 1
                     for n, p, k, s in zip(shape, padding, kernel, stride, strict=True)]
        return x, indices, shape


class SparseNormRelu(nn.Sequential):
    def __init__(self, c_in, c_out, **arguments):
        super().__init__(Sparse(c_in, c_out, **arguments), nn.BatchNorm1d(c_out, eps=1e-3),
                         nn.ReLU())

    def forward(self, x, indices, shape):
        conv, norm, relu = self
        x, indices, shape = conv(x, indices, shape)
        return relu(norm(x)), indices, shape


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = Sparse(c, c), nn.BatchNorm1d(c, eps=1e-3)
        self.conv2, self.bn2 = Sparse(c, c), nn.BatchNorm1d(c, eps=1e-3)
        self.relu = nn.ReLU()

    def forward(self, x, indices, shape):
        y, indices, shape = self.conv1(x, indices, shape)
        y, indices, shape = self.conv2(self.relu(self.bn1(y)), indices, shape)
        return self.relu(self.bn2(y) + x), indices, shape


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.shape, c = list(config.spatial_shape_xyz), config.sparse_channels
        self.conv_input = SparseNormRelu(config.in_channels, c[0])
        self.encoder_layers = nn.ModuleDict()
        for i in range(4):
            layer = nn.ModuleList([Block(c[i]), Block(c[i])])
            if i < 3:
                layer.append(SparseNormRelu(c[i], c[i + 1], stride=(2, 2, 2), subm=False,
                                            padding=(1, 1, 0 if i == 2 else 1)))
            self.encoder_layers[f'encoder_layer{i + 1}'] = layer
        self.conv_out = SparseNormRelu(c[3], config.bev_channels, kernel=(1, 1, 3),
                                       stride=(1, 1, 2), padding=(0, 0, 0), subm=False)

    def forward(self, x, indices):
        state = self.conv_input(x, indices, self.shape)
        for layer in self.encoder_layers.values():
            for block in layer:
                state = block(*state)
        x, indices, shape = self.conv_out(*state)
        grid = torch.zeros(1, *shape, x.shape[1])
        i = indices.long()
        grid[i[:, 0], i[:, 1], i[:, 2], i[:, 3]] = x
        grid = grid.permute(0, 4, 1, 2, 3)
        n, c, size_x, size_y, size_z = grid.shape
        return grid.permute(0, 1, 4, 2, 3).contiguous().view(n, c * size_z, size_x, size_y)


class LayerNorm(nn.Module):
    """In its parts, as deployment tools rewrite it."""

    def __init__(self, c):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(c, heads)

    def forward(self, query, key, value):
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        return self.attn(query, key, value)[0].transpose(0, 1)


class PositionEmbedding(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.position_embedding_head = nn.Sequential(
            nn.Conv1d(2, c, 1), nn.BatchNorm1d(c), nn.ReLU(), nn.Conv1d(c, c, 1))

    def forward(self, x):
        return self.position_embedding_head(x.transpose(1, 2).contiguous())


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = config.hidden_channels
        self.self_attn = Attention(c, config.num_heads)
        self.cross_attn = Attention(c, config.num_heads)
        self.ffn = nn.Module()
        self.ffn.layers = nn.Sequential(
            nn.Sequential(nn.Linear(c, config.ffn_channels), nn.ReLU(), nn.Dropout()),
            nn.Linear(config.ffn_channels, c), nn.Dropout())
        self.norms = nn.ModuleList(LayerNorm(c) for _ in range(3))
        self.self_posembed, self.cross_posembed = PositionEmbedding(c), PositionEmbedding(c)

    def forward(self, query, key, query_pos, key_pos):
        query_pos = self.self_posembed(query_pos).permute(0, 2, 1)
        key_pos = self.cross_posembed(key_pos).permute(0, 2, 1)
        query, key = query.permute(0, 2, 1), key.permute(0, 2, 1)
        # Every sum anew: torch would project queries, keys and values at once if they were one.
        query = self.norms[0](query + self.self_attn(query + query_pos, query + query_pos,
                                                     query + query_pos))
        query = self.norms[1](query + self.cross_attn(query + query_pos, key + key_pos,
                                                      key + key_pos))
        return self.norms[2](query + self.ffn.layers(query)).permute(0, 2, 1)


class ConvNormRelu(nn.Module):
    def __init__(self, conv, norm):
        super().__init__()
        self.conv, self.bn, self.activate = conv, norm, nn.ReLU()

    def forward(self, x):
        return self.activate(self.bn(self.conv(x)))


class Head(nn.Module):
    def __init__(self, config, full_sort):
        super().__init__()
        self.config, self.full_sort = config, full_sort
        c, width = config.hidden_channels, config.branch_channels
        self.shared_conv = nn.Conv2d(2 * config.neck_channels, c, 3, padding=1)
        self.heatmap_head = nn.Sequential(
            ConvNormRelu(nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)),
            nn.Conv2d(c, config.num_classes, 3, padding=1))
        self.class_encoding = nn.Conv1d(config.num_classes, c, 1)
        self.decoder = nn.ModuleList([Decoder(config)])
        self.prediction_heads = nn.ModuleList([nn.ModuleDict({
            name: nn.Sequential(ConvNormRelu(nn.Conv1d(c, width, 1, bias=False),
                                             nn.BatchNorm1d(width)), nn.Conv1d(width, size, 1))
            for name, size in {**BOX, 'heatmap': config.num_classes}.items()})])
        x, y = (torch.arange(n) + 0.5 for n in config.feature_map_xy)
        self.cells = torch.stack(torch.meshgrid(x, y, indexing='ij'), -1).view(1, -1, 2)

    def forward(self, x):
        config = self.config
        features = self.shared_conv(x)
        flat = features.view(x.shape[0], features.shape[1], -1)
        cells = self.cells.repeat(x.shape[0], 1, 1)
        heatmap = self.local_maxima(self.heatmap_head(features).sigmoid())
        heatmap = heatmap.view(x.shape[0], heatmap.shape[1], -1)
        scores = heatmap.view(x.shape[0], -1)
        if self.full_sort:
            best = scores.argsort(dim=-1, descending=True)[..., :config.num_proposals]
        else:
            best = scores.topk(config.num_proposals, dim=-1).indices
        label = best // heatmap.shape[-1]
        position = best - label * heatmap.shape[-1]
        query = flat.gather(index=position[:, None].expand(-1, flat.shape[1], -1), dim=-1)
        one_hot = F.one_hot(label, config.num_classes).permute(0, 2, 1)
        query = query + self.class_encoding(one_hot.float())
        query_pos = cells.gather(index=position[:, :, None].expand(-1, -1, 2), dim=1)
        query = self.decoder[0](query, flat, query_pos, cells)
        out = {name: branch(query) for name, branch in self.prediction_heads[0].items()}
        out['center'] = out['center'] + query_pos.permute(0, 2, 1)
        found = heatmap.gather(index=position[:, None].expand(-1, config.num_classes, -1), dim=-1)
        one_hot = F.one_hot(label, config.num_classes).permute(0, 2, 1)
        score = (out['heatmap'].sigmoid() * found * one_hot)[0].max(dim=0).values
        return torch.cat([out[name][0] for name in BOX]), score, label[0]

    def local_maxima(self, heatmap):
        pooled = list(self.config.pooled_classes)
        greatest = torch.zeros_like(heatmap)
        greatest[:, pooled, 1:-1, 1:-1] = F.max_pool2d(heatmap[:, pooled], 3, 1, 0)
        for c in range(self.config.num_classes):
            if c not in pooled:
                greatest[:, [c]] = heatmap[:, [c]]
        return heatmap * (heatmap == greatest)


class Network(nn.Module):
    def __init__(self, config, full_sort):
        super().__init__()
        self.pts_middle_encoder = Encoder(config)
        self.pts_backbone, self.pts_neck = nn.Module(), nn.Module()
        self.pts_backbone.blocks, self.pts_neck.deblocks = nn.ModuleList(), nn.ModuleList()
        c_in = config.bev_channels * config.level_shapes_xyz[-1][2]
        for stride, c in zip((1, 2), config.backbone_channels, strict=True):
            layers = []
            for i in range(1 + config.backbone_layers):
                layers += [nn.Conv2d(c if i else c_in, c, 3, 1 if i else stride, 1, bias=False),
                           nn.BatchNorm2d(c, eps=1e-3), nn.ReLU()]
            self.pts_backbone.blocks.append(nn.Sequential(*layers))
            up = (nn.Conv2d if stride == 1 else nn.ConvTranspose2d)(
                c, config.neck_channels, stride, stride, bias=False)
            self.pts_neck.deblocks.append(nn.Sequential(
                up, nn.BatchNorm2d(config.neck_channels, eps=1e-3), nn.ReLU()))
            c_in = c
        self.bbox_head = Head(config, full_sort)


class Wrapper(nn.Module):
    """What is exported; its name for the network is the prefix of all weights."""

    def __init__(self, network):
        super().__init__()
        self.mod = network

    def forward(self, voxels, coors, num_points_per_voxel):
        net = self.mod
        features = voxels.sum(dim=1) / num_points_per_voxel.type_as(voxels).view(-1, 1)
        xyz = coors.flip(dims=[-1]).float()
        indices = torch.cat([torch.zeros(xyz.shape[0], 1), xyz], dim=1).int()
        fine = net.pts_backbone.blocks[0](net.pts_middle_encoder(features, indices))
        coarse = net.pts_backbone.blocks[1](fine)
        deblocks = net.pts_neck.deblocks
        return net.bbox_head(torch.cat([deblocks[0](fine), deblocks[1](coarse)], dim=1))


def export(state, config, path, *, full_sort=False):
    """Write a network with weights ``state`` by torch's exporter for traced modules."""
    network = Network(config, full_sort)
    network.load_state_dict(state)
    n = 7
    inputs = {'voxels': torch.rand(n, 10, config.in_channels),
              'coors': torch.zeros(n, 3, dtype=torch.int32),
              'num_points_per_voxel': torch.ones(n, dtype=torch.int32)}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # sizes that are traced as constants; deprecation
        torch.onnx.export(
            Wrapper(network).eval(), tuple(inputs.values()), path, opset_version=17, dynamo=False,
            input_names=list(inputs), output_names=['bbox_pred', 'score', 'label_pred'],
            dynamic_axes={name: {0: 'voxels_num'} for name in inputs},
            custom_opsets={'autoware': 1})
