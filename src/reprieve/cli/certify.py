"""`reprieve certify`: the most lenient threshold whose loss is provably below a bound."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from reprieve.backends.settings import EngineSettings
from reprieve.certify.settings import CertifySettings
from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.settings import PairSettings


@dataclass(frozen=True)
class Certify(Command):
    """Certify a threshold: test from strict to lenient, stop at the first without a proof, confirm on held-out data.

    Args:
        num_workers: Number of parallel processes.
        out: Folder for results; run again with it to resume.
    """

    verb = "certify"
    example = "reprieve certify --rule judge --max-drop 0.05 --limit 200 --held-out-limit 200"

    settings: CertifySettings
    num_workers: int = 1
    answering: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/certify")

    def run(self) -> int:
        from reprieve.certify.procedure import Plan, certify

        [k] = self.answering.draft_tokens(self.settings.num_draft_tokens)
        plan = Plan.of(replace(self.settings, num_draft_tokens=k), target=self.pair.target)
        run_settings = self.settings.run
        opened = screen.engine_and_task(
            self.answering, self.pair, run_settings.task, run_settings.prompt, num_workers=self.num_workers
        )
        with opened as (engine, task), screen.progress_bar("answers") as bar:
            self._warn_of_few(len(task.problems(run_settings.split, run_settings.limit, offset=run_settings.offset)))
            outcome = certify(
                plan,
                engine,
                task,
                self.out,
                command=screen.command_line(),
                announce=screen.say,
                progress=screen.reporter(bar),
            )
        if outcome is None:
            screen.warn("interrupted: answers are kept; run again to go on")
            return 130
        self.keep_config(self.out)
        if outcome.certificate is None:
            screen.say(f"no certificate: {outcome.reason}")
            return 1
        screen.say(f"\n{outcome.certificate.statement}")
        screen.say(f"{outcome.certificate.verdict}; certificate: {outcome.path}")
        screen.say(f"use it: reprieve bench --arm certified:{outcome.path}")
        return 0

    def _warn_of_few(self, num_problems: int) -> None:
        """Warn before any answer if the promise needs more problems than there are."""
        from reprieve.certify.fixed_sequence import num_needed

        if num_problems < (needed := num_needed(self.settings.promise)):
            screen.warn(
                f"{num_problems} calibration problems cannot prove a loss below "
                f"{100 * self.settings.promise.max_drop:g} points: {needed} or more are needed (--limit, --max-drop)"
            )
