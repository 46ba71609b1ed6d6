"""Target behind an OpenAI-compatible completions API (AutoJudge, appendix R).

Most servers exchange text, and one text has many tokenizations. A swapped token can merge with its neighbours, so the
server may continue a different token sequence than the one being judged. Such swaps are not labelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reprieve.errors import SpecError, require_choice
from reprieve.mining.responses import until_stop
from reprieve.mining.target import Target
from reprieve.models.batch_decoder import Session
from reprieve.models.sampling import Draw

PROMPTS = ("text", "tokens")


class ApiTarget(Target):
    """Continues texts by requests; greedy only.

    Args:
        client: an asynchronous `openai` client, or an object with `completions.create`.
        model: the target's name on the server.
        tokenizer: the draft's tokenizer, which the target must share.
        eos_id: appended if the server reports that the response stopped.
        stops: returns True if a stop text ends a response's tokens.
        stop: the stop texts. Sent only to servers that take token ids: other servers remove the stop text and do not
            report whether it or the end-of-text token ended a completion.
        prompts: format of the prompts sent: `text`, or `tokens`, which avoids the ambiguity but needs a server that
            exchanges token ids, such as vLLM.

    Raises:
        SpecError: unknown `prompts`.
    """

    def __init__(
        self,
        client: Any,
        model: str,
        tokenizer: Any,
        *,
        eos_id: int,
        stops: Callable[[list[int]], bool] | None = None,
        stop: Sequence[str] = (),
        prompts: str = "text",
    ) -> None:
        require_choice("prompts", prompts, PROMPTS)
        self.client = client
        self.model = model
        self.tokenizer = tokenizer
        self.eos_id = eos_id
        self.stops = stops
        self.stop = list(stop)
        self.prompts = prompts

    async def complete(
        self, session: Session, prompt_ids: list[int], response_ids: list[int], max_new_tokens: int, draw: Draw | None
    ) -> list[int] | None:
        """Return a completion, or None if the server would tokenize the text differently. See `Target`.

        Raises:
            SpecError: sampling, which a server cannot reproduce.
        """
        if draw is not None:
            raise SpecError("an API target is greedy: a server's sampling cannot be keyed by the prefix")
        prefix = [*prompt_ids, *response_ids]
        text = self._text(prefix)
        if self.prompts == "text" and response_ids and list(self.tokenizer.encode(text)) != prefix:
            return None
        reply = await self.client.completions.create(
            model=self.model,
            prompt=prefix if self.prompts == "tokens" else text,
            max_tokens=max_new_tokens,
            temperature=0.0,
            **self._asked_of_tokens(),
        )
        choice = reply.choices[0]
        new = getattr(choice, "token_ids", None)  # the server's own, if provided
        new = self._tokens(prefix, text, choice.text) if new is None else list(new)
        if new is None:
            return None
        stopped = self.stops is not None and self.stops([*response_ids, *new])
        if choice.finish_reason == "stop" and not stopped and new[-1:] != [self.eos_id]:
            new.append(self.eos_id)
        return until_stop(self.stops, response_ids, new[:max_new_tokens])

    def _asked_of_tokens(self) -> dict[str, Any]:
        """Return the additional request fields for token prompts, as vLLM names them."""
        if self.prompts != "tokens":
            return {}
        more = {"return_token_ids": True, "include_stop_str_in_output": True}
        return {"extra_body": more, **({"stop": self.stop} if self.stop else {})}

    def _text(self, token_ids: list[int]) -> str:
        """Return the text of tokens, with special tokens except leading ones that the tokenizer adds itself."""
        added = list(self.tokenizer.encode(""))
        if added and token_ids[: len(added)] == added:
            token_ids = token_ids[len(added) :]
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def _tokens(self, prefix: list[int], prefix_text: str, new_text: str) -> list[int] | None:
        """Return a completion's tokens after the prefix; None if no tokens continue the prefix to that text."""
        whole = list(self.tokenizer.encode(prefix_text + new_text))
        if whole[: len(prefix)] == prefix:
            return whole[len(prefix) :]
        alone = list(self.tokenizer.encode(new_text, add_special_tokens=False))
        return alone if self._text([*prefix, *alone]) == prefix_text + new_text else None
