"""The generated unit tests of a plan: a pytest module that holds foreign kernels of the blocks to their oracles."""

from __future__ import annotations

from kda2.ops.kda.spec import KDA
from kda2.testing.stages import STAGES
from kda2.workbench.blockplan import BlockPlan
from kda2.workbench.planner.problem import Problem

# The oracles run on the CPU too, token by token in fp64.
_MOST_CHANNELS, _MOST_TOKENS = 32, 64
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}

_MODULE = '''"""Unit tests of the blocks of {op}, written by `kda2 plan {op}`, which replaces this file when run again.

To test a kernel of a stage, put it beside this file as <stage>.py with a function run(**inputs) -> dict of tensors:

{signatures}

NT chunks of C tokens lie one after another; `python -c "import kda2.testing.stages as s; help(s)"` says more. A stage
without a file is skipped. Sizes are small, as the oracles run token by token in fp64.

    pytest test_blocks.py
    pytest test_blocks.py -k "state and random"
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from kda2.testing import STAGES, Problem, verify_stage

PLAN = "{plan}"
HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = {C}
PROBLEM = Problem(
    T={T}, H={H}, HV={HV}, K={K}, V={V}, dtype={dtype}, gate="{gate}", qk_l2norm={qk_l2norm},
    state={state}, device=DEVICE,
)
FAMILIES = (
{families}
)


def kernel(stage):
    """The function `run` of <stage>.py; skips where there is none."""
    path = HERE / f"{{stage}}.py"
    if not path.exists():
        takes = ", ".join(x.name for x in STAGES[stage].inputs)
        gives = ", ".join(x.name for x in STAGES[stage].outputs)
        pytest.skip(f"no {{path.name}} beside this file: write run({{takes}}) -> dict of {{gives}} to test it")
    spec = importlib.util.spec_from_file_location(f"kernel_{{stage}}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run


def check(stage, family):
    verdict = verify_stage(kernel(stage), stage, family, PROBLEM, C)
    assert verdict.ok, "\\n" + verdict.explain()


{tests}
'''
_TEST = '''@pytest.mark.parametrize("family", FAMILIES)
def test_{stage}(family):
    """{what}"""
    check("{stage}", family)
'''


def unit_tests(plan: BlockPlan) -> str:
    """The source of test_blocks.py: every stage on every probe family, at sizes that the CPU's oracles can bear."""
    p = Problem.of(plan.problem)
    C = min(p.C, _MOST_TOKENS)
    state = "None" if p.state_dtype is None or "in" not in p.state.split("-") else _DTYPES[p.state_dtype]
    return _MODULE.format(
        op=plan.op,
        plan=plan.content_hash,
        signatures="\n".join(_signature(stage) for stage in STAGES),
        C=C,
        T=2 * C + 2,
        H=1,
        HV=1 if p.value_heads == p.H else 2,
        K=min(p.K, _MOST_CHANNELS),
        V=min(p.V, _MOST_CHANNELS),
        dtype=_DTYPES[p.dtype],
        gate=p.gate,
        qk_l2norm=p.qk_l2norm,
        state=state,
        families="\n".join(f'    "{family}",' for family in KDA.families),
        tests="\n\n".join(_TEST.format(stage=stage, what="; ".join(_what(stage))) for stage in STAGES).rstrip(),
    )


def _signature(stage: str) -> str:
    takes, gives = (", ".join(t.name for t in tensors) for tensors in (STAGES[stage].inputs, STAGES[stage].outputs))
    return f"    {stage + '.py':<12} run({takes}) -> {gives}"


def _what(stage: str) -> tuple[str, ...]:
    """The formulas, short enough for a docstring's line."""
    return ("factors, then solve",) if stage == "prepare" else STAGES[stage].computes[-2:]
