"""GGUF files: loaded as ordinary models, or refused by name."""

import gguf
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from reprieve.engine import load_pair
from reprieve.errors import ReprieveError
from reprieve.settings import SamplingParams

TOKENS = ["<|endoftext|>", *(chr(code) for code in range(33, 127)), "Ġ", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]
TENSORS = {  # GGUF's names by transformers'
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    if name in TENSORS:
        return TENSORS[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{LAYER[module]}.{kind}"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = model.config
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(TOKENS) - 1)])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_loads_as_the_model_it_was_made_from(path, model):
    pair = load_pair(path, path, dtype="float32")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(pair.target.state_dict()[name], tensor)
    assert pair.tokenizer.encode("abc") == [TOKENS.index("ab"), TOKENS.index("c")]
    made = pair.decoder("lossless", num_draft_tokens=4).generate("ab", SamplingParams(max_new_tokens=8))
    assert made.num_accepted == made.num_drafted > 0  # the draft is the target


def test_a_gguf_file_can_be_loaded_as_int8(path):
    assert load_pair(path, dtype="int8").dtype == "int8"


def test_a_missing_or_broken_file_is_refused_by_name(tmp_path):
    with pytest.raises(ReprieveError, match=r"nothing\.gguf' is not a file"):
        load_pair(tmp_path / "nothing.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really")
    with pytest.raises(ReprieveError, match=r"could not load the target .*broken\.gguf"):
        load_pair(tmp_path / "broken.gguf")
