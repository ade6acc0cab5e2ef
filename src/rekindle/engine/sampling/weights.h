/* Exponentials of logits, their sums, and the top-p nucleus.
 *
 * Everything is inlined, so that it is compiled for each instruction set that rows.c is built for.
 */

#ifndef WEIGHTS_H
#define WEIGHTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 32, BLOCK = LANES * 64 }; /* parallel sums; numbers summed in float32 */

static const double ROUNDING = 1e-5; /* relative error bound of a float32 sum */

/* Returns e to the power of x, to about one unit in the last place, and 0 below the normal numbers.
 * NaN and large values become 1.7e38, which is more than weights may sum up to. */
INLINE float exp_of(float x) {
    const float magic = 0x1.8p23f; /* adding it rounds to a whole number */
    float bounded = x < 88.0f ? x : 88.0f;
    bounded = bounded > -87.0f ? bounded : -87.0f;
    float shifted = bounded * 0x1.715476p0f + magic;
    float whole = shifted - magic;
    float rest = bounded - whole * 0.693359375f; /* ln 2, in two parts */
    rest = rest - whole * -2.12194440e-4f;
    float tail = 0.00138145324f;
    tail = tail * rest + 0.00836874638f;
    tail = tail * rest + 0.0416683927f;
    tail = tail * rest + 0.166665211f;
    tail = tail * rest + 0.49999994f;
    float power = tail * (rest * rest) + rest + 1.0f;
    int32_t exponent;
    memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (int32_t)((uint32_t)(exponent + 127) << 23);
    float scale;
    memcpy(&scale, &exponent, sizeof scale);
    return x < -87.0f ? 0.0f : power * scale;
}

/* Sums the weights above a bound. */
INLINE double sum_above(const float *weights, int64_t size, float bound) {
    double total = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        float lanes[LANES] = {0};
        int64_t end = start + BLOCK < size ? start + BLOCK : size, at = start;
        for (; at + LANES <= end; at += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] += weights[at + lane] > bound ? weights[at + lane] : 0.0f;
        for (int lane = 0; at + lane < end; lane++)
            lanes[lane] += weights[at + lane] > bound ? weights[at + lane] : 0.0f;
        for (int half = LANES / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
        total += lanes[0];
    }
    return total;
}

/* The same in float64, for the few cases that float32 cannot decide. */
INLINE double exact_sum_above(const float *weights, int64_t size, float bound) {
    double total = 0;
    for (int64_t at = 0; at < size; at++) total += weights[at] > bound ? (double)weights[at] : 0.0;
    return total;
}

INLINE float just_below(float weight) { return nextafterf(weight, -1.0f); }

typedef struct {
    const float *weights; /* candidates of the nucleus */
    const float *all;     /* all weights, whose total counts */
    int64_t size, all_size;
    double total, share;
} Nucleus;

/* Returns whether a weight is in the nucleus: whether the heavier weights, and the equal ones before
 * it, have less than the share of the total. */
INLINE int is_in(const Nucleus *nucleus, int64_t place) {
    const float *weights = nucleus->weights, *after = weights + place;
    int64_t rest = nucleus->size - place;
    float weight = weights[place], below = just_below(weight);
    double before = sum_above(weights, place, below) + sum_above(after, rest, weight);
    double limit = nucleus->share * nucleus->total;
    if (fabs(before - limit) < ROUNDING * (before + limit)) {
        before = exact_sum_above(weights, place, below) + exact_sum_above(after, rest, weight);
        limit = nucleus->share * exact_sum_above(nucleus->all, nucleus->all_size, -1.0f);
    }
    return before < limit || before == 0;
}

#endif
