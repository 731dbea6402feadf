/* A program in C, or C++, that uses fa_ext through its table: see test_c_api.py, which compiles it as both. */
#include "fa_ext.h"

#include <math.h>
#include <string.h>

#ifdef __cplusplus
#define EXPORT extern "C" __attribute__((visibility("default")))
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* ---- calls with arrays that Python made: it holds the results against its own interface ---- */

/* q, k, v, bias, mask, sinks, alibi, out, lse, cu_seqlens_q, seqlens_q, cu_seqlens_k, seqlens_k, page_table,
 * k_range_begin, k_range_end, positions, q_segments, k_segments, intervals, max_logit */
static fa_ext_forward forward_of(const fa_ext_array *const *arrays, const fa_ext_options *options, int check) {
    fa_ext_forward call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call;
    call.q = arrays[0], call.k = arrays[1], call.v = arrays[2];
    call.bias = arrays[3], call.mask = arrays[4], call.sinks = arrays[5];
    call.alibi = arrays[6], call.out = arrays[7], call.lse = arrays[8];
    call.cu_seqlens_q = arrays[9], call.seqlens_q = arrays[10];
    call.cu_seqlens_k = arrays[11], call.seqlens_k = arrays[12], call.page_table = arrays[13];
    call.k_range_begin = arrays[14], call.k_range_end = arrays[15], call.positions = arrays[16];
    call.q_segments = arrays[17], call.k_segments = arrays[18], call.intervals = arrays[19];
    call.max_logit = arrays[20];
    call.options = options;
    call.check = check;
    return call;
}

/* dout, q, k, v, out, lse, dlse, bias, mask, sinks, alibi, dq, dk, dv, dbias, dsinks, then the index arrays of
 * forward_of but page_table, and intervals; flags: 1 accumulate, 2 unordered, 4 FA_EXT_CHECK_NEVER */
static fa_ext_backward backward_of(const fa_ext_array *const *arrays, const fa_ext_options *options, int flags) {
    fa_ext_backward call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call;
    call.dout = arrays[0], call.q = arrays[1], call.k = arrays[2], call.v = arrays[3];
    call.out = arrays[4], call.lse = arrays[5], call.dlse = arrays[6];
    call.bias = arrays[7], call.mask = arrays[8], call.sinks = arrays[9];
    call.alibi = arrays[10];
    call.dq = arrays[11], call.dk = arrays[12], call.dv = arrays[13], call.dbias = arrays[14], call.dsinks = arrays[15];
    call.cu_seqlens_q = arrays[16], call.seqlens_q = arrays[17];
    call.cu_seqlens_k = arrays[18], call.seqlens_k = arrays[19];
    call.k_range_begin = arrays[20], call.k_range_end = arrays[21], call.positions = arrays[22];
    call.q_segments = arrays[23], call.k_segments = arrays[24], call.intervals = arrays[25];
    call.options = options;
    call.accumulate = flags & 1;
    call.unordered = flags & 2;
    call.check = flags & 4 ? FA_EXT_CHECK_NEVER : FA_EXT_CHECK_DEFAULT;
    return call;
}

/* outs, lses (`count` each, one behind the other), sinks, out, lse; options: the layout alone */
static fa_ext_merge merge_of(const fa_ext_array *const *arrays, const fa_ext_options *options, int count) {
    fa_ext_merge call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call;
    call.outs = arrays[0], call.lses = arrays[1], call.count = (size_t)count;
    call.sinks = arrays[2], call.out = arrays[3], call.lse = arrays[4];
    call.layout = options ? options->layout : FA_EXT_BHSD;
    return call;
}

/* k_cache, v_cache, k, v, q, out, rotary_cos, rotary_sin, page_table, seqlens_k, cu_seqlens_q, seqlens_q, slots,
 * positions; options: the layout alone; flags: 1 interleaved, 2 never checked */
static fa_ext_append append_of(const fa_ext_array *const *arrays, const fa_ext_options *options, int flags) {
    fa_ext_append call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call;
    call.k_cache = arrays[0], call.v_cache = arrays[1], call.k = arrays[2], call.v = arrays[3];
    call.q = arrays[4], call.out = arrays[5], call.rotary_cos = arrays[6], call.rotary_sin = arrays[7];
    call.page_table = arrays[8], call.seqlens_k = arrays[9], call.cu_seqlens_q = arrays[10],
    call.seqlens_q = arrays[11];
    call.slots = arrays[12], call.positions = arrays[13];
    call.layout = options ? options->layout : FA_EXT_BHSD;
    call.interleaved = flags & 1;
    call.check = flags & 2 ? FA_EXT_CHECK_NEVER : FA_EXT_CHECK_DEFAULT;
    return call;
}

/* ids, out; `check`: fa_ext_check */
static fa_ext_documents documents_of(const fa_ext_array *const *arrays, int check) {
    fa_ext_documents call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call, call.ids = arrays[0], call.out = arrays[1], call.check = check;
    return call;
}

EXPORT int dropout_keep(const fa_ext_api *api, const fa_ext_array *out, const fa_ext_options *options,
                        const fa_ext_run *run) {
    fa_ext_dropout_keep call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call, call.out = out, call.options = options;
    return api->dropout_keep(&call, run);
}

EXPORT int faults(const fa_ext_api *api, int device, int keep, fa_ext_fault *found, size_t count,
                  const fa_ext_run *run) {
    fa_ext_faults call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call, call.device = device, call.keep = keep, call.found = found, call.count = count;
    return api->faults(&call, run);
}

/* `bytes` NULL: runs the operation; else asks for its workspace. `extra`: flags, check, or the number of parts. */
EXPORT int call(const fa_ext_api *api, int operation, const fa_ext_array *const *arrays, const fa_ext_options *options,
                int extra, const fa_ext_run *run, size_t *bytes) {
    if (operation == FA_EXT_FORWARD) {
        const fa_ext_forward arguments = forward_of(arrays, options, extra);
        return bytes ? api->workspace(operation, &arguments, run, bytes) : api->forward(&arguments, run);
    }
    if (operation == FA_EXT_BACKWARD) {
        const fa_ext_backward arguments = backward_of(arrays, options, extra);
        return bytes ? api->workspace(operation, &arguments, run, bytes) : api->backward(&arguments, run);
    }
    if (operation == FA_EXT_APPEND) {
        const fa_ext_append arguments = append_of(arrays, options, extra);
        return bytes ? api->workspace(operation, &arguments, run, bytes) : api->append(&arguments, run);
    }
    if (operation == FA_EXT_DOCUMENTS) {
        const fa_ext_documents arguments = documents_of(arrays, extra);
        return bytes ? api->workspace(operation, &arguments, run, bytes) : api->documents(&arguments, run);
    }
    const fa_ext_merge arguments = merge_of(arrays, options, extra);
    return bytes ? api->workspace(operation, &arguments, run, bytes) : api->merge(&arguments, run);
}

/* ---- a program of its own: returns 0, or the line of the first check that fails ---- */

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) return __LINE__;                                                                             \
    } while (0)

enum { HEADS = 2, QUERIES = 3, KEYS = 5, DIM = 7 };

static const int64_t of_q[4] = {1, HEADS, QUERIES, DIM}, of_k[4] = {1, HEADS, KEYS, DIM},
                     of_lse[3] = {1, HEADS, QUERIES};

static fa_ext_array array_of(void *data, int ndim, const int64_t *shape) {
    fa_ext_array array;
    memset(&array, 0, sizeof array);
    array.data = data;
    array.dtype = FA_EXT_FLOAT32;
    array.ndim = ndim;
    array.shape = shape;
    return array;
}

static fa_ext_array indices_of(int32_t *data, int ndim, const int64_t *shape) {
    fa_ext_array array = array_of(data, ndim, shape);
    array.dtype = FA_EXT_INT32;
    return array;
}

static void fill(float *numbers, int count, unsigned *seed) {
    for (int n = 0; n < count; n++) {
        *seed = *seed * 1664525u + 1013904223u;
        numbers[n] = (float)(*seed >> 8) / 8388608.0f - 1.0f;
    }
}

typedef struct problem {
    float q[HEADS * QUERIES * DIM], k[HEADS * KEYS * DIM], v[HEADS * KEYS * DIM];
    float out[HEADS * QUERIES * DIM], lse[HEADS * QUERIES], dv[HEADS * KEYS * DIM];
} problem;

/* Row i of head h by the definition, in double; returns its log-sum-exp. */
static double attend(const problem *p, int h, int i, double row[DIM]) {
    double weight[KEYS], sum = 0;
    for (int j = 0; j < KEYS; j++) {
        double score = 0;
        for (int d = 0; d < DIM; d++)
            score += (double)p->q[(h * QUERIES + i) * DIM + d] * (double)p->k[(h * KEYS + j) * DIM + d];
        weight[j] = exp(score / sqrt((double)DIM));
        sum += weight[j];
    }
    for (int d = 0; d < DIM; d++) {
        row[d] = 0;
        for (int j = 0; j < KEYS; j++) row[d] += weight[j] / sum * (double)p->v[(h * KEYS + j) * DIM + d];
    }
    return log(sum);
}

static int is_right(const problem *p) {
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < QUERIES; i++) {
            double row[DIM];
            const double lse = attend(p, h, i, row);
            if (!(fabs(lse - (double)p->lse[h * QUERIES + i]) < 1e-5)) return 0;
            for (int d = 0; d < DIM; d++)
                if (!(fabs(row[d] - (double)p->out[(h * QUERIES + i) * DIM + d]) < 1e-5)) return 0;
        }
    return 1;
}

/* dv summed over keys is dout summed over queries, since the weights of a row sum to 1; dout is all ones here. */
static int sums_are_right(const problem *p) {
    for (int h = 0; h < HEADS; h++)
        for (int d = 0; d < DIM; d++) {
            double sum = 0;
            for (int j = 0; j < KEYS; j++) sum += (double)p->dv[(h * KEYS + j) * DIM + d];
            if (!(fabs(sum - QUERIES) < 1e-4)) return 0;
        }
    return 1;
}

static int check_errors(const fa_ext_api *api, fa_ext_forward call, fa_ext_run run) {
    char *message = run.message;
    fa_ext_array bad = *call.k;
    CHECK(api->forward(NULL, &run) == FA_EXT_EVALUE && strstr(message, "fa_ext_forward is NULL"));
    call.size = 8;
    CHECK(api->forward(&call, &run) == FA_EXT_EVALUE && strstr(message, "fa_ext_forward.size is 8"));
    call.size = sizeof call;
    bad.dtype = FA_EXT_FLOAT64;
    call.k = &bad;
    CHECK(api->forward(&call, &run) == FA_EXT_ETYPE && strstr(message, "k has dtype float64"));
    bad.dtype = 0;
    CHECK(api->forward(&call, &run) == FA_EXT_ETYPE && strstr(message, "k.dtype is 0"));
    bad = *call.q, bad.data = NULL;
    CHECK(api->forward(&call, &run) == FA_EXT_EBUFFER && strstr(message, "k has a NULL data pointer"));
    CHECK(api->forward(&call, NULL) == FA_EXT_EBUFFER);
    call.k = NULL;
    CHECK(api->forward(&call, &run) == FA_EXT_EVALUE && strstr(message, "k is NULL"));
    run.message_bytes = 4;
    message[4] = '!';
    CHECK(api->forward(&call, &run) == FA_EXT_EVALUE && strlen(message) == 3 && message[4] == '!');
    return 0;
}

/* The keys of the problem appended to pages of 2 rows, the last first, and attended there: the same result. A page that
 * is none is an error, or counted. */
static int check_serving(const fa_ext_api *api, problem *p, const fa_ext_run *how) {
    enum { PAGES = 4, SIZE = 2, COLUMNS = 3 };
    static float k_cache[PAGES * HEADS * SIZE * DIM], v_cache[PAGES * HEADS * SIZE * DIM];
    static const int64_t of_cache[4] = {PAGES, HEADS, SIZE, DIM}, of_table[2] = {1, COLUMNS}, one[1] = {1};
    int32_t table[COLUMNS] = {3, 0, 2}, length = KEYS;
    const fa_ext_array cached_k = array_of(k_cache, 4, of_cache), cached_v = array_of(v_cache, 4, of_cache);
    const fa_ext_array k = array_of(p->k, 4, of_k), v = array_of(p->v, 4, of_k), q = array_of(p->q, 4, of_q);
    const fa_ext_array out = array_of(p->out, 4, of_q), lse = array_of(p->lse, 3, of_lse);
    const fa_ext_array pages = indices_of(table, 2, of_table), lengths = indices_of(&length, 1, one);
    fa_ext_fault found[FA_EXT_FAULT_POSITION + 2];
    fa_ext_append append;
    fa_ext_forward forward;
    memset(&append, 0, sizeof append);
    append.size = sizeof append;
    append.k_cache = &cached_k, append.v_cache = &cached_v, append.k = &k, append.v = &v;
    append.page_table = &pages, append.seqlens_k = &lengths;
    memset(k_cache, 0xff, sizeof k_cache), memset(v_cache, 0xff, sizeof v_cache); /* NaN */
    CHECK(api->append(&append, how) == FA_EXT_OK && k_cache[3 * HEADS * SIZE * DIM] == p->k[0]);
    memset(&forward, 0, sizeof forward);
    forward.size = sizeof forward;
    forward.q = &q, forward.k = &cached_k, forward.v = &cached_v, forward.out = &out, forward.lse = &lse;
    forward.page_table = &pages, forward.seqlens_k = &lengths;
    memset(p->out, 0xff, sizeof p->out);
    CHECK(api->forward(&forward, how) == FA_EXT_OK && is_right(p));
    table[1] = PAGES;
    CHECK(api->forward(&forward, how) == FA_EXT_EVALUE && strstr(how->message, "page_table[0, 1] is 4"));
    CHECK(is_right(p) && faults(api, FA_EXT_CPU, 0, NULL, 0, how) == FA_EXT_OK);
    append.check = forward.check = FA_EXT_CHECK_NEVER;
    CHECK(api->append(&append, how) == FA_EXT_OK && api->forward(&forward, how) == FA_EXT_OK && !is_right(p));
    CHECK(faults(api, FA_EXT_CPU, 1, found, FA_EXT_FAULT_POSITION + 2, how) == FA_EXT_OK);
    CHECK(found[FA_EXT_FAULT_PAGE].count == 2 && found[FA_EXT_FAULT_PAGE].index == 1);
    CHECK(found[FA_EXT_FAULT_PAGE].value == PAGES && found[FA_EXT_FAULT_POSITION + 1].count == 0);
    CHECK(faults(api, FA_EXT_CPU, 0, found, 1, how) == FA_EXT_OK && found[FA_EXT_FAULT_LENGTH].count == 0);
    CHECK(faults(api, FA_EXT_CPU, 0, found, 3, how) == FA_EXT_OK && found[FA_EXT_FAULT_PAGE].count == 0);
    return 0;
}

/* Known answers of the generator, at probabilities around them. */
static int check_dropout(const fa_ext_api *api, const fa_ext_run *how) {
    static const int64_t shape[4] = {1, 1, 9, 2};
    unsigned char kept[18];
    fa_ext_array out = array_of(kept, 4, shape);
    fa_ext_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.dropout_seed = 0x123456789abcdef0u, options.dropout_offset = 7;
    options.dropout_origin[1] = 3, options.dropout_heads = 4;
    out.dtype = FA_EXT_BOOL;
    options.dropout = 44887.0 / 65536; /* of query and key 0; 45181 of query 8 */
    CHECK(dropout_keep(api, &out, &options, how) == FA_EXT_OK && kept[0] == 1 && kept[1] == 0 && kept[16] == 1);
    options.dropout = 44888.0 / 65536;
    CHECK(dropout_keep(api, &out, &options, how) == FA_EXT_OK && kept[0] == 0 && kept[16] == 1);
    CHECK(dropout_keep(api, &out, NULL, how) == FA_EXT_OK && kept[0] == 1 && kept[1] == 1);
    out.dtype = FA_EXT_FLOAT16;
    CHECK(dropout_keep(api, &out, &options, how) == FA_EXT_ETYPE && strstr(how->message, "out has dtype float16"));
    return 0;
}

EXPORT int run(const fa_ext_api *api) {
    static problem p;
    static float ones[HEADS * QUERIES * DIM], merged[HEADS * QUERIES * DIM], merged_lse[HEADS * QUERIES];
    static unsigned char workspace[1 << 20];
    char message[256] = "";
    unsigned seed = 7;
    size_t bytes = 1;
    fill(p.q, HEADS * QUERIES * DIM, &seed);
    fill(p.k, HEADS * KEYS * DIM, &seed);
    fill(p.v, HEADS * KEYS * DIM, &seed);
    for (int n = 0; n < HEADS * QUERIES * DIM; n++) ones[n] = 1;
    const fa_ext_array q = array_of(p.q, 4, of_q), k = array_of(p.k, 4, of_k), v = array_of(p.v, 4, of_k);
    const fa_ext_array out = array_of(p.out, 4, of_q), lse = array_of(p.lse, 3, of_lse);
    const fa_ext_array dout = array_of(ones, 4, of_q), dv = array_of(p.dv, 4, of_k);
    const fa_ext_array whole = array_of(merged, 4, of_q), whole_lse = array_of(merged_lse, 3, of_lse);
    fa_ext_run how;
    memset(&how, 0, sizeof how);
    how.size = sizeof how, how.message = message, how.message_bytes = sizeof message;

    CHECK(api->abi == FA_EXT_ABI && FA_EXT_HAS(api, faults) && strlen(api->version) > 0);
    fa_ext_forward forward;
    memset(&forward, 0, sizeof forward);
    forward.size = sizeof forward;
    forward.q = &q, forward.k = &k, forward.v = &v, forward.out = &out, forward.lse = &lse;
    CHECK(api->forward(&forward, &how) == FA_EXT_OK && is_right(&p));
    memset(p.out, 0xff, sizeof p.out); /* NaN */
    CHECK(api->workspace(FA_EXT_FORWARD, &forward, &how, &bytes) == FA_EXT_OK && bytes < sizeof workspace);
    how.workspace = workspace + 1, how.workspace_bytes = bytes;
    CHECK(api->forward(&forward, &how) == FA_EXT_OK && is_right(&p));
    how.workspace = NULL;

    fa_ext_backward backward;
    memset(&backward, 0, sizeof backward);
    backward.size = sizeof backward;
    backward.dout = &dout, backward.q = &q, backward.k = &k, backward.v = &v, backward.out = &out, backward.lse = &lse;
    backward.dv = &dv;
    CHECK(api->backward(&backward, &how) == FA_EXT_OK && sums_are_right(&p));
    backward.dv = NULL;
    CHECK(api->backward(&backward, &how) == FA_EXT_EVALUE && strstr(message, "at least one"));

    const fa_ext_array outs[2] = {out, out}, lses[2] = {lse, lse};
    fa_ext_merge merge;
    memset(&merge, 0, sizeof merge);
    merge.size = sizeof merge;
    merge.outs = outs, merge.lses = lses, merge.count = 2, merge.out = &whole, merge.lse = &whole_lse;
    CHECK(api->merge(&merge, &how) == FA_EXT_OK);
    for (int n = 0; n < HEADS * QUERIES; n++) CHECK(fabs((double)(merged_lse[n] - p.lse[n]) - log(2.0)) < 1e-5);
    for (int n = 0; n < HEADS * QUERIES * DIM; n++) CHECK(fabs((double)(merged[n] - p.out[n])) < 1e-6);
    int line = check_serving(api, &p, &how);
    if (!line) line = check_dropout(api, &how);
    return line ? line : check_errors(api, forward, how);
}

#ifdef FA_EXT_IMPORT
/* With the GIL held: the table that fa_ext_import() finds. */
EXPORT const void *imported(void) { return fa_ext_import(); }
#endif
