/* The passes for processors with AVX-512 (F, DQ, BW, VL): sixteen entries at a time, the same bits as `scalar.c`. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>

#include "passes.h"

#define AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#define AVX512_INLINE AVX512 static inline __attribute__((always_inline))

AVX512_INLINE __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

AVX512 static float row_max(const float *x, int64_t n, float *maxima) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    __mmask16 has_nan = 0;
    for (int64_t first = 0; first < n; first += GROUP * 16) {
        __m512 group = _mm512_set1_ps(-INFINITY);
        for (int64_t i = first; i < n && i < first + GROUP * 16; i += 16) {
            __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), first_lanes(n - i), x + i);
            has_nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
            group = _mm512_max_ps(group, v);
        }
        if (maxima) _mm512_storeu_ps(maxima + first / GROUP, group);
        top = _mm512_max_ps(top, group);
    }
    return has_nan ? NAN : _mm512_reduce_max_ps(top);
}

/* Scaled entries and which of them reach the floor; lanes past the end are among those that do not. */
AVX512_INLINE __m512 scaled(const float *x, int64_t left, struct scaling scaling, __mmask16 *reach) {
    __mmask16 there = first_lanes(left);
    __m512 v = _mm512_sub_ps(_mm512_maskz_loadu_ps(there, x), _mm512_set1_ps(scaling.top));
    if (scaling.temperature != 1.0f) v = _mm512_div_ps(v, _mm512_set1_ps(scaling.temperature));
    *reach = _mm512_mask_cmp_ps_mask(there, v, _mm512_set1_ps(scaling.floor), _CMP_GE_OQ);
    return v;
}

enum { SIDE = 4 }; /* vectors whose powers are found side by side, so that none waits for its own last step */

/* 2^40 exp(x), not cut yet, of up to SIDE vectors in their places. */
AVX512_INLINE void powers(__m512 x[], const int vectors) {
    static const float series[] = {EXP_P4, EXP_P3, EXP_P2, EXP_P1, EXP_P0, 1.0f};
    /* Adding this rounds to a whole number and leaves it, 40 added, in the lowest bits. */
    const __m512 to_whole = _mm512_set1_ps(0x1.8p23f + MASS_BITS);
    __m512 power[SIDE], r[SIDE];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
        __m512 y = _mm512_mul_ps(_mm512_max_ps(x[j], _mm512_set1_ps(EXP_LOWEST)), _mm512_set1_ps(LOG2_E));
        power[j] = _mm512_add_ps(y, to_whole);
        r[j] = _mm512_sub_ps(y, _mm512_sub_ps(power[j], to_whole));
        x[j] = _mm512_set1_ps(EXP_P5);
    }
#pragma GCC unroll 6
    for (int term = 0; term < 6; ++term)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; ++j)
            x[j] = _mm512_add_ps(_mm512_mul_ps(x[j], r[j]), _mm512_set1_ps(series[term]));
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
        __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(power[j]), 23);
        x[j] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x[j]), exponent));
    }
}

/* The masses of the lanes named, 0 elsewhere: the first eight and the last eight. */
AVX512_INLINE void masses_16(__m512 x, __mmask16 lanes, __m512i mass[2]) {
    powers(&x, 1);
    __m512 p = _mm512_maskz_mov_ps(lanes, x);
    mass[0] = _mm512_cvttps_epi64(_mm512_castps512_ps256(p));
    mass[1] = _mm512_cvttps_epi64(_mm512_extractf32x8_ps(p, 1));
}

/* A sum of masses. Nearly all are small: those are added up in 32 bits, at most 32 times before they are widened. */
struct mass_sum {
    __m512i wide, narrow;
    int left;
};
enum { NARROW = 28 };
#define SMALL_MASS_BELOW -9.02f /* 2^27 at most there */

AVX512_INLINE void widen_sum(struct mass_sum *sum) {
    __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(sum->narrow));
    __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti32x8_epi32(sum->narrow, 1));
    sum->wide = _mm512_add_epi64(sum->wide, _mm512_add_epi64(low, high));
    sum->narrow = _mm512_setzero_si512();
    sum->left = NARROW;
}

AVX512_INLINE struct mass_sum no_mass(void) {
    return (struct mass_sum){_mm512_setzero_si512(), _mm512_setzero_si512(), NARROW};
}

AVX512_INLINE void add_masses(struct mass_sum *sum, __m512 x[], const __mmask16 lanes[], const int vectors) {
    __mmask16 large = 0;
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j)
        large |= _mm512_mask_cmp_ps_mask(lanes[j], x[j], _mm512_set1_ps(SMALL_MASS_BELOW), _CMP_GE_OQ);
    if (large) {
        for (int j = 0; j < vectors; ++j) {
            __m512i mass[2];
            masses_16(x[j], lanes[j], mass);
            sum->wide = _mm512_add_epi64(sum->wide, _mm512_add_epi64(mass[0], mass[1]));
        }
        return;
    }
    powers(x, vectors);
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j)
        sum->narrow = _mm512_add_epi32(sum->narrow, _mm512_maskz_cvttps_epi32(lanes[j], x[j]));
    if ((sum->left -= vectors) <= 0) widen_sum(sum);
}

AVX512_INLINE int64_t sum_of(struct mass_sum *sum) {
    widen_sum(sum);
    return _mm512_reduce_add_epi64(sum->wide);
}

/* Append the lanes of a vector that reach a floor. */
AVX512_INLINE void append(struct kept *kept, __m512 v, __mmask16 reach, int64_t first) {
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)first));
    /* Compressed in registers and stored whole: a masked store of compressed lanes is slow on some processors. */
    _mm512_storeu_ps(kept->values + kept->count, _mm512_maskz_compress_ps(reach, v));
    _mm512_storeu_si512(kept->places + kept->count, _mm512_maskz_compress_epi32(reach, places));
    kept->count += __builtin_popcount(reach);
}

AVX512_INLINE __mmask16 reaches(__m512 v, __mmask16 lanes, float floor) {
    return _mm512_mask_cmp_ps_mask(lanes, v, _mm512_set1_ps(floor), _CMP_GE_OQ);
}

AVX512 static void keep(const float *x, int64_t n, struct scaling scaling, float floor, const float *sets,
                        struct kept *kept) {
    kept->count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        if (sets && !(sets[i / SET] >= floor)) {
            i += SET - 16; /* found at a set's first half */
            continue;
        }
        __mmask16 reach;
        __m512 v = scaled(x + i, n - i, scaling, &reach);
        reach = reaches(v, reach, floor);
        if (reach) append(kept, v, reach, i);
    }
}

AVX512_INLINE void scale_side(const float *x, int64_t n, int64_t first, struct scaling scaling, __m512 v[SIDE],
                              __mmask16 reach[SIDE]) {
#pragma GCC unroll 4
    for (int j = 0; j < SIDE; ++j) {
        int64_t left = n - first - 16 * j;
        v[j] = scaled(x + first + 16 * j, left > 0 ? left : 0, scaling, reach + j);
    }
}

AVX512 static int64_t keep_and_total(const float *x, int64_t n, struct scaling scaling, float floor, struct kept *kept) {
    struct mass_sum sum = no_mass();
    kept->count = 0;
    for (int64_t i = 0; i < n; i += 16 * SIDE) {
        __m512 v[SIDE];
        __mmask16 reach[SIDE], any = 0;
        scale_side(x, n, i, scaling, v, reach);
#pragma GCC unroll 4
        for (int j = 0; j < SIDE; ++j) any |= reaches(v[j], reach[j], floor);
        if (any)
            for (int j = 0; j < SIDE; ++j) {
                __mmask16 kept_here = reaches(v[j], reach[j], floor);
                if (kept_here) append(kept, v[j], kept_here, i + 16 * j);
            }
        add_masses(&sum, v, reach, SIDE);
    }
    return sum_of(&sum);
}

AVX512 static int64_t weigh(const float *values, int64_t n, int64_t *masses) {
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 there = first_lanes(n - i);
        __m512i mass[2];
        masses_16(_mm512_maskz_loadu_ps(there, values + i), there, mass);
        _mm512_mask_storeu_epi64(masses + i, (__mmask8)there, mass[0]);
        _mm512_mask_storeu_epi64(masses + i + 8, (__mmask8)(there >> 8), mass[1]);
        total = _mm512_add_epi64(total, _mm512_add_epi64(mass[0], mass[1]));
    }
    return _mm512_reduce_add_epi64(total);
}

AVX512 static int64_t total(const float *x, int64_t n, struct scaling scaling) {
    struct mass_sum sum = no_mass();
    for (int64_t i = 0; i < n; i += 16 * SIDE) {
        __m512 v[SIDE];
        __mmask16 reach[SIDE];
        scale_side(x, n, i, scaling, v, reach);
        add_masses(&sum, v, reach, SIDE);
    }
    return sum_of(&sum);
}

AVX512 static void share(const float *x, int64_t n, struct scaling scaling, double *out) {
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 there = first_lanes(n - i), reach;
        __m512 v = scaled(x + i, n - i, scaling, &reach);
        __m512i mass[2];
        masses_16(v, reach, mass);
        _mm512_mask_storeu_pd(out + i, (__mmask8)there, _mm512_cvtepi64_pd(mass[0]));
        _mm512_mask_storeu_pd(out + i + 8, (__mmask8)(there >> 8), _mm512_cvtepi64_pd(mass[1]));
        total = _mm512_add_epi64(total, _mm512_add_epi64(mass[0], mass[1]));
    }
    __m512d each = _mm512_set1_pd(1.0 / (double)_mm512_reduce_add_epi64(total));
    for (int64_t i = 0; i < n; i += 8) {
        __mmask8 there = (__mmask8)first_lanes(n - i);
        _mm512_mask_storeu_pd(out + i, there, _mm512_mul_pd(_mm512_maskz_loadu_pd(there, out + i), each));
    }
}

/* What Philox needs of a key, in every lane. Only the block differs between the blocks of a decision, so that half of the
 * first two rounds is the same for all and made once. In memory, where an operand costs nothing; the compiler would make
 * them anew from scalars for every block. */
struct wide_key {
    __m512i first_2, second_0, second_2, second_3;
    __m512i round[PHILOX_ROUNDS][2];
};

AVX512_INLINE void widen(const struct noise_key *key, struct wide_key *wide) {
    uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
    uint64_t p1 = (uint64_t)(uint32_t)key->position * PHILOX_M1;
    uint32_t w0 = (uint32_t)(p1 >> 32) ^ key->role ^ k0;
    uint64_t p0 = (uint64_t)w0 * PHILOX_M0;
    wide->first_2 = _mm512_set1_epi64((uint32_t)(key->position >> 32) ^ k1);
    wide->second_0 = _mm512_set1_epi64((uint32_t)p1 ^ (k0 + PHILOX_W0));
    wide->second_2 = _mm512_set1_epi64((uint32_t)(p0 >> 32) ^ (k1 + PHILOX_W1));
    wide->second_3 = _mm512_set1_epi64((uint32_t)p0);
    for (int i = 0; i < PHILOX_ROUNDS; ++i) {
        wide->round[i][0] = _mm512_set1_epi64(k0);
        wide->round[i][1] = _mm512_set1_epi64(k1);
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
}

/* Philox of sets of eight blocks, which stand in the low halves of each `w[.][0]`; results in the low halves, the high
 * ones hold anything. Sets side by side hide the time that a round's steps wait for one another. */
AVX512_INLINE void philox_wide(__m512i w[][4], const int sets, const struct wide_key *key) {
    __m512i m0 = _mm512_set1_epi64(PHILOX_M0), m1 = _mm512_set1_epi64(PHILOX_M1);
#pragma GCC unroll 4
    for (int s = 0; s < sets; ++s) {
        __m512i p0 = _mm512_mul_epu32(w[s][0], m0);
        __m512i p1 = _mm512_mul_epu32(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), key->first_2), m1);
        w[s][0] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), key->second_0);
        w[s][1] = p1;
        w[s][2] = _mm512_xor_si512(p0, key->second_2);
        w[s][3] = key->second_3;
    }
#pragma GCC unroll 10
    for (int i = 2; i < PHILOX_ROUNDS; ++i)
#pragma GCC unroll 4
        for (int s = 0; s < sets; ++s) {
            __m512i p0 = _mm512_mul_epu32(w[s][0], m0), p1 = _mm512_mul_epu32(w[s][2], m1);
            w[s][0] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), w[s][1], key->round[i][0], 0x96);
            w[s][1] = p1;
            w[s][2] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), w[s][3], key->round[i][1], 0x96);
            w[s][3] = p0;
        }
}

struct leader {
    float best;
    int64_t winner;
};

/* Lanes whose word is small enough to win: `gumbel_bound` without its half, in one step with the sum. It bounds what is
 * rounded otherwise, so it needs values that are not far below the leader's; `could_win` sees to that. */
AVX512_INLINE __mmask16 still_wins(const struct leader *leader, __m512 values, __m512i words, __mmask16 lanes) {
    __m512 log = _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepu32_ps(words)));
    __m512 highest = _mm512_fmadd_ps(log, _mm512_set1_ps(UPPER_SLOPE), values);
    return _mm512_mask_cmp_ps_mask(lanes, highest, _mm512_set1_ps(leader->best - UPPER_OFFSET), _CMP_GT_OQ);
}

/* Let those of sixteen entries run that could win; few can, once a good one has been seen. */
AVX512_INLINE void run_16(struct leader *leader, __m512 values, __m512i words, __mmask16 lanes, int64_t first) {
    lanes = still_wins(leader, values, words, lanes);
    if (__builtin_expect(!lanes, 1)) return;
    float value[16];
    uint32_t word[16];
    _mm512_storeu_ps(value, values);
    _mm512_storeu_si512(word, words);
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        float sum = value[lane] + (float)gumbel_of(word[lane]);
        if (sum > leader->best) leader->best = sum, leader->winner = first + lane;
    }
}

AVX512_INLINE __mmask16 could_win(const struct leader *leader, __m512 values, __mmask16 lanes) {
    return _mm512_mask_cmp_ps_mask(lanes, values, _mm512_set1_ps(leader->best - LARGEST_GUMBEL), _CMP_GT_OQ);
}

enum { SETS = 4 }; /* of eight blocks, side by side in a race */

AVX512 static int64_t race(const float *x, int64_t n, struct scaling scaling, const struct noise_key *key) {
    struct leader leader = {BELOW_ANY_WINNER, 0};
    struct wide_key wide;
    widen(key, &wide);
    /* Blocks in the order that puts the words of the first four, then of the last four, side by side below. */
    __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t i = 0; i < n; i += 32 * SETS) {
        __m512 values[2 * SETS];
        __mmask16 lanes[2 * SETS];
        int any = 0;
#pragma GCC unroll 8
        for (int j = 0; j < 2 * SETS; ++j) {
            int64_t left = n - i - 16 * j;
            values[j] = scaled(x + i + 16 * j, left > 0 ? left : 0, scaling, lanes + j);
            lanes[j] = could_win(&leader, values[j], lanes[j]);
            any |= lanes[j];
        }
        if (!any) continue;
        __m512i w[SETS][4];
#pragma GCC unroll 4
        for (int s = 0; s < SETS; ++s) w[s][0] = _mm512_add_epi64(order, _mm512_set1_epi64((i >> 2) + 8 * s));
        philox_wide(w, SETS, &wide);
#pragma GCC unroll 4
        for (int s = 0; s < SETS; ++s) {
            __m512i w01 = _mm512_mask_blend_epi32(0xAAAA, w[s][0], _mm512_slli_epi64(w[s][1], 32));
            __m512i w23 = _mm512_mask_blend_epi32(0xAAAA, w[s][2], _mm512_slli_epi64(w[s][3], 32));
            run_16(&leader, values[2 * s], _mm512_unpacklo_epi64(w01, w23), lanes[2 * s], i + 32 * s);
            run_16(&leader, values[2 * s + 1], _mm512_unpackhi_epi64(w01, w23), lanes[2 * s + 1], i + 32 * s + 16);
        }
    }
    return leader.winner;
}

/* The words of sixteen tokens. */
AVX512_INLINE __m512i words_16(const __m512i tokens[2], const struct wide_key *key) {
    __m512i w[2][4];
    __m256i half[2];
    for (int s = 0; s < 2; ++s) w[s][0] = _mm512_srli_epi64(tokens[s], 2);
    philox_wide(w, 2, key);
    for (int s = 0; s < 2; ++s) {
        __m512i which = _mm512_and_si512(tokens[s], _mm512_set1_epi64(3)), word = w[s][0];
        for (int j = 1; j < 4; ++j)
            word = _mm512_mask_mov_epi64(word, _mm512_cmpeq_epi64_mask(which, _mm512_set1_epi64(j)), w[s][j]);
        half[s] = _mm512_cvtepi64_epi32(word);
    }
    return _mm512_inserti32x8(_mm512_castsi256_si512(half[0]), half[1], 1);
}

AVX512 static int64_t race_kept(const struct kept *kept, const int64_t *ids, const struct noise_key *key, float bar) {
    struct leader leader = {bar, 0};
    struct wide_key wide;
    widen(key, &wide);
    for (int64_t i = 0; i < kept->count; i += 16) {
        __mmask16 lanes = first_lanes(kept->count - i);
        __m512 values = _mm512_maskz_loadu_ps(lanes, kept->values + i);
        lanes = could_win(&leader, values, lanes);
        if (!lanes) continue;
        __m512i places = _mm512_maskz_loadu_epi32(lanes, kept->places + i), tokens[2];
        for (int half = 0; half < 2; ++half) {
            __m256i part = half ? _mm512_extracti32x8_epi32(places, 1) : _mm512_castsi512_si256(places);
            tokens[half] = ids ? _mm512_i32gather_epi64(part, ids, 8) : _mm512_cvtepi32_epi64(part);
        }
        __m512i words = words_16(tokens, &wide);
        run_16(&leader, values, words, lanes, i);
    }
    return leader.winner;
}

const struct passes avx512_passes = {row_max, keep, keep_and_total, weigh, total, share, race, race_kept};
#endif
