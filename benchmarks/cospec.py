"""CoSpec's smaller tables on one pair: `python benchmarks/cospec.py overhead --limit 30 --out runs/cospec`.

Parts: `complement` (Table 2, from the folder of a `reprieve bench`), `ablations` (Tables 6 and 8: trains every variant
on the same small budget, then measures all; resumes from its folder), `overhead` (the arbiter's share of an answer's
time, with and without its cache). Tables 1 and 7 come from `reprieve bench`, Table 3 from
`benchmarks/cospec_branches.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `recipes`

from arms import answer_test_problems, over, part, run, task_of, whole, write_parts
from recipes.arbiter.reinforce import Reinforce
from reprieve.bench.arms import LOSSLESS, Arm, make_arms
from reprieve.bench.records import read_answers, read_run
from reprieve.bench.summary import summarise
from reprieve.cli.main import main as reprieve
from reprieve.cli.main import run_command
from reprieve.engine import DRAFT_ONLY, TARGET_ONLY, Pair, SamplingParams, SpeculativeDecoder, load_pair
from reprieve.errors import ReprieveError
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.loading import attach_heads
from reprieve.models.arbiter import ArbiterAdvisor, ArbiterModel
from reprieve.rules import Rule
from reprieve.rules.arbiter import ArbiterRule
from reprieve.stats import bootstrap_interval, paired_difference
from reprieve.types import Block, Evidence
from tables import COLUMNS

LAMBDAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# Tables 6 and 8: each variant's flags of `python -m recipes.arbiter.reinforce`; the causal one has its own warm-up.
VARIANTS: dict[str, list[str]] = {
    "full": [],
    "no warm-up": ["--start", "none"],
    "terminal only": ["--no-length", "--no-shaped"],
    "no length": ["--no-length"],
    "no risk": ["--risk", "0"],
    "no rejection": ["--rejection", "0"],
    "no rebalancing": ["--no-rebalance"],
    "causal mask": ["--start", "CAUSAL"],
    "shared credit": ["--share-credit"],  # ours
}


def complement(pair: Pair, options: argparse.Namespace) -> None:
    """Compare the problems that the target, the draft and each arm solve, with greedy decoding."""
    right = solved_by_arm(options.run)
    target, draft = right[TARGET_ONLY], right[DRAFT_ONLY]
    union = target | draft
    rows: list[list[object]] = [[f"`{TARGET_ONLY}`", int(target.sum()), *["-"] * 5]]
    rows += [
        [f"`{name}`", int(solved.sum()), "-", "-", "-", over(_points(solved, target), 1, 100), "-"]
        for name, solved in ((DRAFT_ONLY, draft), ("either of both", union))
    ]
    for name, rule_right in right.items():
        if name in (TARGET_ONLY, DRAFT_ONLY, LOSSLESS):
            continue

        def recovery(indices: np.ndarray, rule_right: np.ndarray = rule_right) -> float:
            gap = int(union[indices].sum()) - int(target[indices].sum())
            return (int(rule_right[indices].sum()) - int(target[indices].sum())) / gap if gap else float("nan")

        recovered = [recovery(np.arange(len(rule_right))), *bootstrap_interval(recovery, len(rule_right))]
        counts = [
            int(each.sum()) for each in (rule_right, rule_right & ~target, target & ~rule_right, rule_right & ~union)
        ]
        rows.append([f"`{name}`", *counts, over(_points(rule_right, target), 1, 100), over(recovered, 0, 100)])
    head = ["arm", "solved", "gained", "lost", "solved by neither alone", "over the target, points", "recovered, %"]
    note = f"n = {len(target)} test problems, greedy; brackets are 95% intervals."
    write_parts(options.out / "complement.json", {"complement": part(head, rows, note)})


def solved_by_arm(folder: Path) -> dict[str, np.ndarray]:
    """Return which problems each arm of a greedy run solved; all arms have the same order of problems.

    Raises:
        ReprieveError: no run, a sampled one, one without both models alone, or arms with different problems.
    """
    config = read_run(folder)
    if config["sampling"]["temperature"] or config["num_trials"] != 1:
        raise ReprieveError(f"--run {str(folder)!r} must hold greedy answers, one per problem")
    found: dict[str, dict[str, bool]] = {}
    for record in read_answers(folder):
        found.setdefault(record.arm, {})[record.problem_id] = record.correct
    problem_sets = {frozenset(solved) for solved in found.values()}
    if len(problem_sets) != 1 or not {TARGET_ONLY, DRAFT_ONLY} <= found.keys():
        raise ReprieveError(f"--run {str(folder)!r} must hold a complete run with {TARGET_ONLY} and {DRAFT_ONLY}")
    return {arm: np.array([solved[name] for name in sorted(solved)]) for arm, solved in found.items()}


def _points(arm: np.ndarray, target: np.ndarray) -> list[float]:
    return list(paired_difference(arm, target))


def _start(options: argparse.Namespace) -> tuple[Rule, Arbiter]:
    """Return the arbiter that a part begins with, as a rule and as a head."""
    rule = attach_heads(ArbiterRule(options.start), options.target)
    ((_, head),) = rule.heads
    return rule, head


def ablations(pair: Pair, options: argparse.Namespace) -> None:
    """Train every variant on the same budget, then measure them all; both stages resume.

    At a common lambda, variants would be compared at different speeds. Each is therefore measured at several values and
    reported at the one whose tokens per round are closest to those of the warmed-up arbiter at its own lambda.
    """
    _, start = _start(options)
    causal = options.out / "sft-causal"
    warm_up = ["train", "arbiter", "--preset", "small", "--no-hybrid", "--epochs", str(options.epochs)]
    warm_up += [word for store in options.labels for word in ("--labels", str(store))]
    warm_up += ["--tie", str(options.tie), "--lambda", str(start.threshold), "--num-threads", "1"]
    _require_done(reprieve([*warm_up, "--out", str(causal)]))
    paths = {"SFT only": options.start, "SFT only, causal mask": str(causal / "arbiter")}
    for name, changes in VARIANTS.items():
        folder = options.out / name.replace(" ", "-")
        settings = [str(causal / "arbiter") if word == "CAUSAL" else word for word in changes]
        if "--start" not in settings:
            settings += ["--start", options.start]
        print(f"{name}: {' '.join(settings)}", flush=True)
        fixed = ["--num-draft-tokens", str(options.num_draft_tokens), "--workers", str(options.workers)]
        budget = ["--updates", str(options.updates), "--prompts-per-update", str(options.prompts), "--group-size", "8"]
        once = ["--validation", "1", "--validate-every", str(options.updates), "--num-threads", "1"]
        arguments = ["--preset", "small", *fixed, *budget, *once, *settings]
        _require_done(run_command(Reinforce, [*arguments, "--lambda", str(start.threshold), "--out", str(folder)]))
        paths[name] = str(folder / "last")
        _keep_last(folder)
    specs = {
        attach_heads(ArbiterRule(path, lambda_=value), options.target).spec: (name, value)
        for name, path in paths.items()
        for value in LAMBDAS
    }
    arms = make_arms(list(specs), [options.num_draft_tokens], target=pair.target_name)
    run = answer_test_problems(pair, arms, options.out / "measured", options, drafter="draft", temperature=0.0)
    results = summarise(run)
    results.write(options.out / "measured")
    found = {arm.spec: vars(arm) for arm in results.arms}
    sft = ("SFT only", start.threshold)
    aim = next(found[spec]["tokens_per_round"] for spec, variant in specs.items() if variant == sft)
    columns = ("accuracy", "accuracy_vs_target", "tokens_per_round", "speedup_vs_target")
    rows = []
    for name in paths:
        by_lambda = {value: found[spec] for spec, (variant, value) in specs.items() if variant == name}
        chosen = min(by_lambda, key=lambda value, arms=by_lambda: abs(arms[value]["tokens_per_round"] - aim))
        rows.append([name, chosen, *(COLUMNS[column][1](by_lambda[chosen], column) for column in columns)])
    head = ["variant", "lambda", *(COLUMNS[column][0] for column in columns)]
    lambdas = ", ".join(f"{value:g}" for value in LAMBDAS)
    note = (
        f"{options.updates} updates of {options.prompts * 8} rollouts each; each variant at the lambda of {lambdas} "
        f"where its tokens per round come nearest to {aim:.2f}; n = {options.limit} test problems, greedy, "
        f"K = {options.num_draft_tokens}; brackets are 95% intervals."
    )
    write_parts(options.out / "ablations.json", {"ablations": part(head, rows, note)})


def _keep_last(folder: Path) -> None:
    """Save the weights after the last update: the best by validation may be the initial ones."""
    from safetensors.torch import load_file

    best = Arbiter.from_pretrained(folder / "arbiter")
    tensors = load_file(folder / "checkpoint.safetensors")
    names = {name: name if f"model.{name}" in tensors else f"backbone.{name}" for name in best.tensors}
    last = {name: tensors[f"model.{stored}"] for name, stored in names.items()}
    best_only = ("update", "seconds", "recipe", "validation")  # fields that describe the best weights
    training = {name: value for name, value in best.training.items() if name not in best_only}
    training["weights"] = "after the last update"
    dataclasses.replace(best, tensors=last, training=training).save_pretrained(folder / "last")


def _require_done(status: int) -> None:
    if status:
        sys.exit(status)


class Forgetful(ArbiterAdvisor):
    """Advisor without a cache: reads the whole context in every round."""

    def advise(self, block: Block, evidence: Evidence, settled: torch.Tensor) -> torch.Tensor:
        self.forget()
        return super().advise(block, evidence, settled)


def overhead(pair: Pair, options: argparse.Namespace) -> None:
    """Measure the parts of a round's time with and without the cached context; the two decoders take turns."""
    rule, start = _start(options)
    arm = Arm(rule.spec, rule, options.num_draft_tokens)
    assert pair.draft is not None
    model = ArbiterModel.of(start, pair.draft)
    decoders: dict[str, SpeculativeDecoder] = {}
    advisors: dict[str, ArbiterAdvisor] = {}
    for name, kind in (("cached", ArbiterAdvisor), ("read again every round", Forgetful)):
        advisors[name] = kind(model)
        decoders[name] = arm.decoder(pair)
        decoders[name].advisor = advisors[name]
    timings: dict[str, list[dict[str, float]]] = {name: [] for name in decoders}
    task = task_of(pair)
    for number, problem in enumerate(task.problems("test", options.limit, offset=options.offset)):
        for name in sorted(decoders, reverse=bool(number % 2)):
            read = advisors[name].num_read
            started = time.perf_counter()
            params = SamplingParams(max_new_tokens=task.max_new_tokens)
            generation = decoders[name].generate(problem.prompt, params, timed=True)
            parts: dict[str, float] = dict(generation.seconds_by_part)
            parts |= {"seconds": time.perf_counter() - started, "num_rounds": generation.num_rounds}
            parts["num_read"] = advisors[name].num_read - read
            timings[name].append(parts)
    rows = []
    for name, answers in timings.items():
        share = np.array([answer["advise"] / answer["seconds"] for answer in answers])
        positions, num_rounds, seconds = (
            sum(answer[key] for answer in answers) for key in ("num_read", "num_rounds", "seconds")
        )
        shares = [sum(answer[key] for answer in answers) / seconds for key in ("draft", "verify")]
        middle = [float(np.median(share)), *bootstrap_interval(_median_of(share), len(share))]
        rows.append([name, over(middle, 1, 100), f"{positions / num_rounds:.0f}", *(f"{100 * s:.0f}" for s in shares)])
    head = ["context", "arbiter, % of an answer's time", "positions per round", "drafting, %", "verifying, %"]
    ratio = np.array([b["advise"] / a["advise"] for a, b in zip(*timings.values(), strict=True)])
    longer = over([float(np.median(ratio)), *bootstrap_interval(_median_of(ratio), len(ratio))], 2)
    note = (
        f"`{rule.spec}`, K = {options.num_draft_tokens}, n = {options.limit} test problems, greedy; without the cached "
        f"context the arbiter takes {longer} times as long; brackets are 95% intervals."
    )
    write_parts(options.out / "overhead.json", {"overhead": part(head, rows, note)})


def _median_of(values: np.ndarray) -> Callable[[np.ndarray], float]:
    return lambda places: float(np.median(values[places]))


PARTS = {one.__name__: one for one in (complement, ablations, overhead)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--start", default="reprieve/miniature-arbiter", help="a warmed-up arbiter")
    parser.add_argument("--num-draft-tokens", type=whole(1), default=16)
    parser.add_argument("--limit", type=whole(1), default=40)
    parser.add_argument("--offset", type=whole(0), default=0, help="first test problem")
    parser.add_argument("--run", type=Path, default=Path("runs/tables/cospec"), help="for `complement`: run folder")
    parser.add_argument("--workers", type=whole(1), default=1, help="parallel processes; speeds need 1")
    parser.add_argument(
        "--labels", type=Path, nargs="+", default=[Path("benchmarks/labels/miniature-arbitration")],
        help="for `ablations`: warm-up traces",
    )  # fmt: skip
    parser.add_argument("--tie", type=float, default=0.5, help="for `ablations`: label of ties")
    parser.add_argument("--epochs", type=whole(1), default=1, help="for `ablations`: epochs of the causal warm-up")
    parser.add_argument("--updates", type=whole(1), default=3, help="for `ablations`: updates of each variant")
    parser.add_argument(
        "--prompts", type=whole(1), default=8, help="for `ablations`: prompts per update, 8 rollouts each"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/cospec"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    PARTS[options.part](load_pair(options.target, dtype="float32"), options)


if __name__ == "__main__":
    run(main)
