"""Untrusted heads and certificates: values out of range are refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

from reprieve import load_head
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.certificates import Certificate
from reprieve.heads.files import find_head, signature
from reprieve.models.eagle3 import load_eagle3
from tests.kit.tiny import random_eagle, random_head, tiny_model

NAN, INF = float("nan"), float("inf")


def forged(folder, config=lambda values: None, weights=lambda tensors: None):
    """Change a saved head and recompute its signature, as an attacker would."""
    values = json.loads((folder / "config.json").read_text())
    tensors = load((folder / "model.safetensors").read_bytes())
    config(values)
    weights(tensors)
    content = save(tensors)
    values.pop("sha256")
    values["sha256"] = signature(values, content)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def largest(change):
    def changed(tensors):
        name = max(tensors, key=lambda name: tensors[name].numel())
        tensors[name] = change(tensors[name])

    return changed


WEIGHTS = {
    "half": largest(lambda tensor: tensor.half()),
    "bfloat16": largest(lambda tensor: tensor.bfloat16()),
    "double": largest(lambda tensor: tensor.double()),
    "integers": largest(lambda tensor: tensor.int()),
    "truth values": largest(lambda tensor: tensor > 0),
    "NaN": largest(lambda tensor: torch.full_like(tensor, NAN)),
    "infinite": largest(lambda tensor: torch.full_like(tensor, INF)),
    "another shape": largest(lambda tensor: tensor.new_ones(3, 5, 7)),
    "nothing": lambda tensors: tensors.clear(),
}


@pytest.mark.parametrize("kind", ["judge", "pivot", "state_arbiter", "lts"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_invalid_weights_are_refused(kind, name, tmp_path):
    random_head(kind).save_pretrained(tmp_path / "h")
    with pytest.raises(ReprieveError, match=f"{kind} head"):
        load_head(forged(tmp_path / "h", weights=WEIGHTS[name]))


CONSTANTS = {
    "a NaN factor": dict(embedding_factors=[NAN]),
    "an infinite factor": dict(logit_factors=[INF]),
    "a negative factor": dict(embedding_factors=[-1.0]),
    "no tolerance": dict(tolerances=[0.0]),
    "too many": dict(tolerances=[1.0, 2.0]),
    "a NaN scale": dict(scale=[NAN] * 6),
    "a negative scale": dict(scale=[-1.0] * 6),
    "a scale of another form": dict(scale=[[1.0] * 6]),
    "an edge without buckets": dict(
        edges=[1.0], embedding_factors=[1.0] * 2, logit_factors=[1.0] * 2, tolerances=[1.0] * 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_a_bound_are_positive_and_finite(name, tmp_path):
    random_head("lts").save_pretrained(tmp_path / "h")
    changed = {key: torch.tensor(value) for key, value in CONSTANTS[name].items()}
    with pytest.raises(ReprieveError, match="lts head"):
        load_head(forged(tmp_path / "h", weights=lambda tensors: tensors.update(changed)))


@pytest.mark.parametrize("edges", [[2.0, 1.0], [1.0, 1.0], [1.0, NAN], [1.0, INF]])
def test_edges_must_rise(edges, tmp_path):
    three = torch.ones(3)
    made = dataclasses.replace(
        random_head("lts"), edges=torch.tensor([1.0, 2.0]), bucket_by="margin",
        embedding_factors=three, logit_factors=three, tolerances=three,
    )  # fmt: skip
    made.save_pretrained(tmp_path / "h")
    load_head(tmp_path / "h")
    with pytest.raises(ReprieveError, match=r"edges must be rising|finite"):
        load_head(forged(tmp_path / "h", weights=lambda tensors: tensors.update(edges=torch.tensor(edges))))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("arbiter", dict(num_draft_tokens=-1)),
        ("arbiter", dict(num_draft_tokens=0)),
        ("arbiter", dict(num_draft_tokens=10**6)),
        ("arbiter", dict(num_draft_tokens="8")),
        ("arbiter", dict(threshold=NAN)),
        ("arbiter", dict(threshold=2)),
        ("arbiter", dict(shape=dict(rank=10**6))),
        ("arbiter", dict(shape=dict(rank=0))),
        ("arbiter", dict(shape=dict(scale=INF))),
        ("arbiter", dict(shape=dict(dropout=-1))),
        ("arbiter", dict(shape=dict(nonsense=1))),
        ("judge", dict(threshold=-0.1)),
        ("judge", dict(threshold=NAN)),
        ("judge", dict(threshold=None)),
        ("judge", dict(recipe=dict(layers=[10**9]))),
        ("judge", dict(recipe=dict(layers=["a"]))),
        ("judge", dict(recipe=dict(layers=[]))),
        ("judge", dict(recipe=dict(states="all"))),
        ("judge", dict(recipe=5)),
        ("judge", dict(pair=5)),
        ("judge", dict(task=5)),
        ("lts", dict(delta=0)),
        ("lts", dict(delta=NAN)),
        ("lts", dict(delta=0.9)),
        ("lts", dict(bucket_by="nothing")),
    ],
)
def test_settings_out_of_range_are_refused(kind, change, tmp_path):
    random_head(kind).save_pretrained(tmp_path / "h")
    with pytest.raises(ReprieveError, match=f"{kind} head"):
        load_head(forged(tmp_path / "h", config=lambda values: values.update(change)))


EAGLE = {
    "NaN": lambda tensors: tensors["fc.weight"].fill_(NAN),
    "infinite": lambda tensors: tensors["fc.weight"].fill_(INF),
    "integers": lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].int()}),
    "tokens below 0": lambda tensors: tensors["d2t"].fill_(-100),
    "tokens beyond all": lambda tensors: tensors["d2t"].fill_(10**9),
    "tokens by halves": lambda tensors: tensors.update(d2t=tensors["d2t"].float() + 0.5),
    "no tokens": lambda tensors: tensors.pop("d2t"),
    "a layer too few": lambda tensors: tensors.pop("fc.weight"),
}


def save_eagle(head, folder):
    """Save an EAGLE-3 head in the speculators format."""
    folder.mkdir()
    tensors = {name: tensor.contiguous().clone() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.config.layers),
        "transformer_layer_config": head.config.layer.to_dict(),
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", EAGLE)
def test_drafting_heads_are_checked_too(name, tmp_path):
    target = tiny_model()
    save_eagle(random_eagle(target, draft_vocab_size=20), tmp_path / "e")
    load_eagle3(str(tmp_path / "e"), target)
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    EAGLE[name](tensors)
    save_file(tensors, tmp_path / "e" / "model.safetensors")
    with pytest.raises(ReprieveError, match="EAGLE-3 head"):
        load_eagle3(str(tmp_path / "e"), target)


CERTIFICATE = {
    "a larger threshold": (dict(threshold=0.9), True),
    "another rule": (dict(rule="margin:delta=50"), True),
    "another portable rule": (dict(portable_rule="margin:delta=50"), True),
    "another rule's threshold": (dict(rule="judge:path=x,threshold=0.9"), True),
    "both rules": (dict(rule="judge:path=x,threshold=0.9", portable_rule="judge:path=y,threshold=0.9"), True),
    "no rule": (dict(rule="nonsense"), True),
    "a text for a threshold": (dict(threshold="0.04"), True),
    "NaN": (dict(threshold=NAN), True),
    "a smaller loss": (dict(promise=dict(max_drop=0.0001)), False),
    "another verdict": (dict(verdict="confirmed!"), False),
    "another statement": (dict(statement="It is lossless."), False),
    "other conditions": (dict(conditions={}), True),
    "more": (dict(extra=1), True),
}


@pytest.mark.parametrize("name", CERTIFICATE)
def test_an_edited_certificate_is_refused(name, tmp_path):
    change, contradicts = CERTIFICATE[name]
    source = next((find_head("reprieve/arithmetic-judge") / "certificates").glob("*-0.04.json"))
    values = json.loads(source.read_text()) | change
    path = tmp_path / "c.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ReprieveError, match="changed after it was made"):
        Certificate.load(path)
    del values["sha256"]
    path.write_text(json.dumps(values))
    with pytest.raises(ReprieveError, match="changed after it was made"):
        Certificate.load(path)
    if contradicts:  # with a new signature, its fields must still agree
        path.write_text(json.dumps({**values, "sha256": signature(values)}))
        with pytest.raises(ReprieveError, match="cannot be read"):
            Certificate.load(path)


def test_a_contradiction_in_a_certificate_is_named(tmp_path):
    source = next((find_head("reprieve/arithmetic-judge") / "certificates").glob("*-0.04.json"))
    made = Certificate.load(source)
    (tmp_path / "c.json").write_text(dataclasses.replace(made, threshold=0.5).to_json())
    with pytest.raises(ReprieveError, match=r"threshold must be what rule judge.* says, got 0\.5"):
        Certificate.load(tmp_path / "c.json")
    assert issubclass(SpecError, ReprieveError)
