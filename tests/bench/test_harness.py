"""lm-evaluation-harness: our model type against its `hf` type, its command line, and local data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval")

from reprieve.bench.lm_eval_model import ReprieveLM, _sampling  # noqa: E402
from reprieve.errors import SpecError  # noqa: E402
from tests.kit.pairs import SMALL  # noqa: E402

QUESTIONS = [
    ("Tom has 12 apples. He buys 5 more apples. How many apples does Tom have now?", 17),
    ("A box holds 24 pens. 9 pens are sold. How many pens are left?", 15),
    ("Mia reads 14 pages a day. How many pages does she read in 3 days?", 42),
    ("Ben has 40 coins. He finds 13 more. How many coins does Ben have now?", 53),
]

# `python -m lm_eval`, without the index of the harness's own 14,000 tasks.
COMMAND_LINE = (
    "import functools; from lm_eval.__main__ import cli_evaluate; from lm_eval.tasks import TaskManager\n"
    "TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)\n"
    "cli_evaluate()"
)


@pytest.fixture(scope="module")
def pair(bundled_pair):
    return bundled_pair


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("train", "test"):
        rows = [{"question": question, "answer": f"Count.\n#### {answer}"} for question, answer in QUESTIONS]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def tasks(data):
    """GSM8K as the harness defines it, on local data, and the bundled task."""
    import lm_eval.tasks

    own = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
    local = data / "gsm8k_local.yaml"
    local.write_text(
        f"include: {own}\ntask: gsm8k_local\ndataset_path: json\ndataset_name: null\ndataset_kwargs:\n  data_files:\n"
        f"    train: {data}/train.jsonl\n    test: {data}/test.jsonl\n"
        "generation_kwargs:\n  until: ['Question:']\n  do_sample: false\n  max_gen_toks: 96\n"
    )
    return [str(local), str(Path(__file__).parent / "lm_eval_tasks" / "arithmetic.yaml")]


def answers(model, tasks, **model_args):
    """Responses and their grades, by task, problem and filter."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    manager = TaskManager(include_defaults=False, metadata=model_args)  # the harness's own are 14,000 files
    found = lm_eval.simple_evaluate(
        model=model, model_args=model_args, tasks=[load_yaml(path, resolve_func=True) for path in tasks], limit=3,
        num_fewshot=0, bootstrap_iters=0, log_samples=True, batch_size=1, device="cpu", task_manager=manager,
    )  # fmt: skip
    return {
        (task, sample["doc_id"], sample["filter"]): (sample["resps"][0][0], sample["exact_match"])
        for task, samples in found["samples"].items()
        for sample in samples
    }


@pytest.mark.slow
def test_lossless_matches_the_harness_hf_model_in_text_and_score(pair, tasks, monkeypatch):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip, lscpu and others
    target = Path(str(pair.target.config._name_or_path))
    ours = answers("reprieve", tasks, target=pair.target_name, dtype="float32", num_draft_tokens=4)
    theirs = answers("hf", tasks, pretrained=str(target), dtype="float32")
    assert len(ours) == 9 and ours == theirs, "problem by problem"
    assert any(score for _, score in ours.values())


@pytest.mark.slow
def test_the_model_type_works_on_the_harness_command_line(tasks, tmp_path):
    command = [sys.executable, "-c", COMMAND_LINE, "--model", "reprieve", "--tasks", tasks[1], "--limit", "2"]
    command += ["--model_args", f"target={SMALL[1]}", "rule=margin:delta=2;k=5", "num_draft_tokens=4", "dtype=float32"]
    command += ["--output_path", str(tmp_path), "--log_samples"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "c"),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reprieve_arithmetic" in done.stdout and "exact_match" in done.stdout
    assert len(list(tmp_path.rglob("samples_reprieve_arithmetic*.jsonl"))) == 1


def test_likelihoods_are_the_targets_own(pair):
    from lm_eval.api.instance import Instance

    model = ReprieveLM(pair=pair, rule="random:rate=0.9", num_draft_tokens=4)
    request = Instance("loglikelihood", {}, ("Question: Tom has 12 apples.\nAnswer:", " Tom"), 0)
    ((ours, _),) = model.loglikelihood([request], disable_tqdm=True)
    ids = pair.tokenizer.encode("Question: Tom has 12 apples.\nAnswer: Tom")
    context = len(pair.tokenizer.encode("Question: Tom has 12 apples.\nAnswer:"))
    import torch

    with torch.inference_mode():
        scores = pair.target(torch.tensor([ids])).logits[0].log_softmax(-1)
    wanted = sum(float(scores[i - 1, ids[i]]) for i in range(context, len(ids)))
    assert ours == pytest.approx(wanted, abs=1e-3)


def test_unsupported_arguments_are_refused(pair):
    with pytest.raises(SpecError, match="batch_size must be 1"):
        ReprieveLM(pair=pair, batch_size=8)
    with pytest.raises(SpecError, match="repetition_penalty"):
        _sampling({"do_sample": False, "repetition_penalty": 1.2}, 0)
    assert _sampling({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, 3).temperature == 0.6
    assert _sampling({"do_sample": False, "temperature": 0.6}, 3).greedy
