"""A user's JSONL file as a task: graders, templates, splits and errors."""

import json

import pytest

from reprieve.errors import ReprieveError, SpecError
from reprieve.settings import PromptSettings
from reprieve.tasks import load_task
from reprieve.tasks.prompting import with_prompts
from reprieve.tasks.table import JsonlTask
from tests.kit.tiny import NumberTokenizer


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "q.jsonl", [{"q": f"How much is {n} + 1?", "a": {"value": n + 1}} for n in range(200)])


def own(path, **settings):
    return JsonlTask(path=str(path), **{"question": "q", "answer": "a.value", **settings})


def test_fields_prompts_and_answers(data):
    spec = f'jsonl:path={data},question=q,answer=a.value,grader=number,stop="Question:;\\n\\n",length=64'
    task = load_task(spec)
    problem = task.problems("all", 1)[0]
    assert problem.prompt.startswith("How much is 0 + 1?\n\nReason") and problem.reference == "1"
    assert task.stop == ("Question:", "\n\n") and task.max_new_tokens == 64 and task.graded
    assert task.equivalent(task.extract_answer("So \\boxed{1.0}"), problem.reference)


def test_splits_are_carved_and_stay_when_the_file_grows(data):
    before = {split: own(data).problems(split, 999) for split in ("train", "validation", "test")}
    sizes = {split: len(problems) for split, problems in before.items()}
    assert sum(sizes.values()) == 200 and sizes["train"] > sizes["validation"] > 10 < sizes["test"]
    with data.open("a") as file:
        file.write('{"q": "Another?", "a": {"value": 3}}\n')
    lines = data.read_text().splitlines()
    write(data, [lines[-1], *lines[:-1]])
    for split, problems in before.items():
        after = {problem.problem_id for problem in own(data).problems(split, 999)}
        assert {problem.problem_id for problem in problems} <= after and len(after) <= len(problems) + 1


def test_files_by_split_are_used_as_they_are(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", [{"q": f"{split} {n}", "a": {"value": n}} for n in range(5)])
    task = own(tmp_path / "{split}.jsonl")
    assert [problem.question for problem in task.problems("test", 9)] == [f"test {n}" for n in range(5)]
    with pytest.raises(ReprieveError, match=r"validation\.jsonl.*No such file"):
        task.problems("validation", 1)


def test_bad_data_is_named_and_copies_are_counted(tmp_path):
    good = {"q": "1 + 1?", "a": {"value": 2}}
    path = write(tmp_path / "x.jsonl", [good, {"q": "2 + 2?", "a": {"value": 4}}, {"q": "3 + 3?"}])
    with pytest.raises(ReprieveError, match=r"line 3: field 'a.value' is missing; it has q"):
        own(path).problems("all", 1)
    write(path, [good, {"q": "", "a": {"value": 2}}])
    with pytest.raises(ReprieveError, match=r"line 2: field 'q' must be a text or a number, got ''"):
        own(path).problems("all", 1)
    write(path, ['{"q": "1?", "a": {"value": NaN}}'])
    with pytest.raises(ReprieveError, match=r"line 1: field 'a.value' must be a text or a number, got nan"):
        own(path).problems("all", 1)
    write(path, ['{"q": "1?", "q": "2?", "a": {"value": 1}}'])
    with pytest.raises(ReprieveError, match=r"line 1: not JSON \(the key 'q' is given twice\)"):
        own(path).problems("all", 1)
    write(path, [])
    with pytest.raises(ReprieveError, match="holds no problems"):
        own(path).problems("all", 1)
    write(path, [good, {"q": "1 +  1? ", "a": {"value": 3}}, {"q": "2?", "a": {"value": 3}}])
    with pytest.warns(UserWarning, match=r"1 rows .* repeat a question and are left out"):
        assert len(own(path).problems("all", 9)) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(grader="best"), "grader must be one of .*got 'best'"),
        (dict(grader="regex:("), "is not a pattern"),
        (dict(grader="python:nowhere.py:f"), "'nowhere.py' is not a file"),
        (dict(grader="python:f"), "is written python:FILE.py:FUNCTION"),
        (dict(template="/nowhere.txt"), "template '/nowhere.txt' cannot be read"),
        (dict(length=0), "length must be"),
    ],
)
def test_bad_settings_are_refused_at_once(data, settings, said):
    with pytest.raises(SpecError, match=said):
        own(data, **settings)


def test_a_file_is_needed():
    with pytest.raises(SpecError, match="task jsonl needs path="):
        load_task("jsonl")


def test_patterns_and_functions_can_grade(data, tmp_path):
    task = own(data, grader=r"regex:=\s*(\d+)")
    assert task.extract_answer("1 = 1, 2 = 3.") == "3" and task.extract_answer("none") is None
    (tmp_path / "g.py").write_text(
        "def right(response, answer):\n    return answer in response\n"
        "def read(response):\n    return response.split()[-1]\n"
        "def broken(response, answer):\n    raise ValueError('no')\n"
    )
    judged = own(data, grader=f"python:{tmp_path}/g.py:right")
    problem = judged.problems("all", 1)[0]
    assert judged.equivalent(judged.extract_answer("it is 1"), problem.reference)
    assert judged.same(problem, "it is 1", "1 it is") and not judged.same(problem, "it is 1", "it is 2")
    assert judged.same(problem, "2", "3"), "both wrong"
    assert own(data, grader=f"python:{tmp_path}/g.py:read").extract_answer("so 5") == "5"
    with pytest.raises(ReprieveError, match=r"g.py:broken raised ValueError: no"):
        own(data, grader=f"python:{tmp_path}/g.py:broken").equivalent("a", "b")
    with pytest.raises(SpecError, match="has no function 'missing'"):
        own(data, grader=f"python:{tmp_path}/g.py:missing")


def test_a_template_and_a_judge(data, tmp_path):
    (tmp_path / "t.txt").write_text("Q: {question}\nA:")
    task = own(data, template=str(tmp_path / "t.txt"), grader="judge", answer="nothing")
    assert task.problems("all", 1)[0].prompt == "Q: How much is 0 + 1?\nA:" and not task.graded
    (tmp_path / "t.txt").write_text("no place")
    with pytest.raises(SpecError, match=r"must hold \{question\}"):
        own(data, template=str(tmp_path / "t.txt"))


def test_a_missing_chat_template_is_refused(data):
    with pytest.raises(SpecError, match="needs a tokenizer with a chat template"):
        with_prompts(own(data), NumberTokenizer(), PromptSettings(chat_template=True))
    for settings in (dict(thinking="on"), dict(system_prompt="Be brief.")):
        with pytest.raises(SpecError, match="needs the chat template"):
            PromptSettings(**settings)
