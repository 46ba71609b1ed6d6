"""`reprieve labels show|stats|import`: what a label store holds, and labels made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reprieve.cli import options as o

if TYPE_CHECKING:
    from reprieve.labelling.records import ProblemLabels

Store = Annotated[Path, typer.Argument(help="Label store, from `reprieve mine`.")]


def show(
    store: Store,
    problem: Annotated[list[str], typer.Option(help="Problem id; several times for several.")] = [],  # noqa: B006
    limit: Annotated[int, typer.Option(help="Without --problem: the first so many.")] = 1,
    html: Annotated[Path | None, typer.Option(help="Write a page instead.")] = None,
    color: Annotated[bool | None, typer.Option("--color/--no-color", help="Default: on a terminal.")] = None,
) -> int:
    """Print problems: important tokens red, unimportant green, the other model's in brackets, and every swap."""
    o.quiet_transformers()
    from reprieve.files import replace_file
    from reprieve.labelling.show import html_page, terminal_text

    problems, tokenizer = _open(store)
    chosen = _choose(problems, problem, limit)
    if html is not None:
        replace_file(html, html_page(chosen, tokenizer, title=f"Labels of {store}"))
        o.console().print(f"{len(chosen)} problems: {html}", soft_wrap=True)
        return 0
    for labels in chosen:
        o.console(color=color).print(terminal_text(labels, tokenizer), soft_wrap=True)
    return 0


def stats(
    store: Store, top: Annotated[int, typer.Option(help="How many of the most frequent important tokens.")] = 15
) -> int:
    """Counts, shares by class of token, and the most frequent important tokens."""
    o.quiet_transformers()
    from rich import box
    from rich.table import Table

    from reprieve.labelling.summary import frequent_important, shares_by_class, summarise
    from reprieve.metrics import wilson_interval

    problems, tokenizer = _open(store)
    summary = summarise(problems)
    out = o.console()
    out.print(summary.sentence(), soft_wrap=True, markup=False)
    if summary.num_problems:
        out.print(f"{summary.num_generated / summary.num_problems:.0f} tokens generated a problem", soft_wrap=True)
    table = Table("class of the target's token", "labelled", "important", "share [95%]", box=box.SIMPLE_HEAD)
    for row in shares_by_class(problems, tokenizer):
        low, high = wilson_interval(row.num_important, row.num_labelled)
        share = f"{100 * row.num_important / row.num_labelled:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
        table.add_row(row.name, str(row.num_labelled), str(row.num_important), share)
    out.print(table)
    swaps = Table("important: target", "draft", "times", box=box.SIMPLE_HEAD)
    for ours, theirs, count in frequent_important(problems, tokenizer, top):
        swaps.add_row(repr(ours), repr(theirs), str(count))
    out.print(swaps)
    return 0


def import_(
    annotations: Annotated[Path, typer.Argument(help="JSONL: prompt, response, wrong = [[start, end], ...].")],
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    task: Annotated[str, typer.Option(help="Name of the task the responses are of.")] = "arithmetic",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[Path, typer.Option("--out", help="New label store.")] = Path("runs/annotations"),
) -> int:
    """Take labels made by hand (Judge Decoding's protocol) into a store that `reprieve train judge` reads."""
    o.quiet_transformers()
    import dataclasses

    from reprieve.engine import load_pair
    from reprieve.labelling.annotations import read_annotations
    from reprieve.labelling.store import LabelStore
    from reprieve.labelling.summary import summarise

    pair = load_pair(target, draft, dtype=dtype, device=device)
    problems = read_annotations(annotations, pair.tokenizer)
    store = LabelStore(out, {"miner": "annotations", **dataclasses.asdict(pair.identity), "task": task})
    for labels in problems:
        if labels.problem_id not in store.done():
            store.append(labels)
    store.fold()
    o.console().print(summarise(store.problems()).sentence(), soft_wrap=True, markup=False)
    o.console().print(f"labels: {out}", soft_wrap=True)
    return 0


COMMANDS: dict[str, Any] = {"show": show, "stats": stats, "import": import_}


def _open(store: Path) -> tuple[list[ProblemLabels], Any]:
    from reprieve.labelling.store import LabelStore
    from reprieve.models.loading import load_tokenizer

    opened = LabelStore(store)
    return opened.problems(), load_tokenizer(opened.manifest.get("draft") or opened.manifest["target"])


def _choose(problems: list[ProblemLabels], wanted: list[str], limit: int) -> list[ProblemLabels]:
    from reprieve.errors import SpecError

    if limit < 1:
        raise SpecError(f"limit must be 1 or more, got {limit}")
    if not wanted:
        return problems[:limit]
    by_id = {problem.problem_id: problem for problem in problems}
    if missing := [name for name in wanted if name not in by_id]:
        raise SpecError(f"problem must be in the store, got {missing[0]!r}; it has {', '.join(list(by_id)[:5])} ...")
    return [by_id[name] for name in wanted]
