"""`reprieve mine autojudge|pivot|arbitration`: labelled mismatches into a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reprieve.cli import options as o
from reprieve.errors import SpecError

if TYPE_CHECKING:
    from reprieve.labelling.recipes import MiningConfig

InFlight = Annotated[int, typer.Option("--in-flight", help="Problems under way at once.")]
Offset = Annotated[int, typer.Option(help="First problem of the split.")]
Workers = Annotated[str, typer.Option(help="1, or ray, or ray:N for N workers of a Ray cluster.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Largest whole response. Default: the task's.")]


def autojudge(
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    task: o.TaskName = "arithmetic",
    split: o.Split = "train",
    limit: o.Limit = 100,
    offset: Offset = 0,
    variant: Annotated[str, typer.Option(help="search (Algorithm 1), or naive: every mismatch alone.")] = "search",
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = 0,
    max_new_tokens: MaxNewTokens = None,
    judge: Annotated[
        str | None, typer.Option(help="Compares open-ended responses: openai:model=NAME,url=ADDRESS.")
    ] = None,
    api_url: Annotated[
        str | None, typer.Option(help="OpenAI-compatible address that has the target; --target is its name there.")
    ] = None,
    api_prompts: Annotated[str, typer.Option(help="What the API is sent: text, or tokens (vLLM).")] = "text",
    in_flight: InFlight = 16,
    workers: Workers = "1",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path, typer.Option("--out", help="Label store; run again with it to go on.")] = Path("runs/labels"),
) -> int:
    """Find the mismatches that change the answer (AutoJudge, Algorithm 1)."""
    from reprieve.labelling.recipes import MiningConfig

    config = MiningConfig(
        miner="autojudge",
        target=target,
        draft=draft,
        dtype=dtype,
        device=device,
        task=task,
        split=split,
        limit=limit,
        offset=offset,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_new_tokens=max_new_tokens,
        num_in_flight=in_flight,
        options={"variant": variant, "judge": judge},
        api_url=api_url,
        api_prompts=api_prompts,
    )
    return _mine(config, out, workers)


def pivot(
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    task: o.TaskName = "arithmetic",
    split: o.Split = "train",
    limit: o.Limit = 100,
    offset: Offset = 0,
    rollouts: Annotated[int, typer.Option(help="N: rollouts on each side of a rejected token.")] = 8,
    alpha: Annotated[float, typer.Option(help="A pivot's utility is below alpha times the base's.")] = 0.8,
    soundness: Annotated[
        str | None, typer.Option(help="Judge of non-pivots: equations, or openai:model=NAME,url=ADDRESS.")
    ] = None,
    temperature: o.Temperature = 0.6,
    top_p: o.TopP = 0.95,
    top_k: o.TopK = 20,
    seed: o.Seed = 0,
    max_new_tokens: MaxNewTokens = None,
    in_flight: InFlight = 4,
    workers: Workers = "1",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path, typer.Option("--out", help="Label store; run again with it to go on.")] = Path("runs/pivots"),
) -> int:
    """Label the tokens that speculative sampling rejects by rollouts (PAD, Algorithm 1)."""
    from reprieve.labelling.recipes import MiningConfig

    config = MiningConfig(
        miner="pivot",
        target=target,
        draft=draft,
        dtype=dtype,
        device=device,
        task=task,
        split=split,
        limit=limit,
        offset=offset,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_new_tokens=max_new_tokens,
        num_in_flight=in_flight,
        options={"num_rollouts": rollouts, "alpha": alpha, "soundness": soundness},
    )
    return _mine(config, out, workers)


def arbitration(
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    task: o.TaskName = "arithmetic",
    split: o.Split = "train",
    limit: o.Limit = 100,
    offset: Offset = 0,
    num_draft_tokens: Annotated[int, typer.Option(help="K of the rounds.")] = 16,
    per_round: Annotated[int, typer.Option(help="Mismatches labelled in a round, from its first on.")] = 4,
    rollouts: Annotated[int, typer.Option(help="On each side of a mismatch, where sampled; greedily it is one.")] = 4,
    greedy_branches: Annotated[
        bool, typer.Option("--greedy-branches", help="Continue both sides greedily although the rounds are sampled.")
    ] = False,
    tie: Annotated[float, typer.Option(help="Label where both sides end equally well.")] = 0.8,
    judge: Annotated[
        str | None, typer.Option(help="Scores both candidates instead of rollouts: openai:model=NAME,url=ADDRESS.")
    ] = None,
    temperature: o.Temperature = 0.0,
    draft_temperature: o.DraftTemperature = None,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = 0,
    max_new_tokens: MaxNewTokens = None,
    in_flight: InFlight = 16,
    workers: Workers = "1",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path, typer.Option("--out", help="Label store; run again with it to go on.")] = Path("runs/traces"),
) -> int:
    """Trace plain speculative rounds and label which side of each mismatch ends better (CoSpec, appendix C.1)."""
    from reprieve.labelling.recipes import MiningConfig

    config = MiningConfig(
        miner="arbitration",
        target=target,
        draft=draft,
        dtype=dtype,
        device=device,
        task=task,
        split=split,
        limit=limit,
        offset=offset,
        temperature=temperature,
        draft_temperature=draft_temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_new_tokens=max_new_tokens,
        num_in_flight=in_flight,
        options={
            "num_draft_tokens": num_draft_tokens,
            "max_mismatches": per_round,
            "num_rollouts": rollouts,
            "greedy_branches": greedy_branches,
            "tie": tie,
            "judge": judge,
        },
    )
    return _mine(config, out, workers)


COMMANDS: dict[str, Any] = {"autojudge": autojudge, "pivot": pivot, "arbitration": arbitration}


def _mine(config: MiningConfig, out: Path, workers: str) -> int:
    """Mine into the store at `out` and say what came of it; returns the exit status."""
    num_workers = _parse_workers(workers)
    o.quiet_transformers()
    from reprieve.labelling.cluster import mine_on_ray
    from reprieve.labelling.recipes import build
    from reprieve.labelling.runner import mine_problems
    from reprieve.labelling.store import LabelStore
    from reprieve.labelling.summary import summarise

    with o.progress_bar("mining") as bar:
        progress = o.reporter(bar, "problems")
        if num_workers is None:
            bench = build(config)
            store = LabelStore(out, bench.manifest)
            report = mine_problems(
                bench.miner, bench.problems, store, num_in_flight=config.num_in_flight, progress=progress
            )
        else:
            report = mine_on_ray(config, out, num_workers=num_workers or None, progress=progress)
            store = LabelStore(out)
    report.require_some()
    o.console().print(summarise(store.problems()).sentence(), soft_wrap=True, markup=False)
    o.console().print(
        f"labels: {out}   mined now: {report.num_mined}, there before: {report.num_skipped}, "
        f"failed: {len(report.errors)}",
        soft_wrap=True,
    )
    if report.interrupted:
        o.console(stderr=True).print("interrupted: finished problems are kept; run again to go on")
        return 130
    return 1 if report.errors else 0


def _parse_workers(text: str) -> int | None:
    """None for this process; workers of a Ray cluster otherwise, 0 for as many as it has."""
    name, colon, count = text.partition(":")
    if text == "1":
        return None
    if name == "ray" and (not colon or (count.isdigit() and int(count) > 0)):
        return int(count or 0)
    raise SpecError(f"--workers must be 1, ray, or ray:N with N of 1 or more, got {text!r}")
