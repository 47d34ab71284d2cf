"""Runs as they come out of `tune`, made up from a seed: an EfficientNet-like model of 66 layers, 375 final
samples."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from quantsieve.evaluation import Failed, Measured
from quantsieve.front import Candidate, find_front, recommend
from quantsieve.plan import Plan
from quantsieve.reports.summary import LayerFacts, Prediction, Price, Splits, Summary
from quantsieve.targets.timing import summarize

FINAL, SEARCH = 375, 125
FLOAT_BYTES, FULL_BYTES = 18_559_665, 4_871_034
SATURATION = (
    "Integer kernels of this processor lose large sums of int8 weights (0.504 of the exact sum), so weights "
    "are stored as uint8, which is exact here; on processors with VNNI and on ARM the file is as good."
)


def make_layers() -> tuple[LayerFacts, ...]:
    layers = [LayerFacts("stem/conv", "Conv", 896, 3584, 10_838_016, None)]
    for block in range(16):
        width = 16 + 20 * block
        layers += [
            _conv(f"blocks.{block}/expand/conv", width * width * 6, 40_000_000 // (block + 1)),
            _conv(f"blocks.{block}/depthwise/conv", width * 6 * 9, 5_000_000 // (block + 1)),
            _conv(f"blocks.{block}/project/conv", width * width * 6, 40_000_000 // (block + 1)),
            LayerFacts(f"blocks.{block}/add", "Add", 0, 0, 0, None),
        ]
    layers += [
        LayerFacts("pool", "GlobalAveragePool", 0, 0, 0, None),
        LayerFacts("classifier", "Gemm", 1_281_000, 5_124_000, 1_280_000, None),
        LayerFacts("probabilities", "Softmax", 0, 0, 0, "no int8 scheme for Softmax"),
    ]
    return tuple(layers)


def _conv(name: str, params: int, macs: int) -> LayerFacts:
    return LayerFacts(name, "Conv", params, 4 * params, macs, None)


def make_prices(layers: tuple[LayerFacts, ...]) -> tuple[Price, ...]:
    random = np.random.default_rng(5)
    prices = []
    for layer in layers:
        if layer.refusal is None:
            value = float(random.lognormal(-8, 1.2)) * (8 if "depthwise" in layer.name else 1)
            prices.append(Price(layer.name, "int8", value, 0.8 * value, 1.2 * value))
            if layer.num_params:
                prices.append(Price(layer.name, "int8-channel", value / 6, 0.8 * value / 6, 1.2 * value / 6))
    return tuple(prices)


def measured(split: str, disagreeing: int, mse: float) -> Measured:
    """A classifier that float answers as itself: metric 'agreement'."""
    number = FINAL if split == "final" else SEARCH
    agreement = np.ones(number)
    agreement[:disagreeing] = 0
    errors = mse * np.random.default_rng(disagreeing).lognormal(-0.125, 0.5, number)
    decibel = float("inf") if mse == 0 else float(-10 * np.log10(mse))
    return Measured(split, "agreement", agreement, np.ones(number), agreement, errors, decibel, 0)


def plan_keeping(layers: tuple[LayerFacts, ...], kept: set[str], scheme: str = "int8") -> Plan:
    return Plan({layer.name: scheme for layer in layers if layer.refusal is None and layer.name not in kept})


def make_candidate(
    origin: str, plan: Plan, size: int, disagreeing: int, ms: float, layers: tuple[LayerFacts, ...]
) -> Candidate:
    mse = 0.004 * disagreeing**1.2 if plan.quantized() else 0.0
    noise = np.random.default_rng(size).normal(0, 0.02, 40)
    rounds = tuple(float(ms * (1 + n)) for n in noise)
    ran = {layer.name: "int8" if plan.is_quantized(layer.name) else "float" for layer in layers}
    return Candidate(
        id=plan.id,
        origin=origin,
        plan=plan,
        size_bytes=size,
        search=measured("search", disagreeing // 3, mse),
        final=measured("final", disagreeing, mse),
        latency=summarize(rounds),
        latency_ms=rounds,
        predicted_mse=0.95 * mse,
        simulated_mse=0.97 * mse,
        measured_mse=mse,
        ran=ran,
        notes=(),
    )


def make_candidates(layers: tuple[LayerFacts, ...], prices: tuple[Price, ...]) -> tuple[Candidate, ...]:
    costly = [p.layer for p in sorted(prices, key=lambda p: -p.value) if p.scheme == "int8"]
    names = [layer.name for layer in layers if layer.refusal is None]

    def make(origin: str, kept: list[str], size: int, disagreeing: int, ms: float) -> Candidate:
        plan = plan_keeping(layers, set(kept))
        return make_candidate(origin, plan, size, disagreeing, ms, layers)

    float_model = make_candidate("float", Plan({}), FLOAT_BYTES, 0, 21.3, layers)
    failed = make("programme", costly[:30], 9_800_000, 3, 9.0)
    crash = Failed("search", "crash", "run", "SIGSEGV in the worker", "")
    return (
        float_model,
        make("full int8", [], FULL_BYTES, 55, 8.4),
        make("programme", costly[:2], 4_905_000, 17, 8.5),
        make("programme", costly[:5], 4_942_000, 12, 8.6),
        make("programme", costly[:9], 5_081_000, 10, 8.9),
        make("programme", costly[:14], 5_560_000, 6, 9.7),
        make("programme", costly[:24], 7_370_000, 4, 11.9),
        make("programme", costly[:40], 12_100_000, 1, 15.8),
        make("first 3 float", names[:3], 4_960_000, 18, 8.9),
        make("first 9 float", names[:9], 5_180_000, 13, 9.6),
        make("first 21 float", names[:21], 6_900_000, 11, 11.4),
        make("last 2 float", names[-2:], 8_715_000, 52, 8.6),
        make("last 9 float", names[-9:], 11_900_000, 47, 10.4),
        make("ranking, 8 float", costly[1:9], 5_230_000, 14, 9.0),
        make("ranking, 20 float", costly[3:23], 6_880_000, 9, 11.2),
        replace(failed, search=crash, final=None, latency=None, latency_ms=(), measured_mse=None, ran={}),
    )


def make_summary(max_drop: float = 0.03, confident: bool = False, **changes: object) -> Summary:
    """A finished run; `changes` are fields of Summary."""
    layers = make_layers()
    prices = make_prices(layers)
    candidates = make_candidates(layers, prices)
    files: Mapping[str, str] = {c.id: f"plans/{c.id}/model.onnx" for c in candidates}
    summary = Summary(
        model_file="efficientnet_lite0.onnx",
        model_key="5f0c" * 16,
        metric="agreement",
        metric_text="share of samples whose highest-scored class is the float model's",
        data="600 images with labels.csv",
        synthetic=False,
        splits=Splits(100, SEARCH, FINAL),
        seed=0,
        environment={
            "runtime": "onnxruntime 1.32.0",
            "processor": "x86-64 with AVX2, no VNNI",
            "threads": "1",
        },
        saturation=SATURATION,
        layers=layers,
        prices=prices,
        candidates=candidates,
        files=files,
        front=find_front(candidates),
        recommendation=recommend(candidates, max_drop, confident),
        max_drop=max_drop,
        confident=confident,
        float_bytes=FLOAT_BYTES,
        full_bytes=FULL_BYTES,
        schemes=("int8", "int8-channel"),
        settings={"max_trials": 40, "timeout_s": None, "mean": ("127", "127", "127")},
        elapsed_s=312.4,
        stopped="done",
        prediction=Prediction(0.95, 0.97, 9),
        notes=(),
    )
    return replace(summary, **changes)


def make_hard_summary() -> Summary:
    """Synthetic data, budget not met, a file that saturates, stopped early."""
    summary = make_summary(max_drop=0.002, synthetic=True, stopped="timeout")
    full = summary.candidates[1]
    ran = {**full.ran, "classifier": "float", "pool": "gone"}
    note = "The integer kernels of this processor lose large sums of int8 weights."
    changed = replace(full, measured_mse=4.2 * (full.simulated_mse or 1), ran=ran, notes=(note,))
    candidates = (summary.candidates[0], changed, *summary.candidates[2:])
    candidates = tuple(c for c in candidates if c.origin != "programme" or c.size_bytes < 12_000_000)
    return replace(
        summary,
        candidates=candidates,
        front=find_front(candidates),
        recommendation=recommend(candidates, 0.002, False),
        notes=("2 unreadable images were skipped.",),
    )
