"""Speed of running vLLM servers under load: `python benchmarks/served_speed.py --server URL --server URL`.

One server holds the target alone; others hold the pair with the plugin, and all their rules are measured. At each
number of requests in flight, the arms of all servers take turns: in each turn, every arm answers the same problems.
Before, each arm answers the first turn's problems once, not timed. Needs an idle machine. Writes served_speed.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arms import run, whole, write_parts
from batch_speed import Turn, add_pair_flags, table
from reprieve.backends.served import ServedEngine
from reprieve.backends.servers import facts_of
from reprieve.backends.settings import EngineSettings
from reprieve.bench.arms import LOSSLESS, Arm, make_arm
from reprieve.bench.engine import RunConfig
from reprieve.bench.settings import RunSettings
from reprieve.cli.screen import make_engine
from reprieve.engine import TARGET_ONLY
from reprieve.errors import EngineError, SpecError
from reprieve.settings import PairSettings, PromptSettings
from reprieve.tasks import TaskProblem, load_task
from reprieve.tasks.prompting import PromptedTask, with_prompts


@dataclass
class Server:
    """A running server and the arms that it offers."""

    engine: ServedEngine
    arms: list[Arm]
    config: RunConfig

    @classmethod
    def at(cls, address: str, options: argparse.Namespace) -> Server:
        """Return the server at an address, URL or URL@drafter=DRAFTER.

        Raises:
            ReprieveError: it does not answer, or does not hold this pair.
        """
        url, _, drafter = address.partition("@drafter=")
        facts = facts_of([url])
        if facts.num_draft_tokens is None:
            arms = [Arm(TARGET_ONLY, None, 1)]
        else:
            k = facts.num_draft_tokens
            own = f"@K={k}" + (f"@drafter={drafter}" if drafter else "")
            arms = [make_arm(spec + own, k, target=options.target) for spec in (LOSSLESS, *facts.rules.values())]
        pair = PairSettings(target=options.target, draft=options.draft, dtype=options.dtype)
        engine = make_engine(EngineSettings(f"openai:url={url}"), pair)
        assert isinstance(engine, ServedEngine)
        return cls(engine, arms, RunConfig.of(engine, arms, RunSettings(task=options.task)))

    def turn(self, arm: Arm, task: PromptedTask, problems: Sequence[TaskProblem], *, concurrency: int) -> Turn:
        """Answer the problems and time it, from the first request to the last token."""
        answers, seconds = self.engine.timed(self.config, task, arm, problems, concurrency=concurrency, num_warm=0)
        num_tokens = sum(len(one.token_ids) for one in answers)
        return Turn(seconds, num_tokens, sum(one.num_steps for one in answers), len(answers))


def measure(
    servers: Sequence[Server], task: PromptedTask, *, concurrency: int, size: int, num_turns: int
) -> dict[str, list[Turn]]:
    """Time the arms in turns of `size` problems and return each arm's turns.

    Raises:
        SpecError: fewer problems than the turns need.
    """
    problems = task.problems("test", size * num_turns)
    if len(problems) < size * num_turns:
        raise SpecError(f"{concurrency} requests need {size * num_turns} problems, the test split has {len(problems)}")
    pairs = [(server, arm) for server in servers for arm in server.arms]
    for server, arm in pairs:
        server.turn(arm, task, problems[:size], concurrency=concurrency)
    turns: dict[str, list[Turn]] = {arm.label: [] for _, arm in pairs}
    for number in range(num_turns):
        chosen = problems[number * size : (number + 1) * size]
        shift = number % len(pairs)
        for server, arm in [*pairs[shift:], *pairs[:shift]]:
            turns[arm.label].append(server.turn(arm, task, chosen, concurrency=concurrency))
        print(f"{concurrency} at once: turn {number + 1}", flush=True)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="append", required=True, help="URL, or URL@drafter=DRAFTER; repeatable")
    add_pair_flags(parser)
    parser.add_argument("--concurrency", type=whole(1), nargs="+", default=[1, 8, 32], help="requests in flight")
    parser.add_argument("--turns", type=whole(1), default=5)
    parser.add_argument("--min-problems", type=whole(1), default=4, help="per turn; else twice the requests in flight")
    parser.add_argument("--out", type=Path, default=Path("runs/served-speed"))
    options = parser.parse_args()
    servers = [Server.at(address, options) for address in options.server]
    arms = [arm for server in servers for arm in server.arms]
    labels = [arm.label for arm in arms]
    if TARGET_ONLY not in labels:
        raise EngineError("one --server must hold the target alone, without speculation")
    if len(set(labels)) < len(labels):
        raise SpecError(f"servers must differ in K or drafter, got the arms {', '.join(labels)}")
    prompt = PromptSettings(options.chat_template, options.system_prompt, max_new_tokens=options.max_new_tokens)
    task = with_prompts(load_task(options.task), servers[0].engine.tokenizer, prompt)
    facts = servers[-1].engine.facts
    parts = {}
    for concurrency in options.concurrency:
        size = max(options.min_problems, 2 * concurrency)
        turns = measure(servers, task, concurrency=concurrency, size=size, num_turns=options.turns)
        counts = f"{options.turns} turns of {size} problems, {concurrency} at once"
        note = f"{task.name}, {counts}, greedy, {facts.dtype}, vLLM {facts.engine_version}, runner {facts.runner}."
        parts[f"concurrency_{concurrency}"] = table(turns, arms, note)
        write_parts(options.out / "served_speed.json", parts)


if __name__ == "__main__":
    run(main)
