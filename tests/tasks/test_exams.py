"""The papers' tasks in their own formats, and their graders."""

import json
from types import SimpleNamespace

import pytest

from reprieve.errors import ReprieveError, SpecError
from reprieve.tasks import load_task
from reprieve.tasks.exams import MgsmTask, Oasst1Task
from reprieve.tasks.sandbox import Sandbox

FIRST = {"role": "prompter", "parent_id": None, "lang": "en"}
ROWS = {
    "math": {"problem": "Find $x$.", "solution": "Then \\boxed{\\frac{1}{2}}.", "type": "Algebra"},
    "aime": {"ID": "2024-I-1", "Problem": "Find it.", "Answer": "073"},
    "triviaqa": {"question": "Who wrote it?", "answer": {"value": "The Bard", "aliases": ["Shakespeare"]}},
    "mmlu": {"question": "Which?", "choices": ["red", "blue", "green"], "answer": 1, "subject": "art"},
    "mmlu_pro": {"question": "Which?", "options": ["red", "blue", "green"], "answer": "B", "answer_index": 1},
    "mgsm": {"question": "Wie viele?", "answer": None, "answer_number": 1100, "equation_solution": None},
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
    "mmlu_pro": ("The answer is (B), since it is blue.", "Answer: A"),
    "mgsm": ("Also sind es \\boxed{1,100}.", "\\boxed{11}"),
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
    choices = task.name in ("mmlu", "mmlu_pro", "commonsenseqa")
    assert choices or (problem.question and problem.question in problem.prompt)


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


def test_gpqa_choices_have_one_order_per_question(tmp_path):
    rows = [
        {"Question": f"{word}?", "Correct Answer": "yes\n", **{f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}}
        for word in ("One", "Two", "Three", "Four", "Five")
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_task(f"gpqa:path={path}").problems("all", 9)
    for problem in problems:
        assert f"\n{problem.reference}. yes\n" in f"{problem.prompt}\n"
        assert all(f". no {i}" in problem.prompt for i in (1, 2, 3))
    assert len({problem.reference for problem in problems}) > 1, "the right choice is not always at one place"
    assert load_task(f"gpqa:path={path}").problems("all", 9) == problems


def test_the_hub_is_asked_for_the_language(monkeypatch):
    asked = []

    def load_dataset(*arguments, **more):
        asked.append((arguments, more["split"]))
        return [ROWS["mgsm"]]

    monkeypatch.setattr("reprieve.tasks.table.import_extra", lambda *_: SimpleNamespace(load_dataset=load_dataset))
    assert load_task("mgsm:language=th").problems("test", 1)[0].reference == "1100"
    assert asked == [(("juletxara/mgsm", "th"), "test")]
    with pytest.raises(SpecError, match="language must be one of bn, de"):
        load_task("mgsm:language=xx")


def test_malformed_choices_are_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    row = {"question": "Which?", "options": ["red", "blue"], "answer": " b"}
    path.write_text(json.dumps(row) + "\n")
    assert load_task(f"mmlu_pro:path={path}").problems("all", 1)[0].reference == "B"
    for change in ({"answer": "AB"}, {"answer": "C"}, {"options": ["red", ""]}, {"options": ["red", None]}):
        path.write_text(json.dumps({**row, **change}) + "\n")
        wrong = "options must be" if "options" in change else "the right choice must be"
        with pytest.raises(ReprieveError, match=rf"task mmlu_pro: .*line 1: {wrong}"):
            load_task(f"mmlu_pro:path={path}").problems("all", 1)
    row = {"Question": "Which?", "Correct Answer": "1", **{f"Incorrect Answer {i}": str(i) for i in (1, 2, 3)}}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ReprieveError, match="the four answers must differ"):
        load_task(f"gpqa:path={path}").problems("all", 1)


def test_splits_of_the_hub_do_not_overlap(monkeypatch):
    def load_dataset(name, configuration, *, split):
        return [{"text": f"{split} {number}", **FIRST} for number in range(200)]

    monkeypatch.setattr("reprieve.tasks.table.import_extra", lambda *_: SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(MgsmTask, "problem_of", Oasst1Task.problem_of)
    for spec, splits in (
        ("oasst1", ("train", "validation")),
        ("mgsm", ("test", "train", "validation")),
        ("mmlu_pro", ("test", "validation")),
        ("math", ("test",)),
        ("gpqa", ("train", "validation", "test", "all")),
    ):
        task = load_task(spec)
        assert task.splits == splits
        with pytest.raises(SpecError, match="split must be one of"):
            task.problems("dev", 1)
    for spec in ("oasst1", "mgsm"):
        task = load_task(spec)
        texts = [{problem.prompt for problem in task.problems(split, 999)} for split in task.splits]
        assert all(texts) and sum(map(len, texts)) == len(set.union(*texts))


@pytest.mark.parametrize(
    ("language", "text", "number"),
    [("de", "\\boxed{1.100}", "1100"), ("es", "1.250.000.", "1250000"), ("en", "1.5", "1.5"), ("de", "1.5", "1.5")],
)
def test_german_and_spanish_answers_separate_thousands_by_dots(language, text, number):
    assert load_task(f"mgsm:language={language}").extract_answer(f"The final answer is {text}") == number


def test_open_prompts_from_conversations_and_instructions(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [
        {"text": "Hello?", "role": "prompter", "parent_id": None, "lang": "en"},
        {"text": "Hi.", "role": "assistant", "parent_id": "1", "lang": "en"},
        {"text": "Hallo?", "role": "prompter", "parent_id": None, "lang": "de"},
        {"text": "And then?", "role": "prompter", "parent_id": "2", "lang": "en"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(f"oasst1:path={path}")
    assert [problem.prompt for problem in task.problems("all", 9)] == ["Hello?"] and not task.graded
    assert [one.prompt for one in load_task(f"oasst1:path={path},language=de").problems("all", 9)] == ["Hallo?"]
    with pytest.raises(ReprieveError, match="language must be one of de, en, got 'english'"):
        load_task(f"oasst1:path={path},language=english").problems("all", 9)
    path.write_text('{"text": "Hello?"}\n')
    with pytest.raises(ReprieveError, match="line 1: field 'role' is missing"):
        load_task(f"oasst1:path={path}").problems("all", 9)
    path.write_text('{"instruction": "Sum up.", "input": "A text."}\n{"instruction": "Greet.", "input": ""}\n')
    assert [one.prompt for one in load_task(f"alpaca:path={path}").problems("all", 9)] == [
        "Sum up.\n\nA text.",
        "Greet.",
    ]


def test_one_unreadable_reference_leaves_out_one_row(tmp_path):
    rows = [{"problem": f"Find {n}.", "solution": f"\\boxed{{{n}}}"} for n in range(3)] + [
        {"problem": "?", "solution": "?"}
    ]
    (tmp_path / "math.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match="1 rows of .* are left out"):
        assert len(load_task(f"math:path={tmp_path}/math.jsonl").problems("all", 9)) == 3


@pytest.mark.parametrize("right", ["²", True, 3, "D", None])
def test_a_right_choice_that_is_none_of_them_is_refused(tmp_path, right):
    (tmp_path / "x.jsonl").write_text(json.dumps(ROWS["mmlu"] | {"answer": right}))
    with pytest.raises(ReprieveError, match="the right choice must be one of the 3"):
        load_task(f"mmlu:path={tmp_path}/x.jsonl").problems("all", 1)
