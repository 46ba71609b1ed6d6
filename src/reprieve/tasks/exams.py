"""Tasks that the papers use, from local JSONL or the hub: expressions, short answers, choices, and open prompts."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from reprieve.errors import ReprieveError, require_choice
from reprieve.tasks import TaskProblem, register_task
from reprieve.tasks.answers import final_answer
from reprieve.tasks.graders import (
    AliasGrader,
    ChoiceGrader,
    DottedGrader,
    ExactGrader,
    Grader,
    MathGrader,
    NumberGrader,
)
from reprieve.tasks.table import FileTask, TableTask, UnreadReferenceError, read_jsonl, text_of

_BOXED = "{question}\n\nReason step by step, and put the final answer within \\boxed{{}}."
_LETTER = "{question}\n\n{choices}\n\nAnswer with the letter of the right choice."
_LANGUAGES = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
_LETTERS = string.ascii_uppercase


@register_task
@dataclass
class MathTask(TableTask):
    """Hendrycks et al., 2021 (MATH), and data in its form: `problem`, and `answer` or a boxed `solution`."""

    hub: ClassVar[Any] = ("HuggingFaceH4/MATH-500", None, {"test": "test"})
    name: str = field(default="math", init=False)
    grader: Grader = field(default=MathGrader(), init=False, repr=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question = text_of(row, "problem", where)
        reference = text_of(row, "answer", where) if "answer" in row else final_answer(text_of(row, "solution", where))
        if reference is None:
            raise UnreadReferenceError(f"task {self.name}: {where}: solution gives no answer in \\boxed{{}}")
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
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        fields = {key.lower(): value for key, value in row.items()}
        question = text_of(fields, "problem", where)
        written = text_of(fields, "answer" if "answer" in fields else "solution", where)
        reference = self.grader.extract(f"The final answer is {written}") or self.grader.extract(written)
        if reference is None:
            raise UnreadReferenceError(f"task aime: {where}: answer must be a number, got {written!r}")
        return TaskProblem(self.named(question), _BOXED.format(question=question.strip()), reference, question=question)


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
    grader: Grader = field(default=NumberGrader(), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("language", self.language, _LANGUAGES)
        self.grader = DottedGrader() if self.language in ("de", "es") else NumberGrader()

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        question = text_of(row, "question", where)
        reference = NumberGrader().extract(f"The final answer is {text_of(row, 'answer_number', where)}")
        if reference is None:
            raise UnreadReferenceError(
                f"task mgsm: {where}: answer_number must be a number, got {row['answer_number']!r}"
            )
        return TaskProblem(self.named(question), _BOXED.format(question=question.strip()), reference, question=question)


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

    column: ClassVar[str] = "choices"  # of a row, with the texts to choose from
    grader: Grader = field(default=ChoiceGrader(), init=False, repr=False)

    def _problem(self, question: str, choices: Any, right: Any, where: str) -> TaskProblem:
        """Return a row's problem.

        Args:
            choices: 2 to 26 texts or numbers.
            right: letter of the right one, or its position from 0 as a number.
        """
        listed = isinstance(choices, list) and 2 <= len(choices) <= len(_LETTERS)
        if not listed or not all(isinstance(item, str | int | float) and str(item).strip() for item in choices):
            raise ReprieveError(f"task {self.name}: {where}: {self.column} must be 2 to 26 texts, got {choices!r}")
        letters = tuple(_LETTERS[: len(choices)])
        by_number = isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(letters)
        letter = letters[right] if by_number else str(right).strip().upper()
        if letter not in letters:
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
        right = row.get("answer")
        right = int(right) if isinstance(right, str) and right.isdecimal() else right
        return self._problem(text_of(row, "question", where), row.get(self.column), right, where)


@register_task
@dataclass
class MmluProTask(ChoiceTask):
    """Wang et al., 2024 (MMLU-Pro): `question`, up to ten `options`, and the letter of the right one as `answer`."""

    length: int = 1024

    column: ClassVar[str] = "options"
    hub: ClassVar[Any] = ("TIGER-Lab/MMLU-Pro", None, {"test": "test", "validation": "validation"})
    name: str = field(default="mmlu_pro", init=False)

    def problem_of(self, row: dict[str, Any], where: str) -> TaskProblem:
        return self._problem(text_of(row, "question", where), row.get(self.column), row.get("answer"), where)


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
        texts = choices.get("text") if isinstance(choices, dict) else choices
        return self._problem(text_of(row, "question", where), texts, row.get("answerKey"), where)


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
