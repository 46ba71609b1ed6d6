"""EAGLE-3 heads as files: the speculators format and damaged files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from reprieve.drafters import DRAFTERS
from reprieve.drafters.length import FixedLength
from reprieve.engine import SamplingParams, SpeculativeDecoder
from reprieve.errors import PairError, ReprieveError
from reprieve.models.cache import RollbackCache
from reprieve.models.eagle3 import default_layers, load_eagle3
from reprieve.rules import parse_rule
from reprieve.tasks import load_task
from tests.kit.tiny import tiny_model

BUNDLED = "reprieve/arithmetic-eagle3"


@pytest.fixture(scope="module")
def pair(bundled_pair):
    return bundled_pair


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_head_drafts_for_the_bundled_target(pair, temperature):
    problems = load_task("arithmetic").problems("test", 6)
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    drafter = DRAFTERS.make("eagle3").build(pair, parse_rule("lossless"), FixedLength(16))
    decoder = SpeculativeDecoder(pair.cached_target(drafter.target_layers), drafter, pair.tokenizer)
    rounds = tokens = 0
    for number, problem in enumerate(problems):
        params = SamplingParams(temperature=temperature, seed=number)
        made = decoder.generate(problem.prompt, params)
        tokens, rounds = tokens + len(made.tokens), rounds + made.num_rounds
        if not temperature:
            assert made.token_ids == plain.generate(problem.prompt, params).token_ids
    assert tokens / rounds > 4.5, "six tokens deep and a bonus: seven at most"


def test_our_forward_equals_the_speculators_models(pair):
    """Compare every step of its training-time unrolling, with the same weights."""
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    from reprieve.heads.files import find_head

    folder = find_head(BUNDLED)
    document = json.loads((folder / "config.json").read_text())
    config = Eagle3SpeculatorConfig(**{k: v for k, v in document.items() if k != "transformers_version"})
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel(config)
    missing = theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and all(name.startswith("verifier") for name in missing.missing_keys)
    ours = pair.eagle_head(BUNDLED)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 714, (1, 12), generator=generator)
    hidden = torch.randn(1, 12, 256 * 3, generator=generator)
    seen = []
    hook = theirs.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    with torch.no_grad():
        theirs.float()(hidden_states=hidden, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=3)
    hook.remove()
    with torch.inference_mode():
        states = ours.fuse(dict(zip(ours.layers_read, hidden[0].split(256, dim=-1), strict=True)))
        for place in (3, 8):
            cache, size = RollbackCache(), place + 1
            mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
            logits, own = ours(ids[0, :size], states[:size], cache=cache, positions=torch.arange(size), mask=mask)
            own = own[-1:]
            for step in range(3):
                torch.testing.assert_close(logits[-1], seen[step][place], atol=2e-4, rtol=1e-3)
                token = ids[0, place + 1 + step][None]
                logits, own = ours(token, own, cache=cache, positions=torch.tensor([size + step]), mask=None)


def test_a_head_for_a_target_of_other_sizes_is_refused(pair, tmp_path):
    other = tiny_model()
    with pytest.raises(PairError, match="must have shape"):
        load_eagle3(BUNDLED, other)
    with pytest.raises(ReprieveError, match="neither a folder nor a hub id"):
        load_eagle3("./nowhere", other)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ReprieveError, match="speculators format"):
        load_eagle3(tmp_path, other)
    head = pair.eagle_head(BUNDLED)
    assert int(head.target_ids.max()) < 714 and len(set(head.target_ids.tolist())) == head.config.draft_vocab_size


def broken(tmp_path, change, name):
    from reprieve.heads.files import find_head

    folder = tmp_path / name
    folder.mkdir()
    document = json.loads((find_head(BUNDLED) / "config.json").read_text())
    tensors = load_file(find_head(BUNDLED) / "model.safetensors")
    change(document, tensors)
    (folder / "config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda config, tensors: tensors.pop("fc.weight"), "lacks fc.weight"),
        (lambda config, tensors: tensors.update(d2t=tensors["d2t"] + 900), "d2t names tokens"),
        (lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 99]), "reads layers"),
        (lambda config, tensors: config.pop("draft_vocab_size"), "draft_vocab_size"),
        (lambda config, tensors: config.update(draft_vocab_size=-3), "draft_vocab_size must be 1 or more, got -3"),
        (lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids="abc"), "cannot be read"),
        (lambda config, tensors: config["transformer_layer_config"].update(hidden_size="x"), "cannot be read"),
        (lambda config, tensors: config["transformer_layer_config"].update(hidden_act="bogus"), "cannot be read"),
        (lambda config, tensors: config.update(transformer_layer_config=[1]), "cannot be read"),
        (lambda config, tensors: config["transformer_layer_config"].update(model_type="bert"), "must be one of llama"),
    ],
)
def test_damaged_heads_are_refused_with_a_reason(pair, tmp_path, change, told):
    with pytest.raises(ReprieveError, match=told):
        load_eagle3(broken(tmp_path, change, "head"), pair.target)


def test_rotary_frequencies_stay_in_float32(pair):
    exact = pair.eagle_head(BUNDLED).rotary.inv_freq
    head = load_eagle3(BUNDLED, pair.target).to(torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16 and head.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(head.rotary.inv_freq, exact)


def test_default_layers_equal_the_published_ones():
    assert default_layers(32) == (2, 16, 29)
