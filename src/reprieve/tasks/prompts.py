"""Open-ended prompts from a file or the hub: no reference answers, so only a judge can compare responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from reprieve.errors import ReprieveError, require_choice
from reprieve.tasks.base import FileTask, TaskProblem, register_task
from reprieve.tasks.graders import ExactGrader, Grader
from reprieve.tasks.jsonl import read_jsonl
from reprieve.tasks.table import TableTask, text_of


@register_task
@dataclass
class PromptsTask(FileTask):
    """Prompts from a file: a `prompt` a line (or AlpacaEval's `instruction`), or `turns` (MT-Bench, Spec-Bench).

    Benchmarks go through all turns; mining takes the first.
    """

    length: int = 256

    name: str = field(default="prompts", init=False)
    graded: bool = field(default=False, init=False)
    splits: tuple[str, ...] = field(default=("all",), init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=ExactGrader(), init=False, repr=False)  # mining uses a judge to compare meanings

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, self.splits)
        problems = []
        for line, row in read_jsonl(Path(str(self.path))):
            turns = row.get("turns") or [row.get("prompt") or row.get("instruction")]
            if not isinstance(turns, list) or not all(turn and isinstance(turn, str) for turn in turns):
                raise ReprieveError(
                    f"task prompts: line {line} of {self.path} must have prompt, instruction or turns, as texts"
                )
            first, *others = turns
            name = f"prompts-{row.get('question_id', line)}"
            problems.append(TaskProblem(name, first, "", tuple(others), category=str(row.get("category", ""))))
        return problems[offset : offset + limit]


@dataclass
class _OpenTask(TableTask):
    """Prompts from the hub's data sets."""

    length: int = 256

    graded: bool = field(default=False, init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=ExactGrader(), init=False, repr=False)  # mining uses a judge to compare meanings


@register_task
@dataclass
class AlpacaTask(_OpenTask):
    """Taori et al., 2023 (Alpaca): `instruction`, and `input` if there is one."""

    hub: ClassVar[Any] = ("tatsu-lab/alpaca", None, {"all": "train"})
    name: str = field(default="alpaca", init=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        given = text_of(row, "input", where).strip() if row.get("input") else ""
        prompt = text_of(row, "instruction", where).strip() + (f"\n\n{given}" if given else "")
        return TaskProblem(self.named(prompt), prompt, "", question=prompt)


@register_task
@dataclass
class Oasst1Task(_OpenTask):
    """Köpf et al., 2023 (OASST1): the first messages of conversations, in one language.

    Args:
        language: such as en, de or zh.
    """

    language: str = "en"

    hub: ClassVar[Any] = ("OpenAssistant/oasst1", None, {"train": "train", "validation": "validation"})
    name: str = field(default="oasst1", init=False)

    def _rows(self, split: str) -> list[tuple[dict[str, Any], str]]:
        first = [
            (row, where)
            for row, where in super()._rows(split)
            if text_of(row, "role", where) == "prompter" and row.get("parent_id") is None and not row.get("deleted")
        ]
        rows = [(row, where) for row, where in first if text_of(row, "lang", where) == self.language]
        if first and not rows:
            known = ", ".join(sorted({str(row["lang"]) for row, _ in first}))
            raise ReprieveError(f"task oasst1: language must be one of {known}, got {self.language!r}")
        return rows

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        prompt = text_of(row, "text", where).strip()
        return TaskProblem(self.named(prompt), prompt, "", question=prompt)
