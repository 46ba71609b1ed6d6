"""Scripted models for miners: their output is a function of the text, so labels can be worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Callable

from reprieve.mining.autojudge import AutoJudgeMiner
from reprieve.mining.settings import AutoJudgeMining
from reprieve.mining.target import ResponseFormat, Target
from reprieve.tasks import Task, TaskProblem

EOS = 0
PROMPT = "40 41"


class WordTokenizer:
    """Token n is the word `n`; 0 ends the text."""

    eos_token_id = EOS

    def encode(self, text, *, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def decode(self, token_ids, *, skip_special_tokens=False):
        return " ".join(str(i) for i in token_ids if not (skip_special_tokens and i == EOS))


class LastWordTask(Task):
    """A task whose answer is the number after the last 9."""

    name = "words"
    graded = True
    splits = ("train",)
    max_new_tokens = 12
    stop: tuple[str, ...] = ()

    def problems(self, split, limit, *, offset=0):
        return [problem(str(number)) for number in range(offset, offset + limit)]

    def wrap(self, question):
        return question

    def extract_answer(self, text):
        found = re.findall(r"\b9 (\d+)", text)
        return found[-1] if found else None

    def equivalent(self, answer, other):
        return answer is not None and answer == other


def problem(problem_id: str = "p", reference: str = "5") -> TaskProblem:
    return TaskProblem(problem_id, PROMPT, reference)


class ScriptedTarget(Target):
    """Continue a response token by token with a function of the text so far."""

    def __init__(self, next_token: Callable[[list[int]], int]) -> None:
        self.next_token = next_token
        self.asked: list[tuple[list[int], int]] = []

    async def complete(self, session, prompt_ids, response_ids, max_new_tokens, draw):
        self.asked.append((list(response_ids), max_new_tokens))
        new: list[int] = []
        while len(new) < max_new_tokens and (not new or new[-1] != EOS):
            new.append(self.next_token([*response_ids, *new]))
        return new


class ScriptedDraft:
    """Predict each token with a function of the response before it."""

    def __init__(self, next_token: Callable[[list[int]], int]) -> None:
        self.next_token = next_token

    async def mismatches(self, prompt_ids, response_ids, start=0):
        for position in range(start, len(response_ids)):
            token = self.next_token(response_ids[:position])
            if token != response_ids[position]:
                yield position, token


def responses(task=None, max_new_tokens=12) -> ResponseFormat:
    return ResponseFormat(WordTokenizer(), task or LastWordTask(), frozenset({EOS}), max_new_tokens)


def miner(target, draft, *, variant="search", judge=None, max_new_tokens=12, task=None) -> AutoJudgeMiner:
    return AutoJudgeMiner(
        AutoJudgeMining(variant=variant),
        ScriptedTarget(target) if callable(target) else target,
        make_draft=lambda noise: ScriptedDraft(draft),
        responses=responses(task, max_new_tokens),
        judge=judge,
    )
