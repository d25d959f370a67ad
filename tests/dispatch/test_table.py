"""Tables of configurations: the first row that agrees wins; the shipped ones answer every key."""

from __future__ import annotations

import itertools
from importlib import resources
from typing import Any

import pytest

from kda2.dispatch import lookup, table

ROWS: tuple[dict[str, Any], ...] = (
    {"stage": "state", "when": {"K": {"max": 64}, "fast": True}, "config": {"BT": 64, "num_warps": 4, "num_stages": 2}},
    {"stage": "state", "when": {"K": {"max": 64}}, "config": {"BT": 32, "num_warps": 2, "num_stages": 1}},
    {"stage": "output", "when": {}, "config": {"BT": 16, "num_warps": 8, "num_stages": 3}},
)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "rows", lambda op, impl: ROWS)


@pytest.mark.usefixtures("rows")
def test_first_row_that_agrees_wins() -> None:
    assert lookup("op", "impl", "state", {"K": 64, "fast": True}).num_warps == 4
    assert lookup("op", "impl", "state", {"K": 16, "fast": False}).num_warps == 2
    assert lookup("op", "impl", "output", {"K": 999, "fast": False}).tiles == {"BT": 16}


@pytest.mark.usefixtures("rows")
def test_no_row_says_what_was_looked_for() -> None:
    with pytest.raises(LookupError, match=r"table op/impl.json has no row of stage 'state' for \{'K': 65"):
        lookup("op", "impl", "state", {"K": 65, "fast": True})


def test_shipped_table_answers_every_key() -> None:
    sizes, precisions, anchored = (16, 32, 64, 128, 256), ("bf16", "fp32"), (False, True)
    for K, V, precision, is_anchored in itertools.product(sizes, (*sizes, 512), precisions, anchored):
        key = {"K": K, "V": V, "precision": precision, "anchored": is_anchored}
        for stage in ("prepare", "state", "output"):
            assert lookup("kda", "triton", stage, key).num_warps in (1, 2, 4, 8, 16)
        for layout in ("kv", "vk"):
            assert lookup("kda", "triton", "step", {"K": K, "V": V, "state_layout": layout}).num_warps in (1, 2, 4, 8)


TABLES = resources.files("kda2.tables") / "kda"
SHIPPED = sorted(x.name.removesuffix(".json") for x in TABLES.iterdir() if x.name.endswith(".json"))


@pytest.mark.parametrize("impl", SHIPPED)
def test_every_shipped_row_has_its_provenance(impl: str) -> None:
    for row in table.rows("kda", impl):
        assert row["provenance"], row


@pytest.mark.parametrize("impl", SHIPPED)
def test_keys_never_hold_the_length(impl: str) -> None:
    for row in table.rows("kda", impl):
        assert not {"T", "N", "B", "seqlens"} & row["when"].keys()
