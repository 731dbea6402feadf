/* What the module hands to programs in C: capsules. */
#include "capi.h"
#include "core.h"

int fa_capsules_add(PyObject *module, fa_context *context) {
    PyObject *table = PyCapsule_New((void *)fa_capi_table(context), "fa_ext._core._C_API", NULL);
    const int added = table ? PyModule_AddObjectRef(module, "_C_API", table) : -1;
    Py_XDECREF(table);
    return added;
}
