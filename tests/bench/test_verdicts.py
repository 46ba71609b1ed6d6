"""Answers compared by a language model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reprieve.backends.local import LocalEngine
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.settings import VerdictSettings
from reprieve.bench.verdicts import Verdict, judge_run, summarise_verdicts
from reprieve.errors import ReprieveError, SpecError
from reprieve.files import read_records
from reprieve.stats import wilson_interval
from tests.bench.toys import TwoTurns, run_arms, settings


class FirstIsBetter:
    """A judge that prefers the first answer, unless exactly one of them contains a 7."""

    def __init__(self):
        self.num_asked = 0

    async def ask(self, prompt, *, attempt=0):
        self.num_asked += 1
        first, second = prompt.split("assistant A:")[1].split("assistant B:")
        second = second.split("Explain in a sentence")[0]
        if ("7" in first.split()) != ("7" in second.split()):
            return "[[A>B]]" if "7" in first.split() else "[[B>A]]"
        return "[[A>B]]"


def test_a_judges_position_bias_cancels_out(pair, tmp_path):
    arms = make_arms(["random:rate=0.9"], [4])
    config = RunConfig.of(LocalEngine(pair), arms, settings(limit=4))
    records = run_arms(config, arms, LocalEngine(pair), TwoTurns(), tmp_path).records
    problems = TwoTurns().problems("test", 4)
    chat = FirstIsBetter()
    judging = VerdictSettings(judge="openai:model=m,url=u")

    def judged(settings):
        return judge_run(tmp_path, problems, records, chat, settings)

    document = judged(judging)
    rows = {row["arm"]: row for row in document["arms"]}
    assert set(rows) == {"target_only", "draft_only", "random:rate=0.9"}
    same = rows["target_only"]
    assert (same["num_ties"], same["num_judged"], same["equal_or_better"]) == (4, 4, 1.0), "equal texts are ties"
    assert rows["random:rate=0.9"]["num_judged"] == 4 and "chat" in rows["random:rate=0.9"]["categories"]
    asked = chat.num_asked
    assert judged(judging) == document and chat.num_asked == asked, "verdicts are kept"
    other = judged(replace(judging, baseline="random:rate=0.9"))
    assert {row["arm"] for row in other["arms"]} == {"target_only", "draft_only", "lossless"} and chat.num_asked > asked
    assert judged(judging) == document, "verdicts against another baseline do not count"
    for change in ({"judge": "openai:model=another,url=u"}, {"num_votes": 2}):
        asked = chat.num_asked
        judged(replace(judging, **change))
        assert chat.num_asked > asked, change
    with pytest.raises(SpecError, match="baseline must be an arm with answers"):
        judged(replace(judging, baseline="nothing"))


def a_verdict(problem, trial, score):
    return Verdict("a", problem, trial, judge="j", baseline="lossless", num_votes=1, category="", votes=[], score=score)


def test_trials_of_one_problem_are_not_independent_verdicts():
    verdicts = [a_verdict(problem, trial, 1.0) for problem in "pqrs" for trial in range(2)]
    compared = summarise_verdicts(verdicts, "lossless")["arms"][0]
    assert compared["equal_or_better_ci95"] == list(wilson_interval(4, 4)), "four problems, not eight"


def test_a_damaged_verdict_is_named(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    path.write_text(
        '{"arm": "a", "problem_id": "p", "trial": 0, "judge": "j", "baseline": "lossless", '
        '"num_votes": 1, "category": "", "votes": [], "score": "x"}\n'
    )
    with pytest.raises(ReprieveError, match="line 1 is not a valid verdict: score must be of type float"):
        list(read_records(path, Verdict, "verdict", signed=True))
