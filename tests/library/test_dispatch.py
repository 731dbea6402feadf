"""A thread's memory of its last call: calls that differ in one thing from the one before, in random order."""

import numpy as np
import pytest

import fa_ext
from fa_ext import reference

pytestmark = pytest.mark.native

#: The choices of a call: the first of each is the usual one, so that many calls are like the one before.
CHOICES = {
    "dtype": ("float16", "float32"),
    "sizes": ((1, 4, 4, 4, 4, 16, 16), (1, 2, 2, 9, 9, 16, 16), (1, 2, 1, 9, 9, 16, 16), (2, 2, 2, 9, 9, 16, 16), (1, 2, 2, 8, 13, 16, 16),
              (1, 2, 2, 9, 9, 24, 16), (1, 2, 2, 9, 9, 16, 8)),
    "axes": ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)),
    "step": (1, 2, -1),
    "offset": (0, 1, 8, 128),
    "place": (0, 1, 2),
    "layout": ("bhsd", "bshd"),
    "causal": (False, "top_left", "bottom_right"),
    "window": (None, (3, None), (3, 1), (None, 1)),
    "scale": (None, 0.3, -0.5, 0.0),
    "softcap": (0.0, 1.5),
    "into": (False, True, "strided", "pair"),
    "return_lse": (False, True),
    "mask": (False, True),
    "batch_invariant": (False, True),
}  # fmt: skip
PLACES = 1 << 13  # elements from one place of an operand to the next


def aligned(elements, dtype):
    """A flat array whose address is a multiple of 4096: alignment alone must not tell arrays apart."""
    memory = np.empty(elements * np.dtype(dtype).itemsize + 4096, np.uint8)
    return memory[-memory.ctypes.data % 4096 :][: elements * np.dtype(dtype).itemsize].view(dtype)


def view_of(base, strided, shape, axes, step, offset):
    """A view of a flat array: its axes lie in memory in the order `axes`, each element `step` from its neighbour."""
    strides, stride = [0] * 4, abs(step)
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= shape[axis]
    if step < 0:  # numpy alone: the last axis runs backwards
        offset += (shape[3] - 1) * strides[3]
        strides[3] = -strides[3]
    return strided(base, shape, strides, offset)


def numpy_strided(base, shape, strides, offset):
    return np.lib.stride_tricks.as_strided(base[offset:], shape, [s * base.itemsize for s in strides])


class Caller:
    """Calls on views of four flat arrays, held against the reference."""

    def __init__(self, array_of, strided):
        random = np.random.default_rng(0)
        self.host = {name: [aligned(4 * PLACES, name) for _ in range(4)] for name in CHOICES["dtype"]}
        for array in (array for arrays in self.host.values() for array in arrays):
            array[:] = random.standard_normal(array.size)
        self.base = {name: [array_of(array) for array in arrays] for name, arrays in self.host.items()}
        self.array_of, self.strided = array_of, strided

    def views(self, c, strided, bases):
        b, h, hk, sq, sk, d, dv = c["sizes"]
        shapes = (b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (b, h, sq, dv)
        if c["layout"] == "bshd":
            shapes = [(s[0], s[2], s[1], s[3]) for s in shapes]
        step, offset = c["step"], c["offset"] + PLACES * c["place"]
        made = [view_of(base, strided, s, c["axes"], step, offset) for base, s in zip(bases[:3], shapes[:3], strict=True)]
        if not c["into"]:
            return made, None
        plain = (c["axes"], step, offset) if c["into"] == "strided" else ((0, 1, 2, 3), 1, 0)
        out = view_of(bases[3], strided, shapes[3], *plain)
        if c["into"] != "pair":
            return made, out
        return made, (out, strided(self.base["float32"][3], (b, h, sq), (h * sq, sq, 1), PLACES * c["place"] + PLACES // 2))

    def check(self, c):
        (q, k, v), out = self.views(c, self.strided, self.base[c["dtype"]])
        options = {name: c[name] for name in ("layout", "causal", "window", "scale", "softcap")}
        if c["mask"]:
            options["mask"] = np.tri(c["sizes"][3], c["sizes"][4], 2, bool)
        wanted, wanted_lse = reference.attention(
            *self.views(c | {"into": False}, numpy_strided, self.host[c["dtype"]])[0], **options
        )
        if c["mask"]:
            options["mask"] = self.array_of(options["mask"])
        given = fa_ext.attention(
            q, k, v, out=out, return_lse=c["return_lse"], batch_invariant=c["batch_invariant"], **options
        )
        assert out is None or given is out or (c["return_lse"] and given[0] is out)
        given, lse = given if c["return_lse"] or c["into"] == "pair" else (given, None)
        np.testing.assert_allclose(fa_ext.to_numpy(given).astype(float), wanted, rtol=0, atol=4e-3, err_msg=str(c))
        if lse is not None:
            np.testing.assert_allclose(fa_ext.to_numpy(lse), wanted_lse, rtol=0, atol=4e-3, err_msg=str(c))


def walk(caller, calls, without=()):
    random = np.random.default_rng(1)
    names = [name for name in CHOICES if name not in without]
    now = {name: values[0] for name, values in CHOICES.items()}
    for _ in range(calls):
        name = names[random.integers(len(names))]
        before, now = now, now | {name: CHOICES[name][random.integers(len(CHOICES[name]))]}
        caller.check(now)
        moved = now | {"place": (now["place"] + 1) % 3}
        for again in (moved, *(moved | {"into": into} for into in CHOICES["into"]), before, now):
            caller.check(again)
        if random.random() < 0.2:
            now = {name: values[0] for name, values in CHOICES.items()}


def test_random_walk():
    walk(Caller(lambda array: array, numpy_strided), 300)


@pytest.mark.gpu
def test_random_walk_on_a_device():
    torch = pytest.importorskip("torch")
    caller = Caller(lambda array: torch.from_numpy(array).cuda(), torch.as_strided)
    walk(caller, 300, without=("step",))  # torch has no negative strides


def remembered():
    """Four arrays in one aligned memory, and a call that was like those to come."""
    memory = aligned(8 * 256, np.float32)
    memory[:] = np.random.default_rng(0).standard_normal(memory.size)
    q, k, v, out = (memory[n * 256 :][:256].reshape(1, 2, 8, 16) for n in range(4))
    for _ in range(2):
        fa_ext.attention(q, k, v, out=out)
    return memory, q, k, v, out


def test_what_is_wrong_is_seen_after_calls_like_it(monkeypatch):
    memory, q, k, v, out = remembered()
    for shift in (0, 64, 128, 192):
        for place, name in enumerate("qkv"):
            meets = memory[256 * place + shift :][:256].reshape(out.shape)
            both = "|".join("qkv"[place : place + 1 + (shift > 0)])
            with pytest.raises(ValueError, match=f"out overlaps ({both}) in memory"):
                fa_ext.attention(q, k, v, out=meets)
            fa_ext.attention(q, k, v, out=out)
    with pytest.raises(ValueError, match="out overlaps v"):
        fa_ext.attention(q, k, out, out=out)
    lse = memory[4 * 256 :][:16].reshape(1, 2, 8)
    fa_ext.attention(q, k, v, out=(out, lse))
    for place, name in enumerate(("q", "k", "v", "out")):
        for shift in (0, 64, 192):
            with pytest.raises(ValueError, match=f"lse overlaps {name} in memory"):
                fa_ext.attention(q, k, v, out=(out, memory[256 * place + shift :][:16].reshape(1, 2, 8)))
            fa_ext.attention(q, k, v, out=(out, lse))
    locked = out[:]
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        fa_ext.attention(q, k, v, out=locked)
    with pytest.raises(ValueError, match="scale is nan"):
        fa_ext.attention(q, k, v, out=out, scale=float("nan"))
    with pytest.raises(ValueError, match="lse has shape"):
        fa_ext.attention(q, k, v, out=(out, out))
    monkeypatch.setenv("FA_EXT_KERNEL", "none")
    with pytest.raises(ValueError, match='FA_EXT_KERNEL is "none"'):
        fa_ext.attention(q, k, v, out=out)
    monkeypatch.undo()
    fa_ext.attention(q, k, v, out=out)
    gpu = [kernel for kernel in fa_ext.kernels() if fa_ext._core.build_info()["kernels"][kernel][0] == "cuda"]
    for kernel in gpu[:1]:
        with pytest.raises(fa_ext.UnsupportedError, match="the arrays are on the CPU"):
            fa_ext.attention(q, k, v, out=out, kernel=kernel)


@pytest.mark.parametrize(
    "device, kernels",
    [("cpu", ("cpu_ref", "cpu_simd")), pytest.param("cuda", ("minimal", "simt"), marks=pytest.mark.gpu)],
)
def test_the_kernel_asked_for_runs(device, kernels, monkeypatch):
    """Two kernels add up in another order: the last bits tell which one ran."""
    if not set(kernels) <= set(fa_ext.kernels()):
        pytest.skip(f"{kernels} are not built")
    arrays = [np.random.default_rng(n).standard_normal((1, 2, 64, 64)).astype(np.float32) for n in range(4)]
    if device == "cuda":
        arrays = [fa_ext.to_device(array) for array in arrays]
    q, k, v, out = arrays
    bits = {}
    for kernel in kernels * 3:
        fa_ext.attention(q, k, v, out=out, kernel=kernel)
        assert bits.setdefault(kernel, fa_ext.to_numpy(out).tobytes()) == fa_ext.to_numpy(out).tobytes()
        monkeypatch.setenv("FA_EXT_KERNEL", kernels[0])
        fa_ext.attention(q, k, v, out=out)
        monkeypatch.delenv("FA_EXT_KERNEL")
        assert fa_ext.to_numpy(out).tobytes() == bits[kernels[0]]
    assert bits[kernels[0]] != bits[kernels[1]]
