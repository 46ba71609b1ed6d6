"""`reprieve calibrate lts`: what ARC-Decode's acceptance rule measures once per target."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reprieve.cli import options as o

if TYPE_CHECKING:
    from reprieve.heads.lts import LtsCalibration


def lts(
    target: o.Target = o.BUNDLED,
    task: o.TaskName = "arithmetic",
    split: Annotated[str | None, typer.Option(help="Split the prompts come from; validation if there is one.")] = None,
    limit: Annotated[int, typer.Option(help="Number of prompts; the paper uses 200.")] = 200,
    offset: o.Offset = 0,
    delta: Annotated[float, typer.Option(help="Share of positions the bound may miss.")] = 0.05,
    active: Annotated[int, typer.Option(help="Size of the active vocabulary: the paper's top-K.")] = 10,
    safety: Annotated[float, typer.Option(help="alpha, the factor on the log-probability side; 1 or more.")] = 1.0,
    bucket_by: Annotated[str, typer.Option(help="none, entropy, distance or margin.")] = "none",
    buckets: Annotated[int, typer.Option(help="Number of equally filled buckets.")] = 4,
    confidence: Annotated[
        float | None, typer.Option(help="Correct the quantiles for the sample's size, at this confidence.")
    ] = None,
    temperature: o.Temperature = 1.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path, typer.Option(help="Folder for the constants.")] = Path("heads/lts"),
) -> int:
    """Measure the bound's constants on the target's own answers (Algorithm 1)."""
    from reprieve.calibration.lts import LtsRecipe, bounds_of, collect_swaps, fit
    from reprieve.settings import SamplingParams
    from reprieve.training.own_text import own_text_path, write_own_texts

    recipe = LtsRecipe(
        delta=delta,
        active=active,
        safety=safety,
        bucket_by=bucket_by,
        buckets=buckets,
        confidence=confidence,
        seed=seed,
    )
    o.require_problems(limit, offset)
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    pair, loaded = o.load_pair_and_task(target, None, dtype, device, task)
    claim_folder(out, "lts")
    split = o.split_of(loaded, split, "validation")
    params = SamplingParams(
        max_new_tokens=loaded.max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    problems = loaded.problems(split, limit, offset=offset)
    path = own_text_path(out, pair, f"{task} {split} {offset}", params, mixed=False)
    with o.progress_bar("answers") as bar:
        texts = write_own_texts(path, pair, problems, params=params, progress=o.reporter(bar))
    with o.progress_bar("next steps") as bar:
        scale, swaps = collect_swaps(
            pair,
            [(text.prompt_ids, text.answer_ids) for text in texts],
            recipe,
            params,
            progress=o.reporter(bar, "answers"),
        )
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    calibration = fit(pair, task, scale, swaps, recipe, split=split, limit=limit, offset=offset, sampling=sampling)
    calibration.save_pretrained(out)
    bound, tolerance = bounds_of(calibration, swaps)
    told = [*_constants(calibration), f"{swaps.num} positions of {len(texts)} answers; the bound covers "
            f"{(swaps.divergence <= bound).mean():.1%} of them, the tolerance "
            f"{(swaps.divergence <= tolerance).mean():.1%}"]  # fmt: skip
    if float(calibration.tolerances.max()) > math.log(2):
        told.append("the tolerance is above ln 2, the largest divergence there is: it excludes nothing, theta has to")
    told.append(f"calibration: {out}   use it: reprieve bench --arm lts:path={out}")
    o.console().print("\n".join(told), soft_wrap=True, markup=False)
    return 0


def _constants(calibration: LtsCalibration) -> list[str]:
    """A line for each bucket."""
    parts = (calibration.embedding_factors, calibration.logit_factors, calibration.tolerances)
    lines = []
    for bucket, (factor, logit_factor, tolerance) in enumerate(zip(*parts, strict=True)):
        name = f"bucket {bucket}: " if len(calibration.edges) else ""
        lines.append(f"{name}c' {factor:.4g}, alpha kappa {logit_factor:.4g}, tau_delta {tolerance:.4g} nats")
    return lines


COMMANDS: dict[str, Any] = {"lts": lts}
