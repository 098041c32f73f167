/* What one token does beside products: attention, up to where the instruction set takes over, and how far it turned. */
#ifndef ADAPT_TOKEN_H
#define ADAPT_TOKEN_H

#include "native.h"

/* One token at `position`: its projected heads, and the cache that its key and value go to. Of several tokens in a row
 * each sees those before it, and gets what it would get alone: all enter the cache first, and none looks beyond itself. */
typedef struct {
    const Isa *isa;
    const uint16_t *heads;      /* [queries (+ groups), width] */
    const uint16_t *value;      /* [groups, width], or NULL: nothing is stored and `heads` are queries only */
    const uint16_t *cos, *sin;  /* [rotary] or NULL; sin is signed, see Rotary in runtime/rope.py */
    const float *factors;       /* [queries (+ groups), width] of a norm over each head, or NULL */
    uint16_t *keys, *values;
    int64_t rotary, position;
    float eps, scale;
    Attention attention;
} Token;

/* Queries to fp32; key and value into the cache. `spare` has room for one head in fp32, then for all heads in bf16. */
void adapt_enter(Token *token, float *q, float *spare);

/* Task `at` of tokens [count] with at most `spans` spans: one group of one token over one span. The last one of a group
 * writes its heads. */
void adapt_attend_task(const Isa *isa, const Attention *tokens, int64_t spans, int64_t at);

/* Cosine of the angle between two rows, from sums in double; like torch's, each length is 1e-8 at least. */
float adapt_cosine(const uint16_t *x, const uint16_t *y, int64_t D);

#endif
