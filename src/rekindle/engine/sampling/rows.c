/* Chooses tokens from rows of logits, all rows of a step in one call.
 *
 * Sums have a fixed order for every instruction set, so a row gives the same token on every machine.
 * Nothing here allocates or keeps memory. Rows with NaN or infinity, and rows that the given random
 * numbers do not decide, are left to the caller.
 */

#include "rows.h"
#include "weights.h"

#include <float.h>
#include <string.h>

#ifndef SOURCE_HASH
#define SOURCE_HASH "" /* defined by hatch_build.py */
#endif

enum { GREEDY, PROPOSE, DRAW }; /* as in native.py */
enum { UNDECIDED = -1 };
enum { PROPOSALS = 7, DRAWS = 2, DEPTH = 64, GROUPS = 512 };

static const double MIN_TOTAL = 1e-14, MAX_TOTAL = 1e32; /* bounds of the sum of weights */

typedef struct {
    int32_t method, top_k;
    int64_t draws; /* number of draws to try, after the proposals */
    double temperature, top_p, min_score;
    double typical; /* probability that the most typical tokens have to exceed; 0: all tokens stay */
    uint64_t words[3 * PROPOSALS + DRAWS]; /* random bits: three words per proposal, one per draw */
} Params;

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

INLINE double uniform(uint64_t word) { return (double)(word >> 11) * 0x1p-53; }

/* ---- Greedy ---- */

/* Returns the first highest logit. NaN ranks below every number but above minus infinity. */
INLINE int32_t highest(const float *row, int64_t size) {
    float most = -INFINITY;
    int64_t from = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        float lanes[LANES], block = most;
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = most;
        int64_t end = start + BLOCK < size ? start + BLOCK : size, at = start;
        for (; at + LANES <= end; at += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] = row[at + lane] > lanes[lane] ? row[at + lane] : lanes[lane];
        for (int lane = 0; at + lane < end; lane++)
            lanes[lane] = row[at + lane] > lanes[lane] ? row[at + lane] : lanes[lane];
        for (int lane = 0; lane < LANES; lane++) block = lanes[lane] > block ? lanes[lane] : block;
        if (block > most) most = block, from = start;
    }
    if (most > -FLT_MAX) {
        while (row[from] != most) from++;
        return (int32_t)from;
    }
    int64_t found = 0;
    most = -INFINITY;
    for (int64_t at = 0; at < size; at++) {
        float value = row[at] == row[at] ? row[at] : -FLT_MAX;
        if (value > most) most = value, found = at;
    }
    return (int32_t)found;
}

/* ---- Temperatures up to 1: rejection sampling ----
 *
 * A row is laid out as columns of at most DEPTH tokens. A column is proposed by the sum of its
 * weights, then a token of it by its weight. The token is accepted with the probability that turns a
 * draw at temperature 1 into one at the wanted temperature. So one exponential of the row serves both
 * the temperature and the nucleus. */

typedef struct {
    const float *weights;
    float *sums;     /* of each column */
    double *running; /* running sums of the columns */
    int64_t size, columns;
} Columns;

INLINE void weigh(const float *restrict row, float *restrict weights, float *restrict sums,
                  int64_t size, int64_t columns) {
    memset(sums, 0, (size_t)columns * sizeof *sums);
    for (int64_t start = 0; start < size; start += columns) {
        int64_t width = start + columns < size ? columns : size - start;
        for (int64_t column = 0; column < width; column++) {
            float weight = exp_of(row[start + column]);
            weights[start + column] = weight;
            sums[column] += weight;
        }
    }
}

/* Returns the first column whose running sum exceeds `wanted`, or the last column. */
INLINE int64_t find_column(const Columns *all, double wanted) {
    int64_t low = 0, high = all->columns - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (all->running[middle] > wanted) high = middle;
        else low = middle + 1;
    }
    return low;
}

INLINE int64_t find_token(const Columns *all, int64_t column, double share) {
    double total = 0, sum = 0;
    for (int64_t at = column; at < all->size; at += all->columns) total += all->weights[at];
    for (int64_t at = column; at < all->size; at += all->columns) {
        sum += all->weights[at];
        if (sum > share * total) return at;
    }
    return column;
}

/* A heavier token is in a column whose sum is larger, so column sums bound the heavier weights. */
INLINE int is_surely_in(const Columns *all, double total, double share, float weight) {
    double before = sum_above(all->sums, all->columns, just_below(weight)) - weight;
    return before * (1 + ROUNDING) < (share - ROUNDING) * total;
}

INLINE int64_t propose(const float *row, int64_t size, const Params *params, float *memory) {
    Columns all = {.weights = memory, .size = size, .columns = (size + DEPTH - 1) / DEPTH};
    all.sums = memory + size + size % 2;
    all.running = (double *)(all.sums + all.columns + all.columns % 2);
    weigh(row, memory, all.sums, size, all.columns);
    double total = 0;
    float most = 0;
    for (int64_t column = 0; column < all.columns; column++) {
        all.running[column] = total += all.sums[column];
        most = all.sums[column] > most ? all.sums[column] : most;
    }
    if (!(total > MIN_TOTAL && total < MAX_TOTAL)) return UNDECIDED;
    Nucleus nucleus = {memory, memory, size, size, total, params->top_p};
    double power = 1 / params->temperature - 1;
    float outside = 0; /* heaviest weight known to be outside the nucleus */
    int64_t outside_at = -1;
    for (int number = 0; number < PROPOSALS; number++) {
        const uint64_t *words = params->words + 3 * number;
        int64_t column = find_column(&all, uniform(words[0]) * total);
        int64_t token = find_token(&all, column, uniform(words[1]));
        float weight = all.weights[token];
        if (!(uniform(words[2]) < pow(weight / most, power))) continue;
        if (params->top_p >= 1) return token;
        if (weight < outside || (weight == outside && token >= outside_at)) continue;
        if (is_surely_in(&all, total, params->top_p, weight)) return token;
        if (is_in(&nucleus, token)) return token;
        outside = weight, outside_at = token;
    }
    return UNDECIDED;
}

/* ---- All other settings: draw from the whole row ---- */

/* Returns NaN if any value is NaN. */
INLINE float maximum(const float *values, int64_t size) {
    float lanes[LANES], most = -INFINITY;
    int32_t odd[LANES] = {0}, is_odd = 0;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = -INFINITY;
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = values[at + lane];
            lanes[lane] = value > lanes[lane] ? value : lanes[lane];
            odd[lane] |= value != value;
        }
    for (; at < size; at++) {
        most = values[at] > most ? values[at] : most;
        is_odd |= values[at] != values[at];
    }
    for (int lane = 0; lane < LANES; lane++) {
        most = lanes[lane] > most ? lanes[lane] : most;
        is_odd |= odd[lane];
    }
    return is_odd ? NAN : most;
}

/* Collects the places of values that reach a floor. Minus infinity never does. */
INLINE int64_t collect(const float *values, int64_t size, float floor, int32_t *places) {
    int64_t found = 0;
    floor = floor > -FLT_MAX ? floor : -FLT_MAX;
    for (int64_t start = 0; start < size; start += LANES) {
        int64_t end = start + LANES < size ? start + LANES : size;
        int32_t any = 0;
        if (end == start + LANES)
            for (int lane = 0; lane < LANES; lane++) any |= values[start + lane] >= floor;
        if (!any && end < size) continue;
        for (int64_t at = start; at < end; at++) {
            places[found] = (int32_t)at;
            found += values[at] >= floor;
        }
    }
    return found;
}

/* Maps a float to an integer with the same order. */
INLINE int32_t key_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? bits ^ INT32_MAX : bits;
}

/* Returns the `count`-th largest value, by bisection over its bits. */
INLINE float nth_largest(const float *values, int64_t size, int64_t count, int32_t *keys) {
    int64_t low = key_of(-INFINITY), high = (int64_t)key_of(INFINITY) + 1;
    for (int64_t at = 0; at < size; at++) keys[at] = key_of(values[at]);
    while (high - low > 1) {
        int64_t middle = (low + high) / 2, reaching = 0;
        for (int64_t at = 0; at < size; at++) reaching += keys[at] >= (int32_t)middle;
        if (reaching >= count) low = middle;
        else high = middle;
        if (reaching == count) break;
    }
    int32_t bits = low < 0 ? (int32_t)low ^ INT32_MAX : (int32_t)low;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Finds the places of the `count` largest logits. Ties go to the first.
 *
 * The `count`-th largest maximum of some groups is a floor that at least `count` logits reach. */
INLINE int64_t largest(const float *row, int64_t size, int64_t count, float *values, int32_t *keys,
                       int32_t *places) {
    int64_t groups = 4 * count > GROUPS ? 4 * count : GROUPS, depth = size / groups;
    float floor;
    if (depth < 4) {
        floor = nth_largest(row, size, count, keys);
    } else {
        memcpy(values, row, (size_t)groups * sizeof *row);
        for (int64_t start = groups; start < depth * groups; start += groups)
            for (int64_t group = 0; group < groups; group++)
                values[group] =
                    row[start + group] > values[group] ? row[start + group] : values[group];
        floor = nth_largest(values, groups, count, keys);
    }
    int64_t found = collect(row, size, floor, places), kept = 0;
    if (found <= count) return found;
    for (int64_t at = 0; at < found; at++) values[at] = row[places[at]];
    floor = nth_largest(values, found, count, keys);
    int64_t equal = count;
    for (int64_t at = 0; at < found; at++) equal -= values[at] > floor;
    for (int64_t at = 0; at < found; at++)
        if (values[at] > floor || (values[at] == floor && equal-- > 0)) places[kept++] = places[at];
    return kept;
}

/* Returns a place, drawn in proportion to its odds. */
INLINE int64_t pick(const float *odds, int64_t size, double share) {
    double wanted = share * sum_above(odds, size, 0.0f), sum = 0;
    int64_t block = 0, last = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        int64_t width = start + BLOCK < size ? BLOCK : size - start;
        double added = sum_above(odds + start, width, 0.0f);
        if (added > 0) block = start; /* the last one, if rounding puts `wanted` past the end */
        if (sum + added > wanted) break;
        sum += added;
    }
    for (int64_t at = block; at < size && at < block + BLOCK; at++) {
        if (odds[at] > 0) last = at;
        sum += odds[at];
        if (sum > wanted) break;
    }
    return last;
}

typedef struct {
    float *scores, *weights, *kept; /* `kept`: weights of the remaining tokens */
    int32_t *places;                /* of the remaining tokens in the row */
    int64_t size;                   /* number of remaining tokens */
} Left;

/* Sums the weights whose distance reaches at most a bound, in float64 and in a fixed order. */
INLINE double sum_within(const float *weights, const float *distances, int64_t size, float bound) {
    double lanes[LANES] = {0}, total = 0;
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += distances[at + lane] <= bound ? (double)weights[at + lane] : 0.0;
    for (; at < size; at++) total += distances[at] <= bound ? (double)weights[at] : 0.0;
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    return total;
}

/* Returns the smallest distance within which the weights sum to more than `wanted`. */
INLINE float typical_distance(const float *weights, const float *distances, int64_t size,
                              double wanted) {
    int64_t low = -1, high = key_of(FLT_MAX); /* a distance is not negative */
    while (high - low > 1) {
        int32_t middle = (int32_t)((low + high) / 2);
        float bound;
        memcpy(&bound, &middle, sizeof bound);
        if (sum_within(weights, distances, size, bound) > wanted) high = middle;
        else low = middle;
    }
    int32_t bits = (int32_t)high;
    float distance;
    memcpy(&distance, &bits, sizeof distance);
    return distance;
}

/* Locally typical sampling. Keeps the tokens whose information, -log p, is nearest to the entropy,
 * until their probabilities exceed a share. The information of a token minus the entropy is the mean
 * score minus its own score, so no logarithm is needed. Ties go to the first. */
INLINE void keep_typical(Left *left, double share) {
    float *distances = left->kept, most = -INFINITY;
    double total = 0, sum = 0;
    for (int64_t at = 0; at < left->size; at++) {
        float weight = left->weights[at] = exp_of(left->scores[at]);
        total += weight;
        sum += weight > 0 ? (double)weight * left->scores[at] : 0;
    }
    float mean = (float)(sum / total);
    for (int64_t at = 0; at < left->size; at++) distances[at] = fabsf(left->scores[at] - mean);
    double wanted = share * total;
    float distance = typical_distance(left->weights, distances, left->size, wanted);
    double before = 0; /* weight of the nearer tokens, then of the kept ones */
    for (int64_t at = 0; at < left->size; at++)
        before += distances[at] < distance ? (double)left->weights[at] : 0.0;
    int64_t found = 0;
    for (int64_t at = 0; at < left->size; at++) {
        if (distances[at] > distance) continue;
        if (distances[at] == distance) {
            if (before > wanted) continue;
            before += left->weights[at];
        }
        left->scores[found] = left->scores[at];
        left->places[found++] = left->places[at];
    }
    left->size = found;
    for (int64_t at = 0; at < found; at++) most = left->scores[at] > most ? left->scores[at] : most;
    for (int64_t at = 0; at < found; at++) left->scores[at] -= most;
}

/* Returns the first of the remaining tokens with the highest score. */
INLINE int64_t highest_left(const Left *left) {
    int64_t best = 0;
    for (int64_t at = 1; at < left->size; at++)
        if (left->scores[at] > left->scores[best]) best = at;
    return left->places[best];
}

/* Drops tokens that min-p excludes, and tokens too light for the top-p nucleus. For top-p alone this
 * pays only if it leaves less than a quarter. */
INLINE void cut(Left *left, const Params *params, Nucleus *nucleus, int32_t *among) {
    double floor = params->min_score;
    if (params->top_p < 1) {
        for (int64_t at = 0; at < left->size; at++) left->weights[at] = exp_of(left->scores[at]);
        double total = sum_above(left->weights, left->size, 0.0f);
        double lightest = log(0.99 * (1 - params->top_p) * total / (double)left->size);
        floor = lightest > floor ? lightest : floor;
        const float *all = left->weights;
        *nucleus = (Nucleus){all, all, left->size, left->size, total, params->top_p};
    }
    if (floor == -INFINITY) return;
    int64_t found = 0;
    for (int64_t at = 0; at < left->size; at++) found += left->scores[at] >= (float)floor;
    if (params->min_score == -INFINITY && 4 * found > left->size) return;
    collect(left->scores, left->size, (float)floor, among);
    for (int64_t at = 0; at < found; at++) {
        left->scores[at] = left->scores[among[at]];
        if (params->top_p < 1) left->kept[at] = left->weights[among[at]];
        left->places[at] = left->places[among[at]];
    }
    nucleus->weights = left->kept;
    nucleus->size = left->size = found;
}

INLINE int64_t draw(const float *row, int64_t size, const Params *params, const uint64_t *words,
                    float *memory) {
    Left left = {memory, memory + size, memory + 2 * size, (int32_t *)(memory + 3 * size), size};
    int32_t *among = left.places + size;
    float most = maximum(row, size);
    if (!(fabsf(most) <= FLT_MAX)) return UNDECIDED;
    if (0 < params->top_k && params->top_k < size) {
        left.size = largest(row, size, params->top_k, left.weights, among, left.places);
        for (int64_t at = 0; at < left.size; at++) left.scores[at] = row[left.places[at]] - most;
    } else {
        for (int64_t at = 0; at < size; at++) left.places[at] = (int32_t)at;
        for (int64_t at = 0; at < size; at++) left.scores[at] = row[at] - most;
    }
    if (params->typical > 0) {
        keep_typical(&left, params->typical);
        if (params->method == GREEDY) return highest_left(&left);
    }
    Nucleus nucleus = {0};
    cut(&left, params, &nucleus, among);
    float *odds = left.scores, factor = (float)(1 / params->temperature);
    for (int64_t at = 0; at < left.size; at++) odds[at] = exp_of(left.scores[at] * factor);
    for (int64_t number = 0; number < params->draws; number++) {
        int64_t place = pick(odds, left.size, uniform(words[number]));
        if (params->top_p >= 1 || is_in(&nucleus, place)) return left.places[place];
        float weight = nucleus.weights[place]; /* every lighter token is outside, too */
        for (int64_t at = 0; at < left.size; at++) {
            float other = nucleus.weights[at];
            int is_before = other > weight || (other == weight && at < place);
            odds[at] = is_before ? odds[at] : 0.0f;
        }
    }
    return UNDECIDED;
}

/* ---- Repetitions ---- */

/* For each place, counts the tokens up to it that equal the last tokens of the whole sequence. This
 * is the Z-algorithm on the reversed sequence. The count of the last place is 0. */
void match_lengths(const int32_t *tokens, int64_t size, int32_t *lengths) {
    int64_t last = size - 1, left = 0, right = 0; /* the match that reaches furthest back */
    if (size > 0) lengths[last] = 0;
    for (int64_t back = 1; back < size; back++) {
        int64_t length = 0;
        if (back < right) {
            int64_t known = lengths[last - (back - left)];
            length = known < right - back ? known : right - back;
        }
        while (back + length < size && tokens[last - length] == tokens[last - back - length])
            length++;
        lengths[last - back] = (int32_t)length;
        if (back + length > right) left = back, right = back + length;
    }
}

/* ---- Entry points ---- */

const char source_hash[] = SOURCE_HASH;
const int32_t params_bytes = sizeof(Params);

int64_t memory_floats(int64_t size) { return (5 * size + 64 + 15) / 16 * 16; }

FOR_EACH_CPU void choose_tokens(const float *rows, int64_t size, int64_t count, const char *params,
                                float *memory, int32_t *tokens) {
    for (int64_t at = 0; at < count; at++) {
        const float *row = rows + at * size;
        Params own;
        memcpy(&own, params + at * params_bytes, sizeof own);
        if (own.method == GREEDY && !(own.typical > 0)) {
            tokens[at] = highest(row, size);
            continue;
        }
        const uint64_t *words = own.words;
        int64_t token = UNDECIDED;
        if (own.method == PROPOSE) {
            token = propose(row, size, &own, memory);
            words += 3 * PROPOSALS;
        }
        if (token == UNDECIDED) token = draw(row, size, &own, words, memory);
        tokens[at] = (int32_t)token;
    }
}
