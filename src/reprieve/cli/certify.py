"""`reprieve certify` and `reprieve monitor`: prove that a rule loses little, and check it while it answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from reprieve.backends.settings import EngineSettings
from reprieve.bench.settings import CertifySettings, MonitorSettings, RunSettings
from reprieve.cli import screen
from reprieve.cli.command import INTERRUPTED, Command
from reprieve.errors import SpecError
from reprieve.settings import AUTO, NumDraftTokens, PairSettings


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
    engine: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/certify")

    def run(self) -> int:
        from reprieve.certify.fixed_sequence import num_needed
        from reprieve.certify.procedure import Plan, certify

        [k] = self.engine.draft_tokens(self.settings.num_draft_tokens)
        plan = Plan.of(replace(self.settings, num_draft_tokens=k), target=self.pair.target)
        run_settings = self.settings.run
        opened = screen.engine_and_task(self.engine, self.pair, run_settings, num_workers=self.num_workers)
        with opened as (engine, task), screen.progress("answers") as progress:
            num_problems = len(task.problems(run_settings.split, run_settings.limit, offset=run_settings.offset))
            promise = self.settings.promise
            if num_problems < (needed := num_needed(promise)):
                screen.warn(
                    f"{num_problems} calibration problems cannot prove a loss below {100 * promise.max_drop:g} points: "
                    f"{needed} or more are needed (--limit, --max-drop)"
                )
            outcome = certify(
                plan,
                engine,
                task,
                self.out,
                command=screen.command_line(),
                on_claimed=partial(self.keep_config, self.out),
                announce=screen.say,
                progress=progress,
            )
        if outcome is None:
            screen.warn("interrupted: answers are kept; run again to resume")
            return INTERRUPTED
        if outcome.certificate is None:
            screen.say(f"no certificate: {outcome.reason}")
            return 1
        screen.say(f"\n{outcome.certificate.statement}")
        screen.say(f"{outcome.certificate.verdict}; certificate: {outcome.path}")
        screen.say(f"use it: reprieve bench --arm certified:{outcome.path}")
        return 0


@dataclass(frozen=True)
class Monitor(Command):
    """Monitor quality while answering; the exit status is 1 if the alarm was raised.

    Args:
        rule: The rule, such as judge:path=heads/j,threshold=0.03.
        num_draft_tokens: K, drafted tokens per round; auto (adaptive), or auto:path=HEAD.
    """

    verb = "monitor"
    example = "reprieve monitor --rule judge --limit 100 --share 0.5"

    rule: str
    settings: MonitorSettings = field(default_factory=MonitorSettings)
    num_draft_tokens: NumDraftTokens = AUTO
    problems: RunSettings = field(default_factory=RunSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)

    def run(self) -> int:
        from reprieve.bench.arms import LOSSLESS, make_arm
        from reprieve.bench.engine import RunConfig
        from reprieve.certify.monitor import MonitorStatus, watch

        [k] = self.engine.draft_tokens(self.num_draft_tokens)
        strict, relaxed = (make_arm(rule, k, target=self.pair.target) for rule in (LOSSLESS, self.rule))
        if relaxed.rule is None or relaxed.rule.dial is None:
            raise SpecError(f"--rule must be a relaxed rule: there is nothing to watch in {self.rule!r}")
        problems = self.problems
        if problems.num_trials > 1:
            raise SpecError(f"--trials must be 1 for a monitor, got {problems.num_trials}")
        with screen.engine_and_task(self.engine, self.pair, problems) as (engine, task):
            config = RunConfig.of(engine, [strict, relaxed], problems, command=screen.command_line())
            if relaxed.certificate is not None:
                relaxed.certificate.check(config.conditions(engine, relaxed), where=f"of {relaxed.label}")
            alarm, num_tenths = False, 0

            def on_status(status: MonitorStatus) -> None:
                nonlocal alarm, num_tenths
                tenths = status.num_answered * 10 // status.num_problems
                if status.alarm != alarm or tenths > num_tenths:
                    alarm, num_tenths = status.alarm, tenths
                    screen.say(status.sentence())

            final = watch(engine, config, task, relaxed, strict, self.settings, on_status=on_status)
        screen.say(f"final: {final.sentence()}")
        return 1 if final.alarm else 0
