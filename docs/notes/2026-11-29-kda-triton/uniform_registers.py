"""Compile `prepare` for sm_90 with 64- and with 32-token chunks, and print what the inspector says of the machine code.

Needs no GPU. Another assembler takes the place of Triton's with TRITON_PTXAS_PATH=/path/to/ptxas.
"""

from __future__ import annotations

import torch

from kda2.backends.triton.build import Build, build
from kda2.contract import KernelConfig
from kda2.ops.kda import Gate
from kda2.ops.kda.check import Call, check_call, check_options
from kda2.ops.kda.triton import candidates, launches
from kda2.workbench.inspector import inspect

T, H, K = 1024, 64, 128
CHUNKS = (
    KernelConfig(num_warps=4, num_stages=1, tiles={"BT": 64, "BK": 32, "BV": 32}),
    KernelConfig(num_warps=4, num_stages=1, tiles={"BT": 64, "BK": 32, "BV": 64}),
    KernelConfig(num_warps=2, num_stages=1, tiles={"BT": 32, "BK": 32, "BV": 64}),
)


def packed_call() -> Call:
    """Three sequences in one batch, bounded gate, bf16, on the meta device."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v, g = (empty(1, T, H, K) for _ in range(4))
    gate = Gate.bounded(empty(H, dtype=torch.float32), empty(H, K, dtype=torch.float32))
    return check_call(
        q, k, v, g, empty(1, T, H), check_options(q, gate, None, True, True, False, "kv"),
        initial_state=None, output_final_state=False, cu_seqlens=empty(4, dtype=torch.int64), deterministic=False,
    )  # fmt: skip


def prepare(call: Call, config: KernelConfig) -> Build:
    launch = launches(call, {**candidates(call)[0], "prepare": config})[0]
    return build(launch, 90)


def _print(what: str, instructions: tuple[str, ...]) -> None:
    print(f"  {len(instructions)} {what}", *instructions[:2], sep="\n      ")


if __name__ == "__main__":
    call = packed_call()
    for config in CHUNKS:
        built = prepare(call, config)
        found = inspect(built)
        versions = ", ".join(f"{tool} {version}" for tool, version in built.versions.items())
        print(f"{config.tiles}, {found.groups['HGMMA']} wgmma instructions, {versions}")
        _print("reads of a register that nothing set", found.undefined_reads)
        _print("products with a garbled descriptor", found.garbled_descriptors)
