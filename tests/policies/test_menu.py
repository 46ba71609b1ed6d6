"""Configurations of restricted rules, requirements of requests, and servers that are strict only."""

import pytest

from reprieve.errors import SpecError
from reprieve.policies.menu import STRUCTURED_OUTPUTS, Menu
from reprieve.policies.policy import RequestError
from reprieve.rules import LosslessRule
from reprieve.vllm_plugin import configuration
from reprieve.vllm_plugin.configuration import load_menu, require_markers, source_of
from tests.kit.chats import byte_tokenizer
from tests.rules.test_spans import Vocabulary

JUDGE = "judge:path=reprieve/arithmetic-judge,threshold=0.1"


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


def test_structured_outputs_are_strict_if_the_policy_says_so():
    asked = {STRUCTURED_OUTPUTS: True}
    assert not Menu.load("margin:delta=3").choose(asked).strict
    menu = Menu.load({"rule": "margin:delta=3", "strict_structured_outputs": True})
    assert menu.choose(asked).strict and not menu.choose({STRUCTURED_OUTPUTS: False}).strict


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"reprieve_require": "lossless"}, True),
        ({"reprieve_require": "certified"}, True),
        ({"reprieve_require": "lossless", "reprieve_leniency": "strict"}, False),
        ({"reprieve_require": "lossless", "reprieve_rule": "off"}, False),
        ({"reprieve_require": "certified", "reprieve_leniency": "certified"}, False),
        ({"reprieve_require": "certified", "reprieve_threshold": 0.01}, False),
        ({"reprieve_require": "certified", "reprieve_threshold": 0.2}, True),
        ({"reprieve_require": "lossless", "reprieve_leniency": "certified"}, True),
        ({"reprieve_require": "safe"}, True),
    ],
)
def test_a_request_gets_what_it_requires_or_an_error(fields, refused):
    menu = Menu.load(JUDGE)
    if not refused:
        menu.choose(fields)
        return
    with pytest.raises(RequestError, match="reprieve_require") as error:
        menu.choose(fields)
    assert error.value.parameter == "reprieve_require"


def test_a_requirement_holds_under_every_load():
    menu = Menu.load({"rule": JUDGE, "default": "strict", "by_load": {"8": 0.02}})
    assert menu.choose({}).follows_load
    menu.choose({"reprieve_require": "certified"})
    with pytest.raises(RequestError, match=r"reprieve_require=lossless: this request would get judge at 0.02"):
        menu.choose({"reprieve_require": "lossless"})


def test_a_strict_server_decodes_losslessly_and_refuses_leniency():
    menu = load_menu({"rule": JUDGE, "fast": 0.2, "strict_only": True}, "reprieve/x")
    menu = menu.change(lambda policy: policy)
    for fields in ({}, {"reprieve_rule": "on"}, {"reprieve_rule": "off"}, {"reprieve_leniency": "strict"}):
        assert isinstance(menu.choose(fields).rule, LosslessRule)
    for fields in ({"reprieve_leniency": "fast"}, {"reprieve_threshold": 0.01}, {"reprieve_leniency": "certified"}):
        with pytest.raises(RequestError, match=r"decodes losslessly only \(strict_only\)"):
            menu.choose(fields)
    with pytest.raises(RequestError, match="reprieve_treshold is not known"):
        menu.choose({"reprieve_treshold": 0.1})
