"""The direct forward equals transformers', and unsupported models use transformers' forward."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from reprieve.models.cached_model import CachedModel
from reprieve.models.direct import supports
from reprieve.types import ROOT, Block
from tests.kit.tiny import VOCAB_SIZE, tiny_model

TEXT = [(7 * place + 3) % VOCAB_SIZE for place in range(300)]
SHAPE = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=320,
)
YARN = dict(rope_type="yarn", factor=4.0, rope_theta=10_000.0, original_max_position_embeddings=80)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    rope_theta=10_000.0,
    original_max_position_embeddings=80,
)
MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen3": lambda: tiny_model("qwen3"),
    "qwen2, with biases": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2, yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=YARN)),
    "mistral, llama3": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None, rope_parameters=LLAMA3)),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(3)
    made = MODELS[request.param]().eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return made


def both(model, **options):
    direct, library = CachedModel(model, **options), CachedModel(model, direct=False, **options)
    assert direct._direct is not None and library._direct is None
    return direct, library


@pytest.mark.parametrize("folds", [False, True])  # True as on GPUs
@torch.inference_mode()
def test_logits_states_and_rollback_equal_the_librarys(model, folds):
    num_layers = model.config.num_hidden_layers
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        model.to(dtype)
        made = both(model, hidden_layers=(0, 1, -1, num_layers, -2))
        made[0]._direct._folds = folds
        ours, theirs = (one.start(TEXT[:260]) for one in made)  # beyond the initial capacity
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=tolerance, atol=tolerance)
        for tokens, keep in ((TEXT[260:261], 261), (TEXT[261:270], 264), (TEXT[264:266], 12), (TEXT[12:40], 40)):
            (ours, our_states), (theirs, their_states) = (one.forward(tokens) for one in made)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            for layer, states in their_states.items():
                torch.testing.assert_close(our_states[layer], states, rtol=tolerance, atol=tolerance)
            for one in made:
                one.truncate(keep)
                assert one.length == keep


@pytest.mark.parametrize("folds", [False, True])
@torch.inference_mode()
def test_trees_and_their_kept_paths_equal_the_librarys(model, folds):
    block = Block(torch.tensor([5, 6, 7, 8, 9]), (ROOT, ROOT, 0, 1, 2))
    answers = []
    made = both(model)
    made[0]._direct._folds = folds
    for one in made:
        one.start(TEXT[:20])
        logits, _ = one.forward(torch.tensor([1, 5, 6, 7, 8, 9]), block)
        one.record_ids(20, [1, 5, 6, 7, 8, 9])
        one.keep_path(20, [0, 1, 3, 5])
        assert one.cached_ids == [*TEXT[:20], 1, 5, 7, 9]
        answers += [(logits, one.forward([2, 3])[0])]
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_the_last_rows_can_be_computed_alone(model):
    for one in both(model, hidden_layers=(-1,)):
        whole, states = one.forward(TEXT[:9])
        one.truncate(0)
        rows, last = one.forward(TEXT[:9], num_rows=2)
        torch.testing.assert_close(rows, whole[-2:])
        torch.testing.assert_close(last[-1], states[-1][-2:])


def test_unsupported_models_use_the_library():
    windowed = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)).eval()
    assert not any(supports(model) for model in (windowed, tiny_model("gemma3"), tiny_model("gpt_neox")))
    hooked = tiny_model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    replaced = tiny_model()
    replaced.forward = replaced.forward
    adapted = tiny_model()
    adapted.model.layers[1].mlp.up_proj = torch.nn.utils.parametrizations.orthogonal(
        adapted.model.layers[1].mlp.up_proj
    )
    assert not any(supports(model) for model in (hooked, replaced, adapted))


def test_models_that_compute_differently_are_detected(monkeypatch):
    changed = tiny_model()
    for layer in changed.model.layers:
        layer.self_attn.scaling = 1.0
    assert not supports(changed)
    renamed = tiny_model()
    renamed.model.layers[0].self_attn.query = renamed.model.layers[0].self_attn.q_proj
    monkeypatch.delattr(type(renamed.model.layers[0].self_attn), "forward")
    del renamed.model.layers[0].self_attn.q_proj
    assert not supports(renamed)


def test_later_hooks_disable_the_direct_forward_and_transformers_own_do_not():
    model = tiny_model()
    assert supports(model)
    model(torch.tensor([[1, 2]]), output_hidden_states=True)  # installs transformers' own hooks on the layers
    assert supports(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not supports(model) and CachedModel(model)._direct is None
    handle.remove()
    assert supports(model)


def test_cudnn_is_excluded_until_the_last_forward_has_ended(monkeypatch):
    from reprieve.models.attention import without_cudnn

    state = [True]
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: state[-1])
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", state.append)
    with without_cudnn(torch.device("cpu")):
        assert state == [True]
    first, second = without_cudnn(torch.device("cuda")), without_cudnn(torch.device("cuda"))
    first.__enter__()
    second.__enter__()  # in another thread
    first.__exit__(None, None, None)
    assert state[-1] is False
    second.__exit__(None, None, None)
    assert state == [True, False, True]
