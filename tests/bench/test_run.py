"""Runs: the results format, the order of arms, and resuming."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import operator
import re

import pytest

from reprieve.backends.local import LocalEngine
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.figures import draw_frontier
from reprieve.bench.records import RecordFile, read_answers
from reprieve.bench.report import write_report
from reprieve.bench.results import ArmResults, Results
from reprieve.bench.settings import RunSettings
from reprieve.bench.summary import summarise
from reprieve.engine import SpeculativeDecoder
from reprieve.errors import ReprieveError
from reprieve.settings import SamplingSettings
from reprieve.tasks import TaskProblem
from tests.bench.toys import run, run_arms, settings
from tests.kit.toys import ToyTask

ARMS = ["top_k:k=3", "margin:delta=2.0", "random:rate=0.5"]


def config(arms, **changes):
    values = dict(
        command="reprieve bench", target="toy-target", draft="toy-draft", drafter="draft", dtype="float32",
        device="cpu", weights="w",
        task="toy", split="test", limit=6, seed=0, num_draft_tokens=[4],
        arms=[arm.label for arm in arms],
    )  # fmt: skip
    return RunConfig(**{**values, **changes})


def without_times(records):
    return [
        (r.arm, r.problem_id, r.correct, r.answer, r.num_tokens, r.num_rounds, r.num_rescued, r.text) for r in records
    ]


def test_lines_join_arms_that_differ_only_in_their_dial(pair, tmp_path):
    forms = ["fuzzy:threshold=0.1", "fuzzy:threshold=0.4", "fuzzy:threshold=2,divergence=kl", "fuzzy:threshold=0.1,k=2"]
    others = ["margin:delta=1", "margin:delta=2@drafter=ngram@K=2", "margin:delta=2@K=4@drafter=ngram"]
    mixed = ["margin:delta=1&math_symbols", "margin:delta=2&math_symbols", "margin:delta=1&ratio:ratio=0.5",
             "margin:delta=1&ratio:ratio=0.5|margin:delta=1&math_symbols"]  # fmt: skip
    arms = make_arms([*forms, *others, *mixed], [4])
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    draw_frontier(summarise(run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path)), drawn)
    names = set(re.findall(r"<!-- (.+?) -->", html.unescape((drawn / "frontier.svg").read_text())))
    for line in (
        "fuzzy, divergence=js", "fuzzy, divergence=kl", "fuzzy, divergence=js, k=2", "margin, K=4",
        "margin, K=2, drafter=ngram", "margin, K=4, drafter=ngram", "margin&math_symbols:k=none",
        "margin&ratio:ratio=0.5", "margin&ratio:ratio=0.5|margin:delta=1&math_symbols:k=none",
    ):  # fmt: skip
        assert line in names, line


@pytest.mark.parametrize(
    ("sampling", "bounded"),
    [
        ({"temperature": 1.0, "draft_temperature": None}, True),
        ({"temperature": 1.0, "draft_temperature": 0.0}, False),
        ({"temperature": 0.0, "draft_temperature": None}, False),
    ],
)
def test_the_sequence_bound_is_reported_only_for_sampled_drafts(pair, tmp_path, sampling, bounded):
    arms = make_arms(["fuzzy:threshold=0.3,divergence=tv", "fuzzy:threshold=0.3", "margin:delta=1"], [4])
    sampled = config(arms, sampling=SamplingSettings(**sampling))
    rows = summarise(run_arms(sampled, arms, LocalEngine(pair), ToyTask(), tmp_path)).arms
    drafted = rows[3].draft_share * rows[3].tokens_per_answer
    assert rows[3].sequence_bound == (pytest.approx(0.3 * drafted) if bounded else None)
    assert drafted > 0 and all(row.sequence_bound is None for row in (*rows[:3], *rows[4:]))


def test_results_have_every_field_and_the_figure_is_drawn(pair, tmp_path):
    arms = make_arms(ARMS, [4])
    results = summarise(run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path))
    text = results.write(tmp_path).read_text()
    read = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert Results.read(tmp_path) == results
    assert read["schema"] == 2 and read["config"]["task"] == "toy" and read["environment"]["machine"]["processor"]
    assert [arm["spec"] for arm in read["arms"]][:3] == ["target_only", "draft_only", "lossless"]
    for arm in read["arms"]:
        assert arm.keys() == {field.name for field in dataclasses.fields(ArmResults)}
        assert arm["num_problems"] == 6
        assert arm["accuracy_ci95"][0] <= arm["accuracy"] <= arm["accuracy_ci95"][1]
    assert read["arms"][0]["speedup_vs_target"] == 1.0
    assert read["arms"][2]["speedup_vs_lossless"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert len(lines) == 6 * len(arms)
    own = [line for line in lines if line["arm"] == read["arms"][2]["spec"]]
    accepted, tokens = (sum(line[name] for line in own) for name in ("num_accepted", "num_tokens"))
    assert read["arms"][2]["draft_share"] == accepted / tokens <= 1
    assert read["arms"][0]["draft_share"] is read["arms"][1]["draft_share"] is None
    assert lines[0].keys() >= {"arm", "problem_id", "correct", "answer", "num_tokens", "num_rounds", "seconds", "text"}
    for path in draw_frontier(results, tmp_path):
        assert path.stat().st_size > 1000
    assert read["random_allocation"][0]["speedup_vs_target"] == pytest.approx(1.0)
    assert read["random_allocation"][-1]["accuracy"] == pytest.approx(read["arms"][1]["accuracy"])
    ends = [arm["accuracy_vs_allocation"][0] for arm in read["arms"][:2]]
    assert ends == pytest.approx([0.0, 0.0]), "the line begins and ends with them"


def test_lossless_gives_the_targets_answers(pair, tmp_path):
    arms = make_arms([], [4])
    run = run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path)
    texts = {label: [r.text for r in run.records if r.arm == label] for label in ("target_only", "lossless")}
    assert texts["target_only"] == texts["lossless"]


def test_arms_take_turns_problem_by_problem(pair, tmp_path):
    arms = make_arms(ARMS, [4])
    run = run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path)
    order = [(record.problem_id, record.arm) for record in run.records]
    assert [problem for problem, _ in order] == [f"p{i}" for i in range(6) for _ in arms]
    assert len({arm for place, (_, arm) in enumerate(order) if place % len(arms) == 0}) == len(arms)


def test_what_all_prompts_begin_with_is_read_once(pair, tmp_path, monkeypatch):
    class Examples(ToyTask):
        """Every prompt begins with the same example."""

        def problems(self, split, limit, *, offset=0):
            return [TaskProblem(f"p{i}", f"1 2 3 4 {10 + i} 7", str(i % 2)) for i in range(offset, offset + limit)]

    def texts(name):
        engine, arms = LocalEngine(pair), make_arms(["margin"], [4])
        run_arms(RunConfig.of(engine, arms, settings()), arms, engine, Examples(), tmp_path / name)
        return {(record.arm, record.problem_id): record.text for record in read_answers(tmp_path / name)}

    shared = []
    with monkeypatch.context() as without:
        without.setattr(SpeculativeDecoder, "share_prefix", lambda decoder, token_ids: shared.append(token_ids))
        whole = texts("whole")
    assert shared == [pair.tokenizer.encode("1 2 3 4")] * 4, "of each arm"
    assert texts("shared") == whole and len(whole) == 24


def test_an_interrupted_run_resumes_to_the_same_records(pair, tmp_path):
    arms = make_arms(ARMS, [4])
    whole = run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path / "whole")

    def interrupt(done, total):
        if done == 11:
            raise KeyboardInterrupt

    first = run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path / "cut", progress=interrupt)
    assert not first.complete
    assert len(first.records) == 11
    assert summarise(first).num_problems == 1, "only problems every arm finished are compared"
    with (tmp_path / "cut" / "problems.jsonl").open("a") as file:
        file.write('{"arm": "half a li')  # left by a kill in the middle of a write
    reported = []
    again = config(arms, command="typed otherwise")
    second = run_arms(
        again, arms, LocalEngine(pair), ToyTask(), tmp_path / "cut", progress=lambda *counts: reported.append(counts)
    )
    assert second.complete and reported[0] == (11, len(whole.records)), "progress begins with what is there"
    assert without_times(second.records) == without_times(whole.records)
    third = run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path / "cut")
    assert len(third.records) == len(whole.records), "nothing is measured twice"


def test_arms_can_be_added_to_a_run_whose_answers_are_not_timed(pair, tmp_path):
    few, more = make_arms([], [4]), make_arms(["margin:delta=2.0"], [4])
    whole = run_arms(config(more), more, LocalEngine(pair), ToyTask(), tmp_path / "whole")
    engine = LocalEngine(pair)
    run_arms(config(few), few, engine, ToyTask(), tmp_path / "run")
    with pytest.raises(ReprieveError, match="with arms = "):
        run_arms(config(more), more, engine, ToyTask(), tmp_path / "run")
    engine.answer = functools.partial(_in_turn, engine, engine.answer)
    engine.num_parallel = 2
    with pytest.raises(ReprieveError, match=r"with num_draft_tokens = \[4\] instead of \[8\]"):
        run_arms(config(more, num_draft_tokens=[8]), more, engine, ToyTask(), tmp_path / "run")
    engine.num_parallel = 2
    extended = run_arms(config(more), more, engine, ToyTask(), tmp_path / "run")
    key = operator.attrgetter("arm", "problem_id")
    assert without_times(sorted(extended.records, key=key)) == without_times(sorted(whole.records, key=key))


def _in_turn(engine, answer, *args):
    engine.num_parallel = 1
    return answer(*args)


def test_a_folder_of_another_run_is_refused_with_the_difference(pair, tmp_path):
    arms = make_arms([], [4])
    run_arms(config(arms), arms, LocalEngine(pair), ToyTask(), tmp_path)
    with pytest.raises(ReprieveError, match="with seed = 0 instead of 7"):
        run_arms(config(arms, seed=7), arms, LocalEngine(pair), ToyTask(), tmp_path)


def test_failures_are_counted_and_never_answers(pair, tmp_path):
    class TooLong(ToyTask):
        def problems(self, split, limit, *, offset=0):
            good = super().problems(split, limit)
            return [*good[:-1], TaskProblem("long", " ".join(["3"] * 400), "1")]

    arms = make_arms([], [4])
    results = summarise(run_arms(config(arms), arms, LocalEngine(pair), TooLong(), tmp_path))
    assert [arm.num_failed for arm in results.arms] == [1, 1, 1]
    lines = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["error"]]
    assert {line["problem_id"] for line in failed} == {"long"}
    assert not any(line["correct"] or line["text"] for line in failed)


def test_damaged_line_is_named(tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"arm": 1}\n')
    with pytest.raises(ReprieveError, match="line 1 is not a valid problem record"):
        RecordFile(tmp_path / "problems.jsonl")


@pytest.mark.slow
def test_max_new_tokens_is_reduced_to_fit_the_models(bundled_pair, tmp_path):
    """Data files default to 1,024 tokens; a pair with 512 positions still answers."""
    from reprieve.tasks import load_task
    from reprieve.tasks.prompting import with_prompts

    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "3"}) + "\n")
    task = with_prompts(load_task(f"jsonl:path={path},grader=number"), bundled_pair.tokenizer)
    engine, arms = LocalEngine(bundled_pair), make_arms([], [4])
    asked = RunSettings(task="jsonl", split="all", limit=1)
    config = RunConfig.of(engine, arms, asked)
    with pytest.warns(UserWarning, match="max_new_tokens is .* instead of 1024: the models read 512 tokens"):
        run = run_arms(config, arms, engine, task, tmp_path / "run")
    assert run.complete and not any(record.error for record in run.records)


def test_one_problem_gives_no_confidence_interval_of_the_speedup(pair, tmp_path):
    arms = make_arms(["margin:delta=3"], [4])
    results = summarise(run(pair, arms, tmp_path, limit=1))
    for arm in results.arms:
        intervals = (arm.speedup_vs_target_ci95, arm.speedup_vs_lossless_ci95, arm.answers_vs_lossless_ci95)
        assert arm.speedup_vs_target is not None and intervals == (None, None, None)
    assert draw_frontier(results, tmp_path)[0].exists()
    assert write_report([results.write(tmp_path).parent], tmp_path / "r.html").exists()
