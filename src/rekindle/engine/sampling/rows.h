#ifndef ROWS_H
#define ROWS_H

#include <stdint.h>

extern const char source_hash[];   /* hash of the files that this was compiled from */
extern const int32_t params_bytes; /* bytes of parameters per row */

/* Floats of scratch memory that a row of `size` logits needs. */
int64_t memory_floats(int64_t size);

/* Writes a token for each row. `memory` is overwritten. */
void choose_tokens(const float *rows, int64_t size, int64_t count, const char *params,
                   float *memory, int32_t *tokens);

#endif
