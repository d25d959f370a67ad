"""Calls of sanitize.py, with signals that every thread of a role gives instead of one for all of them:

    compute-sanitizer --tool racecheck python racecheck.py [NAME ...]

The source stays as it is. In the PTX all threads arrive where one did after a barrier, and mbarriers count them.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triton import knobs

SLOTS = 4  # that the tables give


def counts(inits: int, threads_of_state: int) -> Iterator[int]:
    """How many arrivals end a phase of each mbarrier, in the order in which `slots.allocate` makes them."""
    one_factor = inits == 3 * SLOTS + 2
    factors = 1 if one_factor else 2
    of = {"copy engine": 1, "factor": 128, "score": 128, "state": threads_of_state}
    for signals, giver in (
        (SLOTS, "copy engine"), (SLOTS, "factor"), (SLOTS, "score"), (factors, "state"), (factors, "copy engine"),
        *(() if one_factor else ((SLOTS, "factor"), (SLOTS, "state"))),
    ):  # fmt: skip
        yield from repeat(of[giver], signals)


def all_arrive(ptx: str, threads_of_state: int) -> str:
    init = re.compile(r"(mbarrier\.init\.shared::cta\.b64 \[\S+\], )1;")
    inits = len(init.findall(ptx))
    count = counts(inits, threads_of_state)
    ptx = init.sub(lambda found: f"{found[1]}{next(count)};", ptx)
    ptx, arrivals = re.subn(r"@%p\d+ (mbarrier\.arrive\.shared::cta\.b64)", r"\1", ptx)
    assert inits and arrivals, "this version of Triton writes other PTX"
    return ptx


def hook(*arguments: Any) -> tuple[str, str] | None:
    """Triton asks for a cache key without arguments, and to change the stages of a compilation with them."""
    if not arguments:
        return "all threads arrive", "all threads arrive"
    stages, options = arguments[1:3]
    make = stages["ptx"]
    stages["ptx"] = lambda src, metadata: all_arrive(make(src, metadata), 32 * options.num_warps)
    return None


if __name__ == "__main__":
    knobs.runtime.add_stages_inspection_hook = hook
    # a cache of its own: Triton 3.6 looks for a build by its source alone, and would take one made without the hook
    with TemporaryDirectory() as knobs.cache.dir:
        runpy.run_path(str(Path(__file__).with_name("sanitize.py")), run_name="__main__")
