"""lm-evaluation-harness (EleutherAI) with our decoders: the model type `reprieve`.

Importing this module registers it. Releases after 0.4.13 find it by the package's entry point; with 0.4.13, use
`python -m reprieve.bench.lm_eval_model` in the place of `lm_eval`. The harness caches answers itself (`--use_cache`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from reprieve.bench.arms import LOSSLESS, make_arms
from reprieve.engine import Pair, SamplingParams, load_pair
from reprieve.errors import SpecError
from reprieve.settings import AUTO, BUNDLED_PAIR, NumDraftTokens, read_draft_tokens


@register_model("reprieve")
class ReprieveLM(HFLM):  # type: ignore[misc]
    """Generates with a target, a draft and a rule; all else is the harness's own Hugging Face model on the target.

    Multiple-choice tasks are scored by the target's likelihoods, which no verification rule touches.

    Args:
        target, draft: model names; the bundled pair by default. `pretrained` is another name for target.
        rule: an arm as `reprieve bench` takes it: target_only, lossless, or a rule. Write `;` instead of `,` in it,
            because `,` separates model arguments.
        num_draft_tokens: K, or `auto`.
        pair: models in memory, instead of names.

    Raises:
        SpecError: a rule that cannot be read, or a batch size other than 1.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        pretrained: str | None = None,
        rule: str = LOSSLESS,
        num_draft_tokens: NumDraftTokens = AUTO,
        drafter: str = "draft",
        dtype: str = "auto",
        device: str | None = None,
        seed: int = 0,
        pair: Pair | None = None,
        batch_size: int | str | None = 1,
        **kwargs: Any,
    ) -> None:
        if str(batch_size or 1) not in ("1", "auto"):
            raise SpecError(f"batch_size must be 1: the local engine decodes one answer at a time, got {batch_size}")
        if device and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # what the harness asks for by default, whatever the machine has
        self.pair = pair or load_pair(target or pretrained or BUNDLED_PAIR, draft, dtype=dtype, device=device)
        super().__init__(self.pair.target, tokenizer=self.pair.tokenizer, batch_size=1, **kwargs)
        spec = rule.replace(";", ",")
        arms = make_arms([spec], [read_draft_tokens(num_draft_tokens)], target=self.pair.target_name)
        self.arm = next((arm for arm in arms if arm.label == spec), arms[-1])
        self.seed = int(seed)
        self._decoder = self.arm.decoder(self.pair, drafter=drafter)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """One answer by our engine, [1, prompt + answer]."""
        prompt_ids = context[0].tolist()
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        params = _sampling(generation_kwargs, self.seed)
        params = dataclasses.replace(
            params,
            max_new_tokens=max_length - len(prompt_ids),
            stop=tuple(text for text in stop if text and text != eos),
        )
        generation = self._decoder.generate(prompt_ids, self.arm.params(params))
        return torch.tensor([prompt_ids + generation.token_ids], device=context.device)


def _sampling(arguments: dict[str, Any], seed: int) -> SamplingParams:
    """Convert the harness's generation arguments to `SamplingParams`.

    Raises:
        SpecError: an argument that would change the answer and has no counterpart here.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    sampled = given.pop("do_sample", None)
    temperature = float(given.pop("temperature", 1.0 if sampled else 0.0))
    top_p, top_k = float(given.pop("top_p", 1.0)), int(given.pop("top_k", 0))
    odd = {key: value for key, value in given.items() if key != "attention_mask"}  # one prompt has no padding
    if odd:
        raise SpecError(f"generation arguments must be do_sample, temperature, top_p, top_k or until, got {odd}")
    return SamplingParams(
        temperature=temperature if sampled or sampled is None else 0.0, top_p=top_p, top_k=top_k, seed=seed
    )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
