"""`reprieve tune`: the K that suits each arm, or FSD's whole protocol."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from reprieve.cli import options as o
from reprieve.errors import require_choice


def command(
    arm: Annotated[list[str], typer.Option(help="k: a rule, such as top_k:k=4. Repeatable.")] = [],  # noqa: B006
    protocol: Annotated[str, typer.Option(help="k: the fastest K of each arm; fsd: FSD's way to thresholds.")] = "k",
    rule: Annotated[str, typer.Option(help="fsd: the rule without its threshold.")] = "fuzzy",
    thresholds: Annotated[str, typer.Option(help="fsd: rising values of its dial.")] = "0.1,0.2,0.3,0.4,0.5,0.7,0.9",
    lost_share: Annotated[float, typer.Option(help="fsd: stop once this share of the target-draft gap is lost.")] = 0.2,
    main_split: Annotated[str, typer.Option(help="fsd: split to measure on.")] = "test",
    main_limit: Annotated[int, typer.Option(help="fsd: number of problems to measure on.")] = 200,
    trials: Annotated[int, typer.Option(help="fsd: answers per problem and arm.")] = 3,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[str, typer.Option(help="Values of K to try.")] = "4,8,12,16,24,32",
    task: o.TaskName = "arithmetic",
    split: Annotated[str, typer.Option(help="Split to choose on.")] = "validation",
    limit: Annotated[int, typer.Option(help="Number of problems to choose on.")] = 40,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: 0 for k, 1 for fsd.")] = None,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    draft_temperature: o.DraftTemperature = None,
    chat_template: o.ChatTemplate = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: o.Out = Path("runs/tune"),
) -> int:
    """Find K for lossless and each arm separately, by tokens a second (AutoJudge, appendix G); or FSD's protocol.

    FSD's: K' for lossless, the threshold that accepts as much as lossless does, then upward until the loss is too
    large; the draft is greedy, the target samples.
    """
    require_choice("--protocol", protocol, ("k", "fsd"))
    if protocol == "fsd":
        temperature = 1.0 if temperature is None else temperature
        draft_temperature = 0.0 if draft_temperature is None else draft_temperature
    shared: dict[str, Any] = dict(
        command=o.command_line(),
        drafter=drafter,
        task=task,
        seed=seed,
        sampling=o.sampling_options(temperature or 0.0, top_p, top_k, draft_temperature),
        chat_template=chat_template,
    )
    pilot = {**shared, "split": split, "limit": limit}
    ks = o.parse_numbers(num_draft_tokens, "--num-draft-tokens", int)
    if protocol == "k":
        return _tune_k(arm, ks, pilot, (target, draft, dtype, device, task), out)
    from reprieve.evaluation.tuning import FsdProtocol

    plan = FsdProtocol(
        rule=rule,
        thresholds=o.parse_numbers(thresholds, "--thresholds"),
        ks=ks,
        pilot=pilot,
        main={**shared, "split": main_split, "limit": main_limit, "num_trials": trials},
        lost_share=lost_share,
    )
    return _run_fsd(plan, (target, draft, dtype, device, task), out)


def _tune_k(arm: list[str], ks: list[int], settings: dict[str, Any], loading: tuple[Any, ...], out: Path) -> int:
    from reprieve.evaluation.arms import make_arms, without_missing_draft
    from reprieve.evaluation.config import RunConfig
    from reprieve.evaluation.results import summarise, write_results
    from reprieve.evaluation.runner import run_arms
    from reprieve.evaluation.tuning import best_ks
    from reprieve.files import replace_file

    arms = make_arms(arm, ks)
    pair, task = o.load_pair_and_task(*loading)
    arms = without_missing_draft(arms, pair)
    with o.progress_bar(f"{len(arms)} arms") as bar:
        run = run_arms(RunConfig.of(pair, arms, **settings), arms, pair, task, out, progress=o.reporter(bar))
    if not run.complete:
        o.console(stderr=True).print("interrupted: run again to resume")
        return 130
    document = summarise(run)
    write_results(document, out)
    found = best_ks(document)
    replace_file(out / "tuned.json", json.dumps({"arms": [asdict(best) for best in found]}, indent=2) + "\n")
    for best in found:
        speeds = ", ".join(f"{k}: {speed:.0f}" for k, speed in sorted(best.by_k.items()))
        o.console().print(f"--arm {best.arm}   (tokens a second by K: {speeds})", soft_wrap=True, markup=False)
    return 0


def _run_fsd(plan: Any, loading: tuple[Any, ...], out: Path) -> int:
    from reprieve.evaluation.results import write_results

    pair, task = o.load_pair_and_task(*loading)
    with o.progress_bar("answers") as bar:
        document = plan.run(
            pair,
            task,
            out,
            announce=lambda line: o.console().print(line, soft_wrap=True, markup=False),
            progress=o.reporter(bar),
        )
    if document is None:
        o.console(stderr=True).print("interrupted: run again to resume")
        return 130
    write_results(document, out)
    width = o.table_width(o.console())
    o.console(width=width).print(o.results_table(document, width=width))
    return 0
