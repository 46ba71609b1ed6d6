"""`reprieve eval`: lm-evaluation-harness's tasks through several arms, compared problem by problem."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reprieve.errors import ReprieveError, SpecError, import_extra
from reprieve.evaluation.arms import DRAFT_ONLY, Arm
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.records import ProblemRecord, claim_folder, replace_file
from reprieve.evaluation.results import summarise, write_results
from reprieve.evaluation.runner import Run, environment
from reprieve.models import Pair

_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}  # unless a task says otherwise


def evaluate_arms(
    arms: Sequence[Arm],
    pair: Pair,
    folder: Path,
    *,
    tasks: Sequence[str],
    data: Mapping[str, Mapping[str, str]],
    command: str,
    limit: int | None = None,
    num_fewshot: int | None = None,
    drafter: str = "draft",
    seed: int = 0,
    generation: Mapping[str, Any] | None = None,
    apply_chat_template: bool = False,
    include_path: str | None = None,
    allow_unsafe_code: bool = False,
) -> dict[str, dict[str, Any]]:
    """Run the tasks through every arm; answers are kept as they come, and not made again.

    Args:
        data: local JSONL files in the place of a task's hub data: by task, by split.
        allow_unsafe_code: passed on to the harness, whose own code tasks (HumanEval, MBPP) run what models write
            without isolation. `reprieve bench --task humaneval:path=...` has a sandbox.

    Returns:
        a results document for every task and filter (docs/results.md), also written to `folder/TASK/results.json`;
        tasks scored by likelihood have `metrics` only.

    Raises:
        ReprieveError: lm_eval is missing, or refuses a task.
        SpecError: data for a task that is not among the tasks.
    """
    lm_eval = import_extra("lm_eval", "eval")
    from lm_eval.tasks import TaskManager

    from reprieve.evaluation.lm_eval_model import TASKS, ReprieveLM, request_key

    if unknown := data.keys() - set(tasks):
        raise SpecError(f"--data names tasks that are not evaluated: {', '.join(sorted(unknown))}")
    arms = [arm for arm in arms if arm.label != DRAFT_ONLY]
    config = RunConfig.of(
        pair, arms, command=command, drafter=drafter, task=",".join(tasks), split="test", limit=limit or 10**9,
        seed=seed, sampling={**_GREEDY, **(generation or {})}, chat_template=apply_chat_template,
    )  # fmt: skip
    claim_folder(folder, {**vars(config), "num_fewshot": num_fewshot, "data": {k: dict(v) for k, v in data.items()}})
    paths = [str(TASKS), *([include_path] if include_path else [])]
    manager = TaskManager(include_path=paths)
    records: dict[str, list[ProblemRecord]] = {}
    metrics: dict[str, dict[str, Any]] = {}
    for number, arm in enumerate(arms):
        model = ReprieveLM(
            pair=pair, rule=arm.label, num_draft_tokens=arm.num_draft_tokens, drafter=drafter, seed=seed,
            records=folder / f"answers-{number}.jsonl",
        )  # fmt: skip
        try:
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=[task_with_files(manager, name, data.get(name)) for name in tasks],
                num_fewshot=num_fewshot,
                limit=limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=apply_chat_template,
                gen_kwargs=dict(generation) if generation else None,
                task_manager=manager,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
                confirm_run_unsafe_code=allow_unsafe_code,
            )
        except ReprieveError:
            raise
        except Exception as error:  # unknown tasks, no network, bad data: the harness has many ways to say it
            raise ReprieveError(f"lm_eval: {type(error).__name__}: {error}") from error
        metrics[arm.label] = found["results"]
        for task, samples in found["samples"].items():
            for sample in samples:
                if _generated(sample):
                    made = model.generated[request_key(*sample["arguments"][0][:2])]
                    name = task + ("" if sample["filter"] == "none" else f"-{sample['filter']}")
                    graded = replace(
                        made,
                        problem_id=f"{task}-{sample['doc_id']}",
                        correct=_solved(sample),
                        answer=_answer(sample),
                    )
                    records.setdefault(name, []).append(graded)
        replace_file(
            folder / f"lm_eval-{number}.json",
            json.dumps({"arm": arm.label, "results": found["results"]}, indent=2, default=str) + "\n",
        )
    documents = {}
    for name, graded_records in records.items():
        run = Run(replace(config, task=name), list(arms), graded_records, environment(), complete=True)
        document = {**summarise(run), "harness": {"lm_eval": lm_eval.__version__, "num_fewshot": num_fewshot}}
        write_results(document, folder / name)
        lines = "".join(json.dumps(vars(record), ensure_ascii=False) + "\n" for record in graded_records)
        replace_file(folder / name / "problems.jsonl", lines)
        documents[name] = document
    for name in metrics[arms[0].label]:
        if not any(known.startswith(name) for known in documents):
            documents[name] = {"metrics": {arm: found[name] for arm, found in metrics.items()}}
    return documents


def task_with_files(manager: Any, name: str, files: Mapping[str, str] | None) -> str | dict[str, Any]:
    """The task's name, or its own definition with local files for data."""
    if not files:
        return name
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index.get(name)
    path = entry.get("yaml_path") if isinstance(entry, dict) else getattr(entry, "yaml_path", None)
    if path is None:
        raise SpecError(f"task {name} is not one of lm_eval's single tasks; local data needs one")
    definition = dict(load_yaml(Path(path), resolve_func=True))
    definition.pop("dataset_name", None)
    return {**definition, "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": dict(files)}}


def _generated(sample: Mapping[str, Any]) -> bool:
    """Whether a sample was generated; a likelihood's second argument is a continuation, not a dictionary."""
    arguments: Sequence[Sequence[Any]] = sample.get("arguments") or ()
    return bool(arguments) and len(arguments[0]) > 1 and isinstance(arguments[0][1], dict)


def _solved(sample: Mapping[str, Any]) -> bool:
    """By the task's first metric that is a number; half the points or more count as solved."""
    for name in sample.get("metrics", ()):
        value = sample.get(name)
        if isinstance(value, (bool, int, float)):
            return float(value) >= 0.5
    return False


def _answer(sample: Mapping[str, Any]) -> str | None:
    found = sample.get("filtered_resps") or [None]
    return None if found[0] is None else str(found[0])[:200]
