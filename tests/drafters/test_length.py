"""Draft length per round: constant, from recent acceptance, or from a head."""

import dataclasses

import pytest
import torch

from reprieve.drafters import DraftModelDrafter, EagleDrafter, EagleSettings, NgramDrafter, NgramSettings
from reprieve.drafters.draft_model import DraftModelSettings
from reprieve.drafters.length import (
    AcceptanceLength,
    AcceptanceRates,
    FixedLength,
    LearnedLength,
    TreeLength,
    best_length,
)
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.errors import PairError, SpecError
from reprieve.heads.length import LengthHead
from reprieve.models import cached_model
from reprieve.models.cached_model import CachedModel, StepCosts
from reprieve.rules import parse_rule
from reprieve.settings import require_draft_tokens
from tests.kit.tiny import NumberTokenizer, perturbed, random_eagle, random_length, tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PARAMS = SamplingParams(max_new_tokens=60)
CPU = torch.device("cpu")


def decoder(target, draft, length, *, rule="lossless"):
    drafter = DraftModelDrafter(CachedModel(draft, hidden_layers=(-1,)), CPU, hidden_layers=())
    return SpeculativeDecoder(
        CachedModel(target), drafter, NumberTokenizer(), rule=parse_rule(rule), num_draft_tokens=length
    )


def plain(target):
    return SpeculativeDecoder(CachedModel(target), None, NumberTokenizer()).generate(PROMPT, PARAMS).token_ids


def test_greedy_lossless_answers_are_the_targets_for_every_length_policy(target, draft):
    for length in (FixedLength(5), AcceptanceLength(StepCosts(0.1, 0.03)), LearnedLength(random_length(32))):
        made = decoder(target, draft, length).generate(PROMPT, PARAMS, trace=True)
        assert made.token_ids == plain(target)
        assert max(len(one.drafted_ids) for one in made.trace) <= length.most
        again = decoder(target, draft, length).generate(PROMPT, PARAMS)
        assert again.round_lengths == made.round_lengths, "the same request, the same rounds"


def test_a_higher_price_makes_shorter_blocks(target, draft):
    drafted = {}
    for price in (1e-300, 1e-6, 0.5, 1.0):
        made = decoder(target, draft, LearnedLength(random_length(32, price=price))).generate(
            PROMPT, PARAMS, trace=True
        )
        drafted[price] = [len(one.drafted_ids) for one in made.trace[: len(made.trace) // 2]]
    assert set(drafted[1e-300]) == {6}, "its longest block"
    assert set(drafted[1.0]) == {1}, "a block has one token at least"
    assert len({*drafted[1e-6], *drafted[0.5]}) > 2
    assert sum(drafted[0.5]) / len(drafted[0.5]) < sum(drafted[1e-6]) / len(drafted[1e-6])


def test_a_heads_decision_by_hand():
    head = random_length(4, price=0.5)
    state, logits, token = torch.randn(1, 4), torch.randn(1, 9), torch.tensor([3])
    one = LearnedLength(head).start(0.7, 1.3)
    one.begin()
    one.update(4, 1)  # recent: 0.8 * 0.7 + 0.2 * 1 / 2
    scalars = torch.tensor([1.0, logits.log_softmax(-1)[0, 3], 0.0, 0.66, 0.0, 1.3])  # lossless: no dial
    this, after = torch.sigmoid(head.hidden_weight @ state[0] + head.scalar_weight @ scalars)
    for price in (this * after * 0.99, this * after * 1.01):
        asked = LearnedLength(dataclasses.replace(head, price=float(price))).start(0.7, 1.3)
        asked.begin()
        asked.update(4, 1)
        assert asked.should_continue(state, logits, token) == (price < this * after)
    one.begin()
    assert one.should_continue(state, logits, token) == bool(this * after >= 0.5)
    two = scalars.clone()
    two[2] = 1 / 8
    then, _ = torch.sigmoid(head.hidden_weight @ state[0] + head.scalar_weight @ two)
    one.should_continue(state, logits, token)
    assert one._chance == pytest.approx(float(this * then), rel=1e-5), "of all tokens so far"


def policy(cost, exact):
    """A policy for a rule that is `exact` or not; measured costs equal the estimate."""
    return AcceptanceLength(StepCosts(cost, 0.03), measure=(lambda: StepCosts(cost, 0.03)) if exact else None)


@pytest.mark.parametrize("exact", [False, True])
def test_recent_acceptance_sets_the_length(exact):
    good, bad = (policy(0.1, exact).start(None, 0.0) for _ in range(2))
    for _ in range(16):
        good.update(good.begin(), good.begin())
        bad.update(bad.begin(), 0)
    assert good.begin() > 16 and bad.begin() == 1
    bad.update(0, 0)
    assert bad.begin() == 1, "a round without a block says nothing"
    dear = policy(2.0, exact).start(None, 0.0)
    assert dear.begin() == 1


def test_rates_are_per_position_and_unseen_positions_follow_the_one_before():
    rates = AcceptanceRates(4)
    assert rates.rates() == pytest.approx([0.95] * 4)
    for num_accepted in (0, 3, 3, 3):  # rejected at once, or not at all
        rates.update(3, num_accepted)
    first = (3 + 8 * 0.95) / (4 + 8)
    second = (3 + 8 * first) / (3 + 8)
    third = (3 + 8 * second) / (3 + 8)
    assert rates.rates() == pytest.approx([first, second, third, third])
    assert rates.rates([0.5] * 4) == pytest.approx([11 / 20, 11 / 19, 11 / 19, 0.5])


def test_the_best_length_maximises_tokens_per_time():
    rates, cost = [0.6, 0.95, 0.95, 0.95, 0.2], 0.1
    speeds, reached, tokens = [], 1.0, 1.0
    for place, rate in enumerate(rates, start=1):
        reached *= rate
        tokens += reached
        speeds.append(tokens / (1 + cost * place))
    assert best_length(rates, cost) == 1 + speeds.index(max(speeds)) == 4


def test_a_draft_costs_its_share_of_weights_and_on_a_gpu_at_least_of_layers(bundled_pair, monkeypatch):
    num_weights = [sum(p.numel() for p in model.parameters()) for model in (bundled_pair.draft, bundled_pair.target)]
    assert DraftModelSettings().costs(bundled_pair).draft == pytest.approx(num_weights[0] / num_weights[1])
    monkeypatch.setattr(Pair, "device", torch.device("cuda"))
    assert DraftModelSettings().costs(bundled_pair).draft == 2 / 8 > num_weights[0] / num_weights[1]


def test_measured_costs_set_the_length_of_exact_greedy_answers_only():
    cheap, dear = StepCosts(0.05, 0.03), StepCosts(0.5, verify=0.5)
    lossless, relaxed = AcceptanceLength(cheap, measure=lambda: dear), AcceptanceLength(cheap)
    guessed = relaxed.start(None, 0.0).begin()
    assert lossless.start(None, 0.0).begin() < guessed == lossless.start(None, 1.0).begin()
    trees = AcceptanceLength(cheap, drafts_trees=True, measure=lambda: dear)
    assert trees.start(None, 0.0).costs is dear and trees.start(None, 1.0).costs is cheap


def test_forwards_are_measured_in_turns_once_for_each_pair(bundled_pair, monkeypatch):
    seconds = {("target", 1): 2.0, ("target", 5): 10.0, ("draft", 1): 0.5}
    calls = []

    def timed(model, num_tokens, *, num_cached):
        calls.append(("target" if model.model is bundled_pair.target else "draft", num_tokens))
        return seconds[calls[-1]] + len(calls)  # slower and slower: the first turn after the warm-up counts

    monkeypatch.setattr(cached_model, "forward_seconds", timed)
    pair = dataclasses.replace(bundled_pair)
    measured = pair.measured_costs
    assert calls == [*seconds] * 4 and pair.measured_costs is measured
    assert measured == StepCosts(draft=6.5 / 6, verify=(15 / 6 - 1) / 4)
    assert DraftModelSettings().costs(pair, measured) == measured
    assert EagleSettings().costs(pair, measured) == StepCosts(1 / 8, measured.verify)
    assert NgramSettings().costs(pair, measured) == StepCosts(0.0, measured.verify)


def test_only_exact_greedy_answers_start_from_earlier_rates():
    def first_length(*, exact, temperature):
        length = policy(0.1, exact)
        for _ in range(20):
            answer = length.start(None, temperature)
            answer.update(answer.begin(), 0)
        return length.start(None, temperature).begin()

    unseen = AcceptanceLength(StepCosts(0.1, 0.03)).start(None, 0.0).begin()
    assert first_length(exact=True, temperature=0.0) == 1
    assert first_length(exact=True, temperature=1.0) == first_length(exact=False, temperature=0.0) == unseen > 1


def test_trees_shrink_if_drafting_does_not_pay(target):
    head = random_eagle(target)
    answers = {}
    for name, length in (
        ("fixed", FixedLength(16)),
        ("auto", AcceptanceLength(StepCosts(0.5, 0.03), drafts_trees=True)),
    ):
        shape = EagleSettings(depth=4, top_k=4, total_tokens=20)
        drafter = EagleDrafter(head, vocab_size=48, settings=shape, keep_logits=False)
        cached = CachedModel(target, hidden_layers=head.layers_read)
        one = SpeculativeDecoder(cached, drafter, NumberTokenizer(), num_draft_tokens=length)
        answers[name] = one.generate(PROMPT, PARAMS, trace=True)
    assert answers["auto"].token_ids == answers["fixed"].token_ids == plain(target)
    sizes = {name: [len(one.drafted_ids) for one in made.trace] for name, made in answers.items()}
    assert sum(sizes["auto"]) < sum(sizes["fixed"]) / 2, "an untrained head: hardly anything pays"
    assert answers["auto"].num_pruned == 0, "pruning is what was asked for"


def test_tree_limits_follow_the_expected_acceptance():
    trees = TreeLength(StepCosts(0.2, 0.03))
    assert trees.level_pays(0.9) and not trees.level_pays(0.1)
    before = trees.least()
    for _ in range(10):
        trees.expect(4.0)
        trees.update(8, 1)
    assert trees.least() > before, "a drafter that promises too much"
    assert TreeLength(StepCosts(0.2, 0.0)).least() > 0, "its logarithm is taken"


@pytest.mark.parametrize("value", [0, -1, 513, 2.5, True, "", "Auto", "auto:", "auto:path=", "8", "auto:head=x"])
def test_invalid_numbers_of_draft_tokens_are_refused(value):
    with pytest.raises(SpecError, match="num_draft_tokens"):
        require_draft_tokens(value)


class TestPair:
    @pytest.fixture(scope="class")
    def pair(self):
        target = tiny_model()
        return Pair(target, perturbed(target, noise=0.03), NumberTokenizer(), "tiny/target", "tiny/draft")

    def head(self, pair, **changes):
        return dataclasses.replace(random_length(32), pair=pair.identity, **changes)

    def test_auto_uses_recent_acceptance_without_a_head(self, pair):
        assert isinstance(pair.decoder().draft_length, AcceptanceLength)
        assert isinstance(pair.decoder(num_draft_tokens=7).draft_length, FixedLength)
        assert pair.decoder("lossless", drafter="ngram").draft_length.costs.draft == 0
        assert isinstance(pair.decoder("lossless", drafter="ngram").drafter, NgramDrafter)

    def test_a_saved_head_sets_the_length(self, pair, tmp_path):
        self.head(pair).save_pretrained(tmp_path)
        made = pair.decoder("lossless", num_draft_tokens=f"auto:path={tmp_path}")
        assert isinstance(made.draft_length, LearnedLength)
        assert made.generate(PROMPT, PARAMS).token_ids == pair.decoder("target_only").generate(PROMPT, PARAMS).token_ids

    def test_heads_of_other_rules_thresholds_drafters_and_pairs_are_refused(self, pair, tmp_path):
        head = self.head(pair, rule="top_k", lowest=2.0, highest=4.0)
        head.save_pretrained(tmp_path)
        named = f"auto:path={tmp_path}"
        assert isinstance(pair.decoder("top_k:k=3", num_draft_tokens=named).draft_length, LearnedLength)
        for rule in ("lossless", "top_k:k=5"):
            with pytest.raises(SpecError, match="was trained for top_k at 2 to 4, not for"):
                pair.decoder(rule, num_draft_tokens=named)
        with pytest.raises(SpecError, match="the drafter is ngram"):
            pair.decoder("top_k:k=3", num_draft_tokens=named, drafter="ngram")
        with pytest.raises(PairError, match="was made for target"):
            pair.decoder("lossless", num_draft_tokens=random_length(32))

    @pytest.mark.parametrize(
        "changes",
        [
            {"price": 0.0},
            {"price": float("nan")},
            {"most": 0},
            {"most": 513},
            {"lowest": 2.0, "highest": 1.0},
            {"hidden_weight": torch.zeros(3, 32)},
            {"hidden_weight": torch.full((2, 32), float("inf"))},
            {"scalar_weight": torch.zeros(2, 5)},
        ],
    )
    def test_constants_out_of_range_are_refused(self, pair, changes):
        with pytest.raises(SpecError):
            self.head(pair, **changes)

    def test_a_head_round_trips_through_a_folder(self, pair, tmp_path):
        head = self.head(pair, training={"num_problems": 3})
        head.save_pretrained(tmp_path)
        assert LengthHead.from_pretrained(tmp_path).fingerprint == head.fingerprint
