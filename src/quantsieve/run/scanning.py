"""A scan of one line: its prices as ranked layers, with what the layers are in the user's own file."""

from quantsieve.model.graph import Graph
from quantsieve.run.line import Line
from quantsieve.search.prices import Accounts, make_problem
from quantsieve.sensitivity.blocks import find_blocks
from quantsieve.sensitivity.origin import original_nodes
from quantsieve.sensitivity.ranking import Choice, Refused, Score, rank
from quantsieve.sensitivity.scan_document import ScanResult


def scan_line(line: Line) -> ScanResult:
    """Every layer of the model: ranked under each scheme that it may have, or refused with the reason."""
    options, form = line.options, line.schemes[0].activation
    refusals = options.refusals
    return ScanResult(
        model_file=line.path.name,
        model_key=line.model_key,
        num_samples=line.prices.num_samples if options.schemes else 0,
        seed=line.settings.seed,
        schemes=line.settings.schemes,
        activation=form,
        calibration_samples=len(line.split.calibration),
        layers=_scores(line, form) if options.schemes else (),
        refused=tuple(
            Refused(x.name, x.op_type, refusals[x.name]) for x in line.structure.layers if x.name in refusals
        ),
        notes=(*line.prepared.notes, *line.sources.notes(), *dict.fromkeys(line.notes)),
    )


def _scores(line: Line, form: str) -> tuple[Score, ...]:
    structure = line.structure
    accounts = Accounts(line.prices, line.costs, form, False)
    problem = make_problem(line.graph, structure, line.options, accounts)
    blocks = find_blocks(line.graph, structure)
    nodes = original_nodes(Graph(line.original), structure.layers, dict(line.prepared.given_names))
    layers = {layer.name: layer for layer in structure.layers}
    choices = [
        Choice(layers[name], schemes, tuple(problem.tensors[t] for t in links), nodes[name], blocks.get(name))
        for name, schemes, links in zip(problem.layers, problem.options, problem.links, strict=True)
    ]
    return rank(choices, line.prices, form)
