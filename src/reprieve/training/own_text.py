"""A target's own answers to a task's problems, as training data for drafters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from reprieve.engine import Pair
from reprieve.engine.continuations import ContinuationDecoder, Session, TextRequest
from reprieve.errors import ReprieveError
from reprieve.files import append_line, read_records
from reprieve.identity import digest
from reprieve.models.cached_model import eos_token_ids
from reprieve.models.sampling import UniformDraw
from reprieve.settings import ProblemSettings, SamplingParams
from reprieve.tasks import TaskProblem
from reprieve.tasks.prompting import prompt_ids_of
from reprieve.types import Progress, no_progress

_NUM_ROWS = 96  # texts in one forward


@dataclass(frozen=True)
class OwnText:
    """Prompt and the target's answer to it, in tokens."""

    problem_id: str
    prompt_ids: list[int]
    answer_ids: list[int]


def own_text_path(folder: Path, pair: Pair, problems: ProblemSettings, params: SamplingParams, *, mixed: bool) -> Path:
    """Return the file for the answers of one target; its name depends on target, task, split, offset and sampling."""
    source = f"{problems.task} {problems.split} {problems.offset}"
    made_with = repr((pair.identity.target_weights, source, params, mixed))
    return folder / f"own-text-{digest(made_with.encode())}.jsonl"


def write_own_texts(
    path: Path,
    pair: Pair,
    problems: Sequence[TaskProblem],
    *,
    params: SamplingParams,
    mixed: bool = False,
    progress: Progress = no_progress,
) -> list[OwnText]:
    """Answer every problem that is not yet in the file, one line each, and return all the texts.

    Args:
        params: sampling parameters; draws are keyed by their seed and the problem.
        mixed: answer every second problem greedily, so that a drafter sees both kinds of text.

    Raises:
        ReprieveError: a file that holds something else.
    """
    prompts = {problem.problem_id: prompt_ids_of(problem, pair.tokenizer) for problem in problems}
    read = _read(path, pair.vocab_size)
    texts = {text.problem_id: text for text in read if prompts.get(text.problem_id) == text.prompt_ids}
    eos_ids = eos_token_ids(pair.target, pair.tokenizer)
    decoder = ContinuationDecoder(pair.target, num_rows=_NUM_ROWS, params=params, eos_ids=eos_ids)

    def keep(problem_id: str, token_ids: list[int]) -> None:
        texts[problem_id] = OwnText(problem_id, prompts[problem_id], token_ids)
        append_line(path, asdict(texts[problem_id]), f"the {len(texts) - 1} texts before it")
        progress(len(texts), len(prompts))

    path.parent.mkdir(parents=True, exist_ok=True)
    progress(len(texts), len(prompts))
    for index, (problem_id, prompt_ids) in enumerate(prompts.items()):
        if problem_id not in texts:
            greedy = params.greedy or (mixed and index % 2 == 0)
            uniforms = random.Random(f"{params.seed} {problem_id}").random
            request = TextRequest(
                session=Session(),
                prefix_ids=prompt_ids,
                max_new_tokens=params.max_new_tokens,
                draw=None if greedy else UniformDraw(uniforms),
                on_done=partial(keep, problem_id),
                response_start=len(prompt_ids),
            )
            decoder.submit(request)
    while not decoder.idle:
        decoder.step()
    return [texts[problem.problem_id] for problem in problems]


def _read(path: Path, vocab_size: int) -> Iterator[OwnText]:
    """Yield the texts of a file."""
    for text in read_records(path, OwnText, "target text", repair=True):
        if max([*text.prompt_ids, *text.answer_ids], default=0) >= vocab_size:
            raise ReprieveError(f"{path}, {text.problem_id}: a token is not in [0, {vocab_size - 1}]")
        yield text
