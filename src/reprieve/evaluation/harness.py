"""`reprieve eval`: lm-evaluation-harness's tasks through several arms, compared problem by problem."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from reprieve.engine import DRAFT_ONLY, Pair
from reprieve.errors import ReprieveError, SpecError, import_extra
from reprieve.evaluation.arms import Arm
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.engines.local import LocalEngine
from reprieve.evaluation.records import ProblemRecord, claim_run
from reprieve.evaluation.results import summarise, write_results
from reprieve.evaluation.runner import Run, environment
from reprieve.evaluation.settings import HarnessSettings, RunSettings
from reprieve.files import replace_file
from reprieve.settings import PromptSettings
from reprieve.specs import parse_parameters
from reprieve.tasks.answers import THINKING_ENDS

_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}  # unless a task says otherwise


@dataclass(frozen=True)
class HarnessRun:
    """The harness's settings, read: names, files by task and split, generation arguments.

    Raises:
        SpecError: something that cannot be read, or data for a task that is not among the tasks.
    """

    settings: HarnessSettings

    def __post_init__(self) -> None:
        if unknown := self.data.keys() - set(self.tasks):
            raise SpecError(f"--data names tasks that are not evaluated: {', '.join(sorted(unknown))}")
        _ = self.generation

    @cached_property
    def tasks(self) -> list[str]:
        return [name for name in self.settings.tasks.split(",") if name]

    @cached_property
    def data(self) -> dict[str, dict[str, str]]:
        files = {}
        for text in self.settings.data:
            name, colon, rest = text.partition(":")
            if not colon:
                raise SpecError(f"--data is written TASK:split=FILE,split=FILE, got {text!r}")
            files[name] = parse_parameters(rest, where=f"--data {name}")
        return files

    @cached_property
    def generation(self) -> dict[str, Any] | None:
        text = self.settings.gen_kwargs
        try:
            asked: dict[str, Any] = {
                name: float(value) for name, value in parse_parameters(text, where="--gen-kwargs").items()
            }
        except ValueError:
            raise SpecError(f"--gen-kwargs must be numbers by name, got {text!r}") from None
        if asked:
            asked["do_sample"] = asked.get("temperature", 0) > 0
        if self.settings.prompt.max_new_tokens is not None:
            asked["max_gen_toks"] = self.settings.prompt.max_new_tokens
        return asked or None

    def evaluate(self, lm_eval: Any, model: Any, manager: Any) -> dict[str, Any]:
        """The harness's own results, samples included.

        Raises:
            ReprieveError: a task it does not know, data it cannot load.
        """
        settings = self.settings
        try:
            answers: dict[str, Any] = lm_eval.simple_evaluate(
                model=model,
                tasks=[task_with_files(manager, name, self.data.get(name)) for name in self.tasks],
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=settings.prompt.chat_template,
                system_instruction=settings.prompt.system_prompt,
                gen_kwargs=self.generation,
                task_manager=manager,
                random_seed=settings.seed,
                numpy_random_seed=settings.seed,
                torch_random_seed=settings.seed,
                fewshot_random_seed=settings.seed,
                confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
            )
        except ReprieveError:
            raise
        except Exception as error:  # unknown tasks, no network, bad data: the harness has many ways to say it
            raise ReprieveError(f"lm_eval: {type(error).__name__}: {error}") from error
        return answers


def evaluate_arms(
    arms: Sequence[Arm], pair: Pair, folder: Path, run: HarnessRun, *, command: str
) -> dict[str, dict[str, Any]]:
    """Run the tasks through every arm; answers are kept as they come, and not made again.

    Returns:
        a results document for every task and filter (docs/reference/results.md), also written to
        `folder/TASK/results.json`; tasks scored by likelihood have `metrics` only.

    Raises:
        ReprieveError: lm_eval is missing, or refuses a task.
    """
    lm_eval = import_extra("lm_eval", "eval")
    from lm_eval.tasks import TaskManager

    from reprieve.evaluation.lm_eval_model import TASKS, ReprieveLM

    arms = [arm for arm in arms if arm.label != DRAFT_ONLY]
    settings = run.settings
    config = RunConfig.of(
        LocalEngine(pair),
        arms,
        RunSettings(
            task=",".join(run.tasks),
            limit=settings.limit or 10**9,
            drafter=settings.drafter,
            prompt=settings.prompt,
            seed=settings.seed,
        ),
        command=command,
    )
    config = replace(config, sampling={**_GREEDY, **(run.generation or {})})
    claim_run(folder, {**vars(config), "num_fewshot": settings.num_fewshot, "data": run.data})
    manager = TaskManager(include_path=[str(TASKS), *([settings.include_path] if settings.include_path else [])])
    records: dict[str, list[ProblemRecord]] = {}
    metrics: dict[str, dict[str, Any]] = {}
    for number, arm in enumerate(arms):
        answers = folder / f"answers-{number}.jsonl"
        model = ReprieveLM(
            pair=pair,
            rule=arm.label,
            num_draft_tokens=arm.num_draft_tokens,
            drafter=settings.drafter,
            seed=settings.seed,
            records=answers,
            **_thinking(settings.prompt),
        )
        evaluated = run.evaluate(lm_eval, model, manager)
        metrics[arm.label] = evaluated["results"]
        for name, record in _graded(evaluated["samples"], model.generated):
            records.setdefault(name, []).append(record)
    about = {"lm_eval": lm_eval.__version__, "num_fewshot": settings.num_fewshot, "metrics": metrics}
    replace_file(folder / "lm_eval.json", json.dumps(about, indent=2, default=str) + "\n")
    documents = {}
    for name, ours in records.items():
        done = Run(replace(config, task=name), list(arms), ours, environment(), complete=True)
        documents[name] = {**summarise(done), "harness": {key: about[key] for key in ("lm_eval", "num_fewshot")}}
        write_results(documents[name], folder / name)
        lines = "".join(json.dumps(vars(record), ensure_ascii=False) + "\n" for record in ours)
        replace_file(folder / name / "problems.jsonl", lines)
    for name in metrics[arms[0].label]:
        if not any(known.startswith(name) for known in documents):
            documents[name] = {"metrics": {arm: by_task[name] for arm, by_task in metrics.items()}}
    return documents


def _thinking(prompt: PromptSettings) -> dict[str, Any]:
    """Arguments of the harness's own model: what thinking it asks for, and cuts from answers."""
    if not prompt.chat_template or prompt.thinking is None:
        return {}
    return {"enable_thinking": prompt.thinking == "on", "think_end_token": THINKING_ENDS[0]}


def _graded(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], generated: Mapping[str, ProblemRecord]
) -> Iterator[tuple[str, ProblemRecord]]:
    """What was generated with the task's verdict on it, by task and filter; likelihoods are left out."""
    from reprieve.evaluation.lm_eval_model import request_key

    for task, ours in samples.items():
        for sample in ours:
            if not _generated(sample):
                continue
            made = generated[request_key(*sample["arguments"][0][:2])]
            name = task + ("" if sample["filter"] == "none" else f"-{sample['filter']}")
            name_in_task = f"{task}-{sample['doc_id']}"
            yield name, replace(made, problem_id=name_in_task, correct=_solved(sample), answer=_answer(sample))


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
    answers = sample.get("filtered_resps") or [None]
    return None if answers[0] is None else str(answers[0])[:200]
