"""Values of `--engine`, and the vLLM command line made from them."""

import json

import pytest

from reprieve.backends.deployers import DRAFT, PAIR, TARGET, ServerPlan, VllmDeployer, fields_of
from reprieve.backends.settings import EngineSettings, OpenAISettings, RaySettings, VllmSettings
from reprieve.backends.vllm import Deployment, start_vllm
from reprieve.bench.arms import make_arm
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.loading import attach_heads
from reprieve.rules import parse_rule
from reprieve.settings import PairSettings
from tests.kit.pairs import ARITHMETIC

JUDGE = "judge:path=reprieve/arithmetic-judge,threshold="


def rule(spec):
    return attach_heads(parse_rule(spec), ARITHMETIC.name)


def test_engine_specifications_are_parsed():
    assert EngineSettings().local
    assert EngineSettings("vllm").servers == VllmSettings()
    assert EngineSettings("vllm:max_num_seqs=64,runner=v2,eager=true").servers == VllmSettings(
        max_num_seqs=64, runner="v2", eager=True
    )
    assert EngineSettings("ray:replicas=3,parallel=9").servers == RaySettings(replicas=3, parallel=9)
    several = EngineSettings('openai:url="http://a:1/v1;https://b:2/"').servers
    assert isinstance(several, OpenAISettings) and several.urls == ("http://a:1", "https://b:2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cuda", "engine must be one of local, batched, openai, ray, vllm, got 'cuda'"),
        ("openai", "needs url=http://HOST:PORT"),
        ('openai:url="ftp://x"', "needs url=http://HOST:PORT"),
        ("openai:url=http://me:secret@x", "url must not hold a password; set OPENAI_API_KEY instead"),
        ("vllm:seqs=3", "no parameter 'seqs'"),
        ("vllm:runner=v3", "runner must be one of None, v1, v2"),
        ("ray:replicas=0", "replicas must be 1 or more"),
        ("vllm:parallel=0", "parallel must be 1 or more"),
        ("vllm:gpu_memory_utilization=1.5", "gpu_memory_utilization must be in"),
    ],
)
def test_invalid_engine_specifications_are_refused(text, said):
    with pytest.raises(SpecError, match=said):
        EngineSettings(text)


def test_a_rule_is_offered_once_for_all_its_thresholds():
    plan = ServerPlan(PAIR, 8, "draft")
    for value in ("0.02", "0.1", "0.5"):
        plan.add(rule(JUDGE + value))
    plan.add(rule("margin:delta=2"))
    plan.add(rule("margin:delta=2,k=3"))
    plan.add(rule("lossless"))
    plan.add(None)
    assert [part.spec for part in plan.rules] == [JUDGE + "0.02", "margin:delta=2", "margin:delta=2,k=3"]


def test_requests_select_rules_by_name_and_dial():
    offered = {"judge": "judge:path=abc,threshold=0.02", "top_k": "top_k:k=2"}
    assert fields_of(rule("top_k:k=4"), offered) == {"reprieve_rule": "top_k", "reprieve_threshold": 4.0}
    assert fields_of(rule("lossless"), offered) == {"reprieve_rule": "off"}
    assert fields_of(rule("lossless"), {}) == {} and fields_of(None, offered) == {}
    assert fields_of(rule(JUDGE + "0.02"), offered) is None  # another head
    assert fields_of(rule("margin:delta=2"), offered) is None


@pytest.mark.parametrize("has_gpu", [False, True])
def test_chunked_prefill_is_disabled_on_the_cpu(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr("reprieve.backends.vllm._has_gpu", lambda: has_gpu)
    flags = Deployment("target", "float32").flags(VllmSettings(), tmp_path / "policy.json")
    assert ("--no-enable-chunked-prefill" in flags) is not has_gpu


def test_the_vllm_command_line_follows_the_plan(tmp_path):
    deployer = VllmDeployer(
        VllmSettings(max_model_len=512, arguments="--seed 3"), PairSettings(ARITHMETIC.name), "float32"
    )
    plan = ServerPlan(PAIR, 4, "draft")
    plan.add(rule("fuzzy:threshold=0.1"))
    made = deployer.deployment(plan)
    assert made.speculation["method"] == "draft_model" and made.speculation["num_speculative_tokens"] == 4
    assert made.speculation["draft_sample_method"] == "probabilistic"  # fuzzy reads the draft's distribution
    flags = made.flags(deployer.settings, tmp_path / "policy.json")
    assert list(made.rules) == ["fuzzy:threshold=0.1"]
    assert json.loads(flags[flags.index("--additional-config") + 1]) == {"reprieve": str(tmp_path / "policy.json")}
    assert flags[flags.index("--generation-config") + 1] == "vllm"  # else the model's own penalties would count
    assert flags[flags.index("--max-model-len") + 1] == "512" and flags[-2:] == ["--seed", "3"]
    alone = deployer.deployment(ServerPlan(TARGET))
    assert alone.speculation is None and not alone.rules
    ngram = deployer.deployment(ServerPlan(PAIR, 4, "ngram:max_ngram=2"))
    assert ngram.speculation == {
        "method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1, "num_speculative_tokens": 4
    }  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "spec", "said"),
    [
        (ServerPlan(PAIR, 4, "eagle3:top_k=8"), "lossless", "chains, no trees"),
        (ServerPlan(PAIR, 4, "draft"), "arbiter", "an advisor"),
        (ServerPlan(PAIR, 4, "draft"), "lossless:verification=block", "a lossless check of its own"),
        (ServerPlan(PAIR, 4, "draft"), "top_k:k=2", ""),
    ],
)
def test_refusals_name_what_vllm_does_not_support(plan, spec, said):
    deployer = VllmDeployer(VllmSettings(), PairSettings(ARITHMETIC.name), "float32")
    reason = deployer.refusal(plan, rule(spec))
    assert said in reason if said else reason == ""


def test_vllms_own_methods_get_separate_servers_without_the_plugin(tmp_path):
    deployer = VllmDeployer(VllmSettings(), PairSettings(ARITHMETIC.name), "float32")
    plan = ServerPlan(PAIR, 4, "draft", method=make_arm("vllm:synthetic,acceptance_length=2.5", 4).vllm)
    plan.add(rule("lossless"))
    block = ServerPlan(PAIR, 4, "draft", method=make_arm("vllm:block", 4).vllm)
    assert len({plan.key, block.key, ServerPlan(PAIR, 4, "draft").key}) == 3
    made = deployer.deployment(plan)
    assert made.speculation["rejection_sample_method"] == "synthetic"
    assert made.speculation["synthetic_acceptance_length"] == 2.5 and not made.rules
    assert "--additional-config" not in made.flags(deployer.settings, tmp_path / "policy.json")
    assert "rejection_sample_method synthetic" in deployer.words(plan)


@pytest.mark.parametrize(("installed", "refused"), [((0, 32), True), ((0, 33), False), ((1, 0), False), (None, False)])
def test_fly_is_refused_by_version_where_vllm_does_not_have_it(monkeypatch, installed, refused):
    monkeypatch.setattr("reprieve.backends.deployers.vllm_version", lambda: installed)
    deployer = VllmDeployer(VllmSettings(), PairSettings(ARITHMETIC.name), "float32")
    reason = deployer.refusal(ServerPlan(PAIR, 4, "draft", method=make_arm("vllm:fly", 4).vllm), rule("lossless"))
    assert reason == ("vLLM 0.32 has no fly, which came with 0.33" if refused else "")


def test_plans_that_need_a_draft_are_refused_without_one():
    deployer = VllmDeployer(VllmSettings(), PairSettings("some/target"), "float32")
    assert deployer.refusal(ServerPlan(DRAFT), None) == "the pair has no draft"
    assert "name one with --draft" in deployer.refusal(ServerPlan(PAIR, 4, "draft"), None)


def test_starting_vllm_without_vllm_installed_is_refused(monkeypatch):
    monkeypatch.setattr("reprieve.backends.vllm.find_spec", lambda name: None)
    deployer = VllmDeployer(VllmSettings(), PairSettings(ARITHMETIC.name), "float32")
    with pytest.raises(ReprieveError, match="requires vLLM in this environment"):
        start_vllm(deployer.deployment(ServerPlan(TARGET)), deployer.settings)
