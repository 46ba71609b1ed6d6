"""Restricted rules: lenient only between the model's thinking markers, or strict at the start."""

import pytest
from vllm import SamplingParams

from tests.kit.chats import save_chat_pair
from tests.vllm import cpu_kernels
from tests.vllm.conftest import make_llm, rules_of, texts
from tests.vllm.runner import V2

NUM = 24
QUESTIONS = ["<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>assistant\nHi"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    if V2:
        cpu_kernels.mend_interpreter()
    return save_chat_pair(tmp_path_factory.mktemp("chats"), head_dim=64)


def engine(pair, rule):
    return make_llm(rule, model=pair[1], num_speculative_tokens=4, engine={"model": pair[0]})


def generate(llm, prompts, **asked):
    params = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True, extra_args=asked or None)
    return llm.generate(prompts, params, use_tqdm=False)


def rescued(outputs):
    return [output.outputs[0].spec_decode_metrics.to_dict()["num_rescued_tokens"] for output in outputs]


def test_only_thinking_is_lenient(pair):
    llm = engine(pair, "top_k:k=300,span=thinking")
    assert rules_of(llm).menu.rules[0].spec == "top_k:k=300,span=thinking"
    answers = QUESTIONS + [text + "<think>x</think>" for text in QUESTIONS]
    thoughts = [text + "<think>" for text in QUESTIONS]
    together = generate(llm, answers + thoughts)
    strict = generate(llm, answers + thoughts, reprieve_leniency="strict")
    num = len(answers)
    for output, other in zip(together[:num], strict[:num], strict=True):
        if "<think>" not in output.outputs[0].text:  # nothing opened a span
            assert list(output.outputs[0].token_ids) == list(other.outputs[0].token_ids)
    assert sum(rescued(together[num:])) > 0 and rescued(strict) == [0] * len(strict)
    assert texts(together[num:]) != texts(strict[num:]) and rules_of(llm).failures == 0


def test_a_strict_start_is_lossless_and_the_rest_is_not(pair):
    llm = engine(pair, "top_k:k=300,strict_first=9")
    restricted, strict = generate(llm, QUESTIONS), generate(llm, QUESTIONS, reprieve_leniency="strict")
    for output, other in zip(restricted, strict, strict=True):
        assert list(output.outputs[0].token_ids[:9]) == list(other.outputs[0].token_ids[:9])
    assert texts(restricted) != texts(strict) and sum(rescued(restricted)) > 0 and rules_of(llm).failures == 0
    assert restricted[0].outputs[0].spec_decode_metrics.to_dict()["reprieve_certified"] is False
