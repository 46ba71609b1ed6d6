"""The plugin and the local engine decide alike: same pair, same K, same rule, same answers."""

import pytest
import torch
from vllm import SamplingParams

from reprieve.engine import SamplingParams as LocalParams
from reprieve.engine import load_pair
from tests.kit.pairs import ARITHMETIC
from tests.vllm.conftest import V2, K, local_decoder, make_llm, rules_of, use_rule

NUM_PROBLEMS = 2
MAX_TOKENS = 32 if V2 else 200
RULES = [
    "lossless",
    "top_k:k=4",
    "typical:epsilon=0.02",
    "margin:delta=3",
    "margin:delta=0.6,k=10,scale=prob",
    "ratio:ratio=0.1",
    "lenience:lenience=0.05",
    "fuzzy:threshold=0.2",
    "fuzzy:threshold=0.4,divergence=tv",
    "fly:theta=0.1,window=2",
    "asd:regret=4,budget=8",
    "cascade:kind=opt,alpha=0.5",
    "cascade:kind=tok,alpha=0.9",
    "math_symbols:k=16",
    "judge:path=reprieve/arithmetic-judge,threshold=0.1",
    "pivot:path=reprieve/arithmetic-pivot,threshold=0.5",
    "judge:path=reprieve/arithmetic-judge,threshold=0.2&floor:min_prob=0.02",
    "lts:theta=0.9",
    'top_k:k=8,start=".",end=","',
]


@pytest.fixture(scope="module")
def llm():
    return make_llm("fuzzy:threshold=0.4")


def local_answers(spec, served):
    """Answers of the local engine from where vLLM starts to draft: after one token from the target."""
    decoder = local_decoder(spec)
    starts = [[*output.prompt_token_ids, output.outputs[0].token_ids[0]] for output in served]
    params = LocalParams(max_new_tokens=MAX_TOKENS + K)  # so that no block is shortened by the end of the answer
    return [decoder.generate(start, params) for start in starts]


@pytest.mark.parametrize("spec", RULES)
def test_greedy_answers_equal_the_local_engines(llm, problems, spec):
    rules = use_rule(llm, spec)
    prompts = [problem.prompt for problem in problems[:NUM_PROBLEMS]]
    served = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    local = local_answers(spec, served)
    for output, made in zip(served, local, strict=True):
        assert list(output.outputs[0].token_ids[1:]) == made.token_ids[: MAX_TOKENS - 1]
    if spec == "lossless":
        assert rules.counter.num_rescued == 0
    else:
        assert rules.counter.num_rescued > 0 and sum(made.num_rescued for made in local) > 0


def test_vllm_may_choose_k_by_the_number_of_running_requests(problems):
    llm = make_llm("margin:delta=3", num_speculative_tokens_per_batch_size=[(1, 1, K), (2, 16, 3)])
    pair = load_pair(ARITHMETIC.name)
    prompts = [problem.prompt for problem in problems[: 2 if V2 else 4]]
    per_round = []
    for batch in (prompts[:1], prompts):
        before = _drafted(llm)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        for output in llm.generate(batch, params, use_tqdm=False):
            token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            with torch.inference_mode():
                logits = pair.target(torch.tensor([token_ids])).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
            answer = torch.tensor(output.outputs[0].token_ids)
            gaps = logits.max(-1).values - logits.gather(-1, answer[:, None])[:, 0]
            assert gaps.max() <= 3 + 1e-3, "every token is the target's own or within the rule's margin"
        rounds, tokens = (after - earlier for after, earlier in zip(_drafted(llm), before, strict=True))
        per_round.append(tokens / rounds)
    assert per_round[0] > 6 > 4 > per_round[1], "K = 8 alone, 3 together"
    assert rules_of(llm).counter.num_rescued > 0


def _drafted(llm):
    """Rounds with a block, and drafted tokens, so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_draft_tokens"]
