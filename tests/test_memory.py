"""Poison, fingerprints and guard bands notice what they are for."""

from __future__ import annotations

import pytest
import torch

import kda2
from kda2.testing import Problem, fenced_memory, fingerprint, guarded, make, poisoned_memory


def test_fresh_memory_is_poisoned_and_only_inside() -> None:
    x = torch.zeros(3)
    plain = torch.empty
    with poisoned_memory():
        for fresh in (
            torch.empty(4),
            torch.empty_like(x),
            torch.empty_strided((2, 2), (2, 1)),
            x.new_empty(3),
            x.new_empty_strided((2,), (1,)),
            torch.empty(2, dtype=torch.bfloat16),
        ):
            assert fresh.isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all() and torch.empty(2, dtype=torch.bool).all()
        assert torch.empty(3, device="meta").is_meta
        assert torch.zeros(3).eq(0).all()
    assert torch.empty is plain


def test_poison_ends_with_an_exception() -> None:
    plain = torch.empty
    with pytest.raises(RuntimeError), poisoned_memory():
        raise RuntimeError
    assert torch.empty is plain


def test_fingerprint_sees_every_byte_of_the_storage() -> None:
    kwargs = make(Problem(strides="last_axis"))
    before = fingerprint(kwargs)
    assert {"q", "beta", "A_log", "dt_bias", "initial_state"} <= before.keys()
    assert fingerprint(kwargs) == before
    storage = torch.as_strided(kwargs["q"], (2,), (1,))
    storage[1] = 7.0  # a gap between two elements
    changed = {name for name, hash in fingerprint(kwargs).items() if hash != before[name]}
    assert changed == {"q"}


def test_fingerprint_sees_gate_parameters() -> None:
    A_log = torch.zeros(2)
    kwargs = {"gate": kda2.Gate.softplus(A_log)}
    before = fingerprint(kwargs)
    A_log += 1
    assert fingerprint(kwargs) != before


@pytest.mark.parametrize("at", [-1, 6])
def test_guard_notices_one_element_outside(at: int) -> None:
    guard = guarded(torch.arange(6.0).view(2, 3), band=4)
    assert guard.intact() and guard.inside.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    guard.inside[:] = 9.0
    assert guard.intact()
    guard.buffer[4 + at] = 0.0
    assert not guard.intact()


def test_fences_stand_around_fresh_memory() -> None:
    with fenced_memory(band=8) as fenced:
        x = torch.empty(2, 3)
        y = torch.empty_like(x)
        assert x.isnan().all() and y.shape == (2, 3) and len(fenced) == 2
        x.fill_(1.0)
        assert all(f.intact() for f in fenced)
        torch.as_strided(y, (1,), (1,), y.storage_offset() + 6)[0] = 1.0  # one past its end
        assert [f.intact() for f in fenced] == [True, False]
