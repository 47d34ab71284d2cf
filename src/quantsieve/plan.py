"""Plans: a scheme for every layer, and what follows from it for every tensor.

The rule: the output of a quantized layer is rounded for every reader,
since the integer kernel exists only then (Gemm and MatMul can give float and are rounded only for a quantized reader);
a quantized layer rounds what it reads; a float reader of a float producer reads the unrounded value. Simulation and
writer both follow `Placement`, so they cannot disagree on where rounding happens.
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantsieve.calibrate import Calibration
from quantsieve.errors import UsageError
from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure, Tensor, layout_root
from quantsieve.schemes import FLOAT, Scheme


@dataclass(frozen=True, slots=True)
class Plan:
    """schemes: by layer name; a layer that is not named is float. repairs: what is mended along the whole plan."""

    schemes: Mapping[str, str]
    repairs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Ten hex digits of the content; equal for equal plans."""
        chosen = {layer: scheme for layer, scheme in self.schemes.items() if scheme != FLOAT}
        content = [chosen, list(self.repairs) if chosen else []]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]

    def scheme(self, layer: str) -> str:
        return self.schemes.get(layer, FLOAT)

    def is_quantized(self, layer: str | None) -> bool:
        return layer is not None and self.scheme(layer) != FLOAT

    def quantized(self) -> tuple[str, ...]:
        return tuple(sorted(layer for layer in self.schemes if self.is_quantized(layer)))


BIAS = "bias-correction"  # a repair: see repair.py


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a plan rounds. outputs: roots rounded behind their producer, for every reader.
    reads: by layer, (value, root) pairs that this layer alone reads rounded."""

    outputs: tuple[str, ...]
    reads: Mapping[str, tuple[tuple[str, str], ...]]

    @property
    def roots(self) -> tuple[str, ...]:
        """Every tensor that is rounded somewhere."""
        return tuple(dict.fromkeys([*self.outputs, *(root for pairs in self.reads.values() for _, root in pairs)]))


def place(graph: Graph, structure: Structure, plan: Plan) -> Placement:
    """Where `plan` rounds activations."""
    makers = {layer.name: layer for layer in structure.quantizable}
    outputs = tuple(
        tensor.root
        for tensor in structure.tensors
        if plan.is_quantized(tensor.producer) and _rounds(makers, tensor, plan)
    )
    done = set(outputs)
    reads = {}
    for layer in structure.quantizable:
        if not plan.is_quantized(layer.name):
            continue
        pairs = tuple((name, layout_root(graph, name)) for name in layer.inputs)
        pairs = tuple((name, root) for name, root in pairs if root not in done)
        if pairs:
            reads[layer.name] = pairs
    return Placement(outputs, reads)


def _rounds(makers: Mapping[str, Layer], tensor: Tensor, plan: Plan) -> bool:
    producer = makers.get(tensor.producer or "")
    forced = producer is not None and producer.rounds_output and producer.output == tensor.root
    return forced or any(plan.is_quantized(reader) for reader in tensor.readers)


@dataclass(frozen=True, slots=True)
class Options:
    """schemes: by layer, those it may have besides float. refusals: by layer, why it may have none."""

    schemes: Mapping[str, tuple[str, ...]]
    refusals: Mapping[str, str]


KEPT = "kept float by scan.json"  # a refusal that is the user's


def find_options(
    graph: Graph,
    structure: Structure,
    calibration: Calibration,
    schemes: Sequence[Scheme],
    keep_float: Collection[str] = (),
) -> Options:
    """What each layer may be given. A layer without weights gets the first scheme that takes it: they round alike.

    keep_float: names of layers that are never quantized, whatever could be done. Raises UsageError for unknown ones.
    """
    check_layers(keep_float, structure)
    allowed: dict[str, tuple[str, ...]] = {}
    refusals: dict[str, str] = {}
    for layer in structure.layers:
        reasons = [scheme.refusal(layer, graph.opset) for scheme in schemes]
        taken = [scheme.name for scheme, reason in zip(schemes, reasons, strict=True) if reason is None]
        reason = next((r for r in reasons if r is not None), None) if not taken else None
        if reason is None and layer.is_quantizable:
            roots = [layout_root(graph, name) for name in layer.inputs] + [layer.output]
            reason = next((r for root in roots if (r := calibration.refusal(root)) is not None), None)
        if reason is None and taken and layer.name in keep_float:
            reason = KEPT
        if reason is not None or not taken:
            refusals[layer.name] = reason or "no scheme was asked for that takes it"
        else:
            allowed[layer.name] = tuple(taken) if layer.weight is not None else tuple(taken[:1])
    return Options(allowed, refusals)


def full_plan(options: Options, scheme: str) -> Plan:
    """Every layer that can be quantized, with `scheme` where it is allowed and the layer's first scheme elsewhere."""
    return Plan({n: scheme if scheme in found else found[0] for n, found in options.schemes.items()})


def check_plan(plan: Plan, options: Options) -> None:
    """Raises UsageError when the plan names a layer that does not exist or gives one what it cannot have."""
    for layer, scheme in plan.schemes.items():
        if scheme == FLOAT and (layer in options.schemes or layer in options.refusals):
            continue
        if layer in options.refusals:
            raise UsageError(
                "a plan that can be built",
                f"{scheme} for {layer}: {options.refusals[layer]}",
                "Keep it float.",
            )
        if layer not in options.schemes:
            raise UsageError(
                "a plan over the model's layers",
                f"a layer {layer!r} that it lacks",
                _nearest(layer, [*options.schemes, *options.refusals]),
            )
        if scheme not in options.schemes[layer]:
            known = ", ".join((FLOAT, *options.schemes[layer]))
            raise UsageError(f"one of {known} for {layer}", repr(scheme), "Change the plan.")


def check_layers(keep_float: Collection[str], structure: Structure) -> None:
    """Raises UsageError when a layer that is to be kept float does not exist."""
    known = [layer.name for layer in structure.layers]
    unknown = sorted(set(keep_float) - set(known))
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UsageError(
            "keep_float for layers of the model", f"{unknown[0]!r}{more}, which it lacks", _nearest(unknown[0], known)
        )


def _nearest(layer: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(layer, list(known), n=3)
    return f"Nearest names: {', '.join(near)}." if near else "`quantsieve inspect` lists the names."
