#ifndef ROWS_H
#define ROWS_H

#include <stdint.h>

extern const char source_hash[];   /* of the files that this was compiled from */
extern const int32_t choice_bytes; /* how much is said about each row's choice */

/* What choosing from a row of so many logits takes. */
int64_t memory_floats(int64_t size);

/* A token for each of some rows; `memory` is overwritten. */
void choose_tokens(const float *rows, int64_t size, int64_t count, const char *choices,
                   float *memory, int32_t *tokens);

#endif
