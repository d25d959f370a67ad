"""Device functions that the stages share: which chunk a program owns, the gate, exact products of decayed factors.

Logs are base 2 inside kernels. A chunk is a *slot*: dense batches number the chunks of sequence n from n * NT, packed
ones from cu_seqlens[n] // BT + n, which leaves room for each sequence's partial chunk without a prefix sum over the
batch, so nothing is read on the host. Constants stand to the right of tensors: the interpreter wants it so.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Below this a base-2 log decay is a reset: its exponential is 0 in fp32, and sums of it are exact in bf16 terms.
RESET = tl.constexpr(-256.0)
L2NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def sequence_bounds(p_cu, i_n, N, T, IS_PACKED: tl.constexpr):
    """First token and end of a sequence, clamped to [0, T] whatever cu_seqlens holds."""
    if IS_PACKED:
        bos = tl.minimum(tl.maximum(tl.load(p_cu + i_n).to(tl.int64), 0), T)
        eos = T
        if i_n < N:
            eos = tl.minimum(tl.maximum(tl.load(p_cu + i_n + 1).to(tl.int64), bos), T)
        return bos, eos
    else:
        return i_n.to(tl.int64) * 0, i_n.to(tl.int64) * 0 + T


@triton.jit
def sequence_of_slot(p_cu, i_slot, N, T, BT: tl.constexpr, IS_PACKED: tl.constexpr):
    """(sequence, its first token, its end, its first slot) of a slot. Sequence N stands for what no sequence owns."""
    if IS_PACKED:
        low = i_slot * 0
        high = low + N
        while low < high:  # the last n in [0, N] whose first slot is not past i_slot
            middle = (low + high + 1) // 2
            start = tl.minimum(tl.maximum(tl.load(p_cu + middle).to(tl.int64), 0), T)
            if start // BT + middle <= i_slot:
                low = middle
            else:
                high = middle - 1
        i_n = low
        bos, eos = sequence_bounds(p_cu, i_n, N, T, IS_PACKED)
        return i_n, bos, eos, bos // BT + i_n
    else:
        NT = tl.cdiv(T, BT)
        i_n = i_slot // NT
        return i_n, i_n * 0, i_n * 0 + T, i_n * NT


@triton.jit
def aligned(offset, ALIGN: tl.constexpr):
    """`offset`, which is a multiple of ALIGN, in a form that shows it: a hint would be lost where the sum is folded."""
    return offset // ALIGN * ALIGN


@triton.jit
def inverse_norms(p_x, o_t, m_t, s_t, s_d, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) of each row [BT]."""
    b_square = tl.zeros([BT], tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_x = load_rows(p_x, o_t, m_t, i_k, s_t, s_d, K, BK)
        b_square += tl.sum(b_x * b_x, 1)
    return tl.rsqrt(b_square + L2NORM_EPS)


@triton.jit
def load_rows(p_x, o_t, m_t, i_k, s_t, s_d, K: tl.constexpr, BK: tl.constexpr):
    """Channels [i_k * BK, (i_k + 1) * BK) of the rows o_t, in fp32; 0 outside."""
    o_k = i_k * BK + tl.arange(0, BK)
    m_tk = m_t[:, None] & ((o_k < K) | (K % BK == 0))[None, :]
    return tl.load(p_x + o_t[:, None] * s_t + o_k[None, :] * s_d, mask=m_tk, other=0.0).to(tl.float32)


@triton.jit
def log2_decay(b_g, a, b_bias, lower_bound, GATE: tl.constexpr):
    """Base-2 log decay of the gate's input, fp32. `a` is exp(A_log)."""
    if GATE == "log":
        b_g = b_g * LOG2E
    else:
        b_g = b_g + b_bias
        if GATE == "softplus":
            e = tl.exp2(tl.abs(b_g) * -LOG2E)
            # log(1 + e) loses small e; its series does not
            b_log1p = tl.where(e < 1e-3, e * (1.0 - 0.5 * e), tl.log(1.0 + e))
            b_g = (tl.where(b_g > 0, b_g, 0.0) + b_log1p) * (a * -LOG2E)
        else:
            b_root = tl.rsqrt(1.0 + tl.exp2(b_g * (a * -LOG2E)))  # its square is the sigmoid, without a division
            b_g = (b_root * b_root) * (lower_bound * LOG2E)
    # a comparison, not a maximum: NaN must stay NaN
    return tl.where(b_g < RESET, RESET, b_g)


@triton.jit
def load_log2_decay(
    p_g, p_dt_bias, o_t, m_t, i_k, a, lower_bound, s_g_t, s_g_d, s_dt_d,
    K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Base-2 log decay of a tile of channels; 0 outside."""
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = (o_k < K) | (K % BK == 0)
    b_bias = tl.zeros([1, BK], tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_dt_bias + o_k * s_dt_d, mask=m_k, other=0.0)[None, :]
    b_g = log2_decay(load_rows(p_g, o_t, m_t, i_k, s_g_t, s_g_d, K, BK), a, b_bias, lower_bound, GATE)
    return tl.where(m_t[:, None] & m_k[None, :], b_g, 0.0)


@triton.jit
def two_terms(b_x):
    """fp32 as a sum of two bf16 terms, to 2^-17."""
    b_high = b_x.to(tl.bfloat16)
    return b_high, (b_x - b_high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def sum_tokens(m_plus, m_minus, b_g, PRECISION: tl.constexpr):
    """For each row i, the log decays of the tokens j that m_plus [BT, BT] selects, less those of m_minus: [BT, BK].

    As a matrix product: exact weights, and g in two bf16 terms (or three tf32 ones), so the error is 2^-17 of the
    largest log decay summed (2^-21)."""
    dtype: tl.constexpr = tl.bfloat16 if PRECISION == "bf16" else tl.float32
    b_one = tl.full(m_plus.shape, 1.0, dtype)
    b_weight = tl.where(m_plus, b_one, tl.where(m_minus, -b_one, tl.zeros(m_plus.shape, dtype)))
    if PRECISION == "bf16":
        b_high, b_low = two_terms(b_g)
        return tl.dot(b_weight, b_low, tl.dot(b_weight, b_high))
    else:
        return tl.dot(b_weight, b_g, input_precision="tf32x3")


@triton.jit
def product(b_a, b_b, b_acc, PRECISION: tl.constexpr):
    """b_acc + b_a @ b_b on matrix operands of the workspace's dtype."""
    if PRECISION == "bf16":
        return tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16), b_acc)
    else:
        return tl.dot(b_a, b_b, b_acc, input_precision="tf32x3")


@triton.jit
def product_fp32(b_a, b_b, PRECISION: tl.constexpr):
    """b_a @ b_b of fp32 tiles to 2^-16 (three products of two bf16 terms) or 2^-21 (three tf32 ones)."""
    if PRECISION == "bf16":
        b_a1, b_a2 = two_terms(b_a)
        b_b1, b_b2 = two_terms(b_b)
        return tl.dot(b_a1, b_b1, tl.dot(b_a1, b_b2, tl.dot(b_a2, b_b1)))
    else:
        return tl.dot(b_a, b_b, input_precision="tf32x3")


@triton.jit
def across_cut(o_i, o_j, HALF: tl.constexpr):
    """Mask: row o_i and column o_j lie in one block of 2 * HALF tokens, on the right and the left of its middle."""
    return (o_i // (2 * HALF) == o_j // (2 * HALF)) & (o_i % (2 * HALF) >= HALF) & (o_j % (2 * HALF) < HALF)


@triton.jit
def add_decayed_scores(b_x, b_k, b_g, b_scores, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile of channels' share of x_i . (k_j exp(g_{j+1} + ... + g_i)) for j < i.

    The chunk is halved again and again: across each cut both factors decay towards it, so neither exceeds its row of
    x or k. Blocks of BC tokens are not cut further: their factors are anchored at the block's middle and reach
    exp(BC / 2 bounded log decays), which asks for a bounded gate.
    """
    if BC > 1:
        b_scores = _add_in_blocks(b_x, b_k, b_g, b_scores, BT, BC, PRECISION)
    for i_level in tl.static_range(0, 6):
        if ((1 << i_level) >= BC) and ((1 << i_level) < BT):
            b_scores = _add_across_cut(b_x, b_k, b_g, b_scores, 1 << i_level, BT, PRECISION)
    return b_scores


@triton.jit
def _add_across_cut(b_x, b_k, b_g, b_scores, HALF: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Add the scores of rows right of the middle of their block of 2 * HALF tokens with columns left of it."""
    o_i = tl.arange(0, BT)
    cut = o_i // (2 * HALF) * (2 * HALF) + HALF
    right = (o_i >= cut)[:, None]
    to_cut = right & (o_i[None, :] >= cut[:, None]) & (o_i[None, :] <= o_i[:, None])
    from_cut = (o_i[None, :] > o_i[:, None]) & (o_i[None, :] < cut[:, None])
    b_decay = tl.exp2(sum_tokens(to_cut | from_cut, to_cut & from_cut, b_g, PRECISION))
    b_left = tl.trans(tl.where(right, 0.0, b_k * b_decay))
    b_right = tl.where(right, b_x * b_decay, 0.0)
    if 2 * HALF == BT:  # every product lies across the one cut, or is 0
        return product(b_right, b_left, b_scores, PRECISION)
    else:
        b_product = product(b_right, b_left, tl.zeros([BT, BT], tl.float32), PRECISION)
        return b_scores + tl.where(across_cut(o_i[:, None], o_i[None, :], HALF), b_product, 0.0)


@triton.jit
def _add_in_blocks(b_x, b_k, b_g, b_scores, BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr):
    """Add the scores below the diagonal inside blocks of BC tokens."""
    o_i = tl.arange(0, BT)
    middle = o_i // BC * BC + (BC // 2 - 1)
    after = (o_i[None, :] > middle[:, None]) & (o_i[None, :] <= o_i[:, None])
    before = (o_i[None, :] > o_i[:, None]) & (o_i[None, :] <= middle[:, None])
    b_s = sum_tokens(after, before, b_g, PRECISION)
    b_product = product(b_x * tl.exp2(b_s), tl.trans(b_k * tl.exp2(-b_s)), tl.zeros([BT, BT], tl.float32), PRECISION)
    # selected after the product: outside the block and above the diagonal it may overflow
    m_block = (o_i[:, None] // BC == o_i[None, :] // BC) & (o_i[:, None] > o_i[None, :])
    return b_scores + tl.where(m_block, b_product, 0.0)


@triton.jit
def unit_lower_inverse(b_A, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower A [BT, BT] in fp32, merging blocks of 1, 2, 4, ... tokens:
    the inverse of [[P, 0], [R, Q]] is [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]]. As stable as forward substitution.
    Up to 16 tokens the diagonal blocks are merged on their own, as a batch [BT / 16, 16, 16]."""
    NB: tl.constexpr = BT // 16
    o_n = tl.arange(0, NB)
    o_c = tl.arange(0, 16)
    m_diagonal = o_n[:, None, None, None] == o_n[None, None, :, None]
    b_D = tl.sum(tl.where(m_diagonal, tl.reshape(b_A, [NB, 16, NB, 16]), 0.0), 2)
    m_one = (o_c[:, None] == o_c[None, :])[None, :, :]
    b_T = tl.where(m_one, 1.0, 0.0) - tl.where(across_cut(o_c[None, :, None], o_c[None, None, :], 1), b_D, 0.0)
    for i_level in tl.static_range(1, 4):
        b_R = tl.where(across_cut(o_c[None, :, None], o_c[None, None, :], 1 << i_level), b_D, 0.0)
        b_T -= product_fp32(product_fp32(b_T, b_R, PRECISION), b_T, PRECISION)
    b_T = tl.reshape(tl.where(m_diagonal, b_T[:, :, None, :], 0.0), [BT, BT])
    o_i = tl.arange(0, BT)
    for i_level in tl.static_range(4, 6):
        if (1 << i_level) < BT:
            b_R = tl.where(across_cut(o_i[:, None], o_i[None, :], 1 << i_level), b_A, 0.0)
            b_T -= product_fp32(product_fp32(b_T, b_R, PRECISION), b_T, PRECISION)
    return b_T
