"""Where the time of a file goes, kernel by kernel, told by the nodes and tensors of the file.

onnxruntime's own profile names kernels as its optimized graph does (measured, 1.32); from there the audit's ways lead
back to the file. Nodes without a name count in the total alone. What converts between number formats is told by the
tensor that it converts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import onnx

from quantsieve.targets.audit import Origins
from quantsieve.targets.base import Profile

_KERNEL = "_kernel_time"
_QUANTIZE = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})


def profile_graph(
    original: onnx.GraphProto, ran: onnx.GraphProto, events: Sequence[Mapping[str, Any]], runs: int
) -> Profile:
    """events: of onnxruntime's profile of `runs` runs, the earlier ones of warming up left out by the caller."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            times[event["name"].removesuffix(_KERNEL)].append(event["dur"] / 1e3)
    ms = {name: median(found) * len(found) / runs for name, found in times.items()}
    origins = Origins(original)
    nodes: dict[str, float] = defaultdict(float)
    quantize: dict[str, float] = defaultdict(float)
    dequantize: dict[str, list[float]] = defaultdict(list)
    rest = 0.0
    for node in ran.node:
        if not node.name:
            continue  # the profile tells nameless kernels by nothing but their operator
        spent = ms.pop(node.name, 0.0)
        if node.op_type in _QUANTIZE:
            quantize[node.input[0]] += spent
        elif node.op_type == "DequantizeLinear":
            dequantize[origins.tensor(node.input[0])].append(spent)
        elif (label := origins.label(node)) is not None:
            nodes[label] += spent
        else:
            rest += spent
    total = sum(nodes.values()) + sum(quantize.values()) + sum(map(sum, dequantize.values())) + rest
    each = {tensor: sum(found) / len(found) for tensor, found in dequantize.items()}
    return Profile(dict(nodes), dict(quantize), each, total + sum(ms.values()))
