"""What every implementation of `kda_step` must do; subclass `KdaStepConformance` as one does `KdaConformance`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import kda2
from kda2.dispatch import choose
from kda2.memory import fenced_memory, fingerprint, guarded
from kda2.ops.kda.spec import KDA_STEP
from kda2.testing.conformance import DTYPES, FLAGS, GATES, HEADS, KV_SIZES, QUICK, STATES, each, poisoned
from kda2.testing.families import FAMILIES
from kda2.testing.inputs import Problem, Strides, as_step, make, make_step
from kda2.testing.oracle import checked_step, oracle
from kda2.testing.verify import judge, judge_step

StepOutputs = tuple[Tensor, Tensor]


class KdaStepConformance:
    """Tests of `kda2.kda_step` on one implementation and device."""

    impl = "auto"
    device = "cpu"
    sizes = QUICK

    _poisoned = poisoned

    def problem(self, **changes: Any) -> Problem:
        s = self.sizes
        return replace(Problem(B=5, T=1, H=s.H, HV=s.HV, K=s.K, V=s.V, device=self.device, regime="weak"), **changes)

    def run(self, **kwargs: Any) -> StepOutputs:
        """Call the implementation; what it may not write must come out as it went in."""
        written = {"out"} | ({"state"} if kwargs.get("inplace", True) else set())
        kept = {name: x for name, x in kwargs.items() if name not in written}
        before = fingerprint(kept)
        outputs = kda2.kda_step(**kwargs, impl=self.impl)
        assert fingerprint(kept) == before, "the call wrote into its inputs"
        return outputs

    def check(self, kwargs: dict[str, Any]) -> StepOutputs:
        """Run a call on a copy of its state and hold o and the state to the oracle."""
        got = self.run(**{**kwargs, "state": kwargs["state"].clone()})
        comparisons = judge_step(got, kwargs)
        assert all(c.ok for c in comparisons), "\n".join(c.explain() for c in comparisons)
        return got

    @each("flags", FLAGS)
    @each("gate", GATES)
    def test_options(self, gate: str, flags: str) -> None:
        self.check(make_step(self.problem(**GATES[gate], **FLAGS[flags])))

    @each("dtype", DTYPES)
    @each("state", [name for name in STATES if name != "none"])
    @each("layout", ("kv", "vk"))
    def test_dtypes(self, layout: str, state: str, dtype: str) -> None:
        self.check(make_step(self.problem(layout=layout, state=STATES[state], **DTYPES[dtype])))

    @each("dtype", ("bf16", "fp32"))
    @each("family", KDA_STEP.families)
    def test_family(self, family: str, dtype: str) -> None:
        self.check(as_step(FAMILIES[family].build(self.problem(**DTYPES[dtype]))))

    @each("layout", ("kv", "vk"))
    @each("K, V", KV_SIZES)
    def test_sizes(self, K: int, V: int, layout: str) -> None:
        self.check(make_step(self.problem(K=K, V=V, B=2, H=1, HV=1, layout=layout)))

    @each("H, HV", HEADS)
    def test_heads(self, H: int, HV: int) -> None:
        self.check(make_step(self.problem(H=H, HV=HV)))

    def test_scale(self) -> None:
        self.check(make_step(self.problem(scale=-0.7)))

    @each("strides", ("fused", "head_first", "expanded_beta", "last_axis"))
    def test_strides(self, strides: Strides) -> None:
        self.check(make_step(self.problem(strides=strides, H=2, HV=4)))

    def test_no_rows(self) -> None:
        o, state = self.check(make_step(self.problem(B=0)))
        assert o.shape[0] == 0 and state.shape[0] == 0

    def test_autograd_sees_what_is_written(self) -> None:
        """What it saved of the state or of `out` before the call must not pass for unchanged."""
        kwargs = make_step(self.problem())
        out = torch.zeros_like(kwargs["v"])
        versions = kwargs["state"]._version, out._version
        self.run(**kwargs, out=out)
        assert kwargs["state"]._version > versions[0] and out._version > versions[1]

    # state pool

    @each("layout", ("kv", "vk"))
    @each("indices", (torch.int32, torch.int64))
    def test_pool(self, indices: torch.dtype, layout: str) -> None:
        problem = self.problem(layout=layout, offsets_dtype=indices)
        kwargs = make_step(problem, slots=9, indices=(7, 0, 3, 8, 2))
        _, state = self.check(kwargs)
        untouched = [1, 4, 5, 6]
        assert torch.equal(state[untouched], kwargs["state"][untouched])

    @each("pad_slot, indices", ((-1, (2, -1, 0, -1, 4)), (0, (2, 0, 1, 0, 4)), (99, (2, 99, 1, 0, 4))))
    def test_padding(self, pad_slot: int, indices: tuple[int, ...]) -> None:
        kwargs = make_step(self.problem(), slots=6, indices=indices, pad_slot=pad_slot)
        o, state = self.check(kwargs)
        padded = [row for row, slot in enumerate(indices) if slot == pad_slot]
        assert (o[padded] == 0).all()
        idle = [slot for slot in range(6) if slot == pad_slot or slot not in indices]
        assert torch.equal(state[idle], kwargs["state"][idle])

    def test_only_padding(self) -> None:
        kwargs = make_step(self.problem(), slots=2, indices=(-1,) * 5)
        o, state = self.check(kwargs)
        assert (o == 0).all() and torch.equal(state, kwargs["state"])

    def test_nan_stays_in_its_row(self) -> None:
        kwargs = make_step(self.problem(), slots=6, indices=(2, -1, 0, 1, 4))
        clean, clean_state = self.run(**{**kwargs, "state": kwargs["state"].clone()})
        spoilt = {name: kwargs[name].clone() for name in ("q", "k", "v", "g", "beta", "state")}
        for name, x in spoilt.items():
            x[[0, 1] if name != "state" else [2, 3]] = torch.nan
        got, state = self.run(**{**kwargs, **spoilt})
        assert torch.equal(got[1:], clean[1:]) and torch.equal(state[[0, 1, 4, 5]], clean_state[[0, 1, 4, 5]])

    @each("stride", ("gap", "head_first", "last_axis"))
    @each("pooled", (False, True))
    def test_strided_state(self, pooled: bool, stride: str) -> None:
        kwargs = make_step(self.problem(), slots=7, indices=(6, 1, 0, 5, 2) if pooled else None)
        view = _RESTRIDE_STATE[stride](kwargs["state"])
        o, state = self.run(**{**kwargs, "state": view})
        assert state.data_ptr() == view.data_ptr()
        comparisons = judge_step((o, view), kwargs)
        assert all(c.ok for c in comparisons), "\n".join(map(str, comparisons))

    @each("bad", (-2, 6, 10**6, -(2**31), 2**31 - 1, 2**62, -(2**63)))
    def test_no_slot_reaches_outside_the_pool(self, bad: int) -> None:
        """Past the checks, as contents on a GPU are: such a row is as padding."""
        kwargs = make_step(self.problem(B=3), slots=6, indices=(2, 0, 1))
        guard = guarded(kwargs["state"])
        call = checked_step({**kwargs, "state": guard.inside})
        indices = torch.tensor((2, bad, 1), device=self.device)
        with fenced_memory() as fenced:
            o, _ = choose(call.query(), self.impl).load()(replace(call, state_indices=indices))
        assert guard.intact() and all(f.intact() for f in fenced)
        assert (o[1] == 0).all() and o.isfinite().all()
        assert torch.equal(guard.inside[[0, 3, 4, 5]], kwargs["state"][[0, 3, 4, 5]])
        assert not torch.equal(guard.inside[[1, 2]], kwargs["state"][[1, 2]])

    # outputs

    @each("pooled", (False, True))
    def test_inplace(self, pooled: bool) -> None:
        kwargs = make_step(self.problem(), slots=7, indices=(6, 1, 0, 5, 2) if pooled else None)
        guard = guarded(kwargs["state"])
        o, state = self.run(**{**kwargs, "state": guard.inside})
        assert state.data_ptr() == guard.inside.data_ptr() and guard.intact()
        o_copy, copy = self.run(**kwargs, inplace=False)
        assert copy.data_ptr() != kwargs["state"].data_ptr()
        assert torch.equal(copy, state) and torch.equal(o_copy, o)

    def test_out(self) -> None:
        kwargs = make_step(self.problem())
        want, _ = self.run(**{**kwargs, "state": kwargs["state"].clone()})
        guard = guarded(torch.full_like(want, torch.nan))
        got, _ = self.run(**{**kwargs, "state": kwargs["state"].clone(), "out": guard.inside})
        assert got.data_ptr() == guard.inside.data_ptr() and guard.intact() and torch.equal(guard.inside, want)

    def test_strided_out(self) -> None:
        kwargs = make_step(self.problem(), slots=6, indices=(2, -1, 0, 1, 4))
        want, _ = self.run(**{**kwargs, "state": kwargs["state"].clone()})
        wide = torch.full((*want.shape[:2], 2 * want.shape[2] + 3), torch.nan, dtype=want.dtype, device=want.device)
        out = wide[..., 1 : 1 + want.shape[2]]
        self.run(**{**kwargs, "state": kwargs["state"].clone(), "out": out})
        assert torch.equal(out, want)
        assert wide[..., 0].isnan().all() and wide[..., 1 + want.shape[2] :].isnan().all()

    # against prefill

    @each("gate", ("log", "softplus", "bounded"))
    @each("layout", ("kv", "vk"))
    def test_steps_are_a_prefill(self, layout: str, gate: str) -> None:
        T, tokens = 6, ("q", "k", "v", "g", "beta")
        kwargs = make(self.problem(B=2, T=T, layout=layout, gate=gate))
        state, outputs = kwargs["initial_state"].clone(), []
        for t in range(T):
            one = {**kwargs, "initial_state": state, **{name: kwargs[name][:, t : t + 1] for name in tokens}}
            o, state = self.run(**as_step(one))
            outputs.append(o)
        comparisons = judge((torch.stack(outputs, dim=1), state), oracle(kwargs), kwargs)
        assert all(c.ok for c in comparisons), "\n".join(map(str, comparisons))


def _with_gap(state: Tensor) -> Tensor:
    """Slots that lie apart, as in a cache that keeps more per slot than this state."""
    wide = state.new_full((state.shape[0], state[0].numel() + 24), torch.nan)
    view = wide[:, : state[0].numel()].view(state.shape)
    return view.copy_(state)


def _head_first(state: Tensor) -> Tensor:
    return state.transpose(0, 1).contiguous().transpose(0, 1)


def _last_axis(state: Tensor) -> Tensor:
    return torch.stack([state, torch.full_like(state, torch.nan)], dim=-1)[..., 0]


_RESTRIDE_STATE: dict[str, Callable[[Tensor], Tensor]] = {
    "gap": _with_gap,
    "head_first": _head_first,
    "last_axis": _last_axis,
}
