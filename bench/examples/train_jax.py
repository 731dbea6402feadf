"""Trains a small GPT through fa_ext.jax and through jax.nn.dot_product_attention, under jit(value_and_grad).

    python -m bench.examples.train_jax                                    # a tiny one on the CPU, in half a minute
    python -m bench.examples.train_jax --layers 12 --width 768 --heads 12 --seq 1024 --vocab 50304 --batch 8 --steps 300 \
        --rate 3e-4 --warmup 30                                           # GPT-2 124M

It runs where JAX runs by default. Text, bound and exit status are those of `train_torch`, with the gap to "math"; the backends are
an attention written out in float32, and the implementations of JAX's own that take the call. By default XLA may add up a scatter, as the
gradient of the embedding is, by atomics: two runs of one backend then differ by as much as those of two, so each runs twice, and the
bound is between any two of these. Equal bits are asked of a process of its own, in which XLA's sums are ordered too (XLA_FLAGS).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import fa_ext.jax
from bench.examples import training


def written_out(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v.astype(jnp.float32)).astype(q.dtype)


def jaxs(implementation):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


BACKENDS = {"math": written_out, "xla": jaxs("xla"), "cudnn": jaxs("cudnn")}


def ours(deterministic):
    return lambda q, k, v: fa_ext.jax.attention(q, k, v, causal=True, layout="bshd", deterministic=deterministic)


def parameters(args):
    """Weights by name, float32."""
    made = {name: jnp.array(matrix) for name, matrix in training.matrices(args.layers, args.width, args.seq, args.vocab).items()}
    return made | {f"{n}.norm{m}": jnp.ones(args.width) for n in range(args.layers) for m in (0, 1)} | {"norm": jnp.ones(args.width)}


def normalised(x, gain):
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def loss_of(args, attend):
    kind = jnp.bfloat16 if args.bfloat16 else jnp.float32

    def times(x, weight):
        return x.astype(kind) @ weight.astype(kind)

    def loss(p, ids):
        x = p["words"][ids[:, :-1]] + p["places"]
        for n in range(args.layers):
            packed = times(normalised(x, p[f"{n}.norm0"]), p[f"{n}.into"])
            q, k, v = (y.reshape(*y.shape[:2], args.heads, -1) for y in jnp.split(packed, 3, axis=-1))
            x = x + times(attend(q, k, v).reshape(x.shape), p[f"{n}.out"])
            x = x + times(jax.nn.gelu(times(normalised(x, p[f"{n}.norm1"]), p[f"{n}.up"])), p[f"{n}.down"])
        logits = jax.nn.log_softmax(times(normalised(x, p["norm"]), p["words"].T).astype(jnp.float32))
        return -jnp.take_along_axis(logits, ids[:, 1:, None], -1).mean()

    return loss


def step_of(args, attend):
    """(weights, means, squares, step from 1 on, rate, ids) -> the same after a step of AdamW, and the loss."""
    gradients = jax.value_and_grad(loss_of(args, attend))

    def step(p, mean, square, n, rate, ids):
        loss, g = gradients(p, ids)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, g)
        square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, g)

        def moved(p, m, s):
            return p - rate * (m / (1 - 0.9**n) / (jnp.sqrt(s / (1 - 0.999**n)) + 1e-8) + 0.01 * p)

        return jax.tree.map(moved, p, mean, square), mean, square, loss

    return jax.jit(step, donate_argnums=(0, 1, 2))


class Training:
    """Weights on their way: called with the number of a step, 0 at first, and its text it makes the step and returns the loss."""

    def __init__(self, args, step):
        self.args, self.step, self.weights = args, step, parameters(args)
        self.moments = [jax.tree.map(jnp.zeros_like, self.weights) for _ in range(2)]

    def __call__(self, n, ids):
        self.weights, *self.moments, loss = self.step(self.weights, *self.moments, float(n + 1), training.rate(self.args, n), ids)
        return float(loss)  # waits for the device


def put(text):
    return jnp.asarray(text.astype(np.int32))


def backends():
    """Those of `BACKENDS` that take the call here."""
    return [name for name in BACKENDS if name != "cudnn" or jax.default_backend() == "gpu"]


def kernels(args):
    """The kernels that fa_ext runs forward and backward."""
    shape = (args.batch, args.seq, args.heads, args.width // args.heads)
    q = jnp.ones(shape, jnp.bfloat16 if args.bfloat16 else jnp.float32)
    options = {"causal": True, "layout": "bshd"}
    out, lse = fa_ext.attention(q, q, q, **options, return_lse=True)
    backward = [fa_ext.explain_backward(out, q, q, q, out, lse, **options, deterministic=d)[0] for d in (False, True)]
    return sorted({fa_ext.explain(q, q, q, **options)[0], *backward})


def equal_bits(args):
    """Whether two ordered runs of this process end with the same bits in every weight."""
    ordered = step_of(args, ours(deterministic=True))
    found = {name: Training(args, ordered) for name in ("first", "second")}
    training.take_rounds(args, found, put)
    first, second = (run.weights for run in found.values())
    return all(bool(jnp.array_equal(first[name], second[name])) for name in first)


def equal_bits_apart(line):
    """The same in a process of its own. It comes before the first use of JAX here, which would take the GPU's memory."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    done = subprocess.run([sys.executable, "-m", "bench.examples.train_jax", *line, "--twice"], env={**os.environ, "XLA_FLAGS": flags},
                          stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
    return json.loads(done.stdout)["equal_bits"]


def main(arguments=None):
    parser = training.parser("python -m bench.examples.train_jax", __doc__.split("\n\n")[0])
    parser.add_argument("--twice", action="store_true", help="only whether two ordered runs end with equal bits, as JSON")
    line = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(line)
    equal = None if args.twice else equal_bits_apart(line)
    if args.bfloat16 is None:
        args.bfloat16 = jax.default_backend() == "gpu"  # XLA's CPU has few products of bfloat16
    if args.twice:
        print(json.dumps({"equal_bits": equal_bits(args)}))
        return 0
    runs = {}
    for name in backends():
        step = step_of(args, BACKENDS[name])
        runs |= {run: Training(args, step) for run in (name, f"{name}, again")}
    peers = list(runs)
    for name, deterministic in (("fa_ext", False), ("fa_ext, ordered", True)):
        runs[name] = Training(args, step_of(args, ours(deterministic)))
    found = training.take_rounds(args, runs, put)
    largest = training.gaps(found, peers, "math")
    held = equal and max(largest.values()).ratio <= 2
    training.show(args, found, largest, equal_bits=equal, held=held, kernels=kernels(args))
    if not args.json:
        print(f"two ordered runs: {'equal bits' if equal else 'DIFFERENT BITS'}")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
