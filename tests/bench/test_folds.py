"""Out-of-fold heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from reprieve.backends.local import LocalEngine, _RunState
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.run import Run
from reprieve.heads.folds import FoldedHead, fold_folder, fold_of, write_folds
from tests.bench.toys import settings
from tests.kit.tiny import random_head
from tests.kit.toys import ToyTask


def test_no_problem_is_decoded_by_a_head_trained_on_it(tmp_path, pair):
    for fold in range(3):
        random_head(size=32, seed=fold, pair=pair.identity).save_pretrained(fold_folder(tmp_path, fold))
    write_folds(tmp_path, 3)
    arm = make_arms([f"judge:path={tmp_path},threshold=0.4"], [4])[-1]
    assert isinstance(dict(arm.rule.heads)[str(tmp_path)], FoldedHead)
    engine = LocalEngine(pair)
    run = Run(RunConfig.of(engine, [arm], settings()), [arm], engine, ToyTask(), tmp_path / "run")
    for problem in run.problems:
        decoder = engine._decoders(_RunState(run.config, []), arm)[fold_of(problem.problem_id, 3)]
        head = dict(decoder.rule.heads)[str(fold_folder(tmp_path, 0).parent)]
        alone = random_head(size=32, seed=fold_of(problem.problem_id, 3), pair=pair.identity)
        assert torch.equal(head.tensors["weight"], alone.tensors["weight"])
    assert {fold_of(f"p{i}", 3) for i in range(40)} == {0, 1, 2}


def test_folded_heads_are_held_against_the_prompt_format_too(tmp_path, pair):
    for fold in range(3):
        made = dataclasses.replace(random_head(size=32, seed=fold, pair=pair.identity), prompt={"chat_template": True})
        made.save_pretrained(fold_folder(tmp_path, fold))
    write_folds(tmp_path, 3)
    arm = make_arms([f"judge:path={tmp_path},threshold=0.4"], [4])[-1]
    engine = LocalEngine(pair)
    config = RunConfig.of(engine, [arm], settings())
    with pytest.warns(UserWarning, match="made with the chat template and is used with raw prompts"):
        engine._decoders(_RunState(config, []), arm)
