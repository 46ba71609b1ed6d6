"""Soundness of a correct rollout's reasoning: by a language model (PAD, section 3.3), or by its equations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from reprieve.files import parse_json
from reprieve.tasks.chat import Chat

SOUND, UNSOUND, NO_VERDICT, NOT_ASKED = "sound", "unsound", "no_verdict", ""

_PROMPT = """\
You check the reasoning of a solution, not its final answer, which is known to be right.

Call the reasoning flawed if any of this holds:
- a step is wrong, even if a later one makes up for it: a false calculation, or one that does not follow;
- the solution jumps to a result without grounds, so that it is right by luck;
- it states something, takes it back, and starts again;
- it has steps that the result does not need.

Problem:
{question}

Reference answer: {reference}

Solution to check:
{response}

Reply with one JSON object and nothing else, with exactly these keys:
{{"analysis": "one or two sentences", "flawed": true or false}}"""


class SoundnessJudge(Protocol):
    """Judges the reasoning of a correct response."""

    async def judge(self, question: str, reference: str, response: str) -> str:
        """Return `sound`, `unsound` or `no_verdict`."""
        ...


@dataclass(frozen=True)
class ModelSoundness:
    """Asks a language model for a JSON verdict.

    Args:
        chat: the model.
        num_tries: maximum number of requests until a verdict can be parsed.
    """

    chat: Chat
    num_tries: int = 3

    async def judge(self, question: str, reference: str, response: str) -> str:
        """Return `sound`, `unsound` or `no_verdict`."""
        prompt = _PROMPT.format(question=question, reference=reference, response=response)
        for number in range(self.num_tries):
            flawed = parse_verdict(await self.chat.ask(prompt, attempt=number))
            if flawed is not None:
                return UNSOUND if flawed else SOUND
        return NO_VERDICT


def parse_verdict(reply: str) -> bool | None:
    """Return `flawed` of the JSON object in a reply, fenced or not; None if no valid object is found."""
    braces = re.search(r"\{.*\}", reply, flags=re.DOTALL)
    if not braces:
        return None
    try:
        verdict = parse_json(braces[0])
    except ValueError:
        return None
    if not isinstance(verdict, dict) or verdict.keys() != {"analysis", "flawed"}:
        return None
    return verdict["flawed"] if isinstance(verdict["flawed"], bool) else None


_EQUATION = re.compile(r"(-?\d+)\s*([+\-*/x])\s*(-?\d+)\s*=\s*(-?\d+)(?!\s*[+\-*/x\d])")


@dataclass(frozen=True)
class EquationSoundness:
    """Judges a response unsound if an equation between whole numbers is false. Ours; for arithmetic tasks."""

    async def judge(self, question: str, reference: str, response: str) -> str:
        """Return `sound`, `unsound` or `no_verdict`."""
        return SOUND if all(map(_holds, _EQUATION.findall(response))) else UNSOUND


def _holds(equation: tuple[str, str, str, str]) -> bool:
    left, right, result = int(equation[0]), int(equation[2]), int(equation[3])
    if equation[1] == "/":
        return right != 0 and left == right * result
    return {"+": left + right, "-": left - right}.get(equation[1], left * right) == result
