"""Readers of what others write, under hypothesis: only errors of ours may come out, and nothing may hang.

    python benchmarks/fuzz.py specs --minutes 5

- `specs`: rules, drafters, engines, from texts made of their own names, signs and numbers;
- `json`: the one reader of JSON, certificates, policies, runs and label stores, from texts that were valid once;
- `bodies`: what a server and the vLLM plugin are asked: completions, chats, and the fields that choose a rule.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reprieve.backends.settings import EngineSettings
from reprieve.bench.records import read_run
from reprieve.drafters import DRAFTERS
from reprieve.errors import ReprieveError
from reprieve.files import parse_json, read_json
from reprieve.heads.certificates import Certificate
from reprieve.heads.files import find_head
from reprieve.mining.store import LabelStore
from reprieve.playground.protocol import ChatBody, CompletionBody, field_error
from reprieve.rules import RULES, parse_rule
from reprieve.vllm_plugin.menu import Menu
from reprieve.vllm_plugin.policy import Policy

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
    """A text that should be a rule, a drafter or an engine."""
    for read in (parse_rule, DRAFTERS.make, lambda given: EngineSettings(given).servers):
        with contextlib.suppress(ReprieveError):
            read(text)


def changed(valid: str, draw: Callable[[Any], Any]) -> str:
    """A valid document with a piece cut out, doubled, or replaced, or another value somewhere."""
    how = draw(st.sampled_from(["cut", "insert", "value", "deep", "whole"]))
    if how == "whole":
        return json.dumps(draw(VALUES))
    if how == "value":
        document = json.loads(valid)
        place = document
        while isinstance(place, dict) and place:
            key = draw(st.sampled_from(sorted(place)))
            if not isinstance(place[key], dict) or draw(st.booleans()):
                place[key] = draw(VALUES)
                break
            place = place[key]
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
    """A damaged document of each kind."""
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
    """A damaged body, and fields of a request as vLLM hands them on."""
    kind, valid = draw(st.sampled_from([(CompletionBody, COMPLETION), (ChatBody, CHAT)]))
    try:
        body = kind.model_validate(parse_json(changed(valid, draw)))
        with contextlib.suppress(ReprieveError):
            MENU.choose(body.leniency)
    except ValidationError as error:
        sentence, _ = field_error(error.errors())
        assert sentence
    except ValueError:
        pass  # no JSON: FastAPI says so
    with contextlib.suppress(ReprieveError):
        MENU.choose(draw(st.dictionaries(KEYS, VALUES, max_size=3)), num_running=draw(st.integers(0, 10**6)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("specs", "json", "bodies"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    count: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:

        def once(data: Any, text: str) -> None:
            count["tried"] += 1
            if options.what == "specs":
                read_specs(text)
            elif options.what == "json":
                read_documents(data.draw, Path(folder))
            else:
                read_bodies(data.draw)

        number = 0
        while time.monotonic() < end:  # in portions: hypothesis itself has no limit on time
            quiet = settings(
                max_examples=500, deadline=5000, database=None, suppress_health_check=list(HealthCheck),
                phases=(Phase.explicit, Phase.generate, Phase.shrink),
            )  # fmt: skip
            texts = SPECS if options.what == "specs" else st.just("")
            seed(options.seed + number)(quiet(given(data=st.data(), text=texts)(once)))()
            number += 1
    print(f"{options.what}: {count['tried']} tried in {options.minutes:g} minutes, every error one of ours")


if __name__ == "__main__":
    main()
