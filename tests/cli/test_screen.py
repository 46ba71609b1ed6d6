"""Progress without a terminal."""

import time

from reprieve.cli import screen


def test_lines_of_progress_come_while_nothing_finishes_and_at_the_end(monkeypatch, capsys):
    monkeypatch.setattr(screen, "_REPORT_SECONDS", 0.02)
    text = ""
    with screen.progress("bench", "answers") as report:
        report(1, 5)
        deadline = time.monotonic() + 20
        while text.count("1 of 5 answers after") < 2 and time.monotonic() < deadline:
            text += capsys.readouterr().err
        monkeypatch.setattr(screen, "_REPORT_SECONDS", 1000)
        report(5, 5)
    lines = (text + capsys.readouterr().err).splitlines()
    assert [line.split(" after")[0] for line in lines[:2]] == ["1 of 5 answers"] * 2
    assert lines[-1].startswith("5 of 5 answers after ")


def test_before_the_first_report_the_line_gives_no_total(monkeypatch, capsys):
    monkeypatch.setattr(screen, "_REPORT_SECONDS", 0.02)
    text, deadline = "", time.monotonic() + 20
    with screen.progress("mining", "problems"):
        while "0 problems after" not in text and time.monotonic() < deadline:
            text += capsys.readouterr().err
    assert "0 problems after" in text
