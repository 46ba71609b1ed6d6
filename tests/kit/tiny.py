"""Tiny random models and drafters, built in code: no download, no weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from reprieve.drafters.length import RoundLength
from reprieve.heads.classifiers import Arbiter, Head, JudgeHead, PivotHead, StateArbiter
from reprieve.heads.length import LengthHead
from reprieve.heads.lts import LtsCalibration
from reprieve.heads.settings import ArbiterShape, FeatureRecipe
from reprieve.identity import PairIdentity
from reprieve.models.eagle3 import EagleConfig, EagleHead
from reprieve.models.sampling import Sampler
from reprieve.rules import Checked, Rule
from reprieve.rules.learned import HeadRule
from reprieve.types import Block, Need, Outcome, Prefill, Verification

VOCAB_SIZE = 48
STATE_ARBITER = FeatureRecipe(states="both", entropy=True, probability=True, draft_scalars=True)
PIVOT = FeatureRecipe(entropy=True, probability=True)
ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt_neox")


def tiny_model(
    kind: str = "llama", *, seed: int = 0, vocab_size: int = VOCAB_SIZE, scale: float | None = None
) -> PreTrainedModel:
    """A two-layer random model; `scale` sharpens its distributions (by default enough for varied greedy text)."""
    torch.manual_seed(seed)
    common = dict(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=320,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    grouped = dict(num_key_value_heads=1, head_dim=16)
    windows = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    model: PreTrainedModel = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=1)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common, **grouped)),
        "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**common, **grouped, **windows)),
        "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**common)),
    }[kind]()
    factor = scale or (8.0 if kind == "gpt_neox" else 4.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    return model.eval()


def perturbed(model: PreTrainedModel, *, noise: float = 0.02, seed: int = 1) -> PreTrainedModel:
    """A draft for `model`: its own weights with noise, so that it agrees often but not always."""
    torch.manual_seed(seed)
    draft = type(model)(model.config).eval()
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs + noise * torch.randn_like(theirs))
    return draft


class NumberTokenizer:
    """Tokens are numbers, text is the numbers with a space after each."""

    def __init__(self, size: int = VOCAB_SIZE, eos_token_id: int | None = None) -> None:
        self.size = size
        self.eos_token_id = eos_token_id

    def __len__(self) -> int:
        return self.size

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i == self.eos_token_id)]
        return "".join(f"{i} " for i in kept)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(part) for part in text.split()]

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self.size)}


def checked_by(accepts: torch.Tensor) -> Checked:
    """The lossless check's decisions on a chain, from flags [N]; the tokens after them are 0."""
    return Checked(accepts, accepts, torch.zeros(len(accepts) + 1, dtype=torch.long))


class ScriptedDrafter:
    """Propose the block that a function of the committed tokens returns."""

    name = "scripted"
    target_layers: tuple[int, ...] = ()
    drafts_trees = False  # although a script may return trees
    provides = frozenset({Need.DRAFT_PROBS})

    def __init__(self, script: Callable[[list[int], int], Block]) -> None:
        self.script = script
        self.token_ids: list[int] = []
        self.outcomes: list[Outcome] = []

    def start(self, prompt_ids: Sequence[int], sampler: Sampler, prefill: Prefill) -> None:
        self.token_ids = list(prompt_ids)
        self.sampler = sampler

    def propose(self, max_depth: int, length: RoundLength) -> Block:
        if max_depth < 1:
            return Block.empty()
        return self.script(self.token_ids, max_depth)

    def commit(self, block: Block, outcome: Outcome, verification: Verification) -> None:
        self.outcomes.append(outcome)
        self.token_ids += outcome.committed_ids


IDENTITY = PairIdentity("tiny/target", "tiny/draft", "t0", "d0", "tok0")


def random_length(hidden_size: int, *, rule: str = "lossless", price: float = 0.5, seed: int = 0) -> LengthHead:
    """A length head with random weights, which depends on the state and the token."""
    generator = torch.Generator().manual_seed(seed)
    scalars = torch.tensor([[1.0, 2.0, -0.5, 0.3, 0.1, 0.0], [2.0, 1.0, -1.0, 0.5, 0.0, 0.1]])
    return LengthHead(
        hidden_weight=torch.randn(2, hidden_size, generator=generator),
        scalar_weight=scalars,
        rule=rule,
        lowest=0.0,
        highest=0.0 if rule == "lossless" else 1.0,
        price=price,
        most=6,
        pair=IDENTITY,
        task="arithmetic",
    )


def random_head(
    kind: str = "judge", path: str = "", *, size: int = 6, seed: int = 0, pair=IDENTITY
) -> Head | LtsCalibration | Arbiter | LengthHead:
    """A small head of the given kind: random weights, constants for lts, no weights for an arbiter."""
    if kind == "length":
        return random_length(size, seed=seed)
    if kind == "arbiter":
        return Arbiter({}, ArbiterShape(), 0.6, 16, pair=pair, task="arithmetic")
    if kind == "lts":
        one = torch.ones(1)
        return LtsCalibration(torch.ones(size), one, one, 4 * one, torch.empty(0), 0.05, pair=pair, task="arithmetic")
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    if kind == "judge":
        return JudgeHead({"weight": draw(size), "bias": draw(1)[0]}, FeatureRecipe(), 0.2, pair=pair, task="arithmetic")
    if kind == "state_arbiter":
        tensors = {"weight": draw(2, 2 * size + 4), "bias": draw(2)}
        return StateArbiter(tensors, STATE_ARBITER, 0.51, pair=pair, task="arithmetic")
    sizes = {"hidden": (4, size), "scalars": (3, 2), "fuse": (5, 7), "out": (2, 5)}
    tensors = {f"{name}.weight": draw(*shape) for name, shape in sizes.items()}
    tensors |= {f"{name}.bias": draw(shape[0]) for name, shape in sizes.items()}
    tensors |= {"mean": torch.zeros(size + 2), "scale": torch.ones(size + 2)}
    return PivotHead(tensors, PIVOT, 0.5, pair=pair, task="arithmetic")


def with_heads(rule: Rule, load: Callable[[str], object] = random_head) -> Rule:
    """Attach in-memory heads to a rule; `load` makes one from its kind."""

    def attach(part: Rule) -> Rule:
        return part.with_head(load(part.head_kind)) if isinstance(part, HeadRule) else part

    return rule.transform(attach)


def random_eagle(target: PreTrainedModel, *, draft_vocab_size: int | None = None, seed: int = 0, **flags) -> EagleHead:
    """An untrained EAGLE-3 head for a tiny target; its vocabulary is the target's first tokens."""
    text = target.config
    layer = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=320,
    )
    config = EagleConfig(layer, (0, 1, 2), draft_vocab_size or text.vocab_size, **flags)
    torch.manual_seed(seed)
    head = EagleHead(config, num_target_layers=2, target_size=text.hidden_size).eval()
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[: len(head.d2t)])
    return head
