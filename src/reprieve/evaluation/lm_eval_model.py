"""lm-evaluation-harness (EleutherAI) with our decoders: the model type `reprieve`.

Importing this module registers it. Releases after 0.4.13 find it by the package's entry point; with 0.4.13, either name
a task file of `lm_eval_tasks/`, which imports this module, or use `python -m reprieve.evaluation.lm_eval_model` in the
place of `lm_eval`, or `reprieve eval`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from reprieve.engine import DRAFT_ONLY, TARGET_ONLY, Pair, SamplingParams, load_pair
from reprieve.errors import SpecError
from reprieve.evaluation.answering import record_of, reply_of
from reprieve.evaluation.arms import LOSSLESS, Arm, make_arms
from reprieve.evaluation.records import ProblemRecord, RecordFile
from reprieve.heads.binding import digest
from reprieve.settings import AUTO, NumDraftTokens, read_draft_tokens
from reprieve.types import Generation

TASKS = Path(__file__).parent / "lm_eval_tasks"


@register_model("reprieve")
class ReprieveLM(HFLM):  # type: ignore[misc]
    """Generates with a target, a draft and a rule; all else is the harness's own Hugging Face model on the target.

    Multiple-choice tasks are scored by the target's likelihoods, which no verification rule touches.

    Args:
        target, draft: model names; the bundled pair by default. `pretrained` is another name for target.
        rule: an arm as `reprieve bench` takes it: target_only, lossless, or a rule; `;` may stand for `,` in it, which
            separates model arguments.
        num_draft_tokens: K, or `auto`.
        records: a JSONL file of what was generated; answers found in it are not generated again.
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
        records: str | Path | None = None,
        pair: Pair | None = None,
        batch_size: int | str | None = 1,
        **kwargs: Any,
    ) -> None:
        if str(batch_size or 1) not in ("1", "auto"):
            raise SpecError(f"batch_size must be 1: the local engine decodes one answer at a time, got {batch_size}")
        if device and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # what the harness asks for by default, whatever the machine has
        name = target or pretrained
        self.pair = pair or (
            load_pair(name, draft, dtype=dtype, device=device) if name else load_pair(dtype=dtype, device=device)
        )
        super().__init__(self.pair.target, tokenizer=self.pair.tokenizer, batch_size=1, **kwargs)
        self.arm = _arm(rule.replace(";", ","), read_draft_tokens(num_draft_tokens), self.pair.target_name)
        self.seed = int(seed)
        self._decoder = self.arm.decoder(self.pair, drafter=drafter)
        self._file = RecordFile(Path(records)) if records else None
        self._known = {record.problem_id: record for record in self._file.records} if self._file else {}
        self._made: Generation | None = None
        self.generated: dict[str, ProblemRecord] = {}  # by request, see `request_key`

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer each request; the harness's own code cuts prompts, stop texts and thinking."""
        texts = []
        for request in tqdm(requests, desc=f"{self.arm.label}", disable=disable_tqdm or None):
            key = request_key(request.args[0], request.args[1], getattr(request, "idx", 0))
            if key not in self._known:
                text = super().generate_until([request], disable_tqdm=True)[0]
                record = self._record(key, text)
                if self._file:
                    self._file.append(record)
                self._known[key] = record
            self.generated[key] = self._known[key]
            texts.append(self._known[key].text)
        return texts

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
        self._made = self._decoder.generate(prompt_ids, self.arm.params(params))
        self._stop = params.stop
        return torch.tensor([prompt_ids + self._made.token_ids], device=context.device)

    def _record(self, key: str, text: str) -> ProblemRecord:
        """What is kept of an answer; grading comes later, by the task."""
        made = self._made
        assert made is not None
        record = record_of(self.arm, key, [reply_of(self.arm, made, self.pair.tokenizer, self._stop)])
        return dataclasses.replace(record, text=text)  # as the harness cuts it


def request_key(context: str, arguments: dict[str, Any], repeat: int = 0) -> str:
    """Identifies a request by what is asked, so that answers are found again whatever else is in the run."""
    return digest(json.dumps([context, arguments, repeat], sort_keys=True, default=str).encode())


def _arm(spec: str, k: NumDraftTokens, target: str) -> Arm:
    wanted = make_arms([spec], [k], target=target)
    if spec in (TARGET_ONLY, DRAFT_ONLY):
        return next(arm for arm in wanted if arm.label == spec)
    return wanted[-1]


def _sampling(arguments: dict[str, Any], seed: int) -> SamplingParams:
    """The harness's generation arguments as ours.

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
