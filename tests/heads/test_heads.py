"""Heads: checked by hand, bound to their pair, safe to load; training and decoding see the same features."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from reprieve.drafters import DraftModelDrafter
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.errors import PairError, ReprieveError, SpecError, UnsupportedModelError
from reprieve.heads.classifiers import JudgeHead, PivotHead, StateArbiter, pivot_logits
from reprieve.heads.features import TokenStates, assemble
from reprieve.heads.files import signature
from reprieve.heads.loading import attach_heads, load_head, require_heads_fit
from reprieve.heads.settings import FeatureRecipe
from reprieve.mining.store import MINED, Mismatch, ProblemLabels
from reprieve.models.cached_model import CachedModel
from reprieve.rules import RiskBudget, accept, accepts, parse_rule
from reprieve.rules.arbiter import StateArbiterRule
from reprieve.rules.judge import JudgeRule
from reprieve.rules.pivot import PivotRule
from reprieve.training.features import collect
from reprieve.types import Block, Evidence, Provenance, select_rows
from tests.kit.tiny import IDENTITY, NumberTokenizer, checked_by, perturbed, random_head, tiny_model

CPU = torch.device("cpu")
PROMPT = list(range(3, 15))


@pytest.fixture(scope="module")
def pair():
    target = tiny_model(seed=5)
    return Pair(target, perturbed(target, noise=0.03), NumberTokenizer(), "tiny/target", "tiny/draft")


def evidence(hidden, *, logits=None, token_ids=(1, 0, 2)):
    logits = (
        torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4 - 5e-5, 5e-5], [0.4, 0.3, 0.3]]))
        if logits is None
        else logits
    )
    return Evidence(
        token_ids=torch.tensor(token_ids),
        target_logits=logits,
        greedy=True,
        lossless_accepts=torch.zeros(len(token_ids), dtype=torch.bool),
        node_hidden={-1: torch.tensor(hidden)},
    )


def test_judge_by_hand_at_three_tokens():
    head = JudgeHead(
        {"weight": torch.tensor([2.0, -1.0]), "bias": torch.tensor(0.5)}, FeatureRecipe(), 0.3, pair=IDENTITY, task="t"
    )
    case = evidence([[0.0, 0.5], [-1.0, 0.5], [1.0, 1.0]])
    expected = [1 / (1 + math.exp(-logit)) for logit in (0.0, -2.0, 1.5)]
    torch.testing.assert_close(head.risk(case), torch.tensor(expected))
    assert accepts(JudgeRule.of(head), case).tolist() == [False, True, False]
    assert accepts(JudgeRule.of(head, threshold=0.6), case).tolist() == [True, True, False]


def test_state_arbiter_by_hand():
    """The risk weighs harm against benefit; equal chances of both give 0.5."""
    weight = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0, 0.0, 1.0]])
    recipe = FeatureRecipe(states="both", entropy=True, probability=True, draft_scalars=True)
    head = StateArbiter({"weight": weight, "bias": torch.zeros(2)}, recipe, 0.51, pair=IDENTITY, task="t")
    logits = torch.tensor([[0.0, 0.0]] * 3)
    case = Evidence(
        torch.tensor([0, 0, 0]), logits, True, torch.zeros(3, dtype=torch.bool),
        draft_logits=torch.tensor([[math.log(3.0), 0.0]] * 3),
        node_hidden={-1: torch.tensor([[0.0], [1.0], [0.0]])}, draft_hidden={-1: torch.tensor([[-0.25], [0.0], [1.0]])},
    )  # fmt: skip

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    # The draft's probability, 3/4, is the last feature.
    better = [sigmoid(0.0), sigmoid(0.75), sigmoid(3.75)]
    worse = [0.5, sigmoid(2.0), 0.5]
    expected = [(1 + bad - good) / 2 for bad, good in zip(worse, better, strict=True)]
    torch.testing.assert_close(head.risk(case), torch.tensor(expected))
    assert expected[0] == 0.5 and accepts(StateArbiterRule.of(head), case).tolist() == [True, False, True]
    assert accepts(StateArbiterRule.of(head, threshold=0.45), case).tolist() == [False, False, True]


def test_pivot_by_hand_and_its_floor():
    tensors = {
        "mean": torch.tensor([0.0, 0.0, 0.0]), "scale": torch.tensor([1.0, 1.0, 2.0]),
        "hidden.weight": torch.tensor([[1.0]]), "hidden.bias": torch.tensor([0.0]),
        "scalars.weight": torch.tensor([[0.0, 1.0]]), "scalars.bias": torch.tensor([0.0]),
        "fuse.weight": torch.tensor([[1.0, -4.0]]), "fuse.bias": torch.tensor([0.0]),
        "out.weight": torch.tensor([[0.0], [1.0]]), "out.bias": torch.tensor([0.0, 0.0]),
    }  # fmt: skip
    head = PivotHead(tensors, FeatureRecipe(entropy=True, probability=True), 0.5, pair=IDENTITY, task="t")
    case = evidence([[2.0], [3.0], [-1.0]], token_ids=(1, 2, 0))
    # relu(2 - 4 * 0.3 / 2) = 1.4; p = 5e-5; relu(0 - 0.8) = 0
    probabilities = head.risk(case)
    torch.testing.assert_close(probabilities[0], torch.sigmoid(torch.tensor(1.4)))
    torch.testing.assert_close(probabilities[2], torch.tensor(0.5))
    risks = PivotRule.of(head).risk(case)
    assert risks[1] == math.inf
    assert risks[0] == probabilities[0]
    assert PivotRule.of(head, floor=1e-5).risk(case)[1] < 1


def test_recipes_order_states_and_refuse_features_that_decoding_lacks():
    states = TokenStates(
        target={
            "draft": {-1: torch.full((1, 2), 1.0), 2: torch.full((1, 2), 2.0)},
            "target": {-1: torch.full((1, 2), 5.0)},
        },
        draft={"draft": {-1: torch.full((1, 1), 3.0)}},
        entropy=torch.tensor([7.0]),
        probability=torch.tensor([0.5]),
    )
    recipe = FeatureRecipe(states="both", layers=(2, -1), entropy=True, probability=True)
    assert assemble(recipe, states).tolist() == [[2, 2, 1, 1, 3, 7, 0.5]]
    assert assemble(FeatureRecipe(encoding="both"), states).tolist() == [[1, 1, 5, 5]]
    with pytest.raises(SpecError, match="layer 4 that encode the draft token"):
        assemble(FeatureRecipe(layers=(4,)), states)
    for odd in (FeatureRecipe(encoding="target"), FeatureRecipe(encoding="previous", states="both")):
        with pytest.raises(SpecError, match="do not exist while decoding"):
            odd.require_decodable()
    with pytest.raises(SpecError, match="states must be one of target, draft, both, got 'all'"):
        FeatureRecipe(states="all")


def test_a_recipe_is_saved_with_its_head(tmp_path):
    recipe = FeatureRecipe(states="both", layers=(2, -1), entropy=True)
    dataclasses.replace(random_head("judge"), recipe=recipe).save_pretrained(tmp_path)
    assert JudgeHead.from_pretrained(tmp_path).recipe == recipe
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (({"depth": 3}, "unknown: depth"), ({"states": "all"}, "got 'all'")):
        changed = {**config, "recipe": {**config["recipe"], **changes}}
        changed.pop("sha256")
        changed["sha256"] = signature(changed, (tmp_path / "model.safetensors").read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ReprieveError, match=message):
            JudgeHead.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["judge", "pivot"])
def test_artefacts_round_trip(kind, tmp_path):
    head = random_head(kind)
    head.save_pretrained(tmp_path / "h")
    assert sorted(path.name for path in (tmp_path / "h").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = type(head).from_pretrained(tmp_path / "h", pair=IDENTITY)
    features = torch.randn(5, 6 + head.recipe.num_scalars)
    assert torch.equal(again.probability(features), head.probability(features))
    assert (again.recipe, again.pair, again.task, again.threshold) == (
        head.recipe,
        head.pair,
        head.task,
        head.threshold,
    )


def test_mismatched_and_tampered_artefacts_are_refused(tmp_path):
    head = random_head()
    folder = tmp_path / "h"
    head.save_pretrained(folder)
    other = dataclasses.replace(IDENTITY, target="big/target", target_weights="t9")
    with pytest.raises(PairError, match=r"'tiny/target'.*'big/target'.*target_weights"):
        JudgeHead.from_pretrained(folder, pair=other)
    with pytest.raises(ReprieveError, match=r"must have .*pivot.*, got .*judge"):
        PivotHead.from_pretrained(folder)
    with pytest.raises(ReprieveError, match="holds something else than a pivot head"):
        random_head("pivot").save_pretrained(folder)
    with pytest.raises(ReprieveError, match="neither a folder nor a hub id"):
        JudgeHead.from_pretrained(tmp_path / "nothing")
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"extra": 1},
        {"threshold": 0.9},
        {"task": "gsm8k"},
        {"recipe": {**config["recipe"], "layers": [1]}},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ReprieveError, match="was changed after they were saved together"):
            JudgeHead.from_pretrained(folder)
    for content in ("[1]", "{", "\x00"):
        (folder / "config.json").write_text(content)
        with pytest.raises(ReprieveError, match=r"cannot be read|must be an object"):
            JudgeHead.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    random_head(seed=3).save_pretrained(tmp_path / "other")
    (folder / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ReprieveError, match="was changed after they were saved together"):
        JudgeHead.from_pretrained(folder)
    with pytest.raises(SpecError, match=r"weight must have shape \[-1\], got nothing"):
        JudgeHead({"bias": torch.tensor(0.0)}, FeatureRecipe(), 0.1, pair=IDENTITY, task="t")
    weights = {"weight": torch.tensor([math.nan]), "bias": torch.tensor(0.0)}
    with pytest.raises(SpecError, match="must be finite"):
        JudgeHead(weights, FeatureRecipe(), 0.1, pair=IDENTITY, task="t")


def test_other_pairs_are_errors_and_other_tasks_warnings(pair):
    rule = JudgeRule.of(random_head(size=32, pair=pair.identity))
    with pytest.warns(UserWarning, match="trained on task 'arithmetic' and is used on 'gsm8k:shots=2'"):
        require_heads_fit(rule, pair.identity, "gsm8k:shots=2")
    require_heads_fit(rule, pair.identity, "arithmetic")
    with pytest.raises(PairError, match="was made for target"):
        pair.decoder(JudgeRule.of(random_head(size=32)), num_draft_tokens=4)
    # A head on target states works with another draft; one on draft states does not.
    other_draft = dataclasses.replace(pair.identity, draft_weights="d9")
    require_heads_fit(rule, other_draft, None)
    both = JudgeHead(
        {"weight": torch.zeros(64), "bias": torch.tensor(0.0)},
        FeatureRecipe(states="both"),
        0.2,
        pair=pair.identity,
        task="arithmetic",
    )
    with pytest.raises(PairError, match="different draft_weights"):
        require_heads_fit(JudgeRule.of(both), other_draft, None)


def test_a_rule_loads_its_head_from_a_folder_alone_or_composed(tmp_path):
    random_head().save_pretrained(tmp_path / "h")
    rule = attach_heads(parse_rule(f"judge:path={tmp_path}/h"))
    assert rule.threshold == 0.2
    assert rule.spec == f"judge:path={tmp_path}/h,threshold=0.2"
    both = attach_heads(parse_rule(f"judge:path={tmp_path}/h,threshold=0.4&floor:min_prob=0.01"))
    assert both.traits.target_layers == (-1,)
    assert [name for name, _ in both.heads] == [f"{tmp_path}/h"]
    case = evidence(torch.randn(3, 6).tolist())
    risky = rule.risk(case) > 0.4
    assert not accepts(both, case)[risky].any()
    assert accepts(both, case).tolist() == (~risky & (case.token_log_probs > torch.tensor(0.01).log())).tolist()


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", ["judge", "pivot", "state_arbiter"])
def test_decoding_at_threshold_0_is_lossless_and_at_1_rescues(pair, kind, greedy):
    rule_type = {"judge": JudgeRule, "pivot": PivotRule, "state_arbiter": StateArbiterRule}[kind]
    params = SamplingParams(max_new_tokens=48, temperature=0.0 if greedy else 0.8, top_k=0 if greedy else 20, seed=3)
    head = random_head(kind, size=32, pair=pair.identity)

    def answer(threshold):
        rule = rule_type.of(head, threshold=threshold)
        return pair.decoder(rule, num_draft_tokens=6).generate(PROMPT, params)

    lossless = pair.decoder("lossless", num_draft_tokens=6).generate(PROMPT, params)
    assert answer(0.0).token_ids == lossless.token_ids
    assert answer(1.0).num_rescued > 0


@pytest.mark.parametrize("kind", ["judge", "pivot"])
def test_head_rules_judge_tree_nodes_by_the_states_of_the_nodes(pair, kind):
    """Every branch of a tree gets the risk it would get as a chain."""
    rule = {"judge": JudgeRule, "pivot": PivotRule}[kind].of(random_head(kind, size=32, pair=pair.identity))
    tree = Block(torch.tensor([7, 9, 8, 4]), (-1, -1, 0, 1))

    def risks(block):
        model = CachedModel(pair.target, hidden_layers=(-1,))
        with torch.inference_mode():
            model.start(PROMPT[:-1])
            logits, hidden = model.forward([PROMPT[-1], *block.token_ids.tolist()], block)
        from reprieve.types import Verification

        verification = Verification(logits, hidden)
        case = Evidence(
            block.token_ids, verification.logits[block.parent_rows], True,
            torch.zeros(block.num_tokens, dtype=torch.bool),
            node_hidden=select_rows(verification.hidden, slice(1, None)), parents=block.parents,
        )  # fmt: skip
        return rule.with_dial(1.0).risk(case), case

    whole, case = risks(tree)
    for branch in ([0, 2], [1, 3]):
        alone, _ = risks(Block.chain(tree.token_ids[branch]))
        torch.testing.assert_close(whole[branch], alone, rtol=1e-4, atol=1e-5)
    checked = checked_by(case.lossless_accepts)
    outcome = accept(rule.with_dial(1.0), tree, case, checked, budget=RiskBudget())
    assert outcome.path[0] in (0, 1)
    assert set(outcome.provenance) == {Provenance.RESCUED}


def test_wrong_sizes_and_missing_states_are_named(pair):
    with pytest.raises(UnsupportedModelError, match="needs the target's hidden states of layer -1"):
        SpeculativeDecoder(
            CachedModel(pair.target),
            DraftModelDrafter(CachedModel(pair.draft), CPU),
            pair.tokenizer,
            rule=JudgeRule.of(random_head(size=32)),
        )
    decoder = pair.decoder(JudgeRule.of(random_head(size=6, pair=pair.identity)), num_draft_tokens=4)
    with pytest.raises(SpecError, match="reads 6 features, these models give 32"):
        decoder.generate(PROMPT)


def test_training_features_equal_what_decoding_sees(pair):
    """One tree forward over a labelled problem gives the same states as a plain forward over each prefix."""
    response = [5, 9, 2, 30, 17]
    labels = ProblemLabels(
        "p", MINED, tuple(PROMPT), tuple(response), tuple(response), None,
        (Mismatch(1, 40, 9, False), Mismatch(3, 30, 21, True), Mismatch(0, 5, 6, None)),
    )  # fmt: skip
    tokens = collect(pair, [labels], layers=(1, -1))
    assert tokens.important.tolist() == [False, True]

    def states(model, text):
        with torch.inference_mode():
            return model(torch.tensor([text]), output_hidden_states=True)

    for row, (place, ours, theirs) in enumerate([(1, 9, 40), (3, 21, 30)]):
        before = [*PROMPT, *response[:place]]
        for encoding, text in (("draft", [*before, ours]), ("target", [*before, theirs]), ("previous", before)):
            for found, model, layers in (
                (tokens.states.target, pair.target, (1, -1)),
                (tokens.states.draft, pair.draft, (-1,)),
            ):
                whole = states(model, text).hidden_states
                for layer in layers:
                    torch.testing.assert_close(found[encoding][layer][row], whole[layer][0, -1], rtol=1e-3, atol=1e-3)
        log_probs = states(pair.target, before).logits[0, -1].log_softmax(-1)
        assert float(tokens.states.probability[row].log()) == pytest.approx(float(log_probs[ours]), abs=1e-3)
        expected = float(states(pair.draft, before).logits[0, -1].softmax(-1)[ours])
        assert float(tokens.states.draft_probability[row]) == pytest.approx(expected, abs=1e-4)
    assert tokens.features(FeatureRecipe(states="both")).shape == (2, 64)


def test_formulas_take_any_leading_shape():
    features = torch.randn(2, 3, 8)
    head = random_head("pivot")
    assert pivot_logits(features, head.tensors).shape == (2, 3, 2)
    judge = random_head("judge")
    assert judge.probability(torch.randn(2, 3, judge.num_features)).shape == (2, 3)


def test_bundled_heads_default_to_their_most_lenient_certified_threshold(tmp_path):
    def spec(rule, target="reprieve/miniature"):
        return attach_heads(parse_rule(rule), target).spec

    assert spec("judge") == "judge:threshold=0.1" and spec("state_arbiter") == "state_arbiter:threshold=0.51"
    assert spec("judge:path=reprieve/miniature-judge", None) == "judge:path=reprieve/miniature-judge,threshold=0.1"
    assert spec("judge:threshold=0.3") == "judge:threshold=0.3"
    assert spec("pivot") == f"pivot:threshold={load_head('reprieve/miniature-pivot').threshold:g}", "none is certified"
