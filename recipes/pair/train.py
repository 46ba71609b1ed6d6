"""Train a bundled pair: `python -m recipes.pair.train --pair miniature --out runs/pair` (resumes when run again).

The recipe is fixed by `RECIPES` and a seed. A model may grow during training: new layers are copies with zero outputs
(like LLaMA Pro's blocks, Wu et al. 2024), so that the model computes the same function. Training runs on a GPU or on
two CPU cores, saves a checkpoint every few minutes, and writes each finished model with the facts of its model card:
seed, token count, time and accuracy.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.pair.card import greedy_accuracy, install, write_card
from recipes.pair.corpus import RowStream
from recipes.pair.presets import CONTENTS, HALF, RECIPES, TOKENIZER_TEXTS, Recipe
from recipes.pair.tokenizer import train_tokenizer
from recipes.pair.wordings import Teller
from reprieve.bundles import BY_KEY
from reprieve.tasks.families import FAMILIES
from reprieve.tasks.word_problems import Contents, draw_problem
from reprieve.training.loop import Learner, learning_rate_at, train

_REPORT_SECONDS = 20.0


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the initial model, with fresh weights or those of the arithmetic pair's model."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_heads,
            max_position_embeddings=recipe.max_length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    if recipe.start is not None:
        _start_from(BY_KEY["arithmetic"].role_folder(recipe.start), model, tokenizer)
    # On a CPU, heads of 64 train faster unfused, and heads of 32 fused.
    model.set_attn_implementation("eager" if recipe.hidden_size // recipe.num_heads >= 64 else "sdpa")
    return model


@torch.no_grad()
def _start_from(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Load another model's weights; tokens that it lacks keep their fresh embeddings."""
    older = LlamaForCausalLM.from_pretrained(folder)
    words = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    weights = older.state_dict()
    known = weights["model.embed_tokens.weight"]
    embeddings = model.model.embed_tokens.weight.detach().clone()
    for token, row in tokenizer.get_vocab().items():
        if token in words:
            embeddings[row] = known[words[token]]
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = embeddings
    model.load_state_dict(weights)


@torch.no_grad()
def grow(model: LlamaForCausalLM, num_layers: int) -> None:
    """After each layer, insert copies with outputs of zero, so that the model computes the same function.

    Raises:
        ValueError: `num_layers` is not a multiple of the current number.
    """
    layers = list(model.model.layers)
    if num_layers % len(layers):
        raise ValueError(f"num_layers must be a multiple of {len(layers)}, got {num_layers}")
    grown: list[nn.Module] = []
    for layer in layers:
        grown.append(layer)
        for _ in range(num_layers // len(layers) - 1):
            copied: Any = copy.deepcopy(layer)
            copied.self_attn.o_proj.weight.zero_()
            copied.mlp.down_proj.weight.zero_()
            grown.append(copied)
    for index, layer in enumerate(grown):
        layer.self_attn.layer_idx = index  # type: ignore[union-attr]
    model.model.layers = nn.ModuleList(grown)
    model.config.num_hidden_layers = num_layers


class PairLearner(Learner):
    """Trains one model of the pair.

    Args:
        compiled: compile the model first; needs a C++ compiler.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, name: str, device: str, *, compiled: bool = False
    ) -> None:
        self.settings = recipe
        self.name = name
        self.device = device
        self.model: LlamaForCausalLM = build_model(recipe, tokenizer)
        self.model.to(device)  # type: ignore[arg-type]
        self.model.train()
        self.compiled = compiled
        self._forward = self._make_forward()
        self.optimizer = self._make_optimizer()
        self.stream = RowStream(tokenizer, recipe.mixture, row_length=recipe.row_length, seed=recipe.seed)
        self._reported = self._began = time.perf_counter()
        self._first: int | None = None

    @property
    def recipe(self) -> str:
        return repr(self.settings)

    @property
    def num_updates(self) -> int:
        return self.settings.num_updates

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        grown = self.settings.grown_layers
        if grown and f"model.model.layers.{grown - 1}.mlp.down_proj.weight" in tensors:
            self._grow(grown)
        super().load_state(tensors)

    def _make_forward(self) -> Callable[..., Any]:
        return torch.compile(self.model.forward) if self.compiled else self.model.forward

    def _make_optimizer(self) -> torch.optim.AdamW:
        recipe = self.settings
        return torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        )

    def _grow(self, num_layers: int) -> None:
        """Add layers; the optimiser state of the existing parameters is kept."""
        before = self.optimizer.state
        grow(self.model, num_layers)
        self._forward = self._make_forward()
        self.optimizer = self._make_optimizer()
        for parameter in self.model.parameters():
            if parameter in before:
                self.optimizer.state[parameter] = before[parameter]

    def one_update(self, update: int) -> dict[str, float]:
        if (num_layers := self.settings.layers_at(update)) != self.model.config.num_hidden_layers:
            self._grow(num_layers)
        loss = self._learn(update)
        self._report(update, loss)
        return {"loss": loss}

    def _learn(self, update: int) -> float:
        recipe = self.settings
        first = update * recipe.rows_per_update
        ids, weights = self.stream.rows(
            range(first, first + recipe.rows_per_update), progress=update / recipe.num_updates
        )
        input_ids = torch.from_numpy(ids).to(self.device)
        loss_weights = torch.from_numpy(weights[:, 1:]).to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(recipe, update)
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16):
            logits = self._forward(input_ids=input_ids[:, :-1], use_cache=False).logits
        token_loss = F.cross_entropy(logits.float().flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
        loss = (token_loss * loss_weights.flatten()).sum() / loss_weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _report(self, update: int, loss: float) -> None:
        """Print progress from time to time; the first call only records where training starts."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self._began = update, now
            return
        if now - self._reported < _REPORT_SECONDS and update + 1 < self.num_updates:
            return
        self._reported = now
        per_update = (now - self._began) / (update - self._first)
        size = self.settings.rows_per_update * self.settings.row_length
        minutes = per_update * (self.num_updates - update) / 60
        print(
            f"{self.name}: {update * size / 1e6:.1f}M of {self.settings.num_tokens / 1e6:.0f}M tokens, "
            f"loss {loss:.4f}, {size / per_update:,.0f} tokens/s, {minutes:.0f} min left",
            flush=True,
        )


def rate_at(recipe: Recipe, update: int) -> float:
    """Return the learning rate of an update."""
    return learning_rate_at(
        update, peak=recipe.learning_rate, num_warmup=recipe.warmup_updates, num_updates=recipe.num_updates
    )


def pair_tokenizer(folder: Path, contents: Contents, teller: Teller) -> PreTrainedTokenizerFast:
    """The pair's tokenizer, learned from the first 5,000 training problems unless `folder` already has it."""
    path = folder / "tokenizer"
    if path.exists():
        learned: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
        return learned
    rng = random.Random(0)
    equal = dataclasses.replace(contents, family_weights=dict.fromkeys(FAMILIES, 1.0))
    problems = [draw_problem("train", index, contents=equal) for index in range(5000)]
    texts = (problem.prompt + "".join(text for text, _ in teller.tell(problem, rng)) for problem in problems)
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(path)
    return tokenizer


def train_model(
    pair: str,
    role: str,
    folder: Path,
    *,
    device: str,
    compiled: bool = False,
    recipe: Recipe | None = None,
    num_test_problems: int = 1000,
) -> None:
    """Train a pair's `target` or `draft` and save it, its tokenizer and its model card under `folder/role`."""
    recipe = recipe or RECIPES[pair][role]
    contents = CONTENTS[pair]
    tokenizer = pair_tokenizer(folder, *TOKENIZER_TEXTS[pair])
    learner = PairLearner(recipe, tokenizer, role, device, compiled=compiled)
    seconds = train(learner, folder / role)
    model = learner.model.float().cpu().eval()
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder / role)
    tokenizer.save_pretrained(folder / role)
    record = {
        "recipe": asdict(recipe),
        "num_parameters": model.num_parameters(),
        "training_seconds": round(seconds),
        "device": device,
        "num_threads": torch.get_num_threads(),
        "compiled": compiled,
        "torch": torch.__version__,
        "num_test_problems": num_test_problems,
        "test_accuracy": greedy_accuracy(model, tokenizer, contents, num_test_problems),
    }
    write_card(folder / role, BY_KEY[pair], record)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a bundled pair's target and draft (resumes when run again).")
    parser.add_argument("roles", nargs="*", default=["target", "draft"], help="target, draft or both (default)")
    parser.add_argument("--pair", choices=list(RECIPES), default="miniature")
    parser.add_argument("--out", type=Path, default=Path("runs/pair"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true", help="compile the model: faster on a CPU; needs g++")
    parser.add_argument("--install", action="store_true", help="put the trained models into the package")
    arguments = parser.parse_args()
    if unknown := set(arguments.roles) - set(RECIPES[arguments.pair]):
        parser.error(f"roles must be among target, draft, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(arguments.num_threads)
    try:
        for role in arguments.roles:
            train_model(arguments.pair, role, arguments.out, device=arguments.device, compiled=arguments.compile)
            if arguments.install:
                install(arguments.out / role, BY_KEY[arguments.pair].role_folder(role), half=arguments.pair in HALF)
    except KeyboardInterrupt:
        print(f"interrupted; the checkpoint is in {arguments.out}: run again to resume", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
