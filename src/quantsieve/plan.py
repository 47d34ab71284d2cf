"""Plans: a scheme for every layer, and what follows from it for every tensor.

The rule: the output of a quantized layer is rounded for every reader,
since the integer kernel exists only then (Gemm and MatMul can give float and are rounded only for a quantized reader);
a quantized layer rounds what it reads; a float reader of a float producer reads the unrounded value. A layer whose
weights alone are quantized rounds no tensor, one that finds its ranges when it runs only what it reads. Where a layer
reads in another format than its producer rounds in, it rounds what the producer gives once more. Simulation and writer
both follow `Placement`, so they cannot disagree on where rounding happens.
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quantsieve.calibrate import Calibration
from quantsieve.errors import UsageError
from quantsieve.model.execute import OWN_RANGE
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
EQUALIZED = "equalization"  # another, of the model that is quantized: see model/equalize.py


class Rounded(NamedTuple):
    """A tensor, by its root, in an activation format."""

    root: str
    form: str


class Read(NamedTuple):
    """A value that a layer reads rounded; root: of its tensor."""

    name: str
    root: str
    form: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a plan rounds. outputs: by root that is rounded behind its producer, for every reader, the format.
    reads: by layer, what this layer alone reads rounded, on top of what `outputs` says."""

    outputs: Mapping[str, str]
    reads: Mapping[str, tuple[Read, ...]]

    @property
    def rounded(self) -> tuple[Rounded, ...]:
        """Every tensor that is rounded somewhere, once a format."""
        outputs = [Rounded(root, form) for root, form in self.outputs.items()]
        reads = [Rounded(read.root, read.form) for found in self.reads.values() for read in found]
        return tuple(dict.fromkeys([*outputs, *reads]))


def place(graph: Graph, structure: Structure, plan: Plan, schemes: Mapping[str, Scheme]) -> Placement:
    """Where `plan` rounds activations. schemes: by name, those of the plan."""
    makers = {layer.name: layer for layer in structure.quantizable}
    forms = {name: _form(plan, name, schemes) for name in makers}
    outputs = {
        tensor.root: form
        for tensor in structure.tensors
        if (form := forms.get(tensor.producer or "")) not in (None, *OWN_RANGE)
        and (_is_forced(makers, tensor) or any(forms.get(reader) == form for reader in tensor.readers))
    }
    reads = {}
    for layer in structure.quantizable:
        form = forms[layer.name]
        if form is not None:
            pairs = ((name, layout_root(graph, name)) for name in layer.inputs)
            own = tuple(Read(name, root, form) for name, root in pairs if outputs.get(root) != form)
            if own:
                reads[layer.name] = own
    return Placement(outputs, reads)


def _form(plan: Plan, layer: str, schemes: Mapping[str, Scheme]) -> str | None:
    return schemes[plan.scheme(layer)].activation if plan.is_quantized(layer) else None


def _is_forced(makers: Mapping[str, Layer], tensor: Tensor) -> bool:
    producer = makers[tensor.producer or ""]
    return producer.rounds_output and producer.output == tensor.root


def forced_tensors(graph: Graph, layer: Layer, scheme: Scheme) -> tuple[Rounded, ...]:
    """The tensors that a layer switches on, with their format, when it is quantized under the scheme."""
    form = scheme.activation
    if form is None:
        return ()
    roots = [layout_root(graph, name) for name in layer.inputs]
    is_forced = layer.rounds_output and form not in OWN_RANGE
    return tuple(Rounded(root, form) for root in dict.fromkeys([*roots, *([layer.output] * is_forced)]))


@dataclass(frozen=True, slots=True)
class Options:
    """schemes: by layer, those it may have besides float. refusals: by layer, why it may have none. forms: by scheme,
    its activation format."""

    schemes: Mapping[str, tuple[str, ...]]
    refusals: Mapping[str, str]
    forms: Mapping[str, str | None]


KEPT_BY = "kept float by "  # so begins a refusal that is the user's
KEPT = f"{KEPT_BY}scan.json"


def find_options(
    graph: Graph,
    structure: Structure,
    calibration: Calibration,
    schemes: Sequence[Scheme],
    keep_float: Collection[str] = (),
    by_hand: Mapping[str, str] | None = None,
) -> Options:
    """What each layer may be given. A layer without weights gets the first scheme of each activation format that takes
    it: they round alike.

    keep_float: names of layers that are never quantized, whatever could be done. Raises UsageError for unknown ones.
    by_hand: more of them, by name the reason (see `selection`).
    """
    check_layers(keep_float, structure)
    allowed: dict[str, tuple[str, ...]] = {}
    refusals: dict[str, str] = {}
    for layer in structure.layers:
        reasons = {scheme.name: _refusal(graph, layer, calibration, scheme) for scheme in schemes}
        taken = [scheme for scheme in schemes if reasons[scheme.name] is None]
        if layer.weight is None:
            taken = [s for i, s in enumerate(taken) if s.activation not in [t.activation for t in taken[:i]]]
        if not taken:
            refusals[layer.name] = next(filter(None, reasons.values()), "no scheme was asked for that takes it")
        elif by_hand and layer.name in by_hand:
            refusals[layer.name] = by_hand[layer.name]
        elif layer.name in keep_float:
            refusals[layer.name] = KEPT
        else:
            allowed[layer.name] = tuple(scheme.name for scheme in taken)
    return Options(allowed, refusals, {scheme.name: scheme.activation for scheme in schemes})


def _refusal(graph: Graph, layer: Layer, calibration: Calibration, scheme: Scheme) -> str | None:
    """Why the layer cannot have the scheme on these samples."""
    reason = scheme.refusal(layer, graph.opset)
    if reason is not None or scheme.activation is None or not layer.is_quantizable:
        return reason
    roots = [layout_root(graph, name) for name in layer.inputs] + [layer.output]
    return next((found for root in roots if (found := calibration.refusal(root)) is not None), None)


def nothing_to_quantize(options: Options) -> str:
    """What is said of a model without any layer that can be quantized."""
    reasons = list(dict.fromkeys(options.refusals.values()))
    why = f" ({'; '.join(reasons[:3])}{'; ...' if len(reasons) > 3 else ''})" if reasons else ""
    return f"no layer of this model can be quantized{why}: the model is handed on as it is"


def full_plan(options: Options, scheme: str) -> Plan:
    """Every layer that can be quantized: with `scheme` where it is allowed, elsewhere with the layer's first scheme of
    the same activation format, or else with its weights alone. A layer that has none of these stays float."""
    chosen = {}
    for layer, found in options.schemes.items():
        alike = [name for name in found if options.forms[name] == options.forms[scheme]]
        alike += [name for name in found if options.forms[name] is None]
        if alike:
            chosen[layer] = scheme if scheme in found else alike[0]
    return Plan(chosen)


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
                nearest(layer, [*options.schemes, *options.refusals]),
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
            "keep_float for layers of the model", f"{unknown[0]!r}{more}, which it lacks", nearest(unknown[0], known)
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names that are most like it, as a sentence."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"Nearest names: {', '.join(near)}." if near else "`quantsieve inspect` lists the names."
