"""Cases that a plausible plugin would get wrong."""

import pytest
import torch
from vllm import SamplingParams

from tests.vllm import cpu_kernels
from tests.vllm.conftest import make_llm, rules_of, texts, use_rule, worker_of


@pytest.fixture(scope="module")
def llm():
    return make_llm("top_k:k=714")


def generate(llm, prompts, **settings):
    settings = {"temperature": 0, "max_tokens": 60, **settings}
    return llm.generate(prompts, SamplingParams(**settings), use_tqdm=False)


def counted(llm):
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def test_accepting_everything_gives_whole_blocks(llm, problems):
    """k = V accepts all that the drafter proposes: K + 1 tokens per round."""
    before = counted(llm)
    generate(llm, [problem.prompt for problem in problems[:3]], ignore_eos=True, max_tokens=91)
    after = counted(llm)
    drafted = after["vllm:spec_decode_num_draft_tokens"] - before["vllm:spec_decode_num_draft_tokens"]
    assert after["vllm:spec_decode_num_accepted_tokens"] - before["vllm:spec_decode_num_accepted_tokens"] == drafted


def test_placeholder_drafts_are_left_to_vllm(llm, problems):
    """Near the context limit vLLM drafts token 0 for the whole batch; a rule with k = V would accept all of them."""
    ids = llm.get_tokenizer().encode(problems[0].prompt)
    long = {"prompt_token_ids": (ids * 40)[:480]}
    rounds = rules_of(llm).counter.num_rounds
    served = generate(llm, [long, problems[1].prompt], ignore_eos=True, max_tokens=31)
    assert rules_of(llm).counter.num_rounds > rounds
    for output in served:
        assert len(output.outputs[0].token_ids) == 31
        assert 0 not in output.outputs[0].token_ids


def test_masked_tokens_are_never_accepted(llm, problems):
    allowed = sorted(range(30, 300))
    output = generate(llm, [problems[0].prompt], allowed_token_ids=allowed, ignore_eos=True)[0].outputs[0]
    assert set(output.token_ids) <= set(allowed)
    eos = llm.get_tokenizer().eos_token_id
    assert eos not in generate(llm, [problems[0].prompt], min_tokens=50, max_tokens=50)[0].outputs[0].token_ids
    comma, dash = (llm.get_tokenizer().encode(text, add_special_tokens=False)[0] for text in (",", "-"))
    assert {comma, dash} <= set(generate(llm, [problems[0].prompt])[0].outputs[0].token_ids)
    output = generate(llm, [problems[0].prompt], bad_words=[",", "-"])[0].outputs[0]
    assert not {comma, dash} & set(output.token_ids)


def test_structured_outputs_follow_their_grammar(llm, problems):
    from vllm.sampling_params import StructuredOutputsParams

    made = generate(llm, [problems[0].prompt], structured_outputs=StructuredOutputsParams(regex=" [0-9]{5}"))
    assert made[0].outputs[0].text.strip().isdigit()


def test_padding_is_never_accepted_and_ends_a_block():
    from reprieve.rules import RiskBudget, parse_rule
    from reprieve.rules.batch import Batch, BatchRequest, decide

    for spec in ("top_k:k=9", "fly:theta=0,window=1", "random:rate=1"):
        rule = parse_rule(spec)
        row = BatchRequest(rule.name, rule, 4, True, True, RiskBudget.of(rule))
        scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
        batch = Batch(
            torch.tensor([3, -1, 4, 5]), [4], scores, scores, torch.ones(4, dtype=torch.bool), noise=torch.rand(4)
        )
        made = decide([row], batch)
        assert not made.accept[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20},
    ],
)
def test_processors_stay_vllms_own(llm, problems, settings):
    """A rule that accepts nothing runs all of the machinery and changes nothing."""
    cpu_kernels.mend()
    prompts = [problem.prompt for problem in problems[:4]]
    made = {}
    for spec in ("lossless", "margin:delta=0"):
        rules = use_rule(llm, spec)
        made[spec] = texts(generate(llm, prompts, **settings))
    use_rule(llm, "top_k:k=714")
    assert made["lossless"] == made["margin:delta=0"]
    assert rules.counter.num_rounds > 0 and rules.failures == 0


def test_prefix_caching_and_chunked_prefill_change_nothing(problems):
    prompts = ["".join(problem.prompt + " 5.\n\n" for problem in problems[:3]) + item.prompt for item in problems[3:9]]
    engines = [
        make_llm("margin:delta=4"),
        make_llm(
            "margin:delta=4", engine={"enable_prefix_caching": True, "max_num_batched_tokens": 48, "max_num_seqs": 4}
        ),
    ]
    plain, cached = ([texts(generate(llm, prompts)) for _ in range(2)] for llm in engines)
    assert plain[0] == plain[1] == cached[0] == cached[1]
    assert rules_of(engines[1]).counter.num_rescued > 0


def test_stops_inside_an_accepted_block_end_the_answer(llm, problems):
    prompts = [problem.prompt for problem in problems[:4]]
    for output in generate(llm, prompts, stop=["."], max_tokens=80):
        assert "." not in output.outputs[0].text


def test_logprobs_are_the_targets_own(llm, problems):
    """Raised logits are restored: a rescued token has the target's logprob, not 0."""
    output = generate(llm, [problems[0].prompt], logprobs=1, max_tokens=40)[0].outputs[0]
    chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert all(value <= 1e-6 for value in chosen) and min(chosen) < -0.7


def test_answers_do_not_depend_on_reordering_and_other_requests(llm, problems):
    """More requests than slots, with different lengths: each answer is the same as alone."""
    use_rule(llm, "margin:delta=4")
    prompts = [problem.prompt for problem in problems[:40]]
    lengths = [SamplingParams(temperature=0, max_tokens=20 + 7 * (place % 9)) for place in range(40)]
    together = texts(llm.generate(prompts, lengths, use_tqdm=False))
    alone = [texts(llm.generate([prompts[place]], [lengths[place]], use_tqdm=False))[0] for place in range(0, 40, 5)]
    use_rule(llm, "top_k:k=714")
    assert together[::5] == alone


def test_state_of_finished_requests_is_forgotten(llm, problems):
    rules = rules_of(llm)
    for _ in range(3):
        generate(llm, [problem.prompt for problem in problems[:16]], max_tokens=12)
    generate(llm, [problems[0].prompt], max_tokens=12)
    assert len(rules._known) < 40 and len(rules._drafts) < 40


def test_the_sampler_is_wrapped_and_no_round_stays_open(llm):
    from vllm.v1.sample import rejection_sampler as module

    from reprieve.vllm_plugin import v1 as sampler

    assert sampler.ROUND.get() is None
    assert module.rejection_sample.__wrapped__ is not None


@pytest.mark.parametrize(
    ("source", "speculative", "told"),
    [
        ("fuzzy:threshold=0.1", {"method": "ngram", "model": None, "prompt_lookup_max": 3}, "draft probabilities"),
        ("lossless:verification=block", {}, "cannot be offered"),
        ("margin:delta=2", {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}, "standard"),
        ("margin:delta=-2", {}, "delta"),
        ("margin:delta=2,span=thinking", {}, "span thinking: the tokenizer has no tokens"),
        ("/nowhere/policy.json", {}, "cannot be read"),
        ({"rule": "margin:delta=2", "leniency": 3}, {}, "takes rule"),
    ],
)
def test_unsupported_configurations_are_refused_at_startup(source, speculative, told):
    with pytest.raises(Exception, match=told):
        make_llm(source, **speculative)


def test_n_grams_serve_rules_that_need_no_draft(problems):
    llm = make_llm("margin:delta=3", method="ngram", model=None, prompt_lookup_max=3, prompt_lookup_min=1)
    generate(llm, [problem.prompt for problem in problems[:4]], max_tokens=120)
    status = rules_of(llm).status
    assert status["failures"] == 0 and status["num_rounds"] > 0 and status["num_rescued"] > 0
    assert worker_of(llm).reprieve_status() == status
