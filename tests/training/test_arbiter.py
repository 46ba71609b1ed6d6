"""CoSpec's warm-up and reinforcement."""

import dataclasses
import json
import math

import pytest
import torch

from recipes.arbiter.reinforce import Reinforcement, reinforce, untrained
from recipes.arbiter.rewards import Rewards
from recipes.arbiter.rollouts import RolloutJob, RolloutPool, RolloutSettings
from reprieve.engine import Pair, SamplingParams
from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.settings import ArbiterShape
from reprieve.models.arbiter import ArbiterModel, ArbitrationRound
from reprieve.rules.arbiter import ArbiterRule
from reprieve.settings import PairSettings
from reprieve.tasks import load_task
from reprieve.training.arbiter_warm_up import (
    ArbiterTraining,
    RoundReader,
    Traces,
    _Learner,
    read_traces,
    require_traces,
    warm_up,
)
from reprieve.types import Need
from tests.kit.pairs import SMALL
from tests.kit.parity import CLIMB, ParityTask, climb, mine
from tests.kit.tiny import NumberTokenizer, perturbed, tiny_model


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return Pair(target, perturbed(target, noise=0.05), NumberTokenizer(), "tiny/target", "tiny/draft")


@pytest.fixture(scope="module")
def traces(pair):
    return Traces(require_traces(mine(pair, 8)), "parity", 4)


QUICK = ArbiterTraining(
    shape=ArbiterShape(dropout=0.1), learning_rate=3e-3, decisions_per_update=16, num_epochs=3, held_out=0.25
)


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Stop(Exception):
    pass


def stopping_at(update):
    def progress(done, total):
        if done == update:
            raise Stop

    return progress


@pytest.mark.slow
def test_warm_up_learns_and_resumes_exactly(pair, traces, tmp_path):
    whole = warm_up(pair, traces, tmp_path / "whole", settings=QUICK)
    with pytest.raises(Stop):
        warm_up(pair, traces, tmp_path / "cut", settings=QUICK, progress=stopping_at(4))
    resumed = warm_up(pair, traces, tmp_path / "cut", settings=QUICK)
    assert resumed.fingerprint == whole.fingerprint
    assert read(tmp_path / "cut") == read(tmp_path / "whole")
    losses = [line["loss"] for line in read(tmp_path / "whole") if line["kind"] == "train"]
    assert losses[0] == pytest.approx(0.693, abs=0.02) and min(losses[-3:]) < losses[0]
    assert whole.training["stage"] == "sft" and whole.num_draft_tokens == 4 and whole.pair == pair.identity
    validations = [line for line in read(tmp_path / "whole") if line["kind"] == "validation"]
    assert len(validations) == 3
    assert whole.training["validation"]["loss"] == min(line["loss"] for line in validations), "the best epoch's"
    other = dataclasses.replace(QUICK, seed=1)
    with pytest.raises(ReprieveError, match="belongs to another recipe"):
        warm_up(pair, traces, tmp_path / "cut", settings=other)


def test_a_warm_up_interrupted_at_the_end_of_an_epoch_still_validates_it(pair, traces, tmp_path):
    settings = dataclasses.replace(QUICK, num_epochs=1)
    num = len(read_updates(pair, traces, tmp_path / "whole", settings))
    with pytest.raises(Stop):
        warm_up(pair, traces, tmp_path / "cut", settings=settings, progress=stopping_at(num))
    assert warm_up(pair, traces, tmp_path / "cut", settings=settings).training["update"] == num


@pytest.mark.slow
def test_an_arbiter_with_readings_sees_the_same_inputs_in_training_and_decoding(pair, traces, tmp_path):
    settings = dataclasses.replace(QUICK, readings=True)
    made = warm_up(pair, traces, tmp_path / "warm", settings=settings)
    assert made.shape.num_readings == 2 * 32 + 4 and made.tensors["readings.weight"].abs().sum() > 0
    plain = warm_up(pair, traces, tmp_path / "plain", settings=QUICK)
    assert "readings.weight" not in plain.tensors and plain.needs == frozenset()
    made.save_pretrained(tmp_path / "saved")
    rule = ArbiterRule.of(Arbiter.from_pretrained(tmp_path / "saved"), lambda_=0.5)
    assert {Need.NODE_HIDDEN, Need.DRAFT_HIDDEN, Need.DRAFT_PROBS, Need.ADVICE} == rule.traits.needs
    answer = pair.decoder(rule, num_draft_tokens=4).generate(
        [3, 1, 4, 1, 5], SamplingParams(max_new_tokens=40), trace=True
    )
    start, rounds, advised = 5, [], []
    for traced in answer.trace:
        if traced.drafted_ids and traced.drafted_ids != traced.target_ids:
            rounds.append(ArbitrationRound(start, traced.drafted_ids, traced.target_ids))
            advised.append(traced)
        start += len(traced.committed)
    model = ArbiterModel.of(rule.head, pair.draft)
    context = [3, 1, 4, 1, 5, *answer.token_ids]
    with pytest.raises(SpecError, match="reads what verification knows of each drafted token, and got nothing"):
        model.judge(context, rounds)
    with torch.no_grad():
        judged = model.judge(context, RoundReader(pair).read(context, rounds))
    assert len(rounds) > 3
    for traced, logits in zip(advised, judged, strict=True):
        matched = torch.tensor(traced.drafted_ids) == torch.tensor(traced.target_ids)
        wanted = logits.sigmoid().masked_fill(matched, 1.0)
        torch.testing.assert_close(torch.tensor(traced.advice), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_reinforcement_trains_the_readings(pair, traces, tmp_path):
    settings = dataclasses.replace(QUICK, readings=True, num_epochs=1)
    start = warm_up(pair, traces, tmp_path / "warm", settings=settings)
    made = climb(pair, tmp_path / "rl", start=start)
    assert made.shape == start.shape
    assert not torch.equal(made.tensors["readings.weight"], start.tensors["readings.weight"])


def read_updates(pair, traces, folder, settings):
    warm_up(pair, traces, folder, settings=settings)
    return [line for line in read(folder) if line["kind"] == "train"]


@pytest.mark.slow
def test_two_processes_make_the_same_rollouts_as_one(tmp_path, bundled_pair):
    """With the bundled pair, since another process must load it."""
    task = load_task("arithmetic")
    tensors = untrained(bundled_pair, ArbiterShape(), "arithmetic", 8).tensors
    settings = RolloutSettings("arithmetic", 8, pair=PairSettings(SMALL[1], dtype="float32"))
    jobs = [RolloutJob("train", number, seed=number) for number in range(5)]
    jobs += [RolloutJob("validation", 0, 0, threshold=0.5)]
    made = []
    for num_workers in (1, 2):
        with RolloutPool(settings, ArbiterShape(), bundled_pair, task, num_workers=num_workers) as pool:
            made.append(pool.make(jobs, tensors))
    ours, theirs = made
    assert [item.context_ids for item in ours[:5]] == [item.context_ids for item in theirs[:5]]
    assert ours[5] == theirs[5]


def test_warm_up_needs_labelled_traces(pair):
    with pytest.raises(ReprieveError, match="got 1; `reprieve mine arbitration`"):
        require_traces(mine(pair, 1))


def test_validation_by_hand(pair, traces, tmp_path, monkeypatch):
    """Eq. 29 and the agreement: ties count as agreed, whichever side is chosen."""
    learner = _Learner(pair, traces, tmp_path, QUICK)  # lambda = 0.6
    learner.held = [None]
    logits, labels = torch.tensor([2.0, 2.0, -1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.8])
    utilities = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    monkeypatch.setattr(learner, "_at_mismatches", lambda answer: (logits, labels, *utilities))
    reached = learner.validate(1, 0.0)
    chances = [1 / (1 + math.exp(-value)) for value in logits.tolist()]
    losses = [
        -label * math.log(chance) - (1 - label) * math.log(1 - chance)
        for label, chance in zip(labels.tolist(), chances, strict=True)
    ]
    assert reached["loss"] == pytest.approx(sum(losses) / 4) and reached["agreement"] == 3 / 4


def without_seconds(lines):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.slow
def test_reinforcement_repeats_and_resumes_exactly(pair, tmp_path):
    whole = climb(pair, tmp_path / "whole")
    with pytest.raises(Stop):
        climb(pair, tmp_path / "cut", progress=stopping_at(2))
    resumed = climb(pair, tmp_path / "cut")
    assert resumed.fingerprint == whole.fingerprint
    assert without_seconds(read(tmp_path / "cut")) == without_seconds(read(tmp_path / "whole"))
    lines = read(tmp_path / "whole")
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [0, 2, 3]
    training = [line for line in lines if line["kind"] == "train"]
    assert all(line["divergence"] >= 0 and line["entropy"] > 0 for line in training)
    assert training[-1]["divergence"] > training[0]["divergence"], "it moved away from where it began"
    assert whole.training["stage"] == "rl" and whole.training["settings"]["group_size"] == 4


@pytest.mark.slow
def test_rewarding_length_raises_acceptance(pair, tmp_path):
    """If every rollout is right, only the accepted length is rewarded, so the policy must learn to accept."""

    class AllRight(ParityTask):
        def equivalent(self, answer, other):
            return True

    start = untrained(pair, ArbiterShape(), "parity", 4)
    rollouts = RolloutSettings("parity", 4, pair=PairSettings("tiny/target", "tiny/draft"))
    settings = dataclasses.replace(CLIMB, num_updates=8, learning_rate=1e-2, validate_every=8, num_validation=1)
    reinforce(pair, AllRight(), start, rollouts, tmp_path, settings=settings)
    accepted = [line["accepted"] for line in read(tmp_path) if line["kind"] == "train"]
    assert accepted[-1] > accepted[0] + 0.2


def test_reinforcement_refuses_invalid_settings(pair, tmp_path):
    start = untrained(pair, ArbiterShape(), "parity", 4)
    foreign = dataclasses.replace(start, pair=dataclasses.replace(start.pair, draft_weights="other"))
    rollouts = RolloutSettings("parity", 4, pair=PairSettings("tiny/target", "tiny/draft"))
    with pytest.raises(PairError, match="different draft_weights"):
        reinforce(pair, ParityTask(), foreign, rollouts, tmp_path)
    with pytest.raises(SpecError, match=r"workers must be in \[1, 1024\], got 0"):
        climb(pair, tmp_path, num_workers=0)
    for bad, told in (
        (dict(group_size=1), "group_size must be 2 or more"),
        (dict(num_updates=0), "num_updates must be 1 or more"),
        (dict(clip=0.0), r"clip must be in \(0, 1\]"),
    ):
        with pytest.raises(SpecError, match=told):
            Reinforcement(**bad)
    with pytest.raises(SpecError, match="risk must be in"):
        Rewards(risk=-1.0)


def test_defaults_are_the_papers():
    """Appendix C.1 and C.2."""
    warm, climbing, shape = ArbiterTraining(), Reinforcement(), ArbiterShape()
    assert (shape.rank, shape.scale, shape.dropout) == (16, 32.0, 0.05)
    assert (warm.learning_rate, warm.weight_decay, warm.decisions_per_update) == (1e-4, 0.1, 256)
    assert (climbing.group_size, climbing.prompts_per_update, climbing.num_epochs) == (12, 128, 4)
    assert (climbing.learning_rate, climbing.clip, climbing.entropy, climbing.divergence) == (5e-5, 0.2, 0.01, 0.02)
    assert (climbing.max_grad_norm, climbing.lambda_) == (1.0, 0.6)
    assert (climbing.rewards.risk, climbing.rewards.rejection, climbing.rewards.fail_weight) == (1.0, 0.25, 0.5)


def test_a_store_that_is_named_twice_is_refused(tmp_path):
    with pytest.raises(SpecError, match="--labels must name different stores"):
        read_traces([tmp_path / "a", tmp_path / "b" / ".." / "a"])
