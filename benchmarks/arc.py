"""ARC-Decode's tables and figures on one pair: `python benchmarks/arc.py table --limit 500 --out runs/arc`.

Parts: `table` (the paper's Tables 2 to 4: EAGLE-3 lossless, pruned, LTS, both, and FSD on the draft), `paper` (theta
0.3 as published, and chains), `temperature` and `theta` (Figures 4 and 5), `pruning` (Table 8), `judge` (AutoJudge's
appendix J), `shift` (whether the next step's divergence tells important mismatches from harmless ones). Every part
resumes from its folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from arms import answer_test_problems
from reprieve.calibration.swaps import SwapMeter
from reprieve.engine import DRAFT_ONLY, Pair, SamplingParams, load_pair
from reprieve.evaluation.arms import make_arms
from reprieve.evaluation.results import summarise, write_results
from reprieve.files import replace_file
from reprieve.labelling.store import LabelStore
from reprieve.models.sampling import Sampler
from reprieve.training.splits import auc, auc_interval
from tables import arms_table

EAGLE, PRUNED = "eagle3", "eagle3:prune=entropy"
CHAIN = "eagle3:top_k=1,depth=16,total_tokens=16"
STRICT = 0.97  # theta at which the bundled target keeps its accuracy
FSD = [f"fuzzy:threshold={t}@drafter=draft" for t in (0.4, 0.6, 0.8)]
TABLE = [
    f"lossless@drafter={PRUNED}",
    f"lts:theta={STRICT}",
    f"lts:theta={STRICT}@drafter={PRUNED}",
    "lossless@drafter=draft",
    f"lts:theta={STRICT}@drafter=draft",
    *FSD,
]
PAPER = [
    f"lossless@drafter={PRUNED}",
    *[f"lts:theta={theta}{own}" for theta in (0.3, STRICT) for own in ("", f"@drafter={PRUNED}")],
    f"lossless@drafter={CHAIN}",
    f"lts:theta={STRICT}@drafter={CHAIN}",
]
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 0.9)
THETAS = (0.3, 0.5, 0.7, 0.9, 0.97, 1.0)
PRUNINGS = [
    *[f"eagle3:prune=entropy,epsilon={e}" for e in (0.05, 0.2)],
    *[f"eagle3:prune={name},keep=0.5" for name in ("depth", "depth_exp", "path_prob")],
]
JUDGE = "judge:path=reprieve/arithmetic-judge,threshold="


def measure(
    pair: Pair,
    specs: list[str],
    folder: Path,
    options: argparse.Namespace,
    *,
    temperature: float,
    draft_greedy: bool = True,
) -> dict[str, Any]:
    """Run arms over the test split and summarise them; resumes from the folder."""
    arms = [arm for arm in make_arms(specs, [16], target=pair.target_name) if arm.label != DRAFT_ONLY]
    draft_temperature = 0.0 if draft_greedy else None
    run = answer_test_problems(
        pair, arms, folder, options, drafter=EAGLE, temperature=temperature, draft_temperature=draft_temperature
    )
    document = summarise(run)
    write_results(document, folder)
    return document


def show(document: dict[str, Any]) -> None:
    """The columns of the paper's tables, as Markdown."""
    columns = ("spec", "accuracy", "accuracy_vs_lossless", "tokens_per_round", "speedup_vs_target",
               "speedup_vs_lossless", "pruned_share", "tokens_per_answer")  # fmt: skip
    print(arms_table({"columns": columns}, document))


def figure(rows: list[dict[str, Any]], x: str, x_label: str, path: Path) -> None:
    """Tokens a round, speedup and accuracy against one setting, a line for each arm."""
    drawing = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(drawing)
    names = list(dict.fromkeys(row["name"] for row in rows))
    panels = (("tokens_per_round", "tokens per round", 1), ("speedup_vs_target", "speedup over the target", 1),
              ("accuracy", "problems solved, %", 100))  # fmt: skip
    for axes, (key, label, scale) in zip(drawing.subplots(1, 3), panels, strict=True):
        for place, name in enumerate(names):
            ours = sorted((row for row in rows if row["name"] == name), key=lambda row: row[x])
            values = [scale * row[key] for row in ours]
            if f"{key}_ci95" in ours[0]:
                bars = np.array([[scale * abs(end - row[key]) for end in row[f"{key}_ci95"]] for row in ours]).T
                axes.errorbar([row[x] for row in ours], values, yerr=bars, marker="os^D"[place], capsize=2, label=name)
            else:
                axes.plot([row[x] for row in ours], values, marker="os^D"[place], label=name)
        axes.set_xlabel(x_label)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    for kind in ("png", "svg"):
        drawing.savefig(path.with_suffix(f".{kind}"), dpi=150)
    print(f"figure: {path.with_suffix('.png')}")


def table(pair: Pair, options: argparse.Namespace) -> None:
    show(measure(pair, TABLE, options.out / "table", options, temperature=1.0))


def paper(pair: Pair, options: argparse.Namespace) -> None:
    show(measure(pair, PAPER, options.out / "paper", options, temperature=1.0))


def temperature(pair: Pair, options: argparse.Namespace) -> None:
    rows = []
    specs = [f"lts:theta={STRICT}@drafter={PRUNED}"]
    for value in TEMPERATURES:
        document = measure(pair, specs, options.out / f"temperature-{value}", options, temperature=value)
        show(document)
        named = {"lossless": "EAGLE-3, lossless", specs[0]: f"ARC, theta {STRICT}"}
        rows += [{**arm, "name": named[arm["spec"]], "x": value} for arm in document["arms"] if arm["spec"] in named]
    figure(rows, "x", "temperature", options.out / "temperature")


def theta(pair: Pair, options: argparse.Namespace) -> None:
    named = {f"lts:theta={value}": value for value in THETAS}
    document = measure(pair, list(named), options.out / "theta", options, temperature=1.0)
    show(document)
    found = {float(arm["params"]["theta"]): arm for arm in document["arms"] if arm["rule"] == "lts"}
    lossless = next(arm for arm in document["arms"] if arm["spec"] == "lossless")
    rows = [{**arm, "name": "LTS", "x": value} for value, arm in found.items()]
    rows += [{**lossless, "name": "EAGLE-3, lossless", "x": value} for value in (min(THETAS), max(THETAS))]
    figure(rows, "x", "theta", options.out / "theta")


def pruning(pair: Pair, options: argparse.Namespace) -> None:
    specs = [f"lossless@drafter={spec}" for spec in PRUNINGS]
    show(measure(pair, specs, options.out / "pruning", options, temperature=1.0))


def judge(pair: Pair, options: argparse.Namespace) -> None:
    specs = [f"{JUDGE}{threshold}" for threshold in (0.02, 0.04, 0.08, 0.15, 0.3)]
    show(measure(pair, specs, options.out / "judge", options, temperature=0.0))


def shift(pair: Pair, options: argparse.Namespace) -> None:
    """AUC of the true divergence, and of what the bound is made of, for AutoJudge's labels: high is important."""
    meter = SwapMeter(pair.cached_target(), Sampler(SamplingParams(), pair.device), top_k=10)
    values: dict[str, list[np.ndarray]] = {"divergence": [], "distance": [], "margin": []}
    important, names = [], []
    for problem in LabelStore(options.labels).problems()[: options.limit]:
        labelled = problem.labelled()
        if not labelled:
            continue
        places, tokens = [m.position for m in labelled], [m.draft_id for m in labelled]
        swaps = meter.measure(problem.prompt_ids, problem.response_ids, places, tokens)
        for name, parts in values.items():
            parts.append(getattr(swaps, name))
        important += [bool(m.important) for m in labelled]
        names += [problem.problem_id] * len(labelled)
    truth, ids = np.array(important), np.array(names)
    found: dict[str, Any] = {"num_tokens": len(truth), "num_important": int(truth.sum())}
    for name, parts in values.items():
        joined = np.concatenate(parts)
        found[name] = {
            "auc": auc(truth, joined), "auc_and_ci95": auc_interval(truth, joined, ids),
            "median_important": float(np.median(joined[truth])), "median_harmless": float(np.median(joined[~truth])),
        }  # fmt: skip
    replace_file(options.out / "shift.json", json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


PARTS = {part.__name__: part for part in (table, paper, temperature, theta, pruning, judge, shift)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--limit", type=int, default=100, help="problems")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--labels", type=Path, default=Path("runs/labels-autojudge"))
    parser.add_argument("--out", type=Path, default=Path("runs/arc"))
    options = parser.parse_args()
    PARTS[options.part](load_pair("reprieve/arithmetic-pair", dtype="float32"), options)


if __name__ == "__main__":
    main()
