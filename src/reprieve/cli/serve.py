"""`reprieve serve`: an OpenAI-compatible server and a playground over the local engine."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.errors import import_extra
from reprieve.playground.settings import PlaygroundSettings
from reprieve.settings import PairSettings

KEY = "REPRIEVE_API_KEY"


@dataclass(frozen=True)
class Serve(Command):
    """Serve the OpenAI API, /health and a playground at /, one request at a time.

    Args:
        rule: A rule to offer: a specification, or a policy file (JSON) that also names levels and a largest threshold.
            The first is the default for requests that choose none. Repeatable. Default: the rules of the bundled pair,
            else margin:delta=1.
    """

    verb = "serve"
    example = "reprieve serve --rule judge --rule margin:delta=2 --port 8000"

    rule: tuple[str, ...] = ()
    settings: PlaygroundSettings = field(default_factory=PlaygroundSettings)
    pair: PairSettings = field(default_factory=PairSettings)

    def run(self) -> int:
        for module in ("uvicorn", "fastapi"):
            import_extra(module, "serve")
        from reprieve.policies.policy import Policy

        usual = ("margin:delta=1",) if self.pair.bundle is None else self.pair.bundle.menu
        policies = [Policy.load(source, target=self.pair.target) for source in self.rule or usual]
        settings = dataclasses.replace(
            self.settings,
            model_name=self.settings.model_name or self.pair.target,
            api_key=self.settings.api_key or os.environ.get(KEY) or None,
        )
        from reprieve.playground.launch import make_app, require_free_port, run

        require_free_port(settings)
        pair = screen.load(self.pair)

        app = make_app(pair, policies, settings, announce=screen.warn)
        if not settings.loopback and settings.api_key is None:
            screen.warn(f"warning: {settings.host} may be reached by others, and there is no API key (--api-key)")
        run(app, settings)
        return 0
