"""flash_attn_with_kvcache of fa_ext.torch.flash_attn and of .flash_attn_interface: what it writes, and what it attends to."""

import pytest

torch = pytest.importorskip("torch")

from fa_ext.torch import flash_attn as fa  # noqa: E402
from fa_ext.torch import flash_attn_interface as fa3  # noqa: E402
from tests.frameworks.support import flash_attn_math as math  # noqa: E402
from tests.frameworks.support.flash_attn_math import D, DV, HK, H, close  # noqa: E402

B, NEW, CAPACITY, PAGE = 3, 2, 12, 4
LENGTHS = [3, 0, 6]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])


def tensors(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


class Caches:
    """Caches whose rows nobody may read are NaN, and what sequence b holds before the call; stored dense, in rows of an index, in
    blocks, or in blocks of an index's rows."""

    def __init__(self, storage="dense", seed=0):
        self.storage = storage
        self.k, self.v = math.draw((B, CAPACITY, HK, D), (B, CAPACITY, HK, DV), seed=seed)
        self.index, self.table = tensors(4, 1, 2), torch.randperm(9, generator=torch.Generator().manual_seed(3)).view(B, 3).int()
        shape = {"dense": (B, CAPACITY), "wider": (B + 2, CAPACITY), "index": (5, CAPACITY)}.get(storage, (9, PAGE))
        self.given = [x.new_full((*shape, *x.shape[2:]), torch.nan) for x in (self.k, self.v)]
        for b, length in enumerate(LENGTHS):
            for cache, x in zip(self.given, (self.k, self.v), strict=True):
                for j in range(length):
                    cache[self.at(b, j)] = x[b, j]

    def at(self, b, j):
        if self.storage in ("table", "indexed table"):
            return self.table[b, j // PAGE].item(), j % PAGE
        return (self.index[b].item() if self.storage == "index" else b), j

    def where(self, table="block_table"):
        if self.storage == "indexed table":
            rows = self.table.new_full((5, 3), -1)
            rows[self.index.long()] = self.table
            return {table: rows, "cache_batch_idx": self.index}
        return {"index": {"cache_batch_idx": self.index}, "table": {table: self.table}}.get(self.storage, {})

    def holds(self, b, rows, begin=0):
        """The first ``rows`` rows of sequence b, as they are stored."""
        return [torch.stack([cache[self.at(b, j)] for j in range(begin, rows)]) for cache in self.given]


def fresh():
    q, k, v = math.draw((B, NEW, H, D), (B, NEW, HK, D), (B, NEW, HK, DV), seed=5)
    angle = torch.arange(20)[:, None] * 10.0 ** (-torch.arange(3) / 3)
    return q, k, v, angle.cos().double(), angle.sin().double()


each_storage = pytest.mark.parametrize("storage", ["dense", "wider", "index", "table", "indexed table"])
each_causal = pytest.mark.parametrize("causal", [False, True])


@each_storage
@each_causal
def test_a_cache_that_is_read(storage, causal):
    caches, (q, *_) = Caches(storage), fresh()
    options = {"cache_seqlens": tensors(*LENGTHS), "causal": causal, **caches.where()}
    out, lse = fa.flash_attn_with_kvcache(q, *caches.given, return_softmax_lse=True, **options)
    assert lse.shape == (B, H, NEW)
    for b, length in enumerate(LENGTHS):
        wanted, wanted_lse = math.attend(q[b], caches.k[b, :length], caches.v[b, :length], causal=causal)
        close(out[b], wanted)
        close(lse[b], wanted_lse)
    assert torch.equal(fa.flash_attn_with_kvcache(q, *caches.given, **options), out)


@each_storage
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0)}, {"window_size": (-1, 1)}], ids=str)
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_new_keys(storage, options, interleaved):
    """They are written behind the others, rotated at their places, and every row but theirs stays as it is; queries are rotated at
    their places in calls with a mask, else at the first new key."""
    caches, (q, k, v, cos, sin) = Caches(storage), fresh()
    before = [x.clone() for x in caches.given]
    rotary = {} if interleaved is None else {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    lengths = tensors(*LENGTHS)
    out, lse = fa.flash_attn_with_kvcache(q, *caches.given, k, v, cache_seqlens=lengths, return_softmax_lse=True, **rotary, **options, **caches.where())

    def turned(x, b, i):
        return x if interleaved is None else math.rotate(x, cos, sin, LENGTHS[b] + i, interleaved)

    for b, length in enumerate(LENGTHS):
        keys, values = (torch.cat((x[b, :length], new)) for x, new in
                        ((caches.k, torch.stack([turned(k[b, i], b, i) for i in range(NEW)])), (caches.v, v[b])))  # fmt: skip
        queries = torch.stack([turned(q[b, i], b, i if options else 0) for i in range(NEW)])
        wanted, wanted_lse = math.attend(queries, keys, values, **options)
        close(out[b], wanted)
        close(lse[b], wanted_lse)
        for stored, right in zip(caches.holds(b, length + NEW), (keys, values), strict=True):
            close(stored, right)
        for cache, old in zip(caches.given, before, strict=True):
            for j in range(length, length + NEW):
                old[caches.at(b, j)] = cache[caches.at(b, j)]
    for cache, old in zip(caches.given, before, strict=True):
        assert torch.equal(cache.nan_to_num(9.0), old.nan_to_num(9.0))
    assert lengths.tolist() == LENGTHS


def test_one_query_or_other_queries_than_new_keys():
    """A decoding step without a mask, and more queries than new keys: both have queries at their own positions."""
    for queries, options in ((1, {}), (4, {"causal": True}), (4, {})):
        caches, (_, k, v, cos, sin) = Caches(), fresh()
        k, v = k[:, :1], v[:, :1]
        (q,) = math.draw((B, queries, H, D), seed=8)
        out = fa.flash_attn_with_kvcache(q, *caches.given, k, v, cos, sin, tensors(*LENGTHS), **options)
        for b, length in enumerate(LENGTHS):
            keys = torch.cat((caches.k[b, :length], math.rotate(k[b, 0], cos, sin, length, True)[None]))
            turned = torch.stack([math.rotate(q[b, i], cos, sin, length + (i if options else 0), True) for i in range(queries)])
            close(out[b], math.attend(turned, keys, torch.cat((caches.v[b, :length], v[b])), **options)[0])


@pytest.mark.parametrize("storage", ["dense", "table"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, -1)}], ids=str)
def test_left_padding(storage, options):
    """Keys before cache_leftpad hide; places count from the end, so that masks and slopes do not see the padding."""
    caches, (q, k, v, *_) = Caches(storage), fresh()
    pads = [2, 0, 5]
    out, lse = fa.flash_attn_with_kvcache(
        q, *caches.given, k, v, cache_seqlens=tensors(*LENGTHS), cache_leftpad=tensors(*pads), alibi_slopes=SLOPES,
        return_softmax_lse=True, **options, **caches.where(),
    )  # fmt: skip
    for b, length in enumerate(LENGTHS):
        keys, values = (x[pads[b] :] for x in (torch.cat((caches.k[b, :length], k[b])), torch.cat((caches.v[b, :length], v[b]))))
        wanted, wanted_lse = math.attend(q[b], keys, values, slopes=SLOPES, **options)
        close(out[b], wanted)
        close(lse[b], wanted_lse)


def test_lengths_as_an_int_or_none():
    q, *_ = fresh()
    k, v = math.draw((B, CAPACITY, HK, D), (B, CAPACITY, HK, DV))
    close(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, causal=True), math.batch(q, k[:, :4], v[:, :4], causal=True)[0])
    whole, _ = math.batch(q, k, v, causal=True)
    close(fa.flash_attn_with_kvcache(q, k, v, causal=True), whole)
    pages = [x.view(B * 3, PAGE, *x.shape[2:]) for x in (k, v)]
    close(fa.flash_attn_with_kvcache(q, *pages, causal=True, block_table=torch.arange(9).view(B, 3)), whole)


def test_options_by_position():
    q, *_ = fresh()
    k, v = math.draw((B, CAPACITY, HK, D), (B, CAPACITY, HK, DV))
    out, lse = fa.flash_attn_with_kvcache(
        q, k, v, None, None, None, None, tensors(5, 7, 9), None, tensors(1, 0, 2), None, 0.3, False, (4, 1), 0.9, True, SLOPES, 0, True
    )
    for b, (begin, end) in enumerate(((1, 5), (0, 7), (2, 9))):
        wanted = math.attend(q[b], k[b, begin:end], v[b, begin:end], scale=0.3, window_size=(4, 1), softcap=0.9, slopes=SLOPES)
        close(out[b], wanted[0])
        close(lse[b], wanted[1])


# ---- FlashAttention 3's ----


@each_storage
@each_causal
@pytest.mark.parametrize("packed_keys", [False, True])
@pytest.mark.parametrize("seqlens", [False, True])
def test_packed_queries(storage, causal, packed_keys, seqlens):
    """q and new keys packed, apart from one another or with one tensor of starts; positions of rotary that are not the lengths."""
    caches = Caches(storage)
    counts = [2, 1, 3] if packed_keys else [NEW] * B
    q, k, v = math.draw((sum(counts), H, D), (sum(counts), HK, D), (sum(counts), HK, DV), seed=5)
    *_, cos, sin = fresh()
    starts, firsts = math.starts(counts), [4, 1, 9] if seqlens else LENGTHS
    new = {"k": k, "v": v, "cu_seqlens_k_new": starts} if packed_keys else {"k": k.view(B, NEW, HK, D), "v": v.view(B, NEW, HK, DV)}
    out, lse = fa3.flash_attn_with_kvcache(
        q, *caches.given, **new, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, cache_seqlens=tensors(*LENGTHS),
        cu_seqlens_q=starts, max_seqlen_q=3, rotary_seqlens=tensors(*firsts) if seqlens else None, causal=causal,
        return_softmax_lse=True, **caches.where("page_table"),
    )  # fmt: skip
    assert lse.shape == (H, sum(counts))
    rows = [x.split(counts) for x in (q, k, v)]
    for b, (queries, keys, values) in enumerate(zip(*rows, strict=True)):
        keys = torch.stack([math.rotate(x, cos, sin, firsts[b] + i, False) for i, x in enumerate(keys)])
        queries = torch.stack([math.rotate(x, cos, sin, firsts[b] + (i if causal else 0), False) for i, x in enumerate(queries)])
        keys, values = torch.cat((caches.k[b, : LENGTHS[b]], keys)), torch.cat((caches.v[b, : LENGTHS[b]], values))
        wanted, wanted_lse = math.attend(queries, keys, values, causal=causal)
        close(out[starts[b] : starts[b + 1]], wanted)
        close(lse[:, starts[b] : starts[b + 1]], wanted_lse)
        for stored, right in zip(caches.holds(b, LENGTHS[b] + counts[b]), (keys, values), strict=True):
            close(stored, right)


def test_starts_of_queries_and_of_new_keys_that_differ():
    """As many tokens in all, of other sequences: queries have their own places."""
    caches, counts_q, counts_k = Caches(), [1, 3, 2], [3, 1, 2]
    q, k, v = math.draw((6, H, D), (6, HK, D), (6, HK, DV), seed=5)
    *_, cos, sin = fresh()
    out = fa3.flash_attn_with_kvcache(
        q, *caches.given, k, v, None, cos, sin, tensors(*LENGTHS), cu_seqlens_q=math.starts(counts_q),
        cu_seqlens_k_new=math.starts(counts_k), causal=True,
    )  # fmt: skip
    rows = zip(q.split(counts_q), out.split(counts_q), k.split(counts_k), v.split(counts_k), LENGTHS, strict=True)
    for b, (queries, found, keys, values, first) in enumerate(rows):
        queries, keys = (torch.stack([math.rotate(x, cos, sin, first + i, True) for i, x in enumerate(part)]) for part in (queries, keys))
        keys, values = torch.cat((caches.k[b, :first], keys)), torch.cat((caches.v[b, :first], values))
        close(found, math.attend(queries, keys, values, causal=True)[0])


def test_both_modules_agree():
    caches, others, (q, k, v, cos, sin) = Caches(), Caches(), fresh()
    got = fa3.flash_attn_with_kvcache(q, *caches.given, k, v, None, cos, sin, tensors(*LENGTHS), causal=True, num_splits=3)
    assert torch.equal(got, fa.flash_attn_with_kvcache(q, *others.given, k, v, cos, sin, tensors(*LENGTHS), causal=True, num_splits=7))
    for x, y in zip(caches.given, others.given, strict=True):
        assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


# ---- what is refused ----


def test_mixtures_are_refused_before_anything_is_written():
    caches, (q, k, v, cos, sin) = Caches(), fresh()
    before = [x.clone() for x in caches.given]
    lengths = tensors(*LENGTHS)
    for bad, error, match in (
        ({"k": k, "cache_seqlens": lengths}, ValueError, "k is given without v"),
        ({"v": v, "cache_seqlens": lengths}, ValueError, "v is given without k"),
        ({"k": k, "v": v}, ValueError, "k is given without cache_seqlens"),
        ({"rotary_cos": cos, "k": k, "v": v, "cache_seqlens": lengths}, ValueError, "rotary_cos and rotary_sin go together"),
        ({"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": lengths}, ValueError, "rotary_cos is given without k"),
        ({"rotary_cos": cos, "rotary_sin": sin, "k": k, "v": v, "cache_seqlens": lengths, "cache_leftpad": lengths},
         NotImplementedError, "cache_leftpad is given with rotary_cos"),
        ({"block_table": caches.table, "cache_batch_idx": caches.index.float()}, TypeError, "cache_batch_idx has dtype torch.float32"),
        ({"cache_seqlens": lengths.float()}, TypeError, "cache_seqlens has dtype torch.float32"),
        ({"cache_seqlens": True}, TypeError, "cache_seqlens has type bool"),
        ({"cache_seqlens": lengths + CAPACITY}, ValueError, "seqlens_k"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            fa.flash_attn_with_kvcache(q, *caches.given, **bad)
    for name in ("qv", "q_descale", "k_descale", "v_descale"):
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            fa3.flash_attn_with_kvcache(q, *caches.given, k, v, cache_seqlens=lengths, **{name: q})
    with pytest.raises(NotImplementedError, match="attention_chunk is 64"):
        fa3.flash_attn_with_kvcache(q, *caches.given, k, v, cache_seqlens=lengths, attention_chunk=64)
    with pytest.raises(ValueError, match="q requires grad, but flash_attn_with_kvcache has no derivative"):
        fa.flash_attn_with_kvcache(q.clone().requires_grad_(), *caches.given, k, v, cache_seqlens=lengths)
    for x, y in zip(caches.given, before, strict=True):
        assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0))


@each_causal
def test_compiled(causal):
    """In whole graphs that write the cache in place."""
    torch._dynamo.reset()
    step = torch.compile(fa.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    caches, others, (q, k, v, cos, sin) = Caches("table"), Caches("table"), fresh()
    got = step(q, *caches.given, k, v, cos, sin, tensors(*LENGTHS), causal=causal, **caches.where())
    close(got, fa.flash_attn_with_kvcache(q, *others.given, k, v, cos, sin, tensors(*LENGTHS), causal=causal, **others.where()))
    for x, y in zip(caches.given, others.given, strict=True):
        close(x.nan_to_num(9.0), y.nan_to_num(9.0))
