"""What a judge writes arrives as it was; what comes back is numbers or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kda2.workbench.verifier.wire import Unreadable, Wire

CPU = torch.device("cpu")
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
Ends = tuple[Wire, Wire]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The judge's end and the other one."""
    judge = Wire.made()
    other = Wire.handed(",".join(str(os.dup(descriptor)) for descriptor in judge.descriptors))
    yield judge, other
    other.close()
    judge.close()


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal elements, NaN with their payloads."""
    bits = BITS.get(x.dtype, x.dtype)
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.view(bits), y.view(bits))


@pytest.mark.parametrize("dtype", [*BITS, torch.int32, torch.int64, torch.bool])
def test_every_dtype_arrives_with_its_bits(ends: Ends, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, 1.5], [-3.0, 0.0, 2.25]]).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[1, 0] = torch.nan, torch.inf
    ends[0].put({"x": x})
    assert same_bits(ends[1].get(CPU)["x"], x)


def test_a_nan_keeps_its_payload(ends: Ends) -> None:
    x = torch.tensor([0x7FC1, -0x0045], dtype=torch.int16).view(torch.bfloat16)
    ends[0].put({"x": x})
    assert x.isnan().tolist() == [True, True]
    assert ends[1].get(CPU)["x"].view(torch.int16).tolist() == [0x7FC1, -0x0045]


def test_a_view_arrives_with_its_strides_and_what_lies_between(ends: Ends) -> None:
    buffer = torch.full((2, 5, 8), torch.nan)
    x = buffer[:, :, 2:6]
    x.copy_(torch.arange(40.0).view(2, 5, 4))
    ends[0].put({"x": x, "turned": x.mT})
    got = ends[1].get(CPU)
    assert same_bits(got["x"], x) and got["x"].stride() == (40, 8, 1) and got["x"].storage_offset() == 2
    assert got["turned"].stride() == (40, 1, 8)
    storage = torch.empty(0).set_(got["x"].untyped_storage())
    assert storage.numel() == 80 and int(storage.isnan().sum()) == 40


def test_views_of_one_buffer_stay_so(ends: Ends) -> None:
    packed = torch.arange(24.0).view(2, 12)
    ends[0].put({"q": packed[:, :4], "k": packed[:, 4:8]})
    got = ends[1].get(CPU)
    assert got["k"].data_ptr() - got["q"].data_ptr() == 16 and got["k"].tolist() == packed[:, 4:8].tolist()


def test_plain_values_and_absent_ones_arrive(ends: Ends) -> None:
    plain = {"scale": 0.0883883476483184, "n": -1, "gate": "softplus", "flag": True, "cu_seqlens": None}
    ends[0].put(plain)
    got = ends[1].get(CPU)
    assert got == plain and [type(x) for x in got.values()] == [type(x) for x in plain.values()]


def test_a_shorter_call_leaves_nothing_of_a_longer_one(ends: Ends) -> None:
    ends[0].put({"x": torch.zeros(4096)})
    ends[0].put({"y": torch.ones(1)})
    assert list(ends[1].get(CPU)) == ["y"]


@pytest.mark.parametrize("size", [1, 100, 1000, 3000, 100_000])
def test_every_call_is_read_anew(ends: Ends, size: int) -> None:
    for i, count in enumerate((size, size, 2 * size, size)):
        x = torch.full((count,), float(i))
        ends[0].put({"x": x})
        assert same_bits(ends[1].get(CPU)["x"], x)


@pytest.mark.parametrize("size", [1, 100, 1000, 3000, 100_000])
def test_every_answer_is_read_anew(ends: Ends, size: int) -> None:
    for i, count in enumerate((size, size, 2 * size, size)):
        x = torch.full((count,), float(i))
        ends[1].give({"x": x})
        assert same_bits(ends[0].take()["x"], x)


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_an_answer_arrives_with_its_bits(ends: Ends, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    answer = torch.full(shape, torch.nan if dtype.is_floating_point else 1).to(dtype)
    ends[1].give({"o": answer})
    assert same_bits(ends[0].take()["o"], answer)


def test_answers_may_be_strided_and_share_memory(ends: Ends) -> None:
    x = torch.arange(12.0).view(3, 4)
    ends[1].give({"o": x.mT, "state": x[:, 1:3]})
    got = ends[0].take()
    assert got["o"].tolist() == x.mT.tolist() and got["state"].tolist() == [[1, 2], [5, 6], [9, 10]]


def test_an_answer_is_read_once(ends: Ends) -> None:
    ends[1].give({"o": torch.ones(2)})
    assert ends[0].take()["o"].tolist() == [1, 1]
    with pytest.raises(Unreadable):
        ends[0].take()


def safetensors(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + body


GARBAGE: dict[str, Any] = {
    "nothing": b"",
    "text": b"no tensors at all",
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01o\x94K\x01s.",
    "a length beyond the file": (2**40).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": safetensors(b"{'o': 1}"),
    "a header that is a list": safetensors(b"[1, 2]"),
    "a dtype that is none": safetensors(b'{"o":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}', b"1"),
    "offsets beyond the end": safetensors(b'{"o":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', b"1234"),
    "a shape of another size": safetensors(b'{"o":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', b"1234"),
    "a shape below zero": safetensors(b'{"o":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_safetensors_file_is_unreadable(ends: Ends, name: str) -> None:
    judge, other = ends
    os.pwrite(other.descriptors[1], GARBAGE[name], 0)
    with pytest.raises(Unreadable, match="its answer is no safetensors file: "):
        judge.take()
    other.give({"o": torch.ones(1)})  # what was read is gone
    assert judge.take()["o"].tolist() == [1]
