"""The forget gate: how the model's gate activations become the per-channel log decay g_t <= 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kda2.errors import InvalidValue

# Stands for a log decay of -inf: its exponential is exactly 0 in every dtype, and sums of it stay finite.
RESET = -1e30


def _check_lower_bound(lower_bound: float) -> None:
    if not -5.0 <= lower_bound < 0.0:
        raise InvalidValue("lower_bound", "in [-5, 0)", repr(lower_bound))


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

    @classmethod
    def log(cls, lower_bound: float | None = None) -> Gate:
        """`g` is the natural log decay. `lower_bound` in [-5, 0) is the caller's promise that g >= lower_bound
        everywhere, which enables a faster route; a broken promise gives wrong results."""
        if lower_bound is not None:
            _check_lower_bound(lower_bound)
        return cls("log", lower_bound=lower_bound)

    @classmethod
    def softplus(cls, A_log: Tensor, dt_bias: Tensor | None = None) -> Gate:
        """-exp(A_log) * softplus(g + dt_bias). A_log fp32 [HV], dt_bias fp32 [HV, K] or None."""
        return cls("softplus", A_log, dt_bias)

    @classmethod
    def bounded(cls, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float = -5.0) -> Gate:
        """lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). A_log fp32 [HV], dt_bias fp32 [HV, K] or None."""
        _check_lower_bound(lower_bound)
        return cls("bounded", A_log, dt_bias, lower_bound)


def log_decay(g: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """The log decay g_t of `g` [..., HV, K] in `dtype`; resets come out as `RESET`."""
    g = g.to(dtype)
    if gate.kind == "log":
        return g.clamp(min=RESET)
    assert gate.A_log is not None
    rate = gate.A_log.to(dtype).exp()[:, None]
    if gate.dt_bias is not None:
        g = g + gate.dt_bias.to(dtype)
    if gate.kind == "softplus":
        # clamped before the product, so that a reset gives no inf * 0 in the gradient of A_log
        return (-rate * torch.nn.functional.softplus(g.clamp(max=-RESET))).clamp(min=RESET)
    assert gate.lower_bound is not None
    return gate.lower_bound * torch.sigmoid(rate * g)
