"""Off means off: with the plugin configured, requests that switch it off get the same bytes as from vLLM without it.

Greedy requests on both model runners, sampled ones on V2.
"""

import json
import os
import subprocess
import sys

from vllm import SamplingParams

from tests.vllm import cpu_kernels
from tests.vllm.runner import V2

# Triton's interpreter is slow. On V2 the second batch is sampled.
NUM_PROMPTS, MAX_TOKENS, BATCH = (8, 8, 4) if V2 else (24, 16, 8)
RULE = "top_k:k=6"


def answers(llm, **asked):
    """Token ids and log-probabilities of all prompts."""
    from reprieve.tasks import load_task

    prompts = [problem.prompt for problem in load_task("arithmetic").problems("test", NUM_PROMPTS)]
    made = []
    for start in range(0, len(prompts), BATCH):
        # Sampled answers of V1's CPU build differ from process to process even without the plugin (vLLM issue 55005).
        temperature = 0.8 * (start // BATCH % 2) if V2 else 0.0
        made += llm.generate(
            prompts[start : start + BATCH],
            [
                SamplingParams(
                    temperature=temperature, seed=seed, logprobs=1, max_tokens=MAX_TOKENS, extra_args=asked or None
                )
                for seed in range(BATCH)
            ][: len(prompts) - start],
            use_tqdm=False,
        )
    return [
        (
            list(output.token_ids),
            [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)],
        )
        for output in (one.outputs[0] for one in made)
    ]


def main(source):
    from tests.vllm.conftest import make_llm, rules_of

    (cpu_kernels.mend_interpreter if V2 else cpu_kernels.mend)()
    llm = make_llm(source or None)
    if not source:
        print(json.dumps({"off": answers(llm)}))
        return
    made = {
        "off": answers(llm, reprieve_rule="off"),
        "strict": answers(llm, reprieve_leniency="strict"),
        "on": answers(llm),
    }
    print(json.dumps({**made, "failures": rules_of(llm).failures}))


def made_by(source, *, plugins):
    """Answers of an engine in a separate process, which loads none of our code if `plugins` is false."""
    environment = {**os.environ, **({} if plugins else {"VLLM_PLUGINS": ""})}
    command = [sys.executable, "-c", f"from tests.vllm.test_off import main; main({source!r})"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_off_means_the_same_bytes_as_without_the_plugin():
    without = made_by("", plugins=False)
    with_it = made_by(RULE, plugins=True)
    assert len(without["off"]) == NUM_PROMPTS
    assert with_it["off"] == without["off"]
    assert with_it["strict"] == without["off"]
    assert with_it["on"] != without["off"] and with_it["failures"] == 0
