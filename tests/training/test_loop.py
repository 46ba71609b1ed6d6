"""The training loop: interrupted training ends like uninterrupted training."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch import nn

from reprieve.errors import ReprieveError
from reprieve.training.loop import CHECKPOINT, Learner, learning_rate_at, train


class Line(Learner):
    """Fit a line, with random inputs that depend only on the number of the update."""

    def __init__(self, *, num_updates=12, recipe="line", stop_after=None):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.length = num_updates
        self.name = recipe
        self.stop_after = stop_after
        self.validated = []

    @property
    def num_updates(self):
        return self.length

    @property
    def recipe(self):
        return self.name

    def one_update(self, update):
        inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(update))
        loss = (self.model(inputs) - inputs.sum(-1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": float(loss.detach())}

    def validates_after(self, update):
        return update % 4 == 0

    def validate(self, update, seconds):
        self.validated.append(update)
        return {"at": float(update)}


class Stopped(Exception):
    """Stands in for anything that ends a process."""


def cut_off_at(number, error):
    def progress(done, total):
        if done == number:
            raise error

    return progress


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", [1, 4, 7, 12])
def test_interrupted_training_ends_like_uninterrupted_training(tmp_path, number):
    whole, first, second = Line(), Line(), Line()
    train(whole, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(first, tmp_path / "cut", progress=cut_off_at(number, Stopped))
    train(second, tmp_path / "cut")
    assert torch.equal(whole.model.weight, second.model.weight)
    assert read(tmp_path / "whole") == read(tmp_path / "cut")
    assert whole.validated == [0, 4, 8, 12] == [*first.validated, *second.validated]


def test_ctrl_c_ends_training_after_the_current_update(tmp_path, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with SIGINT ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    class Interrupted(Line):
        def one_update(self, update):
            if update == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return super().one_update(update)

    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(), tmp_path)
    assert read(tmp_path)[-1]["step"] == 6, "the update in hand is finished and kept"
    learner = Line()
    train(learner, tmp_path)
    whole = Line()
    train(whole, tmp_path / "whole")
    assert torch.equal(whole.model.weight, learner.model.weight)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failed_update_keeps_the_last_checkpoint(tmp_path):
    class Broken(Line):
        def one_update(self, update):
            if update == 6:
                raise Stopped
            return super().one_update(update)

    with pytest.raises(Stopped):
        train(Broken(), tmp_path)
    learner, whole = Line(), Line()
    train(learner, tmp_path)
    train(whole, tmp_path / "whole")
    assert torch.equal(whole.model.weight, learner.model.weight)
    assert learner.validated == [8, 12], "it went on from the checkpoint after the validation at 4"


def test_another_recipe_and_a_damaged_checkpoint_are_refused(tmp_path):
    train(Line(), tmp_path)
    with pytest.raises(ReprieveError, match="belongs to another recipe"):
        train(Line(recipe="curve"), tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"nonsense")
    with pytest.raises(ReprieveError, match="cannot be read as a checkpoint"):
        train(Line(), tmp_path)


def test_the_rate_warms_up_and_falls_to_a_fiftieth():
    rates = [learning_rate_at(update, peak=1.0, num_warmup=4, num_updates=20) for update in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[4] == 1.0
    assert rates[20] == pytest.approx(0.02)
