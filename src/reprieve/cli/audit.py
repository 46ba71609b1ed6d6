"""`reprieve audit`: how far accepted tokens moved the target's next step, and whether a bound held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from reprieve.cli import options as o
from reprieve.errors import SpecError


def command(
    rules: Annotated[list[str], typer.Argument(help="Rules, such as lts, lts:theta=0.5 or judge:path=heads/j.")],
    calibration: Annotated[
        str | None, typer.Option(help="Bounds to hold other rules against; an lts rule has its own.")
    ] = None,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "eagle3",
    num_draft_tokens: Annotated[int, typer.Option(help="K: deepest drafted token.")] = 16,
    task: o.TaskName = "arithmetic",
    split: Annotated[str | None, typer.Option(help="Split; test if there is one.")] = None,
    limit: o.Limit = 200,
    offset: o.Offset = 0,
    active: Annotated[int, typer.Option(help="Top-K of each distribution that divergences are taken on.")] = 10,
    temperature: o.Temperature = 1.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path | None, typer.Option(help="File for the numbers, as JSON.")] = None,
) -> int:
    """Recompute the target's next step at every accepted token (ARC-Decode, Table 5)."""
    from reprieve.drafters.spec import DrafterSpec
    from reprieve.evaluation.arms import build_decoder, rule_arms
    from reprieve.evaluation.auditing import audit
    from reprieve.evaluation.runner import environment
    from reprieve.files import replace_file
    from reprieve.heads.lts import LtsCalibration
    from reprieve.rules import LtsRule
    from reprieve.settings import SamplingParams

    o.require_problems(limit, offset)
    if active < 2:
        raise SpecError(f"--active must be 2 or more, got {active}")
    o.require_file(out)
    DrafterSpec.parse(drafter)
    arms = rule_arms(rules, num_draft_tokens)
    given = None if calibration is None else LtsCalibration.from_pretrained(calibration)
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    pair, loaded = o.load_pair_and_task(target, draft, dtype, device, task)
    split = o.split_of(loaded, split, "test")
    params = SamplingParams(
        max_new_tokens=loaded.max_new_tokens,
        stop=tuple(loaded.stop),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    problems = loaded.problems(split, limit, offset=offset)
    found = []
    for arm in arms:
        bounds = arm.rule.head if isinstance(arm.rule, LtsRule) else given
        if bounds is not None:
            bounds.require_pair(pair.identity, calibration or arm.label)
        decoder = build_decoder(arm, pair, drafter=drafter, task=task)
        with o.progress_bar(arm.label) as bar:
            made = audit(arm.label, decoder, pair, loaded, problems, params, top_k=active, progress=o.reporter(bar))
        found.append({**made.summary(bounds), "calibration": None if bounds is None else bounds.fingerprint})
    settings = {
        "command": o.command_line(),
        **environment(),
        "target": target,
        "draft": draft,
        "drafter": drafter,
        "num_draft_tokens": num_draft_tokens,
        "task": task,
        "split": split,
        "limit": limit,
        "offset": offset,
        "active": active,
        "sampling": {"temperature": temperature, "top_p": top_p, "top_k": top_k},
        "seed": seed,
    }
    if out is not None:
        replace_file(out, json.dumps({**settings, "audits": found}, indent=2) + "\n")
    o.console().print(_table(found, len(problems)))
    return 0


NESTED = {"arbitration": "audit_arbitration"}


def _table(found: list[dict[str, Any]], num_problems: int) -> Table:
    table = Table(
        title=f"next-step shift of accepted tokens, JS in nats, n = {num_problems} problems; brackets are 95% "
        "intervals that take tokens for independent",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("arm", "tokens", "n", "mean", "median", "95%", "JS <= U, %", "JS <= tau, %"):
        table.add_column(name, justify="left" if name in ("arm", "tokens") else "right")
    for summary in found:
        for group in ("accepted", "swapped", "rescued"):
            values = summary[group]
            shifts = [f"{values[name]:.4f}" if name in values else "-" for name in ("mean", "median", "q95")]
            shares = [_share(values, name) for name in ("within_bound", "within_tolerance")]
            table.add_row(summary["arm"] if group == "accepted" else "", group, str(values["num"]), *shifts, *shares)
    return table


def _share(values: dict[str, Any], name: str) -> str:
    if name not in values:
        return "-"
    low, high = values[f"{name}_ci95"]
    return f"{100 * values[name]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
