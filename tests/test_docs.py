"""README and docs: commands resolve to settings, Python blocks run, vLLM configurations load."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.records import ProblemRecord
from reprieve.bench.results import Allocation, ArmResults, Environment, Results, ThroughputResults
from reprieve.bench.settings import CertifySettings
from reprieve.certify.procedure import Plan
from reprieve.cli.flags import parse, parser_of
from reprieve.cli.main import COMMANDS, command_of
from reprieve.drafters import DRAFTERS
from reprieve.errors import SpecError
from reprieve.heads.certificates import Certificate
from reprieve.policies.menu import Menu
from reprieve.rules import RULES, parse_rule
from reprieve.tasks import load_task
from reprieve.vllm_plugin.probing import PARTS, WRAPPED

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CERTIFICATE = ROOT / "src/reprieve/bundled/miniature/judge/certificates/net_drop-0.03-0.1.json"
every_page = pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())


def blocks_of(text, language=""):
    """Contents of a page's fenced blocks of a language; lines continued by a backslash are joined."""
    fences = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.S | re.M)
    return [re.sub(r"\\\n\s*", "", block) for kind, block in fences if kind == language]


def titled_files(text):
    """Files that a page shows in blocks with a title, by name."""
    return dict(re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', text, re.S | re.M))


def block_commands(text):
    """Whole commands: the lines of blocks that begin with `reprieve`."""
    lines = re.findall(r"^(?:\$ )?(?:\.venv/bin/)?(reprieve .*?)(?:\s+#.*)?$", "\n".join(blocks_of(text)), re.M)
    return [line for line in lines if "..." not in line]


def inline_commands(text):
    """Commands between backticks, which may name some flags only."""
    found = (re.sub(r"\s*\n\s*", " ", code) for code in re.findall(r"(?<!`)`(reprieve [^`]+)`(?!`)", text))
    return [line for line in found if " --" in line and "..." not in line]


def split_command(line):
    """Split a command line into the command's class, its name and its arguments."""
    words = shlex.split(line)[1:]
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    assert name in COMMANDS, line
    return command_of(name), name, words[len(name.split()) :]


def leaves_of(record):
    """The values of a record and of the records in it, by name."""
    values = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        values |= leaves_of(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def certification_of(record):
    """The settings of a certification in a record, if it has any."""
    values = [getattr(record, field.name) for field in dataclasses.fields(record)]
    return next((value for value in values if isinstance(value, CertifySettings)), None)


def resolve(line):
    """Parse all that a command line names: rules, arms, thresholds, task, splits, drafter. Load no model."""
    kind, name, given = split_command(line)
    if "--help" in given:
        return
    command = parse(kind, given, command=name)
    values = leaves_of(command)
    task = getattr(command, "task_spec", values.get("task"))
    if task is not None and name != "labels import":
        splits = load_task(task).splits
        for key in ("split", "held_out_split"):
            assert values.get(key) is None or values[key] in splits, f"{line}: {key} must be one of {splits}"
    if values.get("drafter"):
        DRAFTERS.make(values["drafter"])
    if isinstance(values.get("arm"), tuple):
        make_arms(values["arm"], values["num_draft_tokens"], target=values["target"])
    if (settings := certification_of(command)) is not None:
        Plan.of(settings, target=values["target"])
    rules = values.get("rule") or ()
    for rule in (rules,) if isinstance(rules, str) else rules:
        if not rule.endswith(".json"):
            parse_rule(rule)


@pytest.fixture
def without_files(monkeypatch):
    """Replace heads and certificates that the docs name: rules get no head, and a bundled certificate stands in."""
    certificate = Certificate.load(CERTIFICATE)
    for module in ("bench.arms", "certify.procedure", "policies.policy"):
        monkeypatch.setattr(f"reprieve.{module}.attach_heads", lambda rule, target=None: rule)
    monkeypatch.setattr("reprieve.bench.arms.draft_tokens_for", lambda k, rule: k)
    monkeypatch.setattr("reprieve.policies.policy._certificates", lambda *given: [certificate] if given[1] else [])
    monkeypatch.setattr(Certificate, "load", lambda path: certificate)


def test_committed_tables_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    stale = [page for page in DOCS if hooks.with_tables(page.read_text()) != page.read_text()]
    assert not stale, "run `python docs/hooks.py`"
    pages = "".join(page.read_text() for page in DOCS)
    assert all(pages.count(f"<!-- {name} -->\n| ") == 1 for name in ("rules", "origins", "verbs"))
    assert hooks.with_tables("<!-- rules -->\nold\n<!-- /rules -->").count("\n| [`") == len(list(RULES))


@every_page
def test_commands_in_blocks_resolve_to_settings(page, without_files, tmp_path, monkeypatch):
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    for name, content in titled_files(text).items():
        Path(name).write_text(content)
    for line in block_commands(text):
        try:
            resolve(line)
        except (SystemExit, SpecError) as error:
            pytest.fail(f"{line}: {error}")


@every_page
def test_flags_named_in_the_text_exist(page):
    for line in inline_commands(page.read_text()):
        kind, _, given = split_command(line)
        if "--help" not in given:
            parser_of(kind, prog="reprieve").parse_args(given)  # exits on an unknown flag


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("reprieve certify --rule margin --max-drop 0.03", "needs --thresholds"),
        ("reprieve certify --rule margin --thresholds 1 --max-drop 0.03 --split dev", "split must be one of"),
        ("reprieve bench --arm margin:gamma=2", "gamma"),
        ("reprieve bench --arm margin --drafter eagle3:width=2", "width"),
        ("reprieve bench --arm margin --task jsonl:path=a.jsonl,grader=numbr", "grader must be one of"),
    ],
)
def test_values_that_flag_parsing_alone_accepts_are_refused(line, message, without_files):
    with pytest.raises((SpecError, AssertionError), match=message):
        resolve(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in DOCS if "import" in "".join(blocks_of(page.read_text(), "python"))],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_python_blocks_run(page, tmp_path):
    """Run the blocks that contain imports; they need the bundled pair at most."""
    blocks = [block for block in blocks_of(page.read_text(), "python") if "import" in block]
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_configurations_of_vllm_can_be_read(without_files):
    num_read = 0
    for page in DOCS:
        text = page.read_text()
        sources = [json.loads(given)["reprieve"] for given in re.findall(r"--additional-config '({.*?})'", text, re.S)]
        sources += [json.loads(block) for block in blocks_of(text, "json") if '"rule"' in block]
        sources += [json.loads(given) for given in re.findall(r"`({\"rules\".*?})`", text)]
        for source in sources:
            if isinstance(source, str) and source.endswith(".json"):
                continue
            Menu.load(source)
            num_read += 1
    assert num_read >= 3


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_docs_list_the_vllm_functions_that_the_plugin_wraps(runner):
    text = (ROOT / "docs" / "guides" / "vllm_operations.md").read_text()
    rows = dict(re.findall(r"^\| (V2 and V1|V1|V2) \|(.*)$", text.partition("| runner | wrapped |")[2], re.M))
    listed = re.findall(r"`([\w.]+)`", rows["V2 and V1"] + rows[runner.upper()])
    wrapped = [part.name for part in PARTS[runner] if part.use == WRAPPED]
    assert sorted(listed) == sorted(wrapped)
    assert f"{len(wrapped)} on {runner.upper()}" in text


def test_the_results_page_names_every_field():
    page = (ROOT / "docs" / "reference" / "results.md").read_text()
    for record in (Results, RunConfig, ArmResults, ThroughputResults, Allocation, Environment, ProblemRecord):
        for field in dataclasses.fields(record):
            name = re.sub(r"_(ci95|p|range)$", "", field.name)
            assert f"`{name}`" in page, f"{record.__name__}.{field.name}"
