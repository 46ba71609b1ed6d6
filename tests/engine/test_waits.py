"""A round of constant K waits for the device at most twice, whatever the rule and the drafter."""

from __future__ import annotations

import pytest
import torch

from reprieve import SamplingParams, load_task
from reprieve.engine import SpeculativeDecoder
from tests.kit.waits import HostWaits

MOST = 2


def waits_of_rounds(decoder, monkeypatch, *, temperature):
    """Places where the host waited, for each round of an answer."""
    rounds, whole = [], SpeculativeDecoder._round

    def counted(self, answer):
        with HostWaits() as waits:
            whole(self, answer)
        rounds.append(waits.where)

    monkeypatch.setattr(SpeculativeDecoder, "_round", counted)
    prompt = load_task("arithmetic").problems("test", 1)[0].prompt
    decoder.generate(prompt, SamplingParams(max_new_tokens=60, temperature=temperature))
    return rounds


@pytest.mark.parametrize("drafter", ["draft", "eagle3"])
def test_adaptive_lengths_wait_at_most_once_more_per_token_or_level(bundled_pair, monkeypatch, drafter):
    decoder = bundled_pair.decoder("lossless", drafter=drafter)
    for waits in waits_of_rounds(decoder, monkeypatch, temperature=0.0):
        deciding = [where for where in waits if "length.py" in where or where.startswith("__float__")]
        assert len(deciding) <= 20 and len(waits) - len(deciding) <= MOST, "\n".join(waits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("target_only", "draft"),
        ("lossless", "draft"),
        ("lossless", "ngram"),
        ("lossless", "eagle3"),
        ("lossless", "eagle3:prune=entropy"),
        ("lossless:verification=block", "draft"),
        ("lossless:verification=exact", "draft"),
        ("margin:delta=3", "draft"),
        ("fuzzy:threshold=0.4", "draft"),
        ("fly", "draft"),
        ("cascade", "draft"),
        ("asd", "draft"),
        ("judge", "draft"),
        ("pivot|floor:min_prob=0.2", "draft"),
        ("lts:theta=0.97", "eagle3"),
        ("arbiter", "draft"),
        ("math_symbols", "draft"),
    ],
)
def test_a_round_waits_at_most_twice(bundled_pair, monkeypatch, rule, drafter, temperature):
    decoder = bundled_pair.decoder(rule, num_draft_tokens=8, drafter=drafter)
    rounds = waits_of_rounds(decoder, monkeypatch, temperature=temperature)
    worst = max(rounds, key=len)
    assert len(rounds) > 3
    assert len(worst) <= MOST, "\n".join(worst)


def test_the_counter_detects_waits():
    numbers = torch.arange(4)
    for wait in (
        numbers.tolist,
        numbers.cpu,
        lambda: int(numbers[0]),
        lambda: bool(numbers[0] > 1),
        lambda: numbers[numbers > 1],
        lambda: numbers.nonzero(),
        lambda: torch.tensor([1, 2], device="cpu"),
        lambda: 3 in numbers,
    ):
        with HostWaits() as waits:
            wait()
        assert waits.num >= 1
    with HostWaits() as waits:
        numbers.to(torch.float32)[torch.tensor([1, 2])].sum() + torch.tensor(3)
    assert waits.num == 0
