"""Imports point down, in one line of parts; read with `ast`, so that nothing need be importable."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "quantsieve"

# From low to high; a part imports from itself and from lower rows only, never from its neighbours in a row.
LINE = (
    ("errors", "example"),
    ("model", "data", "tasks", "targets"),
    ("schemes",),
    ("clipping",),
    ("calibrate",),
    ("plan",),
    ("selection",),
    ("weights",),
    ("simulate",),
    ("repair",),
    ("sensitivity",),
    ("search",),
    ("writing",),
    ("operators",),
    ("sizes",),
    ("readback",),
    ("evaluation",),
    ("front",),
    ("reports",),
    ("run",),
    ("inspection",),
    ("api",),
    ("_streams",),
    ("_door", "_options", "_tables", "_progress"),
    ("_show",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, row in enumerate(LINE) for part in row}

# Imports that wait until they are needed: (module, what it imports). `quantsieve --help` must not load onnxruntime.
WAITING = {
    ("quantsieve", "quantsieve.api"),  # for type checkers; `__getattr__` finds it by name at the first use
    ("quantsieve._tables", "quantsieve.api"),  # for type checkers
    ("quantsieve.cli", "quantsieve._progress"),
    ("quantsieve.cli", "quantsieve._show"),
    ("quantsieve.cli", "quantsieve.api"),
    ("quantsieve.cli", "quantsieve.data"),
    ("quantsieve.cli", "importlib.metadata"),
    ("quantsieve.reports.figures", "matplotlib"),  # an extra
    ("quantsieve.reports.figures", "matplotlib.axes"),
    ("quantsieve.reports.figures", "matplotlib.figure"),
    ("quantsieve.reports.figures", "matplotlib.patheffects"),
    ("quantsieve.reports.figures", "matplotlib.transforms"),
}


def module_name(path: Path) -> str:
    parts = ("quantsieve", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """(module imported, whether at the top of the file); of `from package import module` the module."""
    tree = ast.parse(source)
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            names = {name if name in MODULES else str(node.module) for name in found}
            yield from ((name, id(node) in top) for name in sorted(names))


def own_imports(module: str) -> set[str]:
    found = {name for name, _ in imports(MODULES[module].read_text(encoding="utf-8"))}
    return {name for name in found if name.partition(".")[0] == "quantsieve"}


def part(module: str) -> str:
    """`model` of quantsieve.model.graph; the root itself is no part."""
    return module.split(".")[1] if "." in module else ""


def test_every_part_has_its_place_in_the_line():
    assert {part(module) for module in MODULES} - {""} == set(RANK)


@pytest.mark.parametrize("module", [name for name in MODULES if part(name)])  # the root offers the names of api
def test_imports_point_down_the_line(module):
    for imported in own_imports(module):
        assert imported in MODULES, f"{module} imports {imported}, which is no module"
        inside = part(imported) == part(module)
        assert part(imported), f"{module} imports from the root, which stands above all"
        assert inside or RANK[part(imported)] < RANK[part(module)], f"{module} imports {imported}, upward"


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_stand_at_the_top_of_a_file_but_for_those_listed_here():
    waiting = {
        (module, name)
        for module, path in MODULES.items()
        for name, at_top in imports(path.read_text(encoding="utf-8"))
        if not at_top
    }
    assert waiting == WAITING


@pytest.mark.parametrize("folder", ["data", "tasks", "targets"])
def test_what_a_user_may_replace_knows_of_errors_only(folder):
    own = {module for module in MODULES if part(module) == folder}
    outside = {name for module in own for name in own_imports(module) if part(name) != folder}
    assert outside == {"quantsieve.errors"}


def test_no_module_is_a_drawer_for_odds_and_ends():
    words = ("util", "helper", "misc", "common")
    assert [m for m in MODULES for word in words if word in m.rpartition(".")[2]] == []


def test_an_import_inside_a_function_or_from_a_package_is_seen():
    source = "from quantsieve import schemes\ndef late():\n    from quantsieve.model.graph import Graph\n"
    assert list(imports(source)) == [("quantsieve.schemes", True), ("quantsieve.model.graph", False)]
