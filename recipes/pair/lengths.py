"""Train the bundled pair's draft length heads: `python -m recipes.pair.lengths --out runs/lengths`; resumes.

Run it after the other heads are installed, on an otherwise idle core: a head's price comes from measured times.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from reprieve.cli.train import TrainLength
from reprieve.settings import PairSettings, ProblemSettings
from reprieve.training.settings import LengthTraining

# For each rule with a length head, the values of its dial that the head serves.
DIALS: dict[str, tuple[float, ...]] = {
    "lossless": (),
    "judge": (0.05, 0.1, 0.214),
    "pivot": (0.246, 0.5, 0.7),
    "arbiter": (0.4, 0.5, 0.6),
    "state_arbiter": (0.5, 0.51),
    "margin": (1, 2, 3),
    "typical": (-1, 0, 1),
    "fly": (0.1, 0.3, 1),
    "fuzzy": (0.1, 0.2, 0.4),
}


def command(rule: str, out: Path, limit: int) -> TrainLength:
    """Return the command that trains a rule's head into `out/length-RULE`."""
    return TrainLength(
        rule=rule,
        problems=ProblemSettings(split="train", limit=limit),
        settings=LengthTraining(thresholds=DIALS[rule], num_draft_tokens=32),
        pair=PairSettings(num_threads=1),
        out=out / f"length-{rule}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=400, help="training problems")
    parser.add_argument("--out", type=Path, default=Path("runs/lengths"))
    arguments = parser.parse_args()
    for rule in DIALS:
        one = command(rule, arguments.out, arguments.limit)
        if not (one.out / "config.json").exists():
            one.run()


if __name__ == "__main__":
    main()
