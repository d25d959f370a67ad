"""Offline compilation: the signature of a launch, the numbers of a build, and errors in the compiler's own words."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kda2.backends.triton import Launch
from kda2.backends.triton.binary import disassemble, resources
from kda2.backends.triton.build import BuildError, build, code_key
from kda2.contract import KernelConfig
from kda2.errors import KDA2Error, UnsupportedTarget


@triton.jit(do_not_specialize=["T"])
def _scale(p_x, p_y, p_bias, T, long: tl.int64, n, stride, factor, N: tl.constexpr, DTYPE: tl.constexpr):
    o_i = tl.arange(0, N)
    m_i = o_i < n
    b_x = tl.load(p_x + o_i * stride + T + long, mask=m_i, other=0.0).to(tl.float32) * factor
    if p_bias is not None:
        b_x += tl.load(p_bias + o_i, mask=m_i, other=0.0)
    tl.store(p_y + o_i, b_x.to(DTYPE), mask=m_i)


@triton.jit
def _matmul(p_a, p_b, p_o, N: tl.constexpr):
    o_ij = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(p_o + o_ij, tl.dot(tl.load(p_a + o_ij), tl.load(p_b + o_ij)))


@triton.jit
def _bad_assembly(p_x, N: tl.constexpr):
    o_i = tl.arange(0, N)
    b_x = tl.inline_asm_elementwise("frobnicate.b32 $0, $1;", "=r,r", [tl.load(p_x + o_i)], tl.int32, True, 1)
    tl.store(p_x + o_i, b_x)


@triton.jit
def _bad_shape(p_x, N: tl.constexpr):
    tl.store(p_x + tl.arange(0, N), tl.arange(0, N)[:, None])


@gluon.jit
def _copy_rows(x_desc, p_o, start, s_o, ROWS: gl.constexpr, N: gl.constexpr):
    b_x = gl.allocate_shared_memory(x_desc.dtype, [ROWS, N], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [start, 0], full, b_x)
    mbarrier.wait(full, 0)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_i = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    o_j = gl.arange(0, N, gl.SliceLayout(0, L))
    gl.store(p_o + o_i[:, None] * s_o + o_j[None, :], b_x.load(L))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def scale_launch(**changes: Any) -> Launch:
    args = {
        "p_x": meta(64, dtype=torch.bfloat16), "p_y": meta(64, dtype=torch.bfloat16), "p_bias": None,
        "T": 16, "long": 3, "n": 48, "stride": 1, "factor": 2.0, "N": 64, "DTYPE": tl.bfloat16,
    }  # fmt: skip
    return Launch("scale", _scale, 1, {**args, **changes}, KernelConfig(1, 1))


def matmul_launch(n: int, num_warps: int) -> Launch:
    args = {"p_a": meta(n, n, dtype=torch.bfloat16), "p_b": meta(n, n, dtype=torch.bfloat16), "p_o": meta(n, n), "N": n}
    return Launch("matmul", _matmul, 1, args, KernelConfig(num_warps, 1))


def tma_launch(rows: int = 256, maxnreg: int | None = None, **changes: Any) -> Launch:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = TensorDescriptor.from_tensor(meta(rows, 64, dtype=torch.bfloat16), [32, 64], layout)
    args = {"x_desc": x, "p_o": meta(32, 64, dtype=torch.bfloat16), "start": 2, "s_o": 64, "ROWS": 32, "N": 64}
    return Launch("copy", _copy_rows, 1, {**args, **changes}, KernelConfig(4, 1), maxnreg)


def parameters(launch: Launch) -> dict[str, str]:
    """Name -> type and attributes of each run-time parameter of the compiled kernel."""
    signature = re.search(r"tt\.func public @\w+\((.*)\) attributes", build(launch, 90).ttgir)
    assert signature
    found = re.findall(r"%(\w+): (.*?) loc\(", signature[1])
    return dict(found)


def test_specialisation_of_a_launch() -> None:
    aligned = "{tt.divisibility = 16 : i32}"
    assert parameters(scale_launch()) == {
        "p_x": f"!tt.ptr<bf16> {aligned}",
        "p_y": f"!tt.ptr<bf16> {aligned}",
        "T": "i32",  # 16, but not to be specialised
        "long": "i64",  # as annotated, though 3 fits 32 bits
        "n": f"i32 {aligned}",
        "factor": "f32",
        # p_bias is None and stride is 1: constants
    }


@pytest.mark.parametrize(
    ("changes", "name", "kind"),
    [
        ({"stride": 3}, "stride", "i32"),
        ({"n": 2**31 + 16}, "n", "i64 {tt.divisibility = 16 : i32}"),
        ({"T": 1}, "T", "i32"),
        ({"p_bias": meta(64)}, "p_bias", "!tt.ptr<f32> {tt.divisibility = 16 : i32}"),
        ({"p_x": meta(80, dtype=torch.bfloat16)[3:]}, "p_x", "!tt.ptr<bf16>"),
        ({"p_x": meta(64, dtype=torch.float16)}, "p_x", "!tt.ptr<f16> {tt.divisibility = 16 : i32}"),
    ],
)
def test_specialisation_of_one_argument(changes: dict[str, Any], name: str, kind: str) -> None:
    assert parameters(scale_launch(**changes))[name] == kind


class _Driver:
    """Stands for the driver of a Hopper GPU up to the point where a kernel would be loaded."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize(
    "launch",
    [
        scale_launch(),
        scale_launch(stride=2, T=1),
        scale_launch(p_bias=meta(64), n=1),
        tma_launch(),
        tma_launch(maxnreg=64, start=0),
    ],
    ids=lambda launch: launch.stage,
)
def test_a_launch_on_such_a_gpu_gives_the_same_binary(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    online = launch.kernel.run(grid=(1,), warmup=True, **launch.args, **launch.options)
    launch.kernel.device_caches.clear()  # the next test may run on a real GPU
    assert build(launch, 90).cubin == online.asm["cubin"]


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 120])
def test_numbers_of_a_build(arch: int) -> None:
    built = build(matmul_launch(64, 4), arch)
    assert (built.stage, built.name, built.arch, built.num_warps) == ("matmul", "_matmul", arch, 4)
    assert built.shared >= 2 * 64 * 64 * 2 - 1  # both operands go through shared memory
    assert 32 <= built.registers <= 255
    assert built.spills == 0
    assert built.seconds > 0
    assert built.versions["triton"] == triton.__version__
    assert re.fullmatch(r"\d+\.\d+", built.versions["ptxas"])
    assert f".target sm_{arch}" in built.ptx
    assert "ttg.num-warps" in built.ttgir
    assert built.cubin.startswith(b"\x7fELF")
    assert built.artifacts.keys() == {"cubin", "ptx", "ttgir"}


def test_hopper_uses_its_own_matrix_instructions() -> None:
    assert "HGMMA" in disassemble(build(matmul_launch(64, 4), 90).cubin)
    assert "HGMMA" not in disassemble(build(matmul_launch(64, 4), 80).cubin)


def test_a_gluon_kernel_with_a_descriptor() -> None:
    built = build(tma_launch(), 90)
    assert (built.stage, built.name, built.num_warps, built.spills) == ("copy", "_copy_rows", 4, 0)
    assert built.shared >= 32 * 64 * 2 + 8  # the rows and the barrier
    assert "UTMALDG.2D" in disassemble(built.cubin)


def test_the_most_registers_of_a_thread_are_the_launchs() -> None:
    assert tma_launch().options == {"num_warps": 4, "num_stages": 1}
    assert tma_launch(maxnreg=64).options == {"num_warps": 4, "num_stages": 1, "maxnreg": 64}
    assert ".maxnreg 64" in build(tma_launch(maxnreg=64), 90).ptx
    assert ".maxnreg" not in build(tma_launch(), 90).ptx


def test_options_for_the_assembler_are_the_launchs() -> None:
    launch = replace(tma_launch(), ptxas="--register-usage-level=0")
    assert launch.options == {"num_warps": 4, "num_stages": 1, "ptx_options": "--register-usage-level=0"}
    assert build(launch, 90).spills == 0
    with pytest.raises(BuildError, match="no-such-option"):
        build(replace(tma_launch(), ptxas="--no-such-option"), 90)


def test_the_key_of_a_gluon_kernel_names_its_code() -> None:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = TensorDescriptor.from_tensor(meta(64, 64, dtype=torch.float16), [32, 64], layout)
    keys = [code_key(tma_launch(**changes), 90) for changes in ({}, {"rows": 1000}, {"start": 3})]
    assert len(set(keys)) == 1  # neither lengths nor coordinates change it
    others = [tma_launch(maxnreg=64), tma_launch(x_desc=x, p_o=meta(32, 64, dtype=torch.float16))]
    assert len({keys[0], *(code_key(launch, 90) for launch in others)}) == 3


def test_spills_are_counted() -> None:
    # 128 x 128 fp32 accumulators in two warps want 256 registers a thread, one more than there are
    assert build(matmul_launch(128, 2), 80).spills > 0


def test_artifact_hashes_tell_kernels_apart() -> None:
    one, same, other = build(scale_launch(), 90), build(scale_launch(), 90), build(scale_launch(N=32), 90)
    assert one.artifacts == same.artifacts
    assert one.artifacts["cubin"] != other.artifacts["cubin"]


def test_what_ptxas_says_reaches_the_caller() -> None:
    launch = Launch("bad", _bad_assembly, 1, {"p_x": meta(32, dtype=torch.int32), "N": 32}, KernelConfig(1, 1))
    with pytest.raises(BuildError, match="frobnicate") as raised:
        build(launch, 90)
    assert (raised.value.stage, raised.value.arch) == ("bad", 90)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_what_the_front_end_says_reaches_the_caller() -> None:
    launch = Launch("bad", _bad_shape, 1, {"p_x": meta(32, dtype=torch.int32), "N": 32}, KernelConfig(1, 1))
    with pytest.raises(BuildError, match=r"(?s)stage 'bad' does not compile for sm_80: .*to have shape"):
        build(launch, 80)


def test_a_missing_argument_is_a_build_error() -> None:
    launch = scale_launch()
    with pytest.raises(BuildError, match="p_y"):
        build(replace(launch, args={k: v for k, v in launch.args.items() if k != "p_y"}), 90)


def test_a_kernel_that_the_binary_does_not_hold() -> None:
    with pytest.raises(KDA2Error, match="no kernel 'other'"):
        resources(build(scale_launch(), 90).cubin, "other")


def test_what_is_not_a_binary() -> None:
    with pytest.raises(KDA2Error, match="nvdisasm"):
        disassemble(b"not a cubin")


@pytest.mark.interpreter
def test_under_the_interpreter_there_is_nothing_to_compile() -> None:
    with pytest.raises(UnsupportedTarget, match="TRITON_INTERPRET"):
        build(scale_launch(), 90)
