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
from typing import Annotated, Any

import typer

from reprieve.cli import options as o
from reprieve.files import replace_file
from reprieve.heads.loading import attach_heads
from reprieve.rules import parse_rule

# One setting a rule, for the choice of its K; then the settings of the frontier.
RULES: dict[str, tuple[str, ...]] = {
    "top_k:k=2": ("top_k:k=2", "top_k:k=4"),
    "typical": ("typical",),
    "margin:delta=2": ("margin:delta=1", "margin:delta=2", "margin:delta=4"),
    "ratio:ratio=0.3": ("ratio:ratio=0.3",),
    "floor:min_prob=0.1": ("floor:min_prob=0.1",),
    "lenience:lenience=0.3": ("lenience:lenience=0.3",),
    "fuzzy:threshold=0.4": ("fuzzy:threshold=0.1", "fuzzy:threshold=0.4"),
    "random:rate=0.8": ("random:rate=0.8",),
    "fly": ("fly",),
    "asd": ("asd",),
    "cascade": ("cascade",),
    "math_symbols": ("math_symbols",),
}
JUDGE, PIVOT = "judge:path=reprieve/arithmetic-judge", "pivot:path=reprieve/arithmetic-pivot"
BUNDLED_RULES: dict[str, tuple[str, ...]] = {
    f"{JUDGE},threshold=0.03": tuple(f"{JUDGE},threshold={value}" for value in (0.01, 0.03, 0.06, 0.12)),
    f"{PIVOT},threshold=0.3": (f"{PIVOT},threshold=0.3",),
}
CONTROLS = ("direct:top_k:k=2", "direct:margin:delta=2")
CERTIFIED = {"margin": "2"}
BUNDLED_CERTIFIED = {JUDGE: "0.02,0.04"}
# The bundled task's first thousand calibration problems chose these thresholds and the bound (docs/evidence.md), so
# that certificates rest on the next.
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


def command(
    arm: Annotated[list[str], typer.Option(help="A rule beside the usual ones, such as judge:path=heads/j.")] = [],  # noqa: B006
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    task: o.TaskName = "arithmetic",
    limit: Annotated[int, typer.Option(help="Problems of the frontier.")] = 60,
    tune_limit: Annotated[int, typer.Option(help="Problems that choose K.")] = 12,
    num_draft_tokens: Annotated[str, typer.Option(help="Values of K to choose from.")] = "4,8,16",
    certify_limit: Annotated[int, typer.Option(help="Calibration problems, and as many held-out ones.")] = 1000,
    max_drop: Annotated[float, typer.Option(help="What certificates promise to stay below.")] = 0.03,
    workers: Annotated[int | None, typer.Option(help="Processes side by side. Default: the cores, at most 4.")] = None,
    seed: o.Seed = 0,
    dtype: o.Dtype = "float32",
    device: o.Device = None,
    out: o.Out = Path("runs/study"),
) -> int:
    """Measure every rule at its own K, certify two rules, and write the report; resumes where it was stopped."""
    shared = ["--target", target, *(["--draft", draft] if draft else []), "--task", task, "--seed", str(seed)]
    shared += ["--dtype", dtype, *(["--device", device] if device else [])]
    bundled = target == o.BUNDLED
    study = Study(
        rules={**RULES, **(BUNDLED_RULES if bundled else {}), **{name: (name,) for name in arm}},
        certified={**(BUNDLED_CERTIFIED if bundled else {}), **CERTIFIED},
        shared=shared,
        certify=[
            *("--max-drop", f"{max_drop:g}", "--num-draft-tokens", "8", "--limit", str(certify_limit)),
            *("--held-out-limit", str(certify_limit), "--offset", str(BUNDLED_OFFSET if bundled else 0)),
        ],
        num_workers=min(os.cpu_count() or 1, 4) if workers is None else workers,
        out=out,
    )
    try:
        study.measure(["--num-draft-tokens", num_draft_tokens, "--limit", str(tune_limit)], ["--limit", str(limit)])
        study.report(f"{target} on {task}")
    except StageFailed as failure:
        study.stop()
        failed = failure.stage
        o.console(stderr=True).print(
            f"{failed.name} ended with status {failed.status}; see {failed.log(out)}; run again to go on",
            soft_wrap=True,
        )
        return 130 if failed.status == 130 else 1
    return 0


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
        self._run(Stage("tune", ["tune", *arms, *tune, *self.shared, "--out", str(self.out / "tune")]))
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
        found = json.loads((self.out / "tune" / "tuned.json").read_text())["arms"]
        tuned = {best["spec"]: best["num_draft_tokens"] for best in found}
        arms = [f"lossless@K={tuned['lossless']}", f"lossless_rerun@K={tuned['lossless']}", *CONTROLS]
        for rule, settings in self.rules.items():
            k = tuned[attach_heads(parse_rule(rule)).spec]  # its canonical text may differ from what was typed
            arms += [f"{setting}@K={k}" for setting in settings]
        return arms

    def _start(self, stage: Stage) -> None:
        """Start a stage; what it says goes to a file of its name."""
        self.stages.append(stage)
        self.out.mkdir(parents=True, exist_ok=True)
        o.console().print(f"{stage.name}: {stage.command}", soft_wrap=True, markup=False)
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
        o.console().print(f"{stage.name}: {stage.seconds:.0f} s, exit status {stage.status}", markup=False)
        # That no threshold of a rule could be certified is a result, not a failure.
        if stage.status != 0 and not (stage.status == 1 and stage.name.startswith("certify")):
            raise StageFailed(stage)
