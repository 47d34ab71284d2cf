"""What a model is made of, before anything is measured: its file, its interface, its operators, its layers.

Needs no data and changes nothing. Layers are those of the prepared model, under the names that plans and
reports use; operators are counted in the user's own file. A model that onnxruntime refuses is shown all the
same, with a note.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx_ir as ir

from quantsieve import schemes
from quantsieve.errors import UnsupportedModel
from quantsieve.model.graph import Graph, GraphValue, inner_constants
from quantsieve.model.load import file_bytes, open_model
from quantsieve.model.prepare import outline, prepare
from quantsieve.model.units import WEIGHTED, Layer, find_structure, reads
from quantsieve.schemes import Scheme

SCHEMA = 1  # of the JSON document: raise it when a name or a meaning in it changes

# Shapes, axes and indices; numbers of other types are what the model was trained to hold.
_NOT_PARAMETERS = (ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.STRING)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer. Weights that several layers share count at each of them."""

    name: str
    op_type: str  # with its domain unless that is ONNX's own
    num_params: int  # elements of its constants of rank 1 or more; shapes, axes and indices do not count
    weight_bytes: int  # of the same constants
    output_shape: tuple[int | None, ...] | None  # None: a dimension, or the rank, known only when it runs
    macs: int | None  # multiply-adds of one sample; None where a dimension is unknown or the operator is no product
    schemes: tuple[str, ...]  # that it can have besides float
    refusal: str | None  # why it can have none


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts of one model file."""

    path: str
    size_bytes: int  # with external data
    opset: int
    opsets: tuple[tuple[str, int], ...]  # of the other operator domains
    ir_version: int
    producer: str
    inputs: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]
    op_counts: tuple[tuple[str, int], ...]  # most frequent first, subgraphs included
    layers: tuple[LayerFacts, ...]  # in graph order
    num_params: int  # each constant once
    weight_bytes: int  # each constant once
    macs: int  # of one sample, over the layers where they are known
    notes: tuple[str, ...]

    @property
    def quantizable(self) -> tuple[LayerFacts, ...]:
        return tuple(layer for layer in self.layers if layer.schemes)

    def document(self) -> dict[str, object]:
        """All facts as JSON values, with the number of their schema."""
        facts = dataclasses.asdict(self)
        facts["op_counts"] = dict(self.op_counts)
        facts["opsets"] = {"ai.onnx": self.opset, **dict(self.opsets)}
        facts["num_layers"] = len(self.layers)
        facts["num_quantizable"] = len(self.quantizable)
        return {"schema": SCHEMA, "kind": "inspection", **facts}


def inspect(path: str | Path) -> Inspection:
    """The facts of the model in `path`; it is read, not run.

    Raises InputError when there is no readable ONNX file, UnsupportedModel when it has no graph or is 2 GiB.
    """
    with TemporaryDirectory(prefix="quantsieve-") as folder:
        return _inspect(Path(path), Path(folder))


def _inspect(path: Path, folder: Path) -> Inspection:
    """folder: for large constants, instead of memory."""
    original = open_model(path)
    size_bytes = file_bytes(path)
    given = Graph(original)
    counts = _count_ops(original)
    prepared, notes = _prepare(original, size_bytes, folder)
    graph = Graph(prepared)
    known = schemes.discover()
    layers = tuple(_layer_facts(graph, layer, known) for layer in find_structure(graph).layers)
    constants = _parameters(
        [*prepared.graph.initializers.values(), *(v for n in graph.nodes for v in inner_constants(n))]
    )
    open_sizes = sum(layer.op_type in WEIGHTED and layer.macs is None for layer in layers)
    if open_sizes:
        notes = (*notes, f"multiply-adds unknown where sizes depend on the input (layers: {open_sizes})")
    if not any(layer.schemes for layer in layers):
        notes = (*notes, "no layer of this model can be quantized")
    return Inspection(
        path=str(path),
        size_bytes=size_bytes,
        opset=given.opset,
        opsets=tuple(sorted((d, v) for d, v in original.opset_imports.items() if d not in ("", "ai.onnx"))),
        ir_version=original.ir_version or 0,
        producer=" ".join(text for text in (original.producer_name, original.producer_version) if text),
        inputs=tuple(value for value in given.inputs if not given.is_constant(value.name)),
        outputs=given.outputs,
        op_counts=counts,
        layers=layers,
        num_params=sum(value.size for value in constants),
        weight_bytes=sum(value.nbytes for value in constants),
        macs=sum(layer.macs or 0 for layer in layers),
        notes=notes,
    )


def _prepare(model: ir.Model, size_bytes: int, folder: Path) -> tuple[ir.Model, tuple[str, ...]]:
    try:
        ready, prepared = prepare(model, (), size_bytes, folder)
    except UnsupportedModel as error:
        return outline(model), (f"this model cannot be tuned: {error}",)
    return ready, prepared.notes


def _layer_facts(graph: Graph, layer: Layer, known: tuple[Scheme, ...]) -> LayerFacts:
    reasons = [(scheme.name, scheme.refusal(layer, graph.opset)) for scheme in known]
    allowed = tuple(name for name, reason in reasons if reason is None)
    outer = [graph.model.graph.initializers[name] for name in reads(graph, layer) if graph.is_constant(name)]
    inner = [value for name in layer.nodes for value in inner_constants(graph.by_name[name])]
    constants = _parameters([*outer, *inner])
    node = graph.by_name[layer.nodes[0]]
    return LayerFacts(
        name=layer.name,
        op_type=_op_name(node),
        num_params=sum(tensor.size for tensor in constants),
        weight_bytes=sum(tensor.nbytes for tensor in constants),
        output_shape=layer.output_shape,
        macs=layer.macs if layer.op_type in WEIGHTED and layer.macs else None,
        schemes=allowed,
        refusal=None if allowed else next((reason for _, reason in reasons if reason), "no scheme is known"),
    )


def _parameters(values: list[ir.Value]) -> list[ir.TensorProtocol]:
    tensors = [value.const_value for value in values if value.const_value is not None]
    return [tensor for tensor in tensors if tensor.dtype not in _NOT_PARAMETERS and len(tensor.shape)]


def _count_ops(model: ir.Model) -> tuple[tuple[str, int], ...]:
    counts = Counter(_op_name(node) for node in model.graph.all_nodes())
    return tuple(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _op_name(node: ir.Node) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
