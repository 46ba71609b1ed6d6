"""Parts of `gpu.py` that import vLLM: the machine, answers, decisions. Each writes one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reprieve.backends.deployers import vllm_version
from reprieve.bundles import BUNDLES
from reprieve.errors import ReprieveError
from reprieve.files import replace_file

BUNDLED, K, TOKENS = "reprieve/miniature", 8, 96
RULES = ("margin:delta=2", "top_k:k=2", "typical", "fly:theta=0.1,window=2,variant=vllm", "judge:threshold=0.1")
MIN_EQUAL = 0.9  # share of answers that must be equal: on a GPU, rounding depends on the batch size


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return versions, devices, and whether this vLLM has the parts that the plugin wraps."""
    import torch

    from reprieve.bench.results import Environment
    from reprieve.vllm_plugin import configuration, probing

    fits = {}
    for kind, parts in probing.PARTS.items():
        try:
            probing.require_parts(parts, probing.live)
            fits[kind] = "fits"
        except ReprieveError as error:
            fits[kind] = str(error)
    smi = "nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv,noheader"
    devices = [] if options.device == "cpu" else subprocess.check_output(smi.split(), text=True).splitlines()
    found = ".".join(map(str, vllm_version() or ()))
    differs = "; ".join(f"{kind}: {text}" for kind, text in fits.items() if text != "fits")
    if options.device != "cpu" and not torch.cuda.is_available():
        differs = "PyTorch sees no CUDA device"
    facts = {"vllm": found, "cuda": torch.version.cuda, "probe": fits, "devices": devices, "differs": differs}
    warning = configuration.version_warning(found, "v1" if options.device == "cpu" else "v2")
    return {**asdict(Environment.here()), **facts, "warning": warning}


def engine_of(options: argparse.Namespace, rules: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Start vLLM on the bundled pair; return it and its effective settings."""
    from vllm import LLM

    bundle, cpu = BUNDLES[BUNDLED], options.device == "cpu"
    draft = {"method": "draft_model", "model": str(bundle.role_folder("draft")), "num_speculative_tokens": K}
    llm = LLM(
        model=str(bundle.role_folder("target")),
        speculative_config=draft,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        seed=0,
        enable_prefix_caching=False,
        tensor_parallel_size=options.tensor_parallel,
        enforce_eager=cpu or options.eager,
        additional_config={"reprieve": {"rules": [{"rule": rule} for rule in rules]}} if rules else {},
        **({} if cpu else {"gpu_memory_utilization": 0.4}),  # leave memory for the local engine's models
        **({"compilation_config": json.loads(options.compilation_config)} if options.compilation_config else {}),
    )
    config = llm.llm_engine.vllm_config
    return llm, {
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cuda_graphs": str(config.compilation_config.cudagraph_mode),
        "eager": bool(config.model_config.enforce_eager),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
    }


def prompts_of(limit: int) -> list[str]:
    from reprieve.tasks import load_task

    return [problem.prompt for problem in load_task(BUNDLES[BUNDLED].task).problems("test", limit)]


def answers(options: argparse.Namespace) -> dict[str, Any]:
    """Return vLLM's answers with the plugin switched off by each request, or without the plugin."""
    from vllm import SamplingParams

    with_plugin = os.environ.get("VLLM_PLUGINS") != ""
    llm, engine = engine_of(options, RULES[:1] if with_plugin else ())
    prompts, result = prompts_of(options.limit), {}
    # Sampled answers of the CPU build differ from process to process even without the plugin (vLLM issue 55005).
    for name, temperature in [("greedy", 0.0)] + ([] if options.device == "cpu" else [("sampled", 0.8)]):
        extra = {"extra_args": {"reprieve_rule": "off"}} if with_plugin else {}
        params = [
            SamplingParams(temperature=temperature, seed=n, max_tokens=TOKENS, **extra) for n in range(len(prompts))
        ]
        result[name] = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
    return {"engine": engine, **result}


def decisions(options: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy answers of each rule with the local engine's; the plugin tests itself when the engine starts."""
    from vllm import SamplingParams

    from reprieve.engine import SamplingParams as LocalParams
    from reprieve.engine import load_pair
    from reprieve.vllm_plugin import require_active

    llm, engine = engine_of(options, RULES)
    require_active(llm)
    served = {}
    for rule in ("off", *RULES):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, extra_args={"reprieve_rule": rule.partition(":")[0]})
        served[rule] = llm.generate(prompts_of(options.limit), params, use_tqdm=False)
    require_active(llm)  # fails if a rule raised an error
    pair, rows = load_pair(BUNDLED, dtype="float32", device=options.device), {}
    for rule, outputs in served.items():
        decoder, row = pair.decoder("lossless" if rule == "off" else rule, num_draft_tokens=K), {"n": 0, "equal": 0}
        row["rescued"] = 0
        for output in outputs:
            served_ids = list(output.outputs[0].token_ids)
            start_ids = [*output.prompt_token_ids, served_ids[0]]  # vLLM never drafts an answer's first token
            # With a limit of TOKENS the last block would be shorter.
            local = decoder.generate(start_ids, LocalParams(max_new_tokens=TOKENS + K))
            row["n"] += 1
            row["equal"] += served_ids[1:] == local.token_ids[: TOKENS - 1]
            row["rescued"] += local.num_rescued
        rows[rule] = row
    few = [rule for rule, row in rows.items() if row["equal"] < MIN_EQUAL * row["n"]]
    return {"engine": engine, "rules": rows, "differs": f"other answers than the local engine: {few}" if few else ""}


PARTS = {"machine": machine_facts, "answers": answers, "decisions": decisions}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--compilation-config", default="", help="vLLM's, as JSON")
    options = parser.parse_args()
    replace_file(options.into, json.dumps(PARTS[options.part](options)) + "\n")


if __name__ == "__main__":
    main()
