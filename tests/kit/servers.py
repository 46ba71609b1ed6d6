"""A fake vLLM server with the plugin's API, backed by the local engine; it needs no vLLM."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from reprieve.heads.certificates import portable_spec
from reprieve.policies.menu import Menu
from reprieve.policies.policy import STRICT, RequestError
from reprieve.settings import SamplingParams
from tests.kit.pairs import ARITHMETIC


class PairServer:
    """An HTTP server for a pair.

    Args:
        rules: Rules on offer; empty for a server without the plugin.
        dies_after: Number of requests after which it stops answering.
    """

    def __init__(self, pair, rules=(), *, k=8, dies_after=None, version="0.32.0"):
        self.pair, self.k, self.version = pair, k, version
        self.menu = Menu.load({"rules": [{"rule": rule} for rule in rules]}, target=ARITHMETIC.name) if rules else None
        self.requests = []
        self.dies_after = dies_after
        self.lock = threading.Lock()
        self.waiting, self.most_waiting = set(), 0  # threads whose request is not yet decoded
        self._decoders = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    @property
    def dead(self):
        return self.dies_after is not None and len(self.requests) >= self.dies_after

    @property
    def metrics(self):
        if self.menu is None:
            return ""
        rules = json.dumps({name: portable_spec(policy.rule) for name, policy in self.menu.policies.items()})
        labels = {
            "engine": "vllm", "engine_version": self.version, "runner": "v1", "dtype": "float32", "drafter": "draft",
            "num_draft_tokens": str(self.k), "rules": rules.replace("\\", "\\\\").replace('"', '\\"'),
        }  # fmt: skip
        return "vllm:reprieve_info{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "} 1.0\n"

    def answer(self, asked):
        """The completions of one request; one at a time, since decoders keep caches."""
        params = SamplingParams(
            max_new_tokens=asked["max_tokens"], temperature=asked["temperature"], top_p=asked["top_p"],
            top_k=max(0, asked["top_k"]), stop=tuple(asked.get("stop") or ()),
        )  # fmt: skip
        rule = STRICT if self.menu is None else self.menu.choose(asked.get("vllm_xargs")).rule
        self.waiting.add(threading.get_ident())
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        with self.lock:
            self.waiting.remove(threading.get_ident())
            if rule.spec not in self._decoders:
                self._decoders[rule.spec] = self.pair.decoder(rule, num_draft_tokens=self.k)
            decoder = self._decoders[rule.spec]
            return [
                decoder.generate(
                    asked["prompt"], SamplingParams(**{**vars(params), "seed": (asked.get("seed") or 0) + number})
                )
                for number in range(asked["n"])
            ]

    def read(self, asked):
        """Prompt log-probabilities as vLLM returns them: for each token, the likeliest ones and the token itself."""
        ids = torch.tensor([asked["prompt"]])
        with self.lock, torch.inference_mode():
            rows = self.pair.target(ids).logits[0, :-1].log_softmax(-1)
        places = []
        for row, token_id in zip(rows, ids[0, 1:].tolist(), strict=True):
            order = row.sort(descending=True, stable=True).indices.tolist()
            told = dict.fromkeys([*order[: asked["prompt_logprobs"]], token_id])
            places.append({str(one): {"logprob": float(row[one]), "rank": order.index(one) + 1} for one in told})
        return [None, *places]


class _Handler(BaseHTTPRequestHandler):
    owner: PairServer
    protocol_version = "HTTP/1.1"

    def _hang_up(self):
        self.close_connection = True
        self.connection.close()

    def do_GET(self):
        if self.owner.dead:
            self._hang_up()
            return
        pages = {
            "/health": "", "/metrics": self.owner.metrics, "/version": json.dumps({"version": self.owner.version}),
            "/v1/models": json.dumps({"data": [{"id": "the-model"}]}),
        }  # fmt: skip
        self._send(pages.get(self.path, ""), 200 if self.path in pages else 404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner = self.owner
        if owner.dead:
            self._hang_up()
            return
        owner.requests.append(asked)
        if "prompt_logprobs" in asked:
            choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None, "token_ids": [0]}
            choice["prompt_logprobs"] = owner.read(asked)
            self._send(
                json.dumps({"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})
            )
            return
        try:
            made = owner.answer(asked)
        except RequestError as error:
            self._send(json.dumps({"error": {"message": str(error), "param": error.parameter}}), 400)
            return
        choices = [_choice(number, one) for number, one in enumerate(made)]
        reply = {"id": "x", "object": "text_completion", "created": 0, "model": asked["model"], "choices": choices}
        if len(made) == 1:
            reply["metrics"] = {"speculative_decoding": _numbers(made[0], owner.k)}
        if not asked.get("stream"):
            self._send(json.dumps(reply))
            return
        first = {**choices[0], "token_ids": choices[0]["token_ids"][:1], "text": "", "finish_reason": None}
        last = {**choices[0], "token_ids": choices[0]["token_ids"][1:]}
        parts = [{**reply, "choices": [first]}, {**reply, "choices": [last]}, {**reply, "choices": []}]
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
        self._send(text, kind="text/event-stream")

    def _send(self, text, status=200, kind="application/json"):
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def _choice(number, made):
    return {
        "index": number,
        "text": made.text,
        "finish_reason": "length" if made.finish_reason == "length" else "stop",
        "stop_reason": "text" if made.finish_reason == "stop" else None,
        "logprobs": None,
        "token_ids": made.token_ids,
    }


def _numbers(made, k):
    accepted = [length - 1 for length in made.round_lengths]
    return {
        "acceptance_histogram": [accepted.count(number) for number in range(k + 1)],
        "num_spec_steps": made.num_rounds - 1,
        "num_accepted_draft_tokens": made.num_accepted,
        "num_draft_tokens": made.num_drafted,
        "num_spec_tokens": k,
        "num_rescued_tokens": made.num_rescued,
    }
