"""Mining with a target behind an API gives the same labels as with a local one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from reprieve.engine.continuations import Session
from reprieve.errors import SpecError
from reprieve.mining.building import build
from reprieve.mining.target import ApiTarget, ResponseFormat, TokenizationError
from reprieve.settings import PairSettings, SamplingParams
from tests.kit.mining import EOS, ScriptedTarget, miner, problem

BUNDLED = "reprieve/arithmetic-pair"


class FakeApi(BaseHTTPRequestHandler):
    """A completions server over the bundled target: text in, text out."""

    decoder = None
    tokenizer = None
    lock = threading.Lock()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = self.tokenizer.encode(asked["prompt"])
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


@pytest.mark.slow
def test_an_api_target_gives_the_same_labels_as_a_local_one(short, monkeypatch, bundled_pair):
    settings, ours = short
    FakeApi.tokenizer = bundled_pair.tokenizer
    FakeApi.decoder = bundled_pair.decoder("target_only")
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeApi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    big = PairSettings("big", BUNDLED)
    served = build(dataclasses.replace(settings, pair=big, api_url=url))
    try:
        theirs = asyncio.run(served.miner.mine(served.problems[0]))
    finally:
        server.shutdown()
    assert [m.important for m in ours.labelled()] == [m.important for m in theirs.labelled()]
    assert (ours.target_ids, ours.response_ids) == (theirs.target_ids, theirs.response_ids)
    assert served.manifest["target_weights"] == "api:big"


class MergingTokenizer:
    """Letters, plus the tokens `ab` and `bc`, so that one text has several tokenizations."""

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


def api(reply, *, finish="stop", stop=()):
    seen = []

    async def create(**asked):
        seen.append(asked)
        return SimpleNamespace(choices=[SimpleNamespace(text=reply, finish_reason=finish)])

    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    responses = ResponseFormat(MergingTokenizer(), SimpleNamespace(stop=stop), frozenset({EOS}), 99)
    return ApiTarget(client, "m", responses), seen


def complete(target, prompt, response, size=9):
    return asyncio.run(target.complete(Session(), prompt, response, size, None))


A, B, C, AB, BC, SPACE = range(1, 7)


def test_a_swap_that_the_server_would_tokenize_differently_is_skipped():
    target, seen = api("c")
    with pytest.raises(TokenizationError, match="would tokenize the swapped text differently"):
        complete(target, [C], [A, B])  # the server would tokenize "cab" as c, ab
    assert not seen
    assert complete(target, [C], [AB]) == [C, EOS]


def test_a_completion_that_merges_with_the_prefix_keeps_the_prefix():
    target, _ = api("bc")
    # "a" + "bc" would be tokenized as ab, c, but the prefix must keep its tokens.
    assert complete(target, [SPACE], [A]) == [BC, EOS]


def test_api_completions_respect_the_budget_and_the_finish_reason():
    target, seen = api("ccc", finish="length")
    assert complete(target, [A], [], size=3) == [C, C, C]
    assert seen[0]["max_tokens"] == 3
    target, _ = api("ccccc")
    assert complete(target, [A], [], size=3) == [C, C, C]
    with pytest.raises(SpecError, match="API target is greedy"):
        asyncio.run(target.complete(Session(), [A], [], 3, lambda scores, ids: 0))


def test_stop_texts_are_cut_locally_and_add_no_end_of_text():
    """Stop texts are not sent to the server, so the reason for the end is known."""
    target, seen = api("acca", stop=("cc",))
    assert complete(target, [C], []) == [A, C, C]
    assert "stop" not in seen[0]
    target, _ = api("ca", stop=("cc",))
    assert complete(target, [A], [C]) == [C], "a stop text can begin in what was given"
    target, _ = api("a", stop=("cc",))
    assert complete(target, [A], [C]) == [A, EOS]


def test_unlabelled_swaps_keep_the_targets_token():
    class Refusing(ScriptedTarget):
        async def complete(self, session, prompt_ids, response_ids, max_new_tokens, draw):
            if response_ids and response_ids[-1] == 2:
                raise TokenizationError("merges with its neighbour")
            return await super().complete(session, prompt_ids, response_ids, max_new_tokens, draw)

    script = [1, 3, 9, 5, EOS]
    target = Refusing(lambda before: script[len(before)])
    found = asyncio.run(miner(target, lambda before: [2, 3, 9, 6, 0][len(before)]).mine(problem()))
    assert [(m.important, bool(m.reason)) for m in found.mismatches] == [(None, True), (True, False)]
    assert found.response_ids == (1, 3, 9, 5, EOS)
    assert len(found.labelled()) == 1
