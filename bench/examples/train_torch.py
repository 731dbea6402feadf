"""Trains a small GPT through fa_ext.torch and through every backend of torch's scaled_dot_product_attention.

    python -m bench.examples.train_torch                                  # a tiny one on the CPU, in a minute or two
    python -m bench.examples.train_torch --device cuda --layers 12 --width 768 --heads 12 --seq 1024 --vocab 50304 \
        --batch 8 --steps 300 --rate 3e-4 --warmup 30                     # GPT-2 124M

The text is a Markov chain, which can be learnt. All runs start from the same weights and see the same text.
At step t the loss of fa_ext, eager and compiled, may differ from that of FLASH_ATTENTION by twice the largest gap
that any two of torch's backends had at steps 1 to t; and two runs with deterministic algorithms must end with the same bits
in every parameter. The exit status says whether that holds.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_ext.torch
from bench.examples import training

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Block(nn.Module):
    def __init__(self, args, n, matrices, attend):
        super().__init__()
        self.heads, self.attend = args.heads, attend
        self.norms = nn.ModuleList(nn.LayerNorm(args.width, bias=False) for _ in range(2))
        self.into, self.out, self.up, self.down = (linear(matrices[f"{n}.{name}"]) for name in ("into", "out", "up", "down"))

    def forward(self, x):
        q, k, v = self.into(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (B, S, H, D)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, args, attend):
        super().__init__()
        matrices = {name: torch.from_numpy(matrix) for name, matrix in training.matrices(args).items()}
        self.words, self.places = (nn.Embedding.from_pretrained(matrices[name], freeze=False) for name in ("words", "places"))
        self.blocks = nn.ModuleList(Block(args, n, matrices, attend) for n in range(args.layers))
        self.norm = nn.LayerNorm(args.width, bias=False)

    def forward(self, ids):
        x = self.words(ids[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def linear(matrix):
    """x -> x @ matrix, without a bias."""
    made = nn.Linear(*matrix.shape, bias=False)
    made.weight = nn.Parameter(matrix.T.contiguous())
    return made


def train(args, attend, *, backend=None, compiled=False):
    """(losses, median seconds a step, parameters at the end) of one run."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = GPT(args, attend).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, fused=args.device == "cuda")
    step_of = torch.compile(model, fullgraph=True, backend=args.compiler) if compiled else model
    losses, seconds = [], []
    kernel = sdpa_kernel(backend) if backend else contextlib.nullcontext()
    with kernel:
        for step in range(args.steps):
            ids = torch.from_numpy(training.text(args.batch, args.seq, args.vocab, step)).to(args.device)
            begun = time.perf_counter()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.bfloat16):
                loss = step_of(ids)
            loss.backward()
            optimizer.param_groups[0]["lr"] = training.rate(args, step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device
            seconds.append(time.perf_counter() - begun)
    return losses, statistics.median(seconds), [x.detach() for x in model.parameters()]


def attention(args):
    """fa_ext as a model's attention: q, k, v of (B, S, H, D)."""
    return lambda q, k, v: fa_ext.torch.attention(q, k, v, causal=True, layout="bshd", dropout_p=args.dropout)


def runs(args):
    """{name: losses and seconds}: torch's backends that take the call, then fa_ext."""

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=args.dropout).transpose(1, 2)

    found = {}
    for name, backend in BACKENDS.items():
        try:
            found[name] = train(args, theirs, backend=backend)[:2]
        except RuntimeError as error:
            if not re.search("No (available kernel|viable backend)", str(error)):
                raise
    found["fa_ext"] = train(args, attention(args))[:2]
    found["fa_ext, compiled"] = train(args, attention(args), compiled=True)[:2]
    return found


def repeats(args):
    """Whether two runs of fa_ext with deterministic algorithms end with the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (train(args, attention(args))[2] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def kernels(args):
    """The kernels that fa_ext runs forward and backward, compiled or not."""
    shape, options = (args.batch, args.seq, args.heads, args.width // args.heads), {"causal": True, "layout": "bshd"}
    q, k, v = (torch.randn(shape, device=args.device, dtype=torch.bfloat16 if args.bfloat16 else torch.float32) for _ in range(3))
    out, lse = fa_ext.attention(q, k, v, **options, return_lse=True)
    backward = [fa_ext.explain_backward(out, q, k, v, out, lse, **options, deterministic=d)[0] for d in (False, True)]
    return sorted({fa_ext.explain(q, k, v, **options)[0], *backward})


def main(arguments=None):
    parser = training.parser("python -m bench.examples.train_torch", __doc__.split("\n\n")[0])
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    args = parser.parse_args(arguments)
    if args.bfloat16 is None:  # the CPU has two backends, one gap, which says little of how far apart roundings take losses
        args.bfloat16 = args.device == "cuda"
    found = runs(args)
    largest, equal = training.gaps(found, list(BACKENDS), "flash"), repeats(args)
    held = equal and max(largest.values()).ratio <= 2
    training.show(args, found, largest, equal_bits=equal, held=held, dropout=args.dropout, kernels=kernels(args))
    if not args.json:
        print(f"two deterministic runs: {'equal bits' if equal else 'DIFFERENT BITS'}")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
