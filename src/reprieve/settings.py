"""Settings shared by several packages. Each is declared once, on the record that the code uses, and becomes a flag.

No module with settings imports torch, so that `--help` answers at once. Settings of one package are in its own
`settings` module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

from reprieve.bundles import BUNDLES, DEFAULT, Bundle
from reprieve.errors import SpecError, require_choice, require_range, require_whole

MAX_STOPS, MAX_STOP_LENGTH = 64, 1000  # texts that end an answer, and their characters
MAX_PROBLEMS = 10_000_000  # of a run
MAX_SEED = 2**63 - 1
_MOST_TOKENS = 2**31 - 1
MAX_DRAFT_TOKENS = 512  # of a round
AUTO = "auto"
_NAMED = f"{AUTO}:path="
NumDraftTokens = int | str  # K, `auto` (adaptive), or `auto:path=FOLDER`
BUNDLED_PAIR, BUNDLED_TASK = DEFAULT.name, DEFAULT.task


def require_draft_tokens(value: NumDraftTokens) -> None:
    """Refuse anything but a K, `auto` or `auto:path=FOLDER`.

    Raises:
        SpecError: names what is allowed.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool) and 1 <= value <= MAX_DRAFT_TOKENS
    if not whole and not length_head_path(value) and value != AUTO:
        raise SpecError(
            f"num_draft_tokens must be a whole number in [1, {MAX_DRAFT_TOKENS}], 'auto', or 'auto:path=FOLDER', got "
            f"{value!r}"
        )


def common_length(lengths: Sequence[NumDraftTokens]) -> NumDraftTokens:
    """Return the draft length of several arms; "by arm" if they differ."""
    return lengths[0] if len(lengths) == 1 else "by arm"


def length_head_path(value: NumDraftTokens) -> str:
    """Return the folder in `auto:path=FOLDER`; empty for other values."""
    return value.removeprefix(_NAMED) if isinstance(value, str) and value.startswith(_NAMED) else ""


def read_draft_tokens(text: NumDraftTokens) -> NumDraftTokens:
    """Parse the text of `num_draft_tokens`: an int if it is a number, else the text itself."""
    return int(text) if isinstance(text, str) and text.isdecimal() and text.isascii() else text


@dataclass(frozen=True)
class PairSettings:
    """Models of a pair.

    Args:
        target: Target model: hub id or folder. Default: the bundled pair.
        draft: Draft model: hub id or folder. Default: the bundled one with the bundled target, else none.
        dtype: auto, float32, bfloat16, float16, or int8 (linear layers, on CPUs).
        device: cpu, cuda, cuda:1 ... Default: a GPU if there is one.
        device_map: auto, balanced ... (see accelerate): spread the target over several devices, the draft stays on one.
        num_threads: CPU threads of a forward pass. Default: one, or all cores if a short trial finds them faster.
    """

    target: str = BUNDLED_PAIR
    draft: str | None = None
    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    num_threads: int | None = field(default=None, repr=False)  # not part of the identity of a training

    def __post_init__(self) -> None:
        require_whole("num_threads", self.num_threads, 1, 1024, optional=True)

    @property
    def models(self) -> dict[str, Any]:
        """Arguments of `load_pair`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "num_threads"}

    @property
    def bundle(self) -> Bundle | None:
        """The bundled pair it names, if it is one."""
        return BUNDLES.get(self.target)

    @property
    def draft_source(self) -> str | None:
        """Name of the draft; for a bundled target without a draft, the name of the bundled pair."""
        return self.target if self.draft is None and self.bundle else self.draft


@dataclass(frozen=True)
class PromptSettings:
    """Format of prompts.

    Args:
        chat_template: Wrap prompts in the tokenizer's chat template.
        system_prompt: System message before the prompts; needs the chat template.
        thinking: on or off, for templates that support enable_thinking. Default: the template's own.
        max_new_tokens: Maximum length of an answer in tokens, including thinking. Default: the task's.
    """

    chat_template: bool = False
    system_prompt: str | None = None
    thinking: str | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.thinking is not None:
            require_choice("thinking", self.thinking, ("on", "off"))
        for name in ("system_prompt", "thinking"):
            if getattr(self, name) is not None and not self.chat_template:
                raise SpecError(f"{name} needs the chat template, which is off, got {getattr(self, name)!r}")
        require_whole("max_new_tokens", self.max_new_tokens, 1, _MOST_TOKENS, optional=True)

    @property
    def format(self) -> dict[str, Any]:
        """Settings that change the tokens the model reads; defaults are left out."""
        given = {"chat_template": self.chat_template, "system_prompt": self.system_prompt, "thinking": self.thinking}
        return {name: value for name, value in given.items() if value}


def describe_format(given: Mapping[str, Any]) -> str:
    """`PromptSettings.format`, in words."""
    if not given.get("chat_template"):
        return "raw prompts"
    words = [f"{name.replace('_', ' ')} {given[name]!r}" for name in ("system_prompt", "thinking") if given.get(name)]
    return ", ".join(["the chat template", *words])


@dataclass(frozen=True)
class ProblemSettings:
    """Task, split and range of problems.

    Args:
        task: Task, such as gsm8k:path=gsm8k_{split}.jsonl. Default: that of the bundled pair.
        split: Split of the task.
        limit: Number of problems.
        offset: Skip this many problems of the split.
    """

    task: str = BUNDLED_TASK
    split: str = "test"
    limit: int = 200
    offset: int = 0
    prompt: PromptSettings = field(default_factory=PromptSettings)

    def __post_init__(self) -> None:
        require_whole("limit", self.limit, 1, MAX_PROBLEMS)
        require_whole("offset", self.offset, 0, MAX_PROBLEMS)


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling of tokens.

    Args:
        temperature: 0 is greedy.
        top_p: Nucleus mass, in (0, 1]; 1 keeps everything.
        top_k: Most likely tokens kept; 0 keeps all.
        draft_temperature: The draft's own temperature (FSD drafts at 0). Default: the target's.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        _require_temperature("temperature", self.temperature)
        require_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        require_whole("top_k", self.top_k, 0, _MOST_TOKENS)
        if self.draft_temperature is not None:
            _require_temperature("draft_temperature", self.draft_temperature)

    @property
    def greedy(self) -> bool:
        """True if the target's most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class SamplingParams(SamplingSettings):
    """Sampling, length and stops of one answer.

    Args:
        max_new_tokens: maximum number of generated tokens, including the end-of-text token.
        seed: same seed, same answer.
        stop: texts that end the answer; the answer's text stops before them.
        ignore_eos: continue after the end-of-text token.
        eos_token_ids: tokens that end the answer; None for the model's and the tokenizer's own.
        num_logprobs: return each token's log-probability under the target, and those of this many most likely ones,
            0 to 20; None for neither.
        truncation: draw the target's tokens only from those that this rule would accept; None for no limit.
    """

    max_new_tokens: int = 256
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] | None = None
    num_logprobs: int | None = None
    truncation: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stop, tuple | list):
            raise SpecError(f"stop must be a tuple of texts, got {self.stop!r}")
        require_whole("max_new_tokens", self.max_new_tokens, 1, _MOST_TOKENS)
        require_whole("seed", self.seed, 0, MAX_SEED)
        require_whole("num_logprobs", self.num_logprobs, 0, 20, optional=True)
        if len(self.stop) > MAX_STOPS:
            raise SpecError(f"stop must hold at most {MAX_STOPS} texts, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                got = f"one of {len(text)}" if isinstance(text, str) else repr(text)
                raise SpecError(f"stop must hold texts of 1 to {MAX_STOP_LENGTH} characters, got {got}")
        if self.truncation is not None and not self.truncation.truncates:
            raise SpecError(
                f"truncation takes a rule that judges by the target's distribution alone, got {self.truncation.name}"
            )

    def for_problem(self, number: int, trial: int = 0) -> SamplingParams:
        """Return a copy with a separate seed for the `number`th problem of a task and one trial of it."""
        return dataclasses.replace(self, seed=wrapped_seed((self.seed + trial) * 1_000_003 + number))


def wrapped_seed(seed: int) -> int:
    """Return a seed in [0, 2**63 - 1] for one that was computed from another."""
    return seed % (MAX_SEED + 1)


def _require_temperature(name: str, value: float) -> None:
    """Refuse temperatures other than 0 by which float32 logits cannot be divided: outside of [1e-6, 1e6]."""
    require_range(name, value, 0.0, 1e6)
    if 0 < value < 1e-6:
        raise SpecError(f"{name} must be 0 or in [1e-06, 1e+06], got {value!r}")
