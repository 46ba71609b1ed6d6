"""Whole engines on the V2 model runner, under Triton's interpreter: with few tokens per case."""

import subprocess
import sys

import pytest
import torch
from vllm import SamplingParams

from tests.vllm import cpu_kernels
from tests.vllm.conftest import local_decoder, make_llm, rules_of, texts, use_rule, worker_of
from tests.vllm.runner import V2

pytestmark = pytest.mark.skipif(not V2, reason="of the V2 runner: RUNNER=v2")

JUDGE = "judge:path=reprieve/arithmetic-judge,threshold=0.1"
SEVERAL = {"rules": ["margin:delta=3", "top_k:k=4", JUDGE, "fuzzy:threshold=0.4", "asd:regret=4,budget=8"]}


@pytest.fixture(scope="module")
def llm():
    cpu_kernels.mend_interpreter()
    return make_llm(SEVERAL)


@pytest.fixture
def everything(llm):
    """A rule that accepts every possible token."""
    before = rules_of(llm)
    yield use_rule(llm, "top_k:k=714")
    worker_of(llm).model_runner.reprieve.rules = before


def generate(llm, prompts, params=None, **settings):
    params = params or SamplingParams(**{"temperature": 0, "max_tokens": 32, **settings})
    return llm.generate(prompts, params, use_tqdm=False)


def prompts_of(problems, num):
    return [problem.prompt for problem in problems[:num]]


def test_eight_requests_of_different_rules_each_equal_their_pure_run(llm, problems):
    wishes = [
        {}, {"reprieve_rule": "off"}, {"reprieve_rule": "top_k"}, {"reprieve_threshold": 0.5},
        {"reprieve_rule": "judge", "reprieve_threshold": 0.4}, {"reprieve_rule": "fuzzy"},
        {"reprieve_rule": "asd"}, {"reprieve_rule": "top_k", "reprieve_threshold": 20},
    ]  # fmt: skip
    prompt = problems[1].prompt
    params = [SamplingParams(temperature=0, max_tokens=20, extra_args=asked or None) for asked in wishes]
    mixed = generate(llm, [prompt] * 8, params)
    for place in range(8):
        assert texts(generate(llm, [prompt], params[place])) == texts(mixed[place : place + 1]), wishes[place]
    assert len(set(texts(mixed))) > 3 and rules_of(llm).failures == 0


def test_strict_requests_get_the_local_engines_lossless_answer(llm, problems):
    served = generate(llm, prompts_of(problems, 2), extra_args={"reprieve_rule": "off"})
    from reprieve.engine import SamplingParams as Params

    decoder = local_decoder("lossless")
    for output, problem in zip(served, problems[:2], strict=True):
        made = decoder.generate(problem.prompt, Params(max_new_tokens=32))
        assert list(output.outputs[0].token_ids) == made.token_ids


def test_a_response_and_the_counters_say_what_the_rule_did(llm, problems):
    before = rules_of(llm).counter.num_rescued
    output = generate(llm, prompts_of(problems, 1), extra_args={"reprieve_rule": "top_k"})[0].outputs[0]
    summary = output.spec_decode_metrics.to_dict()
    assert summary["reprieve_rule"] == "top_k@4"
    assert summary["num_rescued_tokens"] == rules_of(llm).counter.num_rescued - before > 0
    places = {
        (metric.labels["outcome"], metric.labels["position"]): metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:reprieve_tokens_per_position" and metric.labels["rule"] == "top_k@4"
    }
    assert places["drafted", "0"] >= places.get(("matched", "0"), 0) + places.get(("rescued", "0"), 0) > 0


def test_forbidden_tokens_and_stop_texts_never_appear(everything, llm, problems):
    from vllm.sampling_params import StructuredOutputsParams

    prompt = problems[0].prompt
    allowed = sorted(range(30, 300))
    output = generate(llm, [prompt], allowed_token_ids=allowed, ignore_eos=True, max_tokens=16)[0].outputs[0]
    assert set(output.token_ids) <= set(allowed)
    eos = llm.get_tokenizer().eos_token_id
    assert eos not in generate(llm, [prompt], min_tokens=30, max_tokens=30)[0].outputs[0].token_ids
    comma = llm.get_tokenizer().encode(",", add_special_tokens=False)[0]
    assert comma in generate(llm, [prompt])[0].outputs[0].token_ids
    assert comma not in generate(llm, [prompt], bad_words=[","])[0].outputs[0].token_ids
    made = generate(llm, [prompt], structured_outputs=StructuredOutputsParams(regex=" [0-9]{5}"))
    assert made[0].outputs[0].text.strip().isdigit()
    assert "." not in generate(llm, [prompt], stop=["."])[0].outputs[0].text


def test_logprobs_are_the_targets_own(everything, llm, problems):
    output = generate(llm, prompts_of(problems, 1), logprobs=1, max_tokens=24)[0].outputs[0]
    chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert all(value <= 1e-6 for value in chosen) and min(chosen) < -0.7


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.4}, {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20}]
)
def test_a_rule_that_accepts_nothing_changes_nothing(llm, problems, settings):
    """Penalties, temperature, top-k and top-p, and vLLM's own draws."""
    made = {}
    before = rules_of(llm)
    for spec in ("lossless", "ratio:ratio=1"):
        rules = use_rule(llm, spec)
        made[spec] = texts(generate(llm, prompts_of(problems, 2), max_tokens=20, **settings))
    worker_of(llm).model_runner.reprieve.rules = before
    assert made["lossless"] == made["ratio:ratio=1"]
    assert rules.counter.num_rounds > 0 and rules.failures == 0


def test_seeded_draws_do_not_depend_on_other_requests(llm, problems):
    params = [
        SamplingParams(temperature=0.9 * (place % 2), top_p=0.95, seed=place, max_tokens=20) for place in range(4)
    ]
    mixed = texts(generate(llm, prompts_of(problems, 4), params))
    for place in (1, 2):
        assert mixed[place] == texts(generate(llm, [problems[place].prompt], params[place]))[0]


def test_a_random_rules_draws_do_not_depend_on_other_requests(llm, problems, everything):
    use_rule(llm, "random:rate=0.5")
    params = [SamplingParams(temperature=0, seed=place % 2, max_tokens=20) for place in range(4)]
    prompts = [problems[1].prompt] * 4
    mixed = texts(generate(llm, prompts, params))
    assert mixed[:2] == mixed[2:] and mixed[0] != mixed[1]
    assert texts(generate(llm, prompts[:1], params[1])) == mixed[1:2]


def test_prefix_caching_chunked_prefill_and_preemption_change_nothing(llm, problems):
    """Chunked prompts, cached prefixes, and so few blocks that requests are preempted and resumed."""
    prompts = prompts_of(problems[2:], 4)
    plain = texts(generate(llm, prompts))
    crowded = make_llm(
        SEVERAL,
        engine={
            "enable_prefix_caching": True,
            "max_model_len": 128,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 4,
            "block_size": 32,
            "num_gpu_blocks_override": 8,
        },
    )
    for _ in range(2):
        assert texts(generate(crowded, prompts)) == plain
    assert rules_of(crowded).counter.num_rescued > 0 and rules_of(crowded).failures == 0
    preempted = next(metric.value for metric in crowded.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preempted > 0


def test_spans_work_under_asynchronous_scheduling(problems, monkeypatch):
    """On a CPU, vLLM silently disables asynchronous scheduling; this test keeps it on."""
    from vllm.platforms.cpu import CpuPlatform

    adapt = CpuPlatform.check_and_update_config

    def adapt_but_that(vllm_config):
        asked = vllm_config.scheduler_config.async_scheduling
        adapt(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(adapt_but_that))
    spec = 'top_k:k=8,start=".",end=","'
    llm = make_llm(spec, engine={"async_scheduling": True, "max_num_seqs": 1})
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    from reprieve.engine import SamplingParams as Params

    decoder = local_decoder(spec)
    for output in generate(llm, prompts_of(problems, 2)):
        start = [*output.prompt_token_ids, output.outputs[0].token_ids[0]]
        made = decoder.generate(start, Params(max_new_tokens=48))
        assert list(output.outputs[0].token_ids[1:]) == made.token_ids[:31]
    assert rules_of(llm).counter.num_rescued > 0 and rules_of(llm).failures == 0


def test_n_grams_serve_rules_that_need_no_draft(problems):
    llm = make_llm("margin:delta=3", method="ngram_gpu", model=None, prompt_lookup_max=3, prompt_lookup_min=1)
    generate(llm, prompts_of(problems, 2), max_tokens=60)
    status = rules_of(llm).status
    assert status["failures"] == 0 and status["num_rounds"] > 0 and status["num_rescued"] > 0


@pytest.mark.parametrize("broken", ["the processor is lost", "the edit is lost", "everybody is edited", "other draws"])
def test_the_self_test_fails_where_a_hook_is_broken(llm, broken, monkeypatch):
    from reprieve.errors import ReprieveError
    from reprieve.vllm_plugin import v2 as v2_runner
    from reprieve.vllm_plugin import v2_processor
    from reprieve.vllm_plugin.probing import run_selftest
    from reprieve.vllm_plugin.v2_processor import uniforms_of

    hooks = worker_of(llm).model_runner.reprieve
    run_selftest(hooks)
    if broken == "the processor is lost":
        processors = worker_of(llm).model_runner.sampler.logits_processors
        monkeypatch.setattr(worker_of(llm).model_runner.sampler, "logits_processors", processors[:-1])
    elif broken == "the edit is lost":
        monkeypatch.setattr(v2_processor, "_lift", lambda *args: None)
    elif broken == "other draws":
        monkeypatch.setattr(v2_runner, "uniforms_of", lambda *rows: 1 - uniforms_of(*rows))
    else:
        two = torch.tensor([2])
        monkeypatch.setattr(type(hooks), "apply", lambda self, logits, ctx: logits.index_fill_(1, two, 9.0))
    with pytest.raises(ReprieveError, match=r"self-test failed in worker 0: (a .* was (rejected|changed)|.* random)"):
        run_selftest(hooks)


def test_without_a_configuration_nothing_is_patched():
    code = (
        "from tests.vllm.conftest import make_llm, worker_of\n"
        "from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module\n"
        "llm = make_llm(None)\n"
        "runner = worker_of(llm).model_runner\n"
        "assert not hasattr(module.rejection_sample, '__wrapped__')\n"
        "assert not {'sample_tokens', 'finish_requests', 'load_model', 'reprieve'} & vars(runner).keys()\n"
        "assert all(type(item).__module__.startswith('vllm') for item in runner.sampler.logits_processors)\n"
        "print('untouched')\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert "untouched" in made.stdout, made.stderr[-2000:]
