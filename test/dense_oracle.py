# SPDX-License-Identifier: Apache-2.0
"""The lidar network on dense grids in float64, written from its definition.

Slow and plain; shares nothing with the package but the names of the weights.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

ONE, TWO, THREE = (1, 1, 1), (2, 2, 2), (3, 3, 3)
SPARSE_EPS, HEAD_EPS = 1e-3, 1e-5


def naive_table(sites_in, sites_out, kernel, stride, padding):
    """Return int32 [sites_out, kernel offsets]: row of the input site of each offset, or -1."""
    row_of = {tuple(site): row for row, site in enumerate(sites_in.tolist())}
    offsets = list(itertools.product(*map(range, kernel)))
    return np.array([[row_of.get(tuple(o * s - p + k for o, s, p, k
                                       in zip(site, stride, padding, offset, strict=True)), -1)
                      for offset in offsets] for site in sites_out.tolist()],
                    np.int32).reshape(len(sites_out), len(offsets))


def naive_output_sites(sites, shape_out, kernel, stride, padding):
    """Return the sorted output sites of a strided sparse convolution, int32 [n, 3]."""
    found = set()
    for site in sites.tolist():
        for offset in itertools.product(*map(range, kernel)):
            scaled = [i + p - k for i, p, k in zip(site, padding, offset, strict=True)]
            if all(v % s == 0 and 0 <= v // s < n
                   for v, s, n in zip(scaled, stride, shape_out, strict=True)):
                found.add(tuple(v // s for v, s in zip(scaled, stride, strict=True)))
    return np.array(sorted(found), np.int32).reshape(-1, 3)


def naive_rulebooks(coords_xyz, shapes):
    """Return what the package's rulebooks hold, from sorted coordinates int32 [n, 3].

    :param shapes: cells along x, y, z of the four levels and of the output.
    """
    sites, subm, down = [coords_xyz], [], []
    for level in range(4):
        subm.append(naive_table(sites[-1], sites[-1], THREE, ONE, ONE))
        if level < 3:
            padding = (1, 1, 0 if level == 2 else 1)
            sites.append(naive_output_sites(sites[-1], shapes[level + 1], THREE, TWO, padding))
            down.append(naive_table(sites[-2], sites[-1], THREE, TWO, padding))
    last = ((1, 1, 3), (1, 1, 2), (0, 0, 0))
    sites.append(naive_output_sites(sites[-1], shapes[4], *last))
    return SimpleNamespace(
        order=np.arange(len(coords_xyz), dtype=np.int32), coords_xyz=tuple(sites),
        subm=tuple(subm), down=tuple(down), out=naive_table(sites[-2], sites[-1], *last),
        num_rows=tuple(map(len, sites)))


class DenseNetwork:
    """Evaluates the network block by block; ``blocks`` has the result of each by its name.

    :param state: weights and norms by name, of a network with norms.
    :param training: norms use the statistics of this very input.
    """

    def __init__(self, state, config, training=False):
        self.w = {name: torch.as_tensor(value).double() for name, value in state.items()}
        self.config = config
        self.training = training
        self.blocks = {}

    def __call__(self, features, coords_xyz):
        """Take float32 [n, features] at sites int32 [n, 3]."""
        sx, sy, sz = self.config.spatial_shape_xyz
        x = torch.zeros(1, features.shape[1], sx, sy, sz, dtype=torch.float64)
        active = torch.zeros(1, 1, sx, sy, sz, dtype=torch.float64)
        i, j, k = torch.as_tensor(coords_xyz).long().T
        x[0, :, i, j, k] = torch.as_tensor(features).double().T
        active[0, 0, i, j, k] = 1
        bev = self.encoder(x, active)
        return self.head(self.neck(bev))

    # Norms

    def norm(self, y, name, eps, active=None):
        """Normalise [1, C, ...] by channel; with ``active``, over its non-zero sites only."""
        if self.training:
            rows = y.flatten(2)[0]
            if active is not None:
                rows = rows[:, active.flatten() > 0]
            mean, var = rows.mean(1), rows.var(1, unbiased=False)
        else:
            mean, var = self.w[f'{name}.running_mean'], self.w[f'{name}.running_var']
        shape = [1, -1] + [1] * (y.ndim - 2)
        y = (y - mean.view(shape)) / torch.sqrt(var.view(shape) + eps)
        y = y * self.w[f'{name}.weight'].view(shape) + self.w[f'{name}.bias'].view(shape)
        return y if active is None else y * active

    # Sparse encoder: dense convolutions, masked to the active sites

    def sparse(self, x, active, name, norm, stride=ONE, padding=ONE, subm=True):
        filters = self.w[f'{name}.weight'].permute(0, 4, 1, 2, 3)
        y = F.conv3d(x, filters, stride=stride, padding=padding)
        if not subm:
            ones = torch.ones(1, 1, *filters.shape[2:], dtype=torch.float64)
            active = (F.conv3d(active, ones, stride=stride, padding=padding) > 0).double()
        return self.norm(y * active, norm, SPARSE_EPS, active), active

    def encoder(self, x, active):
        root = 'pts_middle_encoder'
        x, active = self.sparse(x, active, f'{root}.conv_input.0', f'{root}.conv_input.1')
        x = x.clamp(min=0)
        self.keep_sparse(f'{root}.conv_input', x, active)
        for level in (1, 2, 3, 4):
            stem = f'{root}.encoder_layers.encoder_layer{level}'
            for block in (0, 1):
                y, _ = self.sparse(x, active, f'{stem}.{block}.conv1', f'{stem}.{block}.bn1')
                y, _ = self.sparse(y.clamp(min=0), active, f'{stem}.{block}.conv2',
                                   f'{stem}.{block}.bn2')
                x = (y + x).clamp(min=0)
                self.keep_sparse(f'{stem}.{block}', x, active)
            if level < 4:
                x, active = self.sparse(x, active, f'{stem}.2.0', f'{stem}.2.1', TWO,
                                        (1, 1, 0 if level == 3 else 1), subm=False)
                x = x.clamp(min=0)
                self.keep_sparse(f'{stem}.2', x, active)
        x, active = self.sparse(x, active, f'{root}.conv_out.0', f'{root}.conv_out.1', (1, 1, 2),
                                0, subm=False)
        x = x.clamp(min=0)
        self.keep_sparse(f'{root}.conv_out', x, active)
        _, c, sx, sy, sz = x.shape
        bev = torch.zeros(1, c * sz, sx, sy, dtype=torch.float64)
        for channel, z in itertools.product(range(c), range(sz)):
            bev[0, channel * sz + z] = x[0, channel, :, :, z]
        self.blocks[f'{root}.bev'] = bev
        return bev

    def keep_sparse(self, name, x, active):
        """Keep the active sites as rows, sorted by x, y, z."""
        i, j, k = torch.nonzero(active[0, 0], as_tuple=True)
        self.blocks[name] = x[0, :, i, j, k].T

    # Dense part

    def conv(self, x, name, **kwargs):
        return F.conv2d(x, self.w[f'{name}.weight'], self.w.get(f'{name}.bias'), **kwargs)

    def neck(self, x):
        stages = []
        for block in (0, 1):
            for layer in range(self.config.backbone_layers + 1):
                name = f'pts_backbone.blocks.{block}'
                x = self.conv(x, f'{name}.{3 * layer}', padding=1,
                              stride=2 if block and not layer else 1)
                x = self.norm(x, f'{name}.{3 * layer + 1}', SPARSE_EPS).clamp(min=0)
            self.blocks[f'pts_backbone.blocks.{block}'] = x
            stages.append(x)
        fine = self.conv(stages[0], 'pts_neck.deblocks.0.0')
        filters = self.w['pts_neck.deblocks.1.0.weight']
        _, _, h, w = stages[1].shape
        coarse = torch.zeros(1, filters.shape[1], 2 * h, 2 * w, dtype=torch.float64)
        for a, b in itertools.product(range(2), range(2)):
            coarse[:, :, a::2, b::2] = torch.einsum('nchw,co->nohw', stages[1],
                                                    filters[:, :, a, b])
        outputs = []
        for i, y in enumerate((fine, coarse)):
            y = self.norm(y, f'pts_neck.deblocks.{i}.1', SPARSE_EPS).clamp(min=0)
            self.blocks[f'pts_neck.deblocks.{i}'] = y
            outputs.append(y)
        x = self.blocks['pts_neck'] = torch.cat(outputs, 1)
        return x

    # Head; rows are [n, channels]

    def pointwise(self, x, name):
        y = x @ self.w[f'{name}.weight'][:, :, 0].T
        return y + self.w[f'{name}.bias'] if f'{name}.bias' in self.w else y

    def linear(self, x, name):
        return x @ self.w[f'{name}.weight'].T + self.w[f'{name}.bias']

    def row_norm(self, x, name):
        return self.norm(x.T[None], name, HEAD_EPS)[0].T

    def position(self, points, name):
        stem = f'bbox_head.decoder.0.{name}.position_embedding_head'
        x = self.row_norm(self.pointwise(points, f'{stem}.0'), f'{stem}.1').clamp(min=0)
        x = self.blocks[f'bbox_head.decoder.0.{name}'] = self.pointwise(x, f'{stem}.3')
        return x

    def attention(self, query, memory, name):
        stem, heads = f'bbox_head.decoder.0.{name}.attn', self.config.num_heads
        weights = self.w[f'{stem}.in_proj_weight'].chunk(3)
        biases = self.w[f'{stem}.in_proj_bias'].chunk(3)
        q, k, v = (x @ w.T + b for x, w, b in zip((query, memory, memory), weights, biases,
                                                  strict=True))
        width = q.shape[1] // heads
        mixed = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T / width ** 0.5
            mixed.append(torch.softmax(scores, 1) @ v[:, part])
        return self.linear(torch.cat(mixed, 1), f'{stem}.out_proj')

    def layer_norm(self, x, index):
        name = f'bbox_head.decoder.0.norms.{index}'
        x = x - x.mean(1, keepdim=True)
        x = x / torch.sqrt((x ** 2).mean(1, keepdim=True) + HEAD_EPS)
        x = self.blocks[name] = x * self.w[f'{name}.weight'] + self.w[f'{name}.bias']
        return x

    def decode(self, query, query_pos, memory, memory_pos):
        position = self.position(query_pos, 'self_posembed')
        memory = memory + self.position(memory_pos, 'cross_posembed')
        query = self.layer_norm(query + self.attention(query + position, query + position,
                                                       'self_attn'), 0)
        query = self.layer_norm(query + self.attention(query + position, memory, 'cross_attn'), 1)
        stem = 'bbox_head.decoder.0.ffn.layers'
        hidden = self.linear(query, f'{stem}.0.0').clamp(min=0)
        return self.layer_norm(query + self.linear(hidden, f'{stem}.1'), 2)

    def head(self, x):
        config = self.config
        shared = self.blocks['bbox_head.shared_conv'] = self.conv(x, 'bbox_head.shared_conv',
                                                                  padding=1)
        y = self.conv(shared, 'bbox_head.heatmap_head.0.conv', padding=1)
        y = self.norm(y, 'bbox_head.heatmap_head.0.bn', HEAD_EPS).clamp(min=0)
        y = self.blocks['bbox_head.heatmap_head'] = self.conv(y, 'bbox_head.heatmap_head.1',
                                                              padding=1)
        heatmap = naive_local_maxima(torch.sigmoid(y)[0].numpy(), config.pooled_classes)
        self.blocks['bbox_head.heatmap'] = torch.from_numpy(heatmap)
        flat = heatmap.ravel()
        proposals = sorted(range(flat.size), key=lambda i: (-flat[i], i))[:config.num_proposals]
        proposals = self.blocks['bbox_head.proposals'] = torch.tensor(proposals)

        _, size_x, size_y = heatmap.shape
        label, cell = proposals // (size_x * size_y), proposals % (size_x * size_y)
        memory = shared[0].flatten(1).T
        encoding = self.w['bbox_head.class_encoding.weight'][:, :, 0].T
        query = memory[cell] + encoding[label] + self.w['bbox_head.class_encoding.bias']
        self.blocks['bbox_head.query'] = query
        centres = torch.tensor([(i + 0.5, j + 0.5) for i in range(size_x) for j in range(size_y)],
                               dtype=torch.float64)
        query = self.decode(query, centres[cell], memory, centres)

        rows = {}
        for name in ('center', 'height', 'dim', 'rot', 'vel', 'heatmap'):
            stem = f'bbox_head.prediction_heads.0.{name}'
            hidden = self.row_norm(self.pointwise(query, f'{stem}.0.conv'), f'{stem}.0.bn')
            rows[name] = self.blocks[stem] = self.pointwise(hidden.clamp(min=0), f'{stem}.1')
        certainty = torch.sigmoid(rows.pop('heatmap'))[torch.arange(len(label)), label]
        rows['center'] = rows['center'] + centres[cell]
        self.blocks['bbox_pred'] = torch.cat(list(rows.values()), 1).T
        self.blocks['score'] = certainty * torch.from_numpy(flat)[proposals]
        self.blocks['label_pred'] = label
        return self.blocks


def naive_local_maxima(heatmap, pooled_classes):
    """Zero what is not the greatest of its 3 x 3 cells, and the border, of pooled classes."""
    kept = heatmap.copy()
    _, size_x, size_y = heatmap.shape
    for c in pooled_classes:
        for i, j in itertools.product(range(size_x), range(size_y)):
            inside = 0 < i < size_x - 1 and 0 < j < size_y - 1
            if not inside or heatmap[c, i, j] < heatmap[c, i - 1:i + 2, j - 1:j + 2].max():
                kept[c, i, j] = 0
    return kept
