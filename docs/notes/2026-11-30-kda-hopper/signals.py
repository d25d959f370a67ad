"""The roles of stage `fused` as generators that hand slots to each other: is every order of their steps a right one?

    python signals.py [RUNS]

They wait on mbarriers and arrive at them as factor.py, score.py and state.py do, at random speeds; copies complete in
any order. What a slot holds must be what its reader expects, and stay while it reads; someone can always go on. What is
computed, and the fences and barriers within a role, are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from random import Random

Signals = list[int]  # of each mbarrier the parity of its phase
Wait = tuple[Signals, int, int]  # until the phase has another parity than this
Role = Generator[Wait | None, None, None]  # None: others may come in between
Holds = tuple[str, int, int]  # what was written last, of which chunk, and of which of its windows


class Slots:
    def __init__(self, SLOTS: int, FACTORS: int, windows: list[int]) -> None:
        """For a sequence with so many windows in each chunk, 0 where the chunk's factors do."""
        self.SLOTS, self.FACTORS, self.windows, self.chunks = SLOTS, FACTORS, windows, len(windows)
        self.holds: list[Holds] = [("nothing", 0, 0)] * SLOTS
        self.large = [-1] * SLOTS  # of which chunk
        self.readers = [0] * SLOTS
        self.copies: list[tuple[int, Signals, int]] = []  # under way: chunk and mbarrier
        self.full, self.measured, self.factored, self.ready, self.free = ([0] * SLOTS for _ in range(5))
        self.again, self.reloaded = [0] * FACTORS, [0] * FACTORS


def signal(bars: Signals, slot: int) -> None:
    bars[slot] ^= 1  # one arrival ends a phase


def write(s: Slots, what: str, n: int, window: int = 0) -> None:
    assert not s.readers[n % s.SLOTS], f"{what} of {n} written where {s.holds[n % s.SLOTS]} is being read"
    s.holds[n % s.SLOTS] = what, n, window


def read(s: Slots, what: str, n: int, window: int = 0) -> Role:
    s.readers[n % s.SLOTS] += 1
    for _ in range(2):  # at its start and after others had time to spoil it
        found = s.holds[n % s.SLOTS]
        assert found == (what, n, window), f"{what} of {n}, window {window}, expected; found {found}"
        yield None
    s.readers[n % s.SLOTS] -= 1


def load(s: Slots, n: int, bars: Signals, i: int) -> None:
    write(s, "a copy under way", n)
    s.copies.append((n, bars, i))


def factor(s: Slots, which: int) -> Role:
    for n in range(which, min(s.chunks, s.SLOTS) if s.FACTORS == 2 else 0, 2):
        load(s, n, s.full, n)
        yield None
    again = turn = 0
    for n in range(which, s.chunks, s.FACTORS):
        slot, before = n % s.SLOTS, (n - 1) % s.SLOTS
        yield s.full, slot, n // s.SLOTS & 1
        yield from read(s, "raw", n)
        if s.FACTORS == 2:  # `remember`
            if n > 0:
                yield s.measured, before, (n - 1) // s.SLOTS & 1
                for _ in range(2):
                    assert s.large[before] == n - 1, f"large of {n - 1} expected, found of {s.large[before]}"
                    yield None
            s.large[slot] = n
            signal(s.measured, slot)
        yield from read(s, "raw", n)
        write(s, "factors", n)  # even where windows are to replace them
        for window in range(s.windows[n]):
            load(s, n, s.reloaded, which)
            yield s.reloaded, which, turn & 1
            yield from read(s, "raw", n)
            write(s, "factors", n, window)
            if window + 1 < s.windows[n]:
                signal(s.factored, slot)
                yield s.again, which, again
                again ^= 1
            turn += 1
        signal(s.factored, slot)
        old = n - s.FACTORS
        new = old + s.SLOTS
        if s.FACTORS == 2 and old >= 0 and new < s.chunks:
            yield s.free, old % s.SLOTS, old // s.SLOTS & 1
            load(s, new, s.full, old % s.SLOTS)


def score(s: Slots) -> Role:
    parities = [0] * s.SLOTS
    for n in range(s.chunks):
        for window in range(max(s.windows[n], 1)):  # the kernel's MORE: `read` sees that the slot has just these
            yield s.factored, n % s.SLOTS, parities[n % s.SLOTS]
            parities[n % s.SLOTS] ^= 1
            yield from read(s, "factors", n, window)
            write(s, "scores", n, window)
            signal(s.ready, n % s.SLOTS)


def state(s: Slots) -> Role:
    for n in range(min(s.chunks, s.SLOTS) if s.FACTORS == 1 else 0):
        load(s, n, s.full, n)
        yield None
    parities = [0] * s.SLOTS
    for n in range(s.chunks):
        for window in range(max(s.windows[n], 1)):
            yield s.ready, n % s.SLOTS, parities[n % s.SLOTS]
            parities[n % s.SLOTS] ^= 1
            yield from read(s, "scores", n, window)
            if window + 1 < s.windows[n]:
                signal(s.again, n % s.FACTORS)
            elif s.FACTORS == 2:
                signal(s.free, n % s.SLOTS)
            elif n + s.SLOTS < s.chunks:
                load(s, n + s.SLOTS, s.full, n % s.SLOTS)


def run(s: Slots, random: Random) -> None:
    waits: dict[Role, Wait | None] = dict.fromkeys([state(s), score(s), *(factor(s, i) for i in range(s.FACTORS))])
    speeds = {role: random.random() ** 3 + 0.01 for role in (*waits, None)}  # None: copies
    while waits:
        able: list[Role | None] = [role for role, on in waits.items() if on is None or on[0][on[1]] != on[2]]
        able += [None] * bool(s.copies)
        if not able:
            raise RuntimeError("deadlock")
        role = able[0] if len(able) == 1 else random.choices(able, [speeds[each] for each in able])[0]
        if role is None:
            n, bars, i = s.copies.pop(random.randrange(len(s.copies)))
            write(s, "raw", n)
            signal(bars, i)
            continue
        try:
            waits[role] = next(role)
        except StopIteration:
            del waits[role]
    assert not s.copies, "copies that nobody waits for"


def draw(random: Random) -> Slots:
    FACTORS, often = random.choice([1, 2]), random.choice([0.0, 0.1, 0.5, 1.0])
    tokens = random.randint(0, 32 * random.choice([12, 12, 12, 12, 40]))
    chunks = [min(tokens - first, 32) for first in range(0, tokens, 32)]  # the last one may be shorter
    windows = [-(-end // random.choice([1, 2, 4, 8, 16])) if random.random() < often else 0 for end in chunks]
    return Slots(random.randint(FACTORS + 1, 6), FACTORS, windows)


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 60000
    for seed in range(runs):
        random = Random(seed)
        run(draw(random), random)
    print(f"{runs} interleavings: no deadlock, every slot held what was read")
    try:
        run(Slots(SLOTS=2, FACTORS=2, windows=[0] * 6), Random(0))
        sys.exit("two factor roles with two slots should deadlock")
    except RuntimeError:
        print("two factor roles with two slots, as a control: deadlock")
