"""Tasks: prompts, answers, equivalence and malformed files."""

from __future__ import annotations

import json
import re
import threading

import pytest

from reprieve.errors import ReprieveError, SpecError
from reprieve.tasks import load_task
from reprieve.tasks.numbers import same_expression

ROWS = [
    {"question": "Ann has 3 hats and buys 2. How many?", "answer": "She has 3+2=<<3+2=5>>5 hats.\n#### 5"},
    {"question": "A car costs $2,000. Two cars?", "answer": "2*2000=<<2*2000=4000>>4000\n#### 4,000"},
    {"question": "Half of 3?", "answer": "3/2=1.5\n#### 1.5"},
]


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"gsm_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_gsm8k_reads_files_by_split_and_shows_worked_examples(folder):
    task = load_task(f"gsm8k:path={folder}/gsm_{{split}}.jsonl,shots=2")
    problems = task.problems("test", 2, offset=1)
    assert [problem.problem_id for problem in problems] == ["gsm8k-test-1", "gsm8k-test-2"]
    assert problems[0].reference == "4000"
    prompt = problems[1].prompt
    assert prompt.endswith("Problem: Half of 3?\nSolution:")
    assert "She has 3+2=5 hats.\nThe final answer is 5.\n" in prompt
    assert "<<" not in prompt
    assert prompt.count("Problem:") == 3


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 3+2=5.\nThe final answer is 5.", "5"),
        ("The final answer is: $1,000", "1000"),
        ("the Final Answer is 3. No: the final answer is \\frac{3}{2}.", "1.5"),
        ("I do not know", None),
        ("The final answer is .", None),
    ],
)
def test_gsm8k_answers_follow_the_last_answer_phrase(text, answer):
    assert load_task("gsm8k").extract_answer(text) == answer


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("1.5", "3/2", True),
        ("\\frac{3}{2}", "1.5", True),
        ("$1,000", "1000", True),
        ("5.0", "5", True),
        ("x+1", "1+x", True),
        ("5", "6", False),
        ("1,5", "15", False),
        ("3/2", "2/3", False),
        ("", "", False),
        ("99999999!", "3", False),
        ("9^{9^{9^{9}}}", "3", False),
        ("2^{99999999}", "3", False),
        ("9" * 500, "3", False),
    ],
)
def test_expressions_are_compared_as_expressions(left, right, same):
    assert same_expression(left, right) is same


def test_worked_examples_leave_out_the_problem_that_is_asked(folder):
    task = load_task(f"gsm8k:path={folder}/gsm_{{split}}.jsonl,shots=2")
    prompt = task.problems("train", 1)[0].prompt
    assert prompt.count("Ann has 3 hats") == 1
    assert prompt.count("Problem:") == 3


def test_strings_may_hold_other_line_separators(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n")
    assert load_task(f"prompts:path={path}").problems("all", 1)[0].prompt == "a\u2028b"


def test_expressions_can_be_compared_in_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(same_expression("3/2", "1.5")))
    thread.start()
    thread.join()
    assert found == [True]


def test_an_absent_answer_equals_nothing():
    for name in ("arithmetic", "gsm8k"):
        assert not load_task(name).equivalent(None, None)
        assert not load_task(name).equivalent("5", None)


def test_prompts_are_read_from_both_row_formats(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Say hi"}\n\n{"question_id": 81, "turns": ["Write a poem", "Shorter"]}\n')
    problems = load_task(f"prompts:path={path}").problems("all", 5)
    assert [(problem.problem_id, problem.prompt) for problem in problems] == [
        ("prompts-1", "Say hi"),
        ("prompts-81", "Write a poem"),
    ]


def test_bad_tasks_and_files_are_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    for content, says in (("{not json}\n", "line 1: not JSON"), ("[1]\n", "must be an object, got list")):
        path.write_text(content)
        with pytest.raises(ReprieveError, match=says):
            load_task(f"gsm8k:path={path}").problems("test", 1)
    path.write_text('{"question": "?"}\n')
    with pytest.raises(ReprieveError, match=r"line 1: field .answer. is missing"):
        load_task(f"gsm8k:path={path}").problems("test", 1)
    path.write_text('\n\n{"question": "?", "answer": "5"}\n')
    with pytest.raises(ReprieveError, match=r"line 3: answer must end in #### and the result, got '5'"):
        load_task(f"gsm8k:path={path}").problems("test", 1)
    with pytest.raises(ReprieveError, match=r"line 3 of .* must have prompt, instruction or turns"):
        load_task(f"prompts:path={path}").problems("all", 1)
    with pytest.raises(ReprieveError, match="No such file"):
        load_task("gsm8k:path=/nowhere.jsonl").problems("test", 1)
    for spec, says in (
        ("chess", "task must be one of aime, alpaca, arithmetic, .*, word_problems, got 'chess'"),
        ("gsm8k:shots=99", r"shots must be in \[0, 64\], got 99"),
        ("gsm8k:name=x", "no parameter 'name'"),
        ("prompts", "needs path=FILE"),
        ("arithmetic:shots=2", "no parameter 'shots'; it takes none"),
    ):
        with pytest.raises(SpecError, match=says):
            load_task(spec)


def test_one_file_of_gsm8k_is_divided_into_splits_that_share_no_problem(tmp_path):
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(200)]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = load_task(f"gsm8k:path={path},shots=8")
    found = {split: {p.question for p in task.problems(split, 200)} for split in task.splits}
    assert len(found["all"]) == 200 and min(map(len, found.values())) > 20
    assert not found["train"] & found["test"] and not found["validation"] & (found["train"] | found["test"])
    prompt = task.problems("test", 1)[0].prompt
    shown = re.findall("Problem: (.*)", prompt)
    assert len(shown) == 9 and set(shown[:-1]) <= found["train"], "worked examples are training problems"
    names = {p.question: p.problem_id for p in task.problems("test", 200)}
    path.write_text(path.read_text().partition("\n")[2])  # the file without its first line
    again = {p.question: p.problem_id for p in load_task(f"gsm8k:path={path}").problems("test", 200)}
    assert again.items() <= names.items(), "a name belongs to a question"


def test_gsm8k_validation_problems_come_from_the_training_file(tmp_path):
    rows = [{"question": f"Question {number}?", "answer": f"So. #### {number}"} for number in range(200)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"gsm8k:path={tmp_path}/{{split}}.jsonl"
    train, validation = (
        {problem.question for problem in load_task(path).problems(split, 999)} for split in ("train", "validation")
    )
    assert len(train) + len(validation) == 200 and not train & validation and 20 <= len(validation) <= 60
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[100:]))
    again = {problem.question for problem in load_task(path).problems("validation", 999)}
    assert again == {row["question"] for row in rows[100:]} & validation, "a problem stays in its split"
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert len(load_task(path).problems("validation", 999)) == 3 and len(load_task(path).problems("train", 999)) == 100
