"""What every implementation of `kda` must do. A backend subclasses `KdaConformance` and inherits every test:

    class TestMine(KdaConformance):
        impl = "mine"
        device = "cuda"
        sizes = FULL

Where its capability names the only numbers of channels that it serves, the tests take those; what they do in a dtype
that it refuses is skipped. Every test runs on memory that starts as NaN, and every call is checked to leave its inputs
as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import kda2
from kda2.dispatch import capability, choose
from kda2.errors import MissingExtra
from kda2.memory import fenced_memory, fingerprint, guarded, poisoned_memory
from kda2.testing.families import FAMILIES
from kda2.testing.inputs import RESTRIDE, Problem, make
from kda2.testing.oracle import Outputs, checked, oracle
from kda2.testing.verify import NAMES, expected, judge, verify

try:
    import pytest
except ImportError as e:
    raise MissingExtra("pytest", "test", "a conformance suite") from e

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

GATES: dict[str, dict[str, Any]] = {
    "log": {"gate": "log"},
    "log_bounded": {"gate": "log_bounded"},
    "softplus": {"gate": "softplus"},
    "softplus_no_bias": {"gate": "softplus", "dt_bias": False},
    "bounded": {"gate": "bounded"},
    "bounded_no_bias": {"gate": "bounded", "dt_bias": False},
    "bounded_at_2": {"gate": "bounded", "lower_bound": -2.0},
}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"qk_l2norm": False, "beta_sigmoid": False},
    "l2norm": {"qk_l2norm": True, "beta_sigmoid": False},
    "sigmoid": {"qk_l2norm": False, "beta_sigmoid": True},
    "l2norm+sigmoid": {"qk_l2norm": True, "beta_sigmoid": True},
    "neg_eigval": {"qk_l2norm": False, "beta_sigmoid": True, "neg_eigval": True},
    "l2norm+neg_eigval": {"qk_l2norm": True, "beta_sigmoid": True, "neg_eigval": True},
}
DTYPES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": BF16},
    "bf16_fp32_gate": {"dtype": BF16, "g_dtype": FP32, "beta_dtype": FP32},
    "fp16": {"dtype": FP16},
    "fp16_fp32_gate": {"dtype": FP16, "g_dtype": FP32, "beta_dtype": FP32},
    "fp32": {"dtype": FP32},
}
KV_SIZES = (
    (1, 1), (16, 16), (17, 33), (60, 100), (100, 60), (64, 64), (64, 128), (128, 64), (192, 96), (96, 192), (128, 512),
    (256, 64), (256, 512),
)  # fmt: skip
HEADS = ((1, 1), (1, 3), (2, 2), (2, 6))
STATES = {"none": None, "fp32": FP32, "bf16": BF16, "fp16": FP16}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65)


@dataclass(frozen=True)
class Sizes:
    """How large the suite's problems are; `T` and `lengths` count tokens. `kv_T` is for the sweep over K and V."""

    T: int
    lengths: tuple[int, ...]
    H: int
    HV: int
    K: int
    V: int
    kv_T: int


# For the interpreter and the CPU: two chunks of 64 and a bit of everything.
QUICK = Sizes(T=70, lengths=(5, 0, 70, 1), H=1, HV=2, K=32, V=32, kv_T=20)
FULL = Sizes(T=300, lengths=(129, 0, 300, 1, 64), H=2, HV=4, K=128, V=128, kv_T=150)

# For four sequences in 200 tokens: what cu_seqlens must never hold, but may on a GPU, where nobody looks.
BAD_OFFSETS = {
    "negative": (-5, -4, -3, -2, -1),
    "past the end": (0, 10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6),
    "decreasing": (200, 150, 100, 50, 0),
    "extreme": (-(2**62), 2**62, -(2**63), 2**63 - 1, 7),
    "overlapping": (0, 150, 20, 190, 60),
    "not from 0": (100, 120, 130, 140, 150),
}

each = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def poisoned(self: object) -> Iterator[None]:
    """A member of every suite: fresh memory is NaN in each of its tests."""
    with poisoned_memory():
        yield


class KdaConformance:
    """Tests of `kda2.kda` on one implementation and device."""

    impl = "auto"
    device = "cpu"
    sizes = QUICK
    # whether the rounding of a token may depend on later ones of its chunk: where they choose how it is computed
    rounds_by_chunk = False

    _poisoned = poisoned

    def problem(self, **changes: Any) -> Problem:
        """The suite's ordinary problem, changed, as far as the implementation serves it."""
        s = self.sizes
        p = replace(Problem(T=s.T, H=s.H, HV=s.HV, K=s.K, V=s.V, device=self.device), **changes)
        limits = capability("kda", self.impl)
        if limits is None:
            return p
        if NAMES[p.dtype] not in limits.dtypes:
            pytest.skip(f"{self.impl} does not serve {NAMES[p.dtype]}")
        K, V = limits.channels(p.K, p.V)
        return replace(p, K=K, V=V)

    def run(self, **kwargs: Any) -> Outputs:
        """Call the implementation; its inputs must come out as they went in."""
        before = fingerprint(kwargs)
        outputs = kda2.kda(**kwargs, impl=self.impl)
        assert fingerprint(kwargs) == before, "the call wrote into its inputs"
        return outputs

    def check(self, problem: Problem, **changes: Any) -> Outputs:
        """Run `problem` (arguments replaced by `changes`) and hold every output to the oracle."""
        kwargs = {**make(problem), **changes}
        got = self.run(**kwargs)
        comparisons = judge(got, expected(kwargs), kwargs)
        assert all(c.ok for c in comparisons), "\n".join(c.explain() for c in comparisons)
        return got

    # formula and options

    @each("flags", FLAGS)
    @each("gate", GATES)
    def test_options(self, gate: str, flags: str) -> None:
        self.check(self.problem(T=self.sizes.kv_T, **GATES[gate], **FLAGS[flags]))

    @each("dtype", DTYPES)
    @each("gate", GATES)
    def test_dtypes(self, gate: str, dtype: str) -> None:
        self.check(self.problem(**GATES[gate], **DTYPES[dtype]))

    @each("scale", (0.5, -2.0, 1))
    def test_scale(self, scale: float) -> None:
        self.check(self.problem(scale=scale))

    def test_zero_scale_gives_zero(self) -> None:
        o, _ = self.run(**make(self.problem(scale=0.0)))
        assert (o == 0).all()

    def test_promised_bound_changes_nothing(self) -> None:
        kwargs = make(self.problem(gate="log"))
        promised = {**kwargs, "gate": kda2.Gate.log(lower_bound=-5.0)}
        comparisons = judge(self.run(**promised), self.run(**kwargs), kwargs)
        assert all(c.ok for c in comparisons), "\n".join(map(str, comparisons))

    @each("dtype", ("bf16", "fp32"))
    @each("family", FAMILIES)
    def test_family(self, family: str, dtype: str) -> None:
        verdict = verify(self.run, family, self.problem(**DTYPES[dtype]))
        print(verdict)
        assert verdict.ok, verdict.explain()

    @each(
        "family",
        ("saturated_gate", "reset_softplus", "open_gate", "near_collinear_keys", "unnormalised_keys", "tiny_rows",
         "large_state"),
    )  # fmt: skip
    def test_family_in_fp16(self, family: str) -> None:
        """Those that leave the range of fp16 most easily."""
        verdict = verify(self.run, family, self.problem(dtype=FP16))
        assert verdict.ok, verdict.explain()

    @each("gate", GATES)
    def test_a_token_alone(self, gate: str) -> None:
        """All of its output is q . k times v, and q . k may be far smaller than its terms."""
        for seed in range(8):
            self.check(self.problem(T=1, H=1, HV=1, K=128, V=32, state=None, seed=seed, **GATES[gate]))

    # shapes

    @each("K, V", KV_SIZES)
    def test_sizes(self, K: int, V: int) -> None:
        # one channel: all keys are parallel and nothing averages out, which bf16 does not stand
        dtype = FP32 if K == 1 else BF16
        problem = self.problem(K=K, V=V, T=self.sizes.kv_T, H=1, HV=1, dtype=dtype)
        if (problem.K, problem.V) != (K, V):
            pytest.skip(f"{self.impl} serves some K and V only")
        self.check(problem)

    @each("dtype", ("bf16", "fp32"))
    @each("gate", ("log", "bounded"))
    def test_odd_sizes_packed(self, gate: str, dtype: str) -> None:
        self.check(self.problem(K=60, V=100, lengths=(3, 0, self.sizes.kv_T), **GATES[gate], **DTYPES[dtype]))

    @each("H, HV", HEADS)
    def test_heads(self, H: int, HV: int) -> None:
        self.check(self.problem(H=H, HV=HV, B=2, T=20))

    @each("T", LENGTHS)
    def test_lengths(self, T: int) -> None:
        self.check(self.problem(T=T, regime="weak"))

    @each("B, T", ((0, 5), (1, 0), (3, 0)))
    def test_nothing(self, B: int, T: int) -> None:
        _, state = self.check(self.problem(B=B, T=T))
        kwargs = make(self.problem(B=B, T=T))
        assert state is not None and torch.equal(state, kwargs["initial_state"])

    def test_batch(self) -> None:
        self.check(self.problem(B=3, T=33))

    @each("offsets", (torch.int32, torch.int64))
    @each("layout", ("kv", "vk"))
    def test_packed(self, layout: str, offsets: torch.dtype) -> None:
        self.check(self.problem(lengths=self.sizes.lengths, layout=layout, offsets_dtype=offsets, regime="weak"))

    def test_host_offsets(self) -> None:
        problem = self.problem(lengths=self.sizes.lengths)
        self.check(problem, cu_seqlens=make(problem)["cu_seqlens"].cpu())

    @each("tail", (1, 64, 100))
    def test_tokens_of_no_sequence_give_zero(self, tail: int) -> None:
        lengths = (5, 33)
        o, _ = self.check(self.problem(lengths=lengths, tail=tail))
        assert (o[:, sum(lengths) :] == 0).all()

    def test_no_sequences(self) -> None:
        kwargs = make(self.problem(lengths=(), tail=10))
        o, state = self.run(**kwargs)
        assert (o == 0).all() and state is not None and state.shape[0] == 0

    # states

    @each("final", (True, False))
    @each("state", STATES)
    @each("layout", ("kv", "vk"))
    def test_states(self, layout: str, state: str, final: bool) -> None:
        _, got = self.check(self.problem(layout=layout, state=STATES[state], final_state=final, regime="weak"))
        assert (got is not None) == final

    @each("layout", ("kv", "vk"))
    def test_state_layouts_agree(self, layout: str) -> None:
        kwargs = make(self.problem(K=16, V=48, regime="weak"))
        o, state = self.run(**kwargs)
        swapped = {**kwargs, "initial_state": kwargs["initial_state"].mT.contiguous(), "state_layout": "vk"}
        o_swapped, state_swapped = self.run(**swapped)
        assert state is not None and state_swapped is not None
        assert torch.equal(o, o_swapped) and torch.equal(state, state_swapped.mT)

    def test_strided_state(self) -> None:
        problem = self.problem(B=2, regime="weak")
        state = make(problem)["initial_state"]
        wide = torch.full((*state.shape[:3], 2 * state.shape[3]), torch.nan, device=state.device)
        wide[..., ::2] = state
        self.check(problem, initial_state=wide[..., ::2])
        self.check(problem, initial_state=state.transpose(1, 2).contiguous().transpose(1, 2))

    @each("split", (1, 16, 50, 64))
    @each("layout", ("kv", "vk"))
    def test_two_calls_are_one(self, layout: str, split: int) -> None:
        kwargs = make(self.problem(layout=layout, regime="weak"))
        tokens = ("q", "k", "v", "g", "beta")
        first = {**kwargs, **{name: kwargs[name][:, :split] for name in tokens}}
        o1, carried = self.run(**first)
        second = {**kwargs, **{name: kwargs[name][:, split:] for name in tokens}, "initial_state": carried}
        o2, final = self.run(**second)
        comparisons = judge((torch.cat([o1, o2], dim=1), final), oracle(kwargs), kwargs)
        assert all(c.ok for c in comparisons), "\n".join(map(str, comparisons))

    def test_coarse_state_is_judged_per_call(self) -> None:
        """With a bf16 state each call is right for the state as it was stored."""
        problem = self.problem(state=BF16, regime="weak", T=33)
        _, carried = self.check(problem)
        self.check(replace(problem, seed=1), initial_state=carried)

    def test_packed_is_separate(self) -> None:
        lengths = self.sizes.lengths
        kwargs = make(self.problem(lengths=lengths, regime="weak"))
        outputs, states, start = [], [], 0
        for n, length in enumerate(lengths):
            one = {**kwargs, "cu_seqlens": None, "initial_state": kwargs["initial_state"][n : n + 1]}
            for name in ("q", "k", "v", "g", "beta"):
                one[name] = kwargs[name][:, start : start + length]
            o, state = self.run(**one)
            outputs.append(o)
            states.append(state)
            start += length
        separate = (torch.cat(outputs, dim=1), torch.cat([s for s in states if s is not None]))
        comparisons = judge(self.run(**kwargs), separate, kwargs)
        assert all(c.ok for c in comparisons), "\n".join(map(str, comparisons))

    def test_empty_sequences_keep_their_state(self) -> None:
        kwargs = make(self.problem(lengths=(0, 5, 0)))
        _, state = self.run(**kwargs)
        assert state is not None and torch.equal(state[[0, 2]], kwargs["initial_state"][[0, 2]])

    # memory

    @each("packed", (False, True))
    @each("strides", RESTRIDE)
    def test_strides(self, strides: str, packed: bool) -> None:
        lengths = (5, 0, 33, 1) if packed else None
        self.check(self.problem(strides=strides, lengths=lengths, B=1 if packed else 2, H=1, HV=2, T=35))

    def test_strided_gate_parameters(self) -> None:
        problem = self.problem()
        gate = make(problem)["gate"]
        A_log = torch.stack([gate.A_log, gate.A_log + 1], dim=-1)[:, 0]
        self.check(problem, gate=kda2.Gate.bounded(A_log, gate.dt_bias.mT.contiguous().mT))

    def test_nan_stays_in_its_sequence(self) -> None:
        lengths = (30, 17, 40)
        kwargs = make(self.problem(lengths=lengths))
        clean, clean_state = self.run(**kwargs)
        spoilt = {name: kwargs[name].clone() for name in ("q", "k", "v", "g", "beta")}
        for x in spoilt.values():
            x[:, 30:47] = torch.nan
        got, state = self.run(**{**kwargs, **spoilt})
        assert state is not None and clean_state is not None
        assert torch.equal(got[:, :30], clean[:, :30]) and torch.equal(got[:, 47:], clean[:, 47:])
        assert torch.equal(state[[0, 2]], clean_state[[0, 2]])

    def test_nan_after_the_last_sequence_is_not_read(self) -> None:
        kwargs = make(self.problem(lengths=(30,), tail=40))
        clean, _ = self.run(**kwargs)
        spoilt = {name: kwargs[name].clone() for name in ("q", "k", "v", "g", "beta")}
        for x in spoilt.values():
            x[:, 30:] = torch.nan
        got, state = self.run(**{**kwargs, **spoilt})
        assert torch.equal(got, clean) and state is not None and state.isfinite().all()

    def test_offsets_may_be_strided(self) -> None:
        kwargs = make(self.problem(lengths=self.sizes.lengths))
        between = torch.full_like(kwargs["cu_seqlens"], 10**6)
        strided = torch.stack([kwargs["cu_seqlens"], between], dim=1)[:, 0]
        (o, state), (o_strided, state_strided) = self.run(**kwargs), self.run(**{**kwargs, "cu_seqlens": strided})
        assert state is not None and state_strided is not None
        assert torch.equal(o, o_strided) and torch.equal(state, state_strided)

    @each("values", BAD_OFFSETS.values(), ids=BAD_OFFSETS)
    def test_no_offsets_reach_outside_the_tensors(self, values: tuple[int, ...]) -> None:
        """Past the checks, as contents on a GPU are."""
        kwargs = make(self.problem(lengths=(70, 0, 1, 129), H=1, HV=1, K=16, V=16))
        guards = {name: guarded(kwargs[name]) for name in ("q", "k", "v", "g", "beta", "initial_state")}
        call = checked({**kwargs, **{name: guard.inside for name, guard in guards.items()}})
        bad = replace(call, cu_seqlens=torch.tensor(values, device=self.device))
        with fenced_memory() as fenced:
            o, state = choose(bad.query(), self.impl).load()(bad)
        assert all(f.intact() for f in fenced) and all(g.intact() for g in guards.values())
        assert all(torch.equal(guard.inside, kwargs[name]) for name, guard in guards.items())
        assert o.shape == kwargs["v"].shape and state.shape == kwargs["initial_state"].shape
        assert not state.isnan().any(), "something was read from outside the tensors, or never written"

    def test_later_tokens_do_not_reach_earlier_ones(self) -> None:
        kwargs = make(self.problem(gate="softplus"))
        clean, _ = self.run(**kwargs)
        cut = self.sizes.T // 2 + 3
        later = {name: kwargs[name].clone() for name in ("q", "k", "v", "g", "beta")}
        for x in later.values():
            x[:, cut:] = 50.0
        got, _ = self.run(**{**kwargs, **later})
        if self.rounds_by_chunk:
            error = (got[:, :cut].double() - clean[:, :cut].double()).norm() / clean[:, :cut].double().norm()
            assert error < 2**-7
        else:
            assert torch.equal(got[:, :cut], clean[:, :cut])

    def test_same_bits_twice(self) -> None:
        kwargs = {**make(self.problem(lengths=self.sizes.lengths)), "deterministic": True}
        (o, state), (o_again, state_again) = self.run(**kwargs), self.run(**kwargs)
        assert state is not None and state_again is not None
        assert torch.equal(o, o_again) and torch.equal(state, state_again)

    def test_gradients_flow_or_are_refused(self) -> None:
        """Never a result that silently has no gradient."""
        limits = capability("kda", self.impl)
        kwargs = make(self.problem(T=20, dtype=FP32 if limits is None or "fp32" in limits.dtypes else BF16))
        kwargs["q"] = kwargs["q"].requires_grad_()
        if kda2.explain(kda2.kda, **kwargs, impl=self.impl).chosen is None:
            with pytest.raises(kda2.UnsupportedTarget, match="requires grad"):
                kda2.kda(**kwargs, impl=self.impl)
            return
        o, _ = kda2.kda(**kwargs, impl=self.impl)
        o.sum().backward()
        assert kwargs["q"].grad.isfinite().all() and kwargs["q"].grad.abs().sum() > 0
