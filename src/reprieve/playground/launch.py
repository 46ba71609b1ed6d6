"""Build and run the server for a pair and a menu of rules."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reprieve.bundles import BUNDLES
from reprieve.drafters import DRAFTERS
from reprieve.engine import Pair, SpeculativeDecoder
from reprieve.errors import SpecError
from reprieve.heads.length import draft_tokens_for
from reprieve.playground.app import Service, create_app
from reprieve.playground.protocol import Prompts
from reprieve.playground.settings import PlaygroundSettings
from reprieve.playground.worker import Worker
from reprieve.policies.menu import Menu
from reprieve.policies.policy import STRICT, Policy
from reprieve.settings import AUTO, NumDraftTokens
from reprieve.tasks import load_task

if TYPE_CHECKING:
    from fastapi import FastAPI

_GRACE_S = 10  # for clients that do not read their response, or have not sent the whole request


def make_app(
    pair: Pair,
    policies: list[Policy],
    settings: PlaygroundSettings,
    *,
    announce: Callable[[str], None] = lambda line: None,
) -> FastAPI:
    """Create a server for the pair, with its rules built and its engine thread started.

    The task in the settings formats chats if the tokenizer has no chat template. The default for a bundled pair is the
    pair's own task.

    Args:
        announce: called with a line about each rule.

    Raises:
        ReprieveError: a rule that the pair cannot serve.
        PairError: a head or a certificate made for another pair.
    """
    bundle = BUNDLES.get(pair.target_name)
    name = settings.task or (bundle.task if bundle else None)
    task = None if name is None else load_task(name)
    menu = Menu([_fitted(policy, pair, settings) for policy in policies])
    for policy in menu.policies.values():
        announce(f"offers {policy.describe()}")
    k = draft_tokens_for(settings.num_draft_tokens, STRICT)
    strict = pair.decoder(STRICT, num_draft_tokens=k, drafter=settings.drafter)
    decoders: dict[str | None, SpeculativeDecoder] = {None: strict}
    for name, policy in menu.policies.items():
        k = _num_draft_tokens(policy, settings)
        decoders[name] = pair.decoder(policy.rule, num_draft_tokens=k, drafter=settings.drafter)
    worker = Worker(decoders, max_waiting=settings.max_waiting)
    service = Service(
        settings,
        worker,
        menu,
        Prompts(
            pair.tokenizer,
            max_positions=pair.num_positions or sys.maxsize,
            vocab_size=pair.num_token_ids,
            wrap=getattr(task, "wrap", None),  # without a chat template, chats are formatted like the task's problems
            settings=settings.prompt_settings,
        ),
        num_draft_tokens=AUTO if isinstance(settings.num_draft_tokens, str) else settings.num_draft_tokens,
        example="" if bundle is None or task is None else task.problems("test", 7)[6].prompt,  # both models solve it
    )
    app = create_app(service)
    app.state.worker = worker
    return app


def require_free_port(settings: PlaygroundSettings) -> None:
    """Refuse a port that cannot be bound, before a large model is loaded.

    Raises:
        SpecError: names host, port and reason.
    """
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((settings.host, settings.port))
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"cannot listen on port {settings.port} of {settings.host}: {reason}") from None


def run(app: FastAPI, settings: PlaygroundSettings) -> None:
    """Serve until a stop signal, which ends running requests with an error."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.worker.stop()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    Server(config).run()


def _fitted(policy: Policy, pair: Pair, settings: PlaygroundSettings) -> Policy:
    if policy.certificate is not None:
        made_for = policy.certificate.conditions.pair
        made_for.require_matches(pair.identity, f"the certificate of {policy.rule.spec}", reads_draft=True)
    policy = policy.for_conditions(engine="local", drafter=settings.drafter, dtype=pair.dtype)
    k = _num_draft_tokens(policy, settings)
    head = pair.select_length_head(k, policy.rule, DRAFTERS.make(settings.drafter))
    drafts = k if head is None else head.certified()
    return policy.for_conditions(num_draft_tokens=drafts)


def _num_draft_tokens(policy: Policy, settings: PlaygroundSettings) -> NumDraftTokens:
    """Return the configured draft length; for `auto`, the K that the policy's certificate is valid for."""
    if settings.num_draft_tokens == AUTO and policy.certificate is not None:
        certified = policy.certificate.conditions.num_draft_tokens
        if isinstance(certified, int):
            return certified
    return draft_tokens_for(settings.num_draft_tokens, policy.rule)
