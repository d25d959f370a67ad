"""The `hopper` implementation: the conformance suite, and calls that its short cuts cannot take, on a GPU of compute
capability 9.0. `torch` takes the same calls on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kda2.ops.kda import Gate, kda
from kda2.testing import KdaConformance
from kda2.testing.conformance import FULL


@pytest.mark.gpu
@pytest.mark.hopper
class TestKdaOnGpu(KdaConformance):
    impl = "hopper"
    device = "cuda"
    sizes = FULL
    rounds_by_chunk = True


@dataclass(frozen=True)
class Hard:
    """A call whose exponents or magnitudes leave fp32 unless a chunk is taken apart; `spoil` changes its inputs."""

    name: str
    gate: str
    spoil: Callable[[dict[str, Tensor]], None] = lambda x: None
    A_log: float = 0.0
    neg_eigval: bool = False
    g_dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = (130,)
    state: float = 1.0  # of the initial state's elements
    limits: tuple[float, float] = (5e-3, 4e-3)  # of the relative errors of o and of the final state


def _resets(x: dict[str, Tensor]) -> None:
    x["g"][torch.rand_like(x["g"]) < 0.01] = -torch.inf
    x["g"][:, 70] = -torch.inf


def _repeated(x: dict[str, Tensor]) -> None:
    x["k"][:] = x["k"][:, :1].clone()
    x["g"].zero_()
    x["beta"].add_(2)


def _scaled(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def spoil(x: dict[str, Tensor]) -> None:
        x["g"].fill_(40.0)  # the gate at its bound
        x[name].mul_(factor)

    return spoil


def _steep_then_flat(x: dict[str, Tensor]) -> None:
    """Half of each chunk of 32 tokens decays by 2^161, the other by little: together it is less than a half may have,
    were it even."""
    x["g"][:, torch.arange(x["g"].shape[1]) % 32 < 16] = -7.0


def _large_there(x: dict[str, Tensor]) -> None:
    _steep_then_flat(x)
    x["v"][:, 40:50] *= 1e4


def _some_steep(x: dict[str, Tensor]) -> None:
    x["g"].fill_(-1e-4)
    x["g"][..., ::2] = -4.9


def _reset_in_the_last_chunk(x: dict[str, Tensor]) -> None:
    x["g"][:, 33] = -torch.inf


def _alike(x: dict[str, Tensor]) -> None:
    """Every channel decays alike and by little, and beta is near 1: factors of a row all err to one side."""
    x["g"].fill_(-2.4e-4)
    x["beta"].fill_(4.0)


HARD = (
    Hard("reset_in_a_short_last_chunk", "log", _reset_in_the_last_chunk, lengths=(34,)),
    Hard("channels_alike", "log", _alike, lengths=(600,), limits=(7e-3, 6e-3)),
    Hard("large_state_kept_beside_steep_channels", "log", _some_steep, state=1e5),
    Hard("huge_state_packed", "log", _some_steep, lengths=(33, 0, 1, 61), state=1e8),
    Hard("resets", "log", _resets),
    Hard("steep_then_flat", "log", _steep_then_flat),
    Hard("steep_then_flat_large_values", "log", _large_there),
    Hard("steep_then_flat_packed", "log", _steep_then_flat, lengths=(33, 0, 1, 61)),
    Hard("vanishing_A_log", "bounded", A_log=-200.0),
    Hard("sparse_decays_of_100", "log", lambda x: x["g"].masked_fill_(torch.rand_like(x["g"]) < 0.05, -100.0)),
    Hard("steep_softplus", "softplus", A_log=3.0),
    Hard("steep_softplus_packed", "softplus", A_log=3.0, lengths=(33, 0, 1, 61)),
    Hard("steep_softplus_fp32_gate", "softplus", A_log=3.0, g_dtype=torch.float32),
    Hard("bound_large_keys", "bounded", _scaled("k", 1e4)),
    Hard("bound_large_values", "bounded", _scaled("v", 1e4)),
    Hard("bound_small_values", "bounded", _scaled("v", 1e-4)),
    Hard("bound_tiny_values", "bounded", _scaled("v", 1e-6), state=1e-6),
    Hard("bound_tiny_keys", "bounded", _scaled("k", 1e-5)),
    Hard("bound_tiny_queries", "bounded", _scaled("q", 1e-5)),
    Hard("flipped_repeated_keys", "log", _repeated, neg_eigval=True),
    Hard("long_sequences_last", "bounded", lengths=(5, 40, 200, 7)),
)
# heads of which an H200 has a multiprocessor for each half of V, and heads of which it has not
ON_HOPPER = [pytest.param("hopper", "cuda", HV, marks=[pytest.mark.gpu, pytest.mark.hopper]) for HV in (2, 80)]


@pytest.mark.parametrize(("impl", "device", "HV"), [("torch", "cpu", 2), *ON_HOPPER])
@pytest.mark.parametrize("hard", HARD, ids=lambda hard: hard.name)
def test_any_gate_and_any_magnitude_is_exact(hard: Hard, impl: str, device: str, HV: int) -> None:
    T, N, H, K = sum(hard.lengths), len(hard.lengths), 2, 128
    x = {name: torch.randn(1, T, H, K) for name in ("q", "k")} | {name: torch.randn(1, T, HV, K) for name in ("v", "g")}
    x["beta"] = torch.randn(1, T, HV)
    if hard.gate == "log":
        x["g"] = -0.3 * torch.rand(1, T, HV, K)
    hard.spoil(x)
    dtypes = {"g": hard.g_dtype}
    x = {name: value.to(device, dtypes.get(name, torch.bfloat16)) for name, value in x.items()}
    A_log, dt_bias = (torch.rand(HV) + hard.A_log).to(device), torch.rand(HV, K).to(device)
    gates = {
        "log": Gate.log(),
        "softplus": Gate.softplus(A_log, dt_bias),
        "bounded": Gate.bounded(A_log, dt_bias),
    }
    offsets = torch.tensor((0, *accumulate(hard.lengths)), device=device)
    first = hard.state * torch.randn(N, HV, K, K).to(device)

    def run(impl: str, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        o, state = kda(
            **{name: value.to(dtype or value.dtype) for name, value in x.items()},
            gate=gates[hard.gate], qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=hard.neg_eigval,
            initial_state=first.to(dtype or first.dtype), output_final_state=True, cu_seqlens=offsets, impl=impl,
        )  # fmt: skip
        assert state is not None
        return o, state

    for got, want, limit in zip(run(impl, None), run("reference", torch.float64), hard.limits, strict=True):
        assert (got.double() - want).norm() < limit * want.norm()


@pytest.mark.gpu
@pytest.mark.hopper
def test_expanded_tensors_are_read_as_their_copies() -> None:
    H, T, K = 3, 70, 128
    x = {name: torch.randn(2, T, 1, K, dtype=torch.bfloat16, device="cuda") for name in ("q", "k", "v", "g")}
    expanded = {name: value[:1].expand(2, T, H, K) for name, value in x.items()}
    beta = torch.rand(1, T, 1, dtype=torch.bfloat16, device="cuda").expand(2, T, H)
    gate = Gate.softplus(torch.rand(H, device="cuda"))
    outputs = [
        kda(**tensors, beta=beta, gate=gate, qk_l2norm=True, output_final_state=True, impl="hopper")
        for tensors in (expanded, {name: value.contiguous() for name, value in expanded.items()})
    ]
    for got, want in zip(*outputs, strict=True):
        assert got is not None and want is not None and torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.slow
def test_rows_of_an_initial_state_past_two_to_the_31() -> None:
    T, K = 40, 128
    x = {name: torch.randn(1, T, 1, K, dtype=torch.bfloat16, device="cuda") for name in ("q", "k", "v")}
    g, beta = -torch.rand(1, T, 1, K, device="cuda").bfloat16(), torch.rand(1, T, 1, device="cuda").bfloat16()
    first = torch.randn(1, 1, K, K, device="cuda")
    apart = torch.empty(K, 17_000_000, device="cuda")[:, :K].copy_(first[0, 0])[None, None]
    outputs = [
        kda(**x, g=g, beta=beta, qk_l2norm=True, initial_state=state, output_final_state=True, impl="hopper")
        for state in (apart, first)
    ]
    for got, want in zip(*outputs, strict=True):
        assert got is not None and want is not None and torch.equal(got, want)
