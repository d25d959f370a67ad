"""What this machine can do with kda2: versions, devices, tools, implementations, extras, folders, platforms."""

from __future__ import annotations

import platform
import warnings
from importlib.util import find_spec
from typing import Any

import torch

import kda2
from kda2 import device
from kda2.contract import Query
from kda2.dispatch import explain_choice
from kda2.workbench.profiler.environment import driver, package_version

EXTRAS = {
    "workbench": ("pydantic", "typer", "rich", "jinja2", "optuna", "plotly", "safetensors"),
    "test": ("pytest", "pytest_timeout", "hypothesis", "xdist"),
    "dev": ("ruff", "mypy"),
}
PEERS = {"fla": "fla-core", "flash_kda": "flash-kda", "cudnn": "nvidia-cudnn-frontend"}
# Beginnings of the versions that the tests have run with.
TESTED = {"python": ("3.11.", "3.12."), "torch": ("2.11.", "2.13."), "triton": ("3.6.0", "3.7.1")}
PLATFORMS = {
    "Linux, NVIDIA sm_80 or newer": "everything: triton and torch kernels (hopper's on sm_90), verification, "
    "inspection, measuring",
    "Linux without a GPU": "torch and reference; Triton's interpreter; offline builds for any NVIDIA GPU",
    "WSL 2": "as Linux",
    "macOS, Windows": "torch and reference on the CPU; Triton is not available there",
    "ROCm": "GPU kernels not supported; torch and reference on the CPU",
}


def examine() -> dict[str, dict[str, Any]]:
    """Findings by heading, as plain data."""
    return {
        "Software": _software(),
        "Devices": _devices(),
        "Implementations that run here": _implementations(),
        "Extras": _extras(),
        "Peers for benchmarks": {name: _installed(name, dist) for name, dist in PEERS.items()},
        "Platforms": PLATFORMS,
    }


def _software() -> dict[str, Any]:
    python, triton = platform.python_version(), package_version("triton")
    return {
        "kda2": kda2.__version__,
        "python": f"{python}{_untested('python', python)} on {platform.system()} {platform.machine()}{_wsl()}",
        "torch": f"{torch.__version__}{_untested('torch', torch.__version__)}, CUDA "
        f"{torch.version.cuda or 'not built in'}{_rocm()}",
        "triton": f"{triton}{_untested('triton', triton)}" if triton else "not installed",
        **_tools(),
    }


def _untested(what: str, version: str) -> str:
    """A remark on a release series that nobody has run the tests with."""
    known = TESTED[what]
    return "" if version.startswith(known) else f" (not tested; tested: {', '.join(k.rstrip('.') for k in known)})"


def _wsl() -> str:
    return " (WSL)" if "microsoft" in platform.release().lower() else ""


def _rocm() -> str:
    return f", ROCm {torch.version.hip}" if torch.version.hip else ""


def _tools() -> dict[str, str]:
    """Binary tools of NVIDIA's that builds and inspection use, and where Triton keeps compiled kernels."""
    if find_spec("triton") is None:
        return {}
    import triton

    tools = {name: getattr(triton.knobs.nvidia, name) for name in ("ptxas", "cuobjdump", "nvdisasm")}
    found = {name: f"{tool.version} at {tool.path}" for name, tool in tools.items()}
    return found | {"kernel cache": _cache()}


def _cache() -> str:
    """Where compiled kernels are kept, and whether they can be."""
    import triton

    from kda2.backends.triton import cache

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.ensure_writable()
    return f"{triton.knobs.cache.dir}{', writable' if not caught else f' ({caught[0].message})'}"


def _devices() -> dict[str, Any]:
    found = {
        f"cuda:{i}": f"{g.name}, sm_{g.arch}, {g.sm_count} SMs, {g.memory_bytes / 2**30:.0f} GiB, driver {driver()}"
        for i, g in enumerate(device.gpus())
    }
    return found or {"cuda": "no CUDA device: verification runs in Triton's interpreter, and nothing is measured"}


def _implementations() -> dict[str, str]:
    gpus = device.gpus()
    where = ("cuda", gpus[0].arch) if gpus else ("cpu", 0)
    rows = {}
    for op in ("kda", "kda_step"):
        query = Query(op, where[0], where[1], device.interpreted(), "bf16", 128, 128, needs_grad=False)
        explanation = explain_choice(query)
        for name, check in explanation.verdicts:
            can = "yes, the default" if name == explanation.chosen else "yes"
            rows[f"{op}, {name}"] = can if check.ok else f"no: {check}"
    return rows


def _extras() -> dict[str, str]:
    rows = {}
    for extra, packages in EXTRAS.items():
        missing = [p for p in packages if find_spec(p) is None]
        rows[extra] = f"missing {', '.join(missing)}: pip install '.[{extra}]'" if missing else "installed"
    return rows


def _installed(module: str, distribution: str) -> str:
    if find_spec(module) is None:
        return "not installed"
    return package_version(distribution) or "installed, version unknown"
