"""PAD's miner, by hand and in distribution."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

import pytest
import torch

from reprieve.engine import Pair
from reprieve.engine.batched import BatchedSpeculativeDecoder
from reprieve.engine.batches import Stepper
from reprieve.errors import SpecError
from reprieve.mining import building
from reprieve.mining.building import build
from reprieve.mining.draft import BlockReader, local_reader
from reprieve.mining.pivot import (
    NO_VERDICT,
    UNSOUND,
    BatchedSource,
    Candidate,
    CandidateSource,
    PivotMiner,
    median_length,
    model_soundness,
)
from reprieve.mining.runner import mine_problems
from reprieve.mining.settings import PivotMining
from reprieve.mining.store import LabelStore
from reprieve.mining.target import Target
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import Sampler
from reprieve.settings import PairSettings, PromptSettings, SamplingParams
from tests.kit.mining import EOS, problem, responses
from tests.kit.pairs import ARITHMETIC
from tests.kit.tiny import NumberTokenizer, perturbed, tiny_model
from tests.mining.toys import FakeChat

A, B, C, AB, BC, SPACE = range(1, 7)


class ListedSource:
    """Candidates written out: (accepted before it, candidate, fallback)."""

    def __init__(self, *steps):
        self.steps = list(steps)

    async def __call__(self, prompt_ids, response_ids, num_left):
        accepted, draft_id, fallback_id = self.steps.pop(0)
        return accepted, None if draft_id is None else Candidate(draft_id, fallback_id)


class Remembered:
    """A model that reads each text once: many draws follow the same few texts."""

    def __init__(self, model):
        self.model, self.known = CachedModel(model), {}

    def start(self, token_ids, *, reuse_prefix):
        self.text = list(token_ids)

    def forward(self, token_ids):
        rows = []
        for token_id in token_ids:
            self.text.append(token_id)
            key = tuple(self.text)
            if key not in self.known:
                self.model.start(self.text[:-1], reuse_prefix=True)
                self.known[key] = self.model.forward([token_id])[0]
            rows.append(self.known[key])
        return torch.cat(rows), None


class RolloutTarget(Target):
    """A target that answers correctly after a prefix as often as a table says."""

    def __init__(self, shares):
        self.shares = shares
        self.count: dict[tuple[int, ...], int] = {}

    async def complete(self, session, prompt_ids, response_ids, max_new_tokens, draw):
        key = tuple(response_ids)
        number = self.count[key] = self.count.get(key, 0) + 1
        good = number <= self.shares[key]
        return [*([3] * number), 9, 5 if good else 6, EOS]


def pivots(source, shares, *, alpha=0.8, soundness=None):
    made = PivotMiner(
        PivotMining(num_rollouts=4, alpha=alpha),
        RolloutTarget(shares),
        lambda seed: source,
        responses(max_new_tokens=30),
        soundness,
    )
    return asyncio.run(made.mine(problem()))


def test_pivot_labels_and_the_prefix_by_hand():
    source = ListedSource(([1], 7, 8), ([], 6, 2), ([9, 5, EOS], None, None))
    # 7 scores 3/4 against 4/4, below 0.8: a pivot, replaced by 8. 6 scores 3/4 against 3/4: not a pivot.
    found = pivots(source, {(1,): 4, (1, 7): 3, (1, 8): 3, (1, 8, 6): 3})
    assert [(m.position, m.draft_id, m.important) for m in found.mismatches] == [(1, 7, True), (2, 6, False)]
    assert [(m.base_utility, m.candidate_utility) for m in found.mismatches] == [(1.0, 0.75), (0.75, 0.75)]
    assert found.response_ids == (1, 8, 6, 9, 5, EOS)


def test_alpha_sets_the_tolerance():
    shares = {(): 4, (7,): 3}
    steps = ([], 7, 8), ([EOS], None, None)
    assert pivots(ListedSource(*steps), shares, alpha=0.8).mismatches[0].important
    assert not pivots(ListedSource(*steps), shares, alpha=0.75).mismatches[0].important
    with pytest.raises(SpecError, match=r"alpha must be in \[0, 1\], got 1.5"):
        pivots(ListedSource(*steps), shares, alpha=1.5)


def test_a_base_that_is_never_right_gives_no_pivots():
    found = pivots(ListedSource(([], 7, 8), ([EOS], None, None)), {(): 0, (7,): 0})
    assert not found.mismatches[0].important


def test_soundness_flips_non_pivots_only_and_reads_the_median_rollout():
    chat = FakeChat('{"analysis": "", "flawed": true}')
    shares = {(): 4, (7,): 4}
    found = pivots(ListedSource(([], 7, 8), ([EOS], None, None)), shares, soundness=partial(model_soundness, chat))
    assert found.mismatches[0].important
    assert found.mismatches[0].verdict == UNSOUND
    assert found.response_ids == (8, EOS), "a flipped token falls back like any pivot"
    assert "7 3 3 3 9 5\n" in chat.prompts[0]
    never_asked = FakeChat()
    found = pivots(
        ListedSource(([], 7, 8), ([EOS], None, None)), {(): 4, (7,): 1}, soundness=partial(model_soundness, never_asked)
    )
    assert found.mismatches[0].important
    lost = FakeChat("?", "?", "?")
    found = pivots(ListedSource(([], 7, 8), ([EOS], None, None)), shares, soundness=partial(model_soundness, lost))
    assert (found.mismatches[0].important, found.mismatches[0].verdict) == (False, NO_VERDICT)


def test_a_candidate_that_ends_the_text_needs_no_rollouts():
    found = pivots(ListedSource(([9, 5], EOS, 8)), {(9, 5): 4})
    assert found.mismatches[0].candidate_utility == 1.0
    assert found.response_ids == (9, 5, EOS)


def test_accepted_tokens_end_the_walk_at_the_end_of_text():
    found = pivots(ListedSource(([9, 5, EOS, 3], 7, 8)), {})
    assert found.response_ids == (9, 5, EOS)
    assert not found.mismatches


def test_median_length_picks_the_middle_rollout():
    assert median_length([[1, 1, 1], [2], [3, 3]]) == [3, 3]
    assert median_length([[1] * 4, [2] * 3, [3], [4] * 2]) == [2] * 3


@pytest.mark.slow
@pytest.mark.parametrize("draft_temperature", [None, 0.0])
@pytest.mark.parametrize("batched", [False, True])
def test_accepted_tokens_and_fallbacks_follow_the_targets_distribution(batched, draft_temperature):
    """Chi-square over the next token, whether accepted or a fallback."""
    from scipy.stats import chisquare

    target = tiny_model(seed=1, scale=1.2, vocab_size=8)
    draft = perturbed(target, noise=0.3)
    params = SamplingParams(temperature=1.0, draft_temperature=draft_temperature)
    with torch.inference_mode():
        probs = target(torch.tensor([[3, 1, 2]])).logits[0, -1].softmax(-1)
    counts, num_rejected, size = torch.zeros(8), 0, 1500
    if batched:
        pair = Pair(target, draft, NumberTokenizer(), "tiny/target", "tiny/draft")
        stepper = Stepper(BatchedSpeculativeDecoder(pair, num_rows=100, num_draft_tokens=2, params=params))
        sources = [BatchedSource(stepper, seed) for seed in range(size)]
    else:
        read, sampler = local_reader(Remembered(target)), Sampler(params, torch.device("cpu"))
        blocks = BlockReader(Remembered(draft), read, RolloutTarget({}).run_blocking, sampler)
        alone = CandidateSource(blocks, block_size=2)
        sources = [alone] * size

    async def ask():
        return await asyncio.gather(*(source([3, 1], [2], 5) for source in sources))

    for accepted, candidate in asyncio.run(ask()):
        if not accepted:
            assert candidate is not None
            num_rejected += 1
        counts[accepted[0] if accepted else candidate.fallback_id] += 1
    assert 0.02 * size < num_rejected < 0.98 * size
    expected = size * probs.double() / probs.double().sum()
    assert chisquare(counts.tolist(), expected.tolist()).pvalue > 1e-3


@pytest.mark.parametrize("draft_noise", [0.0, 0.3])
def test_a_batched_source_stops_at_the_first_rejection_or_the_end(draft_noise):
    target = tiny_model(seed=1, scale=1.2, vocab_size=8)
    pair = Pair(target, perturbed(target, noise=draft_noise), NumberTokenizer(), "tiny/target", "tiny/draft")
    params = SamplingParams(temperature=1.0)
    stepper = Stepper(BatchedSpeculativeDecoder(pair, num_rows=8, num_draft_tokens=3, params=params))

    async def ask():
        return await asyncio.gather(*(BatchedSource(stepper, seed)([3, 1], [2], 11) for seed in range(50)))

    for accepted, candidate in asyncio.run(ask()):
        if draft_noise == 0.0:
            assert candidate is None and len(accepted) == 11
        elif candidate is None:
            assert len(accepted) == 11
        else:
            assert len(accepted) < 11 and candidate.draft_id != candidate.fallback_id


@pytest.mark.slow
def test_problems_mined_in_one_batch(monkeypatch, tmp_path):
    """As on an accelerator. Labels do not depend on the other problems in flight, nor on an interruption."""
    monkeypatch.setattr(building, "_on_accelerator", lambda pair: True)
    pair = PairSettings(ARITHMETIC.name, dtype="float32")
    config = PivotMining(
        limit=2, task="arithmetic", pair=pair, prompt=PromptSettings(max_new_tokens=16), num_rollouts=2
    )
    found = []
    for name, num_in_flight, limits in (("together", 2, (2,)), ("resumed", 1, (1, 2))):
        bench = build(dataclasses.replace(config, num_in_flight=num_in_flight))
        store = LabelStore(tmp_path / name, bench.manifest)
        for limit in limits:
            problems = bench.problems[:limit]
            report = mine_problems(bench.miner, problems, store, num_in_flight=num_in_flight)
            assert not report.errors and len(store.done()) == limit
        found.append({labels.problem_id: dataclasses.replace(labels, seconds=0) for labels in store.problems()})
    assert found[0] == found[1]
    assert sum(len(labels.mismatches) for labels in found[0].values()) >= 3


@pytest.mark.slow
def test_pivot_mining_is_repeatable():
    pair, prompt = PairSettings(ARITHMETIC.name, dtype="float32"), PromptSettings(max_new_tokens=24)
    config = PivotMining(
        limit=1, task="arithmetic", pair=pair, prompt=prompt, num_in_flight=1, num_rollouts=2, soundness="equations"
    )
    first, second = (build(config) for _ in range(2))
    one, two = (asyncio.run(bench.miner.mine(bench.problems[0])) for bench in (first, second))
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(two, seconds=0)
    assert one.mismatches
