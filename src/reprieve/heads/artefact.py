"""Base class of training and calibration artefacts: saving, loading, sharing, and binding to a pair."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import ModelHubMixin
from torch import Tensor

from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.binding import PairIdentity
from reprieve.heads.files import fingerprint_of, read_head, write_head
from reprieve.heads.model_card import model_card
from reprieve.specs import Registry

_ORIGIN = frozenset({"prompt", "problems", "drafter"})  # optional: unknown where they are missing
_TENSORS = "tensors"  # field with all weights by name; without it, each tensor is a separate field


@dataclass(frozen=True)
class Artefact(ModelHubMixin):
    """Head: weights or constants, and the pair and task they belong to.

    Subclasses are frozen dataclasses. Their tensors go to `model.safetensors`, all other fields to `config.json`.
    `push_to_hub` is huggingface_hub's own.

    Args:
        prompt: prompt format of the problems it was made from (`PromptSettings.format`); None if unknown.
        problems: digests of those problems (`TaskProblem.digest`); empty if unknown.
        certificates: texts of the certificates in its folder, by file name; saved and loaded with it.
    """

    kind: ClassVar[str]
    purpose: ClassVar[str]  # a sentence for the model card
    use: ClassVar[str | None] = None  # `--arm` that uses it, with THIS for its folder; None: the rule of its kind

    pair: PairIdentity = field(kw_only=True)
    task: str = field(kw_only=True)
    prompt: Mapping[str, Any] | None = field(default=None, kw_only=True)
    problems: tuple[str, ...] = field(default=(), repr=False, kw_only=True)
    certificates: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False, kw_only=True)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a plain object: the mixin's constructor would add a configuration to it."""
        return object.__new__(cls)

    def require_numbers(self) -> None:
        """Refuse weights that are not finite float32; other types would give other results.

        Raises:
            SpecError: names the first.
        """
        for name, tensor in self.weights.items():
            if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise SpecError(f"the {self.kind} head's {name} must be float32, got {kind}")
            if not bool(tensor.isfinite().all()):
                raise SpecError(f"the {self.kind} head's weights must be finite; {name} is not")

    @property
    def reads_draft(self) -> bool:
        """True if the draft's weights matter to it."""
        return False

    def facts(self) -> dict[str, str]:
        """Return additional rows of the model card, by heading."""
        return {}

    def features_of(self, hidden_size: int) -> int:
        """Return the number of inputs it gets from a target of this hidden size; must equal `num_features`."""
        return hidden_size

    @property
    def weights(self) -> dict[str, Tensor]:
        """Tensors by name."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        state = dict(own.get(_TENSORS, {}))
        return state | {name: value for name, value in own.items() if isinstance(value, Tensor)}

    def to(self, device: Any) -> Self:
        """Return a copy with its tensors on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.weights.items()}
        return dataclasses.replace(self, **({_TENSORS: moved} if _TENSORS in _fields(type(self)) else moved))

    @property
    def fingerprint(self) -> str:
        """Hash of its tensors, so that runs of a retrained head do not mix with those of the old one."""
        return fingerprint_of(self.weights)

    def require_pair(self, pair: PairIdentity, name: str) -> None:
        """Refuse a pair other than its own.

        Raises:
            PairError: names both pairs.
        """
        self.pair.require_matches(pair, f"{self.kind} head {name!r}", reads_draft=self.reads_draft)

    def save_pretrained(self, save_directory: str | Path, **ignored: Any) -> None:
        """Write `config.json`, `model.safetensors`, a model card, and the certificates.

        Args:
            ignored: additional arguments from huggingface_hub's `push_to_hub`; not used.

        Raises:
            ReprieveError: the folder cannot be written, or holds something else.
        """
        config = {name: _plain(getattr(self, name)) for name in _config_keys(type(self))}
        config = {name: value for name, value in config.items() if value or name not in _ORIGIN or value == {}}
        others = {"README.md": self.card(), **self.certificates}
        write_head(Path(save_directory), self.kind, config, self.weights, others)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        source: str | Path,
        *,
        pair: PairIdentity | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> Self:
        """Load a head from a folder or a hub id.

        Args:
            source: a folder, or a hub id.
            pair: the pair it will be used with; None skips the check.
            revision: branch, tag or commit on the hub.
            token: for private repositories; the saved login by default.
            cache_dir: folder of the download cache; huggingface_hub's own by default.
            force_download: download files even if they are cached.
            local_files_only: never contact the hub.

        Raises:
            ReprieveError: not found, of another kind, or tampered with.
            PairError: made for another pair.
        """
        download = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
        }
        config, tensors, certificates = read_head(source, cls.kind, _config_keys(cls), optional=_ORIGIN, **download)
        try:
            values = {name: _typed(hint, config[name]) for name, hint in _fields(cls).items() if name in config}
            parts = {_TENSORS: tensors} if _TENSORS in _fields(cls) else tensors
            head = cls(**values, **parts, certificates=certificates)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ReprieveError(f"{cls.kind} head {str(source)!r}: {error}") from None
        if pair is not None:
            head.require_pair(pair, str(source))
        return head

    def card(self) -> str:
        """Return its model card, Markdown."""
        return model_card(
            kind=self.kind,
            purpose=self.purpose,
            target=self.pair.target,
            draft=self.pair.draft if self.reads_draft else None,
            facts={"task": self.task, **self.facts()},
            certificates=list(self.certificates.values()),
            use=self.use,
        )


HEADS: Registry[Artefact] = Registry("kind of head", "reprieve.heads", attribute="kind")
register_head = HEADS.register


def _fields(kind: type[Artefact]) -> dict[str, Any]:
    """Return the types of a class's fields, by name."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _config_keys(kind: type[Artefact]) -> frozenset[str]:
    """Return the fields that go to `config.json`."""
    fields = _fields(kind)
    return frozenset(name for name in fields if name not in (_TENSORS, "certificates") and fields[name] is not Tensor)


def _plain(value: Any) -> Any:
    """Convert a value to types that JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(item) for key, item in dataclasses.asdict(value).items()}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _typed(hint: Any, value: Any) -> Any:
    """Convert a value of the configuration to its field's type.

    Raises:
        TypeError: another type.
    """
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _typed(hints.get(name), part) for name, part in value.items()})
    if hint in (str, int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float) if hint is float else hint):
            raise TypeError(f"expected {hint.__name__}, got {value!r}")
        return hint(value)
    return tuple(value) if typing.get_origin(hint) is tuple and isinstance(value, list) else value
