"""Configurations of the plugin: names, markers of the model, and what is refused."""

import pytest

from reprieve.errors import SpecError
from reprieve.vllm_plugin import configuration
from reprieve.vllm_plugin.configuration import load_menu, require_markers, source_of
from tests.kit.chats import byte_tokenizer
from tests.rules.test_spans import Vocabulary


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(configuration.VARIABLE, raising=False)


def test_requests_name_a_restricted_rule_by_its_plain_name():
    menu = load_menu(source_of({"reprieve": "margin:delta=3,span=thinking,strict_first=4"}), "somebody/model")
    assert list(menu.policies) == ["margin"] and menu.choose({"reprieve_rule": "margin"}).name == "margin"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"reprive": "margin:delta=3"}, "'reprive' is not known, did you mean 'reprieve'"),
        ({"reprieve": "margin:delta=3", "strict_only": True}, "strict_only must be given inside reprieve"),
        ({"reprieve": "margin:delta=3", "strict_onyl": True}, "strict_only must be given inside reprieve"),
        ({"reprieve": "margin:delta=3", "span": "thinking"}, "span must be given inside reprieve"),
        ({"reprieve": "margin:delta=3", "strict_first": 16}, "strict_first must be given inside reprieve"),
        ({"reprieve": {"rule": "margin:delta=3", "strict_onyl": True}}, "got strict_onyl"),
        ({"reprieve": {"rule": "margin:delta=3", "strict_only": "yes"}}, "strict_only must be true or false"),
        ({"reprieve": {"rule": "margin:delta=3", "strict_structured_outputs": 1}}, "must be true or false"),
    ],
)
def test_invalid_configurations_are_refused(config, said):
    with pytest.raises(SpecError, match=said):
        load_menu(source_of(config), "somebody/model")


def test_other_plugins_keys_are_ignored():
    assert source_of({"reprieve": "margin:delta=3", "another_plugins": 1}) == "margin:delta=3"


def test_a_model_without_markers_is_refused_by_name_and_one_with_them_is_not():
    menu = load_menu("margin:delta=3,span=thinking", "somebody/model")
    with pytest.raises(SpecError, match="model 'somebody/model': span thinking: the tokenizer has no tokens for it"):
        require_markers(menu, "somebody/model", Vocabulary)
    require_markers(menu, "somebody/model", byte_tokenizer)
    require_markers(load_menu("margin:delta=3", "somebody/model"), "somebody/model", lambda: 1 / 0)
