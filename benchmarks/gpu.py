"""Run all checks on a machine with an NVIDIA GPU in one command, `make gpu`. See docs/guides/gpu.md.

    python benchmarks/gpu.py --out runs/gpu                          # on a GPU; run it again to resume
    python benchmarks/gpu.py --device cpu --limit 4 --concurrency 1,4 --turns 1     # on vLLM's CPU build

Each part runs in its own processes, so that one that fails or hangs does not stop the others. Finished parts are not
repeated. Writes report.html and gpu.json, which holds the commands, versions, results and the ends of failed logs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reprieve.backends.deployers import vllm_version
from reprieve.bench.results import Results
from reprieve.errors import ReprieveError
from reprieve.files import read_json, replace_file

DEFAULT_TARGET, DEFAULT_DRAFT = "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"
K = 8
ARMS = ("fly:theta=0.3,variant=vllm", "margin:delta=2", "typical")
REPRIEVE = (sys.executable, "-m", "reprieve.cli.main")
CHILD = Path(__file__).with_name("gpu_parts.py")
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
Environment = Mapping[str, str]
Runner = Callable[[Sequence[str], Environment, Path], int]


@dataclass(frozen=True)
class Part:
    """One check.

    Args:
        commands: run in order, each with additional environment variables.
        skip: reason not to run it, printed and stored.
        judge: reads the result from the folder; returns it and a description of its failure, or "".
    """

    name: str
    commands: tuple[tuple[tuple[str, ...], tuple[tuple[str, str], ...]], ...] = ()
    skip: str = ""
    judge: Callable[[Path], tuple[dict[str, Any], str]] = field(default=lambda folder: ({}, ""), compare=False)

    @property
    def lines(self) -> list[str]:
        """The commands as lines for a shell."""
        return [
            " ".join([*(f"{k}={shlex.quote(v)}" for k, v in more), shlex.join(args)]) for args, more in self.commands
        ]


def start(command: Sequence[str], environment: Environment, log: Path, *, timeout: float) -> int:
    """Run a command in its own session, with output to a log; kill the whole session after `timeout` seconds."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_parts(parts: Sequence[Part], out: Path, runner: Runner) -> dict[str, dict[str, Any]]:
    """Run the unfinished parts and store the outcome of each; a failure does not stop the others."""
    done = {}
    for part in parts:
        folder = out / part.name
        folder.mkdir(parents=True, exist_ok=True)
        kept = read_json(folder / "part.json", "a part") if (folder / "part.json").is_file() else {}
        if kept.get("status") == OK and kept.get("commands") == part.lines:
            print(f"{part.name}: already done", flush=True)
        elif part.skip:
            kept = {"status": SKIPPED, "why": part.skip}
        else:
            print(f"{part.name}: {len(part.commands)} command(s), log {folder / 'log.txt'}", flush=True)
            kept = _run(part, folder, runner)
        replace_file(folder / "part.json", json.dumps(kept, indent=1) + "\n")
        done[part.name] = kept
        print(f"{part.name}: {kept['status']}{'; ' + kept['why'] if kept.get('why') else ''}", flush=True)
    return done


def _run(part: Part, folder: Path, runner: Runner) -> dict[str, Any]:
    began, why = time.monotonic(), ""
    result: dict[str, Any] = {}
    log = folder / "log.txt"
    log.unlink(missing_ok=True)
    try:
        for command, more in part.commands:
            if status := runner(command, dict(more), log):
                why = f"ended with status {status}{' (out of time)' if status == 124 else ''}"
                break
        else:
            result, why = part.judge(folder)
    except (OSError, ValueError, KeyError, ReprieveError) as error:
        why = f"{type(error).__name__}: {error}"
    kept: dict[str, Any] = {"status": FAILED if why else OK, "why": why, "commands": part.lines, "result": result}
    kept["seconds"] = round(time.monotonic() - began, 1)
    if why and log.is_file():
        kept["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
    return kept


def judge_result(folder: Path) -> tuple[dict[str, Any], str]:
    """Read a child's result; a nonempty `differs` is a failure."""
    result = read_json(folder / "result.json", "the result")
    return result, result.get("differs", "")


def judge_off(folder: Path) -> tuple[dict[str, Any], str]:
    """Compare the switched-off plugin with two runs without it, which show how many answers repeat at all."""
    answers = {name: read_json(folder / f"{name}.json", "answers") for name in ("unpatched", "again", "off")}
    keys = [key for key in ("greedy", "sampled") if key in answers["off"]]
    result: dict[str, Any] = {"unpatched": answers["unpatched"]["engine"], "off": answers["off"]["engine"]}
    for key in keys:
        pairs = {name: zip(answers["unpatched"][key], answers[name][key], strict=True) for name in ("again", "off")}
        result[key] = {"n": len(answers["off"][key])} | {
            name: sum(a == b for a, b in pair) for name, pair in pairs.items()
        }
    worse = [key for key in keys if result[key]["off"] < result[key]["again"]]
    return result, f"{', '.join(worse)} answers differ from those without the plugin" if worse else ""


def judge_bench(folder: Path) -> tuple[dict[str, Any], str]:
    """Read a run of `reprieve bench`."""
    results = Results.read(folder)
    if results is None:
        return {}, "no results.json"
    config, rows = results.config, [asdict(row) for row in results.throughput]
    arms = [{key: getattr(arm, key) for key in ("spec", "accuracy", "tokens_per_round")} for arm in results.arms]
    result = {"engine": [config.engine, config.engine_version, config.runner], "arms": arms, "throughput": rows}
    return result, "" if rows else "no throughput was measured"


def plan(options: argparse.Namespace, num_devices: int, version: tuple[int, ...] | None) -> list[Part]:
    """Return the parts for this machine."""
    cpu, out = options.device == "cpu", options.out
    common = (("OMP_NUM_THREADS", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"))
    variables = common if cpu else ()

    def child(what: str, folder: str, *flags: str, **environment: str) -> Any:
        target = str(out / folder / f"{flags[0] if what == 'answers' else 'result'}.json")
        given = ("--device", options.device, "--limit", str(options.limit), *flags[what == "answers" :])
        given += ("--compilation-config", options.compilation_config) if options.compilation_config else ()
        return (sys.executable, str(CHILD), what, "--into", target, *given), (*variables, *environment.items())

    def decisions(name: str, *flags: str, skip: str = "") -> Part:
        return Part(name, (child("decisions", name, *flags),), skip, judge_result)

    def bench(name: str, engine: str, arms: Sequence[str], *flags: str, skip: str = "") -> Part:
        fly = ("vllm:fly",) if version is not None and version >= (0, 33) else ()
        command = [*REPRIEVE, "bench", "--engine", f"vllm:{engine}", *flags, "--num-draft-tokens", str(K)]
        command += [part for arm in (*fly, *arms) for part in ("--arm", arm)]
        command += ["--concurrency", options.concurrency, "--turns", str(options.turns), "--limit", str(options.limit)]
        return Part(name, (((*command, "--out", str(out / name)), variables),), skip, judge_bench)

    single = "" if num_devices > 1 else "one device"
    pair: tuple[str, ...] = ("--target", options.target, "--draft", options.draft, "--dtype", options.dtype)
    pair += ("--task", options.task, *shlex.split(options.prompt))
    if cpu and options.target == DEFAULT_TARGET:
        missing = "without a GPU it takes hours; name --target and --draft"
    else:
        gone = [name for name in (options.target, options.draft) if not at_hand(name)]
        missing = f"{' and '.join(gone)} cannot be had: no such folder, and no hub" if gone else ""
    large = f"max_model_len={options.max_model_len},tensor_parallel={power_of_two(num_devices)}"
    small = "max_model_len=512,max_num_seqs=64"
    eagle = f"eagle3:path={options.eagle},top_k=1"
    return [
        Part("machine", (child("machine", "machine"),), "", judge_result),
        decisions("decisions"),
        decisions("decisions-eager", "--eager", skip="the CPU build is always eager" if cpu else ""),
        decisions("decisions-parallel", "--tensor-parallel", "2", skip=single),
        Part(
            "off",
            (
                child("answers", "off", "unpatched", VLLM_PLUGINS=""),
                child("answers", "off", "again", VLLM_PLUGINS=""),
                child("answers", "off", "off"),
            ),
            "",
            judge_off,
        ),
        bench("bundled", small, (*ARMS, "judge:threshold=0.1"), "--dtype", "float32"),
        bench("pair", large, ARMS, *pair, skip=missing),
        bench("eagle", large, ARMS, *pair, "--drafter", eagle, skip=missing or ("" if options.eagle else "no --eagle")),
    ]


def at_hand(name: str) -> bool:
    """Return True if a model is in a local folder or the cache, or can be downloaded."""
    if name.startswith("reprieve/") or Path(name).is_dir():
        return True
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    try:
        return bool(HfApi().model_info(name, timeout=10))
    except Exception:  # the hub raises many types
        return False


def power_of_two(number: int) -> int:
    """Return the largest power of two that is no larger, at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def finish(done: Mapping[str, dict[str, Any]], out: Path, runner: Runner) -> None:
    """Write gpu.json, and report.html from the complete runs."""
    folders = [str(out / name) for name, kept in done.items() if (out / name / "results.json").is_file()]
    document = {"command": shlex.join(sys.argv), "made": datetime.datetime.now(datetime.UTC).isoformat(), "parts": done}
    if folders:
        report = [*REPRIEVE, "report", *folders, "--title", "Reprieve on a GPU", "--out", str(out / "report.html")]
        if runner(report, {}, out / "report.log"):
            print(f"report: failed, see {out / 'report.log'}")
    replace_file(out / "gpu.json", json.dumps(document, indent=1) + "\n")
    print(f"To send: {out / 'gpu.json'}" + (f" and {out / 'report.html'}" if (out / "report.html").is_file() else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eagle", default="", help="folder or hub id of an EAGLE-3 head of the target")
    parser.add_argument("--task", default="gsm8k", help="task of the pair; offline: gsm8k:path=gsm8k_{split}.jsonl")
    parser.add_argument(
        "--prompt", default="--chat-template --thinking off --max-new-tokens 1024", help="flags of `reprieve bench`"
    )
    parser.add_argument("--compilation-config", default="", help="vLLM's, as JSON, for decisions and off")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=100, help="number of problems and prompts")
    parser.add_argument("--concurrency", default="1,8,32,64")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hours", type=float, default=3, help="time limit of each command, in hours")
    parser.add_argument("--only", nargs="*", help="names of the parts to run")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args()
    import torch

    def runner(command: Sequence[str], environment: Environment, log: Path) -> int:
        return start(command, environment, log, timeout=3600 * options.hours)

    parts = plan(options, torch.cuda.device_count(), vllm_version())
    if unknown := set(options.only or ()) - {part.name for part in parts}:
        parser.error(f"--only must name parts of {', '.join(part.name for part in parts)}, got {', '.join(unknown)}")
    done = run_parts([part for part in parts if not options.only or part.name in options.only], options.out, runner)
    finish(done, options.out, runner)
    return int(any(kept["status"] == FAILED for kept in done.values()))


if __name__ == "__main__":
    sys.exit(main())
