"""The user's file becomes a clean float model; a step that changes the outputs is undone.

Steps, in order: inline functions, lift constants to initializers, drop initializers from the inputs, lift the opset to
what the schemes need, fold constants, fold BatchNorm, infer shapes, name every node. Each is a library's pass
(onnx-ir, onnxscript), and none is trusted: after each the model is run on real samples and compared with the original
(onnxruntime, optimizations off); a step that fails or moves an output by more than 1e-5 of its range is taken back
and leaves a note. Names of nodes that the user gave are kept; nodes without a usable name get one from their output.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxruntime
import onnxscript.optimizer
import onnxscript.rewriter
from onnxscript.rewriter.rules.common import _fuse_batchnorm

from quantsieve.errors import InputError, UnsupportedModel
from quantsieve.model import aside

VERSION = 1
MIN_OPSET = 13  # per-channel QuantizeLinear; DequantizeLinear with an axis
RELATIVE_TOLERANCE = 1e-5  # of the output's range, invariant 2

Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What prepare did. The model itself is a file beside this fact."""

    steps: tuple[str, ...]
    notes: tuple[str, ...]
    opset: int
    original_opset: int
    original_bytes: int  # with external data
    given_names: tuple[tuple[str, str], ...]  # (name in the prepared model, name the user gave), where they differ


def prepare(
    model: ir.Model, feeds: Sequence[Feeds], size_bytes: int, folder: Path | None = None
) -> tuple[ir.Model, Prepared]:
    """A clean float model that computes the same, and what was done.

    feeds: a few real samples, each a whole feed; outputs are compared on them. With none, only structure is checked.
    folder: takes large constants out of memory, those of `model` too, and is needed as long as the result is.
    Raises UnsupportedModel when onnxruntime cannot run the original at all, InputError when it gives NaN or infinity.
    """
    original_opset = model.opset_imports.get("", 1)
    model = _apart(model, folder)
    renamed = _name_nodes(model)  # first of all: onnxruntime refuses a model in which two nodes share a name
    reference = _reference(model, feeds)
    steps, notes = [], []
    for name, step in _STEPS:
        candidate = aside.copied(model)
        try:
            changed = step(candidate)
        except Exception as error:  # a library's pass may fail in any way; the model without it is still good
            notes.append(f"{name} was left out: it failed with {type(error).__name__}: {str(error)[:160]}")
            continue
        if not changed:
            continue
        if folder is not None:
            candidate = aside.move_out(candidate, folder)
        refusal = _difference(candidate, feeds, reference)
        if refusal:
            notes.append(f"{name} was left out: {refusal}")
            continue
        model = candidate
        steps.append(name)
    given = _names_given(model, renamed, _name_nodes(model))
    opset = model.opset_imports.get("", 1)
    if opset < MIN_OPSET:
        notes.append(f"opset {opset} could not be lifted to {MIN_OPSET}: per-channel schemes cannot be written")
    return model, Prepared(tuple(steps), tuple(notes), opset, original_opset, size_bytes, given)


def outline(model: ir.Model) -> ir.Model:
    """A copy with constants lifted, shapes inferred and nodes named, nothing compared: for a model that cannot run.

    It shows the layers; nothing may be computed with it.
    """
    model = aside.copied(model)
    for step in (_inline, _lift_constants, _drop_overridable, _infer_shapes):
        candidate = aside.copied(model)
        # A library's pass may fail in any way on a model that is broken; what it would have added is then not shown.
        with contextlib.suppress(Exception):
            step(candidate)
            model = candidate
    _name_nodes(model)
    return model


def plain_session(model: ir.Model | Path) -> onnxruntime.InferenceSession:
    """A session with all optimizations off: the reference that everything is compared with."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if isinstance(model, Path):
        return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return aside.open_session(model, options)


def _apart(model: ir.Model, folder: Path | None) -> ir.Model:
    return aside.copied(model) if folder is None else aside.move_out(model, folder)


def _reference(model: ir.Model, feeds: Sequence[Feeds]) -> list[list[np.ndarray]]:
    try:
        session = plain_session(model)
        outputs = [session.run(None, dict(feed)) for feed in feeds]
    except Exception as error:
        raise UnsupportedModel(
            "a float model that onnxruntime can run",
            f"one that fails before any quantization: {str(error).strip().splitlines()[0][:300]}",
            "Check the model and its inputs with onnxruntime alone first.",
        ) from error
    names = [output.name for output in session.get_outputs()]
    for index, values in enumerate(outputs):
        for name, value in zip(names, values, strict=True):
            if _is_float(value) and not np.isfinite(value).all():
                raise InputError(
                    "finite outputs of the float model",
                    f"NaN or infinity in output {name} on sample {index}",
                    "Check the preprocessing (mean, std, layout) and the model before quantizing it.",
                )
    return outputs


def _difference(model: ir.Model, feeds: Sequence[Feeds], reference: list[list[np.ndarray]]) -> str | None:
    """Why `model` does not compute the reference, or None when it does."""
    try:
        session = plain_session(model)
        outputs = [session.run(None, dict(feed)) for feed in feeds]
    except Exception as error:
        return f"the model no longer runs ({str(error).strip().splitlines()[0][:160]})"
    for values, expected in zip(outputs, reference, strict=True):
        for value, wanted in zip(values, expected, strict=True):
            gap = output_gap(value, wanted)
            if gap > RELATIVE_TOLERANCE:
                return f"an output moved by {gap:.1e} of its range"
    return None


def largest_gap(first: Path, second: Path, feeds: Iterable[Feeds]) -> float:
    """Largest difference between the outputs of two models, relative to the range of the first's on the same feeds;
    infinite when they cannot be compared. onnxruntime, optimizations off."""
    sessions = [plain_session(path) for path in (first, second)]
    gap = 0.0
    for feed in feeds:
        wanted, found = (session.run(None, dict(feed)) for session in sessions)
        gap = max([gap, *(output_gap(b, a) for a, b in zip(wanted, found, strict=True))])
    return gap


def output_gap(value: object, wanted: object) -> float:
    """Largest difference between two outputs, relative to the range of `wanted`; inf when they cannot be compared."""
    if not isinstance(value, np.ndarray) or not isinstance(wanted, np.ndarray):
        return 0.0 if type(value) is type(wanted) else np.inf
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return np.inf
    if not _is_float(value):
        return 0.0 if np.array_equal(value, wanted) else np.inf
    if wanted.size == 0:
        return 0.0
    spread = float(np.ptp(wanted)) or float(np.abs(wanted).max()) or 1.0
    gap = float(np.abs(value.astype(np.float64) - wanted).max()) / spread
    return gap if np.isfinite(gap) else np.inf


def _is_float(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _inline(model: ir.Model) -> bool:
    return bool(model.functions) and passes.InlinePass()(model).modified


def _lift_constants(model: ir.Model) -> bool:
    modified = passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model).modified
    return _allow_plain_initializers(model, modified)


def _drop_overridable(model: ir.Model) -> bool:
    return _allow_plain_initializers(model, passes.RemoveInitializersFromInputsPass()(model).modified)


def _allow_plain_initializers(model: ir.Model, modified: bool) -> bool:
    """Before IR version 4 every initializer had to be an input too, and the version converter still insists."""
    if modified:
        model.ir_version = max(model.ir_version or 0, 4)
    return modified


def _lift_opset(model: ir.Model) -> bool:
    if model.opset_imports.get("", 1) >= MIN_OPSET:
        return False
    converted = onnx.version_converter.convert_version(ir.to_proto(model), MIN_OPSET)
    lifted = aside.from_proto(converted, aside.folder_of(model))
    # The converter turns attributes (limits of Clip, pads, axes) into Constant nodes.
    _lift_constants(lifted)
    _adopt(model, lifted)
    return True


def _fold_constants(model: ir.Model) -> bool:
    modified = bool(onnxscript.optimizer.fold_constants(model, onnx_shape_inference=False).modified)
    if modified:
        _lift_constants(model)  # what was folded may have become a Constant node
    return modified


def _fold_batchnorm(model: ir.Model) -> bool:
    if not any(node.op_type == "BatchNormalization" for node in model.graph):
        return False
    return bool(_fuse_batchnorm.rules.apply_to_model(model))


def _infer_shapes(model: ir.Model) -> bool:
    return passes.ShapeInferencePass()(model).modified


def _remove_unused(model: ir.Model) -> bool:
    return passes.RemoveUnusedNodesPass()(model).modified


def _adopt(model: ir.Model, other: ir.Model) -> None:
    """Give `model` the content of `other` (a pass that returns a new model instead of changing its own)."""
    model.graph = other.graph
    model.ir_version = max(model.ir_version or 0, other.ir_version or 0)


_STEPS: tuple[tuple[str, Callable[[ir.Model], bool]], ...] = (
    ("inlining functions", _inline),
    ("lifting constants to initializers", _lift_constants),
    ("making overridable initializers constant", _drop_overridable),
    (f"lifting the opset to {MIN_OPSET}", _lift_opset),
    ("folding constants", _fold_constants),
    ("folding BatchNormalization", _fold_batchnorm),
    ("inferring shapes", _infer_shapes),
    ("removing unused nodes", _remove_unused),
)


def _names_given(
    model: ir.Model, first: tuple[tuple[str, str], ...], last: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """(name now, name the user gave) of the nodes that are left, from two rounds of naming."""
    originals, moved = dict(first), dict(last)
    names = [node.name or "" for node in model.graph]
    traced = [(name, moved.get(name, name)) for name in names]
    found = [(name, originals.get(middle, middle)) for name, middle in traced]
    return tuple((name, given) for name, given in found if name != given)


def _name_nodes(model: ir.Model) -> tuple[tuple[str, str], ...]:
    """Give every node a name of its own; returns (new, given) where a given name had to change."""
    seen: set[str] = set()
    changed = []
    for node in model.graph:
        given = node.name or ""
        base = given or next((value.name for value in node.outputs if value.name), node.op_type)
        name, count = base, 1
        while name in seen:
            count += 1
            name = f"{base}#{count}"
        if given and name != given:
            changed.append((name, given))
        seen.add(name)
        node.name = name
    return tuple(changed)
