"""FlashInfer-Trace as its own models define it (flashinfer-bench's `Definition`, and `Trace` lines without a solution).

Fields that are not known here are let through: the format grows.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator, model_validator

from kda2.errors import InvalidValue

Words = Annotated[str, Field(min_length=1)]
# kda2's names of dtypes to the format's.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DType = Literal[
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1", "int64", "int32", "int16", "int8",
    "bool",
]  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class Const(_Model):
    type: Literal["const"]
    value: NonNegativeInt


class Var(_Model):
    type: Literal["var"]


class Tensor(_Model):
    """`shape` names axes; None stands for a Python scalar."""

    shape: list[Words] | None
    dtype: DType
    description: str | None = None


class Definition(_Model):
    """definition.json: an operator at fixed heads and channels, with its reference as source."""

    name: Words
    op_type: Words
    axes: dict[Words, Annotated[Const | Var, Field(discriminator="type")]]
    inputs: dict[Words, Tensor]
    outputs: dict[Words, Tensor]
    reference: Words
    tags: list[Words] = []
    description: str | None = None
    constraints: list[Words] = []

    @field_validator("reference")
    @classmethod
    def _has_run(cls, reference: str) -> str:
        try:
            body = ast.parse(reference).body
        except SyntaxError as e:
            raise ValueError(f"not Python: {e}") from e
        if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body):
            raise ValueError("no function named run")
        return reference

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        both = self.inputs.keys() & self.outputs.keys()
        if both:
            raise ValueError(f"{', '.join(sorted(both))} is an input and an output")
        for name, tensor in {**self.inputs, **self.outputs}.items():
            unknown = [axis for axis in tensor.shape or [] if axis not in self.axes]
            if unknown:
                raise ValueError(f"{name} has an axis {unknown[0]} that axes lacks")
        return self


class Random(_Model):
    type: Literal["random"]


class Scalar(_Model):
    type: Literal["scalar"]
    value: bool | int | float


class Safetensors(_Model):
    type: Literal["safetensors"]
    path: Words
    tensor_key: Words


class Case(_Model):
    """One workload: the values of the variable axes, and where each input comes from."""

    uuid: Words
    axes: dict[str, NonNegativeInt]
    inputs: dict[str, Annotated[Random | Scalar | Safetensors, Field(discriminator="type")]]


class Line(_Model):
    """A line of workloads.jsonl."""

    definition: Words
    workload: Case


M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], text: str, where: str) -> M:
    """`text` as `model`. Raises `InvalidValue` that names the first field that is wrong."""
    try:
        return model.model_validate_json(text)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        at = f"{where}: {field}" if field else where
        raise InvalidValue(at, f"a FlashInfer-Trace {model.__name__.lower()}", first["msg"]) from e


def read(path: Path, argument: str) -> str:
    """The text of a file. Raises `InvalidValue` if there is none."""
    try:
        return path.read_text()
    except FileNotFoundError as e:
        raise InvalidValue(argument, "a file", f"{path}, which does not exist") from e
    except UnicodeDecodeError as e:
        raise InvalidValue(argument, "text", f"{path}, which is not UTF-8") from e
