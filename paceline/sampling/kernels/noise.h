/* The noise and the masses of docs/noise.md, one number at a time: what every faster form must equal bit for bit.
 *
 * Compiled without contraction: each addition, multiplication and division is rounded by itself. */
#ifndef PACELINE_NOISE_H
#define PACELINE_NOISE_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "operations are not rounded to their own type here: leave the kernels out, torch gives the right numbers"
#endif

enum { PHILOX_ROUNDS = 10 };
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

/* log f = t (2 + z R(z)) with t = (f - 1) / (f + 1), z = t t; R interpolated at six Chebyshev nodes, see `noise.py`. */
#define LOG_R0 0x1.55555555553b8p-1
#define LOG_R1 0x1.9999999b86b7cp-2
#define LOG_R2 0x1.2492462aa8c89p-2
#define LOG_R3 0x1.c71fcd1ced0aep-3
#define LOG_R4 0x1.7382d06f0c1dep-3
#define LOG_R5 0x1.546adfbbda333p-3
#define LN_2 0x1.62e42fefa39efp-1
#define SQRT_HALF_BITS 0x3FE6A09E667F3BCDLL

/* What one decision's noise is keyed by. */
struct noise_key {
    uint64_t seed, position;
    uint32_t role;
};

static inline void philox(uint32_t block, const struct noise_key *key, uint32_t word[4]) {
    uint32_t w0 = block, w1 = key->role, w2 = (uint32_t)key->position, w3 = (uint32_t)(key->position >> 32);
    uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
    for (int i = 0; i < PHILOX_ROUNDS; ++i) {
        uint64_t p0 = (uint64_t)w0 * PHILOX_M0, p1 = (uint64_t)w2 * PHILOX_M1;
        w0 = (uint32_t)(p1 >> 32) ^ w1 ^ k0;
        w1 = (uint32_t)p1;
        w2 = (uint32_t)(p0 >> 32) ^ w3 ^ k1;
        w3 = (uint32_t)p0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    word[0] = w0, word[1] = w1, word[2] = w2, word[3] = w3;
}

static inline uint32_t noise_word(int64_t token, const struct noise_key *key) {
    uint32_t word[4];
    philox((uint32_t)(token >> 2), key, word);
    return word[token & 3];
}

static inline double exact_log(double y) {
    int64_t bits;
    memcpy(&bits, &y, sizeof bits);
    int64_t power = (bits - SQRT_HALF_BITS) >> 52;
    bits -= (int64_t)((uint64_t)power << 52);
    double f;
    memcpy(&f, &bits, sizeof f);
    double t = (f - 1.0) / (f + 1.0), z = t * t;
    double r = LOG_R5;
    r = r * z + LOG_R4;
    r = r * z + LOG_R3;
    r = r * z + LOG_R2;
    r = r * z + LOG_R1;
    r = r * z + LOG_R0;
    return (z * r + 2.0) * t + (double)power * LN_2;
}

static inline double gumbel_of(uint32_t word) {
    double uniform = 1.0 - (2.0 * (double)word + 1.0) * 0x1p-33; /* exact */
    return -exact_log(-exact_log(uniform));
}

/* At least the float32 Gumbel number of a word, for little: -log(c) >= -log(-log(1 - c)), and log2(1 + f) >= f lets the
 * bits of a float32 stand for its logarithm. The margin covers the rounding of each step. */
#define LARGEST_GUMBEL 23.0f
#define BELOW_ANY_WINNER -4.0f /* the largest scaled logit is 0 and the smallest Gumbel number -3.13 */
#define UPPER_SLOPE -0x1.62e430p-24f /* -ln 2 / 2^23 */
#define UPPER_OFFSET 110.2101f       /* ln 2 (127 + 32), and 1e-3 */

static inline float gumbel_bound(uint32_t word) {
    float x = (float)word + 0.5f;
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (float)bits * UPPER_SLOPE + UPPER_OFFSET;
}

/* 2^40 exp(x), cut to an integer, for x <= 0: masses that add up to the same sum in every order. 2^r = 1 + r P(r). */
#define LOG2_E 0x1.715476p+0f
#define EXP_LOWEST -60.0f
#define EXP_P0 0x1.62e430p-1f
#define EXP_P1 0x1.ebfbe0p-3f
#define EXP_P2 0x1.c6af6cp-5f
#define EXP_P3 0x1.3b2a54p-7f
#define EXP_P4 0x1.5f0890p-10f
#define EXP_P5 0x1.44138ap-13f
enum { MASS_BITS = 40 };

static inline int64_t mass_of(float x) {
    float y = (x > EXP_LOWEST ? x : EXP_LOWEST) * LOG2_E;
    float power = __builtin_rintf(y), r = y - power;
    float p = EXP_P5;
    p = p * r + EXP_P4;
    p = p * r + EXP_P3;
    p = p * r + EXP_P2;
    p = p * r + EXP_P1;
    p = p * r + EXP_P0;
    p = p * r + 1.0f;
    int32_t bits;
    memcpy(&bits, &p, sizeof bits);
    bits += ((int32_t)power + MASS_BITS) * (1 << 23);
    memcpy(&p, &bits, sizeof p);
    return (int64_t)p;
}

#endif
