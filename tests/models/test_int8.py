"""int8 linear layers: close to float32, equal for blocks and single tokens, refused if unsupported."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from reprieve.engine import SpeculativeDecoder, load_pair
from reprieve.errors import SpecError, UnsupportedModelError
from reprieve.models.cached_model import CachedModel
from reprieve.models.int8 import Int8Linear, dtype_name, output_weights, quantise, require_int8
from reprieve.models.loading import weights_fingerprint
from reprieve.models.stored import stored_identity
from reprieve.settings import PairSettings, SamplingParams
from tests.kit.chats import save_chat_pair
from tests.kit.tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model

TOKEN_IDS = [int(token) for token in torch.arange(24) * 7 % VOCAB_SIZE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_chat_pair(folder)
    return folder


def test_a_layer_is_within_a_hundredth_of_float32():
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48)
    x = torch.randn(5, 64) * torch.tensor([[1.0], [1e-3], [1e3], [0.0], [1.0]])  # every row has its own scale
    with torch.inference_mode():
        exact, rounded = linear(x), Int8Linear(linear)(x)
    scale = exact.abs().amax(-1, keepdim=True)
    assert ((exact - rounded).abs() <= 0.01 * scale).all()
    assert torch.equal(rounded[3], linear.bias.detach())


def test_a_row_does_not_depend_on_the_other_rows():
    torch.manual_seed(0)
    layer = Int8Linear(torch.nn.Linear(64, 48))
    rows = torch.randn(9, 64)
    alone = torch.cat([layer(row[None]) for row in rows])
    torch.testing.assert_close(layer(rows), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_distributions_stay_near_float32(kind):
    token_ids = torch.tensor([TOKEN_IDS])
    with torch.inference_mode():
        exact = tiny_model(kind)(input_ids=token_ids).logits.log_softmax(-1)
        rounded = quantise(tiny_model(kind))(input_ids=token_ids).logits.log_softmax(-1)
    kl = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert kl < 0.02


def test_a_block_gives_the_logits_of_one_token_at_a_time():
    model = quantise(tiny_model("qwen3"))
    with torch.inference_mode():
        block, single = CachedModel(model), CachedModel(model)
        block.start(TOKEN_IDS[:8])
        single.start(TOKEN_IDS[:8])
        at_once, _ = block.forward(TOKEN_IDS[8:16])
        one_by_one = torch.cat([single.forward([token])[0] for token in TOKEN_IDS[8:16]])
    # A difference of one float32 bit in attention may become one step of 13 bits in the next layer.
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=0.01 * float(one_by_one.abs().max()))


def test_lossless_decoding_gives_the_targets_own_tokens(folder):
    pair = load_pair(folder / "target", folder / "draft", dtype="int8")
    assert pair.dtype == dtype_name(pair.target) == "int8"
    params = SamplingParams(max_new_tokens=24)
    target_only = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    for prompt in ("one", "two and three", "four"):
        lossless = pair.decoder("lossless", num_draft_tokens=4)
        assert lossless.generate(prompt, params).token_ids == target_only.generate(prompt, params).token_ids


def test_int8_has_its_own_fingerprint(folder):
    exact, rounded = (load_pair(folder / "target", dtype=dtype) for dtype in ("float32", "int8"))
    assert weights_fingerprint(exact.target) != weights_fingerprint(rounded.target)
    assert weights_fingerprint(rounded.target) == weights_fingerprint(load_pair(folder / "target", dtype="int8").target)
    assert rounded.vocab_size == exact.vocab_size
    head = exact.target.get_output_embeddings().weight.detach()
    torch.testing.assert_close(output_weights(rounded.target), head.float(), rtol=0, atol=float(head.abs().max()) / 100)


def test_weights_outside_of_linear_layers_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCAB_SIZE))
    with pytest.raises(UnsupportedModelError, match=r"has transformer\.h\.0\.attn\.c_attn\.weight"):
        quantise(model)


def test_a_quantised_model_is_refused():
    model = tiny_model()
    model.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(UnsupportedModelError, match="quantised already"):
        quantise(model)


def test_other_devices_are_refused(folder):
    with pytest.raises(UnsupportedModelError, match="requires the CPU, got device 'cuda:0'"):
        require_int8("cuda:0")
    with pytest.raises(SpecError, match="requires one device"):
        load_pair(folder / "target", dtype="int8", device_map="auto")


def test_servers_refuse_what_only_the_local_engine_reads(folder):
    with pytest.raises(SpecError, match="int8 requires --engine local"):
        stored_identity(PairSettings(str(folder / "target"), dtype="int8"))
    with pytest.raises(SpecError, match=r"GGUF files require --engine local .*model\.gguf"):
        stored_identity(PairSettings("model.gguf"))
