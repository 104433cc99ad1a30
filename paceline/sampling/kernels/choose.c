/* The choice of a row: which entries the filters leave, and which of them wins the Gumbel race. Called through ctypes. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "passes.h"

enum { KERNELS_VERSION = 5, KERNELS_REVISION = 2, NOT_CHOSEN = -1, PADDING = 16, STRIDE = 512 };

/* One row, as Python describes it; `kernels/__init__.py` has the same structure. */
struct row {
    const float *logits;
    const int64_t *ids; /* token id of each place, for the noise; none where they are the places */
    const float *maxima; /* the largest of every SET logits, where it is known; then a row is read once less */
    int64_t width;
    int64_t top_k; /* 0: all */
    double top_p;  /* 1: all */
    struct noise_key key;
    float temperature;
    float floor; /* on scaled logits, of which the largest is 0; -inf: all */
};

/* What a row's probabilities are shares of; Python holds it and knows its size. */
struct measured {
    struct scaling scaling; /* its floor the one that the filters left */
    int64_t total;
};

/* What a thread needs for a row, kept from call to call. */
struct scratch {
    int64_t width;
    float *maxima; /* of a row with a cut, scaled */
    struct kept kept;
    int64_t *masses;
    int32_t *members;
};

static _Thread_local struct scratch held;

static struct scratch *scratch_for(int64_t width) {
    if (held.width >= width) return &held;
    free(held.maxima), free(held.kept.values), free(held.kept.places), free(held.masses), free(held.members);
    held.maxima = malloc((size_t)count_of_maxima(width) * sizeof(float));
    held.kept.values = malloc((size_t)(width + PADDING) * sizeof(float));
    held.kept.places = malloc((size_t)(width + PADDING) * sizeof(int32_t));
    held.masses = malloc((size_t)width * sizeof(int64_t));
    held.members = malloc((size_t)(width + PADDING) * sizeof(int32_t)); /* of maxima, too */
    int has_all = held.maxima && held.kept.values && held.kept.places && held.masses && held.members;
    held.width = has_all ? width : 0;
    return has_all ? &held : 0;
}

static uint32_t key_of(float value) {
    uint32_t key;
    memcpy(&key, &value, sizeof key);
    return key & 0x7fffffff; /* minus the value: rising keys are falling values */
}

/* The smallest of n values, none above 0, of which the larger ones together weigh less than `wanted`; each weighs its mass,
 * or 1 without masses. The weights of all come to `wanted` at least. Radix selection on the bits of the float32s, `members`
 * being those whose leading bits agree. */
static float smallest_within(const float *values, const int64_t *masses, int64_t n, int64_t wanted, int32_t *members) {
    static const int shifts[] = {20, 10, 0};
    uint32_t found = 0;
    for (int level = 0; level < 3; ++level) {
        int64_t weights[2048] = {0};
        uint32_t last = level ? 1023 : 2047, bucket = 0;
        for (int64_t j = 0; j < n; ++j) {
            int64_t i = level ? members[j] : j;
            weights[key_of(values[i]) >> shifts[level] & last] += masses ? masses[i] : 1;
        }
        while (bucket < last && weights[bucket] < wanted) wanted -= weights[bucket++];
        found |= bucket << shifts[level];
        int64_t count = 0;
        for (int64_t j = 0; j < n; ++j) {
            int32_t i = level ? members[j] : (int32_t)j;
            members[count] = i;
            count += (key_of(values[i]) >> shifts[level]) == found >> shifts[level];
        }
        n = count;
    }
    found |= 0x80000000;
    float value;
    memcpy(&value, &found, sizeof value);
    return value;
}

/* Drop entries below a floor. */
static void raise_floor(struct kept *kept, float floor) {
    int64_t count = 0;
    for (int64_t i = 0; i < kept->count; ++i) {
        if (!(kept->values[i] >= floor)) continue;
        kept->values[count] = kept->values[i];
        kept->places[count++] = kept->places[i];
    }
    kept->count = count;
}

static int64_t num_maxima(const struct row *row) {
    return row->maxima ? count_of_sets(row->width) : count_of_maxima(row->width);
}

/* A floor that at least `count` scaled entries of the row reach, from its maxima: so many sets have one that does. Of a
 * wide row's many maxima several are taken together first, which is faster than to rank them all. */
static float floor_for(const struct row *row, struct scratch *scratch, struct scaling scaling, int64_t count) {
    int64_t n = num_maxima(row);
    if (n < count) return scaling.floor;
    float *folded = scratch->kept.values; /* free until something is kept */
    memcpy(folded, scratch->maxima, (size_t)n * sizeof *folded);
    while (n / 2 >= 2 * count) {
        int64_t rest = n - n / 2;
        for (int64_t i = 0; i < n / 2; ++i) folded[i] = folded[i] > folded[rest + i] ? folded[i] : folded[rest + i];
        n = rest;
    }
    float floor = smallest_within(folded, 0, n, count, scratch->members);
    return floor > scaling.floor ? floor : scaling.floor;
}

static int limits(const struct row *row) { return 0 < row->top_k && row->top_k < row->width; }

static int has_cut(const struct row *row) { return limits(row) || row->top_p < 1 || row->floor > -FLT_MAX; }

/* Min-p, top-k and top-p in turn, each on what the one before left; the survivors are in `scratch->kept`: all that reach the
 * floor that is returned. */
static float filter(const struct passes *passes, const struct row *row, struct scratch *scratch, struct scaling scaling) {
    static const int64_t likeliest[] = {128, 2048}; /* a nucleus is nearly always among so many, mostly the fewer */
    struct kept *kept = &scratch->kept;
    const float *sets = has_cut(row) && row->maxima ? scratch->maxima : 0;
    float floor = scaling.floor;
    int64_t total, have;
    if (limits(row)) {
        floor = floor_for(row, scratch, scaling, row->top_k);
        passes->keep(row->logits, row->width, scaling, floor, sets, kept);
        if (kept->count > row->top_k) {
            floor = smallest_within(kept->values, 0, kept->count, row->top_k, scratch->members);
            raise_floor(kept, floor);
        }
        if (!(row->top_p < 1)) return floor;
        total = have = passes->weigh(kept->values, kept->count, scratch->masses);
    } else if (row->top_p < 1) {
        floor = floor_for(row, scratch, scaling, likeliest[0]);
        total = passes->keep_and_total(row->logits, row->width, scaling, floor, kept);
        have = passes->weigh(kept->values, kept->count, scratch->masses);
    } else {
        passes->keep(row->logits, row->width, scaling, floor, sets, kept);
        return floor;
    }
    int64_t wanted = (int64_t)ceil((double)total * row->top_p);
    if (have < wanted) {
        floor = floor_for(row, scratch, scaling, likeliest[1]);
        passes->keep(row->logits, row->width, scaling, floor, sets, kept);
        have = passes->weigh(kept->values, kept->count, scratch->masses);
    }
    int has_all = have >= wanted;
    if (!has_all) {
        passes->keep(row->logits, row->width, scaling, scaling.floor, sets, kept);
        passes->weigh(kept->values, kept->count, scratch->masses);
    }
    floor = smallest_within(kept->values, scratch->masses, kept->count, wanted, scratch->members);
    if (has_all)
        raise_floor(kept, floor);
    else
        passes->keep(row->logits, row->width, scaling, floor, sets, kept);
    return floor;
}

static int scale(const struct passes *passes, const struct row *row, struct scratch *scratch, struct scaling *scaling) {
    float top = row->maxima ? passes->row_max(row->maxima, count_of_sets(row->width), 0)
                            : passes->row_max(row->logits, row->width, has_cut(row) ? scratch->maxima : 0);
    *scaling = (struct scaling){top, row->temperature, row->floor};
    if (has_cut(row)) {
        const float *maxima = row->maxima ? row->maxima : scratch->maxima;
        for (int64_t i = 0; i < num_maxima(row); ++i) scratch->maxima[i] = (maxima[i] - top) / row->temperature;
    }
    return isfinite(top);
}

static int64_t choose(const struct passes *passes, const struct row *row) {
    struct scratch *scratch = scratch_for(row->width);
    struct scaling scaling;
    if (!scratch || !scale(passes, row, scratch, &scaling)) return NOT_CHOSEN;
    if (!has_cut(row) && !row->ids) return passes->race(row->logits, row->width, scaling, &row->key);
    scaling.floor = filter(passes, row, scratch, scaling);
    /* Words come four to a block: where many are left, all of them are cheaper than some. */
    if (!row->ids && scratch->kept.count > row->width / 8)
        return passes->race(row->logits, row->width, scaling, &row->key);
    return scratch->kept.places[passes->race_kept(&scratch->kept, row->ids, &row->key, BELOW_ANY_WINNER)];
}

/* The first `count` places of the race, best first, and the sums they ran with; fewer where filters left fewer. */
static int64_t rank(const struct passes *passes, const struct row *row, int64_t count, int64_t *places, float *sums) {
    struct scratch *scratch = scratch_for(row->width);
    struct scaling scaling;
    if (!scratch || !scale(passes, row, scratch, &scaling)) return NOT_CHOSEN;
    filter(passes, row, scratch, scaling);
    struct kept *kept = &scratch->kept;
    int64_t found = 0;
    for (; found < count && found < kept->count; ++found) {
        int64_t winner = passes->race_kept(kept, row->ids, &row->key, -INFINITY);
        if (kept->values[winner] == -INFINITY) break;
        int64_t place = kept->places[winner];
        places[found] = place;
        sums[found] = kept->values[winner] + (float)gumbel_of(noise_word(row->ids ? row->ids[place] : place, &row->key));
        kept->values[winner] = -INFINITY; /* out of the race */
    }
    return found;
}

static int64_t process(const struct passes *passes, const struct row *row, float *out) {
    struct scratch *scratch = scratch_for(row->width);
    struct scaling scaling;
    if (!scratch || !scale(passes, row, scratch, &scaling)) return NOT_CHOSEN;
    filter(passes, row, scratch, scaling);
    const struct kept *kept = &scratch->kept;
    for (int64_t i = 0; i < row->width; ++i) out[i] = -INFINITY;
    for (int64_t i = 0; i < kept->count; ++i) out[kept->places[i]] = kept->values[i];
    return kept->count;
}

/* Shares of the mass; 0 for what the filters took. */
static int64_t share(const struct passes *passes, const struct row *row, double *out) {
    struct scratch *scratch = scratch_for(row->width);
    struct scaling scaling;
    if (!scratch || !scale(passes, row, scratch, &scaling)) return NOT_CHOSEN;
    if (!has_cut(row)) {
        passes->share(row->logits, row->width, scaling, out);
        return row->width;
    }
    filter(passes, row, scratch, scaling);
    const struct kept *kept = &scratch->kept;
    double each = 1.0 / (double)passes->weigh(kept->values, kept->count, scratch->masses);
    memset(out, 0, (size_t)row->width * sizeof *out);
    for (int64_t i = 0; i < kept->count; ++i) out[kept->places[i]] = (double)scratch->masses[i] * each;
    return kept->count;
}

static int64_t measure(const struct passes *passes, const struct row *row, struct measured *out) {
    struct scratch *scratch = scratch_for(row->width);
    if (!scratch || !scale(passes, row, scratch, &out->scaling)) return NOT_CHOSEN;
    if (!has_cut(row)) {
        out->total = passes->total(row->logits, row->width, out->scaling);
        return row->width;
    }
    out->scaling.floor = filter(passes, row, scratch, out->scaling);
    out->total = passes->weigh(scratch->kept.values, scratch->kept.count, scratch->masses);
    return scratch->kept.count;
}

static const struct passes *form(int32_t only_scalar) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!only_scalar && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return &avx512_passes;
#endif
    return &scalar_passes;
}

/* What this library was built as, for Python to check its own against: the version rises with what changes, the revision with
 * what is added. */
int64_t pl_noise_built_as(int32_t which) {
    int64_t facts[] = {KERNELS_VERSION, sizeof(struct row), sizeof(struct measured), KERNELS_REVISION};
    return 0 <= which && which < (int32_t)(sizeof facts / sizeof *facts) ? facts[which] : -1;
}

/* `out` gets the place that each row chooses, or -1 for a row without a finite largest entry. */
void pl_choose(const struct row *rows, int64_t num_rows, int32_t num_threads, int32_t only_scalar, int64_t *out) {
    const struct passes *passes = form(only_scalar);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i) out[i] = choose(passes, rows + i);
}

/* `places` and `sums`, `count` of each row one after the other, get the first of each race; `counts` how many, -1 for a row
 * as above. */
void pl_rank(const struct row *rows, int64_t num_rows, int64_t count, int32_t num_threads, int32_t only_scalar,
             int64_t *places, float *sums, int64_t *counts) {
    const struct passes *passes = form(only_scalar);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i)
        counts[i] = rank(passes, rows + i, count, places + i * count, sums + i * count);
}

/* The first of `n` entries that is `value`, or NaN where that is what it is. */
static int64_t first_of(const float *x, int64_t n, float value) {
    int64_t i = 0;
    if (isnan(value))
        while (i < n - 1 && !isnan(x[i])) ++i;
    else
        while (i < n - 1 && x[i] != value) ++i;
    return i;
}

/* `out` gets the place of each row's largest entry, the first of equals, a NaN above all: of every row its maxima are read,
 * and one set. Rows lie `stride` entries apart, their maxima `maxima_stride`. */
void pl_largest(const float *logits, int64_t stride, const float *maxima, int64_t maxima_stride, int64_t num_rows,
                int64_t width, int32_t num_threads, int32_t only_scalar, int64_t *out) {
    const struct passes *passes = form(only_scalar);
    int64_t sets = count_of_sets(width);
#pragma omp parallel for num_threads(num_threads) if (num_rows > 64)
    for (int64_t i = 0; i < num_rows; ++i) {
        float top = passes->row_max(maxima + i * maxima_stride, sets, 0);
        int64_t first = first_of(maxima + i * maxima_stride, sets, top) * SET;
        int64_t there = width - first < SET ? width - first : SET;
        out[i] = first + first_of(logits + i * stride + first, there, top);
    }
}

/* `out`, rows as wide as the widths say one after the other, gets scaled logits, -inf where a filter took them; `counts` -1
 * for a row as above, whose part of `out` is then untouched. */
void pl_process(const struct row *rows, int64_t num_rows, int32_t num_threads, int32_t only_scalar, float *out,
                int64_t *counts) {
    const struct passes *passes = form(only_scalar);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i) counts[i] = process(passes, rows + i, out + i * rows[i].width);
}

/* The same for probabilities, rows of which follow one another in `out`. */
void pl_share(const struct row *rows, int64_t num_rows, int32_t num_threads, int32_t only_scalar, double *out,
              int64_t *counts) {
    const struct passes *passes = form(only_scalar);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i) counts[i] = share(passes, rows + i, out + i * rows[i].width);
}

/* The mass of one place. */
static int64_t mass_at(const struct row *row, struct scaling scaling, int64_t place) {
    float value = (row->logits[place] - scaling.top) / scaling.temperature;
    return value >= scaling.floor ? mass_of(value) : 0;
}

/* Prepares single probabilities of rows; `counts` as in `pl_process`. */
void pl_measure(const struct row *rows, int64_t num_rows, int32_t num_threads, int32_t only_scalar, struct measured *out,
                int64_t *counts) {
    const struct passes *passes = form(only_scalar);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i) counts[i] = measure(passes, rows + i, out + i);
}

/* One of them: what `pl_share` writes at that place. */
double pl_share_of(const struct row *row, const struct measured *measured, int64_t place) {
    return (double)mass_at(row, measured->scaling, place) * (1.0 / (double)measured->total);
}

static int is_among(int64_t place, const int64_t *places, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (places[i] == place) return 1;
    return 0;
}

/* Whether any of the entries from `first` on, a whole number of sets, may have a mass, as far as the maxima tell. */
static int may_weigh(const struct row *row, struct scaling scaling, int64_t first, int64_t end) {
    if (!row->maxima) return 1;
    for (int64_t set = first / SET; set < count_of_sets(end); ++set)
        if ((row->maxima[set] - scaling.top) / scaling.temperature >= scaling.floor) return 1;
    return 0;
}

/* The place at which the running sum of masses passes `noise` times their total, some distinct places left out; -1 where
 * nothing is left. Whole strides are summed before the one that matters is walked. */
int64_t pl_draw(const struct row *row, const struct measured *measured, double noise, int32_t only_scalar,
                const int64_t *without, int64_t num_without) {
    const struct passes *passes = form(only_scalar);
    struct scaling scaling = measured->scaling;
    int64_t total = measured->total;
    for (int64_t i = 0; i < num_without; ++i) total -= mass_at(row, scaling, without[i]);
    if (total <= 0) return NOT_CHOSEN;
    int64_t wanted = (int64_t)(noise * (double)total);
    if (wanted >= total) wanted = total - 1; /* the product was rounded up */
    for (int64_t first = 0; first < row->width; first += STRIDE) {
        int64_t end = first + STRIDE < row->width ? first + STRIDE : row->width;
        if (!may_weigh(row, scaling, first, end)) continue;
        int64_t mass = passes->total(row->logits + first, end - first, scaling);
        for (int64_t i = 0; i < num_without; ++i)
            if (first <= without[i] && without[i] < end) mass -= mass_at(row, scaling, without[i]);
        if (wanted >= mass) {
            wanted -= mass;
            continue;
        }
        for (int64_t place = first; place < end; ++place) {
            if (is_among(place, without, num_without)) continue;
            wanted -= mass_at(row, scaling, place);
            if (wanted < 0) return place;
        }
    }
    return NOT_CHOSEN;
}

/* Uniform number `index` of a decision. */
double pl_uniform(uint64_t seed, uint64_t position, uint32_t role, uint32_t index) {
    struct noise_key key = {seed, position, role};
    uint32_t word[4];
    philox(index >> 1, &key, word);
    const uint32_t *pair = word + 2 * (index & 1);
    return ((double)((uint64_t)pair[0] << 20 | pair[1] >> 12) + 0.5) * 0x1p-52;
}

/* The Gumbel numbers of n token ids, or of the first n. */
void pl_gumbel(uint64_t seed, uint64_t position, uint32_t role, const int64_t *ids, int64_t n, float *out) {
    struct noise_key key = {seed, position, role};
    for (int64_t i = 0; i < n; ++i) out[i] = (float)gumbel_of(noise_word(ids ? ids[i] : i, &key));
}
