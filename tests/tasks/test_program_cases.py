"""Programs in responses: the right block is extracted and run as each benchmark's own grader runs it."""

import json
from pathlib import Path

import pytest

from reprieve.tasks.programs import HumanEvalTask, LiveCodeBenchTask, MbppTask

CASES = json.loads((Path(__file__).parent / "program_cases.json").read_text())
ADD = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 5) == 4\n"
HUMANEVAL = json.dumps({"prompt": 'def add(a, b):\n    """Adds."""\n', "test": ADD, "entry_point": "add"})
MBPP = json.dumps({"tests": ["assert add(1, 2) == 3", "assert add(-1, 5) == 4"], "setup": "", "hidden": []})


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "none.jsonl"
    path.write_text("")
    kinds = {"humaneval": HumanEvalTask, "mbpp": MbppTask, "livecodebench": LiveCodeBenchTask}
    return {name: kind(path=str(path)) for name, kind in kinds.items()}


def reference_of(case):
    if case["grader"] != "livecodebench":
        return {"humaneval": HUMANEVAL, "mbpp": MBPP}[case["grader"]]
    kind = "functional" if case.get("mode") == "functional" else "stdin"
    test = {"input": case.get("stdin", ""), "output": case["expected"], "testtype": kind}
    return json.dumps({"tests": [test], "function": case.get("function")})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['grader']}: {case['input'][:50]!r}")
def test_a_response_passes_where_its_program_does(tasks, case):
    task = tasks[case["grader"]]
    answer = task.extract_answer(case["input"])
    assert task.equivalent(answer, reference_of(case)) is case["right"], answer
