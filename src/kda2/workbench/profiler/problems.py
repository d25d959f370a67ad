"""The benchmark's problems: inputs of a case, the fp64 oracle's answer, and the least work the case needs.

Gate regimes: inputs are randn, A_log and dt_bias uniform in [0, 1), lower_bound -5. `strong` is that; `weak` shifts g
by -8, so that heads remember; `mixed` shifts each head by its own amount in [-8, 0]; `none` lets nothing decay.
`softplus` has the inputs of `strong` and the softplus gate, which has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator
from torch import Tensor

import kda2
from kda2.ops.kda import spec
from kda2.testing import FAMILIES, error
from kda2.workbench.profiler.suites import GateRegime, MadeRegime

LOWER_BOUND = -5.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Makes the gate's sigmoid exactly 0 without an infinity that some peer may not expect.
_NEVER = -1e4


class _Case(BaseModel):
    """Axes shared by prefill and step. `kv_heads` is the number of value heads where it differs from `heads`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int = Field(gt=0)
    kv_heads: int | None = Field(default=None, gt=0)
    k: int = Field(gt=0)
    v: int = Field(gt=0)
    dtype: Literal["bf16", "fp16", "fp32"]
    gate: GateRegime

    @property
    def value_heads(self) -> int:
        return self.kv_heads or self.heads

    def make(self, lead: tuple[int, ...], where: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
        """q, k, v, g, beta, A_log and dt_bias for tokens of shape `lead`."""

        def randn(*shape: int) -> Tensor:
            return torch.randn(*lead, *shape, generator=generator, device=where, dtype=DTYPES[self.dtype])

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=where)

        H, HV, K, V = self.heads, self.value_heads, self.k, self.v
        tensors = {"q": randn(H, K), "k": randn(H, K), "v": randn(HV, V), "g": randn(HV, K), "beta": randn(HV)}
        tensors |= {"A_log": uniform(HV), "dt_bias": uniform(HV, K)}
        if self.gate == "none":
            tensors["g"].fill_(_NEVER)
        elif self.gate in ("weak", "mixed"):
            tensors["g"] += -8.0 if self.gate == "weak" else (-8.0 * uniform(HV, 1)).to(tensors["g"].dtype)
        return tensors


class _Sequences(_Case):
    seqlens: tuple[NonNegativeInt, ...] = Field(min_length=1)

    @property
    def tokens(self) -> int:
        return sum(self.seqlens)


class PrefillCase(_Sequences):
    """Whole sequences: one is a dense call, several are packed. `state` says which states go in and come out."""

    gate: MadeRegime
    state: Literal["fp32-in-out", "none"] = "fp32-in-out"


class CaptureFacts(BaseModel):
    """What a record says of a captured call: the first 12 digits of its file's SHA-256, and its options. `packed` has
    offsets, `tail` is the number of tokens past the last of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern="^[0-9a-f]{12}$")
    gate: Literal["log", "softplus", "bounded"]
    lower_bound: float | None
    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    allow_neg_eigval: bool
    state_layout: Literal["kv", "vk"]
    packed: bool
    tail: int
    g_dtype: Literal["bf16", "fp16", "fp32"]


class CapturedCase(_Sequences):
    """A call that a model made. `state` gives the initial state's dtype (else the final one's) and the ways it goes."""

    gate: Literal["captured"]
    state: str = Field(pattern="^none$|^(bf16|fp16|fp32)(-in)?(-out)?$")
    capture: CaptureFacts


class StepCase(_Case):
    """One token for each of `batch` sequences, the state updated in place."""

    gate: MadeRegime
    batch: int = Field(gt=0)
    state_dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def tokens(self) -> int:
        return self.batch


class FamilyCase(_Case):
    """A probe family of `kda2.testing`, `seqlens` long where it leaves lengths open. The gate is `own` where it has no
    regime."""

    gate: Literal["strong", "weak", "mixed", "none", "own"]
    seqlens: tuple[PositiveInt]
    family: str

    @field_validator("family")
    @classmethod
    def _is_one(cls, name: str) -> str:
        if name not in FAMILIES:
            raise ValueError(f"no family {name!r} among {', '.join(FAMILIES)}")
        return name

    @property
    def tokens(self) -> int:
        return self.seqlens[0]


Case = PrefillCase | CapturedCase | StepCase | FamilyCase


@dataclass(frozen=True)
class Options:
    """What a call is told beside its tensors; by default what the suites have."""

    scale: float
    output_final_state: bool
    gate: Literal["log", "softplus", "bounded"] = "bounded"
    lower_bound: float | None = LOWER_BOUND
    qk_l2norm: bool = True
    beta_sigmoid: bool = True
    allow_neg_eigval: bool = False
    state_layout: Literal["kv", "vk"] = "kv"


@dataclass(frozen=True)
class Problem:
    """A case on a device: its tensors by name, its options, and its outputs' shapes.

    `tensors` holds q, k, v, g, beta, and A_log, dt_bias, initial_state (in the layout of the options) and cu_seqlens
    where the case has them; for a step `state` [B, HV, K, V] instead.
    """

    case: Case
    tensors: Mapping[str, Tensor]
    options: Options

    @property
    def gate(self) -> kda2.Gate:
        o = self.options
        return kda2.Gate(o.gate, self.tensors.get("A_log"), self.tensors.get("dt_bias"), o.lower_bound)

    @property
    def call_options(self) -> dict[str, Any]:
        """The options by the names that kda2's calls have for them, but for the final state."""
        o = self.options
        return {
            "gate": self.gate, "scale": o.scale, "qk_l2norm": o.qk_l2norm, "beta_sigmoid": o.beta_sigmoid,
            "allow_neg_eigval": o.allow_neg_eigval, "state_layout": o.state_layout,
        }  # fmt: skip

    @property
    def costs(self) -> dict[str, int]:
        """`flops` of the recurrence and `bytes` of every input and output once, states included."""
        case = {**self.case.model_dump(), "heads": self.case.value_heads, "qk_heads": self.case.heads}
        if isinstance(self.case, CapturedCase):
            case["g_dtype"] = self.case.capture.g_dtype
        return {"flops": spec.flops(case), "bytes": spec.bytes_moved(case)}

    def owned(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs without the tokens that belong to no sequence: what stands there is everybody's own affair."""
        packed = "cu_seqlens" in self.tensors
        return {name: x[:, : self.case.tokens] if packed and name == "o" else x for name, x in outputs.items()}


def make_problem(case: PrefillCase | StepCase, where: torch.device, seed: int) -> Problem:
    """The problem of a case, the same for the same seed and kind of device."""
    generator = torch.Generator(device=where).manual_seed(seed)
    options = Options(case.k**-0.5, True)
    if case.gate == "softplus":
        options = replace(options, gate="softplus", lower_bound=None)
    if isinstance(case, StepCase):
        tensors = case.make((case.batch,), where, generator)
        shape = (case.batch, case.value_heads, case.k, case.v)
        state = torch.randn(shape, generator=generator, device=where)
        return Problem(case, tensors | {"state": state.to(DTYPES[case.state_dtype])}, options)
    tensors = case.make((1, case.tokens), where, generator)
    if len(case.seqlens) > 1:
        offsets = torch.tensor([0, *case.seqlens]).cumsum(0)
        tensors["cu_seqlens"] = offsets.to(device=where, dtype=torch.int32)
    if case.state == "fp32-in-out":
        shape = (len(case.seqlens), case.value_heads, case.k, case.v)
        tensors["initial_state"] = torch.randn(shape, generator=generator, device=where)
    return Problem(case, tensors, replace(options, output_final_state=case.state != "none"))


def oracle(problem: Problem) -> dict[str, Tensor]:
    """o and the final state [N, HV, K, V], in fp64, by the token recurrence."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in problem.tensors.items()}
    return problem.owned(kda2_outputs(replace(problem, tensors=wide), "reference"))


def kda2_outputs(problem: Problem, impl: str) -> dict[str, Tensor]:
    """o and the final state [N, HV, K, V] of kda2's own call on the problem; a step's state is left as it was."""
    t = problem.tensors
    options = problem.call_options | {"impl": impl}
    tokens = (t["q"], t["k"], t["v"], t["g"], t["beta"])
    with torch.no_grad():
        if isinstance(problem.case, StepCase):
            o, state = kda2.kda_step(*tokens, t["state"], inplace=False, **options)
            return {"o": o, "state": state}
        o, final = kda2.kda(
            *tokens, initial_state=t.get("initial_state"), cu_seqlens=t.get("cu_seqlens"), output_final_state=True,
            **options,
        )  # fmt: skip
    assert final is not None
    return {"o": o, "state": final.mT if problem.options.state_layout == "vk" else final}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error; infinite if anything is not finite or the shapes differ."""
    return error(got, want) if got.shape == want.shape else math.inf
