"""Inside transformers' `generate`: every setting is supported, has no effect, or is refused by name."""

import pytest
import torch
from transformers import GenerationConfig

from reprieve import custom_generate, load_pair
from reprieve.engine.custom_generate import _TAKEN, _WITHOUT_EFFECT
from reprieve.errors import SpecError
from tests.kit.chats import save_chat_pair

# For each refused setting, a value that would change the answer.
CHANGED = {
    "num_beams": 2, "num_return_sequences": 2, "repetition_penalty": 1.2, "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2, "min_new_tokens": 3, "min_length": 30, "min_p": 0.1, "typical_p": 0.5,
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "bad_words_ids": [[3]], "sequence_bias": [[[3], 1.0]],
    "suppress_tokens": [3], "forced_bos_token_id": 3, "forced_eos_token_id": 3, "guidance_scale": 2.0, "max_time": 9.0,
    "return_dict_in_generate": True, "begin_suppress_tokens": [3], "watermarking_config": {"greenlist_ratio": 0.5},
    "top_h": 0.5, "penalty_alpha": 0.6, "dola_layers": "low", "exponential_decay_length_penalty": (3, 1.2),
    "encoder_no_repeat_ngram_size": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": ["x"],
    "force_words_ids": [[3]], "token_healing": True, "renormalize_logits": True, "assistant_ensemble_weight": 0.5,
    "use_mtp": True, "output_attentions": True, "output_hidden_states": True, "output_logits": True,
    "output_scores": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_chat_pair(folder)
    return load_pair(folder / "target", folder / "draft", dtype="float32")


@pytest.fixture(scope="module")
def prompt(pair):
    return torch.tensor([pair.tokenizer.encode("hello")])


def test_every_field_of_the_generation_configuration_is_accounted_for():
    assert set(GenerationConfig().to_dict()) <= {*_TAKEN, *_WITHOUT_EFFECT, *CHANGED}


def test_neutral_values_are_accepted(pair, prompt):
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "typical_p": 1.0, "min_length": 0, "min_p": 0.0}
    config = GenerationConfig(max_new_tokens=2, output_scores=False, bad_words_ids=None, **neutral)
    made = custom_generate(pair.target, prompt, draft_model=pair.draft, generation_config=config)
    assert made.shape[1] == prompt.shape[1] + 2


@pytest.mark.parametrize("name", [name for name in CHANGED if hasattr(GenerationConfig(), name)])
def test_unsupported_settings_are_refused_by_name(pair, prompt, name):
    config = GenerationConfig(max_new_tokens=4)
    setattr(config, name, CHANGED[name])
    with pytest.raises(SpecError, match=f"generation setting {name} must be"):
        custom_generate(pair.target, prompt, draft_model=pair.draft, generation_config=config)


def test_stop_texts_end_the_answer(pair, prompt):
    generate = {"custom_generate": custom_generate, "draft_model": pair.draft, "text_tokenizer": pair.tokenizer}
    free = pair.target.generate(prompt, max_new_tokens=24, do_sample=False, **generate)[0, prompt.shape[1] :]
    text = pair.tokenizer.decode(free)
    stop = text[3:5]
    cut = pair.target.generate(prompt, max_new_tokens=24, do_sample=False, stop=stop, **generate)[0, prompt.shape[1] :]
    assert len(cut) < len(free) and pair.tokenizer.decode(cut).startswith(text[: text.index(stop)])


def test_a_token_that_only_the_target_has_is_refused_by_name():
    from tests.kit.tiny import NumberTokenizer, tiny_model

    wide, narrow = tiny_model(vocab_size=64), tiny_model(vocab_size=48)
    from reprieve.engine import Pair

    decoder = Pair(wide, narrow, NumberTokenizer(48), "wide", "narrow").decoder("lossless", num_draft_tokens=2)
    with pytest.raises(SpecError, match=r"a token id of the prompt must be in \[0, 47\], got 60"):
        decoder.generate([1, 60])
