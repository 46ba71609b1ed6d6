"""Train an EAGLE-3 head for a target on the target's own answers (arXiv 2503.01840).

Model and loss come from the speculators library. This file adds training on one machine without a serving engine:
the target's states, computed once per text, the reduced vocabulary, batches, checkpoints. Training-time test unrolls
the head for several steps on its own hidden states and compares each step with the target's distribution.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig

from reprieve.engine import Pair
from reprieve.errors import ReprieveError, import_extra
from reprieve.files import replace_file
from reprieve.identity import digest
from reprieve.models.attention import without_cudnn
from reprieve.models.int8 import output_weights
from reprieve.training.loop import Learner, learning_rate_at, train
from reprieve.training.own_text import OwnText
from reprieve.training.settings import EagleTraining
from reprieve.types import Progress, no_progress

_MOST_KEPT = 8 << 30  # bytes of target outputs kept for later passes


def batches_of(texts: Sequence[OwnText], settings: EagleTraining) -> list[list[OwnText]]:
    """Return the batches of a whole training run, so that a resumed run continues with the next."""
    rng = random.Random(settings.seed)
    batches: list[list[OwnText]] = []
    for _ in range(settings.num_passes):
        order = list(texts)
        rng.shuffle(order)
        batches.append([])
        room = settings.tokens_per_update
        for text in order:
            size = len(text.prompt_ids) + len(text.answer_ids)
            if batches[-1] and size > room:
                batches.append([])
                room = settings.tokens_per_update
            batches[-1].append(text)
            room -= size
    return batches


def choose_vocabulary(texts: Sequence[OwnText], *, size: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the two maps of a vocabulary reduced to the most frequent tokens of the answers.

    Returns:
        t2d [vocab_size], bool: mask of draftable target tokens; d2t [size], int64: offset from a draft token's id to
        the target's id. Both as in EAGLE-3 checkpoints.
    """
    counts = Counter(token for text in texts for token in text.answer_ids)
    frequent = [token for token, _ in counts.most_common(size)]
    rare = (token for token in range(vocab_size) if token not in counts)
    frequent += [token for token, _ in zip(rare, range(size - len(frequent)), strict=False)]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[frequent] = True
    return t2d, t2d.nonzero().squeeze(-1) - torch.arange(len(frequent))


def train_eagle3(
    pair: Pair, texts: Sequence[OwnText], folder: Path, *, settings: EagleTraining, progress: Progress = no_progress
) -> dict[str, Any]:
    """Train a head on the target's own texts, and save it in the speculators format; resumes from its checkpoint.

    Args:
        folder: for `checkpoint.safetensors` and the finished head in `head/`, with its results and its target in
            `training.json`.

    Returns:
        Results on the held-out texts. `accuracy` holds, per step, the share of tokens that head and target both rank
        first, given that they did so in all earlier steps.

    Raises:
        ReprieveError: no speculators library, no texts, or a checkpoint of another recipe.
    """
    if len(texts) < 2:
        raise ReprieveError(f"training needs 2 texts or more, got {len(texts)}")
    num_held = max(1, round(len(texts) * settings.held_out))
    training, held = texts[num_held:], texts[:num_held]
    learner = _Learner(pair, training, settings)
    precision = torch.get_float32_matmul_precision()
    try:
        if pair.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, for the updates only
        seconds = train(learner, folder, progress=progress)
    finally:
        torch.set_float32_matmul_precision(precision)
    reached = {
        "accuracy": learner.accuracy(held),
        "num_held_out": len(held),
        "num_texts": len(training),
        "settings": asdict(settings),
        "seconds": round(seconds),
        "pair": asdict(pair.identity),
    }
    learner.save(folder / "head")
    replace_file(folder / "head" / "training.json", json.dumps(reached, indent=2) + "\n")
    return reached


class _Learner(Learner):
    def __init__(self, pair: Pair, texts: Sequence[OwnText], settings: EagleTraining) -> None:
        self.pair = pair
        self.texts = texts
        self.settings = settings
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # target outputs, by token ids
        self._kept_bytes = 0
        self.batches = batches_of(texts, settings)
        config = pair.target.config.get_text_config()
        self.layers = self.settings.layers_of(config.num_hidden_layers)
        size = min(self.settings.draft_vocab_size, pair.vocab_size)
        self.t2d, self.d2t = choose_vocabulary(texts, size=size, vocab_size=pair.vocab_size)
        self.model = self._build(config)
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=self.settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.settings.weight_decay,
        )
        from speculators.losses.eager import kl_div_loss

        # The library's default loss is a Triton kernel, which needs a GPU.
        self.loss_config = {"kl_div": (kl_div_loss, 1.0)}

    def _build(self, config: Any) -> Any:
        import_extra("speculators", "eagle")
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        layer = self._layer(config)
        with torch.random.fork_rng():
            torch.manual_seed(self.settings.seed)
            model: Any = Eagle3DraftModel(
                Eagle3SpeculatorConfig(
                    transformer_layer_config=layer,
                    draft_vocab_size=len(self.d2t),
                    norm_before_residual=True,
                    eagle_aux_hidden_state_layer_ids=list(self.layers),
                    speculators_config=SpeculatorsConfig(
                        algorithm="eagle3",
                        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=self.settings.num_steps)],
                        default_proposal_method="greedy",
                        verifier=VerifierConfig(
                            name_or_path=self.pair.target_name,
                            architectures=list(self.pair.target.config.architectures or []),
                        ),
                    ),
                )
            )
        model.load_vocab_mappings(self.t2d, self.d2t)
        with torch.no_grad():
            embeddings: Any = self.pair.target.get_input_embeddings()
            model.embed_tokens.weight.copy_(embeddings.weight)
            model.lm_head.weight.copy_(output_weights(self.pair.target)[self.t2d])
        model.lm_head.weight.requires_grad_(True)
        # The target's own logits are passed in, so that any scaling or capping of them is learned too.
        model.verifier_norm, model.verifier_lm_head = nn.Identity(), nn.Identity()
        return model.float().to(self.pair.device)

    def _layer(self, config: Any) -> LlamaConfig:
        """Return the configuration of the head's decoder layer, with the target's sizes by default."""
        heads = config.num_attention_heads
        layer = LlamaConfig(
            vocab_size=self.pair.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=self.settings.intermediate_size or config.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", heads),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_parameters=getattr(config, "rope_parameters", None),
            tie_word_embeddings=False,
        )
        layer._attn_implementation = "eager"
        return layer

    @property
    def num_updates(self) -> int:
        return len(self.batches)

    @cached_property
    def recipe(self) -> str:
        texts = digest(repr(self.texts).encode())
        return repr((self.settings, self.pair.identity.target_weights, texts))

    def one_update(self, update: int) -> dict[str, float]:
        self.model.train()
        peak, num_warmup = self.settings.learning_rate, self.settings.warmup_updates
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(update, peak=peak, num_warmup=num_warmup, num_updates=self.num_updates)
        batch = self._batch(self.batches[update])
        _, loss, _ = self.model(
            **batch,
            ttt_steps=self.settings.num_steps,
            ttt_step_loss_decay=self.settings.step_decay,
            loss_config=self.loss_config,
        )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": float(loss.detach())}

    @torch.no_grad()
    def accuracy(self, texts: Sequence[OwnText]) -> list[float]:
        """Return, per step, the share of tokens that head and target both rank first (see `train_eagle3`)."""
        self.model.eval()
        measured = []
        for first in range(0, len(texts), 8):
            *_, metrics = self.model(
                **self._batch(texts[first : first + 8]), ttt_steps=self.settings.num_steps, loss_config=self.loss_config
            )
            measured.append(metrics)

        def total(name: str) -> float:
            return sum(float(step[name]) for step in measured)

        return [
            round(total(f"cond_acc_{step}_sum") / max(1.0, total(f"cond_acc_{step}_total")), 4)
            for step in range(self.settings.num_steps)
        ]

    def _batch(self, texts: Sequence[OwnText]) -> dict[str, Tensor]:
        """Pack texts into one row, with each token paired with the target's states that predicted it."""
        device = self.pair.device
        pieces = []
        for row, text in enumerate(texts):
            states, logits = self._target_outputs(text)
            positions = torch.arange(1, len(text.prompt_ids) + len(text.answer_ids), device=device)
            piece = {
                "input_ids": torch.tensor((text.prompt_ids + text.answer_ids)[1:], device=device),
                "hidden_states": states.to(device).float(),
                "verifier_last_hidden_states": logits.to(device).float(),
                "loss_mask": positions >= len(text.prompt_ids) - 1,  # positions that predict an answer's token
                "document_ids": torch.full_like(positions, row),
                "position_ids": positions,
            }
            pieces.append(piece)
        return {name: torch.cat([piece[name] for piece in pieces])[None] for name in pieces[0]}

    @torch.no_grad()
    def _target_outputs(self, text: OwnText) -> tuple[Tensor, Tensor]:
        """Return the target's states before, and its logits after, each token of a text but the first.

        The target runs once per text as long as the results fit into `_MOST_KEPT` bytes of the host's memory, and once
        per pass for the other texts.

        Returns:
            bfloat16 [n - 1, layers * hidden_size] and float16 [n - 1, draft_vocab_size].
        """
        key = (*text.prompt_ids, *text.answer_ids)
        if key in self._kept:
            return self._kept[key]
        ids = torch.tensor([key], device=self.pair.device)
        with without_cudnn(self.pair.device):
            output = self.pair.target(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([output.hidden_states[layer][0, :-1] for layer in self.layers], dim=-1).bfloat16().cpu()
        logits = output.logits[0, 1:, self.t2d.to(ids.device)].half().cpu()
        size = states.nbytes + logits.nbytes
        if self.model.training and self.settings.num_passes > 1 and self._kept_bytes + size <= _MOST_KEPT:
            self._kept[key] = states, logits
            self._kept_bytes += size
        return states, logits

    def save(self, folder: Path) -> None:
        """Save the finished head, in the speculators format and half precision."""
        config = json.loads(self.model.config.to_json_string())
        config.pop("auto_map", None)  # names code files that are not saved
        tensors = {
            name: (tensor.half() if tensor.is_floating_point() else tensor).cpu().contiguous()
            for name, tensor in self.model.state_dict().items()
        }
        replace_file(folder / "model.safetensors", save(tensors))
        replace_file(folder / "config.json", json.dumps(config, indent=2) + "\n")
