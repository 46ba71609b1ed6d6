"""The shipped pair: plain transformers folders, small enough, and lossless on real answers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import reprieve
from reprieve.evaluation.arms import Arm, build_decoder
from reprieve.models.loading import bundled_folder
from reprieve.pair.problems import split_of
from reprieve.tasks import load_task


@pytest.fixture(scope="module")
def pair():
    return reprieve.load_pair(dtype="float32", device="cpu")


def test_weights_are_small_and_plain():
    sizes = [path.stat().st_size for role in ("target", "draft") for path in bundled_folder(role).glob("*.safetensors")]
    assert len(sizes) == 2
    assert sum(sizes) < 30e6
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(bundled_folder(role))
        assert model.config.model_type == "llama"
        assert len(AutoTokenizer.from_pretrained(bundled_folder(role))) == model.config.vocab_size
        record = json.loads((bundled_folder(role) / "training.json").read_text())
        assert record["recipe"]["seed"] is not None
        assert record["test_accuracy"] > 0.4


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_lossless_greedy_equals_generate_on_real_problems(pair, drafter):
    task = load_task("arithmetic")
    decoder = build_decoder(Arm("lossless", reprieve.parse_rule("lossless"), 16), pair, drafter=drafter)
    for problem in task.problems("test", 12):
        ids = torch.tensor([pair.tokenizer.encode(problem.prompt)])
        expected = pair.target.generate(ids, max_new_tokens=256, do_sample=False)[0, ids.shape[1] :].tolist()
        assert decoder.generate(problem.prompt).token_ids == expected


def test_a_lenient_rule_rescues_and_needs_fewer_rounds(pair):
    task = load_task("arithmetic")
    rounds = {}
    for spec in ("lossless", "margin:delta=6"):
        decoder = build_decoder(Arm(spec, reprieve.parse_rule(spec), 16), pair)
        made = [decoder.generate(problem.prompt) for problem in task.problems("test", 10)]
        rounds[spec] = sum(len(m.tokens) for m in made) / sum(m.num_rounds for m in made)
    assert rounds["margin:delta=6"] > 1.3 * rounds["lossless"]


def test_task_problems_belong_to_their_split():
    task = load_task("arithmetic")
    for split in task.splits:
        for problem in task.problems(split, 20, offset=5):
            question = problem.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
            assert split_of(question) == split
    assert task.problems("test", 3, offset=2)[0] == task.problems("test", 5)[2]
