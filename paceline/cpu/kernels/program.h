/* A model as a list of operations over buffers of rows; `program.py` builds it, `program.c` runs it. */
#ifndef PACELINE_PROGRAM_H
#define PACELINE_PROGRAM_H

#include <stdint.h>

#include "simd.h"

enum { OP_EMBED, OP_NORM, OP_LINEAR, OP_ATTEND, OP_GATHER, OP_COPY, OP_TOP };
enum { STORE, ADD, GATE_SILU, GATE_GELU, STORE_FLOAT };

/* Raised with every change to the structures, the enumerations or what an operation means. */
enum { PROGRAM_VERSION = 4 };

/* Columns of a weight panel. */
enum { PANEL = 32 };

/* One operation. `in`, `out` and `residual` index the program's buffers; -1 is none. */
struct op {
    int32_t kind, in, out, residual;
    int32_t epilogue;    /* OP_LINEAR */
    int32_t layer;       /* OP_ATTEND: layer of the cache */
    int32_t on_selected; /* runs over the selected rows (those that want logits) instead of all */
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t window;      /* OP_ATTEND: tokens a row sees, itself included; 0 is all */
    int32_t in_is_bound; /* `in` is the caller's, with nothing readable behind its last row */
    int32_t count;       /* OP_TOP: entries wanted of each row */
    int32_t maxima;      /* OP_LINEAR, STORE_FLOAT: buffer of the largest of each panel's columns, or -1 */
    int64_t in_width;    /* of a row of `in`, in elements */
    int64_t out_width;   /* of a row of `out` */
    int64_t out_offset;  /* OP_NORM: first column written */
    float eps, scale;
    const void *weight;  /* OP_LINEAR: packed panels; OP_EMBED: [vocab, width] */
    const bf16 *norm;    /* OP_NORM, OP_LINEAR: [in_width] or none; OP_ATTEND: [heads + kv_heads, head_dim] or none */
    const float *bias;   /* OP_LINEAR: [out_width] or none */
    const bf16 *rope;    /* OP_ATTEND: [positions, 2, head_dim], cosine then signed sine */
};

/* The rows of one sequence. Row i is written to cache row `write_at + i`. A chain (`paths` none) sees everything up
 * to itself. A row of a tree sees the first `past` cache rows, then those that its path names, itself last. */
struct segment {
    int64_t first_row, num_rows, past, write_at;
    bf16 *cache; /* [layers][2 * kv_heads][capacity][head_dim], keys first; strides in elements */
    int64_t layer_stride, head_stride;
    const int32_t *paths;       /* cache rows, less `past`, in order of depth */
    const int32_t *path_starts; /* [num_rows + 1] into paths */
};

struct step {
    int64_t num_rows, num_selected, num_segments;
    const int64_t *tokens, *positions; /* [num_rows] */
    const int64_t *selected;           /* [num_selected] row indices */
    const int32_t *row_segment;        /* [num_rows]; -1 is padding */
    const struct segment *segments;
    void *const *buffers; /* own ones have eight readable rows behind the last, and so has scratch */
    bf16 *scratch;       /* [num_rows, widest in_width]: normed rows on their way into a product */
    float *scores;       /* [num_threads][scores_stride] */
    int64_t scores_stride;
    int32_t num_threads;
    int32_t is_resident; /* the weights stay in a cache between runs: arithmetic takes the time, not memory */
};

/* A sequence's tree; see `grow.c`. Its arrays have room for r = (depth - 1) * width rows and branch * (1 + r) nodes. */
struct tree {
    int32_t depth, width, branch;          /* levels of nodes, rows run at each but the last, children of every row */
    int32_t num_nodes, num_rows;           /* so far */
    int32_t num_newest;                    /* rows of the newest pass */
    int64_t position;                      /* a node at depth d stands at `position + d` */
    const int32_t *ranked;                 /* what the root's row proposes, as OP_TOP writes it */
    const bf16 *state;                     /* of the root's row */
    struct segment segment;                /* its cache, and where the first row is written */
    int32_t *tokens;                       /* of nodes */
    float *log_probs;                      /* of nodes, given their path */
    double *scores;                        /* of nodes: sums along the path */
    int32_t *row_nodes;                    /* of rows: the node that each ran */
    bf16 *states;                          /* of rows: the program's outputs */
};

struct forest {
    int64_t num_trees;
    struct tree *trees;
    const int64_t *token_of;   /* of ranked ids, or none where they are the same */
    int64_t num_tokens;        /* that may be run */
    int64_t width;             /* of a state */
    int32_t in, out;           /* buffers of the states that rows go on from, and of their outputs */
    int32_t best, num_best;    /* OP_TOP's buffer, and its count */
};

/* What `pl_grow` returns where it failed. */
enum { BAD_TOKEN = 1, NO_MEMORY = 2 };

void pl_run(const struct op *ops, int64_t num_ops, const struct step *step);
void pl_linear(const struct op *op, const struct step *step);
void pl_norm(const struct op *op, const struct step *step);
void pl_norm_rows(const bf16 *in, int64_t in_stride, const bf16 *weight, float eps, int64_t width, int64_t num_rows,
                  bf16 *out, int64_t out_stride, const bf16 *residual);
void pl_attend(const struct op *op, const struct step *step);
void pl_top(const struct op *op, const struct step *step);

static inline int64_t rows_of(const struct op *op, const struct step *step) {
    return op->on_selected ? step->num_selected : step->num_rows;
}

#endif
