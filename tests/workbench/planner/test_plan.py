"""The Planner's figures, held to ones worked out by hand."""

from __future__ import annotations

import pytest
import torch

import kda2
from kda2 import device
from kda2.ops.kda.spec import KDA, bytes_moved, flops
from kda2.workbench.blockplan import BlockPlan, PlannedBlock
from kda2.workbench.planner import Problem, plan
from kda2.workbench.planner.amounts import human
from kda2.workbench.profiler import bench, problems
from kda2.workbench.records import BadRecord


def made(text: str = "", target: str = "sm_90", sms: int | None = None, gpu: str | None = None) -> BlockPlan:
    return plan("kda", target, Problem.parse(text), sms, gpu)


def block(p: BlockPlan, stage: str) -> PlannedBlock:
    return next(b for b in p.blocks if b.stage == stage)


def counts(p: BlockPlan, stage: str) -> dict[str, int]:
    return {name: count.amount for name, count in block(p, stage).counts.items()}


def us(p: BlockPlan, stage: str, resource: str) -> float:
    return next(f.us for f in block(p, stage).floors if f.resource == resource)


# --- the usual problem: T = 8192, H = 64, K = V = 128, bf16, C = 64, so NT = 128 ---


def test_the_whole_call() -> None:
    p = made()
    t = p.totals
    assert t.tokens.amount == 5 * 8192 * 64 * 128 * 2 == 671_088_640
    assert t.token_floor.us == pytest.approx(158.28, abs=0.01)
    # beta 1 MiB, A_log and dt_bias 33 024 B, two states of 4 MiB
    assert t.moved.amount == 671_088_640 + 2**20 + 33_024 + 2 * 2**22
    assert t.flops.amount == 7 * 8192 * 64 * 128 * 128
    assert t.floor.resource == "memory" and t.floor.us == pytest.approx(160.51, abs=0.01)
    assert t.serial_steps.amount == 128
    assert [b.letter + b.stage for b in p.blocks] == ["Afactors", "Dsolve", "Bstate", "Coutput"]


def test_the_workspace_by_hand() -> None:
    big = 128 * 64 * 64 * 128 * 2  # W, U, Qd, Kd, Kr, Vn; and A, half as wide in fp32
    assert made().totals.workspace.amount == 7 * big + 128 * 64 * 128 * 4 + 128 * 64 * 128 * 128 * 2 == 1_212_153_856


def test_the_input_pipeline_by_hand() -> None:
    p = made()
    elements = 128 * 64 * 64 * 128
    assert counts(p, "factors") == {
        "call bytes": 3 * 2 * elements + 2**20 + 33_024,
        "workspace bytes": 4 * 2 * elements + 2**22,
        "tensor": 128 * 64 * 2 * 64 * 64 * 128,
        "fp32": (4 + 6 + 2 + 7) * elements + 128 * 64 * 64 * 64,
        "special": (2 + 2) * elements + 128 * 64 * 64 * (2 + 2),
        "lanes": 28 * elements + 128 * 64 * 64 * 64 + 128 * 64 * 64 * 4,
        "issue": 63_776_833,  # 1_914_699_776 / 32 + 944_800_000 / 512 + 8_589_934_592 / 4096
    }
    assert us(p, "factors", "memory") == pytest.approx(222.83, abs=0.01)
    assert us(p, "factors", "memory on chip") == pytest.approx(95.22, abs=0.01)
    assert us(p, "factors", "special") == pytest.approx(64.69, abs=0.01)
    assert block(p, "factors").binds == "memory" and block(p, "factors").floor_us == us(p, "factors", "memory")


def test_the_recurrence_by_hand() -> None:
    p, state = made(), block(made(), "state")
    assert counts(p, "state")["tensor"] == 128 * 64 * 2 * (2 * 64 * 128 * 128)
    assert counts(p, "state")["special"] == 0 and state.counts["special"].counted == "none"
    # one CTA, 128 chunks, two products of 2 x 64 x 64 x 128, at 708/132 Tflop/s
    assert us(p, "state", "chain") == pytest.approx(128 * 2 * 2 * 64 * 64 * 128 / (708e12 / 132) * 1e6)
    assert state.binds_on_chip == "chain"
    # S^T 64, its copy 32, Vn^T 32, 40 for addresses; two stages of W, Kr, U and decay
    assert state.tile.registers.amount == 64 + 32 + 32 + 40 and state.tile.warps == 4
    assert state.tile.shared.amount == 2 * (2 * 64 * 128 * 2 + 64 * 64 * 2 + 128 * 4) == 82_944
    assert state.grid.resident == 2 and state.grid.limit == "shared"


def test_the_inverse_and_the_scores_by_hand() -> None:
    p = made()
    assert counts(p, "solve")["fp32"] == 128 * 64 * (64**3 - 64) // 3 + 128 * 64 * 64 * 64
    assert counts(p, "solve")["tensor"] == 128 * 64 * 2 * 64 * 64 * (128 + 128)
    assert counts(p, "output")["tensor"] == 128 * 64 * 2 * (64 * 128 * 128 + 64 * 64 * 128 + 64 * 64 * 128)
    assert us(p, "output", "tensor") == pytest.approx(34_359_738_368 / 708e6)


@pytest.mark.parametrize(
    ("sms", "gpu", "waves", "fill"),
    [(132, None, 2, 192 / 264), (78, None, 3, 192 / 234), (None, "H20", 3, 192 / 234), (50, None, 4, 192 / 200)],
)
def test_waves_of_the_recurrence(sms: int | None, gpu: str | None, waves: int, fill: float) -> None:
    grid = block(made("H=96", sms=sms, gpu=gpu), "state").grid
    assert (grid.ctas.amount, grid.waves, grid.fill) == (192, waves, fill)


def test_waves_at_residency() -> None:
    grid = block(made("H=96"), "state").grid
    assert (grid.resident, grid.resident_waves, grid.resident_fill) == (2, 1, 192 / 264)


def test_two_waves_make_the_chain_twice_as_long() -> None:
    assert us(made("H=96"), "state", "chain") == pytest.approx(2 * us(made("H=64"), "state", "chain"))
    # of unequal sequences only the longest is sure to be on one SM
    assert us(made("seqlens=8192+64,H=96"), "state", "chain") == pytest.approx(us(made("H=64"), "state", "chain"))


# --- parts ---


def test_a_part_nobody_has_measured() -> None:
    p = made(target="sm_80", sms=108)
    assert p.part["name"] == "A100 80GB SXM" and "datasheet" in p.totals.floor.counted
    assert p.totals.floor.us == pytest.approx(680_558_848 / 2.04e6)
    assert block(p, "state").grid.waves == 2  # 128 CTAs on 108 SMs


def test_a_scaled_part_can_be_bound_by_its_products() -> None:
    p = made(sms=50)
    assert p.totals.floor.resource == "tensor"
    assert p.totals.floor.us == pytest.approx(60_129_542_144 / (708e6 * 50 / 132))
    assert "50/132" in p.part["note"] and us(p, "factors", "memory") == pytest.approx(222.83, abs=0.01)


def test_a_tile_that_does_not_fit_says_so() -> None:
    grid = block(made("K=256,V=128,C=128", target="sm_86"), "state").grid
    assert grid.resident == 0 and grid.limit == "shared" and grid.resident_waves is None


# --- problems ---


@pytest.mark.parametrize(
    "text",
    ["", "T=1", "seqlens=1300+0+547", "T=300,B=2,H=2,HV=6,K=60,V=100", "dtype=fp32,T=512", "state=none,gate=softplus",
     "gate=log,T=100", "state=fp32-out,T=64,dtype=fp16", "state=bf16-in-out,T=65"],
)  # fmt: skip
def test_the_call_costs_what_the_contract_says(text: str) -> None:
    problem = Problem.parse(text)
    t = plan("kda", "sm_90", problem).totals
    assert t.moved.amount == bytes_moved(problem.case()) and t.flops.amount == flops(problem.case())
    assert t.floor.us == pytest.approx(max(t.moved.amount / 4.24e12, t.flops.amount / 708e12) * 1e6)


@pytest.mark.parametrize(("heads", "seqlens"), [(64, (8192,)), (96, (1300, 547, 2048)), (16, (1,))])
def test_the_floor_is_that_of_the_benchmarks(
    heads: int, seqlens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gpu", lambda _: device.Gpu("NVIDIA H200", 90, 132, 0, 0))
    case = problems.PrefillCase(heads=heads, k=128, v=128, dtype="bf16", gate="strong", seqlens=seqlens)
    measured = bench.floor_us(problems.Problem(case, {}, problems.Options(1.0, True)), torch.device("cuda"))
    assert plan("kda", "sm_90", Problem(H=heads, seqlens=seqlens)).totals.floor.us == pytest.approx(measured)


def test_fp32_needs_six_times_the_products() -> None:
    p = made("T=512,H=2,dtype=fp32,gate=log,state=none,qk_l2norm=false")
    NT, elements = 8, 8 * 2 * 64 * 128
    assert counts(p, "factors")["fp32"] == (1 + 8 + 9) * elements + NT * 2 * 64 * 64
    assert counts(p, "factors")["special"] == 8 * elements + NT * 2 * 64 * 2
    assert us(p, "state", "tensor") == pytest.approx(6 * counts(p, "state")["tensor"] / 708e6)
    names = {t.name: t for b in p.blocks for t in (*b.inputs, *b.outputs)}
    assert names["W"].dtype == "fp32" and names["q"].size.amount == 512 * 2 * 128 * 4
    assert not {"initial_state", "final_state", "A_log", "dt_bias"} & set(names)


def test_one_token_is_one_chunk() -> None:
    p = made("T=1,H=1")
    assert p.sizes["NT"] == 1 and p.totals.serial_steps.amount == 1
    assert block(p, "factors").grid.ctas.amount == 1 and block(p, "state").grid.ctas.amount == 2
    assert block(p, "factors").grid.fill == 1 / 132


def test_packed_sequences_with_an_empty_one() -> None:
    p = made("seqlens=1300+0+547,H=2")
    assert p.sizes["NT"] == 30 and p.totals.serial_steps.amount == 21
    assert block(p, "state").grid.ctas.amount == 3 * 2 * 2
    q = block(p, "factors").inputs[0]
    assert q.axes == ("1", "T", "H", "K") and q.shape == (1, 1847, 2, 128)


def test_nothing_but_empty_sequences() -> None:
    p = made("seqlens=0+0,H=2")
    assert p.totals.staged_us > 0 and p.totals.serial_steps.amount == 0  # states still move
    assert block(p, "factors").grid.waves == 0 and block(p, "factors").grid.fill == 0.0
    assert made("seqlens=0,state=none,gate=log").totals.gap.startswith("none")


def test_queries_and_keys_are_shared_by_value_heads() -> None:
    shapes = {t.name: t.shape for t in block(made("T=64,H=2,HV=6"), "factors").inputs}
    assert shapes["q"] == (1, 64, 2, 128) and shapes["g"] == (1, 64, 6, 128)


def test_lengths_of_a_chunk() -> None:
    rows = {c.C: c for c in made().chunks}
    assert list(rows) == [16, 32, 64, 128] and [c.serial_steps for c in rows.values()] == [512, 256, 128, 64]
    # per token and head: three products with the state, and C x (3 K + 2 V) of those inside the chunk
    for C, row in rows.items():
        assert row.tensor_flops == 8192 * 64 * (6 * 128 * 128 + 2 * C * 5 * 128)
        assert row.workspace_bytes == 8192 * 64 * (6 * 128 * 2 + C * 4) + 8192 // C * 64 * (128 * 4 + 128 * 128 * 2)
    assert rows[64].staged_us == pytest.approx(made().totals.staged_us)
    assert [made(f"C={C}").totals.on_chip_us for C in rows] == pytest.approx([c.on_chip_us for c in rows.values()])


def test_the_gap_is_named() -> None:
    t = made().totals
    assert t.saved_us == pytest.approx(t.staged_us - t.on_chip_us) and t.saved_us > t.on_chip_us - t.floor.us
    # what the stages hand on, once out and once in: A, Kd, W, U, Qd, Kr, Vn, S and decay, at 4.24 TB/s
    assert t.gap.startswith("the workspace through memory: 523.7 of the 827.5 us")
    assert "S alone moves 536.9 MB" in t.gap  # written and read, 268.4 MB each


# --- the plan as a record ---


@pytest.mark.parametrize("text", ["", "seqlens=5+0+70,H=2,HV=4", "T=1,dtype=fp32,C=128", "state=none,gate=log"])
def test_there_and_back_through_json(text: str) -> None:
    p = made(text)
    again = BlockPlan.from_line(p.line())
    assert again == p and again.content_hash == p.content_hash and p.op_hash == KDA.content_hash


def test_the_same_problem_gives_the_same_plan_and_another_does_not() -> None:
    assert made().content_hash == made().content_hash != made("C=32").content_hash
    with pytest.raises(BadRecord, match="not a BlockPlan"):
        BlockPlan.from_line(made().line().replace('"gap"', '"gaps"'))


def test_only_kda_is_planned() -> None:
    with pytest.raises(kda2.InvalidValue, match="op must be 'kda', got 'gla'"):
        plan("gla")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(134_217_728, "B", "134.2 MB"), (256, "B", "256 B"), (8192, "", "8,192"), (270_532_608, "", "270.5 M"),
     (4.24e12, "B", "4.24 TB"), (999_950, "B", "1000 kB"), (0, "", "0"), (3e18, "flop", "3,000 Pflop")],
)  # fmt: skip
def test_figures_are_short(value: float, unit: str, text: str) -> None:
    assert human(value, unit) == text
