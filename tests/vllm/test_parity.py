"""The plugin and the local engine decide alike: same pair, same K, same rule, same answers."""

import pytest
from vllm import SamplingParams

from reprieve.engine import SamplingParams as LocalParams
from tests.vllm.conftest import V2, K, local_decoder, make_llm, use_rule

NUM_PROBLEMS = 2 if V2 else 6
MAX_TOKENS = 48 if V2 else 200
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
        assert rules.num_rescued == 0
    else:
        assert rules.num_rescued > 0 and sum(made.num_rescued for made in local) > 0
