"""The shipped pair: plain transformers folders, small enough, and lossless on real answers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import reprieve
from reprieve.bundles import BUNDLES
from reprieve.errors import PairError
from reprieve.tasks import load_task
from reprieve.tasks.word_problems import split_of


@pytest.fixture(scope="module")
def pair(bundled_pair):
    return bundled_pair


@pytest.mark.parametrize("bundle", BUNDLES.values(), ids=lambda bundle: bundle.key)
def test_weights_are_small_and_plain(bundle):
    folders = [bundle.role_folder(role) for role in ("target", "draft")]
    sizes = [path.stat().st_size for folder in folders for path in folder.glob("*.safetensors")]
    assert len(sizes) == 2
    assert sum(sizes) < 40e6
    assert all((bundle.folder / head).is_dir() for head in bundle.heads)
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.model_type == "llama"
        assert len(AutoTokenizer.from_pretrained(folder)) == model.config.vocab_size
        record = json.loads((folder / "training.json").read_text())
        assert record["recipe"]["seed"] is not None
        assert record["test_accuracy"] > 0.4


def test_the_miniature_answers_a_first_question_and_decodes_losslessly():
    pair = reprieve.load_pair("reprieve/miniature")
    assert pair.target.dtype == torch.float32  # the weights are stored as float16
    task = load_task(BUNDLES["reprieve/miniature"].task)
    question = task.wrap("Anna has 23 stamps. She buys 18 more stamps. How many stamps does Anna have now?")
    decoder = pair.decoder("lossless", num_draft_tokens=8)
    for prompt in (question, task.problems("test", 1)[0].prompt):
        ids = torch.tensor([pair.tokenizer.encode(prompt)])
        expected = pair.target.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
        made = decoder.generate(prompt, reprieve.SamplingParams(max_new_tokens=64))
        assert made.token_ids == expected
        assert prompt != question or task.extract_answer(made.text) == "41"


@pytest.mark.slow
def test_lossless_greedy_equals_generate_on_real_problems(pair):
    decoders = [pair.decoder("lossless", drafter=drafter) for drafter in ("draft", "ngram")]
    for problem in load_task("arithmetic").problems("test", 4):
        ids = torch.tensor([pair.tokenizer.encode(problem.prompt)])
        expected = pair.target.generate(ids, max_new_tokens=256, do_sample=False)[0, ids.shape[1] :].tolist()
        assert [decoder.generate(problem.prompt).token_ids for decoder in decoders] == [expected, expected]


PARAMS = reprieve.SamplingParams(max_new_tokens=200)


@pytest.fixture(scope="module")
def strict(pair):
    """Problems and their lossless answers."""
    problems = load_task("arithmetic").problems("validation", 4)
    decoder = pair.decoder("lossless", num_draft_tokens=16)
    return problems, [decoder.generate(problem.prompt, PARAMS) for problem in problems]


def tokens_per_round(answers):
    return sum(len(answer.tokens) for answer in answers) / sum(answer.num_rounds for answer in answers)


@pytest.mark.slow
def test_a_lenient_rule_rescues_and_needs_fewer_rounds(pair, strict):
    problems, plain = strict
    decoder = pair.decoder("margin:delta=6", num_draft_tokens=16)
    made = [decoder.generate(problem.prompt, PARAMS) for problem in problems]
    assert tokens_per_round(made) > 1.3 * tokens_per_round(plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["judge", "pivot"])
def test_bundled_heads_fit_their_pair_and_rescue(pair, strict, kind):
    problems, plain = strict
    rule = reprieve.parse_rule(f"{kind}:path=reprieve/arithmetic-{kind}")
    relaxed = pair.decoder(rule, num_draft_tokens=16, task="arithmetic")
    made = [relaxed.generate(problem.prompt, PARAMS) for problem in problems]
    assert sum(one.num_rescued for one in made) > 4
    assert sum(one.num_rounds for one in made) < 0.8 * sum(one.num_rounds for one in plain)


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
