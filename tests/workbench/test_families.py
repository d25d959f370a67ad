"""Probe families as a benchmark suite: the same inputs for all, errors instead of times, and what a peer refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import kda2
from kda2.ops.kda.spec import KDA
from kda2.testing import FAMILIES, Problem
from kda2.testing.oracle import Outputs
from kda2.workbench.profiler import bench, families, peers, suites
from kda2.workbench.profiler.problems import FamilyCase
from kda2.workbench.records import BenchRecord

CPU = torch.device("cpu")
SMALL = {"heads": 2, "k": 128, "v": 128, "dtype": "bf16", "seqlens": [40], "gate": "own"}
# FlashKDA's range: bounded gates, norms and sigmoids of its own, no negative eigenvalues, bf16 alone.
REFUSED = {
    "random_depth_gate": "its gate is bounded, not log",
    "deep_gate": "its gate is bounded, not log",
    "reset_log": "its gate is bounded, not log",
    "reset_softplus": "its gate is bounded, not softplus",
    "open_gate": "its gate is bounded, not softplus",
    "bare": "its gate is bounded, not softplus",
    "unnormalised_keys": "it always takes norms of q and k and the sigmoid of beta",
    "repeated_keys_neg_eigval": "it has no negative eigenvalues",
    "options": "it takes g and beta in bf16 only",
    "grouped": "its gate is bounded, not log",
    "many_sequences": "its gate is bounded, not softplus",
    "long": "it has no negative eigenvalues",
    "plain_packed": "its gate is bounded, not log",
    "learned_gate": "its gate is bounded, not softplus",
}


class FlashKDA:
    """FlashKDA's interface over kda2's own kernels; past the last sequence it writes nothing."""

    __version__ = "1.0"

    @staticmethod
    def fwd(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, out: Any, A_log: Any, dt_bias: Any, lower_bound: Any,
        *, initial_state: Any, final_state: Any, cu_seqlens: Any,
    ) -> None:  # fmt: skip
        o, final = kda2.kda(
            q, k, v, g, beta, gate=kda2.Gate.bounded(A_log, dt_bias, lower_bound), scale=scale, qk_l2norm=True,
            beta_sigmoid=True, initial_state=initial_state, output_final_state=True, state_layout="vk",
            cu_seqlens=cu_seqlens, impl="torch",
        )  # fmt: skip
        out.copy_(o)
        final_state.copy_(final)
        if cu_seqlens is not None:
            out[:, int(cu_seqlens[-1]) :] = torch.nan


def records_of(*names: str, impls: tuple[str, ...] = ("kda2:torch",), **changes: Any) -> list[BenchRecord]:
    cases = tuple({**SMALL, **changes, "family": name} for name in names)
    given = suites.Suite(suite="kda-errors", op="kda", impls=impls, max_rel_err=1.0, case=cases)
    return list(bench.run(bench.Plan(given, tuple(given.cases()), given.impls, 1, CPU), print))


def test_the_shipped_suite_has_every_family_in_the_regimes_that_it_takes() -> None:
    suite = suites.load_suite("kda-errors")
    found: dict[str, set[str]] = {}
    for raw in suite.cases():
        case = bench.typed_case("kda", raw)
        assert isinstance(case, FamilyCase)
        found.setdefault(case.family, set()).add(case.gate)
    assert found == {name: {"strong", "weak"} if takes_a_regime(name) else {"own"} for name in FAMILIES}


def takes_a_regime(name: str) -> bool:
    strong, weak = (FAMILIES[name].build(Problem(T=8, K=8, V=8, regime=regime))["g"] for regime in ("strong", "weak"))
    return not torch.equal(strong.nan_to_num(), weak.nan_to_num())


def test_a_family_has_errors_and_limits_and_no_times() -> None:
    random, repeated = records_of("random", "repeated_keys")
    for record in (random, repeated):
        assert record.status == "ok" and record.median_us is None and record.source is not None
        assert record.limit is not None and list(record.rel_err) == list(record.limit) == ["o", "state"]
        assert all(0 < error < record.limit[name] for name, error in record.rel_err.items())
        assert BenchRecord.from_line(record.line()) == record
    limits = {t.output: t.relative_l2 for t in KDA.tolerances if (t.dtype, t.family) == ("bf16", "random")}
    assert random.limit == {"o": limits["o"], "state": limits["final_state"]}
    assert suites.case_name(repeated.case) == "H2-40-own-repeated_keys"


def test_a_peer_serves_what_is_in_its_range_and_says_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_import", lambda module: FlashKDA)
    found = records_of(*FAMILIES, impls=("flash_kda",))
    said = {r.case["family"]: r.status for r in found}
    assert said == {name: f"unsupported({REFUSED[name]})" if name in REFUSED else "ok" for name in FAMILIES}
    assert all(r.rel_err[x] < r.limit[x] for r in found if r.status == "ok" and r.limit for x in r.rel_err)


@pytest.mark.parametrize("name", ["repeated_keys", "near_collinear_keys"])
def test_norms_and_sigmoid_go_inside_without_changing_the_call(name: str) -> None:
    base = Problem(T=40, K=32, V=32)
    plain, inside = FAMILIES[name].build(base), families._inside(FAMILIES[name]).build(base)
    assert inside["qk_l2norm"] and inside["beta_sigmoid"] and bool((inside["beta"].float().sigmoid() == 1.0).all())
    plain_o, inside_o = (kda2.kda(**kwargs, impl="torch")[0].double() for kwargs in (plain, inside))
    assert (plain_o - inside_o).norm() < 1e-2 * plain_o.norm()


def test_rows_that_are_not_unit_keep_their_norms() -> None:
    family = FAMILIES["unnormalised_keys"]
    assert not families._inside(family).build(Problem(T=8, K=8, V=8))["qk_l2norm"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda o, s: (o * torch.nan, s), "wrong result: o: 10240 elements are NaN or inf"),
        (lambda o, s: (o[:, :-1], s), r"wrong result: o: wanted shape \(1, 40, 2, 128\)"),
        (lambda o, s: (3 * o, s), "wrong result: relative error o 2.0e.00 above 1e.00"),
    ],
)
def test_what_is_no_answer_is_recorded_as_such(spoil: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_returned", partial(spoilt, families._returned, spoil))
    (record,) = records_of("random")
    with pytest.raises(AssertionError, match=words):
        assert record.status == "ok", record.status


def spoilt(returned: Any, spoil: Any, *args: Any) -> Outputs:
    changed: Outputs = spoil(*returned(*args))
    return changed


def test_an_unknown_family_is_none() -> None:
    with pytest.raises(kda2.InvalidValue, match="no family 'odd' among random, "):
        bench.typed_case("kda", {**SMALL, "family": "odd"})
