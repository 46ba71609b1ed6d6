"""A third-party rule, found by its entry point, inside vLLM."""

import pytest
from vllm import SamplingParams

from reprieve.rules import RULES
from tests.kit.plugin import install_plugin
from tests.vllm.conftest import local_decoder, make_llm, texts


@pytest.fixture(scope="module")
def _installed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(install_plugin(tmp_path_factory.mktemp("site"))))
        RULES.__dict__.pop("_plugins", None)
        yield


@pytest.mark.usefixtures("_installed")
def test_a_third_party_rule_decides_as_in_the_local_engine(problems):
    spec = "surprisal:bits=3"
    llm = make_llm(spec)
    prompts = [problem.prompt for problem in problems[:10]]
    params = SamplingParams(temperature=0, max_tokens=80)
    decoder = local_decoder(spec)
    from reprieve import SamplingParams as Params

    answers = [decoder.generate(prompt, Params(max_new_tokens=80)) for prompt in prompts]
    assert sum(answer.num_rescued for answer in answers) > 0
    assert texts(llm.generate(prompts, params)) == [answer.text for answer in answers]
