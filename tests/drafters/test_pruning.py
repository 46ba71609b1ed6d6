"""ARC-Decode's pruning and the alternatives."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from reprieve.drafters.pruning import Pruning
from reprieve.types import ROOT


def random_tree(seed, num=40):
    generator = torch.Generator().manual_seed(seed)
    parents, log_probs = [], []
    for node in range(num):
        parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else ROOT
        step = -float(torch.rand(1, generator=generator)) * 2
        parents.append(parent)
        log_probs.append(step + (0.0 if parent == ROOT else log_probs[parent]))
    return parents, log_probs


@st.composite
def trees(draw):
    """Trees of up to 24 nodes; log-probabilities fall along every path."""
    parents, log_probs = [], []
    for node in range(draw(st.integers(1, 24))):
        parent = draw(st.integers(ROOT, node - 1))
        parents.append(parent)
        log_probs.append(-draw(st.floats(0.0, 4.0)) + (0.0 if parent == ROOT else log_probs[parent]))
    return parents, log_probs


def depths_of(parents):
    depths = []
    for parent in parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


@given(trees(), st.floats(0.0, 1.0), st.sampled_from(["entropy", "depth", "depth_exp", "path_prob"]))
def test_pruning_keeps_prefixes(tree, root_entropy, strategy):
    parents, log_probs = tree
    kept = Pruning(strategy, epsilon=0.3, keep=0.6, leaf=0.02).kept(parents, log_probs, root_entropy)
    assert kept == sorted(set(kept))
    assert all(parents[node] == ROOT or parents[node] in kept for node in kept)
    if strategy == "entropy":
        assert kept, "something is left to verify"
    if strategy == "path_prob":  # a parent is at least as likely as its child, and comes first
        assert len(kept) == max(1, round(0.6 * len(parents)))


@pytest.mark.parametrize("strategy", ["entropy", "depth", "depth_exp", "path_prob"])
def test_pruning_removes_some_nodes_and_keeps_some(strategy):
    parents, log_probs = random_tree(0)
    assert 0 < len(Pruning(strategy, epsilon=0.3, keep=0.6, leaf=0.02).kept(parents, log_probs, 0.4)) < len(parents)


@given(trees())
def test_entropy_pruning_covers_each_depths_mass_and_leaves_no_parent_childless(tree):
    parents, log_probs = tree
    assume(len(set(log_probs)) == len(log_probs))  # nodes of equal mass are interchangeable
    depths = depths_of(parents)
    for pruning, share in ((Pruning(epsilon=0.2), 0.2), (Pruning(budget=0.5), 0.5 / (max(depths) + 1))):
        kept = set(pruning.kept(parents, log_probs, 0.4))
        # A node is removed only by its depth's threshold or together with its parent.
        for depth in range(max(depths) + 1):
            nodes = [node for node in range(len(parents)) if depths[node] == depth]
            mass = sum(math.exp(log_probs[node]) for node in nodes)
            ranked = sorted(nodes, key=lambda node: -log_probs[node])
            needed = next(
                size for size in range(1, len(ranked) + 1)
                if sum(math.exp(log_probs[node]) for node in ranked[:size]) >= (1 - share) * mass * (1 - 1e-9)
            )  # fmt: skip
            reachable = [n for n in ranked[:needed] if parents[n] == ROOT or parents[n] in kept]
            assert set(reachable) <= kept
        parents_with_children = {parent for parent in parents if parent != ROOT}
        for node in kept & parents_with_children:
            assert any(parents[child] == node for child in kept)


def test_entropy_affects_leaves_and_no_depth_threshold():
    parents, log_probs = random_tree(3)
    calm, unsure = (Pruning(epsilon=0.2).kept(parents, log_probs, entropy) for entropy in (0.0, 1.0))
    assert calm == unsure, "Eq. 1 scales a whole depth: Eq. 3 cannot see it"
    calm, unsure = (Pruning(epsilon=0.2, leaf=0.05).kept(parents, log_probs, entropy) for entropy in (0.0, 1.0))
    assert len(unsure) < len(calm)


def test_pruning_by_hand():
    # Two roots of mass 0.9 and 0.05; under the first 0.6, 0.2 and 0.02; under the 0.2 a lone child.
    parents = [ROOT, ROOT, 0, 0, 0, 3]
    mass = [0.9, 0.05, 0.6, 0.2, 0.02, 0.1]
    logs = [math.log(value) for value in mass]
    assert Pruning(epsilon=0.1).kept(parents, logs, 0.0) == [0, 2, 3, 5]
    assert Pruning(epsilon=0.3).kept(parents, logs, 0.0) == [0, 2], "0.6 of 0.82 covers 70% of its depth"
    assert Pruning(epsilon=0.1, leaf=0.3).kept(parents, logs, 0.0) == [0, 2, 3, 5], "a parent keeps its best child"
    assert Pruning("path_prob", keep=0.5).kept(parents, logs, 0.0) == [0, 2, 3]
    assert Pruning("depth", keep=0.5, alpha=1.0).kept(parents, logs, 0.0) == [0], (
        "its favourites have lost their parents: the best root is left"
    )
    assert Pruning().kept([], [], 0.0) == []
