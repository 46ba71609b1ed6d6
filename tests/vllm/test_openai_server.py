"""vLLM's own OpenAI server with the plugin, as an operator starts it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest

from tests.kit.pairs import ARITHMETIC
from tests.vllm.certified import judge_path
from tests.vllm.conftest import K

with socket.socket() as _probe:
    _probe.bind(("127.0.0.1", 0))
    PORT = _probe.getsockname()[1]
MODEL = "pair"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    policy = tmp_path_factory.mktemp("policy") / "reprieve.json"
    rule = f"judge:path={judge_path()},threshold=0.04"
    policy.write_text(json.dumps({"rule": rule, "fast": 0.2, "max_threshold": 0.3, "default": "certified"}))
    log = policy.with_name("log.txt")
    spec = {"method": "draft_model", "model": str(ARITHMETIC.role_folder("draft")), "num_speculative_tokens": K}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(ARITHMETIC.role_folder("target")),
        "--served-model-name", MODEL, "--speculative-config", json.dumps(spec), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--port", str(PORT), "--host", "127.0.0.1",
        "--no-enable-prefix-caching",
        "--additional-config", json.dumps({"reprieve": str(policy)}),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("TORCH_COMPILE_DISABLE")  # as on a real server
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            if get("/health")[0] == 200:
                break
            time.sleep(0.5)
        else:
            raise AssertionError(f"not up in time: {log.read_text()[-3000:]}")
        yield log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def get(path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0)


def ask(client, problem, *, max_tokens=120, **xargs):
    return client.completions.create(
        model=MODEL, prompt=problem.prompt, max_tokens=max_tokens, temperature=0,
        extra_body={"vllm_xargs": xargs or None},
    )  # fmt: skip


def test_the_log_names_the_active_rule_and_its_certificate(server):
    told = [line for line in server.read_text().splitlines() if "eprieve" in line]
    [line] = [line for line in told if "Reprieve is active in 1 worker" in line]
    assert "threshold=0.04" in line and "With 95% confidence" in line and "up to threshold=0.3" in line


def test_requests_choose_their_leniency(client, problems):
    strict = ask(client, problems[0], reprieve_leniency="strict")
    fast = ask(client, problems[0], reprieve_leniency="fast")
    assert strict.choices[0].text != fast.choices[0].text
    told = fast.model_extra["metrics"]["speculative_decoding"]
    assert told["num_rescued_tokens"] > 0 and told["reprieve_rule"].endswith("@0.2")
    assert (told["reprieve_threshold"], told["reprieve_certified"]) == (0.2, False)
    told = strict.model_extra["metrics"]["speculative_decoding"]
    assert (told["reprieve_rule"], told["reprieve_threshold"], told["num_rescued_tokens"]) == ("lossless", None, 0)
    assert ask(client, problems[0]).choices[0].text == ask(client, problems[0], reprieve_threshold=0.04).choices[0].text


def test_streams_choose_their_leniency_too(client, problems):
    parts = client.completions.create(
        model=MODEL, prompt=problems[0].prompt, max_tokens=120, temperature=0, stream=True,
        extra_body={"vllm_xargs": {"reprieve_leniency": "fast"}},
    )  # fmt: skip
    fast = ask(client, problems[0], reprieve_leniency="fast").choices[0].text
    assert "".join(part.choices[0].text for part in parts) == fast


@pytest.mark.parametrize(
    ("xargs", "field"),
    [
        ({"reprieve_threshold": 0.5}, "reprieve_threshold"),
        ({"reprieve_threshold": "a lot"}, "reprieve_threshold"),
        ({"reprieve_leniency": "wild"}, "reprieve_leniency"),
        ({"reprieve_rule": "none"}, "reprieve_rule"),
        ({"reprieve_require": "lossless"}, "reprieve_require"),
        ({"reprieve_require": "certified", "reprieve_leniency": "fast"}, "reprieve_require"),
        ({"reprieve_treshold": 0.1}, "reprieve_treshold"),
    ],
)
def test_bad_values_get_a_400_that_names_the_field(client, problems, xargs, field):
    with pytest.raises(openai.BadRequestError, match=field) as refused:
        ask(client, problems[0], **xargs)
    assert refused.value.status_code == 400 and refused.value.param == field
    assert ask(client, problems[0], max_tokens=4).choices[0].text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_field_outside_of_vllm_xargs_is_a_400_that_says_where_it_belongs(client, path):
    prompt = {"prompt": "1"} if path == "completions" else {"messages": [{"role": "user", "content": "1"}]}
    body = {"model": MODEL, **prompt, "max_tokens": 1, "reprieve_leniency": "strict"}
    status, answer = post(json.dumps(body), path)
    assert status == 400, answer
    error = json.loads(answer)["error"]
    assert error["param"] == "reprieve_leniency" and "must be given in vllm_xargs" in error["message"]


def test_a_request_may_require_its_guarantee(client, problems):
    assert ask(client, problems[0], max_tokens=4, reprieve_require="certified").choices[0].text
    assert (
        ask(client, problems[0], max_tokens=4, reprieve_require="lossless", reprieve_leniency="strict").choices[0].text
    )


HOSTILE = {
    "not a number": '{"reprieve_threshold": NaN}',
    "infinite": '{"reprieve_threshold": 1e999}',
    "below nothing": '{"reprieve_threshold": -1e-300}',
    "6,000 digits": '{"reprieve_threshold": ' + "9" * 6000 + "}",
    "a truth": '{"reprieve_threshold": true}',
    "a list": '{"reprieve_threshold": [0.1]}',
    "an object": '{"reprieve_threshold": {"a": 0.1}}',
    "a long text": '{"reprieve_threshold": "' + "9" * 100_000 + '"}',
    "a deep list": '{"reprieve_threshold": ' + "[" * 500 + "]" * 500 + "}",
    "a level as a list": '{"reprieve_leniency": ["fast"]}',
    "a level as a number": '{"reprieve_leniency": 2}',
    "a long level": '{"reprieve_leniency": "' + "x" * 100_000 + '"}',
    "a level by attribute": '{"reprieve_leniency": "__class__"}',
    "control characters": '{"reprieve_leniency": "fast\\u0000\\u001b[2J"}',
    "a lone surrogate": '{"reprieve_leniency": "\\ud800"}',
    "a rule with a path": '{"reprieve_rule": "judge:path=/etc/passwd"}',
    "a rule from elsewhere": '{"reprieve_rule": "../../etc/passwd"}',
    "a rule as an object": '{"reprieve_rule": {"name": "judge"}}',
    "two at once": '{"reprieve_threshold": 0.1, "reprieve_leniency": "fast"}',
    "a name from inside": '{"reprieve___init__": 1}',
    "a long name": '{"reprieve_' + "x" * 100_000 + '": 1}',
    "a name in other letters": '{"reprieve_thr\u0435shold": 0.1}',
    "many names": "{" + ", ".join(f'"reprieve_{number}": 1' for number in range(5000)) + "}",
}


def post(body, path="completions"):
    """Send a raw body; return the status and the answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/{path}", body.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_fields_get_a_short_400(client, name):
    status, answer = post(
        f'{{"model": "{MODEL}", "prompt": "Question: 1+1?", "max_tokens": 4, "vllm_xargs": {HOSTILE[name]}}}'
    )
    assert status == 400, (status, answer[:300])
    assert json.loads(answer) and b"Traceback" not in answer and len(answer) < 4000
    assert get("/health")[0] == 200


def test_hostile_fields_do_not_change_later_answers(client, problems):
    before = ask(client, problems[0], reprieve_leniency="fast").choices[0].text
    for fields in HOSTILE.values():
        post(f'{{"model": "{MODEL}", "prompt": "Question: 1+1?", "max_tokens": 4, "vllm_xargs": {fields}}}')
    assert ask(client, problems[0], reprieve_leniency="fast").choices[0].text == before


def test_counters_are_on_the_metrics_page(client, problems):
    ask(client, problems[0], reprieve_leniency="fast")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        page = get("/metrics")[1]
        counters = [line for line in page.splitlines() if line.startswith("vllm:reprieve_rescued_tokens_total")]
        lines = [line for line in counters if 'rule="judge@0.2"' in line]
        if lines and float(lines[0].split()[-1]) > 0:
            break
        time.sleep(0.2)
    assert len(lines) == 1 and float(lines[0].split()[-1]) > 0
    assert 'outcome="rescued",position="0"' in page.replace(", ", ",")
    assert "vllm:reprieve_relaxed_rounds_total" in page and "vllm:spec_decode_num_drafts_total" in page


def test_the_health_check_passes(client):
    assert get("/health")[0] == 200


def test_a_worker_without_the_plugin_stops_the_start(tmp_path):
    """If the plugin did not load in a worker, startup fails instead of serving losslessly."""
    code = (
        "import os; os.environ['VLLM_PLUGINS'] = ''\n"
        "from tests.vllm.conftest import make_llm\n"
        "from reprieve.vllm_plugin import startup\n"
        "from vllm.v1.worker.worker_base import WorkerBase\n"
        "startup.register()\n"
        "del WorkerBase.reprieve_install\n"
        "make_llm('margin:delta=2')\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert made.returncode != 0 and "did not load in a worker" in made.stderr


def test_without_a_configuration_nothing_is_patched():
    code = (
        "from tests.vllm.conftest import make_llm, worker_of\n"
        "from vllm.v1.sample import rejection_sampler as module\n"
        "from vllm.v1.spec_decode.metrics import SpecDecodingStats\n"
        "llm = make_llm(None)\n"
        "assert not hasattr(module.rejection_sample, '__wrapped__')\n"
        "assert not hasattr(SpecDecodingStats, 'reprieve')\n"
        "assert not hasattr(worker_of(llm).model_runner, 'reprieve')\n"
        "assert 'sample_tokens' not in vars(worker_of(llm).model_runner)\n"
        "print('untouched')\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert "untouched" in made.stdout, made.stderr[-2000:]
