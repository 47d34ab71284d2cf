"""Walks share what plans have in common at their start, and nothing else: the same bits with and without, in bounds."""

import numpy as np
import onnx
import pytest

import planned
from planned import Kit
from quantsieve.model.execute import Executor
from quantsieve.model.walks import Walks
from quantsieve.plan import Plan
from quantsieve.repair import correct_along
from quantsieve.simulate import Simulation

PLANS = 4
ROOM = 1 << 30  # for everything


@pytest.fixture(scope="module", params=["convolutions", "tokens", "demo"])
def kit(request: pytest.FixtureRequest) -> Kit:
    return planned.demo(16) if request.param == "demo" else planned.KITS[request.param]()


def plans(kit: Kit) -> list[Plan]:
    """Plans of which each shares a start with others: the first layers of one, the last of another."""
    names, drawn = list(kit.options.schemes), [kit.random_plan(seed).schemes for seed in range(PLANS // 2)]
    half = len(names) // 2
    mixed = [
        {n: scheme for i, n in enumerate(names) if (scheme := (a if i < half else b).get(n))}
        for a, b in zip(drawn, drawn[1:] + drawn[:1], strict=True)
    ]
    alike = [kit.plan(scheme=scheme) for scheme in ("int8", "int8-channel")]  # they round the same tensors
    # Each layer quantized without those behind it: a Gemm or MatMul rounds its output for a quantized reader alone.
    heads = [kit.plan(*names[:count]) for count in range(1, len(names))]
    return [*(Plan(dict(schemes)) for schemes in (*drawn, *mixed)), *alike, *heads[-4:]]


def walked(kit: Kit, plan: Plan, correction: Walks, scan: Walks) -> bytes:
    """All bits of the corrections and of the simulated outputs."""
    parts = correct_along(kit.parts(), plan, correction)
    shifts = {name: shift for found in parts.corrections.shifts.values() for name, shift in found.items()}
    arrays = [shifts[n] for n in sorted(shifts)]
    for made in (parts, kit.parts()):  # corrected and not
        outputs = Simulation(kit.executor, made, plan).walk(scan)[0]
        arrays += [outputs[o.name].numpy() for o in kit.graph.outputs]
    return b"".join(array.tobytes() for array in arrays)


def fresh(kit: Kit, *max_bytes: int) -> tuple[Walks, Walks]:
    """Walks on all samples in two batches, and on the first half alone."""
    count = len(next(iter(kit.feeds.values()))) // 2
    halves = [{k: a[part] for k, a in kit.feeds.items()} for part in (slice(0, count), slice(count, None))]
    return Walks(kit.executor, halves, max_bytes[0]), Walks(kit.executor, halves[:1], max_bytes[-1])


@pytest.mark.parametrize("share", [PLANS, 1, 0.3, 0.03])
def test_a_shared_walk_gives_the_bits_of_a_walk_of_its_own(kit: Kit, share: float) -> None:
    """share: of what one plan's steps take, how much is kept."""
    wanted = [walked(kit, plan, *fresh(kit, 0)) for plan in plans(kit)]
    one = fresh(kit, ROOM)
    walked(kit, plans(kit)[0], *one)
    limits = [int(share * walks.kept_bytes) for walks in one]
    shared = fresh(kit, *limits)
    for _ in range(2):
        for plan, bits in zip(plans(kit), wanted, strict=True):
            assert walked(kit, plan, *shared) == bits
            assert all(held(walks) == walks.kept_bytes <= limit for walks, limit in zip(shared, limits, strict=True))


def held(walks: Walks) -> int:
    """Bytes of the made values of all steps behind the start."""
    found, waiting = 0, [*walks.start.following.values()]
    while waiting:
        step = waiting.pop()
        found += sum(map(walks.executor.num_bytes, step.made))
        waiting += step.following.values()
    return found


def test_a_plan_that_was_walked_runs_nothing_again(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = fresh(kit, ROOM)
    bits = [walked(kit, plan, *shared) for plan in plans(kit)]
    monkeypatch.delattr(Executor, "made")
    assert [walked(kit, plan, *shared) for plan in plans(kit)] == bits


def test_a_plan_that_ends_differently_runs_only_the_end(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [x.name for x in kit.structure.quantizable if x.name in kit.options.schemes]
    scan = fresh(kit, ROOM)[1]
    Simulation(kit.executor, kit.parts(), kit.plan()).walk(scan)
    ran = []
    real = Executor.made
    monkeypatch.setattr(Executor, "made", lambda self, index, *rest: (ran.append(index), real(self, index, *rest))[1])
    Simulation(kit.executor, kit.parts(), kit.plan(*names[:-1])).walk(scan)
    steps = [layer.name if layer is not None else "" for layer in kit.executor.steps]
    assert 0 < len(ran) < len(steps) and steps.index(names[-1]) in ran


def test_a_value_that_only_one_plan_rounds_is_not_shared() -> None:
    """A MatMul under int8 gives float, and is rounded for a quantized reader alone."""
    draw, node, value = np.random.default_rng(0), planned.node, onnx.helper.make_tensor_value_info
    weights = [onnx.numpy_helper.from_array(draw.standard_normal((6, 6)).astype(np.float32), n) for n in ("v", "w")]
    nodes = [node("MatMul", ["x", "v"], ["m"], name="first"), node("MatMul", ["m", "w"], ["y"], name="second")]
    ends = [[value(name, onnx.TensorProto.FLOAT, ["n", 6])] for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "g", *ends, weights)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    kit = planned.kit_of(model, {"x": draw.standard_normal((8, 6)).astype(np.float32)})
    shared = fresh(kit, ROOM)
    for plan in (kit.plan("first"), kit.plan("first", "second")):
        assert walked(kit, plan, *shared) == walked(kit, plan, *fresh(kit, 0))
