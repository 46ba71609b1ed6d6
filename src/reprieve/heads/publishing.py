"""Hub repositories of heads: head, certificates and report together, and a page that lists several heads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from reprieve.errors import ReprieveError, SpecError
from reprieve.files import read_file, replace_file
from reprieve.heads.artefact import HEADS, Artefact
from reprieve.heads.certificates import Certificate
from reprieve.heads.files import CERTIFICATES, kind_of
from reprieve.heads.folds import read_folds
from reprieve.heads.loading import load_head

_REPORT = "report.html"
_CARD = "README.md"
_HUB = "https://huggingface.co"
_GENERATE = "custom_generate/generate.py"
# Read by transformers: `model.generate(custom_generate=REPOSITORY, trust_remote_code=True)` runs it.
_CUSTOM_GENERATE: Mapping[str, str] = {
    _GENERATE: '''"""Speculative decoding with a rule: `reprieve.custom_generate` documents the arguments."""

import reprieve
from transformers import GenerationMixin


def generate(model, *args, **kwargs):
    return GenerationMixin.generate(model, *args, custom_generate=reprieve.custom_generate, **kwargs)
''',
    "custom_generate/requirements.txt": "reprieve\n",
}
_COLLECTION = """---
library_name: reprieve
tags:
- reprieve
- speculative-decoding
- custom_generate
---

> {summary}

# Heads for relaxed speculative decoding

| head | kind | target | task | certificate |
| --- | --- | --- | --- | --- |
{rows}

Each was made for one target and is refused with another. With plain transformers:

```python
model.generate(
    **inputs, custom_generate="{repo}", trust_remote_code=True, draft_model=draft, text_tokenizer=tokenizer,
    rule="{rule}",
)
```
"""


@dataclass(frozen=True)
class Repository:
    """One repository, ready to be uploaded.

    Args:
        name: owner/name on the hub.
        files: contents by path.
        head: None for a page that lists several.
    """

    name: str
    files: Mapping[str, bytes]
    head: Artefact | None = None

    def write(self, root: Path) -> Path:
        """Write the files to `root/owner/name`, replacing those of an earlier call; return that folder.

        Raises:
            ReprieveError: the folder holds something else, or cannot be written.
        """
        folder = root / self.name
        if folder.exists() and any(folder.iterdir()):
            if not (folder / _GENERATE).is_file():
                raise ReprieveError(f"{str(folder)!r} holds something else than files to publish; name another --out")
            shutil.rmtree(folder)
        for path, content in self.files.items():
            replace_file(folder / path, content)
        return folder


def repositories(folders: Sequence[Path], name: str, *, report: Path | None = None) -> list[Repository]:
    """Return a repository for each head; for several heads, also one with the page that lists them.

    Args:
        folders: of heads or of `quickstart`.
        name: owner/name of the repository; for several heads, the name of each one's folder is appended.
        report: HTML page for the head; the `report.html` of a quickstart folder by default.

    Raises:
        SpecError: not owner/name, two folders with the same name, or a report for several heads.
        ReprieveError: a folder without a head, or a certificate of another head.
    """
    if name.count("/") != 1 or not all(name.split("/")):
        raise SpecError(f"repo must be owner/name, got {name!r}")
    if len(folders) == 1:
        return [_repository(folders[0], name, report)]
    if report is not None:
        raise SpecError(f"report needs a single head, got {len(folders)} folders: publish them one by one")
    names = [f"{name}-{folder.resolve().name}" for folder in folders]
    if len(set(names)) < len(names):
        raise SpecError(f"folders must have different names, got {', '.join(map(str, folders))}")
    repositories = [_repository(folder, own, None) for folder, own in zip(folders, names, strict=True)]
    return [*repositories, Repository(name, {_CARD: _collection(name, repositories).encode(), **_generate_files()})]


def upload(repository: Repository, folder: Path, *, private: bool = False) -> str:
    """Create the repository if necessary, upload the folder in one commit, and return the repository's address.

    Raises:
        ReprieveError: no network, no login or no right to write there.
    """
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(repository.name, private=private, exist_ok=True)
        HfApi().upload_folder(
            repo_id=repository.name, folder_path=folder, commit_message="Publish with reprieve", delete_patterns="*"
        )
    except Exception as error:  # the hub raises many types: no network, no login, no access
        reason = " ".join(str(error).split())
        raise ReprieveError(
            f"{repository.name} cannot be uploaded: {reason}. Log in with `hf auth login`; the files are in {folder}"
        ) from None
    return str(address)


def _repository(folder: Path, name: str, report: Path | None) -> Repository:
    head_folder = folder / "head" if (folder / "head").is_dir() else folder
    if not head_folder.is_dir():
        raise ReprieveError(f"{str(folder)!r} must be the folder of a head or of quickstart; there is no such folder")
    kind = "folds" if read_folds(head_folder) is not None else kind_of(head_folder)
    if kind not in HEADS.names():
        raise ReprieveError(f"{str(folder)!r} must hold one head ({', '.join(HEADS.names())}), got {kind}")
    head = cast(Artefact, load_head(head_folder))
    head = dataclasses.replace(head, certificates=_certificates(head, head_folder, folder))
    if report is None and (folder / _REPORT).is_file():
        report = folder / _REPORT
    files = {
        _CARD: _card(head, name, has_report=report is not None).encode(),
        **{path: read_file(head_folder / path, "head") for path in ("config.json", "model.safetensors")},
        **{path: text.encode() for path, text in head.certificates.items()},
        **_generate_files(),
    }
    if report is not None:
        files[_REPORT] = read_file(report, "report")
    return Repository(name, files, head)


def _certificates(head: Artefact, *folders: Path) -> dict[str, str]:
    """Return the texts of the certificates in folders, by path in the repository.

    Raises:
        ReprieveError: a certificate that cannot be read, or that is about another head.
    """
    texts = {}
    for path in sorted({path for folder in folders for path in (folder / CERTIFICATES).glob("*.json")}):
        certificate = Certificate.load(path)
        if head.fingerprint not in certificate.portable_rule:
            raise ReprieveError(
                f"certificate {str(path)!r} must be about this head ({head.fingerprint}), got "
                f"{certificate.portable_rule}: remove it from the folder"
            )
        texts[f"{CERTIFICATES}/{path.name}"] = path.read_text(encoding="utf-8")
    return texts


def _card(head: Artefact, name: str, *, has_report: bool) -> str:
    card = (
        head.card().replace("path=THIS", f"path={name}").replace("\n- reprieve\n", "\n- reprieve\n- custom_generate\n")
    )
    return f"{card}\nThe [report]({_REPORT}) has the measurements.\n" if has_report else card


def _collection(repo: str, repositories: Sequence[Repository]) -> str:
    heads = [(repository.name, repository.head) for repository in repositories if repository.head is not None]
    certified = sum(bool(head.certificates) for _, head in heads)
    rows = [
        f"| [{name}]({_HUB}/{name}) | {head.kind} | {head.pair.target} | {head.task} | {_promises(head)} |"
        for name, head in heads
    ]
    first, head = heads[0]
    return _COLLECTION.format(
        summary=f"{certified} of {len(heads)} heads have a certificate, a proved bound on the loss on one task.",
        rows="\n".join(rows),
        repo=repo,
        rule=f"{head.kind}:path={first}",
    )


def _promises(head: Artefact) -> str:
    statements = [str(json.loads(text)["statement"]) for text in head.certificates.values()]
    return " ".join(statement.replace("|", "\\|") for statement in statements) or "none"


def _generate_files() -> dict[str, bytes]:
    return {path: text.encode() for path, text in _CUSTOM_GENERATE.items()}
