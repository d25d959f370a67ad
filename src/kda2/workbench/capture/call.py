"""A call of `kda2.kda` as a value: kept in a safetensors file, described in numbers."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kda2.errors import InvalidValue
from kda2.ops.kda.gate import RESET, Gate, log_decay
from kda2.testing import checked
from kda2.testing.verify import NAMES
from kda2.workbench import extras
from kda2.workbench.profiler.environment import file_hash

SCHEMA = 1
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
_LEARNED = ("A_log", "dt_bias")
_OPTIONS = ("scale", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout")
_QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_BINS = 40
# The most gates that a regime is told from: it is written beside a running model, which waits for it.
_SAMPLED = 1 << 24
_NAMES = {**NAMES, torch.float64: "fp64"}


class _Options(BaseModel):
    """A call's plain options, as a file has them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    allow_neg_eigval: bool
    state_layout: Literal["kv", "vk"]
    output_final_state: bool


class _Gate(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["log", "softplus", "bounded"]
    lower_bound: float | None


class _Facts(BaseModel):
    """What is read back of a capture's facts; the others follow from its tensors."""

    origin: dict[str, Any]


class _About(BaseModel):
    """The metadata of a capture file."""

    schema_: Literal[1] = Field(alias="schema")
    options: _Options
    gate: _Gate
    facts: _Facts


@dataclass(frozen=True)
class Capture:
    """One call: `kwargs` as `kda2.kda` takes them, and where it came from."""

    kwargs: dict[str, Any]
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked(self.kwargs)  # a capture that kda2 itself would refuse is refused here, with the same words

    @property
    def gate(self) -> Gate:
        gate: Gate = self.kwargs["gate"]
        return gate

    def to(self, device: torch.device | str) -> Capture:
        """The same call with its tensors on `device`."""
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.kwargs.items()}
        gate = self.gate
        A_log, dt_bias = (x if x is None else x.to(device) for x in (gate.A_log, gate.dt_bias))
        return Capture({**moved, "gate": replace(gate, A_log=A_log, dt_bias=dt_bias)}, self.origin)

    def first(self, tokens: int) -> Capture:
        """The call on the first tokens of each row; a packed call is left whole."""
        if self.kwargs.get("cu_seqlens") is not None or tokens >= self.kwargs["q"].shape[1]:
            return self
        cut = {name: self.kwargs[name][:, :tokens] for name in ("q", "k", "v", "g", "beta")}
        return Capture({**self.kwargs, **cut}, self.origin)

    def options(self) -> dict[str, Any]:
        """The call's options that are plain values, defaults filled in."""
        call = checked(self.kwargs)
        filled = {name: getattr(call.options, name) for name in _OPTIONS}
        return filled | {"output_final_state": call.output_final_state}

    def case(self) -> dict[str, Any]:
        """The call as `kda2.ops.kda.spec` counts it."""
        kwargs = self.kwargs
        B, T, H, K = kwargs["q"].shape
        offsets, initial = kwargs.get("cu_seqlens"), kwargs.get("initial_state")
        ends = [T * b for b in range(B + 1)] if offsets is None else offsets.tolist()
        ways = [w for w, there in (("in", initial is not None), ("out", kwargs.get("output_final_state"))) if there]
        state = "fp32" if initial is None else _NAMES[initial.dtype]
        return {
            "seqlens": [end - start for start, end in pairwise(ends)],
            "heads": kwargs["v"].shape[2], "qk_heads": H, "k": K, "v": kwargs["v"].shape[3],
            "dtype": _NAMES[kwargs["q"].dtype], "g_dtype": _NAMES[kwargs["g"].dtype],
            "state": "-".join([state, *ways]) if ways else "none",
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Sizes, options and the gate's regime, as plain data. The half-life of a channel is the number of tokens in
        which its state halves; quantiles and histogram are over all heads and channels, and over all tokens of
        sequences, or every n-th of them in a call of more than 16 million gates."""
        q, v = self.kwargs["q"], self.kwargs["v"]
        B, T, H, K = q.shape
        cu = self.kwargs.get("cu_seqlens")
        return {
            "batch": B, "tokens": T, "heads": H, "value_heads": v.shape[2], "K": K, "V": v.shape[3],
            "sequences": B if cu is None else cu.numel() - 1,
            "dtype": str(q.dtype).removeprefix("torch."),
            "gate": self.gate.kind, "lower_bound": self.gate.lower_bound,
            **self.options(),
            "regime": self._regime(),
            "origin": self.origin,
        }  # fmt: skip

    def _regime(self) -> dict[str, Any]:
        g, cu = self.kwargs["g"].detach().flatten(0, 1), self.kwargs.get("cu_seqlens")
        g = g if cu is None else g[: int(cu[-1])]
        A_log, dt_bias = (x if x is None else x.detach().cpu() for x in _learned_of(self.gate).values())
        sample = g[:: max(1, -(-g.numel() // _SAMPLED))].cpu()
        decay = log_decay(sample, replace(self.gate, A_log=A_log, dt_bias=dt_bias), torch.float64).flatten()
        resets = int((decay <= RESET).sum())
        decay = decay[decay > RESET]
        if not decay.numel():
            return {"resets": resets}
        at = torch.tensor(_QUANTILES, dtype=torch.float64, device="cpu")
        depth = torch.quantile(decay[:: max(1, decay.numel() // 1_000_000)], at)  # quantile() takes 16 M elements
        half_life = (-math.log(2.0) / depth.clamp(max=-1e-12)).tolist()
        exponent = torch.log10((-decay).clamp(min=1e-12))
        counts, edges = torch.histogram(exponent.float(), bins=_BINS)
        return {
            "log_decay": _named(depth.tolist()),
            "half_life_tokens": _named(half_life),
            "resets": resets,
            "histogram": {"log10_of_minus_log_decay": edges.tolist(), "count": [int(c) for c in counts.tolist()]},
        }

    def save(self, path: Path) -> str:
        """Write the capture, whole or not at all; returns the file's SHA-256. Raises `OSError` with the file's name."""
        tensors = {name: self.kwargs[name] for name in TENSORS if self.kwargs.get(name) is not None}
        tensors |= {name: x for name, x in _learned_of(self.gate).items() if x is not None}
        about = {
            "schema": SCHEMA,
            "options": self.options(),
            "gate": {"kind": self.gate.kind, "lower_bound": self.gate.lower_bound},
            "facts": self.facts(),
        }
        plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
        return _write_whole(plain, {"kda2": json.dumps(about)}, path)

    @classmethod
    def load(cls, path: Path, argument: str = "--inputs") -> Capture:
        """Read what `save` wrote. Raises `InvalidValue` for `argument`, naming what is missing or wrong."""
        files = extras.load("safetensors", "a capture file")
        try:
            with files.safe_open(path, framework="pt") as f:
                about = _About.model_validate_json((f.metadata() or {})["kda2"])
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a mapping
        except FileNotFoundError as e:
            raise InvalidValue(argument, "a capture file", f"{path}, which does not exist") from e
        except (KeyError, ValueError, OSError, files.SafetensorError) as e:
            fix = "captures are written by kda2 capture, kda2 run and Capture.save"
            raise InvalidValue(argument, "a safetensors file with kda2's metadata", f"{path}: {e!r}", fix) from e
        if missing := [name for name in ("q", "k", "v", "g", "beta") if name not in tensors]:
            raise InvalidValue(argument, "a capture with q, k, v, g and beta", f"{path} without {missing}")
        if unknown := sorted(set(tensors) - {*TENSORS, *_LEARNED}):
            raise InvalidValue(argument, f"a capture of {', '.join((*TENSORS, *_LEARNED))}", f"{path} with {unknown}")
        A_log, dt_bias = (tensors.pop(name, None) for name in _LEARNED)
        gate = Gate(about.gate.kind, A_log, dt_bias, about.gate.lower_bound)
        return cls({**tensors, **about.options.model_dump(), "gate": gate}, about.facts.origin)


def _named(values: list[float]) -> dict[str, float]:
    return {f"p{100 * q:g}": value for q, value in zip(_QUANTILES, values, strict=True)}


def _learned_of(gate: Gate) -> dict[str, Tensor | None]:
    return {name: getattr(gate, name) for name in _LEARNED}


def _write_whole(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> str:
    """Write beside `path`, and rename once the disk has all of it; returns the SHA-256."""
    save_file = extras.load("safetensors.torch", "a capture file").save_file
    refused = extras.load("safetensors", "a capture file").SafetensorError
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata=metadata)
        part.chmod(0o644)  # as the other files of a run; it comes out readable by its owner alone
        with part.open("rb+") as f:
            os.fsync(f.fileno())
        digest = file_hash(part)
        part.replace(path)
    except (OSError, refused) as e:  # a full disk
        raise OSError(None, f"a capture cannot be written ({e})", str(path)) from e
    finally:
        part.unlink(missing_ok=True)
    return digest
