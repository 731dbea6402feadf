"""Trains a small GPT through fa_ext.torch and through every backend of torch's scaled_dot_product_attention.

    python -m bench.examples.train_torch                                  # a tiny one on the CPU, in a minute or two
    python -m bench.examples.train_torch --device cuda --layers 12 --width 768 --heads 12 --seq 1024 --vocab 50304 \
        --batch 8 --steps 300 --rate 3e-4 --warmup 30                     # GPT-2 124M

The text is a Markov chain, which can be learnt. All runs start from the same weights, see the same text and make each step one after another.
At step t the loss of fa_ext, eager and compiled, may differ from that of FLASH_ATTENTION by twice the largest gap
that any two runs of torch's backends had at steps 1 to t. With dropout each backend has a second run with other draws: what is
drawn moves losses further than roundings do. And two runs with deterministic algorithms must end with the same bits in every
parameter. The exit status says whether that holds.
"""

from __future__ import annotations

import contextlib
import re

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
COMPILED = ("flash", "cudnn")  # what fa_ext compiled stands beside


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
        drawn = training.matrices(args.layers, args.width, args.seq, args.vocab)
        matrices = {name: torch.tensor(matrix) for name, matrix in drawn.items()}
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


class Training:
    """A model on its way: called with the number of a step, 0 at first, and its text it makes the step and returns the loss."""

    def __init__(self, args, attend, *, backend=None, compiled=False, draws=0):
        self.args, self.draws, self.model = args, draws, GPT(args, attend).to(args.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.rate, fused=args.device == "cuda")
        self.loss = torch.compile(self.model, fullgraph=True, backend=args.compiler) if compiled else self.model
        self.kernel = (lambda: sdpa_kernel(backend)) if backend else contextlib.nullcontext

    def __call__(self, n, ids):
        torch.manual_seed(n + self.draws * self.args.steps)  # for dropout
        with self.kernel():
            with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.bfloat16):
                loss = self.loss(ids)
            loss.backward()
        self.optimizer.param_groups[0]["lr"] = training.rate(self.args, n)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()  # waits for the device


def put(args):
    return lambda text: torch.from_numpy(text).to(args.device)


def ours(args):
    """fa_ext as a model's attention, of q, k, v (B, S, H, D)."""
    return lambda q, k, v: fa_ext.torch.attention(q, k, v, causal=True, layout="bshd", dropout_p=args.dropout)


def theirs(args, backend=None):
    """torch's. A backend is named here where the model is compiled, for the graph keeps what was chosen when it was traced."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=args.dropout).transpose(1, 2)

    return attend


def backends(args):
    """Those of `BACKENDS` that take the call here."""
    found = []
    for name, backend in BACKENDS.items():
        q, k, v = inputs(args)
        try:
            with sdpa_kernel(backend):
                theirs(args)(q, k, v).sum().backward()
            found.append(name)
        except RuntimeError as error:
            if not re.search("No (available kernel|viable backend)", str(error)):
                raise
    return found


def runs(args):
    """({name: losses and seconds}, names of torch's own): torch's backends, eager and those of `COMPILED` compiled, then fa_ext.
    With dropout eager ones run again with other draws."""
    torch.compiler.reset()
    names = backends(args)
    found = {name: Training(args, theirs(args), backend=BACKENDS[name]) for name in names}
    for name in names if args.dropout else ():
        found[f"{name}, again"] = Training(args, theirs(args), backend=BACKENDS[name], draws=1)
    for name in (name for name in COMPILED if name in names):
        found[f"{name}, compiled"] = Training(args, theirs(args, BACKENDS[name]), compiled=True)
    peers = list(found)
    found["fa_ext"] = Training(args, ours(args))
    found["fa_ext, compiled"] = Training(args, ours(args), compiled=True)
    return training.take_rounds(args, found, put(args)), peers


def repeats(args):
    """Whether two runs of fa_ext with deterministic algorithms end with the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        found = {name: Training(args, ours(args)) for name in ("first", "second")}
        training.take_rounds(args, found, put(args))
    finally:
        torch.use_deterministic_algorithms(False)
    first, second = (run.model.parameters() for run in found.values())
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def inputs(args):
    """q, k, v of a layer."""
    shape, dtype = (args.batch, args.seq, args.heads, args.width // args.heads), torch.bfloat16 if args.bfloat16 else torch.float32
    return (torch.randn(shape, device=args.device, dtype=dtype, requires_grad=True) for _ in range(3))


def kernels(args):
    """The kernels that fa_ext runs forward and backward, compiled or not."""
    q, k, v = (x.detach() for x in inputs(args))
    options = {"causal": True, "layout": "bshd"}
    if args.dropout:
        options["dropout"] = args.dropout, torch.zeros(4, dtype=torch.int64, device=args.device)
    out, lse = fa_ext.attention(q, k, v, **options, return_lse=True)
    backward = [fa_ext.explain_backward(out, q, k, v, out, lse, **options, deterministic=d)[0] for d in (False, True)]
    return sorted({fa_ext.explain(q, k, v, **options)[0], *backward})


def main(arguments=None):
    parser = training.parser("python -m bench.examples.train_torch", __doc__.split("\n\n")[0])
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    args = parser.parse_args(arguments)
    if args.dropout and args.device == "cpu":
        parser.error("--dropout is for --device cuda: on the CPU torch has one attention that drops weights, and none to compare it with")
    if args.bfloat16 is None:  # the CPU has two backends, one gap, which says little of how far apart roundings take losses
        args.bfloat16 = args.device == "cuda"
    found, peers = runs(args)
    largest, equal = training.gaps(found, peers, "flash"), repeats(args)
    held = equal and max(largest.values()).ratio <= 2
    training.show(args, found, largest, equal_bits=equal, held=held, dropout=args.dropout, kernels=kernels(args))
    if not args.json:
        print(f"two deterministic runs: {'equal bits' if equal else 'DIFFERENT BITS'}")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
