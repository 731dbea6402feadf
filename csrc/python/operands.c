/* _core.operands(): operands.def for front ends in Python. */
#include "call.h"

#include "problem/operands.h"

static PyStructSequence_Field fields[] = {
    {"number", "its bit in the attribute `given` of XLA's custom calls"},
    {"name", NULL},
    {"role", "\"data\", \"option\", \"state\", \"index\" or \"memory\""},
    {"reads", "names of the operations that read it"},
    {"writes", "names of those that write it"},
    {"gradient", "whether it has one"},
    {"dtypes", "in words"},
    {"axes", "as csrc/operands.def has them"},
    {NULL, NULL},
};

enum { FIELDS = sizeof fields / sizeof *fields - 1 };

static PyStructSequence_Desc description = {"fa_ext._core.Operand", "A line of csrc/operands.def.", fields, FIELDS};

/* Names of the operations that use an operand, in one way or the other. */
static PyObject *operations(const fa_operand_line *line, fa_use use, fa_use use_opt) {
    static const char *const names[FA_OP_COUNT] = FA_OPERATION_NAMES;
    PyObject *list = PyList_New(0), *tuple;
    for (int op = 0; list && op < FA_OP_COUNT; op++) {
        if (line->use[op] != use && line->use[op] != use_opt) continue;
        PyObject *name = PyUnicode_FromString(names[op]);
        if (!name || PyList_Append(list, name) < 0) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    tuple = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return tuple;
}

static PyObject *record(PyTypeObject *type, int number) {
    static const char *const roles[] = {[FA_ROLE_DATA] = "data",
                                        [FA_ROLE_OPTION] = "option",
                                        [FA_ROLE_STATE] = "state",
                                        [FA_ROLE_INDEX] = "index",
                                        [FA_ROLE_MEMORY] = "memory"};
    const fa_operand_line *line = &fa_operands[number];
    PyObject *const items[FIELDS] = {
        PyLong_FromLong(number),
        PyUnicode_FromString(line->name),
        PyUnicode_FromString(roles[line->role]),
        operations(line, FA_USE_IN, FA_USE_IN_OPT),
        operations(line, FA_USE_OUT, FA_USE_OUT_OPT),
        PyBool_FromLong(line->grad != FA_GRAD_COUNT),
        PyUnicode_FromString(line->dtypes),
        PyUnicode_FromString(line->axes),
    };
    PyObject *made = PyStructSequence_New(type);
    bool whole = made != NULL;
    for (int n = 0; n < FIELDS; n++) {
        whole = whole && items[n];
        if (made)
            PyStructSequence_SetItem(made, n, items[n]);
        else
            Py_XDECREF(items[n]);
    }
    if (!whole) Py_CLEAR(made);
    return made;
}

PyObject *fa_operands_py(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    PyTypeObject *type = PyStructSequence_NewType(&description);
    PyObject *tuple = type ? PyTuple_New(FA_OPERAND_COUNT) : NULL;
    for (int n = 0; tuple && n < FA_OPERAND_COUNT; n++) {
        PyObject *item = record(type, n);
        if (!item || PyTuple_SetItem(tuple, n, item) < 0) Py_CLEAR(tuple);
    }
    Py_XDECREF((PyObject *)type);
    return tuple;
}
