"""The search problem: what each choice costs in noise, bytes and time, as one table.

Noise is the sum of the prices of the sources that are on; a layer that is quantized forces on the tensors that it
reads, and its output where its kernel needs that. Bytes and time are changes against the float model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure
from quantsieve.plan import Options, Plan, Rounded, forced_tensors
from quantsieve.schemes import Scheme
from quantsieve.sensitivity.suffix import Prices


@dataclass(frozen=True, slots=True)
class Costs:
    """Changes against the float file. layer_bytes, layer_ms: by layer, by scheme."""

    float_bytes: int
    layer_bytes: Mapping[str, Mapping[str, int]]
    tensor_bytes: Mapping[Rounded, int]
    layer_ms: Mapping[str, Mapping[str, float]]
    tensor_ms: Mapping[Rounded, float]
    crossing_ms: Mapping[tuple[Rounded, str], float] = field(
        default_factory=dict
    )  # see `Crossing`; by tensor and layer


class Crossing(NamedTuple):
    """What a conversion takes: milliseconds where a tensor is rounded and a layer that makes or reads it is not in its
    format. Indices of the problem."""

    tensor: int
    layer: int
    ms: float


@dataclass(frozen=True, slots=True)
class Problem:
    """layers: those with a choice. options[l]: schemes. noise, bytes and ms[l]: one number an option.
    links[l]: for each option the indices of the tensors that it forces on."""

    layers: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]
    layer_noise: tuple[tuple[float, ...], ...]
    layer_bytes: tuple[tuple[int, ...], ...]
    layer_ms: tuple[tuple[float, ...], ...]
    tensors: tuple[Rounded, ...]
    tensor_noise: tuple[float, ...]
    tensor_bytes: tuple[int, ...]
    tensor_ms: tuple[float, ...]
    links: tuple[tuple[tuple[int, ...], ...], ...]
    crossings: tuple[Crossing, ...] = ()

    def predict(self, plan: Plan) -> "Predicted":
        """Sums over what the plan switches on."""
        noise, size, ms = 0.0, 0, 0.0
        on: set[int] = set()
        for index, layer in enumerate(self.layers):
            if plan.is_quantized(layer):
                choice = self.options[index].index(plan.scheme(layer))
                noise += self.layer_noise[index][choice]
                size += self.layer_bytes[index][choice]
                ms += self.layer_ms[index][choice]
                on.update(self.links[index][choice])
        noise += sum(self.tensor_noise[t] for t in on)
        size += sum(self.tensor_bytes[t] for t in on)
        ms += sum(self.tensor_ms[t] for t in on)
        ms += sum(c.ms for c in self.crossings if c.tensor in on and not self._holds(plan, c))
        return Predicted(noise, size, ms)

    def _holds(self, plan: Plan, crossing: Crossing) -> bool:
        """Whether the plan has the crossing's layer in the format of its tensor."""
        layer = crossing.layer
        scheme = plan.scheme(self.layers[layer])
        return scheme in self.options[layer] and (
            crossing.tensor in self.links[layer][self.options[layer].index(scheme)]
        )

    def plan(self, choices: Sequence[int | None]) -> Plan:
        """The plan with option choices[l] for layer l, None for float."""
        chosen = zip(self.layers, self.options, choices, strict=True)
        return Plan({layer: options[c] for layer, options, c in chosen if c is not None})

    def with_free_riders(self, plan: Plan) -> Plan:
        """The plan and every layer that costs neither noise, bytes nor time once the plan's tensors are on."""
        on: set[int] = set()
        for index, layer in enumerate(self.layers):
            if plan.is_quantized(layer):
                on.update(self.links[index][self.options[index].index(plan.scheme(layer))])
        schemes = dict(plan.schemes)

        def spared(layer: int, links: tuple[int, ...]) -> float:
            """Milliseconds of conversions that go when the layer joins its tensors."""
            return sum(c.ms for c in self.crossings if c.layer == layer and c.tensor in links)

        for index, layer in enumerate(self.layers):
            if not plan.is_quantized(layer):
                free = [
                    option
                    for option, links, noise, size, ms in zip(
                        self.options[index],
                        self.links[index],
                        self.layer_noise[index],
                        self.layer_bytes[index],
                        self.layer_ms[index],
                        strict=True,
                    )
                    if noise <= 0 and size <= 0 and on.issuperset(links) and ms <= spared(index, links)
                ]
                if free:
                    schemes[layer] = free[0]
        return Plan(schemes)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of a plan, never measured: relative squared error, bytes and milliseconds against float."""

    noise: float
    bytes_change: int
    ms_change: float


@dataclass(frozen=True, slots=True)
class Accounts:
    """What prices are read from. is_corrected: plans are mended by bias correction."""

    prices: Prices
    costs: Costs
    is_corrected: bool

    def noise(self) -> dict[tuple[str, str, str], float]:
        """Price by (kind, owner, form) of the source."""
        values = self.prices.corrected() if self.is_corrected else self.prices.mean()
        sources = self.prices.sources
        return {(s.kind, s.owner, s.form): max(0.0, float(v)) for s, v in zip(sources, values, strict=True)}


def make_problem(
    graph: Graph, structure: Structure, options: Options, schemes: Mapping[str, Scheme], accounts: Accounts
) -> Problem:
    """The table. schemes: by name, those of the options."""
    price, costs = accounts.noise(), accounts.costs
    tensors = tuple(Rounded(s.owner, s.form) for s in accounts.prices.sources if s.kind == "tensor")
    index = {tensor: i for i, tensor in enumerate(tensors)}
    layers = [layer for layer in structure.quantizable if layer.name in options.schemes]
    chosen = tuple(options.schemes[layer.name] for layer in layers)
    links = tuple(
        tuple(tuple(index[pair] for pair in forced_tensors(graph, layer, schemes[name])) for name in names)
        for layer, names in zip(layers, chosen, strict=True)
    )
    return Problem(
        layers=tuple(layer.name for layer in layers),
        options=chosen,
        layer_noise=tuple(
            tuple(price.get(("weight", layer.name, s), 0.0) for s in names)
            for layer, names in zip(layers, chosen, strict=True)
        ),
        layer_bytes=_table(layers, chosen, costs.layer_bytes),
        layer_ms=_table(layers, chosen, costs.layer_ms),
        tensors=tensors,
        tensor_noise=tuple(price["tensor", root, form] for root, form in tensors),
        tensor_bytes=tuple(costs.tensor_bytes.get(tensor, 0) for tensor in tensors),
        tensor_ms=tuple(costs.tensor_ms.get(tensor, 0.0) for tensor in tensors),
        links=links,
        crossings=tuple(
            Crossing(index[tensor], number, ms)
            for number, layer in enumerate(layers)
            for tensor in dict.fromkeys(tensors[t] for found in links[number] for t in found)
            if (ms := costs.crossing_ms.get((tensor, layer.name), 0.0))
        ),
    )


Number = TypeVar("Number", int, float)


def _table(
    layers: Sequence[Layer], chosen: Sequence[tuple[str, ...]], costs: Mapping[str, Mapping[str, Number]]
) -> tuple[tuple[Number, ...], ...]:
    return tuple(
        tuple(costs.get(layer.name, {}).get(s, 0) for s in schemes)
        for layer, schemes in zip(layers, chosen, strict=True)
    )
