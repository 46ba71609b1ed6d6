"""Share of rejected tokens that would not have changed the answer (ARC-Decode, section 3.1 and Figure 2).

Each drafted token that lossless decoding rejects replaces the committed token, and both texts are continued greedily to
their ends, so that the token is the only difference. They agree if they reach the same final answer; for open-ended
tasks, models named by flags compare the texts.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from arms import answer_params, flags_in_force, require_file, share_with_interval, write_json
from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.cli.main import run_command
from reprieve.concurrency import gather_all
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.engine.continuations import ContinuationDecoder, Session
from reprieve.errors import ReprieveError, SpecError
from reprieve.mining.target import LocalTarget, ResponseFormat
from reprieve.models.cached_model import eos_token_ids
from reprieve.settings import PairSettings, ProblemSettings, SamplingSettings
from reprieve.tasks import Task, TaskProblem
from reprieve.tasks.prompting import prompt_ids_of
from reprieve.types import ROOT, Generation
from tables import share_text

ALIKE = 0.9  # lowest cosine similarity of texts that count as equivalent
CONTRADICTS = 0.5  # texts agree below this probability of contradiction
_ROWS = 32  # texts in one forward
_LONG = "word " * 2000  # longer than the context of most such models


@dataclass(frozen=True)
class Rejection:
    """A position at which drafted tokens were rejected.

    Args:
        start: number of answer tokens committed before it.
        taken_id: token committed at the position.
        refused_ids: drafted tokens other than the committed one.
    """

    start: int
    taken_id: int
    refused_ids: tuple[int, ...]


def rejections(generation: Generation) -> Iterator[Rejection]:
    """Yield the rejections of a traced answer, in order. Positions after the end of the answer are left out."""
    assert generation.trace is not None
    start = 0
    for traced in generation.trace:
        last = traced.path[-1] if traced.path else ROOT
        if len(traced.committed) > len(traced.path):
            taken_id = traced.committed[len(traced.path)].token_id
            drafted = (traced.drafted_ids[node] for node, parent in enumerate(traced.parents) if parent == last)
            if refused := tuple(dict.fromkeys(token_id for token_id in drafted if token_id != taken_id)):
                yield Rejection(start + len(traced.path), taken_id, refused)
        start += len(traced.committed)


class Agreement(Protocol):
    """Measure of whether complete responses to one problem are equivalent."""

    @property
    def name(self) -> str: ...

    def agree(self, problem: TaskProblem, first: str, others: Sequence[str]) -> list[bool]:
        """Return, for each of `others`, whether it agrees with the first."""
        ...


@dataclass(frozen=True)
class SameAnswer:
    """Agreement on the final answer, right or wrong; two responses without an answer do not agree."""

    task: Task
    name: str = "answer"

    def agree(self, problem: TaskProblem, first: str, others: Sequence[str]) -> list[bool]:
        extract = self.task.extract_answer
        return [self.task.same(problem, extract(first), extract(other)) for other in others]


class SimilarText:
    """Agreement by sentence embeddings: mean of the last hidden states, cosine similarity 0.9 or more.

    Args:
        model: hub id or folder of an encoder, such as sentence-transformers/all-mpnet-base-v2.
        device: device of the model.

    Raises:
        SpecError: the model generates text, so the mean of its states is not a sentence embedding.
        ReprieveError: the model cannot be loaded, or cannot read a long text.
    """

    name = "embedding"

    def __init__(self, model: str, device: torch.device | str = "cpu") -> None:
        config = _config_of("--embedding", model)
        kinds = config.architectures or ()
        if writes := [name for name in kinds if re.search("CausalLM|LMHead|ConditionalGeneration", name)]:
            raise SpecError(f"--embedding must name an encoder of sentences, {model!r} is a {writes[0]}")
        self.tokenizer, self.model = _load("--embedding", model, config, AutoModel, device)
        _try("--embedding", model, lambda: self._embed([_LONG]))

    def agree(self, problem: TaskProblem, first: str, others: Sequence[str]) -> list[bool]:
        vectors = self._embed([first, *others])
        return (vectors[1:] @ vectors[0] >= ALIKE).tolist()

    @torch.inference_mode()
    def _embed(self, texts: Sequence[str]) -> Tensor:  # [n, D], of length 1
        read = _encode(self.tokenizer, self.model, list(texts))
        mask = read["attention_mask"].unsqueeze(-1).float()
        hidden = self.model(**read).last_hidden_state.float()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp_min(1.0), dim=-1)


class NoContradiction:
    """Agreement by natural language inference: no contradiction between the texts, in either order.

    Args:
        model: hub id or folder of a classifier with a label that begins with "contradict".
        device: device of the model.

    Raises:
        ReprieveError: the model cannot be loaded, or cannot read a long text.
        SpecError: the model has no such label.
    """

    name = "nli"

    def __init__(self, model: str, device: torch.device | str = "cpu") -> None:
        config = _config_of("--nli", model)
        labels: dict[int, str] = config.id2label or {}
        self.label = next((index for index, text in labels.items() if text.lower().startswith("contradict")), None)
        if self.label is None:
            names = ", ".join(labels.values())
            raise SpecError(f"--nli must name a model with a label for contradiction, {model!r} has {names}")
        self.tokenizer, self.model = _load("--nli", model, config, AutoModelForSequenceClassification, device)
        _try("--nli", model, lambda: self._contradiction([(_LONG, _LONG)]))

    def agree(self, problem: TaskProblem, first: str, others: Sequence[str]) -> list[bool]:
        pairs = [(first, other) for other in others], [(other, first) for other in others]
        worst = torch.stack([self._contradiction(each) for each in pairs]).amax(0)
        return (worst < CONTRADICTS).tolist()

    @torch.inference_mode()
    def _contradiction(self, pairs: Sequence[tuple[str, str]]) -> Tensor:  # [n], probabilities
        first, second = zip(*pairs, strict=True)
        read = _encode(self.tokenizer, self.model, list(first), list(second))
        logits: Tensor = self.model(**read).logits
        return logits.float().softmax(-1)[:, self.label]


def _config_of(flag: str, name: str) -> Any:
    """Load a model's configuration without its weights."""
    if (folder := Path(name)).is_dir() and not (folder / "config.json").is_file():
        raise ReprieveError(f"{flag} {name!r} holds no model: there is no config.json")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ReprieveError(f"could not load {flag} {name!r}: {error}") from error


def _load(flag: str, name: str, config: Any, kind: Any, device: torch.device | str) -> tuple[Any, Any]:
    """Load the tokenizer and a model without missing weights, from safetensors only."""
    try:
        # Texts share their beginning, so truncate on the left and keep the part in which they differ.
        tokenizer = AutoTokenizer.from_pretrained(name, truncation_side="left")
        model, found = kind.from_pretrained(name, config=config, use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ReprieveError(f"could not load {flag} {name!r}: {error}") from error
    missing = sorted(found["missing_keys"])
    if kind is AutoModel:  # a mean over states needs no pooler; a classifier's head reads it
        missing = [weight for weight in missing if "pooler" not in weight]
    if missing:
        raise ReprieveError(f"{flag} {name!r} lacks trained weights of a {type(model).__name__}: {', '.join(missing)}")
    return tokenizer, model.to(device).eval()


def _try(flag: str, name: str, read: Callable[[], Tensor]) -> None:
    """Check that the model can read a long text before any problem is decoded."""
    try:
        read()
    except (RuntimeError, ValueError, IndexError, OverflowError) as error:
        raise ReprieveError(f"{flag} {name!r} cannot read a long text: {error}") from error


def _encode(tokenizer: Any, model: Any, *texts: list[str]) -> Any:
    """Encode texts, or pairs of texts, as one batch, truncated on the left to the model's positions."""
    num_positions = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    max_length = min(num_positions, tokenizer.model_max_length)
    batch = tokenizer(*texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    return batch.to(model.device)


@dataclass(frozen=True)
class Verdicts:
    """Agreement of every rejected token, by problem and position.

    Args:
        by_measure: for each measure, [problem][position][token]: whether the texts agree.
        num_correct: number of correct lossless answers.
    """

    by_measure: dict[str, list[list[list[bool]]]]
    num_correct: int

    def summary(self) -> dict[str, Any]:
        """Return counts and, for each measure, the share of rejected tokens that agree, of positions where any does and
        of positions where all do, with 95% bootstrap intervals over problems."""
        problems = next(iter(self.by_measure.values()))
        rejected = [rejection for problem in problems for rejection in problem]
        return {
            "num_problems": len(problems),
            "num_correct": self.num_correct,
            "num_places": len(rejected),
            "num_refused": sum(map(len, rejected)),
            **{name: _shares(found) for name, found in self.by_measure.items()},
        }


def _shares(problems: list[list[list[bool]]]) -> dict[str, list[float] | None]:
    counted: dict[str, tuple[Callable[[list[bool]], int], Callable[[list[bool]], int]]] = {
        "tokens": (sum, len),
        "places_any": (any, lambda rejection: 1),
        "places_all": (all, lambda rejection: 1),
    }
    return {
        name: share_with_interval(
            np.array([sum(agreeing(rejection) for rejection in problem) for problem in problems]),
            np.array([sum(total(rejection) for rejection in problem) for problem in problems]),
        )
        for name, (agreeing, total) in counted.items()
    }


def examine(
    decoder: SpeculativeDecoder,
    pair: Pair,
    task: Task,
    problems: Sequence[TaskProblem],
    params: SamplingParams,
    measures: Sequence[Agreement],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verdicts:
    """Answer problems losslessly and continue the answer from every rejected token.

    Args:
        decoder: decodes with the lossless rule.
        params: of the answers; each problem has its own seed, as in `reprieve bench`.
    """
    eos = frozenset(eos_token_ids(pair.target, pair.tokenizer))
    responses = ResponseFormat(pair.tokenizer, task, eos, max_new_tokens=params.max_new_tokens)
    greedy = ContinuationDecoder(
        pair.target, num_rows=_ROWS, params=SamplingParams(), eos_ids=eos, stops=responses.stops
    )
    found: dict[str, list[list[list[bool]]]] = {measure.name: [] for measure in measures}
    num_correct = 0
    for number, problem in enumerate(problems):
        generation = decoder.generate(prompt_ids_of(problem, decoder.tokenizer), params.for_problem(number), trace=True)
        if task.graded:
            num_correct += task.equivalent(task.extract_answer(generation.text), problem.reference)
        texts = asyncio.run(_continued(LocalTarget(greedy), responses, generation))
        for measure in measures:
            found[measure.name].append([measure.agree(problem, first, others) for first, others in texts])
        progress(number + 1, len(problems))
    return Verdicts(found, num_correct)


async def _continued(
    target: LocalTarget, responses: ResponseFormat, generation: Generation
) -> list[tuple[str, list[str]]]:  # per position: the text with the committed token, and one with each rejected token
    session = Session()

    async def complete(start: int, token_id: int) -> str:
        prefix = [*generation.token_ids[:start], token_id]
        num_left = responses.num_left(prefix)
        rest = await target.complete(session, generation.prompt_ids, prefix, num_left, None) if num_left > 0 else []
        return responses.text([*prefix, *rest])

    rejected = list(rejections(generation))
    starts = [
        (rejection.start, token_id)
        for rejection in rejected
        for token_id in (rejection.taken_id, *rejection.refused_ids)
    ]
    texts = iter(await gather_all(complete(*start) for start in starts))
    return [(next(texts), [next(texts) for _ in rejection.refused_ids]) for rejection in rejected]


@dataclass(frozen=True)
class Rejections(Command):
    """Insert rejected drafted tokens into lossless answers and count those that change nothing (ARC-Decode, 3.1).

    Args:
        drafter: draft, ngram, or eagle3:path=FOLDER.
        num_draft_tokens: K: deepest drafted token.
        embedding: Encoder that compares responses, such as sentence-transformers/all-mpnet-base-v2. Texts agree
            at cosine similarity 0.9 or more.
        nli: Classifier that finds contradictions between responses, such as
            cross-encoder/nli-deberta-v3-base. Texts agree below probability 0.5.
        seed: Same seed, same answers. Continuations of rejected tokens are greedy.
        out: File for the numbers, as JSON.
    """

    verb = "benchmarks/arc_rejections.py"

    drafter: str = "eagle3"
    num_draft_tokens: int = 16
    embedding: str | None = None
    nli: str | None = None
    problems: ProblemSettings = field(default_factory=lambda: ProblemSettings(limit=40))
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path | None = None

    def run(self) -> int:
        require_file(self.out)
        pair, task, problems = screen.load_problems(self.pair, self.problems)
        measures: list[Agreement] = [SameAnswer(task)] if task.graded else []
        if self.embedding is not None:
            measures.append(SimilarText(self.embedding, pair.target.device))
        if self.nli is not None:
            measures.append(NoContradiction(self.nli, pair.target.device))
        if not measures:
            raise SpecError(
                f"task {self.problems.task} has no reference answers: name a model with --embedding or --nli"
            )
        decoder = pair.decoder(
            "lossless", num_draft_tokens=self.num_draft_tokens, drafter=self.drafter, task=self.problems.task
        )
        params = answer_params(self.sampling, task, self.seed)
        with screen.progress("problems") as progress:
            summary = examine(decoder, pair, task, problems, params, measures, progress=progress).summary()
        if self.out is not None:
            write_json(self.out, {**flags_in_force(self), "rejections": summary})
        screen.console().print(_rejection_table(summary, [measure.name for measure in measures]))
        return 0


def _rejection_table(summary: dict[str, Any], measures: list[str]) -> Table:

    solved = f" ({summary['num_correct']} solved)" if "answer" in measures else ""
    table = Table(
        title=f"share of {summary['num_refused']} refused tokens, at {summary['num_places']} places of "
        f"{summary['num_problems']} problems{solved}, that change nothing; brackets are 95% bootstrap intervals "
        "over problems",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("compared by", "tokens, %", "places with one, %", "places with all, %"):
        table.add_column(name, justify="left" if name == "compared by" else "right")
    for measure in measures:
        values = summary[measure]
        table.add_row(measure, *(share_text(values[name]) for name in ("tokens", "places_any", "places_all")))
    return table


if __name__ == "__main__":
    sys.exit(run_command(Rejections, sys.argv[1:]))
