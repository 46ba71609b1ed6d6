"""Tiny untrained drafters of the bundled target, in the layouts that vLLM reads: EAGLE-3, MTP and DFlash."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.kit.pairs import ARITHMETIC

K = 4


class Weights:
    """Random matrices and norms of ones, by name."""

    def __init__(self):
        self.draw = torch.Generator().manual_seed(0)
        self.tensors = {}

    def matrix(self, name, *shape):
        self.tensors[f"{name}.weight"] = torch.randn(*shape, generator=self.draw) * 0.05

    def norms(self, *names, size):
        for name in names:
            self.tensors[f"{name}.weight"] = torch.ones(size)

    def layer(self, name, *, size, inner, reads=1):
        """Attention and MLP of a Llama or Qwen layer; attention reads `reads` times the hidden size."""
        for part in "qkv":
            self.matrix(f"{name}.self_attn.{part}_proj", size, reads * size)
        self.matrix(f"{name}.self_attn.o_proj", size, size)
        self.matrix(f"{name}.mlp.gate_proj", inner, size)
        self.matrix(f"{name}.mlp.up_proj", inner, size)
        self.matrix(f"{name}.mlp.down_proj", size, inner)
        self.norms(f"{name}.input_layernorm", f"{name}.post_attention_layernorm", size=size)

    def save(self, folder, config):
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.tensors, folder / "model.safetensors")


def _layer_config(model_type, inner):
    target = AutoConfig.from_pretrained(ARITHMETIC.role_folder("target"))
    heads = target.num_attention_heads
    return {
        "model_type": model_type, "hidden_size": target.hidden_size, "intermediate_size": inner,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": target.hidden_size // heads, "vocab_size": target.vocab_size, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip


def eagle3(folder):
    """Write an EAGLE-3 head in the speculators format, with a reduced vocabulary."""
    layer = _layer_config("llama", inner=256)
    size, vocab, inner = layer["hidden_size"], layer["vocab_size"], layer["intermediate_size"]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1",
        "draft_vocab_size": vocab - 100,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
            "verifier": {"name_or_path": str(ARITHMETIC.role_folder("target")), "architectures": ["LlamaForCausalLM"]},
        },
    }
    made = Weights()
    made.layer("layers.0", size=size, inner=inner, reads=2)
    made.norms("layers.0.hidden_norm", "norm", size=size)
    made.matrix("embed_tokens", vocab, size)
    made.matrix("fc", size, 3 * size)
    made.matrix("lm_head", vocab - 100, size)
    made.tensors["d2t"] = torch.zeros(vocab - 100, dtype=torch.long)
    made.tensors["t2d"] = torch.arange(vocab) < vocab - 100
    made.save(folder, config)
    return {"method": "eagle3", "model": str(folder)}


def dflash(folder):
    """One layer that drafts a block at once, from the states of two of the target's layers."""
    layer = _layer_config("qwen3", inner=64)
    size, head = layer["hidden_size"], layer["head_dim"]
    config = {
        **layer,
        "architectures": ["DFlashDraftModel"],
        "block_size": K + 1,
        "num_target_layers": AutoConfig.from_pretrained(ARITHMETIC.role_folder("target")).num_hidden_layers,
        # vLLM's attention on a CPU is causal only
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1], "causal": True},
    }
    made = Weights()
    made.layer("layers.0", size=size, inner=64)
    made.norms("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm", size=head)
    made.norms("hidden_norm", "norm", size=size)
    made.matrix("fc", size, 2 * size)
    made.save(folder, config)
    return {"method": "dflash", "model": str(folder)}


def mtp(folder):
    """The bundled target in MiMo's layout (Qwen2 with biases of zero), with one MTP layer."""
    source = ARITHMETIC.role_folder("target")
    given = json.loads((source / "config.json").read_text())
    size, layers = given["hidden_size"], given["num_hidden_layers"]
    for path in source.iterdir():
        if path.suffix in (".json", ".model") and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    made = Weights()
    for path in source.glob("*.safetensors"):
        made.tensors |= {name: tensor.float() for name, tensor in load_file(path).items()}
    layer = "model.mtp_layers.0"
    made.layer(layer, size=size, inner=given["intermediate_size"])
    made.matrix(f"{layer}.input_proj", size, 2 * size)
    made.norms(*(f"{layer}.{name}_layernorm" for name in ("token", "hidden", "final")), size=size)
    for name in (layer, *(f"model.layers.{number}" for number in range(layers))):
        for part in "qkv":
            made.tensors[f"{name}.self_attn.{part}_proj.bias"] = torch.zeros(
                len(made.tensors[f"{name}.self_attn.{part}_proj.weight"])
            )
    config = {**given, "model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    made.save(folder, config)
    return {"method": "mtp", "model": str(folder)}


def engine_of(name: str, speculative: dict[str, str]) -> dict[str, str]:
    """Engine settings that a drafter needs: the MTP layer is part of the target's folder."""
    if name != "mtp":
        return {}
    # the tokenizer from its own folder: transformers would build another one from a Qwen2 config
    return {"model": speculative["model"], "tokenizer": str(ARITHMETIC.role_folder("target"))}


DRAFTERS: dict[str, object] = {"eagle3": eagle3, "mtp": mtp, "dflash": dflash}
