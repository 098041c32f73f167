/* Products by chunks of rows. Knows no Python and starts no threads. */
#include "job.h"

static void run_chunk(Job *job, int64_t chunk) {
    int part = 0;
    while (chunk >= job->ends[part]) part++;
    int64_t first = (chunk - (part ? job->ends[part - 1] : 0)) * job->step;
    int64_t block = block_rows(job->M, job->parts ? job->isa->dense_block : job->isa->int4_block);
    for (int64_t m = 0; m < job->M; m += block) {
        int rows = (int)least(block, job->M - m);
        if (job->parts) {
            const Dense *d = &job->dense[part];
            job->isa->dense_rows(d, job->K, job->xs, m, rows, first, least(d->n, first + job->step));
        } else {
            job->isa->int4_rows(&job->int4, job->xs, job->sums, m, rows, first, least(job->int4.n, first + job->step));
        }
    }
}

void adapt_work(void *data) {
    Job *job = data;
    for (;;) {
        int64_t chunk = atomic_fetch_add_explicit(job->next, 1, memory_order_relaxed);
        if (chunk >= job->chunks) return;
        run_chunk(job, chunk);
    }
}

/* Rows per chunk, in whole units, but at least four chunks for each thread. */
static int64_t rows_per_chunk(const Job *job, int64_t row_bytes, int64_t widest, int64_t unit) {
    int64_t step = least(chunk_bytes(job->M, widest) / row_bytes + 1, ceil_div(job->rows, 4 * job->threads));
    return ceil_div(step ? step : 1, unit) * unit;
}

static void plan_dense(Job *job) {
    job->rows = job->chunks = 0;
    for (int i = 0; i < job->parts; i++) job->rows += job->dense[i].n;
    job->bytes = job->rows * job->K * 2;
    job->step = rows_per_chunk(job, 2 * job->K, job->isa->dense_block, 4);
    for (int i = 0; i < job->parts; i++) job->ends[i] = job->chunks += ceil_div(job->dense[i].n, job->step);
}

static void plan_int4(Job *job) {
    const Int4 *p = &job->int4;
    int64_t tile = p->groups * (p->lines + (p->wide ? 2 : 1)) * LINE;
    job->rows = p->n;
    job->bytes = ceil_div(p->n, TILE) * tile;
    job->step = rows_per_chunk(job, ceil_div(tile, TILE), job->isa->int4_block, TILE);
    job->ends[0] = job->chunks = ceil_div(p->n, job->step);
}

void adapt_plan(Job *job) {
    if (job->parts) plan_dense(job);
    else plan_int4(job);
}

static size_t codes_room(const Job *job) { return job->isa->int4_bytes(job->M, job->K); }

size_t adapt_room(const Job *job) {
    if (job->parts) return job->isa->dense_bytes(job->M, job->K);
    return codes_room(job) + (size_t)(job->M * job->int4.groups) * 2 * sizeof(float);
}

void adapt_prepare(Job *job, void *room) {
    job->xs = room;
    if (job->parts) {
        job->isa->dense_prepare(job->x, job->M, job->K, room);
        return;
    }
    job->sums = (float *)((char *)room + codes_room(job));
    job->isa->int4_prepare(job->x, job->M, job->K, job->int4.groups, room, job->sums);
}
