"""The letter that a response to a multiple-choice question chooses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from reprieve.tasks.answers import RUN_ON
from reprieve.tasks.graders import ExactGrader, register_grader

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|mbox)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\*\*|__|`|\$")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}")
_LETTER = r"[(\[]?\b[A-Z]\b[)\]]?(?!['’])"
_MORE = rf"(?:\s*(?:,|/|and|or|nor)\s*{_LETTER})*"
_REJECTED = (
    re.compile(
        r"(?:\b(?:not|never|neither|nor|cannot|rather than|instead of)|n['’]t)\s+(?:be\s+)?"
        rf"(?:(?:option|choice|answer)\s+)?{_LETTER}{_MORE}(?:,?\s+but\b)?",
        re.IGNORECASE,
    ),
    re.compile(rf"{_LETTER}{_MORE}\s+(?:is|are|was|were)\s+(?:wrong|incorrect|false|not\b[^.,;\n]*)"),
)
# "A" and "I" can be words, unless a reason follows; a lower-case letter is a choice only at the end of a line.
_REASON = r"(?:because|since|as|for|which|due|and\s+not|not|and|or|is)\b"
_NAMED = rf"(?:([B-HJ-Z])\b(?!['’])|([AI])\b(?!['’])(?!\s+(?!{_REASON})[a-z])|([a-z])\b(?=[\s*_).\"”`}}\]]*(?:\n|$)))"
_OPENING = r"[\s*_:\"“\[(–-]*"
_ASKED = r"(?:the\s+)?(?:correct\s+|right\s+|best\s+)?(?:(?:answer|option|choice)\s*(?:is\b)?\s*)?"
_CHOSEN = (
    re.compile(rf"\b(?i:answer|option|choice)[\s*_]*(?i:is|would\s+be|:)?(?:\s+(?i:option|choice))?{_OPENING}{_NAMED}"),
    re.compile(rf"答案(?:是|为|：|:)?{_OPENING}([A-Za-z])(?![A-Za-z])"),
    re.compile(
        r"(?<![\w'’])[(\[]?([A-Z])[)\]]?\s+(?:is|must\s+be|would\s+be)\s+(?:the\s+)?(?:correct|right|best|answer)\b"
    ),
    re.compile(
        r"\b(?i:(?:must|has\s+to|should|would|will|can\s+only)\s+be|choose|pick|select|go(?:ing)?\s+with)\s+(?i:option|choice|answer)?"
        rf"{_OPENING}{_NAMED}"
    ),
    re.compile(
        rf"\b(?i:so|therefore|hence|thus)\b,?\s*(?i:it['’]s|it\s+is|it\s+must\s+be)?\s*(?i:{_ASKED}){_OPENING}{_NAMED}"
    ),
    re.compile(r"^\W*([A-Z])(?:[).:,]|\s*$)"),
    re.compile(r"^\W*([a-z])[).]\s+\S"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"^\W*([A-Z])[).:]?\W*$", re.MULTILINE),
    re.compile(r"^\W*([a-z])[).]?\W*$"),
)
_OTHER_BEHIND = re.compile(
    rf"^[)\]\s]*(?:,|/|&|\bor\b|\band\b)\s*(?:or\s+|and\s+)?(?:option\s+|choice\s+)?{_LETTER}(?!\s+(?:is|are)\b)"
)
_OTHER_BEFORE = re.compile(rf"{_LETTER}\s*(?:,|/|&|\bor\b|\band\b)\s*[(\[]?$")


@register_grader
@dataclass(frozen=True)
class ChoiceGrader(ExactGrader):
    """A letter: in a box, after "answer is", after "choose", at the beginning, or alone; the last match of each kind.

    Rejected letters ("A is wrong") are ignored. Two adjacent letters ("A or B") are not an answer.
    """

    name: ClassVar[str] = "choice"

    def extract(self, text: str) -> str | None:
        run_on = RUN_ON.search(text)
        before = None if run_on is None else _chosen(text[: run_on.start()])
        return before or _chosen(text)


def _chosen(text: str) -> str | None:
    """Return the letter that a text chooses, in upper case; None where it chooses none, or several."""
    plain = _MARKUP.sub("", _WRAPPED.sub(r"\1", text)).strip()
    if boxed := _BOXED.findall(plain):
        letters = re.findall(r"\b[A-Za-z]\b", _without_rejected(boxed[-1]))
        return letters[0].upper() if letters and len(set(letters)) == 1 else None
    plain = _without_rejected(plain)
    for pattern in _CHOSEN:
        if matches := list(pattern.finditer(plain)):
            last = matches[-1]
            start, end = last.span(last.lastindex or 0)
            if _OTHER_BEHIND.match(plain[end:]) or _OTHER_BEFORE.search(plain[:start]):
                return None
            return str(last[last.lastindex or 0]).upper()
    return None


def _without_rejected(text: str) -> str:
    """Return a text without the letters that it rules out."""
    for pattern in _REJECTED:
        text = pattern.sub(" ", text)
    return text
