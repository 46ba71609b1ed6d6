"""From the text of the command line to a drafter: `draft`, `ngram:max_ngram=3`, `eagle3:top_k=4,prune=entropy`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reprieve.drafters.base import Drafter
from reprieve.drafters.draft_model import DraftModelDrafter
from reprieve.drafters.eagle3 import EagleDrafter, TreeShape
from reprieve.drafters.ngram import NgramDrafter
from reprieve.drafters.pruning import PARAMETERS, Pruning
from reprieve.errors import SpecError, require_choice
from reprieve.models import Pair
from reprieve.rules import Rule
from reprieve.rules.spec import parse_parameters

DRAFTERS = ("draft", "ngram", "eagle3")
BUNDLED_EAGLE3 = "reprieve/arithmetic-eagle3"
_SHAPE = tuple(field.name for field in dataclasses.fields(TreeShape))
_PRUNING = tuple(dict.fromkeys(name for names in PARAMETERS.values() for name in names))


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter's specification, read and checked; no model is loaded."""

    name: str
    ngram: Mapping[str, int] = dataclasses.field(default_factory=dict)
    path: str = BUNDLED_EAGLE3
    shape: TreeShape = dataclasses.field(default_factory=TreeShape)
    pruning: Pruning | None = None

    @classmethod
    def parse(cls, spec: str) -> DrafterSpec:
        """Name and parameters.

        Raises:
            SpecError: unknown drafter or parameter, or a value out of range.
        """
        name, _, rest = spec.partition(":")
        require_choice("drafter", name, DRAFTERS)
        given = parse_parameters(rest, where=f"drafter {name}")
        known = {"draft": (), "ngram": ("max_ngram", "min_ngram"), "eagle3": ("path", *_SHAPE, "prune", *_PRUNING)}
        if unknown := sorted(given.keys() - set(known[name])):
            takes = f"it takes {', '.join(known[name])}" if known[name] else "it takes none"
            raise SpecError(f"drafter {name} has no parameter {unknown[0]!r}; {takes}")
        if name == "ngram":
            numbers = _numbers(name, given, int)
            NgramDrafter(torch.device("cpu"), **numbers)
            return cls(name, ngram=numbers)
        if name == "draft":
            return cls(name)
        if not (path := given.get("path", BUNDLED_EAGLE3)):
            raise SpecError("drafter eagle3: path must name a folder or a hub id, got nothing")
        shape = TreeShape(**_numbers(name, {key: given[key] for key in _SHAPE if key in given}, int))
        return cls(name, path=path, shape=shape, pruning=_pruning(given))

    def fingerprints(self, pair: Pair) -> dict[str, str]:
        """What identifies the weights it brings with it, by name; nothing for those of the pair itself."""
        return {self.path: pair.eagle_head(self.path).fingerprint} if self.name == "eagle3" else {}


def make_drafter(spec: str, pair: Pair, rule: Rule) -> Drafter:
    """The drafter a specification names.

    Raises:
        SpecError: unknown drafter or parameter, or a value out of range.
        PairError: an EAGLE-3 head for another target, or a pair without a draft.
    """
    parsed = DrafterSpec.parse(spec)
    if parsed.name == "eagle3":
        head = pair.eagle_head(parsed.path)
        return EagleDrafter(head, vocab_size=pair.vocab_size, shape=parsed.shape, pruning=parsed.pruning)
    if parsed.name == "ngram":
        return NgramDrafter(pair.device, **parsed.ngram)
    return DraftModelDrafter(pair.cached_draft(rule.draft_layers), pair.device)


def _pruning(given: Mapping[str, str]) -> Pruning | None:
    cuts = {key: given[key] for key in _PRUNING if key in given}
    strategy = given.get("prune")
    if strategy is None:
        if cuts:
            raise SpecError(f"drafter eagle3: {min(cuts)} goes with prune=, one of {', '.join(PARAMETERS)}")
        return None
    require_choice("prune", strategy, tuple(PARAMETERS))
    if odd := sorted(cuts.keys() - set(PARAMETERS[strategy])):
        raise SpecError(f"prune={strategy} takes {', '.join(PARAMETERS[strategy])}, not {odd[0]}")
    return Pruning(strategy, **_numbers("eagle3", cuts, float))


def _numbers(drafter: str, given: Mapping[str, str], kind: type[int] | type[float]) -> dict[str, Any]:
    numbers = {}
    for key, value in given.items():
        try:
            numbers[key] = kind(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise SpecError(f"drafter {drafter}: {key} must be {wanted}, got {value!r}") from None
        if not math.isfinite(numbers[key]):
            raise SpecError(f"drafter {drafter}: {key} must be finite, got {value!r}")
    return numbers
