"""A Kimi Delta Attention layer in plain torch around `kda2.kda`, and a run of it over a text file.

    python examples/kda_layer.py [--tokens 512] [--gate softplus]

The layer is the one of Kimi Linear (arXiv 2510.26692): projections, a short causal convolution, a low-rank forget gate
per channel, a gated RMSNorm. Its weights are random and seeded, with the initial gate range of the published models.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kda2

TEXT = Path(__file__).with_name("attention.txt")
LOWER_BOUND = -5.0


class ShortConvolution(nn.Module):
    """A causal convolution of each channel over its last `width` tokens, then SiLU. [B, T, D] to [B, T, D]."""

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.mT, (self.width - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=x.shape[-1]).mT)


class GatedRMSNorm(nn.Module):
    """RMSNorm over the last axis, times the sigmoid of a gate of the same shape."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * torch.sigmoid(gate)


class KdaLayer(nn.Module):
    """[B, T, hidden] to [B, T, hidden], `heads` heads of `head_dim` channels, keys and values alike.

    `gate` is "softplus", as Kimi Linear has it, or "bounded", whose decay per token never falls below exp(-5).
    """

    def __init__(self, hidden: int = 512, heads: int = 4, head_dim: int = 128, gate: str = "softplus") -> None:
        super().__init__()
        inner = heads * head_dim
        self.heads, self.gate = heads, gate
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(3))
        self.q_conv, self.k_conv, self.v_conv = (ShortConvolution(inner) for _ in range(3))
        self.forget = nn.Sequential(nn.Linear(hidden, head_dim, bias=False), nn.Linear(head_dim, inner, bias=False))
        self.A_log, self.dt_bias = (nn.Parameter(x) for x in _initial_gate(gate, heads, head_dim))
        self.beta_proj = nn.Linear(hidden, heads, bias=False)
        self.out_gate = nn.Sequential(nn.Linear(hidden, head_dim, bias=False), nn.Linear(head_dim, inner))
        self.norm = GatedRMSNorm(head_dim)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, impl: str = "auto") -> Tensor:
        q, k, v, g, out_gate = (
            self._heads(y)
            for y in (
                self.q_conv(self.q_proj(x)), self.k_conv(self.k_proj(x)), self.v_conv(self.v_proj(x)),
                self.forget(x), self.out_gate(x),
            )
        )  # fmt: skip
        o, _ = kda2.kda(q, k, v, g, self.beta_proj(x), gate=self._gate(), qk_l2norm=True, beta_sigmoid=True, impl=impl)
        return self.o_proj(self.norm(o, out_gate).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def _gate(self) -> kda2.Gate:
        A_log, dt_bias = self.A_log.float(), self.dt_bias.float()
        if self.gate == "bounded":
            return kda2.Gate.bounded(A_log, dt_bias, LOWER_BOUND)
        return kda2.Gate.softplus(A_log, dt_bias)


def _initial_gate(gate: str, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """A_log [heads] and dt_bias [heads, head_dim], so that half-lives range from a token to hundreds of them."""
    if gate == "bounded":
        A_log, decay = torch.rand(heads), _log_uniform(1e-3, 1.0, heads, head_dim)
        return A_log, torch.logit(decay / -LOWER_BOUND) / A_log.exp()[:, None]
    return torch.empty(heads).uniform_(1, 16).log(), _inverse_softplus(_log_uniform(1e-3, 1e-1, heads, head_dim))


def _log_uniform(low: float, high: float, *shape: int) -> Tensor:
    return torch.empty(shape).uniform_(math.log(low), math.log(high)).exp()


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def embed(text: bytes, tokens: int, hidden: int) -> Tensor:
    """The first `tokens` bytes of a text, one token each, as random embeddings of unit RMS [1, tokens, hidden]."""
    if len(text) < tokens:
        raise ValueError(f"the text must have at least {tokens} bytes, got {len(text)}")
    ids = torch.tensor(list(text[:tokens]))
    return torch.randn(256, hidden)[ids].unsqueeze(0)


def build(
    tokens: int = 512, heads: int = 4, gate: str = "softplus", seed: int = 0, text: Path = TEXT
) -> tuple[KdaLayer, Tensor]:
    """A bf16 layer with seeded weights and its input, the embedded text [1, tokens, hidden]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = KdaLayer(heads=heads, gate=gate)
        x = embed(text.read_bytes(), tokens, hidden=layer.q_proj.in_features)
    return layer.to(torch.bfloat16), x.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--gate", choices=["softplus", "bounded"], default="softplus")
    args = parser.parse_args()
    layer, x = build(args.tokens, gate=args.gate)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        y = layer.to(device)(x.to(device))
    print(f"{tuple(x.shape)} to {tuple(y.shape)} on {device}, output RMS {y.float().square().mean().sqrt():.4f}")


if __name__ == "__main__":
    main()
