"""CoSpec's training: mined traces, warm-up, reinforcement, and that what was cut off goes on as if it had not been."""

import asyncio
import dataclasses
import json

import pytest
import torch

from reprieve.cli.main import main
from reprieve.drafters import DraftModelDrafter
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder, load_pair
from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.heads.settings import ArbiterShape
from reprieve.labelling.recipes import build
from reprieve.labelling.records import ProblemLabels
from reprieve.labelling.responses import ResponseFormat
from reprieve.labelling.settings import TraceMining
from reprieve.labelling.store import LabelStore
from reprieve.labelling.target import LocalTarget
from reprieve.labelling.traces import LABELS_VERSION, ArbitrationMiner, PairScorer, soft_label
from reprieve.models import CachedModel
from reprieve.models.batch_decoder import BatchDecoder
from reprieve.rules import LosslessRule
from reprieve.settings import PairSettings, SamplingSettings
from reprieve.tasks import TaskProblem, load_task
from reprieve.training.arbiter_rl import Reinforcement, reinforce
from reprieve.training.arbiter_warm_up import WarmUp, untrained, warm_up
from reprieve.training.rewards import Rewards
from reprieve.training.rollouts import RolloutJob, RolloutMaker, RolloutPool, RolloutSettings

from .mining import LastWordTask
from .tiny import NumberTokenizer, perturbed, tiny_model

CPU = torch.device("cpu")


class ParityTask(LastWordTask):
    """Right where the tokens of the answer add up to an even number: what any token may change."""

    name = "parity"
    splits = ("train", "validation")
    max_new_tokens = 24

    def problems(self, split, limit, *, offset=0):
        first = 0 if split == "train" else 20
        numbers = range(offset, min(offset + limit, 12))
        return [TaskProblem(f"{split}-{n}", f"{first + n} 7 3", "even") for n in numbers]

    def extract_answer(self, text):
        return "odd" if sum(map(int, text.split())) % 2 else "even"


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return Pair(target, perturbed(target, noise=0.05), NumberTokenizer(), "tiny/target", "tiny/draft")


def miner_of(pair, *, temperature=0.0, scorer=None, **settings):
    params = SamplingParams(temperature=temperature)
    responses = ResponseFormat(pair.tokenizer, ParityTask(), frozenset(), 24)
    target = LocalTarget(BatchDecoder(pair.target, num_rows=8, params=params, eos_ids=frozenset()))

    def make_decoder(k):
        drafter = DraftModelDrafter(pair.cached_draft(), CPU)
        rule = LosslessRule(verification="exact")
        return SpeculativeDecoder(pair.cached_target(), drafter, pair.tokenizer, rule=rule, num_draft_tokens=k)

    return ArbitrationMiner(
        target,
        responses,
        params,
        make_decoder,
        make_seed=lambda problem: 5,
        num_draft_tokens=4,
        scorer=scorer,
        **settings,
    )


def mine(pair, count=6, **settings):
    miner = miner_of(pair, **settings)
    return [asyncio.run(miner.mine(problem)) for problem in ParityTask().problems("train", count)]


@pytest.fixture(scope="module")
def traces(pair):
    return mine(pair, 8)


# ---- mining ----


def test_soft_labels_by_hand():
    assert [soft_label(*pair, tie=0.8) for pair in ((1, 0), (0, 1), (1, 1), (0, 0))] == [1.0, 0.0, 0.8, 0.8]
    assert soft_label(0.5, 0.25, tie=0.8) == pytest.approx(0.85)
    assert soft_label(0.25, 0.5, tie=0.8) == pytest.approx(0.6)


@pytest.mark.parametrize("sampled", [False, True])
def test_greedy_labels_are_what_the_target_makes_of_both_branches(pair, traces, sampled):
    """Also where the rounds are sampled: a branch that passes through a drawn token is no greedy one from before it."""
    if sampled:
        traces = mine(pair, 8, temperature=1.0, greedy_branches=True)
    alone = SpeculativeDecoder(CachedModel(pair.target), None, pair.tokenizer)
    task = ParityTask()

    def right(prompt_ids, text):
        left = 24 - len(text)
        more = alone.generate([*prompt_ids, *text], SamplingParams(max_new_tokens=left)).token_ids if left else []
        return float(task.extract_answer(pair.tokenizer.decode([*text, *more])) == "even")

    num = {1.0: 0, 0.0: 0, 0.8: 0}
    for found in traces:
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
    assert min(num.values()) > 5, "each kind of label occurs"


def test_reached_mismatches_are_told_apart_from_those_behind(traces):
    for found in traces:
        for mismatch in found.mismatches:
            assert found.response_ids[mismatch.position] == mismatch.target_id != mismatch.draft_id
            assert mismatch.important == (mismatch.candidate_utility < mismatch.base_utility)
    assert sum(len(f.mismatches) for f in traces) < sum(
        x is not None for f in traces for r in f.rounds for x in r.labels
    )


def test_sampled_rollouts_repeat_and_a_cap_leaves_the_rest_unlabelled(pair):
    first, again = (mine(pair, 2, temperature=1.0, num_rollouts=3, max_mismatches=1) for _ in range(2))
    assert [f.rounds for f in first] == [f.rounds for f in again]
    for found in first:
        for traced in found.rounds:
            assert sum(label is not None for label in traced.labels) <= 1
            assert all(u is None or 3 * u == pytest.approx(round(3 * u)) for u in traced.draft_utilities)


def test_the_draft_has_its_own_temperature_in_traces_and_rollouts():
    sampling = SamplingSettings(temperature=1.0, draft_temperature=0.0)
    bench = build(TraceMining(limit=1, num_draft_tokens=6, max_mismatches=1, num_rollouts=1, sampling=sampling))
    assert bench.manifest["draft_temperature"] == 0.0
    found = asyncio.run(bench.miner.mine(bench.problems[0]))
    asked = [((*found.prompt_ids, *found.response_ids[: r.start]), r.draft_ids, r.target_ids) for r in found.rounds]

    bundled, task = load_pair(), load_task("arithmetic")
    shape = ArbiterShape()
    settings = RolloutSettings(num_draft_tokens=6, draft_temperature=0.0)
    maker = RolloutMaker(settings, shape, bundled, task)
    (rollout,) = maker.make([RolloutJob("train", 1, seed=1)], untrained(bundled, shape, "arithmetic", 6).tensors)
    rounds = [made.asked for made in rollout.rounds]
    asked += [(rollout.context_ids[: r.context_length], r.draft_ids, r.target_ids) for r in rounds]
    for before, drafted, _ in asked:
        text = torch.tensor([[*before, *drafted]])
        with torch.no_grad():
            likeliest = bundled.draft(text).logits[0, len(before) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == list(drafted)
    assert any(drafted != drawn for _, drafted, drawn in asked)


def test_labels_of_another_miner_version_are_not_gone_on_with(pair, tmp_path):
    manifest = {**dataclasses.asdict(pair.identity), "task": "parity", "labels_version": LABELS_VERSION}
    LabelStore(tmp_path, {**manifest, "labels_version": None})
    with pytest.raises(ReprieveError, match="labels_version = None, this run has 2"):
        LabelStore(tmp_path, manifest)


def test_traces_survive_the_store(pair, traces, tmp_path):
    manifest = {**dataclasses.asdict(pair.identity), "task": "parity", "num_draft_tokens": 4}
    store = LabelStore(tmp_path, manifest)
    for found in traces:
        store.append(found)
    store.fold()
    again = {found.problem_id: found for found in LabelStore(tmp_path).problems()}
    assert all(again[found.problem_id].rounds == found.rounds for found in traces)
    assert ProblemLabels.from_row({**traces[0].to_row(), "rounds": None}).rounds == (), "labels of other miners"


class Scripted:
    """A judge that replies from a list, again and again."""

    def __init__(self, *replies):
        self.replies, self.prompts = replies, []

    async def ask(self, prompt, *, attempt=0):
        self.prompts.append(prompt)
        return self.replies[min(attempt, len(self.replies) - 1)]


def test_a_language_model_can_score_both_candidates(pair):
    chat = Scripted("no idea", "close call [[A: 4, B: 9]]")
    found = mine(pair, 1, scorer=PairScorer(chat))[0]
    labels = [label for traced in found.rounds for label in traced.labels if label is not None]
    assert labels and labels == pytest.approx([0.4] * len(labels)), "tie + (0.4 - 0.9) * tie"
    assert "Solution so far:" in chat.prompts[0] and "0 7 3" in chat.prompts[0]
    mute = mine(pair, 1, scorer=PairScorer(Scripted("[[A: 11, B: 2]]")))[0]
    assert all(label is None for traced in mute.rounds for label in traced.labels), "scores out of range are none"


@pytest.mark.parametrize("bad", [dict(max_mismatches=0), dict(num_rollouts=0), dict(tie=1.2)])
def test_bad_mining_settings_are_refused(pair, bad):
    with pytest.raises(SpecError, match=f"{next(iter(bad))} must be"):
        miner_of(pair, **bad)


# ---- warm-up ----

QUICK = WarmUp(
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


def test_warm_up_learns_and_a_cut_off_one_goes_on_as_if_it_had_not_been(pair, traces, tmp_path):
    whole = warm_up(pair, traces, "parity", tmp_path / "whole", num_draft_tokens=4, settings=QUICK)
    with pytest.raises(Stop):
        warm_up(pair, traces, "parity", tmp_path / "cut", num_draft_tokens=4, settings=QUICK, progress=stopping_at(4))
    resumed = warm_up(pair, traces, "parity", tmp_path / "cut", num_draft_tokens=4, settings=QUICK)
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
        warm_up(pair, traces, "parity", tmp_path / "cut", num_draft_tokens=4, settings=other)


def test_a_warm_up_cut_off_at_an_epochs_end_still_validates_it(pair, traces, tmp_path):
    settings = dataclasses.replace(QUICK, num_epochs=1)
    num = len(read_updates(pair, traces, tmp_path / "whole", settings))
    with pytest.raises(Stop):
        warm_up(
            pair, traces, "parity", tmp_path / "cut", num_draft_tokens=4, settings=settings, progress=stopping_at(num)
        )
    assert (
        warm_up(pair, traces, "parity", tmp_path / "cut", num_draft_tokens=4, settings=settings).training["update"]
        == num
    )


def read_updates(pair, traces, folder, settings):
    warm_up(pair, traces, "parity", folder, num_draft_tokens=4, settings=settings)
    return [line for line in read(folder) if line["kind"] == "train"]


def test_labels_stop_where_the_answer_does(pair):
    """A drafter goes on behind an end of text; what it says there is decided by nobody."""
    task = ParityTask()
    responses = ResponseFormat(pair.tokenizer, task, frozenset({9}), 24)
    assert responses.length_of([1, 2, 9, 4, 5]) == 3 and responses.length_of([1, 2]) is None
    assert responses.length_of([9, 2, 9, 4], start=1) == 3, "what stood before is taken as it is"
    miner = miner_of(pair)
    miner.responses = responses
    found = [asyncio.run(miner.mine(problem)) for problem in task.problems("train", 8)]
    for item in found:
        for traced in item.rounds:
            for place, label in enumerate(traced.labels):
                assert label is None or 9 not in traced.draft_ids[:place]


def test_two_processes_make_what_one_makes(tmp_path):
    """On the bundled pair, which another process can load."""
    bundled, task = load_pair(), load_task("arithmetic")
    tensors = untrained(bundled, ArbiterShape(), "arithmetic", 8).tensors
    settings = RolloutSettings(num_draft_tokens=8)
    jobs = [RolloutJob("train", number, seed=number) for number in range(5)]
    jobs += [RolloutJob("validation", 0, 0, threshold=0.5)]
    made = []
    for num_workers in (1, 2):
        with RolloutPool(settings, ArbiterShape(), bundled, task, num_workers=num_workers) as pool:
            made.append(pool.make(jobs, tensors))
    ours, theirs = made
    assert [item.context_ids for item in ours[:5]] == [item.context_ids for item in theirs[:5]]
    assert ours[5] == theirs[5]


def test_warm_up_needs_labelled_traces(pair, traces, tmp_path):
    with pytest.raises(ReprieveError, match="got 1; `reprieve mine arbitration`"):
        warm_up(pair, traces[:1], "parity", tmp_path, num_draft_tokens=4)


# ---- reinforcement ----

CLIMB = Reinforcement(
    num_prompts=6,
    group_size=4,
    prompts_per_update=3,
    num_updates=3,
    num_epochs=2,
    steps_per_epoch=2,
    learning_rate=3e-3,
    num_validation=4,
    validate_every=2,
)


def climb(pair, folder, *, settings=CLIMB, num_workers=1, progress=lambda done, total: None):
    start = untrained(pair, ArbiterShape(), "parity", 4)
    rollouts = RolloutSettings("parity", 4, pair=PairSettings("tiny/target", "tiny/draft"))
    return reinforce(
        pair, ParityTask(), start, rollouts, folder, settings=settings, num_workers=num_workers, progress=progress
    )


def without_seconds(lines):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


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
    assert list((tmp_path / "whole").glob("events/*")), "TensorBoard has them too"


def test_rewarded_length_makes_it_accept_more(pair, tmp_path):
    """Where every rollout is right, only the accepted span is rewarded: the policy must come to accept."""

    class AllRight(ParityTask):
        def equivalent(self, answer, other):
            return True

    start = untrained(pair, ArbiterShape(), "parity", 4)
    rollouts = RolloutSettings("parity", 4, pair=PairSettings("tiny/target", "tiny/draft"))
    settings = dataclasses.replace(CLIMB, num_updates=8, learning_rate=1e-2, validate_every=8)
    reinforce(pair, AllRight(), start, rollouts, tmp_path, settings=settings)
    accepted = [line["accepted"] for line in read(tmp_path) if line["kind"] == "train"]
    assert accepted[-1] > accepted[0] + 0.2


def test_reinforcement_refuses_what_cannot_work(pair, tmp_path):
    start = untrained(pair, ArbiterShape(), "parity", 4)
    foreign = dataclasses.replace(start, pair=dataclasses.replace(start.pair, draft_weights="other"))
    rollouts = RolloutSettings("parity", 4, pair=PairSettings("tiny/target", "tiny/draft"))
    with pytest.raises(PairError, match="different draft_weights"):
        reinforce(pair, ParityTask(), foreign, rollouts, tmp_path)
    with pytest.raises(SpecError, match="workers must be 1 or more"):
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
    warm, climbing, shape = WarmUp(), Reinforcement(), ArbiterShape()
    assert (shape.rank, shape.scale, shape.dropout) == (16, 32.0, 0.05)
    assert (warm.learning_rate, warm.weight_decay, warm.decisions_per_update) == (1e-4, 0.1, 256)
    assert (climbing.group_size, climbing.prompts_per_update, climbing.num_epochs) == (12, 128, 4)
    assert (climbing.learning_rate, climbing.clip, climbing.entropy, climbing.divergence) == (5e-5, 0.2, 0.01, 0.02)
    assert (climbing.max_grad_norm, climbing.lambda_) == (1.0, 0.6)
    assert (climbing.rewards.risk, climbing.rewards.rejection, climbing.rewards.fail_weight) == (1.0, 0.25, 0.5)


# ---- commands ----


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "arbiter", "--preset", "huge"], "--preset must be one of paper, small"),
        (["train", "arbiter-rl"], "the following arguments are required: --start"),
        (["train", "arbiter-rl", "--start", "none", "--group-size", "1"], "group_size must be 2 or more"),
        (["train", "arbiter", "--rank", "0"], "rank must be 1 or more"),
        (["train", "arbiter", "--labels", "/nowhere"], "is not a label store"),
        (["train", "arbiter", "--num-draft-tokens", "8"], "unknown flag --num-draft-tokens"),
        (["train", "arbiter-rl", "--start", "o/arbiter", "--out", "o"], "--start must not be what --out"),
        (["mine", "arbitration", "--tie", "2"], "tie must be in"),
        (["mine", "arbitration", "--max-mismatches", "0"], "max_mismatches must be 1 or more"),
        (["audit", "arbitration", "--limit", "0"], "--limit must be 1 or more"),
        (["audit", "arbitration", "--lambda", "7"], r"lambda must be in [0, 1], got 7.0"),
        (["audit", "arbitration", "--temperature", "-1"], "temperature must be in [0, inf]"),
        (["audit", "arbitration", "--arbiter", "nowhere"], "neither a folder nor a hub id"),
    ],
)
def test_bad_usage_is_told(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) in (1, 2)
    assert told in capsys.readouterr().err


def test_what_is_refused_leaves_nothing(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    climb = ["train", "arbiter-rl", "--start", "none", "--out", "rl"]
    assert main([*climb, "--draft-temperature", "-1"]) == 2
    assert "draft_temperature must be in [0, 100], got -1.0" in capsys.readouterr().err
    assert main(["train", "arbiter", "--draft-temperature", "0", "--out", "sft"]) == 2
    assert "unknown flag --draft-temperature" in capsys.readouterr().err
    manifest = {**dataclasses.asdict(pair.identity), "miner": "arbitration", "task": "parity", "num_draft_tokens": 4}
    LabelStore(tmp_path / "old", manifest)
    assert main(["train", "arbiter", "--labels", "old", "--out", "sft"]) in (1, 2)
    told = capsys.readouterr().err
    assert "--labels must hold labels of version 2, 'old' has None" in told
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_the_whole_method_by_command(tmp_path, monkeypatch, capsys):
    """Mine, warm up, reinforce, audit and use, on the bundled pair, as small as it goes."""
    monkeypatch.chdir(tmp_path)
    assert main(["mine", "arbitration", "--limit", "3", "--num-draft-tokens", "8", "--max-mismatches", "1"]) == 0
    assert main(["train", "arbiter", "--preset", "small", "--num-epochs", "1", "--out", "sft"]) == 0
    small = ["--prompts-per-update", "1", "--group-size", "2", "--num-updates", "1", "--num-validation", "2"]
    small += ["--validation-temperature", "1", "--num-draft-tokens", "8"]
    climb = ["train", "arbiter-rl", "--start", "sft/arbiter", "--preset", "small", *small, "--out", "rl"]
    assert main(climb) == 0
    before = (tmp_path / "rl" / "metrics.jsonl").read_text()
    assert main(climb) == 0
    assert (tmp_path / "rl" / "metrics.jsonl").read_text() == before, "again: there is nothing left to do"
    audit = ["audit", "arbitration", "--arbiter", "rl/arbiter", "--limit", "2", "--out", "audit.json"]
    assert main(audit) == 0
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["num_draft_tokens"] == 8 and found["diagnosis"]["num_problems"] == 2
    assert main([*audit, "--temperature", "1", "--seed", "3", "--limit", "1"]) == 0
    sampled = json.loads((tmp_path / "audit.json").read_text())
    assert (sampled["sampling"]["temperature"], sampled["seed"]) == (1.0, 3) and sampled["diagnosis"][
        "num_problems"
    ] == 1
    assert main(["generate", "Question: what is 1 + 2?\nAnswer:", "--rule", "arbiter:path=rl/arbiter", "--json"]) == 0
    assert "best at update" in capsys.readouterr().out
