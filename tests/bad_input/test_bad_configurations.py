"""Runs that cannot start: refused before the environment starts, and no files are left."""

import pytest
from command import CONFIG

# An environment that writes a file when it is started.
TOUCHES = "touch started; exec sleep 1000"
CLONING = "    behavioral_cloning: {demo_path: no/such.demo}\n"


@pytest.mark.parametrize(
    ("more", "options", "expected"),
    [
        (
            CLONING,
            [],
            "config.yaml:11: behaviors.Echo.behavioral_cloning.demo_path: no/such.demo does not ",
        ),
        ("", ["--torch-device=warp"], "--torch-device: 'warp' cannot be used here"),
        ("", ["--run-id=new", "--resume"], "Previous data from this run ID was not found."),
        ("", ["--run-id=run"], "Previous data from this run ID was found."),
        ("", ["--initialize-from=old"], "Could not initialize from results/old."),
        *[
            ("", ["--force", f"--run-id={name}"], "does not name a folder in results")
            for name in ("../elsewhere", ".", "", "/tmp")  # noqa: S108  # never made
        ],
    ],
)
def test_impossible_run_is_refused_before_it_starts(place, here, refused, more, options, expected):
    place.config(CONFIG + more)
    env = place.program(TOUCHES)
    (here / "elsewhere").mkdir()
    (here / "results/run").mkdir(parents=True)
    (here / "results/run/old").write_text("precious")
    before = place.files()
    assert expected in refused("learn", "config.yaml", "--env", env, *options)
    assert place.files() == before
