"""Run vLLM's own rejection-sampler tests with and without the plugin, which must pass all that vLLM passes.

    python benchmarks/vllm_sampler_tests.py --source vllm-0.32.0.tar.gz

Runs test_rejection_sampler.py of vLLM's source distribution three times on the CPU build: untouched; with
`expand_kernel` mended (issue 55005: the CPU build's discards its result); and mended, through the plugin with
`margin:delta=0`, which rescues nothing and so must change nothing, although all of the plugin's code runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

MODE = "REPRIEVE_SAMPLER_TESTS"
FOLDERS = ("tests/v1/sample/", "tests/v1/__init__.py", "tests/__init__.py")


def pytest_configure(config):
    """Patch vLLM; each run loads this file as a pytest plugin (`-p vllm_sampler_tests`)."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides()
    if os.environ[MODE] != "untouched":
        from tests_of_reprieve import cpu_kernels

        cpu_kernels.mend()
    if os.environ[MODE] == "plugin":
        _behind_the_plugin()


def _behind_the_plugin():
    import torch
    from vllm.v1.sample import rejection_sampler as module

    from reprieve.policies.menu import Menu
    from reprieve.vllm_plugin import v1 as sampler
    from reprieve.vllm_plugin.rounds import RoundRequest, WorkerRules
    from reprieve.vllm_plugin.v1 import Hooks

    sampler.patch_sampler()
    patched = module.rejection_sample

    def rejection_sample(token_ids, counts, max_spec_len, ends, probs, logits, bonus, meta, *rest, **more):
        names = [str(number) for number in range(len(counts))]
        zero = torch.zeros(len(counts)) if meta.temperature is None else meta.temperature
        rules = WorkerRules(Menu.load("margin:delta=0"))
        rules.note_drafts(names, None)
        hooks = Hooks(rules, None)
        hooks.requests = lambda given: [  # type: ignore[method-assign, assignment]
            RoundRequest(name, count, bool(zero[int(name)] == 0) or meta.all_greedy, lambda: None)
            for name, count in zip(names, given, strict=True)
        ]
        metadata = SimpleNamespace(draft_token_ids=token_ids, target_logits_indices=torch.arange(len(token_ids)))
        state = SimpleNamespace(spec_decode_metadata=metadata, logits=logits, sample_hidden_states=None)
        everything = torch.ones(len(token_ids), dtype=torch.bool)
        token = sampler.ROUND.set(sampler.V1Round(hooks, state, possible=everything))
        try:
            output = patched(token_ids, counts, max_spec_len, ends, probs, logits, bonus, meta, *rest, **more)
        finally:
            sampler.ROUND.reset(token)
        assert rules.failures == 0, "the plugin failed"
        taken = rules.counter.take().values()
        assert sum(len(rounds) for _, rounds in taken) == sum(count > 0 for count in counts)
        assert not any(sum(flags) for _, rounds in taken for *_, flags in rounds)
        return output

    module.rejection_sample = rejection_sample


def failures(folder, mode):
    """Return the names of the failed tests, and the number of tests run."""
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(folder), str(here.parent)])
    environment = {**os.environ, MODE: mode, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "pytest", "-p", here.stem, "-q", "--tb=line", "-rf", "-p", "no:cacheprovider"]
    test = folder / "tests/v1/sample/test_rejection_sampler.py"
    done = subprocess.run(
        [*command, str(test)], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    failed = set(re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE))
    summary = re.search(r"(?:(\d+) failed, )?(\d+) passed", done.stdout)
    if summary is None:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return failed, int(summary[1] or 0) + int(summary[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="vLLM's source distribution, vllm-0.32.0.tar.gz")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with tarfile.open(options.source) as archive:
            for member in archive.getmembers():
                name = member.name.partition("/")[2]
                if member.isfile() and name.startswith(FOLDERS):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(archive.extractfile(member).read())
        copied = folder / "tests_of_reprieve"
        copied.mkdir()
        source = Path(__file__).resolve().parent.parent / "tests/vllm/cpu_kernels.py"
        (copied / "cpu_kernels.py").write_text(source.read_text())
        found = {mode: failures(folder, mode) for mode in ("untouched", "mended", "plugin")}
    for mode, (failed, ran) in found.items():
        print(f"{mode}: {len(failed)} of {ran} fail")
    new = found["plugin"][0] - found["mended"][0]
    print(f"fail only with the plugin: {sorted(new) or 'none'}")
    sys.exit(bool(new))


if __name__ == "__main__":
    main()
