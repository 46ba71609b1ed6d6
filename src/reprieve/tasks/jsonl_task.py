"""The `jsonl` task: a file of questions and answers, with graders by pattern or function."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, SpecError
from reprieve.tasks.answers import final_answer
from reprieve.tasks.base import TaskProblem, register_task
from reprieve.tasks.graders import GRADERS, ExactGrader, Grader
from reprieve.tasks.table import TableTask, UnreadReferenceError, text_of

_STEPS = '{question}\n\nReason step by step. End with "The final answer is" and the answer.'
_TEMPLATES = {"number": _STEPS, "math": _STEPS}
_JUDGE = "judge"


@register_task
@dataclass
class JsonlTask(TableTask):
    """Questions and answers of your own, a JSON object a line.

    Args:
        question, answer: the fields that hold them; `a.b` is the field b of the object a. With grader=judge, no
            answers are needed.
        grader: exact, number, math, choice, or another package's; `regex:PATTERN`, whose last match in the response
            (its first group, if it has one) is the answer; `python:FILE.py:FUNCTION`, called with a response and the
            row's answer to say whether it is right, or with the response alone to give its answer; or judge: a
            language model compares responses.
        template: a text file with `{question}` in it: the prompt. By default the question, and for number and math a
            line that asks for reasoning and a final answer.
        stop: texts that end a response, separated by `;`, with `\\n` for a line's end.
    """

    question: str = "question"
    answer: str = "answer"
    grader: str = "math"  # type: ignore[assignment]  # a name, until it is made
    template: str | None = None
    stop: str | tuple[str, ...] = ""  # type: ignore[assignment]

    name: str = field(default="jsonl", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str):
            self.stop = tuple(text.replace("\\n", "\n") for text in self.stop.split(";") if text)
        self.chat_stop = self.stop
        self._judged = self.grader == _JUDGE
        self.graded = not self._judged
        self._prompt = _read_template(self.template) if self.template else _TEMPLATES.get(self.grader, "{question}")
        self.grader = make_grader("exact" if self._judged else self.grader)  # type: ignore[assignment]

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question = text_of(row, self.question, where)
        reference = "" if self._judged else self._reference(text_of(row, self.answer, where), where)
        return TaskProblem(self.named(question), self.wrap(question), reference, question=question)

    def _reference(self, written: str, where: str) -> str:
        """Return the right answer as the grader reads it; `written` can be a whole solution, as in GSM8K and MATH.

        Raises:
            UnreadReferenceError: the grader finds no answer in it, so every response would count as wrong.
        """
        grader: Any = self.grader
        name = grader.name
        if name in ("number", "choice"):
            reference = grader.extract(written) or grader.extract(f"The answer is {written.strip()}")
        elif name == "math":
            reference = final_answer(written) or written.strip()
        else:
            return written.strip()
        if not reference or not grader.equivalent(reference, reference):
            raise UnreadReferenceError(
                f"{where}: grader {name} finds no answer in field {self.answer!r}, got {written[:60]!r}"
            )
        return str(reference)

    def wrap(self, question: str) -> str:
        return self._prompt.replace("{question}", question.strip())

    def same(self, problem: TaskProblem, answer: str | None, other: str | None) -> bool:
        """Return whether two answers are equal, or get the same verdict from a grading function."""
        if isinstance(self.grader, FunctionGrader) and self.grader.judges:
            if answer is None or other is None:
                return False
            reference = problem.reference
            return answer == other or self.equivalent(answer, reference) == self.equivalent(other, reference)
        return self.equivalent(answer, other)


def make_grader(spec: str) -> Grader:
    """A grader by name, or a `regex:` or `python:` one.

    Raises:
        SpecError: an unknown name, or a pattern or function that cannot be used.
    """
    kind, _, rest = spec.partition(":")
    if kind == "regex":
        return RegexGrader(rest)
    if kind == "python":
        return FunctionGrader(rest)
    if kind not in (known := (*GRADERS.names(), "regex:PATTERN", "python:FILE.py:FUNCTION", _JUDGE)):
        raise SpecError(f"grader must be one of {', '.join(known)}, got {spec!r}")
    return GRADERS.make(spec)


@dataclass(frozen=True)
class RegexGrader(ExactGrader):
    """The answer is the last match of a pattern: its first group, or all of it."""

    name = "regex"

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise SpecError(f"grader regex: {self.pattern!r} is no pattern: {error}") from None
        if not self.pattern:
            raise SpecError("grader regex: needs a pattern, got an empty one")

    def extract(self, text: str) -> str | None:
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return None
        last = matches[-1]
        found = last[1] if last.re.groups else last[0]
        return (found or "").strip() or None


@dataclass(frozen=True)
class FunctionGrader(Grader):
    """A function of one's own, in a Python file."""

    name = "python"

    source: str  # FILE.py:FUNCTION

    def __post_init__(self) -> None:
        if (num := _num_required(self.source)) not in (1, 2):
            raise SpecError(f"grader {self.source} must take a response, or a response and an answer; it takes {num}")

    @property
    def judges(self) -> bool:
        """True where it compares a response with a reference; else it returns a response's answer."""
        return _num_required(self.source) == 2

    def extract(self, text: str) -> str | None:
        if self.judges:
            return text.strip() or None
        answer = self._call(text)
        return None if answer is None else str(answer)

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        if answer is None or other is None:
            return False
        return bool(self._call(answer, other)) if self.judges else answer == other

    def _call(self, *given: str) -> Any:
        try:
            return _function(self.source)(*given)
        except Exception as error:
            raise ReprieveError(f"grader {self.source} raised {type(error).__name__}: {error}") from error


def _num_required(source: str) -> int:
    """Return the number of arguments that a function must be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(_function(source)).parameters.values()
    return sum(item.kind in kinds and item.default is inspect.Parameter.empty for item in given)


@lru_cache
def _function(source: str) -> Callable[..., Any]:
    path, _, name = source.rpartition(":")
    if not path or not name:
        raise SpecError(f"grader python: is written python:FILE.py:FUNCTION, got {source!r}")
    if not Path(path).is_file():
        raise SpecError(f"grader python: {path!r} is no file")
    spec = importlib.util.spec_from_file_location(f"reprieve_grader_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SpecError(f"grader python: {path!r} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise SpecError(f"grader python: {path!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _read_template(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"template {path!r} cannot be read: {error}") from None
    if "{question}" not in text:
        raise SpecError(f"template {path!r} must hold {{question}} where the question goes")
    return text
