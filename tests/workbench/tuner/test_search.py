"""The search: seeded, inside the declared space, never twice the same, and drawn to what was fast."""

from __future__ import annotations

import itertools

from kda2.workbench.records import Candidate
from kda2.workbench.tuner import Search

SPACE = {"state": {"BV": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3, 4)}, "output": {}}
BASE = {"state": {"BV": 32, "num_warps": 4, "num_stages": 3}, "output": {"BV": 128}}
BEST = Candidate(name="triton", op="kda", impl="triton", writer="kda2", parameters=BASE)


def time_of(config: dict[str, int]) -> float:
    """Fastest at BV=16, 2 warps, 4 stages."""
    return 1.0 + abs(config["BV"] - 16) / 16 + abs(config["num_warps"] - 2) + abs(config["num_stages"] - 4)


def search(seed: int, known: int = 0) -> Search:
    made = Search(SPACE, BASE, BEST, "state", seed)
    grid = itertools.product(*SPACE["state"].values())
    for values in itertools.islice(grid, 0, None, 5):
        if known:
            config = dict(zip(SPACE["state"], values, strict=True))
            made.know({"state": config}, time_of(config))
            known -= 1
    return made


def test_the_same_seed_asks_the_same() -> None:
    first, again, other = (search(seed, 8).ask(frozenset(), 6) for seed in (1, 1, 2))
    assert [c.name for c in first] == [c.name for c in again] != [c.name for c in other]


def test_it_stays_in_the_space_and_says_whose_child_it_is() -> None:
    for c in search(3).ask(frozenset(), 8):
        assert all(c.parameters["state"][field] in values for field, values in SPACE["state"].items())
        assert c.parameters["output"] == BASE["output"]
        assert (c.parent, c.writer, c.impl) == ("triton", "kda2 search", "triton")


def test_nothing_is_asked_twice() -> None:
    first = search(4).ask(frozenset(), 8)
    names = [c.name for c in first]
    assert len(set(names)) == len(names) == 8
    assert not {c.name for c in search(4).ask(frozenset(names), 8)} & set(names)


def test_an_exhausted_space_gives_what_is_left() -> None:
    space = {"state": {"BV": (16, 32)}}
    base = {"state": {"BV": 32}}
    best = BEST.model_copy(update={"parameters": base})
    asked = Search(space, base, best, "state", 0).ask(frozenset({"triton"}), 5)
    assert [c.name for c in asked] == ["triton state BV=16"]
    assert Search(space, base, best, "state", 0).ask(frozenset({"triton", "triton state BV=16"}), 5) == []


def test_what_is_known_to_be_fast_draws_it() -> None:
    """Told a good part of the grid, its suggestions are faster on average than blind ones."""

    def mean(known: int) -> float:
        asked = [c for seed in range(6) for c in search(seed, known).ask(frozenset(), 4)]
        return sum(time_of(c.parameters["state"]) for c in asked) / len(asked)

    assert mean(12) < mean(0)


def test_a_configuration_outside_the_space_teaches_nothing() -> None:
    made = search(5)
    made.know({"state": {"BV": 256, "num_warps": 4, "num_stages": 3}}, 0.1)
    assert [c.name for c in made.ask(frozenset(), 4)] == [c.name for c in search(5).ask(frozenset(), 4)]
