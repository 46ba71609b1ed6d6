"""Programming tasks: HumanEval, and LiveCodeBench's format. Answers are programs, graded by running them sandboxed.

The program of a response is in its fenced code blocks (CommonMark).
"""

from __future__ import annotations

import ast
import base64
import builtins
import functools
import json
import pickletools
import re
import textwrap
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from reprieve.errors import ReprieveError, require_choice
from reprieve.files import parse_json
from reprieve.tasks import TaskProblem, register_task
from reprieve.tasks.answers import after_thinking
from reprieve.tasks.sandbox import ProgramResult, ResourceLimits, Sandbox
from reprieve.tasks.table import FileTask, read_jsonl, text_of

BREAK = "\n\f\n"  # between the blocks of an extracted answer; a form feed is white space to Python

_MOST_KNOWN = 4096  # programs whose verdicts are kept
_MARKS = ("```", "~~~")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NAME = re.compile(r"[A-Za-z_]\w*")
_DEFINED = re.compile(r"^def (\w+)", re.MULTILINE)


@dataclass
class ProgramsTask(FileTask):
    """Base of the programming tasks.

    Args:
        seconds, memory_mb: limits of each run of a program.
        unsafe: run programs on a host that cannot isolate them.
    """

    seconds: float = 10.0
    memory_mb: int = 512
    unsafe: bool = False

    graded: bool = field(default=True, init=False)
    runs_programs: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=("test",), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Mining compares many programs with the target's own.
        self.known_verdicts = functools.lru_cache(_MOST_KNOWN)(self.verdicts)
        self._sandbox = Sandbox(ResourceLimits(seconds=self.seconds, memory_mb=self.memory_mb), unsafe=self.unsafe)

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, self.splits)
        rows = [(line, row) for line, row in read_jsonl(Path(str(self.path))) if self.takes(row)]
        return [self._problem(row, f"{self.path}, line {line}") for line, row in rows[offset : offset + limit]]

    def takes(self, row: dict[str, Any]) -> bool:
        """Return whether a row of the file is one of the task's problems."""
        return True

    def extract_answer(self, text: str) -> str | None:
        """Return the programs of a response's fenced blocks, or all of it; `program_of` chooses among them."""
        said = after_thinking(text)
        return None if said is None else BREAK.join(code_blocks(said)).rstrip() or None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        """Return whether a program passes; `other` is the problem's reference: its tests."""
        if answer is None or other is None:
            return False
        verdicts = self.known_verdicts(answer, other)
        return bool(verdicts) and all(verdicts)

    def same(self, problem: TaskProblem, answer: str | None, other: str | None) -> bool:
        """Return whether two programs get the same result in every test (AutoJudge, section 4.2)."""
        if answer is None or other is None:
            return False
        verdicts, other_verdicts = (self.known_verdicts(program, problem.reference) for program in (answer, other))
        return answer == other or verdicts == other_verdicts

    def verdicts(self, answer: str, reference: str) -> list[bool]:
        """Return for each of the reference's tests whether a program passes it."""
        raise NotImplementedError

    def _problem(self, row: dict[str, Any], where: str) -> TaskProblem:
        raise NotImplementedError


@register_task
@dataclass
class HumanEvalTask(ProgramsTask):
    """Chen et al., 2021: complete a function. A bare completion, or a whole program in a fenced block, is an answer."""

    name: str = field(default="humaneval", init=False)
    stop: tuple[str, ...] = field(default=("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint("), init=False)

    def verdicts(self, answer: str, reference: str) -> list[bool]:
        parts = json.loads(reference)
        chosen = program_of(answer, {parts["entry_point"]})
        whole = parts["entry_point"] in defined_names(chosen)
        # A rewritten function may rely on the imports above the given one.
        program = future_first(parts["prompt"] + ("    pass\n\n" if whole else "") + chosen)
        # Tests may use helpers of the prompt; these must not come from the answer.
        name = parts["entry_point"]
        setup = f"{parts['prompt']}\n    pass\n{name} = __candidate__({name!r})"
        checks = f"{parts['test']}\ncheck({name})"
        return [self._sandbox.passes(program, checks, setup)]

    def _problem(self, row: dict[str, Any], where: str) -> TaskProblem:
        parts = {key: text_of(row, key, where) for key in ("prompt", "test", "entry_point")}
        return TaskProblem(text_of(row, "task_id", where), parts["prompt"], json.dumps(parts))


@register_task
@dataclass
class MbppTask(ProgramsTask):
    """Austin et al., 2021 (MBPP, and its sanitised form): a function from its description and asserts it must pass."""

    name: str = field(default="mbpp", init=False)
    stop: tuple[str, ...] = field(default=("\n[DONE]", "\n```\n"), init=False)

    def verdicts(self, answer: str, reference: str) -> list[bool]:
        parts = json.loads(reference)
        named = [f"{name} = __candidate__({name!r})" for name in parts.get("hidden", ())]
        setup = "\n".join([_imports(parts["setup"]), *named])
        program = future_first(f"{parts['setup']}\n{program_of(answer, set(_NAME.findall(' '.join(parts['tests']))))}")
        return [self._sandbox.passes(program, test, setup) for test in parts["tests"]]

    def _problem(self, row: dict[str, Any], where: str) -> TaskProblem:
        text = text_of(row, "prompt" if "prompt" in row else "text", where)
        tests = row.get("test_list")
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise ReprieveError(f"task mbpp: {where}: test_list must be a list of asserts, got {tests!r}")
        setup = "\n".join(row.get("test_imports") or ()) or str(row.get("test_setup_code") or "")
        shown = "\n".join(tests)
        prompt = f"{text.strip()} Your code should pass these tests:\n\n{shown}\n\nAnswer with one ```python block.\n"
        # A function may have the name of a builtin; the tests then mean the answer's function.
        hidden = [name for name in _DEFINED.findall(str(row.get("code") or "")) if hasattr(builtins, name)]
        reference = json.dumps({"tests": tests, "setup": setup, "hidden": hidden})
        return TaskProblem(f"mbpp-{row.get('task_id', where)}", prompt, reference, question=text)


@register_task
@dataclass
class LiveCodeBenchTask(ProgramsTask):
    """Jain et al., 2024 (arXiv 2403.07974): problems with stdin/stdout or functional tests, public and private.

    Args:
        since, until: range of contest dates, such as 2024-08-01; `until` is exclusive. None for no limit.
        max_tests: maximum number of tests per problem, from the first; None for all.
    """

    since: str | None = None
    until: str | None = None
    max_tests: int | None = None

    name: str = field(default="livecodebench", init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    length: int = 2048

    def takes(self, row: dict[str, Any]) -> bool:
        return (self.since or "") <= str(row.get("contest_date", "9"))[:10] < (self.until or "~")

    def extract_answer(self, text: str) -> str | None:
        return super().extract_answer(text) if is_fenced(text) else None

    def verdicts(self, answer: str, reference: str) -> list[bool]:
        parts = json.loads(reference)
        return [self._passes(answer, test, parts["function"]) for test in parts["tests"]]

    def _passes(self, answer: str, test: dict[str, str], function: str | None) -> bool:
        if test["testtype"] == "stdin":
            finished = self._sandbox.run(future_first(_PRELUDE + program_of(answer, set())), test["input"])
            return _printed(finished, test["output"])
        call = f"getattr(Solution(), {function!r}) if 'Solution' in globals() else globals()[{function!r}]"
        checks = (
            "import json as _json\n"
            f"_arguments = [_json.loads(line) for line in {test['input']!r}.split(chr(10)) if line.strip()]\n"
            f"_call = __candidate__({call!r})\n"
            "_got = _call(*_arguments)\n"
            "_got = list(_got) if isinstance(_got, tuple) else _got\n"
            f"assert _got == _json.loads({test['output']!r}), _got"
        )
        names = {str(function), "Solution"}
        return self._sandbox.passes(future_first(_PRELUDE + program_of(answer, names)), checks)

    def _problem(self, row: dict[str, Any], where: str) -> TaskProblem:
        tests = _tests(row.get("public_test_cases", "[]"), where) + _tests(row.get("private_test_cases", "[]"), where)
        if not tests:
            raise ReprieveError(f"task {self.name}: {where} has no tests")
        metadata = row.get("metadata") or {}
        try:
            function = (parse_json(metadata) if isinstance(metadata, str) else metadata).get("func_name")
        except ValueError as error:
            raise ReprieveError(f"task {self.name}: {where}: metadata is not JSON ({error})") from None
        if function is None and any(test["testtype"] != "stdin" for test in tests):
            raise ReprieveError(f"task {self.name}: {where} has functional tests and no func_name in its metadata")
        starter = str(row.get("starter_code") or "").strip()
        prompt = _INSTRUCTION.format(question=text_of(row, "question_content", where).strip())
        prompt += _WITH_STARTER.format(starter=starter) if starter else _WITH_STDIN
        reference = json.dumps({"tests": tests[: self.max_tests], "function": function})
        return TaskProblem(f"lcb-{text_of(row, 'question_id', where)}", prompt, reference)


_INSTRUCTION = "Write a correct Python program for this problem.\n\n{question}\n\n"
_WITH_STARTER = "Complete this code and answer with all of it in one ```python block.\n\n```python\n{starter}\n```\n"
_WITH_STDIN = "Read standard input, write standard output, and answer with one ```python block.\n"
# What the benchmark's own grader puts before each program.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing", "builtins"),
)
_PRELUDE = (
    "".join(f"from {name} import *\n" for name in _MODULES)
    + "".join(f"import {name}\n" for name in _MODULES)
    + "sys.setrecursionlimit(50_000)\nsys.set_int_max_str_digits(50_000)\n"
)


def _imports(setup: str) -> str:
    """Return the imports of a setup, which the tests need too; its definitions belong to the candidate."""
    return "\n".join(line for line in setup.splitlines() if line.startswith(("import ", "from ")))


def _printed(finished: ProgramResult, wanted: str) -> bool:
    """Return whether a program exited with 0 and printed the expected lines, compared as in the benchmark's grader.

    LiveCodeBench's `testing_util.py` compares lines as text, and otherwise as exact decimals: 0.30 equals 0.3, but the
    output of 0.1 + 0.2 does not.
    """
    if finished.exit_code != 0:
        return False
    printed, expected = ([line.strip() for line in text.strip().split("\n")] for text in (finished.stdout, wanted))
    return len(printed) == len(expected) and all(map(_same_line, printed, expected))


def _same_line(left: str, right: str) -> bool:
    if left == right:
        return True
    try:
        left_numbers, right_numbers = ([Decimal(word) for word in line.split()] for line in (left, right))
        return left_numbers == right_numbers
    except InvalidOperation:
        return False


def _tests(packed: Any, where: str) -> list[dict[str, str]]:
    """Test cases from a list, its JSON, or LiveCodeBench's packed form."""
    try:
        cases = parse_json(_unpack(packed)) if isinstance(packed, str) else packed
        return [
            {"input": str(case["input"]), "output": str(case["output"]), "testtype": str(case["testtype"])}
            for case in cases
        ]
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ReprieveError(f"task livecodebench: {where}: test cases cannot be read ({error})") from None


def _unpack(text: str) -> str:
    """Private tests are base64 of one text, pickled and compressed. The text is read out; nothing is unpickled."""
    if not text or text.lstrip()[:1] in "[{":
        return text or "[]"
    content = zlib.decompress(base64.b64decode(text, validate=True))
    texts = [argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)]
    if len(texts) != 1:
        raise ValueError(f"{len(texts)} texts where one is wanted")
    return texts[0]


def code_blocks(text: str) -> list[str]:
    """Return the Python blocks of a response, in order; without any, other blocks or the bare response.

    Blocks count if they are tagged as Python, or untagged and valid Python. This leaves out blocks that show output.
    """
    text = text.replace("\r\n", "\n")
    fences = [(token.info.strip().lower(), _without_marks(token.content)) for token in _fences(textwrap.dedent(text))]
    fences = [(info.split()[0] if info else "", content) for info, content in fences if content.strip()]
    if tagged := [content for info, content in fences if info.startswith("py") or (not info and _tree(content))]:
        return tagged
    before = text.partition("```")[0]
    if before.strip() and (_tree(textwrap.dedent(before)) or not fences):  # a bare completion and a stray fence
        return [before.rstrip()]
    return [content for _, content in fences] or [_without_marks(text)]


def _without_marks(text: str) -> str:
    """Return a text without lines that open or close a fence."""
    return "\n".join(line for line in text.split("\n") if not line.strip().startswith(_MARKS)).rstrip()


def is_fenced(text: str) -> bool:
    """Return whether a response contains a block that is not empty."""
    return any(token.content.strip() for token in _fences(textwrap.dedent(text)))


def program_of(answer: str, names: Collection[str]) -> str:
    """Return the program among an answer's blocks: the last one that defines one of these names, or the last whole one.

    Earlier blocks that contain only imports and other definitions are prepended.
    """
    blocks = answer.split(BREAK)
    defining = [number for number, block in enumerate(blocks) if defined_names(block) & set(names)]
    whole = [number for number, block in enumerate(blocks) if _tree(block)]
    last = (defining or whole or [len(blocks) - 1])[-1]
    helpers = [block for block in blocks[:last] if _only_defines(block) and not defined_names(block) & set(names)]
    return "\n\n".join([*helpers, blocks[last]])


def defined_names(program: str) -> set[str]:
    """Return the functions and classes that a program defines at its top level; none where it is not one."""
    tree = _tree(program)
    return set() if tree is None else {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}


def future_first(program: str) -> str:
    """Return a program with its `__future__` imports first, where Python wants them."""
    lines = program.split("\n")
    future = [line for line in lines if line.startswith("from __future__ ")]
    return "\n".join([*future, *(line for line in lines if not line.startswith("from __future__ "))])


def _fences(text: str) -> Iterator[Any]:
    return (token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence")


def _only_defines(block: str) -> bool:
    tree = _tree(block)
    wanted = (*_DEFINITIONS, ast.Import, ast.ImportFrom)
    return tree is not None and bool(tree.body) and all(isinstance(node, wanted) for node in tree.body)


def _tree(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
