# SPDX-License-Identifier: Apache-2.0
"""Small networks of the BEVFusion-L topology with random weights, and grids that fit them."""

from __future__ import annotations

import numpy as np
import torch

from tt_perception.bevfusion.config import GridConfig, NetworkConfig
from tt_perception.bevfusion.reference import BEVFusionNet

# Every size is another number, and the map is not square: what is mixed up shows.
TINY = NetworkConfig(
    num_classes=5, num_proposals=18, spatial_shape_xyz=(48, 64, 41), in_channels=4,
    sparse_channels=(4, 6, 8, 10), bev_channels=9, backbone_channels=(12, 14), backbone_layers=2,
    neck_channels=11, hidden_channels=16, num_heads=4, ffn_channels=20, branch_channels=7)
# Another number of levels of everything that the file may have in another number.
OTHER = NetworkConfig(
    num_classes=3, num_proposals=11, spatial_shape_xyz=(64, 32, 25), in_channels=5,
    sparse_channels=(5, 7, 9, 11), bev_channels=6, backbone_channels=(8, 10), backbone_layers=1,
    neck_channels=12, hidden_channels=18, num_heads=3, ffn_channels=13, branch_channels=8,
    pooled_classes=(0, 1, 2))


def grid_of(config: NetworkConfig) -> GridConfig:
    """Return a grid of cubes of 0.5 m for a network."""
    x, y, z = config.spatial_shape_xyz
    size = (x, y, z - 1)
    high = tuple(n * 0.25 for n in size)
    return GridConfig(tuple(-v for v in high) + high, (0.5, 0.5, 0.5), 10, 1, 1000,
                      config.in_channels in (5, 50))


def random_net(config: NetworkConfig, seed: int = 0) -> BEVFusionNet:
    """Return an unfolded network in which every weight and every norm is random."""
    rng = np.random.default_rng(seed)
    net = BEVFusionNet(config).eval()
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if tensor.dtype != torch.float32:
                continue
            if name.endswith('running_var'):
                values = rng.uniform(0.5, 2.0, tensor.shape)
            elif tensor.ndim == 1:
                values = rng.uniform(-0.5, 0.5, tensor.shape)
                if name.endswith('weight'):
                    values += 1.2  # a norm's scale
            else:
                inputs = tensor[0].numel()
                values = rng.standard_normal(tensor.shape) * np.sqrt(2 / inputs)
            tensor.copy_(torch.from_numpy(values))
    return net


def numpy_state(net: BEVFusionNet) -> dict[str, np.ndarray]:
    """Return the weights of a network as arrays."""
    return {name: tensor.numpy() for name, tensor in net.state_dict().items()}
