"""Arbiters over tiny drafts."""

import torch

from reprieve.drafters import DraftModelDrafter
from reprieve.engine import SpeculativeDecoder
from reprieve.heads.classifiers import Arbiter
from reprieve.heads.settings import ArbiterShape
from reprieve.models.arbiter import ArbiterModel
from reprieve.models.cached_model import CachedModel
from tests.kit.tiny import IDENTITY, NumberTokenizer

CPU = torch.device("cpu")


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def trained(draft, *, seed=0, bias=0.0, **shape) -> ArbiterModel:
    """An arbiter with random adapters that do something."""
    model = ArbiterModel(draft, ArbiterShape(**shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.own_tensors.items():
            if "lora_B" in name or name == "head.weight":
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        model.head.bias.fill_(bias)
    return model


def arbiter_of(model, *, threshold=0.6, pair=IDENTITY) -> Arbiter:
    return Arbiter(dict(model.own_tensors), model.shape, threshold, 4, pair=pair, task="arithmetic")


def decoder_with(target, draft, rule, advisor, *, k=4):
    return SpeculativeDecoder(
        CachedModel(target),
        DraftModelDrafter(CachedModel(draft), CPU),
        NumberTokenizer(),
        rule=rule,
        num_draft_tokens=k,
        advisor=advisor,
    )
