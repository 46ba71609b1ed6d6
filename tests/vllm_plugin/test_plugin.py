"""The plugin without vLLM: decisions over a batch, state and refusals. `make test-vllm` runs the rest."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.policies.menu import Menu
from reprieve.policies.policy import STRICT, Policy
from reprieve.rules import RiskBudget, accepts, parse_rule
from reprieve.rules.batch import Batch, BatchRequest, decide
from reprieve.types import Context
from reprieve.vllm_plugin import probing
from reprieve.vllm_plugin.configuration import (
    load_menu,
    require_supported,
    require_tokenizer,
    source_of,
    version_warning,
)
from reprieve.vllm_plugin.rounds import RoundRequest, WorkerRules

V = 12


def row(rule, num_drafted, *, greedy=True, trusted=True):
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    return BatchRequest(rule.name, rule, num_drafted, greedy, trusted, RiskBudget.of(rule))


class Letters:
    """A tokenizer of two markers."""

    def encode(self, text, add_special_tokens=False):
        return [{"a": 1, "b": 2}[text]]


def batch_of(*block_sizes, seed=0, **more):
    num_tokens = sum(block_sizes)
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, V, generator=draw) * 2
    given = dict(
        token_ids=torch.randint(0, V, (num_tokens,), generator=draw),
        block_sizes=block_sizes,
        scores=scores,
        logits=scores,
        possible=torch.ones(num_tokens, dtype=torch.bool),
        uniforms=torch.rand(num_tokens, generator=draw),
        draft_scores=torch.randn(num_tokens, V, generator=draw),
    )
    return Batch(**{**given, **more})


def test_rows_have_their_own_thresholds():
    """Worked by hand: gaps to the best token are 0, 1, 2, 3 in each request's block."""
    scores = torch.full((8, V), -9.0)
    for token in range(8):
        scores[token, 0], scores[token, 1] = 5.0, 5.0 - token % 4
    batch = batch_of(4, 4, scores=scores, logits=scores, token_ids=torch.ones(8, dtype=torch.long))
    made = decide([row("margin:delta=1", 4), row("margin:delta=2", 4)], batch)
    assert (made.accept | made.lossless).tolist() == [True, True, False, False, True, True, True, False]
    assert made.lossless.tolist() == [scores[t].argmax().item() == 1 for t in range(8)]


@pytest.mark.parametrize(
    "spec",
    [
        "margin:delta=2",
        "fuzzy:threshold=0.3",
        "asd:regret=4",
        "asd:regret=9,per_block=1",
        "fly:theta=0.1,window=1",
        "cascade:kind=tok,alpha=0.9",
        "top_k:k=9,start=a,end=b",
    ],
)
def test_decisions_do_not_depend_on_other_requests(spec):
    """Each request's decisions equal those it gets alone, whatever the other requests are."""
    rule = parse_rule(spec).bind(Letters())
    rows = [
        row(rule, 3),
        row(STRICT, 2),
        row(rule, 4, greedy=False),
        row(rule, 0),
        row(rule, 2, trusted=False),
        row(rule, 3, greedy=False),
    ]
    texts = torch.tensor([[1, 2, 0], [1, 0, 0], [2, 1, 2], [1, 1, 1], [3, 3, 1], [5, 1, 2]])
    lengths = torch.tensor([1, 1, 3, 1, 3, 2])
    whole = batch_of(*(item.num_drafted for item in rows), context=Context(texts, lengths))
    made = decide(rows, whole)
    start = 0
    for place, item in enumerate(rows):
        span = slice(start, start + item.num_drafted)
        start += item.num_drafted
        if not item.num_drafted:
            continue
        fields = ("token_ids", "scores", "logits", "possible", "uniforms", "draft_scores")
        text = Context(texts[place : place + 1], lengths[place : place + 1])
        alone = Batch(
            block_sizes=[item.num_drafted], context=text, **{name: getattr(whole, name)[span] for name in fields}
        )
        again = dataclasses.replace(item, budget=RiskBudget.of(item.rule))
        own = decide([again], alone)
        assert own.accept.tolist() == made.accept[span].tolist()
        assert own.refuse.tolist() == made.refuse[span].tolist()
        assert own.lossless.tolist() == made.lossless[span].tolist()
        assert own.relaxed.tolist() == made.relaxed[span].tolist()
        if own.scores is not None:
            torch.testing.assert_close(own.scores, made.scores[span])
        if item.strict:
            assert not own.accept.any() and not own.refuse.any()


def test_a_replacing_rule_decides_every_token():
    rule = parse_rule("fuzzy:threshold=0.3")
    batch = batch_of(10)
    made = decide([row(rule, 10)], batch)
    evidence = batch.evidence(greedy=True)
    assert made.accept.tolist() == accepts(rule, evidence).tolist()
    assert (made.accept ^ made.refuse).all()


def test_impossible_and_padded_tokens_are_never_accepted():
    rule = parse_rule("top_k:k=12")
    possible = torch.tensor([True, False, True])
    made = decide([row(rule, 3)], batch_of(3, possible=possible, token_ids=torch.tensor([3, 4, -1])))
    assert made.accept.tolist()[1:] == [False, False]
    masked = torch.zeros(3, V)
    masked[0, 4] = -math.inf
    made = decide([row(rule, 3)], batch_of(3, scores=masked, logits=masked, token_ids=torch.tensor([4, 5, 6])))
    assert made.accept.tolist() == [False, True, True]


def test_limits_count_what_the_walk_rescues():
    """Two rescues per block, and a budget per answer that earlier blocks use up."""
    scores = torch.zeros(4, V)
    scores[:, 0] = 1.0
    batch = batch_of(4, scores=scores, logits=scores, token_ids=torch.full((4,), 3))
    rule = parse_rule("asd:regret=2,per_block=2,budget=3.5")
    item = row(rule, 4)
    assert decide([item], batch).accept.tolist() == [True, True, False, False]
    assert float(item.budget.left) == pytest.approx(1.5)
    assert decide([item], batch).accept.tolist() == [True, False, False, False]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_limits_do_not_depend_on_the_order_of_a_batch(order):
    """One request sets a budget, the other has the operator's, which is unlimited."""
    scores = torch.zeros(6, V)
    scores[:, 0] = 1.0
    batch = batch_of(3, 3, scores=scores, logits=scores, token_ids=torch.full((6,), 3))
    rule = parse_rule("asd:regret=2,per_block=none,budget=inf")
    items = [row(rule.with_dial(1.0), 3), row(rule, 3)]
    accepted = decide([items[index] for index in order], batch).accept.view(2, 3).sum(-1).tolist()
    assert [accepted[order.index(index)] for index in range(2)] == [1, 3]


def request(name, num_drafted=2, asked=None):
    return RoundRequest(name, num_drafted, True, lambda: asked)


def test_drafts_are_trusted_only_after_the_drafter_made_them():
    rules = WorkerRules(Menu.load("margin:delta=2"))
    assert rules.batch_requests([request("a")])[0].strict
    rules.note_drafts(["a"], None)
    assert not rules.batch_requests([request("a")])[0].strict
    rules.note_drafts(["a", "b"], None, real=False)
    assert all(item.strict for item in rules.batch_requests([request("a"), request("b")]))
    reads_draft = WorkerRules(Menu.load("fuzzy:threshold=0.3"))
    reads_draft.note_drafts(["a"], None)
    assert reads_draft.batch_requests([request("a")])[0].strict, (
        "without the draft's distribution the lossless check stands"
    )
    reads_draft.note_drafts(["a"], torch.full((1, 2, V), 1 / V))
    assert not reads_draft.batch_requests([request("a")])[0].strict


def test_a_request_keeps_its_budget_and_is_forgotten_when_it_ends():
    rules = WorkerRules(Menu.load("asd"))
    rules.note_drafts(["a"], None)
    rules.batch_requests([request("a")])[0].budget.spent = 2.75
    assert rules.batch_requests([request("a")])[0].budget.left == 1.25
    for number in range(40):
        rules.batch_requests([request(str(number))])
    rules.forget_all_but({"a": None})
    assert rules.batch_requests([request("a")])[0].budget.left == 1.25 and len(rules._known) == 1


def test_a_budget_follows_the_rule_that_the_load_puts_in_force():
    source = {"rule": "asd:regret=5,per_block=none,budget=4", "default": "strict", "by_load": {"2": 1.5, "3": 1.0}}
    rules = WorkerRules(Menu.load(source))
    requests = [request(name) for name in "abc"]
    rules.note_drafts(["a", "b", "c"], None)
    assert rules.batch_requests(requests[:1])[0].strict
    item = rules.batch_requests(requests[:2])[0]
    assert item.budget.left == 1.5
    item.budget.spent = 1.25
    assert rules.batch_requests(requests[:2])[0].budget.left == 0.25
    assert rules.batch_requests(requests)[0].budget.left == -0.25, "what was spent under a looser rule counts"


def test_a_bad_request_in_a_worker_is_served_losslessly(caplog):
    rules = WorkerRules(Menu.load("margin:delta=2"))
    rules.note_drafts(["a"], None)
    assert rules.batch_requests([request("a", asked={"reprieve_threshold": -3})])[0].strict
    assert "is served losslessly" in caplog.text


def test_only_kept_rescued_tokens_are_counted():
    rules = WorkerRules(Menu.load("margin:delta=9"))
    rules.note_drafts(["a", "b"], None)
    requests = [request("a", 3), request("b", 2), request("c", 0)]
    rows = rules.batch_requests(requests)
    made = decide(rows, batch_of(3, 2, 0))
    made.lossless = torch.tensor([True, False, False, False, True])
    output = torch.tensor([[4, 5, 6, -1], [7, -1, -1, -1], [8, -1, -1, -1]])
    rules.count(["a", "b", "c"], rows, [3, 2, 0], made.lossless, (output >= 0).sum(-1) - 1)
    taken = {name: rounds for name, (_, rounds) in rules.counter.take().items()}
    assert taken == {"a": [("margin@9", 3, [0, 1])], "b": [("margin@9", 2, [])]}
    assert rules.counter.num_rescued == 1 and rules.counter.take() == {}


def vllm_config(*, v2=False, spec=None, model=None, parallel=None, async_scheduling=False):
    """A configuration like vLLM's that serves every rule; the dictionaries change parts of it."""
    speculative = {
        "method": "draft_model",
        "rejection_sample_method": "standard",
        "draft_sample_method": "probabilistic",
        "use_heterogeneous_vocab": False,
        "parallel_drafting": False,
    }
    size = {"get_hidden_size": lambda: 256, "logprobs_mode": "raw_logprobs"}
    return SimpleNamespace(
        use_v2_model_runner=v2,
        speculative_config=SimpleNamespace(**{**speculative, **(spec or {})}),
        model_config=SimpleNamespace(**{**size, **(model or {})}),
        parallel_config=SimpleNamespace(**(parallel or {})),
        scheduler_config=SimpleNamespace(async_scheduling=async_scheduling),
    )


SPAN = 'margin:delta=2,start="<think>",end="</think>"'
JUDGE = "judge:path=reprieve/arithmetic-judge"


@pytest.mark.parametrize(
    ("rule", "change", "told"),
    [
        ("margin", {"v2": True, "model": {"logprobs_mode": "processed_logits"}}, "--logprobs-mode raw_logprobs"),
        ("fuzzy", {"v2": True, "spec": {"draft_sample_method": "greedy"}}, '"draft_sample_method": "probabilistic"'),
        ("margin", {"parallel": {"enable_batch_sharded_sampling": True}}, "--no-enable-batch-sharded-sampling"),
        ("margin", {"spec": {"enable_adaptive_verification": True}}, '"enable_adaptive_verification": false'),
        ("margin", {"model": {"return_sampling_mask": True}}, "return_sampling_mask"),
        ("margin", {"spec": {"rejection_sample_method": "block"}}, "rejection_sample_method must be one of standard"),
        ("fuzzy", {"spec": {"method": "ngram"}}, "draft probabilities, which method 'ngram'"),
        ("fuzzy", {"v2": True, "spec": {"method": "ngram_gpu"}}, "draft probabilities, which method 'ngram_gpu'"),
        ("cascade", {"spec": {"use_heterogeneous_vocab": True}}, "use_heterogeneous_vocab"),
        ("fuzzy", {"spec": {"parallel_drafting": True}}, "unset it, or use the V2"),
        (SPAN, {"async_scheduling": True}, "--no-async-scheduling"),
        ("lossless:verification=exact", {}, "cannot be offered"),
        (JUDGE, {"model": {"get_hidden_size": lambda: 4096}}, "reads .* features, this target gives"),
    ],
)
def test_unsupported_setups_are_refused_with_a_remedy(rule, change, told):
    with pytest.raises(ReprieveError, match=told):
        require_supported(vllm_config(**change), Menu.load(rule))


def test_rules_without_speculative_decoding_are_refused():
    config = vllm_config()
    config.speculative_config = None
    with pytest.raises(ReprieveError, match="speculative-config"):
        require_supported(config, Menu.load("margin"))


def test_supported_setups_are_accepted():
    size = Policy.load(JUDGE).rule.head.num_features
    for rule in ("lossless", "margin", "fuzzy", SPAN, JUDGE, "fly", "cascade"):
        require_supported(vllm_config(model={"get_hidden_size": lambda: size}), Menu.load(rule))
    require_supported(vllm_config(spec={"method": "ngram"}), Menu.load("margin"))
    require_supported(vllm_config(v2=True, async_scheduling=True), Menu.load(SPAN))


def test_an_untested_version_gets_a_warning():
    assert version_warning("0.32.4.post1", "v1") == version_warning("0.32.0", "v2") == ""
    said = version_warning("1.7.0", "v2")
    assert "0.32.0 (v1), 0.32.0 (v2)" in said and "1.7.0 with v2" in said


def test_a_head_for_another_tokenizer_is_refused():
    class Other:
        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(PairError, match="whose tokenizer is another one"):
        require_tokenizer(Policy.load(JUDGE).rule, Other())


def test_the_configuration_comes_from_vllm_or_the_environment(monkeypatch):
    monkeypatch.delenv("REPRIEVE_VLLM", raising=False)
    assert source_of({}) is None and source_of(None) is None
    assert source_of({"reprieve": "margin"}) == "margin"
    monkeypatch.setenv("REPRIEVE_VLLM", "top_k:k=2")
    assert source_of({}) == "top_k:k=2" and source_of({"reprieve": "margin"}) == "margin"
    assert source_of({"reprieve": False}) is None


def test_a_policy_is_read_once_per_process(monkeypatch):
    reads, menu = [], Menu.load("margin:delta=2")
    monkeypatch.setattr(Menu, "load", lambda source, target: reads.append(source) or menu)
    for _ in range(3):
        load_menu({"rule": "margin:delta=7.125"}, "t")
        load_menu("margin:delta=7.25", "t")
    assert len(reads) == 2


def test_a_reused_request_id_starts_afresh():
    rules = WorkerRules(Menu.load("margin:delta=2"))
    rules.note_drafts(["a"], None)
    assert rules.batch_requests([request("a", asked={"reprieve_rule": "off"})])[0].strict
    rules.forget(["a", "unknown"])
    assert rules.batch_requests([request("a")])[0].strict, "no drafts of its own yet"
    rules.note_drafts(["a"], None)
    assert not rules.batch_requests([request("a")])[0].strict


def test_the_plugin_imports_rules_and_heads_only():
    """vLLM loads the plugin in every process, so it must stay small: no engine, no evaluation, no web framework."""
    code = (
        "import sys; import reprieve.vllm_plugin.rounds, reprieve.vllm_plugin.configuration; "
        "extra = [m for m in sys.modules if m.startswith(('reprieve.engine', 'reprieve.models', 'reprieve.bench',"
        " 'reprieve.tasks', 'fastapi', 'transformers', 'scipy', 'matplotlib'))]; print(extra); sys.exit(bool(extra))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_risk_does_not_depend_on_the_dial():
    """One risk serves a batch of different thresholds."""
    batch = batch_of(20, noise=torch.rand(20))
    for spec in ("top_k", "typical", "margin", "ratio", "floor", "lenience", "fuzzy", "random", "cascade", "asd"):
        rule = parse_rule(spec)
        other = rule.with_dial({"top_k": 5, "cascade": 0.7}.get(spec, 0.6))
        for greedy in (True, False):
            evidence = batch.evidence(greedy=greedy)
            torch.testing.assert_close(rule.risk(evidence), other.risk(evidence))


def test_a_head_that_reads_another_layer_is_refused():
    rule = Policy.load(JUDGE).rule
    recipe = dataclasses.replace(rule.head.recipe, layers=(-2,))
    moved = dataclasses.replace(rule, head=dataclasses.replace(rule.head, recipe=recipe))
    with pytest.raises(SpecError, match="reads layer -2"):
        require_supported(vllm_config(), Menu([Policy(moved)]))


def test_rules_see_processed_scores_and_heads_the_models_own():
    """Rules see scores after penalties and masks; heads see raw logits, as in training."""
    batch = batch_of(4, logits=torch.zeros(4, V))
    evidence = batch.evidence(greedy=True)
    assert torch.equal(evidence.scores, batch.scores) and torch.equal(evidence.target_logits, batch.logits)


def test_the_v1_module_can_be_deleted():
    """No module outside it imports from it."""
    import reprieve.vllm_plugin as package

    root = Path(package.__file__).parent
    for path in root.rglob("*.py"):
        if path.name != "v1.py":
            text = path.read_text(encoding="utf-8")
            assert "vllm_plugin.v1" not in text and "vllm_plugin import v1" not in text, path


def test_without_v1_the_plugin_supports_v2_only(monkeypatch):
    monkeypatch.delitem(probing.RUNNERS, "v1")
    with pytest.raises(ReprieveError, match="knows vLLM's V2 model runners, this is object"):
        probing.runner_kind(object())


def test_the_number_of_touched_parts_is_known():
    """`tests/vllm/test_probing.py` finds these parts in a running vLLM; fewer is better."""
    touched = {kind: sum(part.use != probing.USED for part in parts) for kind, parts in probing.PARTS.items()}
    assert touched == {"v2": 18, "v1": 20}
