"""`reprieve train judge|pivot|eagle|arbiter`: heads from labels, a drafting head from the target's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reprieve.cli import options as o
from reprieve.cli import train_arbiter, train_eagle
from reprieve.errors import import_extra, require_range

if TYPE_CHECKING:
    from reprieve.engine import Pair
    from reprieve.heads.base import Head
    from reprieve.heads.features import FeatureRecipe
    from reprieve.labelling.records import ProblemLabels
    from reprieve.training.features import LabelledTokens

Labels = Annotated[Path, typer.Option(help="Label store, from `reprieve mine`.")]
HeadOut = Annotated[Path, typer.Option("--out", help="Folder for the head.")]
Folds = Annotated[
    int | None,
    typer.Option(help="Train one head per fold of the problems, without that fold (out-of-fold evaluation)."),
]
HeldOut = Annotated[float, typer.Option(help="Share of problems held out.")]
Layers = Annotated[str, typer.Option(help="Target layers, such as -1 or -1,-4; -1 is the last, after the norm.")]


def judge(
    labels: Labels = Path("runs/labels"),
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    states: Annotated[str, typer.Option(help="Hidden states of target, draft or both.")] = "target",
    encoding: Annotated[str, typer.Option(help="Of the draft token, or of the previous one.")] = "draft",
    layers: Layers = "-1",
    grid: Annotated[str, typer.Option(help="Values of C to try.")] = "1,0.1,0.01,1e-3,1e-4,1e-5,1e-6,1e-7",
    held_out: HeldOut = 0.1,
    folds: Folds = None,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: HeadOut = Path("heads/judge"),
) -> int:
    """Fit AutoJudge's linear head."""
    from reprieve.heads.features import FeatureRecipe

    recipe = FeatureRecipe(states=states, encoding=encoding, layers=tuple(o.parse_numbers(layers, "--layers", int)))
    recipe.require_decodable()
    values = o.parse_numbers(grid, "--grid")
    from reprieve.training.judge import require_grid

    require_grid(values)

    def fit(tokens: LabelledTokens, pair: Pair, task: str, progress: Any) -> Head:
        from reprieve.training.judge import train_judge

        return train_judge(
            tokens, pair.identity, task, recipe=recipe, grid=values, held_out=held_out, seed=seed, progress=progress
        )

    return _train(fit, recipe, held_out, folds, labels, target, draft, dtype, device, out)


def pivot(
    labels: Labels = Path("runs/pivots"),
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    layers: Layers = "-1",
    hidden_size: Annotated[int, typer.Option(help="Units of the branch on the hidden state.")] = 64,
    epochs: Annotated[int, typer.Option(help="Largest number of epochs.")] = 60,
    held_out: HeldOut = 0.2,
    folds: Folds = None,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: HeadOut = Path("heads/pivot"),
) -> int:
    """Fit PAD's two-branch MLP."""
    import dataclasses

    from reprieve.heads.features import PIVOT

    recipe = dataclasses.replace(PIVOT, layers=tuple(o.parse_numbers(layers, "--layers", int)))
    from reprieve.training.pivot import PivotTraining

    settings = PivotTraining(hidden_size=hidden_size, num_epochs=epochs)

    def fit(tokens: LabelledTokens, pair: Pair, task: str, progress: Any) -> Head:
        from reprieve.training.pivot import train_pivot

        return train_pivot(
            tokens,
            pair.identity,
            task,
            recipe=recipe,
            held_out=held_out,
            seed=seed,
            settings=settings,
            progress=progress,
        )

    return _train(fit, recipe, held_out, folds, labels, target, draft, dtype, device, out)


COMMANDS: dict[str, Any] = {
    "judge": judge,
    "pivot": pivot,
    "eagle": train_eagle.command,
    "arbiter": train_arbiter.command,
}


def _train(
    fit: Any,
    recipe: FeatureRecipe,
    held_out: float,
    folds: int | None,
    labels: Path,
    target: str,
    draft: str | None,
    dtype: str,
    device: str | None,
    out: Path,
) -> int:
    """Read labels, recompute their features, fit, save and report; returns the exit status."""
    require_range("held_out", held_out, 0.0, 0.9, low_open=True)
    import_extra("sklearn", "labels")
    o.quiet_transformers()
    from reprieve.engine import load_pair
    from reprieve.heads.folds import fold_folder, fold_of, require_folds, write_folds
    from reprieve.labelling.store import LabelStore

    store = LabelStore(labels)
    pair = load_pair(target, draft, dtype=dtype, device=device)
    store.require_pair(pair.identity)
    claim_folder(out)
    problems = store.problems()
    if folds is not None:
        require_folds(folds)
        for fold in range(folds):
            kept = [problem for problem in problems if fold_of(problem.problem_id, folds) != fold]
            _fit_one(fit, recipe, pair, kept, store.manifest["task"], fold_folder(out, fold))
        write_folds(out, folds)
        o.console().print(f"out-of-fold heads: {out}   each problem is answered with the head that never saw it")
        return 0
    head = _fit_one(fit, recipe, pair, problems, store.manifest["task"], out)
    o.console().print(
        f"head: {out}   use it: reprieve bench --arm {head.kind}:path={out}", soft_wrap=True, markup=False
    )
    return 0


def _fit_one(fit: Any, recipe: FeatureRecipe, pair: Pair, problems: list[ProblemLabels], task: str, out: Path) -> Head:
    """Recompute the features of some labels, fit a head, save it and say how good it is."""
    from reprieve.training.features import collect

    claim_folder(out)
    with o.progress_bar("features") as bar:
        tokens = collect(
            pair,
            problems,
            layers=recipe.layers,
            draft_layers=recipe.draft_layers if recipe.reads_draft else (),
            progress=o.reporter(bar, "problems"),
        )
    with o.progress_bar("fitting") as bar:
        head: Head = fit(tokens, pair, task, o.reporter(bar, "steps"))
    head.save_pretrained(out)
    made = head.training
    auc, low, high = made["auc_held_out"]
    lines = (
        f"{made['num_tokens']} labels of {made['num_problems']} problems, {made['num_important']} important; held-out "
        f"ROC AUC {auc:.3f} [{low:.3f}, {high:.3f}]",
        f"features: {recipe.name}",
        f"threshold {head.threshold:g} refuses {100 * made['recall_at_threshold']:.0f}% of the important and accepts "
        f"{100 * made['acceptance_at_threshold']:.0f}% of the others",
    )
    o.console().print("\n".join(lines), soft_wrap=True, markup=False)
    return head
