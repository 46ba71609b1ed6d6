"""Tasks that the papers use, from local JSONL or the hub: expressions, short answers, and choices by letter."""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass, field
from typing import Any, ClassVar

from reprieve.errors import ReprieveError, require_choice
from reprieve.tasks.answers import final_answer
from reprieve.tasks.base import TaskProblem, register_task
from reprieve.tasks.choices import ChoiceGrader
from reprieve.tasks.graders import Grader, MathGrader, NumberGrader, register_grader
from reprieve.tasks.table import TableTask, text_of

_BOXED = "{question}\n\nReason step by step, and put the final answer within \\boxed{{}}."
_LETTER = "{question}\n\n{choices}\n\nAnswer with the letter of the right choice."
_DOTTED = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+(?![.,]?\d)")
_LANGUAGES = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
_LETTERS = string.ascii_uppercase


@register_task
@dataclass
class MathTask(TableTask):
    """Hendrycks et al., 2021 (MATH), and data in its form: `problem`, and `answer` or a boxed `solution`."""

    hub: ClassVar[Any] = ("HuggingFaceH4/MATH-500", None, {"test": "test"})
    name: str = field(default="math", init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=MathGrader(), init=False, repr=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question = text_of(row, "problem", where)
        reference = text_of(row, "answer", where) if "answer" in row else final_answer(text_of(row, "solution", where))
        if reference is None:
            raise ReprieveError(f"task {self.name}: {where}: solution gives no answer in \\boxed{{}}")
        prompt = _BOXED.format(question=question.strip())
        category = str(row.get("subject") or row.get("type") or "")
        return TaskProblem(self.named(question), prompt, reference, category=category, question=question)


@register_task
@dataclass
class AimeTask(TableTask):
    """The American Invitational Mathematics Examination: `problem` and a whole `answer`, in any case of letters."""

    length: int = 4096

    hub: ClassVar[Any] = ("math-ai/aime24", None, {"test": "test"})
    name: str = field(default="aime", init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        fields = {key.lower(): value for key, value in row.items()}
        question = text_of(fields, "problem", where)
        written = text_of(fields, "answer" if "answer" in fields else "solution", where)
        reference = self.grader.extract(f"The final answer is {written}") or self.grader.extract(written)
        if reference is None:
            raise ReprieveError(f"task aime: {where}: answer must be a number, got {written!r}")
        return TaskProblem(self.named(question), _BOXED.format(question=question.strip()), reference, question=question)


@register_grader
@dataclass(frozen=True)
class DottedGrader(NumberGrader):
    """A number whose thousands are separated by dots."""

    name: ClassVar[str] = "dotted_number"

    def extract(self, text: str) -> str | None:
        return super().extract(_DOTTED.sub(lambda number: number[0].replace(".", ""), text))


@register_task
@dataclass
class MgsmTask(TableTask):
    """Shi et al., 2022 (MGSM): GSM8K in other languages, `question` and `answer_number`.

    Args:
        language: language of the hub's data, and of the numbers in answers: bn, de, en, es, fr, ja, ru, sw, te, th or
            zh. German and Spanish write 1.100 for 1100.
    """

    language: str = "de"

    hub: ClassVar[Any] = ("juletxara/mgsm", "{language}", {"test": "test", "train": "train"})
    name: str = field(default="mgsm", init=False)
    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("language", self.language, _LANGUAGES)
        self.grader = DottedGrader() if self.language in ("de", "es") else NumberGrader()

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question = text_of(row, "question", where)
        reference = NumberGrader().extract(f"The final answer is {text_of(row, 'answer_number', where)}")
        if reference is None:
            raise ReprieveError(f"task mgsm: {where}: answer_number must be a number, got {row['answer_number']!r}")
        return TaskProblem(self.named(question), _BOXED.format(question=question.strip()), reference, question=question)


@register_grader
@dataclass(frozen=True)
class AliasGrader(Grader):
    """A short answer, compared with any of several names, as TriviaQA's own evaluation does: case, articles and
    punctuation do not count."""

    name: ClassVar[str] = "alias"

    def extract(self, text: str) -> str | None:
        first = text.strip().split("\n", 1)[0]
        return first if _normal(first) else None

    def equivalent(self, answer: str | None, other: str | None) -> bool:
        if answer is None or other is None:
            return False
        return bool(_names(answer) & _names(other))


@register_task
@dataclass
class TriviaQaTask(TableTask):
    """Joshi et al., 2017, closed book: `question` and `answer` with `value` and `aliases`. An answer is one line."""

    length: int = 32

    hub: ClassVar[Any] = ("mandarjoshi/trivia_qa", "rc.nocontext", {"train": "train", "test": "validation"})
    name: str = field(default="triviaqa", init=False)
    stop: tuple[str, ...] = field(default=("\n",), init=False)
    grader: Grader = field(default=AliasGrader(), init=False, repr=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question, given = text_of(row, "question", where), row.get("answer")
        if isinstance(given, dict):
            names = [given.get("value"), *(given.get("aliases") or ())]
        else:
            names = given if isinstance(given, list) else [given]
        texts = [str(name) for name in names if name]
        if not texts:
            raise ReprieveError(f"task triviaqa: {where}: answer must have a value or aliases, got {given!r}")
        prompt = f"Answer the question in a few words.\n\nQuestion: {question.strip()}\nAnswer:"
        return TaskProblem(
            self.named(question), prompt, "\n".join(text.replace("\n", " ") for text in texts), question=question
        )


@dataclass
class ChoiceTask(TableTask):
    """A question with choices; the model writes the letter."""

    length: int = 256

    stop: tuple[str, ...] = field(default=(), init=False)
    grader: Grader = field(default=ChoiceGrader(), init=False, repr=False)

    def _problem(self, question: str, choices: list[str], right: int | str, where: str) -> TaskProblem:
        letter = _LETTERS[right] if isinstance(right, int) and 0 <= right < len(choices) else right
        if not isinstance(letter, str) or letter not in tuple(_LETTERS[: len(choices)]):
            raise ReprieveError(
                f"task {self.name}: {where}: the right choice must be one of the {len(choices)}, got {right!r}"
            )
        shown = "\n".join(f"{mark}. {choice}" for mark, choice in zip(_LETTERS, choices, strict=False))
        prompt = _LETTER.format(question=question.strip(), choices=shown)
        whole = f"{question}\n{shown}"
        return TaskProblem(self.named(whole), prompt, letter, question=whole)


@register_task
@dataclass
class MmluTask(ChoiceTask):
    """Hendrycks et al., 2021 (MMLU): `question`, `choices`, and `answer` as a number or letter."""

    hub: ClassVar[Any] = ("cais/mmlu", "all", {"test": "test", "validation": "validation", "train": "auxiliary_train"})
    name: str = field(default="mmlu", init=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        choices = row.get("choices")
        if not isinstance(choices, list) or len(choices) < 2:
            raise ReprieveError(f"task mmlu: {where}: choices must be a list of two or more, got {choices!r}")
        right = row.get("answer")
        right = int(right) if isinstance(right, str) and right.isdigit() else right
        return self._problem(text_of(row, "question", where), [str(item) for item in choices], right, where)  # type: ignore[arg-type]


@register_task
@dataclass
class MmluProTask(ChoiceTask):
    """Wang et al., 2024 (MMLU-Pro): `question`, up to ten `options`, and the letter of the right one as `answer`."""

    length: int = 1024

    hub: ClassVar[Any] = ("TIGER-Lab/MMLU-Pro", None, {"test": "test", "validation": "validation"})
    name: str = field(default="mmlu_pro", init=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        options: Any = row.get("options")
        listed = isinstance(options, list) and 2 <= len(options) <= len(_LETTERS)
        if not listed or not all(isinstance(item, str) and item.strip() for item in options):
            raise ReprieveError(f"task mmlu_pro: {where}: options must be 2 to 26 texts, got {options!r}")
        right = text_of(row, "answer", where).strip().upper()
        return self._problem(text_of(row, "question", where), options, right, where)


@register_task
@dataclass
class GpqaTask(ChoiceTask):
    """Rein et al., 2023 (GPQA, diamond): `Question`, `Correct Answer` and three `Incorrect Answer N`.

    The order of the choices depends on the question's text alone.
    """

    length: int = 1024

    hub: ClassVar[Any] = ("Idavidrein/gpqa", "gpqa_diamond", {"all": "train"})
    name: str = field(default="gpqa", init=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question = text_of(row, "Question", where).strip()
        right = text_of(row, "Correct Answer", where).strip()
        choices = [right, *(text_of(row, f"Incorrect Answer {number}", where).strip() for number in (1, 2, 3))]
        if len(set(choices)) < len(choices):
            raise ReprieveError(f"task gpqa: {where}: the four answers must differ, got {choices}")
        random.Random(question).shuffle(choices)
        return self._problem(question, choices, choices.index(right), where)


@register_task
@dataclass
class CommonsenseQaTask(ChoiceTask):
    """Talmor et al., 2019: `question`, `choices` with `label` and `text`, and `answerKey`."""

    hub: ClassVar[Any] = ("tau/commonsense_qa", None, {"train": "train", "test": "validation"})
    name: str = field(default="commonsenseqa", init=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        choices = row.get("choices")
        texts = choices.get("text") if isinstance(choices, dict) else None
        if not isinstance(texts, list) or len(texts) < 2:
            raise ReprieveError(f"task commonsenseqa: {where}: choices must hold two texts or more, got {choices!r}")
        return self._problem(
            text_of(row, "question", where), [str(item) for item in texts], str(row.get("answerKey")), where
        )


def _names(answer: str) -> set[str]:
    """Return the normalised names in an answer, or in a reference with one name per line."""
    return {_normal(name) for name in answer.split("\n")} - {""}


def _normal(text: str) -> str:
    words = "".join(" " if sign in string.punctuation + "‘’´`_“”" else sign for sign in text.lower()).split()
    kept = " ".join(word for word in words if word not in ("a", "an", "the"))
    # Some signs can distinguish names and are kept: C++, -5, 5%.
    return kept if not re.search(r"[+#%$€£-]|\d\.\d", text) else " ".join(text.lower().split())
