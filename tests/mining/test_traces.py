"""CoSpec's traces and their labels."""

import asyncio
import dataclasses
import itertools

import pytest
import torch

from recipes.arbiter.reinforce import untrained
from recipes.arbiter.rollouts import RolloutJob, RolloutMaker, RolloutSettings
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.errors import ContextOverflowError, ReprieveError, SpecError
from reprieve.heads.settings import ArbiterShape
from reprieve.mining.building import build
from reprieve.mining.draft import BlockReader, local_reader
from reprieve.mining.settings import TraceMining
from reprieve.mining.store import LabelStore
from reprieve.mining.target import ResponseFormat
from reprieve.mining.traces import LABELS_VERSION, BlockTracer, TracedRound, _reached, soft_label
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import Sampler
from reprieve.settings import PairSettings, SamplingSettings
from reprieve.tasks import load_task
from tests.kit.pairs import ARITHMETIC
from tests.kit.parity import ParityTask, mine, miner_of
from tests.kit.tiny import NumberTokenizer, perturbed, tiny_model


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return Pair(target, perturbed(target, noise=0.05), NumberTokenizer(), "tiny/target", "tiny/draft")


@pytest.fixture(scope="module")
def traces(pair):
    return mine(pair, 8)


def test_soft_labels_by_hand():
    assert [soft_label(*pair, tie=0.8) for pair in ((1, 0), (0, 1), (1, 1), (0, 0))] == [1.0, 0.0, 0.8, 0.8]
    assert soft_label(0.5, 0.25, tie=0.8) == pytest.approx(0.85)
    assert soft_label(0.25, 0.5, tie=0.8) == pytest.approx(0.6)


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_greedy_labels_equal_the_targets_greedy_outcomes_of_both_branches(pair, traces, sampled):
    """Rounds may be sampled; a branch through a sampled token is not a greedy continuation of the text before it."""
    if sampled:
        traces = mine(pair, 3, temperature=1.0, greedy_branches=True)
    alone = SpeculativeDecoder(CachedModel(pair.target), None, pair.tokenizer)
    task = ParityTask()

    def right(prompt_ids, text):
        left = 24 - len(text)
        more = alone.generate([*prompt_ids, *text], SamplingParams(max_new_tokens=left)).token_ids if left else []
        return float(task.extract_answer(pair.tokenizer.decode([*text, *more])) == "even")

    num = {1.0: 0, 0.0: 0, 0.8: 0}
    for found in traces[:3]:
        assert found.num_generated > 24
        for traced in found.rounds:
            assert traced.draft_ids and len(traced.draft_ids) <= 4
            for place, label in enumerate(traced.labels):
                ours, theirs = traced.draft_ids[place], traced.target_ids[place]
                if label is None:
                    assert ours == theirs, "with four to label at K = 4, every mismatch is labelled"
                    continue
                before = [*found.response_ids[: traced.start], *traced.draft_ids[:place]]
                utilities = [right(found.prompt_ids, [*before, token]) for token in (ours, theirs)]
                assert [traced.draft_utilities[place], traced.target_utilities[place]] == utilities
                assert label == soft_label(*utilities, tie=0.8)
                num[label] += 1
    assert min(num.values()) > 3, "each kind of label occurs"


@pytest.mark.slow
def test_traces_of_a_batch_are_those_of_one_prompt_at_a_time(pair, traces):
    miner = miner_of(pair, batched=True)

    async def mine_all():
        return await asyncio.gather(*(miner.mine(problem) for problem in ParityTask().problems("train", 8)))

    batched = asyncio.run(mine_all())
    assert [found.rounds for found in batched] == [found.rounds for found in traces]
    assert [found.response_ids for found in batched] == [found.response_ids for found in traces]
    assert any(found.mismatches for found in batched)


def test_reached_mismatches_are_separated_from_later_ones(traces):
    for found in traces:
        for mismatch in found.mismatches:
            assert found.response_ids[mismatch.position] == mismatch.target_id != mismatch.draft_id
            assert mismatch.important == (mismatch.candidate_utility < mismatch.base_utility)
    assert sum(len(f.mismatches) for f in traces) < sum(
        x is not None for f in traces for r in f.rounds for x in r.labels
    )


@pytest.mark.slow
def test_sampled_rollouts_repeat_and_a_cap_leaves_the_rest_unlabelled(pair):
    first, again = (mine(pair, 2, temperature=1.0, num_rollouts=3, max_mismatches=1) for _ in range(2))
    assert [f.rounds for f in first] == [f.rounds for f in again]
    for found in first:
        for traced in found.rounds:
            assert sum(label is not None for label in traced.labels) <= 1
            assert all(u is None or 3 * u == pytest.approx(round(3 * u)) for u in traced.draft_utilities)


@pytest.mark.slow
def test_the_draft_has_its_own_temperature_in_traces_and_rollouts(bundled_pair):
    sampling = SamplingSettings(temperature=1.0, draft_temperature=0.0)
    settings = TraceMining(limit=1, task="arithmetic", pair=PairSettings(ARITHMETIC.name), num_draft_tokens=6,
                           max_mismatches=1, num_rollouts=1, sampling=sampling)  # fmt: skip
    bench = build(settings)
    assert bench.manifest["draft_temperature"] == 0.0
    found = asyncio.run(bench.miner.mine(bench.problems[0]))
    asked = [((*found.prompt_ids, *found.response_ids[: r.start]), r.draft_ids, r.target_ids) for r in found.rounds]

    task = load_task("arithmetic")
    shape = ArbiterShape()
    settings = RolloutSettings("arithmetic", 6, draft_temperature=0.0, pair=PairSettings(ARITHMETIC.name))
    maker = RolloutMaker(settings, shape, bundled_pair, task)
    (rollout,) = maker.make([RolloutJob("train", 1, seed=1)], untrained(bundled_pair, shape, "arithmetic", 6).tensors)
    rounds = [made.arbitration for made in rollout.rounds]
    asked += [(rollout.context_ids[: r.context_length], r.draft_ids, r.target_ids) for r in rounds]
    for before, drafted, _ in asked:
        text = torch.tensor([[*before, *drafted]])
        with torch.no_grad():
            likeliest = bundled_pair.draft(text).logits[0, len(before) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == list(drafted)
    assert any(drafted != drawn for _, drafted, drawn in asked)


def test_a_store_of_another_labels_version_is_refused(pair, tmp_path):
    manifest = {**dataclasses.asdict(pair.identity), "task": "parity", "labels_version": LABELS_VERSION}
    LabelStore(tmp_path, {**manifest, "labels_version": None})
    with pytest.raises(ReprieveError, match="labels_version = None, this run has 2"):
        LabelStore(tmp_path, manifest)


def test_traces_round_trip_through_the_store(pair, traces, tmp_path):
    manifest = {**dataclasses.asdict(pair.identity), "task": "parity", "num_draft_tokens": 4}
    store = LabelStore(tmp_path, manifest)
    for found in traces:
        store.append(found)
    again = {found.problem_id: found for found in LabelStore(tmp_path).problems()}
    assert all(again[found.problem_id].rounds == found.rounds for found in traces)


class Scripted:
    """A judge whose reply depends on the attempt only."""

    def __init__(self, *replies):
        self.replies, self.prompts = replies, []

    async def ask(self, prompt, *, attempt=0):
        self.prompts.append(prompt)
        return self.replies[min(attempt, len(self.replies) - 1)]


def test_a_language_model_can_score_both_candidates(pair):
    chat = Scripted("no idea", "close call [[A: 4, B: 9]]")
    found = mine(pair, 1, judge=chat)[0]
    labels = [label for traced in found.rounds for label in traced.labels if label is not None]
    assert labels and labels == pytest.approx([0.4] * len(labels)), "tie + (0.4 - 0.9) * tie"
    assert "Solution so far:" in chat.prompts[0] and "0 7 3" in chat.prompts[0]
    mute = mine(pair, 1, judge=Scripted("[[A: 11, B: 2]]"))[0]
    assert all(label is None for traced in mute.rounds for label in traced.labels), "scores out of range are none"


@pytest.mark.parametrize("bad", [dict(max_mismatches=0), dict(num_rollouts=0), dict(tie=1.2)])
def test_bad_mining_settings_are_refused(pair, bad):
    with pytest.raises(SpecError, match=f"{next(iter(bad))} must be"):
        miner_of(pair, **bad)


@pytest.mark.slow
def test_labels_stop_where_the_answer_does(pair):
    """A drafter may continue past an end of text; the tokens after it get no label."""
    task = ParityTask()
    responses = ResponseFormat(pair.tokenizer, task, frozenset({9}), 24)
    assert responses.length_of([1, 2, 9, 4, 5]) == 3 and responses.length_of([1, 2]) is None
    assert responses.length_of([9, 2, 9, 4], start=1) == 3, "what stood before is taken as it is"
    miner = dataclasses.replace(miner_of(pair), responses=responses)
    found = [asyncio.run(miner.mine(problem)) for problem in task.problems("train", 8)]
    for item in found:
        for traced in item.rounds:
            for place, label in enumerate(traced.labels):
                assert label is None or 9 not in traced.draft_ids[:place]


def test_no_mismatch_is_reached_behind_one_without_a_label():
    unlabelled = TracedRound(0, (1, 2, 3), (9, 2, 8), (None, None, 0.2), (None, None, 0.1), (None, None, 0.9))
    assert list(_reached([unlabelled])) == [], "its context is not the response's"
    labelled = TracedRound(4, (1, 2, 3), (1, 5, 8), (None, 0.2, 0.2), (None, 0.1, 0.1), (None, 0.9, 0.9))
    assert [(one.position, one.draft_id, one.target_id) for one in _reached([labelled])] == [(5, 2, 5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ends", [False, True])
def test_traces_equal_the_rounds_of_the_decoder(pair, temperature, ends):
    """With an end token inside the response, and with a budget that cuts the last block."""
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(max_new_tokens=22, temperature=temperature, seed=5)
    decoder = pair.decoder("lossless:verification=exact", num_draft_tokens=4)
    if ends:
        params = dataclasses.replace(params, eos_token_ids=(decoder.generate(prompt, params).token_ids[9],))
    whole = decoder.generate(prompt, params, trace=True)
    responses = ResponseFormat(pair.tokenizer, ParityTask(), frozenset(params.eos_token_ids or ()), 22)

    async def run_blocking(work):
        return work()

    def make_blocks(params):
        sampler = Sampler(params, torch.device("cpu"))
        return BlockReader(pair.cached_draft(), local_reader(pair.cached_target()), run_blocking, sampler)

    response_ids, rounds = asyncio.run(BlockTracer(make_blocks, responses, 4)(prompt, params))
    assert response_ids == whole.token_ids
    starts = itertools.accumulate((len(traced.committed) for traced in whole.trace), initial=0)
    wanted = [
        (start, tuple(traced.drafted_ids), tuple(traced.target_ids))
        for start, traced in zip(starts, whole.trace, strict=False)
        if traced.drafted_ids
    ]
    assert [(one.start, one.draft_ids, one.target_ids) for one in rounds] == wanted


def test_a_prompt_without_room_for_its_response_is_refused(pair):
    limit = pair.num_positions
    blocks = BlockReader(None, None, None, None, models=[pair.target, pair.draft])
    blocks.require_room([1, 2], limit - 2)
    with pytest.raises(ContextOverflowError, match=rf"2 prompt \+ {limit - 1} new tokens need .* has {limit}; shorten"):
        blocks.require_room([1, 2], limit - 1)
    with pytest.raises(SpecError, match="at least one token"):
        blocks.require_room([], 1)


@pytest.mark.parametrize("number", [0, -3, 513])
def test_draft_lengths_out_of_range_are_refused(number):
    with pytest.raises(SpecError, match="num_draft_tokens must be"):
        TraceMining(num_draft_tokens=number)
