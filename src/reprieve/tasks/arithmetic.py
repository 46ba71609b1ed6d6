"""The bundled task: generated grade-school word problems."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from reprieve.errors import require_choice
from reprieve.pair.problems import SPLITS, draw_problem
from reprieve.tasks.base import Task, TaskProblem

_ANSWER = re.compile(r"final answer is\s+(-?\d[\d,]*)")


@dataclass
class ArithmeticTask(Task):
    """Word problems of 2 to 6 steps; the answer is the number after "The final answer is"."""

    name: str = field(default="arithmetic", init=False)
    graded: bool = field(default=True, init=False)
    splits: tuple[str, ...] = field(default=SPLITS, init=False)
    max_new_tokens: int = field(default=256, init=False)
    stop: tuple[str, ...] = field(default=(), init=False)

    def problems(self, split: str, limit: int, *, offset: int = 0) -> list[TaskProblem]:
        require_choice("split", split, SPLITS)
        drawn = (draw_problem(split, index) for index in range(offset, offset + limit))
        return [TaskProblem(problem.problem_id, problem.prompt, str(problem.answer)) for problem in drawn]

    def wrap(self, question: str) -> str:
        return question if question.startswith("Question:") else f"Question: {question.strip()}\nAnswer:"

    def extract_answer(self, text: str) -> str | None:
        found = _ANSWER.findall(text)
        return found[-1].replace(",", "") if found else None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        return answer is not None and other is not None and int(answer) == int(other)
