"""CoSpec's network: mask, caches, shared weights."""

import dataclasses
import json

import pytest
import torch

from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.loading import attach_heads, require_heads_fit
from reprieve.heads.settings import ArbiterShape
from reprieve.models.arbiter import ArbiterAdvisor, ArbiterModel, ArbitrationRound, Layout, hybrid_mask
from reprieve.rules import parse_rule
from tests.kit.arbiters import PROMPT, arbiter_of, trained
from tests.kit.tiny import ARCHITECTURES, IDENTITY, tiny_model


def test_the_mask_by_hand():
    """Three context tokens, one round after two of them and one after all three; at K = 1 a region has five tokens."""
    parts = [Layout.context(0, 3)]
    parts += [Layout.region(number, ArbitrationRound(length, [7], [8])) for number, length in enumerate((2, 3))]
    layout = Layout.join(parts)
    seen = hybrid_mask(layout, layout).int()
    assert seen[:3, :3].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]], "the context attends causally"
    assert seen[:3, 3:].sum() == 0, "nothing flows back into it"
    for row in seen[3:8]:
        assert row.tolist() == [1, 1, 0] + [1] * 5 + [0] * 5, "its own context and all of itself"
    for row in seen[8:]:
        assert row.tolist() == [1, 1, 1] + [0] * 5 + [1] * 5
    causal = hybrid_mask(layout, layout, hybrid=False).int()
    assert causal[3:8, 3:8].tolist() == torch.ones(5, 5).tril().tolist()
    assert causal[3:8, :3].tolist() == seen[3:8, :3].tolist()
    assert layout.positions.tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7]
    windowed = hybrid_mask(layout, layout, window=2).int()
    assert windowed[8].tolist() == [0, 0, 1] + [0] * 5 + [1, 1, 0, 0, 0], "positions less than two away, on both sides"


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_rounds_get_the_same_logits_together_alone_and_from_the_cache(kind):
    draft = tiny_model(kind)
    model = trained(draft)
    generator = torch.Generator().manual_seed(1)

    def draw(size):
        return torch.randint(0, 48, (size,), generator=generator).tolist()

    context = draw(30)
    rounds = [ArbitrationRound(length, draw(k), draw(k)) for length, k in ((12, 4), (17, 4), (18, 2), (30, 4))]
    cached = ArbiterAdvisor(model)
    cached.start(context[:12], max_length=30, num_draft_tokens=4)
    before, num_read = 12, 0
    with torch.no_grad():
        together = model.judge(context, rounds)
        for asked, logits in zip(rounds, together, strict=True):
            cached.commit(context[before : asked.context_length])
            found = cached.judge(asked.draft_ids, asked.target_ids)
            alone = model.judge(context[: asked.context_length], [asked])[0]
            torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(alone, logits, rtol=1e-3, atol=1e-3)
            num_new = asked.context_length - (before if num_read else 0)
            assert cached.num_read - num_read == num_new + 2 * len(asked.draft_ids) + 3, "the context is read once"
            before, num_read = asked.context_length, cached.num_read
    assert together[0].std() > 0


def test_the_hybrid_mask_lets_drafted_tokens_see_the_targets_and_the_causal_one_does_not(draft):
    asked, changed = (ArbitrationRound(8, [10, 11, 12], [10, 20, last]) for last in (12, 30))
    for hybrid, sees in ((True, True), (False, False)):
        model = trained(draft, hybrid=hybrid)
        with torch.no_grad():
            first, second = (model.judge(PROMPT, [item])[0] for item in (asked, changed))
        assert (first[0] != second[0]).item() is sees


def test_weights_are_shared_and_the_draft_is_unchanged(draft):
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        before = draft(tokens).logits
        model = trained(draft)
        assert torch.equal(draft(tokens).logits, before), "adapters of the arbiter must not touch the draft"
    held = {parameter.data_ptr() for parameter in draft.parameters()}
    base = [p for name, p in model.named_parameters() if not p.requires_grad]
    assert base and all(parameter.data_ptr() in held for parameter in base), "no weight of the draft is held twice"
    assert all("lora_" in name or name in ("separator", "head.weight", "head.bias") for name in model.own_tensors)
    rank = {t.shape[0] for name, t in model.own_tensors.items() if "lora_A" in name}
    assert rank == {16}, "the paper's"


def test_gradients_reach_adapters_separator_and_head_only(draft):
    model = trained(draft)
    model.judge(PROMPT, [ArbitrationRound(8, [1, 2], [3, 4])])[0].sum().backward()
    assert all(tensor.grad is not None and bool(tensor.grad.abs().sum() > 0) for tensor in model.own_tensors.values())
    assert all(parameter.grad is None for parameter in draft.parameters())


def test_bad_shapes_and_rounds_are_refused(draft):
    for bad, told in ((dict(rank=0), "rank must be in"), (dict(dropout=1.0), r"dropout must be in \[0, 0.9\]")):
        with pytest.raises(SpecError, match=told):
            ArbiterShape(**bad)
    with pytest.raises(SpecError, match="must pair each drafted token"):
        ArbitrationRound(3, [1, 2], [1])
    model = ArbiterModel(draft, ArbiterShape())
    with pytest.raises(SpecError, match=r"do not fit this draft: check head\.bias"):
        model.load_own({name: t for name, t in model.own_tensors.items() if name != "head.bias"})
    with pytest.raises(SpecError, match=r"separator must have shape \[32\]"):
        model.load_own({**model.own_tensors, "separator": torch.zeros(3)})


def test_an_arbiter_is_saved_bound_to_its_pair(tmp_path, draft):
    made = arbiter_of(trained(draft), threshold=0.7)
    made.save_pretrained(tmp_path / "a")
    again = Arbiter.from_pretrained(tmp_path / "a")
    assert again.fingerprint == made.fingerprint and again.shape == made.shape and again.num_draft_tokens == 4
    rule = attach_heads(parse_rule(f"arbiter:path={tmp_path / 'a'}"))
    assert rule.lambda_ == 0.7, "its own recommendation"
    assert parse_rule(rule.spec) == rule and "lambda=0.7" in rule.spec
    require_heads_fit(rule, IDENTITY, "arithmetic")
    for name in ("draft_weights", "target_weights", "tokenizer"):
        with pytest.raises(PairError, match="was made for target 'tiny/target'"):
            require_heads_fit(rule, dataclasses.replace(IDENTITY, **{name: "other"}), "arithmetic")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps({**config, "threshold": 0.1}))
    with pytest.raises(ReprieveError, match="was changed after they were saved together"):
        Arbiter.from_pretrained(tmp_path / "a")


def test_a_pair_builds_the_same_network_from_a_saved_arbiter(tmp_path, draft):
    model = trained(draft)
    arbiter_of(model).save_pretrained(tmp_path / "a")
    again = ArbiterModel.of(Arbiter.from_pretrained(tmp_path / "a"), draft)
    asked = [ArbitrationRound(8, [1, 2, 3], [1, 5, 3])]
    with torch.no_grad():
        assert torch.equal(model.judge(PROMPT, asked)[0], again.judge(PROMPT, asked)[0])
