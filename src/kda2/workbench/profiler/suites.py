"""Benchmark suites: TOML files under benchmarks/suites that list cases, gate regimes, implementations and limits."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kda2.errors import InvalidValue
from kda2.workbench.profiler.environment import checkout

# Gates that a suite can make, those of a call as a model made it, and those that a probe family makes by itself.
MadeRegime = Literal["strong", "weak", "mixed", "none", "softplus"]
GateRegime = Literal["strong", "weak", "mixed", "none", "softplus", "captured", "own"]
MADE_REGIMES: tuple[str, ...] = get_args(MadeRegime)
REGIMES: tuple[str, ...] = get_args(GateRegime)
# Records of test runs, which stand beside those of suites.
GPU_TESTS = "gpu-tests.jsonl"
# The suite of captured calls: its cases are files that only their owner has.
CAPTURED = "captured"


class Suite(BaseModel):
    """One suite. `case` holds what differs from case to case, `defaults` what does not.

    `max_rel_err` is what separates a wrong result from a rounded one: beyond it nothing is timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: str = Field(pattern=r"^\w[\w.-]*$")  # it names the file of records
    op: Literal["kda", "kda_step"]
    samples: int = Field(default=200, ge=1)
    impls: tuple[str, ...] = Field(min_length=1)
    gates: tuple[MadeRegime, ...] = Field(default=("strong", "weak"), min_length=1)
    max_rel_err: float = Field(gt=0)
    defaults: dict[str, Any] = Field(default_factory=dict)
    case: tuple[dict[str, Any], ...] = Field(min_length=1)

    @field_validator("suite")
    @classmethod
    def _has_a_file_of_its_own(cls, name: str) -> str:
        if f"{name}.jsonl" == GPU_TESTS:
            raise ValueError(f"{GPU_TESTS} holds the records of test runs")
        return name

    def cases(self, gates: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Every case in every gate regime (those of the suite, or `gates`), or in the one that it names itself."""
        regimes = gates or self.gates
        return [
            {**self.defaults, **case, "gate": gate}
            for case in self.case
            for gate in ([case["gate"]] if "gate" in case else regimes)
        ]


def find_suite(name: str) -> Path:
    """The file of a suite: a path to a TOML file, or a name under benchmarks/suites, here or in kda2's checkout."""
    given = Path(name)
    if given.suffix == ".toml" and given.exists():
        return given
    roots = [Path.cwd(), *([root] if (root := checkout()) else [])]
    folders = list(dict.fromkeys(root.resolve() / "benchmarks" / "suites" for root in roots))
    for folder in folders:
        if (found := folder / f"{name}.toml").exists():
            return found
    known = sorted({p.stem for folder in folders for p in folder.glob("*.toml")})
    wanted = f"one of {known}, or a path to a .toml file" if known else "a path to a .toml file"
    raise InvalidValue("suite", wanted, repr(name), "run from a checkout of kda2, or pass the file")


def load_suite(name: str) -> Suite:
    """Read and check a suite."""
    path = find_suite(name)
    try:
        suite = Suite.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValueError) as e:
        raise InvalidValue("suite", "a valid suite file", f"{path}: {e}") from e
    if suite.suite == CAPTURED:
        raise InvalidValue("suite", f"of another name than {CAPTURED!r}, which captured calls have", str(path))
    return suite


def case_name(case: dict[str, Any]) -> str:
    """A short name to select cases by, e.g. "H64-8x1024-strong", "H96-1300+547+2048-weak", "H32-B256-bf16-strong".
    What differs from the shipped suites' defaults follows: "H4-1024-weak-HV8-K64-V64-fp32-state-none". A probe family's
    has its name: "H8-512-strong-tiny_rows". A captured call ends in the hash of its file:
    "H4-1024-captured-3fa2b1c09d11"."""
    if "batch" in case:
        shape = f"B{case['batch']}-{case.get('state_dtype', 'fp32')}"
    else:
        lengths = list(case["seqlens"])
        alike = len(lengths) > 1 and len(set(lengths)) == 1
        shape = f"{len(lengths)}x{lengths[0]}" if alike else "+".join(map(str, lengths))
    return "-".join([f"H{case['heads']}", shape, case["gate"], *_unusual(case)])


def _unusual(case: dict[str, Any]) -> Iterator[str]:
    """What a name says only where it is not as in the shipped suites."""
    heads = case["heads"]
    for field, usual, text in (
        ("kv_heads", heads, "HV{}"),
        ("k", 128, "K{}"),
        ("v", 128, "V{}"),
        ("dtype", "bf16", "{}"),
        ("state", "fp32-in-out", "state-{}"),
        ("family", None, "{}"),
        ("cold", False, "cold"),
    ):
        value = case.get(field)
        if value is not None and value != usual:
            yield text.format(value)
    if "capture" in case:
        yield case["capture"]["sha256"]


def select(cases: Sequence[dict[str, Any]], pattern: str | None) -> list[dict[str, Any]]:
    """The cases whose name the regular expression `pattern` finds."""
    try:
        wanted = re.compile(pattern or "")
    except re.error as e:
        raise InvalidValue("cases", "a regular expression", repr(pattern), str(e)) from e
    chosen = [case for case in cases if wanted.search(case_name(case))]
    if not chosen:
        raise InvalidValue("cases", f"an expression that finds one of {[case_name(c) for c in cases]}", repr(pattern))
    return chosen
