"""The local server over real sockets: OpenAI's own client, raw bytes, and a browser."""

import asyncio
import dataclasses
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from importlib import resources

import openai
import pytest
import torch
import uvicorn

from reprieve.engine import SamplingParams
from reprieve.playground.launch import make_app
from reprieve.playground.settings import PlaygroundSettings
from reprieve.policies.policy import Policy
from reprieve.tasks import load_task

JUDGE = "judge:path=reprieve/arithmetic-judge,threshold=0.04"
K = 8
MODEL = "pair"


@pytest.fixture(scope="module")
def pair(bundled_pair):
    return bundled_pair


@pytest.fixture(scope="module")
def prompt():
    return load_task("arithmetic").problems("test", 1)[0].prompt


@contextmanager
def serving(pair, *, rules=(JUDGE, "margin:delta=2"), settings=None, **options):
    asked = PlaygroundSettings(model_name=MODEL, num_draft_tokens=K, **(settings or {}))
    app = make_app(pair, [Policy.load(rule) for rule in rules], asked, **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def port(pair):
    with serving(pair, rules=({"rule": JUDGE, "fast": 0.2, "max_threshold": 0.5}, "margin:delta=2")) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def post(port, body, path="/v1/completions", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    text = response.read().decode()
    return response.status, json.loads(text) if text.startswith("{") else text


def test_the_default_k_comes_from_the_policys_certificate(pair):
    told = []
    policies = [Policy.load({"rule": JUDGE, "default": "certified"}), Policy.load("margin:delta=2")]
    app = make_app(pair, policies, PlaygroundSettings(), announce=told.append)
    assert app and "; certificate: With 95% confidence" in told[0], "K = 8 there, as it was made"
    told.clear()
    make_app(pair, policies[1:], PlaygroundSettings(num_draft_tokens="auto:path=reprieve/arithmetic-length-judge"))


def test_k_comes_from_the_certificate_for_this_engine(pair):
    """A head may have certificates with different K for the local engine and for vLLM."""
    policy = Policy.load(JUDGE)
    by_engine = {item.conditions.engine: item for item in policy.certificates}
    conditions = dataclasses.replace(by_engine["local"].conditions, num_draft_tokens=16)
    local = dataclasses.replace(by_engine["local"], conditions=conditions)
    both = dataclasses.replace(policy, certificates=(by_engine["vllm"], local))
    told = []
    make_app(pair, [both], PlaygroundSettings(), announce=told.append)
    assert "levels strict, certified=" in told[0] and "does not hold" not in told[0]


def get(port, path, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers or {})
    response = connection.getresponse()
    return response.status, response.read().decode()


def local(pair, spec, prompt, **params):
    return pair.decoder(spec, num_draft_tokens=K).generate(prompt, SamplingParams(**params))


def test_completions_equal_the_engines(client, pair, prompt):
    made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=120, temperature=0)
    wanted = local(pair, JUDGE, prompt, max_new_tokens=120)
    assert made.choices[0].text == wanted.text and made.choices[0].finish_reason == "stop"
    assert made.usage.completion_tokens == len(wanted.tokens)
    assert made.usage.prompt_tokens == len(wanted.prompt_ids)
    assert made.reprieve["rule"] == JUDGE and made.reprieve["num_rescued"] == wanted.num_rescued > 0


def test_a_stream_adds_up_to_the_whole_response(client, prompt):
    asked = dict(model=MODEL, prompt=prompt, max_tokens=60, temperature=0.8, seed=7, stop=["."])
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert "." not in whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_chat_streams_and_answers(client):
    question = "Jack has 48 shells. Sam has 3 fewer shells than Jack. How many shells does Sam have?"
    asked = dict(model=MODEL, messages=[{"role": "user", "content": question}], temperature=0, max_completion_tokens=80)
    whole = client.chat.completions.create(**asked)
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert "45" in whole.choices[0].message.content


def test_choices_and_prompts_have_separate_seeds(client, prompt):
    asked = dict(model=MODEL, prompt=[prompt, prompt], n=2, max_tokens=40, temperature=1.5, seed=3)
    made = client.completions.create(**asked)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in made.choices}) == 4
    assert [c.text for c in client.completions.create(**asked).choices] == [c.text for c in made.choices]
    one = client.completions.create(**{**asked, "prompt": prompt, "n": 1, "seed": 5})
    assert one.choices[0].text == made.choices[2].text


def test_without_a_seed_sampling_differs(client, prompt):
    texts = {
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=30, temperature=1.5).choices[0].text
        for _ in range(3)
    }
    assert len(texts) > 1


def test_logprobs_are_the_targets(client, pair, prompt):
    made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0, logprobs=3)
    told = made.choices[0].logprobs
    wanted = local(pair, JUDGE, prompt, max_new_tokens=24)
    ids = torch.tensor([wanted.prompt_ids + wanted.token_ids])
    with torch.inference_mode():
        rows = pair.target(ids).logits[0].log_softmax(-1)[len(wanted.prompt_ids) - 1 : -1]
    assert told.token_logprobs == pytest.approx(
        rows.gather(-1, ids[0, len(wanted.prompt_ids) :, None])[:, 0].tolist(), abs=1e-3
    )
    assert max(told.top_logprobs[0].values()) == pytest.approx(float(rows[0].max()), abs=1e-3)
    assert all(len(top) == 3 for top in told.top_logprobs)
    assert "".join(told.tokens) == made.choices[0].text
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "2+2?"}], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2] * 5


def test_a_request_chooses_rule_threshold_and_level(client, pair, prompt):
    def ask(**fields):
        made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=120, temperature=0, extra_body=fields)
        return made.reprieve["rule"], made.choices[0].text

    strict = local(pair, "lossless", prompt, max_new_tokens=120).text
    assert ask(reprieve_rule="off") == ask(reprieve_leniency="strict") == ("lossless", strict)
    judge = JUDGE.replace("0.04", "0.2")
    assert ask(reprieve_threshold=0.2) == ask(reprieve_leniency="fast") == ask(vllm_xargs={"reprieve_threshold": 0.2})
    assert ask(reprieve_threshold=0.2) == (judge, local(pair, judge, prompt, max_new_tokens=120).text)
    assert ask(reprieve_rule="margin", reprieve_threshold=5)[0] == "margin:delta=5"
    assert ask(reprieve_leniency="certified")[0] == JUDGE


def test_provenance_names_each_tokens_origin(port, prompt):
    body = {
        "prompt": prompt,
        "max_tokens": 60,
        "temperature": 0,
        "reprieve_provenance": True,
        "reprieve_threshold": 0.2,
    }
    tokens = post(port, body)[1]["choices"][0]["reprieve"]["tokens"]
    kinds = [token["provenance"] for token in tokens]
    assert {"target", "matched", "rescued"} == set(kinds)
    for token in tokens:
        assert (token["risk"] is None) == (token["provenance"] == "target")
    rescued = tokens[kinds.index("rescued")]
    assert rescued["alternative"]["logprob"] > rescued["logprob"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100000}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"prompt": "\ud800 a"}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1]] * 200}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"prompt": "a " * 3000, "max_tokens": None}, "prompt"),
        ({"prompt": "a " * 50_000}, "prompt"),
        ({"prompt": [1] * 50_000}, "prompt"),
        ({"seed": True}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"reprieve_treshold": 0.1}, "reprieve_treshold"),
        ({"vllm_xargs": {"reprieve_treshold": 0.1}}, "vllm_xargs"),
        ({"vllm_xargs": {"reprieve_threshold": 10**400}}, "reprieve_threshold"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"logprobs": 99}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"reprieve_threshold": 0.9}, "reprieve_threshold"),
        ({"reprieve_threshold": "x"}, "reprieve_threshold"),
        ({"vllm_xargs": {"reprieve_threshold": [1]}}, "reprieve_threshold"),
        ({"reprieve_leniency": "wild"}, "reprieve_leniency"),
        ({"reprieve_require": "some"}, "reprieve_require"),
        ({"reprieve_require": "lossless", "reprieve_threshold": 0.2}, "reprieve_require"),
        ({"reprieve_rule": "top_k:k=3"}, "reprieve_rule"),
    ],
)
def test_bad_requests_name_the_field(port, prompt, change, param):
    status, body = post(port, {"prompt": prompt, "temperature": 0, "max_tokens": 4, **change})
    assert status == 400
    assert body["error"]["param"] == param and body["error"]["message"]
    assert post(port, {"prompt": prompt, "max_tokens": 2})[0] == 200


def test_malformed_bodies_get_clear_errors(port):
    for body in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"prompt": NaN}'):
        status, told = post(port, body)
        assert status == 400 and told["error"]["message"], body
    assert post(port, b"x" * (2 << 20))[0] == 413
    assert post(port, {}, path="/v1/nothing")[0] == 404
    status, told = post(port, {"prompt": "a", "model": "gpt"})
    assert (status, told["error"]["param"]) == (404, "model")
    assert "Content-Type" in post(port, b"{}", headers={"Content-Type": "text/plain"})[1]["error"]["message"]
    assert post(port, {"prompt": "a", "temperature": 1e-320, "max_tokens": 2})[0] == 200
    assert get(port, "/v1/completions")[0] == 405


def test_errors_are_raised_as_the_openai_clients_types(client, prompt):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=prompt, temperature=-3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=prompt)


def test_models_health_and_offer(port, client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert json.loads(get(port, "/health")[1])["status"] == "ok"
    offer = json.loads(get(port, "/v1/reprieve")[1])
    assert [rule["name"] for rule in offer["rules"]] == ["judge", "margin"]
    judge = offer["rules"][0]
    assert judge["stops"] == sorted(judge["stops"]) and max(judge["stops"]) <= 0.5
    assert (
        judge["levels"] == {"strict": None, "certified": 0.04, "fast": 0.2} and "95% confidence" in judge["certificate"]
    )


def test_an_api_key_guards_the_api_and_not_the_health_check(pair, prompt):
    with serving(pair, settings={"api_key": "sesame"}) as port:
        status, body = post(port, {"prompt": prompt})
        assert (status, body["error"]["type"], body["error"]["code"]) == (401, "authentication_error", 401)
        for header in ("Bearer wrong", "sesame", "Basic sesame"):
            assert post(port, {"prompt": prompt}, headers={"Authorization": header})[0] == 401
        asked = {"prompt": prompt, "max_tokens": 2}
        assert post(port, asked, headers={"Authorization": "Bearer sesame"})[0] == 200
        assert get(port, "/health")[0] == 200 and get(port, "/v1/reprieve")[0] == 401


def test_other_hosts_are_refused_on_loopback(pair):
    """A page elsewhere cannot reach a local server by pointing its own name at 127.0.0.1."""
    with serving(pair, settings={"host": "localhost"}) as port:
        assert get(port, "/health")[0] == 200
        assert get(port, "/health", headers={"Host": "evil.example"})[0] == 400


LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


def raw(port, body):
    """Open a connection and send a request without reading the response."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def busy(port):
    state = json.loads(get(port, "/health")[1])
    return state["busy"], state["waiting"]


def test_clients_that_leave_the_queue_make_room_at_once(pair, prompt):
    with serving(pair, settings={"max_waiting": 2}) as port:
        running = raw(port, {"prompt": prompt, "n": 16, **LONG})
        wait_for(lambda: busy(port) == (True, 0))
        left = [raw(port, {"prompt": prompt, **LONG}) for _ in range(2)]
        wait_for(lambda: busy(port) == (True, 2))
        for connection in left:
            connection.close()
        wait_for(lambda: busy(port) == (True, 0))
        stays = raw(port, {"prompt": prompt, "max_tokens": 2})
        wait_for(lambda: busy(port)[1] == 1)
        running.close()
        assert b"200 OK" in stays.recv(4096)


def test_an_engine_error_gives_a_500_and_serving_continues(pair, prompt, monkeypatch):
    from reprieve.engine import SpeculativeDecoder

    with serving(pair) as port:
        monkeypatch.setattr(SpeculativeDecoder, "_round", lambda self, answer: 1 / 0)
        for stream in (False, True):
            status, body = post(port, {"prompt": prompt, "max_tokens": 4, "stream": stream})
            assert status == 500 and "log says more" in body["error"]["message"]
        monkeypatch.undo()
        assert post(port, {"prompt": prompt, "max_tokens": 4})[0] == 200


def test_a_full_queue_is_429_and_clients_that_leave_free_it(pair, prompt):
    with serving(pair, settings={"max_waiting": 2}) as port:
        asked = {"prompt": prompt, "n": 16, **LONG}
        held = [raw(port, asked)]
        wait_for(lambda: busy(port) == (True, 0))  # otherwise the third might arrive before the first leaves the queue
        held += [raw(port, {**asked, "stream": stream}) for stream in (True, False)]
        wait_for(lambda: busy(port) == (True, 2))
        status, body = post(port, {"prompt": prompt, "max_tokens": 2})
        assert status == 429 and "waiting" in body["error"]["message"]
        assert (body["error"]["type"], body["error"]["code"]) == ("rate_limit_error", 429)
        for connection in held:
            connection.close()
        wait_for(lambda: busy(port) == (False, 0), 120)
        assert post(port, {"prompt": prompt, "max_tokens": 2})[0] == 200


def test_shutdown_without_a_signal_finishes_the_running_request(pair, prompt):
    done = []
    with serving(pair) as port:
        asked = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        waiting = threading.Thread(target=lambda: done.append(post(port, asked)))
        waiting.start()
        wait_for(lambda: busy(port)[0])
    waiting.join(30)
    assert done[0][0] == 200 and done[0][1]["usage"]["completion_tokens"] == 100
    with pytest.raises(OSError):
        get(port, "/health")


@pytest.mark.slow
def test_a_terminated_server_ends_open_requests_with_an_error(tmp_path, prompt):
    command = [sys.executable, "-m", "reprieve.cli.main", "serve", "--port", "0", "--rule", "margin"]
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: process.poll() is not None or "Uvicorn running on" in log.read_text(), 90)
        port = int(re.search(r"http://127.0.0.1:(\d+)", log.read_text())[1])
        answers = {}

        def ask(stream):
            answers[stream] = post(port, {"prompt": prompt, "n": 16, "stream": stream, **LONG})

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        wait_for(lambda: busy(port) == (True, 1))
        process.terminate()
        for thread in threads:
            thread.join(30)
        process.wait(30)
    finally:
        process.kill()
    assert '"service_unavailable_error"' in answers[True][1] and "[DONE]" not in answers[True][1]
    assert answers[False][0] == 503 and "shutting down" in answers[False][1]["error"]["message"]
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_concurrent_clients_each_get_their_own_answer(port, pair, prompt):
    problems = load_task("arithmetic").problems("test", 6)
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    async def ask(problem):
        made = await client.completions.create(model=MODEL, prompt=problem.prompt, max_tokens=60, temperature=0)
        return made.choices[0].text

    async def everyone():
        return await asyncio.gather(*(ask(problem) for problem in problems))

    assert asyncio.run(everyone()) == [local(pair, JUDGE, p.prompt, max_new_tokens=60).text for p in problems]


def page_text():
    return resources.files("reprieve.playground").joinpath("playground.html").read_text()


def test_the_playground_page_loads_nothing_from_other_hosts():
    assert not re.search(r"https?://|@import|src=", page_text())


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: the playground is not driven")
@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_the_playground_is_driven_by_keyboard_and_pointer(port, size, tmp_path):
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        complaints = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("request", lambda request: "127.0.0.1" in request.url or complaints.append(request.url))
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#value")).to_have_text("threshold = 0.04")
        expect(page.locator("#certificate")).to_contain_text("With 95% confidence")
        page.locator("#dial").focus()
        for _ in range(5):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#value")).to_have_text("threshold = 0.2")
        expect(page.locator("#certificate")).to_contain_text("More lenient than its certificate")
        prompt = "Question: Jack has 48 shells. Sam has 3 fewer shells than Jack. Leo has 21 fewer shells than Sam. "
        page.locator("#prompt").fill(prompt + "How many shells do Leo and Sam have together?\nAnswer:")
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#verdict")).to_contain_text("tokens per second", timeout=60000)
        assert page.locator("#lossless .rescued").count() == 0
        rescued = page.locator("#relaxed .rescued")
        assert rescued.count() > 0
        rescued.first.hover()
        expect(page.locator("#tip")).to_contain_text("the target would have said")
        page.locator("#relaxed .t").first.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#tip")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.screenshot(path=tmp_path / f"playground-{size[0]}.png", full_page=True)
        page.locator("#rule").select_option("margin")
        expect(page.locator("#value")).to_have_text("delta = 2")
        page.locator("#temperature").fill("-1")
        page.locator("#tokens").fill("9")
        page.evaluate("document.querySelector('#form').noValidate = true")
        page.locator("#go").click()
        expect(page.locator("#error")).to_contain_text("temperature")
        assert [text for text in complaints if "400" not in text] == []
        browser.close()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"temperature": True}, "temperature"),
        ({"top_k": True}, "top_k"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens"),
        ({"vllm_xargs": {"reprieve_threshold": True}}, "reprieve_threshold"),
        ({"vllm_xargs": {f"x{i}": 1 for i in range(5_000)}}, "vllm_xargs must hold at most 64 fields"),
        ({f"x{i}": 1 for i in range(5_000)}, "the body must hold at most 64 fields"),
        ({"x" * 100_000: 1}, "xxx"),
        ({"messages": [{"role": "user", "content": [{}] * 5_000}]}, "messages"),
        ({"messages": [{}] * 5_000}, "messages"),
        ({"messages": [{}] * 330_000}, "at most 32768 lists, objects and fields, got 330"),
        ({"vllm_xargs": {f"x{i}": 1 for i in range(50_000)}}, "at most 32768 lists, objects and fields, got 50"),
        ({"vllm_xargs": {f"x{i}": 1 for i in range(70_000)}}, "at most 65536 texts, got 70"),
        ({"prompt": [1] * 200_000}, "at most 132768 values, got 200002"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_chat_bodies_get_a_short_400(port, body, named):
    given = {"messages": [{"role": "user", "content": "?"}], **body}
    compact = json.dumps(given, separators=(",", ":")).encode()
    status, reply = post(port, compact, "/v1/chat/completions")
    assert status == 400
    message = reply["error"]["message"]
    assert named in message and len(message) < 400


def test_infinity_in_the_extra_arguments_gets_a_400(port):
    body = b'{"messages": [{"role": "user", "content": "?"}], "vllm_xargs": {"reprieve_threshold": Infinity}}'
    assert post(port, body, "/v1/chat/completions")[0] == 400
