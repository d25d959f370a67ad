"""OpSpec: what an operator computes, on which tensors, how exactly, at what cost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kda2.errors import InvalidValue

SCHEMA = 1
T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor. `shape` is algebra over the op's axes, `dtypes` what is accepted."""

    name: str
    shape: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Workload:
    """One weighted shape of the op: axes by name, options by name."""

    name: str
    axes: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True)
class Tolerance:
    """Limits for inputs of one dtype: relative L2 of an output, and for one element as a multiple of the tensor's RMS.

    `family` and `output`: the probe family and the output that they are for; "" is any that has no limits of its own.
    """

    dtype: str
    relative_l2: float
    element_rms: float
    provenance: str = ""
    family: str = ""
    output: str = ""


@dataclass(frozen=True)
class OpSpec:
    """The contract of one operator. `oracle` and `flops`/`bytes` are dotted names of functions, so that the whole
    spec is data: it goes to JSON and is identified by `content_hash`.

    `reference_source` is for operators of other projects: Python source whose `run` is the oracle.
    """

    name: str
    version: int
    source: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    options: Mapping[str, tuple[Any, ...]]
    oracle: str
    flops: str
    bytes: str
    families: tuple[str, ...]
    tolerances: tuple[Tolerance, ...]
    workloads: tuple[Workload, ...] = ()
    reference_source: str = ""

    def to_json(self) -> str:
        """One line. `reference_source`, and `family` and `output` of a tolerance, are left out if empty: specs without
        them keep the hash they had before there were such fields."""
        plain = {"schema": SCHEMA, **asdict(self)}
        if not self.reference_source:
            del plain["reference_source"]
        optional = ("family", "output")
        plain["tolerances"] = [
            {name: x for name, x in t.items() if x or name not in optional} for t in plain["tolerances"]
        ]
        return json.dumps(plain, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> OpSpec:
        """What `to_json` wrote; arrays become tuples. Raises `InvalidValue` with the path of what is wrong."""
        try:
            plain = json.loads(text)
        except ValueError as e:
            raise InvalidValue("spec", "JSON", f"text that is not: {e}") from e
        if not isinstance(plain, dict):
            raise InvalidValue("spec", "a JSON object", _kind(plain))
        schema = plain.pop("schema", None)
        if schema != SCHEMA or isinstance(schema, bool):
            raise InvalidValue("schema", str(SCHEMA), repr(schema), "it comes from another version of kda2")
        return built(cls, plain, "")

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def tolerance(self, dtype: str, family: str = "", output: str = "") -> Tolerance:
        """The limits for `dtype` ("bf16", "fp16", "fp32"): those of the family and its output, else the dtype's general
        ones. Raises `KeyError` for a dtype that has none."""
        found = {(t.family, t.output): t for t in self.tolerances if t.dtype == dtype}
        for row in ((family, output), (family, ""), ("", output), ("", "")):
            if row in found:
                return found[row]
        raise KeyError(f"{self.name} has no tolerance for {dtype}; it has {list(self.judged_dtypes)}")

    @property
    def judged_dtypes(self) -> tuple[str, ...]:
        """The dtypes that have tolerances."""
        return tuple(dict.fromkeys(t.dtype for t in self.tolerances))


def built(cls: type[T], plain: object, path: str) -> T:
    """The dataclass `cls` from a JSON object; `path` is where that stands. Raises `InvalidValue` with the path of what
    is wrong."""
    if not isinstance(plain, dict):
        raise InvalidValue(path, "an object", _kind(plain))
    at = f"{path}." if path else ""
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name in plain:
        if name not in known:
            raise InvalidValue(f"{at}{name}", f"absent: {cls.__name__} has {', '.join(known)}", "a value")
    for name, f in known.items():
        if name not in plain and f.default is MISSING and f.default_factory is MISSING:
            raise InvalidValue(f"{at}{name}", "given", "nothing")
    return cls(**{name: _read(hints[name], value, f"{at}{name}") for name, value in plain.items()})


def _read(hint: Any, value: object, path: str) -> Any:
    """`value` as `hint` has it: a dataclass, a scalar, a tuple of one type, or a mapping from strings."""
    if hint is Any:
        return _frozen(value, path)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise InvalidValue(path, "an array", _kind(value))
        return tuple(_read(get_args(hint)[0], x, f"{path}[{i}]") for i, x in enumerate(value))
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise InvalidValue(path, "an object", _kind(value))
        return {name: _read(get_args(hint)[1], x, f"{path}.{name}") for name, x in value.items()}
    if hint in (str, int, float, bool):
        return _scalar(hint, value, path)
    return built(hint, value, path)


def _scalar(hint: type, value: object, path: str) -> object:
    if hint is float and type(value) in (int, float) and math.isfinite(value):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    if hint is float or type(value) is not hint:
        raise InvalidValue(path, _KINDS[hint], _kind(value))
    return value


def _frozen(value: object, path: str) -> object:
    """Plain data with tuples for arrays."""
    if isinstance(value, list):
        return tuple(_frozen(x, f"{path}[{i}]") for i, x in enumerate(value))
    if isinstance(value, dict):
        return {name: _frozen(x, f"{path}.{name}") for name, x in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidValue(path, "finite", repr(value))
    return value


_KINDS: dict[type, str] = {
    str: "a string", int: "an integer", float: "a finite number", bool: "true or false", list: "an array",
    dict: "an object", type(None): "null",
}  # fmt: skip


def _kind(value: object) -> str:
    """What a JSON value is, with its text where that is short."""
    if value is None or isinstance(value, list | dict):
        return _KINDS[type(value)]
    return f"{json.dumps(value):.40}"
