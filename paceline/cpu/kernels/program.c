/* Runs a program: every operation in turn, one team of threads for all of them. */
#include <string.h>

#include "program.h"

/* Whether this processor has what the kernels are compiled for. */
int32_t pl_is_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

/* What this library was built as, for Python to check its own against: version, then sizes of the structures. */
int64_t pl_built_as(int32_t which) {
    int64_t facts[] = {PROGRAM_VERSION, sizeof(struct op), sizeof(struct segment), sizeof(struct step),
                       sizeof(struct tree), sizeof(struct forest)};
    return facts[which];
}

static void embed(const struct op *op, const struct step *step) {
    int64_t width = op->out_width;
    __m512 scale = _mm512_set1_ps(op->scale);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < step->num_rows; ++row) {
        const bf16 *source = (const bf16 *)op->weight + step->tokens[row] * width;
        bf16 *target = (bf16 *)step->buffers[op->out] + row * width;
        for (int64_t i = 0; i < width; i += 16) store_bf16(target + i, _mm512_mul_ps(load_bf16(source + i), scale));
    }
}

static void gather(const struct op *op, const struct step *step) {
    int64_t bytes = op->in_width * sizeof(bf16);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < step->num_selected; ++row)
        memcpy((char *)step->buffers[op->out] + row * bytes,
               (const char *)step->buffers[op->in] + step->selected[row] * bytes, bytes);
}

static void copy(const struct op *op, const struct step *step) {
    int64_t bytes = op->in_width * sizeof(bf16);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows_of(op, step); ++row)
        memcpy((char *)step->buffers[op->out] + row * bytes, (const char *)step->buffers[op->in] + row * bytes, bytes);
}

void pl_run(const struct op *ops, int64_t num_ops, const struct step *step) {
#pragma omp parallel num_threads(step->num_threads)
    for (int64_t i = 0; i < num_ops; ++i) {
        const struct op *op = ops + i;
        switch (op->kind) {
        case OP_EMBED: embed(op, step); break;
        case OP_NORM: pl_norm(op, step); break;
        case OP_LINEAR: pl_linear(op, step); break;
        case OP_ATTEND: pl_attend(op, step); break;
        case OP_GATHER: gather(op, step); break;
        case OP_COPY: copy(op, step); break;
        case OP_TOP: pl_top(op, step); break;
        default: __builtin_trap();
        }
    }
}
