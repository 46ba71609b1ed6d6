"""Long contexts, conversations, instructions."""

from __future__ import annotations

import json

import pytest

from reprieve.errors import SpecError
from reprieve.tasks import load_task


def test_long_contexts_come_before_the_question_and_stay_the_same(tmp_path):
    rows = [{"question": f"Question {i}?", "answer": f"So. #### {i}"} for i in range(30)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"path={tmp_path}/{{split}}.jsonl"
    task = load_task(f"gsm8k:{path},context=20")
    first, second = task.problems("test", 2)
    assert first.prompt.count("Problem: ") == 21 and first.prompt.endswith("Problem: Question 0?\nSolution:")
    assert "Question 0?" not in first.prompt[: first.prompt.rindex("Problem:")]
    assert first.prompt != second.prompt and task.problems("test", 1)[0] == first
    with pytest.raises(SpecError, match="context must be at most"):
        load_task(f"gsm8k:{path},context=40").problems("test", 1)


def test_alpaca_and_mt_bench_files_are_read(tmp_path):
    rows = [{"instruction": "Write."}, {"question_id": 81, "category": "writing", "turns": ["One", "Two"]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = load_task(f"prompts:path={tmp_path}/p.jsonl").problems("all", 5)
    assert (first.prompt, first.follow_ups) == ("Write.", ())
    assert (second.prompt, second.follow_ups, second.category) == ("One", ("Two",), "writing")
