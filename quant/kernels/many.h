/* Products of many rows of x, where arithmetic is the limit and not memory: what all instruction sets share. Knows no Python. */
#ifndef ADAPT_MANY_H
#define ADAPT_MANY_H

#include "job.h"
#include "team.h"

/* Above so many rows these are faster than passes of a few rows. A row of x gets the same bits beside any number of others
 * above this, but not those that it gets among few. */
enum { MANY_ABOVE = 16 };

enum {
    CHUNK = 64,      /* rows of the weight that a thread takes at a time, at most */
    MOST_ROWS = 384, /* of x that are laid out at a time, at most */
};

typedef struct Multiplier Multiplier;

/* A product of some rows. x is laid out once, in panels; chunks of the weight's rows are tasks. */
typedef struct {
    const Multiplier *by;
    const Job *job;
    int64_t chunks, height;
    int64_t ends[MAX_PARTS]; /* chunk after the last of each part */
    void *x;
    char *own;
    size_t own_bytes;
    atomic_llong task, entered; /* the next chunk, and thread */
} Many;

/* How an instruction set does it. */
struct Multiplier {
    int64_t height;                    /* rows of the weight that are multiplied together: chunks are a multiple of it */
    int64_t (*most_rows)(int64_t K);   /* of x at a time: what is laid out of it stays near */
    size_t (*own_bytes)(int64_t K);    /* what a thread has for itself */
    size_t (*x_bytes)(int64_t M, int64_t K);
    int64_t (*panels)(int64_t M);
    void (*lay_panels)(const void *many, int64_t from, int64_t end);
    void (*run_task)(const Many *many, void *own, int64_t part, int64_t first, int64_t last); /* rows of one part */
    void (*enter)(void); /* a thread begins, and ends; NULL where that takes nothing */
    void (*leave)(void);
};

/* Multiply as `job` says. False where there is no memory for it. */
int adapt_multiply_many(const Multiplier *by, const Job *job, Team team);

/* Instruction sets' own; each only where its processor has been asked for. */
extern const Multiplier adapt_many_avx2, adapt_many_amx;

/* Whether this processor and system have AMX for bf16 values. */
int adapt_has_amx(void);

#endif
