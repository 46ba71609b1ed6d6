"""Hub repository of a head: the head, its certificates and its report together."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from reprieve.errors import ReprieveError, SpecError
from reprieve.files import read_file, replace_file
from reprieve.heads.artefact import HEADS, Artefact
from reprieve.heads.certificates import Certificate
from reprieve.heads.files import CARD, CERTIFICATES, CONFIG, WEIGHTS, kind_of
from reprieve.heads.folds import read_folds
from reprieve.heads.loading import load_head

_REPORT = "report.html"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_GENERATE = "custom_generate/generate.py"
# Read by transformers: `model.generate(custom_generate=REPOSITORY, trust_remote_code=True)` runs it.
_GENERATE_FILES: Mapping[str, bytes] = {
    _GENERATE: b'''"""Speculative decoding with a rule: `reprieve.custom_generate` documents the arguments."""

import reprieve
from transformers import GenerationMixin


def generate(model, *args, **kwargs):
    return GenerationMixin.generate(model, *args, custom_generate=reprieve.custom_generate, **kwargs)
''',
    "custom_generate/requirements.txt": b"reprieve\n",
}


@dataclass(frozen=True)
class Repository:
    """A repository, ready to be uploaded.

    Args:
        name: owner/name on the hub.
        files: contents by path.
    """

    name: str
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, folder: Path, name: str, *, report: Path | None = None) -> Repository:
        """Return the repository of a head.

        Args:
            folder: of a head or of `quickstart`.
            name: owner/name of the repository.
            report: HTML page for the head; the `report.html` of a quickstart folder by default.

        Raises:
            SpecError: not owner/name.
            ReprieveError: a folder without a head, or a certificate of another head.
        """
        if not _REPOSITORY.fullmatch(name):
            raise SpecError(f"repo must be owner/name, of letters, digits, '-', '_' and '.', got {name!r}")
        head_folder = folder / "head" if (folder / "head").is_dir() else folder
        if not head_folder.is_dir():
            raise ReprieveError(
                f"{str(folder)!r} must be the folder of a head or of quickstart; there is no such folder"
            )
        kind = "folds" if read_folds(head_folder) is not None else kind_of(head_folder)
        if kind not in HEADS.names():
            raise ReprieveError(f"{str(folder)!r} must hold one head ({', '.join(HEADS.names())}), got {kind}")
        head = cast(Artefact, load_head(head_folder))
        head = dataclasses.replace(head, certificates=_certificates(head, head_folder, folder))
        card = head.card().replace("path=THIS", f"path={name}")
        card = card.replace("\n- reprieve\n", "\n- reprieve\n- custom_generate\n")
        files = {
            **{path: read_file(head_folder / path, "head") for path in (CONFIG, WEIGHTS)},
            **{path: text.encode() for path, text in head.certificates.items()},
            **_GENERATE_FILES,
        }
        if report is None and (folder / _REPORT).is_file():
            report = folder / _REPORT
        if report is not None:
            files[_REPORT] = read_file(report, "report")
            card += f"\nThe [report]({_REPORT}) has the measurements.\n"
        return cls(name, {CARD: card.encode(), **files})

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

    def upload(self, folder: Path, *, private: bool = False) -> str:
        """Create the repository if necessary, upload the folder in one commit, and return the repository's address.

        Raises:
            ReprieveError: no network, no login or no right to write there.
        """
        from huggingface_hub import HfApi

        try:
            address = HfApi().create_repo(self.name, private=private, exist_ok=True)
            HfApi().upload_folder(
                repo_id=self.name, folder_path=folder, commit_message="Publish with reprieve", delete_patterns="*"
            )
        except Exception as error:  # the hub raises many types: no network, no login, no access
            reason = " ".join(str(error).split())
            raise ReprieveError(
                f"{self.name} cannot be uploaded: {reason}. Log in with `hf auth login`; the files are in {folder}"
            ) from None
        return str(address)


def _certificates(head: Artefact, *folders: Path) -> dict[str, str]:
    """Return the texts of the certificates in folders, by path in the repository."""
    texts = {}
    for path in sorted({path for folder in folders for path in (folder / CERTIFICATES).glob("*.json")}):
        certificate = Certificate.load(path)
        if head.fingerprint not in certificate.portable_rule:
            raise ReprieveError(
                f"certificate {str(path)!r} must be about this head ({head.fingerprint}), got "
                f"{certificate.portable_rule}: remove it from the folder"
            )
        texts[f"{CERTIFICATES}/{path.name}"] = read_file(path, "certificate").decode()
    return texts
