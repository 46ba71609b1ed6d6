"""From messages to tokens: the system prompt and thinking, set by the server or by the request."""

import copy

import pytest
from transformers import AutoTokenizer

from reprieve.errors import SpecError
from reprieve.playground.protocol import Prompts
from reprieve.playground.settings import PlaygroundSettings
from reprieve.policies.policy import RequestError
from tests.kit.chats import save_chat_pair


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    target, _ = save_chat_pair(tmp_path_factory.mktemp("pair"))
    return AutoTokenizer.from_pretrained(target)


def prompts(tokenizer, **settings):
    asked = PlaygroundSettings(**settings).prompt_settings
    return Prompts(tokenizer, max_positions=4096, vocab_size=len(tokenizer), wrap=None, settings=asked)


def read(tokenizer, messages, thinking=None, **settings):
    return tokenizer.decode(prompts(tokenizer, **settings).chat(messages, thinking))


def test_a_chat_gets_the_servers_system_prompt_unless_it_has_one(tokenizer):
    ours = read(tokenizer, [("user", "Hi")], system_prompt="Be brief.")
    assert "Be brief." in ours and "Hi" in ours
    assert "Be brief." not in read(tokenizer, [("system", "Be long."), ("user", "Hi")], system_prompt="Be brief.")


def test_a_requests_thinking_overrides_the_servers(tokenizer):
    off = "<think>\n\n</think>"
    texts = {
        (server, request): off in tokenizer.decode(prompts(tokenizer, thinking=server).chat([("user", "Hi")], request))
        for server in (None, "on", "off")
        for request in (None, True, False)
    }
    assert texts == {
        (server, request): (not request if request is not None else server == "off") for server, request in texts
    }


def test_settings_that_the_chat_template_rejects_are_refused(tokenizer):
    with pytest.raises(SpecError, match="thinking must be one of on, off, got 'maybe'"):
        PlaygroundSettings(thinking="maybe")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no roles here') }}"
    with pytest.raises(SpecError, match="no roles here"):
        prompts(tokenizer, thinking="on")
    with pytest.raises(RequestError, match=r"chat template refuses them: .*no roles here"):
        prompts(tokenizer).chat([("user", "Hi")])
    tokenizer.chat_template = None
    with pytest.raises(SpecError, match="needs a tokenizer with a chat template"):
        prompts(tokenizer, thinking="on")
