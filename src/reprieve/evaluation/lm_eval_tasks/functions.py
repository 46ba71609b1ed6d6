"""What `arithmetic.yaml` calls. Importing it makes the model type `reprieve` known to lm-evaluation-harness."""

from typing import Any

import datasets

import reprieve.evaluation.lm_eval_model
from reprieve.tasks import load_task

assert reprieve.evaluation.lm_eval_model


def load(num_problems: int = 1000, **_: Any) -> dict[str, datasets.Dataset]:
    """Test problems of the bundled task."""
    problems = load_task("arithmetic").problems("test", num_problems)
    rows = [{"id": p.problem_id, "prompt": p.prompt, "answer": p.reference} for p in problems]
    return {"test": datasets.Dataset.from_list(rows)}


def grade(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 where the final answer is right."""
    task = load_task("arithmetic")
    return {"exact_match": float(task.equivalent(task.extract_answer(results[0]), doc["answer"]))}
