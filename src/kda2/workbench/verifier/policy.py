"""L0 of a file: it parses, it has a `run` that takes the inputs, and it does not ask its own judge.

This is a reading of the source, no jail: code that means to deceive can. What deceives the clock or the judge in the
same process is the threat that DESIGN.md states and the other stages narrow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from kda2.contract import Check

# Modules of kda2 that know what is right, or that judge.
JUDGES = ("kda2.testing", "kda2.workbench", "kda2.ops.kda.reference")
_MODULE = re.compile(r"kda2(\.\w+)+")
# Packages whose kernels no interpreter runs on a CPU, by the name that people know them by.
_COMPILED = {
    "triton.experimental.gluon": "Gluon",
    "tilelang": "TileLang",
    "torch.utils.cpp_extension": "CUDA C++",
    "cuda": "CUDA C++",
    "cupy": "CUDA C++",
    "cutlass": "CUTLASS",
}
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_FIX = "write what the kernel computes; the judge compares it with the oracle"


def checks(source: bytes, names: Sequence[str]) -> dict[str, Check]:
    """The predicates of L0 for a file whose `run` is called with `names`, in order; the first that fails may make
    the later ones impossible."""
    try:
        tree = ast.parse(source)
    except _UNREADABLE as e:
        line = getattr(e, "lineno", None)
        what = f"{getattr(e, 'msg', e)}" + (f" (line {line})" if line else "")
        return {"parses": Check(False, what, "Python source", "mend the file so that Python can read it")}
    # of two the later one counts, as it does for Python
    run = next((x for x in reversed(tree.body) if isinstance(x, ast.FunctionDef) and x.name == "run"), None)
    found = {"parses": Check(True, "it parses")}
    found["run"] = _has_run(run, tree)
    if run is not None and found["run"].ok:
        found["arguments"] = _takes(run, names)
    found["policy"] = _asks_no_judge(tree)
    return found


def without_interpreter(source: bytes) -> str | None:
    """What the file's kernels are written in, if nothing can run that on a CPU."""
    try:
        named = set(_imported(ast.parse(source)))
    except _UNREADABLE:
        return None
    found = (says for module, says in _COMPILED.items() if any(f"{n}.".startswith(f"{module}.") for n in named))
    return next(found, None)


def _has_run(run: ast.FunctionDef | None, tree: ast.Module) -> Check:
    if run is not None:
        return Check(True, "it defines run")
    if any(name == "run" for name in _bound_names(tree)):
        return Check(True, "it binds run")  # to what, only running it tells
    defined = [x.name for x in tree.body if isinstance(x, (ast.FunctionDef, ast.ClassDef))]
    seen = f"it defines {', '.join(defined)}" if defined else "it defines no function"
    return Check(False, seen, "def run(**inputs) at the top level", "name the kernel's entry point run")


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Names that the module's own statements bind, but for definitions: by assignment or import, under an if or a try
    too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    yield from (node.name for outer in tree.body if isinstance(outer, (ast.If, ast.Try))
                for node in ast.walk(outer) if isinstance(node, ast.FunctionDef))  # fmt: skip


def _takes(run: ast.FunctionDef, names: Sequence[str]) -> Check:
    a = run.args
    mine = {x.arg for x in (*a.args, *a.kwonlyargs)}
    missing = [] if a.kwarg else [name for name in names if name not in mine]
    optional = {x.arg for x, _ in zip(reversed(a.args), a.defaults, strict=False)}
    optional |= {x.arg for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is not None}
    unknown = sorted(mine - optional - set(names)) + [x.arg for x in a.posonlyargs]
    if unknown:
        fix = "rename them; another operator is --spec, one stage only is --stage"
        lacks = f" and does not take {', '.join(missing)}" if missing else ""
        return Check(False, f"run asks for {', '.join(unknown)}{lacks}", f"arguments among {', '.join(names)}", fix)
    if missing:
        return Check(False, f"run does not take {', '.join(missing)}", "every input by name", "add **inputs to run")
    return Check(True, "run takes the inputs")


def _asks_no_judge(tree: ast.Module) -> Check:
    named = {*_imported(tree), *_reached(tree)}
    asked = sorted({name for name in named if any(f"{name}.".startswith(f"{judge}.") for judge in JUDGES)})
    if asked:
        return Check(False, f"it imports {', '.join(asked)}", "no import of the oracle or the judge", _FIX)
    if _calls_reference(tree):
        return Check(False, 'it asks for impl="reference", the oracle', "a kernel of its own", _FIX)
    return Check(True, "it imports neither the oracle nor the judge")


def _imported(tree: ast.Module) -> Iterator[str]:
    """Every module that the source names in an import, inside functions too, or as an argument of import_module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield node.value


def _reached(tree: ast.Module) -> Iterator[str]:
    """Modules of kda2 that the source reaches as attributes: kda2.testing, whatever name kda2 was imported under."""
    known = {
        alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if known.get(root, "").partition(".")[0] == "kda2":
                yield f"{known[root]}.{rest}"


def _calls_reference(tree: ast.Module) -> bool:
    keywords = (x for x in ast.walk(tree) if isinstance(x, ast.keyword) and x.arg == "impl")
    return any(isinstance(x.value, ast.Constant) and x.value.value == "reference" for x in keywords)
