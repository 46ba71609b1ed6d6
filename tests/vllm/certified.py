"""The bundled judge, certified for the vLLM that runs: a certificate holds for one version only."""

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

from vllm import __version__

from reprieve.heads.certificates import Certificate
from reprieve.heads.files import find_head

BUNDLED = "reprieve/arithmetic-judge"
CERTIFICATE = Path("certificates/net_drop-0.03-0.04-vllm.json")


@functools.cache
def judge_path():
    """The bundled judge's path, or on another vLLM that of a copy whose certificate names this version."""
    certificate = Certificate.load(find_head(BUNDLED) / CERTIFICATE)
    if certificate.conditions.engine_version == __version__:
        return BUNDLED
    folder = Path(tempfile.mkdtemp(prefix="reprieve-judge-"))
    shutil.copytree(find_head(BUNDLED), folder, dirs_exist_ok=True)
    conditions = dataclasses.replace(certificate.conditions, engine_version=__version__)
    (folder / CERTIFICATE).write_text(dataclasses.replace(certificate, conditions=conditions).to_json())
    return str(folder)
