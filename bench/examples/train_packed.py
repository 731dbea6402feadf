"""Trains a small GPT on documents of many lengths: packed through fa_ext.torch, and padded through torch's own attention.

    python -m bench.examples.train_packed                                 # a tiny one on the CPU, in a minute or two
    python -m bench.examples.train_packed --device cuda --layers 12 --width 768 --heads 12 --seq 4096 --vocab 50304 \
        --batch 32 --median 600 --steps 300 --rate 3e-4 --warmup 30         # 125M parameters

The lengths of documents are lognormal, at most SEQ. Padded runs have (BATCH, longest) tokens, of which those behind a document
count in no loss; packed runs have the documents behind one another, and torch's varlen_attn is one of them where it runs. All
runs start from the same weights, see the same documents and make each step one after another. At step t the loss of fa_ext may
differ from that of FLASH_ATTENTION, padded, by twice the largest gap that any two of torch's runs had at steps 1 to t. The exit
status says whether that holds.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

import fa_ext.torch
from bench.examples import training
from bench.examples.train_torch import BACKENDS, GPT, backends, theirs

NO_TARGET = -100
OURS = "fa_ext, packed"


class Form(NamedTuple):
    """Documents as a model takes them: (rows, tokens) each of tokens, the ones that follow them, and places in their document."""

    tokens: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor


class Documents(NamedTuple):
    padded: Form
    packed: Form  #: one row
    starts: torch.Tensor  #: of the documents in the packed row, and its end, int32
    longest: int
    count: int  #: tokens


def documents(args):
    """text -> Documents: of each of its rows as many tokens as are drawn for the step."""
    steps = itertools.count()

    def put(text):
        drawn = np.random.default_rng(2000 + next(steps)).lognormal(np.log(args.median), 1.0, args.batch)
        lengths = np.clip(drawn.astype(np.int64), 2, args.seq)
        longest = int(lengths.max())
        places = np.arange(longest)[None].repeat(args.batch, 0)
        kept = places < lengths[:, None]
        targets = np.where(places < lengths[:, None] - 1, text[:, 1 : longest + 1], NO_TARGET)
        padded = [np.where(kept, text[:, :longest], 0), targets, places]
        packed = [x[kept][None] for x in padded]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        device = args.device
        forms = (Form(*(torch.from_numpy(x).to(device) for x in form)) for form in (padded, packed))
        return Documents(*forms, torch.from_numpy(starts).to(device), longest, int(lengths.sum()))

    return put


class Model(GPT):
    def forward(self, form: Form):
        x = self.words(form.tokens) + self.places(form.places)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), form.targets.flatten(), ignore_index=NO_TARGET)


class Packed:
    """A model's attention over the documents of one row. ``now`` is the step's text."""

    now: Documents

    def __call__(self, q, k, v):
        return self.attend(q[0], k[0], v[0])[None]

    def attend(self, q, k, v):
        starts = self.now.starts
        return fa_ext.torch.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal="bottom_right")


class Varlen(Packed):
    """torch's."""

    def attend(self, q, k, v):
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = self.now.starts, self.now.longest
        windows = "window_size" in inspect.signature(varlen_attn).parameters  # not in torch 2.10
        return varlen_attn(q, k, v, starts, starts, longest, longest, **{"window_size": (-1, 0)} if windows else {"is_causal": True})


class Training:
    """A model on its way: called with the number of a step, 0 at first, and its text it makes the step and returns the loss."""

    def __init__(self, args, attend, backend=None):
        self.args, self.attend, self.model = args, attend, Model(args, attend).to(args.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.rate, fused=args.device == "cuda")
        self.kernel = (lambda: sdpa_kernel(backend)) if backend else contextlib.nullcontext

    def __call__(self, n, text):
        packed = isinstance(self.attend, Packed)
        if packed:
            self.attend.now = text
        with self.kernel():
            with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.bfloat16):
                loss = self.model(text.packed if packed else text.padded)
            loss.backward()
        self.optimizer.param_groups[0]["lr"] = training.rate(self.args, n)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()  # waits for the device


def varlen_runs(args):
    """Whether torch's varlen_attn takes the call here."""
    attend = Varlen()
    dtype = torch.bfloat16 if args.bfloat16 else torch.float32
    x = torch.zeros(4, args.heads, args.width // args.heads, device=args.device, dtype=dtype, requires_grad=True)
    attend.now = Documents(None, None, torch.tensor([0, 4], dtype=torch.int32, device=args.device), 4, 4)
    try:
        attend.attend(x, x, x).sum().backward()
    except (ImportError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("not (implemented|supported|available)|Could not run|only support|No available", str(error)):
            raise
        return False
    return True


def main(arguments=None):
    parser = training.parser("python -m bench.examples.train_packed", __doc__.split("\n\n")[0])
    parser.add_argument("--median", type=float, help="median length of the documents, in tokens (default: a quarter of SEQ)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args(arguments)
    args.median, args.dropout = args.median or args.seq / 4, 0.0
    if args.bfloat16 is None:  # as in train_torch
        args.bfloat16 = args.device == "cuda"
    runs = {name: Training(args, theirs(args), BACKENDS[name]) for name in backends(args)}
    if varlen_runs(args):
        runs["varlen, packed"] = Training(args, Varlen())
    peers = list(runs)
    runs[OURS] = Training(args, Packed())
    found = training.take_rounds(args, runs, documents(args))
    largest = training.gaps(found, peers, "flash")
    held = max(largest.values()).ratio <= 2
    seen = [text for text in map(documents(args), [np.zeros((args.batch, args.seq + 1), np.int64)] * args.steps)]
    tokens = sum(text.count for text in seen) / args.steps
    waste = 1 - sum(text.count for text in seen) / sum(text.padded.tokens.numel() for text in seen)
    rates = {name: tokens / seconds for name, (_, seconds) in found.items()}
    training.show(args, found, largest, held=held, waste=waste, tokens_a_second=rates)
    if not args.json:
        print(f"{100 * waste:.0f}% of the padded tokens are padding; tokens of documents a second, and the time of fa_ext's step over that of each:")
        for name, speed in rates.items():
            print(f"{name:18} {speed:10.0f} {speed / rates[OURS]:6.2f}")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
