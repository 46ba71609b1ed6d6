"""Answer parsing: forms that instruct models write, and GSM8K solutions rewritten into them."""

import pytest

from benchmarks.answers import misreadings
from reprieve.tasks.answers import final_answer
from reprieve.tasks.graders import GRADERS
from reprieve.tasks.numbers import Number, number_in, written
from tests.tasks import answer_forms as forms

NUMBER, MATH = GRADERS.make("number"), GRADERS.make("math")
SENTENCES = ("that Natalia", "of the", "approximately")
NUMBERS = [*forms.QWEN, *forms.LLAMA, *forms.DEEPSEEK, *forms.GEMMA]


def test_there_are_enough_forms():
    assert len(NUMBERS) + len(forms.MATH) >= 80


@pytest.mark.parametrize(("text", "same", "others"), NUMBERS)
@pytest.mark.parametrize("grader", [NUMBER, MATH], ids=["number", "math"])
def test_numbers_are_read(grader, text, same, others):
    if grader is MATH and any(word in text for word in SENTENCES):
        pytest.skip("a sentence: the number grader's to read")
    answer = grader.extract(text)
    assert [grader.equivalent(answer, other) for other in same] == [True] * len(same), answer
    assert [grader.equivalent(answer, other) for other in others] == [False] * len(others), answer


@pytest.mark.parametrize("text", forms.NOTHING)
def test_a_response_without_a_value_has_no_answer_and_equals_nothing(text):
    answer = NUMBER.extract(text)
    assert answer is None and not NUMBER.equivalent(answer, answer) and not NUMBER.equivalent(answer, "7")


@pytest.mark.parametrize(("text", "same", "others"), forms.MATH)
def test_expressions_and_words_are_read(text, same, others):
    answer = MATH.extract(text)
    assert [MATH.equivalent(answer, other) for other in same] == [True] * len(same), answer
    assert [MATH.equivalent(answer, other) for other in others] == [False] * len(others), answer


def test_numbers_round_trip():
    for text in ("72", "-3", "1.5", "0.05", "2/3", "-0.125", "50%", "1000000"):
        number = number_in(text)
        assert number is not None and written(number) == text
    assert written(Number(number_in("1/3").value, percent=True)) == "1/3%"


def test_a_response_of_open_braces_has_no_answer():
    assert final_answer("\\boxed{" * 20000) is None


def test_solutions_in_the_styles_of_models_are_read():
    """A few solutions; `benchmarks/answers.py` checks all of GSM8K's."""
    endings = ("72", "-5", "1,250,000", "2.5", "0", "10")
    solutions = [f"First {number} times 3 is 9.\nThen <<9-4=5>>5 are left.\n#### {number}" for number in endings]
    assert list(misreadings(solutions)) == []


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 5000 + "7" + "}" * 5000,
        "the answer is " * 5000,
        "#### 5\n" * 5000,
        "\\boxed{5 " + "a b/" * 20000 + "}",
    ],
)
def test_long_responses_are_read(text):
    for grader in (NUMBER, MATH):
        answer = grader.extract(text)
        grader.equivalent(answer, "5 " + "a" * 50000)
        grader.equivalent("5 " + "ab " * 20000, answer)
