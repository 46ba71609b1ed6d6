"""Extraction of a response's answer: `\\boxed{}`, `####`, a phrase, or a letter, as instruct models write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from reprieve.tasks.numbers import WRAPPED, whole_number

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
_RUN_ON = re.compile(
    r"^[\s#*_>]*(?:Question|Q|Problem|Human|User)\s*\d*\s*[*_]*(?::|[ \t]*$)|<\|im_start\|>|<\|start_header_id\|>",
    re.MULTILINE,
)
_QUOTES = "\"'“”‘’«»"

# Letters of multiple-choice questions.
_MARKUP = re.compile(r"\*\*|__|`|\$")
_BOXED_CHOICE = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}")
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
    if mentions and (run_on := _RUN_ON.search(said, mentions[0].start)):
        mentions = _mentions(said[: run_on.start()])
    ranks = [(mention.final and mention.firm, mention.firm, mention.final) for mention in mentions]
    best = max(range(len(mentions)), key=lambda number: (ranks[number], number), default=None)
    return None if best is None else mentions[best].answer


def chosen_letter(text: str) -> str | None:
    """Return the letter that a response to a multiple-choice question chooses, in upper case; None if it has none.

    It is in a box, after "answer is", after "choose", at the beginning, or alone; the last match of each kind counts.
    Rejected letters ("A is wrong") are ignored. Two adjacent letters ("A or B") are not an answer.
    """
    run_on = _RUN_ON.search(text)
    before = None if run_on is None else _chosen(text[: run_on.start()])
    return before or _chosen(text)


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


def _chosen(text: str) -> str | None:
    """Return the letter that a text chooses, in upper case; None where it chooses none, or several."""
    plain = _MARKUP.sub("", WRAPPED.sub(r"\1", text)).strip()
    if boxed := _BOXED_CHOICE.findall(plain):
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
