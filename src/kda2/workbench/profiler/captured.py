"""Benchmarks on a captured call: its file as the one case of the suite `captured`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda2.errors import InvalidValue
from kda2.workbench.capture import Capture
from kda2.workbench.profiler.environment import file_hash
from kda2.workbench.profiler.problems import DTYPES, CapturedCase, Options, Problem
from kda2.workbench.profiler.suites import CAPTURED, Suite

IMPLS = ("kda2:hopper", "kda2:triton", "fla", "flash_kda", "cudnn")
MAX_REL_ERR = 2e-2
_DIGITS = 12


def suite(path: Path) -> Suite:
    """The suite whose one case is the call in `path`. Raises `InvalidValue` for what is no capture, and for a call that
    no benchmark can name."""
    case = _case(Capture.load(path, "suite"), path).model_dump(mode="json")
    return Suite(suite=CAPTURED, op="kda", impls=IMPLS, max_rel_err=MAX_REL_ERR, case=(case,))


def problem(case: CapturedCase, path: Path, where: torch.device) -> Problem:
    """The call on a device, in memory of its own. Raises `InvalidValue` if the file is no longer that of the case."""
    capture = _read(path, case.capture.sha256)
    kwargs, gate = capture.kwargs, capture.gate
    tensors = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
    tensors |= {name: x for name, x in (("A_log", gate.A_log), ("dt_bias", gate.dt_bias)) if x is not None}
    facts = case.capture
    options = Options(
        facts.scale, bool(kwargs["output_final_state"]), facts.gate, facts.lower_bound, facts.qk_l2norm,
        facts.beta_sigmoid, facts.allow_neg_eigval, facts.state_layout,
    )  # fmt: skip
    return Problem(case, {name: x.to(where, copy=True) for name, x in tensors.items()}, options)


@lru_cache(maxsize=1)  # every set of inputs begins here
def _read(path: Path, digest: str) -> Capture:
    if _digest(path) != digest:
        raise InvalidValue("suite", f"the file whose SHA-256 begins {digest}", f"{path}, which has changed")
    return Capture.load(path, "suite")


def _case(capture: Capture, path: Path) -> CapturedCase:
    k = capture.kwargs
    for x in (k["q"], k["g"], k.get("initial_state")):
        if x is not None and x.dtype not in DTYPES.values():
            raise InvalidValue("suite", f"a call in {', '.join(DTYPES)}", f"{path} with a tensor in {x.dtype}")
    case, options = capture.case(), capture.options()
    tokens = sum(case["seqlens"])
    if not tokens:
        raise InvalidValue("suite", "a call with a token in a sequence", f"{path} without one")
    del options["output_final_state"]
    same_heads = case["heads"] == case["qk_heads"]
    fields: dict[str, Any] = {
        **{name: case[name] for name in ("k", "v", "dtype", "seqlens", "state")},
        "heads": case["qk_heads"],
        "kv_heads": None if same_heads else case["heads"],
        "gate": CAPTURED,
        "capture": {
            "sha256": _digest(path),
            "gate": capture.gate.kind,
            "lower_bound": capture.gate.lower_bound,
            **options,
            "packed": k.get("cu_seqlens") is not None,
            "tail": k["q"].shape[0] * k["q"].shape[1] - tokens,
            "g_dtype": case["g_dtype"],
        },
    }
    return CapturedCase.model_validate(fields)


def _digest(path: Path) -> str:
    return file_hash(path)[:_DIGITS]
