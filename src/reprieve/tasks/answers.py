"""Extraction of a response's final answer: `\\boxed{}`, `####`, or a phrase, as instruct models write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from reprieve.tasks.numbers import whole_number

# Version of the extraction; labels made with another version may differ.
ANSWERS_VERSION = 3
_LONGEST = 1000  # characters of an answer

THINKING_ENDS = ("</think>", "</thinking>", "</thought>", "<channel|>", "assistantfinal")
THINKING_BEGINS = ("<think>", "<thinking>", "<thought>")

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOXED_DIGITS = re.compile(r"\\(?:boxed|fbox)\s*(-?\d[\d.,]*)")  # without braces, as people write it
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is none
_HASHES = re.compile(r"^\s*#{4}(?!#)[ \t]*", re.MULTILINE)
# "The final answer is:", "**Final Answer:**", and a heading of its own line.
_FINAL = re.compile(
    r"\b(?:final|correct)\s+answer(?:\s+to\s+[^.:\n]{1,60}?)?[\s*_]*(?:is\b|would\s+be|=|:)[*_]*[\s:]*(?:that\b|simply\b)?"
    r"|^[\s#*_]*final\s+answer[ \t*_]*$",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER = re.compile(
    r"\banswer[*_ \t]*(?:is\b|would\s+be|=|:)[*_]*[\s:]*(?:that\b|simply\b)?|答案[是为:：]", re.IGNORECASE
)
_SENTENCE_END = re.compile(
    r"(?<!\bSt)(?<!\bDr)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bRs)(?<!\bNo)(?<!approx)[.!?。](?=\s|$|\*|\\\)|\$(?!\d))|\n\s*\n"
)
# Delimiters around an answer that carry no meaning: LaTeX, Markdown, quotation marks.
_DELIMITERS = re.compile(r"\$\$|\\\[|\\\]|\\\(|\\\)|`+|\*\*+|__+|~~")
_BOLD = re.compile(r"\s*\*\*([^*\n]*\w[^*\n]*)\*\*")
_BOLD_INSIDE = re.compile(r"\*\*([^*\n]+)\*\*")
_STRUCK = re.compile(r"~~[^~\n]*~~")
# Start of a further question that the model makes up: the answer before it counts.
RUN_ON = re.compile(
    r"^[\s#*_>]*(?:Question|Q|Problem|Human|User)\s*\d*\s*[*_]*(?::|[ \t]*$)|<\|im_start\|>|<\|start_header_id\|>",
    re.MULTILINE,
)
_QUOTES = "\"'“”‘’«»"


@dataclass(frozen=True, order=True)
class _Mention:
    """A place in a response that names an answer."""

    start: int
    answer: str
    boxed: bool = False
    final: bool = True  # False after weaker phrases, such as "the answer is"

    @property
    def firm(self) -> bool:
        return self.boxed or any(character.isdigit() for character in self.answer)


def final_answer(text: str) -> str | None:
    """Return the final answer of a response, without delimiters; None if it has none.

    The last match counts: `\\boxed{}`, a line that begins with `####`, or "the final answer is", whose answer may be on
    the next line. Weaker phrases ("the answer is") count only without such a match, and answers without a digit ("the
    answer is clear") only if nothing else matches. The thinking before an answer is ignored.
    """
    said = after_thinking(text)
    if said is None:
        return None
    mentions = _mentions(said)
    if mentions and (run_on := RUN_ON.search(said, mentions[0].start)):
        mentions = _mentions(said[: run_on.start()])
    ranks = [(mention.final and mention.firm, mention.firm, mention.final) for mention in mentions]
    best = max(range(len(mentions)), key=lambda number: (ranks[number], number), default=None)
    return None if best is None else mentions[best].answer


def _mentions(said: str) -> list[_Mention]:
    """Return the places of a text that name an answer, in order."""
    finals, others = _FINAL.finditer(said), _ANSWER.finditer(said)
    mentions = [
        *(_Mention(start, answer, boxed=True) for start, answer in _boxed(said)),
        *(_Mention(match.start(), _cleaned(match[1]), boxed=True) for match in _BOXED_DIGITS.finditer(said)),
        *(_Mention(match.start(), _result_line(_behind(said, match))) for match in _HASHES.finditer(said)),
        *(_Mention(match.end(), _first_sentence(_behind(said, match))) for match in finals),
        *(_Mention(match.end(), _first_sentence(_behind(said, match)), final=False) for match in others),
    ]
    return sorted(mention for mention in mentions if mention.answer)


def after_thinking(text: str) -> str | None:
    """Return the text after a response's thinking; None if the thinking was cut off."""
    end = max((text.rfind(mark) + len(mark) for mark in THINKING_ENDS if mark in text), default=0)
    rest = text[end:]
    return None if any(mark in rest for mark in THINKING_BEGINS) else rest


def _boxed(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position and content of each closed box."""
    begins = {match.end() - 1: match.start() for match in _BOXED.finditer(text)}
    if not begins:
        return
    open_braces: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening in begins and match.start() - opening <= _LONGEST:
                yield begins[opening], _cleaned(text[opening + 1 : match.start()])


def _behind(text: str, match: re.Match[str]) -> str:
    """Return the text after a phrase, up to the longest possible answer."""
    return text[match.end() : match.end() + _LONGEST]


def _result_line(text: str) -> str:
    """Return the line if it is a number or the last line of the response; other lines are headings."""
    line, _, rest = text.partition("\n")
    answer = _cleaned(line)
    return answer if not rest.strip() or whole_number(answer) else ""


def _first_sentence(text: str) -> str:
    """Return the text up to the end of its sentence or line; leading delimiters and empty lines are skipped."""
    bold = _BOLD.match(text)
    first = _STRUCK.sub(" ", text).lstrip().split("\n", 1)[0]
    marked = {inside for inside in _BOLD_INSIDE.findall(first) if any(character.isdigit() for character in inside)}
    if bold is None and len(marked) == 1:  # the only number in bold
        return _cleaned(marked.pop())
    opened = _DELIMITERS.sub(" ", bold[1] if bold else _STRUCK.sub(" ", text)).strip()
    sentence = _SENTENCE_END.split(opened, maxsplit=1)[0].split("\n", 1)[0]
    return "" if _BOXED.search(sentence) else _cleaned(sentence)  # boxes are matched separately


def _cleaned(answer: str) -> str:
    """Strip delimiters, quotation marks and final punctuation; empty if no letter or digit is left."""
    bare = _DELIMITERS.sub(" ", answer).strip().strip(_QUOTES).strip()
    bare = bare.rstrip(".,;:!").strip(" *_" + _QUOTES)
    if bare.count("$") == 2 and bare.startswith("$") and bare.endswith("$"):
        bare = bare.strip("$").strip().rstrip(".").strip()
    elif bare.endswith("$") and not bare.endswith("\\$"):
        bare = bare.rstrip("$").strip()
    without_commands = re.sub(r"\\(?:text|mathrm|mathbf|left|right|quad|,|!|;|boxed)\b", "", bare)
    return bare if any(character.isalnum() for character in without_commands) else ""
