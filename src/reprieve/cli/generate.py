"""`reprieve generate`: one answer, each token coloured by where it comes from; and `reprieve serve`: a local server."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reprieve.cli import screen
from reprieve.cli.command import Command
from reprieve.display import STYLES
from reprieve.errors import SpecError, import_extra, require_choice
from reprieve.playground.settings import PlaygroundSettings
from reprieve.settings import (
    AUTO,
    NumDraftTokens,
    PairSettings,
    PromptSettings,
    SamplingParams,
    SamplingSettings,
    require_draft_tokens,
)

if TYPE_CHECKING:
    from reprieve.types import Generation, Token

_API_KEY_VARIABLE = "REPRIEVE_API_KEY"
_LARGEST_PROMPT = 1 << 24  # bytes


@dataclass(frozen=True)
class Generate(Command):
    """Answer one prompt. Plain: the target's own token; green: drafted and matched; yellow: drafted and rescued.

    Args:
        prompt: The prompt; - reads it from standard input.
        rule: The rule, such as margin:delta=2.
        drafter: draft, ngram:max_ngram=3, or eagle3:path=FOLDER.
        num_draft_tokens: K, drafted tokens per round; auto (adaptive), or auto:path=HEAD.
        max_new_tokens: Maximum number of new tokens.
        stop: A text that ends the answer. Repeatable.
        template: Prompt format: raw, chat or auto. auto is chat if one of the next two flags is given, else the format
            of a bundled pair's task, else raw.
        system_prompt: System message before the prompt, in the chat template.
        thinking: on or off, for chat templates that support enable_thinking.
        seed: Same seed, same answer.
        color: Force or disable colours. Default: colours on a terminal.
        json: Print one JSON object instead.
        trace: With --json: every round in full.
    """

    verb = "generate"
    example = 'reprieve generate "Anna has 23 apples and buys 18 more. How many does she have now?" --rule judge'

    prompt: str = field(metadata={"positional": True})
    rule: str = "lossless"
    drafter: str = "draft"
    num_draft_tokens: NumDraftTokens = AUTO
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    template: str = "auto"
    system_prompt: str | None = None
    thinking: str | None = None
    seed: int = 0
    color: bool | None = None
    json: bool = False
    trace: bool = False
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    pair: PairSettings = field(default_factory=PairSettings)

    def run(self) -> int:
        from rich.text import Text

        require_choice("template", self.template, ("auto", "raw", "chat"))
        prompt_settings = self._prompt_settings
        require_draft_tokens(self.num_draft_tokens)
        if self.trace and not self.json:
            raise SpecError("--trace needs --json")
        params = SamplingParams(
            **vars(self.sampling), max_new_tokens=self.max_new_tokens, seed=self.seed, stop=self.stop
        )
        text = _standard_input() if self.prompt == "-" else self.prompt
        if not text.strip():
            raise SpecError(f"PROMPT must hold text, got {text!r}")
        from reprieve.engine.text import is_unicode

        if not is_unicode(text):
            raise SpecError("PROMPT must be UTF-8 text, got bytes that are not")
        from reprieve.drafters import DRAFTERS
        from reprieve.heads.length import draft_tokens_for
        from reprieve.rules import parse_rule

        DRAFTERS.make(self.drafter)  # a misspelt drafter or rule fails before a large model is loaded
        if self.rule not in ("target_only", "draft_only"):
            draft_tokens_for(self.num_draft_tokens, parse_rule(self.rule))
        pair = screen.load(self.pair)
        decoder = pair.decoder(self.rule, num_draft_tokens=self.num_draft_tokens, drafter=self.drafter)
        shown = screen.console(color=self.color)

        def show(token: Token, piece: str) -> None:
            shown.print(Text(piece, style=STYLES[token.provenance.value]), end="", soft_wrap=True)

        generation = decoder.generate(
            self._wrapped(text, pair.tokenizer, prompt_settings),
            params,
            on_token=None if self.json else show,
            trace=self.trace,
        )
        if self.json:
            print(json.dumps(_as_json(generation, decoder.rule.spec, pair.tokenizer)))
            return 0
        shown.print()
        screen.warn(
            f"{generation.num_tokens} tokens in {generation.num_rounds} round{'s' * (generation.num_rounds > 1)} "
            f"({generation.tokens_per_round:.2f} per round), {generation.num_accepted} drafted and accepted, "
            f"{generation.num_rescued} of them rescued; {generation.seconds:.2f} s, ended by {generation.finish_reason}"
        )
        return 0

    @property
    def _prompt_settings(self) -> PromptSettings:
        wanted = self.template == "chat" or (
            self.template == "auto" and (self.system_prompt is not None or self.thinking is not None)
        )
        return PromptSettings(chat_template=wanted, system_prompt=self.system_prompt, thinking=self.thinking)

    def _wrapped(self, text: str, tokenizer: Any, prompt_settings: PromptSettings) -> str | list[int]:
        from reprieve.tasks import load_task
        from reprieve.tasks.prompting import PromptFormat

        if prompt_settings.chat_template:
            if not tokenizer.chat_template:
                flag = (
                    "--template chat"
                    if self.template == "chat"
                    else "--thinking"
                    if self.thinking
                    else "--system-prompt"
                )
                raise SpecError(f"{flag} needs a chat template, and the tokenizer of {self.pair.target!r} has none")
            return PromptFormat(tokenizer, prompt_settings).encode([{"role": "user", "content": text}])
        if self.template == "auto" and self.pair.bundle:
            return load_task(self.pair.bundle.task).wrap(text)
        return text


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
            api_key=self.settings.api_key or os.environ.get(_API_KEY_VARIABLE) or None,
        )
        from reprieve.playground.launch import make_app, require_free_port, run

        require_free_port(settings)
        pair = screen.load(self.pair)

        app = make_app(pair, policies, settings, announce=screen.warn)
        if not settings.loopback and settings.api_key is None:
            screen.warn(f"warning: {settings.host} may be reached by others, and there is no API key (--api-key)")
        run(app, settings)
        return 0


def _as_json(generation: Generation, spec: str, tokenizer: Any) -> dict[str, Any]:
    document = {
        "rule": spec,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        **generation.stats,
        "tokens_per_round": generation.tokens_per_round,
        "tokens": [
            dataclasses.asdict(token) | {"text": tokenizer.decode([token.token_id])} for token in generation.tokens
        ],
    }
    if generation.trace is not None:
        document["rounds"] = [dataclasses.asdict(entry) for entry in generation.trace]
    finite: dict[str, Any] = _finite(document)
    return finite


def _standard_input() -> str:
    """Read the prompt; bytes that are not UTF-8 become lone surrogates.

    Raises:
        SpecError: it cannot be read, or is too large.
    """
    try:
        content = b"" if sys.stdin is None else sys.stdin.buffer.read(_LARGEST_PROMPT + 1)
    except OSError as error:
        raise SpecError(f"PROMPT: standard input cannot be read: {error.strerror}") from None
    if len(content) > _LARGEST_PROMPT:
        raise SpecError(f"PROMPT must have at most {_LARGEST_PROMPT} bytes, got more")
    return content.decode("utf-8", "surrogateescape")


def _finite(value: Any) -> Any:
    """JSON has no infinity: an infinite risk becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
