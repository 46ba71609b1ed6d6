"""`reprieve train arbiter`: CoSpec's arbitrator, warmed up on labelled traces and improved on its own rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reprieve.cli import options as o
from reprieve.errors import SpecError, import_extra, require_choice

if TYPE_CHECKING:
    from reprieve.heads.arbiter import Arbiter, ArbiterShape
    from reprieve.tasks import Task

STAGES = ("sft", "rl")
PRESETS = ("paper", "small")
# What `small` changes of the paper's settings: a pair of a few million parameters on two cores, within an hour.
_SMALL_WARM_UP = {"learning_rate": 1e-3, "decisions_per_update": 128, "num_epochs": 4}
_SMALL_REINFORCEMENT = {
    "learning_rate": 3e-4,
    "prompts_per_update": 16,
    "num_updates": 40,
    "num_epochs": 2,
    "steps_per_epoch": 4,
}


def command(
    stage: Annotated[str, typer.Option(help="sft: from labelled traces. rl: on rollouts, from an arbiter.")] = "sft",
    preset: Annotated[str, typer.Option(help="paper, or small: a small pair on two cores in under an hour.")] = "paper",
    labels: Annotated[
        list[Path], typer.Option(help="sft: traces, from `reprieve mine arbitration`; several stores are joined.")
    ] = [Path("runs/traces")],  # noqa: B006
    start: Annotated[
        str | None, typer.Option(help="rl: the arbiter to begin with; `none` begins without a warm-up.")
    ] = None,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    task: o.TaskName = "arithmetic",
    tie: Annotated[
        float | None, typer.Option(help="sft: label where both sides end equally well; the traces' own when left out.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="rl: of the prompts; train if there is one.")] = None,
    validation_split: Annotated[
        str | None, typer.Option(help="rl: validation if there is one; else the first problems of the prompts' split.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="rl: K of the rollouts. Default: the start's.")] = None,
    rank: Annotated[int | None, typer.Option(help="Of the adapters, 16 by default; rl has the start's.")] = None,
    scale: Annotated[float | None, typer.Option(help="Alpha of the adapters, 32 by default.")] = None,
    dropout: Annotated[float | None, typer.Option(help="On their input while warming up, 0.05 by default.")] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="sft: without the hybrid mask (the paper's Table 8).")
    ] = False,
    learning_rate: Annotated[float | None, typer.Option(help="Default: the preset's.")] = None,
    epochs: Annotated[int | None, typer.Option(help="sft: over the labels. rl: over a batch of rollouts.")] = None,
    updates: Annotated[int | None, typer.Option(help="rl: batches of rollouts.")] = None,
    prompts: Annotated[int | None, typer.Option(help="rl: prompts a batch.")] = None,
    group_size: Annotated[int, typer.Option(help="rl: M, rollouts a prompt.")] = 12,
    risk: Annotated[float, typer.Option(help="rl: alpha, price of accepting what the target finds unlikely.")] = 1.0,
    rejection: Annotated[float, typer.Option(help="rl: beta, price of a rejection on a failed rollout.")] = 0.25,
    fail_weight: Annotated[float, typer.Option(help="rl: eta_fail, weight of groups that all failed.")] = 0.5,
    length: Annotated[bool, typer.Option(help="rl: reward right rollouts by accepted span.")] = True,
    shaped: Annotated[bool, typer.Option(help="rl: price failed rollouts by decision.")] = True,
    rebalance: Annotated[bool, typer.Option(help="rl: balance right and failed rollouts of a group.")] = True,
    share_credit: Annotated[
        bool, typer.Option(help="rl: share a right rollout's advantage out, as a failed one's; the paper does not.")
    ] = False,
    threshold: Annotated[float, typer.Option("--lambda", help="Recommended, and used to validate.")] = 0.6,
    temperature: Annotated[float, typer.Option(help="rl: of the rollouts.")] = 1.0,
    validation: Annotated[int, typer.Option(help="rl: validation problems.")] = 200,
    validate_every: Annotated[int, typer.Option(help="rl: updates between validations.")] = 5,
    validation_temperature: Annotated[float, typer.Option(help="rl: of the validation's answers; 0 is greedy.")] = 0.0,
    draft_temperature: Annotated[
        float | None, typer.Option(help="rl: the draft's own, in rollouts and validation. Default: the target's.")
    ] = None,
    workers: Annotated[int, typer.Option(help="rl: processes that decode rollouts.")] = 1,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for checkpoint, log and arbiter. Default: runs/arbiter-STAGE.")
    ] = None,
) -> int:
    """Train CoSpec's arbiter; run it again to resume."""
    require_choice("stage", stage, STAGES)
    require_choice("preset", preset, PRESETS)
    import_extra("peft", "arbiter")
    from reprieve.heads.arbiter import ArbiterShape

    out = Path(f"runs/arbiter-{stage}") if out is None else out
    own_shape = {"rank": rank, "scale": scale, "dropout": dropout, "hybrid": False if causal else None}
    own_shape = {name: value for name, value in own_shape.items() if value is not None}
    shape = ArbiterShape(seed=seed, **own_shape)  # type: ignore[arg-type]
    given = {"learning_rate": learning_rate, "num_epochs": epochs}
    common: dict[str, Any] = {"threshold": threshold, "seed": seed}
    try:
        if stage == "sft":
            from reprieve.training.arbiter_warm_up import WarmUp

            for name, value in (("--num-draft-tokens", num_draft_tokens), ("--draft-temperature", draft_temperature)):
                if value is not None:
                    raise SpecError(f"{name} belongs to `reprieve mine arbitration` and to --stage rl")
            values = _settings(preset, _SMALL_WARM_UP, given)
            warm_up = WarmUp(shape=shape, tie=tie, **common, **values)
            made = _warm_up(warm_up, labels, target, draft, dtype, device, out)
        else:
            from reprieve.training.arbiter_rl import Reinforcement
            from reprieve.training.arbitration import Rewards

            if start is None:
                raise SpecError("--start must name an arbiter from --stage sft, or none for one without warm-up")
            if start != "none" and own_shape:
                raise SpecError(f"{', '.join(own_shape)}: set in the warm-up; --start has its own")
            if Path(start).resolve() == (out / "arbiter").resolve():
                raise SpecError(f"--start must not be what --out is to hold, {str(out / 'arbiter')!r}")
            rewards = Rewards(
                risk,
                rejection,
                fail_weight,
                length=length,
                shaped=shaped,
                rebalance=rebalance,
                share_credit=share_credit,
            )
            given |= {"num_updates": updates, "prompts_per_update": prompts}
            settings = Reinforcement(
                group_size=group_size,
                rewards=rewards,
                num_validation=validation,
                validate_every=validate_every,
                **common,
                **_settings(preset, _SMALL_REINFORCEMENT, given),
            )
            where = {"target": target, "draft": draft, "dtype": dtype, "device": device}
            rollouts = {
                "num_draft_tokens": num_draft_tokens,
                "temperature": temperature,
                "validation_temperature": validation_temperature,
                "draft_temperature": draft_temperature,
            }
            splits = (split, validation_split)
            made = _reinforce(settings, shape, start, where, task, splits, rollouts, workers, out)
    except KeyboardInterrupt:
        o.console(stderr=True).print(f"interrupted: what is done is kept in {out}; run again to go on")
        return 130
    _tell(made, out / "arbiter")
    return 0


def _settings(preset: str, small: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The preset's values, and what was given over them."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return {**(small if preset == "small" else {}), **chosen}


def _warm_up(
    settings: Any, labels: list[Path], target: str, draft: str | None, dtype: str, device: str | None, out: Path
) -> Arbiter:
    o.quiet_transformers()
    from reprieve.engine import load_pair
    from reprieve.labelling.arbitration import LABELS_VERSION
    from reprieve.labelling.store import LabelStore
    from reprieve.training.arbiter_warm_up import require_traces, warm_up

    stores = [LabelStore(folder) for folder in labels]
    for folder, store in zip(labels, stores, strict=True):
        if store.manifest.get("miner") != "arbitration":
            raise SpecError(f"--labels must hold traces of `reprieve mine arbitration`, {str(folder)!r} does not")
        if (version := store.manifest.get("labels_version")) != LABELS_VERSION:
            raise SpecError(
                f"--labels must hold labels of version {LABELS_VERSION}, {str(folder)!r} has {version}: mine anew"
            )
    problems = [problem for store in stores for problem in store.problems()]
    require_traces(problems)
    made_at = {(store.manifest["task"], store.manifest["num_draft_tokens"]) for store in stores}
    if len(made_at) > 1:
        raise SpecError(f"--labels must name traces of one task and K, got {sorted(made_at)}")
    task, num_draft_tokens = made_at.pop()
    pair = load_pair(target, draft, dtype=dtype, device=device)
    for store in stores:
        store.require_pair(pair.identity)
    pair.cached_draft()  # refuses a pair without a draft
    claim_folder(out / "arbiter", "arbiter")
    with o.progress_bar("updates") as bar:
        return warm_up(
            pair,
            problems,
            task,
            out,
            num_draft_tokens=num_draft_tokens,
            settings=settings,
            progress=o.reporter(bar, "updates"),
        )


def _reinforce(
    settings: Any,
    shape: ArbiterShape,
    start: str,
    where: dict[str, Any],
    task: str,
    splits: tuple[str | None, str | None],
    rollouts: dict[str, Any],
    workers: int,
    out: Path,
) -> Arbiter:
    import dataclasses

    from reprieve.heads.arbiter import Arbiter
    from reprieve.heads.binding import warn_of_transfer
    from reprieve.training.arbiter_rl import reinforce
    from reprieve.training.arbiter_warm_up import untrained
    from reprieve.training.rollouts import RolloutSettings

    first = None if start == "none" else Arbiter.from_pretrained(start)
    pair, loaded = o.load_pair_and_task(task=task, **where)
    if not loaded.graded:
        raise SpecError(f"task {task} has no right answers: rollouts cannot be rewarded on it")
    pair.cached_draft()  # refuses a pair without a draft
    if first is None:
        first = untrained(pair, shape, task, rollouts["num_draft_tokens"] or 16)
    warn_of_transfer(f"arbiter {start!r}", first.task, task)
    if rollouts["num_draft_tokens"] is None:
        rollouts = {**rollouts, "num_draft_tokens": first.num_draft_tokens}
    settings = dataclasses.replace(settings, **_splits(loaded, *splits, settings.num_validation))
    made_by = RolloutSettings(task=task, shape=first.shape, **rollouts, **where)
    claim_folder(out / "arbiter", "arbiter")
    with o.progress_bar("updates") as bar:
        return reinforce(
            pair,
            loaded,
            first,
            made_by,
            out,
            settings=settings,
            num_workers=workers,
            progress=o.reporter(bar, "updates"),
        )


def _splits(task: Task, split: str | None, validation: str | None, num_validation: int) -> dict[str, Any]:
    """Where prompts and validation problems come from; they never overlap."""
    split = o.split_of(task, split, "train")
    if validation is None:
        validation = "validation" if "validation" in task.splits else split
    return {"split": split, "validation_split": validation, "offset": num_validation if validation == split else 0}


def _tell(made: Arbiter, folder: Path) -> None:
    """What the arbiter reached, and how to use it."""
    reached = made.training["validation"]
    told = ", ".join(f"{name} {value:.3f}" for name, value in reached.items())
    o.console().print(
        f"best at update {made.training['update']}: {told}\n"
        f"arbiter: {folder}   use it: reprieve bench --arm arbiter:path={folder} "
        f"--num-draft-tokens {made.num_draft_tokens}",
        soft_wrap=True,
        markup=False,
    )
