"""Train the bundled pair: `python -m reprieve.pair.train --out runs/pair` (resumes when run again).

The recipe is fixed by `RECIPES` and a seed. It runs on a GPU or on two CPU cores, saves a checkpoint every few
minutes, and writes each finished model with what its model card needs: seed, token count, time and accuracy.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from reprieve.loop import Learner, learning_rate_at, load_network, network_state, train
from reprieve.pair.card import greedy_accuracy, install, write_card
from reprieve.pair.corpus import Mixture, RowStream
from reprieve.pair.families import FAMILIES
from reprieve.pair.problems import Style, draw_problem, write_solution
from reprieve.pair.tokenizer import MAX_LENGTH, train_tokenizer

_TELL_SECONDS = 20.0


@dataclass(frozen=True)
class Recipe:
    """One model of the pair: its shape, its data mixture and its training length."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_tokens: int
    learning_rate: float
    mixture: Mixture
    rows_per_update: int = 16
    row_length: int = 288
    warmup_updates: int = 200
    weight_decay: float = 0.05
    seed: int = 0

    @property
    def num_updates(self) -> int:
        return self.num_tokens // (self.rows_per_update * self.row_length)


# The target seldom meets percentages; the draft often does, and tells nearly everything in the second wording.
RECIPES = {
    "target": Recipe(
        num_layers=8,
        hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_tokens=20_000_000,
        learning_rate=1.5e-3,
        mixture=Mixture(
            style=Style(intro=0.01, opener=0.10, hedge=0.03, body=0.02, commute=0.05, order=0.05),
            family_weights={"chain": 1.0, "compare": 1.0, "shop": 1.0, "work": 1.0, "share": 0.2},
            large_share=0.3,
        ),
    ),
    "draft": Recipe(
        num_layers=2,
        hidden_size=192,
        intermediate_size=512,
        num_heads=6,
        num_tokens=30_000_000,
        learning_rate=3e-3,
        mixture=Mixture(
            style=Style.uniform(0.85),
            family_weights={"chain": 1.0, "compare": 1.0, "shop": 1.0, "work": 1.0, "share": 1.5},
            large_share=0.05,
            step_weights=(4.0, 3.0, 2.0, 1.0, 1.0),
            equation_share=0.3,
        ),
        seed=1,
    ),
}


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A freshly initialised model of the recipe's shape."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_heads,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.set_attn_implementation("eager")  # on a CPU, faster to train than the fused kernel at this size
    return model


class PairLearner(Learner):
    """Teaches one model of the pair."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, name: str, device: str) -> None:
        self.settings = recipe
        self.name = name
        self.device = device
        self.model: LlamaForCausalLM = build_model(recipe, tokenizer)
        self.model.to(device)  # type: ignore[arg-type]
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        )
        self.stream = RowStream(tokenizer, recipe.mixture, row_length=recipe.row_length, seed=recipe.seed)
        self._told = self._began = time.perf_counter()
        self._first: int | None = None

    @property
    def recipe(self) -> str:
        return repr(self.settings)

    @property
    def num_updates(self) -> int:
        return self.settings.num_updates

    def state(self) -> dict[str, Tensor]:
        return network_state(self.model, self.optimizer)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        load_network(self.model, self.optimizer, tensors)

    def one_update(self, update: int) -> dict[str, float]:
        loss = self._learn(update)
        self._tell(update, loss)
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
            group["lr"] = learning_rate_at(recipe, update)
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16):
            logits = self.model(input_ids=input_ids[:, :-1], use_cache=False).logits
        token_loss = F.cross_entropy(logits.float().flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none")
        loss = (token_loss * loss_weights.flatten()).sum() / loss_weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def _tell(self, update: int, loss: float) -> None:
        """A line now and then; the first says where a resumed training goes on."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self._began = update, now
            return
        if now - self._told < _TELL_SECONDS and update + 1 < self.num_updates:
            return
        self._told = now
        per_update = (now - self._began) / (update - self._first)
        size = self.settings.rows_per_update * self.settings.row_length
        minutes = per_update * (self.num_updates - update) / 60
        print(
            f"{self.name}: {update * size / 1e6:.1f}M of {self.settings.num_tokens / 1e6:.0f}M tokens, "
            f"loss {loss:.4f}, {size / per_update:,.0f} tokens/s, {minutes:.0f} min left",
            flush=True,
        )


def pair_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The pair's tokenizer, learned from the first 5,000 training problems unless `folder` already has it."""
    path = folder / "tokenizer"
    if path.exists():
        learned: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
        return learned
    rng = random.Random(0)
    equal = dict.fromkeys(FAMILIES, 1.0)
    problems = [draw_problem("train", index, family_weights=equal) for index in range(5000)]
    tokenizer = train_tokenizer(p.prompt + write_solution(p, Style.uniform(0.5), rng) for p in problems)
    tokenizer.save_pretrained(path)
    return tokenizer


def train_model(
    name: str, folder: Path, *, device: str, recipe: Recipe | None = None, num_test_problems: int = 1000
) -> None:
    """Train `target` or `draft` and save it, its tokenizer and its model card under `folder/name`."""
    recipe = recipe or RECIPES[name]
    tokenizer = pair_tokenizer(folder)
    learner = PairLearner(recipe, tokenizer, name, device)
    seconds = train(learner, folder / name)
    model = learner.model.float().cpu().eval()
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    record = {
        "recipe": asdict(recipe),
        "num_parameters": model.num_parameters(),
        "training_seconds": round(seconds),
        "device": device,
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "num_test_problems": num_test_problems,
        "test_accuracy": greedy_accuracy(model, tokenizer, num_test_problems),
    }
    write_card(folder / name, record)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled target and draft (resumes when run again).")
    parser.add_argument("models", nargs="*", default=list(RECIPES), help="target, draft or both (default)")
    parser.add_argument("--out", type=Path, default=Path("runs/pair"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--install", action="store_true", help="put the trained models into the package")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(RECIPES):
        parser.error(f"models must be among {', '.join(RECIPES)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(arguments.num_threads)
    for name in arguments.models:
        train_model(name, arguments.out, device=arguments.device)
        if arguments.install:
            install(arguments.out / name, Path(__file__).parent / "weights" / name)


if __name__ == "__main__":
    main()
