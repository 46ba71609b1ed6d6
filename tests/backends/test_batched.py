"""Runs on the batched engine: the local engine's answers, arms kept on the same problems, errors recorded."""

import gc
import json

import pytest

from reprieve.backends.local import BatchedEngine, LocalEngine
from reprieve.backends.settings import EngineSettings
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.run import Run
from reprieve.bench.settings import RunSettings
from reprieve.bench.summary import summarise
from reprieve.cli.main import main
from reprieve.engine.batched import BatchedSpeculativeDecoder
from reprieve.errors import ReprieveError, SpecError
from reprieve.settings import SamplingSettings
from tests.bench.toys import run_arms
from tests.kit.pairs import ARITHMETIC, SMALL

SPECS = ("judge:threshold=0.2", "top_k:k=4", "margin:delta=1@K=4")
SETTINGS = RunSettings(task="arithmetic", limit=5)


def arms_of(*specs):
    return make_arms(specs, [8], target=ARITHMETIC.name)


def engine_of(pair, parallel=6):
    return BatchedEngine(pair, parallel)


@pytest.mark.slow
def test_a_batch_gives_the_local_engines_answers(bundled_pair, task, tmp_path):
    arms, settings = arms_of(*SPECS), RunSettings(task="arithmetic", limit=2)
    runs = []
    for engine in (LocalEngine(bundled_pair), engine_of(bundled_pair, parallel=4)):  # more answers than rows
        config = RunConfig.of(engine, arms, settings)
        runs.append(run_arms(config, arms, engine, task, tmp_path / config.engine))
    names = ("arm", "problem_id", "answer", "correct", "text", "num_tokens", "num_rounds", "num_rescued", "spans")
    ours, theirs = (sorted(tuple(getattr(record, name) for name in names) for record in run.records) for run in runs)
    assert ours == theirs and len(ours) == 12
    results = summarise(runs[1])
    assert results.config.engine == "batched" and all(arm.tokens_per_second is None for arm in results.arms)
    assert results.arms[3].num_rescued > 0


@pytest.mark.slow
def test_an_interrupted_run_has_every_arm_on_its_first_problems(bundled_pair, short, tmp_path):
    arms, engine = arms_of(*SPECS), engine_of(bundled_pair, parallel=2)
    settings = RunSettings(task="arithmetic", limit=12)
    run = Run(RunConfig.of(engine, arms, settings), arms, engine, short, tmp_path)

    def interrupt(done, total):
        if done == 36:
            raise KeyboardInterrupt

    assert not run.measure(progress=interrupt)
    finished = {}
    for record in run.records:
        finished.setdefault(record.problem_id, set()).add(record.arm)
    assert len(run.records) == 36 and sum(len(labels) == len(arms) for labels in finished.values()) >= 2
    assert run.measure() and len(run.records) == 72
    assert len({(record.arm, record.problem_id) for record in run.records}) == 72


def test_ctrl_c_in_a_forward_ends_the_run_without_a_traceback(bundled_pair, task, tmp_path, monkeypatch, caplog):
    steps = iter(range(3))
    step = BatchedSpeculativeDecoder.step

    def interrupted(decoder):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        step(decoder)

    monkeypatch.setattr(BatchedSpeculativeDecoder, "step", interrupted)
    engine, arms = engine_of(bundled_pair), arms_of("top_k:k=4")
    run = Run(RunConfig.of(engine, arms, SETTINGS), arms, engine, task, tmp_path)
    assert not run.measure()
    gc.collect()  # asyncio reports an exception that nobody saw when its task is deleted
    assert not caplog.records


def test_a_failed_forward_is_recorded_and_tried_again(bundled_pair, short, tmp_path, monkeypatch):
    arms, engine = arms_of(), engine_of(bundled_pair)
    run = Run(RunConfig.of(engine, arms, SETTINGS), arms, engine, short, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("reprieve.engine.batched.BatchedSpeculativeDecoder._decide", lambda *_: 1 / 0)
        with pytest.raises(ReprieveError, match="every problem failed; the first error: ZeroDivisionError"):
            run.measure()
    assert run.measure()
    assert not any(record.error for record in run.records[-15:])


@pytest.mark.slow
def test_sampled_answers_depend_neither_on_the_batch_nor_on_an_interruption(bundled_pair, short, tmp_path):
    sampling = SamplingSettings(temperature=2.0, draft_temperature=2.0)
    settings = RunSettings(task="arithmetic", limit=2, num_trials=2, sampling=sampling)
    arms = arms_of("top_k:k=4", "random:rate=0.5")

    def texts(name, parallel, progress):
        engine = engine_of(bundled_pair, parallel=parallel)
        run = Run(RunConfig.of(engine, arms, settings), arms, engine, short, tmp_path / name)
        while not run.measure(progress=progress):
            progress = lambda done, total: None  # noqa: E731
        return {(record.arm, record.problem_id, record.trial): record.text for record in run.records}

    def interrupt(done, total):
        if done == 7:
            raise KeyboardInterrupt

    together, alone = texts("together", 8, lambda done, total: None), texts("alone", 1, interrupt)
    assert together == alone and len(alone) == 20 == len({*alone.values()})


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("margin@K=auto", "engine batched needs a number of draft tokens, such as @K=8, got auto"),
        ("margin@drafter=ngram", "engine batched needs the drafter draft or eagle3, got ngram"),
        ("margin@drafter=eagle3:top_k=4", "engine batched drafts chains: top_k of the drafter must be 1, got 4"),
        ("margin@drafter=eagle3:top_k=1,prune=entropy", "the drafter must not prune, got prune=entropy"),
        ("direct:top_k:k=4", "direct: arms need --engine local"),
        ("vllm:block", "is vLLM's own method: use --engine vllm"),
        ("lossless:verification=block", "needs block verification"),
    ],
)
def test_what_a_batch_cannot_decode_is_refused(bundled_pair, spec, reason):
    with pytest.raises(SpecError, match=reason):
        RunConfig.of(engine_of(bundled_pair), arms_of(spec), SETTINGS)


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench = ["bench", *SMALL, "--arm", "margin:delta=2", "--limit", "2", "--max-new-tokens", "24", "--out", "run"]
    assert main([*bench, "--engine", "batched:parallel=3"]) == 0
    assert "answers shared batches: `reprieve bench --engine local` measures them" in capsys.readouterr().err
    assert EngineSettings("batched").draft_tokens("auto", 4) == (8, 4)
    short = [*bench[:-1], "short", "--skip", "target_only", "--skip", "draft_only"]
    assert main([*short, "--engine", "batched:parallel=3"]) == 0
    document = json.loads((tmp_path / "short" / "results.json").read_text())
    assert [arm["spec"] for arm in document["arms"]] == ["lossless", "margin:delta=2"]
    capsys.readouterr()
    for command, message in (
        ([*bench, "--engine", "batched:parallel=0"], "parallel must be"),
        ([*bench, "--engine", "batched:rows=3"], "engine batched has no parameter 'rows'; it takes parallel"),
        ([*bench, "--skip", "lossless"], "skip must be one of target_only, draft_only, got 'lossless'"),
        ([*bench, "--engine", "batched", "--workers", "2"], "--workers applies to --engine local only"),
        ([*bench, "--engine", "batched", "--concurrency", "4"], "--concurrency requires a server engine"),
        (["mine", "autojudge", *SMALL, "--engine", "batched"], "on --engine local, mining is batched already"),
        (["quickstart", "--task", "arithmetic", "--engine", "batched"], "engine must be local, vllm or ray"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
