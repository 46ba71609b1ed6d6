"""Training EAGLE-3 heads."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder
from reprieve.errors import PairError, ReprieveError, SpecError
from reprieve.models.eagle3 import load_eagle3
from reprieve.tasks import load_task
from reprieve.training.own_text import OwnText, write_own_texts
from reprieve.training.settings import EagleTraining
from tests.kit.eagles import PROMPT, make_decoder
from tests.kit.tiny import NumberTokenizer, tiny_model


@pytest.fixture(scope="module")
def pair(bundled_pair):
    return bundled_pair


def tiny_pair():
    return Pair(tiny_model(), None, NumberTokenizer(), "tiny/target", None)


def texts_of(pair, num=12, shift=0):
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    prompts = [[i, (7 * i + shift) % 48, 3, 5] for i in range(num)]
    return [
        OwnText(str(i), prompt, plain.generate(prompt, dataclasses.replace(params, seed=i)).token_ids)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
def test_training_resumes_to_the_same_head_and_learns(tmp_path, monkeypatch):
    pytest.importorskip("speculators")
    from reprieve.training import eagle3 as module

    pair = tiny_pair()
    settings = EagleTraining(
        layers=(0, 1, 2), draft_vocab_size=48, num_steps=2, num_passes=6, tokens_per_update=96, warmup_updates=2,
        learning_rate=5e-3, held_out=0.1,
    )  # fmt: skip
    texts = texts_of(pair)
    lengths = []
    counting = pair.target.register_forward_hook(lambda model, args, output: lengths.append(output.logits.shape[1]))
    reached = module.train_eagle3(pair, texts, tmp_path / "whole", settings=settings)
    counting.remove()
    assert sorted(lengths) == sorted(len(text.prompt_ids + text.answer_ids) for text in texts), "once per text"
    assert len(reached["accuracy"]) == 2 and reached["num_held_out"] == 1
    losses = [json.loads(line)["loss"] for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])

    def stop(done, total):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.train_eagle3(pair, texts, tmp_path / "cut", settings=settings, progress=stop)
    monkeypatch.setattr(module, "_MOST_KEPT", 0)  # nothing is kept: the same head, from more forwards
    module.train_eagle3(pair, texts, tmp_path / "cut", settings=settings)
    whole, cut = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("whole", "cut"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name
    head = load_eagle3(tmp_path / "whole" / "head", pair.target)
    made = make_decoder(pair.target, head).generate(PROMPT, SamplingParams(max_new_tokens=30))
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    assert made.token_ids == plain.generate(PROMPT, SamplingParams(max_new_tokens=30)).token_ids
    for changed in (dict(num_passes=7), dict(held_out=0.3)):
        with pytest.raises(ReprieveError, match="another recipe"):
            module.train_eagle3(pair, texts, tmp_path / "cut", settings=dataclasses.replace(settings, **changed))
    with pytest.raises(ReprieveError, match="another recipe"):  # the same number of other texts: another vocabulary
        module.train_eagle3(pair, texts_of(pair, shift=5), tmp_path / "cut", settings=settings)
    checkpoint = tmp_path / "cut" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ReprieveError, match="cannot be read as a checkpoint"):
        module.train_eagle3(pair, texts, tmp_path / "cut", settings=settings)
    stranger = Pair(tiny_model(seed=9), None, NumberTokenizer(), "tiny/other", None)
    with pytest.warns(UserWarning, match="was trained for target 'tiny/target' with other weights"):
        stranger.eagle_head(str(tmp_path / "whole" / "head"))
    record = json.loads((tmp_path / "whole" / "head" / "training.json").read_text())
    record["pair"]["tokenizer"] = "0" * 16
    (tmp_path / "whole" / "head" / "training.json").write_text(json.dumps(record))
    with pytest.raises(PairError, match=r"made for target 'tiny/target'.*different tokenizer"):
        load_eagle3(tmp_path / "whole" / "head", pair.target, identity=pair.identity)


def test_the_vocabulary_is_the_answers_most_frequent_tokens():
    from reprieve.training.eagle3 import choose_vocabulary

    texts = [OwnText("a", [9, 9, 9], [4, 4, 4, 7, 7, 2]), OwnText("b", [9], [4, 11])]
    t2d, d2t = choose_vocabulary(texts, size=3, vocab_size=12)
    ids = (torch.arange(3) + d2t).tolist()
    assert ids == t2d.nonzero().squeeze(-1).tolist() and {4, 7} <= set(ids)
    t2d, d2t = choose_vocabulary(texts, size=12, vocab_size=12)
    assert (torch.arange(12) + d2t).tolist() == list(range(12))
    with pytest.raises(SpecError, match="num_steps must be 1 or more"):
        EagleTraining(num_steps=0)


def test_own_texts_come_from_the_target_and_survive_a_kill(pair, tmp_path):
    problems = load_task("arithmetic").problems("train", 6)
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)
    path = tmp_path / "own.jsonl"
    whole = write_own_texts(path, pair, problems, params=params, mixed=True)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    seen = []
    again = write_own_texts(path, pair, problems, params=params, mixed=True, progress=lambda *at: seen.append(at))
    assert again == whole and seen[0] == (3, 6)
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    for place in (0, 2, 4):  # every second one is greedy
        made = plain.generate(problems[place].prompt, SamplingParams(max_new_tokens=24))
        assert whole[place].answer_ids == made.token_ids
    edited = [dataclasses.replace(problems[0], prompt=problems[1].prompt), *problems[1:]]
    again = write_own_texts(path, pair, edited, params=params, mixed=True)
    assert again[0].prompt_ids == whole[1].prompt_ids and again[1:] == whole[1:], "an edited prompt is answered anew"
    for damaged in (
        b'{"other": 1}\n',
        b"\xff\xfe\n",
        b'{"problem_id": "a", "prompt_ids": [9999], "answer_ids": [1]}\n',
        b'{"problem_id": "a", "prompt_ids": [1.5], "answer_ids": [1]}\n',
        b'{"problem_id": "a", "prompt_ids": [1], "answer_ids": {}}\n',
        b'{"problem_id": "a", "prompt_ids": [], "answer_ids": [9999]}\n',
    ):
        path.write_bytes(damaged)
        with pytest.raises(ReprieveError, match=r"is not a valid target text|a token is not in|must be UTF-8"):
            write_own_texts(path, pair, problems, params=params)
