"""The benchmark trains with the settings of the page about Stable-Baselines3."""

import coming
import pytest


def test_benchmark_reads_its_settings_from_the_example_on_the_stable_baselines3_page(tmp_path):
    settings = coming.settings_of(coming.PAGE)["default_settings"]
    assert settings["max_steps"] == 50_000
    assert settings["hyperparameters"]["learning_rate_schedule"] == "constant"
    page = tmp_path / "page.md"
    page.write_text("```python\nother = 1\n```\n")
    with pytest.raises(ValueError, match="no assignment to `settings`"):
        coming.settings_of(page)
