"""The shipped pair: plain transformers folders, small enough, and lossless on real answers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import reprieve
from reprieve.bundles import ARITHMETIC
from reprieve.errors import PairError
from reprieve.pair.problems import split_of
from reprieve.tasks import load_task


@pytest.fixture(scope="module")
def pair(bundled_pair):
    return bundled_pair


def test_weights_are_small_and_plain():
    sizes = [
        path.stat().st_size
        for role in ("target", "draft")
        for path in ARITHMETIC.role_folder(role).glob("*.safetensors")
    ]
    assert len(sizes) == 2
    assert sum(sizes) < 30e6
    for role in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(ARITHMETIC.role_folder(role))
        assert model.config.model_type == "llama"
        assert len(AutoTokenizer.from_pretrained(ARITHMETIC.role_folder(role))) == model.config.vocab_size
        record = json.loads((ARITHMETIC.role_folder(role) / "training.json").read_text())
        assert record["recipe"]["seed"] is not None
        assert record["test_accuracy"] > 0.4


@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_lossless_greedy_equals_generate_on_real_problems(pair, drafter):
    task = load_task("arithmetic")
    decoder = pair.decoder("lossless", drafter=drafter)
    for problem in task.problems("test", 12):
        ids = torch.tensor([pair.tokenizer.encode(problem.prompt)])
        expected = pair.target.generate(ids, max_new_tokens=256, do_sample=False)[0, ids.shape[1] :].tolist()
        assert decoder.generate(problem.prompt).token_ids == expected


def test_a_lenient_rule_rescues_and_needs_fewer_rounds(pair):
    task = load_task("arithmetic")
    rounds = {}
    for spec in ("lossless", "margin:delta=6"):
        decoder = pair.decoder(spec, num_draft_tokens=16)
        made = [decoder.generate(problem.prompt) for problem in task.problems("test", 10)]
        rounds[spec] = sum(len(m.tokens) for m in made) / sum(m.num_rounds for m in made)
    assert rounds["margin:delta=6"] > 1.3 * rounds["lossless"]


@pytest.mark.parametrize("kind", ["judge", "pivot"])
def test_bundled_heads_fit_their_pair_and_rescue(pair, kind):
    rule = reprieve.parse_rule(f"{kind}:path=reprieve/arithmetic-{kind}")
    lossless = pair.decoder("lossless", num_draft_tokens=16)
    relaxed = pair.decoder(rule, num_draft_tokens=16, task="arithmetic")
    params = reprieve.SamplingParams(max_new_tokens=200)
    problems = load_task("arithmetic").problems("validation", 4)
    ours = [relaxed.generate(problem.prompt, params) for problem in problems]
    theirs = [lossless.generate(problem.prompt, params) for problem in problems]
    assert sum(made.num_rescued for made in ours) > 4
    assert sum(made.num_rounds for made in ours) < 0.8 * sum(made.num_rounds for made in theirs)


def test_heads_work_inside_generate_and_refuse_other_models(pair):
    prompt = torch.tensor([pair.tokenizer.encode(load_task("arithmetic").problems("validation", 1)[0].prompt)])
    options = dict(
        custom_generate=reprieve.custom_generate,
        text_tokenizer=pair.tokenizer,
        rule="judge:path=reprieve/arithmetic-judge",
        max_new_tokens=60,
    )
    made = pair.target.generate(prompt, draft_model=pair.draft, **options)
    assert made.shape[1] > prompt.shape[1]
    with pytest.raises(PairError, match="was made for target"):
        pair.draft.generate(prompt, draft_model=pair.draft, **options)


def test_task_problems_belong_to_their_split():
    task = load_task("arithmetic")
    for split in task.splits:
        for problem in task.problems(split, 20, offset=5):
            question = problem.prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
            assert split_of(question) == split
    assert task.problems("test", 3, offset=2)[0] == task.problems("test", 5)[2]
