"""`reprieve bench`, `demo`, `report` and `rules`: compare arms, write an HTML page, list the rules."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.backends.settings import EngineSettings
from reprieve.bench.settings import RunSettings, SpeedSettings, VerdictSettings
from reprieve.cli import screen
from reprieve.cli.command import INTERRUPTED, Command
from reprieve.cli.generate import Generate
from reprieve.cli.tables import show_results, show_throughput
from reprieve.display import LEGEND
from reprieve.errors import SpecError, install_command, require_choice
from reprieve.settings import AUTO, NumDraftTokens, PairSettings

if TYPE_CHECKING:
    from reprieve.bench.arms import Arm
    from reprieve.bench.engine import Engine
    from reprieve.bench.results import Results, ThroughputResults
    from reprieve.bench.run import Run
    from reprieve.tasks import Task
    from reprieve.tasks.chat import Chat

_DEMO_ARMS = ("judge:threshold=0.1", "margin:delta=2")
_DEMO_QUESTION = (
    "Noah works 6 hours a day for 4 days and earns 3 dollars per hour. He spends 48 dollars on food. How many dollars "
    "does Noah have now?"
)
_DEMO_K = 16  # of the two answers that are shown; `auto` has to see some answers first
_DEMO_SECONDS = 3  # of a problem, all arms, on two CPU cores
_DEMO_FEW = 200  # problems: fewer give wide intervals
_FEW = 100  # problems; with fewer, the fastest K may be due to chance


@dataclass(frozen=True)
class Bench(Command):
    """Compare rules on a task, with each other and with target-only, draft-only and lossless decoding.

    Args:
        arm: A rule, such as margin:delta=1,2,3 (an arm for each) or judge:path=heads/j@K=24; lossless_rerun;
            direct:top_k:k=4. Repeatable.
        skip: target_only or draft_only, to leave it out. Repeatable.
        num_draft_tokens: K, drafted tokens per round; several as 8,16,auto; auto (adaptive), or auto:path=HEAD.
        num_workers: Parallel processes. With more than one, timings are unreliable.
        out: Folder for results; run again with it to resume.
    """

    verb = "bench"
    example = "reprieve bench --arm judge --arm margin:delta=1,2 --limit 100"

    arm: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    num_draft_tokens: tuple[NumDraftTokens, ...] = (AUTO,)
    settings: RunSettings = field(default_factory=RunSettings)
    speed: SpeedSettings = field(default_factory=SpeedSettings)
    verdicts: VerdictSettings = field(default_factory=VerdictSettings)
    num_workers: int = 1
    engine: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/bench")

    def run(self) -> int:
        return self.run_for(self)

    def run_for(self, command: Command) -> int:
        """Measure and report; the folder's config repeats `command`. Returns the exit status."""
        from reprieve.bench.arms import make_arms
        from reprieve.engine import DRAFT_ONLY, TARGET_ONLY

        for name in self.skip:
            require_choice("skip", name, (TARGET_ONLY, DRAFT_ONLY))
        arms = make_arms(self.arm, self.engine.draft_tokens(*self.num_draft_tokens), target=self.pair.target)
        arms = [arm for arm in arms if arm.label not in self.skip]
        if self.speed.concurrency and (self.engine.local or self.engine.batched):
            raise SpecError(
                f"--concurrency requires a server engine (--engine vllm), got --engine {self.engine.engine}"
            )
        chat = None
        if self.verdicts.judge is not None:  # a judge that cannot be used fails before anything is measured
            from reprieve.tasks.chat import make_chat

            self._require_baseline(arms)
            chat = make_chat(self.verdicts.judge)
        run, results = self._measure(arms, command)
        status = self._report(run, results)
        if chat is not None and run.complete:
            _show_verdicts(run, chat, self.verdicts, self.out)
        return status

    def _require_baseline(self, arms: list[Arm]) -> None:
        if self.verdicts.judge is not None:
            require_choice("baseline", self.verdicts.baseline, tuple(arm.label for arm in arms))

    def _measure(self, arms: list[Arm], command: Command) -> tuple[Run, Results]:
        from reprieve.bench.engine import RunConfig
        from reprieve.bench.run import Run
        from reprieve.bench.summary import summarise
        from reprieve.engine import DRAFT_ONLY, TARGET_ONLY

        settings = self.settings
        opened = screen.engine_and_task(self.engine, self.pair, settings, num_workers=self.num_workers)
        with opened as (engine, task):
            alone = (TARGET_ONLY, DRAFT_ONLY)  # left out where the engine cannot run them
            arms = [arm for arm in arms if arm.label not in alone or not engine.refusal(arm, settings.drafter)]
            self._require_baseline(arms)
            config = RunConfig.of(engine, arms, settings, command=screen.command_line())
            run = Run(config, arms, engine, task, self.out)
            command.keep_config(self.out)
            with screen.progress(f"{len(arms)} arms", "answers") as progress:
                run.measure(progress=progress)
            results = summarise(run)
            if self.speed.concurrency and run.complete:
                throughput = _under_load(engine, run, task, self.speed, self.out)
                results = dataclasses.replace(results, throughput=throughput)
        return run, results

    def _report(self, run: Run, results: Results) -> int:
        """Write and show what was measured; returns the exit status."""
        from reprieve.bench.figures import draw_frontier
        from reprieve.bench.results import best_ks

        results.write(self.out)
        if not results.arms:
            kept = f"; records kept in {self.out}" if run.records else ""
            screen.warn(f"interrupted before every arm had answered a problem{kept}")
            return INTERRUPTED
        show_results(results)
        if unread := next((record for record in run.records if record.unread and results.graded), None):
            which = f"{unread.arm}, {unread.problem_id}"
            screen.say(f"a response without a recognised answer ({which}) ends: {unread.text[-200:]!r}")
        show_throughput(results.throughput)
        fastest = best_ks(results.arms, results.throughput)
        for best in fastest:
            if len(best.by_k) > 1:
                speeds = ", ".join(f"{k}: {speed:.0f}" for k, speed in best.by_k.items())
                screen.say(f"fastest: --arm {best.spec}@K={best.num_draft_tokens}   (tokens/s by K: {speeds})")
        n = results.num_problems
        if n < _FEW and any(len(best.by_k) > 1 for best in fastest):
            problems = f"{n} problem{'s' * (n > 1)}"
            screen.say(f"{problems}: too few to compare these speeds; measure again with --limit {_FEW} or more")
        screen.say(f"results: {self.out / 'results.json'}")
        if not self.engine.local and not results.throughput:
            how = "--engine local" if self.engine.batched else "--concurrency"
            screen.warn(f"no speeds, because answers shared batches: `reprieve bench {how}` measures them")
        if self.num_workers > 1:
            screen.warn(f"{self.num_workers} processes shared this machine: measure speeds with --workers 1")
        if not results.graded:
            screen.say("This task has no reference answers: --judge openai:model=NAME,url=ADDRESS compares the texts.")
        elif find_spec("matplotlib"):
            screen.say(f"figure: {draw_frontier(results, self.out)[0]}")
        else:
            screen.say(f"matplotlib is not installed; skipping the figure: {install_command('evidence')}")
        if not run.complete:
            screen.warn("interrupted: the table holds what was finished; run again to resume")
            return INTERRUPTED
        return 1 if any(arm.num_failed for arm in results.arms) else 0


@dataclass(frozen=True)
class Demo(Command):
    """Compare a trained and an untrained rule with lossless decoding and the target alone on generated word problems.

    Args:
        num_draft_tokens: K, drafted tokens per round; auto (adaptive), or auto:path=HEAD.
        out: Folder for results; run again with it to resume.
    """

    verb = "demo"
    example = "reprieve demo --limit 10"

    num_draft_tokens: NumDraftTokens = AUTO
    settings: RunSettings = field(default_factory=lambda: RunSettings(limit=15))
    pair: PairSettings = field(default_factory=lambda: PairSettings(dtype="float32"))
    out: Path = Path("runs/demo")

    def run(self) -> int:
        minutes = max(1, round(self.settings.limit * _DEMO_SECONDS / 60))
        screen.say(
            f"Answers one question losslessly and with a trained rule, then compares {len(_DEMO_ARMS)} rules with "
            f"lossless decoding on {self.settings.limit} problems.\n"
            f"Takes about {minutes} minute{'s' * (minutes > 1)} on two "
            "CPU cores; the models are bundled, nothing is downloaded. Ctrl-C keeps what is done."
        )
        k = _DEMO_K if self.num_draft_tokens == AUTO else self.num_draft_tokens
        for rule in ("lossless", _DEMO_ARMS[0]):
            screen.console().print(f"\n[bold]{rule}[/bold]  {_DEMO_QUESTION}", soft_wrap=True)
            Generate(_DEMO_QUESTION, rule=rule, num_draft_tokens=k, pair=self.pair).run()
            screen.say(f"{LEGEND}\n")
        bench = Bench(_DEMO_ARMS, (), (self.num_draft_tokens,), settings=self.settings, pair=self.pair, out=self.out)
        status = bench.run_for(self)
        if self.settings.limit < _DEMO_FEW:
            screen.say(
                f"{self.settings.limit} problems give wide intervals: reprieve demo --limit 500 --out runs/demo-500"
            )
        if (picture := self.out / "frontier.png").exists():
            screen.say(f"Picture: {picture}")
        screen.say("Next: reprieve serve   opens a page that shows the source of each token")
        return status


@dataclass(frozen=True)
class Report(Command):
    """Write one self-contained HTML page: frontier, table, certificates, examples, commands.

    Args:
        folders: Result folders of bench or certify.
        title: Title of the page.
        out: The HTML file.
    """

    verb = "report"
    example = "reprieve report runs/bench --out report.html"

    folders: tuple[Path, ...] = field(metadata={"positional": True})
    title: str = ""
    out: Path = Path("report.html")

    def run(self) -> int:
        from reprieve.bench.report import write_report

        path = write_report(self.folders, self.out, title=self.title)
        screen.say(f"report: {path} ({path.stat().st_size / 1024:.0f} KiB, opens in any browser)")
        return 0


@dataclass(frozen=True)
class Rules(Command):
    """List the rules with their sources, parameters, defaults and dials."""

    verb = "rules"
    example = "reprieve rules"

    def run(self) -> int:
        from reprieve.rules import RULES
        from reprieve.specs import parameters_of

        out = screen.console()
        for kind in RULES:
            summary = (kind.__doc__ or "").strip().splitlines()[0]
            out.print(f"[bold]{kind.name}[/bold]  {summary}", soft_wrap=True)
            if kind.origin:
                out.print(f"    from {kind.origin}", soft_wrap=True, markup=False)
            for name, parameter in parameters_of(kind).items():
                dial = "  (dial)" if kind.own_dial is not None and name == kind.own_dial.name else ""
                out.print(f"    {name}={parameter.default}{dial}", soft_wrap=True, markup=False)
        out.print(
            "\nWrite name:parameter=value,...; a&b needs both, a|b either; start= and end= restrict a rule to a span."
        )
        return 0


def _show_verdicts(run: Run, chat: Chat, settings: VerdictSettings, out: Path) -> None:
    """Have a language model compare a run's answers, and print its verdict on each arm; resumes."""
    from reprieve.bench.verdicts import judge_run

    with screen.progress("verdicts") as progress:
        document = judge_run(out, run.problems, run.records, chat, settings, progress=progress)
    for arm in document["arms"]:
        screen.say(f"{arm['arm']}: {_verdict_words(arm)}")
    screen.say(f"verdicts: {out / 'verdicts.jsonl'}")


def _verdict_words(arm: dict[str, Any]) -> str:
    if not arm["num_judged"]:
        return "the judge gave no verdict"
    low, high = arm["equal_or_better_ci95"]
    return (
        f"equal or better in {100 * arm['equal_or_better']:.1f}% [{100 * low:.1f}, {100 * high:.1f}] "
        f"(won {arm['num_wins']}, tied {arm['num_ties']}, lost {arm['num_losses']})"
    )


def _under_load(engine: Engine, run: Run, task: Task, speed: SpeedSettings, out: Path) -> list[ThroughputResults]:
    """Tokens per second of a run's arms at each concurrency."""
    from reprieve.backends.served import ServedEngine
    from reprieve.backends.throughput import measure_throughput

    assert isinstance(engine, ServedEngine)
    with screen.progress("turns") as progress:
        return measure_throughput(engine, run.config, task, run.arms, speed, out, progress=progress)
