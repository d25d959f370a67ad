"""What is wrong with a failed (o, final state), in words: how far off, where, in which pattern, and which named mistake
computes the same.

    from kda2.testing import FAMILIES, Problem, diagnose, oracle
    kwargs = FAMILIES["random"].build(Problem(T=200))
    print(diagnose(my_kernel(**kwargs), oracle(kwargs), kwargs, "random"))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kda2.ops.kda.gate import Gate
from kda2.testing.compare import Comparison, error, rms
from kda2.testing.families import FAMILIES, Family
from kda2.testing.mutants import CHUNKS, MUTANTS
from kda2.testing.oracle import Outputs
from kda2.testing.verify import judge

# Longer calls are not held against mutants, which take tokens in turn.
MUTANT_TOKENS = 700
# A row (one token of one head) is wrong if its error is this many times the limit of the whole tensor.
ROW_FACTOR = 1.5
# An error is thin below this many times its limit, if it is so over the least wrong fifth of the rows too.
THIN = 6.0
# Heads and states down to this part of the tensor's RMS are held to the same relative limit.
SMALL = 0.01
# A mutant computes what came if it is nearer to that than the oracle is, by this factor.
NEARER = 5.0

Bounds = list[tuple[int, int]]
# What is said of wrong places, of one and of several.
WRONG, NOT_FINITE = ("is wrong", "are wrong"), ("has NaN or inf", "have NaN or inf")


def diagnose(
    got: Outputs,
    want: Outputs,
    kwargs: Mapping[str, Any],
    family: str | Family,
    comparisons: Sequence[Comparison] | None = None,
) -> str:
    """One paragraph on `got`, what a kernel gave for the call `kwargs` of `kda2.kda`, where `want` is right.

    `got` and `want` are (o, final state or None) on any device; where `want` itself is not finite nothing is compared.
    `family`: a probe family, or another name for the inputs ("captured call"). `comparisons`: what `judge` found, if
    under other limits than the op's own.
    """
    with torch.inference_mode():
        kwargs = {name: _on_cpu(x) for name, x in kwargs.items()}
        want = (_on_cpu(want[0]), _on_cpu(want[1]))
        got, clean = _comparable(got, want)
        found = judge(got, clean, kwargs) if comparisons is None else comparisons
        return " ".join([*_patterns(got, clean, kwargs, found), *_mutants(got, want, kwargs, found), *_probes(family)])


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Gate):
        return replace(x, A_log=_on_cpu(x.A_log), dt_bias=_on_cpu(x.dt_bias))
    return x.detach().cpu() if isinstance(x, Tensor) else x


def _comparable(got: Outputs, want: Outputs) -> tuple[Outputs, Outputs]:
    """`got` on the CPU as `want` is, 0 in both where `want` is not finite."""
    pairs = [_masked(_on_cpu(x), ref) for x, ref in zip(got, want, strict=True)]
    return (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1])


def _masked(got: Any, want: Any) -> tuple[Any, Any]:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor) or got.shape != want.shape:
        return got, want
    spoilt = ~want.isfinite()
    return got.masked_fill(spoilt, 0.0), want.masked_fill(spoilt, 0.0)


def _probes(family: str | Family) -> list[str]:
    known = FAMILIES.get(family) if isinstance(family, str) else family
    return [] if known is None else [f"The family {known.name} probes {known.probes}."]


# Patterns of what is wrong.


def _patterns(got: Outputs, want: Outputs, kwargs: Mapping[str, Any], found: Sequence[Comparison]) -> Iterator[str]:
    for c in found:
        yield f"{_capital(c.quantity)} agrees." if c.ok else f"{_capital(c.explain())}."
        is_state = c.quantity == "final state"
        x, ref = got[is_state], want[is_state]
        if c.ok or c.mismatch or x is None or ref is None or not x.numel():
            continue
        x, ref = x.double(), ref.double()
        whole = list(_of_the_whole(x, ref, c, kwargs))
        yield from whole or (_of_state(x, ref, c) if is_state else _of_tokens(x, ref, c, _bounds(kwargs, ref)))


def _of_the_whole(got: Tensor, want: Tensor, c: Comparison, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """A constant factor, a transposed state."""
    if not got.isfinite().all() or not want.any():
        return
    it = _capital(c.quantity)
    factor = ((got * want).sum() / want.square().sum()).item()
    if not got.any():
        yield f"{it} is 0 everywhere: never written, or skipped."
    elif abs(factor - 1) > 3 * c.limit and error(got, factor * want) <= c.limit:
        yield f"{it} is {factor:.3g} times what is wanted, everywhere{_factor_name(factor, c, kwargs)}."
    elif c.quantity == "final state" and error(got, want.mT.contiguous().view(want.shape)) <= c.limit:
        yield "It is the wanted state transposed: the other state_layout."


def _factor_name(factor: float, c: Comparison, kwargs: Mapping[str, Any]) -> str:
    K, scale = kwargs["q"].shape[-1], kwargs.get("scale")
    spelt = "K^-0.5" if scale is None else f"{scale:g}"
    value = K**-0.5 if scale is None else scale
    names = {-1.0: "the sign is wrong"}
    if c.quantity == "o" and value not in (0.0, 1.0):
        names |= {1 / value: f"the scale {spelt} is missing", value: f"the scale {spelt} is applied twice"}
    near = [name for x, name in names.items() if abs(factor / x - 1) <= 3 * c.limit]
    return f": {near[0]}" if near else ""


def _bounds(kwargs: Mapping[str, Any], o: Tensor) -> Bounds:
    """(first, one past the last) token of each sequence, over the flattened tokens."""
    offsets, (B, T) = kwargs.get("cu_seqlens"), o.shape[:2]
    return [(b * T, (b + 1) * T) for b in range(B)] if offsets is None else list(pairwise(offsets.tolist()))


def _of_tokens(got: Tensor, want: Tensor, c: Comparison, bounds: Bounds) -> Iterator[str]:
    """Where o [B, T, HV, V] is wrong: heads, sequences, tokens, channels."""
    got, want = got.flatten(0, 1), want.flatten(0, 1)
    off = _off(got, want, dim=-1)  # [tokens, HV]
    rows, says = _wrong(off, c)
    if says is WRONG and (not rows.any() or _is_thin(off, c)):
        yield "The error is spread thinly over tokens and heads, as too few bits somewhere spread it."
        return
    # a head that is small beside the others shows in none of its rows
    heads, _ = _wrong(_off(_by_head(got), _by_head(want), dim=-1, floor=SMALL), c)
    yield from _only("head", rows.any(0) | heads, says)
    yield from _where_in_sequences(rows.any(1), bounds, says)
    channels, _ = _wrong(_off(got[rows], want[rows], dim=0), c)
    yield from _only("channel", channels, says)
    if not got[rows].any():
        yield "It is 0 there: never written, or skipped."


def _by_head(o: Tensor) -> Tensor:
    """[tokens, HV, V] to [HV, tokens * V]."""
    return o.transpose(0, 1).flatten(1)


def _of_state(got: Tensor, want: Tensor, c: Comparison) -> Iterator[str]:
    """Where a state [N, HV, ., .] is wrong: sequences, heads."""
    matrices, says = _wrong(_off(got.flatten(2), want.flatten(2), dim=-1, floor=SMALL), c)  # [N, HV]
    in_state = tuple(f"{words} in the final state" for words in says)
    yield from _only("sequence", matrices.any(1), in_state)
    yield from _only("head", matrices.any(0), in_state)
    if matrices.any() and not got[matrices].any():
        yield "It is 0 there: never written, or skipped."


def _wrong(off: Tensor, c: Comparison) -> tuple[Tensor, tuple[str, str]]:
    """Which errors are too large, and what is said of their places. If one is infinite, only those are."""
    return (off.isinf(), NOT_FINITE) if off.isinf().any() else (off > ROW_FACTOR * c.limit, WRONG)


def _off(got: Tensor, want: Tensor, dim: int, floor: float = 1.0) -> Tensor:
    """Relative L2 error of the slices along `dim`, inf where one is not finite. No slice counts as smaller than `floor`
    times the tensor's RMS has it."""
    least = floor * rms(want) * want.shape[dim] ** 0.5
    size = torch.linalg.vector_norm(want, dim=dim).clamp(min=least or 1.0)
    off = torch.linalg.vector_norm(got - want, dim=dim) / size
    return torch.where(off.isnan(), torch.inf, off)


def _is_thin(off: Tensor, c: Comparison) -> bool:
    """A small error from which few rows are free, and which none exceeds by much."""
    low, high = off.flatten().quantile(torch.tensor([0.2, 1.0], dtype=off.dtype)).tolist()
    return bool(c.relative_l2 < THIN * c.limit and high < THIN * low)


def _only(axis: str, wrong: Tensor, says: Sequence[str], among: Tensor | None = None) -> Iterator[str]:
    """A sentence if some but not all of `wrong` [size] are; `among`: those that could be."""
    if wrong.any() and not wrong[slice(None) if among is None else among].all():
        places = wrong.nonzero().flatten().tolist()
        plural = len(places) > 1
        yield f"Only {axis}{'s' * plural} {_listed(places)} of {len(wrong)} {says[plural]}."


def _where_in_sequences(wrong: Tensor, bounds: Bounds, says: Sequence[str]) -> Iterator[str]:
    """What `wrong` [tokens] has in common over the sequences."""
    inside = [wrong[start:end] for start, end in bounds]
    bad = torch.tensor([bool(x.any()) for x in inside], dtype=torch.bool)
    if not bad.any():
        yield f"Only tokens past the last sequence {says[1]}."
        return
    common = _tokens_in_common([x for x in inside if x.any()], says)
    # a sequence that ends before such tokens has none that could be wrong
    first = min(_first(x) for x in inside if x.any()) if common else 0
    yield from _only("sequence", bad, says, among=torch.tensor([len(x) > first for x in inside]))
    yield from [common] if common else []


def _first(wrong: Tensor) -> int:
    return int(wrong.nonzero()[0])


def _tokens_in_common(inside: list[Tensor], says: Sequence[str]) -> str:
    """On sequences that all have something wrong: one short stretch, the partial chunk at the end, all from one on."""
    first, last = min(_first(x) for x in inside), max(int(x.nonzero()[-1]) for x in inside)
    shortest = min(len(x) for x in inside)
    if last < shortest - 1 and last - first < shortest // 2:
        where = f"token {first}" if last == first else f"tokens {first} to {last}"
        return f"Only {where} of a sequence {says[last > first]}."
    chunks = [C for C in CHUNKS if all(len(x) > C and _first(x) == len(x) - len(x) % C < len(x) for x in inside)]
    if chunks:
        count = _or(sorted({len(x) - _first(x) for x in inside}))
        return f"Only the last {count} tokens {says[1]}: the partial chunk, if chunks have {_or(chunks)} tokens."
    if first == 0:
        return ""
    edges = [C for C in CHUNKS if first % C == 0]
    hint = f": an edge of chunks, if they have {_or(edges)} tokens" if edges else ""
    return f"Tokens from {first} on {says[1]}, earlier ones {says[1].split()[0]} not{hint}."


def _listed(places: Sequence[int]) -> str:
    """ "1, 3 to 5 and 7": ascending numbers with their runs."""
    runs: list[list[int]] = []
    for i in places:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    spelt = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return _or([*spelt[:8], "others"] if len(spelt) > 8 else spelt, "and")


def _or(choices: Sequence[object], word: str = "or") -> str:
    *most, last = map(str, choices)
    return f"{', '.join(most)} {word} {last}" if most else last


def _capital(words: str) -> str:
    return words if re.match(r"o\b", words) else words[:1].upper() + words[1:]


# Mutants that compute the same.


def _mutants(got: Outputs, want: Outputs, kwargs: Mapping[str, Any], found: Sequence[Comparison]) -> Iterator[str]:
    """A sentence if some mutant computes what came."""
    B, T = kwargs["q"].shape[:2]
    whole = want[0].shape == kwargs["v"].shape and B * T <= MUTANT_TOKENS
    if not whole or all(c.ok for c in found) or any(c.mismatch for c in found):
        return
    limits = [c.limit for c in found]
    off = max(error(x, ref) for x, ref in _pairs(got, _comparable(got, want)[1]))
    distances = {}
    for mutant in MUTANTS.values():
        if mutant.applies(kwargs):
            near = _distance(got, _comparable(mutant.run(**kwargs), want)[0], limits)
            if NEARER * near < off:
                distances[mutant.name] = near
    if distances:
        best = min(distances.values())
        says = _merged([MUTANTS[name].says for name, near in distances.items() if near <= 2 * best])
        yield f"It computes KDA {says} (agrees with that {f'to {best:.1e}' if best else 'exactly'})."


def _pairs(got: Outputs, other: Outputs) -> list[tuple[Tensor, Tensor]]:
    return [(x, y) for x, y in zip(got, other, strict=True) if x is not None and y is not None]


def _distance(got: Outputs, mutant: Outputs, limits: Sequence[float]) -> float:
    """The larger relative L2 error between what came and what the mutant gives; inf if it is beyond a limit."""
    worst = 0.0
    for (x, y), limit in zip(_pairs(got, mutant), limits, strict=False):
        off = error(*_without_common_holes(x.double(), y.double()))
        worst = max(worst, off if off <= limit else torch.inf)
    return worst


def _without_common_holes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """0 where both are NaN or inf, if that is not nearly everywhere."""
    holes = ~x.isfinite() & ~y.isfinite()
    return (x, y) if holes.double().mean() > 0.9 else (x.masked_fill(holes, 0.0), y.masked_fill(holes, 0.0))


def _merged(says: Sequence[str]) -> str:
    """Sentences that differ in the length of a chunk alone as one, the others joined by "or"."""
    lengths = re.compile(rf"\b({'|'.join(map(str, CHUNKS))}) tokens")
    groups: dict[str, list[str]] = {}
    for words in says:
        groups.setdefault(lengths.sub("# tokens", words), []).extend(lengths.findall(words))
    return ", or ".join(words.replace("#", _or(chunks)) if chunks else words for words, chunks in groups.items())
