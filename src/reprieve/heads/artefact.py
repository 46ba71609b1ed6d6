"""Base class of training and calibration artefacts: saving, loading, sharing, and binding to a pair."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import ModelHubMixin
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from reprieve.errors import ReprieveError, SpecError
from reprieve.files import converted, parse_json, read_file, read_json, replace_file
from reprieve.heads.files import CARD, CERTIFICATES, CONFIG, WEIGHTS, find_head, require_free, signature
from reprieve.identity import PairIdentity, digest
from reprieve.specs import Registry

SCHEMA = 1
_ORIGIN = frozenset({"prompt", "problems", "drafter"})  # optional: unknown where they are missing
_TENSORS = "tensors"  # field with all weights by name; without it, each tensor is a separate field
_MODEL_CARD = """---
library_name: reprieve
tags:
- reprieve
- speculative-decoding
- {kind}
{base_model}---

{promises}

# {title}

{purpose}

| | |
| --- | --- |
{facts}

```
pip install reprieve
reprieve bench --target {target} --draft {draft_or_yours} --arm {use}
```

`THIS` stands for this repository or folder. Reprieve refuses to use it with weights or a tokenizer other than those it
was made for. On another task, measure the loss of accuracy first.
"""


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
        return digest(self._content)

    @property
    def _content(self) -> bytes:
        """Its tensors in the format of safetensors, which refuses tensors that share memory: they are copied."""
        copies = {
            name: torch.clone(tensor.detach().cpu(), memory_format=torch.contiguous_format)
            for name, tensor in self.weights.items()
        }
        return save(copies)

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
        folder, content = Path(save_directory), self._content
        texts = {CARD: self.card(), **self.certificates}
        require_free(folder, self.kind)
        config = {name: getattr(self, name) for name in _config_keys(type(self))}
        known = {name: value for name, value in config.items() if value or name not in _ORIGIN or value == {}}
        document = json.loads(json.dumps({"schema": SCHEMA, "kind": self.kind, **known}, default=dataclasses.asdict))
        document["sha256"] = signature(document, content)
        # A folder with a configuration counts as a head, so the weights come first.
        replace_file(folder / WEIGHTS, content)
        replace_file(folder / CONFIG, json.dumps(document, indent=2) + "\n")
        for name, text in texts.items():
            replace_file(folder / name, text)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        source: str | Path,
        *,
        pair: PairIdentity | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """Load a head from a folder or a hub id.

        Args:
            source: a folder, or a hub id.
            pair: the pair it will be used with; None skips the check.
            revision: branch, tag or commit on the hub.
            token: for private repositories; the saved login by default.

        Raises:
            ReprieveError: not found, of another kind, or tampered with.
            PairError: made for another pair.
        """
        folder, where = find_head(source, revision=revision, token=token), f"head {str(source)!r}"
        config, tensors = cls._read(folder, where)
        try:
            certificates = {
                f"{CERTIFICATES}/{path.name}": read_file(path, "certificate").decode()
                for path in sorted((folder / CERTIFICATES).glob("*.json"))
            }
            values = {
                name: converted(name, config[name], hint, exact=True, signed=True)
                for name, hint in _fields(cls).items()
                if name in config
            }
            parts = {_TENSORS: tensors} if _TENSORS in _fields(cls) else tensors
            head = cls(**values, **parts, certificates=certificates)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ReprieveError(f"{cls.kind} {where}: {error}") from None
        if pair is not None:
            head.require_pair(pair, str(source))
        return head

    @classmethod
    def _read(cls, folder: Path, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the configuration and tensors in a folder, checked against each other.

        Args:
            where: names the head in messages.

        Raises:
            ReprieveError: unreadable, of another kind, or weights that do not match the digest.
        """
        config = read_json(folder / CONFIG, f"{where}: the file")
        content = read_file(folder / WEIGHTS, f"{where}: the file")
        if not isinstance(config, dict):
            raise ReprieveError(f"{where}: {CONFIG} must be an object, got {type(config).__name__}")
        given = {name: config.get(name) for name in ("kind", "schema")}
        if given != (expected := {"kind": cls.kind, "schema": SCHEMA}):
            raise ReprieveError(f"{where}: {CONFIG} must have {expected}, got {given}")
        wanted = config.pop("sha256", None)
        if signature(config, content) != wanted:
            raise ReprieveError(f"{where}: {CONFIG} or {WEIGHTS} was changed after they were saved together")
        del config["kind"], config["schema"]
        keys = set(_config_keys(cls))
        if not keys - _ORIGIN <= config.keys() <= keys:
            odd = ", ".join(sorted(config.keys() ^ keys))
            raise ReprieveError(f"{where}: {CONFIG} must hold {', '.join(sorted(keys))}; check {odd}")
        try:
            return config, load(content)
        except (SafetensorError, ValueError) as error:
            raise ReprieveError(f"{where}: {WEIGHTS} cannot be read: {error}") from None

    def card(self) -> str:
        """Return its model card, Markdown, with the certified statements first."""
        target, draft = self.pair.target, self.pair.draft if self.reads_draft else None
        rows = {"target": target, **({"draft": draft} if draft else {}), "task": self.task, **self.facts()}
        certificates = [parse_json(text) for text in self.certificates.values()]
        promises = [
            f"> **Certified.** {certificate['statement']}"
            for certificate in certificates
            if self.fingerprint in certificate.get("portable_rule", "")  # its folder may hold those of earlier weights
        ]
        is_hub_id = target.count("/") == 1 and not target.startswith((".", "/"))
        return _MODEL_CARD.format(
            kind=self.kind,
            use=self.use or f"{self.kind}:path=THIS",
            title=f"{self.kind} head for {target}",
            purpose=self.purpose,
            target=target,
            draft_or_yours=draft or "DRAFT",
            base_model=f"base_model: {target}\n" if is_hub_id else "",
            promises="\n>\n".join(promises) or "> **Not certified.** `reprieve certify` bounds what it costs.",
            facts="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        )


HEADS: Registry[Artefact] = Registry("kind of head", "reprieve.heads", attribute="kind")
register_head = HEADS.register


def _fields(kind: type[Artefact]) -> dict[str, Any]:
    """Return the types of a class's fields, by name."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _config_keys(kind: type[Artefact]) -> list[str]:
    """Return the fields that go to `config.json`."""
    fields = _fields(kind)
    return [name for name in fields if name not in (_TENSORS, "certificates") and fields[name] is not Tensor]
