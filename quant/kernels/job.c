/* Products by chunks of rows. Knows no Python and starts no threads. */
#include "job.h"

static void run_chunk(Job *job, int part, int64_t first, int64_t last) {
    int64_t block = block_rows(job->M, job->parts ? job->isa->dense_block : job->isa->int4_block);
    for (int64_t m = 0; m < job->M; m += block) {
        int rows = (int)least(block, job->M - m);
        if (job->parts) job->isa->dense_rows(&job->dense[part], job->K, job->xs, m, rows, first, last);
        else job->isa->int4_rows(&job->int4, job->xs, job->sums, m, rows, first, last);
    }
}

/* The row behind the chunk that begins at `first`. Towards the end a thread takes no more than its share of half of what is
 * left, so that all of them end at about the same time. */
static int64_t chunk_end(const Job *job, int64_t first, int part) {
    int64_t share = (job->rows - first) / (2 * job->threads);
    int64_t rows = least(job->most, share > job->fewest ? share : job->fewest);
    return least(first + ceil_div(rows, job->unit) * job->unit, job->ends[part]);
}

void adapt_work(void *data) {
    Job *job = data;
    int part = 0;
    long long first = atomic_load_explicit(job->next, memory_order_relaxed);
    while (first < job->rows) {
        while (first >= job->ends[part]) part++;
        int64_t last = chunk_end(job, first, part), start = part ? job->ends[part - 1] : 0;
        if (!atomic_compare_exchange_weak_explicit(job->next, &first, last, memory_order_relaxed, memory_order_relaxed))
            continue;
        run_chunk(job, part, first - start, last - start);
        first = atomic_load_explicit(job->next, memory_order_relaxed);
    }
}

static void plan_chunks(Job *job, int64_t row_bytes, int64_t widest, int64_t unit) {
    job->unit = unit;
    job->most = chunk_bytes(job->M, widest) / row_bytes + 1;
    job->fewest = LAST_BYTES / row_bytes + 1;
}

static void plan_dense(Job *job) {
    job->rows = 0;
    for (int i = 0; i < job->parts; i++) job->ends[i] = job->rows += job->dense[i].n;
    job->bytes = job->rows * job->K * 2;
    plan_chunks(job, 2 * job->K, job->isa->dense_block, 4);
}

static void plan_int4(Job *job) {
    const Int4 *p = &job->int4;
    int64_t tile = adapt_tile_bytes(p);
    job->ends[0] = job->rows = p->n;
    job->bytes = ceil_div(p->n, TILE) * tile;
    plan_chunks(job, ceil_div(tile, TILE), job->isa->int4_block, TILE);
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
