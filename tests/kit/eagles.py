"""EAGLE-3 heads for tiny targets."""

from reprieve.drafters import EagleDrafter, EagleSettings
from reprieve.engine import SpeculativeDecoder
from reprieve.models.cached_model import CachedModel
from reprieve.rules import parse_rule
from tests.kit.tiny import NumberTokenizer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def make_decoder(target, head, *, rule="lossless", k=16, **shape):
    drafter = EagleDrafter(head, vocab_size=48, settings=EagleSettings(**shape))
    cached = CachedModel(target, hidden_layers=head.layers_read)
    return SpeculativeDecoder(cached, drafter, NumberTokenizer(), rule=parse_rule(rule), num_draft_tokens=k)
