"""ARC-Decode's figures and smaller tables on one pair: `python benchmarks/arc.py theta --limit 60 --out runs/arc`.

Parts: `theta` and `temperature` (Figures 5 and 4), `pruning` (Table 8), `shift` (AUC of the next step's divergence for
important mismatches). All parts except `shift` resume from their folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from arms import answer_test_problems, labels_of, over, part, run, whole, write_parts
from reprieve.bench.arms import LOSSLESS, make_arms
from reprieve.bench.records import read_answers
from reprieve.bench.results import ArmResults
from reprieve.bench.summary import column, common_rows, summarise
from reprieve.engine import DRAFT_ONLY, Pair, SamplingParams, load_pair
from reprieve.models.sampling import Sampler
from reprieve.stats import bootstrap_interval
from reprieve.training.features import auc_interval
from reprieve.training.lts import SwapMeter
from tables import COLUMNS

EAGLE, PRUNED = "eagle3", "eagle3:prune=entropy"
STRICT = 0.9  # theta, chosen on validation problems
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 0.9)
SHIFTS = {
    "divergence": "true divergence of the next step, nats",
    "distance": "whitened embedding distance, squared",
    "margin": "difference of log-probabilities, squared",
}
THETAS = (0.3, 0.5, 0.7, 0.9, 0.97, 1.0)
# Strategies that prune about the same number of nodes; the paper's own comes first.
PRUNINGS = [
    [
        f"eagle3:prune={spec}"
        for spec in ("entropy,epsilon=0.05", "depth_exp,keep=0.92", "path_prob,keep=0.92", "depth,keep=0.95")
    ],
    [
        f"eagle3:prune={spec}"
        for spec in ("entropy,epsilon=0.2", "depth_exp,keep=0.66", "path_prob,keep=0.66", "depth,keep=0.8")
    ],
]
_TREE_COLUMNS = ("pruned_share", "tokens_per_round")


def measure(
    pair: Pair, specs: list[str], folder: Path, options: argparse.Namespace, *, temperature: float
) -> list[ArmResults]:
    """Run arms over the test split and summarise them; resumes from the folder."""
    arms = [arm for arm in make_arms(specs, [16], target=pair.target_name) if arm.label != DRAFT_ONLY]
    run = answer_test_problems(pair, arms, folder, options, drafter=EAGLE, temperature=temperature)
    results = summarise(run)
    results.write(folder)
    return results.arms


def figure(rows: list[dict[str, Any]], x: str, x_label: str, path: Path) -> None:
    """Plot tokens per round, speedup and accuracy against one setting, with a line for each arm."""
    drawing = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(drawing)
    names = list(dict.fromkeys(row["name"] for row in rows))
    panels = (("tokens_per_round", "tokens per round", 1), ("speedup_vs_target", "speedup over the target", 1),
              ("accuracy", "problems solved, %", 100))  # fmt: skip
    for axes, (key, label, scale) in zip(drawing.subplots(1, 3), panels, strict=True):
        for index, name in enumerate(names):
            series = sorted((row for row in rows if row["name"] == name), key=lambda row: row[x])
            values = [scale * row[key] for row in series]
            if f"{key}_ci95" in series[0]:
                bars = np.array([[scale * abs(end - row[key]) for end in row[f"{key}_ci95"]] for row in series]).T
                axes.errorbar(
                    [row[x] for row in series], values, yerr=bars, marker="os^D"[index], capsize=2, label=name
                )
            else:
                axes.plot([row[x] for row in series], values, marker="os^D"[index], label=name)
        axes.set_xlabel(x_label)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    for kind in ("png", "svg"):
        drawing.savefig(path.with_suffix(f".{kind}"), dpi=150)
    print(f"figure: {path.with_suffix('.png')}")


def temperature(pair: Pair, options: argparse.Namespace) -> None:
    arms, rows = [], []
    specs = [f"lts:theta={STRICT}@drafter={PRUNED}"]
    named = {"lossless": "EAGLE-3, lossless", specs[0]: f"LTS, theta {STRICT}, pruned"}
    columns = ("accuracy", "tokens_per_round", "speedup_vs_target", "speedup_vs_lossless")
    for value in TEMPERATURES:
        for arm in measure(pair, specs, options.out / f"temperature-{value}", options, temperature=value):
            if arm.spec in named:
                arms.append({**vars(arm), "name": named[arm.spec], "x": value})
                rows.append([value, named[arm.spec], *(COLUMNS[name][1](vars(arm), name) for name in columns)])
    figure(arms, "x", "temperature", options.out / "temperature")
    head = ["temperature", "arm", *(COLUMNS[name][0] for name in columns)]
    write_parts(options.out / "temperature.json", {"temperature": part(head, rows, _note(options))})


def theta(pair: Pair, options: argparse.Namespace) -> None:
    named = {f"lts:theta={value}": value for value in THETAS}
    arms = measure(pair, list(named), options.out / "theta", options, temperature=1.0)
    rows = [{**vars(arm), "name": "LTS", "x": float(arm.params["theta"])} for arm in arms if arm.rule == "lts"]
    lossless = next(arm for arm in arms if arm.spec == LOSSLESS)
    rows += [{**vars(lossless), "name": "EAGLE-3, lossless", "x": value} for value in (min(THETAS), max(THETAS))]
    figure(rows, "x", "theta", options.out / "theta")


def pruning(pair: Pair, options: argparse.Namespace) -> None:
    specs = [f"lossless@drafter={spec}" for strategies in PRUNINGS for spec in strategies]
    arms = measure(pair, specs, options.out / "pruning", options, temperature=1.0)
    found = {arm.spec: vars(arm) for arm in arms}
    records = read_answers(options.out / "pruning")
    answers = common_rows([*found], records)
    tokens, rounds = (
        {spec: column(answers[spec], lambda record, name=name: getattr(record, name)) for spec in found}
        for name in ("num_tokens", "num_rounds")
    )
    counts = {spec: np.hstack([tokens[spec], rounds[spec]]) for spec in found}
    rows = [[f"`{LOSSLESS}`", *(COLUMNS[name][1](found[LOSSLESS], name) for name in _TREE_COLUMNS), "-"]]
    for first, *others in PRUNINGS:
        entropy = counts[f"lossless@drafter={first}"]
        for spec in (first, *others):
            arm, arm_counts = found[f"lossless@drafter={spec}"], counts[f"lossless@drafter={spec}"]
            bounds = bootstrap_interval(
                lambda i, arm=arm_counts, base=entropy: _rate(arm[i]) - _rate(base[i]), len(arm_counts)
            )
            difference = "-" if spec == first else over([_rate(arm_counts) - _rate(entropy), *bounds], 2)
            rows.append([f"`{spec}`", *(COLUMNS[name][1](arm, name) for name in _TREE_COLUMNS), difference])
    head = ["drafter", *(COLUMNS[name][0] for name in _TREE_COLUMNS), "tokens per round, against entropy"]
    write_parts(options.out / "pruning.json", {"pruning": part(head, rows, _note(options))})


def _rate(counts: np.ndarray) -> float:
    """Return tokens per round, from the tokens and rounds of each answer, [n, 2]."""
    tokens, rounds = counts.sum(0)
    return float(tokens / rounds)


def _note(options: argparse.Namespace) -> str:
    return f"n = {options.limit} test problems; brackets are 95% intervals."


def shift(pair: Pair, options: argparse.Namespace) -> None:
    """Measure the AUC of the true divergence and of the bound's two terms for AutoJudge's important mismatches."""
    meter = SwapMeter(pair.cached_target(), Sampler(SamplingParams(), pair.device), top_k=10)
    values: dict[str, list[np.ndarray]] = {"divergence": [], "distance": [], "margin": []}
    important: list[bool] = []
    names: list[str] = []
    for problem in labels_of(pair, options.labels).problems()[: options.limit]:
        labelled = problem.labelled()
        if not labelled:
            continue
        positions, tokens = [m.position for m in labelled], [m.draft_id for m in labelled]
        swaps = meter.measure(problem.prompt_ids, problem.response_ids, positions, tokens)
        for name, parts in values.items():
            parts.append(getattr(swaps, name))
        important += [bool(m.important) for m in labelled]
        names += [problem.problem_id] * len(labelled)
    truth, ids = np.array(important), np.array(names)
    rows = []
    for name, parts in values.items():
        joined = np.concatenate(parts)
        medians = (f"{np.median(joined[chosen]):.3g}" for chosen in (truth, ~truth))
        rows.append([SHIFTS[name], over(auc_interval(truth, joined, ids)), *medians])
    head = ["tells important from harmless", "ROC AUC", "median, important", "median, harmless"]
    note = f"{len(truth)} labelled mismatches, {int(truth.sum())} important; intervals over problems."
    write_parts(options.out / "shift.json", {"shift": part(head, rows, note)})


PARTS = {one.__name__: one for one in (temperature, theta, pruning, shift)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--limit", type=whole(1), default=100, help="number of problems")
    parser.add_argument("--offset", type=whole(0), default=0, help="first test problem")
    parser.add_argument("--workers", type=whole(1), default=1, help="parallel processes")
    parser.add_argument("--labels", type=Path, default=Path("benchmarks/labels/miniature-autojudge"))
    parser.add_argument("--out", type=Path, default=Path("runs/arc"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    PARTS[options.part](load_pair(options.target, dtype="float32"), options)


if __name__ == "__main__":
    run(main)
