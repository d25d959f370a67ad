"""Role `factor`: a chunk's gates, and its keys and queries times the decay from the middle of the chunk."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kda2.backends.gluon import barrier, commit, wait, wait_turn
from kda2.ops.kda.hopper.measure import (
    EACH,
    HUGE,
    LARGE,
    SEEN,
    SEEN_BY_LESS,
    at_first,
    clear_rows,
    largest_each,
    limits_of_rows,
    measure,
    remember,
)
from kda2.ops.kda.hopper.slots import (
    LOG2E,
    MATRIX,
    MORE,
    PANEL,
    TILES,
    VECTOR,
    WHOLE,
    C,
    along,
    gate_rows,
    load,
    load_first,
    recomputed,
    set_window,
    tile,
)

# Of a base-2 log decay between the anchor of a chunk and its ends: what fp32 and bf16 factors hold (a gate bounded by
# -5 stays below it), what they hold where rows, values or the state are large, and where they are huge.
LIMIT = gl.constexpr(116.0)
LESS = gl.constexpr(104.0)
SAFE = gl.constexpr(60.0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def last_of(a, b):
    return b


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def as_factor(b_x):
    """An fp32 factor as `times` takes it."""
    return b_x.to(gl.bfloat16)


@gluon.jit
def times(b_x, b_factor):
    """x times a factor, in bf16; bf16 operands two an instruction."""
    if b_x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [b_x, b_factor], gl.bfloat16, True, 2)
    else:
        return (b_x.to(gl.float32) * b_factor.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def load_gates(gates, K: gl.constexpr):
    """The gate's input of a chunk in the layout `tile`, fp32. Rows of 128 bytes hold 64 channels of 16 bits or 32."""
    L: gl.constexpr = tile(K)
    if gates.dtype.primitive_bitwidth == 16:
        return gates.load(L).to(gl.float32)
    else:
        b_g = gates.load(wide_tile(K)).reshape([K // PANEL, 2, 2, 16, 32]).permute((0, 2, 3, 1, 4))
        return gl.convert_layout(b_g.reshape([K // PANEL, 2, 16, PANEL]), L)


@gluon.constexpr_function
def wide_tile(K):
    """[panels of 32 channels, halves, 16 tokens, channels] of an fp32 gate."""
    if K == 128:
        return gl.BlockedLayout([1, 1, 16, 2], [2, 1, 1, 16], [2, 2, 1, 1], [3, 2, 1, 0])
    return gl.BlockedLayout([1, 1, 16, 1], [1, 1, 1, 32], [2, 2, 1, 1], [3, 2, 1, 0])


@gluon.jit
def fast_log2(x):
    """log2 of a normal positive number, one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def log2_decay(b_g, a, b_bias, lower_bound, GATE: gl.constexpr):
    """Base-2 log decay of the gate's input. `a` is exp(A_log)."""
    if GATE == "log":
        return b_g * LOG2E
    elif GATE == "softplus":
        b_x = b_g * LOG2E + b_bias
        b_e = gl.exp2(-gl.abs(b_x))
        # log(1 + e) loses small e; its series does not
        b_log1p = gl.where(b_e < 1e-3, b_e * (LOG2E - 0.5 * LOG2E * b_e), fast_log2(1.0 + b_e))
        return (gl.maximum(b_x, 0.0) + b_log1p) * -a
    else:
        b_root = gl.rsqrt(1.0 + gl.exp2(b_g * (a * -LOG2E) + b_bias))  # its square is the sigmoid, without a division
        return b_root * b_root * (lower_bound * LOG2E)


@gluon.jit
def load_head(p_A_log, p_dt_bias, s_dt_d, GATE: gl.constexpr, HAS_BIAS: gl.constexpr, K: gl.constexpr):
    """exp(A_log), and dt_bias as `log2_decay` adds it [panels, 1, 1, channels]."""
    L: gl.constexpr = tile(K)
    o_p = gl.arange(0, K // PANEL, along(L, 0))[:, None, None, None]
    o_c = gl.arange(0, PANEL, along(L, 3))[None, None, None, :]
    a = 1.0
    if GATE != "log":
        a = gl.maximum(gl.exp2(gl.load(p_A_log) * LOG2E), 1e-30)  # times -inf it is no NaN
    if HAS_BIAS:
        b_bias = gl.load(p_dt_bias + (o_p * PANEL + o_c) * s_dt_d)
    else:
        b_bias = gl.zeros([K // PANEL, 1, 1, PANEL], gl.float32, L)
    return a, b_bias * (LOG2E if GATE == "softplus" else a * -LOG2E)


@gluon.jit
def store_decays(s, slot, b_before, b_after, K: gl.constexpr):
    """exp of both log decays [panels, halves, channels], each summed over the halves."""
    each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    by_half = s.decays.index(slot).permute((1, 0, 2))
    decays = s.decays._reinterpret(gl.float32, [s.decays.shape[0] * 2, K], VECTOR)
    first = decays.index(slot * 2)
    second = decays.index(slot * 2 + 1)
    by_half.store(b_before)
    b_before = first.load(each) + second.load(each)
    by_half.store(b_after)
    b_after = first.load(each) + second.load(each)
    first.store(gl.exp2(b_before))
    second.store(gl.exp2(b_after))


@gluon.jit
def any_bits(s, b_bits, WHICH: gl.constexpr):
    """The bits of all threads of a role of 4 warps, which has one number each [128]."""
    by_warp = s.bits.index(WHICH)
    by_warp.store(gl.reduce(b_bits.reshape([4, 32]), 1, either))
    return gl.reduce(by_warp.load(gl.BlockedLayout([4], [32], [4], [0])), 0, either)


@gluon.jit
def how_far(b_tot):
    """Bits: 1, 2 and 4 where the log decay between the anchor and an end of the chunk leaves SAFE, LESS and LIMIT
    [128]."""
    b_far = largest_each(-b_tot)
    return gl.where(b_far > SAFE, 1, 0) + gl.where(b_far > LESS, 2, 0) + gl.where(b_far > LIMIT, 4, 0)


@gluon.jit
def too_far(found):
    """Whether factors cannot hold what was found, bits of `how_far` and of sizes."""
    limit = limit_of(found)
    return found & gl.where(limit == SAFE, 7, gl.where(limit == LESS, 6, 4)) != 0


@gluon.jit
def limit_of(found):
    safe = (found & HUGE != 0) | (found & SEEN_BY_LESS == 0)
    less = (found & LARGE != 0) | (found & SEEN == 0)
    return gl.where(safe, SAFE, gl.where(less, LESS, LIMIT))


@gluon.jit
def odd_rows(s, slot, SLOTS: gl.constexpr, USE_L2NORM: gl.constexpr):
    """LARGE and HUGE where rows of k and q are, or so small, from the squares of their norms [128]."""
    squares = s.square._reinterpret(gl.float32, [SLOTS, 4 * C], VECTOR).index(slot)
    b_square = squares.load(EACH)  # of keys, twice q . k, of queries
    o_i = recomputed(gl.arange(0, 4 * C, EACH))
    is_norm = ((o_i < C) | (o_i >= 3 * C)) & (b_square > 0.0)  # zeros may well stay zeros
    limits: gl.constexpr = limits_of_rows(USE_L2NORM)
    of_queries: gl.constexpr = limits_of_rows(True)
    b_limit = gl.where(o_i < C, limits[2], of_queries[2])
    b_large = gl.where(is_norm & ((b_square > b_limit) | (b_square < limits[1])), LARGE, 0)
    b_limit = gl.where(o_i < C, limits[3], of_queries[3])
    return b_large + gl.where(is_norm & ((b_square > b_limit) | (b_square < limits[0])), HUGE, 0)


@gluon.jit
def window_size(s, b_g, o_t, limit, WHICH: gl.constexpr):
    """The largest size, a power of two, of which all windows stay within a limit either side of their middle. A
    window's first token decays the state alone."""
    beyond = gl.zeros([128], gl.int32, EACH)  # a bit for each size: one exchange between warps for all
    for bit in gl.static_range(4):
        # sums from the middle on, and before it, in windows of 2 << bit tokens
        b_in = gl.where(o_t % (2 << bit) == 0, 0.0, b_g)
        b_side = gl.abs(gl.sum(b_in.reshape([b_g.shape[0], 2, 16 >> bit, 1 << bit, PANEL]), axis=3))
        beyond |= gl.where(largest_each(gl.max(b_side, axis=2)) > limit, 1 << bit, 0)
    found = any_bits(s, beyond, WHICH)
    size = 1
    for bit in gl.static_range(4):
        size = gl.where(found & (1 << bit) == 0, 2 << bit, size)
    return size


@gluon.jit
def tiles_of(s, slot, K: gl.constexpr, SLOTS: gl.constexpr):
    """A slot's keys, queries and gates as they came, and KL, QL and KR in their places, as `tile` describes them."""
    P: gl.constexpr = K // PANEL
    W: gl.constexpr = s.g.dtype.primitive_bitwidth // 16  # rows of 128 bytes of g for each of KR, which fills the first
    kq = s.kq._reinterpret(s.kq.dtype, [SLOTS, P, 4, 16, PANEL], TILES).index(slot)
    factors = s.kq._reinterpret(gl.bfloat16, [SLOTS, P, 4, 16, PANEL], TILES).index(slot)
    gates = s.g._reinterpret(s.g.dtype, [SLOTS, P * W, 2, 16, PANEL // W], gate_rows(W * 16)[1]).index(slot)
    KR = s.g._reinterpret(gl.bfloat16, [SLOTS * W, P, 2, 16, PANEL], TILES).index(slot * W)
    KL = factors.slice(0, 2, dim=1)
    QL = factors.slice(2, 2, dim=1)
    return kq.slice(0, 2, dim=1), kq.slice(2, 2, dim=1), gates, KL, QL, KR


@gluon.constexpr_function
def gate_tile(s, K):
    """The layout of the gates' input."""
    return wide_tile(K) if s.g.dtype.primitive_bitwidth == 32 else tile(K)


@gluon.jit
def factor_chunk(s, n, tokens, b_large, a, b_bias, lower_bound, WHICH: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
                 SLOTS: gl.constexpr, FACTORS: gl.constexpr, GATE: gl.constexpr, USE_L2NORM: gl.constexpr):  # fmt: skip
    """Factors, decays and squares of chunk n with so many tokens. Returns what was found: where it is `too_far`, the
    factors do not hold what they should; and `b_large` with the bits of this chunk's values."""
    slot = n % SLOTS
    P: gl.constexpr = K // PANEL
    L: gl.constexpr = tile(K)
    keys, queries, gates, KL, QL, KR = tiles_of(s, slot, K, SLOTS)
    if tokens < C:
        clear_rows(gates, tokens, 0.0 if GATE == "log" else float("-inf"), gate_tile(s, K))  # no decay
    channels: gl.constexpr = gl.SliceLayout(2, L)
    o_side = gl.arange(0, 2, along(channels, 1))[None, :, None]
    b_now = measure(s, slot, tokens, K, V, SLOTS, USE_L2NORM)
    b_large = remember(s, n, b_now, b_large, SLOTS, FACTORS)
    slot = recomputed(slot)
    keys, queries, gates, KL, QL, KR = tiles_of(s, slot, K, SLOTS)
    b_sum = gl.associative_scan(log2_decay(load_gates(gates, K), a, b_bias, lower_bound, GATE), 2, add)
    b_tot = gl.reduce(b_sum, 2, last_of)
    b_E = b_sum - gl.where(o_side == 0, b_tot, 0.0)[:, :, None, :]
    b_rows = odd_rows(s, slot, SLOTS, USE_L2NORM)
    found = any_bits(s, how_far(b_tot) | b_large | b_rows, WHICH)
    if too_far(found):
        # an anchor off the middle, where the decay is half of the chunk's, may do
        s.decays.index(slot).permute((1, 0, 2)).store(b_tot)
        by_half = s.decays.index(slot)._reinterpret(gl.float32, [2, P, PANEL], MATRIX)
        b_first = by_half.index(0).load(gl.SliceLayout(1, channels))[:, None, :]
        b_second = by_half.index(1).load(gl.SliceLayout(1, channels))[:, None, :]
        b_tot = gl.zeros_like(b_tot) + 0.5 * (b_first + b_second)
        b_E += (b_first - b_tot)[:, :, None, :]
        found = any_bits(s, how_far(b_tot) | b_large | b_rows, WHICH)
    s.decays.index(slot).permute((1, 0, 2)).store(gl.exp2(b_tot))
    # in place of b_E before k and q come: fewer registers
    b_R = as_factor(gl.exp2(-b_E))
    b_L = as_factor(gl.exp2(b_E))
    b_k = keys.load(L)
    KR.store(times(b_k, b_R))
    b_q = queries.load(L)
    KL.store(times(b_k, b_L))
    QL.store(times(b_q, b_L))
    return found, b_large


@gluon.jit
def factor_window(s, slot, tokens, first, size, a, b_bias, lower_bound, WHICH: gl.constexpr, K: gl.constexpr,
                  SLOTS: gl.constexpr, GATE: gl.constexpr):  # fmt: skip
    """Factors and decays of a window of a slot, from token `first` on, and how many tokens it has: of a size < 0,
    as many as the limit -size allows. Other rows become 0."""
    L: gl.constexpr = tile(K)
    keys, queries, gates, KL, QL, KR = tiles_of(s, slot, K, SLOTS)
    o_t = gl.arange(0, 16, along(L, 2))[None, None, :, None]
    o_half = recomputed(gl.arange(0, 2, along(L, 1)))[None, :, None, None] * 16
    if tokens < C:
        clear_rows(gates, tokens, 0.0 if GATE == "log" else float("-inf"), gate_tile(s, K))
    b_g = log2_decay(load_gates(gates, K), a, b_bias, lower_bound, GATE)
    if size < 0:
        size = window_size(s, b_g, o_t, (-size).to(gl.float32), WHICH)
    at = first - o_half  # in each half: o_t, unlike o_half + o_t, takes no registers
    # the first token's decay is the state's alone
    b_first = gl.sum(gl.where(o_t == at, b_g, 0.0), axis=2)
    b_E = gl.associative_scan(gl.where((o_t > at) & (o_t < at + size), b_g, 0.0), 2, add)
    b_middle = gl.sum(gl.where(o_t == at + (size - 1) // 2, b_E, 0.0), axis=2)
    store_decays(s, slot, b_first + b_middle, gl.reduce(b_E, 2, last_of) - b_middle, K)
    b_E = gl.where((o_t >= at) & (o_t < at + size), b_E - b_middle[:, :, None, :], 0.0)
    inside = (o_t >= recomputed(at)) & (o_t < gl.minimum(at + size, tokens - o_half))
    b_k = keys.load(L)
    b_k = gl.where(inside, b_k, gl.zeros_like(b_k))
    KR.store(times(b_k, as_factor(gl.exp2(-b_E))))
    b_L = as_factor(gl.exp2(b_E))
    KL.store(times(b_k, b_L))
    b_q = queries.load(L)
    QL.store(times(gl.where(inside, b_q, gl.zeros_like(b_q)), b_L))
    return size


@gluon.jit
def factor(
    s, source, p_A_log, p_dt_bias, s_dt_d, p_first, s_first_k, s_first_v, bos, eos, lower_bound,
    WHICH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr, FACTORS: gl.constexpr,
    GATE: gl.constexpr, HAS_BIAS: gl.constexpr, USE_L2NORM: gl.constexpr, HAS_FIRST: gl.constexpr,
    KEYS_FIRST: gl.constexpr,
):  # fmt: skip
    """With E_t the log decay between the middle of a chunk and token t: KL = k exp(E), QL = q exp(E), KR = k exp(-E).

    KL_i . KR_j is then k_i . k_j decayed from j to i, and a state decayed to the middle is all that state needs. Where
    E would leave the range of fp32, the chunk goes through the ring in windows: the same slot, again and again, with
    the rows outside a window zero. Chunks = WHICH modulo FACTORS are this one's. Two such roles wait more than state
    does, and load what all roles read.
    """
    if FACTORS == 2:
        load_first(s, source, bos, eos, WHICH, K, V, SLOTS, 2)
    a, b_bias = load_head(p_A_log, p_dt_bias, s_dt_d, GATE, HAS_BIAS, K)
    chunks = (eos - bos + C - 1) // C
    b_large = at_first(p_first, s_first_k, s_first_v, K, V, HAS_FIRST, KEYS_FIRST, USE_L2NORM)
    heard = 0  # parities of `again`, and of `reloaded` << FACTORS
    for n in range(WHICH, chunks, FACTORS):
        slot = n % SLOTS
        t0 = bos + n * C
        tokens = eos - t0
        wait_turn(s.full, slot, n // SLOTS)
        found, b_large = factor_chunk(s, n, tokens, b_large, a, b_bias, lower_bound, WHICH, K, V, SLOTS, FACTORS, GATE,
                                      USE_L2NORM)  # fmt: skip
        if not too_far(found):
            set_window(s, slot, WHOLE)
        else:
            size = -limit_of(found).to(gl.int32)  # not known yet
            end = gl.minimum(tokens, C)
            first = 0
            while first < end:
                fence_async_shared()
                barrier()
                slot = recomputed(slot)  # no addresses of windows kept over the chunks
                load(s, source, slot, s.reloaded.index(WHICH), t0, K, 0, SLOTS)
                wait_turn(s.reloaded, WHICH, heard >> FACTORS)
                heard ^= 1 << FACTORS
                size = factor_window(s, slot, tokens, first, size, a, b_bias, lower_bound, WHICH, K, SLOTS,
                                     GATE)  # fmt: skip
                set_window(s, slot, first + (size << 8) + gl.where(first + size < end, MORE, 0))
                first += size
                if first < end:
                    fence_async_shared()
                    commit(s.factored, slot)
                    heard = wait(s.again, WHICH, heard)
        fence_async_shared()
        commit(s.factored, slot)
        # state is soon done with the chunk before the last, if it is not yet
        old = n - FACTORS
        new = old + SLOTS
        if FACTORS == 2 and old >= 0 and new < chunks:
            wait_turn(s.free, old % SLOTS, old // SLOTS)
            load(s, source, old % SLOTS, s.full.index(old % SLOTS), bos + new * C, K, V, SLOTS)
