"""Log-probabilities of prompt tokens, as servers return them."""

import asyncio

import pytest
import torch

from reprieve.backends.client import Client
from reprieve.backends.deployers import RunningServers
from reprieve.backends.servers import Running, ServerFacts
from reprieve.backends.settings import OpenAISettings, ServerSettings
from reprieve.errors import EngineError
from tests.kit.servers import PairServer

TEXT = "Question: Anna has 3 stamps."


def read(server, *asked):
    async def ask():
        client = Client(Running((server.url,), "the-model", ServerFacts()), ServerSettings(timeout=30, parallel=2))
        try:
            return await client.read(*asked)
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("num_rows", [1, 3, None])
@pytest.mark.parametrize("num_candidates", [1, 5])
def test_rows_hold_the_candidates_after_the_last_tokens(bundled_pair, num_rows, num_candidates):
    ids = bundled_pair.tokenizer.encode(TEXT)
    num_rows = num_rows or len(ids)
    with torch.inference_mode():
        rows = bundled_pair.target(torch.tensor([ids])).logits[0].log_softmax(-1)[-num_rows:]
    with PairServer(bundled_pair) as server:
        told = read(server, ids, num_rows, num_candidates)
    assert [set(one) for one in told] == [set(row.topk(num_candidates).indices.tolist()) for row in rows]
    for one, row in zip(told, rows, strict=True):
        assert one == pytest.approx({token_id: float(row[token_id]) for token_id in one}, abs=1e-4)
    # The server also returns the text's own tokens; those that are not candidates are left out.
    assert num_rows == 1 or not all(token_id in one for one, token_id in zip(told, ids[-num_rows + 1 :], strict=False))


def test_a_server_without_prompt_logprobs_is_refused(bundled_pair, monkeypatch):
    monkeypatch.setattr(PairServer, "read", lambda self, asked: None)
    with PairServer(bundled_pair) as server, pytest.raises(EngineError, match="no log-probabilities of prompts"):
        read(server, [1, 2, 3], 2, 1)


def test_servers_of_different_models_are_refused(monkeypatch):
    names = {"http://a": "x", "http://b": "y"}
    monkeypatch.setattr("reprieve.backends.deployers.model_of", lambda url, wanted: names[url])
    with pytest.raises(EngineError, match="must serve one model under one name, got x, y"):
        RunningServers(OpenAISettings(url="http://a;http://b"), "float32")
