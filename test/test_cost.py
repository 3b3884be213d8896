# SPDX-License-Identifier: Apache-2.0
"""Counting of operations: the arithmetic, captured graphs, and real ones of the mock device."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tt_perception.runtime.cost import Limits, Operation, Recording, _Reader, aligned

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ('riscv64-unknown-elf-as', 'riscv64-unknown-elf-ld')
LIMITS = Limits()

needs_mock = pytest.mark.skipif(
    importlib.util.find_spec('ttnn') is None or not all(map(shutil.which, TOOLS)),
    reason='the mock device needs ttnn (Python 3.10 or 3.12) and the Debian or Ubuntu package '
           'binutils-riscv64-unknown-elf')


# ---- arithmetic ----

def test_rates_are_those_of_the_card():
    whole = Limits(cores=120)
    assert [round(whole.flops_per_s(name) / 1e12, 1)
            for name in ('LoFi', 'HiFi2', 'HiFi3', 'HiFi4')] == [663.6, 331.8, 221.2, 165.9]
    assert LIMITS.flops_per_s('HiFi4') == pytest.approx(whole.flops_per_s('HiFi4') * 110 / 120)


def test_the_slowest_resource_counts():
    operation = Operation('x', bytes_read=512_000_000, bytes_written=512_000_000)
    assert operation.seconds(LIMITS) == pytest.approx(2e-3)
    assert operation.bound(LIMITS) == 'DRAM'
    flops = Operation('x', flops=LIMITS.flops_per_s('HiFi2') * 1e-3, fidelity='HiFi2',
                      bytes_read=1000, cycles=1350)
    assert flops.seconds(LIMITS) == pytest.approx(1e-3)
    assert flops.bound(LIMITS) == 'matrix'
    rows = Operation('x', gathered_rows=1_000_000, row_s=5e-9, cycles=1.35e6)
    assert rows.seconds(LIMITS) == pytest.approx(5e-3)
    assert Operation('x', cycles=1.35e6).bound(LIMITS) == 'cycles'


def test_a_gather_may_fetch_fewer_rows():
    gather = Operation('embedding', bytes_read=6400 + 40, gathered_rows=100, row_bytes=64)
    assert gather.with_rows(30).bytes_read == 30 * 64 + 40
    assert gather.with_rows(30).gathered_rows == 30


@pytest.mark.parametrize(('size', 'expected'), [(1, 64), (32, 64), (64, 64), (65, 128)])
def test_a_row_takes_whole_reads(size, expected):
    assert aligned(size) == expected


# ---- captured graphs ----

class Graph:
    """Nodes as ttnn captures them."""

    def __init__(self):
        self.nodes = []

    def add(self, kind, params, **more):
        node = {'counter': len(self.nodes), 'node_type': kind, 'params': params,
                'connections': [], 'input_tensors': [], 'arguments': [], **more}
        self.nodes.append(node)
        return node['counter']

    def tensor(self, shape, dtype='BFLOAT16', layout='TILE', kind='DRAM'):
        return self.add('tensor', {
            'shape': f'Shape({list(shape)})', 'dtype': f'DataType::{dtype}',
            'layout': f'Layout::{layout}',
            'memory_config': f'MemoryConfig(buffer_type=BufferType::{kind},shard_spec=none)'})

    def program(self, name, inputs, output, arguments=(), cores=0):
        tensors = [self.tensor(*tensor) for tensor in inputs]
        self.add('function_start', {'name': name, 'program_factory_type': 'F'},
                 input_tensors=tensors, arguments=list(arguments))
        self.add('buffer_allocate', {'type': 'DRAM', 'size': 1000, 'max_size_per_bank': 125})
        if cores:
            self.add('circular_buffer_allocate', {
                'size': cores, 'globally_allocated': '0', 'core_range_set': '{[0-0 - 1-1]}'})
            self.add('dataflow_buffer_allocate', {
                'size': cores, 'borrows_memory': '0', 'core_range_set': '{[1-1 - 2-1]}'})
            self.add('circular_buffer_allocate', {
                'size': cores, 'globally_allocated': '1', 'core_range_set': '{[0-0 - 1-1]}'})
        end = self.add('function_end', {'name': name})
        self.nodes[end]['connections'] = [self.tensor(*output)]

    def read(self, calls=()):
        record = Recording()
        _Reader(record, calls, 5000, 70).read(self.nodes)
        return record

    def read_one(self):
        operation, = self.read().operations
        return operation


def test_a_product_counts_whole_tiles():
    graph = Graph()
    graph.program('MatmulDeviceOperation', [([1, 70], 'FLOAT32'), ([70, 33], 'FLOAT32')],
                  ([1, 33], 'FLOAT32'), ['config(math_fidelity=HiFi3,fp32=1)'])
    operation = graph.read_one()
    assert operation.flops == 2 * 32 * 96 * 64 == operation.useful_flops
    assert operation.bytes_read == 4 * (32 * 96 + 96 * 64)
    assert operation.bytes_written == 4 * 32 * 64
    assert operation.fidelity == 'HiFi3'
    assert operation.dtypes == 'f32 > f32'


def test_what_is_in_l1_costs_no_dram():
    graph = Graph()
    graph.program('UnaryDeviceOperation', [([32, 32], 'BFLOAT16', 'TILE', 'L1')],
                  ([32, 32], 'BFLOAT16', 'TILE', 'L1'))
    operation = graph.read_one()
    assert operation.bytes_read == operation.bytes_written == 0


def test_rows_count_at_least_64_bytes():
    graph = Graph()
    graph.program('EmbeddingsDeviceOperation',
                  [([1, 1, 1, 1000], 'UINT32', 'ROW_MAJOR'), ([50, 8], 'BFLOAT16', 'ROW_MAJOR')],
                  ([1, 1, 1000, 8], 'BFLOAT16', 'ROW_MAJOR'))
    operation = graph.read_one()
    assert operation.gathered_rows == 1000
    assert operation.bytes_read == 1000 * 64 + aligned(4000)
    assert operation.bytes_written == 1000 * 64
    assert operation.seconds(LIMITS) == pytest.approx(5e-6)


def test_a_slice_reads_what_it_keeps():
    graph = Graph()
    graph.program('SliceDeviceOperation', [([640, 64],)], ([32, 32],))
    assert graph.read_one().bytes_read == 2048


def test_convolutions_and_attention_have_flops():
    graph = Graph()
    grid = ([1, 6, 6, 5, 32], 'FLOAT32', 'ROW_MAJOR')
    weight = ([27 * 32, 64], 'FLOAT32')
    graph.program('Conv3dDeviceOperation', [grid, weight, ([32, 64],), weight],
                  ([1, 6, 6, 5, 64], 'FLOAT32', 'ROW_MAJOR'))
    graph.program('SDPAOperation', [([1, 8, 500, 16],), ([1, 8, 90, 16],), ([1, 8, 90, 16],)],
                  ([1, 8, 500, 16],))
    conv, attention = graph.read().operations
    assert conv.flops == 3 * 2 * 180 * 27 * 32 * 64  # pairs of bfloat16: three products
    assert attention.flops == 4 * 8 * 512 * 96 * 32


def test_memory_is_that_of_the_fullest_core_and_moment():
    graph = Graph()
    graph.program('UnaryDeviceOperation', [([32, 32],)], ([32, 32],), cores=100)
    graph.add('buffer_deallocate', {'type': 'DRAM', 'size': 1000, 'max_size_per_bank': 125})
    graph.program('UnaryDeviceOperation', [([32, 32],)], ([32, 32],), cores=10)
    record = graph.read()
    assert [operation.l1_bytes for operation in record.operations] == [270, 90]
    assert [operation.dram_bytes for operation in record.operations] == [6000, 6000]
    assert (record.l1_peak, record.dram_peak) == (270, 6000)


def test_marks_name_the_operations_before_them():
    graph = Graph()
    for block in ('first', 'second'):
        graph.program('UnaryDeviceOperation', [([32, 32],)], ([32, 32],))
        graph.add('function_start', {'name': f'block of the network: {block}'})
        graph.add('function_end', {'name': f'block of the network: {block}'})
    graph.program('UnaryDeviceOperation', [([32, 32],)], ([32, 32],))
    assert [o.block for o in graph.read().operations] == ['first', 'second', '']


def test_a_program_is_named_by_the_operation_that_enqueues_it():
    graph = Graph()
    names = []
    for outer, program in (('ttnn.linear', 'MatmulDeviceOperation'),
                           ('ttnn.layer_norm', 'LayerNormDeviceOperation'),
                           ('ttnn.generic_op', 'GenericOpDeviceOperation')):
        graph.add('function_start', {'name': outer})
        graph.program(program, [([32, 32],), ([32, 32],)], ([32, 32],))
        graph.add('function_end', {'name': outer})
    names = [operation.name for operation in graph.read().operations]
    assert names == ['linear (Matmul)', 'layer_norm', 'generic_op']


# ---- the mock device ----

PROGRAM = '''
import json
from tt_perception.runtime.mock import use_mock_p150
use_mock_p150()
from tt_perception.runtime.cost import recording
from tt_perception.runtime.device import Device, load_ttnn
ttnn = load_ttnn()

def empty(shape, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT):
    return ttnn.allocate_tensor_on_device(ttnn.Shape(shape), dtype, layout, device.handle,
                                          ttnn.DRAM_MEMORY_CONFIG)

class Doubling:
    def __call__(self, x):
        return ttnn.add(x, x)

def run():
    handle = device.handle
    rows = empty([96, 64], layout=ttnn.ROW_MAJOR_LAYOUT)
    indices = empty([1, 320], ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT)
    x, w = empty([320, 64], ttnn.float32), empty([64, 128], ttnn.float32)
    q = empty([1, 8, 64, 32])
    with recording(handle, (Doubling,)) as record:
        y = ttnn.linear(x, w, activation='relu')
        record.mark('a product', y)
        ttnn.embedding(indices, rows, layout=ttnn.ROW_MAJOR_LAYOUT)
        ttnn.to_layout(rows, ttnn.TILE_LAYOUT)
        ttnn.transformer.scaled_dot_product_attention(q, q, q, is_causal=False)
        ttnn.experimental.nlp_create_qkv_heads(
            ttnn.reshape(y, [1, 1, 320, 128]), num_heads=4, num_kv_heads=0,
            transpose_k_heads=False)
        doubling = Doubling()
        doubling(x)
        ttnn.softmax(ttnn.concat([x, x], dim=-1), dim=-1)
        record.mark('the rest')
    assert record.calls[6].operation is doubling and record.calls[6].args == (x,)
    assert '__call__' in vars(Doubling) and Doubling.__call__.__name__ == '__call__'
    return record

with Device(dispatch='worker') as device:
    record = device.call(run)
    print(json.dumps([[o.block, o.name, list(o.shape), o.bytes_read, o.bytes_written, o.flops,
                       o.gathered_rows, o.l1_bytes] for o in record.operations]))
'''


@needs_mock
def test_real_operations_are_recorded(tmp_path):
    done = subprocess.run([sys.executable, '-c', PROGRAM], cwd=tmp_path, timeout=300,
                          env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    operations = json.loads(done.stdout)
    assert [operation[:3] for operation in operations] == [
        ['a product', 'linear (Matmul)', [320, 128]],
        ['a product', 'linear (Unary)', [320, 128]],
        ['the rest', 'embedding (Embeddings)', [1, 1, 320, 64]],
        ['the rest', 'to_layout (Tilize)', [96, 64]],
        ['the rest', 'scaled_dot_product_attention (SDPA)', [1, 8, 64, 32]],
        ['the rest', 'nlp_create_qkv_heads (NlpCreateHeads)', [1, 4, 320, 32]],
        ['the rest', 'add (BinaryNg)', [320, 64]],
        ['the rest', 'concat', [320, 128]],
        ['the rest', 'softmax', [1, 1, 320, 128]],
    ]
    product, _, gather, _, attention, heads, *_ = operations
    assert product[3:6] == [4 * (320 * 64 + 64 * 128), 4 * 320 * 128, 2 * 320 * 64 * 128]
    assert gather[3:7] == [320 * 4 + 320 * 128, 320 * 128, 0, 320]
    assert attention[5] == 4 * 8 * 64 * 64 * 32
    assert heads[4] == heads[3] == 4 * 320 * 128
    assert all(operation[7] > 0 for operation in operations)
