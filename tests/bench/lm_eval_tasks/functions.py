"""Functions that the task files call. Importing this module registers the model type `reprieve` in lm_eval."""

from typing import Any

import datasets

import reprieve.bench.lm_eval_model
from reprieve.tasks import load_task

assert reprieve.bench.lm_eval_model


def load(bundled_task: str, num_problems: int = 1000, **_: Any) -> dict[str, datasets.Dataset]:
    """Test problems of a bundled pair's task."""
    problems = load_task(bundled_task).problems("test", num_problems)
    rows = [{"task": bundled_task, "id": p.problem_id, "prompt": p.prompt, "answer": p.reference} for p in problems]
    return {"test": datasets.Dataset.from_list(rows)}


def grade(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 where the final answer is right."""
    task = load_task(doc["task"])
    return {"exact_match": float(task.equivalent(task.extract_answer(results[0]), doc["answer"]))}
