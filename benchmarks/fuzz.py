"""Fuzz the readers of external input with hypothesis: only Reprieve's own errors may occur, and nothing may hang.

    python benchmarks/fuzz.py specs --minutes 5

    python benchmarks/fuzz.py journals bodies yaml answers --count 500 --seed 0

- `specs`: rules, drafters and engines, from random texts of their names, signs and numbers;
- `json`: the JSON reader, certificates, policies, runs and label stores, from damaged valid documents;
- `bodies`: requests to the server and the vLLM plugin: completions, chats, and the fields that choose a rule;
- `journals`: records of runs;
- `yaml`: configuration files of `reprieve bench`;
- `answers`: responses and references, for each text grader.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from reprieve.backends.settings import EngineSettings
from reprieve.bench.records import RecordFile, read_run
from reprieve.cli.flags import parse
from reprieve.drafters import DRAFTERS
from reprieve.errors import ReprieveError
from reprieve.files import parse_json, read_json
from reprieve.heads.certificates import Certificate
from reprieve.heads.files import find_head
from reprieve.mining.store import LabelStore
from reprieve.playground.bodies import ChatBody, CompletionBody, read_body
from reprieve.policies.menu import Menu
from reprieve.policies.policy import Policy
from reprieve.rules import RULES, parse_rule
from reprieve.tasks.graders import GRADERS
from reprieve.tasks.programs import BREAK, code_blocks, program_of

SIGNS = st.sampled_from([*":=,;|()\"'+@ \t\n\\{}[]", "all", "any", "inf", "nan", "-1", "0", "0.5", "1e400", "9" * 5000])
WORDS = st.sampled_from(
    [
        *RULES.names(),
        *DRAFTERS.names(),
        "local",
        "vllm",
        "openai",
        "ray",
        "path",
        "threshold",
        "delta",
        "k",
        "url",
        "replicas",
    ]
)
SPECS = st.lists(st.one_of(SIGNS, WORDS, st.text(max_size=6)), max_size=12).map("".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just(10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)),
    max_leaves=8,
)


def read_specs(text: str) -> None:
    """Parse a text as a rule, a drafter and an engine."""
    for read in (parse_rule, DRAFTERS.make, EngineSettings):
        with contextlib.suppress(ReprieveError):
            read(text)


def changed(valid: str, draw: Callable[[Any], Any]) -> str:
    """Return a valid document with a piece cut out or inserted, a value changed, or everything replaced."""
    how = draw(st.sampled_from(["cut", "insert", "value", "deep", "whole"]))
    if how == "whole":
        return json.dumps(draw(VALUES))
    if how == "value":
        document = json.loads(valid)
        node = document
        while isinstance(node, dict) and node:
            key = draw(st.sampled_from(sorted(node)))
            if not isinstance(node[key], dict) or draw(st.booleans()):
                node[key] = draw(VALUES)
                break
            node = node[key]
        return json.dumps(document)
    start = draw(st.integers(0, len(valid)))
    if how == "cut":
        return valid[:start] + valid[start + draw(st.integers(0, 40)) :]
    piece = "[" * 3000 if how == "deep" else draw(st.text(max_size=6))
    return valid[:start] + piece + valid[start:]


CERTIFICATE = next((find_head("reprieve/miniature-judge") / "certificates").glob("*-0.05.json")).read_text()
POLICY = json.dumps({"rule": "margin:delta=2", "fast": 3.0, "max_threshold": 5.0, "by_load": {"8": 1.0}})
RUN = json.dumps({"schema": 1, "task": "arithmetic", "chat_template": False, "arms": ["lossless"]})
STORE = json.dumps({"schema": 2, "task": "arithmetic", "target_weights": "x", "tokenizer": "y", "answers": 2})
COMPLETION = json.dumps({"model": "m", "prompt": "x", "stop": ["a"], "n": 1, "vllm_xargs": {"reprieve_threshold": 0.1}})
CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": True}})


def read_documents(draw: Callable[[Any], Any], folder: Path) -> None:
    """Read a damaged document of a random kind."""
    with contextlib.suppress(ValueError):
        parse_json(draw(st.binary(max_size=40)))
    readers: list[tuple[str, str, Callable[[Path], Any]]] = [
        ("c.json", CERTIFICATE, Certificate.load),
        ("p.json", POLICY, lambda path: Policy.load(str(path))),
        ("run.json", RUN, lambda path: read_run(path.parent)),
        ("manifest.json", STORE, lambda path: LabelStore(path.parent).problems()),
        ("x.json", "{}", lambda path: read_json(path, "the file")),
    ]
    name, valid, read = draw(st.sampled_from(readers))
    (folder / name).write_text(changed(valid, draw), encoding="utf-8", errors="replace")
    with contextlib.suppress(ReprieveError):
        read(folder / name)


MENU = Menu([Policy.load(json.loads(POLICY)), Policy.load("top_k:k=2")])
KEYS = st.sampled_from(["reprieve_threshold", "reprieve_rule", "reprieve_leniency", "other"])


def read_bodies(draw: Callable[[Any], Any]) -> None:
    """Read a damaged body, and request fields as vLLM passes them on."""
    kind, valid = draw(st.sampled_from([(CompletionBody, COMPLETION), (ChatBody, CHAT)]))
    with contextlib.suppress(ReprieveError):
        body = read_body(kind, changed(valid, draw).encode(errors="surrogatepass"))
        MENU.choose(body.leniency)
    with contextlib.suppress(ReprieveError):
        MENU.choose(draw(st.dictionaries(KEYS, VALUES, max_size=3)), num_running=draw(st.integers(0, 10**6)))


RECORD = json.dumps(
    {
        "arm": "a", "problem_id": "p", "correct": True, "answer": "7", "text": "7", "finish_reason": "eos",
        "num_tokens": 10, "num_rounds": 2, "num_drafted": 8, "num_accepted": 6, "num_rescued": 1, "seconds": 0.5,
        "seconds_by_part": {"draft": 0.1},
    }
)  # fmt: skip


def read_journals(draw: Callable[[Any], Any], folder: Path) -> None:
    """Read a journal with damaged lines and compute with its records as results do."""
    path = folder / "problems.jsonl"
    lines = [RECORD if draw(st.booleans()) else changed(RECORD, draw) for _ in range(draw(st.integers(1, 3)))]
    path.write_text("\n".join(lines) + draw(st.sampled_from(["", "\n"])), encoding="utf-8", errors="replace")
    with contextlib.suppress(ReprieveError):
        for record in RecordFile(path).records:
            assert record.num_tokens / (record.num_rounds + 1) + record.seconds < float("inf")
            json.dumps(asdict(record))


CONFIG = "command: bench\ntarget: reprieve/miniature\nlimit: 3\narms: [lossless, 'margin:delta=2']\nseed: 1\n"
YAML = st.sampled_from(
    ["1:30", "010", "&a [*a]", "!!python/object:os.system x", "<<: {limit: 2}", "- ", "? ", "%", "~"]
)


def read_configs(draw: Callable[[Any], Any], folder: Path) -> None:
    """Read a configuration with a line added, lines removed or a piece cut out."""
    from reprieve.cli.main import command_of  # the command's module is loaded once

    path, lines = folder / "config.yaml", CONFIG.splitlines()
    key = draw(st.sampled_from(["limit", "target", "arms", "seed", "task", "timeout", "out", "", "draft"]))
    value = draw(st.one_of(YAML, VALUES.map(json.dumps), st.text(max_size=12)))
    lines.insert(draw(st.integers(0, len(lines))), f"{key}: {value}" if draw(st.booleans()) else value)
    text = "\n".join(lines if draw(st.booleans()) else [*lines[:1], f"{key}: {value}"])
    start = draw(st.integers(0, len(text)))
    text = text if draw(st.booleans()) else text[:start] + text[start + draw(st.integers(0, 9)) :]
    path.write_text(text, encoding="utf-8", errors="replace")
    kind = command_of("bench")
    with contextlib.suppress(ReprieveError, SystemExit), contextlib.redirect_stderr(io.StringIO()):
        parse(kind, ["--config", str(path)], command=kind.verb)


PIECES = st.sampled_from(
    [
        "The answer is ", "#### ", r"\boxed{", "}", r"\frac{", r"\sqrt", "^", "_", "{", "(", ")", "1,000",
        "1 000", "3.5e400", "10^", "9" * 400, "-", "%", "$", "=", "A", "B.", "</think>", "<think>", "\n",
        "Question:", "```python\n", "```",
        "def f(x):\n", "x", "+", "/", "!", r"\cdot", r"\pi", "\u0661", "\u00bd", "\x00", "inf", "nan", "12k", "**",
    ]
)  # fmt: skip
ANSWERS = st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=14).map("".join)


def read_answers(draw: Callable[[Any], Any]) -> None:
    """Compare two random responses with each text grader, as texts and as extracted answers."""
    response, other = draw(ANSWERS), draw(ANSWERS)
    for name in GRADERS.names():
        if name != "python":
            grader = GRADERS.make(name)
            read = grader.extract(response)
            assert isinstance(grader.equivalent(read, other), bool)
            assert isinstance(grader.equivalent(response, grader.extract(other)), bool)
    program_of(BREAK.join(code_blocks(response)), {"f"})


READERS: dict[str, Callable[[Callable[[Any], Any], Path], None]] = {
    "specs": lambda draw, folder: read_specs(draw(SPECS)),
    "json": read_documents,
    "bodies": lambda draw, folder: read_bodies(draw),
    "journals": read_journals,
    "yaml": read_configs,
    "answers": lambda draw, folder: read_answers(draw),
}


def fuzz(what: str, count: int, first: int, folder: Path) -> int:
    """Try `count` cases and return the number tried.

    Raises:
        Exception: an error that is not Reprieve's own; hypothesis prints the case in its smallest form.
        DeadlineExceeded: a case took more than five seconds.
    """
    tried = 0

    def once(data: Any) -> None:
        nonlocal tried
        tried += 1
        READERS[what](data.draw, folder)

    quiet = settings(
        max_examples=count, deadline=5000, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed(first)(quiet(given(data=st.data())(once)))()
    return tried


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="+", choices=tuple(READERS))
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes per kind, unless --count is given")
    parser.add_argument("--count", type=int, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for what in options.what:
            began, tried, number = time.monotonic(), 0, options.seed
            if options.count:
                tried = fuzz(what, options.count, number, Path(folder))
            while not options.count and time.monotonic() < began + 60 * options.minutes:
                tried += fuzz(what, 500, number, Path(folder))  # in batches: hypothesis has no time limit
                number += 1
            print(f"{what}: {tried} tried in {time.monotonic() - began:.0f} s, no unexpected error", flush=True)


if __name__ == "__main__":
    main()
