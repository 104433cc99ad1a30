/* Products of rows with a packed weight, after an optional norm and before an optional activation or addition.
 *
 * A weight lies in panels of 32 columns, two k side by side for the bfloat16 dot product: [panel][k / 2][32][2]. A
 * decode step streams every panel once, so time is memory time until about eight rows a core. */
#include <math.h>
#include <string.h>

#include "program.h"

/* Rows held in registers at once: two accumulators each, and the rest for the weight. */
enum { TILE = 12 };

/* From so many rows on arithmetic takes as long as memory, and the hardware's own prefetching falls behind: eight rows
 * took 17 ms on one core without, 13 ms with (SmolLM2-135M). For fewer rows it is faster left alone; from three on it is
 * fastest to compute six all the same, and forget the others; not where the weights are in the cache already. */
enum { MIN_PADDED_ROWS = 3, PREFETCH_ROWS = 6 };
enum { PREFETCH_AHEAD = 4096 /* elements: 8 KiB, into the second-level cache */ };

typedef void tile_fn(const bf16 *rows, int64_t stride, const bf16 *panel, int64_t half_k, float *out);

#define DEFINE_TILE(R)                                                                                               \
    static void tile_##R(const bf16 *rows, int64_t stride, const bf16 *panel, int64_t half_k, float *out) {          \
        __m512 sums[R][2];                                                                                           \
        for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();                                   \
        for (int64_t k = 0; k < half_k; ++k, panel += 2 * PANEL) {                                                   \
            __m512bh left = (__m512bh)_mm512_loadu_si512(panel);                                                     \
            __m512bh right = (__m512bh)_mm512_loadu_si512(panel + PANEL);                                            \
            if (R >= PREFETCH_ROWS) {                                                                                \
                _mm_prefetch((const char *)(panel + PREFETCH_AHEAD), _MM_HINT_T1);                                   \
                _mm_prefetch((const char *)(panel + PREFETCH_AHEAD + PANEL), _MM_HINT_T1);                           \
            }                                                                                                        \
            _Pragma("GCC unroll 12") for (int r = 0; r < R; ++r) {                                                   \
                __m512bh pair = (__m512bh)_mm512_set1_epi32(((const bf16_pair *)(rows + r * stride))[k]);              \
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], left, pair);                                               \
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], right, pair);                                              \
            }                                                                                                        \
        }                                                                                                            \
        for (int r = 0; r < R; ++r) {                                                                                \
            _mm512_storeu_ps(out + r * PANEL, sums[r][0]);                                                           \
            _mm512_storeu_ps(out + r * PANEL + 16, sums[r][1]);                                                      \
        }                                                                                                            \
    }

DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)
DEFINE_TILE(7)
DEFINE_TILE(8)
DEFINE_TILE(9)
DEFINE_TILE(10)
DEFINE_TILE(11)
DEFINE_TILE(12)

static tile_fn *const tiles[TILE + 1] = {0,      tile_1, tile_2, tile_3, tile_4,  tile_5,  tile_6,
                                         tile_7, tile_8, tile_9, tile_10, tile_11, tile_12};

/* The largest of some columns of a panel, NaN if any is one. */
static float largest(const float *sums, int64_t count) {
    __mmask16 first = (__mmask16)(count >= 16 ? 0xffff : (1u << count) - 1);
    __mmask16 second = (__mmask16)(count <= 16 ? 0 : (1u << (count - 16)) - 1);
    __m512 lowest = _mm512_set1_ps(-INFINITY);
    __m512 left = _mm512_mask_loadu_ps(lowest, first, sums), right = _mm512_mask_loadu_ps(lowest, second, sums + 16);
    if (_mm512_cmp_ps_mask(left, right, _CMP_UNORD_Q)) return NAN;
    return _mm512_reduce_max_ps(_mm512_max_ps(left, right));
}

/* Bias, activation, addition and rounding of one row of a panel. */
static void finish(const struct op *op, const struct step *step, int64_t row, int64_t panel, float *sums) {
    int64_t column = panel * PANEL, width = op->out_width;
    if (op->bias)
        for (int c = 0; c < PANEL; ++c) sums[c] += op->bias[column + c];
    if (op->epilogue == GATE_SILU || op->epilogue == GATE_GELU) {
        __m512 gate = _mm512_loadu_ps(sums), up = _mm512_loadu_ps(sums + 16);
        gate = op->epilogue == GATE_SILU ? silu_ps(gate) : gelu_ps(gate);
        store_bf16((bf16 *)step->buffers[op->out] + row * width + panel * 16, _mm512_mul_ps(gate, up));
        return;
    }
    int64_t left = width - column < PANEL ? width - column : PANEL;
    if (op->epilogue == STORE_FLOAT) {
        float *out = (float *)step->buffers[op->out] + row * width + column;
        for (int64_t c = 0; c < left; ++c) out[c] = sums[c];
        if (op->maxima >= 0) {
            int64_t panels = (width + PANEL - 1) / PANEL;
            ((float *)step->buffers[op->maxima])[row * panels + panel] = largest(sums, left);
        }
        return;
    }
    bf16 *out = (bf16 *)step->buffers[op->out] + row * width + column;
    const bf16 *residual =
        op->epilogue == ADD ? (const bf16 *)step->buffers[op->residual] + row * width + column : 0;
    if (left == PANEL) {
        for (int half = 0; half < PANEL; half += 16) {
            __m512 x = _mm512_loadu_ps(sums + half);
            store_bf16(out + half, residual ? _mm512_add_ps(x, load_bf16(residual + half)) : x);
        }
        return;
    }
    for (int64_t c = 0; c < left; ++c) {
        bf16 rounded[16];
        store_bf16(rounded, _mm512_set1_ps(residual ? sums[c] + from_bf16(residual[c]) : sums[c]));
        out[c] = rounded[0];
    }
}

void pl_linear(const struct op *op, const struct step *step) {
    int64_t n = rows_of(op, step), k = op->in_width;
    const bf16 *rows = step->buffers[op->in];
    if (!n) return;
    if (op->norm) {
        pl_norm_rows(rows, k, op->norm, op->eps, k, n, step->scratch, k, 0);
        rows = step->scratch;
    } else if (op->in_is_bound) { /* the caller's rows end where they end; ours have room behind them */
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; ++row) memcpy(step->scratch + row * k, rows + row * k, k * sizeof(bf16));
        rows = step->scratch;
    }
    int gated = op->epilogue == GATE_SILU || op->epilogue == GATE_GELU;
    int64_t columns = gated ? 2 * op->out_width : op->out_width;
    int64_t panels = (columns + PANEL - 1) / PANEL;
    int64_t num_tiles = (n + TILE - 1) / TILE, tile = (n + num_tiles - 1) / num_tiles;
    int64_t padded_from = step->is_resident ? PREFETCH_ROWS : MIN_PADDED_ROWS;
    /* Chunks that a slower core can leave to the other, but not so small that handing them out shows. */
    int64_t chunk = panels / (8 * step->num_threads) + 1;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t p = 0; p < panels; ++p) {
        const bf16 *panel = (const bf16 *)op->weight + p * PANEL * k;
        float sums[TILE * PANEL];
        for (int64_t first = 0; first < n; first += tile) {
            int64_t count = n - first < tile ? n - first : tile;
            int64_t run = count >= padded_from && count < PREFETCH_ROWS ? PREFETCH_ROWS : count;
            tiles[run](rows + first * k, k, panel, k / 2, sums);
            for (int64_t r = 0; r < count; ++r) finish(op, step, first + r, p, sums + r * PANEL);
        }
    }
}

/* Reorder `weight` [num_columns, k] into panels; columns past the end are zero. With `interleave`, the first half of
 * the columns are gates and the second half what they gate: 16 of each share a panel. */
void pl_pack(const bf16 *weight, int64_t num_columns, int64_t k, int32_t interleave, bf16 *panels) {
    int64_t count = (num_columns + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < count; ++p) {
        for (int64_t c = 0; c < PANEL; ++c) {
            int64_t column = p * PANEL + c;
            if (interleave) column = c < 16 ? p * 16 + c : num_columns / 2 + p * 16 + c - 16;
            for (int64_t i = 0; i < k; ++i)
                panels[p * PANEL * k + (i / 2) * 2 * PANEL + 2 * c + i % 2] =
                    column < num_columns ? weight[column * k + i] : 0;
        }
    }
}
