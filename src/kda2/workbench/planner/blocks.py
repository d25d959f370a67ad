"""The functional blocks of KDA: which stage each is, its tensors, invariants and boundary conditions."""

from __future__ import annotations

from dataclasses import dataclass

from kda2.ops.kda.spec import ITEM_BYTES, KDA
from kda2.testing.stages import STAGES
from kda2.workbench.blockplan import PlannedTensor
from kda2.workbench.planner.amounts import Amount, product
from kda2.workbench.planner.problem import Problem

Tensors = dict[str, tuple[PlannedTensor, Amount]]


@dataclass(frozen=True)
class Block:
    """A functional block. `reads` and `writes` name tensors; those that the problem does not have are left out."""

    letter: str
    stage: str
    title: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    invariants: tuple[str, ...]
    boundary_conditions: tuple[str, ...]


_GATE = ("A_log", "dt_bias")
_EMPTY = "empty sequence: owns no chunk, so cu_chunks repeats an offset; family ragged, all_empty"
_PARTIAL = "last partial chunk: rows past the end count as q, k, v, beta = 0 and g = 0; family chunk_edges, ragged"
_ONE = "T = 1: one row of a chunk counts, the others are padding; family one_token"
_PACKED = "packed neighbours: no chunk crosses an offset, and NaN in one sequence stays there; family nan_neighbour"
_RESET = "log decay -inf (stored as -1e30): decay exactly 0, never inf - inf; family reset_log, reset_softplus"
_WIDE = "offsets past 2^31: 64-bit wherever a product of sizes can pass it"
_HEADS = "HV > H: value head h reads query and key head h // (HV / H)"
_ODD = "K or V not a power of two: channels past the last are masked, on loads as 0 and on stores away"

# In the order of the data flow.
BLOCKS: tuple[Block, ...] = (
    Block(
        "A", "factors", "Input pipeline: gate, norms, decayed queries and keys",
        ("q", "k", "g", "beta", *_GATE), ("Qd", "Kd", "Kr", "decay", "A"),
        (
            "g <= 0, so that every decay lies in [0, 1]",
            "every exponent is anchored: no factor exceeds 1 off the diagonal blocks, nor exp(80) inside a block whose "
            "gate is bounded; with an unbounded gate the chunk is halved down to single tokens",
            "no exponent is a difference of prefix sums, unless the gate is bounded",
            "masks select, they never multiply: the masked half of a product may be inf",
            "A is strictly lower triangular, beta included",
            "norms are summed in fp32: rsqrt(sum x^2 + 1e-6)",
        ),
        (_ONE, _PARTIAL, _EMPTY, _RESET, _PACKED, _HEADS, _ODD, _WIDE,
         "gate at its bound over a whole chunk: exp(-G) overflows; family saturated_gate"),
    ),
    Block(
        "D", "solve", "Numerical correction: the triangular inverse, W and U",
        ("A", "beta", "Kd", "v"), ("W", "U"),
        (
            "(I + A)^-1 in fp32 by forward substitution or by merging blocks, never by a truncated series",
            "Tm is unit lower triangular before beta scales its columns",
            "where beta may pass 1 (allow_neg_eigval) Tm is not rounded to 16 bits",
        ),
        (_ONE, _PARTIAL, _EMPTY, _PACKED, _ODD, _WIDE,
         "near-singular chunks: repeated and near-collinear keys with beta 1 and no decay; family repeated_keys, "
         "near_collinear_keys, repeated_keys_neg_eigval"),
    ),
    Block(
        "B", "state", "State recurrence over the chunks of each sequence",
        ("W", "U", "Kr", "decay", "initial_state"), ("Vn", "S", "final_state"),
        (
            "S is accumulated in fp32, whatever it is stored in",
            "chunks of a sequence in order, each once; sequences and heads are independent",
            "decay lies in [0, 1]: what is kept never grows",
            "columns of V are independent: a CTA may own some of them",
        ),
        (_ONE, _EMPTY + ": final state = initial state", "no initial state: S starts at 0", _PACKED,
         "a reset inside a chunk: decay 0 meets a finite S; family reset_log", _ODD, _WIDE,
         "large state: v - S^T k cancels; family large_state"),
    ),
    Block(
        "C", "output", "Query output: what queries read from the state and from their own chunk",
        ("Qd", "q", "k", "g", *_GATE, "Vn", "S"), ("o",),
        (
            "scores are lower triangular, the diagonal included: a token reads itself",
            "what a token reads of itself may be all that is left, so that sum is fp32",
            "exponents are anchored and masks select, as in block A",
            "chunks are independent",
        ),
        (_ONE, _PARTIAL, _EMPTY, _RESET, _PACKED, _HEADS, _ODD, _WIDE,
         "tokens that no sequence owns: their o is 0; family ragged"),
    ),
)  # fmt: skip


def tensors_of(p: Problem) -> Tensors:
    """Every tensor of the blocks that the problem has, with its size."""
    work = "fp32" if p.dtype == "fp32" else "bf16"
    T = ("B", "T") if p.seqlens is None else ("1", "T")
    rows = [
        ("q", (*T, "H", "K"), p.dtype, "call", "queries"),
        ("k", (*T, "H", "K"), p.dtype, "call", "keys"),
        ("v", (*T, "HV", "V"), p.dtype, "call", "values"),
        ("g", (*T, "HV", "K"), p.dtype, "call", "log decay" if p.gate == "log" else "gate activations"),
        ("beta", (*T, "HV"), p.dtype, "call", "logit of the step size"),
        ("o", (*T, "HV", "V"), p.dtype, "call", "outputs"),
    ]
    if p.gate != "log":
        rows.append(("A_log", ("HV",), "fp32", "call", "log of the gate's rate"))
        rows.append(("dt_bias", ("HV", "K"), "fp32", "call", "bias of the gate's activation"))
    for way in ("in", "out"):
        name, meaning = ("initial_state", "before") if way == "in" else ("final_state", "after")
        if p.state_dtype is not None and way in p.state.split("-"):
            rows.append((name, ("N", "HV", "K", "V"), p.state_dtype, "call", f"the state {meaning} each sequence"))
    for spec in {t.name: t for stage in STAGES.values() for t in stage.outputs}.values():
        if spec.shape[0] == "NT" and spec.name != "o":
            dtype = "fp32" if spec.dtypes == ("fp32",) else work
            rows.append((spec.name, spec.shape, dtype, "workspace", spec.meaning))
    return {row[0]: _planned(p, *row) for row in rows}


def _planned(
    p: Problem, name: str, axes: tuple[str, ...], dtype: str, owner: str, meaning: str
) -> tuple[PlannedTensor, Amount]:
    sizes = {**p.sizes, "1": 1}
    counted = " ".join("tokens" if axis == "T" else axis for axis in axes if axis not in ("B", "1"))
    amount = product(sizes, counted, ITEM_BYTES[dtype], unit="B")
    tensor = PlannedTensor.model_validate(
        {
            "name": name, "axes": axes, "shape": [sizes[axis] for axis in axes], "dtype": dtype,
            "size": amount.count("B"), "owner": owner, "meaning": meaning,
        }
    )  # fmt: skip
    return tensor, amount


def unit_tests_of(block: Block) -> tuple[str, ...]:
    """The names of the generated tests that hold the block's kernel to its oracle, one a probe family."""
    return tuple(f"test_blocks.py::test_{block.stage}[{family}]" for family in KDA.families)
