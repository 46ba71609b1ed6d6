"""Settings of single requests in mixed batches, and bad ones that must not harm the engine."""

import collections

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.vllm import cpu_kernels
from tests.vllm.certified import judge_path
from tests.vllm.conftest import make_llm, rules_of, texts, use_rule

THRESHOLDS = (0.0, 0.05, 0.2, 0.6)
JUDGE = f"judge:path={judge_path()},threshold=0.1"


@pytest.fixture(scope="module")
def llm():
    return make_llm("fuzzy:threshold=0.4")


def params(max_tokens=80, **asked):
    return SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=asked or None)


def generate(llm, problems, parameters):
    return llm.generate([problem.prompt for problem in problems], parameters, use_tqdm=False)


@pytest.mark.parametrize(
    ("spec", "values"),
    [(JUDGE, THRESHOLDS), ("fuzzy:threshold=0.3", (0.0, 0.05, 0.3, 0.8)), ("asd:regret=4", (0, 2, 6, 30))],
)
def test_sixteen_mixed_requests_each_equal_their_own_pure_run(llm, problems, spec, values):
    use_rule(llm, spec)
    chosen = problems[:16]
    wanted = [params(reprieve_threshold=values[place % 4]) for place in range(16)]
    mixed = texts(generate(llm, chosen, wanted))
    for place, value in enumerate(values):
        pure = texts(generate(llm, chosen[place::4], params(reprieve_threshold=value)))
        assert mixed[place::4] == pure, f"threshold {value}"
    assert len(set(texts(generate(llm, chosen[:1] * 4, [params(reprieve_threshold=v) for v in values])))) > 1


@pytest.mark.parametrize("spec", ["fuzzy:threshold=0.3", JUDGE, "lenience:lenience=0.2"])
def test_sampling_and_greedy_requests_share_a_batch(llm, problems, spec):
    """Seeded requests have their own random numbers, so each answer is the same without the others."""
    cpu_kernels.mend()
    use_rule(llm, spec)
    chosen = [problem.prompt for problem in problems[:12]]
    wanted = [
        SamplingParams(temperature=0.9 * (place % 2), top_p=0.95, seed=place, max_tokens=48) for place in range(12)
    ]
    mixed = texts(llm.generate(chosen, wanted, use_tqdm=False))
    for kind in (0, 1):
        assert mixed[kind::2] == texts(llm.generate(chosen[kind::2], wanted[kind::2], use_tqdm=False))
    assert rules_of(llm).status["failures"] == 0 and rules_of(llm).counter.num_rescued > 0


def test_off_and_strict_requests_are_lossless_in_a_mixed_batch(llm, problems):
    use_rule(llm, "lossless")
    plain = texts(generate(llm, problems[:6], params()))
    use_rule(llm, "top_k:k=8")
    asked = [params(reprieve_rule="off"), params(reprieve_leniency="strict"), params()] * 2
    served = texts(generate(llm, problems[:6], asked))
    assert [served[place] == plain[place] for place in (0, 1, 3, 4)] == [True] * 4
    assert served[2] != plain[2] or served[5] != plain[5]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"reprieve_threshold": 1.5}, "reprieve_threshold"),
        ({"reprieve_threshold": "much"}, "reprieve_threshold"),
        ({"reprieve_threshold": float("nan")}, "reprieve_threshold"),
        ({"reprieve_threshold": 0.9}, "reprieve_threshold"),  # beyond the cap
        ({"reprieve_leniency": "wild"}, "reprieve_leniency"),
        ({"reprieve_leniency": ["fast"]}, "reprieve_leniency"),
        ({"reprieve_rule": "top_k:k=3"}, "reprieve_rule"),
        ({"reprieve_rule": "off", "reprieve_threshold": 0.1}, "reprieve_rule"),
        ({"reprieve_threshold": 0.1, "reprieve_leniency": "fast"}, "reprieve_threshold"),
    ],
)
def test_bad_values_are_refused_by_name_and_the_engine_keeps_serving(problems, asked, field):
    llm = _capped()
    with pytest.raises(VLLMValidationError, match=field) as refused:
        generate(llm, problems[:1], params(**asked))
    assert refused.value.parameter == field
    assert len(generate(llm, problems[:1], params(4, reprieve_leniency="certified"))) == 1


_ENGINES = {}


def _capped():
    if not _ENGINES:
        source = {"rule": JUDGE, "fast": 0.2, "max_threshold": 0.5}
        _ENGINES["capped"] = make_llm(source)
    return _ENGINES["capped"]


def test_the_bundled_certificate_gives_the_certified_level(problems):
    policy = rules_of(_capped()).menu.policies["judge"]
    assert policy.levels == {"certified": 0.04, "fast": 0.2}
    assert "MORE LENIENT than its certificate" in policy.describe()


def test_a_response_says_what_the_rule_did(problems):
    before = rules_of(_capped()).counter.num_rescued
    output = generate(_capped(), problems[:1], params(reprieve_leniency="fast"))[0]
    summary = output.outputs[0].spec_decode_metrics.to_dict()
    assert summary["reprieve_rule"] == "judge@0.2"
    assert summary["num_rescued_tokens"] == rules_of(_capped()).counter.num_rescued - before > 0
    strict = generate(_capped(), problems[:1], params(reprieve_rule="off"))[0].outputs[0].spec_decode_metrics.to_dict()
    assert (strict["num_rescued_tokens"], strict["reprieve_rule"]) == (0, "lossless")


def test_counters_are_consistent_with_vllms_own(problems):
    llm = _capped()
    before = counters(llm)
    generate(llm, problems[:4], params(reprieve_leniency="fast"))
    generate(llm, problems[:4], params(reprieve_rule="off"))
    after = counters(llm)
    rescued = after["vllm:reprieve_rescued_tokens"] - before["vllm:reprieve_rescued_tokens"]
    rounds = after["vllm:reprieve_relaxed_rounds"] - before["vllm:reprieve_relaxed_rounds"]
    drafts = after["vllm:spec_decode_num_drafts"] - before["vllm:spec_decode_num_drafts"]
    assert 0 < rescued < after["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < rounds < drafts


def counters(llm):
    sums = collections.Counter()
    for metric in llm.get_metrics():
        sums[metric.name] += getattr(metric, "value", 0)
    return sums


def test_a_rule_that_fails_serves_losslessly_and_makes_the_health_check_fail(llm, problems, monkeypatch):
    from reprieve.errors import ReprieveError
    from reprieve.vllm_plugin import require_active

    use_rule(llm, "lossless")
    plain = texts(generate(llm, problems[:2], params()))
    rules = use_rule(llm, "margin:delta=3")
    require_active(llm)
    monkeypatch.setattr(type(rules.menu.rules[0]), "risk", lambda rule, evidence: 1 / 0)
    assert texts(generate(llm, problems[:2], params())) == plain
    with pytest.raises(ReprieveError, match="does not apply the rule"):
        require_active(llm)
