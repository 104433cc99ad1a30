/* Trees of drafted tokens, grown by a program that goes on from its own output: a draft's passes in one call.
 *
 * A node's number says where it hangs: the children of the root come first, then those of each row in the order in which
 * rows were run. So the parent of node n is what row n / branch - 1 ran, and the root where that is -1. */
#include <stdlib.h>
#include <string.h>

#include "program.h"

/* What a pass over several trees needs to describe its rows. */
struct work {
    int64_t *tokens, *positions, *selected;
    int32_t *row_segment, *paths, *path_starts;
    struct segment *segments;
};

static int32_t row_before(const struct tree *tree, int32_t node) { return node / tree->branch - 1; }

/* The children of the root (`row` -1) or of what a row ran, as far as `ranked` names them: ids, then log-probabilities. */
static int32_t propose(struct tree *tree, int32_t row, const int32_t *ranked, const struct forest *forest) {
    const float *log_probs = (const float *)(ranked + forest->num_best);
    double score = row < 0 ? 0.0 : tree->scores[tree->row_nodes[row]];
    for (int32_t i = 0; i < tree->branch; ++i) {
        int64_t token = forest->token_of ? forest->token_of[ranked[i]] : ranked[i];
        if (token < 0 || token >= forest->num_tokens) return BAD_TOKEN;
        tree->tokens[tree->num_nodes] = token;
        tree->log_probs[tree->num_nodes] = log_probs[i];
        tree->scores[tree->num_nodes++] = score + log_probs[i];
    }
    return 0;
}

/* Runs the likeliest of the nodes from `first` on: notes a row for each, likeliest first, of equals the older. */
static int32_t choose(struct tree *tree, int32_t first) {
    int32_t begin = tree->num_rows, count = tree->num_nodes - first;
    if (count > tree->width) count = tree->width;
    for (int32_t i = 0; i < count; ++i) {
        int32_t best = -1;
        for (int32_t node = first; node < tree->num_nodes; ++node) {
            int32_t is_taken = 0;
            for (int32_t row = begin; row < tree->num_rows; ++row) is_taken |= tree->row_nodes[row] == node;
            if (!is_taken && (best < 0 || tree->scores[node] > tree->scores[best])) best = node;
        }
        tree->row_nodes[tree->num_rows++] = best;
    }
    return count;
}

/* Describes the rows that `choose` noted last; the states that they go on from are copied to where the program reads them. */
static void describe(struct tree *tree, int32_t level, int32_t count, const struct forest *forest, struct step *step,
                     struct work *work, bf16 *states, int32_t **path) {
    int64_t bytes = forest->width * sizeof(bf16), segment = step->num_segments++;
    struct segment *into = &work->segments[segment];
    int32_t first = tree->num_rows - count;
    *into = tree->segment;
    into->first_row = step->num_rows;
    into->num_rows = count;
    into->write_at += first;
    into->paths = work->paths;
    /* Each tree's starts have one entry more than rows, so that they lie `segment` entries further on. */
    int32_t *starts = work->path_starts + step->num_rows + segment;
    into->path_starts = starts;
    for (int32_t i = 0; i < count; ++i) {
        int64_t row = step->num_rows++;
        int32_t node = tree->row_nodes[first + i], before = row_before(tree, node), at = level;
        work->tokens[row] = tree->tokens[node];
        work->positions[row] = tree->position + level;
        work->selected[row] = row;
        work->row_segment[row] = segment;
        starts[i] = *path - work->paths;
        for (int32_t above = first + i; above >= 0; above = row_before(tree, tree->row_nodes[above]))
            (*path)[--at] = above;
        *path += level;
        memcpy((char *)states + row * bytes,
               before < 0 ? (const char *)tree->state : (const char *)tree->states + before * bytes, bytes);
    }
    starts[count] = *path - work->paths;
}

static int32_t grow(const struct op *ops, int64_t num_ops, struct step *step, const struct forest *forest,
                    struct work *work) {
    bf16 *states = step->buffers[forest->in];
    const char *out = step->buffers[forest->out];
    const int32_t *best = step->buffers[forest->best];
    int64_t bytes = forest->width * sizeof(bf16);
    for (int64_t i = 0; i < forest->num_trees; ++i) {
        struct tree *tree = &forest->trees[i];
        tree->num_nodes = tree->num_rows = 0;
        if (propose(tree, -1, tree->ranked, forest)) return BAD_TOKEN;
    }
    for (int32_t level = 1;; ++level) {
        int32_t *path = work->paths;
        step->num_rows = step->num_segments = 0;
        for (int64_t i = 0; i < forest->num_trees; ++i) {
            struct tree *tree = &forest->trees[i];
            if (level >= tree->depth) continue;
            int32_t newest = tree->num_rows ? tree->num_nodes - tree->num_newest * tree->branch : 0;
            tree->num_newest = choose(tree, newest);
            describe(tree, level, tree->num_newest, forest, step, work, states, &path);
        }
        if (!step->num_rows) return 0;
        step->num_selected = step->num_rows;
        pl_run(ops, num_ops, step);
        for (int64_t i = 0, row = 0; i < forest->num_trees; ++i) {
            struct tree *tree = &forest->trees[i];
            if (level >= tree->depth) continue;
            for (int32_t own = tree->num_rows - tree->num_newest; own < tree->num_rows; ++own, ++row) {
                memcpy((char *)tree->states + own * bytes, out + row * bytes, bytes);
                if (propose(tree, own, best + row * 2 * forest->num_best, forest)) return BAD_TOKEN;
            }
        }
    }
}

/* Runs `first`, if there is one, then grows trees behind its rows or earlier ones; `step` has the buffers of their passes.
 * Returns 0, or what went wrong. */
int32_t pl_grow(const struct op *ops, int64_t num_ops, const struct step *first, const struct step *step,
                const struct forest *forest) {
    int64_t num_rows = 0, num_entries = 0;
    for (int64_t i = 0; i < forest->num_trees; ++i) {
        num_rows += forest->trees[i].width;
        num_entries += (int64_t)forest->trees[i].width * forest->trees[i].depth;
    }
    int64_t longs = 3 * num_rows, ints = num_rows + num_entries + num_rows + forest->num_trees;
    char *memory = malloc(longs * sizeof(int64_t) + forest->num_trees * sizeof(struct segment) + ints * sizeof(int32_t));
    if (!memory) return NO_MEMORY;
    struct work work = {.tokens = (int64_t *)memory};
    work.positions = work.tokens + num_rows;
    work.selected = work.positions + num_rows;
    work.segments = (struct segment *)(work.selected + num_rows);
    work.row_segment = (int32_t *)(work.segments + forest->num_trees);
    work.paths = work.row_segment + num_rows;
    work.path_starts = work.paths + num_entries;
    struct step passes = *step;
    passes.tokens = work.tokens;
    passes.positions = work.positions;
    passes.selected = work.selected;
    passes.row_segment = work.row_segment;
    passes.segments = work.segments;
    if (first) pl_run(ops, num_ops, first);
    int32_t failure = grow(ops, num_ops, &passes, forest, &work);
    free(memory);
    return failure;
}
