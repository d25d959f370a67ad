"""Stage `fused`: all of a sequence, for one value head and V channels of it, in one CTA."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from kda2.ops.kda.hopper.factor import factor
from kda2.ops.kda.hopper.score import score
from kda2.ops.kda.hopper.slots import Source, allocate
from kda2.ops.kda.hopper.state import state


@gluon.jit
def lengths(p_cu, o_n, N):
    """Of the sequences o_n; -1 past the last. Whatever the offsets, all N come before those."""
    b_len = gl.load(p_cu + o_n + 1, mask=o_n < N, other=0) - gl.load(p_cu + o_n, mask=o_n < N, other=0)
    return gl.where(o_n < N, gl.maximum(b_len, 0), -1)


@gluon.jit
def longest_first(p_cu, rank, N, LIMIT: gl.constexpr):
    """The sequence whose length is the rank-th largest, of at most LIMIT; ties in order."""
    L: gl.constexpr = gl.BlockedLayout([1, LIMIT // 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    o_i = gl.arange(0, LIMIT, gl.SliceLayout(1, L))
    o_j = gl.arange(0, LIMIT, gl.SliceLayout(0, L))
    b_i = lengths(p_cu, o_i, N)
    b_j = lengths(p_cu, o_j, N)
    ahead = (b_j[None, :] > b_i[:, None]) | ((b_j[None, :] == b_i[:, None]) & (o_j[None, :] < o_i[:, None]))
    b_rank = gl.sum(ahead.to(gl.int32), axis=1)
    return gl.sum(gl.where((b_rank == rank) & (o_i < N), o_i, 0), axis=0)


@gluon.jit
def bounds(p_cu, i_n, T, IS_PACKED: gl.constexpr):
    """First token of a sequence and the one after its last. Offsets are the caller's: whatever they are, stay within
    the tensors."""
    if IS_PACKED:
        bos = gl.maximum(gl.minimum(gl.load(p_cu + i_n), T), 0).to(gl.int32)
        return bos, gl.maximum(gl.minimum(gl.load(p_cu + i_n + 1), T), bos).to(gl.int32)
    else:
        return 0 * T, T


# neither T nor the packing may change the code
@gluon.jit(do_not_specialize=["T", "N", "s_beta_b", "s_beta_h"])
def kda_fused(
    q_desc, k_desc, v_desc, g_desc, o_desc, p_beta, p_A_log, p_dt_bias, p_cu, p_first, p_last, p_o,
    scale, lower_bound, beta_scale, T: gl.int32, N: gl.int32,
    s_beta_b: gl.int64, s_beta_t: gl.int64, s_beta_h: gl.int64, s_A, s_dt_h, s_dt_d,
    s_o_b: gl.int64, s_o_t: gl.int64, s_o_h: gl.int64,
    s_first_n: gl.int64, s_first_h: gl.int64, s_first_k, s_first_v,
    s_last_n: gl.int64, s_last_h: gl.int64, s_last_k, s_last_v,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, VS: gl.constexpr, V: gl.constexpr,
    SLOTS: gl.constexpr, FACTORS: gl.constexpr, TERMS: gl.constexpr,
    GATE: gl.constexpr, HAS_BIAS: gl.constexpr, USE_L2NORM: gl.constexpr, USE_SIGMOID: gl.constexpr,
    HAS_FIRST: gl.constexpr, KEYS_FIRST: gl.constexpr, STORE_LAST: gl.constexpr, IS_PACKED: gl.constexpr,
    RANKED: gl.constexpr, FACTOR_REGS: gl.constexpr, SCORE_REGS: gl.constexpr,
):  # fmt: skip
    """
    Computes: o and the final state of one sequence, value head and slice of V channels (the table's BV), out of VS;
              zeros where tokens belong to no sequence. beta_scale is 2 with negative eigenvalues, else 1.
    Reads:    q, k [B, T, H, K], v [B, T, HV, VS V], g [B, T, HV, K] through TMA; beta [B, T, HV], A_log [HV],
              dt_bias [HV, K], initial state [N, HV, K, VS V] in either layout.
    Writes:   o [B, T, HV, VS V] (through TMA but for windows, and what comes last in a packed sequence), final state.
    Grid:     N * HV * VS, the longest of at most RANKED packed sequences first.
    Assumes:  descriptors as [B, heads, T, channels] with boxes [1, 1, 32, channels]; SLOTS more than FACTORS;
              num_warps = V / 16.
    Source:   Kimi Linear (arXiv 2510.26692), chunkwise form with the decay anchored at the middle of a chunk.
    """
    gl.static_assert(SLOTS > FACTORS, "a factor role loads what comes after the chunks that others are at")
    i_v = gl.program_id(0) % VS
    i_hv = gl.program_id(0) // VS % HV
    i_n = gl.program_id(0) // VS // HV
    i_h = i_hv // (HV // H)
    if IS_PACKED and RANKED > 0:
        i_n = longest_first(p_cu, i_n, N, RANKED)
    bos, eos = bounds(p_cu, i_n, T, IS_PACKED)
    i_b = 0 * i_n
    rest = 0
    if IS_PACKED:
        rest = gl.where(i_n == N - 1, T, 0)
    else:
        i_b = i_n
        p_beta += i_n * s_beta_b
        p_o += i_n * s_o_b
    p_beta += i_hv * s_beta_h
    p_A_log += i_hv * s_A
    p_dt_bias += i_hv * s_dt_h
    p_o += i_hv * s_o_h + i_v * V
    p_first += i_n * s_first_n + i_hv * s_first_h + (i_v * V).to(gl.int64) * s_first_v
    s = allocate(q_desc.dtype, g_desc.dtype, K, V, SLOTS, FACTORS, TERMS)
    source = Source(q_desc, k_desc, v_desc, g_desc, i_b, i_h, i_hv, i_v)
    gl.warp_specialize(
        [
            (state, (s, source, o_desc, p_first, p_last, p_o, s_o_t, s_first_k, s_first_v, s_last_n, s_last_h, s_last_k,
                     s_last_v, i_n, bos, eos, rest, K, V, SLOTS, FACTORS, TERMS, HAS_FIRST, STORE_LAST, IS_PACKED)),
            (score, (s, p_beta, s_beta_t, bos, eos, scale, beta_scale, K, SLOTS, TERMS, USE_L2NORM, USE_SIGMOID)),
            (factor, (s, source, p_A_log, p_dt_bias, s_dt_d, p_first, s_first_k, s_first_v, bos, eos, lower_bound,
                      0, K, V, SLOTS, FACTORS, GATE, HAS_BIAS, USE_L2NORM, HAS_FIRST, KEYS_FIRST)),
            (factor, (s, source, p_A_log, p_dt_bias, s_dt_d, p_first, s_first_k, s_first_v, bos, eos, lower_bound,
                      1, K, V, SLOTS, FACTORS, GATE, HAS_BIAS, USE_L2NORM, HAS_FIRST, KEYS_FIRST)),
        ][: 2 + FACTORS],
        [4, 4, 4][: 1 + FACTORS],
        [SCORE_REGS, FACTOR_REGS, FACTOR_REGS][: 1 + FACTORS],
    )  # fmt: skip
