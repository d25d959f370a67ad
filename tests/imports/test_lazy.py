"""`import kda2` costs next to nothing, and what a call does not use is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

OPTIONAL = ("jinja2", "plotly", "pydantic", "pytest", "rich", "safetensors", "typer")
LIMIT_S = 0.3


def run(code: str) -> Any:
    """What `code` prints in a new interpreter, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_import_alone_brings_no_package() -> None:
    loaded = run("import kda2, json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))")
    assert not {"numpy", "torch", "triton", *OPTIONAL} & set(loaded)


def test_the_calls_bring_neither_kernels_nor_optional_packages() -> None:
    loaded = run(
        "import torch, sys, json; before = set(sys.modules)\n"
        "import kda2; kda2.kda, kda2.kda_step, kda2.Gate, kda2.explain\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert "kda2.ops.kda" in loaded
    assert not {"triton", *OPTIONAL} & {m.split(".")[0] for m in loaded}
    kernels = ("kda2.backends", "kda2.ops.kda.hopper", "kda2.ops.kda.triton", "kda2.workbench")
    assert not [m for m in loaded if m.startswith(kernels)]


def test_importing_the_calls_is_quick() -> None:
    code = (
        "import json, time, torch; start = time.perf_counter()\n"
        "import kda2; kda2.kda\n"
        "print(json.dumps(time.perf_counter() - start))"
    )
    assert any(run(code) < LIMIT_S for _ in range(3))  # another process may disturb one of them
