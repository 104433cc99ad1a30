/* The passes in plain C, for every processor. */
#include <math.h>

#include "passes.h"

static float row_max(const float *x, int64_t n, float *maxima) {
    float top = -INFINITY;
    int has_nan = 0;
    if (maxima)
        for (int64_t i = 0; i < count_of_maxima(n); ++i) maxima[i] = -INFINITY;
    for (int64_t i = 0; i < n; ++i) {
        has_nan |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
        if (maxima) {
            float *slot = maxima + i / (GROUP * 16) * 16 + i % 16;
            *slot = x[i] > *slot ? x[i] : *slot;
        }
    }
    return has_nan ? NAN : top;
}

static void append(struct kept *kept, float value, int64_t place) {
    kept->values[kept->count] = value;
    kept->places[kept->count++] = (int32_t)place;
}

static void keep(const float *x, int64_t n, struct scaling scaling, float floor, const float *sets,
                 struct kept *kept) {
    kept->count = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (sets && !(sets[i / SET] >= floor)) continue;
        float value = (x[i] - scaling.top) / scaling.temperature;
        if (value >= floor) append(kept, value, i);
    }
}

static int64_t keep_and_total(const float *x, int64_t n, struct scaling scaling, float floor, struct kept *kept) {
    int64_t sum = 0;
    kept->count = 0;
    for (int64_t i = 0; i < n; ++i) {
        float value = (x[i] - scaling.top) / scaling.temperature;
        if (value >= scaling.floor) sum += mass_of(value);
        if (value >= floor) append(kept, value, i);
    }
    return sum;
}

static int64_t weigh(const float *values, int64_t n, int64_t *masses) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += masses[i] = mass_of(values[i]);
    return total;
}

static int64_t total(const float *x, int64_t n, struct scaling scaling) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) {
        float value = (x[i] - scaling.top) / scaling.temperature;
        if (value >= scaling.floor) sum += mass_of(value);
    }
    return sum;
}

static void share(const float *x, int64_t n, struct scaling scaling, double *out) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        float value = (x[i] - scaling.top) / scaling.temperature;
        int64_t mass = value >= scaling.floor ? mass_of(value) : 0;
        out[i] = (double)mass; /* exact: a mass has 41 bits */
        total += mass;
    }
    double each = 1.0 / (double)total;
    for (int64_t i = 0; i < n; ++i) out[i] *= each;
}

static int64_t race(const float *x, int64_t n, struct scaling scaling, const struct noise_key *key) {
    float best = BELOW_ANY_WINNER;
    int64_t winner = 0;
    for (int64_t first = 0; first < n; first += 4) {
        int64_t there = n - first < 4 ? n - first : 4;
        float value[4], sum;
        uint32_t word[4];
        int could_win = 0;
        for (int64_t i = 0; i < there; ++i) {
            value[i] = (x[first + i] - scaling.top) / scaling.temperature;
            could_win |= value[i] >= scaling.floor && value[i] + LARGEST_GUMBEL > best;
        }
        if (!could_win) continue;
        philox((uint32_t)(first >> 2), key, word);
        for (int64_t i = 0; i < there; ++i) {
            if (!(value[i] >= scaling.floor) || !(value[i] + gumbel_bound(word[i]) > best)) continue;
            sum = value[i] + (float)gumbel_of(word[i]);
            if (sum > best) best = sum, winner = first + i;
        }
    }
    return winner;
}

static int64_t race_kept(const struct kept *kept, const int64_t *ids, const struct noise_key *key, float bar) {
    float best = bar;
    int64_t winner = 0;
    for (int64_t i = 0; i < kept->count; ++i) {
        if (!(kept->values[i] + LARGEST_GUMBEL > best)) continue;
        int64_t token = ids ? ids[kept->places[i]] : kept->places[i];
        uint32_t word = noise_word(token, key);
        if (!(kept->values[i] + gumbel_bound(word) > best)) continue;
        float sum = kept->values[i] + (float)gumbel_of(word);
        if (sum > best) best = sum, winner = i;
    }
    return winner;
}

const struct passes scalar_passes = {row_max, keep, keep_and_total, weigh, total, share, race, race_kept};
