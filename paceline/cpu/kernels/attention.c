/* Attention of a step's rows over their sequences' caches.
 *
 * A row goes through what it sees in order of position, whether that lies in a row or along a path of a tree, so that
 * a node verified in a tree and the same token decoded alone add up alike. Query heads are group-major: those that share
 * key head h stand at h, h + kv_heads, h + 2 * kv_heads, ... */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "program.h"

enum { MAX_GROUP = 16, MAX_HEAD_DIM = 256 };

/* Norm (where the model has one) and rotation of one head, in place. */
static void rotate(bf16 *head, const bf16 *cosine, const bf16 *sine, const bf16 *weight, float eps, int64_t dim) {
    float x[MAX_HEAD_DIM];
    float factor = 1.0f;
    if (weight) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < dim; i += 16) {
            __m512 part = load_bf16(head + i);
            squares = _mm512_fmadd_ps(part, part, squares);
        }
        factor = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + eps);
    }
    for (int64_t i = 0; i < dim; i += 16) {
        __m512 part = load_bf16(head + i);
        if (weight) part = _mm512_mul_ps(_mm512_mul_ps(part, _mm512_set1_ps(factor)), load_bf16(weight + i));
        _mm512_storeu_ps(x + i, part);
    }
    for (int64_t i = 0; i < dim; i += 16) {
        int64_t other = i < dim / 2 ? i + dim / 2 : i - dim / 2;
        __m512 turned = _mm512_mul_ps(_mm512_loadu_ps(x + i), load_bf16(cosine + i));
        store_bf16(head + i, _mm512_fmadd_ps(_mm512_loadu_ps(x + other), load_bf16(sine + i), turned));
    }
}

static void store_row(const struct op *op, const struct step *step, int64_t row) {
    int64_t heads = op->num_heads, kv_heads = op->num_kv_heads, dim = op->head_dim;
    bf16 *qkv = (bf16 *)step->buffers[op->in] + row * op->in_width;
    const bf16 *cosine = op->rope + step->positions[row] * 2 * dim;
    const struct segment *seg = step->segments + step->row_segment[row];
    bf16 *cache = seg->cache + op->layer * seg->layer_stride + (seg->write_at + row - seg->first_row) * dim;
    for (int64_t h = 0; h < heads + kv_heads; ++h)
        rotate(qkv + h * dim, cosine, cosine + dim, op->norm ? op->norm + h * dim : 0, op->eps, dim);
    for (int64_t h = 0; h < 2 * kv_heads; ++h)
        memcpy(cache + h * seg->head_stride, qkv + (heads + h) * dim, dim * sizeof(bf16));
}

/* What one row sees: cache row of each position, `first` and later. */
struct view {
    int64_t past, first, end;
    const int32_t *path;
};

static inline int64_t cache_row(const struct view *view, int64_t position) {
    return position < view->past ? position : view->past + view->path[position - view->past];
}

static struct view view_of(const struct segment *seg, int64_t row, int64_t window) {
    int64_t i = row - seg->first_row;
    struct view view;
    if (seg->paths) {
        view.path = seg->paths + seg->path_starts[i];
        view.past = seg->past;
        view.end = seg->past + seg->path_starts[i + 1] - seg->path_starts[i];
    } else {
        view.path = 0;
        view.past = view.end = seg->write_at + i + 1;
    }
    view.first = window && view.end > window ? view.end - window : 0;
    return view;
}

/* One row and key head: every query head of the group over everything the row sees. */
static inline __attribute__((always_inline)) void attend_row(const struct op *op, const struct step *step,
                                                             int64_t row, int64_t kv_head, float *scores,
                                                             const int64_t dim) {
    int64_t kv_heads = op->num_kv_heads, group = op->num_heads / kv_heads;
    const struct segment *seg = step->segments + step->row_segment[row];
    const bf16 *keys = seg->cache + op->layer * seg->layer_stride + kv_head * seg->head_stride;
    const bf16 *values = keys + kv_heads * seg->head_stride;
    const bf16 *queries = (const bf16 *)step->buffers[op->in] + row * op->in_width + kv_head * dim;
    bf16 *out = (bf16 *)step->buffers[op->out] + row * op->out_width + kv_head * dim;
    struct view view = view_of(seg, row, op->window);
    int64_t start = view.first / 16 * 16, span = (view.end - start + 15) / 16 * 16;
    __m512 top[MAX_GROUP];
    for (int64_t g = 0; g < group; ++g) top[g] = _mm512_set1_ps(-INFINITY);
    for (int64_t tile = start; tile < view.end; tile += 16) {
        const bf16 *rows[16];
        for (int j = 0; j < 16; ++j)
            rows[j] = keys + cache_row(&view, tile + j < view.end ? tile + j : view.end - 1) * dim;
        __mmask16 seen = 0xffff;
        if (tile + 16 > view.end) seen = (__mmask16)((1u << (view.end - tile)) - 1);
        if (tile < view.first) seen &= (__mmask16)(0xffffu << (view.first - tile));
        for (int64_t g = 0; g < group; ++g) {
            const bf16 *query = queries + g * kv_heads * dim;
            __m512 sums[16];
            for (int j = 0; j < 16; ++j) sums[j] = _mm512_setzero_ps();
            for (int64_t i = 0; i < dim; i += 32) {
                __m512bh part = (__m512bh)_mm512_loadu_si512(query + i);
                for (int j = 0; j < 16; ++j)
                    sums[j] = _mm512_dpbf16_ps(sums[j], part, (__m512bh)_mm512_loadu_si512(rows[j] + i));
            }
            __m512 score = _mm512_mul_ps(reduce_16(sums), _mm512_set1_ps(op->scale));
            score = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score);
            _mm512_storeu_ps(scores + g * span + tile - start, score);
            top[g] = _mm512_max_ps(top[g], score);
        }
    }
    float inverse[MAX_GROUP];
    for (int64_t g = 0; g < group; ++g) {
        __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(top[g])), total = _mm512_setzero_ps();
        for (int64_t j = 0; j < span; j += 16) {
            float *at = scores + g * span + j;
            __m512 score = _mm512_loadu_ps(at);
            __mmask16 seen = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
            __m512 weight = _mm512_maskz_mov_ps(seen, exp_ps(_mm512_sub_ps(score, highest)));
            total = _mm512_add_ps(total, weight);
            _mm512_storeu_ps(at, weight);
        }
        inverse[g] = 1.0f / _mm512_reduce_add_ps(total);
    }
    /* Sixteen columns of values at a time, read once for four heads of the group. */
    for (int64_t low = 0; low < group; low += 4) {
        int64_t count = group - low < 4 ? group - low : 4;
        for (int64_t i = 0; i < dim; i += 64) {
            __m512 mixed[4][4];
            int64_t blocks = dim - i < 64 ? (dim - i) / 16 : 4;
            for (int64_t g = 0; g < 4; ++g)
                for (int b = 0; b < 4; ++b) mixed[g][b] = _mm512_setzero_ps();
            for (int64_t position = view.first; position < view.end; ++position) {
                const bf16 *value = values + cache_row(&view, position) * dim + i;
                const float *weight = scores + low * span + position - start;
                for (int b = 0; b < blocks; ++b) {
                    __m512 x = load_bf16(value + 16 * b);
                    for (int64_t g = 0; g < count; ++g)
                        mixed[g][b] = _mm512_fmadd_ps(x, _mm512_set1_ps(weight[g * span]), mixed[g][b]);
                }
            }
            for (int64_t g = 0; g < count; ++g)
                for (int b = 0; b < blocks; ++b)
                    store_bf16(out + (low + g) * kv_heads * dim + i + 16 * b,
                               _mm512_mul_ps(mixed[g][b], _mm512_set1_ps(inverse[low + g])));
        }
    }
}

void pl_attend(const struct op *op, const struct step *step) {
    int64_t n = step->num_rows, kv_heads = op->num_kv_heads;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n; ++row) {
        if (step->row_segment[row] >= 0)
            store_row(op, step, row);
        else
            memset((bf16 *)step->buffers[op->out] + row * op->out_width, 0, op->out_width * sizeof(bf16));
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < n * kv_heads; ++item) {
        /* Later rows of a long chunk see more: they go first, so that no thread ends with a long one. */
        int64_t row = n - 1 - item / kv_heads, head = item % kv_heads;
        float *scores = step->scores + omp_get_thread_num() * step->scores_stride;
        if (step->row_segment[row] < 0) continue;
        if (op->head_dim == 64)
            attend_row(op, step, row, head, scores, 64);
        else if (op->head_dim == 128)
            attend_row(op, step, row, head, scores, 128);
        else
            attend_row(op, step, row, head, scores, op->head_dim);
    }
}
