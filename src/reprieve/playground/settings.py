"""Settings of the playground server."""

from __future__ import annotations

import contextlib
import ipaddress
from dataclasses import dataclass

from reprieve.errors import SpecError, require_whole
from reprieve.settings import AUTO, NumDraftTokens, PromptSettings, require_draft_tokens

_LOCAL = ("127.0.0.1", "localhost", "::1", "[::1]")


@dataclass(frozen=True)
class PlaygroundSettings:
    """Settings of the playground server.

    Args:
        model_name: Model name in the API. Default: the target.
        drafter: draft, ngram:max_ngram=3, or eagle3:path=FOLDER.
        num_draft_tokens: K, drafted tokens per round; auto (adaptive), or auto:path=HEAD.
        host: Address to listen on; other machines can connect unless it is a loopback address.
        port: Port to listen on; 0 picks a free one.
        api_key: Key that clients must send. Default: $REPRIEVE_API_KEY, if it is set.
        max_waiting: Maximum number of queued requests; further ones get status 429.
        max_tokens: Maximum number of new tokens per answer.
        system_prompt: System message of chats that have none; needs a tokenizer with a chat template.
        thinking: on or off, for templates that support enable_thinking; chat_template_kwargs of a chat take precedence.
        task: Task that formats chats if the tokenizer has no chat template. Default: the bundled pair's.
    """

    model_name: str | None = None
    drafter: str = "draft"
    num_draft_tokens: NumDraftTokens = AUTO
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_waiting: int = 64
    max_tokens: int = 4096
    system_prompt: str | None = None
    thinking: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        require_draft_tokens(self.num_draft_tokens)
        require_whole("max_tokens", self.max_tokens, 1, 10**9)
        _ = self.prompt_settings  # refuses a thinking that is neither on nor off
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise SpecError("api_key must be of printable ASCII characters, and not only of spaces")
        if not 0 <= self.port < 65536:
            raise SpecError(f"port must be in [0, 65535], got {self.port}")
        require_whole("max_waiting", self.max_waiting, 1, 1_000_000)

    @property
    def prompt_settings(self) -> PromptSettings:
        """Prompt settings for chats that do not set their own."""
        given = self.system_prompt is not None or self.thinking is not None
        return PromptSettings(chat_template=given, system_prompt=self.system_prompt, thinking=self.thinking)

    @property
    def loopback(self) -> bool:
        """True if other machines cannot connect."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Host names that the server accepts; None for any."""
        return (*_LOCAL, self.host) if self.loopback else None
