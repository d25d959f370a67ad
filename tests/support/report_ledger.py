"""Ledgers to report on, written as a run writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kda2.workbench.floors import kernel_floors
from kda2.workbench.ledger import Ledger
from kda2.workbench.planner import Problem, plan
from kda2.workbench.records import Candidate, Expected, Verdict
from kda2.workbench.rounds import Round, decided

BOOK = plan("kda", "sm_90", Problem(B=1, T=512, H=4, HV=4, K=128, V=128, C=32, dtype="bf16", gate="softplus"))
FLOORS = kernel_floors(BOOK)
SHIPPED, FASTER, SPILLS, TWIN, FILE = (
    "triton",
    "triton state BV=16",
    "triton state BV=128",
    "triton twin",
    "no_delta.py",
)
SPILT = "pruned: state spills 264 bytes a thread, the shipped one 0"
SAME = f"the same machine code as {FASTER}"
DIAGNOSIS = "O is off by 0.72. It computes what the mistake no_delta computes: the correction is missing."
CAPTURE = {
    "batch": 1, "tokens": 512, "heads": 4, "value_heads": 4, "K": 128, "V": 128, "sequences": 1, "dtype": "bfloat16",
    "gate": "softplus", "lower_bound": None, "scale": 0.088, "qk_l2norm": True, "beta_sigmoid": True,
    "allow_neg_eigval": False, "state_layout": "kv", "output_final_state": True, "origin": {"layer": "a layer"},
    "file": "capture.safetensors", "sha256": "ab" * 32,
    "regime": {
        "half_life_tokens": {"p50": 18.25}, "resets": 0,
        "histogram": {"log10_of_minus_log_decay": [-3.0, -2.0, -1.0], "count": [3, 1]},
    },
}  # fmt: skip
RUN = {
    "op": "kda", "arch": 90, "seed": 7, "families": ["random"], "rounds": 2, "kernels": [], "capture": CAPTURE,
    "environment": {"device": "NVIDIA H200", "kda2": "0.1.0", "torch": "2.11", "triton": "3.6.0"},
}  # fmt: skip


def stage_code(registers: int = 128, spills: int = 0, shared: int = 8192) -> dict[str, Any]:
    return {
        "num_warps": 4, "registers": registers, "spills": spills, "shared": shared, "instructions": 1000, "ctas": 132,
        "bytes": 4_800_000, "trips": 1, "groups": {"HMMA": 32, "LDL": 0, "STL": 0},
        "occupancy": {"ctas": 3, "limit": "registers"},
    }  # fmt: skip


def family(relative_l2: float, **more: Any) -> dict[str, Any]:
    quantity = {
        "ok": relative_l2 <= 0.006, "relative_l2": relative_l2, "limit": 0.006, "worst": "token 3",
        "worst_rms_off": 0.1, "element_limit": 0.08, "says": f"o: relative L2 {relative_l2}",
    }  # fmt: skip
    return {"ok": quantity["ok"], "margin": relative_l2 / 0.006, "quantities": {"o": quantity}, **more}


@dataclass
class Writing:
    """Writes a ledger as a run does."""

    path: Path
    run: Mapping[str, Any] = field(default_factory=lambda: RUN)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.path)
        self.ledger.append("run", self.run)

    def candidate(self, name: str, **fields: Any) -> None:
        fields = {"op": "kda", "impl": "triton", "writer": "kda2", **fields}
        candidate = Candidate.model_validate({"name": name, **fields})
        self.ledger.append("candidate", candidate.model_dump(mode="json", exclude={"verdicts", "latency_us"}))

    def verdict(self, name: str, stage: str, outcome: str = "pass", **evidence: Any) -> None:
        verdict = Verdict.model_validate({"stage": stage, "outcome": outcome, "evidence": evidence, "seconds": 0.5})
        self.ledger.append("verdict", {"candidate": name, "verdict": verdict.model_dump(mode="json")})

    def not_run(self, name: str, stages: str, why: str) -> None:
        for stage in stages.split():
            self.verdict(name, stage, f"not_run({why})")

    def code(self, name: str, state: dict[str, Any]) -> None:
        self.verdict(name, "L0")
        self.verdict(name, "L1", stages={"prepare": stage_code(), "state": state, "output": stage_code(shared=1536)})
        self.verdict(name, "L2")

    def correct(self, name: str) -> None:
        self.not_run(name, "L3", "judged on the GPU")
        self.verdict(name, "L4", families={"captured call": family(0.003), "random": family(0.004)}, on="cuda:0")

    def timed(self, name: str, us: float, state_us: float, speed: tuple[float, float, float] | None = None) -> None:
        against: dict[str, Any] = {}
        if speed is not None:
            low, value, high = speed
            against = {
                "against": SHIPPED, "speed": {"low": low, "value": value, "high": high, "verdict": "faster"},
            }  # fmt: skip
        self.verdict(
            name, "L6", median_us=us, p95_us=None, max_us=us + 2, call_us=90.0, samples=200, host_paced=False,
            floor_us=4.0, stages_us={"prepare": 5.0, "state": state_us, "output": 4.0},
            **{"refilled inputs": family(0.003)}, **against,
        )  # fmt: skip

    def rounds(self) -> None:
        first = Round(
            1, "state", "state takes 30.0 us, 9.6 times its floor of 3.1",
            {FASTER: "correct, 40 us", SPILLS: f"not_run({SPILT})", TWIN: f"not_run({SAME})"},
            {FASTER: "held", SPILLS: "refuted"}, FASTER, 40.0, "measured", 20.0, 50.0,
        )  # fmt: skip
        second = Round(2, "prepare", "prepare is left", {}, {}, FASTER, 40.0, "measured", 0.0, 8.0)
        told = [decided([first], ("prepare", "state"), None, None)]
        told.append(decided([*told, second], ("prepare", "state"), 2, None))
        for round_ in told:
            self.ledger.append("round", round_.plain())


def shipped_and_variants(w: Writing) -> None:
    """What ships, a file that is wrong, and what the first round proposed."""
    w.candidate(SHIPPED, parameters={"prepare": {"BT": 32}})
    w.candidate(FILE, impl="file", writer="file", parameters={"file": f"/home/{FILE}"})
    w.code(SHIPPED, stage_code(162, shared=47104))
    w.correct(SHIPPED)
    w.timed(SHIPPED, 50.0, 30.0)
    w.verdict(FILE, "L0")
    w.not_run(FILE, "L1 L2", "it launches no Triton kernel")
    w.verdict(FILE, "L4", "fail", families={"random": family(0.72, says=DIAGNOSIS)}, on="cuda:0")
    w.ledger.append(
        "plan", {"says": "floors of the stages", "floors_us": FLOORS, "book": BOOK.model_dump(mode="json")}
    )  # fmt: skip
    expected = Expected(metric="state: ctas", change="higher")
    for name in (FASTER, SPILLS, TWIN):
        about = f"{name.removeprefix('triton ')}: more CTAs"
        w.candidate(name, writer="kda2 template", parent=SHIPPED, hypothesis=about, expected=expected)
    w.code(FASTER, stage_code(126, shared=23552))
    w.code(SPILLS, stage_code(255, spills=264))
    w.code(TWIN, stage_code(126, shared=23552))
    w.not_run(SPILLS, "L3 L4", SPILT)
    w.not_run(TWIN, "L3 L4", SAME)
    w.correct(FASTER)
    w.timed(FASTER, 40.5, 21.0, (1.22, 1.25, 1.27))


def finished(w: Writing) -> None:
    """The rest of a run that chose."""
    w.rounds()
    for name in (SPILLS, TWIN, FILE):
        w.not_run(name, "L6", "its numerics did not pass")
    for name in (SHIPPED, FILE, FASTER, SPILLS, TWIN):
        w.not_run(name, "L5 L7", "not part of this job")
    w.not_run(FILE, "L3", "judged on the GPU")
    ranking = [{"name": FASTER, "us": 40.0}, {"name": SHIPPED, "us": 50.0, "host_paced": True}]
    w.ledger.append(
        "choice",
        {
            "chosen": FASTER, "label": "measured", "rule": "lowest median of the 2 best", "ranking": ranking,
            "stopped_by": "rounds", "why": "as many rounds as were asked for",
            "cost": "the next per cent would cost 2 s",
        },
    )  # fmt: skip
