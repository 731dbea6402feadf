"""The table of parameters and what is made from it: the stub, signatures, docstrings, binding, the reading of options."""

import dataclasses
import inspect
import re
import threading

import numpy as np
import pytest

import fa_ext
from bench.problems.case import ARRAYS, Case
from fa_ext import _core, reference
from tests.library.support import stub

TABLE = stub.parameters()
FUNCTIONS = tuple(stub.RESULTS)
SHARED = [(function, p) for function in FUNCTIONS for p in TABLE if function in p.functions]
OPTIONS = [p for p in TABLE if "attention" in p.functions and p.kind not in ("own", "array")]
#: A value of each option that changes the result, its shape or its number.
OTHER = {"causal": True, "scale": 0.25, "window": (0, 0), "softcap": 0.5, "layout": "bshd", "dropout": (0.5, 1),
         "max_seqlen_q": 2, "return_lse": True, "batch_invariant": True}  # fmt: skip
#: Options of packed queries alone.
PACKED = ("max_seqlen_q",)


def of(function):
    return [p for p in TABLE if function in p.functions]


def arguments(function):
    """The required arguments of a call that is right."""
    x = np.random.default_rng(0).standard_normal((1, 3, 3, 8)).astype(np.float32)
    out, lse = _core.attention(x, x, x, return_lse=True)
    if function.endswith("append"):
        lengths = np.array([3], np.int32)
        return {"k_cache": x.copy(), "v_cache": x.copy(), "k": x, "v": x, "layout": "bshd", "seqlens_k": lengths}
    known = dict(q=x, k=x, v=x, dout=x, out=out, lse=lse, outs=[out, out], lses=[lse, lse], array=x, path="nowhere.so", ids=np.arange(3))
    return {p.name: known[p.name] for p in of(function) if p.default is None}


def test_the_stub_is_what_the_table_says():
    assert stub.stub(stub.STUB.read_text()) == stub.STUB.read_text(), "python -m tests.library.support.stub writes it"


def test_the_structs_of_c_have_the_operands():
    """A struct that lacks one gets it at its end, behind what it has."""
    text = stub.HEADER.read_text()
    assert stub.header(text) == text, "python -m tests.library.support.stub writes it"
    known, field = "const fa_ext_array *alibi;", re.search(r"    const fa_ext_array \*alibi; .*\n", text)
    assert field and stub.header(text.replace(field[0], "")).count(known) == text.count(known)


def test_operands_are_the_lines_of_their_list():
    lines = stub.operands()
    assert [o.name for o in _core.operands()] == [line["name"] for line in lines]
    assert [o.number for o in _core.operands()] == list(range(len(lines)))
    for operand, line in zip(_core.operands(), lines, strict=True):
        used = {name: line[column] for name, column in (("attention", "forward"), ("backward", "backward"), ("merge", "merge"), ("append", "append"))}
        assert set(operand.reads) == {name for name, use in used.items() if use.startswith("IN")}, operand
        assert set(operand.writes) == {name for name, use in used.items() if use.startswith("OUT")}, operand
        assert operand.role == line["role"].lower() and operand.gradient == (line["gradient"] != "NO_GRADIENT")


def test_the_options_of_reference_and_verifiers_are_those_of_the_table():
    own = ("q", "k", "v", "out", "return_lse", "workspace", "check", "stream", "kernel", "batch_invariant")
    table = {p.name: p for p in of("attention") if p.name not in own}
    fields = {f.name: f for f in dataclasses.fields(reference.Options)}
    assert list(fields) == list(table)
    assert all(repr(f.default) == table[name].default for name, f in fields.items())
    assert reference.Options.ARRAYS == tuple(name for name, p in table.items() if p.kind == "array")
    sequences = {*reference.Options.INDICES, *reference.Options.PAIRS}  # of cases of sequences
    assert tuple(name for name in reference.Options.ARRAYS if name not in sequences) == (*ARRAYS, "max_logit")  # a result of a case
    cases = {f.name: f.default for f in dataclasses.fields(Case)}
    assert all(cases[name] == fields[name].default for name in fields if name not in sequences), "a case can say every option"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures(function):
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    found = inspect.signature(getattr(_core, function)).parameters.values()
    assert [(p.name, p.kind) for p in found] == [(p.name, kinds[p.keyword]) for p in of(function)]
    for given, wanted in zip(found, of(function), strict=True):
        text = None if given.default is given.empty else repr(given.default)
        assert text == wanted.default, given.name


@pytest.mark.parametrize("function", ["attention", "attention_backward", "merge", "documents", "kernels", "to_device", "load"])
def test_docstrings_name_every_parameter(function):
    section = inspect.getdoc(getattr(_core, function)).partition("Parameters\n")[2].partition("Returns")[0]
    heads = {name for line in section.splitlines() if not line.startswith(" ") for name in line.partition(" :")[0].rstrip(",").split(", ")}
    assert {p.name for p in of(function)} <= heads
    assert all(len(line) <= 120 for line in section.splitlines())


def test_names_and_arguments_are_unlike_each_other():
    assert len({p.argument for p in TABLE}) == len(TABLE)
    for function in FUNCTIONS:
        names = [p.name for p in of(function)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_not_bound(function):
    call, given = getattr(_core, function), arguments(function)
    names = ", ".join(p.name for p in of(function))
    with pytest.raises(TypeError, match=f"unknown argument nothing; accepted: {names}$"):
        call(**given, nothing=1)
    positional = [p for p in of(function) if not p.keyword]
    with pytest.raises(TypeError, match=f"{len(positional) + 1} positional arguments given; accepted: {positional[0].name}"):
        call(*range(len(positional) + 1))
    with pytest.raises(TypeError, match=f"argument {positional[0].name} was given twice"):
        call(3, **given | {positional[0].name: 3})


@pytest.mark.parametrize(("function", "parameter"), SHARED, ids=lambda x: x if isinstance(x, str) else x.argument)
def test_each_argument_says_what_it_accepts(function, parameter):
    call, given = getattr(_core, function), arguments(function)
    if parameter.default is None:
        accepted = parameter.doc.splitlines()[0]
        with pytest.raises(TypeError) as raised:
            call(**{name: x for name, x in given.items() if name != parameter.name})
        assert str(raised.value) == f"argument {parameter.name} is missing; accepted: {accepted}"
    if parameter.argument == "features":  # of the laboratory alone
        return
    with pytest.raises(TypeError, match=f"{parameter.name} has type object; accepted: |expected str, bytes"):
        call(**given | {parameter.name: object()})


@pytest.mark.parametrize(("function", "parameter"), SHARED, ids=lambda x: x if isinstance(x, str) else x.argument)
def test_defaults_are_what_the_table_says(function, parameter):
    """A default that is given is no other call."""
    if parameter.default is None or function in ("load", "to_device", "kernels", "faults"):
        return
    call, given = getattr(_core, function), arguments(function)
    if parameter.name in given:  # needed, though it has a default
        return
    plain, same = call(**given), call(**given | {parameter.name: eval(parameter.default)})
    if function.startswith(("explain", "answers", "workspace", "append")):
        assert plain == same
        return
    for a, b in zip(*([x] if isinstance(x, np.ndarray) else x for x in (plain, same)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda p: p.name)
def test_what_a_thread_remembers_looks_at_every_option(option):
    """A call like the last one but for one option is what it is on a thread that remembers nothing."""
    assert option.name in OTHER, f"say in OTHER what changes with {option.name}"
    q, k, v = (np.random.default_rng(n).standard_normal((1, 3, 3, 8)).astype(np.float32) for n in range(3))
    changed, beside = {option.name: OTHER[option.name]}, {}
    if option.name in PACKED:
        q, beside = q[0], {"cu_seqlens_q": np.array([0, 3], np.int32), "check": False}

    def call(options):
        found = fa_ext.attention(q, k, v, **beside, **options)
        return found if isinstance(found, tuple) else (found,)

    fresh = {}
    thread = threading.Thread(target=lambda: fresh.update(changed=call(changed)))
    thread.start()
    thread.join()
    for options in ({}, {}, changed, {}, changed, changed):
        found = call(options)
        wanted = fresh["changed"] if options else call({"scale": None})
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
    if option.name not in ("return_lse", "batch_invariant"):
        assert not np.array_equal(fresh["changed"][0], call({})[0])
