"""What is planned for: sizes and options of one call, read from text such as "T=8192,H=64"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kda2.errors import InvalidType, InvalidValue
from kda2.ops.kda.check import MAX_K, MAX_V
from kda2.testing.stages import CHUNKS

# Each sequence is counted by itself.
MOST_SEQUENCES = 100_000
DTYPES = ("bf16", "fp16", "fp32")
GATES = ("log", "softplus", "bounded")
_STATE = re.compile(r"none|(fp32|bf16|fp16)(-in)?(-out)?")
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Problem:
    """A prefill call by its facts; beta's sigmoid is always inside.

    B sequences of T tokens, or the packed `seqlens`. `state` says which states go in and come out, and in what dtype:
    "fp32-in-out", "bf16-in", "fp32-out", "none". C is the chunk's tokens. Raises `InvalidValue` and `InvalidType`.
    """

    T: int = 8192
    B: int = 1
    H: int = 64
    HV: int | None = None
    K: int = 128
    V: int = 128
    C: int = 64
    dtype: str = "bf16"
    gate: str = "bounded"
    qk_l2norm: bool = True
    state: str = "fp32-in-out"
    seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("T", "B", "H", "HV", "K", "V", "C"):
            value = getattr(self, name)
            if not (name == "HV" and value is None):
                _whole(name, value, 1)
        for length in self.seqlens or ():
            _whole("seqlens", length, 0)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("gate", self.gate, GATES)
        if not isinstance(self.qk_l2norm, bool):
            raise InvalidType("qk_l2norm", "true or false", type(self.qk_l2norm).__name__)
        if self.C not in CHUNKS:
            raise InvalidValue("C", f"a power of two, one of {', '.join(map(str, CHUNKS))}", repr(self.C))
        if self.K > MAX_K or self.V > MAX_V:
            raise InvalidValue("K and V", f"at most {MAX_K} and {MAX_V}", f"{self.K} and {self.V}")
        if self.B > MOST_SEQUENCES or len(self.seqlens or ()) > MOST_SEQUENCES:
            raise InvalidValue(
                "B and seqlens", f"at most {MOST_SEQUENCES} sequences", f"{self.B} and {len(self.seqlens or ())}"
            )
        if self.value_heads % self.H:
            raise InvalidValue("HV", f"a multiple of H = {self.H}", repr(self.HV))
        if self.seqlens is not None and (not self.seqlens or self.B != 1):
            raise InvalidValue(
                "seqlens", "lengths of packed sequences, which have B = 1", f"{self.seqlens}, B={self.B}"
            )
        if _STATE.fullmatch(self.state) is None or self.state in DTYPES:
            raise InvalidValue("state", "fp32-in-out, fp32-in, fp32-out (or bf16, fp16), or none", repr(self.state))

    @property
    def value_heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return (self.T,) * self.B if self.seqlens is None else self.seqlens

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of each sequence."""
        return tuple(-(-length // self.C) for length in self.lengths)

    @property
    def state_dtype(self) -> str | None:
        """The states' dtype; None without any."""
        return None if self.state == "none" else self.state.partition("-")[0]

    @property
    def sizes(self) -> dict[str, int]:
        """The axes' extents. `tokens` counts all sequences', `NT` the chunks', `N` the sequences."""
        return {
            "B": self.B, "T": self.tokens if self.seqlens is not None else self.T, "tokens": self.tokens, "H": self.H,
            "HV": self.value_heads, "K": self.K, "V": self.V, "C": self.C, "N": len(self.lengths),
            "NT": sum(self.chunks),
        }  # fmt: skip

    def case(self) -> dict[str, Any]:
        """The case as the op's contract takes it."""
        return {
            "seqlens": list(self.lengths), "heads": self.value_heads, "qk_heads": self.H, "k": self.K, "v": self.V,
            "dtype": self.dtype, "state": self.state,
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """The problem as plain data, from which `Problem.of` makes it again."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["HV"] = self.value_heads
        if self.seqlens is None:
            del plain["seqlens"]
            return plain
        del plain["T"], plain["B"]
        return {**plain, "seqlens": "+".join(map(str, self.seqlens))}

    @classmethod
    def parse(cls, text: str) -> Problem:
        """From "T=8192,H=64,gate=log"; what is not named keeps its default."""
        return cls.of(assignments(text))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Problem:
        """From a mapping of names to values or their text."""
        known = [f.name for f in fields(cls)]
        for key in given:
            if key not in known:
                raise InvalidValue("problem", f"of the keys {', '.join(known)}", repr(key))
        if "seqlens" in given and ("T" in given or "B" in given):
            raise InvalidValue(
                "seqlens", "without T and B", "both", "packed sequences have their own lengths, and B = 1"
            )
        return cls(**{key: _typed(key, value) for key, value in given.items()})


def assignments(text: str) -> dict[str, str]:
    """{"T": "8192", "H": "64"} of "T=8192,H=64". Raises `InvalidValue`."""
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals or not value:
            raise InvalidValue("problem", "key=value, separated by commas", repr(part), "e.g. T=8192,H=64")
        if key in given:
            raise InvalidValue("problem", f"one value for {key}", f"{given[key]} and {value}")
        given[key] = value
    return given


def _typed(key: str, value: Any) -> Any:
    """A value of the key's type from its text; anything but text as it is."""
    if not isinstance(value, str):
        return tuple(value) if key == "seqlens" and isinstance(value, list) else value
    if key in ("dtype", "gate", "state"):
        return value
    if key == "qk_l2norm":
        if value.lower() not in _FLAGS:
            raise InvalidValue(key, "true or false", repr(value))
        return _FLAGS[value.lower()]
    if key == "seqlens":
        return tuple(_number(key, part) for part in value.split("+"))
    return _number(key, value)


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip(), re.ASCII):
        wanted = "whole numbers joined by +" if key == "seqlens" else "a whole number"
        raise InvalidValue(key, wanted, repr(text))
    return int(text)


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(name, "an int", type(value).__name__)
    if value < least:
        raise InvalidValue(name, f"at least {least}", repr(value))


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidValue(name, f"one of {', '.join(known)}", repr(value))
