/* A device that a dict describes, such as _core.device_info() returns: explain() answers for it without a GPU. */
#include "call.h"

#include <stdio.h>

static fa_code read_size(PyObject *given, const char *key, bool required, size_t *size, fa_status *status) {
    PyObject *value = PyMapping_GetItemString(given, key);
    if (!value) {
        PyErr_Clear();
        if (!required) return FA_OK;
        return fa_fail(status, FA_EVALUE, "device has no \"%s\"; accepted: what _core.device_info() returns", key);
    }
    const unsigned long long number = PyLong_Check(value) ? PyLong_AsUnsignedLongLong(value) : 0;
    fa_code code = FA_OK;
    if (!PyLong_Check(value) || PyErr_Occurred()) {
        PyErr_Clear();
        char name[64];
        snprintf(name, sizeof name, "device's \"%s\"", key);
        code = fa_wrong_type(name, value, "an int >= 0", status);
    }
    *size = (size_t)number;
    Py_DECREF(value);
    return code;
}

/* The keys that plans ask about; cuBLAS is there unless "cublas_error" says otherwise. */
static fa_code read_device(PyObject *given, fa_device_info *info, fa_status *status) {
    size_t cc = 0, sm_count = 0, tensor_maps = 0;
    if (!PyDict_Check(given))
        return fa_wrong_type("device", given, "None, or a dict such as _core.device_info() returns", status);
    info->device = (fa_device){FA_CUDA, 0};
    FA_TRY(read_size(given, "cc", true, &cc, status));
    FA_TRY(read_size(given, "sm_count", true, &sm_count, status));
    FA_TRY(read_size(given, "smem_per_block", true, &info->smem_per_block, status));
    FA_TRY(read_size(given, "smem_per_sm", true, &info->smem_per_sm, status));
    FA_TRY(read_size(given, "l2_bytes", true, &info->l2_bytes, status));
    FA_TRY(read_size(given, "tensor_maps", true, &tensor_maps, status));
    FA_TRY(read_size(given, "workspace_limit", false, &info->workspace_limit, status));
    info->cc = (int)cc;
    info->sm_count = (int)sm_count;
    info->tensor_maps = tensor_maps != 0;
    PyObject *error = PyMapping_GetItemString(given, "cublas_error");
    if (error && error != Py_None) info->library_error[FA_CUBLAS] = "cuBLAS was not found on the device described";
    PyErr_Clear();
    Py_XDECREF(error);
    return FA_OK;
}

fa_code fa_device_described(fa_state *state, PyObject *given, fa_device_info *described, fa_status *status) {
    const fa_device_info *here;
    FA_TRY(fa_device_info_get(state->context, (fa_device){FA_CPU, 0}, &here, status));
    *described = (fa_device_info){.workspace_limit = here->workspace_limit};
    return read_device(given, described, status);
}
