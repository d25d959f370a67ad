"""Role `score`: the scores of a chunk, and the inverses that its delta rule takes."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kda2.backends.gluon import commit, next_slot, wait
from kda2.ops.kda.hopper.slots import CUBE, LOG2E, MORE, PANEL, ROWS, ROWS8_4D, ROWS16, C, mma, recomputed, window_of

L2NORM_EPS = gl.constexpr(1e-6)


@gluon.jit
def load_beta(p_beta, s_beta_t, t0, eos):
    """beta of a chunk's tokens, as it lies in memory [2 C]: of the keys' half."""
    o_i = gl.arange(0, 2 * C, gl.SliceLayout(1, mma(C)))
    mask = (o_i < C) & (t0 + o_i < eos)
    return gl.load(p_beta + (t0 + o_i).to(gl.int64) * s_beta_t, mask=mask, other=0.0)


@gluon.jit
def score_chunk(
    s, slot, tokens, b_raw, scale, beta_scale, K: gl.constexpr, SLOTS: gl.constexpr,
    TERMS: gl.constexpr, USE_L2NORM: gl.constexpr, USE_SIGMOID: gl.constexpr,
):  # fmt: skip
    """A = strict_tril(diag(beta |k|^-2) KL KR^T), Y = (I + A)^-1, Tm = Y diag(beta |k|^-1) below its diagonal, which
    state applies in fp32; Aqk = tril(QL KR^T), whose diagonal is q . k as it came.

    Keys stay as they came: their norms are in A's rows and Tm's columns.
    """
    P: gl.constexpr = K // PANEL
    W: gl.constexpr = s.g.dtype.primitive_bitwidth // 16
    L: gl.constexpr = mma(C)
    row: gl.constexpr = gl.SliceLayout(1, L)
    keys = s.kq._reinterpret(gl.bfloat16, [SLOTS * P, 2 * C, PANEL], ROWS)
    KR = s.g._reinterpret(gl.bfloat16, [SLOTS * W * P, C, PANEL], ROWS)
    o_i = gl.arange(0, 2 * C, row)
    o_j = gl.arange(0, C, gl.SliceLayout(0, L))
    o_t = o_i % C
    is_key = recomputed(o_i) < C
    b_S = gl.zeros([2 * C, C], gl.float32, L)
    for p in gl.static_range(P):
        kr = KR.index(slot * W * P + p)
        b_S = warpgroup_mma(keys.index(slot * P + p), kr.permute((1, 0)), b_S, use_acc=p > 0, is_async=True)
    b_beta = b_raw.to(gl.float32)
    if USE_SIGMOID:
        b_beta = gl.where(is_key & (o_i < tokens), beta_scale / (1.0 + gl.exp2(b_beta * -LOG2E)), 0.0)
    b_self = s.square.index(slot * 2).load(row)  # |k|^2, then q . k
    if USE_L2NORM:
        b_square = gl.where(is_key, b_self, s.square.index(slot * 2 + 1).load(row))
        b_norm = gl.rsqrt(b_square + L2NORM_EPS)
    else:
        b_norm = gl.full([2 * C], 1.0, gl.float32, row)
        scale = recomputed(scale.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    s.norm.index(slot).store(gl.where(is_key, b_norm, b_norm * scale))  # not a factor by row, which would be kept
    s.bnorm.index(slot).store(b_norm * b_beta)
    b_row = gl.where(is_key, b_norm * b_norm * b_beta, 1.0)
    b_S = warpgroup_mma_wait(0, [b_S])
    b_S = gl.where(o_t[:, None] > o_j[None, :], b_S * b_row[:, None], 0.0)
    b_S = gl.where((o_t[:, None] == o_j[None, :]) & (~is_key)[:, None], b_self[:, None], b_S)
    s.scores.index(slot).store(gl.where(is_key[:, None], 0.0, b_S).to(gl.bfloat16))
    split(s, slot, b_S, o_t, o_j, TERMS)


@gluon.jit
def score(
    s, p_beta, s_beta_t, bos, eos, scale, beta_scale, K: gl.constexpr, SLOTS: gl.constexpr, TERMS: gl.constexpr,
    USE_L2NORM: gl.constexpr, USE_SIGMOID: gl.constexpr,
):  # fmt: skip
    """The scores of all chunks, in order."""
    # what lies beside the diagonal blocks stays zero
    s.YT.store(gl.zeros([2, 16, 16], gl.float32, gl.BlockedLayout([1, 1, 4], [1, 8, 4], [2, 2, 1], [2, 1, 0])))
    if TERMS == 2:
        for i in gl.static_range(SLOTS):
            s.low.index(i).store(gl.zeros([C, C], gl.bfloat16, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])))
    t0 = bos
    b_beta = load_beta(p_beta, s_beta_t, t0, eos)
    slot = 0
    factored = 0
    while t0 < eos:
        factored = wait(s.factored, slot, factored)
        score_chunk(s, slot, eos - t0, b_beta, scale, beta_scale, K, SLOTS, TERMS, USE_L2NORM, USE_SIGMOID)
        # for the next, now that the scores take no registers any more
        more = window_of(s, slot, 4) & MORE
        t0 = gl.where(more == 0, t0 + C, t0)
        b_beta = load_beta(p_beta, s_beta_t, t0, eos)
        solve(s, slot, TERMS)
        fence_async_shared()
        commit(s.ready, slot)
        slot = gl.where(more == 0, next_slot(slot, 1, SLOTS), slot)


@gluon.jit
def split(s, slot, b_A, o_t, o_j, TERMS: gl.constexpr):
    """Store the parts of A [2 C, C]: for `solve` D, its 8x8 diagonal blocks by columns, and N, the blocks left of them;
    for state A21, the 16x16 block left of the second diagonal one. What lies where A has queries or nothing goes along;
    nobody reads it."""
    i8 = (o_t // 8)[:, None]
    j8 = (o_j // 8)[None, :]
    b_D = gl.sum(gl.where(i8 == j8, b_A, 0.0).reshape([2 * C, 4, 8]), axis=1)
    b_N = gl.sum(gl.where(i8 == (j8 ^ 1), b_A, 0.0).reshape([2 * C, 4, 8]), axis=1)
    b_A21 = gl.sum(gl.where(i8 // 2 != j8 // 2, b_A, 0.0).reshape([2 * C, 2, 16]), axis=1)
    blocks = s.D._reinterpret(gl.float32, [8, 8, 8], CUBE)
    blocks.permute((1, 2, 0)).store(b_D.reshape([8, 8, 8]))
    left = s.N._reinterpret(gl.float32, [2, 4, 8, 8], ROWS8_4D)
    left.permute((1, 0, 2, 3)).store(b_N.reshape([4, 2, 8, 8]))
    store_terms(s.A21.index(slot), s.A21_low.index(slot if TERMS == 2 else 0), b_A21, TERMS)


@gluon.jit
def element(x, j: gl.constexpr):
    """x[:, :, j] of a tensor [4, 8, 8] whose threads own whole rows of 8: no instruction."""
    for bit in gl.static_range(3):
        even, odd = gl.split(x.reshape([4, 8, 4 >> bit, 2]))
        if (j >> bit) & 1:
            x = odd
        else:
            x = even
    return x.reshape([4, 8])


@gluon.jit
def product8(left, right):
    """left @ right for pairs of 8x8 matrices in shared memory, left by rows [2, i, k], right by columns [2, c, k]."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 4, 8, 1], [2, 2, 1, 1], [3, 2, 1, 0])
    b_l = left.load(gl.SliceLayout(2, L))[:, :, None, :]
    b_r = right.load(gl.SliceLayout(1, L))[:, None, :, :]
    return gl.sum(b_l * b_r, axis=3)


@gluon.jit
def store_terms(high, low, b_x, TERMS: gl.constexpr):
    """b_x in bf16, and what that leaves in another bf16."""
    b_high = b_x.to(gl.bfloat16)
    high.store(b_high)
    if TERMS == 2:
        low.store((b_x - b_high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def solve(s, slot, TERMS: gl.constexpr):
    """Of Y = (I + A)^-1 both 16x16 diagonal blocks: their 8x8 blocks by forward substitution, the one left of a second
    diagonal one as minus that times (A's there times the first), all in fp32. Below their diagonals they are Tm^T, its
    rows times beta |k|^-1, and the second one as it is Y22."""
    L8: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [1, 1, 4], [2, 1, 0])
    o_c = recomputed(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L8))))[None, :, None]
    o_r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L8)))[None, None, :]
    b_Y = gl.where(o_r == o_c, 1.0, gl.zeros([4, 8, 8], gl.float32, L8))
    for j in gl.static_range(7):
        b_a = s.D.index(j).slice(0, 4).load(gl.SliceLayout(1, L8))[:, None, :]
        b_y = gl.convert_layout(element(b_Y, j), gl.SliceLayout(2, L8))[:, :, None]
        b_Y = gl.where(o_r > j, b_Y - b_a * b_y, b_Y)
    b_Y = b_Y.reshape([2, 2, 8, 8])  # [pair, which of it, column, row]
    s.columns._reinterpret(gl.float32, [2, 2, 8, 8], ROWS8_4D).permute((1, 0, 2, 3)).store(b_Y)
    s.rows._reinterpret(gl.float32, [2, 2, 8, 8], ROWS8_4D).permute((1, 0, 3, 2)).store(b_Y)

    L3: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 4, 8], [2, 2, 1], [2, 1, 0])
    for h in gl.static_range(2):
        s.YT.slice(h * 8, 8, dim=1).slice(h * 8, 8, dim=2).store(s.columns.index(h).load(L3))
    s.Z8.permute((0, 2, 1)).store(product8(s.N.index(1).slice(0, 2), s.columns.index(0)))
    b_Y21 = -product8(s.rows.index(1), s.Z8)
    s.YT.slice(0, 8, dim=1).slice(8, 8, dim=2).permute((0, 2, 1)).store(b_Y21)

    by_columns = s.YT._reinterpret(gl.float32, [2, 16, 16], ROWS16)
    Tm = s.scores.index(slot).slice(0, C)
    low = s.low.index(slot if TERMS == 2 else 0)
    L: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    below = gl.arange(0, 16, gl.SliceLayout(0, L))[None, :] > gl.arange(0, 16, gl.SliceLayout(1, L))[:, None]
    for p in gl.static_range(2):
        b_n = s.bnorm.index(slot).slice(p * 16, 16).load(gl.SliceLayout(1, L))[:, None]
        b_Y = gl.where(below, by_columns.index(p).load(L), 0.0)
        store_terms(Tm.slice(p * 16, 16).slice(p * 16, 16, dim=1), low.slice(p * 16, 16).slice(p * 16, 16, dim=1),
                    b_Y * b_n, TERMS)  # fmt: skip
    store_terms(s.Y22.index(slot).permute((1, 0)), s.Y22_low.index(slot if TERMS == 2 else 0).permute((1, 0)), b_Y,
                TERMS)  # fmt: skip
