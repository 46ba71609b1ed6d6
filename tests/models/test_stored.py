"""The identity read from a pair's files equals that of the loaded pair."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from benchmarks.real_pair import quantise
from reprieve.engine import load_pair
from reprieve.errors import PairError, ReprieveError
from reprieve.models.loading import weights_fingerprint
from reprieve.models.stored import stored_fingerprint, stored_identity
from reprieve.settings import PairSettings
from tests.kit.chats import save_chat_pair
from tests.kit.pairs import ARITHMETIC


def test_the_bundled_pairs_files_give_its_identity(bundled_pair):
    identity, tokenizer, dtype = stored_identity(PairSettings(ARITHMETIC.name))
    assert identity == bundled_pair.identity
    assert len(tokenizer) == len(bundled_pair.tokenizer) and dtype == "float32"


def test_a_saved_pairs_files_give_its_identity_whole_and_in_shards(tmp_path):
    target, draft = save_chat_pair(tmp_path)
    pair = load_pair(target, draft)
    assert stored_identity(PairSettings(target, draft))[0] == pair.identity
    pair.target.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert stored_fingerprint(tmp_path / "shards") == weights_fingerprint(pair.target)
    half = pair.target.bfloat16()
    half.save_pretrained(tmp_path / "half")
    assert stored_fingerprint(tmp_path / "half") == pair.identity.target_weights
    assert stored_identity(PairSettings(str(tmp_path / "target")))[0].draft_weights is None


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss"])
def test_fused_experts_have_the_same_fingerprint_in_files_and_in_memory(tmp_path, kind):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=16, intermediate_size=24, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_local_experts=4,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stored_fingerprint(tmp_path) == weights_fingerprint(loaded)


def test_missing_weights_are_named(tmp_path):
    target, _ = save_chat_pair(tmp_path)
    (tmp_path / "target" / "model.safetensors").unlink()
    with pytest.raises(ReprieveError, match=r"weights in .*target"):
        stored_identity(PairSettings(target))
    with pytest.raises(PairError, match="different tokenizers"):
        stored_identity(PairSettings(str(tmp_path / "draft"), "reprieve/arithmetic-pair"))


def test_compressed_tensors_files_give_the_pairs_identity(tmp_path):
    pytest.importorskip("compressed_tensors")
    target, draft = save_chat_pair(tmp_path)
    config = transformers.AutoConfig.from_pretrained(target)
    config.attention_bias = True  # compressed-tensors re-registers weights, after the biases
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    quantise(tmp_path / "target", tmp_path / "int8")
    identity = stored_identity(PairSettings(str(tmp_path / "int8"), draft))[0]
    pair = load_pair(tmp_path / "int8", draft)
    assert pair.target.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    pair.target(torch.tensor([[1, 2]]))  # replaces the int8 weights
    assert pair.identity == replace(identity, target=pair.target_name)
    assert identity.target_weights != load_pair(target, draft).identity.target_weights


class _Packed(torch.Tensor):
    """A tensor like torchao's: plain values only after `dequantize`."""

    def flatten(self):
        raise NotImplementedError("flatten")

    def dequantize(self):
        return self.as_subclass(torch.Tensor) * 2


def test_a_quantised_tensor_is_fingerprinted_by_its_values():
    plain, packed = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        plain.weight.copy_(torch.arange(12.0).reshape(3, 4))
    packed.weight = nn.Parameter((plain.weight.detach() / 2).as_subclass(_Packed), requires_grad=False)
    assert type(packed.weight.detach()) is _Packed
    assert weights_fingerprint(packed) == weights_fingerprint(plain)
