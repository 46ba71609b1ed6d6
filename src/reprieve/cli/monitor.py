"""`reprieve monitor`: serve a task with a rule, and check a share of the answers as a server would."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from reprieve.cli import options as o
from reprieve.errors import SpecError


def command(
    rule: Annotated[str, typer.Option(help="The rule, such as judge:path=heads/j,threshold=0.03.")],
    share: Annotated[float, typer.Option(help="Share of requests that are also answered losslessly.")] = 0.2,
    max_drop: Annotated[float | None, typer.Option(help="Alarm once the drop is proved larger than this.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="Of the interval, at all times at once.")] = 0.95,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[int, typer.Option(help="K: drafted tokens a round.")] = 16,
    task: o.TaskName = "arithmetic",
    split: o.Split = "test",
    limit: o.Limit = 200,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
) -> int:
    """Watch quality while answering; exit status 1 where the alarm was raised."""
    from reprieve.evaluation.arms import LOSSLESS, build_decoder, make_arms
    from reprieve.evaluation.config import RunConfig
    from reprieve.evaluation.monitor import MonitorStatus, watch

    sampling = o.sampling_options(temperature, top_p, top_k)
    strict = make_arms([], [num_draft_tokens])[-1]
    relaxed = make_arms([rule], [num_draft_tokens])[-1]
    if relaxed.rule is None or relaxed.rule.name == LOSSLESS:
        raise SpecError(f"--rule must be a relaxed rule: there is nothing to watch in {rule!r}")
    pair, loaded = o.load_pair_and_task(target, draft, dtype, device, task)
    shared = dict(drafter=drafter, task=task, split=split, limit=limit, seed=seed, sampling=sampling)
    here = RunConfig.of(pair, [relaxed], command=o.command_line(), **shared).conditions(pair, relaxed)
    if relaxed.certificate is not None:
        relaxed.certificate.check(here, where=f"of {relaxed.label}")
    problems = loaded.problems(split, limit)
    show = o.console().print
    told: dict[str, Any] = {"checked": -1}

    def on_answer(status: MonitorStatus) -> None:
        tenth = status.num_seen * 10 // len(problems) > (status.num_seen - 1) * 10 // len(problems)
        if tenth and status.num_checked != told["checked"]:
            told["checked"] = status.num_checked
            show(status.sentence(), soft_wrap=True, markup=False)

    final = watch(
        build_decoder(relaxed, pair, drafter=drafter, task=task, here=here),
        build_decoder(strict, pair, drafter=drafter),
        loaded,
        problems,
        {**sampling, "seed": seed},
        share=share,
        max_drop=max_drop,
        confidence=confidence,
        seed=seed,
        on_alarm=lambda status: show(f"alarm: {status.sentence()}", soft_wrap=True, markup=False),
        on_answer=on_answer,
    )
    show(f"final: {final.sentence()}", soft_wrap=True, markup=False)
    return 1 if final.alarm else 0
