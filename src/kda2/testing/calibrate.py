"""Where the tolerances come from: `python -m kda2.testing.calibrate [--device cuda] [--tokens 4096]` prints the worst
errors of faithful computations, and those over 0.7.

Faithful are the recurrence in the inputs' own precision (outputs rounded), and the chunked form whose matrix operands
are rounded as a kernel rounds them. Families that are held to a reference with the same roundings do not count.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch

from kda2.ops.kda import kda
from kda2.ops.kda.spec import KDA
from kda2.testing.compare import compare
from kda2.testing.families import FAMILIES
from kda2.testing.inputs import Problem
from kda2.testing.oracle import Outputs, same_roundings
from kda2.testing.verify import NAMES, expected

HEADROOM = 0.7
SIZES = ((64, 64), (128, 128), (60, 100), (256, 64))


def faithful_errors(problem: Problem, family: str) -> Iterator[tuple[float, float]]:
    """(relative L2, worst element in RMS) of every output of both faithful computations."""
    kwargs = FAMILIES[family].build(problem)
    want = expected(kwargs)
    operand = None if problem.dtype == torch.float32 else torch.bfloat16
    ran: list[Outputs] = [same_roundings(kwargs, operand=operand)]
    if kwargs["q"].shape[1] <= 512:
        ran.append(kda(**kwargs, impl="reference"))
    limits = KDA.tolerance(NAMES[problem.dtype])
    for outputs in ran:
        for got, ref in zip(outputs, want, strict=True):
            if got is not None and ref is not None:
                c = compare(got, ref, limits)
                yield c.relative_l2, c.worst.rms_off if c.worst else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    judged = [f.name for f in FAMILIES.values() if f.judge == "tolerance" and f.spoilt is None]
    for dtype, name in NAMES.items():
        worst = [0.0, 0.0]
        for K, V in SIZES:
            for family in judged:
                problem = Problem(T=args.tokens, H=2, HV=args.heads, K=K, V=V, dtype=dtype, device=args.device)
                for errors in faithful_errors(problem, family):
                    if not all(map(math.isfinite, errors)):
                        raise ArithmeticError(f"{family} in {name}: a faithful computation is not finite")
                    worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        l2, element = worst
        print(f"{name}: relative L2 {l2:.2e} ({l2 / HEADROOM:.2e}), element {element:.2e} ({element / HEADROOM:.2e})")


if __name__ == "__main__":
    main()
