"""Certificates: the walk, resumption, refusals."""

from __future__ import annotations

import contextlib
import json
import re
from types import SimpleNamespace

import pytest

from reprieve.backends.local import BatchedEngine, LocalEngine
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.records import claim_run
from reprieve.bench.run import Run
from reprieve.bench.settings import CertifySettings, Promise
from reprieve.certify.procedure import Plan, _require_first_walk, certify
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.certificates import Certificate
from reprieve.settings import PromptSettings, SamplingSettings
from reprieve.tasks import load_task
from reprieve.tasks.prompting import with_prompts
from tests.bench.toys import TwoTurns, run, settings
from tests.kit.records import a_record
from tests.kit.toys import ToyTask


def plan(**changes):
    values = dict(
        rule="margin", promise=Promise(0.6), thresholds=(0.5, 2.0), num_draft_tokens=4, held_out_limit=8,
        run=settings(limit=12),
    )  # fmt: skip
    return Plan.of(CertifySettings(**{**values, **changes}))


def test_a_certificate_states_its_promise_and_can_be_used_as_an_arm(pair, tmp_path, monkeypatch):
    outcome = certify(plan(), LocalEngine(pair), ToyTask(), tmp_path, command="reprieve certify")
    made = Certificate.load(outcome.path)
    assert made == outcome.certificate
    assert [(step.threshold, step.evidence.passed) for step in outcome.steps] == [(0.5, True), (2.0, True)]
    assert made.threshold == 2.0 and made.promise["loss"] == "net_drop"
    assert outcome.path.name.startswith("margin-net_drop-")
    assert f"{made.held_out['num_problems']} held-out problems" in made.statement
    assert made.held_out["offset"] == 12 and made.conditions.num_draft_tokens == 4
    arm = make_arms([f"certified:{outcome.path}"], [16])[-1]
    here = outcome.certificate.conditions
    assert arm.unchecked(here) is None, "the run holds the named certificate against its conditions, and no other"
    assert make_arms(["margin"], [16])[-1].unchecked(here) is here
    assert (arm.rule.spec, arm.num_draft_tokens) == (made.rule, 4)
    with pytest.warns(UserWarning, match="temperature 1.0"):
        run(
            pair,
            [*make_arms([], [4]), arm],
            tmp_path / "elsewhere",
            limit=1,
            sampling=SamplingSettings(temperature=1.0),
        )


def test_the_statement_names_an_engine_that_has_neither_version_nor_runner(pair, tmp_path):
    engine = BatchedEngine(pair, 4)
    made = certify(plan(), engine, ToyTask(), tmp_path, command="reprieve certify").certificate
    assert " at K = 4 on batched, where lossless solves" in made.statement
    assert "Noise floor: two lossless runs gave the same answer to 100.0% of 12 problems" in made.statement


def test_no_certificate_without_proof_and_the_walk_resumes(pair, tmp_path):
    outcome = certify(plan(promise=Promise(0.01)), LocalEngine(pair), ToyTask(), tmp_path, command="c")
    assert outcome.certificate is None and "strictest" in outcome.reason and len(outcome.steps) == 1
    assert re.search(r"This promise takes \d{3} calibration problems .*; there were 12 ", outcome.reason)
    lines = (tmp_path / "calibration" / "problems.jsonl").read_text().splitlines()
    certify(plan(promise=Promise(0.01)), LocalEngine(pair), ToyTask(), tmp_path, command="c")
    assert (tmp_path / "calibration" / "problems.jsonl").read_text().splitlines() == lines


def test_an_interrupted_certification_ends_like_an_uninterrupted_one(pair, tmp_path):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    whole = certify(plan(), LocalEngine(pair), ToyTask(), tmp_path / "whole", command="c")
    with contextlib.suppress(KeyboardInterrupt):
        assert certify(plan(), LocalEngine(pair), ToyTask(), tmp_path / "cut", command="c", progress=stop) is None
    assert (tmp_path / "cut" / "calibration" / "problems.jsonl").is_file()
    resumed = certify(plan(), LocalEngine(pair), ToyTask(), tmp_path / "cut", command="c")
    assert resumed.steps == whole.steps and resumed.certificate.held_out == whole.certificate.held_out


def test_trying_thresholds_until_one_passes_is_refused(pair, tmp_path):
    certify(plan(thresholds=(3.0,)), LocalEngine(pair), ToyTask(), tmp_path, command="c")
    certify(plan(thresholds=(3.0,)), LocalEngine(pair), ToyTask(), tmp_path, command="c")
    with pytest.raises(SpecError, match=r"first tried on these problems, margin:delta=3: .*--offset"):
        certify(plan(thresholds=(0.5, 2.0)), LocalEngine(pair), ToyTask(), tmp_path, command="c")


@pytest.mark.slow
def test_nothing_is_certified_without_references_or_with_failed_answers(pair, tmp_path):
    with pytest.raises(SpecError, match="no reference answers"):
        certify(plan(), LocalEngine(pair), TwoTurns(), tmp_path / "a", command="c")

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
        certify(plan(), LocalEngine(pair), Breaks(), tmp_path / "b", command="c")
    with pytest.raises(ReprieveError, match="1 answers failed"):
        certify(plan(), LocalEngine(pair), BreaksOnce(), tmp_path / "c", command="c")
    again = certify(plan(), LocalEngine(pair), ToyTask(), tmp_path / "c", command="c")
    assert again is not None and again.steps, "what failed is tried once more"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(thresholds=[1, 1]), "different values"),
        (dict(rule="lossless"), "nothing to certify"),
        (dict(held_out_limit=0), r"held_out_limit must be in \[1, 10000000\]"),
    ],
)
def test_invalid_plans_are_refused_before_any_measurement(changes, message):
    with pytest.raises(SpecError, match=message):
        plan(**changes)


@pytest.mark.slow
def test_a_second_rule_reuses_the_strict_answers(pair, tmp_path):
    certify(plan(), LocalEngine(pair), ToyTask(), tmp_path, command="c")
    certify(plan(rule="top_k", thresholds=(2, 3)), LocalEngine(pair), ToyTask(), tmp_path, command="c")
    records = [json.loads(line) for line in (tmp_path / "calibration" / "problems.jsonl").read_text().splitlines()]
    assert sum(record["arm"] == "lossless" for record in records) == 12


def test_thresholds_are_tried_from_strict_to_lenient_whatever_their_order():
    assert [rule.delta for rule in plan(thresholds=(3, 1, 2)).candidates()] == [1, 2, 3]
    assert [rule.ratio for rule in plan(rule="ratio", thresholds=(0.2, 0.9)).candidates()] == [0.9, 0.2]
    with pytest.raises(SpecError, match="--thresholds"):
        plan(thresholds=()).candidates()


def test_only_extendable_settings_of_a_run_may_grow(tmp_path):
    begun = claim_run(tmp_path, {"arms": ["a"], "heads": {"h": "1"}}, extendable=("arms", "heads"))
    begun.append(a_record())
    claim_run(tmp_path, {"arms": ["b"], "heads": {"i": "2"}}, extendable=("arms", "heads"))
    assert json.loads((tmp_path / "run.json").read_text()) == {"arms": ["a", "b"], "heads": {"h": "1", "i": "2"}}
    with pytest.raises(ReprieveError, match="with heads = "):
        claim_run(tmp_path, {"arms": ["a"], "heads": {"h": "9"}}, extendable=("arms", "heads"))
    with pytest.raises(ReprieveError, match="with arms = "):
        claim_run(tmp_path, {"arms": ["c"], "heads": {}})


def test_a_larger_limit_continues_in_the_same_folder(tmp_path):
    begun = claim_run(tmp_path, {"arms": ["a"], "limit": 2})
    begun.append(a_record())
    assert len(claim_run(tmp_path, {"arms": ["a"], "limit": 5}).records) == 1
    with pytest.raises(ReprieveError, match="with limit = 5 instead of 2"):
        claim_run(tmp_path, {"arms": ["a"], "limit": 2})


def test_a_folder_without_answers_can_be_claimed_by_any_run(tmp_path):
    """A command that is refused after claiming its folder leaves such a folder."""
    claim_run(tmp_path, {"arms": ["a"], "drafter": "ngram"})
    claim_run(tmp_path, {"arms": ["a"], "drafter": "draft"})
    assert json.loads((tmp_path / "run.json").read_text())["drafter"] == "draft"


@pytest.mark.slow
def test_several_processes_give_the_same_answers(tmp_path, bundled_pair):
    arms = make_arms(["margin:delta=2"], [4])[2:]
    prompt = PromptSettings(max_new_tokens=40)
    task = with_prompts(load_task("arithmetic"), bundled_pair.tokenizer, prompt)
    # Six jobs are two chunks, so both processes answer.
    config = RunConfig.of(LocalEngine(bundled_pair), arms, settings(task="arithmetic", limit=3, prompt=prompt))
    runs = [Run(config, arms, LocalEngine(bundled_pair, num_workers=n), task, tmp_path / str(n)) for n in (1, 2)]
    assert all(run.measure() for run in runs)
    alone, together = ({(r.arm, r.problem_id): r.text for r in run.records} for run in runs)
    assert alone == together and len(alone) == 6


def test_a_length_head_of_ones_own_does_not_hide_the_lossless_answers():
    length = "auto:path=reprieve/miniature-length-lossless"
    own = Plan.of(
        CertifySettings(rule="margin", promise=Promise(0.6), thresholds=(1.0, 2.0), num_draft_tokens=length),
        target="reprieve/miniature",
    )
    first, second = (own.arm(rule).label for rule in own.candidates())
    assert own.arm("lossless").label != "lossless" and own.arm("lossless").label in own.lossless_labels
    earlier = SimpleNamespace(records=[a_record(arm=label) for label in (*own.lossless_labels, first)])
    _require_first_walk(own, earlier, {first, second})
    with pytest.raises(SpecError, match="first tried on these problems, margin:delta=1"):
        _require_first_walk(own, earlier, {second})


def test_a_refused_run_does_not_begin(pair, tmp_path):
    begun = []
    for settings_of_run, refused in ((settings(limit=12), False), (settings(limit=12, seed=5), True)):
        with pytest.raises(ReprieveError, match="holds another run") if refused else contextlib.nullcontext():
            certify(
                plan(run=settings_of_run), LocalEngine(pair), ToyTask(), tmp_path, command="c",
                on_claimed=lambda: begun.append(1),
            )  # fmt: skip
    assert begun == [1], "the configuration of the first run must not be overwritten"
