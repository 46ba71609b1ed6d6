"""`reprieve eval`: lm-evaluation-harness's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reprieve.cli import options as o
from reprieve.errors import SpecError, import_extra


def command(
    tasks: Annotated[str, typer.Option(help="lm_eval's tasks, such as gsm8k,mmlu, or reprieve_arithmetic.")],
    arm: Annotated[list[str], typer.Option(help="A rule, such as top_k:k=4. Repeatable.")] = [],  # noqa: B006
    data: Annotated[
        list[str], typer.Option(help="Local JSONL in the place of a task's hub data: gsm8k:train=FILE,test=FILE.")
    ] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(help="Number of problems of each task. Default: all.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Worked examples. Default: the task's.")] = None,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[int, typer.Option(help="K: drafted tokens a round.")] = 16,
    gen_kwargs: Annotated[str, typer.Option(help="Generation arguments, such as temperature=0.6,top_p=0.95.")] = "",
    chat_template: o.ChatTemplate = False,
    include_path: Annotated[str | None, typer.Option(help="Folder of task definitions of your own.")] = None,
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="Let the harness's code tasks run what models write.")
    ] = False,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: o.Out = Path("runs/eval"),
) -> int:
    """Run lm-evaluation-harness's tasks through target-only, lossless and rules; resumes.

    Arms run one after another here: compare quality and tokens a round; for speeds, `reprieve bench` has arms take
    turns.
    """
    import_extra("lm_eval", "eval")
    from reprieve.engine import load_pair
    from reprieve.evaluation.arms import make_arms
    from reprieve.evaluation.harness import HarnessSettings, evaluate_arms
    from reprieve.rules.spec import parse_parameters

    try:
        generation = {name: float(value) for name, value in parse_parameters(gen_kwargs, where="--gen-kwargs").items()}
    except ValueError:
        raise SpecError(f"--gen-kwargs must be numbers by name, got {gen_kwargs!r}") from None
    files = {}
    for text in data:
        name, colon, rest = text.partition(":")
        if not colon:
            raise SpecError(f"--data is written TASK:split=FILE,split=FILE, got {text!r}")
        files[name] = parse_parameters(rest, where=f"--data {name}")
    settings = HarnessSettings(
        tasks=[name for name in tasks.split(",") if name],
        data=files,
        limit=limit,
        num_fewshot=num_fewshot,
        drafter=drafter,
        seed=seed,
        generation={**generation, "do_sample": generation.get("temperature", 0) > 0} if generation else None,
        apply_chat_template=chat_template,
        include_path=include_path,
        allow_unsafe_code=confirm_run_unsafe_code,
    )
    arms = make_arms(arm, [num_draft_tokens])
    o.quiet_transformers()
    pair = load_pair(target, draft, dtype=dtype, device=device)
    documents = evaluate_arms(arms, pair, out, settings, command=o.command_line())
    width = o.table_width(o.console())
    for name, document in documents.items():
        if "metrics" in document:
            o.console().print(f"{name}, scored by the target's likelihoods, the same for every rule:")
            found = next(iter(document["metrics"].values()))
            numbers = {key: value for key, value in found.items() if isinstance(value, float)}
            o.console().print("  " + ", ".join(f"{key} {value:.4f}" for key, value in numbers.items()))
        else:
            o.console(width=width).print(o.results_table(document, width=width))
    o.console().print(f"results: {out}", soft_wrap=True)
    return 0
