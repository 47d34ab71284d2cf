"""Cross-layer equalization: channels between layers are scaled so that rounding to integers does the least harm.

At a joint (see `joints.py`) channel c of what a layer makes is multiplied by s_c, a power of two, and divided by it in
the weights that read it: the float model computes the same bits, and one scale for a tensor fits its channels better.
With weights W, channel peaks a, mean squares m, and gains H to the outputs of the chain, rounding costs, in 8 bits,

    (max |W_oi| s_o / s_i)^2 / 127^2  sum_o (sum_i m_i s_i^2) H_o / s_o^2    of the weights of a layer, and
    (max s_o a_o)^2 / 255^2  sum_o H_o / s_o^2                               of what it makes.

The sum over both sides of a joint is minimised in log s, one joint after the other, with a power mean for max, and then
rounded. Equal ranges of weights alone (Nagel et al. 2019) spoil activations: on efficientnet_lite0 they left nothing
of the model, on kws_dscnn twice the squared error. Whether a plan gains is for a simulation to say.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import scipy.optimize

from quantsieve.model import aside
from quantsieve.model.execute import Executor
from quantsieve.model.graph import Graph
from quantsieve.model.joints import Joint
from quantsieve.model.units import Structure

VERSION = 1
# Of a Clip's bound over scaled peaks: on 400 unseen samples of mobilenetv2_cifar10 peaks grow by up to 1.8.
HEADROOM = 2.0
LEAST = 2.0**-10  # of a channel's peak and of the largest one's: what calibration hardly saw may well be seen later
MOST = 12.0  # of |log2 s|
SWEEPS = 4
GAIN = 0.9  # of a joint's cost before, that it must at least come down to
_POWER = 24.0  # of the mean that stands for max
_ACTIVATION = (127 / 255) ** 2  # of the cost of activations, where that of weights counts as 1


@dataclass(frozen=True, slots=True)
class Moments:
    """Of values by name, over all samples and places, float64 (channels,): largest absolute value, mean square."""

    peaks: Mapping[str, np.ndarray]
    squares: Mapping[str, np.ndarray]


def measure(
    executor: Executor, joints: Sequence[Joint], batches: Iterable[tuple[Mapping[str, np.ndarray], int]]
) -> Moments:
    """Moments of what the layers at the joints read and make, from one streaming pass over (feeds, samples in them)."""
    axes = _watched(executor, joints)
    peaks: dict[str, np.ndarray] = {}
    totals: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for feeds, _ in batches:
        values = executor.forward(feeds, keep=lambda name: name in axes)
        for name, axis in axes.items():
            array = values[name].numpy()
            rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).astype(np.float64)
            rows = np.where(np.isfinite(rows), rows, 0.0)
            peaks[name] = np.maximum(peaks.get(name, 0.0), np.abs(rows).max(axis=1, initial=0.0))
            totals[name] = totals.get(name, 0.0) + np.square(rows).sum(axis=1)
            counts[name] = counts.get(name, 0) + rows.shape[1]
    return Moments(peaks, {name: total / max(1, counts[name]) for name, total in totals.items()})


def _watched(executor: Executor, joints: Sequence[Joint]) -> dict[str, int]:
    """Axis of the channels by value."""
    names = {side.layer for joint in joints for side in (joint.maker, *joint.readers)}
    axes: dict[str, int] = {}
    for layer in executor.structure.quantizable:
        if layer.name in names:
            axis = 1 if layer.op_type in ("Conv", "ConvTranspose") else -1
            axes |= {layer.inputs[0]: axis, layer.output: axis}
    return axes


def find_scales(
    graph: Graph, structure: Structure, joints: Sequence[Joint], moments: Moments, headroom: float = HEADROOM
) -> dict[str, np.ndarray]:
    """By name of the maker, float32 (channels,): powers of two; joints that would gain too little are left out.

    headroom: scaled peaks times this stay below the bound of a Clip.
    """
    layers = _find_layers(graph, structure, joints, moments)
    for joint in reversed(joints):  # gains grow from the outputs back
        layers[joint.maker.layer].gains = _gains(joint, layers)
    for _ in range(SWEEPS):
        if not sum(_choose(joint, layers, moments, headroom) for joint in joints):
            break
    for joint in joints:
        chosen, ones = layers[joint.maker.layer].made, np.ones(joint.num_channels)
        costs = _Costs(joint, layers, moments)
        if costs.exact(chosen) > GAIN * costs.exact(ones):
            _set(joint, layers, ones)
    found = {joint.maker.layer: layers[joint.maker.layer].made.astype(np.float32) for joint in joints}
    return {name: scales for name, scales in found.items() if (scales != 1).any()}


def equalized(model: ir.Model, joints: Sequence[Joint], scales: Mapping[str, np.ndarray]) -> ir.Model:
    """A copy of the model, its channels scaled. scales: by name of the maker, see `find_scales`."""
    model = aside.copied(model)
    constants = _Constants(model)
    for joint in joints:
        own = scales.get(joint.maker.layer)
        if own is None:
            continue
        constants[joint.maker.weight] = joint.maker.form.scaled(constants[joint.maker.weight], own, None)
        for bias in joint.maker.biases:
            constants[bias] = constants[bias] * own
        for reader in joint.readers:
            constants[reader.weight] = reader.form.scaled(constants[reader.weight], None, 1 / own)
    return model


class _Constants:
    """The initializers of a model as arrays."""

    def __init__(self, model: ir.Model):
        self._values = model.graph.initializers

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._values[name].const_value
        assert tensor is not None
        return np.asarray(tensor.numpy())

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self._values[name].const_value = ir.tensor(array, name=name)


@dataclass(slots=True)
class _Layer:
    """A layer at a joint. Arrays by channel are float64; weights as [groups, outputs, inputs]."""

    peaks: np.ndarray  # of weights over the taps
    squares: np.ndarray  # of weights, summed over the taps
    taps: int
    read_squares: np.ndarray  # mean squares of what it reads
    gains: np.ndarray  # of squared errors of what it makes, to the end of the chain, relative to what is there
    made: np.ndarray  # scales of what it makes
    read: np.ndarray  # scales of what it reads

    def by_group(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self.peaks.shape[0], -1)


def _find_layers(graph: Graph, structure: Structure, joints: Sequence[Joint], moments: Moments) -> dict[str, _Layer]:
    sides = {joint.maker.layer: joint.maker for joint in joints}
    sides |= {reader.layer: reader for joint in joints for reader in joint.readers}
    found = {}
    for name, side in sides.items():
        layer = structure.layer(name)
        array = graph.constant(side.weight)
        assert array is not None
        wide = side.form.wide(array).astype(np.float64)
        squares = moments.squares[layer.inputs[0]].reshape(wide.shape[0] * wide.shape[2], -1).mean(axis=1)
        outputs = wide.shape[0] * wide.shape[1]
        energy = float(moments.squares[layer.output].sum())
        found[name] = _Layer(
            np.abs(wide).max(axis=3),
            np.square(wide).sum(axis=3),
            wide.shape[3],
            _floored(squares, LEAST**2),
            np.full(outputs, 1 / energy if energy > 0 else 1.0),
            np.ones(outputs),
            np.ones(len(squares)),
        )
    return found


def _gains(joint: Joint, layers: Mapping[str, _Layer]) -> np.ndarray:
    total = np.zeros(joint.num_channels)
    for side in joint.readers:
        reader = layers[side.layer]
        total += np.einsum("goi,go->gi", reader.squares, reader.by_group(reader.gains)).reshape(-1)
    return _floored(total, 1e-12)


def _floored(values: np.ndarray, share: float) -> np.ndarray:
    """At least that share of the largest, and above 0."""
    return np.maximum(values, max(share * float(values.max(initial=0.0)), 1e-30))


class _Costs:
    """What rounding costs as a function of the scales of one joint, those of all others as they are."""

    def __init__(self, joint: Joint, layers: Mapping[str, _Layer], moments: Moments):
        maker = layers[joint.maker.layer]
        peaks = (maker.peaks / maker.by_group(maker.read)[:, None, :]).max(axis=2).reshape(-1)
        read = maker.by_group(maker.read_squares * np.square(maker.read)).sum(axis=1, keepdims=True) * maker.taps
        share = maker.by_group(maker.gains) * read
        activations = _floored(moments.peaks[joint.value], LEAST)
        # (largest of peaks * s)^2 times the sum of weights / s^2, for those with +1; of peaks / s for those with -1.
        self.terms = [
            (1, _floored(peaks, 1e-12), share.reshape(-1)),
            (1, activations, _ACTIVATION * maker.gains),
        ]
        for side in joint.readers:
            reader = layers[side.layer]
            peaks = (reader.peaks * reader.by_group(reader.made)[:, :, None]).max(axis=1).reshape(-1)
            gains = reader.by_group(reader.gains / np.square(reader.made)).sum(axis=1, keepdims=True) * reader.taps
            self.terms.append((-1, _floored(peaks, 1e-12), (reader.by_group(reader.read_squares) * gains).reshape(-1)))

    def exact(self, scales: np.ndarray) -> float:
        return sum(
            float(np.square((peaks * scales**sign).max()) * (share / np.square(scales**sign)).sum())
            for sign, peaks, share in self.terms
        )

    def smooth(self, logs: np.ndarray) -> tuple[float, np.ndarray]:
        """Log of the cost with power means for max, and its gradient in log s; s = 1 is favoured by very little."""
        total, slope = 0.0, np.zeros_like(logs)
        for sign, peaks, share in self.terms:
            high = _POWER * (np.log(peaks) + sign * logs)
            top = high.max()
            weights = np.exp(high - top)
            low = share * np.exp(-2 * sign * logs)
            cost = math.exp(2 * (top + math.log(weights.sum())) / _POWER) * low.sum()
            total += cost
            slope += cost * 2 * sign * (weights / weights.sum() - low / low.sum())
        return math.log(total) + 1e-3 * float(np.square(logs).mean()), slope / total + 2e-3 * logs / len(logs)


def _choose(joint: Joint, layers: Mapping[str, _Layer], moments: Moments, headroom: float) -> bool:
    """Whether the joint got better scales, those of all others as they are."""
    costs = _Costs(joint, layers, moments)
    limit = MOST * math.log(2)
    upper = np.full(joint.num_channels, limit)
    if math.isfinite(joint.bound):
        room = joint.bound / (headroom * np.maximum(moments.peaks[joint.value], 1e-30))
        upper = np.minimum(upper, np.log(room))
    is_pinned = upper < 0  # its values come near the bound
    bounds = [(0.0, 0.0) if pinned else (-limit, high) for pinned, high in zip(is_pinned, upper, strict=True)]
    start = np.log(layers[joint.maker.layer].made)
    found = scipy.optimize.minimize(costs.smooth, start, jac=True, method="L-BFGS-B", bounds=bounds)
    candidates = [layers[joint.maker.layer].made]
    for shift in np.arange(8) / 8:  # a common factor changes nothing but how they round
        powers = np.floor(np.minimum(found.x / math.log(2) + shift, upper / math.log(2)))
        candidates.append(np.exp2(np.where(is_pinned, 0.0, powers)))
    best = min(candidates, key=costs.exact)  # the first of equal ones
    _set(joint, layers, best)
    return best is not candidates[0]


def _set(joint: Joint, layers: Mapping[str, _Layer], scales: np.ndarray) -> None:
    layers[joint.maker.layer].made = scales
    for reader in joint.readers:
        layers[reader.layer].read = scales
