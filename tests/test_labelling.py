"""The label store, targets behind an API, judges, PAD's miner, and labels for people."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

import reprieve
from reprieve.cli.main import main
from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.labelling.annotations import read_annotations
from reprieve.labelling.api_target import ApiTarget
from reprieve.labelling.equivalence import NotWorse
from reprieve.labelling.pivot import Candidate, CandidateSource, PivotMiner, median_length
from reprieve.labelling.recipes import build, make_chat, make_soundness
from reprieve.labelling.records import MINED, Mismatch, ProblemLabels
from reprieve.labelling.runner import mine_problems
from reprieve.labelling.settings import AutoJudgeMining, PivotMining
from reprieve.labelling.show import html_page, terminal_text
from reprieve.labelling.soundness import (
    NO_VERDICT,
    SOUND,
    UNSOUND,
    EquationSoundness,
    ModelSoundness,
    parse_verdict,
)
from reprieve.labelling.store import LabelStore
from reprieve.labelling.summary import shares_by_class, summarise, token_class
from reprieve.labelling.target import LocalTarget, gather_all
from reprieve.models.batch_decoder import BatchDecoder, Session
from reprieve.models.cached_model import CachedModel
from reprieve.settings import PairSettings, SamplingParams

from .mining import EOS, ScriptedTarget, WordTokenizer, miner, problem, responses
from .tiny import IDENTITY, perturbed, tiny_model

BUNDLED = "reprieve/arithmetic-pair"
MANIFEST = {"miner": "autojudge", "task": "words", **dataclasses.asdict(IDENTITY)}


def labels(problem_id="p-1", important=True) -> ProblemLabels:
    mismatch = Mismatch(1, 5, 6, important, continuation_ids=(9, 6, 0), answer="6")
    return ProblemLabels(problem_id, MINED, (40,), (1, 5, 9, 5, 0), (1, 5, 9, 5, 0), "5", (mismatch,))


# The store


def test_labels_round_trip_and_stay_in_order(tmp_path):
    store = LabelStore(tmp_path / "s", MANIFEST)
    wanted = [labels("p-2"), dataclasses.replace(labels("p-10"), mismatches=()), labels("p-1", None)]
    for problem_labels in wanted:
        store.append(problem_labels)
    again = LabelStore(tmp_path / "s")
    assert again.problems() == [wanted[2], wanted[0], wanted[1]]
    store.fold()
    assert [path.name[:4] for path in (tmp_path / "s" / "shards").iterdir()] == ["many"]
    assert again.problems() == [wanted[2], wanted[0], wanted[1]]
    assert again.done() == {"p-1", "p-2", "p-10"}


@pytest.mark.parametrize(
    ("key", "value"), [("task", "gsm8k"), ("draft_weights", "x"), ("tokenizer", "y"), ("alpha", 0.5)]
)
def test_labels_of_something_else_are_not_mixed_in(tmp_path, key, value):
    LabelStore(tmp_path, MANIFEST).append(labels())
    with pytest.raises(ReprieveError, match=f"made with {key} = .*this run has '?{value}'?; labels are not mixed"):
        LabelStore(tmp_path, {**MANIFEST, key: value})
    assert len(LabelStore(tmp_path, MANIFEST).problems()) == 1


def test_a_store_knows_its_pair(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    store.require_pair(IDENTITY)
    with pytest.raises(PairError, match="different draft_weights"):
        store.require_pair(dataclasses.replace(IDENTITY, draft_weights="d7"))
    served = LabelStore(tmp_path / "api", {**MANIFEST, "target_weights": "api:big"})
    served.require_pair(IDENTITY)


def test_what_is_no_store_or_no_shard_is_named(tmp_path):
    with pytest.raises(ReprieveError, match=r"is not a label store: it has no manifest\.json"):
        LabelStore(tmp_path / "nowhere")
    store = LabelStore(tmp_path / "s", MANIFEST)
    (tmp_path / "s" / "shards" / "one-x.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ReprieveError, match=r"one-x\.parquet cannot be read"):
        store.problems()
    (tmp_path / "s" / "manifest.json").write_text("{")
    with pytest.raises(ReprieveError, match="is not a label store's manifest"):
        LabelStore(tmp_path / "s")
    (tmp_path / "s" / "manifest.json").write_text("[1]")
    with pytest.raises(ReprieveError, match="must name schema, pair and task"):
        LabelStore(tmp_path / "s")


def test_a_reader_sees_every_problem_while_another_worker_folds(tmp_path, monkeypatch):
    writer, reader = LabelStore(tmp_path, MANIFEST), LabelStore(tmp_path)
    for number in range(5):
        writer.append(labels(f"p-{number}"))
    listed = reader._shards

    def list_then_fold():
        shards = listed()
        writer.fold()
        return shards

    monkeypatch.setattr(reader, "_shards", list_then_fold)
    assert len(reader.problems()) == 5
    assert reader.done() == {f"p-{number}" for number in range(5)}


def test_a_last_single_problem_is_folded_too(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    for number in range(3):
        store.append(labels(f"p-{number}"))
    store.fold()
    store.append(labels("p-3"))  # by the worker that was at it while the other one folded
    store.fold()
    assert not list((tmp_path / "shards").glob("one-*"))
    assert len(LabelStore(tmp_path).problems()) == 4


def test_ids_that_look_alike_in_file_names_are_kept_apart(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    with store.claim("a b") as first, store.claim("a_b") as second, store.claim("x" * 300) as long:
        assert (first, second, long) == (True, True, True)
    store.append(labels("x" * 300))
    assert store.done() == {"x" * 300}


def test_a_problem_is_claimed_by_one_worker_and_freed_by_its_death(tmp_path):
    first, second = LabelStore(tmp_path, MANIFEST), LabelStore(tmp_path, MANIFEST)
    with first.claim("p/1") as ours, second.claim("p/1") as theirs:
        assert (ours, theirs) == (True, False)
    with second.claim("p/1") as theirs:
        assert theirs
        second.append(labels("p/1"))
    with first.claim("p/1") as ours:
        assert not ours, "it is done, though this store object did not do it"


SLOW_WORKER = """
import asyncio, sys, time
from pathlib import Path
from reprieve.labelling.runner import mine_problems
from reprieve.labelling.store import LabelStore
sys.path.insert(0, {tests!r})
from tests.test_labelling import MANIFEST, labels
from tests.mining import problem

class Slow:
    async def mine(self, item):
        await asyncio.sleep(0.03)
        return labels(item.problem_id)

problems = [problem(f"p-{{n}}") for n in range({size})]
mine_problems(Slow(), problems, LabelStore(Path({folder!r}), MANIFEST), num_in_flight=2)
"""


def worker(folder, size=60):
    code = SLOW_WORKER.format(tests=str(os.getcwd()), folder=str(folder), size=size)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


def test_killed_workers_lose_only_what_is_in_hand_and_two_share_the_rest(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    first = worker(tmp_path)
    while len(store.done()) < 5:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = set(store.done())
    assert 5 <= len(kept) < 60
    both = [worker(tmp_path), worker(tmp_path)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    shards = {path.name for path in (tmp_path / "shards").glob("*.parquet")}
    assert not [name for name in shards if name.startswith("one-")], "the last worker to end folds"
    found = LabelStore(tmp_path).problems()
    assert [item.problem_id for item in found] == [f"p-{n}" for n in range(60)]
    import pyarrow.parquet as parquet

    rows = sum(parquet.read_table(tmp_path / "shards" / name).num_rows for name in shards)
    assert rows == 60, "no problem was mined twice"


def test_what_a_dead_worker_had_in_hand_is_mined_after_all(tmp_path):
    store = LabelStore(tmp_path, MANIFEST)
    holder = LabelStore(tmp_path, MANIFEST).claim("p-0")

    class Dying:
        async def mine(self, item):
            if item.problem_id == "p-2":
                holder.__exit__(None, None, None)  # the other worker dies while we are at the last problem
            return labels(item.problem_id)

    assert holder.__enter__()
    report = mine_problems(Dying(), [problem(f"p-{n}") for n in range(3)], store, num_in_flight=1)
    assert (report.num_mined, report.num_skipped) == (3, 0)


class Flaky:
    """Fails on one problem."""

    def __init__(self):
        self.fails = {"p-1"}

    async def mine(self, item):
        if item.problem_id in self.fails:
            raise RuntimeError("server is away")
        return labels(item.problem_id)


def test_failed_problems_are_reported_not_labelled_and_tried_again(tmp_path, capsys):
    store, flaky = LabelStore(tmp_path, MANIFEST), Flaky()
    problems = [problem(f"p-{n}") for n in range(3)]
    report = mine_problems(flaky, problems, store, num_in_flight=2)
    assert (report.num_mined, report.errors) == (2, {"p-1": "RuntimeError: server is away"})
    assert "p-1: RuntimeError" in capsys.readouterr().err
    flaky.fails = set()
    report = mine_problems(flaky, problems, store)
    assert (report.num_mined, report.num_skipped) == (1, 2)
    flaky.fails = {"p-7"}
    report = mine_problems(flaky, [problem("p-0"), problem("p-7")], store)
    report.require_some()  # one was there already
    with pytest.raises(ReprieveError, match="every problem failed; the first, p-7: RuntimeError"):
        mine_problems(flaky, [problem("p-7")], store).require_some()
    with pytest.raises(SpecError, match="num_in_flight must be 1 or more, got 0"):
        mine_problems(flaky, problems, store, num_in_flight=0)


def test_a_forward_that_fails_fails_its_problems_and_nothing_hangs():
    model = tiny_model()
    params = SamplingParams(temperature=1.0)
    decoder = BatchDecoder(model, num_rows=2, params=params, eos_ids=frozenset())
    target = LocalTarget(decoder)

    def fail(scores, token_ids):
        raise RuntimeError("bad draw")

    async def ask():
        first = target.complete(Session(), [1, 2], [], 4, fail)
        with pytest.raises(RuntimeError, match="bad draw"):
            await asyncio.wait_for(first, timeout=5)
        return await asyncio.wait_for(target.complete(Session(), [1, 2], [], 4, None), timeout=5)

    assert len(asyncio.run(ask())) == 4


def test_a_cancelled_problem_leaves_no_text_behind():
    decoder = BatchDecoder(tiny_model(), num_rows=1, params=SamplingParams(), eos_ids=frozenset())
    target = LocalTarget(decoder)

    async def fail():
        await asyncio.sleep(0)
        raise RuntimeError("judge is away")

    async def both():
        texts = [target.complete(Session(), [1, 2], [], 200, None) for _ in range(3)]
        with pytest.raises(RuntimeError, match="judge is away"):
            await gather_all([*texts, fail()])

    asyncio.run(both())
    assert decoder.idle


# A target behind an API


class FakeApi(BaseHTTPRequestHandler):
    """A completions server over the bundled target: text in, text out."""

    decoder = None
    tokenizer = None
    lock = threading.Lock()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["prompt"]
        ids = prompt if isinstance(prompt, list) else self.tokenizer.encode(prompt)
        with self.lock:
            made = self.decoder.generate(ids, SamplingParams(max_new_tokens=asked["max_tokens"]))
        choice = {
            "index": 0,
            "text": made.text,
            "finish_reason": "stop" if made.finish_reason == "eos" else "length",
            "logprobs": None,
        }
        reply = {"id": "x", "object": "text_completion", "created": 0, "model": asked["model"], "choices": [choice]}
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("prompts", ["text", "tokens"])
def test_a_target_behind_an_api_gives_the_labels_it_gives_locally(prompts, monkeypatch):
    pair = reprieve.load_pair()
    FakeApi.tokenizer = pair.tokenizer
    FakeApi.decoder = pair.decoder("target_only")
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeApi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    local = build(AutoJudgeMining(limit=1))
    served = build(AutoJudgeMining(limit=1, pair=PairSettings("big", BUNDLED), api_url=url, api_prompts=prompts))
    try:
        ours = asyncio.run(local.miner.mine(local.problems[0]))
        theirs = asyncio.run(served.miner.mine(served.problems[0]))
    finally:
        server.shutdown()
    assert [m.important for m in ours.labelled()] == [m.important for m in theirs.labelled()]
    assert (ours.target_ids, ours.response_ids) == (theirs.target_ids, theirs.response_ids)
    assert served.manifest["target_weights"] == "api:big"


class MergingTokenizer:
    """Letters, but `ab` and `bc` are tokens of their own wherever they occur: one text, several spellings."""

    vocabulary = ("<eos>", "a", "b", "c", "ab", "bc", " ")
    eos_token_id = 0

    def encode(self, text, *, add_special_tokens=True):
        ids = []
        while text:
            piece = next(p for p in sorted(self.vocabulary, key=len, reverse=True) if text.startswith(p))
            ids.append(self.vocabulary.index(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(self.vocabulary[i] for i in token_ids if not (skip_special_tokens and i == 0))


def api(reply, *, finish="stop", **options):
    seen = []

    async def create(**asked):
        seen.append(asked)
        return SimpleNamespace(choices=[SimpleNamespace(text=reply, finish_reason=finish)])

    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    return ApiTarget(client, "m", MergingTokenizer(), eos_id=0, **options), seen


def complete(target, prompt, response, size=9):
    return asyncio.run(target.complete(Session(), prompt, response, size, None))


A, B, C, AB, BC, SPACE = range(1, 7)


def test_a_swap_the_server_would_spell_otherwise_is_not_tried():
    target, seen = api("c")
    assert complete(target, [C], [A, B]) is None  # "cab" is read as c, ab
    assert not seen
    assert complete(target, [C], [AB]) == [C, EOS]


def test_tokens_can_be_sent_where_a_server_takes_them():
    target, seen = api("c", prompts="tokens")
    assert complete(target, [C], [A, B]) == [C, EOS]
    assert seen[0]["prompt"] == [C, A, B]


def test_a_completion_that_merges_with_the_prefix_keeps_the_prefix():
    target, _ = api("bc")
    # "a" + "bc" would be read as ab, c: the prefix's own token must not change under the label.
    assert complete(target, [SPACE], [A]) == [BC, EOS]


def test_api_budgets_are_cut_and_endings_told_apart():
    target, seen = api("ccc", finish="length")
    assert complete(target, [A], [], size=3) == [C, C, C]
    assert seen[0]["max_tokens"] == 3
    target, _ = api("ccccc")
    assert complete(target, [A], [], size=3) == [C, C, C]
    with pytest.raises(SpecError, match="API target is greedy"):
        asyncio.run(target.complete(Session(), [A], [], 3, lambda scores, ids: 0))
    with pytest.raises(SpecError, match="prompts must be one of text, tokens, got 'ids'"):
        api("c", prompts="ids")


def test_stop_texts_are_cut_here_and_no_end_is_invented():
    """The server is sent none, so that what ended the completion is known."""
    stops = lambda ids: MergingTokenizer().decode(ids).endswith("cc")  # noqa: E731
    target, seen = api("acca", stops=stops)
    assert complete(target, [C], []) == [A, C, C]
    assert "stop" not in seen[0]
    target, _ = api("ca", stops=stops)
    assert complete(target, [A], [C]) == [C], "a stop text can begin in what was given"
    target, _ = api("a", stops=stops)
    assert complete(target, [A], [C]) == [A, EOS]


def test_unlabelled_swaps_keep_the_targets_token():
    class Refusing(ScriptedTarget):
        async def complete(self, session, prompt_ids, response_ids, max_new_tokens, draw):
            if response_ids and response_ids[-1] == 2:
                return None
            return await super().complete(session, prompt_ids, response_ids, max_new_tokens, draw)

    script = [1, 3, 9, 5, EOS]
    target = Refusing(lambda before: script[len(before)])
    found = asyncio.run(miner(target, lambda before: [2, 3, 9, 6, 0][len(before)]).mine(problem()))
    assert [(m.important, bool(m.reason)) for m in found.mismatches] == [(None, True), (True, False)]
    assert found.response_ids == (1, 3, 9, 5, EOS)
    assert len(found.labelled()) == 1


# Judges


class FakeChat:
    """Gives replies in turn."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.prompts = []

    async def ask(self, prompt, *, attempt=0):
        self.prompts.append(prompt)
        return self.replies.pop(0)


@pytest.mark.parametrize(
    ("replies", "important", "votes"),
    [
        (["[[A>>B]]", "[[A>B]]", "[[B>A]]"], True, "A>>B,A>B,B>A"),
        (["[[A=B]]", "[[A>B]]", "[[B>>A]]"], False, "A=B,A>B,B>>A"),
        (["first [[A>B]], no: [[A=B]]", "[[A=B]]", "[[A=B]]"], False, "A=B,A=B,A=B"),
        (["?", "[[A>B]]", "A>B", "x", "y", "[[A=B]]"], True, "A>B,none,A=B"),
        (["?"] * 9, None, "none,none,none"),
    ],
)
def test_pairwise_votes_by_majority(replies, important, votes):
    chat = FakeChat(*replies)
    judge = NotWorse(chat)
    verdict = asyncio.run(judge.compare(problem(), responses(), [1], [2, 2], [3, 3]))
    assert (verdict.important, verdict.votes) == (important, votes)
    assert "assistant A:\n2 2" in chat.prompts[0]
    assert "assistant B:\n3 3" in chat.prompts[0]


def test_open_ended_mining_compares_with_the_running_response():
    """After one accepted swap, A is the response that has it."""
    chat = FakeChat(*["[[A=B]]"] * 3, *["[[A>B]]"] * 3)
    script = lambda text: lambda before: text[len(before)] if len(before) < len(text) else EOS  # noqa: E731
    found = asyncio.run(
        miner(script([1, 3, EOS]), script([2, 4, EOS]), equivalence=NotWorse(chat), task=Open()).mine(problem())
    )
    assert [m.important for m in found.mismatches] == [False, True]
    assert "assistant A:\n1 3\n" in chat.prompts[0]
    assert "assistant A:\n2 3\n" in chat.prompts[3]
    assert "assistant B:\n2 4\n" in chat.prompts[3]


class Open:
    """No answers: the response is the answer."""

    stop = ()
    graded = False

    def extract_answer(self, text):
        return text or None

    def equivalent(self, answer, other):
        raise AssertionError("a judge decides")


@pytest.mark.parametrize(
    ("reply", "flawed"),
    [
        ('{"analysis": "ok", "flawed": false}', False),
        ('```json\n{"analysis": "a {b} c", "flawed": true}\n```', True),
        ('{"analysis": "ok", "flawed": "no"}', None),
        ('{"flawed": true}', None),
        ("[]", None),
        ("{not json}", None),
        ("it is sound", None),
    ],
)
def test_soundness_verdicts_are_strict_json(reply, flawed):
    assert parse_verdict(reply) is flawed


def test_malformed_soundness_verdicts_are_asked_for_again_and_then_count_as_none():
    good = '{"analysis": "", "flawed": true}'
    assert asyncio.run(ModelSoundness(FakeChat("?", "{", good)).judge("q", "5", "r")) == UNSOUND
    assert asyncio.run(ModelSoundness(FakeChat("?", "?", "?", good)).judge("q", "5", "r")) == NO_VERDICT


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("2+3=5. Then 5*4=20 and 20/5=4.", SOUND),
        ("2+3=6.", UNSOUND),
        ("7/2=3", UNSOUND),
        ("25% of 84=21", SOUND),
        ("no equation", SOUND),
    ],
)
def test_equations_are_checked(text, verdict):
    assert asyncio.run(EquationSoundness().judge("q", "5", text)) == verdict


def test_judges_are_named_by_text(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert make_soundness(None) is None
    assert make_chat("openai:model=m,url=http://127.0.0.1:1/v1").model == "m"
    for spec in ("gemini", "openai:url=x", "openai:model=m,size=3"):
        with pytest.raises(SpecError, match="a judge is written openai:model=NAME"):
            make_chat(spec)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ReprieveError, match="API client cannot start"):
        make_chat("openai:model=m")


# PAD


class ListedSource:
    """Candidates written out: (accepted before it, candidate, fallback)."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def next(self, prompt_ids, response_ids, num_left):
        accepted, draft_id, fallback_id = self.steps.pop(0)
        return accepted, None if draft_id is None else Candidate(draft_id, fallback_id)


class RolloutTarget:
    """Ends well after a prefix as often as a table says."""

    def __init__(self, shares):
        self.shares = shares
        self.count: dict[tuple[int, ...], int] = {}

    async def complete(self, session, prompt_ids, response_ids, max_new_tokens, draw):
        key = tuple(response_ids)
        number = self.count[key] = self.count.get(key, 0) + 1
        good = number <= self.shares[key]
        return [*([3] * number), 9, 5 if good else 6, EOS]


def pivots(source, shares, **options):
    made = PivotMiner(
        target=RolloutTarget(shares),
        make_source=lambda seed: source,
        responses=responses(max_new_tokens=30),
        make_seed=lambda item: 1,
        num_rollouts=4,
        **options,
    )
    return asyncio.run(made.mine(problem()))


def test_pivot_labels_and_the_prefix_by_hand():
    source = ListedSource(([1], 7, 8), ([], 6, 2), ([9, 5, EOS], None, None))
    # 7: 3 of 4 against 4 of 4 is under 0.8, a pivot: 8 takes its place. 6: 3 of 4 against 3 of 4 is none.
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


def test_a_base_that_never_ends_well_makes_no_pivots():
    found = pivots(ListedSource(([], 7, 8), ([EOS], None, None)), {(): 0, (7,): 0})
    assert not found.mismatches[0].important


def test_soundness_flips_non_pivots_only_and_sees_the_median_rollout():
    chat = FakeChat('{"analysis": "", "flawed": true}')
    shares = {(): 4, (7,): 4}
    found = pivots(ListedSource(([], 7, 8), ([EOS], None, None)), shares, soundness=ModelSoundness(chat))
    assert found.mismatches[0].important
    assert found.mismatches[0].verdict == UNSOUND
    assert found.response_ids == (8, EOS), "a flipped token falls back like any pivot"
    assert "7 3 3 3 9 5\n" in chat.prompts[0]
    never_asked = FakeChat()
    found = pivots(
        ListedSource(([], 7, 8), ([EOS], None, None)), {(): 4, (7,): 1}, soundness=ModelSoundness(never_asked)
    )
    assert found.mismatches[0].important
    lost = FakeChat("?", "?", "?")
    found = pivots(ListedSource(([], 7, 8), ([EOS], None, None)), shares, soundness=ModelSoundness(lost))
    assert (found.mismatches[0].important, found.mismatches[0].verdict) == (False, NO_VERDICT)


def test_a_candidate_that_ends_the_text_is_judged_as_it_stands():
    found = pivots(ListedSource(([9, 5], EOS, 8)), {(9, 5): 4})
    assert found.mismatches[0].candidate_utility == 1.0
    assert found.response_ids == (9, 5, EOS)


def test_accepted_tokens_end_the_walk_at_the_end_of_text():
    found = pivots(ListedSource(([9, 5, EOS, 3], 7, 8)), {})
    assert found.response_ids == (9, 5, EOS)
    assert not found.mismatches


def test_median_length_is_the_middle_one():
    assert median_length([[1, 1, 1], [2], [3, 3]]) == [3, 3]
    assert median_length([[1] * 4, [2] * 3, [3], [4] * 2]) == [2] * 3


def test_candidates_are_what_speculative_sampling_rejects():
    """Accepted tokens and fallbacks together are distributed as the target's own (chi-square)."""
    from scipy.stats import chisquare

    target = tiny_model(seed=1, scale=1.2, vocab_size=8)
    draft = perturbed(target, noise=0.3)
    params = SamplingParams(temperature=1.0)
    with torch.inference_mode():
        probs = target(torch.tensor([[3, 1, 2]])).logits[0, -1].softmax(-1)
    counts, num_rejected, size = torch.zeros(8), 0, 1500
    source = CandidateSource(CachedModel(target), CachedModel(draft), params, block_size=2)
    for _ in range(size):
        accepted, candidate = source.next([3, 1], [2], 5)
        if not accepted:
            assert candidate is not None
            num_rejected += 1
        counts[accepted[0] if accepted else candidate.fallback_id] += 1
    assert 0.02 * size < num_rejected < 0.98 * size
    expected = size * probs.double() / probs.double().sum()
    assert chisquare(counts.tolist(), expected.tolist()).pvalue > 1e-3


def test_pivot_mining_is_repeatable():
    config = PivotMining(limit=1, max_new_tokens=60, num_in_flight=1, num_rollouts=2, soundness="equations")
    first, second = (build(config) for _ in range(2))
    one, two = (asyncio.run(bench.miner.mine(bench.problems[0])) for bench in (first, second))
    assert dataclasses.replace(one, seconds=0) == dataclasses.replace(two, seconds=0)
    assert one.mismatches


# Labels for people


def test_labels_are_shown_with_alternatives_and_outcomes():
    tokenizer = WordTokenizer()
    item = dataclasses.replace(labels(), response_ids=(1, 5, 9, 5, 0))
    shown = terminal_text(item, tokenizer)
    assert "5[6]" in shown.plain.replace(" ", "")
    assert "✗ 6" in shown.plain
    red = [shown.plain[span.start : span.end] for span in shown.spans if "red" in str(span.style)]
    assert any("5" in text for text in red)
    page = html_page([item], tokenizer, title="a <b>")
    assert '<span class="important" title="...9 6 ✗ 6"> 5</span><span class="other">[6]</span>' in page
    assert "<title>a &lt;b&gt;</title>" in page
    harmless = dataclasses.replace(labels(important=False), response_ids=(1, 6, 9, 5, 0))
    assert '<span class="harmless" title="...9 6 ✓ 6"> 6</span>' in html_page([harmless], tokenizer, title="t")
    assert "6[5]" in terminal_text(harmless, tokenizer).plain.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 12", "number"),
        ("=", "operator"),
        (" then", "word"),
        (".", "punctuation"),
        ("\n", "space"),
        ("<eos>", "end of text"),
        ("a1", "other"),
    ],
)
def test_token_classes(text, kind):
    assert token_class(text) == kind


def test_summaries_count_labels_and_classes():
    items = [labels("a"), labels("b", False), labels("c", None)]
    summary = summarise(items)
    assert (summary.num_labelled, summary.num_important, summary.num_unlabelled) == (2, 1, 1)
    assert "1 important: 50.0%" in summary.sentence()
    assert [(row.name, row.num_labelled, row.num_important) for row in shares_by_class(items, WordTokenizer())] == [
        ("number", 2, 1)
    ]
    assert "no labelled mismatches" in summarise([]).sentence()


def test_annotations_label_every_token_by_its_span(tmp_path):
    tokenizer = reprieve.load_pair().tokenizer
    path = tmp_path / "a.jsonl"
    response = " First, 5+3=9. The final answer is 9."
    start = response.index("9.")
    path.write_text(
        json.dumps({"id": "x", "prompt": "Question: ?\nAnswer:", "response": response, "wrong": [[start, start + 1]]})
        + "\n"
    )
    (found,) = read_annotations(path, tokenizer)
    path.write_text(path.read_text() * 2)
    with pytest.raises(ReprieveError, match="got 'x' twice"):
        read_annotations(path, tokenizer)
    wrong = [tokenizer.decode([m.draft_id]) for m in found.mismatches if m.important]
    assert wrong == ["9"]
    assert len(found.mismatches) == len(found.response_ids)
    for row, says in (
        ({"prompt": "p", "response": "r"}, "wrong is missing"),
        ({"prompt": "p", "response": "r", "wrong": 5}, "wrong must be a list"),
        ({"prompt": "p", "response": "r", "wrong": [["a", 1]]}, "a span must be"),
        (
            {"prompt": "p", "response": "r", "wrong": [[0, 9]]},
            r"a span must be \[start, end\) in \[0, 1\], got \[0, 9\]",
        ),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(ReprieveError, match=says):
            read_annotations(path, tokenizer)


# The commands


def test_mine_show_train_and_decode_end_to_end(tmp_path, capsys):
    store, head = tmp_path / "labels", tmp_path / "head"
    mine = ["mine", "autojudge", "--limit", "6", "--num-in-flight", "6", "--out", str(store)]
    assert main(mine) == 0
    assert "6 problems (0 without an answer)" in capsys.readouterr().out
    assert main(mine) == 0
    assert "mined now: 0, there before: 6" in capsys.readouterr().out
    assert main([*mine, "--variant", "naive"]) == 1
    assert "made with variant = 'search', this run has 'naive'" in capsys.readouterr().err
    assert main(["labels", "show", str(store), "--problem", "train-0-3", "--no-color"]) == 0
    assert "train-0-3 (mined)" in capsys.readouterr().out
    assert main(["labels", "show", str(store), "--problem", "nope"]) == 2
    assert main(["labels", "show", str(store), "--limit", "2", "--html", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text().count("<h2>") == 2
    assert main(["labels", "stats", str(store)]) == 0
    assert "class of the target's token" in capsys.readouterr().out
    assert main(["train", "judge", "--labels", str(store), "--held-out", "0.5", "--out", str(head)]) == 0
    assert re.search(r"held-out ROC AUC 0\.\d+", capsys.readouterr().out)
    bench = ["bench", "--arm", f"judge:path={head}", "--limit", "2", "--out", str(tmp_path / "bench")]
    assert main(bench) == 0
    arms = {arm["rule"]: arm for arm in json.loads((tmp_path / "bench" / "results.json").read_text())["arms"]}
    assert arms["judge"]["num_rescued"] > 0
    assert arms["judge"]["tokens_per_round"] > arms["lossless"]["tokens_per_round"]
    sweep = [
        "sweep",
        "--rule",
        f"judge:path={head}",
        "--thresholds",
        "0,0.5",
        "--limit",
        "1",
        "--out",
        str(tmp_path / "s"),
    ]
    assert main(sweep) == 0
    assert main(["bench", "--arm", "judge:path=/nowhere", "--out", str(tmp_path / "b2")]) == 1
    assert "neither a folder nor a hub id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["mine", "autojudge", "--max-new-tokens", "0"], "max_new_tokens must be 1 or more, got 0"),
        (["mine", "pivot", "--num-rollouts", "0"], "num_rollouts must be 1 or more, got 0"),
        (["mine", "autojudge", "--task", "prompts:path={prompts}", "--split", "all"], "no answers to compare"),
        (["mine", "pivot", "--task", "prompts:path={prompts}", "--split", "all"], "no answers to compare"),
        (["mine", "autojudge", "--task", "gsm8k:path={gsm}", "--offset", "9"], "offset must be below"),
        (
            ["mine", "autojudge", "--judge", "openai:model=m,temperature=hot", "--limit", "1"],
            "must be a number, got 'hot'",
        ),
        (["train", "judge", "--grid", "nan"], "grid must hold finite values of C above 0"),
        (["train", "judge", "--held-out", "1"], "held_out must be in (0, 0.9], got 1.0"),
        (["train", "pivot", "--num-epochs", "-1"], "num_epochs must be 1 or more, got -1"),
    ],
)
def test_bad_options_are_refused_at_once(command, says, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Say hi"}\n')
    (tmp_path / "g.jsonl").write_text('{"question": "1+1?", "answer": "2\\n#### 2"}\n')
    given = [part.format(prompts=tmp_path / "p.jsonl", gsm=tmp_path / "g.jsonl") for part in command]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_pivot_end_to_end(tmp_path, capsys):
    store, head = tmp_path / "labels", tmp_path / "head"
    mine = ["mine", "pivot", "--limit", "4", "--num-rollouts", "3", "--num-in-flight", "4"]
    assert main([*mine, "--out", str(store)]) == 0
    assert (
        main(["train", "pivot", "--labels", str(store), "--num-epochs", "3", "--held-out", "0.5", "--out", str(head)])
        == 0
    )
    sampling = ["--temperature", "0.6", "--top-p", "0.95", "--top-k", "20"]
    bench = [
        "bench",
        "--arm",
        f"pivot:path={head},threshold=0.9",
        "--limit",
        "1",
        *sampling,
        "--out",
        str(tmp_path / "b"),
    ]
    assert main(bench) == 0
    assert main(["train", "pivot", "--labels", str(tmp_path / "none")]) == 1
    assert "is not a label store" in capsys.readouterr().err


def test_annotated_labels_train_a_head(tmp_path):
    rows = [
        {"prompt": f"Question: {n}?\nAnswer:", "response": f" 5+{n}={n}. The final answer is {n}.", "wrong": [[5, 6]]}
        for n in range(1, 9)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = tmp_path / "store"
    assert main(["labels", "import", str(path), "--out", str(store)]) == 0
    assert main(["train", "judge", "--labels", str(store), "--held-out", "0.3", "--out", str(tmp_path / "h")]) == 0


def test_ray_workers_share_one_store(tmp_path, capsys):
    """A local cluster of two workers labels what one process labels."""
    ray = pytest.importorskip("ray")
    mine = ["mine", "autojudge", "--limit", "4", "--num-in-flight", "2", "--max-new-tokens", "64"]
    assert main([*mine, "--workers", "ray:2", "--out", str(tmp_path / "ray")]) == 0
    ray.shutdown()
    assert "mined now: 4" in capsys.readouterr().out
    assert main([*mine, "--out", str(tmp_path / "one")]) == 0
    ours, theirs = (LabelStore(tmp_path / name).problems() for name in ("one", "ray"))
    assert [dataclasses.replace(p, seconds=0) for p in ours] == [dataclasses.replace(p, seconds=0) for p in theirs]
    assert main([*mine, "--workers", "ray:0", "--out", str(tmp_path / "x")]) == 2
    assert "--workers must be 1, ray, or ray:N" in capsys.readouterr().err
