"""The first-GPU script, with a fake runner: the parts it plans and how it handles failures."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.kit.results import arm_results, results, throughput_results


@pytest.fixture
def options(tmp_path):
    return argparse.Namespace(
        device="cuda",
        target="reprieve/miniature",
        draft="reprieve/miniature",
        dtype="bfloat16",
        eagle="",
        task="gsm8k",
        prompt="--chat-template --thinking off",
        compilation_config="",
        max_model_len=4096,
        limit=7,
        concurrency="1,8",
        turns=2,
        out=tmp_path,
    )


ANSWERS = {"engine": {"runner": "v2"}, "greedy": [[1, 2], [3]], "sampled": [[4], [5]]}


class Machine:
    """A fake runner that writes the commands' output files; `broken` names the parts that fail."""

    def __init__(self, broken=()):
        self.broken, self.commands = set(broken), []

    def __call__(self, command, environment, log):
        self.commands.append((list(command), dict(environment)))
        if command[3:4] == ["report"] or "report" in command:
            Path(command[list(command).index("--out") + 1]).write_text("<html>")
            return 0
        into = "--into" if "--into" in command else "--out"
        target = Path(command[list(command).index(into) + 1])
        folder = target if into == "--out" else target.parent
        log.write_text("a line\n")
        if folder.name in self.broken:
            return 1
        if into == "--out":
            results([arm_results("lossless")], [throughput_results("lossless")]).write(folder)
        else:
            target.write_text(json.dumps(ANSWERS if folder.name == "off" else {"differs": ""}))
        return 0


def names(machine, out):
    targets = [
        command[command.index("--into" if "--into" in command else "--out") + 1] for command, _ in machine.commands
    ]
    return [Path(target).relative_to(out).parts[0] for target in targets]


def test_one_device_skips_the_parts_for_several_devices_and_for_a_head(options):
    parts = {part.name: part for part in gpu.plan(options, 1, (0, 33))}
    assert {name: part.skip for name, part in parts.items() if part.skip} == {
        "decisions-parallel": "one device",
        "eagle": "no --eagle",
    }
    ((command, _),) = parts["pair"].commands
    assert command[command.index("--engine") + 1] == "vllm:max_model_len=4096,tensor_parallel=1"
    assert command[command.index("--concurrency") + 1] == "1,8" and "vllm:fly" in command
    assert [dict(more) for _, more in parts["off"].commands] == [{"VLLM_PLUGINS": ""}, {"VLLM_PLUGINS": ""}, {}]


def test_several_devices_share_the_pair_and_old_versions_skip_fly(options):
    options.eagle = "heads/eagle"
    parts = {part.name: part for part in gpu.plan(options, 6, (0, 32))}
    assert not any(part.skip for part in parts.values())
    assert "tensor_parallel=4" in " ".join(parts["pair"].lines) and "vllm:fly" not in " ".join(parts["pair"].lines)
    assert "--drafter eagle3:path=heads/eagle,top_k=1" in parts["eagle"].lines[0]


def test_parts_with_missing_models_are_skipped_with_a_reason(options, monkeypatch):
    options.draft = "no/such"
    monkeypatch.setattr(gpu, "at_hand", lambda name: name != "no/such")
    parts = {part.name: part for part in gpu.plan(options, 1, (0, 33))}
    assert parts["pair"].skip == "no/such cannot be had: no such folder, and no hub" and not parts["bundled"].skip
    options.device, options.target = "cpu", gpu.DEFAULT_TARGET
    assert "name --target" in {part.name: part for part in gpu.plan(options, 0, None)}["pair"].skip


def test_a_failed_part_stops_no_other_and_is_the_only_one_rerun(options, capsys):
    parts = gpu.plan(options, 2, (0, 33))
    first = Machine(broken={"decisions"})
    done = gpu.run_parts(parts, options.out, first)
    gpu.finish(done, options.out, first)
    assert {name: kept["status"] for name, kept in done.items() if kept["status"] != "ok"} == {
        "decisions": "failed",
        "eagle": "skipped",
    }
    assert done["decisions"]["why"] == "ended with status 1" and done["decisions"]["log"] == ["a line"]
    sent = json.loads((options.out / "gpu.json").read_text())
    assert sent["parts"]["bundled"]["result"]["throughput"] and (options.out / "report.html").is_file()
    assert shlex.split(sent["parts"]["bundled"]["commands"][0])[:3] == list(gpu.REPRIEVE)
    again = Machine()
    done = gpu.run_parts(parts, options.out, again)
    assert names(again, options.out) == ["decisions"] and done["decisions"]["status"] == "ok"
    options.limit = 8  # the commands change, so all parts run again
    machine = Machine()
    gpu.run_parts(gpu.plan(options, 2, (0, 33)), options.out, machine)
    assert len(set(names(machine, options.out))) == 7


@pytest.mark.parametrize(("again", "failed"), [([[1, 2], [3]], True), ([[1, 2], [9]], False)])
def test_off_may_differ_from_vllm_no_more_than_vllm_from_itself(tmp_path, again, failed):
    made = {"unpatched": [[1, 2], [3]], "again": again, "off": [[1, 2], [4]]}
    for name, ids in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"engine": {}, "greedy": ids}))
    result, why = gpu.judge_off(tmp_path)
    assert result["greedy"] == {"n": 2, "again": 1 + failed, "off": 1} and bool(why) == failed


def test_a_command_past_its_timeout_is_killed(tmp_path):
    assert gpu.start([sys.executable, "-c", "import time; time.sleep(60)"], {}, tmp_path / "log", timeout=0.5) == 124
    assert (
        gpu.start([sys.executable, "-c", "import os; print(os.environ['A'])"], {"A": "b"}, tmp_path / "log", timeout=60)
        == 0
    )
    assert (tmp_path / "log").read_text() == "b\n"
