/* Many rows of x: memory, chunks and threads; the arithmetic is in gemm.c and amx.c. */
#include "many.h"

#include <stdlib.h>

enum { ALONE = 100000 }; /* values of x that one thread lays out sooner than others wake */

static int64_t rows_of(const Job *job, int part) { return job->parts ? job->dense[part].n : job->int4.n; }

/* Chunks of at most 64 rows, and at least eight for each thread where there are rows enough. */
static void plan(Many *many, const Job *job) {
    many->height = ceil_div(least(ceil_div(job->rows, 8 * job->threads), CHUNK), many->by->height) * many->by->height;
    for (int i = 0; i < (job->parts ? job->parts : 1); i++)
        many->ends[i] = many->chunks += ceil_div(rows_of(job, i), many->height);
}

static void run_tasks(void *data) {
    Many *many = data;
    const Multiplier *by = many->by;
    char *own = many->own + (size_t)atomic_fetch_add_explicit(&many->entered, 1, memory_order_relaxed) * many->own_bytes;
    if (by->enter) by->enter();
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&many->task, 1, memory_order_relaxed);
        if (task >= many->chunks) break;
        int part = 0;
        while (task >= many->ends[part]) part++;
        int64_t first = (task - (part ? many->ends[part - 1] : 0)) * many->height;
        by->run_task(many, own, part, first, least(rows_of(many->job, part), first + many->height));
    }
    if (by->leave) by->leave();
}

static void run_rows(Many *many, const Job *job, Team team, int64_t threads) {
    many->job = job;
    atomic_init(&many->task, 0);
    atomic_init(&many->entered, 0);
    Shared panels = {.work = many->by->lay_panels, .what = many, .count = many->by->panels(job->M), .step = 1};
    share(&panels, team, job->M * job->K < ALONE ? 1 : threads);
    if (team && threads > 1) team(run_tasks, many, (unsigned)threads, 0);
    else run_tasks(many);
}

int adapt_multiply_many(const Multiplier *by, const Job *job, Team team) {
    int64_t most = ceil_div(block_rows(job->M, by->most_rows(job->K)), TILE) * TILE;
    Many many = {.by = by, .own_bytes = adapt_lines(by->own_bytes(job->K))};
    plan(&many, job);
    int64_t threads = team ? least(job->threads, many.chunks) : 1;
    size_t x_bytes = adapt_lines(by->x_bytes(most, job->K));
    char *memory = malloc(x_bytes + (size_t)threads * many.own_bytes + LINE);
    if (!memory) return 0;
    many.x = adapt_aligned(memory);
    many.own = (char *)many.x + x_bytes;
    for (int64_t m = 0; m < job->M; m += most) {
        Job some = *job;
        some.M = least(most, job->M - m);
        some.x += m * job->K;
        for (int i = 0; i < job->parts; i++) some.dense[i].out += m * job->dense[i].out_stride;
        if (!job->parts) some.int4.out += m * job->int4.n;
        run_rows(&many, &some, team, threads);
    }
    free(memory);
    return 1;
}
