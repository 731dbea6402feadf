"""The training example of JAX: its text can be learnt, its verdict holds on a tiny model and fails for a wrong attention."""

import json

import pytest

jax = pytest.importorskip("jax")

from bench.examples import train_jax  # noqa: E402

TINY = ["--layers=1", "--width=32", "--heads=2", "--seq=24", "--vocab=32", "--batch=4", "--steps=25", "--rate=0.003"]


def test_the_loss_stays_between_those_of_the_backends(capsys):
    with jax.default_matmul_precision("highest"):  # a GPU's products of float32 are of fewer bits else, those of fa_ext are not
        assert train_jax.main([*TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held"] and found["equal_bits"] and found["kernels"]
    run = found["runs"]["fa_ext"]
    assert run["last"] < run["first"] - 0.1 and run["gap"] <= 2


def test_a_wrong_attention_is_noticed(monkeypatch):
    right = train_jax.ours(deterministic=True)
    monkeypatch.setattr(train_jax, "ours", lambda deterministic: lambda q, k, v: right(1.01 * q, k, v))
    assert train_jax.main(TINY) == 1
