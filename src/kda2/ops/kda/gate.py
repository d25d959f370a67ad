"""The forget gate: how the model's gate activations become the per-channel log decay g_t <= 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kda2.errors import InvalidType, InvalidValue
from kda2.ops.kda.arguments import real_number

# Stands for a log decay of -inf: its exponential is exactly 0 in every dtype, and sums of it stay finite.
RESET = -1e30


@dataclass(frozen=True, eq=False)
class Gate:
    """How `g` is read. Build one with `Gate.log`, `Gate.softplus` or `Gate.bounded`.

    | gate | log decay g_t |
    |---|---|
    | `log` | `g` itself: natural log, any value <= 0, -inf resets the channel |
    | `softplus` | `-exp(A_log) * softplus(g + dt_bias)`; `g = +inf` resets the channel |
    | `bounded` | `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, `lower_bound` in [-5, 0) |

    Source: Kimi Linear (arXiv 2510.26692) and the gates of its released models.
    """

    kind: Literal["log", "softplus", "bounded"]
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("log", "softplus", "bounded"):
            raise InvalidValue("gate", "of kind 'log', 'softplus' or 'bounded'", repr(self.kind))
        if self.kind == "log":
            _refuse_given(self.kind, A_log=self.A_log, dt_bias=self.dt_bias)
        elif self.A_log is None:
            raise InvalidType("A_log", f"a torch.Tensor for the gate {self.kind!r}", "None")
        if self.kind == "softplus":
            _refuse_given(self.kind, lower_bound=self.lower_bound)
        elif self.kind == "bounded" or self.lower_bound is not None:
            object.__setattr__(self, "lower_bound", _checked_lower_bound(self.lower_bound))

    @classmethod
    def log(cls, lower_bound: float | None = None) -> Gate:
        """`g` is the natural log decay. `lower_bound` in [-5, 0) is the caller's promise that g >= lower_bound
        everywhere, which enables a faster route; a broken promise gives wrong results."""
        return cls("log", lower_bound=lower_bound)

    @classmethod
    def softplus(cls, A_log: Tensor, dt_bias: Tensor | None = None) -> Gate:
        """-exp(A_log) * softplus(g + dt_bias). A_log fp32 [HV], dt_bias fp32 [HV, K] or None."""
        return cls("softplus", A_log, dt_bias)

    @classmethod
    def bounded(cls, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float = -5.0) -> Gate:
        """lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). A_log fp32 [HV], dt_bias fp32 [HV, K] or None."""
        return cls("bounded", A_log, dt_bias, lower_bound)


def _refuse_given(kind: str, **arguments: object) -> None:
    for name, x in arguments.items():
        if x is not None:
            raise InvalidValue(name, f"None for the gate {kind!r}, which has none", "one")


def _checked_lower_bound(lower_bound: object) -> float:
    bound = real_number("lower_bound", lower_bound)
    if not -5.0 <= bound < 0.0:
        raise InvalidValue("lower_bound", "in [-5, 0)", repr(bound))
    return bound


def log_decay(g: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """The log decay g_t of `g` [..., HV, K] in `dtype`; resets come out as `RESET`."""
    g = g.to(dtype)
    if gate.kind == "log":
        return g.clamp(min=RESET)
    assert gate.A_log is not None
    rate = gate.A_log.to(dtype).exp()[:, None]
    if gate.dt_bias is not None:
        g = g + gate.dt_bias.to(dtype)
    # clamped before the products, so that an infinite activation gives no inf * 0 in the gradient of A_log
    g = g.clamp(min=RESET, max=-RESET)
    if gate.kind == "softplus":
        return (-rate * torch.nn.functional.softplus(g)).clamp(min=RESET)
    assert gate.lower_bound is not None
    return gate.lower_bound * torch.sigmoid(rate * g)
