/* Paged attention on a host: cache write and one flash-style kernel for prefill and decode.
 *
 * Formula, per query row i and head h (KV head h / G), keys j of the row's own request:
 *
 *     s_ij = scale * q_i . k_j ; softcap c: s -> c * tanh(s / c)
 *     visible: j <= i, and j > i - window when window > 0
 *     o_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink_h)) ; lse_i = log(denominator)
 *
 * | tensor | shape | type | layout |
 * | q, out | [T, H, D], [T, H, Dv] | elem | strides given, rows contiguous |
 * | k cache | [N, K, D, S] | elem | any block stride; keys innermost, so that a vector register
 * |         |              |      | holds one dimension of VL keys and needs no horizontal sum |
 * | v cache | [N, K, S, Dv] | elem | any block stride |
 * | tasks | [num_tasks, 4] | int32 | request, first row of the step, tokens, position of the first |
 *
 * Work: one unit is (task, KV head, segment of the keys). Its rows are (token, query head of the
 * group) packed; keys come KEYS at a time: scores, online softmax, then the values. With several
 * segments each writes (m, l, acc) and a second loop merges them by natural-log maximum.
 *
 * Bytes: decode reads each visible key and value once (bound by memory bandwidth); prefill is
 * bound by multiply-adds, all in float32. Tolerance against float64: 1e-5 in float32, 2e-2 in
 * bf16. Only keys that some row of the task sees are read, so unused slots may hold NaN.
 *
 * Limits, checked by the caller: S % 16 == 0, Dv % 16 == 0, rows of a task <= rows_max.
 * Compiled once per element type: -DBF16=1 (bfloat16) or 0 (float32). Uses no header.
 *
 * Source: FlashAttention-2 (arXiv 2307.08691); exp: range reduction after Cephes.
 */

typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;

#ifdef __AVX512F__
#define VL 16 /* floats in a vector */
#define QR 6  /* rows, and vectors of keys or values, whose sums stay in registers */
#define PN 4
#else
#define VL 8
#define QR 4
#define PN 2
#endif
#define KEYS 64 /* keys between two rescalings */
#define UNROLL _Pragma("GCC unroll 8")

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef u32 vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef i32 vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef u16 vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define NEG (-__builtin_inff())

#if BF16
typedef u16 elem;
INLINE vf load(const elem *p) {
    return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16);
}
INLINE void store(elem *p, vf x) {
    vu u = (vu)x;
    vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16; /* to nearest, ties to even */
    vu nan = (vu)(x != x);
    r = (nan & 0x7fc0u) | (~nan & r);
    *(vh *)p = __builtin_convertvector(r, vh);
}
INLINE float load1(const elem *p) {
    union { u32 u; float f; } x = {(u32)*p << 16};
    return x.f;
}
#else
typedef float elem;
INLINE vf load(const elem *p) { return *(const vf *)p; }
INLINE void store(elem *p, vf x) { *(vf *)p = x; }
INLINE float load1(const elem *p) { return *p; }
#endif

INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vmax(vf a, vf b) { return pick((vi)(a > b), a, b); }

/* exp for |x| <= 87; below it 0, above it e^87. Relative error about 2e-7. */
INLINE vf vexp(vf x) {
    vi small = (vi)(x < -87.0f);
    x = vmax(x, all(-87.0f));
    x = pick((vi)(x > 87.0f), all(87.0f), x);
    vf t = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer in the low bits */
    vf n = t - 12582912.0f;
    vi e = (vi)t - 0x4b400000;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vf y = (vf)((vi)p + (e << 23));
    return pick(small, (vf){0}, y);
}
INLINE float exp1(float x) { return vexp(all(x))[0]; }

/* Natural log of a positive normal number; error about 1e-7. */
INLINE float log1(float x) {
    union { float f; u32 u; } b = {x};
    int e = (int)(b.u >> 23) - 127;
    b.u = (b.u & 0x7fffffu) | 0x3f800000u;
    if (b.f > 1.41421356f) {
        b.f *= 0.5f;
        e++;
    }
    float t = (b.f - 1.0f) / (b.f + 1.0f), u = t * t;
    float p = 2.0f + u * (0.6666666667f + u * (0.4f + u * (0.2857142857f + u * 0.2222222222f)));
    return t * p + (float)e * 0.69314718f;
}

typedef struct {
    /* changes with the layer */
    const elem *q;
    elem *k_cache, *v_cache, *out;
    const float *sinks; /* [H] or null */
    float *lse;         /* [H, T] or null */
    i64 q_st, q_sh, out_st, out_sh, lse_sh;
    i64 kc_sb, vc_sb; /* elements from block to block */
    /* changes with the step */
    const i32 *tasks, *block_table;
    i64 num_tasks, table_sr, segments, threads;
    /* fixed */
    float *scratch; /* threads * scratch_floats(rows_max) */
    float *parts;   /* num_tasks * K * segments * rows_max * (Dv + 2), when segments > 1 */
    i64 num_kv_heads, group, head_size, value_size, block_size, window, rows_max;
    float scale, softcap;
} Args;

/* scores[r][..] of n rows against PN vectors of keys; q is [D][QR] (rows innermost). */
INLINE void dot_rows(const int n, const float *q, const elem *const *k, i64 ks, i64 dims,
                     float *scores) {
    vf acc[QR][PN];
    UNROLL for (int r = 0; r < n; r++)
        UNROLL for (int c = 0; c < PN; c++) acc[r][c] = (vf){0};
    for (i64 d = 0; d < dims; d++) {
        vf x[PN];
        UNROLL for (int c = 0; c < PN; c++) x[c] = load(k[c] + d * ks);
        UNROLL for (int r = 0; r < n; r++)
            UNROLL for (int c = 0; c < PN; c++) acc[r][c] += q[d * QR + r] * x[c];
    }
    UNROLL for (int r = 0; r < n; r++)
        UNROLL for (int c = 0; c < PN; c++) *(vf *)(scores + r * KEYS + c * VL) = acc[r][c];
}

/* acc[r][..] += weights[r][j] * v[j][..] for n rows, `wide` vectors of values. */
INLINE void add_rows(const int n, const int wide, const float *w, const elem *v, i64 dv, int keys,
                     float *acc) {
    vf a[QR][PN];
    UNROLL for (int r = 0; r < n; r++)
        UNROLL for (int c = 0; c < wide; c++) a[r][c] = *(const vf *)(acc + r * dv + c * VL);
    for (int j = 0; j < keys; j++) {
        vf x[PN];
        UNROLL for (int c = 0; c < wide; c++) x[c] = load(v + j * dv + c * VL);
        UNROLL for (int r = 0; r < n; r++)
            UNROLL for (int c = 0; c < wide; c++) a[r][c] += w[r * KEYS + j] * x[c];
    }
    UNROLL for (int r = 0; r < n; r++)
        UNROLL for (int c = 0; c < wide; c++) *(vf *)(acc + r * dv + c * VL) = a[r][c];
}

/* The count of rows becomes a constant, so that their sums are registers. */
#if QR == 6
#define MORE_ROWS(call)                                                                           \
    case 4: call(4); break;                                                                       \
    case 5: call(5); break;
#else
#define MORE_ROWS(call)
#endif
#define ROWS(n, call)                                                                             \
    switch (n) {                                                                                  \
    case 1: call(1); break;                                                                       \
    case 2: call(2); break;                                                                       \
    case 3: call(3); break;                                                                       \
    MORE_ROWS(call)                                                                               \
    default: call(QR);                                                                            \
    }

static void dots(int n, const float *q, const elem *const *k, i64 ks, i64 dims, float *scores) {
#define CALL(m) dot_rows(m, q, k, ks, dims, scores)
    ROWS(n, CALL)
#undef CALL
}

static void adds(int n, const float *w, const elem *v, i64 dv, int keys, float *acc) {
    i64 c = 0;
#define CALL(m) add_rows(m, PN, w, v + c, dv, keys, acc + c)
    for (; c + PN * VL <= dv; c += PN * VL) ROWS(n, CALL)
#undef CALL
#define CALL(m) add_rows(m, 1, w, v + c, dv, keys, acc + c)
    for (; c < dv; c += VL) ROWS(n, CALL)
#undef CALL
}

/* Scores of all rows against keys [start, start + KEYS) that lie in [lo, hi). */
static void score_tile(const Args *a, const i32 *table, i64 head, i64 rows, const float *q, i64 start,
                       i64 lo, i64 hi, float *scores) {
    i64 S = a->block_size, D = a->head_size;
    const elem *base = a->k_cache + head * D * S;
    const elem *some = base + table[lo / S] * a->kc_sb; /* read instead of keys outside [lo, hi) */
    for (i64 at = start; at < start + KEYS; at += PN * VL) {
        if (at + PN * VL <= lo || at >= hi) continue;
        const elem *k[PN];
        for (int c = 0; c < PN; c++) {
            i64 key = at + c * VL;
            int inside = key + VL > lo && key < hi;
            k[c] = inside ? base + table[key / S] * a->kc_sb + key % S : some;
        }
        for (i64 r = 0; r < rows; r += QR) {
            int n = (int)(rows - r < QR ? rows - r : QR);
            dots(n, q + r * D, k, S, D, scores + r * KEYS + (at - start));
        }
    }
}

/* Asks for the keys and values of [start, start + KEYS) before they are needed: blocks lie far
 * apart, so the processor does not foresee them. */
static void foresee(const Args *a, const i32 *table, i64 head, i64 start, i64 hi) {
    i64 S = a->block_size, D = a->head_size, Dv = a->value_size;
    i64 end = start + KEYS < hi ? start + KEYS : hi;
    for (i64 at = start; at < end; at += 16) {
        i64 block = table[at / S], offset = at % S;
        const elem *k = a->k_cache + block * a->kc_sb + head * D * S + offset;
        const elem *v = a->v_cache + block * a->vc_sb + (head * S + offset) * Dv;
        if (S == 16)
            for (i64 i = 0; i < D * 16; i += 64 / sizeof(elem)) __builtin_prefetch(k + i);
        else
            for (i64 d = 0; d < D; d++) __builtin_prefetch(k + d * S);
        for (i64 i = 0; i < Dv * 16; i += 64 / sizeof(elem)) __builtin_prefetch(v + i);
    }
}

/* Turns scores into weights: cap, mask by position, online softmax. Returns the row's rescaling. */
INLINE float soften(const Args *a, float *s, int from, int to, float *m, float *l) {
    if (to <= from) { /* this row sees none of these keys: it has weight 0 for all of them */
        for (int j = 0; j < KEYS; j += VL) *(vf *)(s + j) = (vf){0};
        return 1.0f;
    }
    for (int j = 0; j < from; j++) s[j] = NEG;
    for (int j = to; j < KEYS; j++) s[j] = NEG;
    if (a->softcap > 0.0f) {
        float twice = 2.0f / a->softcap;
        for (int j = 0; j < KEYS; j += VL) {
            vf x = *(vf *)(s + j);
            vf capped = a->softcap * (1.0f - 2.0f / (vexp(x * twice) + 1.0f));
            *(vf *)(s + j) = pick((vi)(x == NEG), x, capped);
        }
    }
    vf top = *(vf *)s;
    for (int j = VL; j < KEYS; j += VL) top = vmax(top, *(vf *)(s + j));
    float best = *m;
    for (int c = 0; c < VL; c++) best = top[c] > best ? top[c] : best;
    vf sum = (vf){0};
    for (int j = 0; j < KEYS; j += VL) {
        vf p = vexp(*(vf *)(s + j) - best);
        *(vf *)(s + j) = p;
        sum += p;
    }
    float total = 0.0f;
    for (int c = 0; c < VL; c++) total += sum[c];
    float alpha = *m == best ? 1.0f : exp1(*m - best);
    *l = *l * alpha + total;
    *m = best;
    return alpha;
}

/* One unit of work; acc [rows, Dv], m [rows], l [rows] hold its partial result. */
static void attend(const Args *a, const i32 *task, i64 head, i64 segment, float *acc, float *m,
                   float *l, float *scratch) {
    i64 S = a->block_size, D = a->head_size, Dv = a->value_size, G = a->group;
    i64 rows = task[2] * G, first = task[3];
    float *q = scratch, *scores = scratch + (a->rows_max + QR) * D;
    const i32 *table = a->block_table + task[0] * a->table_sr;
    for (i64 r = 0; r < rows; r++) {
        const elem *x = a->q + (task[1] + r / G) * a->q_st + (head * G + r % G) * a->q_sh;
        float *to = q + r / QR * QR * D + r % QR;
        for (i64 d = 0; d < D; d++) to[d * QR] = load1(x + d) * a->scale;
        int with_sink = a->sinks && segment == 0; /* one partial result only may carry it */
        m[r] = with_sink ? a->sinks[head * G + r % G] : NEG;
        l[r] = with_sink && m[r] > NEG ? 1.0f : 0.0f;
    }
    for (i64 i = 0; i < rows * Dv; i += VL) *(vf *)(acc + i) = (vf){0};

    i64 hi = first + task[2], lo = 0;
    if (a->window > 0 && first - a->window + 1 > 0) lo = first - a->window + 1;
    i64 tiles = hi > lo ? (hi - 1) / KEYS - lo / KEYS + 1 : 0;
    i64 begin = lo / KEYS + tiles * segment / a->segments;
    i64 end = lo / KEYS + tiles * (segment + 1) / a->segments;
    for (i64 tile = begin; tile < end; tile++) {
        i64 start = tile * KEYS;
        i64 key0 = start > lo ? start : lo, key1 = start + KEYS < hi ? start + KEYS : hi;
        if (rows <= QR && tile + 1 < end) foresee(a, table, head, start + KEYS, hi);
        score_tile(a, table, head, rows, q, start, key0, key1, scores);
        for (i64 r = 0; r < rows; r++) {
            i64 pos = first + r / G, from = key0, to = pos + 1 < key1 ? pos + 1 : key1;
            if (a->window > 0 && pos - a->window + 1 > from) from = pos - a->window + 1;
            float alpha = soften(a, scores + r * KEYS, (int)(from - start), (int)(to - start), m + r,
                                 l + r);
            if (alpha != 1.0f)
                for (i64 c = 0; c < Dv; c += VL) *(vf *)(acc + r * Dv + c) *= alpha;
        }
        for (i64 at = key0; at < key1;) {
            i64 run = S - at % S < key1 - at ? S - at % S : key1 - at;
            const elem *v = a->v_cache + table[at / S] * a->vc_sb + (head * S + at % S) * Dv;
            for (i64 r = 0; r < rows; r += QR) {
                int n = (int)(rows - r < QR ? rows - r : QR);
                adds(n, scores + r * KEYS + (at - start), v, Dv, (int)run, acc + r * Dv);
            }
            at += run;
        }
    }
}

static void finish(const Args *a, const i32 *task, i64 head, const float *acc, const float *m,
                   const float *l) {
    i64 Dv = a->value_size, G = a->group;
    for (i64 r = 0; r < task[2] * G; r++) {
        i64 row = task[1] + r / G, h = head * G + r % G;
        float inverse = l[r] > 0.0f ? 1.0f / l[r] : 0.0f;
        elem *to = a->out + row * a->out_st + h * a->out_sh;
        for (i64 c = 0; c < Dv; c += VL) store(to + c, *(const vf *)(acc + r * Dv + c) * inverse);
        if (a->lse) a->lse[h * a->lse_sh + row] = l[r] > 0.0f ? m[r] + log1(l[r]) : NEG;
    }
}

/* acc, m, l of segment 0 become those of all segments. A part lies [rows, Dv], [rows], [rows]. */
static void merge(const Args *a, i64 rows, float *part, i64 part_floats) {
    i64 Dv = a->value_size;
    float *acc = part, *m = part + a->rows_max * Dv, *l = m + a->rows_max;
    for (i64 s = 1; s < a->segments; s++) {
        const float *acc2 = part + s * part_floats, *m2 = acc2 + a->rows_max * Dv;
        const float *l2 = m2 + a->rows_max;
        for (i64 r = 0; r < rows; r++) {
            if (l2[r] == 0.0f) continue;
            float best = m[r] > m2[r] ? m[r] : m2[r];
            float mine = l[r] > 0.0f ? exp1(m[r] - best) : 0.0f, other = exp1(m2[r] - best);
            for (i64 c = 0; c < Dv; c += VL)
                *(vf *)(acc + r * Dv + c) =
                    *(vf *)(acc + r * Dv + c) * mine + *(const vf *)(acc2 + r * Dv + c) * other;
            l[r] = l[r] * mine + l2[r] * other;
            m[r] = best;
        }
    }
}

i64 scratch_floats(i64 rows_max, i64 head_size, i64 value_size) {
    /* q, scores, acc, m, l; a cache line apart */
    return (rows_max + QR) * (head_size + KEYS + value_size + 2) + 16;
}

#ifdef _OPENMP
extern int omp_get_thread_num(void);
#else
static int omp_get_thread_num(void) { return 0; }
#endif

void forward(const Args *a) {
    i64 K = a->num_kv_heads, units = a->num_tasks * K * a->segments;
    i64 part_floats = a->rows_max * (a->value_size + 2);
    i64 each = scratch_floats(a->rows_max, a->head_size, a->value_size);
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
    {
        float *own = a->scratch + omp_get_thread_num() * each;
#pragma omp for schedule(dynamic, 1)
        for (i64 u = 0; u < units; u++) {
            i64 pair = u / a->segments, segment = u % a->segments;
            const i32 *task = a->tasks + 4 * (pair / K);
            float *acc = own + (a->rows_max + QR) * (a->head_size + KEYS);
            if (a->segments > 1) acc = a->parts + u * part_floats;
            float *m = acc + a->rows_max * a->value_size, *l = m + a->rows_max;
            attend(a, task, pair % K, segment, acc, m, l, own);
            if (a->segments == 1) finish(a, task, pair % K, acc, m, l);
        }
        if (a->segments > 1) {
#pragma omp for schedule(dynamic, 1)
            for (i64 pair = 0; pair < a->num_tasks * K; pair++) {
                const i32 *task = a->tasks + 4 * (pair / K);
                float *part = a->parts + pair * a->segments * part_floats;
                float *m = part + a->rows_max * a->value_size;
                merge(a, task[2] * a->group, part, part_floats);
                finish(a, task, pair % K, part, m, m + a->rows_max);
            }
        }
    }
}

void write_rows(const elem *k, const elem *v, elem *k_cache, elem *v_cache, const i64 *slots,
                i64 num_tokens, i64 k_st, i64 k_sh, i64 v_st, i64 v_sh, i64 kc_sb, i64 vc_sb, i64 K,
                i64 D, i64 Dv, i64 S, i64 threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (i64 t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        i64 block = slots[t] / S, offset = slots[t] % S;
        for (i64 h = 0; h < K; h++) {
            elem *to = k_cache + block * kc_sb + h * D * S + offset;
            const elem *from = k + t * k_st + h * k_sh;
            for (i64 d = 0; d < D; d++) to[d * S] = from[d];
            to = v_cache + block * vc_sb + (h * S + offset) * Dv;
            from = v + t * v_st + h * v_sh;
            for (i64 d = 0; d < Dv; d++) to[d] = from[d];
        }
    }
}
