"""Progress without a terminal."""

import pytest

from reprieve.cli import screen


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    return now


def test_a_line_of_progress_is_printed_once_a_minute_and_at_the_end(clock, capsys):
    with screen.progress("bench", "answers") as report:
        for done, seconds in ((1, 30), (2, 61), (3, 90), (4, 122), (5, 123)):
            clock[0] = seconds
            report(done, 5)
    lines = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["2 of 5 answers", "4 of 5 answers", "5 of 5 answers"]
