"""What NVIDIA's binary tools, which Triton brings along, say about a cubin. No GPU or driver needed."""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton

from kda2.errors import KDA2Error


def resources(cubin: bytes, name: str) -> dict[str, int]:
    """Resource usage of kernel `name`: REG (registers of a thread), STACK and LOCAL (bytes of its local memory),
    SHARED (bytes, static: Triton's own shared memory is dynamic and not in it), ..."""
    text = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
    usage = re.search(rf"Function {re.escape(name)}:\s*(.*)", text)
    if usage is None:
        raise KDA2Error(f"the cubin has no kernel {name!r}: {text}")
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage[1])}


def disassemble(cubin: bytes) -> str:
    """The machine code (SASS), one instruction a line, as nvdisasm prints it."""
    return _run(triton.knobs.nvidia.nvdisasm.path, "--print-code", cubin)


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, option, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise KDA2Error(f"{tool} {option} failed: {done.stderr.strip()}")
    return done.stdout
