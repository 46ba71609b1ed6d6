"""Running servers: their URLs and the facts that they report."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reprieve.errors import EngineError, ReprieveError, SpecError
from reprieve.rules import Rule
from reprieve.types import Need

INFO = "vllm:reprieve_info"  # a metric of the plugin; its labels describe the server
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SECONDS = 10.0


@dataclass(frozen=True)
class ServerFacts:
    """Facts that a server reports about itself; None for each one that it does not report."""

    version: str | None = None
    runner: str | None = None
    dtype: str | None = None
    drafter: str | None = None
    num_draft_tokens: int | None = None
    rules: dict[str, str] = field(default_factory=dict)  # specifications by the names that requests use


@dataclass(frozen=True)
class Running:
    """Servers that hold one model.

    Args:
        close: ends the servers if they were started here.
        why: returns the likely cause of a server's death: the end of its log.
    """

    urls: tuple[str, ...]
    model: str
    facts: ServerFacts
    close: Callable[[], None] = lambda: None
    why: Callable[[], str] = lambda: ""


def facts_of(urls: Sequence[str]) -> ServerFacts:
    """Return the facts that all of these servers agree on.

    Raises:
        EngineError: one of them does not answer.
        ReprieveError: they are not alike.
    """
    facts_by_url = {url: _facts(url) for url in urls}
    first = next(iter(facts_by_url.values()))
    for url, facts in facts_by_url.items():
        if facts != first:
            raise ReprieveError(f"{url} and {next(iter(facts_by_url))} are not the same server: {facts} and {first}")
    return first


def model_of(url: str, wanted: str | None) -> str:
    """Return the name of the model that a server holds.

    Args:
        wanted: expected name; None if the server holds a single model.

    Raises:
        EngineError: the server does not answer.
        ReprieveError: it does not hold `wanted`, or `wanted` is None and it does not hold exactly one model.
    """
    try:
        names = [str(model["id"]) for model in json.loads(_get(f"{url}/v1/models"))["data"]]
    except (ValueError, KeyError, TypeError):
        raise ReprieveError(f"{url}/v1/models did not return an OpenAI-compatible list of models") from None
    if wanted is None and len(names) != 1:
        raise ReprieveError(f"{url} holds several models: name one with model=, one of {', '.join(names)}")
    if wanted is not None and wanted not in names:
        raise ReprieveError(f"{url} does not hold model {wanted!r}; it has {', '.join(names)}")
    return wanted or names[0]


def answers(url: str) -> bool:
    """Return whether a server is up and healthy."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_SECONDS) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _facts(url: str) -> ServerFacts:
    reply = _get(f"{url}/version", missing="{}")
    try:
        version = str(json.loads(reply)["version"])
    except (ValueError, KeyError, TypeError):
        version = None
    page = _get(f"{url}/metrics", missing="")
    line = next((line for line in page.splitlines() if line.startswith(INFO + "{")), None)
    if line is None:
        return ServerFacts(version)
    labels = {name: value.replace('\\"', '"').replace("\\\\", "\\") for name, value in _LABEL.findall(line)}
    return ServerFacts(
        version,
        runner=labels.get("runner") or None,
        dtype=labels.get("dtype") or None,
        drafter=labels.get("drafter") or None,
        num_draft_tokens=int(labels["num_draft_tokens"]) if labels.get("num_draft_tokens", "").isdigit() else None,
        rules=json.loads(labels.get("rules") or "{}"),
    )


def _get(address: str, *, missing: str | None = None) -> str:
    """A page.

    Args:
        missing: returned if the server has no such page (404); None to raise.
    """
    key = os.environ.get("OPENAI_API_KEY")
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404 and missing is not None:
            return missing
        raise EngineError(f"{address} refuses ({error})") from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{address} does not answer ({error})") from None


def require_vllm_inputs(rule: Rule) -> None:
    """Refuse a rule with inputs that vLLM does not provide.

    Raises:
        SpecError: names the input.
    """
    for need, words in ((Need.DRAFT_HIDDEN, "the draft's hidden states"), (Need.ADVICE, "an advisor")):
        if need in rule.traits.needs:
            raise SpecError(f"rule {rule.spec} needs {words}, which vLLM does not hand out; use the local engine")
    if other := set(rule.traits.target_layers) - {-1}:
        raise SpecError(
            f"rule {rule.spec} reads layer {min(other)}; vLLM hands out the last one (-1) only: train a "
            "head on that one, or use the local engine"
        )
