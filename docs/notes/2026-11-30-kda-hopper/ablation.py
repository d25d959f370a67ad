"""What two choices of the Hopper kernel are worth: where the state lives and how long a chunk is; how deep the ring is.

    python ablation.py --compile-only          # the machine code of part `state`, without a GPU
    python ablation.py --out ablation.jsonl    # both parts, on an H200
    python ablation.py --part ring             # one of them

`state` runs the recurrence over chunks alone: operands lie in shared memory, every chunk takes the same ones, and
nothing goes to memory until the last chunk is done. What a chunk costs is the slope between two numbers of chunks.
`ring` runs the shipped kernel with other numbers of slots and factor roles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kda2.backends.gluon import barrier
from kda2.backends.triton import Launch
from kda2.backends.triton.binary import disassemble
from kda2.backends.triton.build import build
from kda2.contract import KernelConfig
from kda2.ops.kda.check import Call
from kda2.ops.kda.hopper.launches import kda, key_of
from kda2.ops.kda.hopper.tuning import default_configs
from kda2.testing.inputs import Problem, make
from kda2.testing.oracle import checked
from kda2.workbench.inspector.inspection import instructions
from kda2.workbench.profiler.timing import interleave

K = V = 128
CHUNKS = 2048  # any number that takes long enough to time
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def mma(n, V):
    """Accumulators of wgmmas with n columns and V rows, 16 a warp."""
    return gl.NVMMADistributedLayout([3, 0], [V // 16, 1], [16, n, 16])


@gluon.constexpr_function
def rows(width):
    """Rows of a wgmma operand in shared memory."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, 2)


@gluon.jit
def tile(p, N: gl.constexpr, M: gl.constexpr):
    """A tensor [N, M] of global memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_n = gl.arange(0, N, gl.SliceLayout(1, L))
    return gl.load(p + o_n[:, None] * M + gl.arange(0, M, gl.SliceLayout(0, L))[None, :])


@gluon.jit
def operand(b_a, n: gl.constexpr):
    """b_a in bf16, as the register operand of a product with n columns."""
    return gl.convert_layout(b_a.to(gl.bfloat16), gl.DotOperandLayout(0, mma(n, b_a.shape[0]), 2))


@gluon.jit
def product(a, b, n: gl.constexpr, V: gl.constexpr):
    """Start a @ b [V, n]."""
    return warpgroup_mma(a, b, gl.zeros([V, n], gl.float32, mma(n, V)), use_acc=False, is_async=True)


@gluon.jit
def halves(b_x, C: gl.constexpr, V: gl.constexpr):
    """The left and right C columns of b_x [V, 2 C]: no instruction."""
    b_l, b_r = gl.split(b_x.reshape([V, 2, C]).permute((0, 2, 1)))
    return gl.convert_layout(b_l, mma(C, V)), gl.convert_layout(b_r, mma(C, V))


@gluon.jit
def in_registers(b_S, b_O, KQ, KR, v, scores, decay, n, C: gl.constexpr, V: gl.constexpr):
    """The state in fp32 accumulators, as stage `fused` has it."""
    for _ in range(n):
        b_S = b_S * decay.load(gl.SliceLayout(0, mma(64, V)))[None, :]
        b_A = operand(b_S, C)
        b_P = product(b_A, KQ.slice(0, C).permute((1, 0)), C, V)
        b_O = product(b_A, KQ.slice(C, C).permute((1, 0)), C, V)
        b_v = v.permute((1, 0)).load(mma(C, V)).to(gl.float32)
        b_P = warpgroup_mma_wait(1, [b_P])
        b_V = product(operand(b_v - b_P, C), scores.slice(0, C), C, V)
        b_V, b_O = warpgroup_mma_wait(0, [b_V, b_O])
        b_S = warpgroup_mma(operand(b_V, 64), KR, b_S, is_async=True)
        b_O = warpgroup_mma(operand(b_V, C), scores.slice(C, C).permute((1, 0)), b_O, is_async=True)
        b_S = warpgroup_mma_wait(1, [b_S])
        b_O = warpgroup_mma_wait(0, [b_O])
    return b_S, b_O


@gluon.jit
def in_shared(b_S, b_O, KQ, KR, v, scores, decay, n, C: gl.constexpr, V: gl.constexpr):
    """The state in shared memory, rounded to bf16 after every chunk. Keys and queries hold its decay, so that it decays
    while they are multiplied."""
    S = gl.allocate_shared_memory(gl.bfloat16, [V, KR.shape[1]], rows(KR.shape[1]), b_S.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    for _ in range(n):
        # P and S QL^T in one product, which reads the state once
        b_PO = product(S, KQ.permute((1, 0)), 2 * C, V)
        b_S = S.load(mma(64, V)).to(gl.float32) * decay.load(gl.SliceLayout(0, mma(64, V)))[None, :]
        b_v = v.permute((1, 0)).load(mma(C, V)).to(gl.float32)
        b_P, b_QS = halves(warpgroup_mma_wait(0, [b_PO]), C, V)
        b_V = warpgroup_mma_wait(0, [product(operand(b_v - b_P, C), scores.slice(0, C), C, V)])
        b_S = warpgroup_mma(operand(b_V, 64), KR, b_S, is_async=True)
        b_AV = product(operand(b_V, C), scores.slice(C, C).permute((1, 0)), C, V)
        b_S = warpgroup_mma_wait(1, [b_S])
        S.store(b_S.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        # not accumulated: ptxas serialises all wgmmas where one goes on with half of another's registers
        b_O = b_QS + warpgroup_mma_wait(0, [b_AV])
    return S.load(mma(64, V)).to(gl.float32), b_O


@gluon.jit(do_not_specialize=["n"])
def state_stage(p_KQ, p_KR, p_v, p_scores, p_decay, p_first, p_last, p_o, n: gl.int32,
                C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, IN_SHARED: gl.constexpr):  # fmt: skip
    """
    Computes: S <- decay S; e = v - S KL^T; Vn = e Tm; o = S QL^T + Vn Aqk^T; S <- S + Vn KR, n times, all transposed.
    Reads:    [KL; QL] [2 C, K], KR [C, K], v [C, V], [Tm; Aqk] [2 C, C], decay [K], the first S [V, K].
    Writes:   of every CTA, the last S [V, K] and the last o [V, C].
    Grid:     any: all CTAs do the same.
    Assumes:  num_warps = V / 16; where the state is in shared memory, KL and QL times decay.
    """
    KQ = gl.allocate_shared_memory(gl.bfloat16, [2 * C, K], rows(K), tile(p_KQ, 2 * C, K))
    KR = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows(K), tile(p_KR, C, K))
    v = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows(V), tile(p_v, C, V))
    scores = gl.allocate_shared_memory(gl.bfloat16, [2 * C, C], rows(C), tile(p_scores, 2 * C, C))
    o_k = gl.arange(0, K, gl.SliceLayout(0, mma(64, V)))
    decay = gl.allocate_shared_memory(gl.float32, [K], VECTOR, gl.load(p_decay + o_k))
    fence_async_shared()
    barrier()
    o_v = gl.arange(0, V, gl.SliceLayout(1, mma(64, V)))
    b_S = gl.load(p_first + o_v[:, None] * K + o_k[None, :])
    b_O = gl.zeros([V, C], gl.float32, mma(C, V))
    if IN_SHARED:
        b_S, b_O = in_shared(b_S, b_O, KQ, KR, v, scores, decay, n, C, V)
    else:
        b_S, b_O = in_registers(b_S, b_O, KQ, KR, v, scores, decay, n, C, V)
    i_cta = gl.program_id(0)
    gl.store(p_last + i_cta * V * K + o_v[:, None] * K + o_k[None, :], b_S)
    o_v = gl.arange(0, V, gl.SliceLayout(1, mma(C, V)))
    gl.store(p_o + i_cta * V * C + o_v[:, None] * C + gl.arange(0, C, gl.SliceLayout(0, mma(C, V)))[None, :], b_O)


@dataclass(frozen=True)
class Stage:
    """A variant of the recurrence: where the state is, tokens of a chunk, V channels of a CTA."""

    place: str
    C: int
    BV: int

    def __str__(self) -> str:
        return f"{self.place}, C={self.C}, BV={self.BV}"


STAGES = [Stage(place, C, BV) for BV in (128, 64) for place in ("registers", "shared") for C in (16, 32, 64)]


def operands(stage: Stage) -> dict[str, Tensor]:
    """Random, the same for every place of the state; small enough that the state stays bounded."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    C = stage.C
    Tm = (0.5 * torch.eye(C) + normal(C, C) / C**0.5).triu()  # of the transposed product
    x = {
        "KQ": normal(2 * C, K) / K**0.5,
        "KR": 0.5 * normal(C, K) / K**0.5,
        "v": normal(C, V)[:, : stage.BV],
        "scores": torch.cat([Tm, (normal(C, C) / C**0.5).tril()]),
    }
    x = {name: value.bfloat16().contiguous() for name, value in x.items()}
    return {**x, "decay": 0.3 + 0.5 * torch.rand(K, generator=rng), "first": normal(V, K)[: stage.BV]}


def in_torch(stage: Stage, n: int) -> tuple[Tensor, Tensor]:
    """The last state and o of n chunks in fp64."""
    x = {name: value.double() for name, value in operands(stage).items()}
    KL, QL = x["KQ"].chunk(2)
    Tm, Aqk = x["scores"].chunk(2)
    S, o = x["first"], x["v"].T
    for _ in range(n):
        S = S * x["decay"]
        Vn = (x["v"].T - S @ KL.T) @ Tm
        o = S @ QL.T + Vn @ Aqk.T
        S = S + Vn @ x["KR"]
    return S, o


def launch_of(stage: Stage, n: int, grid: int, device: str) -> Launch:
    x = operands(stage)
    if stage.place == "shared":
        x["KQ"] = (x["KQ"] * x["decay"]).bfloat16()
    args = {f"p_{name}": value.to(device) for name, value in x.items()}
    for name, width in (("last", K), ("o", stage.C)):
        args[f"p_{name}"] = torch.full((grid, stage.BV, width), torch.nan, device=device)
    sizes = {"n": n, "C": stage.C, "K": K, "V": stage.BV, "IN_SHARED": stage.place == "shared"}
    return Launch("state", state_stage, grid, {**args, **sizes}, KernelConfig(stage.BV // 16, 1))


def compile_stages() -> None:
    """Print what the machine code of every stage holds. As many waits as wgmmas: ptxas has serialised them."""
    print(f"triton {triton.__version__}")
    print(f"{'state':>28} {'registers':>9} {'spills':>8} {'shared':>8} {'wgmmas':>8} {'waits':>8} {'barriers':>8}")
    for stage in STAGES:
        built = build(launch_of(stage, CHUNKS, 1, "meta"), 90)
        code = instructions(disassemble(built.cubin))
        counts = [sum(line.startswith(name) for line in code) for name in ("HGMMA", "WARPGROUP.DEPBAR", "BAR.SYNC")]
        figures = (built.spills, built.shared, *counts)
        print(f"{stage!s:>28} {built.registers:9}", *(f"{figure:8}" for figure in figures))


def check_stage(stage: Stage, n: int = 6) -> None:
    """Raise where the kernel is not the recurrence that is written above."""
    launch = launch_of(stage, n, 2, "cuda")
    launch.run()
    for name, want in zip(("last", "o"), in_torch(stage, n), strict=True):
        for got in launch.args[f"p_{name}"].cpu():
            error = ((got.double() - want).norm() / want.norm()).item()
            if not error < 1e-2:
                raise SystemExit(f"{stage}: relative error of {name} {error:.1e}, wanted at most 1e-2")


def microseconds(function: Callable[[], Any], samples: int = 20) -> float:
    """Median time on the device."""
    return interleave({"": [function]}, samples, torch.device("cuda"))[""].median_us


@dataclass(frozen=True)
class Results:
    """Prints each figure, and appends it to a file as a JSON line."""

    out: Path

    def add(self, case: str, variant: str, figure: float, unit: str) -> None:
        print(f"{case:>24}  {variant:<30} {figure:9.2f} {unit}", flush=True)
        device, torch_version = torch.cuda.get_device_name(), torch.__version__
        record = {"case": case, "variant": variant, "figure": round(figure, 3), "unit": unit, "device": device,
                  "torch": torch_version, "triton": triton.__version__}  # fmt: skip
        with self.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def measure_stages(results: Results) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for stage in STAGES:
        check_stage(stage)
    for grid in (1, sms):
        for stage in STAGES:
            once, twice = (microseconds(launch_of(stage, n, grid, "cuda").run) for n in (CHUNKS, 2 * CHUNKS))
            chunk = (twice - once) / CHUNKS * 1e3
            results.add(f"state, grid {grid}", str(stage), chunk, "ns/chunk")
            results.add(f"state, grid {grid}", str(stage), chunk / stage.C, "ns/token")


def ring_configs(call: Call) -> Iterator[tuple[str, KernelConfig]]:
    """The shipped configurations, for all of V in a CTA and for halves, with other rings."""
    for BV, FACTORS, registers in ((128, 1, {}), (64, 1, {"FACTOR_REGS": 136}), (64, 2, {"FACTOR_REGS": 120})):
        config = default_configs({**key_of(call), "halves_fit": BV == 64})["fused"]
        for SLOTS in range(2, 6 if BV == 128 else 7):
            if SLOTS > FACTORS:
                tiles = {**config.tiles, "BV": BV, "SLOTS": SLOTS, "FACTORS": FACTORS, **registers}
                name = f"BV={BV}, FACTORS={FACTORS}, SLOTS={SLOTS}"
                yield name, replace(config, num_warps=BV // 16, tiles=tiles)


def measure_ring(results: Results) -> None:
    problem = Problem(K=K, V=V, regime="strong", device="cuda")
    for H in (64, 96):
        for B, T in ((1, 8192), (8, 1024)):
            call = checked(make(replace(problem, B=B, T=T, H=H, HV=H)))
            want, _ = kda(call)
            for name, config in ring_configs(call):
                try:
                    measure_config(results, f"ring, H={H}, {B} x {T}", name, call, config, want)
                except Exception as e:  # Triton, its compiler and torch each raise their own
                    print(f"{name} at H={H}, {B} x {T} left out: {e}", flush=True)
                    torch.cuda.synchronize()  # after a fault inside a kernel nothing else can run


def measure_config(results: Results, case: str, name: str, call: Call, config: KernelConfig, want: Tensor) -> None:
    got, _ = kda(call, {"fused": config})
    error = ((got.float() - want).norm() / want.float().norm()).item()
    if not error < 5e-3:
        raise RuntimeError(f"o differs from the shipped configuration's by {error:.1e}")
    results.add(case, name, microseconds(lambda: kda(call, {"fused": config})), "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compile-only", action="store_true", help="compile part `state` for sm_90 and stop")
    parser.add_argument("--part", choices=("state", "ring"), help="one part alone")
    parser.add_argument("--out", type=Path, default=Path("ablation.jsonl"), help="where JSON lines are appended")
    args = parser.parse_args()
    if args.compile_only:
        return compile_stages()
    results, start = Results(args.out), time.perf_counter()
    if args.part != "ring":
        measure_stages(results)
    if args.part != "state":
        measure_ring(results)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
