"""lm-evaluation-harness: our model type, lossless, beside the harness's own `hf` on the same target.

Compares what was said and how it was scored, problem by problem, on GSM8K from local files and on the bundled task.

    python benchmarks/harness.py --train gsm8k_train.jsonl --test gsm8k_test.jsonl --limit 50
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from reprieve.engine import load_pair
from reprieve.evaluation.harness import task_with_files
from reprieve.evaluation.lm_eval_model import TASKS, ReprieveLM
from reprieve.evaluation.runner import environment
from reprieve.files import replace_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="GSM8K's training problems, JSONL")
    parser.add_argument("--test", required=True, help="GSM8K's test problems, JSONL")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-gen-toks", type=int, default=96, help="the pair never learnt to end GSM8K answers")
    parser.add_argument("--out", type=Path, default=Path("runs/harness"))
    given = parser.parse_args()
    pair = load_pair("reprieve/arithmetic-pair", dtype="float32")
    manager = TaskManager(include_path=str(TASKS))
    gsm8k: Any = task_with_files(manager, "gsm8k", {"train": given.train, "test": given.test})
    gsm8k["generation_kwargs"] = {**gsm8k["generation_kwargs"], "max_gen_toks": given.max_gen_toks}
    hf = {"pretrained": pair.target.config._name_or_path, "dtype": "float32"}
    found: dict[str, dict[Any, Any]] = {}
    seconds = {}
    for name in ("reprieve", "hf"):
        started = time.perf_counter()
        model: Any = ReprieveLM(pair=pair, num_draft_tokens=given.num_draft_tokens) if name == "reprieve" else "hf"
        results = lm_eval.simple_evaluate(
            model=model,
            model_args=None if name == "reprieve" else hf,
            tasks=[dict(gsm8k), "reprieve_arithmetic"],
            num_fewshot=0,
            limit=given.limit,
            bootstrap_iters=0,
            log_samples=True,
            device="cpu",
            batch_size=1,
            task_manager=manager,
        )  # fmt: skip
        seconds[name] = time.perf_counter() - started
        found[name] = {
            (task, sample["filter"], sample["doc_id"]): (sample["resps"][0][0], float(sample["exact_match"]))
            for task, samples in results["samples"].items()
            for sample in samples
        }
    ours, theirs = found["reprieve"], found["hf"]
    rows = {}
    for task in dict.fromkeys(key[:2] for key in ours):
        keys = [key for key in ours if key[:2] == task]
        rows["-".join(task)] = {
            "num_problems": len(keys),
            "same_text": sum(ours[key][0] == theirs[key][0] for key in keys),
            "same_score": sum(ours[key][1] == theirs[key][1] for key in keys),
            "score": sum(ours[key][1] for key in keys) / len(keys),
        }
    document = {"tasks": rows, "seconds": seconds, "lm_eval": lm_eval.__version__, **environment()}
    replace_file(given.out / "harness.json", json.dumps(document, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
