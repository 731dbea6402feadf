"""The training example: its text can be learnt, its verdict holds on a tiny model and fails for a wrong attention."""

import inspect
import json

import pytest

torch = pytest.importorskip("torch")

from bench.examples import train_packed, train_torch, training  # noqa: E402

TINY = ["--layers=1", "--width=32", "--heads=2", "--seq=24", "--vocab=32", "--batch=4", "--steps=25",
        "--compiler=aot_eager", "--rate=0.003"]  # fmt: skip


@pytest.fixture
def one_thread_of_torch():
    """Tiny steps on a busy machine: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_loss_stays_between_those_of_the_backends(one_thread_of_torch, capsys):
    assert train_torch.main([*TINY, "--no-bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "equal bits" in printed and "fa_ext, compiled" in printed
    first, last = map(float, next(line for line in printed.splitlines() if line.startswith("fa_ext  ")).split()[1:3])
    assert last < first - 0.1


def test_in_bfloat16_the_loss_stays_close(one_thread_of_torch, capsys):
    """By how much is for GPUs to say: between the two backends of the CPU there is one gap, which may be next to nothing."""
    train_torch.main([*TINY, "--bfloat16", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["equal_bits"]
    runs = found["runs"]
    for run in (runs["fa_ext"], runs["fa_ext, compiled"]):
        assert run["last"] < run["first"] - 0.1 and abs(run["last"] - runs["flash"]["last"]) < 5e-3


def test_a_wrong_attention_is_noticed(one_thread_of_torch, monkeypatch, capsys):
    right = train_torch.fa_ext.torch.attention

    def wrong(q, k, v, **options):
        return right(q, k, v, **options | {"scale": 1.01 / q.shape[-1] ** 0.5})

    monkeypatch.setattr(train_torch.fa_ext.torch, "attention", wrong)
    assert train_torch.main([*TINY, "--no-bfloat16"]) == 1


PACKED = [*(word for word in TINY if not word.startswith("--compiler")), "--no-bfloat16"]


def test_packed_documents_train_as_padded_ones(one_thread_of_torch, capsys):
    assert train_packed.main([*PACKED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    packed = found["runs"]["fa_ext, packed"]
    assert packed["last"] < packed["first"] - 0.1 and 0.1 < found["waste"] < 0.9
    assert train_packed.main(PACKED) == 0
    assert "of the padded tokens are padding" in capsys.readouterr().out


@pytest.mark.parametrize("causal", [{"window_size": (-1, 0)}, {"is_causal": True}], ids=["windows", "torch 2.10"])
def test_packed_documents_train_beside_varlen_attn(causal, one_thread_of_torch, monkeypatch, capsys):
    (name,), asked = causal, []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        assert options == causal and max_q == max_k == int(cu_seq_q.diff().max())
        asked.append(max_q)
        return train_packed.fa_ext.torch.attention(query, key, value, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, causal="bottom_right")

    named = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    varlen_attn.__signature__ = inspect.Signature([*inspect.signature(varlen_attn).parameters.values()][:7] + [named])
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert train_packed.main(PACKED) == 0 and len(asked) == 26
    printed = capsys.readouterr().out
    assert [line.split()[-1] for line in printed.splitlines() if line.startswith("fa_ext, packed")][-1] == "1.00"
    assert printed.count("varlen, packed") == 2


def test_documents_that_see_each_other_are_noticed(one_thread_of_torch, monkeypatch, capsys):
    def wrong(q, k, v, **options):
        return train_torch.fa_ext.torch.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True)[0].transpose(0, 1)

    monkeypatch.setattr(train_packed.fa_ext.torch, "attention", wrong)
    assert train_packed.main(PACKED) == 1


def test_dropout_on_the_cpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        train_torch.main([*TINY, "--dropout=0.1"])
    assert "--dropout is for --device cuda" in capsys.readouterr().err


def test_gaps():
    losses = {"math": [1.0, 2.0, 3.0], "flash": [1.0, 2.1, 3.0], "fa_ext": [1.0, 2.1, 3.15]}
    found = training.gaps({n: (x, 0.0) for n, x in losses.items()}, ["math", "flash"], "math")
    assert found["fa_ext"] == pytest.approx((1.5, 3, 0.15))


def test_a_loss_that_is_no_number_is_the_largest_gap():
    losses = {"math": [1.0, 2.0, 3.0], "flash": [1.0, 2.1, 3.0], "fa_ext": [1.0, float("nan"), 3.0]}
    found = training.gaps({n: (x, 0.0) for n, x in losses.items()}, ["math", "flash"], "math")
    assert found["fa_ext"].ratio == float("inf") and found["fa_ext"].step == 2


def test_the_largest_rise():
    assert training.rise([5.0, 3.0, 4.5, 2.0, 3.0]) == 1.5 and training.rise([3.0, 2.0]) == 0.0


def test_the_rate_rises():
    args = training.parser("x", "").parse_args(["--rate=0.5", "--warmup=4"])
    assert [training.rate(args, step) for step in (0, 1, 3, 4, 100)] == [0.125, 0.25, 0.5, 0.5, 0.5]
