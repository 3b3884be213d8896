# SPDX-License-Identifier: Apache-2.0
"""A read-only view of an ONNX file that may come from anywhere.

The whole structure is checked when the file is opened, so that whoever walks the graph finds
every tensor that a node names, in a graph without cycles. Nodes that compute the same twice
appear once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from tt_perception.runtime.errors import ArtifactError

_MOST_BYTES = 1 << 30
_MOST_BYTES_COMPARED = 1024  # larger constants are not worth a comparison
_DTYPES = {
    onnx.TensorProto.FLOAT: np.dtype('<f4'),
    onnx.TensorProto.FLOAT16: np.dtype('<f2'),
    onnx.TensorProto.DOUBLE: np.dtype('<f8'),
    onnx.TensorProto.INT32: np.dtype('<i4'),
    onnx.TensorProto.INT64: np.dtype('<i8'),
    onnx.TensorProto.BOOL: np.dtype('?'),
}
_TYPED_FIELDS = {
    onnx.TensorProto.FLOAT: 'float_data',
    onnx.TensorProto.FLOAT16: 'int32_data',
    onnx.TensorProto.DOUBLE: 'double_data',
    onnx.TensorProto.INT32: 'int32_data',
    onnx.TensorProto.INT64: 'int64_data',
    onnx.TensorProto.BOOL: 'int32_data',
}
# Operators that change the layout or the type of their first input, or repeat it.
_LAYOUT = frozenset(('Cast', 'Expand', 'Flatten', 'Identity', 'Reshape', 'Squeeze', 'Tile',
                     'Transpose', 'Unsqueeze'))
# Least and greatest number of inputs, and of outputs, of the operators that the network may have,
# so that whoever reads a node need not look whether an input is there.
_OPERANDS = {
    **dict.fromkeys(('Cast', 'Cos', 'Flatten', 'Identity', 'MaxPool', 'Relu', 'Shape', 'Sigmoid',
                     'Sin', 'Softmax', 'Sqrt', 'Transpose'), (1, 1, 1)),
    **dict.fromkeys(('Add', 'Div', 'Equal', 'Expand', 'Gather', 'GatherElements', 'MatMul', 'Mul',
                     'Pow', 'Reshape', 'Sub', 'Tile'), (2, 2, 1)),
    **dict.fromkeys(('ReduceMax', 'ReduceMean', 'ReduceSum', 'Squeeze', 'Unsqueeze'), (1, 2, 1)),
    **dict.fromkeys(('Conv', 'ConvTranspose'), (2, 3, 1)),
    **dict.fromkeys(('Gemm', 'OneHot', 'ScatterND', 'Where'), (3, 3, 1)),
    'BatchNormalization': (5, 5, 1),
    'Concat': (1, math.inf, 1),
    'Constant': (0, 0, 1),
    'Slice': (3, 5, 1),
    'TopK': (2, 2, 2),
    'GetIndicePairsImplicitGemm': (1, 1, 5),
    'ImplicitGemm': (5, 6, 1),
}


@dataclass(frozen=True, eq=False)
class Node:
    """One node; ``attributes`` holds int, float, str, tuples of these, or a tensor."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        return f'{self.op} {self.name!r}'


class OnnxGraph:
    """The main graph of an ONNX file.

    :ivar path: of the file, for messages.
    :ivar nodes: in an order in which every node comes after those that it depends on.
    :ivar inputs: name -> dimensions, -1 where one is not a number.
    :ivar outputs: names.
    """

    def __init__(self, path: str | Path) -> None:
        """Read and check a file.

        :raises ArtifactError: no ONNX file; data outside the file; a subgraph; a tensor that
            nothing produces, or two nodes do; a cycle.
        """
        self.path = Path(path)
        self._read(_parse(self.path))

    def error(self, message: str) -> ArtifactError:
        """Return an error about this file."""
        return ArtifactError(f'{self.path}: {message}')

    def _read(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        if not graph.node:
            raise self.error('no ONNX model: it has no nodes')
        if model.functions or graph.sparse_initializer:
            raise self.error('found functions or sparse initializers, expected one flat graph')
        self.inputs = {self._text(value.name): tuple(
            d.dim_value if d.WhichOneof('value') == 'dim_value' else -1
            for d in value.type.tensor_type.shape.dim) for value in graph.input}
        self.outputs = tuple(self._text(value.name) for value in graph.output)
        self._tensors = {}
        for tensor in graph.initializer:
            self._add_tensor(self._text(tensor.name), tensor)
        nodes = [self._node(proto) for proto in graph.node]
        self._producer: dict[str, Node] = {}
        for node in nodes:
            for name in filter(None, node.outputs):
                if name in self._producer or name in self._tensors or name in self.inputs:
                    raise self.error(f'{node}: its output {name!r} exists already')
                self._producer[name] = node
        self._check_names(nodes)
        self.nodes = self._merged(self._ordered(nodes))
        for node in self.nodes:
            value = node.attributes.get('value')
            if node.op == 'Constant' and isinstance(value, onnx.TensorProto):
                self._add_tensor(node.outputs[0], value)
        self._users: dict[str, list[tuple[Node, int]]] = defaultdict(list)
        for node in self.nodes:
            for index, name in enumerate(node.inputs):
                self._users[name].append((node, index))

    def _text(self, name: str | bytes) -> str:
        """Return a name; protobuf gives bytes for what is no text."""
        if not isinstance(name, str):
            raise self.error(f'damaged: the name {name!r} is no text')
        return name

    def _add_tensor(self, name: str, tensor: onnx.TensorProto) -> None:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise self.error(f'tensor {name!r} has its data in another file, expected it inside')
        if name in self._tensors or name in self.inputs:
            raise self.error(f'tensor {name!r} exists twice')
        self._tensors[name] = tensor

    def _node(self, proto: onnx.NodeProto) -> Node:
        least, most, outputs = _OPERANDS.get(proto.op_type, (0, math.inf, len(proto.output)))
        found = len(proto.input), len(proto.output)
        if not (least <= found[0] <= most and found[1] == outputs and outputs):
            span = least if least == most else f'{least} to {most}'
            raise self.error(f'{proto.op_type} {proto.name!r}: found {found[0]} inputs and '
                             f'{found[1]} outputs, expected {span} and {outputs or "some"}')
        attributes = {self._text(a.name): self._attribute(proto, a) for a in proto.attribute}
        return Node(self._text(proto.name), self._text(proto.op_type),
                    tuple(map(self._text, proto.input)), tuple(map(self._text, proto.output)),
                    attributes)

    def _attribute(self, node: onnx.NodeProto, a: onnx.AttributeProto) -> Any:
        kinds = onnx.AttributeProto
        if a.type == kinds.INT:
            return a.i
        if a.type == kinds.FLOAT:
            return a.f
        if a.type == kinds.STRING:
            return a.s
        if a.type == kinds.INTS:
            return tuple(a.ints)
        if a.type == kinds.FLOATS:
            return tuple(a.floats)
        if a.type == kinds.TENSOR:
            return a.t
        raise self.error(f'{node.op_type} {node.name!r}: attribute {a.name!r} is neither number, '
                         'text nor tensor')

    def _check_names(self, nodes: list[Node]) -> None:
        known = {*self._producer, *self._tensors, *self.inputs, ''}
        for node in nodes:
            for name in node.inputs:
                if name not in known:
                    raise self.error(f'{node}: reads {name!r}, which nothing in the file gives')
        for name in self.outputs:
            if name not in known:
                raise self.error(f'output {name!r}: nothing in the file gives it')

    def _ordered(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes in an order of dependence."""
        waiting = {}
        followers: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            before = {self._producer[name] for name in node.inputs if name in self._producer}
            waiting[node] = len(before)
            for other in before:
                followers[other].append(node)
        ordered = [node for node in nodes if not waiting[node]]
        for node in ordered:  # grows while it is read
            for follower in followers[node]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ordered.append(follower)
        if len(ordered) < len(nodes):
            stuck = next(node for node in nodes if waiting[node])
            raise self.error(f'{stuck}: depends on itself, expected a graph without cycles')
        return ordered

    def _merged(self, nodes: list[Node]) -> list[Node]:
        """Leave out nodes that do the same with the same inputs as an earlier one."""
        self._alias: dict[str, str] = {}
        first: dict[tuple, Node] = {}
        kept = []
        for node in nodes:
            inputs = tuple(self._alias.get(name, name) for name in node.inputs)
            node = replace(node, inputs=inputs)
            what = tuple(sorted((name, _comparable(value))
                                for name, value in node.attributes.items()))
            same = first.setdefault((node.op, inputs, what, len(node.outputs)), node)
            if same is node:
                kept.append(node)
            else:
                self._alias.update(zip(node.outputs, same.outputs, strict=True))
            self._producer.update(dict.fromkeys(filter(None, node.outputs), same))
        return kept

    def producer(self, tensor: str) -> Node | None:
        """Return the node that gives a tensor; None for inputs and initializers."""
        return self._producer.get(tensor)

    def source(self, tensor: str) -> str:
        """Return the tensor that ``tensor`` is another layout or type of.

        Also looks through a Concat of one input, and a Gather of element 0 of axis 0, which takes
        the only frame of a batch.
        """
        tensor = self._alias.get(tensor, tensor)
        while (node := self._producer.get(tensor)) is not None and self._keeps_values(node):
            tensor = node.inputs[0]
        return tensor

    def users(self, tensor: str) -> list[tuple[Node, int]]:
        """Return (node, input index) of all that compute with a tensor, in any layout or type."""
        found, pending = [], [tensor]
        while pending:
            for node, index in self._users.get(pending.pop(), ()):
                if not self._keeps_values(node):
                    if node.op != 'Shape':
                        found.append((node, index))
                elif index == 0:
                    pending.append(node.outputs[0])
        return found

    def direct_users(self, tensor: str) -> list[tuple[Node, int]]:
        """Return (node, input index) of all nodes that read a tensor."""
        return list(self._users.get(tensor, ()))

    def _keeps_values(self, node: Node) -> bool:
        if node.op in _LAYOUT:
            return bool(node.inputs)
        if node.op == 'Concat':
            return len(node.inputs) == 1
        if node.op == 'Gather' and len(node.inputs) == 2 and node.attributes.get('axis', 0) == 0:
            index = self.constant(node.inputs[1])
            return index is not None and index.ndim == 0 and index == 0
        return False

    def ancestors(self, tensor: str) -> Iterator[str]:
        """Yield a tensor and all tensors that it depends on."""
        seen, pending = {tensor}, [tensor]
        while pending:
            name = pending.pop()
            yield name
            node = self._producer.get(name)
            for before in node.inputs if node is not None else ():
                if before not in seen:
                    seen.add(before)
                    pending.append(before)

    def constant(self, tensor: str) -> np.ndarray | None:
        """Return the value of an initializer or a ``Constant``, also through Cast or Identity.

        :return: read-only array of the stored type; None for what is computed.
        :raises ArtifactError: a type that is not read here, or data of another size than declared.
        """
        while (node := self._producer.get(tensor)) is not None and node.op in ('Cast', 'Identity'):
            if not node.inputs:
                return None
            tensor = node.inputs[0]
        proto = self._tensors.get(tensor)
        return None if proto is None else self._decode(tensor, proto)

    def _decode(self, name: str, proto: onnx.TensorProto) -> np.ndarray:
        dtype = _DTYPES.get(proto.data_type)
        if dtype is None:
            kinds = onnx.TensorProto.DataType
            known = proto.data_type in kinds.values()
            found = kinds.Name(proto.data_type) if known else proto.data_type
            raise self.error(f'tensor {name!r}: found type {found}, expected '
                             + ', '.join(kinds.Name(kind) for kind in _DTYPES))
        shape = tuple(proto.dims)
        size = math.prod(shape)
        if min(shape, default=0) < 0:
            raise self.error(f'tensor {name!r}: found shape {shape}, expected no negative size')
        if proto.HasField('raw_data'):
            found = len(proto.raw_data) / dtype.itemsize
            values = np.frombuffer(proto.raw_data, dtype) if found == size else None
        else:
            typed = getattr(proto, _TYPED_FIELDS[proto.data_type])
            found = len(typed)
            values = _from_typed(typed, dtype) if found == size else None
        if values is None:
            raise self.error(f'tensor {name!r}: found {found:g} values, '
                             f'expected {size} for the shape {shape}')
        return values.reshape(shape)


class GraphWalk:
    """Steps along the edges of a graph; what is not as expected is refused by name."""

    def __init__(self, graph: OnnxGraph) -> None:
        self.graph = graph

    def fail(self, where: Any, found: Any, expected: Any) -> NoReturn:
        """Refuse the file."""
        raise self.graph.error(f'{where}: found {found}, expected {expected}')

    def expect(self, where: Any, what: str, found: Any, expected: Any) -> None:
        """Refuse the file when two values differ."""
        if found != expected:
            self.fail(f'{where}: {what}', found, expected)

    def user(self, tensor: str, op: str, where: str, *, index: int | None = None,
             optional: bool = False) -> Node | None:
        """Return the one node with operator ``op`` that computes with ``tensor``."""
        users = self.graph.users(tensor)
        nodes = list(dict.fromkeys(node for node, at in users
                                   if node.op == op and index in (None, at)))
        if optional and not nodes:
            return None
        if len(nodes) != 1:
            found = ', '.join(sorted(node.op for node, _ in users)) or 'nothing'
            self.fail(f'{where}: after {tensor!r}', found, f'one {op}')
        return nodes[0]

    def result(self, tensor: str, op: str, where: str) -> str:
        """Return the output of the one node with operator ``op`` behind ``tensor``."""
        return self.user(tensor, op, where).outputs[0]

    def maker(self, tensor: str, op: str, where: str) -> Node:
        """Return the node that computes ``tensor``, which must have operator ``op``."""
        source = self.graph.source(tensor)
        node = self.graph.producer(source)
        if node is None or node.op != op:
            self.fail(f'{where}: {source!r}', node or 'no node that computes it', op)
        return node

    def sources(self, node: Node) -> tuple[str, ...]:
        """Return the inputs of a node, each without what only changes its layout."""
        return tuple(self.graph.source(name) for name in node.inputs)

    def partner(self, node: Node, tensor: str) -> str:
        """Return the operand of a node of two operands that is not ``tensor``."""
        a, b = self.sources(node)
        source = self.graph.source(tensor)
        if source not in (a, b):
            self.fail(node, f'operands {a!r} and {b!r}', f'{source!r} among them')
        return b if a == source else a

    def number(self, tensor: str) -> float | int | None:
        """Return a constant of one element, None for anything else."""
        value = self.graph.constant(self.graph.source(tensor))
        return value.item() if value is not None and value.size == 1 else None

    def numbers(self, node: Node, index: int) -> list[int] | None:
        """Return an input as a list of integers, None when it is computed or absent."""
        if index >= len(node.inputs) or not node.inputs[index]:
            return None
        value = self.graph.constant(node.inputs[index])
        if value is None or value.ndim > 1 or value.dtype.kind != 'i':
            return None
        return value.reshape(-1).tolist()

    def attribute(self, node: Node, name: str, expected: Any, default: Any = None) -> None:
        """Check an attribute; ``default`` is what a missing one means."""
        found = node.attributes.get(name, default)
        if isinstance(expected, float):
            if not (isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-6)):
                self.fail(f'{node}: {name}', found, expected)
        else:
            self.expect(node, name, found, expected)

    def axis(self, node: Node, rank: int, expected: int) -> None:
        """Check a node's attribute ``axis``, which may count from the end."""
        axis = node.attributes.get('axis', 0)
        if axis not in (expected, expected - rank):
            self.fail(f'{node}: axis', axis, expected)

    def weight(self, tensor: str, where: Any, shape: Sequence[int | None]) -> np.ndarray:
        """Return a stored tensor as float32; None in ``shape`` stands for any size."""
        array = self.graph.constant(tensor)
        if array is None:
            self.fail(where, f'{tensor!r}, which is not stored', 'stored weights')
        if array.dtype not in (np.float32, np.float16):
            self.fail(f'{where}: {tensor!r}', array.dtype, 'float32 or float16')
        fits = array.ndim == len(shape) and all(
            size in (None, found) and found > 0
            for size, found in zip(shape, array.shape, strict=True))
        if not fits:
            expected = [size or 'any' for size in shape]
            self.fail(f'{where}: shape of {tensor!r}', list(array.shape), expected)
        array = array.astype(np.float32)
        if not np.isfinite(array).all():
            self.fail(f'{where}: {tensor!r}', 'a value that is no finite number', 'numbers')
        return array


def _parse(path: Path) -> onnx.ModelProto:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ArtifactError(f'{path}: found {size} bytes, expected at most {_MOST_BYTES}')
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f'{path}: cannot be read: {error.strerror}') from None
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError:
        raise ArtifactError(f'{path}: no ONNX file, or one cut off or damaged ({size} bytes)'
                            ) from None


def _comparable(value: Any) -> str:
    """Return what stands for an attribute's value in comparisons."""
    if not isinstance(value, onnx.TensorProto):
        return repr(value)
    data = value.SerializeToString(deterministic=True)
    return repr(data) if len(data) <= _MOST_BYTES_COMPARED else str(id(value))


def _from_typed(values: Any, dtype: np.dtype) -> np.ndarray:
    if dtype == np.float16:  # the bit patterns, one in each integer
        return np.array(values, np.int64).astype(np.uint16).view(dtype)
    return np.array(values, dtype)
