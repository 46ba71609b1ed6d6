"""Policies: the leniency that requests may choose within the operator's limits."""

import json

import pytest

from reprieve.errors import ReprieveError, SpecError
from reprieve.policies.menu import Menu, slider_values
from reprieve.policies.policy import Policy, RequestError
from reprieve.rules import RULES, parse_rule
from tests.kit.pairs import ARITHMETIC
from tests.kit.tiny import random_head

JUDGE = "judge:path=reprieve/arithmetic-judge,threshold=0.1"


@pytest.fixture(scope="module")
def policy():
    return Policy.load({"rule": JUDGE, "fast": 0.2, "max_threshold": 0.3})


def test_the_heads_certificate_sets_the_certified_level(policy):
    assert policy.levels == {"certified": 0.04, "fast": 0.2}
    assert policy.certificate.promise["max_drop"] == 0.03
    assert "MORE LENIENT than its certificate" in policy.describe()
    calm = Policy.load({"rule": JUDGE, "default": "certified"})
    assert "; certificate: With 95% confidence" in calm.describe()
    assert calm.resolve({}).threshold == 0.04


def test_a_certificate_made_under_other_conditions_is_set_aside(policy):
    assert policy.for_conditions(num_draft_tokens=8, drafter="draft", dtype="float32") is policy
    elsewhere = policy.for_conditions(num_draft_tokens=16, drafter="draft", dtype="bfloat16")
    assert elsewhere.certificate is None and elsewhere.levels == {"fast": 0.2}
    told = "its certificate does not hold here: num_draft_tokens 16 (certified: 8); dtype bfloat16 (certified: float32)"
    assert told in elsewhere.describe()
    with pytest.raises(RequestError, match="one of strict, fast on this server"):
        elsewhere.resolve({"reprieve_leniency": "certified"})
    with pytest.raises(SpecError, match="default certified: the certificate does not hold here"):
        Policy.load({"rule": JUDGE, "default": "certified"}).for_conditions(num_draft_tokens=4)


def test_the_certificate_for_the_current_conditions_is_chosen(policy):
    here = {"num_draft_tokens": 8, "drafter": "draft", "dtype": "float32"}
    local = policy.for_conditions(engine="local", **here)
    assert local.certificate.conditions.engine == "local" and local.levels["certified"] == 0.04
    vllm = policy.for_conditions(engine="vllm", engine_version="0.32.0", runner="v1", **here)
    assert vllm.certificate.conditions.runner == "v1" and "Noise floor" in vllm.certificate.statement
    other = policy.for_conditions(engine="vllm", engine_version="0.33.0", runner="v2", **here)
    assert other.certificate is None and "engine_version 0.33.0 (certified: 0.32.0)" in other.certificate_mismatch


@pytest.mark.parametrize(
    ("asked", "threshold"),
    [
        ({}, 0.1),
        (None, 0.1),
        ({"unrelated": 3}, 0.1),
        ({"reprieve_rule": "on"}, 0.1),
        ({"reprieve_threshold": 0}, 0.0),
        ({"reprieve_threshold": 0.3}, 0.3),
        ({"reprieve_rule": "on", "reprieve_threshold": 0.25}, 0.25),
        ({"reprieve_leniency": "certified"}, 0.04),
        ({"reprieve_leniency": "fast"}, 0.2),
    ],
)
def test_a_request_gets_the_threshold_it_asked_for(policy, asked, threshold):
    assert policy.resolve(asked).threshold == threshold


def test_strict_and_off_are_the_lossless_check(policy):
    for asked in ({"reprieve_leniency": "strict"}, {"reprieve_rule": "off"}):
        assert policy.resolve(asked).name == "lossless"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"reprieve_threshold": 0.31}, "reprieve_threshold"),
        ({"reprieve_threshold": -0.1}, "reprieve_threshold"),
        ({"reprieve_threshold": "0.1"}, "reprieve_threshold"),
        ({"reprieve_threshold": True}, "reprieve_threshold"),
        ({"reprieve_threshold": float("nan")}, "reprieve_threshold"),
        ({"reprieve_threshold": 10**400}, "reprieve_threshold"),
        ({"reprieve_treshold": 0.1}, "reprieve_treshold"),
        ({"reprieve_leniency": 3}, "reprieve_leniency"),
        ({"reprieve_rule": "off", "reprieve_leniency": "fast"}, "reprieve_rule"),
        ({"reprieve_threshold": 0.1, "reprieve_leniency": "fast"}, "reprieve_threshold"),
    ],
)
def test_invalid_requests_name_the_field(policy, asked, field):
    with pytest.raises(RequestError, match=field) as refused:
        policy.resolve(asked)
    assert refused.value.parameter == field


@pytest.mark.parametrize(
    ("rule", "cap", "strict", "lenient"),
    [("ratio:ratio=0.5", 0.3, 0.4, 0.2), ("fly:theta=1", 0.5, 0.7, 0.3), ("asd", 8, 6, 20), ("top_k:k=2", 4, 3, 5)],
)
def test_a_cap_respects_the_direction_of_leniency(rule, cap, strict, lenient):
    policy = Policy.load({"rule": rule, "max_threshold": cap})
    policy.resolve({"reprieve_threshold": strict})
    with pytest.raises(RequestError, match="no more lenient"):
        policy.resolve({"reprieve_threshold": lenient})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rule": "margin:delta=2", "fast": "much"}, "fast must be a number"),
        ({"rule": "margin:delta=2", "fast": -1}, "delta"),
        ({"rule": "margin:delta=2", "default": "fast"}, "default must be one of strict"),
        ({"rule": "margin:delta=4", "max_threshold": 2}, "no more lenient"),
        ({"rule": "margin:delta=1", "fast": 3, "max_threshold": 2}, "no more lenient"),
        ({"rule": "margin:delta=2", "speed": 1}, "takes rule, certified"),
        ({"fast": 3}, "needs rule"),
        ({"rule": "margin:delta=2", "certificate": "/nowhere.json"}, "cannot be read"),
        ({"rule": "margin:delta=2", "certified": 3, "fast": 1}, "no stricter than certified"),
        ({"rule": "margin:delta=2", "default": ["strict"]}, "default must be a text"),
        ({"rule": "margin:delta=2", "certificate": 5}, "certificate must be a text"),
        ({"rule": "margin:delta=2", "fast": 10**400}, "fast must fit in a float"),
        ({"rule": "margin:delta=2", 5: 1}, "takes rule, certified"),
        (5, "must be a rule, a file's path or an object"),
        (["margin"], "must be a rule, a file's path or an object"),
        ({}, "needs rule"),
        ("", "empty text"),
        ("/nowhere/policy.json", "cannot be read"),
        ("margins", "rule must be one of"),
    ],
)
def test_invalid_configurations_are_refused(settings, told):
    with pytest.raises(ReprieveError, match=told):
        Policy.load(settings)


def test_naming_the_rule_does_not_undo_the_default():
    policy = Policy.load({"rule": "margin:delta=4", "default": "strict"})
    assert policy.resolve({"reprieve_rule": "on"}).name == "lossless"
    assert Menu([policy]).choose({"reprieve_rule": "margin"}).strict
    assert policy.resolve({"reprieve_threshold": 2}).spec == "margin:delta=2"
    assert "rule margin:delta=4; default strict" in policy.describe()
    loaded = Policy.load({"rule": "margin:delta=4", "default": "strict", "by_load": {"2": 1, "8": 3}})
    assert "; by load 2: 1, 8: 3" in loaded.describe()


def test_an_unknown_key_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match=r"a policy takes rule, .*got max_treshold; a file for vLLM also takes rules"):
        Policy.load({"rule": "margin:delta=4", "max_treshold": 4})


def test_a_refused_threshold_is_named_once():
    policy = Policy.load("margin:delta=4")
    with pytest.raises(RequestError, match=r"^reprieve_threshold \(delta of margin\): must be a number, got '0.5'"):
        policy.resolve({"reprieve_threshold": "0.5"})


def test_without_a_certificate_the_error_suggests_strict():
    with pytest.raises(RequestError, match="ask for reprieve_leniency=strict"):
        Menu([Policy.load("margin:delta=4")]).choose({"reprieve_require": "certified"})


def test_a_policy_can_be_loaded_from_a_file(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"rule": "margin:delta=2", "fast": 4}))
    assert Policy.load(str(path)).levels == {"fast": 4}
    path.write_text("[1]")
    with pytest.raises(ReprieveError, match="JSON object"):
        Policy.load(str(path))


def test_a_certificate_of_another_rule_is_refused(tmp_path):
    from reprieve.heads.files import find_head

    certificate = next((find_head("reprieve/arithmetic-judge") / "certificates").glob("*.json"))
    with pytest.raises(SpecError, match="is about judge"):
        Policy.load({"rule": "margin:delta=2", "certificate": str(certificate)})


def test_the_menu_distinguishes_rules_by_name():
    menu = Menu([Policy.load(spec) for spec in ("margin:delta=2", "margin:delta=2,k=5", "top_k:k=2")])
    assert list(menu.policies) == ["margin", "margin:delta=2,k=5", "top_k"]
    assert menu.choose({}).rule.spec == "margin:delta=2"
    assert menu.choose({"reprieve_rule": "top_k", "reprieve_threshold": 3}).rule.dial_value == 3
    assert menu.choose({"reprieve_rule": "off"}).strict
    with pytest.raises(RequestError, match="reprieve_rule must be one of on, off, margin"):
        menu.choose({"reprieve_rule": "typical"})
    with pytest.raises(SpecError, match="twice"):
        Menu([Policy.load("margin:delta=2")] * 2)
    with pytest.raises(SpecError, match="reprieve_rule=off"):
        Menu([Policy.load("lossless:verification=block")])
    with pytest.raises(SpecError, match="at least one"):
        Menu([])


@pytest.mark.parametrize("name", RULES.names())
def test_every_rule_has_a_slider_from_strict_to_lenient(name, tmp_path):
    spec = JUDGE if name == "judge" else name
    if name == "state_arbiter":  # the smaller pair has none
        random_head(name).save_pretrained(tmp_path)
        spec = f"{name}:path={tmp_path}"
    policy = Policy.load(spec, target=ARITHMETIC.name)
    found = slider_values(policy)
    if name == "lossless":
        assert found == []
        return
    leniency = [policy.rule.with_dial(value).leniency for value in found]
    assert leniency == sorted(leniency) and len(found) > 3
    if policy.rule.dial_value is not None:
        assert slider_values(Policy.load({"rule": spec, "max_threshold": found[-1]}, target=ARITHMETIC.name)) == found


def test_leniency_orders_the_budget_rules_by_their_budget():
    small, large = (parse_rule(f"asd:budget={value}").leniency for value in (1, 9))
    assert small < large


def test_one_configuration_holds_several_rules():
    menu = Menu.load({"rules": ["margin:delta=2", {"rule": "top_k:k=3", "max_threshold": 5}]})
    assert menu.choose(None).rule.spec == "margin:delta=2"
    assert menu.choose({"reprieve_rule": "top_k", "reprieve_threshold": 5}).rule.spec == "top_k:k=5"
    assert menu.choose({"reprieve_rule": "off"}).strict
    with pytest.raises(RequestError, match="must be one of on, off, margin, top_k, got 'fly'"):
        menu.choose({"reprieve_rule": "fly"})
    with pytest.raises(RequestError, match="no more lenient than k=5"):
        menu.choose({"reprieve_rule": "top_k", "reprieve_threshold": 6})
    for bad in ({"rules": []}, {"rules": "margin"}, {"rules": ["margin"], "fast": 1}):
        with pytest.raises(SpecError, match="rules must stand alone and be a list"):
            Menu.load(bad)


def test_load_sets_the_leniency_of_requests_without_settings():
    menu = Menu.load({"rule": "margin:delta=1", "by_load": {"4": 2, "16": 3.5}, "fast": 4})
    for running, delta in ((1, 1), (3, 1), (4, 2), (15, 2), (16, 3.5), (400, 3.5)):
        for silent in (None, {}, {"reprieve_rule": "on"}):
            choice = menu.choose(silent, num_running=running)
            assert choice.rule.dial_value == delta and choice.follows_load
    asked = menu.choose({"reprieve_threshold": 0.5}, num_running=400)
    assert asked.rule.dial_value == 0.5 and not asked.follows_load
    assert menu.choose({"reprieve_leniency": "strict"}, num_running=400).strict


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"by_load": {"8": 2}, "max_threshold": 1.5}, "by_load at 8 requests must be no more lenient than delta=1.5"),
        ({"by_load": {"0": 2}}, "distinct request counts of 1 or more"),
        ({"by_load": {"many": 2}}, "must map numbers of running requests"),
        ({"by_load": [2]}, "must map numbers of running requests"),
        ({"by_load": {"8": "2"}}, "by_load must be a number"),
        ({"by_load": {"8": -2}}, "delta"),
    ],
)
def test_invalid_tables_of_loads_are_refused(settings, said):
    with pytest.raises(SpecError, match=said):
        Policy.load({"rule": "margin:delta=1", **settings})


def test_a_certificate_caps_the_leniency_by_load():
    assert Policy.load({"rule": JUDGE, "by_load": {"8": 0.04}}).at_load(8).threshold == 0.04
    with pytest.raises(SpecError, match=r"no more lenient than the certificate allows \(0.04\), got 0.1"):
        Policy.load({"rule": JUDGE, "by_load": {"8": 0.1}})


@pytest.mark.parametrize(
    "fields",
    [
        {"reprieve_threshold": "9" * 100_000},
        {"reprieve_threshold": [0.1] * 100_000},
        {"reprieve_leniency": "x" * 100_000},
        {"reprieve_rule": "x" * 100_000},
        {"reprieve_threshold": 10**5000},
        {"reprieve_" + "x" * 100_000: 1},
        {"reprieve_\x1b[2J\nINFO: forged": 1},
    ],
)
def test_error_messages_stay_short_and_printable(fields):
    with pytest.raises(RequestError) as refused:
        Menu.load("margin").choose(fields)
    assert len(str(refused.value)) < 600 and str(refused.value).isprintable()
    assert len(refused.value.parameter) < 120 and refused.value.parameter.isprintable()


def test_a_slider_extends_beyond_the_configured_threshold():
    policy = Policy.load("fuzzy:threshold=3,divergence=kl,form=released")
    assert slider_values(policy)[-1] > 3 > 1 == slider_values(Policy.load("fuzzy"))[-1]
