"""Install a built package into an empty environment and run the README's steps: a script, since it needs the network.

    python tests/release/try_wheel.py dist/reprieve-1.0.0-py3-none-any.whl --extras serve --first torch==2.13.0

Print one line of JSON with the seconds of each step; exit with an error at the first step that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
_START_SECONDS = 180  # for a server to start, including the first import of torch


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("package", type=Path, help="wheel or sdist")
    options.add_argument("--extras", default="", help="such as serve or evidence,labels; none by default")
    options.add_argument("--first", nargs="*", default=[], help="what to install before, such as torch's CPU build")
    options.add_argument("--lowest", nargs="*", default=[], help="pins to install it with, such as fastapi==0.115.0")
    asked = options.parse_args()
    print(json.dumps(try_package(asked.package.resolve(), asked.extras, asked.first, asked.lowest)))


def try_package(package: Path, extras: str, first: list[str], lowest: list[str]) -> dict[str, object]:
    """Return the seconds of each step."""
    took: dict[str, object] = {"package": package.name, "extras": extras}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # nothing of the checkout can be imported from here
        python, reprieve = folder / "env/bin/python", folder / "env/bin/reprieve"

        def run(*command: str | Path) -> str:
            return _run(list(command), folder)

        def timed(step: str, do: Callable[[], object]) -> None:
            start = time.monotonic()
            do()
            took[f"{step}_s"] = round(time.monotonic() - start, 1)

        def install() -> None:
            pip = (python, "-m", "pip", "install", "--quiet")
            if first:
                run(*pip, *first)
            run(*pip, f"{package}[{extras}]" if extras else package, *lowest)

        run(sys.executable, "-m", "venv", folder / "env")
        timed("install", install)
        run(python, "-m", "pip", "check")
        timed("readme", lambda: run(python, "-c", readme_example()))
        timed("demo", lambda: run(reprieve, "demo", "--limit", "5", "--out", "demo"))
        timed("serve", lambda: _serve(reprieve, folder, expected="serve" in extras.split(",")))
    return took


def readme_example() -> str:
    """The README's first example in Python."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.S)[0]


def _run(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _serve(reprieve: Path, folder: Path, *, expected: bool) -> None:
    """Start a server, read its models and end it; without the extra, it must name the extra."""
    port = _free_port()
    command = [reprieve, "serve", "--port", str(port)]
    if not expected:
        refused = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=180)
        if refused.returncode == 0 or "reprieve[serve]" not in refused.stderr:
            raise SystemExit(f"serve without its extra must name reprieve[serve], got:\n{refused.stderr}")
        return
    with _server(command, folder) as server:
        models = _models(f"http://127.0.0.1:{port}/v1/models", server)
    if not models["data"]:
        raise SystemExit(f"/v1/models lists no model: {models}")


@contextmanager
def _server(command: list[str | Path], folder: Path) -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen(command, cwd=folder, env=_environment(), text=True)
    try:
        yield server
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    finally:
        server.kill()


def _models(url: str, server: subprocess.Popen[str]) -> dict[str, list[object]]:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: dict[str, list[object]] = json.load(answer)
                return found
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not answer within {_START_SECONDS} s; exit status {server.poll()}")


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


if __name__ == "__main__":
    main()
