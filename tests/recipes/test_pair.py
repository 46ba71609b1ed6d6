"""The bundled task: every problem is solvable, every solution right, and splits are disjoint."""

from __future__ import annotations

import random
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import reprieve
from recipes.pair.card import install
from recipes.pair.corpus import Mixture, RowStream
from recipes.pair.presets import TOKENIZER_TEXTS, Recipe
from recipes.pair.tokenizer import train_tokenizer
from recipes.pair.train import PairLearner, build_model, grow, pair_tokenizer, rate_at
from recipes.pair.wordings import RARE, SENTENCES, Style, Voice
from reprieve.bundles import BUNDLES, BY_KEY
from reprieve.tasks import load_task
from reprieve.tasks.families import FAMILIES, evaluate
from reprieve.tasks.word_problems import ARITHMETIC, MINIATURE, Contents, draw_problem, split_of
from reprieve.training.loop import train

EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)|(\d+)% of (\d+)=(\d+)")


def equations(text):
    for left, operator, right, result, percent, whole, part in EQUATION.findall(text):
        if operator:
            yield int(left), operator, int(right), int(result)
        else:
            yield int(whole), "%", int(percent), int(part)


def told(problem, teller, rng):
    return "".join(text for text, _ in teller.tell(problem, rng))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_solutions_are_correct_and_end_in_the_answer(family):
    task = load_task("arithmetic")
    for index in range(300):
        problem = draw_problem("train", index, contents=Contents({family: 1.0}, 0.25))
        assert 2 <= len(problem.steps) <= 6
        for probability in (0.0, 0.5, 1.0):
            text = told(problem, Style.uniform(probability), random.Random(index))
            found = list(equations(text))
            assert len(found) == len(problem.steps)
            for left, operator, right, result in found:
                assert evaluate(left, operator, right) == result
                assert 0 <= result <= 9999
            assert text.endswith(f"The final answer is {problem.answer}.")
            assert task.equivalent(task.extract_answer(text), str(problem.answer))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_numbers_come_from_the_question_or_an_earlier_step(family):
    for index in range(200):
        problem = draw_problem("validation", index, contents=Contents({family: 1.0}, 0.25))
        fractions = {"half": 2, "third": 3, "quarter": 4, "fifth": 5}
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        known |= {value for word, value in fractions.items() if word in problem.question}
        for step in problem.steps:
            assert {step.left, step.right} <= known, problem
            known.add(step.result)


def test_splits_are_disjoint_and_problems_repeatable():
    seen = {}
    for split in ("train", "validation", "test"):
        for index in range(1500):
            problem = draw_problem(split, index)
            assert split_of(problem.question) == split
            assert seen.setdefault(problem.question, split) == split
    assert draw_problem("test", 7) == draw_problem("test", 7)
    assert draw_problem("test", 7) != draw_problem("test", 7, seed=1)
    with pytest.raises(ValueError, match="split must be one of train, validation, test, got 'dev'"):
        draw_problem("dev", 0)


def test_styles_change_words_and_order_but_not_the_answer():
    problem = draw_problem("test", 3)
    first = told(problem, Style(), random.Random(0))
    second = told(problem, Style.uniform(1.0), random.Random(0))
    assert "we know that" in first
    assert "it follows that" in second
    assert first.split("The final")[1] == second.split("The final")[1]


@pytest.fixture(scope="module")
def tokenizer():
    texts = (
        draw_problem("train", i).prompt + told(draw_problem("train", i), Style(), random.Random(i)) for i in range(200)
    )
    return train_tokenizer(texts, vocab_size=512)


def test_tokenizer_splits_digits_and_round_trips_any_text(tokenizer):
    for text in ("Anna has 1234 apples.", "12+30=42", "naïve 漢字 🙂\n\ttab  two", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x 123")][-3:] == ["1", "2", "3"]


def test_rows_count_only_solutions_and_results(tokenizer):
    stream = RowStream(tokenizer, Mixture(Style(), ARITHMETIC), row_length=288, seed=0)
    ids, weights = stream.rows(range(4), progress=0.9)
    assert ids.shape == weights.shape == (4, 289)
    counted = "".join(tokenizer.decode([i]) for i, w in zip(ids[0], weights[0], strict=True) if w)
    assert "Question" not in counted
    assert "The final answer is" in counted
    again, _ = stream.rows(range(2, 4), progress=0.9)
    assert (again == ids[2:]).all(), "rows depend on their index alone"


def test_training_resumes_to_the_same_weights(tokenizer, tmp_path):
    recipe = Recipe(
        1,
        16,
        32,
        2,
        num_tokens=6 * 2 * 64,
        learning_rate=1e-3,
        mixture=Mixture(Style(), ARITHMETIC),
        rows_per_update=2,
        row_length=64,
        warmup_updates=2,
    )

    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    whole, cut, resumed = (PairLearner(recipe, tokenizer, "tiny", "cpu") for _ in range(3))
    train(whole, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(cut, tmp_path / "cut", progress=stop)
    before = (tmp_path / "cut" / "metrics.jsonl").read_text()
    train(resumed, tmp_path / "cut")
    assert (tmp_path / "cut" / "metrics.jsonl").read_text().startswith(before), "it went on with the fourth update"
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_learning_rate_warms_up_and_decays():
    recipe = Recipe(1, 16, 32, 2, num_tokens=1000 * 16 * 288, learning_rate=1.0, mixture=Mixture(Style(), ARITHMETIC))
    assert rate_at(recipe, 0) == pytest.approx(1 / 200)
    assert rate_at(recipe, 200) == pytest.approx(1.0)
    assert rate_at(recipe, 1000) == pytest.approx(0.02)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_the_miniature_has_one_to_eight_steps_of_every_family(family, num_steps):
    contents = Contents({family: 1.0}, 0.5, step_weights=(1.0,), fewest_steps=num_steps)
    for index in range(40):
        problem = draw_problem("train", index, contents=contents)
        fewer = family == "work" and num_steps > 2 and problem.steps[-1].operator == "/"  # dividing the money ends it
        assert len(problem.steps) == num_steps or fewer
        found = list(equations(told(problem, Voice(seed=0, slips=0.0), random.Random(index))))
        assert [evaluate(*equation[:3]) for equation in found] == [equation[3] for equation in found]
        assert len(found) == len(problem.steps)


def test_round_numbers_allow_any_percentage_but_not_in_one_step():
    contents = Contents({"share": 1.0}, 0.0, round_share=1.0, step_weights=(1.0, 1.0, 1.0), fewest_steps=1)
    odd = 0
    for index in range(200):
        problem = draw_problem("train", index, contents=contents)
        shares = [step for step in problem.steps if step.operator == "%"]
        fine = any(step.right % 5 for step in shares)
        assert len(problem.steps) > 1 or not fine
        odd += fine
        assert all(step.left * step.right % 100 == 0 for step in shares)
    assert odd > 60


@pytest.mark.parametrize("key", ["arithmetic", "miniature"])
def test_retraining_a_tokenizer_gives_the_shipped_one(key, tmp_path):
    learned = pair_tokenizer(tmp_path, *TOKENIZER_TEXTS[key])
    shipped = PreTrainedTokenizerFast.from_pretrained(BY_KEY[key].role_folder("target"))
    assert learned.get_vocab() == shipped.get_vocab()


def test_a_slip_is_corrected_at_once_and_excluded_from_the_loss():
    slipped = 0
    for index in range(200):
        problem = draw_problem("train", index, contents=MINIATURE)
        segments = Voice(seed=0, slips=1.0).tell(problem, random.Random(index))
        (wrong,) = [text for text, counts in segments if not counts]
        text = "".join(text for text, _ in segments)
        bad = [found for found in equations(text) if evaluate(*found[:3]) != found[3]]
        assert [str(found[3]) for found in bad] == [wrong]
        assert text.count("Wait, that is wrong: ") == 1
        assert text.endswith(f"The final answer is {problem.answer}.")
        slipped += 1
    assert slipped == 200


def test_voices_spread_over_all_wordings_and_differ():
    target = Voice(seed=0)
    draft = Voice(seed=1, like=target, agreement=0.5, fond_of_rare=0.4)
    places = [(place, f"{family} {operator}") for place in SENTENCES for family in FAMILIES for operator in "+-*/%"]
    same = fond = 0
    for place, context in places:
        mine, theirs = target.weights(place, context), draft.weights(place, context)
        assert sum(mine) == pytest.approx(1) and sum(theirs) == pytest.approx(1)
        assert mine[-1] == RARE, "one wording is rare in the target's voice everywhere"
        same += mine == theirs
        fond += max(theirs) == theirs[-1]
    assert 0.4 < same / len(places) < 0.75
    assert 0.1 < fond / len(places) < 0.3


def test_growing_a_model_keeps_its_logits(tokenizer):
    recipe = Recipe(2, 16, 32, 2, num_tokens=1, learning_rate=1.0, mixture=Mixture(Style(), ARITHMETIC))
    model = build_model(recipe, tokenizer).eval()
    ids = torch.arange(5, 25).unsqueeze(0)
    before = model(ids).logits
    grow(model, 6)
    assert model.config.num_hidden_layers == len(model.model.layers) == 6
    torch.testing.assert_close(model(ids).logits, before)
    with pytest.raises(ValueError, match="num_layers must be a multiple of 6, got 8"):
        grow(model, 8)


def test_training_with_growth_resumes_to_the_same_weights(tokenizer, tmp_path):
    mixture = Mixture(Voice(seed=0), MINIATURE)
    recipe = Recipe(
        1, 16, 32, 2, 6 * 2 * 64, 1e-3, mixture, rows_per_update=2, row_length=64, grown_layers=3, grow_at=0.5
    )

    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    whole, cut, resumed = (PairLearner(recipe, tokenizer, "tiny", "cpu") for _ in range(3))
    train(whole, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(cut, tmp_path / "cut", progress=stop)
    train(resumed, tmp_path / "cut")
    assert len(resumed.model.model.layers) == 3
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_training_may_start_from_the_arithmetic_pair(tokenizer):
    mixture = Mixture(Style(), ARITHMETIC)
    recipe = Recipe(2, 192, 512, 6, num_tokens=1, learning_rate=1.0, mixture=mixture, start="draft")
    model = build_model(recipe, tokenizer)
    older = reprieve.load_pair("reprieve/arithmetic-pair", dtype="float32")
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, older.draft.model.layers[1].mlp.up_proj.weight)
    mine = model.model.embed_tokens.weight[tokenizer.encode("7")[0]]
    assert torch.equal(mine, older.draft.model.embed_tokens.weight[older.tokenizer.encode("7")[0]])


def test_weights_are_stored_in_half_precision_and_loaded_as_float32(tmp_path):
    shipped = AutoModelForCausalLM.from_pretrained(BUNDLES["reprieve/arithmetic-pair"].role_folder("draft"))
    source, out = tmp_path / "trained", tmp_path / "draft"
    shutil.copytree(BUNDLES["reprieve/arithmetic-pair"].role_folder("draft"), source)
    with torch.no_grad():
        for parameter in shipped.parameters():
            parameter += 1e-5  # digits that half precision cannot hold
    shipped.float().save_pretrained(source)
    install(source, out, half=True)
    assert (out / "model.safetensors").stat().st_size < 0.51 * (source / "model.safetensors").stat().st_size
    whole, rounded = (AutoModelForCausalLM.from_pretrained(folder, dtype="auto") for folder in (source, out))
    assert whole.dtype == rounded.dtype == torch.float32
    for ours, theirs in zip(whole.parameters(), rounded.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours.half().float(), rtol=0, atol=0)
