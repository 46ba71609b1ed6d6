"""Language models as judges, and equations checked by hand."""

from __future__ import annotations

import asyncio

import pytest

from reprieve.errors import ReprieveError, SpecError
from reprieve.mining.autojudge import judged_worse
from reprieve.mining.pivot import (
    NO_VERDICT,
    SOUND,
    UNSOUND,
    equation_soundness,
    make_soundness,
    model_soundness,
    parse_verdict,
)
from reprieve.tasks.chat import make_chat
from tests.kit.mining import EOS, miner, problem
from tests.mining.toys import FakeChat

A, B, C, AB, BC, SPACE = range(1, 7)


@pytest.mark.parametrize(
    ("replies", "important", "votes"),
    [
        (["[[A>>B]]", "[[A>B]]", "[[B>A]]"], True, "A>>B,A>B,B>A"),
        (["[[A=B]]", "[[A>B]]", "[[B>>A]]"], False, "A=B,A>B,B>>A"),
        (["first [[A>B]], no: [[A=B]]", "[[A=B]]", "[[A=B]]"], False, "A=B,A=B,A=B"),
        (["?", "[[A>B]]", "A>B", "x", "y", "[[A=B]]"], True, "A>B,none,A=B"),
        (["?"] * 9, None, "none,none,none"),
    ],
)
def test_pairwise_votes_by_majority(replies, important, votes):
    chat = FakeChat(*replies)
    assert asyncio.run(judged_worse(chat, "40 41", "2 2", "3 3")) == (important, votes)
    assert "assistant A:\n2 2" in chat.prompts[0]
    assert "assistant B:\n3 3" in chat.prompts[0]


def test_open_ended_mining_compares_with_the_running_response():
    """After an accepted swap, response A contains it."""
    chat = FakeChat(*["[[A=B]]"] * 3, *["[[A>B]]"] * 3)
    script = lambda text: lambda before: text[len(before)] if len(before) < len(text) else EOS  # noqa: E731
    found = asyncio.run(miner(script([1, 3, EOS]), script([2, 4, EOS]), judge=chat, task=Open()).mine(problem()))
    assert [m.important for m in found.mismatches] == [False, True]
    assert "assistant A:\n1 3\n" in chat.prompts[0]
    assert "assistant A:\n2 3\n" in chat.prompts[3]
    assert "assistant B:\n2 4\n" in chat.prompts[3]


class Open:
    """A task without references: the response is the answer."""

    stop = ()
    graded = False

    def extract_answer(self, text):
        return text or None

    def equivalent(self, answer, other):
        raise AssertionError("a judge decides")


@pytest.mark.parametrize(
    ("reply", "flawed"),
    [
        ('{"analysis": "ok", "flawed": false}', False),
        ('```json\n{"analysis": "a {b} c", "flawed": true}\n```', True),
        ('{"analysis": "ok", "flawed": "no"}', None),
        ('{"flawed": true}', None),
        ("[]", None),
        ("{not json}", None),
        ("it is sound", None),
    ],
)
def test_soundness_verdicts_are_strict_json(reply, flawed):
    assert parse_verdict(reply) is flawed


def test_malformed_soundness_verdicts_are_retried_and_then_count_as_none():
    good = '{"analysis": "", "flawed": true}'
    assert asyncio.run(model_soundness(FakeChat("?", "{", good), "q", "5", "r")) == UNSOUND
    assert asyncio.run(model_soundness(FakeChat("?", "?", "?", good), "q", "5", "r")) == NO_VERDICT


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("2+3=5. Then 5*4=20 and 20/5=4.", SOUND),
        ("2+3=6.", UNSOUND),
        ("7/2=3", UNSOUND),
        ("25% of 84=21", SOUND),
        ("no equation", SOUND),
    ],
)
def test_equations_are_checked(text, verdict):
    assert asyncio.run(equation_soundness("q", "5", text)) == verdict


def test_judges_are_created_from_specifications(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert make_soundness(None) is None
    assert make_chat("openai:model=m,url=http://127.0.0.1:1/v1").model == "m"
    for spec in ("gemini", "openai:url=x", "openai:model=m,size=3"):
        with pytest.raises(SpecError, match="a judge is written openai:model=NAME"):
            make_chat(spec)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ReprieveError, match="API client cannot start"):
        make_chat("openai:model=m")
