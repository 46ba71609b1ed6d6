"""CoSpec's tables on one pair: `python benchmarks/cospec.py table --arbiter runs/rl/arbiter --out runs/cospec`.

Parts: `table` (Table 1, greedy and at temperature 1, three seeds), `complement` (Table 2), `ablations` (Tables 6 and
8: trains every variant on the same small budget, then measures all), `dials` (Table 7: K and lambda), `overhead` (the
arbiter's share of a round, and what its cache saves). Every part resumes from its folder. Table 3 is
`reprieve audit arbitration`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from arms import answer_test_problems
from reprieve.cli.main import main as reprieve
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder, load_pair
from reprieve.engine.advisors import ArbiterAdvisor, build_arbiter
from reprieve.evaluation.arms import Arm, make_arms
from reprieve.evaluation.results import summarise, write_results
from reprieve.evaluation.runner import environment
from reprieve.files import replace_file
from reprieve.heads.arbiter import Arbiter
from reprieve.heads.loading import attach_heads
from reprieve.metrics import bootstrap_interval, paired_difference
from reprieve.rules.arbiter import ArbiterRule
from reprieve.tasks import load_task
from reprieve.training.own_text import own_text_path, write_own_texts
from reprieve.types import PARTS as ROUND_PARTS
from tables import arms_table

BASELINES = ("fly", "judge:path=reprieve/arithmetic-judge,threshold=0.04")
DIALLED_KS = (6, 20)  # beside the arbiter's own, which it was trained at
# Table 6 and 8: what each variant changes of `reprieve train arbiter-rl`; the causal one is warmed up anew.
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


def measure(
    pair: Pair,
    specs: list[str],
    folder: Path,
    options: argparse.Namespace,
    *,
    trials: int = 1,
) -> dict[str, Any]:
    """Run arms over the test split and summarise them; resumes from the folder."""
    arms = make_arms(specs, [options.num_draft_tokens], target=pair.target_name)
    run = answer_test_problems(
        pair,
        arms,
        folder,
        options,
        drafter="draft",
        temperature=options.temperature,
        draft_temperature=options.draft_temperature,
        num_trials=trials,
    )
    document = summarise(run)
    write_results(document, folder)
    return document


def show(document: dict[str, Any]) -> None:
    """Table 1's columns, as Markdown, with the paired difference to the target."""
    columns = ("spec", "speedup_vs_target", "tokens_per_round", "accuracy", "accuracy_vs_target", "tokens_per_answer")
    print(arms_table({"columns": columns}, document))


def table(pair: Pair, options: argparse.Namespace) -> None:
    specs = ["lossless", *BASELINES, *(rule.spec for rule in _rules(options)), *options.arm]
    trials = 3 if options.temperature else 1
    show(measure(pair, specs, options.out / _sampling(options), options, trials=trials))


def _sampling(options: argparse.Namespace) -> str:
    """A name for how answers are drawn."""
    name = f"temperature-{options.temperature:g}" if options.temperature else "greedy"
    return name if options.draft_temperature is None else f"{name}-draft-{options.draft_temperature:g}"


def _rules(options: argparse.Namespace) -> list[ArbiterRule]:
    """The arbiter at each lambda asked for."""
    thresholds = options.thresholds or [None]
    return [attach_heads(ArbiterRule(options.arbiter, lambda_=value)) for value in thresholds]


def complement(pair: Pair, options: argparse.Namespace) -> None:
    """What target and draft solve, together and apart, and what the arbiter recovers of it; greedy."""
    task = load_task("arithmetic")
    problems = task.problems("test", options.limit)
    params = SamplingParams(max_new_tokens=task.max_new_tokens)
    right = {}
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        alone = dataclasses.replace(pair, target=model)
        path = own_text_path(options.out, alone, "arithmetic test 0", params, mixed=False)
        texts = write_own_texts(path, alone, problems, params=params)
        answers = [pair.tokenizer.decode(text.answer_ids, skip_special_tokens=True) for text in texts]
        right[name] = [
            task.equivalent(task.extract_answer(answer), problem.reference)
            for answer, problem in zip(answers, problems, strict=True)
        ]
    rule = _rules(options)[0]
    arm = Arm(rule.spec, rule, options.num_draft_tokens)
    run = answer_test_problems(pair, [arm], options.out / "arbiter", options, drafter="draft", temperature=0.0)
    found = {record.problem_id: record.correct for record in run.records}
    ours = np.array([found[problem.problem_id] for problem in problems])
    target, draft = (np.array(right[name]) for name in ("target", "draft"))
    union = target | draft

    def recovery(places: np.ndarray) -> float:
        gap = int(union[places].sum()) - int(target[places].sum())
        return (int(ours[places].sum()) - int(target[places].sum())) / gap if gap else float("nan")

    summary = {
        "command": " ".join(sys.argv),
        **environment(),
        "rule": rule.spec,
        "num_problems": len(problems),
        "target": int(target.sum()),
        "draft": int(draft.sum()),
        "union": int(union.sum()),
        "cospec": int(ours.sum()),
        "gained": int((ours & ~target).sum()),
        "lost": int((target & ~ours).sum()),
        "gained_beyond_union": int((ours & ~union).sum()),
        "over_target": paired_difference(ours, target),
        "recovery": recovery(np.arange(len(ours))),
        "recovery_ci95": bootstrap_interval(recovery, len(ours)),
    }
    replace_file(options.out / "complement.json", json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


def ablations(pair: Pair, options: argparse.Namespace) -> None:
    """Train every variant on the same budget, unless it is there, and measure them side by side."""
    # One lambda for all variants: the start's own when left out.
    threshold = options.thresholds[0] if options.thresholds else Arbiter.from_pretrained(options.start).threshold
    causal = options.out / "sft-causal"
    warm_up = ["train", "arbiter", "--preset", "small", "--no-hybrid", "--epochs", str(options.epochs)]
    warm_up += [part for store in options.labels for part in ("--labels", str(store))]
    warm_up += [] if options.tie is None else ["--tie", str(options.tie)]
    _require_done(reprieve([*warm_up, "--out", str(causal)]))
    names = {"SFT only": options.start, "SFT only, causal mask": str(causal / "arbiter")}
    for name, changes in VARIANTS.items():
        folder = options.out / name.replace(" ", "-")
        settings = [str(causal / "arbiter") if part == "CAUSAL" else part for part in changes]
        if "--start" not in settings:
            settings += ["--start", options.start]
        print(f"{name}: {' '.join(settings)}", flush=True)
        fixed = ["--num-draft-tokens", str(options.num_draft_tokens), "--workers", str(options.workers)]
        budget = ["--updates", str(options.updates), "--prompts-per-update", str(options.prompts), "--group-size", "8"]
        once = ["--validation", "20", "--validate-every", str(options.updates)]
        once += ["--validation-temperature", str(options.temperature)]
        if options.draft_temperature is not None:
            once += ["--draft-temperature", str(options.draft_temperature)]
        arguments = ["train", "arbiter-rl", "--preset", "small", *fixed, *budget, *once, *settings]
        _require_done(reprieve([*arguments, "--lambda", str(threshold), "--out", str(folder)]))
        names[name] = str(folder / "last")
        _keep_last(folder)
    specs = [attach_heads(ArbiterRule(path, lambda_=threshold)).spec for path in names.values()]
    folder = options.out / f"measured-{_sampling(options)}"
    document = measure(pair, specs, folder, options)
    for name, spec in zip(names, specs, strict=True):
        print(f"{name}: `{spec}`")
    show(document)


def _keep_last(folder: Path) -> None:
    """The weights a variant ended with: the best by validation may be those it began with."""
    from safetensors.torch import load_file

    best = Arbiter.from_pretrained(folder / "arbiter")
    tensors = load_file(folder / "checkpoint.safetensors")
    names = {name: name if f"model.{name}" in tensors else f"backbone.{name}" for name in best.tensors}
    last = {name: tensors[f"model.{stored}"] for name, stored in names.items()}
    of_the_best = ("update", "seconds", "recipe", "validation")
    training = {name: value for name, value in best.training.items() if name not in of_the_best}
    training["weights"] = "after the last update"
    dataclasses.replace(best, tensors=last, training=training).save_pretrained(folder / "last")


def _require_done(status: int) -> None:
    if status:
        sys.exit(status)


def dials(pair: Pair, options: argparse.Namespace) -> None:
    """Every lambda asked for, and the first at other Ks: the arbiter was trained at one."""
    rules = _rules(options)
    rows = [*(rule.spec for rule in rules), *(f"{rules[0].spec}@K={k}" for k in DIALLED_KS)]
    show(measure(pair, rows, options.out / f"dials-{_sampling(options)}", options))


def overhead(pair: Pair, options: argparse.Namespace) -> None:
    """Where a round's time goes, the cached context beside the whole context every round; answers take turns."""
    rule = _rules(options)[0]
    arm = Arm(rule.spec, rule, options.num_draft_tokens)
    model = build_arbiter(rule.head, pair.draft)
    decoders: dict[str, SpeculativeDecoder] = {}
    advisors: dict[str, ArbiterAdvisor] = {}
    for name, keep in (("cached", True), ("uncached", False)):
        advisors[name] = ArbiterAdvisor(model, keep_context=keep)
        decoders[name] = arm.decoder(pair)
        decoders[name].advisor = advisors[name]
    spent: dict[str, list[dict[str, float]]] = {name: [] for name in decoders}
    task = load_task("arithmetic")
    for number, problem in enumerate(task.problems("test", options.limit)):
        for name in sorted(decoders, reverse=bool(number % 2)):
            read = advisors[name].arbiter.num_read
            started = time.perf_counter()
            params = SamplingParams(max_new_tokens=task.max_new_tokens)
            made = decoders[name].generate(problem.prompt, params, timed=True)
            parts: dict[str, float] = dict(made.seconds_by_part)
            parts |= {"seconds": time.perf_counter() - started, "num_rounds": made.num_rounds}
            parts["num_read"] = advisors[name].arbiter.num_read - read
            spent[name].append(parts)
    found: dict[str, Any] = {"command": " ".join(sys.argv), **environment(), "rule": rule.spec}
    found |= {"num_problems": options.limit, "num_draft_tokens": options.num_draft_tokens}
    for name, rows in spent.items():
        share = np.array([row["advise"] / row["seconds"] for row in rows])
        found[name] = {
            "share_of_time": float(np.median(share)),
            "share_of_time_ci95": bootstrap_interval(lambda at, share=share: float(np.median(share[at])), len(share)),
            "positions_per_round": sum(row["num_read"] for row in rows) / sum(row["num_rounds"] for row in rows),
            "parts": {
                part: sum(row[part] for row in rows) / sum(row["seconds"] for row in rows) for part in ROUND_PARTS
            },
        }
    ratio = np.array([b["advise"] / a["advise"] for a, b in zip(spent["cached"], spent["uncached"], strict=True)])
    found["uncached_over_cached"] = float(np.median(ratio))
    found["uncached_over_cached_ci95"] = bootstrap_interval(lambda at: float(np.median(ratio[at])), len(ratio))
    replace_file(options.out / "overhead.json", json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


PARTS = {part.__name__: part for part in (table, complement, ablations, dials, overhead)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--arbiter", default="reprieve/arithmetic-arbiter")
    parser.add_argument(
        "--lambda",
        dest="thresholds",
        type=float,
        nargs="+",
        help="`table` and `dials`: each; elsewhere the first; the arbiter's own if left out",
    )
    parser.add_argument("--arm", action="append", default=[], help="of `table`: another arm")
    parser.add_argument("--num-draft-tokens", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.0, help="of `table`, `ablations` and `dials`")
    parser.add_argument(
        "--draft-temperature", type=float, default=None, help="where --temperature counts; the target's when left out"
    )
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1, help="more than one is for outcomes, not for speed")
    parser.add_argument(
        "--labels", type=Path, nargs="+", default=[Path("runs/traces")], help="of `ablations`: warm-up traces"
    )
    parser.add_argument("--tie", type=float, default=None, help="of `ablations`: label of ties, if not the traces' own")
    parser.add_argument("--start", default="runs/sft/arbiter", help="of `ablations`: the warmed-up arbiter")
    parser.add_argument("--epochs", type=int, default=3, help="of `ablations`: warm-up without the hybrid mask")
    parser.add_argument("--updates", type=int, default=8, help="of `ablations`: the budget of each variant")
    parser.add_argument(
        "--prompts", type=int, default=16, help="of `ablations`: prompts an update, eight rollouts each"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/cospec"))
    options = parser.parse_args()
    PARTS[options.part](load_pair("reprieve/arithmetic-pair"), options)


if __name__ == "__main__":
    main()
