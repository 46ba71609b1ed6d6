"""Rejected tokens, and whether they would have changed the answer."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from arc_rejections import NoContradiction, Rejection, SameAnswer, SimilarText, Verdicts, examine, rejections
from reprieve.engine import Pair, SamplingParams
from reprieve.errors import ReprieveError, SpecError
from reprieve.types import ROOT, DecodingStats, Generation, Provenance, RoundTrace, Token
from tests.benchmarks.test_cospec_branches import SameTextTask
from tests.kit.mining import problem
from tests.kit.tiny import NumberTokenizer

WORDS = ["[PAD]", "[UNK]", "a", "b", "c", "d"]


def _round(drafted, parents, path, committed):
    return RoundTrace(
        drafted_ids=drafted, parents=parents, target_ids=[0] * len(drafted), target_log_probs=[0.0] * len(drafted),
        risks=None, advice=None, bonus_id=None, lossless_accepts=[node in path for node in range(len(drafted))],
        path=path, committed=[Token(token_id, "", Provenance.TARGET) for token_id in committed],
    )  # fmt: skip


def _generation(rounds):
    tokens = [token for traced in rounds for token in traced.committed]
    stats = DecodingStats.total(()).stats
    return Generation(prompt_ids=[1], tokens=tokens, text="", finish_reason="eos", trace=rounds, **stats)


def test_rejected_tokens_are_found_where_another_token_was_committed():
    chain = _round([5, 6, 7], [ROOT, 0, 1], [0], [5, 9])
    tree = _round([3, 4, 3, 8, 8], [ROOT, ROOT, 1, 1, 0], [1], [4, 2])
    whole = _round([5], [ROOT], [0], [5, 6])  # fully accepted: the bonus token replaces nothing
    same = _round([7, 6], [ROOT, ROOT], [], [6])  # the draw fell on a drafted token after all
    ended = _round([5, 6], [ROOT, 0], [0], [5])  # by an end-of-text token among the accepted ones
    found = list(rejections(_generation([chain, tree, whole, same, ended])))
    assert found == [Rejection(1, 9, (6,)), Rejection(3, 2, (3, 8)), Rejection(6, 6, (7,))]


def test_another_token_in_an_answer_makes_another_text(target, draft):
    pair = Pair(target, draft, NumberTokenizer(), "t", "d")
    decoder = pair.decoder("lossless", num_draft_tokens=4)
    task = SameTextTask()
    params = SamplingParams(max_new_tokens=16, temperature=1.0)
    problems = [problem(name, "x") for name in "pq"]
    summary = examine(decoder, pair, task, problems, params, [SameAnswer(task)]).summary()
    assert summary["num_problems"] == 2 and summary["num_refused"] >= summary["num_places"] > 2
    assert summary["answer"] == {"tokens": [0.0] * 3, "places_any": [0.0] * 3, "places_all": [0.0] * 3}


class AnyTask(SameTextTask):
    def extract_answer(self, text):
        return "the same"


def test_equal_answers_agree_whatever_their_texts(target, draft):
    pair = Pair(target, draft, NumberTokenizer(), "t", "d")
    params = SamplingParams(max_new_tokens=16, temperature=1.0)
    measures = [SameAnswer(AnyTask())]
    found = examine(
        pair.decoder("lossless", num_draft_tokens=4), pair, AnyTask(), [problem("p", "x")], params, measures
    )
    assert found.summary()["answer"]["places_all"] == [1.0, 0.0, 1.0], "one problem tells no interval"


def test_shares_are_counted_by_token_and_by_position():
    summary = Verdicts({"answer": [[[True, False, False], [True]], []]}, 1).summary()
    assert (summary["num_places"], summary["num_refused"], summary["num_correct"]) == (2, 4, 1)
    first = {name: shares[0] for name, shares in summary["answer"].items()}
    assert first == {"tokens": 0.5, "places_any": 1.0, "places_all": 0.5}
    alone = Verdicts({"answer": [[[True]], []]}, 1).summary()["answer"]
    assert alone["tokens"] == [1.0, 0.0, 1.0], "all cases are one problem's"
    assert Verdicts({"answer": [[]]}, 0).summary()["answer"]["tokens"] is None


def _kept(folder, model):
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def _config(**settings):
    return BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=12, **settings,
    )  # fmt: skip


def test_an_encoder_finds_equal_texts_similar(tmp_path):
    torch.manual_seed(0)
    model = BertModel(_config())
    torch.nn.init.normal_(model.embeddings.word_embeddings.weight, std=3.0)
    measure = SimilarText(_kept(tmp_path, model))
    assert measure.agree(problem("p", "x"), "a b", ["a b", "d d d c"]) == [True, False]
    long = "a b " * 20
    ends = measure.agree(problem("p", "x"), long + "a b " * 6, [long + "a b " * 6, long + "d d d c " * 3])
    assert ends == [True, False], "what is longer than the model's positions is cut at its beginning"


def test_a_classifier_that_finds_a_contradiction_in_either_order(tmp_path):
    torch.manual_seed(0)
    settings = {"id2label": {0: "ENTAILMENT", 1: "CONTRADICTION"}, "label2id": {"ENTAILMENT": 0, "CONTRADICTION": 1}}
    model = BertForSequenceClassification(_config(**settings))
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([0.0, -3.0])
    measure = NoContradiction(_kept(tmp_path / "calm", model))
    assert measure.agree(problem("p", "x"), "a", ["b", "c d"]) == [True, True]
    model.classifier.bias.data = torch.tensor([-3.0, 0.0])
    assert NoContradiction(_kept(tmp_path / "odd", model)).agree(problem("p", "x"), "a", ["b"]) == [False]
    plain = BertForSequenceClassification(_config())
    with pytest.raises(SpecError, match="--nli must name a model with a label for contradiction"):
        NoContradiction(_kept(tmp_path / "plain", plain))


def test_unsuitable_models_are_refused_when_loaded(tmp_path):
    settings = {"id2label": {0: "ENTAILMENT", 1: "CONTRADICTION"}, "label2id": {"ENTAILMENT": 0, "CONTRADICTION": 1}}
    headless = _kept(tmp_path / "headless", BertModel(_config(**settings)))
    with pytest.raises(ReprieveError, match="lacks trained weights of a BertForSequenceClassification: classifier"):
        NoContradiction(headless)
    with pytest.raises(SpecError, match=r"--embedding must name an encoder of sentences, .* is a BertLMHeadModel"):
        SimilarText(_kept(tmp_path / "writer", BertLMHeadModel(_config(is_decoder=True))))
    unpooled = BertForSequenceClassification(_config(**settings))
    torch.nn.Module.__setattr__(unpooled.bert, "pooler", None)
    with pytest.raises(ReprieveError, match=r"lacks trained weights of a BertForSequenceClassification: .*pooler"):
        NoContradiction(_kept(tmp_path / "unpooled", unpooled))
    short = RobertaConfig(vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                          max_position_embeddings=12, pad_token_id=0)  # fmt: skip
    with pytest.raises(ReprieveError, match=r"--embedding .* cannot read a long text"):
        SimilarText(_kept(tmp_path / "short", RobertaModel(short)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReprieveError, match=r"--nli '.*empty' holds no model"):
        NoContradiction(str(tmp_path / "empty"))
