"""Progress without a terminal."""

import subprocess
import sys
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


def test_the_time_left_is_estimated_from_all_that_this_run_did():
    line = screen.progress_line(50, 100, "answers", 130.0, before=40, since=120.0)
    assert line == "50 of 100 answers after 130 s, about 600 s left"
    assert screen.progress_line(40, 100, "answers", 60.0, before=40, since=60.0) == "40 of 100 answers after 60 s"
    assert screen.progress_line(100, 100, "answers", 60.0, before=0, since=60.0) == "100 of 100 answers after 60 s"


def test_what_an_earlier_run_did_does_not_count_as_speed(monkeypatch, capsys):
    monkeypatch.setattr(screen, "_REPORT_SECONDS", 0.05)
    text, deadline = "", time.monotonic() + 20
    with screen.progress("bench", "answers") as report:
        report(999_990, 1_000_000)
        time.sleep(1)
        report(999_991, 1_000_000)
        while " left" not in text and time.monotonic() < deadline:
            text += capsys.readouterr().err
    assert int(text.split("about ")[1].split(" s left")[0]) >= 9  # one answer a second, nine to go


def test_before_the_first_report_the_line_gives_no_total(monkeypatch, capsys):
    monkeypatch.setattr(screen, "_REPORT_SECONDS", 0.02)
    text, deadline = "", time.monotonic() + 20
    with screen.progress("mining", "problems"):
        while "0 problems after" not in text and time.monotonic() < deadline:
            text += capsys.readouterr().err
    assert "0 problems after" in text


def test_a_closed_stderr_ends_the_command_and_not_its_progress_alone():
    code = (
        "import time; from reprieve.cli import screen; screen._REPORT_SECONDS = 0.05\n"
        "with screen.progress('bench', 'answers') as report:\n"
        "    for _ in range(100):\n"
        "        time.sleep(0.1)\n"
        "        report(1, 5)\n"
        "print('whole')\n"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stderr.close()
    printed = running.stdout.read()
    running.stdout.close()
    assert running.wait() != 0 and b"whole" not in printed
