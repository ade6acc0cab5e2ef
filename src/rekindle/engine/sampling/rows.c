/* Tokens chosen from rows of logits: what sampling.py does with NumPy, in one call.
 *
 * A sum has a fixed order, whatever instructions compute it, so a row gives the same token on every
 * machine. Nothing here allocates, keeps or shares memory. Rows with NaN or infinity in them, and what
 * the random numbers at hand do not decide, are left to NumPy.
 */

#include "rows.h"
#include "weights.h"

#include <float.h>
#include <string.h>

#ifndef SOURCE_HASH
#define SOURCE_HASH "" /* hatch_build.py tells it */
#endif

enum { GREEDY, PROPOSE, DRAW }; /* ways to choose, as in compiled_rows.py */
enum { UNDECIDED = -1 };
enum { PROPOSALS = 7, DRAWS = 2, DEPTH = 64, GROUPS = 512 };

static const double LEAST = 1e-14, MOST = 1e32; /* that weights may sum up to */

typedef struct {
    int32_t way, top_k;
    int64_t draws; /* that may be tried, after all proposals if there are any */
    double temperature, top_p, min_score;
    uint64_t words[3 * PROPOSALS + DRAWS]; /* of random bits: three a proposal, one a draw */
} Choice;

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

INLINE double uniform(uint64_t word) { return (double)(word >> 11) * 0x1p-53; }

/* ---- Greedy ---- */

/* As candidates.highest: the first of the highest; NaN is above minus infinity alone. */
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

/* ---- Temperatures to 1: proposals, as in weighted_rows.py ---- */

typedef struct {
    const float *weights;
    float *sums;     /* of columns */
    double *running; /* sums of those */
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

/* The first running sum above what is wanted, or the last. */
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

/* What is heavier is in a column whose sum is. */
INLINE int is_surely_in(const Columns *all, double total, double share, float weight) {
    double before = sum_above(all->sums, all->columns, just_below(weight)) - weight;
    return before * (1 + ROUNDING) < (share - ROUNDING) * total;
}

INLINE int64_t propose(const float *row, int64_t size, const Choice *choice, float *memory) {
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
    if (!(total > LEAST && total < MOST)) return UNDECIDED;
    Nucleus nucleus = {memory, memory, size, size, total, choice->top_p};
    double power = 1 / choice->temperature - 1;
    float outside = 0; /* the weight of one that is not in, nor is what comes after it */
    int64_t outside_at = -1;
    for (int number = 0; number < PROPOSALS; number++) {
        const uint64_t *words = choice->words + 3 * number;
        int64_t column = find_column(&all, uniform(words[0]) * total);
        int64_t token = find_token(&all, column, uniform(words[1]));
        float weight = all.weights[token];
        if (!(uniform(words[2]) < pow(weight / most, power))) continue;
        if (choice->top_p >= 1) return token;
        if (weight < outside || (weight == outside && token >= outside_at)) continue;
        if (is_surely_in(&all, total, choice->top_p, weight)) return token;
        if (is_in(&nucleus, token)) return token;
        outside = weight, outside_at = token;
    }
    return UNDECIDED;
}

/* ---- All other ways: a draw from the whole row, as in sampling.py ---- */

/* NaN if one of them is. */
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

/* The places of those that reach a floor; minus infinity does not. */
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

/* A whole number that compares as the float does. */
INLINE int32_t key_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? bits ^ INT32_MAX : bits;
}

/* A value that `count` of them reach, and no more but for equal ones. */
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

/* As candidates.largest: the places of the largest; of equal ones the first. */
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

/* As candidates.pick: a place by its chance. */
INLINE int64_t pick(const float *chances, int64_t size, double share) {
    double wanted = share * sum_above(chances, size, 0.0f), sum = 0;
    int64_t block = 0, last = 0;
    for (int64_t start = 0; start < size; start += BLOCK) {
        int64_t width = start + BLOCK < size ? BLOCK : size - start;
        double added = sum_above(chances + start, width, 0.0f);
        if (added > 0) block = start; /* if sums are rounded up, it is the last */
        if (sum + added > wanted) break;
        sum += added;
    }
    for (int64_t at = block; at < size && at < block + BLOCK; at++) {
        if (chances[at] > 0) last = at;
        sum += chances[at];
        if (sum > wanted) break;
    }
    return last;
}

typedef struct {
    float *scores, *weights, *kept; /* `kept`: weights of those that are left */
    int32_t *places;                /* of those that are left, in the row */
    int64_t size;                   /* how many are left */
} Left;

/* Leave what top-p and min-p may leave; it is not worth it for top-p alone if that is more than a
 * quarter. */
INLINE void cut(Left *left, const Choice *choice, Nucleus *nucleus, int32_t *among) {
    double floor = choice->min_score;
    if (choice->top_p < 1) {
        for (int64_t at = 0; at < left->size; at++) left->weights[at] = exp_of(left->scores[at]);
        double total = sum_above(left->weights, left->size, 0.0f);
        double lightest = log(0.99 * (1 - choice->top_p) * total / (double)left->size);
        floor = lightest > floor ? lightest : floor;
        const float *all = left->weights;
        *nucleus = (Nucleus){all, all, left->size, left->size, total, choice->top_p};
    }
    if (floor == -INFINITY) return;
    int64_t found = 0;
    for (int64_t at = 0; at < left->size; at++) found += left->scores[at] >= (float)floor;
    if (choice->min_score == -INFINITY && 4 * found > left->size) return;
    collect(left->scores, left->size, (float)floor, among);
    for (int64_t at = 0; at < found; at++) {
        left->scores[at] = left->scores[among[at]];
        if (choice->top_p < 1) left->kept[at] = left->weights[among[at]];
        left->places[at] = left->places[among[at]];
    }
    nucleus->weights = left->kept;
    nucleus->size = left->size = found;
}

INLINE int64_t draw(const float *row, int64_t size, const Choice *choice, const uint64_t *words,
                    float *memory) {
    Left left = {memory, memory + size, memory + 2 * size, (int32_t *)(memory + 3 * size), size};
    int32_t *among = left.places + size;
    float most = maximum(row, size);
    if (!(fabsf(most) <= FLT_MAX)) return UNDECIDED;
    if (0 < choice->top_k && choice->top_k < size) {
        left.size = largest(row, size, choice->top_k, left.weights, among, left.places);
        for (int64_t at = 0; at < left.size; at++) left.scores[at] = row[left.places[at]] - most;
    } else {
        for (int64_t at = 0; at < size; at++) left.places[at] = (int32_t)at;
        for (int64_t at = 0; at < size; at++) left.scores[at] = row[at] - most;
    }
    Nucleus nucleus = {0};
    cut(&left, choice, &nucleus, among);
    float *chances = left.scores, factor = (float)(1 / choice->temperature);
    for (int64_t at = 0; at < left.size; at++) chances[at] = exp_of(left.scores[at] * factor);
    for (int64_t number = 0; number < choice->draws; number++) {
        int64_t place = pick(chances, left.size, uniform(words[number]));
        if (choice->top_p >= 1 || is_in(&nucleus, place)) return left.places[place];
        float weight = nucleus.weights[place]; /* nor is what comes after it */
        for (int64_t at = 0; at < left.size; at++) {
            float other = nucleus.weights[at];
            int is_before = other > weight || (other == weight && at < place);
            chances[at] = is_before ? chances[at] : 0.0f;
        }
    }
    return UNDECIDED;
}

/* ---- All ---- */

const char source_hash[] = SOURCE_HASH;
const int32_t choice_bytes = sizeof(Choice);

int64_t memory_floats(int64_t size) { return (5 * size + 64 + 15) / 16 * 16; }

FOR_EACH_CPU void choose_tokens(const float *rows, int64_t size, int64_t count, const char *choices,
                                float *memory, int32_t *tokens) {
    for (int64_t at = 0; at < count; at++) {
        const float *row = rows + at * size;
        Choice choice;
        memcpy(&choice, choices + at * choice_bytes, sizeof choice);
        if (choice.way == GREEDY) {
            tokens[at] = highest(row, size);
            continue;
        }
        const uint64_t *words = choice.words;
        int64_t token = UNDECIDED;
        if (choice.way == PROPOSE) {
            token = propose(row, size, &choice, memory);
            words += 3 * PROPOSALS;
        }
        if (token == UNDECIDED) token = draw(row, size, &choice, words, memory);
        tokens[at] = (int32_t)token;
    }
}
