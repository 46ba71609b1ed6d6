"""`reprieve study`: tuned K, every rule, certificates and the report, in one command."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.files import replace_file
from reprieve.settings import PairSettings

CONTROLS = ("direct:top_k:k=2", "direct:margin:delta=2")
CERTIFIED = {"margin": "2"}
BUNDLED_CERTIFIED = {"judge": "0.02,0.04"}
# The bundled task's first thousand calibration problems chose these thresholds and the bound
# (docs/guides/evidence.md), so that certificates rest on the next.
BUNDLED_OFFSET = 1000


@dataclass
class Stage:
    """One command of the study."""

    name: str
    arguments: list[str]
    seconds: float = 0.0
    status: int | None = None
    process: Any = field(default=None, repr=False)

    @property
    def command(self) -> str:
        return shlex.join(["reprieve", *self.arguments])

    def log(self, out: Path) -> Path:
        """The file with all it said."""
        return out / f"{self.name.replace(' ', '-')}.log"

    @property
    def account(self) -> dict[str, Any]:
        return {"name": self.name, "command": self.command, "seconds": self.seconds, "status": self.status}


@dataclass(frozen=True)
class StudyCommand(Command):
    """Measure every rule at its own K, certify two rules, and write the report; resumes where it was stopped.

    Args:
        arm: A rule beside the usual ones, such as judge:path=heads/j. Repeatable.
        task: Task.
        limit: Problems of the frontier.
        tune_limit: Problems that choose K.
        num_draft_tokens: Values of K to choose from.
        certify_limit: Calibration problems, and as many held-out ones.
        max_drop: What certificates promise to stay below.
        num_workers: Processes side by side. Default: the cores, at most 4.
        seed: Same seed, same answers.
        out: Folder for results; run again with it to resume.
    """

    verb = "study"

    arm: tuple[str, ...] = ()
    task: str = "arithmetic"
    limit: int = 60
    tune_limit: int = 12
    num_draft_tokens: tuple[int, ...] = (4, 8, 16)
    certify_limit: int = 1000
    max_drop: float = 0.03
    num_workers: int | None = None
    seed: int = 0
    pair: PairSettings = field(default_factory=lambda: PairSettings(dtype="float32"))
    out: Path = Path("runs/study")

    def run(self) -> int:
        study = self._study()
        self.keep_config(self.out)
        ks = ",".join(map(str, self.num_draft_tokens))
        try:
            study.measure(["--num-draft-tokens", ks, "--limit", str(self.tune_limit)], ["--limit", str(self.limit)])
            study.report(f"{self.pair.target} on {self.task}")
        except StageFailed as failure:
            study.stop()
            failed = failure.stage
            screen.warn(
                f"{failed.name} ended with status {failed.status}; see {failed.log(self.out)}; run again to go on"
            )
            return 130 if failed.status == 130 else 1
        return 0

    def _study(self) -> Study:
        pair, bundled = self.pair, self.pair.bundled
        shared = ["--target", pair.target, *(["--draft", pair.draft] if pair.draft else []), "--task", self.task]
        shared += ["--seed", str(self.seed), "--dtype", pair.dtype, *(["--device", pair.device] if pair.device else [])]
        limit = str(self.certify_limit)
        return Study(
            rules={**usual_rules(bundled=bundled), **{name: (name,) for name in self.arm}},
            certified={**(BUNDLED_CERTIFIED if bundled else {}), **CERTIFIED},
            shared=shared,
            certify=[
                *("--max-drop", f"{self.max_drop:g}", "--num-draft-tokens", "8", "--limit", limit),
                *("--held-out-limit", limit, "--offset", str(BUNDLED_OFFSET if bundled else 0)),
            ],
            num_workers=min(os.cpu_count() or 1, 4) if self.num_workers is None else self.num_workers,
            out=self.out,
            target=pair.target,
        )


def usual_rules(*, bundled: bool) -> dict[str, tuple[str, ...]]:
    """What every rule says of its place in a study: the setting that chooses its K, and the settings to measure.

    Args:
        bundled: whether rules with a head can be among them: only the bundled pair has heads that nobody names.
    """
    from reprieve.rules import RULES
    from reprieve.rules.learned import HeadRule

    kinds = [kind for kind in RULES if kind.about.study and (bundled or not issubclass(kind, HeadRule))]
    return {kind.about.study[0]: kind.about.study for kind in kinds}


class StageFailed(Exception):
    """A stage ended badly."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.name)
        self.stage = stage


@dataclass
class Study:
    """The stages of a study, run as the commands a user would type; each resumes by itself.

    Args:
        rules: for each rule at the setting that chooses its K, the settings to measure.
        certified: for each rule to certify, its thresholds.
        shared: arguments of every measuring command; `certify` those of `certify`.
    """

    rules: dict[str, tuple[str, ...]]
    certified: dict[str, str]
    shared: list[str]
    certify: list[str]
    num_workers: int
    out: Path
    target: str
    stages: list[Stage] = field(default_factory=list)

    def measure(self, tune: list[str], bench: list[str]) -> None:
        """K for each rule, the frontier, and the certificates, the first of them beside the others on a second core.

        Raises:
            StageFailed: names the stage.
        """
        first, *others = self.certified
        beside = self._certify(first, 1) if self.num_workers > 1 else None
        if beside:
            self._start(beside)
        arms = [part for rule in self.rules for part in ("--arm", rule)]
        self._run(Stage("tune", ["tune", "k", *arms, *tune, *self.shared, "--out", str(self.out / "tune")]))
        arms = [part for name in self._arms() for part in ("--arm", name)]
        self._run(Stage("frontier", ["bench", *arms, *bench, *self.shared, "--out", str(self.out / "frontier")]))
        for stage in [beside or self._certify(first, 1), *(self._certify(rule, self.num_workers) for rule in others)]:
            self._run(stage)

    def report(self, title: str) -> None:
        """One page of all of it.

        Raises:
            StageFailed: it could not be written.
        """
        folders = [self.out / "frontier"]
        folders += [self.out / "certificates"] if any((self.out / "certificates").glob("*.json")) else []
        named = ["--title", title, "--out", str(self.out / "report.html")]
        self._run(Stage("report", ["report", *map(str, folders), *named]))

    def stop(self) -> None:
        """End what still runs."""
        for stage in self.stages:
            if stage.process is not None and stage.process.poll() is None:
                stage.process.terminate()

    def _certify(self, rule: str, num_workers: int) -> Stage:
        asked = ["--rule", rule, "--thresholds", self.certified[rule], *self.certify, "--workers", str(num_workers)]
        arguments = ["certify", *asked, *self.shared, "--out", str(self.out / "certificates")]
        return Stage(f"certify {rule.partition(':')[0]}", arguments)

    def _arms(self) -> list[str]:
        """Every setting of every rule at the K that its rule is fastest at; lossless at its own, twice."""
        from reprieve.heads.loading import attach_heads
        from reprieve.rules import parse_rule

        arms = json.loads((self.out / "tune" / "tuned.json").read_text())["arms"]
        tuned = {best["spec"]: best["num_draft_tokens"] for best in arms}
        arms = [f"lossless@K={tuned['lossless']}", f"lossless_rerun@K={tuned['lossless']}", *CONTROLS]
        for rule, settings in self.rules.items():
            k = tuned[attach_heads(parse_rule(rule), self.target).spec]  # which may differ from what was typed
            arms += [f"{setting}@K={k}" for setting in settings]
        return arms

    def _start(self, stage: Stage) -> None:
        """Start a stage; what it says goes to a file of its name."""
        self.stages.append(stage)
        self.out.mkdir(parents=True, exist_ok=True)
        screen.say(f"{stage.name}: {stage.command}")
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        command = [sys.executable, "-m", "reprieve.cli.main", *stage.arguments]
        stage.seconds = -time.monotonic()
        with stage.log(self.out).open("ab") as log:
            stage.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _run(self, stage: Stage) -> None:
        """Run a stage to its end and keep the study's account."""
        if stage.process is None:
            self._start(stage)
        stage.status = stage.process.wait()
        stage.seconds += time.monotonic()
        account = [item.account for item in self.stages if item.status is not None]
        replace_file(self.out / "study.json", json.dumps({"stages": account}, indent=2) + "\n")
        screen.say(f"{stage.name}: {stage.seconds:.0f} s, exit status {stage.status}")
        # That no threshold of a rule could be certified is a result, not a failure.
        if stage.status != 0 and not (stage.status == 1 and stage.name.startswith("certify")):
            raise StageFailed(stage)
