"""Training rows for a bundled pair: whole problems packed into rows, gaps filled with bare equations.

A row is `row_length + 1` token ids and as many loss weights. Loss is taken on solutions and on the results of
equations only: questions and operands are random draws, and learning to predict them teaches nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from recipes.pair.wordings import Segments, Teller, equation_of
from reprieve.tasks.families import LARGE, ROUND, SMALL
from reprieve.tasks.word_problems import Contents, draw_problem


@dataclass(frozen=True)
class Mixture:
    """Training data of one model of a pair.

    Args:
        teller: words the solutions.
        contents: distribution of the problems.
        equation_share: share of rows of equations only, in the first `equation_phase` of training.
        equation_phase: share of the training.
        operators: operators of the bare equations; repeated ones are more frequent.
    """

    teller: Teller
    contents: Contents
    equation_share: float = 0.5
    equation_phase: float = 0.6
    operators: str = "++--***//%"


def draw_equation(rng: random.Random, mixture: Mixture) -> Segments:
    """Draw one bare equation with the operand ranges of the word problems."""
    contents = mixture.contents
    large, kind = rng.random(), rng.choice(mixture.operators)
    large = large < (contents.large_shares.get("share", contents.large_share) if kind == "%" else contents.large_share)
    if kind == "+":
        operands = [rng.randint(2, 1500 if large else 300), rng.randint(2, 600 if large else 60)]
        rng.shuffle(operands)
    elif kind == "-":
        left = rng.randint(8, 1500 if large else 300)
        operands = [left, rng.randint(2, min(left - 1, 900 if large else 80))]
    elif kind == "*":
        operands = [rng.randint(2, 72 if large else 56), rng.randint(2, 48 if large else 12)]
        if rng.random() < 0.3:
            operands = [rng.randint(2, 300 if large else 60), rng.randint(2, 9 if large else 4)]
        rng.shuffle(operands)
    elif kind == "/":
        right = rng.randint(2, 9)
        operands = [right * rng.randint(2, 150 if large else 40), right]
    else:
        ranges = LARGE if large else SMALL
        if contents.round_share and rng.random() < contents.round_share:
            ranges = ROUND
        operands = [ranges.group_unit * rng.randint(1, ranges.group[1]), rng.choice(ranges.percents)]
    question, result = equation_of(operands[0], kind, operands[1]).split("=")
    return [(question + "=", False), (result + "\n", True)]


class RowStream:
    """An endless, seeded stream of packed rows; `row_index` restarts it at any row, which makes training resumable."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, mixture: Mixture, *, row_length: int, seed: int) -> None:
        self.tokenizer = tokenizer
        self.mixture = mixture
        self.row_length = row_length
        self.seed = seed

    def rows(self, row_indices: range, *, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and loss weights, each [num_rows, row_length + 1]; `progress` is the share of training done."""
        share = self.mixture.equation_share if progress < self.mixture.equation_phase else 0.05
        drawn = [self._row(index, share) for index in row_indices]
        return np.stack([ids for ids, _ in drawn]), np.stack([weights for _, weights in drawn])

    def _row(self, index: int, equation_share: float) -> tuple[np.ndarray, np.ndarray]:
        rng = random.Random(f"row:{self.seed}:{index}")
        size = self.row_length + 1
        ids: list[int] = []
        weights: list[float] = []
        problems = self._problems(rng, index)
        while rng.random() >= equation_share or ids:
            new_ids, new_weights = self._encode(next(problems), end=True)
            if len(ids) + len(new_ids) > size:
                break
            ids += new_ids
            weights += new_weights
        filler: Segments = []
        for _ in range((size - len(ids)) // 6 + 1):
            filler += draw_equation(rng, self.mixture)
        new_ids, new_weights = self._encode(filler, end=False)
        ids, weights = (ids + new_ids)[:size], (weights + new_weights)[:size]
        padding = size - len(ids)
        pad_id = self.tokenizer.pad_token_id
        return (
            np.array(ids + [pad_id] * padding, dtype=np.int64),
            np.array(weights + [0.0] * padding, dtype=np.float32),
        )

    def _problems(self, rng: random.Random, row_index: int) -> Iterator[Segments]:
        number = 0
        while True:
            problem = draw_problem("train", row_index * 16 + number, seed=self.seed, contents=self.mixture.contents)
            yield [(problem.prompt, False), *self.mixture.teller.tell(problem, rng)]
            number += 1

    def _encode(self, segments: Segments, *, end: bool) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        # Digits and punctuation are separate tokens, so encoding by pieces equals encoding the whole text.
        for text, counts in segments:
            piece = self._ids_of(text)
            ids += piece
            weights += [float(counts)] * len(piece)
        if end:
            ids.append(self.tokenizer.eos_token_id)
            weights.append(1.0)
        return ids, weights

    def _ids_of(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
