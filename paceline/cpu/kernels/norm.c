/* Root-mean-square norms of rows. */
#include <math.h>

#include "program.h"

static float inverse_rms(const bf16 *row, int64_t width, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        __m512 x = load_bf16(row + i);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + eps);
}

/* out = norm(in) * weight, plus `residual` where given (rows as wide as `width`). Called by a whole thread team. */
void pl_norm_rows(const bf16 *in, int64_t in_stride, const bf16 *weight, float eps, int64_t width, int64_t num_rows,
                  bf16 *out, int64_t out_stride, const bf16 *residual) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16 *x = in + row * in_stride;
        bf16 *y = out + row * out_stride;
        __m512 factor = _mm512_set1_ps(inverse_rms(x, width, eps));
        for (int64_t i = 0; i < width; i += 16) {
            __m512 normed = _mm512_mul_ps(_mm512_mul_ps(load_bf16(x + i), factor), load_bf16(weight + i));
            if (residual) normed = _mm512_add_ps(normed, load_bf16(residual + row * width + i));
            store_bf16(y + i, normed);
        }
    }
}

void pl_norm(const struct op *op, const struct step *step) {
    const bf16 *residual = op->residual < 0 ? 0 : step->buffers[op->residual];
    bf16 *out = (bf16 *)step->buffers[op->out] + op->out_offset;
    pl_norm_rows(step->buffers[op->in], op->in_width, op->norm, op->eps, op->in_width, rows_of(op, step), out,
                 op->out_width, residual);
}
