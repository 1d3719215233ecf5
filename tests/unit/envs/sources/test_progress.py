from __future__ import annotations

import io
import logging
import sys

from pipeline.envs.sources import download


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_the_time_left(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with download.progress("Downloading game.zip", 1000, 0) as advance:
        advance(250)
    text = terminal.getvalue()
    assert "Downloading game.zip" in text
    assert "/1.0 kB" in text
    assert "-:--:--" in text


def test_elsewhere_there_is_a_line_now_and_then_with_the_time_left(monkeypatch, caplog):
    now = iter([0.0, 1.0, 20.0])
    monkeypatch.setattr(download.time, "monotonic", lambda: next(now))
    with (
        caplog.at_level(logging.INFO),
        download.progress("Downloading game.zip", 10_000_000, 1_000_000) as advance,
    ):
        advance(1_000_000)
        advance(3_000_000)
    assert caplog.messages == [
        "Downloading game.zip: 10.0 MB, 1.0 MB here already",
        "Downloading game.zip: 5.0 MB of 10.0 MB, 25 s left",
    ]


def test_an_unknown_size_is_said_so(caplog):
    with caplog.at_level(logging.INFO), download.progress("Downloading", None, 0) as advance:
        advance(1)
    assert caplog.messages == ["Downloading: unknown size"]
