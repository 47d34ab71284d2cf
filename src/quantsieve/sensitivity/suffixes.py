"""Runs what a change reaches, at the speed of the whole model: suffixes of onnxruntime's optimized graph.

Every region (see `optimized.py`) is a session, from which the base values and the first steps behind a change come.
From the next multiple of `STRIDE` regions on one session runs all the rest (several if more than `LONGEST` regions are
left); it is made when it is first needed and kept. Blocked weights are inputs, shared by all sessions. Weights that
onnxruntime packs for itself (of MatMul and Gemm) are held by the session: a stretch of regions with more than `LIGHT`
bytes of them in one is a session of its own, in large models each such region. A layer whose weights are probed runs in
a session that takes them as inputs. Where branches leave much of a suffix untouched by a change, shorter ones or single
regions run instead.

The same kernels run everywhere, so that a change of zero gives a difference of zero.
Memory: beside the model its blocked weights once, and its packed ones once, twice when they are below `TWICE` bytes.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from quantsieve.model.execute import AMPLE, Piece, Room, Shelf, hold, make_model, piece_options
from quantsieve.model.graph import Graph
from quantsieve.model.units import Layer, Structure
from quantsieve.sensitivity.optimized import BLOCKED, MULTIPLIES, Optimized, Region, Slots, find_slots

STRIDE = 6  # regions from one start of a suffix to the next
LONGEST = 10 * STRIDE  # regions in one session: a cut costs little, a node some kilobytes in every session it is in
TWICE = 1 << 28  # bytes of packed weights of a model up to which longer sessions hold them once more
LIGHT = 1 << 14  # bytes of packed weights of a region that every suffix may hold anew
WORTH = 0.7  # share of a session's work that a change must reach for it to run whole
SMALL = 1 << 12  # bytes; constants below stay in the sessions, since kernels may want them there (shapes, limits)
_TAKING = ("Gather", "Add", "Sub", "Mul", "Div")  # standard operators to which a constant is like any other input

Values = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Run:
    """Regions first to last (not included) in one session; what nobody needs afterwards."""

    first: int
    last: int
    drops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Session:
    """A piece, whose names are its own: regions that differ in their weights only share one."""

    piece: Piece
    names: Mapping[str, str]  # of the piece, by the name in the graph
    reads: tuple[str, ...]  # in the graph, as are all names but those of the piece
    constants: Values  # that are inputs, by name of the piece
    outputs: tuple[str, ...]

    def run(self, values: Mapping[str, np.ndarray], instead: Values | None = None) -> Values:
        """instead: other arrays for some of the constants that are inputs."""
        feeds = self.constants | {self.names[name]: values[name] for name in self.reads}
        if instead:
            feeds |= {self.names[name]: array for name, array in instead.items()}
        made = self.piece.arrays(feeds)
        return {name: made[self.names[name]] for name in self.outputs}


class Suffixes:
    """The sessions of one model. Thread-safe: sessions are, and a run holds its values itself."""

    def __init__(self, optimized: Optimized, graph: Graph, structure: Structure, room: Room = AMPLE):
        self.optimized = optimized
        self._room = room
        self._regions = optimized.regions
        self._slots: dict[str, Slots | None] = {
            layer.name: find_slots(optimized, graph, layer) for layer in structure.quantizable if layer.weight
        }
        self._opened = {  # regions whose session holds a weight or a bias that a probe changes
            found.region
            for found in self._slots.values()
            if found
            and not {found.weight, found.bias or found.weight} <= set(self._inputs([self._regions[found.region]]))
        }
        self._given = {  # outputs that no region makes
            name: np.ascontiguousarray(array)
            for name in optimized.outputs
            if (array := graph.constant(name)) is not None
        }
        self._work: list[float] = []  # by region, known from the first base values
        self._reached = _reached(self._regions)
        self._readers: dict[str, list[int]] = {}
        for index, region in enumerate(self._regions):
            for name in region.reads:
                self._readers.setdefault(name, []).append(index)
        self._ends = self._find_ends()
        self._sessions: dict[tuple[int, int, bool], _Session] = {}
        self._shared: dict[bytes, Piece] = {}
        self._plans: dict[tuple[frozenset[str], int], tuple[_Run, ...]] = {}
        self._lock = Lock()

    # --- running ----------------------------------------------------------------------------------------------

    def base(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """Every value between regions, for the samples of `feeds`."""
        values, shelf = self.start(feeds), Shelf(self._room.values)
        for index in range(len(self._regions)):
            values |= {name: shelf.put(array) for name, array in self.region(index, values).items()}
        if not self._work:
            self._work = [_work(region, self.optimized.constants, values) for region in self._regions]
        return values

    def start(self, feeds: Mapping[str, np.ndarray]) -> Values:
        """What no region makes: inputs, and constants that are outputs."""
        return {name: np.ascontiguousarray(array) for name, array in feeds.items()} | self._given

    def region(self, index: int, values: Mapping[str, np.ndarray], instead: Values | None = None) -> Values:
        """What one region makes. instead: other arrays for its layer's weight and bias."""
        return self._session(index, index + 1, instead is not None).run(values, instead)

    def region_of(self, layer: Layer) -> int | None:
        """Number of the region with the layer's weights; None when nothing reads the layer."""
        slots = self._slots[layer.name]
        return None if slots is None else slots.region

    def swapped(self, layer: Layer, weight: np.ndarray, bias: np.ndarray | None) -> tuple[int, Values] | None:
        """The region of a layer, and its constants for that weight and bias; None when nothing reads the layer."""
        slots = self._slots[layer.name]
        return None if slots is None else (slots.region, slots.arrays(weight, bias, self.optimized.constants))

    def reweighted(
        self, base: Mapping[str, np.ndarray], layer: Layer, weight: np.ndarray, bias: np.ndarray | None
    ) -> Values:
        """Outputs of the graph when one layer has other weights, from the base values of the same samples."""
        found = self.swapped(layer, weight, bias)
        return self.after(base, {} if found is None else self.region(found[0], base, found[1]))

    def after(self, base: Mapping[str, np.ndarray], changed: Values, start: int = 0) -> Values:
        """Outputs of the graph when some values are replaced; runs what the change reaches. Empties `changed`.

        start: the first region that may run; what those before it make of the change is in `changed` already.
        """
        values = ChainMap(changed, base)  # type: ignore[arg-type]
        for run in self._plan(frozenset(changed), start):
            changed.update(self._session(run.first, run.last).run(values))
            for name in run.drops:
                changed.pop(name, None)
        return {name: values[name] for name in self.optimized.outputs}

    # --- what to run ------------------------------------------------------------------------------------------

    def _plan(self, changed: frozenset[str], start: int = 0) -> tuple[_Run, ...]:
        plan = self._plans.get((changed, start))
        if plan is None:
            plan = self._plans.setdefault((changed, start), self._make_plan(changed, start))
        return plan

    def _make_plan(self, changed: frozenset[str], start: int = 0) -> tuple[_Run, ...]:
        reached = 0
        for name in changed:
            for reader in self._readers.get(name, ()):
                reached |= self._reached[reader]
        reached &= -1 << start
        runs: list[_Run] = []
        # A session must not start before what is reached first: it would make the changed values themselves anew.
        index, count = (reached & -reached).bit_length() - 1, len(self._regions)
        while 0 <= index < count:
            last = self._longest(index, reached)
            if last > index + 1 or reached >> index & 1:
                runs.append(_Run(index, last))
            index = last
        return self._with_drops(runs, changed)

    def _longest(self, index: int, reached: int) -> int:
        """Where the session that is to run from `index` on ends; index + 1 for the region alone."""
        end = max(self._ends.get(index, 0), index + 1)
        for last in (end, min(index + STRIDE, end)):
            inside = range(index, last)
            if sum(self._work[i] for i in inside if reached >> i & 1) >= WORTH * sum(self._work[i] for i in inside):
                return last
        return index + 1

    def _with_drops(self, runs: Sequence[_Run], changed: frozenset[str]) -> tuple[_Run, ...]:
        last_use: dict[str, int] = dict.fromkeys(changed, 0)
        for position, run in enumerate(runs):
            for region in self._regions[run.first : run.last]:
                last_use |= dict.fromkeys((*region.reads, *region.outputs), position)
        drops: list[list[str]] = [[] for _ in runs]
        for name, position in last_use.items():
            if name not in self.optimized.outputs and runs:
                drops[position].append(name)
        return tuple(_Run(run.first, run.last, tuple(names)) for run, names in zip(runs, drops, strict=True))

    def _find_ends(self) -> dict[int, int]:
        """For each start of a longer session, where it ends: before the next region with many packed weights, or, if
        the model is so small that sessions may hold them once more, with the stretch that the start begins."""
        packed = [
            sum(self.optimized.constants[name].nbytes for name in set(region.constants) - set(self._inputs([region])))
            for region in self._regions
        ]
        is_small = sum(packed) <= TWICE
        ends: dict[int, int] = {}
        end = count = len(packed)
        for index in reversed(range(count)):
            stretch = min(index + STRIDE, count)
            if packed[index] > LIGHT and not is_small:
                ends[index + 1], end = end, index
            elif index % STRIDE == 0:
                is_light = max(packed[index:stretch]) <= LIGHT or not is_small
                ends[index] = min(end, index + LONGEST) if is_light else stretch
                end = end if is_light else index
        return ends

    # --- sessions ---------------------------------------------------------------------------------------------

    def _session(self, first: int, last: int, is_open: bool = False) -> _Session:
        """Of some regions. is_open: of one whose layer's weight and bias are to be given."""
        key = (first, last, is_open and first in self._opened)
        found = self._sessions.get(key)
        if found is None:
            with self._lock:
                found = self._sessions.get(key) or self._make_session(*key)
                self._sessions[key] = found
        return found

    def _make_session(self, first: int, last: int, is_open: bool) -> _Session:
        regions = self._regions[first:last]
        made = {name for region in regions for name in region.outputs}
        reads = dict.fromkeys(name for region in regions for name in region.reads if name not in made)
        outputs = tuple(name for region in regions for name in region.outputs if self._leaves(name, last))
        given = self._inputs(regions, is_open)
        constants = self.optimized.constants
        held = dict.fromkeys(name for region in regions for name in region.constants if name not in given)
        nodes = [node for region in regions for node in region.nodes]
        is_shared = last == first + 1 and sum(constants[name].nbytes for name in held) <= SMALL
        names = _own_names((*reads, *given, *held), nodes) if is_shared else None
        called = {name: name for name in (*reads, *given, *outputs)} if names is None else names
        types = {called[name]: self.optimized.types[name] for name in reads}
        for name in given:
            elem = onnx.helper.np_dtype_to_tensor_dtype(constants[name].dtype)
            types[called[name]] = onnx.helper.make_tensor_type_proto(elem, None)
        options = piece_options()
        # The graph is optimized already, and the same kernels everywhere leave no difference but the change's own.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        model = make_model(
            nodes if names is None else [_renamed(node, names) for node in nodes],
            types,
            [called[name] for name in outputs],
            hold({(names or {}).get(name, name): ir.tensor(constants[name]) for name in held}, options),
            self.optimized.opsets,
            self.optimized.ir_version,
        )
        key = model.SerializeToString() if names is not None else b""
        piece = self._shared.get(key)
        if piece is None:
            piece = Piece(f"regions {first} to {last}", model, options)
            if key:
                self._shared[key] = piece
        return _Session(piece, called, tuple(reads), {called[name]: constants[name] for name in given}, outputs)

    def _leaves(self, name: str, last: int) -> bool:
        """Whether a value is an output or read from region `last` on."""
        return name in self.optimized.outputs or any(reader >= last for reader in self._readers.get(name, ()))

    def _inputs(self, regions: Sequence[Region], is_open: bool = False) -> list[str]:
        """Constants that the session of the regions takes as inputs: large ones that no kernel packs."""
        constants = self.optimized.constants
        given = {name for region in regions for name in region.constants if constants[name].nbytes > SMALL}
        for node in (node for region in regions for node in region.nodes):
            if (node.domain == BLOCKED and node.op_type == "Conv") or (
                self._room.is_lean and node.op_type in MULTIPLIES
            ):
                given |= {name for name in node.input if name in constants}
            elif node.domain or node.op_type not in _TAKING:
                given -= set(node.input)
        if is_open:
            slots = [found for found in self._slots.values() if found and self._regions[found.region] in regions]
            given |= {name for found in slots for name in (found.weight, found.bias) if name}
        return sorted(given)


def _own_names(names: Iterable[str], nodes: Sequence[onnx.NodeProto]) -> dict[str, str] | None:
    """Names by order of appearance, equal for nodes that do the same; None where subgraphs hold names too."""
    if any(attribute.HasField("g") or attribute.graphs for node in nodes for attribute in node.attribute):
        return None
    every = dict.fromkeys((*names, *(name for node in nodes for name in (*node.input, *node.output) if name)))
    return {name: f"v{index}" for index, name in enumerate(every)} | {"": ""}


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto.FromString(node.SerializeToString())
    copy.name = names[node.output[0]]
    copy.input[:] = [names[name] for name in node.input]
    copy.output[:] = [names[name] for name in node.output]
    return copy


def _reached(regions: Sequence[Region]) -> list[int]:
    """For each region, a bit for itself and for every region that it reaches."""
    readers: dict[str, int] = {}
    found = [0] * len(regions)
    for index in reversed(range(len(regions))):
        found[index] = 1 << index
        for name in regions[index].outputs:
            found[index] |= readers.get(name, 0)
        for name in regions[index].reads:
            readers[name] = readers.get(name, 0) | found[index]
    return found


def _work(region: Region, constants: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> float:
    """Cost of a region in elements written: multiply-adds count an eighth, as wide registers do them."""
    outputs = [values[name] for name in region.outputs]
    written = float(sum(array.size for array in outputs))
    node = region.weighted()
    if node is None or node.op_type not in MULTIPLIES or not outputs or outputs[-1].ndim < 2:
        return written
    channels = outputs[-1].shape[1] if outputs[-1].ndim == 4 else outputs[-1].shape[-1]
    return written + outputs[-1].size * constants[node.input[1]].size / max(channels, 1) / 8
