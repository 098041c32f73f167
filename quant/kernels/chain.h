/* Decoder blocks one behind the other: what a call of them is, and what each of its threads does. */
#ifndef ADAPT_CHAIN_H
#define ADAPT_CHAIN_H

#include "job.h"
#include "team.h"

/* Numbers of a product: parts, K, then w, n, bias of each part; or 0, K, then data, n, bias, groups, wide. */
enum { PARTS = 3, PRODUCT = 2 + 3 * PARTS };
enum { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };
/* Numbers of a block: see chain.py. Norms are float32 factors; 0 where there is none. */
enum { KIND, LAYER, STORES, NORM_IN, NORM_MIXED, NORM_MLP, NORM_OUT, HEAD_NORM, FIRST_PRODUCT };
enum { BLOCK_NUMBERS = FIRST_PRODUCT + PRODUCTS * PRODUCT };
/* Numbers of a row: position, row of the cache, then of each kind of layer its rotation and the first position seen. */
enum { POSITION, CACHE_ROW, FIRST_KIND, COS = 0, SIN, ROTARY, SEEN, KIND_NUMBERS };
/* A block is gone through by the rows that are still in the backbone, and by those that have left it. */
enum { SIDES = 2 };
/* What threads take piece by piece: a product of each side, and attention. */
enum { STAGES = PRODUCTS * SIDES + 1, ATTEND = PRODUCTS * SIDES };

typedef struct {
    /* as given */
    Team team;
    int (*team_size)(void);
    int64_t threads;
    const Isa *products, *small;
    int64_t hidden, inner, queries, groups, width, gate, kinds, M;
    const uint16_t *h;
    uint16_t *result;
    const int64_t *blocks, *places, *rows;
    int64_t first, last, group_stride, row_stride; /* blocks [first, last) run */
    const int64_t *exits; /* the blocks that rows run once they have left, or NULL: none leaves */
    const double *thresholds; /* of each block: the cosine above which a row leaves after it */
    int64_t resident; /* after so many blocks all rows leave */
    int64_t *depths; /* of each row the blocks after which it left, 0: it has not; those that have left already say so */
    int together; /* rows leave only all at once */
    float eps, scale;
    /* shared */
    uint16_t *qkv, *attended, *mixed, *wide;
    int64_t spans; /* of the token that sees most */
    float *queries32, *sums, *tops, *spare;
    Attention *tokens;
    atomic_llong *joined;
    char *own; /* `own_bytes` for each thread */
    size_t own_bytes, prepared_bytes;
    atomic_llong *stages;
    Meeting meeting;
    int64_t done; /* found: the block behind the last one that ran */
} Chain;

static inline const int64_t *adapt_block(const int64_t *blocks, int64_t index) { return blocks + index * BLOCK_NUMBERS; }

/* Whether somebody has described a block: its products have inputs. */
static inline int adapt_is_there(const int64_t *block) { return block[FIRST_PRODUCT + 1] != 0; }

/* Values of a head in fp32. */
static inline int64_t adapt_padded(const Chain *c) { return ceil_div(c->width, PAD) * PAD; }

/* A product of a block for M rows as a job; `out` rows lie side by side, the parts' outputs behind each other. */
Job adapt_product(const Chain *c, const int64_t *block, int which, int64_t M, const uint16_t *x, uint16_t *out);

/* What each thread of a team runs; `data` is a Chain whose arrays have their places. */
void adapt_run_blocks(void *data);

#endif
