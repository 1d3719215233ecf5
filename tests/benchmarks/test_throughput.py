"""`benchmarks/throughput.py` refuses runs that are too short before it trains."""

import sys

import pytest
import throughput


@pytest.mark.parametrize(("options", "least"), [([], 24_000), (["--compile"], 48_000)])
def test_throughput_benchmark_refuses_too_few_steps_before_training(
    options, least, monkeypatch, capsys
):
    def nothing_is_made(_name):
        raise AssertionError

    monkeypatch.setattr(throughput, "executable", nothing_is_made)
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--steps", str(least - 1), *options])
    with pytest.raises(SystemExit) as ended:
        throughput.main()
    assert ended.value.code == 2
    message = f"--steps {least - 1}: a rate needs summaries, so at least {least} steps"
    assert message in capsys.readouterr().err
