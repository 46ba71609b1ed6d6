"""The papers' tasks in their own formats, and their graders."""

import json

import pytest

from reprieve.errors import ReprieveError
from reprieve.tasks import load_task
from reprieve.tasks.sandbox import Sandbox

ROWS = {
    "math": {"problem": "Find $x$.", "solution": "Then \\boxed{\\frac{1}{2}}.", "type": "Algebra"},
    "aime": {"ID": "2024-I-1", "Problem": "Find it.", "Answer": "073"},
    "triviaqa": {"question": "Who wrote it?", "answer": {"value": "The Bard", "aliases": ["Shakespeare"]}},
    "mmlu": {"question": "Which?", "choices": ["red", "blue", "green"], "answer": 1, "subject": "art"},
    "commonsenseqa": {
        "question": "Where?",
        "choices": {"label": ["A", "B"], "text": ["here", "there"]},
        "answerKey": "B",
    },
}
ANSWERS = {
    "math": ("So it is $\\boxed{0.5}$.", "So it is \\boxed{2}."),
    "aime": ("The final answer is \\boxed{73}.", "\\boxed{7}"),
    "triviaqa": ("shakespeare.", "Marlowe"),
    "mmlu": ("The answer is (B), since it is blue.", "Answer: A"),
    "commonsenseqa": ("B. there", "(A)"),
}


@pytest.fixture(params=list(ROWS))
def task(request, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(ROWS[request.param]) + "\n")
    return load_task(f"{request.param}:path={path}")


def test_right_and_wrong_answers_are_distinguished(task):
    problem = task.problems("all", 1)[0]
    right, wrong = ANSWERS[task.name]
    assert task.equivalent(task.extract_answer(right), problem.reference)
    assert not task.equivalent(task.extract_answer(wrong), problem.reference)
    assert (problem.question and problem.question in problem.prompt) or task.name in ("mmlu", "commonsenseqa")


def test_a_row_without_its_fields_is_named(task, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(ReprieveError, match="line 1"):
        task.problems("all", 1)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("(C)", "C"), ("C) blue", "C"), ("**Answer: D**", "D"), ("The correct answer is B.", "B"),
        ("\\boxed{A}", "A"), ("First A seems right.\nThe answer is C", "C"), ("I think\nB", "B"), ("blue", None),
        ("", None), ("The answer is A because cats purr.", "A"), ("The answer is a dog", None),
        ("The answer is A dog", None), ("the correct option is b", "B"), ("The answer is not A but C.", "C"),
        ("So the right choice is B, not C.", "B"), ("The answer is B since it rains", "B"),
        ("The choice I made was (D)", "D"),
    ],
)  # fmt: skip
def test_letters_are_read(text, letter):
    assert load_task("mmlu").extract_answer(text) == letter


def test_mbpp_programs_run_once(tmp_path, monkeypatch):
    path = tmp_path / "mbpp.jsonl"
    row = {"task_id": 2, "text": "Write a function to add.", "test_list": ["assert add(1, 2) == 3"]}
    path.write_text(json.dumps(row) + "\n")
    task = load_task(f"mbpp:path={path},unsafe=true")
    problem = task.problems("test", 1)[0]
    runs = []
    passes = Sandbox.passes
    monkeypatch.setattr(Sandbox, "passes", lambda *given: runs.append(1) or passes(*given))
    good = task.extract_answer("```python\ndef add(a, b):\n    return a + b\n```")
    other = task.extract_answer("```python\ndef add(a, b):\n    return b + a\n```")
    assert task.equivalent(good, problem.reference) and task.same(problem, good, other)
    assert not task.equivalent("def add(a, b):\n    return a", problem.reference)
    assert task.same(problem, other, good) and len(runs) == 3, "each program once"
