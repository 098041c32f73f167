/* A product shared out among threads: what is multiplied, where x is laid out, and which chunk of rows is next. */
#ifndef ADAPT_JOB_H
#define ADAPT_JOB_H

#include <stdatomic.h>

#include "native.h"

enum { MAX_PARTS = 8 };

/* x [M, K] times `parts` bf16 matrices of K inputs each, or, where `parts` is 0, times a 4-bit one. */
typedef struct {
    const Isa *isa;
    int64_t M, K, threads;
    const uint16_t *x;
    int parts;
    Dense dense[MAX_PARTS];
    Int4 int4;
    /* Set by adapt_plan and adapt_prepare. */
    int64_t rows, bytes;
    int64_t most, fewest, unit; /* rows that a thread takes at a time; a multiple of `unit` but for the last of a part */
    int64_t ends[MAX_PARTS];    /* row after the last of each part, counted through all of them */
    void *xs;
    float *sums;
    atomic_llong *next; /* the row that nobody has taken yet; the threads of a team share it */
} Job;

/* Say in what chunks the rows of the weights are taken. */
void adapt_plan(Job *job);

/* Bytes that the prepared x takes. */
size_t adapt_room(const Job *job);

/* Lay x out in `room`, which must begin at a cache line: loads that cross one cost twice. */
void adapt_prepare(Job *job, void *room);

/* Take chunks until none is left. `job` is a Job, planned and prepared. */
void adapt_work(void *job);

/* Whether waking other threads would cost more than it saves: from about 20 microseconds of work on it pays. One thread
 * does some 12 weight bytes, or 30 multiplications, in a nanosecond. */
static inline int adapt_alone(int64_t multiplications, int64_t bytes) {
    return multiplications / 30 < 20000 && bytes / 12 < 20000;
}

/* Bytes of weights that a thread takes at a time, for M rows of x in passes of at most `widest`: what is read once comes
 * fastest in long streams, what several passes go over should stay near. */
static inline int64_t chunk_bytes(int64_t M, int64_t widest) { return M > widest ? 65536 : 262144; }

enum { LAST_BYTES = 16384 }; /* of the last chunks: about two microseconds */

#endif
