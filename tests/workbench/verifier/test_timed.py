"""L6: turns, what is checked of a timing from outside, and that nobody's end or trick is another's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kda2.testing import Problem, make
from kda2.workbench.capture import Capture
from kda2.workbench.records import Verdict
from kda2.workbench.verifier import Children, Conditions, Limits, Subject, timed
from kda2.workbench.verifier.process import Child
from kda2.workbench.verifier.timed import Standing, _turns
from kda2.workbench.verifier.words import reasons

SAMPLES = 40
ASIDE = "\n\nimport os\n\nwith open(__file__ + '.pid', 'w') as f:\n    f.write(str(os.getpid()))\n\nCALLS = []\n\n\n"
# How a file's `run` treats what it computes; five calls warm it up.
RUNS = {
    "right.py": "def run(**x):\n    return compute(**x)\n",
    # right for some calls, then what it gave last
    "stale.py": (
        "def run(**x):\n    if len(CALLS) < 8:\n        CALLS.append(compute(**x))\n"
        "    return {name: y.clone() for name, y in CALLS[-1].items()}\n"
    ),
    # the work that is left is done when nobody looks any more
    "late.py": (
        "import time\nimport weakref\n\n\ndef run(**x):\n    outputs = compute(**x)\n"
        "    weakref.finalize(outputs['o'], time.sleep, 0.03)\n    return outputs\n"
    ),
    "raises.py": "def run(**x):\n    CALLS.append(0)\n    assert len(CALLS) < 12, 'enough'\n    return compute(**x)\n",
    "leaves.py": "def run(**x):\n    CALLS.append(0)\n    len(CALLS) < 12 or os._exit(6)\n    return compute(**x)\n",
    # says that all is done, in the judge's own words
    "forges.py": (
        "import json\nimport sys\n\n\ndef run(**x):\n    CALLS.append(0)\n    frame = sys._getframe()\n"
        "    while frame.f_code.co_name != 'main':\n        frame = frame.f_back\n"
        "    told = json.dumps({'done': True, 'token': frame.f_locals['task']['token']})\n"
        "    len(CALLS) < 12 or print(told, file=frame.f_locals['answers'], flush=True)\n    return compute(**x)\n"
    ),
    # spoils what it is compared with
    "spoils.py": (
        "import kda2\nimport kda2.ops.kda.api\n\n\ndef spoilt(*args, **kwargs):\n    raise RuntimeError('spoilt')\n\n\n"
        "kda2.kda = kda2.ops.kda.api.kda = spoilt\n\n\ndef run(**x):\n    return compute(**x)\n"
    ),
    "tampers.py": (
        "import torch\n\n\ndef run(**x):\n    torch.equal = torch.allclose\n    return compute(**x)\n"
    ),
}  # fmt: skip


def _conditions(folder: Path) -> Conditions:
    capture = folder / "call.safetensors"
    Capture(make(Problem(T=6, H=1, HV=1, K=8, V=8)), {}).save(capture)
    return Conditions(
        arch=90, device="cpu", capture=str(capture), tokens=None, families=(), sizes={}, seed=3, limits=Limits(120)
    )  # fmt: skip


class Timed:
    """All of them timed beside what the library would run; `pids` are those of the children by their subjects."""

    def __init__(self, folder: Path, plain: str) -> None:
        started = list[int]()

        class Noted(Child):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                started.append(self.pid)

        for name, run in RUNS.items():
            (folder / name).write_text(plain.replace("def run(", "def compute(") + ASIDE + run)
        subjects = {"shipped": Subject("auto")} | {name: Subject.of_file(folder / name) for name in RUNS}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timed, "Child", Noted)
            patch.setattr(timed, "_BURST_OVERHEAD_US", 8000.0)  # other tests may keep this machine's cores busy
            self.verdicts, self.timings = timed.latency(
                Children(), subjects, "shipped", _conditions(folder), SAMPLES
            )  # fmt: skip
        self.pids = dict(zip(subjects, started, strict=True))
        self.own_pids = {name: int((folder / f"{name}.pid").read_text()) for name in RUNS}

    def gates(self, name: str) -> set[str]:
        evidence = self.verdicts[name].evidence
        return set(evidence.get("gates", [evidence["gate"]] if "gate" in evidence else []))


@pytest.fixture(scope="module")
def clocked(tmp_path_factory: pytest.TempPathFactory, plain: str) -> Timed:
    return Timed(tmp_path_factory.mktemp("timed"), plain)


def test_a_right_file_is_timed_and_looked_at(clocked: Timed) -> None:
    verdict = clocked.verdicts["right.py"]
    assert verdict.outcome == "pass", reasons(verdict)
    assert verdict.evidence["samples"] == SAMPLES and verdict.evidence["against"] == "shipped"
    assert verdict.evidence["floor_us"] is None and verdict.evidence["burst_us"] > 0
    assert verdict.evidence["timed_outputs"]["checked"] == 3
    assert 0 < verdict.evidence["timed_outputs"]["margin"] <= 1 and verdict.evidence[timed.REFILLED]["ok"]


def test_answers_that_are_stale_after_a_while(clocked: Timed) -> None:
    assert clocked.verdicts["stale.py"].outcome == "invalid"
    assert {"timed outputs", "repeat"} <= clocked.gates("stale.py")
    assert clocked.verdicts["stale.py"].evidence["timed_outputs"]["checked"] == 3


def test_work_that_the_clock_does_not_see(clocked: Timed) -> None:
    verdict = clocked.verdicts["late.py"]
    assert verdict.outcome == "invalid" and clocked.gates("late.py") == {"wall"}
    assert "work goes on that its clock does not see" in reasons(verdict)[0]
    assert verdict.evidence["burst_us"] > 30_000


@pytest.mark.parametrize(("name", "says"), [
    ("raises.py", "it raised AssertionError: enough (raises.py, line "),
    ("leaves.py", "the process that timed it ended: it left with exit code 6"),
])  # fmt: skip
def test_who_ends_meanwhile_takes_nobody_along(clocked: Timed, name: str, says: str) -> None:
    verdict = clocked.verdicts[name]
    assert verdict.outcome == "fail" and reasons(verdict)[0].startswith(says)
    assert verdict.evidence["gate"] == "process"
    assert {x for x, v in clocked.verdicts.items() if v.outcome == "fail"} == {"raises.py", "leaves.py", "forges.py"}
    assert len(clocked.timings["shipped"].device_us) == len(clocked.timings["right.py"].device_us) == SAMPLES


def test_a_forged_answer_ends_the_file_and_not_the_judge(clocked: Timed) -> None:
    assert clocked.verdicts["forges.py"].outcome == "fail" and clocked.gates("forges.py") == {"protocol"}


def test_every_file_has_a_process_of_its_own(clocked: Timed) -> None:
    assert {name: clocked.pids[name] for name in RUNS} == clocked.own_pids
    assert len(set(clocked.pids.values())) == len(RUNS) + 1


def test_what_it_is_compared_with_cannot_be_spoilt(clocked: Timed) -> None:
    assert clocked.verdicts["shipped"].outcome == "pass", reasons(clocked.verdicts["shipped"])
    assert clocked.verdicts["spoils.py"].outcome == "pass", reasons(clocked.verdicts["spoils.py"])


def test_tampering_while_timed_is_seen(clocked: Timed) -> None:
    assert "tamper" in clocked.gates("tampers.py") and clocked.verdicts["tampers.py"].outcome == "invalid"


def test_only_timings_that_are_believed_are_given(clocked: Timed) -> None:
    assert set(clocked.timings) == {"shipped", "right.py", "spoils.py"}


def test_times_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("_burst", "_timed_outputs", "_refilled"):
        monkeypatch.setattr(timed, check, lambda *_: None)

    def why(floor: float | None, wall_s: float) -> dict[str, str]:
        standing = Standing("it", Subject("torch"), [20.0, 30.0, 40.0], [5.0, 5.0, 5.0])
        timed._cross_check(Stand("it"), standing, floor, wall_s)  # type: ignore[arg-type]
        return standing.why

    assert why(None, 1.0) == why(29.9, 1.0) == why(30.0, 91e-6) == {}
    assert why(45.5, 1.0) == {"floor": "30.0 us is below the 45.5 us that the device's datasheet allows"}
    assert why(None, 89e-6) == {"wall": "its samples add up to more than the 0.0 s that the measurement took"}


def test_no_floor_without_a_datasheet(tmp_path: Path) -> None:
    assert timed.datasheet_floor_us(_conditions(tmp_path)) is None


# The turns, without a process.


class Stand:
    """Notes who is timed; whoever is in `ends` ends the process at its n-th call, and everybody in it."""

    def __init__(self, *names: str, us: float = 1.0, ends: tuple[str, int] = ("", 0)) -> None:
        self.subjects = {name: Standing(name, Subject("torch")) for name in names}
        self.us, self.ends, self.calls = us, ends, list[str]()

    def time(self, names: list[str]) -> None:
        assert names
        for name in names:
            self.calls.append(name)
            self.subjects[name].device_us.append(self.us)
            self.subjects[name].call_us.append(self.us)
            if self.ends == (name, self.calls.count(name)):
                for s in self.subjects.values():
                    s.ended = "gone"


def turned(samples: int, *stands: Stand) -> None:
    every = {name: s for stand in stands for name, s in stand.subjects.items()}
    _turns(every, {name: stand for stand in stands for name in stand.subjects}, samples)  # type: ignore[misc]


def test_everybody_is_timed_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    own, file = Stand("a", "b"), Stand("f")
    taken = list[str]()
    for stand in (own, file):
        monkeypatch.setattr(stand, "time", lambda names: taken.extend(names))
    turned(30, own, file)
    turns = [taken[i : i + 3] for i in range(0, 90, 3)]
    assert all(sorted(turn) == ["a", "b", "f"] for turn in turns) and len(taken) == 90
    assert all(second == first[::-1] for first, second in zip(turns[::2], turns[1::2], strict=True))
    assert len({tuple(turn) for turn in turns}) > 2


def test_a_slow_one_is_passed_over_after_enough_turns() -> None:
    slow, fast = Stand("slow", us=timed.LIMIT_S * 1e6), Stand("fast")
    turned(30, slow, fast)
    assert (len(slow.calls), len(fast.calls)) == (timed.FEWEST_TURNS, 30)


def test_who_has_ended_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own, file = Stand("a", "b", ends=("a", 2)), Stand("f")
    orders: Iterator[list[str]] = itertools.repeat(["a", "f", "b"])
    monkeypatch.setattr(timed, "orders_of", lambda *_: orders)
    turned(5, own, file)
    assert own.calls == ["a", "b", "a"] and file.calls == ["f"] * 5


# What a standing comes to.


def verdict_of(**changes: Any) -> Verdict:
    standing = Standing("it", Subject("torch"), [2.0, 3.0, 4.0], [5.0, 5.0, 5.0])
    for name, value in changes.items():
        setattr(standing, name, value)
    return standing.verdict(("base", None), 1.5, 0.0)


def test_a_standing_as_a_verdict() -> None:
    found = verdict_of()
    assert (found.stage, found.outcome, found.evidence["median_us"], found.evidence["max_us"]) == ("L6", "pass", 3, 4)
    assert found.evidence["call_us"] == 5 and found.evidence["floor_us"] == 1.5 and "against" not in found.evidence
    why = {"wall": "a", "repeat": "b"}
    assert verdict_of(why=why).outcome == "invalid" and verdict_of(why=why).evidence["gates"] == why
    assert verdict_of(ended="gone", why={"outputs": "gone"}).evidence == {"ended": "gone", "gate": "outputs"}
    assert verdict_of(device_us=[]).evidence == {"ended": "it was not timed", "gate": "process"}
