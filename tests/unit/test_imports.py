"""Imports between subpackages point in one direction, as read from the source."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import trl_tpu

ROOT = Path(trl_tpu.__file__).parent
MODULES = {
    ".".join(["trl_tpu", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


@cache
def imports_of(module: str, *, when_imported: bool = False) -> set[str]:
    """Return the full names of a module's imports; ``from m import n`` gives the module n, or m.

    With ``when_imported`` skip imports in functions, for type checkers and in ``__main__``.
    """
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in _nodes(TREES[module], when_imported):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{source}.{each.name}" if f"{source}.{each.name}" in MODULES else source for each in node.names}
    return names


def _nodes(tree: ast.AST, when_imported: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        later = (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or "TYPE_CHECKING" in test or "__main__" in test
        )
        if when_imported and later:
            continue
        yield node
        yield from _nodes(node, when_imported)


def importers_of(package: str) -> set[str]:
    return {module for module in MODULES if any(f"{name}.".startswith(f"{package}.") for name in imports_of(module))}


def reached_from(module: str) -> set[str]:
    """Return every module that importing ``module`` imports, directly or through this package's modules."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        names = imports_of(waiting.pop(), when_imported=True) - found
        found |= names
        waiting += [name for name in names if name in MODULES]
    return found


def test_import_reader_resolves_relative_imports() -> None:
    assert {"trl_tpu", "trl_tpu.runtime.xla", "trl_tpu.data.trl_dict", "trl_tpu.trainer.reward_trainer"} <= {*MODULES}
    assert "trl_tpu.data.tokenize" in imports_of("trl_tpu.modeling.build")  # from a relative import
    assert "trl_tpu.runtime" in imports_of("trl_tpu.modeling.load")  # ``from .. import runtime``


def test_torch_xla_peft_and_trl_are_imported_only_where_listed() -> None:
    by_torch_xla = importers_of("torch_xla")
    stand_in = "trl_tpu.plan.placeholder"  # a runtime of tensors without data
    assert {"trl_tpu.runtime.xla", stand_in} <= by_torch_xla
    assert all(module.startswith("trl_tpu.runtime.") for module in by_torch_xla - {stand_in})
    assert importers_of("peft") == {"trl_tpu.modeling.adapters"}
    assert not {name for name in reached_from("trl_tpu.modeling.adapters") if name.startswith("peft")}
    assert importers_of("trl") == set()


def test_runtime_is_independent_and_xla_runtime_is_imported_lazily() -> None:
    imported = {name for module in MODULES if module.startswith("trl_tpu.runtime") for name in imports_of(module)}
    ours = {name for name in imported if name.startswith("trl_tpu") and not name.startswith("trl_tpu.runtime")}
    assert ours <= {"trl_tpu.errors"}
    reached = reached_from("trl_tpu.trainer.reward_trainer") | reached_from("trl_tpu.cli")
    assert "trl_tpu.runtime" in reached
    assert not {name for name in reached if name.startswith(("torch_xla", "trl_tpu.runtime.xla"))}


def test_no_code_compares_runtime_names() -> None:
    for module in (module for module in MODULES if not module.startswith("trl_tpu.runtime")):
        compared = {
            each.value
            for node in ast.walk(TREES[module])
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "name"
            for each in node.comparators
            if isinstance(each, ast.Constant)
        }
        assert not compared & {"xla", "native"}, module


# subpackage -> subpackages below it; modules at the top level are TRL's paths to the subpackages' contents
BELOW = {
    "errors": set(),
    "packing": set(),
    "runtime": set(),
    "data": {"packing"},
    "parallel": {"runtime"},
    "compat": {"data"},
    "config": {"compat", "parallel", "runtime"},
    "modeling": {"compat", "config", "data", "packing", "parallel", "runtime"},
    "evaluation": {"data", "packing"},
    "scoring": {"data", "evaluation", "modeling", "packing", "parallel", "runtime"},
    "report": {"data", "evaluation", "modeling", "packing"},
    "checkpoint": {"compat", "config", "modeling", "parallel", "runtime"},
    "training": {
        "checkpoint", "compat", "config", "data", "evaluation", "modeling", "packing", "parallel", "report", "runtime",
    },
    "trainer": {
        "compat", "config", "data", "evaluation", "modeling", "packing", "parallel", "report", "runtime", "training",
    },
    "experimental": {"config", "data", "modeling", "runtime", "trainer"},
    "plan": {"config", "data", "experimental", "modeling", "packing", "parallel", "runtime", "trainer", "training"},
    "scripts": {
        "checkpoint", "compat", "config", "data", "evaluation", "modeling", "packing", "parallel",
        "experimental", "plan", "report", "runtime", "scoring", "trainer", "training",
    },
    "cli": {"plan", "scripts", "runtime"},
    "data_utils": {"data"},
}  # fmt: skip


@pytest.mark.parametrize("room", BELOW)
def test_subpackages_import_only_those_below_them(room: str) -> None:
    modules = [module for module in MODULES if module.split(".")[1:2] == [room]]
    names = {name for module in modules for name in imports_of(module, when_imported=True)}
    imported = {name.split(".")[1] for name in names if name in MODULES and name != "trl_tpu"}
    assert modules and imported <= BELOW[room] | {room, "errors"}


def test_every_subpackage_is_listed_and_imports_are_acyclic() -> None:
    assert {module.split(".")[1] for module in MODULES if module != "trl_tpu"} == set(BELOW)
    list(TopologicalSorter(BELOW).static_order())
    modules = {module: imports_of(module, when_imported=True) & MODULES.keys() for module in MODULES}
    try:
        list(TopologicalSorter(modules).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")
