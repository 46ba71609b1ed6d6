"""Requirements of requests, structured outputs, and servers that are strict only."""

import pytest

from reprieve.policies.menu import STRUCTURED_OUTPUTS, Menu
from reprieve.policies.policy import RequestError
from reprieve.rules import LosslessRule

JUDGE = "judge:path=reprieve/arithmetic-judge,threshold=0.1"


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
    menu = Menu.load({"rule": JUDGE, "fast": 0.2, "strict_only": True})
    menu = menu.map_policies(lambda policy: policy)
    for fields in ({}, {"reprieve_rule": "on"}, {"reprieve_rule": "off"}, {"reprieve_leniency": "strict"}):
        assert isinstance(menu.choose(fields).rule, LosslessRule)
    for fields in ({"reprieve_leniency": "fast"}, {"reprieve_threshold": 0.01}, {"reprieve_leniency": "certified"}):
        with pytest.raises(RequestError, match=r"decodes losslessly only \(strict_only\)"):
            menu.choose(fields)
    with pytest.raises(RequestError, match="reprieve_treshold is not known"):
        menu.choose({"reprieve_treshold": 0.1})
