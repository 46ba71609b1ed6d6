"""Both branches of every decision."""

import dataclasses

import pytest

from cospec_branches import BranchChoices, diagnose
from reprieve.engine import Pair, SamplingParams
from reprieve.models.arbiter import ArbiterAdvisor
from reprieve.rules.arbiter import ArbiterRule
from tests.kit.arbiters import PROMPT, arbiter_of, decoder_with, trained
from tests.kit.mining import LastWordTask, problem
from tests.kit.tiny import NumberTokenizer


def test_choices_are_counted_by_category():
    choices = BranchChoices([True, True, False, False, True, False], [1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 1, 0])
    counts = choices.counts()
    assert {name: count["num"] for name, count in counts.items()} == {
        "all": 6, "draft_better": 2, "target_better": 2, "both_right": 1, "both_wrong": 1
    }  # fmt: skip
    assert counts["draft_better"] == {"num": 2, "num_draft_not_worse": 2, "num_draft_chosen": 1, "num_agreed": 1}
    assert counts["target_better"] == {"num": 2, "num_draft_not_worse": 0, "num_draft_chosen": 1, "num_agreed": 1}
    assert counts["all"]["num_agreed"] == 4


class SameTextTask(LastWordTask):
    """The answer is the whole text."""

    def extract_answer(self, text):
        return text.strip()


@pytest.mark.slow
def test_both_branches_of_every_decision_are_followed(target, draft):
    """Each mismatch that the answer reached is followed on both sides; here the other side always changes the text."""
    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    decoder = decoder_with(target, draft, rule, ArbiterAdvisor(model))
    pair = Pair(target, draft, NumberTokenizer(), "t", "d")
    params = SamplingParams(max_new_tokens=40)
    text = " ".join(map(str, PROMPT))
    own = decoder.generate(text, params, trace=True)
    problems = [dataclasses.replace(problem("p", own.text.strip()), prompt=text)]
    found = diagnose(decoder, pair, SameTextTask(), problems, params)
    (choices,) = found.choices
    reached = sum(
        sum(
            not passed
            for place, passed in enumerate(traced.lossless_accepts)
            if place < min(len(traced.committed), len(traced.path) + 1)
        )
        for traced in own.trace
    )
    assert len(choices.accepted) == reached > 5 and found.num_correct == 1
    others = [
        target_side if accepted else draft_side
        for accepted, draft_side, target_side in zip(
            choices.accepted, choices.draft_utilities, choices.target_utilities, strict=True
        )
    ]
    assert set(others) == {0.0}, "another token in an answer makes another text"
    summary = found.summary()
    assert summary["all"]["num"] == reached and summary["all"]["share"][0] == 1.0


@pytest.mark.slow
def test_branches_of_sampled_answers_continue_greedily(target, draft):
    """Branches continue greedily; the recorded choices are those of the sampled answer."""
    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    decoder = decoder_with(target, draft, rule, ArbiterAdvisor(model))
    pair = Pair(target, draft, NumberTokenizer(), "t", "d")
    text = " ".join(map(str, PROMPT))
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    made = [decoder.generate(text, params.for_problem(number), trace=True) for number in range(2)]
    first, place = next(
        (traced, place)
        for traced in made[0].trace
        for place, passed in enumerate(traced.lossless_accepts)
        if not passed
    )
    start = sum(len(traced.committed) for traced in made[0].trace[: made[0].trace.index(first)])
    branch = [*made[0].token_ids[:start], *first.drafted_ids[:place], first.target_ids[place]]
    rest = decoder.generate([*PROMPT, *branch], SamplingParams(max_new_tokens=24 - len(branch)))
    ends = NumberTokenizer().decode([*branch, *rest.token_ids], skip_special_tokens=True)
    problems = [dataclasses.replace(problem("p", ends.strip()), prompt=text)] * 2
    found = diagnose(decoder, pair, SameTextTask(), problems, params)
    choices, other = found.choices
    assert choices.target_utilities[0] == 1.0, "the target's side, gone on with greedily, is the reference"
    assert choices.accepted[0] == (place < len(first.path)) and found.num_correct == 0
    assert len(other.accepted) > 0 and made[0].token_ids != made[1].token_ids, "each answer has a seed of its own"


@pytest.mark.slow
def test_forcing_the_taken_branch_repeats_the_answer(target, draft):
    """Continuing from the text and the rest of the block repeats the answer exactly."""
    from cospec_branches import _Branches, _decisions
    from reprieve.mining.target import ResponseFormat

    model = trained(draft)
    rule = ArbiterRule.of(arbiter_of(model), lambda_=0.5)
    decoder = decoder_with(target, draft, rule, ArbiterAdvisor(model))
    params = SamplingParams(max_new_tokens=40)
    responses = ResponseFormat(NumberTokenizer(), LastWordTask(), frozenset(), 40)
    item = dataclasses.replace(problem("p", "0"), prompt=" ".join(map(str, PROMPT)))
    branches = _Branches(decoder, responses, item, params)
    num_followed, turned = 0, 0
    for start, traced, place in _decisions(branches.made):
        text = [*branches.made.token_ids[:start], *traced.drafted_ids[:place]]
        if place < len(traced.path):
            text = [*text, traced.drafted_ids[place], *branches._scan_on(traced, place + 1)]
        else:
            text = [*text, traced.target_ids[place]]
        assert branches._continued(text[:40]) == branches.made.token_ids
        num_followed += 1
        other = branches._branch(start, traced, place, draft=place >= len(traced.path))
        forced = (traced.target_ids if place < len(traced.path) else traced.drafted_ids)[place]
        at = start + place
        assert len(other) == 40 and other[:at] == branches.made.token_ids[:at] and other[at] == forced
        text = [*branches.made.token_ids[:at], forced]
        if place >= len(traced.path):
            text += branches._scan_on(traced, place + 1)
        fresh = decoder.generate(
            [*PROMPT, *text[:40]], dataclasses.replace(params, max_new_tokens=max(1, 40 - len(text)))
        )
        turned += len(text) >= 40 or other == [*text, *fresh.token_ids]
    assert num_followed > 5 and turned == num_followed, "from there the same policy goes on"
