"""Measuring faithful implementations, from which the tolerances come; `kda2 spec calibrate` is the command.

Faithful are the token recurrence in the inputs' own precision (`reference`), the chunked form in fp32 (`torch`), the
same with matrix operands rounded to bf16 in chunks of 16, 32 and 64 tokens (`rounded_16` ...), and the kernels of the
library, each where it runs. Every one is run on the same calls, and every one has to pass.

A call whose limits are made for itself alone (inputs that amplify every rounding, few numbers) is judged, and not taken
into the calibration: its errors are chance, or its own affair.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import torch

import kda2
from kda2.contract import Tolerance
from kda2.contract.calibration import Calibration, rounded_up
from kda2.errors import InvalidValue, KDA2Error
from kda2.testing.compare import Comparison
from kda2.testing.families import FAMILIES, Family
from kda2.testing.inputs import Problem, make
from kda2.testing.limits import COARSEST, NAMES, RECURRENT_TOKENS, copies_needed
from kda2.testing.oracle import Outputs, same_roundings
from kda2.testing.verify import trial

# A limit that is more times what the measurements ask for is too loose.
LOOSE = 3.0
OUTPUT = {"o": "o", "final state": "final_state"}


@dataclass(frozen=True)
class Size:
    """What a problem is changed to, and the part of the seeds that it gets: large tensors differ little by seed."""

    changes: Mapping[str, Any]
    share: float = 1.0

    def seeds(self, seeds: int) -> int:
        return max(1, math.ceil(seeds * self.share))

    def __str__(self) -> str:
        return " ".join(f"{name}{x}" for name, x in self.changes.items())


# The verifier's own sizes, those that `hopper` serves, many rows of few tokens, many tokens, and few numbers; some of
# them without an initial state too, beside which errors are small.
SIZES = (
    Size({"T": 70, "B": 2, "H": 2, "HV": 4, "K": 24, "V": 20}),
    Size({"T": 70, "B": 1, "H": 1, "HV": 1, "K": 32, "V": 32}),
    Size({"T": 8, "B": 16, "H": 2, "HV": 4, "K": 24, "V": 20}, 0.5),
    Size({"T": 8, "B": 16, "H": 2, "HV": 4, "K": 64, "V": 64}, 0.25),
    Size({"T": 300, "B": 2, "H": 2, "HV": 4, "K": 128, "V": 100}, 0.1),
    Size({"T": 300, "B": 1, "H": 2, "HV": 4, "K": 128, "V": 128}, 0.1),
    Size({"T": 130, "B": 1, "H": 1, "HV": 2, "K": 256, "V": 64}, 0.1),
    Size({"T": 4096, "B": 1, "H": 1, "HV": 2, "K": 128, "V": 128}, 0.01),
    Size({"T": 70, "B": 2, "H": 2, "HV": 4, "K": 24, "V": 20, "state": None}, 0.5),
    Size({"T": 8, "B": 16, "H": 2, "HV": 4, "K": 24, "V": 20, "state": None}, 0.5),
    Size({"T": 300, "B": 1, "H": 2, "HV": 4, "K": 128, "V": 128, "state": None}, 0.05),
    Size({"T": 3, "B": 1, "H": 1, "HV": 1, "K": 20, "V": 2}),
    Size({"T": 4, "B": 1, "H": 1, "HV": 1, "K": 2, "V": 8}),
)
# Rows, which are tokens of a head, that the interpreter gets through in a few seconds.
INTERPRETED_ROWS = 400


def _registered(name: str) -> Callable[..., Outputs]:
    return lambda kwargs: kda2.kda(**kwargs, impl=name)


def _rounded(chunk: int) -> Callable[..., Outputs]:
    def run(kwargs: Mapping[str, Any]) -> Outputs:
        operand = None if kwargs["q"].dtype == torch.float32 else torch.bfloat16
        return same_roundings(kwargs, chunk, operand)

    return run


REGISTERED = ("reference", "torch", "triton", "hopper")
FAITHFUL: dict[str, Callable[..., Outputs]] = {
    **{name: _registered(name) for name in REGISTERED},
    **{f"rounded_{chunk}": _rounded(chunk) for chunk in (16, 32, 64)},
}


@dataclass
class Findings:
    """What was measured: the entries of the file; by implementation and row the worst error over its limit; in words
    each call on which an implementation is beyond its limits; why others were not run; and the dtype and family before
    which an interrupt ended it ("" for none)."""

    calibrations: tuple[Calibration, ...] = ()
    margins: dict[tuple[str, str, str], dict[str, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    stopped: str = ""


def measure(
    impls: Sequence[str],
    device: str,
    seeds: int,
    dtypes: Collection[str] = tuple(NAMES.values()),
    say: Callable[[str], None] = lambda line: None,
    families: Collection[str] = (),
) -> Findings:
    """Run faithful implementations on every family (of `families`, if any), dtype and size; `say` hears of each family.

    Raises `InvalidValue` for an unknown name or dtype, and `KDA2Error` if an implementation gives NaN or an output of
    another shape, which no limit would excuse.
    """
    _check("impls", impls, FAITHFUL)
    _check("dtypes", dtypes, NAMES.values())
    found = Findings(missing={name: why for name in impls if (why := _refusal(name, make(_probe(device))))})
    errors: dict[str, dict[str, Any]] = {name: {} for name in impls if name not in found.missing}
    for dtype in (dtype for dtype, name in NAMES.items() if name in dtypes):
        for family in (f for f in FAMILIES.values() if f.name in (families or FAMILIES)):
            say(f"{NAMES[dtype]} {family.name}")
            try:
                for size in SIZES:
                    for seed in range(size.seeds(seeds)):
                        problem = replace(Problem(dtype=dtype, device=device, seed=seed), **size.changes)
                        _measure_call(family, problem, f"{size}, seed {seed}", errors, found)
            except KeyboardInterrupt:  # what is whole is kept
                found.stopped = f"{NAMES[dtype]} {family.name}"
                for rows in errors.values():
                    rows.get(NAMES[dtype], {}).pop(family.name, None)
                break
        if found.stopped:
            break
    today = datetime.date.today().isoformat()
    found.calibrations = tuple(
        Calibration(name, _device(name, device), today, _versions(name), seeds, tuple(map(str, SIZES)), rows)
        for name, rows in errors.items()
        if rows
    )
    return found


def _check(argument: str, names: Collection[str], known: Collection[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise InvalidValue(argument, f"among {', '.join(known)}", repr(unknown[0]))


def _probe(device: str) -> Problem:
    """A call that every implementation serves on its device."""
    return Problem(T=4, K=64, V=64, device=device)


def _measure_call(
    family: Family, problem: Problem, which: str, errors: Mapping[str, dict[str, Any]], found: Findings
) -> None:
    kwargs = family.build(problem)
    serve = [name for name in errors if not _refusal(name, kwargs) and not _is_too_long(name, kwargs)]
    if not serve:
        return
    on, dtype = trial(family, problem), NAMES[problem.dtype]
    calibrates = family.judge == "tolerance" and not copies_needed(on.kwargs, on.want)
    for name in serve:
        verdict = on.judge(FAITHFUL[name](on.kwargs))
        if math.isinf(verdict.margin):
            raise KDA2Error(f"{name} is not faithful in {dtype}, {which}: {verdict.explain()}")
        if not verdict.ok:
            found.faults.append(f"{name}, {dtype}, {which}: {verdict.explain()}")
        for c in verdict.comparisons:
            output = OUTPUT[c.quantity]
            margins = found.margins.setdefault((dtype, family.name, output), {})
            margins[name] = max(margins.get(name, 0.0), c.margin)
            if calibrates and not _is_stored_coarser(on.kwargs, output):
                _record(errors[name].setdefault(dtype, {}).setdefault(family.name, {}), output, c)


def _record(row: dict[str, tuple[float, ...]], output: str, c: Comparison) -> None:
    now = c.relative_l2, c.worst.rms_off if c.worst else 0.0
    row[output] = tuple(max(a, rounded_up(b)) for a, b in zip(row.get(output, (0.0, 0.0)), now, strict=True))


def _is_stored_coarser(kwargs: Mapping[str, Any], output: str) -> bool:
    """A state of fewer digits than the inputs have is held to the limits of its own dtype."""
    initial, rank = kwargs["initial_state"], COARSEST.index
    return bool(output == "final_state" and initial is not None and rank(initial.dtype) < rank(kwargs["v"].dtype))


def _refusal(name: str, kwargs: Mapping[str, Any]) -> str:
    """Why an implementation does not serve a call, "" if it does."""
    if name not in REGISTERED:
        return ""
    explanation = kda2.explain(kda2.kda, **kwargs, impl=name)
    return "" if explanation.chosen else str(dict(explanation.verdicts)[name])


def _is_too_long(name: str, kwargs: Mapping[str, Any]) -> bool:
    if name == "triton" and kwargs["q"].device.type == "cpu":
        return bool(kwargs["beta"].numel() > INTERPRETED_ROWS)
    return bool(name == "reference" and kwargs["q"].shape[1] > RECURRENT_TOKENS)


def _device(name: str, device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return "interpreter" if name == "triton" else "cpu"


def _versions(name: str) -> dict[str, str]:
    own = {"triton": metadata.version("triton")} if name in ("triton", "hopper") else {}
    return {"kda2": kda2.__version__, "torch": torch.__version__.partition("+")[0], **own}


def changes(old: Sequence[Tolerance], new: Sequence[Tolerance]) -> Iterator[tuple[Tolerance | None, Tolerance | None]]:
    """(before, after) of each row whose limits differ, None where there is no such row."""
    rows = [{(t.dtype, t.family, t.output): t for t in table} for table in (old, new)]
    for row in sorted({*rows[0], *rows[1]}):
        before, after = (table.get(row) for table in rows)
        if before is None or after is None or _limits(before) != _limits(after):
            yield before, after


def loose(stored: Sequence[Tolerance], measured: Sequence[Tolerance]) -> Iterator[tuple[Tolerance, Tolerance]]:
    """(stored, measured) of each row with a stored limit of more than `LOOSE` times what the measurements ask for."""
    for before, after in changes(stored, measured):
        if before and after and any(a > LOOSE * b for a, b in zip(_limits(before), _limits(after), strict=True)):
            yield before, after


def _limits(t: Tolerance) -> tuple[float, float]:
    return t.relative_l2, t.element_rms
