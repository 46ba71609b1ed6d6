"""Drafting trees with EAGLE-3 heads."""

import itertools

import pytest
import torch

from reprieve.drafters import DRAFTERS, EagleDrafter, EagleSettings
from reprieve.drafters.length import FixedLength
from reprieve.drafters.pruning import Pruning
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import SpecError, UnsupportedModelError
from reprieve.models.cache import RollbackCache
from reprieve.models.cached_model import CachedModel
from reprieve.types import ROOT
from tests.kit.eagles import PROMPT, make_decoder
from tests.kit.tiny import ARCHITECTURES, NumberTokenizer, random_eagle, tiny_model

SHAPES = [
    dict(depth=1, top_k=3, total_tokens=3),
    dict(depth=4, top_k=1, total_tokens=4),
    dict(depth=5, top_k=4, total_tokens=20),
    dict(depth=3, top_k=48, total_tokens=60),
]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_trees_give_the_targets_own_tokens(kind, shape):
    target = tiny_model(kind)
    head = random_eagle(target, draft_vocab_size=40)
    plain = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer())
    params = SamplingParams(max_new_tokens=60)
    wanted = plain.generate(PROMPT, params).token_ids
    for pruning in ({}, {"prune": "entropy", "epsilon": 0.3}):
        made = make_decoder(target, head, **pruning, **shape).generate(PROMPT, params)
        assert made.token_ids == wanted
        assert (made.num_pruned > 0) == (bool(pruning) and shape["top_k"] > 1)


@pytest.mark.parametrize(
    "rule",
    ["top_k:k=3", "typical", "margin:delta=2", "fuzzy:threshold=0.5", "asd", "fly", "random:rate=0.5", "lenience"],
)
def test_every_kind_of_rule_decodes_trees(rule):
    target = tiny_model()
    decoder = make_decoder(target, random_eagle(target), rule=rule, depth=4, top_k=3, total_tokens=12)
    for temperature in (0.0, 1.0):
        made = decoder.generate(PROMPT, SamplingParams(max_new_tokens=40, temperature=temperature))
        assert len(made.tokens) == 40
        assert max(made.round_lengths) <= 5


def test_rounds_keep_within_depth_budget_and_k():
    target = tiny_model()
    head = random_eagle(target)
    for k, longest in ((2, 3), (16, 7)):
        made = make_decoder(target, head, rule="top_k:k=48", k=k, depth=6, top_k=1).generate(
            PROMPT, SamplingParams(max_new_tokens=23)
        )
        assert max(made.round_lengths) == longest and len(made.tokens) == 23
    assert len(make_decoder(target, head, depth=3).generate([5], SamplingParams(max_new_tokens=9)).tokens) == 9


def test_the_tree_holds_the_paths_of_largest_joint_probability():
    """With two fully expanded levels, the tree is the best set of paths, found here by enumeration."""
    target = tiny_model(vocab_size=6)
    head = random_eagle(target)
    total = 11
    drafter = EagleDrafter(head, vocab_size=6, settings=EagleSettings(depth=2, top_k=6, total_tokens=total))
    cached = CachedModel(target, hidden_layers=head.layers_read)
    SpeculativeDecoder(cached, drafter, NumberTokenizer(6))
    with torch.inference_mode():
        prompt = [1, 2, 3, 4]
        prefill = cached.start(prompt[:-1])
        from reprieve.models.sampling import Sampler

        drafter.start(prompt, Sampler(SamplingParams(), torch.device("cpu")), prefill)
        block = drafter.propose(2, FixedLength(2))
        states = head.fuse(prefill.hidden)
        cache = RollbackCache()
        size = len(states)
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
        places = torch.arange(size)
        logits, hidden = head(torch.tensor(prompt[1:]), states, cache=cache, positions=places, mask=mask)
        first = logits[-1].log_softmax(-1)
        paths = {}
        for token in range(6):
            paths[(token,)] = float(first[token])
            cache.truncate(size)
            after, _ = head(torch.tensor([token]), hidden[-1:], cache=cache, positions=torch.tensor([size]), mask=None)
            for child in range(6):
                paths[token, child] = float(first[token] + after[0].log_softmax(-1)[child])
    best = set(sorted(paths, key=paths.get, reverse=True)[:total])
    drafted = []
    for node, parent in enumerate(block.parents):
        above = () if parent == ROOT else drafted[parent]
        drafted.append((*above, int(block.token_ids[node])))
    assert set(drafted) == best
    assert block.draft_logits[0].log_softmax(-1).allclose(first, atol=1e-5)


def test_two_children_of_one_parent_are_never_the_same_token():
    target = tiny_model()
    decoder = make_decoder(target, random_eagle(target), depth=4, top_k=5, total_tokens=30)
    made = decoder.generate(PROMPT, SamplingParams(max_new_tokens=40), trace=True)
    for trace in made.trace:
        pairs = list(zip(trace.parents, trace.drafted_ids, strict=True))
        assert len(set(pairs)) == len(pairs)


def test_a_target_without_hidden_states_is_refused():
    target = tiny_model()
    with pytest.raises(UnsupportedModelError, match="eagle3 drafter needs the target's hidden states of layer 0"):
        SpeculativeDecoder(CachedModel(target), EagleDrafter(random_eagle(target), vocab_size=48), NumberTokenizer())


def test_block_verification_of_trees_is_refused_at_once():
    target = tiny_model()
    with pytest.raises(SpecError, match="needs chains, and the eagle3 drafter draws trees"):
        make_decoder(target, random_eagle(target), rule="lossless:verification=block")
    chain = make_decoder(target, random_eagle(target), rule="lossless:verification=block", top_k=1)
    assert len(chain.generate(PROMPT, SamplingParams(max_new_tokens=9, temperature=1.0)).tokens) == 9


def test_specifications_are_parsed_and_bad_ones_are_refused_with_a_reason():
    parsed = DRAFTERS.make("eagle3:top_k=4,prune=depth,keep=0.5")
    assert parsed == EagleSettings(top_k=4, prune="depth", keep=0.5) and parsed.pruning == Pruning("depth", keep=0.5)
    for spec, told in {
        "eagle3:width=3": "takes alpha, budget, depth",
        "eagle3:depth=0": "depth must be in [1, 512], got 0",
        "eagle3:epsilon=0.1": "epsilon goes with prune=",
        "eagle3:prune=random": "prune must be one of entropy, depth, depth_exp, path_prob, got 'random'",
        "eagle3:prune=entropy,epsilon=1": "epsilon must be in [0, 1), got 1.0",
        "eagle3:depth=deep": "depth must be a whole number, got 'deep'",
        "eagle3:top_k=1.5": "top_k must be a whole number, got '1.5'",
        "eagle3:prune=entropy,keep=0.5": "prune=entropy takes epsilon, budget, entropy_weight, leaf, not keep",
        "eagle3:prune=depth,alpha=inf": "alpha must be in [-1e+06, 1e+06], got inf",
        "eagle3:path=": "path must name a folder or a hub id, got nothing",
        "ngram:max_ngram=0": "max_ngram must be 1 or more, got 0",
        "draft:k=3": "it takes none",
        "oracle": "drafter must be one of draft, eagle3, ngram",
    }.items():
        with pytest.raises(SpecError) as caught:
            DRAFTERS.make(spec)
        assert told in str(caught.value)


def test_a_fully_pruned_tree_decodes_one_token_per_round():
    target = tiny_model()
    decoder = make_decoder(target, random_eagle(target), prune="depth", keep=0.1, alpha=9.0, depth=4, top_k=3)
    made = decoder.generate(PROMPT, SamplingParams(max_new_tokens=12))
    assert len(made.tokens) == 12 and set(itertools.chain(made.round_lengths)) == {1}


def test_the_default_head_is_the_targets_own():
    eagle, named = DRAFTERS.make("eagle3"), DRAFTERS.make("eagle3:path=heads/mine")
    assert eagle.source("reprieve/arithmetic-pair") == "reprieve/arithmetic-eagle3"
    assert eagle.source("reprieve/miniature") == "reprieve/miniature-eagle3"
    assert named.source("reprieve/miniature") == "heads/mine"
    with pytest.raises(SpecError, match="needs path=FOLDER: target 'some/model' has no head of its own"):
        eagle.source("some/model")
