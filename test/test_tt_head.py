# SPDX-License-Identifier: Apache-2.0
"""The head's graph: its weights in plain torch, the whole of it on the functional simulator."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tiny_nets import numpy_state

from tt_perception.bevfusion.fold import BOX_BRANCHES, fold_norms
from tt_perception.bevfusion.reference import BEVFusionNet
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.seeded import grid_of, seeded_cloud, seeded_network, small_config
from tt_perception.bevfusion.tt import layout
from tt_perception.bevfusion.tt.layout import TILE, Packed, Proposal
from tt_perception.bevfusion.voxelize import Voxelizer
from tt_perception.runtime.errors import ConfigError

pytestmark = pytest.mark.usefixtures('one_thread')

SMALL = small_config()[1]  # heads of 8 channels
# Heads of 16 channels, no proposal is padding, more cells than the attention takes at once.
WIDE = replace(SMALL, hidden_channels=64, num_proposals=64, spatial_shape_xyz=(208, 304, 41))
CONFIGS = {'8 channels': SMALL, '16 channels': WIDE}


@pytest.fixture(scope='module', params=CONFIGS.values(), ids=CONFIGS)
def config(request):
    return request.param


# Weights


@pytest.fixture(scope='module')
def net(config):
    """Return a network without norms, with random weights and biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = BEVFusionNet(config, folded=True).eval()
        for name, parameter in net.bbox_head.named_parameters():
            if name.endswith('bias'):
                torch.nn.init.normal_(parameter)
    return net.requires_grad_(False)


@pytest.fixture(scope='module')
def arrays(net):
    return numpy_state(net)


def rows(count, channels, seed=0):
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(seed))


def apply(layer, x):
    return x @ layer.weight + layer.bias


def by_head(x):
    """Return [n, heads * 32] as [heads, n, 32]."""
    return x.unflatten(1, (-1, TILE)).transpose(0, 1)


@pytest.mark.parametrize('name', ['self_attn', 'cross_attn'])
def test_attention(config, net, arrays, name):
    """One tile a head holds keys and values; the same tiles serve as both."""
    weights = layout.attention(arrays, name, config)
    query, memory = rows(40, config.hidden_channels), rows(70, config.hidden_channels, 1)
    tiles = by_head(apply(weights.key_value, memory))
    assert tiles.shape == (config.num_heads, 70, TILE)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        by_head(apply(weights.query, query)), tiles, tiles,
        scale=(config.hidden_channels // config.num_heads) ** -0.5)
    found = apply(weights.out, mixed.transpose(0, 1).flatten(1))
    expected = getattr(net.bbox_head.decoder[0], name)['attn'](query, memory)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_branches(config, net, arrays):
    first, box, classes = layout.branches(arrays, config)
    query = rows(40, config.hidden_channels)
    hidden = apply(first, query).relu()
    boxes, logits = apply(box, hidden), apply(classes, hidden)
    heads = net.bbox_head.prediction_heads[0]
    expected = torch.cat([heads[name](query) for name in BOX_BRANCHES], dim=1)
    torch.testing.assert_close(boxes[:, :10], expected, rtol=1e-4, atol=1e-4)
    assert not boxes[:, 10:].any()
    one_hot = slice(Proposal.ONE_HOT, Proposal.ONE_HOT + config.num_classes)
    torch.testing.assert_close(logits[:, one_hot], heads['heatmap'](query), rtol=1e-4, atol=1e-4)
    logits[:, one_hot] = 0
    assert not logits.any()


@pytest.mark.parametrize('name', ['self_posembed', 'cross_posembed'])
def test_position_encoding(config, net, arrays, name):
    """A row for each cell, in the order of the map's rows."""
    expected = getattr(net.bbox_head.decoder[0], name)(net.bbox_head.cell_centres)
    found = layout.position_encoding(arrays, name, config)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_class_encoding(config, net, arrays):
    first_cells = torch.arange(config.num_classes) * len(net.bbox_head.cell_centres)
    proposals = Frame.proposals_of(config, first_cells, torch.zeros(config.num_classes))
    found = proposals[:config.num_classes] @ layout.class_encoding(arrays)
    expected = net.bbox_head.class_encoding(torch.eye(config.num_classes))
    torch.testing.assert_close(found, expected)


def test_score_and_places():
    proposals = torch.zeros(3, TILE)
    proposals[:, :4] = torch.tensor([[-1.0, 5, 179, 4], [2.0, 0, 1, 0], [-1e4, 0, 0, 0]])
    proposals[[0, 1], [Proposal.ONE_HOT + 4, Proposal.ONE_HOT]] = 0.25
    packed = proposals @ layout.score_column() + proposals @ layout.place_columns()
    expected = torch.zeros(3, TILE)
    expected[:2, Packed.SCORE] = 0.25
    expected[:, [Packed.X, Packed.Y, Packed.LABEL]] = proposals[:, [1, 2, 3]]
    assert torch.equal(packed, expected)


def test_pairs_keep_sixteen_bits():
    values = rows(50, 32) * 1000
    pairs = layout.pair_rows(values)
    assert pairs.dtype == torch.bfloat16
    assert torch.equal(pairs[:, :32], values.bfloat16())
    sums = pairs.float() @ layout.pair_sum(32)
    torch.testing.assert_close(sums, values, rtol=2 ** -16, atol=0)


@pytest.mark.parametrize(('proposals', 'padded'), [(1, 32), (32, 32), (500, 512)])
def test_padded_proposals(proposals, padded):
    assert layout.padded_proposals(replace(SMALL, num_proposals=proposals)) == padded


@pytest.mark.parametrize('sizes', [{'hidden_channels': 128}, {'num_classes': 25}],
                         ids=['head', 'classes'])
def test_sizes_that_have_no_place(sizes):
    layout.check(SMALL)
    with pytest.raises(ConfigError, match='expected at most'):
        layout.check(replace(SMALL, **sizes))


# The whole head on the functional simulator of the chip


@dataclass
class Frame:
    """What a folded network computes for a seeded cloud, and the inputs of its head.

    :ivar blocks: all blocks of the reference.
    :ivar memory: the map as rows, float32 [cells, C].
    :ivar proposals: float32 [padded proposals, 32].
    :ivar cells: int32 [1, padded proposals].
    """

    config: object
    arrays: dict
    blocks: dict
    memory: torch.Tensor
    proposals: torch.Tensor
    cells: torch.Tensor

    @classmethod
    def of(cls, config):
        arrays = fold_norms(numpy_state(seeded_network(config)), config)
        net = BEVFusionNet(config, folded=True).eval()
        net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        blocks = seeded_blocks(net)
        cell = blocks['bbox_head.proposals'] % len(net.bbox_head.cell_centres)
        heat = blocks['bbox_head.heatmap'].flatten()[blocks['bbox_head.proposals']]
        cells = torch.zeros(1, layout.padded_proposals(config), dtype=torch.int32)
        cells[0, :len(cell)] = cell
        return cls(config, arrays, blocks,
                   blocks['bbox_head.shared_conv'][0].permute(1, 2, 0).flatten(0, 1),
                   cls.proposals_of(config, blocks['bbox_head.proposals'], heat), cells)

    @staticmethod
    def proposals_of(config, indices, heat):
        """Return the head's table of proposals, given as indices into the flattened heat map."""
        x, y = config.feature_map_xy
        label, cell = indices // (x * y), indices % (x * y)
        table = torch.zeros(layout.padded_proposals(config), TILE)
        table[:, Proposal.LOGIT] = -1e4
        logit = torch.where(heat > 0, torch.logit(heat), -1e4)
        columns = (logit, cell // y, cell % y, label)
        table[:len(indices), :4] = torch.stack([c.float() for c in columns], dim=1)
        table[torch.arange(len(indices)), Proposal.ONE_HOT + label] = 1
        return table


def seeded_blocks(net):
    """Return the blocks of a seeded cloud that the network has not seen."""
    xyz = seeded_cloud(6000, seed=1)
    points = np.hstack([xyz, np.zeros((len(xyz), 1), np.float32)])
    voxels = Voxelizer(grid_of(net.config))(points)
    rulebooks = RulebookBuilder(net.config)(voxels.coords_zyx)
    with torch.inference_mode():
        return net.forward_blocks(torch.from_numpy(voxels.features[rulebooks.order]), rulebooks)


class OnDevice:
    """A head and its inputs on the device."""

    def __init__(self, device, frame):
        import ttnn

        from tt_perception.bevfusion.tt.head import Head
        self.ttnn, self.device = ttnn, device
        self.head = Head(device, frame.config, frame.arrays)
        self.inputs = [self.host(values, dtype).to(device) for values, dtype in (
            (layout.pair_rows(frame.memory), ttnn.bfloat16), (frame.proposals, ttnn.float32),
            (frame.cells, ttnn.uint32))]

    def host(self, values, dtype):
        return self.ttnn.from_torch(values, dtype=dtype, layout=self.ttnn.ROW_MAJOR_LAYOUT)

    def put_memory(self, memory):
        host = self.host(layout.pair_rows(memory), self.ttnn.bfloat16)
        self.ttnn.copy_host_to_device_tensor(host, self.inputs[0])

    def run(self, keep=lambda name, tensor: None):
        return self.head(*self.inputs, keep=keep)

    def read(self, tensor):
        return self.ttnn.to_torch(tensor).flatten(0, -2)  # rows of proposals


@pytest.fixture(scope='module')
def frame(device, config):
    return Frame.of(config)


@pytest.fixture(scope='module')
def on_device(device, frame):
    return OnDevice(device, frame)


def check_close(name, found, expected, error):
    """Compare by correlation, and by the error relative to the spread of the values."""
    found, expected = found.double(), expected.double()
    correlation = torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]
    assert correlation >= 0.999, f'{name}: correlation {correlation:.6f}'
    assert (found - expected).abs().max() < error * expected.std(), name


@pytest.mark.simulator
def test_every_block(config, frame, on_device):
    count, blocks = config.num_proposals, {}
    packed = on_device.run(
        lambda name, tensor: blocks.__setitem__(name, on_device.read(tensor)))
    assert tuple(packed.shape) == (layout.padded_proposals(config), TILE)
    packed = on_device.read(packed)[:count]
    decoder = layout.DECODER
    assert list(blocks) == ['bbox_head.query', f'{decoder}.self_posembed',
                            *(f'{decoder}.norms.{i}' for i in range(3))]
    for name, found in blocks.items():
        check_close(name, found[:count], frame.blocks[name], 0.02)
    parts = packed[:, :10].split(list(BOX_BRANCHES.values()), dim=1)
    for name, found in zip(BOX_BRANCHES, parts, strict=True):
        check_close(name, found, frame.blocks[f'{layout.PREDICTION}.{name}'], 0.05)
    check_close('score', packed[:, Packed.SCORE], frame.blocks['score'], 0.05)
    assert torch.equal(packed[:, [Packed.X, Packed.Y, Packed.LABEL]],
                       frame.proposals[:count, [Proposal.X, Proposal.Y, Proposal.LABEL]])


@pytest.mark.simulator
def test_padding_has_no_influence(config, frame, on_device):
    """Whatever the padding holds, the proposals get the same bits."""
    count = config.num_proposals
    if count % TILE == 0:
        pytest.skip('no proposal is padding')
    ttnn, expected = on_device.ttnn, on_device.read(on_device.run())[:count]
    cells, proposals = frame.cells.clone(), frame.proposals.clone()
    cells[0, count:], proposals[count:] = 7, 3.0
    found = on_device.head(
        on_device.inputs[0], on_device.host(proposals, ttnn.float32).to(on_device.device),
        on_device.host(cells, ttnn.uint32).to(on_device.device))
    assert torch.equal(on_device.read(found)[:count], expected)


@pytest.mark.simulator
def test_trace_replay(frame, device, on_device):
    """A replay computes what a call computes, bit for bit, also for another frame."""
    if os.environ.get('TT_METAL_SLOW_DISPATCH_MODE'):
        pytest.skip('TT_METAL_SLOW_DISPATCH_MODE is set: slow dispatch has no traces')
    ttnn, memories = on_device.ttnn, (frame.memory, frame.memory.flip(0))
    expected = []
    for memory in memories:
        on_device.put_memory(memory)
        expected.append(on_device.read(on_device.run()))
    assert not torch.equal(*expected)
    trace = ttnn.begin_trace_capture(device, cq_id=0)
    out = on_device.run()
    ttnn.end_trace_capture(device, trace, cq_id=0)
    for i in (0, 1, 1, 0):
        on_device.put_memory(memories[i])
        ttnn.execute_trace(device, trace, cq_id=0, blocking=True)
        assert torch.equal(on_device.read(out), expected[i])
    ttnn.release_trace(device, trace)
