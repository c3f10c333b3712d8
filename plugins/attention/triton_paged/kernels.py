"""Paged attention kernels: cache write, work items, prefill, split-KV decode, merge.

Formula, per query row i and head h (KV head h // G), keys j of the row's own request:

    s_ij = scale * q_i . k_j ; softcap c: s -> c * tanh(s / c)
    visible: j <= i, and j > i - WINDOW when WINDOW > 0
    o_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink_h)) ; lse_i = log of the denominator

| tensor | shape | dtype | layout | in/out |
|---|---|---|---|---|
| q, out | [T, H, D], [T, H, Dv] | 16 or 32 bit float | strides given, rows contiguous | in, out |
| k, v (new rows) | [T, K, D], [T, K, Dv] | as q | strides given, rows contiguous | in |
| k cache, v cache | [N, K, S, D], [N, K, S, Dv] | as q | any block stride (a pool view) | in/out |
| block_table | [R, max_blocks] | int32 | row stride given | in |
| slot_mapping | [T] | int64 | block * S + offset; -1 = skip | in |
| query_start_loc, seq_lens | [R + 1], [R] | int32 | contiguous | in |
| items | [W, 8] | int32 | req, first, count, lo, hi, seq_len, q_start, q_len | plan -> all |
| first | [R + 1] | int32 | first item of each request | plan -> merge |
| partial out, lse | [W, K, M, Dv], [W, K, M] | float32 | contiguous; natural log | inside |
| sinks | [H] | float | contiguous | in |
| lse | [H, T] | float32 | row stride given, natural log | out |

A *work item* is what one program does for one KV head: in prefill one tile of query tokens of one
request, in decode one run of key tiles [lo, hi) of one request. `plan_kernel` makes the list on
the device once a step, so that all grids depend only on R, T and the chip, never on lengths: no
host sync, and a captured graph stays right. Decode splits the batch's key tiles evenly: with
`chunk = ceil(all tiles / target)` there are at most R + target items, whatever the lengths.

Grid of prefill: (K * W), program p does item W - 1 - p // K (long tiles first) of KV head p % K,
rows m = (token, query head of the group) packed, so that a KV tile is read once for its G heads.
Grid of decode: (K, W), of merge: (rows, H), of write: (T).

Bytes: decode reads each visible K and V once (bound by memory bandwidth); prefill reads them once
per q tile out of L2 (bound by matmul rate). Products accumulate in float32; tolerance against
float64: 2e-2 absolute in bf16, 1e-5 in float32. Scores and the running maximum are in base 2
inside a program only; everything stored is natural log. Every loaded value is masked by position
first: unused slots may hold NaN.

Limits, checked by the launcher: D, Dv <= 256, G <= BLOCK_M, scale > 0, last dims contiguous.

Source: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding (2023), PagedAttention (arXiv
2309.06180), gpt-oss attention sinks; the idea of packing a query group's rows is vLLM's.
"""

# fmt: off  (signatures keep tensors, strides and constants in groups)

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG = tl.constexpr(float("-inf"))
ITEM = tl.constexpr(8)  # int32 columns of a work item


# ---- cache write ---------------------------------------------------------------------------------


@triton.jit
def write_kernel(
    k_ptr,
    v_ptr,
    k_cache,
    v_cache,
    slot_mapping,
    k_st,
    k_sh,
    v_st,
    v_sh,
    kc_sb,
    kc_sh,
    kc_ss,
    vc_sb,
    vc_sh,
    vc_ss,
    K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Program t stores the K and V rows of token t, all KV heads, at its slot."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + t)
    if slot >= 0:
        block, offset = slot // S, slot % S
        h = tl.arange(0, BLOCK_K)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        mask = (h < K) & (d < D)
        new = tl.load(k_ptr + t * k_st + h * k_sh + d, mask=mask)
        tl.store(k_cache + block * kc_sb + h * kc_sh + offset * kc_ss + d, new, mask=mask)
        d = tl.arange(0, BLOCK_DV)[None, :]
        mask = (h < K) & (d < DV)
        new = tl.load(v_ptr + t * v_st + h * v_sh + d, mask=mask)
        tl.store(v_cache + block * vc_sb + h * vc_sh + offset * vc_ss + d, new, mask=mask)


# ---- work items ----------------------------------------------------------------------------------


@triton.jit
def _key_tiles(seq_len, q_len, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Key tiles [lo, hi) that the rows of a request can see."""
    hi = tl.where(q_len > 0, (seq_len + TILE - 1) // TILE, 0)
    lo = hi * 0
    if WINDOW > 0:
        lo = tl.minimum(tl.maximum(seq_len - q_len - WINDOW + 1, 0) // TILE, hi)
    return lo, hi


@triton.jit
def _count(seq_len, q_len, chunk, WINDOW: tl.constexpr, TILE: tl.constexpr, PREFILL: tl.constexpr):
    """Work items of a request. A decode row without keys has one too: it must write zeros."""
    if PREFILL:
        return (q_len + TILE - 1) // TILE
    else:
        lo, hi = _key_tiles(seq_len, q_len, WINDOW, TILE)
        return tl.where(q_len > 0, tl.maximum((hi - lo + chunk - 1) // chunk, 1), 0)


@triton.jit(do_not_specialize=["req0", "num_reqs", "num_items", "target", "min_tiles"])
def plan_kernel(
    query_start_loc,
    seq_lens,
    items,
    first,
    req0,
    num_reqs,
    num_items,
    target,
    min_tiles,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    PREFILL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program p writes items [p * BLOCK_W, (p + 1) * BLOCK_W); program 0 also writes `first`.

    Requests are req0 .. req0 + num_reqs. TILE is in query tokens for prefill, keys for decode.
    """
    pid = tl.program_id(0)
    w = pid * BLOCK_W + tl.arange(0, BLOCK_W)
    lane = tl.arange(0, BLOCK_R)
    chunk = min_tiles
    if not PREFILL:
        total = tl.sum(lane * 0)
        for r0 in range(0, num_reqs, BLOCK_R):
            r = r0 + lane
            ok = r < num_reqs
            a = tl.load(query_start_loc + req0 + r, mask=ok, other=0)
            b = tl.load(query_start_loc + req0 + r + 1, mask=ok, other=0)
            n = tl.load(seq_lens + req0 + r, mask=ok, other=0)
            lo, hi = _key_tiles(n, b - a, WINDOW, TILE)
            total += tl.sum(hi - lo)
        chunk = tl.maximum(min_tiles, (total + target - 1) // target)

    before = w * 0  # requests whose items all come before item w
    start = w * 0  # first item of the request of item w
    carry = tl.sum(lane * 0)
    for r0 in range(0, num_reqs, BLOCK_R):
        r = r0 + lane
        ok = r < num_reqs
        a = tl.load(query_start_loc + req0 + r, mask=ok, other=0)
        b = tl.load(query_start_loc + req0 + r + 1, mask=ok, other=0)
        n = tl.load(seq_lens + req0 + r, mask=ok, other=0)
        count = tl.where(ok, _count(n, b - a, chunk, WINDOW, TILE, PREFILL), 0)
        ends = tl.cumsum(count, 0) + carry
        past = (ends[None, :] <= w[:, None]) & ok[None, :]
        before += tl.sum(past.to(tl.int32), 1)
        start += tl.sum(tl.where(past, count[None, :], 0), 1)
        carry += tl.sum(count)
        if pid == 0:
            tl.store(first + 1 + r, ends, mask=ok)
    if pid == 0:
        tl.store(first, 0)

    live = before < num_reqs
    req = tl.where(live, before, 0)
    q_start = tl.load(query_start_loc + req0 + req, mask=live, other=0)
    q_len = tl.load(query_start_loc + req0 + req + 1, mask=live, other=0) - q_start
    seq_len = tl.load(seq_lens + req0 + req, mask=live, other=0)
    count = _count(seq_len, q_len, chunk, WINDOW, TILE, PREFILL)
    index = w - start
    if PREFILL:
        lo, hi = index, index + 1
    else:
        lo, hi = _key_tiles(seq_len, q_len, WINDOW, TILE)
        per = (hi - lo + count - 1) // tl.maximum(count, 1)
        lo = tl.minimum(lo + index * per, hi)
        hi = tl.minimum(lo + per, hi)
    row = items + w * ITEM
    mask = w < num_items
    tl.store(row, tl.where(live, req0 + req, -1), mask=mask)
    tl.store(row + 1, start, mask=mask)
    tl.store(row + 2, count, mask=mask)
    tl.store(row + 3, lo, mask=mask)
    tl.store(row + 4, hi, mask=mask)
    tl.store(row + 5, seq_len, mask=mask)
    tl.store(row + 6, q_start, mask=mask)
    tl.store(row + 7, q_len, mask=mask)


# ---- shared pieces -------------------------------------------------------------------------------


@triton.jit
def _tile_blocks(table, start, end, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of keys start .. start + BLOCK_N: one id when a tile lies within a block."""
    if S % BLOCK_N == 0:
        return tl.load(table + start // S, mask=start < end, other=0)
    else:
        pos = start + tl.arange(0, BLOCK_N)
        return tl.load(table + pos // S, mask=pos < end, other=0)


@triton.jit
def _load_rows(
    base,
    offsets,
    d,
    keep,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Cache rows base + offsets [N] as [N, BLOCK]; 0 in rows not kept and columns past SIZE."""
    pointers = base + offsets[:, None] + d[None, :]
    if MASKED:
        if SIZE == BLOCK:
            return tl.load(pointers, mask=keep[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=keep[:, None] & (d < SIZE)[None, :], other=0.0)
    else:
        if SIZE == BLOCK:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(d < SIZE)[None, :], other=0.0)


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores [M, N] of q [M, D] and k [N, D]: still to be scaled, or capped and in base 2."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        s = softcap * (2.0 * tl.sigmoid(2.0 * scale * s) - 1.0)
    return s


@triton.jit
def _absorb(s, v, m, l, acc, scale, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax: scores s [M, N] and values v [N, Dv] join (m, l, acc)."""
    if SOFTCAP:
        top = tl.maximum(m, tl.max(s, 1))
    else:
        top = tl.maximum(m, tl.max(s, 1) * scale)
    base = top
    if MASKED:
        base = tl.where(top == NEG, 0.0, top)  # a row that has seen no key yet
    if SOFTCAP:
        p = tl.exp2(s - base[:, None])
    else:
        p = tl.exp2(s * scale - base[:, None])  # one fused multiply-add
    alpha = tl.exp2(m - base)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return top, l, acc


@triton.jit
def _finish(m, l, acc):
    """Normalised output and natural-log LSE; 0 and -inf for rows that saw no key and no sink."""
    empty = m == NEG
    out = acc / tl.where(empty, 1.0, l)[:, None]
    lse = tl.where(empty, NEG, (m + tl.log2(tl.where(empty, 1.0, l))) * LN2)
    return out, lse


# ---- prefill -------------------------------------------------------------------------------------


@triton.jit
def _attend(
    q,
    m,
    l,
    acc,
    table,
    k_base,
    v_base,
    k_desc,
    v_desc,
    k_row,
    v_row,
    pos_q,
    lo,
    hi,
    seq_len,
    oldest,
    kc_sb,
    kc_ss,
    vc_sb,
    vc_ss,
    k_rows,
    v_rows,
    scale,
    softcap,
    D: tl.constexpr,
    DV: tl.constexpr,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Runs key tiles [lo, hi). Unmasked tiles are visible to every row, so all slots are real."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # The ids of the next tile are loaded one tile ahead: the K and V loads depend on them.
    blocks = _tile_blocks(table, lo * BLOCK_N, tl.where(lo < hi, seq_len, 0), S, BLOCK_N)
    for t in tl.range(lo, hi):
        start = t * BLOCK_N
        pos = start + n
        if TMA and not MASKED:
            k = k_desc.load([blocks * k_rows + k_row + start % S, 0])
        else:
            keep = (pos < seq_len) & (pos >= oldest)
            ids = blocks.to(tl.int64)
            slot = pos % S
            k = _load_rows(k_base, ids * kc_sb + slot * kc_ss, d, keep, D, BLOCK_D, MASKED)
        s = _scores(q, k, scale, softcap, SOFTCAP)
        if MASKED:
            visible = (pos[None, :] <= pos_q[:, None]) & keep[None, :]
            if WINDOW > 0:
                visible &= pos[None, :] > pos_q[:, None] - WINDOW
            s = tl.where(visible, s, NEG)
        if TMA and not MASKED:
            v = v_desc.load([blocks * v_rows + v_row + start % S, 0])
        else:
            v = _load_rows(v_base, ids * vc_sb + slot * vc_ss, dv, keep, DV, BLOCK_DV, MASKED)
        blocks = _tile_blocks(table, start + BLOCK_N, seq_len, S, BLOCK_N)
        m, l, acc = _absorb(s, v, m, l, acc, scale, SOFTCAP, MASKED)
    return m, l, acc


@triton.jit(do_not_specialize=["num_items", "lse_sh"])
def prefill_kernel(
    q_ptr,
    k_cache,
    v_cache,
    k_desc,
    v_desc,
    block_table,
    items,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    num_items,
    scale,
    softcap,
    q_st,
    q_sh,
    out_st,
    out_sh,
    lse_sh,
    table_sr,
    kc_sb,
    kc_sh,
    kc_ss,
    vc_sb,
    vc_sh,
    vc_ss,
    k_rows,
    v_rows,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of BLOCK_M // G query tokens of one request, for the G heads of one KV head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    pid = tl.program_id(0)
    h = pid % K
    item = items + (num_items - 1 - pid // K) * ITEM
    req = tl.load(item)
    if req < 0:
        return
    tile = tl.load(item + 3)
    seq_len = tl.load(item + 5)
    q_start = tl.load(item + 6)
    q_len = tl.load(item + 7)

    m_idx = tl.arange(0, BLOCK_M)
    token = tile * BLOCK_Q + m_idx // G
    head = h * G + m_idx % G
    row_ok = (m_idx < BLOCK_Q * G) & (token < q_len)
    row = (q_start + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + row[:, None] * q_st + head[:, None] * q_sh + d[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)

    first_pos = seq_len - q_len + tile * BLOCK_Q
    last_pos = tl.minimum(first_pos + BLOCK_Q, seq_len) - 1
    pos_q = first_pos + m_idx // G
    # Tiles [lo, a) cross the window's left edge, [a, b) are seen by every row, [b, hi) cross
    # the diagonal.
    hi = tl.where(last_pos >= 0, last_pos // BLOCK_N + 1, 0)
    b = tl.minimum((tl.maximum(first_pos, -1) + 1) // BLOCK_N, hi)
    lo = hi * 0
    a = lo
    oldest = lo
    if WINDOW > 0:
        oldest = tl.maximum(first_pos - WINDOW + 1, 0)
        lo = tl.minimum(oldest // BLOCK_N, hi)
        a = (tl.maximum(last_pos - WINDOW + 1, 0) + BLOCK_N - 1) // BLOCK_N
        a = tl.maximum(tl.minimum(a, hi), lo)
        b = tl.maximum(b, a)

    m = tl.full([BLOCK_M], NEG, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        m = tl.load(sinks_ptr + head, mask=row_ok, other=NEG).to(tl.float32) * LOG2E
        l += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = block_table + req.to(tl.int64) * table_sr
    k_base = k_cache + h * kc_sh
    v_base = v_cache + h * vc_sh
    k_row = h * (kc_sh // D)
    v_row = h * (vc_sh // DV)
    if WINDOW > 0:
        m, l, acc = _attend(
            q,
            m,
            l,
            acc,
            table,
            k_base,
            v_base,
            k_desc,
            v_desc,
            k_row,
            v_row,
            pos_q,
            lo,
            a,
            seq_len,
            oldest,
            kc_sb,
            kc_ss,
            vc_sb,
            vc_ss,
            k_rows,
            v_rows,
            scale,
            softcap,
            D,
            DV,
            S,
            BLOCK_N,
            BLOCK_D,
            BLOCK_DV,
            WINDOW,
            SOFTCAP,
            True,
            TMA,
        )
    m, l, acc = _attend(
        q,
        m,
        l,
        acc,
        table,
        k_base,
        v_base,
        k_desc,
        v_desc,
        k_row,
        v_row,
        pos_q,
        a,
        b,
        seq_len,
        oldest,
        kc_sb,
        kc_ss,
        vc_sb,
        vc_ss,
        k_rows,
        v_rows,
        scale,
        softcap,
        D,
        DV,
        S,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        WINDOW,
        SOFTCAP,
        False,
        TMA,
    )
    m, l, acc = _attend(
        q,
        m,
        l,
        acc,
        table,
        k_base,
        v_base,
        k_desc,
        v_desc,
        k_row,
        v_row,
        pos_q,
        b,
        hi,
        seq_len,
        oldest,
        kc_sb,
        kc_ss,
        vc_sb,
        vc_ss,
        k_rows,
        v_rows,
        scale,
        softcap,
        D,
        DV,
        S,
        BLOCK_N,
        BLOCK_D,
        BLOCK_DV,
        WINDOW,
        SOFTCAP,
        True,
        TMA,
    )
    out, lse = _finish(m, l, acc)
    dv = tl.arange(0, BLOCK_DV)
    out_at = out_ptr + row[:, None] * out_st + head[:, None] * out_sh + dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (dv < DV)[None, :])
    if LSE:
        tl.store(lse_ptr + head * lse_sh + row, lse, mask=row_ok)


# ---- decode --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["lse_sh"])
def decode_kernel(
    q_ptr,
    k_cache,
    v_cache,
    block_table,
    items,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    part_out,
    part_lse,
    scale,
    softcap,
    q_st,
    q_sh,
    out_st,
    out_sh,
    lse_sh,
    table_sr,
    kc_sb,
    kc_sh,
    kc_ss,
    vc_sb,
    vc_sh,
    vc_ss,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Key tiles [lo, hi) of one request for one KV head; ROWS = most query tokens * G.

    A request with one item is finished here; else the partial result goes to `part_*`.
    """
    h = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    w = tl.program_id(1)
    item = items + w * ITEM
    req = tl.load(item)
    first = tl.load(item + 1)
    count = tl.load(item + 2)
    lo = tl.load(item + 3)
    hi = tl.load(item + 4)
    seq_len = tl.load(item + 5)
    q_start = tl.load(item + 6)
    q_len = tl.load(item + 7)
    if req < 0:
        return

    m_idx = tl.arange(0, BLOCK_M)
    token = m_idx // G
    head = h * G + m_idx % G
    row_ok = (m_idx < ROWS) & (token < q_len)
    row = (q_start + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = q_ptr + row[:, None] * q_st + head[:, None] * q_sh + d[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    pos_q = seq_len - q_len + token

    m = tl.full([BLOCK_M], NEG, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # Only one partial result of a request may carry the sink.
        m = tl.load(sinks_ptr + head, mask=row_ok, other=NEG).to(tl.float32) * LOG2E
        m = tl.where(w == first, m, NEG)
        l += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    table = block_table + req.to(tl.int64) * table_sr
    k_base = k_cache + h * kc_sh
    v_base = v_cache + h * vc_sh
    n = tl.arange(0, BLOCK_N)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(seq_len - q_len - WINDOW + 1, 0)
    blocks = _tile_blocks(table, lo * BLOCK_N, tl.where(lo < hi, seq_len, 0), S, BLOCK_N)
    for t in tl.range(lo, hi):
        start = t * BLOCK_N
        pos = start + n
        keep = (pos < seq_len) & (pos >= oldest)
        ids = blocks.to(tl.int64)
        slot = pos % S
        k = _load_rows(k_base, ids * kc_sb + slot * kc_ss, d, keep, D, BLOCK_D, True)
        v = _load_rows(v_base, ids * vc_sb + slot * vc_ss, dv, keep, DV, BLOCK_DV, True)
        blocks = _tile_blocks(table, start + BLOCK_N, seq_len, S, BLOCK_N)
        s = _scores(q, k, scale, softcap, SOFTCAP)
        visible = (pos[None, :] <= pos_q[:, None]) & keep[None, :]
        if WINDOW > 0:
            visible &= pos[None, :] > pos_q[:, None] - WINDOW
        s = tl.where(visible, s, NEG)
        m, l, acc = _absorb(s, v, m, l, acc, scale, SOFTCAP, True)

    out, lse = _finish(m, l, acc)
    if count == 1:
        out_at = out_ptr + row[:, None] * out_st + head[:, None] * out_sh + dv[None, :]
        mask = row_ok[:, None] & (dv < DV)[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
        if LSE:
            tl.store(lse_ptr + head * lse_sh + row, lse, mask=row_ok)
    else:
        at = (w.to(tl.int64) * num_kv_heads + h) * ROWS + m_idx
        mask = (m_idx < ROWS)[:, None] & (dv < DV)[None, :]
        tl.store(part_out + at[:, None] * DV + dv[None, :], out, mask=mask)
        tl.store(part_lse + at, lse, mask=m_idx < ROWS)


@triton.jit(do_not_specialize=["req0", "lse_sh"])
def merge_kernel(
    part_out,
    part_lse,
    query_start_loc,
    first,
    out_ptr,
    lse_ptr,
    req0,
    out_st,
    out_sh,
    lse_sh,
    K: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    LSE: tl.constexpr,
):
    """Program (r * ROWS // G + i, head) merges the partial results of token i of request r.

    The formula of cardcage.core.runtime.lse.merge, BLOCK_P partial results at a time.
    """
    TOKENS: tl.constexpr = ROWS // G
    r = tl.program_id(0) // TOKENS
    i = tl.program_id(0) % TOKENS
    head = tl.program_id(1)
    begin = tl.load(first + r)
    end = tl.load(first + r + 1)
    q_start = tl.load(query_start_loc + req0 + r)
    q_len = tl.load(query_start_loc + req0 + r + 1) - q_start
    if (end - begin < 2) | (i >= q_len):
        return
    dv = tl.arange(0, BLOCK_DV)
    at = (head // G) * ROWS + i * G + head % G
    top = tl.full([1], NEG, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for p0 in range(begin, end, BLOCK_P):
        p = p0 + tl.arange(0, BLOCK_P)
        index = p.to(tl.int64) * (K * ROWS) + at
        lse = tl.load(part_lse + index, mask=p < end, other=NEG)
        new = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new == NEG, 0.0, new)
        weight = tl.exp2((lse - base) * LOG2E)
        used = (weight > 0.0)[:, None] & (dv < DV)[None, :]
        part = tl.load(part_out + index[:, None] * DV + dv[None, :], mask=used, other=0.0)
        alpha = tl.exp2((top - base) * LOG2E)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        top = new
    out = acc / tl.where(total > 0.0, total, 1.0)
    row = (q_start + i).to(tl.int64)
    tl.store(
        out_ptr + row * out_st + head * out_sh + dv,
        out.to(out_ptr.dtype.element_ty),
        mask=dv < DV,
    )
    if LSE:
        base = tl.where(top == NEG, 0.0, top)
        lse = tl.where(total > 0.0, base + tl.log2(tl.where(total > 0.0, total, 1.0)) * LN2, NEG)
        tl.store(lse_ptr + head * lse_sh + row + tl.arange(0, 1), lse)
