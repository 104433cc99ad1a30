/* The passes over a row of logits that cost time, in the forms that processors have. Every form gives the same bits. */
#ifndef PACELINE_PASSES_H
#define PACELINE_PASSES_H

#include "noise.h"

enum { SET = 32 }; /* entries, one after the other, whose largest a row may come with */
enum { GROUP = 16 }; /* entries that share one entry of `maxima`, at most */

/* How a row's logits become what is left to choose from: (x - top) / temperature, nothing below `floor`. */
struct scaling {
    float top, temperature, floor;
};

/* Entries of a row that are left, places rising. */
struct kept {
    float *values;
    int32_t *places;
    int64_t count;
};

struct passes {
    /* The largest entry, NaN if any entry is one. Where `maxima` is given it gets the largest of each of
     * `count_of_maxima(n)` disjoint sets of entries. */
    float (*row_max)(const float *x, int64_t n, float *maxima);
    /* Scale a row and keep what reaches `floor`, which is not below the scaling's own. Where `sets` is given, the largest
     * scaled entry of every SET, the sets that do not reach `floor` are not read. */
    void (*keep)(const float *x, int64_t n, struct scaling scaling, float floor, const float *sets, struct kept *kept);
    /* The same, and the mass of all that reach the scaling's floor. */
    int64_t (*keep_and_total)(const float *x, int64_t n, struct scaling scaling, float floor, struct kept *kept);
    /* The masses of n values, and their sum. */
    int64_t (*weigh)(const float *values, int64_t n, int64_t *masses);
    /* The mass of all that reach the floor. */
    int64_t (*total)(const float *x, int64_t n, struct scaling scaling);
    /* Each entry's share of the mass of all that reach the floor; 0 for those that do not. */
    void (*share)(const float *x, int64_t n, struct scaling scaling, double *out);
    /* Where value plus Gumbel number is largest, first of equals: a place in the row. Token ids are the places. */
    int64_t (*race)(const float *x, int64_t n, struct scaling scaling, const struct noise_key *key);
    /* The same among kept entries with a sum above `bar`: an index into them, 0 where there is none. Token ids are the
     * places, or `ids[place]`. */
    int64_t (*race_kept)(const struct kept *kept, const int64_t *ids, const struct noise_key *key, float bar);
};

static inline int64_t count_of_sets(int64_t n) { return (n + SET - 1) / SET; }

static inline int64_t count_of_maxima(int64_t n) { return (n + GROUP * 16 - 1) / (GROUP * 16) * 16; }

extern const struct passes scalar_passes;
#if defined(__x86_64__)
extern const struct passes avx512_passes;
#endif

#endif
