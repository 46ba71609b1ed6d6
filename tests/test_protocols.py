"""Arms, trials, controls, protocols, several processes, conversations, energy, provenance, the monitor, the judge."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from reprieve.calibration.settings import Promise
from reprieve.engine import Pair
from reprieve.errors import ReprieveError, SpecError
from reprieve.evaluation.arms import make_arms
from reprieve.evaluation.certifying import Plan, certify
from reprieve.evaluation.config import RunConfig
from reprieve.evaluation.conversation import Conversation
from reprieve.evaluation.energy import EnergyMeter
from reprieve.evaluation.judging import judge_run
from reprieve.evaluation.monitor import LosslessCheck, QualityMonitor, Served, watch
from reprieve.evaluation.provenance import provenance_spans
from reprieve.evaluation.records import claim_run
from reprieve.evaluation.results import summarise
from reprieve.evaluation.runner import Runner, run_arms
from reprieve.evaluation.settings import CertifySettings, FsdSettings, RunSettings
from reprieve.evaluation.tuning import FsdProtocol, best_ks
from reprieve.heads.certificates import Certificate
from reprieve.heads.folds import FoldedHead, fold_folder, fold_of, write_folds
from reprieve.metrics import clustered_interval, paired_difference, paired_pvalue
from reprieve.rules import parse_rule
from reprieve.rules.judge import JudgeRule
from reprieve.rules.top_k import TopKRule
from reprieve.rules.truncation import truncated_tokens
from reprieve.settings import SamplingParams, SamplingSettings
from reprieve.tasks import TaskProblem, load_task
from reprieve.types import Provenance, Token

from .test_evaluation import ToyTask
from .tiny import NumberTokenizer, perturbed, random_head, tiny_model


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return Pair(target, perturbed(target), NumberTokenizer(), "toy-target", "toy-draft")


def settings(**changes):
    return RunSettings(**{"task": "toy", "limit": 6, **changes})


def run(pair, arms, folder, **changes):
    return run_arms(RunConfig.of(pair, arms, settings(**changes)), arms, pair, ToyTask(), folder)


# Arms


def test_an_arm_may_have_a_k_of_its_own_and_lossless_too():
    arms = make_arms(["lossless@K=4", "top_k:k=3@K=8", "margin"], [16])
    assert [(arm.label, arm.num_draft_tokens) for arm in arms[2:]] == [
        ("lossless@K=4", 4), ("top_k:k=3@K=8", 8), ("margin:delta=1", 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "spec", ["margin@K=", "margin@K=x", "direct:judge:path=x", "direct:fuzzy", "direct:top_k@K=4", "certified:none"]
)
def test_arms_that_cannot_be_are_refused(spec):
    with pytest.raises(ReprieveError):
        make_arms([spec], [16])


def test_lossless_beside_itself_is_the_noise_floor(pair, tmp_path):
    arms = make_arms(["lossless_rerun"], [4])
    greedy = {row["spec"]: row for row in summarise(run(pair, arms, tmp_path / "greedy"))["arms"]}
    difference, low, high = greedy["lossless_rerun"]["accuracy_vs_lossless"]
    assert difference == 0 and low < 0 < high, "six equal problems do not prove equality"
    assert greedy["lossless"]["accuracy_vs_lossless"] == [0.0, 0.0, 0.0], "it is the same arm"
    sampled = run(pair, arms, tmp_path / "sampled", sampling=SamplingSettings(temperature=1.0))
    texts = {label: [r.text for r in sampled.records if r.arm == label] for label in ("lossless", "lossless_rerun")}
    assert texts["lossless"] != texts["lossless_rerun"], "draws of its own"


ACCEPTED = {
    "top_k:k=3": lambda probs: probs >= probs.topk(3).values[-1],
    "margin:delta=1.5": lambda probs: probs.log() >= probs.max().log() - 1.5,
    "ratio:ratio=0.4,k=none": lambda probs: probs >= 0.4 * probs.max(),
    "floor:min_prob=0.05": lambda probs: probs >= 0.05,
    "typical": lambda probs: probs >= min(0.09, 0.3 * math.exp(float((probs * probs.log()).sum()))),
}


@pytest.mark.parametrize("spec", ACCEPTED)
def test_direct_arms_sample_from_what_the_rule_accepts(spec):
    torch.manual_seed(0)
    for _ in range(5):
        logits = 3 * torch.randn(300)
        wanted = ACCEPTED[spec](logits.softmax(-1))
        wanted[logits.argmax()] = True
        assert torch.equal(truncated_tokens(parse_rule(spec), logits, logits), wanted)


def test_a_direct_arm_draws_only_from_the_set_and_in_its_proportions(pair, tmp_path):
    arm = make_arms(["direct:top_k:k=2"], [4])[-1]
    decoder = arm.decoder(pair)
    firsts = []
    for seed in range(300):
        params = arm.params(SamplingParams(max_new_tokens=1, temperature=1.0, seed=seed))
        firsts.append(decoder.generate([1, 2, 3], params).token_ids[0])
    logits = pair.target(torch.tensor([[1, 2, 3]])).logits[0, -1].detach()
    top = logits.topk(2).indices.tolist()
    share = float(logits[top].softmax(-1)[0])
    assert set(firsts) <= set(top)
    assert firsts.count(top[0]) / 300 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 300) + 1e-3)


# Trials and statistics


def test_trials_have_draws_of_their_own_and_count_as_one_problem(pair, tmp_path):
    arms = make_arms(["margin:delta=2"], [4])
    whole = run(pair, arms, tmp_path, num_trials=3, sampling=SamplingSettings(temperature=1.0))
    ours = [r for r in whole.records if r.arm == "margin:delta=2" and r.problem_id == "p0"]
    assert [record.trial for record in ours] == [0, 1, 2] and len({record.text for record in ours}) > 1
    document = summarise(whole)
    assert (document["num_problems"], document["num_trials"]) == (6, 3)
    row = document["arms"][-1]
    assert row["accuracy"] == np.mean([r.correct for r in whole.records if r.arm == "margin:delta=2"])
    again = run(pair, arms, tmp_path, num_trials=3, sampling=SamplingSettings(temperature=1.0))
    assert len(again.records) == len(whole.records), "nothing is answered twice"


def test_regressions_and_improvements_make_the_net_drop(pair, tmp_path):
    document = summarise(run(pair, make_arms(["random:rate=0.9"], [4]), tmp_path, limit=20))
    row = document["arms"][-1]
    assert row["net_drop"][0] == pytest.approx(row["regression_rate"] - row["improvement_rate"])
    assert row["net_drop"][0] == pytest.approx(-row["accuracy_vs_lossless"][0])
    assert 0 < row["tokens_vs_lossless_p"] <= 1 and row["truncated_vs_lossless"][0] == 0


def test_correlated_trials_do_not_narrow_an_interval():
    rng = np.random.default_rng(0)
    problems = rng.integers(0, 2, (60, 1)).astype(float)
    repeated = np.repeat(problems, 5, axis=1)
    low, high = clustered_interval(repeated)
    independent = np.std(repeated) / math.sqrt(repeated.size) * 2 * 1.96
    assert high - low > 1.8 * independent
    assert paired_difference(repeated, np.zeros_like(repeated))[0] == pytest.approx(problems.mean())


def test_sign_flips_find_differences_and_keep_their_level():
    rng = np.random.default_rng(1)
    assert paired_pvalue(rng.normal(0.5, 1, 200)) < 0.001
    assert paired_pvalue(np.zeros(50)) == 1.0
    rejected = sum(paired_pvalue(rng.normal(0, 1, 40), num_flips=199, seed=i) <= 0.05 for i in range(400))
    assert rejected / 400 < 0.05 + 0.03


# Protocols


def test_each_arm_gets_the_k_it_is_fastest_at():
    def arm(spec, k, speed):
        return {"spec": spec, "num_draft_tokens": k, "tokens_per_second": speed}

    rows = [arm("target_only", None, 50), arm("lossless@K=4", 4, 90), arm("lossless@K=8", 8, 80), arm("margin", 8, 7)]
    best = best_ks({"arms": rows})
    assert [found.arm for found in best] == ["lossless@K=4", "margin@K=8"]
    assert best[0].by_k == {4: 90, 8: 80}


def test_fsds_protocol_climbs_until_the_share_is_lost(pair, tmp_path):
    asked = FsdSettings(
        "random", (0.1, 0.5, 0.9), num_draft_tokens=(2, 4), main_limit=12, main_trials=1, run=settings(limit=3)
    )
    protocol = FsdProtocol(asked)
    told = []
    document = protocol.run(pair, ToyTask(), tmp_path, announce=told.append)
    accuracy = {row["spec"]: row["accuracy"] for row in document["arms"]}
    floor = accuracy["target_only"] - 0.2 * (accuracy["target_only"] - accuracy["draft_only"])
    measured = [row["spec"] for row in document["arms"][3:]]
    assert measured and all(accuracy[spec] > floor for spec in measured[:-1])
    assert document["protocol"]["num_draft_tokens"] in (2, 4) and told[0].startswith("K' = ")
    assert set(document["protocol"]["acceptance_rates"]) >= {"lossless", "random:rate=0.1", "random:rate=0.9"}
    with pytest.raises(SpecError, match="rise"):
        FsdSettings(thresholds=(0.5, 0.1))


# Certifying


def plan(**changes):
    values = dict(
        rule="margin", promise=Promise(0.6), thresholds=(0.5, 2.0), num_draft_tokens=4, held_out_limit=8,
        run=settings(limit=12),
    )  # fmt: skip
    return Plan.of(CertifySettings(**{**values, **changes}))


def test_a_certificate_names_what_it_promises_and_can_be_used(pair, tmp_path, monkeypatch):
    outcome = certify(plan(), pair, ToyTask(), tmp_path, command="reprieve certify")
    made = Certificate.load(outcome.path)
    assert made == outcome.certificate
    assert made.threshold == outcome.steps[-1].threshold == 2.0 or not outcome.steps[-1].evidence.passed
    assert f"{made.held_out['num_problems']} held-out problems" in made.statement
    assert made.held_out["offset"] == 12 and made.conditions.num_draft_tokens == 4
    arm = make_arms([f"certified:{outcome.path}"], [16])[-1]
    assert (arm.rule.spec, arm.num_draft_tokens) == (made.rule, 4)
    with pytest.warns(UserWarning, match="temperature 1.0"):
        run(
            pair,
            [*make_arms([], [4]), arm],
            tmp_path / "elsewhere",
            limit=1,
            sampling=SamplingSettings(temperature=1.0),
        )


def test_no_certificate_without_proof_and_the_walk_resumes(pair, tmp_path):
    outcome = certify(plan(promise=Promise(0.01)), pair, ToyTask(), tmp_path, command="c")
    assert outcome.certificate is None and "strictest" in outcome.reason and len(outcome.steps) == 1
    lines = (tmp_path / "calibration" / "problems.jsonl").read_text().splitlines()
    certify(plan(promise=Promise(0.01)), pair, ToyTask(), tmp_path, command="c")
    assert (tmp_path / "calibration" / "problems.jsonl").read_text().splitlines() == lines


def test_trying_thresholds_until_one_passes_is_refused(pair, tmp_path):
    certify(plan(thresholds=(3.0,)), pair, ToyTask(), tmp_path, command="c")
    certify(plan(thresholds=(3.0,)), pair, ToyTask(), tmp_path, command="c")
    with pytest.raises(SpecError, match=r"first tried on these problems, margin:delta=3: .*--offset"):
        certify(plan(thresholds=(0.5, 2.0)), pair, ToyTask(), tmp_path, command="c")


def test_nothing_is_certified_without_right_answers_or_with_failed_ones(pair, tmp_path):
    with pytest.raises(SpecError, match="no right answers"):
        certify(plan(), pair, TwoTurns(), tmp_path / "a", command="c")

    class Breaks(ToyTask):
        def extract_answer(self, text):
            raise ValueError("unreadable") if hash(text) % 2 else ValueError("unreadable too")

    class BreaksOnce(ToyTask):
        num_left = 1

        def extract_answer(self, text):
            if self.num_left and len(text.split()) == self.max_new_tokens:
                self.num_left -= 1
                raise ValueError("unreadable")
            return super().extract_answer(text)

    with pytest.raises(ReprieveError, match="every problem failed"):
        certify(plan(), pair, Breaks(), tmp_path / "b", command="c")
    with pytest.raises(ReprieveError, match="1 answers failed"):
        certify(plan(), pair, BreaksOnce(), tmp_path / "c", command="c")
    again = certify(plan(), pair, ToyTask(), tmp_path / "c", command="c")
    assert again is not None and again.steps, "what failed is tried once more"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(thresholds=[1, 1]), "different values"),
        (dict(rule="lossless"), "nothing to certify"),
        (dict(held_out_limit=0), "held_out_limit must be 1 or more"),
    ],
)
def test_plans_that_cannot_be_are_refused_before_anything_is_measured(changes, message):
    with pytest.raises(SpecError, match=message):
        plan(**changes)


def test_a_second_rule_shares_the_strict_answers(pair, tmp_path):
    certify(plan(), pair, ToyTask(), tmp_path, command="c")
    certify(plan(rule="top_k", thresholds=(2, 3)), pair, ToyTask(), tmp_path, command="c")
    records = [json.loads(line) for line in (tmp_path / "calibration" / "problems.jsonl").read_text().splitlines()]
    assert sum(record["arm"] == "lossless" for record in records) == 12


def test_thresholds_are_tried_from_strict_to_lenient_whatever_their_order():
    assert [rule.delta for rule in plan(thresholds=(3, 1, 2)).candidates()] == [1, 2, 3]
    assert [rule.ratio for rule in plan(rule="ratio", thresholds=(0.2, 0.9)).candidates()] == [0.9, 0.2]
    with pytest.raises(SpecError, match="--thresholds"):
        plan(thresholds=()).candidates()


def test_folders_grow_only_where_that_is_harmless(tmp_path):
    claim_run(tmp_path, {"arms": ["a"], "heads": {"h": "1"}}, extendable=("arms", "heads"))
    claim_run(tmp_path, {"arms": ["b"], "heads": {"i": "2"}}, extendable=("arms", "heads"))
    assert json.loads((tmp_path / "run.json").read_text()) == {"arms": ["a", "b"], "heads": {"h": "1", "i": "2"}}
    with pytest.raises(ReprieveError, match="its heads is"):
        claim_run(tmp_path, {"arms": ["a"], "heads": {"h": "9"}}, extendable=("arms", "heads"))
    with pytest.raises(ReprieveError, match="its arms is"):
        claim_run(tmp_path, {"arms": ["c"], "heads": {}})


def test_several_processes_give_the_same_answers(tmp_path):
    from reprieve.engine import load_pair

    bundled = load_pair(dtype="float32")
    arms = make_arms(["margin:delta=2"], [4])[2:]
    task = load_task("arithmetic")
    config = RunConfig.of(bundled, arms, settings(task="arithmetic", limit=5))
    runners = [Runner(config, arms, bundled, task, tmp_path / str(n), num_workers=n) for n in (1, 2)]
    assert all(runner.measure() for runner in runners)
    alone, together = ({(r.arm, r.problem_id): r.text for r in runner.records} for runner in runners)
    assert alone == together and len(alone) == 10


# Out-of-fold heads


def test_no_problem_meets_a_head_trained_on_it(tmp_path, pair):
    for fold in range(3):
        random_head(size=32, seed=fold, pair=pair.identity).save_pretrained(fold_folder(tmp_path, fold))
    write_folds(tmp_path, 3)
    arm = make_arms([f"judge:path={tmp_path},threshold=0.4"], [4])[-1]
    assert isinstance(dict(arm.rule.heads)[str(tmp_path)], FoldedHead)
    runner = Runner(RunConfig.of(pair, [arm], settings()), [arm], pair, ToyTask(), tmp_path / "run")
    for problem in runner.problems:
        decoder = runner.answerer._decoder(arm, problem)
        head = dict(decoder.rule.heads)[str(fold_folder(tmp_path, 0).parent)]
        alone = random_head(size=32, seed=fold_of(problem.problem_id, 3), pair=pair.identity)
        assert torch.equal(head.tensors["weight"], alone.tensors["weight"])
    assert {fold_of(f"p{i}", 3) for i in range(40)} == {0, 1, 2}


# Conversations, energy, provenance


class Template:
    chat_template = "yes"

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]


def test_conversations_follow_the_template_or_go_on_as_text():
    talk = Conversation(Template(), "Hi", chat_template=True)
    talk.add("Yes?", "More")
    assert "".join(map(chr, talk.prompt())) == "<user>Hi<assistant>Yes?<user>More<assistant>"
    plain = Conversation(NumberTokenizer(), "1 2", chat_template=False)
    plain.add("3", "4")
    assert plain.prompt() == "1 2\n\n3\n\n4"
    with pytest.raises(SpecError, match="chat template"):
        Conversation(NumberTokenizer(), "1", chat_template=True)


class TwoTurns(ToyTask):
    graded = False

    def problems(self, split, limit, *, offset=0):
        return [TaskProblem(f"c{i}", f"{i + 1} 2 3", "", ("7 8",), category="chat") for i in range(limit)]


def test_later_turns_read_earlier_answers_and_count(pair, tmp_path):
    arms = make_arms([], [4])
    config = RunConfig.of(pair, arms, settings(limit=2))
    whole = run_arms(config, arms, pair, TwoTurns(), tmp_path)
    record = next(r for r in whole.records if r.arm == "lossless")
    assert len(record.turns) == 2 and record.text == record.turns[1] and record.num_tokens == 24
    second = (
        arms[2]
        .decoder(pair)
        .generate([1, 2, 3, *map(int, record.turns[0].split()), 7, 8], SamplingParams(max_new_tokens=12))
    )
    assert second.text == record.turns[1]
    row = summarise(whole)["arms"][2]
    assert row["accuracy"] is None and row["tokens_per_answer"] == 24


def test_energy_is_read_where_there_is_a_counter_and_said_to_be_missing_elsewhere(tmp_path):
    nothing = EnergyMeter("cpu", rapl=tmp_path / "none")
    assert nothing.joules() is None and nothing.source.startswith("unavailable")
    domain = tmp_path / "intel-rapl:0"
    domain.mkdir()
    (domain / "energy_uj").write_text("9000000")
    (domain / "max_energy_range_uj").write_text("10000000")
    meter = EnergyMeter("cpu", rapl=tmp_path)
    first = meter.joules()
    (domain / "energy_uj").write_text("500000")  # the counter starts anew at 10 J
    assert meter.joules() - first == pytest.approx(1.5) and meter.source == "RAPL"


def test_spans_cover_the_text_and_merge_neighbours():
    kinds = [Provenance.TARGET, Provenance.MATCHED, Provenance.MATCHED, Provenance.RESCUED]
    tokens = [Token(i, kind) for i, kind in zip((5, 11, 7, 40), kinds, strict=True)]
    assert provenance_spans(tokens, NumberTokenizer()) == [(2, "t"), (5, "m"), (3, "r")]
    assert provenance_spans(tokens, NumberTokenizer(), stop=("7",)) == [(2, "t"), (3, "m")]
    assert provenance_spans([], NumberTokenizer()) == []


def test_records_keep_rounds_and_spans(pair, tmp_path):
    whole = run(pair, make_arms(["margin:delta=3"], [4]), tmp_path)
    for record in whole.records:
        assert sum(record.round_lengths) == record.num_tokens
        assert sum(length for length, _ in record.spans) == len(record.text)
    assert any(code == "r" for record in whole.records for _, code in record.spans)


# The monitor


def served(number=0):
    return Served(TaskProblem(f"p{number}", "1 2 3", "1"), SamplingParams(max_new_tokens=8), "")


def test_the_alarm_is_raised_once_when_the_drop_is_proved():
    alarms = []
    monitor = QualityMonitor(lambda _: 1.0, share=1.0, max_drop=0.2, on_alarm=alarms.append, max_waiting=1000)
    for number in range(60):
        monitor.observe(served(number))
    final = monitor.close()
    assert final.alarm and len(alarms) == 1 and alarms[0].interval[0] > 0.2
    assert (final.num_seen, final.num_checked, final.drop) == (60, 60, 1.0)
    assert "ALARM" in final.sentence()


def test_no_alarm_without_a_drop_and_only_a_share_is_checked():
    monitor = QualityMonitor(lambda _: 0.0, share=0.25, max_drop=0.05, seed=1, max_waiting=1000)
    for number in range(400):
        monitor.observe(served(number))
    final = monitor.close()
    assert not final.alarm and 60 < final.num_checked < 140


def test_failed_and_crowded_checks_are_counted_and_never_stop_serving():
    import threading

    gate = threading.Event()

    def check(_):
        gate.wait(10)
        raise RuntimeError("broken")

    monitor = QualityMonitor(check, share=1.0, max_waiting=2)
    for number in range(10):
        monitor.observe(served(number))
    gate.set()
    final = monitor.close()
    assert final.num_failed + final.num_skipped == 10 and final.num_skipped >= 7 and final.num_checked == 0


def test_watching_a_task_finds_what_bench_finds(pair, tmp_path):
    arms = make_arms(["random:rate=0.9"], [4])
    whole = run(pair, arms, tmp_path, limit=15)
    row = summarise(whole)["arms"][-1]
    final = watch(
        arms[-1].decoder(pair), arms[2].decoder(pair), ToyTask(), ToyTask().problems("test", 15),
        {"temperature": 0.0}, share=1.0, max_drop=None, max_waiting=100,
    )  # fmt: skip
    assert final.num_checked == 15 and abs(final.drop) <= 1
    assert final.interval[0] <= final.drop <= final.interval[1] and not final.alarm
    assert row["net_drop"] is not None


def test_without_references_a_changed_answer_counts_as_lost(pair):
    class Unlabelled(ToyTask):
        def same(self, problem, answer, other):
            return answer == other

    check = LosslessCheck(make_arms([], [4])[2].decoder(pair), Unlabelled())
    problem = TaskProblem("p", "1 2 3", "")
    params = SamplingParams(max_new_tokens=8)
    strict = check.decoder.generate(problem.prompt, params).text
    odd = str(int(strict.split()[-1]) + 1)
    assert check(Served(problem, params, strict)) == 0.0
    assert check(Served(problem, params, odd)) == 1.0


@pytest.mark.parametrize("values", [dict(share=0.0), dict(share=2), dict(max_drop=-1), dict(max_waiting=0)])
def test_monitor_settings_out_of_range_are_refused(values):
    with pytest.raises(SpecError, match=next(iter(values))):
        QualityMonitor(lambda _: 0.0, **values)


# The judge


class FirstIsBetter:
    """A judge that prefers whatever it reads first, unless one answer holds a 7."""

    def __init__(self):
        self.num_asked = 0

    async def ask(self, prompt, *, attempt=0):
        self.num_asked += 1
        if "double brackets" in prompt:
            return "Fine. [[8]]"
        first, second = prompt.split("assistant A:")[1].split("assistant B:")
        second = second.split("Explain in a sentence")[0]
        if ("7" in first.split()) != ("7" in second.split()):
            return "[[A>B]]" if "7" in first.split() else "[[B>A]]"
        return "[[A>B]]"


def test_a_judges_love_of_first_place_cancels_out(pair, tmp_path):
    arms = make_arms(["random:rate=0.9"], [4])
    run_arms(RunConfig.of(pair, arms, settings(limit=4)), arms, pair, TwoTurns(), tmp_path)
    problems = TwoTurns().problems("test", 4)
    chat = FirstIsBetter()
    document = judge_run(tmp_path, problems, chat)
    rows = {row["arm"]: row for row in document["arms"]}
    assert set(rows) == {"target_only", "draft_only", "random:rate=0.9"}
    same = rows["target_only"]
    assert (same["num_ties"], same["num_judged"], same["equal_or_better"]) == (4, 4, 1.0), "equal texts are ties"
    assert rows["random:rate=0.9"]["num_judged"] == 4 and "chat" in rows["random:rate=0.9"]["categories"]
    asked = chat.num_asked
    assert judge_run(tmp_path, problems, chat) == document and chat.num_asked == asked, "verdicts are kept"
    graded = judge_run(tmp_path, problems, chat, grade=True)
    assert all(row["mean_grade"] == 8.0 for row in graded["arms"])
    with pytest.raises(SpecError, match="baseline"):
        judge_run(tmp_path, problems, chat, baseline="nothing")
    with pytest.raises(ReprieveError, match=r"no problems\.jsonl"):
        judge_run(tmp_path / "none", problems, chat)


# Tasks


def test_long_contexts_come_before_the_question_and_stay_the_same(tmp_path):
    rows = [{"question": f"Question {i}?", "answer": f"So. #### {i}"} for i in range(30)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"path={tmp_path}/{{split}}.jsonl"
    task = load_task(f"gsm8k:{path},context=20")
    first, second = task.problems("test", 2)
    assert first.prompt.count("Problem: ") == 21 and first.prompt.endswith("Problem: Question 0?\nSolution:")
    assert "Question 0?" not in first.prompt[: first.prompt.rindex("Problem:")]
    assert first.prompt != second.prompt and task.problems("test", 1)[0] == first
    with pytest.raises(SpecError, match="context must be at most"):
        load_task(f"gsm8k:{path},context=40").problems("test", 1)


def test_alpaca_and_mt_bench_files_are_read(tmp_path):
    rows = [{"instruction": "Write."}, {"question_id": 81, "category": "writing", "turns": ["One", "Two"]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = load_task(f"prompts:path={tmp_path}/p.jsonl").problems("all", 5)
    assert (first.prompt, first.follow_ups) == ("Write.", ())
    assert (second.prompt, second.follow_ups, second.category) == ("One", ("Two",), "writing")


def test_rules_for_single_tokens_only_are_refused_by_direct_arms():
    with pytest.raises(SpecError, match="distribution alone"):
        SamplingParams(truncation=JudgeRule.of(random_head()))
    assert dataclasses.replace(SamplingParams(), truncation=TopKRule()).truncation == TopKRule()
