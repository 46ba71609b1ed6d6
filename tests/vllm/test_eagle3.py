"""EAGLE-3 heads in the speculators format: one untrained, whose drafts go through the rules, and the bundled one."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm import SamplingParams

from reprieve.drafters import DRAFTERS
from reprieve.engine import SamplingParams as LocalParams
from reprieve.engine import SpeculativeDecoder, load_pair
from reprieve.heads.files import bundled_folder, find_head
from reprieve.rules import parse_rule
from tests.vllm.conftest import make_llm, rules_of, use_rule

K = 4


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle3")
    target = AutoConfig.from_pretrained(bundled_folder("target"))
    size, vocab, inner = target.hidden_size, target.vocab_size, 2 * target.hidden_size
    layer = {
        "model_type": "llama", "hidden_size": size, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": target.num_attention_heads, "num_key_value_heads": target.num_attention_heads,
        "head_dim": size // target.num_attention_heads, "vocab_size": vocab, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1",
        "draft_vocab_size": vocab - 100,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": K}],
            "verifier": {"name_or_path": str(bundled_folder("target")), "architectures": ["LlamaForCausalLM"]},
        },
    }
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "embed_tokens": (vocab, size),
        "fc": (size, 3 * size),
        "lm_head": (vocab - 100, size),
        **{f"layers.0.self_attn.{name}_proj": (size, 2 * size) for name in "qkv"},
        "layers.0.self_attn.o_proj": (size, size),
        "layers.0.mlp.gate_proj": (inner, size),
        "layers.0.mlp.up_proj": (inner, size),
        "layers.0.mlp.down_proj": (size, inner),
    }
    tensors = {f"{name}.weight": torch.randn(*shape, generator=draw) * 0.05 for name, shape in shapes.items()}
    for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(size)
    tensors["d2t"] = torch.zeros(vocab - 100, dtype=torch.long)
    tensors["t2d"] = torch.arange(vocab) < vocab - 100
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return make_llm("fuzzy:threshold=0.4", method="eagle3", model=str(folder), num_speculative_tokens=K)


def generate(llm, problems):
    prompts = [problem.prompt for problem in problems[:4]]
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=41, ignore_eos=True), use_tqdm=False)


@pytest.mark.parametrize(
    "spec", ["fuzzy:threshold=1", "judge:path=reprieve/arithmetic-judge,threshold=1", "top_k:k=714", "cascade:alpha=9"]
)
def test_rules_that_accept_everything_keep_whole_blocks(llm, problems, spec):
    rules = use_rule(llm, spec)
    for output in generate(llm, problems):
        summary = output.outputs[0].spec_decode_metrics.to_dict()
        assert summary["mean_acceptance_length"] == K + 1 and summary["num_rescued_tokens"] > 0
    assert rules.failures == 0


def test_strict_rules_leave_the_targets_answers(llm, problems):
    use_rule(llm, "lossless")
    plain = [output.outputs[0].token_ids for output in generate(llm, problems)]
    for spec in ("fuzzy:threshold=0", "margin:delta=0", "judge:path=reprieve/arithmetic-judge,threshold=0"):
        use_rule(llm, spec)
        assert [output.outputs[0].token_ids for output in generate(llm, problems)] == plain
    assert rules_of(llm).failures == 0


def test_the_bundled_head_is_accepted_as_often_as_by_the_local_engine(problems):
    """Chains of six tokens: vLLM's own drafting from the shipped file, and ours, round by round."""
    depth = 6
    folder = find_head("reprieve/arithmetic-eagle3")
    served = make_llm("lossless", method="eagle3", model=str(folder), num_speculative_tokens=depth)
    prompts = [problem.prompt for problem in problems[:8]]
    outputs = served.generate(prompts, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    pair = load_pair(dtype="float32")
    drafter = DRAFTERS.make(f"eagle3:top_k=1,depth={depth}").build(pair, parse_rule("lossless"))
    decoder = SpeculativeDecoder(pair.cached_target(drafter.target_layers), drafter, pair.tokenizer)
    theirs = ours = 0.0
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        made = decoder.generate([*output.prompt_token_ids, ids[0]], LocalParams(max_new_tokens=199))
        assert made.token_ids == ids[1:]
        summary = output.outputs[0].spec_decode_metrics.to_dict()
        theirs += summary["mean_acceptance_length"] / len(outputs)
        ours += made.tokens_per_round / len(outputs)
    print(f"mean acceptance length: vLLM {theirs:.3f}, ours {ours:.3f}")
    assert theirs == pytest.approx(ours, rel=0.03) and ours > 3.5
