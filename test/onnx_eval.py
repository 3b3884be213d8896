# SPDX-License-Identifier: Apache-2.0
"""Evaluates an ONNX file node by node: slow, plain, and independent of the package.

Every operator of the lidar network is written from its definition: the two sparse ones as loops
over a dictionary of sites.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper

_TYPES = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.INT32: np.int32,
          onnx.TensorProto.INT64: np.int64, onnx.TensorProto.BOOL: np.bool_}


def evaluate(model, inputs):
    """Return every tensor of the model, name -> array, for arrays of its inputs."""
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    values.update(inputs)
    pending = list(model.graph.node)
    while pending:
        # A file may have its nodes in any order.
        ready = [n for n in pending if all(not i or i in values for i in n.input)]
        assert ready, f'nothing gives the inputs of {pending[0].name}'
        done = set()
        for node in ready:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            arrays = [values[name] if name else None for name in node.input]
            results = globals()[f'op_{node.op_type}'](*arrays, **attributes)
            if not isinstance(results, tuple):
                results = (results,)
            for name, result in zip(node.output, results, strict=True):
                values[name] = np.asarray(result)
            done.add(id(node))
        pending = [n for n in pending if id(n) not in done]
    return values


# The two operators of the sparse convolution

def op_GetIndicePairsImplicitGemm(indices, *, spatial_shape, ksize, stride, padding, subm,
                                  dilation, out_padding, transpose, algo, batch_size, is_train,
                                  do_sort=0):
    assert list(dilation) == [1, 1, 1] and list(out_padding) == [0, 0, 0] and not transpose
    assert algo == 1 and batch_size == 1 and is_train == (not subm) and not do_sort
    row_of = {tuple(site[1:]): row for row, site in enumerate(indices.tolist())}
    assert all(0 <= c < n for site in row_of for c, n in zip(site, spatial_shape, strict=True))
    offsets = list(itertools.product(*map(range, ksize)))
    if subm:
        stride, padding = (1, 1, 1), tuple(k // 2 for k in ksize)
        sites = list(row_of)
    else:
        out_shape = [(n + 2 * p - k) // s + 1
                     for n, p, k, s in zip(spatial_shape, padding, ksize, stride, strict=True)]
        reached = set()
        for site, offset in itertools.product(row_of, offsets):
            out = [divmod(c + p - k, s)
                   for c, p, k, s in zip(site, padding, offset, stride, strict=True)]
            if all(rest == 0 and 0 <= o < n
                   for (o, rest), n in zip(out, out_shape, strict=True)):
                reached.add(tuple(o for o, _ in out))
        sites = sorted(reached)
    pairs = np.full((len(offsets), len(sites)), -1, np.int32)
    for k, offset in enumerate(offsets):
        for column, site in enumerate(sites):
            source = tuple(o * s - p + d
                           for o, s, p, d in zip(site, stride, padding, offset, strict=True))
            pairs[k, column] = row_of.get(source, -1)
    out = np.array([(0, *site) for site in sites], np.int32).reshape(-1, 4)
    return (out, pairs, np.zeros((len(sites), 1), np.int32), np.arange(len(sites), dtype=np.int32),
            np.int32(len(sites)))


def op_ImplicitGemm(features, filters, pairs, mask, order, bias=None, *, is_subm, is_train,
                    act_alpha, act_beta, output_scale, output_add_scale, act_type=0):
    assert (is_train, act_alpha, act_beta, output_scale, output_add_scale) == (0, 0, 0, 1, 0)
    out = np.zeros((pairs.shape[1], filters.shape[0]), np.float64)
    flat = filters.reshape(filters.shape[0], -1, filters.shape[-1]).astype(np.float64)
    for k, rows in enumerate(pairs):
        there = rows >= 0
        out[there] += features[rows[there]].astype(np.float64) @ flat[:, k].T
    if bias is not None:
        out += bias
    return (np.maximum(out, 0) if act_type == 1 else out).astype(np.float32)


# Arithmetic

def op_Add(a, b): return a + b
def op_Sub(a, b): return a - b
def op_Mul(a, b): return a * b
def op_Equal(a, b): return a == b
def op_Pow(a, b): return (a ** b).astype(a.dtype)
def op_Sqrt(a): return np.sqrt(a)
def op_Cos(a): return np.cos(a)
def op_Sin(a): return np.sin(a)
def op_Relu(a): return np.maximum(a, 0)
def op_MatMul(a, b): return np.matmul(a, b)


def op_Div(a, b):
    return a / b if a.dtype.kind == 'f' else (a // b).astype(a.dtype)


def op_Sigmoid(a):
    return (1 / (1 + np.exp(-a.astype(np.float64)))).astype(np.float32)


def op_Softmax(a, *, axis=-1):
    e = np.exp(a - a.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def op_ReduceMean(a, *, axes, keepdims=1):
    return a.mean(axis=tuple(axes), keepdims=bool(keepdims), dtype=np.float64).astype(a.dtype)


def op_ReduceMax(a, *, axes, keepdims=1):
    return a.max(axis=tuple(axes), keepdims=bool(keepdims))


def op_ReduceSum(a, axes, *, keepdims=1):
    return a.sum(axis=tuple(axes.tolist()), keepdims=bool(keepdims))


def op_Gemm(a, b, c, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    a, b = a.T if transA else a, b.T if transB else b
    return np.float32(alpha) * (a @ b) + np.float32(beta) * c


def op_BatchNormalization(x, scale, shift, mean, variance, *, epsilon=1e-5, momentum=0.9,
                          training_mode=0):
    assert not training_mode
    shape = (1, -1) + (1,) * (x.ndim - 2)
    scale, shift, mean, variance = (v.reshape(shape).astype(np.float64)
                                    for v in (scale, shift, mean, variance))
    return ((x - mean) / np.sqrt(variance + epsilon) * scale + shift).astype(np.float32)


def op_Conv(x, w, b=None, *, kernel_shape, strides, pads, dilations, group):
    rank = len(kernel_shape)
    assert list(w.shape[2:]) == list(kernel_shape) and pads[:rank] == pads[rank:] and group == 1
    conv = {1: F.conv1d, 2: F.conv2d}[rank]
    bias = None if b is None else torch.tensor(b)
    return conv(torch.tensor(x), torch.tensor(w), bias, strides, pads[:rank], dilations).numpy()


def op_ConvTranspose(x, w, b=None, *, kernel_shape, strides, pads, dilations, group):
    assert not any(pads) and group == 1 and b is None
    return F.conv_transpose2d(torch.tensor(x), torch.tensor(w), stride=strides,
                              dilation=dilations).numpy()


def op_MaxPool(x, *, kernel_shape, strides, pads, ceil_mode=0, dilations=(1, 1)):
    assert not any(pads) and not ceil_mode and list(dilations) == [1, 1]
    return F.max_pool2d(torch.tensor(x), kernel_shape, strides).numpy()


def op_TopK(x, k, *, axis=-1, largest=1, sorted=1):
    assert largest and sorted and axis in (-1, x.ndim - 1)
    order = np.argsort(-x, axis=-1, kind='stable')[..., :int(k[0])]
    return np.take_along_axis(x, order, -1), order


# Layout

def op_Constant(*, value): return numpy_helper.to_array(value)
def op_Cast(x, *, to): return x.astype(_TYPES[to])
def op_Identity(x): return x
def op_Shape(x): return np.array(x.shape, np.int64)
def op_Transpose(x, *, perm): return x.transpose(perm)
def op_Concat(*xs, axis): return np.concatenate(xs, axis)
def op_Expand(x, shape): return x * np.ones(shape.tolist(), x.dtype)
def op_Where(condition, a, b): return np.where(condition, a, b)
def op_Tile(x, repeats): return np.tile(x, repeats.tolist())
def op_Squeeze(x, axes): return x.squeeze(tuple(axes.tolist()))
def op_Range(begin, end, step): return np.arange(begin, end, step)


def op_Reshape(x, shape, *, allowzero=0):
    assert not allowzero
    sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(shape.tolist())]
    return x.reshape(sizes)


def op_Unsqueeze(x, axes):
    return np.expand_dims(x, tuple(axes.tolist()))


def op_ConstantOfShape(shape, *, value):
    value = numpy_helper.to_array(value)
    return np.full(shape.tolist(), value[0], value.dtype)


def op_Gather(x, indices, *, axis=0):
    return np.take(x, indices, axis)


def op_GatherElements(x, indices, *, axis=0):
    return np.take_along_axis(x, indices, axis)


def op_ScatterND(x, indices, updates):
    out = x.copy()
    out[tuple(np.moveaxis(indices, -1, 0))] = updates
    return out


def op_OneHot(indices, depth, values, *, axis=-1):
    assert axis == -1
    return np.where(indices[..., None] == np.arange(depth), values[1], values[0])


def op_Slice(x, starts, ends, axes=None, steps=None):
    axes = np.arange(len(starts)) if axes is None else axes
    steps = np.ones_like(starts) if steps is None else steps
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes.tolist(),
                                      steps.tolist(), strict=True):
        size = x.shape[axis]
        if step < 0 and end < -size:
            end = None  # before the first element
        index[axis] = slice(start, end, step)
    return x[tuple(index)]
