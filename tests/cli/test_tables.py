"""Tables fit the terminal, and 80 columns in a file."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from reprieve.cli.tables import results_table, show_throughput, wrap_spec
from tests.kit.results import arm_results, throughput_results

ARMS = (
    "target_only", "lossless@K=8", "fuzzy:threshold=1,divergence=kl,form=released",
    "judge:path=heads/j,threshold=0.03@K=24@drafter=eagle3:top_k=4",
)  # fmt: skip


def arm(spec):
    ratio = {f"{name}{end}": [23.64, 43.02] if end else 35.28 for end in ("", "_ci95") for name in (
        "speedup_vs_target", "speedup_vs_lossless", "answers_vs_lossless")}  # fmt: skip
    return arm_results(
        spec, accuracy=1.0, accuracy_ci95=[0.34, 1.0], accuracy_vs_lossless=[-0.5, -1.0, 0.56],
        tokens_per_round=12.91, acceptance_rate=0.9, num_rescued=12, tokens_per_answer=143.0, rounds_per_answer=11.1,
        **ratio,
    )  # fmt: skip


def printed(width):
    config = SimpleNamespace(task="word_problems", split="test")
    arms = [arm(spec) for spec in ARMS]
    out = io.StringIO()
    table = results_table(SimpleNamespace(config=config, num_problems=2, draft_length=8, arms=arms), width=width)
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 250])
def test_tables_fit_and_break_specifications_at_separators_only(width):
    lines = printed(width).splitlines()
    assert max(map(len, lines)) <= width
    words = {line[: line.find("  ", 1)].strip() for line in lines}
    for spec in ARMS[:3]:
        assert set(wrap_spec(spec, 1).split("\n")) <= {
            part for word in words for part in wrap_spec(word, 1).split("\n")
        }
    assert ("cut off" in lines[3] or "cut off" in lines[2]) == (width == 250)


def test_the_narrowest_table_keeps_quality_and_speed():
    text = printed(80)
    assert "100.0 [34, 100]" in text and "35.28x [23.64, 43.02]" in text


def test_speeds_under_load_fit_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        throughput_results(
            spec, concurrency=128, tokens_per_second=12345.0, tokens_per_step=4.2, vs_lossless=1.21,
            vs_lossless_ci95=[1.2, 1.23], first_s=[0.2, 1.3], per_token_s=[0.02, 0.13],
        )
        for spec in ARMS
    ]  # fmt: skip
    show_throughput(rows)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "1.21x [1.20, 1.23]" in text and "200 (p95 1300)" in text
