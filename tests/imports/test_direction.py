"""Imports inside kda2 point down the list of layers, never up; only the top layers import optional packages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kda2

SRC = Path(kda2.__file__).parent
# From the bottom to the top. A module imports from its own layer and from those before it.
LAYERS = (
    {"errors", "device", "memory", "tables"},
    {"contract"},
    {"backends", "dispatch"},
    {"ops"},
    {"compat", "distributed", "testing"},
    {"workbench"},
    {"cli", "mcp"},
)
CORE = {"numpy", "torch", "triton"}
# Folders of an op that are no backend's name, and the backends that they may use: `hopper` is written in Gluon, which
# Triton launches and compiles.
USES = {"hopper": {"gluon", "triton"}}
# Beyond the standard library and CORE. Elsewhere an optional package must not even be named.
EXTRAS = {
    "testing": {"pytest"},
    "workbench": {"jinja2", "optuna", "plotly", "pydantic", "rich", "safetensors"},
    "cli": {"rich", "typer"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Data: files that the audit hands to the verifier, which import their helpers from beside them.
AUDITED = SRC / "workbench" / "audit" / "kernels"
MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py")) if path.parent != AUDITED}
INNER = sorted(MODULES.keys() - {"kda2"})


def layer(module: str) -> int:
    """The layer of a module of kda2. `kda2` itself hands out the public calls, so it stands with the ops."""
    top = "ops" if module == "kda2" else module.split(".")[1]
    return next(i for i, names in enumerate(LAYERS) if top in names)


def imports(module: str, tree: ast.Module) -> Iterator[str]:
    """Every module that `tree` imports, at the top or inside a function, and every module of kda2 that a string in it
    names (as an argument of `import_module` would)."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            full = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else base for name in full)
        elif isinstance(node, ast.Constant) and node.value in MODULES and node.value != "kda2":
            yield node.value


def imports_of(module: str) -> set[str]:
    return set(imports(module, ast.parse(MODULES[module].read_text())))


def backend(module: str) -> str | None:
    """The backend that a module of `kda2.backends.triton`, or of an op's folder `kda2.ops.kda.triton`, belongs to."""
    parts = module.split(".")
    if parts[1:2] == ["backends"] and len(parts) > 2:
        return parts[2]
    if parts[1:2] == ["ops"] and len(parts) > 3 and (SRC / "ops" / parts[2] / parts[3]).is_dir():
        return parts[3]
    return None


def is_kda2(module: str) -> bool:
    return module.split(".")[0] == "kda2"


def test_every_package_has_a_layer() -> None:
    tops = {m.split(".")[1] for m in INNER}
    assert tops <= set().union(*LAYERS), "name the new package in LAYERS, and in DESIGN.md"


@pytest.mark.parametrize("module", INNER)
def test_imports_point_down(module: str) -> None:
    upward = [other for other in imports_of(module) if is_kda2(other) and layer(other) > layer(module)]
    assert not upward, f"{module} looks up at {upward}"


@pytest.mark.parametrize("module", [m for m in INNER if backend(m)])
def test_a_backend_stands_alone(module: str) -> None:
    """It imports neither the reference it is tested against nor another backend, nor another implementation."""
    ours = {other for other in imports_of(module) if is_kda2(other)}
    mine = str(backend(module))
    assert not [other for other in ours if "reference" in other.split(".")]
    assert not [other for other in ours if backend(other) not in {None, mine, *USES.get(mine, ())}]
    assert not [other for other in ours if layer(other) == layer(module) and backend(other) not in (None, mine)]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_third_party_packages(module: str) -> None:
    allowed = CORE | EXTRAS.get(module.split(".")[1] if module != "kda2" else "", set())
    foreign = {name.split(".")[0] for name in imports_of(module)} - {"kda2"} - sys.stdlib_module_names
    assert foreign <= allowed, f"{module} imports {sorted(foreign - allowed)}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import kda2.workbench.loop", "kda2.workbench.loop"),
        ("from kda2.errors import InvalidValue", "kda2.errors"),
        ("from kda2 import errors", "kda2.errors"),
        ("from kda2 import kda", "kda2"),
        ("from ..errors import InvalidValue", "kda2.errors"),
        ("from . import config", "kda2.contract.config"),
        ("def f():\n    import triton.language", "triton.language"),
        ("import_module('kda2.dispatch.select')", "kda2.dispatch.select"),
    ],
)
def test_the_finder_sees(code: str, found: str) -> None:
    assert found in set(imports("kda2.contract", ast.parse(code))) | set(imports("kda2.contract.spec", ast.parse(code)))
