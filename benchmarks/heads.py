"""Accuracy of heads at detecting important tokens: `python benchmarks/heads.py`.

Held-out ROC AUC of judge, pivot and the target's log-probability alone, with bootstrap intervals over problems; ROC
curves; AutoJudge's ablations (Figures 6 and 7) and correlations (appendix O). Writes heads.json and roc.png.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import roc_curve
from sklearn.neural_network import MLPClassifier

import reprieve
from arms import labels_of, over, part, run, task_of, write_parts
from reprieve.heads.settings import FeatureRecipe
from reprieve.training.classifiers import fit_linear, train_pivot
from reprieve.training.features import LabelledTokens, auc, auc_interval, collect, split_by_problem
from reprieve.training.settings import JudgeTraining, PivotTraining

SEED = 0
GRID = JudgeTraining().grid
ENCODINGS = ("previous", "draft", "target", "both")


class Split:
    """Split into training and held-out problems, shared by all comparisons."""

    def __init__(self, tokens: LabelledTokens, held_out: float) -> None:
        self.tokens = tokens
        self.held = split_by_problem(tokens.problem_ids, tokens.important, held_out=held_out, seed=SEED)

    def interval(self, scores: np.ndarray) -> list[float]:
        """Return the held-out AUC and its interval, given scores of all tokens."""
        tokens, held = self.tokens, self.held
        return auc_interval(tokens.important[held], scores[held], tokens.problem_ids[held])

    def linear(self, recipe: FeatureRecipe, c: float) -> np.ndarray:
        """Return scores of all tokens by a logistic regression fitted to the training problems."""
        features = self.tokens.features(recipe)
        return fit_linear(features[~self.held], self.tokens.important[~self.held], c).scores(features)

    def best_linear(self, recipe: FeatureRecipe) -> tuple[float, np.ndarray]:
        """Choose C by AUC on an eighth of the training problems; return it and the scores of its fit to all of them.

        Held-out problems do not influence the choice, so their AUC is not that of the luckiest C.
        """
        tokens, training = self.tokens, ~self.held
        features, important = tokens.features(recipe)[training], tokens.important[training]
        chosen = split_by_problem(tokens.problem_ids[training], important, held_out=0.125, seed=SEED)
        fits = {c: fit_linear(features[~chosen], important[~chosen], c) for c in GRID}
        best = max(GRID, key=lambda c: auc(important[chosen], fits[c].scores(features[chosen])))
        return best, self.linear(recipe, best)


JUDGE_TARGET, JUDGE_BOTH = FeatureRecipe(), FeatureRecipe(states="both")


def regularisation(split: Split) -> list[list[str]]:
    """Figure 6, left: every C of the grid."""
    return [["regularisation", *_row(f"C = {c:g}", split, split.linear(JUDGE_BOTH, c))] for c in GRID]


def classifiers(split: Split) -> list[list[str]]:
    """Figure 6, right: logistic regression, random forest, MLP, with the paper's settings."""
    features, important, held = split.tokens.features(JUDGE_BOTH), split.tokens.important, split.held
    mean, scale = features[~held].mean(0), features[~held].std(0) + 1e-8
    standard = (features - mean) / scale
    models = {
        "random forest, 128 trees": RandomForestClassifier(
            n_estimators=128, min_samples_leaf=0.001, random_state=SEED, n_jobs=1
        ),
        "MLP, 128 hidden units": MLPClassifier(hidden_layer_sizes=(128,), early_stopping=True, random_state=SEED),
    }
    c, scores = split.best_linear(JUDGE_BOTH)
    rows = [_row(f"logistic regression, C = {c:g}", split, scores)]
    for name, model in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(standard[~held], important[~held])
        rows.append(_row(name, split, model.predict_proba(standard)[:, 1]))
    return [["classifier", *row] for row in rows]


def _row(name: str, split: Split, scores: np.ndarray) -> list[str]:
    held, important = split.held, split.tokens.important
    return [name, over(split.interval(scores)), f"{auc(important[~held], scores[~held]):.3f}"]


def inputs(split: Split) -> list[list[str]]:
    """Figure 7: the encoded token (with both models' states), and the models (with the drafted token's states)."""
    recipes = {
        ("encoded token, both models' states", encoding): FeatureRecipe(states="both", encoding=encoding)
        for encoding in ENCODINGS
    }
    recipes |= {
        ("whose states, of the drafted token", states): FeatureRecipe(states=states)
        for states in ("draft", "target", "both")
    }
    return [[group, *_row(name, split, split.best_linear(recipe)[1])] for (group, name), recipe in recipes.items()]


def _log_probs(tokens: LabelledTokens) -> np.ndarray:
    """Return the target's log-probabilities of the drafted tokens."""
    return tokens.states.probability.clamp_min(1e-45).log().numpy()


def _draft_probability(tokens: LabelledTokens) -> np.ndarray:
    """Return the draft's probabilities of the drafted tokens."""
    return tokens.states.draft_probability.numpy().astype(np.float64)


def correlation(split: Split, scores: np.ndarray) -> list[list[str]]:
    """Appendix O: correlation of the head's and the draft's probability of drafted tokens, on held-out problems."""
    held = split.held
    head_scores, draft_probs = scores[held], _draft_probability(split.tokens)[held]
    problems = split.tokens.problem_ids[held]
    by_problem = [
        np.corrcoef(head_scores[problems == problem], draft_probs[problems == problem])[0, 1]
        for problem in np.unique(problems)
        if (problems == problem).sum() > 2
    ]
    low, middle, high = np.nanquantile(by_problem, [0.1, 0.5, 0.9])
    return [
        ["Pearson correlation over held-out tokens", f"{np.corrcoef(head_scores, draft_probs)[0, 1]:.2f}"],
        ["covariance", f"{np.cov(head_scores, draft_probs)[0, 1]:.3f}"],
        ["Pearson by problem: 10th, 50th, 90th percentile", f"{low:.2f}, {middle:.2f}, {high:.2f}"],
    ]


def draw(curves: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Plot ROC curves with their AUC in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 4.6))
    for name, (important, scores) in curves.items():
        false_positives, true_positives, _ = roc_curve(important, scores)
        axes.plot(false_positives, true_positives, label=f"{name}: {auc(important, scores):.3f}")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="unimportant tokens refused", ylabel="important tokens refused", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="lower right", fontsize=8, title="held-out ROC AUC", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge-labels", type=Path, default=Path("benchmarks/labels/miniature-autojudge"))
    parser.add_argument("--pivot-labels", type=Path, default=Path("benchmarks/labels/miniature-pivot"))
    parser.add_argument("--held-out", type=float, default=0.2)
    parser.add_argument("--target", default="reprieve/miniature")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/heads-report"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pair = reprieve.load_pair(arguments.target, arguments.draft)
    split = Split(collect(pair, labels_of(pair, arguments.judge_labels).problems()), arguments.held_out)
    tokens, held = split.tokens, split.held
    _, target_scores = split.best_linear(JUDGE_TARGET)
    _, both_scores = split.best_linear(JUDGE_BOTH)
    named = {
        "judge, target states": target_scores,
        "judge, target and draft states": both_scores,
        "target's log-probability alone": -_log_probs(tokens),
        "draft's probability alone": -_draft_probability(tokens),
    }
    curves = {name: (tokens.important[held], scores[held]) for name, scores in list(named.items())[:3]}
    rows = [["AutoJudge's", name, over(split.interval(scores))] for name, scores in named.items()]
    notes = ["AutoJudge's labels: " + _counts(tokens, held)]
    if arguments.pivot_labels.exists():
        more, counts = pivot_part(pair, arguments, curves)
        rows += more
        notes.append("PAD's: " + counts)
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(curves, arguments.out / "roc.png")
    ablations = [*regularisation(split), *classifiers(split), *inputs(split)]
    parts = {
        "auc": part(["labels", "score", "held-out ROC AUC"], rows, "; ".join(notes) + "; intervals over problems."),
        "ablations": part(["ablation", "variant", "held-out ROC AUC", "training"], ablations),
        "correlation": part(["head's probability and the draft's", "value"], correlation(split, target_scores)),
    }
    write_parts(arguments.out / "heads.json", parts)


def pivot_part(pair: reprieve.Pair, arguments: argparse.Namespace, curves: dict) -> tuple[list[list[str]], str]:
    """Compare the pivot head, a linear head and the log-probability on PAD's labels."""
    tokens = collect(pair, labels_of(pair, arguments.pivot_labels).problems())
    split = Split(tokens, arguments.held_out)
    settings = PivotTraining(held_out=arguments.held_out, seed=SEED)
    head = train_pivot(tokens, pair.identity, task_of(pair).name, settings=settings)
    named = {
        "pivot (MLP)": head.probability(torch.tensor(tokens.features(head.recipe))).numpy().astype(np.float64),
        "target's log-probability alone": -_log_probs(tokens),
        "linear head": split.best_linear(JUDGE_TARGET)[1],
    }
    curves["pivot, on PAD's labels"] = (tokens.important[split.held], named["pivot (MLP)"][split.held])
    rows = [["PAD's", name, over(split.interval(scores))] for name, scores in named.items()]
    return rows, _counts(tokens, split.held)


def _counts(tokens: LabelledTokens, held: np.ndarray) -> str:
    num, important = len(tokens.important), int(tokens.important.sum())
    problems = len(np.unique(tokens.problem_ids))
    return f"{num} of {problems} problems, {important} important, {int(held.sum())} held out"


if __name__ == "__main__":
    run(main)
