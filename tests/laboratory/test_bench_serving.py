"""The example of serving: it generates what a dense float64 run says, gives its pages back, and says when there are too few."""

import pytest

from bench.examples import serving
from tests.contract import runner


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_example_runs(library, capsys):
    if not runner.has(library):
        pytest.skip(f"{library} is not installed")
    words = ["--requests", "5", "--new", "6", "--batch", "2", "--pages", "14", "--page-size", "8", "--chunk", "7", "--on", library]
    found = serving.main(words)
    assert found["deviation"] < 1e-4 and found["tokens"] == 30 and found["free_pages"] == 14
    assert "new tokens a second" in capsys.readouterr().out


def test_too_few_pages():
    with pytest.raises(MemoryError, match="more pages than there are"):
        serving.main(["--requests", "3", "--pages", "2"])


def test_a_wrong_cache_is_noticed(monkeypatch):
    append = serving.fa_ext.append

    def forgetful(keys, values, k, v, **options):
        return append(keys, values, k, v * 0.9, **options)

    monkeypatch.setattr(serving.fa_ext, "append", forgetful)
    with pytest.raises(SystemExit, match="too much"):
        serving.main(["--requests", "2", "--new", "3"])
