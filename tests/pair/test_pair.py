"""The bundled task: every problem is solvable, every solution right, and splits are disjoint."""

from __future__ import annotations

import random
import re

import pytest
import torch

from reprieve.loop import learning_rate_at, train
from reprieve.pair.corpus import Mixture, RowStream
from reprieve.pair.families import FAMILIES, evaluate
from reprieve.pair.problems import Style, draw_problem, split_of, write_solution
from reprieve.pair.train import PairLearner, Recipe, train_tokenizer
from reprieve.tasks import load_task

EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)|(\d+)% of (\d+)=(\d+)")


def equations(text):
    for left, operator, right, result, percent, whole, part in EQUATION.findall(text):
        if operator:
            yield int(left), operator, int(right), int(result)
        else:
            yield int(whole), "%", int(percent), int(part)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_solutions_compute_what_they_say_and_end_in_the_answer(family):
    task = load_task("arithmetic")
    for index in range(300):
        problem = draw_problem("train", index, family_weights={family: 1.0})
        assert 2 <= len(problem.steps) <= 6
        for probability in (0.0, 0.5, 1.0):
            text = write_solution(problem, Style.uniform(probability), random.Random(index))
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
        problem = draw_problem("validation", index, family_weights={family: 1.0})
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
    first = write_solution(problem, Style(), random.Random(0))
    second = write_solution(problem, Style.uniform(1.0), random.Random(0))
    assert "we know that" in first
    assert "it follows that" in second
    assert first.split("The final")[1] == second.split("The final")[1]


@pytest.fixture(scope="module")
def tokenizer():
    texts = (
        draw_problem("train", i).prompt + write_solution(draw_problem("train", i), Style(), random.Random(i))
        for i in range(200)
    )
    return train_tokenizer(texts, vocab_size=512)


def test_tokenizer_splits_digits_and_round_trips_any_text(tokenizer):
    for text in ("Anna has 1234 apples.", "12+30=42", "naïve 漢字 🙂\n\ttab  two", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x 123")][-3:] == ["1", "2", "3"]


def test_rows_count_only_solutions_and_results(tokenizer):
    stream = RowStream(tokenizer, Mixture(Style()), row_length=288, seed=0)
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
        mixture=Mixture(Style()),
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
    recipe = Recipe(1, 16, 32, 2, num_tokens=1000 * 16 * 288, learning_rate=1.0, mixture=Mixture(Style()))
    assert learning_rate_at(recipe, 0) == pytest.approx(1 / 200)
    assert learning_rate_at(recipe, 200) == pytest.approx(1.0)
    assert learning_rate_at(recipe, 1000) == pytest.approx(0.02)
