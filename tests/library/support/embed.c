/* A program with Python inside that calls attention on memory of its own: two keys, of which the query sees one. */
#define FA_EXT_IMPORT
#include "fa_ext.h"

#include <stdio.h>

static int attend(const fa_ext_api *api) {
    float q[2] = {1, 1}, k[4] = {1, 2, 3, 4}, v[4] = {1.5F, 2.5F, 7, 7}, out[2] = {0, 0};
    const int64_t one[4] = {1, 1, 1, 2}, two[4] = {1, 1, 2, 2};
    const fa_ext_array of_q = {.data = q, .dtype = FA_EXT_FLOAT32, .ndim = 4, .shape = one};
    const fa_ext_array of_k = {.data = k, .dtype = FA_EXT_FLOAT32, .ndim = 4, .shape = two};
    const fa_ext_array of_v = {.data = v, .dtype = FA_EXT_FLOAT32, .ndim = 4, .shape = two};
    const fa_ext_array of_out = {.data = out, .dtype = FA_EXT_FLOAT32, .ndim = 4, .shape = one};
    const fa_ext_options options = {.size = sizeof options, .causal = FA_EXT_CAUSAL_TOP_LEFT};
    const fa_ext_forward call = {
        .size = sizeof call, .q = &of_q, .k = &of_k, .v = &of_v, .out = &of_out, .options = &options};
    char message[256];
    const fa_ext_run run = {.size = sizeof run, .message = message, .message_bytes = sizeof message};
    if (api->forward(&call, &run) != FA_EXT_OK) {
        fprintf(stderr, "%s\n", message);
        return 1;
    }
    printf("%g %g\n", (double)out[0], (double)out[1]);
    return 0;
}

int main(void) {
    Py_Initialize();
    const fa_ext_api *api = fa_ext_import();
    if (!api) PyErr_Print();
    const int failed = api ? attend(api) : 1;
    return Py_FinalizeEx() < 0 ? 1 : failed;
}
