"""Model card of a trained model: training data, training time and accuracy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from reprieve.bundles import Bundle
from reprieve.files import replace_file
from reprieve.tasks.word_problems import Contents, draw_problem

_WEIGHTS = "model.safetensors"
SHIPPED = (
    "config.json",
    "generation_config.json",
    _WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
    "README.md",
)
_ANSWER = re.compile(r"final answer is\s+(\d+)\.")

_CARD = """---
license: apache-2.0
library_name: transformers
tags: [speculative-decoding, arithmetic]
---

# {pair}: {name}

The {name} model of a pair bundled with Reprieve: Llama architecture, {parameters:,} parameters
({layers} layers, width {width}), {origin} on generated grade-school word problems with worked solutions.

| | |
| --- | --- |
| command | `python -m recipes.pair.train {name} --pair {key} --out runs/pair` |
| seed | {seed} |
| training tokens | {tokens:,} |
| training time | {minutes:.0f} minutes ({device}, {threads} threads at the end) |
| problems solved, test split, greedy | {percent:.1f}% of {num_problems} |

`training.json` has the full training configuration. For tests, demonstrations and research on verification rules only.
"""


def greedy_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    contents: Contents,
    num_problems: int,
    *,
    batch_size: int = 50,
) -> float:
    """Return the share of the first `num_problems` test problems that plain `generate` solves."""
    tokenizer.padding_side = "left"
    problems = [draw_problem("test", index, contents=contents) for index in range(num_problems)]
    num_right = 0
    generate: Any = model.generate
    for start in range(0, num_problems, batch_size):
        batch = problems[start : start + batch_size]
        inputs = tokenizer([problem.prompt for problem in batch], return_tensors="pt", padding=True).to(model.device)
        with torch.inference_mode():
            output = generate(
                input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=320, do_sample=False
            )
        texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        for problem, text in zip(batch, texts, strict=True):
            numbers = _ANSWER.findall(text)
            num_right += bool(numbers) and int(numbers[-1]) == problem.answer
    return num_right / num_problems


def write_card(folder: Path, bundle: Bundle, record: dict[str, Any]) -> None:
    """Write `training.json` and `README.md` next to the weights."""
    recipe = record["recipe"]
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    (folder / "README.md").write_text(
        _CARD.format(
            pair=bundle.name,
            key=bundle.key,
            name=folder.name,
            parameters=record["num_parameters"],
            layers=recipe["grown_layers"] or recipe["num_layers"],
            origin="initialised from the arithmetic pair and trained" if recipe["start"] else "trained from scratch",
            width=recipe["hidden_size"],
            seed=recipe["seed"],
            tokens=recipe["num_tokens"],
            minutes=record["training_seconds"] / 60,
            device=record["device"],
            threads=record["num_threads"],
            percent=100 * record["test_accuracy"],
            num_problems=record["num_test_problems"],
        )
    )


def install(folder: Path, package: Path, *, half: bool) -> None:
    """Put a trained model's files where the package looks for them.

    Args:
        half: round weights to float16, at half the size; `config.json` keeps the training dtype, so that they are
            loaded with it.
    """
    package.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(folder / name, package / name)
    if half:
        weights = {name: tensor.half() for name, tensor in load_file(package / _WEIGHTS).items()}
        replace_file(package / _WEIGHTS, save(weights, metadata={"format": "pt"}))
