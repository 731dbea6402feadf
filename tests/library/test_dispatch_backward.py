"""A thread's memory of its last call for gradients: calls that differ in one thing from the one before, against the same
call on a thread that has nothing to remember."""

import itertools
import threading

import numpy as np
import pytest

import fa_ext

pytestmark = pytest.mark.native

#: The choices of a call: the first of each is the usual one, so that many calls are like the one before.
CHOICES = {
    "dtype": ("float32", "float16"),
    "sizes": ((1, 4, 4, 4, 4, 16, 16), (1, 2, 2, 9, 9, 16, 16), (1, 2, 1, 9, 9, 16, 16), (2, 2, 2, 9, 9, 16, 16), (1, 2, 2, 8, 13, 16, 16),
              (1, 2, 2, 9, 9, 24, 16), (1, 2, 2, 9, 9, 16, 8), (1, 4, 4, 0, 4, 16, 16), (1, 4, 4, 4, 0, 16, 16)),
    "swapped": ("", "q", "k", "v", "dout", "out", "lse"),
    "offset": ("", "q", "k", "v", "dout", "out", "lse"),
    "place": (0, 1, 2),
    "layout": ("bhsd", "bshd"),
    "causal": (False, "top_left", "bottom_right"),
    "window": (None, (3, None), (3, 1)),
    "scale": (None, 0.3, -0.5),
    "softcap": (0.0, 1.5),
    "batch_invariant": (False, True),
    "deterministic": (True, False),
    "wrt": (("q", "k", "v"), ("q",), ("k", "v"), ("v", "q")),
    "dlse": (False, True),
    "dout": (True, False),
    "sinks": (False, True),
    "dropout": (None, (0.5, 3), (0.5, 4)),
    "grads": (False, True),
    "accumulate": (False, True),
    "kernel": (None, "cpu_ref_backward"),
}  # fmt: skip


def aligned(random, shape, dtype, swapped, offset):
    """Random numbers whose address is a multiple of 4096 plus `offset` elements; swapped: axes 1 and 2 lie the other way round."""
    size = np.dtype(dtype).itemsize
    memory = np.empty(int(np.prod(shape)) * size + 8192, np.uint8)
    flat = memory[-memory.ctypes.data % 4096 + offset * size :][: int(np.prod(shape)) * size].view(dtype)
    flat[:] = random.standard_normal(flat.size)
    return flat.reshape(shape[0], shape[2], shape[1], *shape[3:]).swapaxes(1, 2) if swapped else flat.reshape(shape)


def arguments(c):
    """Positional and keyword arguments. `place` changes what the arrays hold and where they lie, and nothing else."""
    random = np.random.default_rng(c["place"])
    b, h, hk, sq, sk, d, dv = c["sizes"]
    shapes = {"q": (b, h, sq, d), "k": (b, hk, sk, d), "v": (b, hk, sk, dv), "dout": (b, h, sq, dv), "out": (b, h, sq, dv)}
    if c["layout"] == "bshd":
        shapes = {name: (s[0], s[2], s[1], s[3]) for name, s in shapes.items()}
    shapes["lse"] = (b, h, sq)

    def array(name):
        dtype = "float32" if name == "lse" else c["dtype"]
        return aligned(random, shapes[name], dtype, c["swapped"] == name, 8 * (c["offset"] == name))

    given = {name: array(name) for name in ("q", "k", "v", "dout", "out", "lse")}
    given["lse"] += 2
    options = {name: c[name] for name in ("layout", "causal", "window", "scale", "softcap", "batch_invariant", "deterministic", "wrt",
                                          "dropout", "kernel")}  # fmt: skip
    if c["sinks"]:
        options["sinks"] = random.standard_normal(h).astype("float32")
    if c["dlse"]:
        options["dlse"] = aligned(random, (b, h, sq), "float32", False, 0)
    if c["grads"]:
        grads = tuple(aligned(random, given[name].shape, c["dtype"], False, 0) for name in c["wrt"])
        options |= {"grads": grads, "accumulate": c["accumulate"]}
    dout = given["dout"] if c["dout"] or not c["dlse"] else None
    return (dout, *(given[name] for name in ("q", "k", "v", "out", "lse"))), options


def alone(call):
    """The result of `call` on a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def check(c, move):
    def call():
        given, options = arguments(c)
        return fa_ext.attention_backward(*map(move, given), **{name: move(x) for name, x in options.items()})

    for ours, wanted, name in zip(call(), alone(call), c["wrt"], strict=True):
        ours, wanted = (fa_ext.to_numpy(x).astype(float) for x in (ours, wanted))
        if c["deterministic"]:
            np.testing.assert_array_equal(ours, wanted, err_msg=f"{name} of {c}")
        else:
            np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-3 * abs(wanted).max(initial=0), err_msg=f"{name} of {c}")


def walk(calls, move, without=()):
    random = np.random.default_rng(1)
    names = [name for name in CHOICES if name not in without]
    now = {name: values[0] for name, values in CHOICES.items()}
    for _ in range(calls):
        name = names[random.integers(len(names))]
        before, now = now, now | {name: CHOICES[name][random.integers(len(CHOICES[name]))]}
        for again in (now, now | {"place": (now["place"] + 1) % 3}, before, now):
            check(again, move)
        if random.random() < 0.2:
            now = {name: values[0] for name, values in CHOICES.items()}


def test_random_walk():
    walk(250, lambda x: x)


@pytest.mark.gpu
def test_random_walk_on_a_device():
    torch = pytest.importorskip("torch")

    def move(x):
        if isinstance(x, tuple):
            return tuple(map(move, x))
        return torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x

    walk(250, move, without=("kernel",))


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", ["wrt", "deterministic", "causal", "scale", "dtype", "dlse", "dout", "grads", "accumulate"])
def test_each_value_after_each(name, grads):
    """Not every value is followed by every other one in a walk."""
    plain = {name: values[0] for name, values in CHOICES.items()} | {"grads": grads, "dlse": name == "dout"}
    for before in CHOICES[name]:
        for after in CHOICES[name]:
            for place, value in enumerate((before, after)):
                check(plain | {"sizes": (1, 2, 2, 9, 9, 16, 16), "place": place, name: value}, lambda x: x)


def test_gradients_that_meet_anything_are_refused_after_calls_like_them():
    """Every array lies in one memory, 1024 bytes on from the one before, so that those that meet are aligned as those that do not."""
    names = ("dout", "q", "k", "v", "out", "dq", "dk", "dv", "lse", "dlse")
    memory = aligned(np.random.default_rng(0), (1, 1, len(names) + 2, 256), "float32", False, 0).reshape(-1)

    def array(place, name="q"):
        return memory[256 * place :][:16].reshape(1, 4, 4) if "lse" in name else memory[256 * place :][:256].reshape(1, 4, 4, 16)

    lying = {name: array(n + 1, name) for n, name in enumerate(names)}
    inputs, before = [lying[name] for name in ("dout", "q", "k", "v", "out", "lse")], {name: x.copy() for name, x in lying.items()}

    def call(**others):
        grads = tuple((lying | others)[name] for name in ("dq", "dk", "dv"))
        return fa_ext.attention_backward(*inputs, dlse=lying["dlse"], grads=grads)

    wanted = [x.copy() for x in call()]
    for name, other in itertools.product(("dq", "dk", "dv"), names):
        for shift in (-0.75, -0.25, 0, 0.25, 0.75):
            place = names.index(other) + 1 + shift
            if other == name or ("lse" in other and shift > 0) or round(shift * 256) + 256 <= 0:
                continue
            meeting = memory[round(256 * place) :][:256].reshape(1, 4, 4, 16)
            with pytest.raises(ValueError, match="overlaps"):
                call(**{name: meeting})
            for ours, right in zip(call(), wanted, strict=True):
                np.testing.assert_array_equal(ours, right)
    for name in ("dout", "q", "k", "v", "out", "lse", "dlse"):
        np.testing.assert_array_equal(lying[name], before[name])


def test_what_is_wrong_is_seen_after_calls_like_it(monkeypatch):
    (dout, q, k, v, out, lse), _ = arguments({name: values[0] for name, values in CHOICES.items()})
    call = fa_ext.attention_backward
    for _ in range(2):
        call(dout, q, k, v, out, lse)
    with pytest.raises(ValueError, match="lse has shape"):
        call(dout, q, k, v, out, lse[:, :2])
    with pytest.raises(ValueError, match="dout has shape"):
        call(dout[..., :8], q, k, v, out, lse)
    with pytest.raises(TypeError, match="dout has dtype"):
        call(dout.astype("float16"), q, k, v, out, lse)
    with pytest.raises(ValueError, match="scale is nan"):
        call(dout, q, k, v, out, lse, scale=float("nan"))
    with pytest.raises(ValueError, match=r"grads\[\"q\"\] overlaps q"):
        call(dout, q, k, v, out, lse, grads=(q, None, None))
    with pytest.raises(ValueError, match="dout is None"):
        call(None, q, k, v, out, lse)
    monkeypatch.setenv("FA_EXT_KERNEL_BACKWARD", "none")
    with pytest.raises(ValueError, match='FA_EXT_KERNEL_BACKWARD is "none"'):
        call(dout, q, k, v, out, lse)
