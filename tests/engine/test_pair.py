"""The public API: `load_pair`, `pair.decoder`, `decoder.generate`."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import reprieve
from reprieve.drafters import DraftModelDrafter, EagleDrafter, NgramDrafter
from reprieve.drafters.length import AcceptanceLength, LearnedLength
from reprieve.errors import PairError, SpecError
from reprieve.rules import parse_rule
from tests.kit.chats import save_chat_pair
from tests.kit.tiny import IDENTITY, NumberTokenizer, random_head, tiny_model

QUESTION = "Question: Anna has 23 apples. She buys 18 more apples. How many apples does Anna have now?\nAnswer:"


def test_everything_exported_can_be_used_and_is_documented():
    for name in reprieve.__all__:
        found = getattr(reprieve, name)
        assert name == "__version__" or (found.__doc__ or "").strip(), name
    assert dir(reprieve) == reprieve.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        reprieve.nothing  # noqa: B018


def test_a_rule_by_text_and_by_object_decode_alike(bundled_pair):
    by_text = bundled_pair.decoder("margin:delta=3", num_draft_tokens=8).generate(QUESTION)
    by_object = bundled_pair.decoder(parse_rule("margin:delta=3"), num_draft_tokens=8).generate(QUESTION)
    assert by_text.text == by_object.text
    assert by_text.num_rescued == by_object.num_rescued > 0


def test_one_model_alone_equals_its_generate(bundled_pair):
    ids = bundled_pair.tokenizer(QUESTION, return_tensors="pt").input_ids
    for name, model in (("target_only", bundled_pair.target), ("draft_only", bundled_pair.draft)):
        answer = bundled_pair.decoder(name).generate(QUESTION, reprieve.SamplingParams(max_new_tokens=40))
        with torch.no_grad():
            wanted = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
        assert answer.token_ids == wanted.tolist()
        assert answer.num_drafted == 0


def test_lossless_is_the_default(bundled_pair):
    decoder = bundled_pair.decoder()
    assert decoder.rule.name == "lossless"
    assert isinstance(decoder.draft_length, LearnedLength), "as many tokens as pay, by the bundled head"


def test_bundled_length_heads_are_used_only_with_their_pair_and_drafter(bundled_pair):
    assert isinstance(bundled_pair.decoder("judge:threshold=0.5").draft_length, LearnedLength), "whatever the threshold"
    assert bundled_pair.decoder("typical").draft_length.head.rule == "lossless", "the next best"
    assert bundled_pair.decoder("judge").draft_length.head.rule == "judge"
    assert isinstance(bundled_pair.decoder(drafter="ngram").draft_length, AcceptanceLength)
    assert bundled_pair.decoder(drafter="eagle3").draft_length.drafts_trees
    other = dataclasses.replace(bundled_pair, draft=bundled_pair.target, draft_name="another")
    assert isinstance(other.decoder().draft_length, AcceptanceLength)
    with pytest.raises(PairError, match="made for target"):
        other.decoder(num_draft_tokens="auto:path=reprieve/arithmetic-length-lossless")


@pytest.mark.parametrize("value", [0, 513, 8.0, None, "8", "atuo", "auto:path="])
@pytest.mark.parametrize("drafter", ["draft", "ngram"])
def test_invalid_k_is_refused(bundled_pair, value, drafter):
    with pytest.raises(SpecError, match="num_draft_tokens"):
        bundled_pair.decoder(num_draft_tokens=value, drafter=drafter)


@pytest.mark.slow
def test_auto_gives_the_targets_answers_and_drafts_few_rejected_tokens(bundled_pair):
    task = reprieve.load_task("arithmetic")
    problems = task.problems("test", 3)
    params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)
    auto, plain = bundled_pair.decoder(), bundled_pair.decoder("target_only")
    made = [auto.generate(problem.prompt, params) for problem in problems]
    assert [one.token_ids for one in made] == [plain.generate(problem.prompt, params).token_ids for problem in problems]
    assert sum(one.num_accepted for one in made) > 0.75 * sum(one.num_drafted for one in made)


@pytest.mark.parametrize(
    ("spec", "kind"), [("draft", DraftModelDrafter), ("ngram:max_ngram=2", NgramDrafter), ("eagle3", EagleDrafter)]
)
def test_drafters_are_selected_by_specification(bundled_pair, spec, kind):
    assert isinstance(bundled_pair.decoder(drafter=spec).drafter, kind)


@pytest.mark.parametrize("rule", ["judge", "pivot", "lts:theta=0.9", "arbiter", "judge&floor:min_prob=0.1"])
def test_rules_without_a_path_use_the_bundled_head_on_the_bundled_pair(bundled_pair, rule):
    decoder = bundled_pair.decoder(rule, num_draft_tokens=4)
    assert decoder.rule.heads
    assert decoder.generate(QUESTION, reprieve.SamplingParams(max_new_tokens=8)).num_rounds > 0


def other_pair():
    return reprieve.Pair(tiny_model(), None, NumberTokenizer(), "tiny/target", None)


def test_on_other_pairs_a_rule_without_a_path_names_the_training_command():
    with pytest.raises(SpecError, match=r"rule judge needs path=FOLDER, a head from `reprieve train judge`"):
        other_pair().decoder("judge", drafter="ngram")


def test_a_head_of_another_pair_is_refused_and_one_of_another_task_warns(bundled_pair, tmp_path):
    random_head("judge", pair=IDENTITY).save_pretrained(tmp_path)
    with pytest.raises(PairError, match="tiny/target"):
        bundled_pair.decoder(f"judge:path={tmp_path}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bundled_pair.decoder("judge", task="arithmetic")
    with pytest.warns(UserWarning, match="trained on task 'arithmetic' and is used on 'gsm8k'"):
        bundled_pair.decoder("judge", task="gsm8k")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rule": "nothing"}, "rule must be one of"),
        ({"rule": "margin:delta=-1"}, r"delta must be in .* got -1"),
        ({"num_draft_tokens": 0}, r"num_draft_tokens must be a whole number in \[1, 512\], .*, got 0"),
        ({"drafter": "crystal_ball"}, "drafter must be one of"),
        ({"rule": "fuzzy", "drafter": "ngram"}, "needs draft probabilities, which the ngram drafter does not have"),
    ],
)
def test_invalid_arguments_are_named(bundled_pair, arguments, says):
    with pytest.raises(SpecError, match=says):
        bundled_pair.decoder(**arguments)


def test_a_pair_without_a_draft_says_what_it_lacks():
    with pytest.raises(PairError, match="draft"):
        other_pair().decoder("margin:delta=1")
    with pytest.raises(PairError, match="draft"):
        other_pair().decoder("draft_only")


def test_two_decoders_of_one_pair_do_not_disturb_each_other(bundled_pair):
    first, second = (bundled_pair.decoder("lossless", num_draft_tokens=4) for _ in range(2))
    alone = first.generate(QUESTION).text
    seen = []
    first.generate(QUESTION, on_token=lambda *_: seen.append(0) if seen else seen.append(second.generate("Question:")))
    assert first.generate(QUESTION).text == alone


def test_sampling_can_be_given_by_name(bundled_pair):
    decoder = bundled_pair.decoder("lossless", num_draft_tokens=4)
    made = decoder.generate("Question: 1 + 1?\nAnswer:", max_new_tokens=3)
    assert len(made.tokens) == 3 and repr(made).startswith("Generation(")
    for call in (lambda: decoder.generate("x", max_tokens=3), lambda: reprieve.SamplingParams(max_tokens=3)):
        with pytest.raises(TypeError, match=r"SamplingParams.* unexpected keyword argument 'max_tokens'"):
            call()
    assert repr(decoder).startswith("SpeculativeDecoder('lossless', target=") and repr(decoder).endswith("K = 4)")
    assert repr(bundled_pair) == (
        "Pair(target='reprieve/arithmetic-pair', draft='reprieve/arithmetic-pair', dtype='float32', device='cpu')"
    )


def test_an_unknown_bundled_name_is_refused_by_name():
    with pytest.raises(SpecError, match=r"target must be one of reprieve/.* or another model, got 'reprieve/nope'"):
        reprieve.load_pair("reprieve/nope")


def test_messages_are_put_in_the_chat_template(tmp_path, bundled_pair):
    save_chat_pair(tmp_path)
    pair = reprieve.load_pair(tmp_path / "target", tmp_path / "draft", dtype="float32")
    messages = [{"role": "user", "content": "hello"}]
    made = pair.decoder().generate(messages=messages, max_new_tokens=4)
    text = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert made.prompt_ids == pair.tokenizer.encode(text, add_special_tokens=False)
    for given, says in (
        ({"prompt": "x", "messages": messages}, "either a prompt or messages"),
        ({}, "either a prompt or messages"),
        ({"messages": []}, "messages must be a list such as"),
        ({"messages": "hello"}, "messages must be a list such as"),
        ({"messages": [{"text": "hello"}]}, "each message must have a role and a content"),
    ):
        with pytest.raises(SpecError, match=says):
            pair.decoder().generate(**given)
    with pytest.raises(SpecError, match="requires a tokenizer with a chat template"):
        bundled_pair.decoder().generate(messages=messages)
