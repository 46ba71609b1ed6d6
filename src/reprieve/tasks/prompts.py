"""Open-ended prompts from a JSONL file: no reference answers, so only a judge can compare responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reprieve.errors import ReprieveError, require_choice
from reprieve.tasks.base import FileTask, TaskProblem, register_task
from reprieve.tasks.graders import ExactGrader, Grader
from reprieve.tasks.jsonl import read_jsonl


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
