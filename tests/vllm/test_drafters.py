"""Drafters other than a draft model: untrained ones, whose drafts go through the rules, and our EAGLE-3 head."""

import pytest
from vllm import SamplingParams

from reprieve.drafters import DRAFTERS
from reprieve.drafters.length import FixedLength
from reprieve.engine import SamplingParams as LocalParams
from reprieve.engine import SpeculativeDecoder, load_pair
from reprieve.errors import ReprieveError
from reprieve.heads.files import find_head
from reprieve.rules import parse_rule
from tests.kit.pairs import ARITHMETIC
from tests.vllm import drafters
from tests.vllm.conftest import make_llm, rules_of, use_rule
from tests.vllm.drafters import K
from tests.vllm.runner import V2

JUDGE = "judge:path=reprieve/arithmetic-judge"
LENIENT = ("top_k:k=714", "margin:delta=99", "cascade:alpha=9", "fuzzy:threshold=1", f"{JUDGE},threshold=1")
STRICT = ("margin:delta=0", "fuzzy:threshold=0", f"{JUDGE},threshold=0")


def served(name, rule):
    """Return whether a drafter supports a rule, as in the guide's table."""
    if name == "mtp" and rule.startswith("judge"):
        return False  # MiMo's states
    return not (name == "dflash" and not V2 and rule.startswith(("fuzzy", "cascade")))


@pytest.fixture(scope="module", params=list(drafters.DRAFTERS))
def engine(request, tmp_path_factory):
    name = request.param
    speculative = drafters.DRAFTERS[name](tmp_path_factory.mktemp(name))
    first = "fuzzy:threshold=0.4" if served(name, "fuzzy") else "top_k:k=2"
    own = drafters.engine_of(name, speculative)
    return name, make_llm(first, engine=own, num_speculative_tokens=K, **speculative)


def generate(llm, problems, max_tokens=21):
    prompts = [problem.prompt for problem in problems[:3]]
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)


@pytest.mark.parametrize("spec", LENIENT)
def test_rules_that_accept_everything_keep_whole_blocks(engine, problems, spec):
    name, llm = engine
    if not served(name, spec):
        pytest.skip(f"refused: {spec} with {name}")
    rules = use_rule(llm, spec)
    for output in generate(llm, problems):
        summary = output.outputs[0].spec_decode_metrics.to_dict()
        assert summary["mean_acceptance_length"] == K + 1 and summary["num_rescued_tokens"] > 0
    assert rules.failures == 0


def test_strict_rules_leave_the_targets_answers(engine, problems):
    name, llm = engine
    num = 11 if V2 else 21  # each token is a round, because untrained drafts are nearly all wrong
    use_rule(llm, "lossless")
    plain = [output.outputs[0].token_ids for output in generate(llm, problems, num)]
    for spec in STRICT:
        if served(name, spec):
            use_rule(llm, spec)
            assert [output.outputs[0].token_ids for output in generate(llm, problems, num)] == plain
    assert rules_of(llm).failures == 0


def test_the_bundled_head_is_accepted_as_often_as_by_the_local_engine(problems):
    """Chains of six tokens: mean acceptance lengths of vLLM's drafting from the shipped file and of ours."""
    depth = 6
    folder = find_head("reprieve/arithmetic-eagle3")
    served = make_llm("lossless", method="eagle3", model=str(folder), num_speculative_tokens=depth)
    prompts = [problem.prompt for problem in problems[:8]]
    outputs = served.generate(prompts, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    pair = load_pair(ARITHMETIC.name, dtype="float32")
    drafter = DRAFTERS.make(f"eagle3:top_k=1,depth={depth}").build(pair, parse_rule("lossless"), FixedLength(16))
    decoder = SpeculativeDecoder(pair.cached_target(drafter.target_layers), drafter, pair.tokenizer)
    theirs = ours = 0.0
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        made = decoder.generate([*output.prompt_token_ids, ids[0]], LocalParams(max_new_tokens=199))
        assert made.token_ids == ids[1:]
        summary = output.outputs[0].spec_decode_metrics.to_dict()
        theirs += summary["mean_acceptance_length"] / len(outputs)
        ours += made.tokens_per_round / len(outputs)
    print(f"mean acceptance length: vLLM {theirs:.3f}, ours {ours:.3f}")
    assert theirs == pytest.approx(ours, rel=0.03) and ours > 3.5


def test_heads_are_refused_for_models_whose_states_precede_the_last_norm(tmp_path):
    speculative = drafters.mtp(tmp_path)
    with pytest.raises(ReprieveError, match="MiMoForCausalLM hands out its hidden states before the last norm"):
        make_llm(
            f"{JUDGE},threshold=0.1",
            engine=drafters.engine_of("mtp", speculative),
            num_speculative_tokens=K,
            **speculative,
        )
