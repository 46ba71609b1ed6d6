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
CERTIFIED = {"margin": "2,3"}
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
    num_workers = min(os.cpu_count() or 1, 4) if workers is None else workers
    shared = ["--target", target, *(["--draft", draft] if draft else []), "--task", task, "--seed", str(seed)]
    shared += ["--dtype", dtype, *(["--device", device] if device else [])]
    bundled = target == o.BUNDLED
    rules = {**RULES, **(BUNDLED_RULES if bundled else {}), **{name: (name,) for name in arm}}
    certified = {**(BUNDLED_CERTIFIED if bundled else {}), **CERTIFIED}
    stages: list[Stage] = []

    def run(*wanted: Stage) -> bool:
        stages.extend(wanted)
        return _run(wanted, stages, out)

    def certify(rule: str, num: int) -> Stage:
        wanted = ["--thresholds", certified[rule], "--max-drop", f"{max_drop:g}", "--num-draft-tokens", "8"]
        wanted += ["--limit", str(certify_limit), "--held-out-limit", str(certify_limit), "--workers", str(num)]
        wanted += ["--offset", str(BUNDLED_OFFSET)] if bundled else []
        name = rule.partition(":")[0]
        arguments = ["certify", "--rule", rule, *wanted, *shared, "--out", str(out / "certificates")]
        return Stage(f"certify {name}", arguments)

    tune = ["tune", *(part for rule in rules for part in ("--arm", rule)), "--num-draft-tokens", num_draft_tokens]
    tune += ["--limit", str(tune_limit), *shared, "--out", str(out / "tune")]
    first, *others = certified
    alongside = [certify(first, 1)] if num_workers > 1 else []
    for stage in alongside:
        _start(stage, out)
    if not run(Stage("tune", tune)):
        return _stopped(stages, alongside)
    tuned = {best["spec"]: best for best in json.loads((out / "tune" / "tuned.json").read_text())["arms"]}
    strict_k = tuned["lossless"]["num_draft_tokens"]
    arms = [f"lossless@K={strict_k}", f"lossless_rerun@K={strict_k}", *CONTROLS]
    for rule, settings in rules.items():
        found = _tuned(rule, tuned)
        arms += [f"{setting}@K={found['num_draft_tokens']}" for setting in settings]
    bench = ["bench", *(part for item in arms for part in ("--arm", item)), "--limit", str(limit), *shared]
    if not run(Stage("frontier", [*bench, "--out", str(out / "frontier")])):
        return _stopped(stages, alongside)
    if not run(*alongside) or not all(
        run(certify(rule, num_workers)) for rule in (others if alongside else [first, *others])
    ):
        return _stopped(stages, alongside)
    report = ["report", str(out / "frontier"), str(out / "certificates"), "--title", f"{target} on {task}"]
    return 0 if run(Stage("report", [*report, "--out", str(out / "report.html")])) else _stopped(stages, [])


def _tuned(rule: str, tuned: dict[str, Any]) -> dict[str, Any]:
    """The entry of a rule, whose canonical text may differ from what was typed."""
    from reprieve.heads.loading import attach_heads
    from reprieve.rules import parse_rule

    entry: dict[str, Any] = tuned[attach_heads(parse_rule(rule)).spec]
    return entry


def _start(stage: Stage, out: Path) -> None:
    """Start a stage; what it says goes to a file of its name."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    log = (out / f"{stage.name.replace(' ', '-')}.log").open("ab")
    stage.seconds = -time.monotonic()
    stage.process = subprocess.Popen(
        [sys.executable, "-m", "reprieve.cli.main", *stage.arguments], stdout=log, stderr=log, env=environment
    )


def _run(wanted: tuple[Stage, ...], stages: list[Stage], out: Path) -> bool:
    """Run stages to their ends and keep the study's account; False where one of them failed."""
    from reprieve.evaluation.records import replace_file

    for stage in wanted:
        if stage.process is None:
            o.console().print(f"{stage.name}: {stage.command}", soft_wrap=True, markup=False)
            _start(stage, out)
        stage.status = stage.process.wait()
        stage.seconds += time.monotonic()
        account = [item.account for item in stages]
        replace_file(out / "study.json", json.dumps({"stages": account}, indent=2) + "\n")
        o.console().print(f"{stage.name}: {stage.seconds:.0f} s, exit status {stage.status}", markup=False)
    # A rule that no threshold of could be certified is a result, not a failure.
    return all(stage.status == 0 or (stage.status == 1 and stage.name.startswith("certify")) for stage in wanted)


def _stopped(stages: list[Stage], alongside: list[Stage]) -> int:
    for stage in alongside:
        if stage.process.poll() is None:
            stage.process.terminate()
    failed = next((stage for stage in stages if stage.status), stages[-1])
    o.console(stderr=True).print(
        f"{failed.name} ended with status {failed.status}; its log is beside the results; run again to go on",
        soft_wrap=True,
    )
    return 130 if failed.status == 130 else 1
