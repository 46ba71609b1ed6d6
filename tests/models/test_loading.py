"""Untrusted model folders: incomplete weights, values that are not finite, and custom code are refused."""

import contextlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BambaConfig, BambaForCausalLM

from reprieve.engine import load_pair
from reprieve.errors import ReprieveError, UnsupportedModelError
from reprieve.models.loading import _why
from tests.kit.chats import byte_tokenizer, save_chat_pair


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_chat_pair(folder)
    return folder / "target"


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_complete_models_load(folder):
    pair = load_pair(folder)
    assert pair.target.config.num_hidden_layers == 2
    change_weights(folder, lambda tensors: tensors.update({"vision_tower.x": torch.ones(1)}))
    load_pair(folder)  # weights of other modalities are ignored


WEIGHTS = {
    "a missing weight": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lack model.layers.1.mlp.up_proj"),
    "a missing head": (lambda t: t.pop("lm_head.weight"), "lack lm_head.weight"),
    "a layer too many": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"].clone()}),
        "have no place for model.layers.2.mlp.up_proj.weight",
    ),
    "another shape": (lambda t: t.update({"model.norm.weight": torch.ones(7)}), "model.norm.weight|shape|size"),
    "another name": (lambda t: t.update({"norm": t.pop("model.norm.weight")}), "lack model.norm.weight"),
    "NaN": (lambda t: t["model.norm.weight"].fill_(float("nan")), "model.norm.weight is not finite"),
    "one infinity": (lambda t: t["model.embed_tokens.weight"][3, 3].fill_(float("inf")), "embed_tokens.* not finite"),
    "both infinities": (
        lambda t: t["lm_head.weight"][0].copy_(torch.tensor([float("inf"), float("-inf")] * 16)),
        "lm_head.weight is not finite",
    ),
    "nothing": (lambda t: t.clear(), "lack|cannot|could not"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_invalid_weights_are_refused(folder, name):
    change, says = WEIGHTS[name]
    change_weights(folder, change)
    with pytest.raises(ReprieveError, match=f"could not load the target .*model.*({says})"):
        load_pair(folder)


CONFIGS = {
    "a layer fewer": dict(num_hidden_layers=1),
    "a layer more": dict(num_hidden_layers=3),
    "a foreign type": dict(model_type="gpt2"),
    "an unknown type": dict(model_type="nonsense"),
    "another width": dict(hidden_size=64),
    "no width": dict(hidden_size=0),
    "a negative width": dict(hidden_size=-32),
    "a text for a width": dict(hidden_size="wide"),
    "other heads": dict(num_attention_heads=3),
    "an unknown activation": dict(hidden_act="nonsense"),
    "a vocabulary too small": dict(vocab_size=8),
    "code of its own": dict(
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, model_type="e"
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_invalid_configurations_are_refused(folder, name, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    change_config(folder, **CONFIGS[name])
    with pytest.raises(ReprieveError, match="could not load the target"):
        load_pair(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\0" * 100, b"\xff" * 8])
def test_damaged_files_are_refused(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ReprieveError, match="could not load the target"):
        load_pair(folder)


def test_custom_tokenizer_code_is_not_run(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    path = folder / "tokenizer_config.json"
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    auto_map = {"AutoTokenizer": ["evil.Tokenizer", None]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map, "tokenizer_class": "Evil"}))
    with contextlib.suppress(ReprieveError):
        load_pair(folder)
    assert not (folder / "ran").exists()


def test_an_unknown_model_name_lists_the_accepted_forms(tmp_path):
    with pytest.raises(ReprieveError, match=r"there is no such folder\. A model is one of reprieve/"):
        load_pair(tmp_path / "nothing")
    error = OSError("We could not connect")
    assert "no such folder, and the model hub has no such model or cannot be reached" in _why("nothing", error)
    assert _why(tmp_path, error) == "We could not connect"


def test_a_hybrid_model_is_refused_by_name(tmp_path):
    tokenizer = byte_tokenizer()
    config = BambaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        mamba_n_groups=1, mamba_expand=2, max_position_embeddings=256,
    )  # fmt: skip
    BambaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for rule, draft in (("target_only", None), ("lossless", tmp_path)):
        pair = load_pair(tmp_path, draft)
        with pytest.raises(UnsupportedModelError, match="bamba has layers of kind linear_attention"):
            pair.decoder(rule)
