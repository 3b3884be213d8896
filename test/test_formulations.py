# SPDX-License-Identifier: Apache-2.0
"""The stock forms of the sparse encoder: their numbers in torch, their legality on the mock."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_nets import numpy_state

from tt_perception.bevfusion.columns import TableLayout
from tt_perception.bevfusion.reference import BEVFusionNet
from tt_perception.bevfusion.rulebook import RulebookBuilder
from tt_perception.bevfusion.seeded import grid_of, seeded_cloud, small_config
from tt_perception.bevfusion.tt.accounting import FrameCounts
from tt_perception.bevfusion.voxelize import Voxelizer

pytestmark = pytest.mark.usefixtures('one_thread')
ROOT = Path(__file__).resolve().parents[1]
TOOLS = ('riscv64-unknown-elf-as', 'riscv64-unknown-elf-ld')
CONFIG = replace(small_config()[1], sparse_channels=(16, 32, 32, 64), bev_channels=32)
CAPACITIES = (2048, 2048, 1024, 512)

needs_mock = pytest.mark.skipif(
    importlib.util.find_spec('ttnn') is None or not all(map(shutil.which, TOOLS)),
    reason='the mock device needs ttnn (Python 3.10 or 3.12) and the Debian or Ubuntu package '
           'binutils-riscv64-unknown-elf')


# ---- numbers: the graph's code on a ttnn made of torch ----

def torch_ttnn() -> ModuleType:
    """Return the operations that the stock encoder uses, on torch tensors."""
    def relu(y, activations):
        return y.relu() if activations else y

    def embedding(indices, rows, *, layout=None, padding_idx, embeddings_type):
        assert not rows[padding_idx].any()  # what is missing is zero
        return F.embedding(indices.long(), rows)

    def conv3d(*, input_tensor, weight_tensor, weight_lo_tensor, bias_tensor, stride, padding,
               output_channels, **_):
        # the pairs of the operand split, but for lo * lo
        x = input_tensor.permute(0, 4, 1, 2, 3)
        hi = x.bfloat16().float()
        y = (F.conv3d(x, weight_tensor, bias_tensor[0], stride, padding)
             + F.conv3d(hi, weight_lo_tensor, None, stride, padding))
        assert y.shape[1] == output_channels
        return y.permute(0, 2, 3, 4, 1)

    ttnn = ModuleType('ttnn')
    vars(ttnn).update(
        bfloat16=torch.bfloat16, float32=torch.float32, uint32=torch.int32,
        TILE_LAYOUT=0, ROW_MAJOR_LAYOUT=1, DRAM_MEMORY_CONFIG=None, Shape=tuple,
        MathFidelity=SimpleNamespace(HiFi4=4), EmbeddingsType=SimpleNamespace(PADDED=0),
        UnaryOpType=SimpleNamespace(RELU=0), UnaryWithParam=lambda kind: kind,
        Conv3dConfig=SimpleNamespace, init_device_compute_kernel_config=lambda *_, **__: None,
        from_torch=lambda x, dtype, **_: x.to(dtype),
        allocate_tensor_on_device=lambda shape, dtype, *_: torch.zeros(shape, dtype=dtype),
        deallocate=lambda x: None, to_layout=lambda x, layout: x, typecast=lambda x, dtype:
        x.to(dtype), embedding=embedding, reshape=lambda x, shape: x.reshape(shape),
        linear=lambda x, w, *, bias, dtype, compute_kernel_config: x.to(dtype) @ w.to(dtype)
        + bias,
        slice=lambda x, begin, end: x[tuple(map(slice, begin, end))],
        add=lambda a, b, *, activations=(), dtype=None: relu(
            a.float() + b.float(), activations).to(dtype or a.dtype),
        subtract=lambda a, b, *, dtype: (a - b.float()).to(dtype),
        multiply=lambda a, b, *, input_tensor_a_activations: relu(
            a, input_tensor_a_activations) * b,
        concat=lambda tensors, dim: torch.cat(tensors, dim),
        experimental=SimpleNamespace(
            nlp_concat_heads=lambda x: x.transpose(1, 2).flatten(2)[:, None], conv3d=conv3d,
            prepare_conv3d_weights=lambda *, weight_tensor, **_: weight_tensor))
    return ttnn


@pytest.fixture(scope='module')
def formulations():
    """Return the module, on torch; the package's own copy is not touched."""
    path = ROOT / 'tt_perception' / 'bevfusion' / 'tt' / 'formulations.py'
    spec = importlib.util.spec_from_file_location('formulations_on_torch', path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, 'ttnn', torch_ttnn())
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def frame():
    """Return rulebooks and features of a small cloud, in the order of the rows."""
    points = np.pad(seeded_cloud(2500), ((0, 0), (0, 1)))
    voxels = Voxelizer(grid_of(CONFIG))(points)
    rulebooks = RulebookBuilder(CONFIG)(voxels.coords_zyx)
    return rulebooks, torch.from_numpy(voxels.features[rulebooks.order])


@pytest.fixture(scope='module')
def net():
    """Return a network without norms, with random biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = BEVFusionNet(CONFIG, folded=True).eval()
        for name, parameter in net.named_parameters():
            if name.endswith('bias'):
                torch.nn.init.normal_(parameter)
    return net.requires_grad_(False)


def write_inputs(encoder, formulations, rulebooks, features):
    """Fill the inputs of a stock encoder."""
    inputs, n = encoder.inputs, len(features)
    hi = features.bfloat16()
    inputs['features'][1:1 + n, :4] = hi
    inputs['features'][1:1 + n, 16:20] = (features - hi.float()).bfloat16()

    def write(name, table):
        taps = table.shape[1]
        filled = formulations.gather_indices(table, inputs[name].shape[1] // taps)
        inputs[name][:] = torch.from_numpy(filled.astype(np.int32))

    for level in range(1, 5):
        if f'subm_{level}' in inputs:
            write(f'subm_{level}', rulebooks.subm[level - 1])
        if level > 1:
            write(f'down_{level}', rulebooks.down[level - 2])
    if 'out' in inputs:
        write('out', rulebooks.out)
    for name, index in (('sites', -1), ('cells', -2)):
        if name in inputs:
            shape = CONFIG.level_shapes_xyz[index]
            cells = np.ravel_multi_index(rulebooks.coords_xyz[index].T, shape)
            inputs[name][0, torch.from_numpy(cells)] = torch.arange(
                1, 1 + len(cells), dtype=torch.int32)


@pytest.mark.parametrize('dense_last_level', [False, True])
def test_stock_operations_give_the_map_of_the_reference(formulations, frame, net,
                                                        dense_last_level):
    rulebooks, features = frame
    device = SimpleNamespace(arch=lambda: None, compute_with_storage_grid_size=lambda: None)
    encoder = formulations.StockEncoder(device, CONFIG, numpy_state(net),
                                        TableLayout.of(CONFIG, CAPACITIES), dense_last_level)
    write_inputs(encoder, formulations, rulebooks, features)
    kept = []
    pairs = encoder(lambda name, tensor: kept.append(name))
    expected = net.pts_middle_encoder(features, rulebooks, lambda name, tensor: None)[0]
    x, y = CONFIG.feature_map_xy
    if dense_last_level:  # hi and lo of both z
        hi, lo = pairs.float().reshape(x, y, 2, 2, -1).unbind(2)
    else:
        hi, lo = pairs.float().reshape(x, y, 2, 2, -1).unbind(3)
    found = (hi + lo).permute(3, 2, 0, 1).flatten(0, 1)  # channel = c * Z + z
    scale = expected.abs().max()
    assert scale > 1
    torch.testing.assert_close(found / scale, expected / scale, atol=1e-4, rtol=0)
    assert len(kept) == len(set(kept)) == 22 + dense_last_level


def test_pairs_of_weights_leave_out_only_the_smallest_product(formulations):
    torch.manual_seed(0)
    x, weight = torch.randn(40, 3, 32), torch.randn(3, 32, 48)
    hi = x.bfloat16()
    rows = torch.cat([hi, (x - hi.float()).bfloat16()], 2).double().flatten(1)
    both = rows @ formulations.pair_weight(weight).double()
    main, rest = both[:, :48], both[:, 64:64 + 48]
    exact = torch.einsum('nti,tio->no', x.double(), weight.double())
    assert (main + rest - exact).norm() < 3e-5 * exact.norm()
    assert not both[:, 48:64].any()


def test_only_present_rows_are_counted(formulations, frame):
    rulebooks, _ = frame
    counts = FrameCounts.of('a frame', rulebooks)
    tables = [*rulebooks.subm, *rulebooks.down, rulebooks.out]
    uses = [5, 4, 4, 4, 1, 1, 1, 1]
    rows = formulations.gathered_rows(counts, False)
    assert len(rows) == 22
    assert sum(rows) == rulebooks.num_rows[4] + sum(
        times * np.count_nonzero(table >= 0) for times, table in zip(uses, tables, strict=True))
    assert len(formulations.gathered_rows(counts, True)) == 19


# ---- legality ----

PROGRAM = '''
import json
from tt_perception.runtime.mock import use_mock_p150
use_mock_p150()
import torch
from tt_perception.bevfusion.columns import TableLayout
from tt_perception.bevfusion.config import CAPACITY_BUCKETS, NetworkConfig
from tt_perception.bevfusion.reference import BEVFusionNet
from tt_perception.bevfusion.tt.formulations import StockEncoder
from tt_perception.runtime.cost import recording
from tt_perception.runtime.device import Device, load_ttnn

config = NetworkConfig()
arrays = {k: v.numpy() for k, v in BEVFusionNet(config, folded=True).state_dict().items()}
layout = TableLayout.of(config, CAPACITY_BUCKETS[BUCKET])

def build(dense_last_level):
    encoder = StockEncoder(device.handle, config, arrays, layout, dense_last_level)
    out = encoder(lambda name, tensor: None)
    load_ttnn().synchronize_device(device.handle)
    with recording(device.handle) as record:
        encoder(record.mark)
    return {'shape': list(out.shape), 'input_bytes': encoder.input_bytes,
            'flops': sum(o.flops for o in record.operations),
            'gathers': sum(bool(o.gathered_rows) for o in record.operations),
            'blocks': sorted({o.block for o in record.operations}),
            'l1_peak': record.l1_peak, 'dram_peak': record.dram_peak}

with Device(dispatch='worker') as device:
    print(json.dumps([device.call(build, False), device.call(build, True)]))
'''


@needs_mock
@pytest.mark.parametrize('bucket', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_both_forms_are_legal_at_full_size(tmp_path, bucket):
    done = subprocess.run([sys.executable, '-c', PROGRAM.replace('BUCKET]', f'{bucket}]')],
                          cwd=tmp_path, timeout=900, env=os.environ | {'PYTHONPATH': str(ROOT)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for form, gathers, blocks in zip(json.loads(done.stdout), (22, 19), (22, 23), strict=True):
        assert form['shape'] == [180 * 180, 2 * 256]
        assert form['gathers'] == gathers
        assert len(form['blocks']) == blocks and '' not in form['blocks']
        assert form['l1_peak'] < 1_461_120
        assert form['dram_peak'] < 12e9
        assert form['flops'] > 1e11
