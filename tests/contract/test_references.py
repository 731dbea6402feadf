"""References that a call holds: they and capsules go back whether it succeeds or fails, and no exception is left behind."""

import gc
import sys

import numpy as np
import pytest

import fa_ext
from tests.arrays.producers import Interface, Producer, exchange_type, interface


class Raises:
    """Looks like the text of a dict's key until it is compared."""

    def __init__(self, text):
        self.text = text

    def __hash__(self):
        return hash(self.text)

    def __eq__(self, other):
        raise ZeroDivisionError(f"{self.text} compared")


class Array:
    """Speaks DLPack until one of its methods raises."""

    def __init__(self, array, raising):
        self.array, self.raising = array, raising

    def __dlpack_device__(self):
        if self.raising == "device":
            raise ZeroDivisionError("device")
        return (1, 0)

    def __dlpack__(self, **keywords):
        raise ZeroDivisionError("capsule")


def operands(dtype=np.float32):
    return [np.random.default_rng(n).standard_normal((1, 2, 4, 8)).astype(dtype) for n in range(3)]


q, k, v = operands()
kind, failing = exchange_type(requires_grad=False), exchange_type(requires_grad=False, failing=True)
window, unusual, pair = (3, None), [1.5, None], (np.empty_like(q), np.empty((1, 2, 4), np.float32))
lses = [np.zeros((1, 2, 4), np.float32) for _ in range(2)]
row_lse, sink, names = lses[0], np.zeros(2, np.float32), ("v", "q", "k")
device = {"cc": 90, "sm_count": 132, "smem_per_block": 232448, "smem_per_sm": 233472, "l2_bytes": 50 << 20, "tensor_maps": True}
capsules = [Producer(array) for array in (q, k, v)]
tensors, refused = [kind(array) for array in (q, k, v)], failing(q)
ids, starts = np.arange(4), np.zeros(5, np.int32)
late, early, dtype, bad = Array(k, "capsule"), Array(k, "device"), q.astype(np.int16), interface(typestr="<i2")

CALLS = {
    "plain": (lambda: fa_ext.attention(q, k, v), None),
    "options": (lambda: fa_ext.attention(q, k, v, window=window, mask=np.ones((4, 4), bool), return_lse=True), None),
    "pair": (lambda: fa_ext.attention(q, k, v, out=pair), None),
    "exchange": (lambda: fa_ext.attention(*tensors, return_lse=True), None),
    "capsules": (lambda: fa_ext.attention(*capsules), None),
    "explain": (lambda: fa_ext.explain(q, k, v), None),
    "described": (lambda: fa_ext.explain(q, k, v, device=device), None),
    "answers": (lambda: fa_ext._core.answers(q, k, v, device=device, features=0, kernel="cpu_ref"), None),
    "no such device": (lambda: fa_ext.explain(q, k, v, device=window), TypeError),
    "merge": (lambda: fa_ext.merge([q, k], lses), None),
    "merge, out": (lambda: fa_ext.merge((q, k), lses, out=pair, sinks=np.zeros(2, np.float32)), None),
    "merge, capsules": (lambda: fa_ext.merge(capsules[:2], lses), TypeError),
    "merge, explained": (lambda: fa_ext.explain_merge([q, k], lses, kernel="cpu_merge"), None),
    "merge, shape": (lambda: fa_ext.merge([q, k[:, :1]], lses), ValueError),
    "merge, keyword": (lambda: fa_ext.merge([q, k], lses, nothing=window), TypeError),
    "merge, overlap": (lambda: fa_ext.merge([q, k], lses, out=k), ValueError),
    "documents": (lambda: fa_ext.documents(ids, out=starts), None),
    "documents, explained": (lambda: fa_ext.explain_documents(ids, kernel="cpu_documents"), None),
    "documents, too many": (lambda: fa_ext.documents(ids, count=1), ValueError),
    "backward": (lambda: fa_ext.attention_backward(q, q, k, v, q, row_lse, wrt=names, grads=[None, pair[0], None]), None),
    "backward, sinks": (lambda: fa_ext.attention_backward(None, q, k, v, q, row_lse, dlse=row_lse, sinks=sink, wrt=["sinks"]), None),
    "backward, capsules": (lambda: fa_ext.attention_backward(q, *capsules, q, row_lse), None),
    "backward, explained": (lambda: fa_ext.explain_backward(q, q, k, v, q, row_lse, kernel="cpu_ref_backward"), None),
    "backward, described": (lambda: fa_ext.explain_backward(q, q, k, v, q, row_lse, device=device), None),
    "backward, wrt": (lambda: fa_ext.attention_backward(q, q, k, v, q, row_lse, wrt=["q", window]), TypeError),
    "backward, grads": (lambda: fa_ext.attention_backward(q, q, k, v, q, row_lse, grads=[None, q, None]), ValueError),
    "backward, allocator": (lambda: fa_ext.attention_backward(q, refused, k, v, q, row_lse), MemoryError),
    "backward, keyword": (lambda: fa_ext.attention_backward(q, q, k, v, q, row_lse, nothing=window), TypeError),
    "to_numpy": (lambda: fa_ext.to_numpy(tensors[0]), None),
    "a capsule too few": (lambda: fa_ext.attention(capsules[0], late, v), ZeroDivisionError),
    "no device": (lambda: fa_ext.attention(capsules[0], early, v), ZeroDivisionError),
    "allocator": (lambda: fa_ext.attention(refused, k, v), MemoryError),
    "dtype": (lambda: fa_ext.attention(q, dtype, v), TypeError),
    "window": (lambda: fa_ext.attention(q, k, v, window=unusual), TypeError),
    "shape": (lambda: fa_ext.attention(capsules[0], k[:, :, :3], v), ValueError),
    "keyword": (lambda: fa_ext.attention(q, k, v, nothing=window), TypeError),
    "interface": (lambda: fa_ext.attention(q, bad, v), TypeError),
    "kernel": (lambda: fa_ext.attention(q, k, v, kernel="none"), ValueError),
    "overlap": (lambda: fa_ext.attention(q, k, v, out=q), ValueError),
    "to_device": (lambda: fa_ext.to_device(q, device="0"), TypeError),
}
HELD = [ids, starts, q, k, v, *lses, sink, names, kind, failing, window, unusual, pair, *pair, *tensors, refused, late, early, dtype, bad, q.dtype]


@pytest.mark.parametrize("name", CALLS)
def test_references_go_back(name):
    call, error = CALLS[name]

    def run():
        if error is None:
            call()
        else:
            with pytest.raises(error):
                call()

    def count():
        gc.collect()
        held = [sys.getrefcount(HELD[n]) for n in range(len(HELD))]
        made, deleted = sum(len(c.capsules) for c in capsules), sum(c.deleted for c in capsules)
        read = sum(k.calls.count("tensor_from_object") for k in (kind, failing))
        return held, made, deleted, read, sum(len(k.alive) for k in (kind, failing))

    run()
    before, made_before, deleted_before, read_before, alive_before = count()
    for _ in range(20):
        run()
    held, made, deleted, read, alive = count()
    assert deleted - deleted_before == made - made_before
    assert alive == alive_before
    # The producers keep their arrays for each capsule and tensor that they made: what they gained there is not ours.
    gained = [held[n] - before[n] for n in range(len(HELD))]
    assert sum(gained) <= made - made_before + read - read_before
    assert not any(gained[n] for n in range(len(HELD)) if not isinstance(HELD[n], np.ndarray))


def test_deleters_do_not_meet_the_exception(recwarn):
    """The deleter of a tensor that was taken over is Python code here, and runs after another array has failed."""
    first = Producer(q)
    with pytest.raises(ZeroDivisionError, match="capsule"):
        fa_ext.attention(first, Array(k, "capsule"), v)
    assert first.deleted == 1 and not recwarn.list


@pytest.mark.parametrize("key", ["version", "shape", "data", "mask", "stream", "strides"])
def test_keys_that_raise(key):
    content = dict(interface().__cuda_array_interface__)
    content.pop(key, None)
    content[Raises(key)] = None
    with pytest.raises(ZeroDivisionError, match=f"{key} compared"):
        fa_ext.attention(q, Interface(content), v)


def test_dict_that_changes_while_it_is_read():
    class Clears:
        def __bool__(self):
            content.clear()
            gc.collect()
            return False

    content = dict(interface(strides=(128, 64, 16, 2)).__cuda_array_interface__)
    content["data"] = (content["data"][0], Clears())
    with pytest.raises((BufferError, fa_ext.CudaError)):
        fa_ext.attention(q, Interface(content), v)
    assert not content


def test_numbers_that_raise():
    class Number:
        def __index__(self):
            raise ZeroDivisionError

        __float__ = __index__

    for options in ({"scale": Number()}, {"softcap": Number()}, {"window": (Number(), 1)}, {"window": [1, Number()]}):
        with pytest.raises(ZeroDivisionError):
            fa_ext.attention(q, k, v, **options)
