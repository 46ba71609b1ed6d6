"""Speed of the batched engine, alone and under load: `python benchmarks/batch_speed.py --arm margin:delta=1`.

For each number of rows, arms take turns: in each turn, every arm answers the same problems, as many at once as there
are rows. A turn with one row has one problem, others have twice as many problems as rows. Arms with the same K and
drafter share a decoder. Before anything is timed, CUDA graphs are captured, and each arm answers the first turn's
problems once. Needs an idle machine. Writes batch_speed.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import reprieve
from arms import part, run, whole, write_parts
from reprieve.backends.local import BatchedEngine, DecoderGroup, group_of
from reprieve.backends.settings import BatchedSettings
from reprieve.bench.arms import Arm, make_arms
from reprieve.bench.summary import lossless_for
from reprieve.engine import DRAFT_ONLY, Pair
from reprieve.engine.batched import BatchedSpeculativeDecoder, Request
from reprieve.errors import SpecError
from reprieve.heads.loading import require_heads_fit
from reprieve.models.row_model import GRAPH_COLUMNS
from reprieve.rules import LosslessRule
from reprieve.settings import PromptSettings, SamplingParams
from reprieve.stats import bootstrap_interval
from reprieve.tasks import load_task
from reprieve.tasks.prompting import PromptedTask, prompt_ids_of, with_prompts
from reprieve.types import Generation


@dataclass
class Turn:
    """Result of one arm in one turn."""

    seconds: float
    num_tokens: int
    num_rounds: int
    num_answers: int


def decode(decoder: BatchedSpeculativeDecoder, arm: Arm, prompts: Sequence[list[int]], max_new_tokens: int) -> Turn:
    """Answer prompts and time it, from the first prompt to the last answer."""
    rule = arm.rule or LosslessRule()
    done: list[Generation] = []
    _wait(decoder)
    started = time.perf_counter()
    for prompt_ids in prompts:
        decoder.submit(Request(prompt_ids, rule, max_new_tokens, done.append))
    while not decoder.idle:
        decoder.step()
    _wait(decoder)
    seconds = time.perf_counter() - started
    return Turn(seconds, sum(len(one.tokens) for one in done), sum(one.num_rounds for one in done), len(done))


def _wait(decoder: BatchedSpeculativeDecoder) -> None:
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)


def decoder_of(
    pair: Pair, group: DecoderGroup, arms: Sequence[Arm], *, num_rows: int, params: SamplingParams, longest: int
) -> BatchedSpeculativeDecoder:
    """Return a decoder for the arms of a group; on a GPU, with its graphs captured.

    Args:
        longest: tokens of the longest text, its answer included.
    """
    rules = [arm.rule for arm in arms if arm.rule is not None]
    decoder = group.decoder(pair, rules, num_rows=num_rows, params=params)
    k = group.num_draft_tokens
    if pair.device.type == "cuda":
        for length in range(longest, 0, -GRAPH_COLUMNS):  # the longest first: graphs are lost when the cache grows
            decode(decoder, arms[0], [[100] * max(1, length - 3 * (k + 1))], k + 1)
    return decoder


def checked(arm: Arm, engine: BatchedEngine, options: argparse.Namespace) -> Arm:
    """Return an arm with its rule ready for the pair.

    Raises:
        SpecError: an arm that the batched engine cannot run.
        PairError: a head of another pair.
    """
    pair = engine.pair
    if reason := engine.refusal(arm, options.drafter):
        raise SpecError(f"arm {arm.label} cannot be measured: {reason}")
    if arm.rule is None:
        return arm
    require_heads_fit(arm.rule, pair.identity, options.task)
    return dataclasses.replace(arm, rule=arm.rule.bind(pair.tokenizer).to(pair.device))


def measure(
    pair: Pair, arms: Sequence[Arm], task: PromptedTask, *, num_rows: int, options: argparse.Namespace
) -> dict[str, list[Turn]]:
    """Time the arms in turns and return each arm's turns.

    Raises:
        SpecError: fewer problems than the turns need.
    """
    size, num_turns = (1, options.limit) if num_rows == 1 else (2 * num_rows, options.turns)
    problems = task.problems("test", size * num_turns)
    if len(problems) < size * num_turns:
        raise SpecError(f"{num_rows} rows need {size * num_turns} problems, and the test split has {len(problems)}")
    if pair.num_positions is not None:
        task.fit(problems, pair.num_positions)
    prompts = [prompt_ids_of(problem, pair.tokenizer) for problem in problems]
    params = SamplingParams(max_new_tokens=task.max_new_tokens, stop=tuple(task.stop))
    longest = max(map(len, prompts)) + params.max_new_tokens
    groups: dict[DecoderGroup, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(group_of(arm, options.drafter), []).append(arm)
    decoders = {}
    for group, members in groups.items():
        decoder = decoder_of(pair, group, members, num_rows=num_rows, params=params, longest=longest)
        decoders.update({arm.label: decoder for arm in members})
    turns: dict[str, list[Turn]] = {arm.label: [] for arm in arms}
    for arm in arms:
        decode(decoders[arm.label], arm, prompts[:size], params.max_new_tokens)
    for turn in range(num_turns):
        chosen = prompts[turn * size : (turn + 1) * size]
        shift = turn % len(arms)
        for arm in [*arms[shift:], *arms[:shift]]:
            turns[arm.label].append(decode(decoders[arm.label], arm, chosen, params.max_new_tokens))
        print(f"{num_rows} rows: turn {turn + 1}", flush=True)
    return turns


def ratio(turns: Sequence[Turn], base: Sequence[Turn], counted: str) -> str:
    """Return the ratio of two arms' rates, with a bootstrap interval over turns; without one below 5 turns."""

    def over(index: Any) -> float:
        def rate(some: Sequence[Turn]) -> float:
            return float(sum(getattr(some[i], counted) for i in index) / sum(some[i].seconds for i in index))

        return rate(turns) / rate(base)

    value = over(range(len(turns)))
    if len(turns) < 5:
        return f"{value:.2f}"
    low, high = bootstrap_interval(over, len(turns))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def table(turns: dict[str, list[Turn]], arms: Sequence[Arm], note: str) -> dict[str, Any]:
    """Return the rates of all arms, over the target alone and over lossless decoding with the same K and drafter."""
    target = turns["target_only"]
    rows = []
    for arm in arms:
        own = turns[arm.label]
        lossless = None if arm.rule is None else turns[str(lossless_for(arm, arms))]
        seconds = sum(turn.seconds for turn in own)
        num_tokens, num_answers = sum(turn.num_tokens for turn in own), sum(turn.num_answers for turn in own)
        rows.append(
            [
                arm.label,
                f"{num_tokens / max(1, sum(turn.num_rounds for turn in own)):.2f}",
                f"{num_tokens / num_answers:.0f}",
                f"{num_tokens / seconds:.0f}",
                ratio(own, target, "num_tokens"),
                ratio(own, lossless, "num_tokens") if lossless else "-",
                ratio(own, target, "num_answers"),
            ]
        )
    head = [
        "arm",
        "tokens per round",
        "tokens per answer",
        "tokens per second",
        "tokens per second, over target",
        "tokens per second, over lossless",
        "answers per second, over target",
    ]
    return part(head, rows, note)


def add_pair_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the pair, its precision, its task and its prompt format."""
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--task", default="word_problems")
    parser.add_argument("--chat-template", action="store_true")
    parser.add_argument("--system-prompt", default=None)
    parser.add_argument("--max-new-tokens", type=whole(1), default=None, help="default: the task's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_pair_flags(parser)
    parser.add_argument("--drafter", default="draft")
    parser.add_argument("--arm", action="append", default=[], help="as in `reprieve bench`")
    parser.add_argument("--num-draft-tokens", type=whole(1), default=4)
    parser.add_argument("--rows", type=whole(1), nargs="+", default=[1, 32])
    parser.add_argument("--limit", type=whole(1), default=6, help="problems with one row, one a turn")
    parser.add_argument("--turns", type=whole(1), default=5, help="turns with more rows")
    parser.add_argument("--out", type=Path, default=Path("runs/batch-speed"))
    options = parser.parse_args()
    pair = reprieve.load_pair(options.target, options.draft, dtype=options.dtype)
    prompt = PromptSettings(options.chat_template, options.system_prompt, max_new_tokens=options.max_new_tokens)
    task = with_prompts(load_task(options.task), pair.tokenizer, prompt)
    arms = make_arms(options.arm, [options.num_draft_tokens], target=pair.target_name)
    engine = BatchedEngine(pair, BatchedSettings().parallel)
    arms = [checked(arm, engine, options) for arm in arms if arm.label != DRAFT_ONLY]
    device = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else "this machine's CPU"
    parts = {}
    for rows in options.rows:
        turns = measure(pair, arms, task, num_rows=rows, options=options)
        num_turns = len(turns["target_only"])
        num_problems = num_turns * (1 if rows == 1 else 2 * rows)
        counts = f"{num_problems} problems in {num_turns} turns, {rows} at once"
        note = f"{task.name}, {counts}, greedy, {pair.dtype}, {device}."
        parts[f"rows_{rows}"] = table(turns, arms, note)
        write_parts(options.out / "batch_speed.json", parts)


if __name__ == "__main__":
    run(main)
