"""`reprieve train lts`: the constants of ARC-Decode's acceptance rule, measured once per target."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.settings import PairSettings, ProblemSettings, SamplingParams, SamplingSettings
from reprieve.training.settings import LtsRecipe

if TYPE_CHECKING:
    from reprieve.heads.lts import LtsCalibration


@dataclass(frozen=True)
class TrainLts(Command):
    """Measure the bound's constants on the target's own answers (ARC-Decode, Algorithm 1).

    Args:
        out: Folder for the constants.
    """

    verb = "train lts"
    example = "reprieve train lts --limit 200 --out heads/lts"

    problems: ProblemSettings = field(default_factory=lambda: ProblemSettings(split="validation"))
    settings: LtsRecipe = field(default_factory=LtsRecipe)
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(temperature=1.0))
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("heads/lts")

    def run(self) -> int:
        from reprieve.heads.files import claim_head
        from reprieve.training.lts import bounds_of, collect_swaps, fit
        from reprieve.training.own_text import own_text_path, write_own_texts

        recipe = self.settings
        pair, task = screen.load_for(self.pair, self.problems)
        claim_head(self.out, "lts")
        problems = screen.problems_for(pair, task, self.problems)
        params = SamplingParams(**vars(self.sampling), max_new_tokens=task.max_new_tokens, seed=recipe.seed)
        path = own_text_path(self.out, pair, self.problems, params, mixed=False)
        with screen.progress_bar("answers") as bar:
            texts = write_own_texts(path, pair, problems, params=params, progress=screen.reporter(bar))
        with screen.progress_bar("next steps") as bar:
            scale, swaps = collect_swaps(
                pair,
                [(text.prompt_ids, text.answer_ids) for text in texts],
                recipe,
                params,
                progress=screen.reporter(bar, "answers"),
            )
        sampling = {name: value for name, value in asdict(self.sampling).items() if name != "draft_temperature"}
        fitted = fit(
            pair,
            self.problems.task,
            scale,
            swaps,
            recipe,
            split=self.problems.split,
            limit=self.problems.limit,
            offset=self.problems.offset,
            sampling=sampling,
        )
        digests = tuple(sorted({problem.digest for problem in problems}))
        fitted = replace(fitted, prompt=self.problems.prompt.format, problems=digests)
        fitted.save_pretrained(self.out)
        self.keep_config(self.out)
        bound, tolerance = bounds_of(fitted, swaps)
        covered, tolerated = (swaps.divergence <= bound).mean(), (swaps.divergence <= tolerance).mean()
        notes = [
            *_constants(fitted),
            f"{swaps.num} positions of {len(texts)} answers; the bound covers {covered:.1%} of them, the tolerance "
            f"{tolerated:.1%}",
        ]
        if float(fitted.tolerances.max()) > math.log(2):
            notes.append("the tolerance is above ln 2, the largest divergence: only theta excludes tokens")
        notes.append(f"calibration: {self.out}   use it: reprieve bench --arm lts:path={self.out}")
        screen.say("\n".join(notes))
        return 0


def _constants(calibration: LtsCalibration) -> list[str]:
    """A line for each bucket."""
    parts = (calibration.embedding_factors, calibration.logit_factors, calibration.tolerances)
    lines = []
    for bucket, (factor, logit_factor, tolerance) in enumerate(zip(*parts, strict=True)):
        name = f"bucket {bucket}: " if len(calibration.edges) else ""
        lines.append(f"{name}c' {factor:.4g}, alpha kappa {logit_factor:.4g}, tau_delta {tolerance:.4g} nats")
    return lines
