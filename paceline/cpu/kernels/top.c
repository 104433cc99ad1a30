/* The likeliest entries of rows of logits, with their log-probabilities. */
#include <math.h>

#include "program.h"

enum { MAX_COUNT = 16 };

static float log_of_sum(const float *row, int64_t width) {
    __m512 highest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    int64_t whole = width / 16 * 16;
    __mmask16 rest = (__mmask16)((1u << (width - whole)) - 1);
    for (int64_t i = 0; i < whole; i += 16) highest = _mm512_max_ps(highest, _mm512_loadu_ps(row + i));
    highest = _mm512_mask_max_ps(highest, rest, highest, _mm512_maskz_loadu_ps(rest, row + whole));
    __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
    for (int64_t i = 0; i < whole; i += 16)
        total = _mm512_add_ps(total, exp_ps(_mm512_sub_ps(_mm512_loadu_ps(row + i), top)));
    __m512 last = exp_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(rest, row + whole), top));
    total = _mm512_mask_add_ps(total, rest, total, last);
    return _mm512_cvtss_f32(top) + logf(_mm512_reduce_add_ps(total));
}

/* `in` holds rows of float logits. `out` gets, for each, `count` int32 indices, best first and the first of equals, and then
 * as many float log-probabilities. */
void pl_top(const struct op *op, const struct step *step) {
    int64_t width = op->in_width, count = op->count;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows_of(op, step); ++r) {
        const float *row = (const float *)step->buffers[op->in] + r * width;
        int32_t *ids = (int32_t *)step->buffers[op->out] + r * 2 * count;
        float *log_probs = (float *)ids + count, values[MAX_COUNT];
        float sum = log_of_sum(row, width);
        int64_t found = 0;
        for (int64_t i = 0; i < width; i += 16) {
            __mmask16 there = width - i < 16 ? (__mmask16)((1u << (width - i)) - 1) : 0xffff;
            __m512 bar = _mm512_set1_ps(found == count ? values[count - 1] : -INFINITY);
            __mmask16 above = found == count
                                  ? _mm512_mask_cmp_ps_mask(there, _mm512_maskz_loadu_ps(there, row + i), bar, _CMP_GT_OQ)
                                  : there;
            for (; above; above &= above - 1) {
                int64_t candidate = i + __builtin_ctz(above);
                float value = row[candidate];
                if (found == count && !(value > values[count - 1])) continue;
                int64_t place = found < count ? found++ : count - 1;
                for (; place > 0 && value > values[place - 1]; --place) {
                    values[place] = values[place - 1];
                    ids[place] = ids[place - 1];
                }
                values[place] = value;
                ids[place] = (int32_t)candidate;
            }
        }
        for (int64_t j = 0; j < count; ++j) log_probs[j] = values[j] - sum;
    }
}
