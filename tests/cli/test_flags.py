"""Flags and configuration files: declared once, checked alike, and a stored configuration repeats its run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from reprieve.cli.flags import flags_of, parse, to_yaml
from reprieve.cli.main import COMMANDS, command_of, main
from reprieve.errors import ReprieveError, SpecError
from tests.kit.pairs import SMALL


@dataclass(frozen=True)
class Inner:
    """Settings of something.

    Args:
        rate: How fast.
        num_steps: How many.
    """

    rate: float = 0.5
    num_steps: int = 3

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise SpecError(f"rate must be 0 or more, got {self.rate}")


@dataclass(frozen=True)
class Toy:
    """A command.

    Args:
        name: What for.
        items: Several texts. Repeatable.
        sizes: Several numbers.
        limit: None for all.
        flag: Whether.
        out: Where to.
    """

    name: str
    items: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    limit: int | None = None
    flag: bool = False
    out: Path = Path("out")
    inner: Inner = field(default_factory=lambda: Inner(num_steps=7))


def toy(*arguments):
    return parse(Toy, arguments, command="toy")


def test_flags_of_records_inside_records_keep_the_outer_defaults():
    assert toy("--name", "a") == Toy("a")
    assert toy("--name", "a", "--steps", "2").inner == Inner(num_steps=2)
    made = toy("--name", "a", "--items", "x", "--items", "y", "--sizes", "3,4", "--flag", "--limit", "5")
    assert made == Toy("a", items=("x", "y"), sizes=(3, 4), flag=True, limit=5)


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@given(
    st.builds(
        Toy,
        name=texts,
        items=st.lists(texts).map(tuple),
        sizes=st.lists(st.integers(), min_size=1).map(tuple),
        limit=st.none() | st.integers(),
        flag=st.booleans(),
        inner=st.builds(Inner, rate=st.floats(0.0, allow_nan=False), num_steps=st.integers()),
    )
)
def test_a_stored_configuration_gives_the_same_record(tmp_path_factory, record):
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(to_yaml(record, "toy"), encoding="utf-8")
    assert toy("--config", str(path)) == record


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("command: toy\nname: a\nsteps: 9\nrate: 1e-3\n")
    made = toy("--config", str(path), "--steps", "4")
    assert made == Toy("a", inner=Inner(0.001, 4))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("command: bench\nname: a\n", "belongs to `reprieve bench`, not to `reprieve toy`"),
        ("name: a\nstep: 9\n", "has no 'step'; did you mean steps?"),
        ("name: [a]\n", "name must be a text, got ['a']"),
        ("name: null\n", "name must be a text, got None"),
        ("name: a\nflag: 1\n", "flag must be true or false, got '1'"),
        ("name: a\nsteps: 1.5\n", "steps must be a whole number, got '1.5'"),
        ("name: a\nsteps: true\n", "steps must be a whole number, got 'true'"),
        ("name: a\nsizes: 3\n", "sizes must be a list, got '3'"),
        ("name: a\nrate: -1\n", "rate must be 0 or more, got -1"),
        ("- name\n", "must hold lines such as limit: 100, got a list"),
        ("name: [\n", "cannot be read"),
    ],
)
def test_invalid_configurations_are_refused_with_a_reason(tmp_path, content, says):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ReprieveError) as refused:
        toy("--config", str(path))
    assert says in str(refused.value)


def test_a_missing_configuration_and_a_missing_flag_are_named(capsys):
    with pytest.raises(ReprieveError, match="No such file"):
        toy("--config", "nowhere.yaml")
    with pytest.raises(SystemExit) as stop:
        toy()
    assert stop.value.code == 2
    assert "required: --name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stepps", "3"], "unknown flag --stepps; did you mean --steps?"),
        (["--zzz", "3"], "unknown flag --zzz\n"),
        (["--steps", "x"], "must be a whole number, got 'x'"),
        (["--sizes", ","], "must be numbers separated by commas"),
    ],
)
def test_bad_usage_is_reported(arguments, says, capsys):
    with pytest.raises(SystemExit):
        toy("--name", "a", *arguments)
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_runs_configuration_repeats_the_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    arms = ["--arm", "margin:delta=3", "--arm", "top_k:k=4"]
    sampled = ["--temperature", "1", "--top-p", "0.9", "--seed", "7", "--trials", "2"]
    sampled += ["--max-new-tokens", "60"]
    assert main(["bench", *SMALL, *arms, *sampled, "--limit", "2", "--num-draft-tokens", "4", "--out", str(first)]) == 0
    assert main(["bench", "--config", str(first / "config.yaml"), "--out", str(second)]) == 0

    def answers(folder):
        lines = (folder / "problems.jsonl").read_text().splitlines()
        return [{key: json.loads(line)[key] for key in ("arm", "problem_id", "trial", "text")} for line in lines]

    assert answers(first) == answers(second)
    ours, theirs = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, second))
    assert ours == {**theirs, "out": str(first)}


def test_presets_override_defaults_and_configurations_override_presets(tmp_path):
    kind = command_of("train arbiter")
    needed = ["--labels", "traces"]

    def epochs(*arguments):
        return parse(kind, [*needed, *arguments], command="train arbiter").settings.num_epochs

    path = tmp_path / "c.yaml"
    path.write_text("epochs: 11\n")
    small = ["--preset", "small"]
    assert epochs() != epochs(*small) == kind.presets["small"]["num_epochs"]
    assert epochs(*small, "--config", str(path)) == 11
    assert epochs(*small, "--config", str(path), "--epochs", "12") == 12


def test_every_flag_is_declared_once_and_explained():
    for name in COMMANDS:
        flags = list(flags_of(command_of(name)))
        assert all(flag.help for flag in flags), [f"{name} {flag.option}" for flag in flags if not flag.help]
        assert len({flag.option for flag in flags}) == len(flags), name


def test_help_and_usage_errors_load_no_torch():
    code = (
        "import sys, contextlib, io\n"
        "from reprieve.cli.main import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "    assert all(main([*name.split(), '--help']) == 0 for name in COMMANDS)\n"
        "    assert all(main([*name.split(), '--no-such-flag']) == 2 for name in COMMANDS)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_bundled_target_sets_the_default_task():
    kind = command_of("bench")

    def task(*arguments):
        return parse(kind, arguments, command="bench").settings.task

    assert task() == "word_problems"
    assert task("--target", "reprieve/arithmetic-pair") == "arithmetic"
    assert task("--target", "reprieve/arithmetic-pair", "--task", "word_problems") == "word_problems"
    assert task("--target", "Qwen/Qwen3-8B", "--task", "gsm8k") == "gsm8k"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("limit: 3\nlimit: 4\n", "the key 'limit' stands twice"),
        ("limit: 1:30\n", "limit must be a whole number, got '1:30'"),
        ('out: ""\n', "out must name a path, got ''"),
        ('target: "a\\0b"\n', "target must be text without NUL"),
        ('target: "a\\uD800b"\n', "must be text without NUL and lone surrogates|cannot be read"),
    ],
)
def test_ambiguous_and_empty_configuration_values_are_refused(written, told, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(written)
    assert main(["bench", "--config", str(path)]) in (1, 2)
    assert re.search(told, capsys.readouterr().err)


def test_configurations_hold_what_the_flags_take(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("command: toy\nname: on\nitems: [1:30, no]\nlimit: null\nflag: True\nsizes: [010]\n")
    assert toy("--config", str(path)) == Toy("on", items=("1:30", "no"), flag=True, sizes=(10,))


def test_numbers_in_configurations_are_read_as_decimals(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("temperature: 1e-3\ntop_p: 0.5\nlimit: 010\n")
    made = parse(command_of("bench"), ["--config", str(path)], command="bench").settings
    assert (made.sampling.temperature, made.sampling.top_p, made.limit) == (0.001, 0.5, 10)


def test_an_empty_path_is_refused(capsys):
    assert main(["bench", "--out", ""]) == 2
    assert "must name a path, got ''" in capsys.readouterr().err


def test_an_argument_that_is_not_utf8_is_refused_before_models_load(capsys):
    assert main(["generate", "caf\udce9"]) == 2
    assert "argument 2 must be UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["bench", "--help"]])
def test_a_closed_pipe_causes_no_error_output(arguments):
    command = [sys.executable, "-u", "-c", "from reprieve.cli.main import run; run()", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait()


OUTPUTS = {
    "closed": (">&-", "rules", 0, ""),
    "full": ("> /dev/full", "rules", 1, "No space left on device"),
    "full, help": ("> /dev/full", "--help", 1, "standard output cannot be written: No space left on device"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_takes_nothing_causes_one_line_at_most(name):
    output, verb, status, says = OUTPUTS[name]
    script = "from reprieve.cli.main import run; run()"
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "{script}" {verb} {output}'], capture_output=True, text=True
    )
    assert done.returncode == status and says in done.stderr and len(done.stderr.splitlines()) == bool(says)


def test_characters_that_a_terminal_cannot_show_are_escaped():
    script = "import sys; from reprieve.cli import main; main.main = lambda arguments: print('\\u2713'); main.run()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("\\u2713\n", "")


@pytest.mark.parametrize("value", ["1_0", "\u0661\u0662"])
def test_numbers_are_written_in_plain_digits(value, capsys):
    assert main(["bench", "--limit", value]) == 2
    assert f"must be a whole number, got {value!r}" in capsys.readouterr().err
