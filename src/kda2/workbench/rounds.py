"""The rules of the loop's rounds: which stage to attack, what a round brought and what it cost, and when to stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

# What gains less than this many per cent, a round or a candidate over its parent, has gained nothing.
WORTH_PERCENT = 1.0
# How many times what the cheapest per cent cost a per cent may cost before the curve has bent.
KNEE = 8.0
GO_ON = "go on"
STOP_RULES = {
    "rounds": "as many rounds as were asked for",
    "budget": "the time is used up: another round like the last would not fit",
    "stagnation": f"no stage has yielded {WORTH_PERCENT:g} % since the best was found",
    "knee": f"the last per cent cost more than {KNEE:g} times what the cheapest did",
    "empty": "nothing is left to propose",
}


@dataclass(frozen=True)
class Gap:
    """A stage's time beside its floor, in microseconds."""

    stage: str
    us: float
    floor_us: float

    @property
    def lost_us(self) -> float:
        return self.us - self.floor_us

    def __str__(self) -> str:
        times = self.us / self.floor_us
        return f"{self.stage} takes {self.us:.4g} us, {times:.1f} times its floor of {self.floor_us:.4g}"


def attack(gaps: Sequence[Gap], barren: frozenset[str]) -> Gap | None:
    """The stage that loses most against its floor, of those that have not just yielded nothing."""
    left = [gap for gap in gaps if gap.stage not in barren]
    return max(left, key=lambda gap: gap.lost_us) if left else None


@dataclass(frozen=True)
class Round:
    """What one round did. `seconds` is its cost, unless it was `interrupted`: then they are those since it went on.
    `candidates` say what became of each proposal."""

    round: int
    stage: str
    why: str
    candidates: dict[str, str]
    hypotheses: dict[str, str]
    best: str
    best_us: float
    label: str
    gain_percent: float
    seconds: float
    interrupted: bool = False
    decision: str = GO_ON
    says: str = ""

    @property
    def gained(self) -> bool:
        return self.gain_percent >= WORTH_PERCENT

    @property
    def seconds_per_percent(self) -> float | None:
        """What one per cent cost; None for a round that gained none, or whose cost is not known."""
        return self.seconds / self.gain_percent if self.gained and not self.interrupted else None

    def plain(self) -> dict[str, Any]:
        """As a ledger line has it."""
        return asdict(self) | {"seconds_per_percent": self.seconds_per_percent}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Round:
        return cls(**{name: x for name, x in plain.items() if name != "seconds_per_percent"})


def barren(rounds: Sequence[Round]) -> frozenset[str]:
    """The stages that yielded nothing since the last gain."""
    stages: set[str] = set()
    for r in rounds:
        stages = set() if r.gained else stages | {r.stage}
    return frozenset(stages)


def past_the_knee(rounds: Sequence[Round]) -> bool:
    """Whether the newest gain cost so much more than the cheapest that the curve has bent."""
    costs = [c for r in rounds if (c := r.seconds_per_percent) is not None]
    return len(costs) > 1 and rounds[-1].seconds_per_percent is not None and costs[-1] > KNEE * min(costs)


def next_percent(rounds: Sequence[Round]) -> str:
    """What the next per cent would cost, as far as the rounds tell."""
    costs = [c for r in rounds if (c := r.seconds_per_percent) is not None]
    if not costs:
        spent = sum(r.seconds for r in rounds)
        return f"no per cent has been gained in {spent:.0f} s"
    return f"the next per cent would cost about {costs[-1]:.0f} s if it costs what the last did"


def decided(rounds: Sequence[Round], stages: Sequence[str], most_rounds: int | None, left_s: float | None) -> Round:
    """The newest round with what follows from it, and the sentence that tells it all."""
    last = rounds[-1]
    decision = _decision(rounds, stages, most_rounds, left_s)
    return replace(last, decision=decision, says=_sentence(last, decision, next_percent(rounds)))


def _decision(rounds: Sequence[Round], stages: Sequence[str], most_rounds: int | None, left_s: float | None) -> str:
    if most_rounds is not None and len(rounds) >= most_rounds:
        return "rounds"
    if barren(rounds) >= set(stages):
        return "stagnation"
    if past_the_knee(rounds):
        return "knee"
    if left_s is not None and rounds[-1].seconds > left_s:
        return "budget"
    return GO_ON


def _sentence(r: Round, decision: str, cost: str) -> str:
    became = Counter(_kind(text) for text in r.candidates.values())
    counts = ", ".join(f"{n} {kind}" for kind, n in became.items())
    gain = f"{r.gain_percent:g} % gained" if r.gained else "nothing gained"
    gain += f" in {r.seconds:g} s"
    if r.interrupted:
        gain += " since it was interrupted"
    held = Counter(r.hypotheses.values())
    hypotheses = f"hypotheses: {', '.join(f'{n} {word}' for word, n in held.items())}; " if held else ""
    then = "goes on" if decision == GO_ON else f"stops: {STOP_RULES[decision]}"
    return (
        f"round {r.round}: {r.why}; {len(r.candidates)} candidates for it ({counts}); best {r.best}, "
        f"{r.best_us:g} us {r.label}, {gain}; {hypotheses}{cost}; {then}"
    )


def _kind(became: str) -> str:
    """What became of a candidate, without its particulars."""
    return "not run" if became.startswith("not_run") else became.partition(",")[0]
