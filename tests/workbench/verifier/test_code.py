"""L0 to L2 on files: what their source says, and what their Triton launches build to for sm_90 without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kda2.workbench.verifier import Subject
from kda2.workbench.verifier.policy import checks, without_interpreter
from kda2.workbench.verifier.questions import argument_names
from kda2.workbench.verifier.words import reasons

LAUNCH = "    kda_recurrent[(N * HV,)](*inputs, state, o, cu_seqlens, scale, HV, K, V, num_warps=4)\n"
NAMES = argument_names(Subject("file"))
TAKES = f"def run({', '.join(NAMES)}):\n    pass\n"


# L0.


def failed(source: str) -> dict[str, str]:
    """The predicates of L0 that do not hold, and what was seen."""
    return {name: c.observed for name, c in checks(source.encode(), NAMES).items() if not c.ok}


@pytest.mark.parametrize(
    ("source", "name", "seen"),
    [
        ("def run(:\n", "parses", "invalid syntax (line 1)"),
        ("x = '\0'", "parses", "source code string cannot contain null bytes"),
        ("a = " + "(" * 500 + ")" * 500, "parses", "too many nested parentheses (line 1)"),
        ("def forward(q):\n    pass\nclass Run:\n    pass\n", "run", "it defines forward, Run"),
        ("run = 1\n", "run", "it defines no function"),
        (TAKES.replace("lower_bound, ", "").replace("q, ", ""), "arguments", "run does not take q, lower_bound"),
        (TAKES.replace("q, ", "q, block, "), "arguments", "run asks for block"),
        (TAKES.replace("q, ", "q, /, "), "arguments", "run asks for q and does not take q"),
        ("from kda2.testing import oracle\n" + TAKES, "policy", "it imports kda2.testing.oracle"),
        ("import kda2.ops.kda.reference as r\n" + TAKES, "policy", "it imports kda2.ops.kda.reference"),
        ("from kda2.ops.kda import reference\n" + TAKES, "policy", "it imports kda2.ops.kda.reference"),
        (
            "import kda2 as x\n" + TAKES + "    x.testing.oracle\n",
            "policy",
            "it imports kda2.testing, kda2.testing.oracle",
        ),
        ("m = 'kda2.workbench.judge'\n" + TAKES, "policy", "it imports kda2.workbench.judge"),
        (TAKES + "    kda(q, impl='reference')\n", "policy", 'it asks for impl="reference", the oracle'),
    ],
)
def test_what_the_source_says_is_held_against_it(source: str, name: str, seen: str) -> None:
    assert failed(source) == {name: seen}


@pytest.mark.parametrize(
    "source",
    [
        "def run(**inputs):\n    pass\n",
        "def run(q, *, v, **rest):\n    pass\n",
        TAKES.replace("q, ", "").replace("):", ", q, block=64):"),
        "def run(x):\n    pass\n" + TAKES,  # the later one counts
        "from my_kernel import run\n",
        "from functools import partial\nfrom my_kernel import kda\nrun = partial(kda, block=64)\n",
        "import sys\nif sys.maxsize:\n    def run(**inputs):\n        pass\n",
        '"""kda2.testing judges this file, kda2.workbench runs it."""\n' + TAKES,
        "from .testing import oracle\nimport kda2_testing, kda2\n" + TAKES + "    kda2.kda(q, impl='torch')\n",
    ],
)
def test_what_is_no_fault_is_let_through(source: str) -> None:
    assert failed(source) == {}


@pytest.mark.parametrize(
    ("source", "language"),
    [
        ("from triton.experimental import gluon", "Gluon"),
        ("def f():\n    import tilelang.language as T", "TileLang"),
        ("from torch.utils.cpp_extension import load_inline", "CUDA C++"),
        ("import cuda.bindings", "CUDA C++"),
        ("import cutlass", "CUTLASS"),
        ("import triton, cudagraphs, torch.utils", None),
        ("def run(:", None),
    ],
)
def test_languages_without_an_interpreter_are_known(source: str, language: str | None) -> None:
    assert without_interpreter(source.encode()) == language


def test_a_file_that_does_not_parse_goes_no_further(shared: Any) -> None:
    found = shared.code(shared.file("def run(:\n"))
    assert {s: v.outcome for s, v in found.items()} == {
        "L0": "fail", "L1": "not_run(refuted before)", "L2": "not_run(refuted before)",
    }  # fmt: skip
    assert reasons(found["L0"]) == [
        "parses: invalid syntax (line 1), wants Python source; mend the file so that Python can read it"
    ]


def test_a_file_that_asks_its_judge_is_invalid(shared: Any, plain: str) -> None:
    found = shared.code(shared.file(f"from kda2.testing import oracle\n{plain}"))
    assert found["L0"].outcome == "invalid"
    assert reasons(found["L0"])[0].startswith("policy: it imports kda2.testing.oracle, wants no import of the oracle")


def test_a_file_changed_before_it_is_read_is_invalid(shared: Any, plain: str) -> None:
    path = shared.file(plain)
    subject = Subject.of_file(path)
    path.write_text("while True: pass\n")
    found = shared.code(subject)
    assert [v.outcome for v in found.values()] == ["invalid", "not_run(refuted before)", "not_run(refuted before)"]
    assert reasons(found["L0"]) == ["kernel.py was changed while it was judged; judge it again"]


# L1: import.


@pytest.mark.parametrize(
    ("top", "says"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package' (kernel.py, line 1 in "),
        ("raise RuntimeError('not today')\n", "RuntimeError: not today (kernel.py, line 1 in <module>)"),
        ("import sys\nsys.exit('bye')\n", "SystemExit: bye (kernel.py, line 2 in <module>)"),
    ],
)
def test_a_file_that_cannot_be_imported_fails_to_build(shared: Any, plain: str, top: str, says: str) -> None:
    found = shared.code(shared.file(top + plain))
    assert (found["L1"].outcome, found["L2"].outcome) == ("fail", "not_run(it cannot be imported here)")
    assert f"import: importing it raised {says}" in reasons(found["L1"])[0]


def test_a_file_without_triton_has_nothing_to_build(shared: Any, plain: str) -> None:
    found = shared.code(shared.file(plain))
    assert [found[s].outcome for s in ("L0", "L1", "L2")] == ["pass", *["not_run(it launches no Triton kernel)"] * 2]


# L1 and L2: recorded launches.


def test_a_triton_kernel_is_built_without_a_gpu(shared: Any, recurrent: str) -> None:
    found = shared.code(shared.file(recurrent))
    assert [v.outcome for v in found.values()] == ["pass", "pass", "pass"]
    built = found["L1"].evidence["stages"]
    assert list(built) == ["kda_recurrent"]
    assert built["kda_recurrent"]["ctas"] == 2 and built["kda_recurrent"]["registers"] > 16
    # q, k, g and o's like v [1, 70, 2, 16], beta [1, 70, 2], the state [1, 2, 16, 16] in fp32; offsets [2] in int64
    assert built["kda_recurrent"]["bytes"] == 4 * (5 * 70 * 2 * 16 + 70 * 2 + 2 * 16 * 16) + 2 * 8


GRIDS = {
    "callable": ["[(N * HV,)]", '[lambda meta: (N * meta["HV"],)]'],
    "by keyword": [", HV, K, V, num_warps=4)", ", HV=HV, K=K, V=V, num_warps=4)"],
    "autotuned": [
        "@triton.jit", '@triton.autotune([triton.Config({"V": v}) for v in (16, 8)], key=["K"])\n@triton.jit',
        ", HV, K, V, num_warps=4)", ", HV, K)",
    ],
    "heuristics": ["@triton.jit", '@triton.heuristics({"V": lambda x: x["K"]})\n@triton.jit',
                   ", HV, K, V, num_warps=4)", ", HV, K)"],
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_every_way_to_launch_is_recorded(shared: Any, recurrent: str, changed: Callable[..., str], name: str) -> None:
    found = shared.code(shared.file(changed(recurrent, *GRIDS[name])))
    assert found["L1"].outcome == "pass"
    assert found["L1"].evidence["stages"]["kda_recurrent"]["ctas"] == 2


def test_a_loop_of_launches_is_built_once_for_each_code(
    shared: Any, recurrent: str, changed: Callable[..., str]
) -> None:
    loop = "    inputs = tuple(inputs)\n    for t in range(400):\n    " + LAUNCH.replace("scale", "scale + t")
    found = shared.code(shared.file(changed(recurrent, LAUNCH, loop)))
    assert list(found["L1"].evidence["stages"]) == ["kda_recurrent"]
    two = changed(recurrent, LAUNCH, f"    inputs = tuple(inputs)\n{LAUNCH}{LAUNCH}", "V, num_warps=4)", "V)")
    two = two.replace("HV, K, V)\n", "HV, K, V, num_warps=8)\n", 1)
    found = shared.code(shared.file(two))
    assert list(found["L1"].evidence["stages"]) == ["kda_recurrent", "kda_recurrent 2"]


def test_launches_of_prepare_do_not_count(shared: Any, recurrent: str) -> None:
    warm = (
        "\n\ndef prepare(**inputs):\n    run(**inputs)\n    kda_recurrent[(1,)](*[inputs['q']] * 8, 1.0, 2, 16, 32)\n"
    )
    assert list(shared.code(shared.file(recurrent + warm))["L1"].evidence["stages"]) == ["kda_recurrent"]


def test_a_kernel_that_does_not_compile_fails_with_the_compilers_words(
    shared: Any, recurrent: str, changed: Callable[..., str]
) -> None:
    path = shared.file(changed(recurrent, "row = t * HV + i_h", "row = tl.nothing(t)"))
    found = shared.code(path)
    assert (found["L1"].outcome, found["L2"].outcome) == ("fail", "not_run(it does not build)")
    (says,) = reasons(found["L1"])
    assert says.startswith("kda_recurrent: CompilationError at line 10 of the kernel, `row = tl.nothing(t)`: Attribute")
    assert "has no attribute 'nothing'" in says and says.endswith("wants a kernel that compiles")


def test_ptxas_is_quoted(shared: Any, recurrent: str, changed: Callable[..., str]) -> None:
    asm = 'tl.inline_asm_elementwise("wrong $0, $1;", "=r,r", [i_n], dtype=tl.int32, is_pure=False, pack=1)'
    path = shared.file(changed(recurrent, "    o_k, o_v", f"    {asm}\n    o_k, o_v"))
    (says,) = reasons(shared.code(path)["L1"])
    assert "Not a name of any known instruction: 'wrong'" in says and "Repro" not in says


def test_too_much_shared_memory_fails(shared: Any, recurrent: str, changed: Callable[..., str]) -> None:
    wide = (
        "    m, c = tl.arange(0, 64), tl.arange(0, 512)\n"
        "    b_x = tl.load(q + m[:, None] * 512 + c[None, :]).to(tl.bfloat16)\n"
        "    b_y = tl.load(k + m[:, None] * 512 + c[None, :]).to(tl.bfloat16)\n"
        "    tl.store(q + m[:, None] * 64 + m[None, :], tl.dot(b_x, tl.trans(b_y)))\n"
    )
    found = shared.code(shared.file(changed(recurrent, "    i_n, i_h", f"{wide}    i_n, i_h")), arch=86)
    assert found["L1"].outcome == "fail"
    # two tiles of 64 KiB; 95 % of 99 KiB
    assert reasons(found["L1"]) == [
        "kda_recurrent: 131072 bytes of shared memory, wants at most 96307; use smaller tiles"
    ]


def test_gluon_kernels_are_built_too(shared: Any, recurrent: str, changed: Callable[..., str]) -> None:
    gluon = (
        "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl\n\n\n"
        "@gluon.jit\ndef nothing(x, N: gl.constexpr):\n    pass\n\n\ndef run("
    )
    path = shared.file(changed(recurrent, "def run(", gluon, LAUNCH, f"    nothing[(1,)](q, 4)\n{LAUNCH}"))
    found = shared.code(path)["L1"]
    assert found.outcome == "pass" and set(found.evidence["stages"]) == {"kda_recurrent", "nothing"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("raise NotImplementedError('K = 16')", "it refuses the call that its launches are recorded on: NotImpl"),
        ("raise IndexError(3)", "its launches could not be recorded without making them: it raised IndexError: 3"),
    ],
)
def test_host_code_that_raises_leaves_nothing_to_build(
    shared: Any, recurrent: str, changed: Callable[..., str], line: str, why: str
) -> None:
    found = shared.code(shared.file(changed(recurrent, LAUNCH, f"    {line}\n{LAUNCH}")))
    assert found["L0"].passed
    assert all(found[s].outcome.startswith(f"not_run({why}") for s in ("L1", "L2"))
