/* bf16 products of many rows of x, where arithmetic is the limit and not memory. Knows no Python. */
#ifndef ADAPT_GEMM_H
#define ADAPT_GEMM_H

#include "job.h"
#include "team.h"

/* Above so many rows `isa->gemm`, where there is one, is faster than passes of a few rows. A row of x gets the same bits
 * beside any number of others above this, but not those that it gets among few. */
enum { GEMM_ABOVE = 16 };

/* Multiply as `job` says, which has parts. False where there is no memory for it. */
int adapt_gemm(const Job *job, Team team);

#endif
