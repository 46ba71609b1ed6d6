"""Training a length head on a tiny pair."""

import pytest
import torch

from reprieve.drafters.length import LearnedLength
from reprieve.engine import Pair, SamplingParams
from reprieve.errors import SpecError
from reprieve.rules import parse_rule
from reprieve.tasks import TaskProblem
from reprieve.training.length import Recorder, train_length
from reprieve.training.settings import LengthTraining
from tests.kit.tiny import NumberTokenizer, perturbed, tiny_model

SETTINGS = LengthTraining(num_draft_tokens=8, grid=(0.1,), held_out=0.3)
PROBLEMS = [TaskProblem(str(n), " ".join(str((7 * n + 5 * i) % 48) for i in range(6)), "0") for n in range(24)]


@pytest.fixture(scope="module")
def pair():
    target = tiny_model()
    return Pair(target, perturbed(target, noise=0.03), NumberTokenizer(), "tiny/target", "tiny/draft")


def trained(pair, folder, *, rule="lossless", settings=SETTINGS, **options):
    options |= {"settings": settings, "folder": folder}
    return train_length(pair, parse_rule(rule), "toy", PROBLEMS, max_new_tokens=40, **options)


@pytest.mark.slow
def test_a_trained_head_drafts_fewer_rejected_tokens(pair, tmp_path):
    head = trained(pair, tmp_path)
    assert min(head.training["auc_held_out"]) > 0.6
    params = SamplingParams(max_new_tokens=60)
    made = {}
    for name, k in (("fixed", 8), ("learned", head)):
        decoder = pair.decoder("lossless", num_draft_tokens=k)
        answers = [decoder.generate([n, 3, 7, 20, n + 1], params) for n in range(40, 46)]
        made[name] = sum(a.num_accepted for a in answers) / sum(a.num_drafted for a in answers)
    assert isinstance(pair.decoder("lossless", num_draft_tokens=head).draft_length, LearnedLength)
    assert made["learned"] > made["fixed"] + 0.05


@pytest.mark.slow
def test_a_head_serves_the_range_of_its_training_thresholds(pair, tmp_path):
    settings = LengthTraining(num_draft_tokens=6, thresholds=(2.0, 5.0), grid=(0.1,), held_out=0.3)
    head = trained(pair, tmp_path, rule="top_k:k=3", settings=settings)
    assert (head.rule, head.lowest, head.highest, head.most) == ("top_k", 2.0, 5.0, 6)
    assert head.covers(parse_rule("top_k:k=4")) and not head.covers(parse_rule("top_k:k=6"))
    with pytest.raises(SpecError, match="rule lossless has no dial"):
        trained(pair, tmp_path, settings=settings)


@pytest.mark.slow
def test_interrupted_training_resumes_to_the_same_head(pair, tmp_path):
    def stop(done, total):
        if done == 9:
            raise KeyboardInterrupt

    whole = trained(pair, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(pair, tmp_path / "cut", progress=stop)
    seen = []
    resumed = trained(pair, tmp_path / "cut", progress=lambda done, total: seen.append(done))
    assert seen[0] == 10
    torch.testing.assert_close(resumed.hidden_weight, whole.hidden_weight)
    torch.testing.assert_close(resumed.scalar_weight, whole.scalar_weight)


def test_nothing_after_the_end_of_text_counts():
    recorder = Recorder(6, frozenset({0})).start(None, 0.0)
    recorder.begin()
    for token in (3, 0, 5, 7):
        recorder.should_continue(torch.zeros(1, 4), torch.zeros(1, 9), torch.tensor([token]))
    recorder.update(6, 5)
    assert recorder.rounds == [(2, 2)]


def test_too_few_problems_or_classes_are_refused(pair, tmp_path):
    with pytest.raises(SpecError, match="at least 2"):
        train_length(
            pair, parse_rule("lossless"), "toy", PROBLEMS[:1], max_new_tokens=8, settings=SETTINGS, folder=tmp_path
        )
    settings = LengthTraining(num_draft_tokens=4, temperatures=(0.0,))
    with pytest.raises(SpecError, match="must hold accepted and rejected tokens"):
        trained(pair, tmp_path, rule="top_k:k=48", settings=settings)
