"""The example of serving: it generates what a dense float64 run says, in any batch, and no page is lost or shared."""

import itertools

import numpy as np
import pytest

from bench.examples import decoder, engine, serving
from tests.contract import runner
from tests.laboratory.support import stand_ins

SMALL = ["--requests", "6", "--prompt", "12", "--new", "5", "--batch", "3", "--budget", "9", "--pages", "14", "--page-size", "8",
         "--layers", "2", "--heads", "4", "--heads-kv", "2", "--head-dim", "32", "--rounds", "2", "--checked", "6"]  # fmt: skip
MODEL = decoder.Model(layers=2, heads=4, heads_kv=2, head_dim=16, positions=80)
NUMPY = decoder.Library("numpy")
WEIGHTS = MODEL.weights(0, "float32")


def made(attend=engine.by_fa_ext, batch=3, budget=9, pages=24, page_size=4):
    return engine.Engine(MODEL, WEIGHTS, NUMPY, attend, batch=batch, budget=budget, pages=pages, page_size=page_size)


def stream(count=9, gap=2.0, seed=0):
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(1, 40, count), rng.integers(1, 20, count))
    return [engine.Request(gap * n, rng.integers(0, MODEL.vocabulary, a).tolist(), int(b)) for n, (a, b) in enumerate(lengths)]


def ticks():
    """A clock that goes on by one at each look."""
    return map(float, itertools.count()).__next__


# ---- the program ----


@pytest.mark.parametrize("options", [["numpy"], ["torch"], ["torch", "--eager"]], ids=" ".join)
def test_the_example_runs(options, capsys):
    if not runner.has(options[0]):
        pytest.skip(f"{options[0]} is not installed")
    found = serving.main([*SMALL, "--on", *options])["fa_ext"]
    assert found.new == len(found.first) + len(found.between) and found.deviation <= 2 * found.plain
    assert min(found.first) > 0 and found.mixed and found.decoding and sum(found.mixed + found.decoding) < found.busy <= found.seconds
    told = capsys.readouterr().out
    assert "new tokens a second" in told and ("not here: flash-attn-3" in told or "flash-attn-3  " in told)


def test_it_runs_as_it_is_called():
    """By the defaults of this machine."""
    found = serving.main(["--requests", "4", "--rounds", "1", "--checked", "1"])
    assert len(found["fa_ext"].first) == 4


def test_the_stream_is_the_same_for_every_engine_and_drawn_anew_by_a_seed():
    args, _ = serving.options(SMALL)
    assert serving.drawn(args, 101) == serving.drawn(args, 101)
    other, _ = serving.options([*SMALL, "--seed", "1"])
    assert serving.drawn(args, 101) != serving.drawn(other, 101)


def test_too_few_pages():
    with pytest.raises(MemoryError, match="more pages than there are, 2"):
        serving.main([*SMALL, "--on", "numpy", "--pages", "2"])


def test_a_budget_below_the_batch():
    with pytest.raises(ValueError, match="budget is 2; accepted: at least batch, 3"):
        serving.main([*SMALL, "--on", "numpy", "--budget", "2"])


@pytest.mark.parametrize(("prompt", "new"), [(0, 4), (4, 0), (50, 31)])
def test_requests_that_no_engine_can_run(prompt, new):
    with pytest.raises(ValueError, match=rf"a request has {prompt} \+ {new} tokens; accepted: 1 \+ 1 to 80 in all"):
        made().run([engine.Request(0.0, [1] * prompt, new)])


def test_sizes_that_are_none(capsys):
    with pytest.raises(SystemExit):
        serving.main([*SMALL, "--batch", "0"])
    assert "--batch is 0; accepted: numbers over 0" in capsys.readouterr().err


def test_a_wrong_cache_is_noticed(monkeypatch):
    append = engine.fa_ext.append

    def forgetful(keys, values, k, v, **options):
        return append(keys, values, k, v * 0.999, **options)

    monkeypatch.setattr(engine.fa_ext, "append", forgetful)
    with pytest.raises(SystemExit, match="too far from float64"):
        serving.main([*SMALL, "--on", "numpy"])


# ---- the pages ----


def test_no_page_is_lost_or_shared_by_the_list():
    rng, pages, held = np.random.default_rng(0), engine.Pages(40), []
    for _ in range(500):
        if held and rng.random() < 0.5:
            pages.give(held.pop(rng.integers(len(held))))
        elif (count := int(rng.integers(0, 12))) <= len(pages.free):
            held.append(pages.take(count))
            assert len(held[-1]) == count
        assert sorted(sum(held, pages.free)) == list(range(40))


@pytest.mark.parametrize("wrong", [[3], [0, 0], [1], [-1]], ids=str)
def test_pages_that_nobody_has_are_not_taken_back(wrong):
    pages = engine.Pages(2)
    assert pages.take(1) == [1] and pages.take(1) == [0] and pages.take(0) == []
    pages.give([1])
    with pytest.raises(ValueError, match="accepted: pages in use, each once"):
        pages.give(wrong)
    assert pages.free == [1] and pages.take(1) == [1]
    with pytest.raises(MemoryError, match="1 pages are asked for, 0 of 2 are free"):
        pages.take(1)


# ---- the engine ----


@pytest.mark.parametrize(
    ("batch", "budget", "pages", "limit"), [(3, 9, 24, "batch"), (3, 3, 24, "batch"), (8, 8, 15, "pages"), (8, 64, 40, "pages"), (1, 1, 24, "batch")]
)
def test_no_page_is_lost_or_shared_by_requests(batch, budget, pages, limit, monkeypatch):
    found, most = made(batch=batch, budget=budget, pages=pages), 0
    step = found.step

    def watched():
        nonlocal most
        rows = [request.pages for request in found.running]
        assert sorted(sum(rows, found.pages.free)) == list(range(pages))
        assert [row[:n].tolist() for row, n in zip(found.table, map(len, rows))] == rows
        assert sum(found.shares()) <= budget and max(found.shares()) > 0
        most = max(most, len(rows))
        return step()

    monkeypatch.setattr(found, "step", watched)
    requests = stream(gap=0.0)
    found.run(requests, ticks())
    assert sorted(found.pages.free) == list(range(pages)) and not found.running
    assert 1 < most < batch if limit == "pages" else most == batch
    assert all(len(request.logits) == len(request.times) == request.new for request in requests)
    assert all(np.diff([request.arrives, *request.times]).min() > 0 for request in requests)


def test_a_request_has_the_tokens_that_it_has_alone():
    together, alone = stream(), stream()
    made().run(together, ticks())
    for request, other in zip(together, alone):
        made(batch=1, budget=64).run([other], ticks())
        assert request.tokens == other.tokens
        np.testing.assert_allclose(request.logits, other.logits, atol=1e-4)


def test_requests_begin_in_order_and_steps_of_a_token_each_are_said_to_be():
    calls = []

    def attend(q, keys, values, step):
        brought = np.diff(step.cu_seqlens_q)
        calls.append((len(q), step.max_seqlen_q, brought.max()))
        empty = len(found.running)
        assert not brought[empty:].any() and not step.seqlens_k[empty:].any() and brought.sum() <= len(q)
        return engine.by_fa_ext(q, keys, values, step)

    found, requests = made(attend), stream(gap=0.0)
    found.run(requests, ticks())
    first = [request.times[0] for request in requests]
    assert first == sorted(first)
    assert {call[:2] for call in calls} == {(3, 1), (9, 9)} and all((bound == 1) == (most == 1) for _, bound, most in calls)


def test_time_without_requests_is_counted_and_not_waited_for():
    requests = stream(count=2, gap=1000.0)
    seconds, busy = made().run(requests, ticks())
    assert 1000 < seconds < 1200 and 0 < busy < 200 and requests[0].times[-1] < 1000 < requests[1].times[0]


# ---- FlashAttention-3 ----


@pytest.mark.parametrize("names", [stand_ins.FA3_FORWARD, stand_ins.VLLM_FA3_FORWARD], ids=["flash-attn-3", "vllm-flash-attn-3"])
def test_flash_attention_3_attends_in_the_place_of_fa_ext(names):
    operator = stand_ins.operator(stand_ins.fa3_forward, names, {"num_splits": 0} if "attention_chunk" in names else {})
    ours, theirs = stream(count=3), stream(count=3)
    made().run(ours, ticks())
    made(engine.by_flash_attention(operator)).run(theirs, ticks())
    for request, other in zip(ours, theirs):
        assert request.tokens == other.tokens
        np.testing.assert_allclose(request.logits, other.logits, atol=1e-4)
