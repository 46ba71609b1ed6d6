"""What a model is given, turn by turn: plain text, or the tokenizer's chat template."""

from __future__ import annotations

from typing import Any

from reprieve.errors import SpecError


class Conversation:
    """Messages so far, and the prompt they make.

    Args:
        first: the first message.
        chat_template: wrap messages as the tokenizer's template does; else each follows the last answer as it is.

    Raises:
        SpecError: the template is wanted and the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, first: str, *, chat_template: bool) -> None:
        if chat_template and not getattr(tokenizer, "chat_template", None):
            raise SpecError("chat_template needs a tokenizer with a chat template; this one has none")
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.messages = [{"role": "user", "content": first}]

    def add(self, answer: str, message: str) -> None:
        """The model's answer, and what the user says to it."""
        self.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": message}]

    def prompt(self) -> str | list[int]:
        """What the model reads next: text, or the template's token ids."""
        if not self.chat_template:
            return "\n\n".join(message["content"] for message in self.messages)
        # As text first: the template writes its own special tokens.
        text = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        return [int(token_id) for token_id in self.tokenizer.encode(text, add_special_tokens=False)]
