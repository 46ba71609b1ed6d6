"""AutoJudge's search: by hand on scripted models, its guarantee, edge cases, and real models."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

import reprieve
from reprieve.backends.settings import EngineSettings
from reprieve.cli.main import main
from reprieve.drafters.eagle3 import EagleSettings
from reprieve.engine import load_pair
from reprieve.engine.continuations import ContinuationDecoder, Session, TextRequest
from reprieve.errors import SpecError
from reprieve.mining.building import build
from reprieve.mining.draft import BatchedDraft, DraftReader, EagleModel
from reprieve.mining.pivot import seeded_draw
from reprieve.mining.settings import AutoJudgeMining, PivotMining
from reprieve.mining.store import MINED, NO_ANSWER, LabelStore
from reprieve.models.cached_model import CachedModel
from reprieve.models.sampling import GumbelNoise, Sampler, UniformDraw, _gumbel, choose, gumbel_choice
from reprieve.settings import PairSettings, PromptSettings, SamplingParams, SamplingSettings
from reprieve.tasks import load_task
from tests.kit.mining import EOS, miner, problem
from tests.kit.tiny import ARCHITECTURES, NumberTokenizer, tiny_model
from tests.mining.toys import SHORT

BUNDLED = "reprieve/arithmetic-pair"
OURS = {"task": "arithmetic", "pair": PairSettings(BUNDLED)}


def mine(*args, **options):
    return asyncio.run(miner(*args, **options).mine(problem()))


def script(text):
    """A model that generates a fixed text, whatever the context."""
    return lambda before: text[len(before)] if len(before) < len(text) else EOS


def labels(found):
    return [(m.position, m.target_id, m.draft_id, m.important) for m in found.mismatches]


def test_search_keeps_important_tokens_and_swaps_harmless_ones():
    # The draft proposes 2 for 1 (wording) and 6 for the answer 5.
    found = mine(script([1, 3, 9, 5, EOS]), script([2, 3, 9, 6, EOS]))
    assert found.status == MINED
    assert labels(found) == [(0, 1, 2, False), (3, 5, 6, True)]
    assert found.response_ids == (2, 3, 9, 5, EOS)
    assert found.target_ids == (1, 3, 9, 5, EOS)
    assert found.mismatches[0].continuation_ids == (3, 9, 5, EOS)
    assert (found.mismatches[0].answer, found.mismatches[1].answer) == ("5", "6")


def jointly_harmful(before):
    """Recovers from one wrong token (7) but not from two."""
    text = [1, 1, 9, 6 if before.count(7) >= 2 else 5, EOS]
    return text[len(before)] if len(before) < len(text) else EOS


def test_search_finds_jointly_harmful_tokens_and_the_naive_variant_does_not():
    draft = script([7, 7, 9, 5, EOS])
    assert labels(mine(jointly_harmful, draft)) == [(0, 1, 7, False), (1, 1, 7, True)]
    naive = mine(jointly_harmful, draft, variant="naive")
    assert labels(naive) == [(0, 1, 7, False), (1, 1, 7, False)]
    assert naive.response_ids == naive.target_ids


def test_mismatches_after_a_swap_are_those_of_the_new_response():
    target = lambda before: script([2, 4, 9, 5, EOS] if before[:1] == [2] else [1, 3, 9, 5, EOS])(before)  # noqa: E731
    draft = lambda before: script([2, 8, 9, 5, EOS] if before[:1] == [2] else [2, 3, 9, 5, EOS])(before)  # noqa: E731
    assert labels(mine(target, draft)) == [(0, 1, 2, False), (1, 4, 8, False)]


def test_a_draft_that_ends_early_ends_the_response_there():
    found = mine(script([1, 9, 5, EOS]), script([1, EOS]))
    assert labels(found)[0] == (1, 9, EOS, True)  # no answer before the end
    assert found.mismatches[0].continuation_ids == ()
    late = mine(script([9, 5, 1, EOS]), script([9, 5, EOS]))
    assert labels(late) == [(2, 1, EOS, False)]
    assert late.response_ids == (9, 5, EOS)


def test_a_draft_that_continues_past_the_end_is_tried_too():
    found = mine(script([9, 5, EOS]), script([9, 5, 1, EOS]))
    assert labels(found) == [(2, EOS, 1, False)]
    assert found.response_ids == (9, 5, 1, EOS)


def test_a_target_without_an_answer_gives_no_labels():
    found = mine(script([1, 2, EOS]), script([3, 4, EOS]))
    assert (found.status, found.mismatches, found.target_answer) == (NO_ANSWER, (), None)


def test_a_swap_that_loses_the_answer_is_important():
    target = lambda before: 1 if before[:1] == [2] else script([1, 9, 5, EOS])(before)  # noqa: E731
    found = mine(target, script([2, 9, 5, EOS]))
    assert labels(found) == [(0, 1, 2, True)]
    assert found.mismatches[0].answer is None


def test_the_token_budget_covers_the_whole_response_exactly():
    scripted = miner(script([1, 2, 3, 9, 5, 1, 1, 1, 1]), script([1, 2, 4, 9, 5, 1]), max_new_tokens=6)
    found = asyncio.run(scripted.mine(problem()))
    assert found.target_ids == (1, 2, 3, 9, 5, 1)
    assert scripted.target.asked == [([], 6), ([1, 2, 4], 3)]
    assert found.response_ids == (1, 2, 4, 9, 5, 1)
    last = miner(script([9, 5, 1, 1]), script([9, 5, 2, 1]), max_new_tokens=3)
    found = asyncio.run(last.mine(problem()))
    assert labels(found) == [(2, 1, 2, False)]
    assert last.target.asked == [([], 3)], "nothing is left to generate after the last token of the budget"


class CountingDecoder(ContinuationDecoder):
    """Counts the tokens that forwards read, without padding."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.num_read = 0
        prefill = self._model.prefill

        def counted(texts, *rest):
            self.num_read += sum(len(text.token_ids) for text in texts)
            prefill(texts, *rest)

        self._model.prefill = counted

    def _choose(self, logits, active):
        self.num_read += len(active)
        return super()._choose(logits, active)


@pytest.mark.parametrize("at_once", [False, True])  # True as on GPUs
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_batched_decoding_equals_single_decoding_and_reads_prefixes_once(kind, at_once):
    model = tiny_model(kind, seed=2)
    texts = [[3, 4, 5, 6], [9, 8, 7], [30, 2, 2, 2, 2, 2, 11], [5]]
    alone = reprieve.SpeculativeDecoder(CachedModel(model), None, NumberTokenizer())
    params = SamplingParams(max_new_tokens=20)
    wanted = [alone.generate(text, params).token_ids for text in texts]
    decoder = CountingDecoder(model, num_rows=3, params=params, eos_ids=frozenset())
    decoder._reads_at_once = at_once
    got, sessions = {}, [Session() for _ in texts]

    def ask(number, prefix, size):
        decoder.submit(TextRequest(sessions[number], prefix, size, None, lambda ids: got.__setitem__(number, ids)))

    for number, text in enumerate(texts):
        ask(number, text, 20)
    while not decoder.idle:
        decoder.step()
    assert [got[number] for number in range(len(texts))] == wanted
    # A regenerated suffix reads the swapped token and its own tokens, and nothing else.
    before = decoder.num_read
    ask(0, [*texts[0], *wanted[0][:7], 13], 5)
    while not decoder.idle:
        decoder.step()
    assert decoder.num_read - before == 5
    assert got[0] == alone.generate([*texts[0], *wanted[0][:7], 13], SamplingParams(max_new_tokens=5)).token_ids


@pytest.mark.parametrize("at_once", [False, True])
def test_rollouts_of_one_prefix_read_it_once_or_at_once(monkeypatch, at_once):
    monkeypatch.setattr("reprieve.models.row_model._PREFILL_TOKENS", 64)
    model = tiny_model(seed=2)
    prefixes = [list(range(30)), list(range(4, 28))]
    decoder = CountingDecoder(model, num_rows=12, params=SamplingParams(), eos_ids=frozenset())
    decoder._reads_at_once = at_once  # then in one forward, and each reads it
    got = []
    for prefix in prefixes:
        session = Session()
        for _ in range(5):
            decoder.submit(TextRequest(session, prefix, 6, None, got.append))
    decoder.step()
    num_readers = 5 if at_once else 1
    assert decoder.num_read == num_readers * sum(len(prefix) - 1 for prefix in prefixes) + 10  # with the last tokens
    while not decoder.idle:
        decoder.step()
    alone = reprieve.SpeculativeDecoder(CachedModel(model), None, NumberTokenizer())
    wanted = [alone.generate(prefix, SamplingParams(max_new_tokens=6)).token_ids for prefix in prefixes]
    assert sorted(got) == sorted(wanted * 5)


def test_only_texts_that_others_can_begin_with_are_kept():
    """A rollout's own tokens are random: no later text begins with them."""
    model, sampled = tiny_model(seed=2), SamplingParams(temperature=1.0)
    for draw, num_kept in ((None, 2), (seeded_draw(1, 2), 1)):
        params = SamplingParams() if draw is None else sampled
        decoder = ContinuationDecoder(model, num_rows=2, params=params, eos_ids=frozenset())
        session = Session()
        decoder.submit(TextRequest(session, [3, 4, 5], 6, draw, lambda ids: None))
        while not decoder.idle:
            decoder.step()
        assert len(session.snapshots) == num_kept and session.snapshots[0].token_ids == [3, 4]


def test_batches_need_rows_and_room():
    model = tiny_model()
    with pytest.raises(SpecError, match="num_rows must be 1 or more, got 0"):
        ContinuationDecoder(model, num_rows=0, params=SamplingParams(), eos_ids=frozenset())
    decoder = ContinuationDecoder(model, num_rows=1, params=SamplingParams(), eos_ids=frozenset())
    with pytest.raises(reprieve.errors.ContextOverflowError, match="need 321 positions"):
        decoder.submit(TextRequest(Session(), [1] * 21, 300, None, print))


def test_draft_reader_equals_a_forward_over_the_whole_text():
    model = tiny_model(seed=4)
    reader = DraftReader(CachedModel(model), Sampler(SamplingParams(), torch.device("cpu")))
    prompt = [3, 1, 4, 1, 5]
    first = [9, 2, 6, 5, 3, 5, 8]
    second = [*first[:3], 40, 41, 42]
    for response in (first, second, first, second[:4]):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0]
        assert reader.predict(prompt, response) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_draft_reader_reads_no_further_than_the_next_mismatch():
    model = CachedModel(tiny_model(seed=4))
    reader = DraftReader(model, Sampler(SamplingParams(), torch.device("cpu")))
    prompt, response = [3, 1, 4], [position % 40 for position in range(100)]
    expected = [(at, new) for at, new in enumerate(reader.predict(prompt, response)) if new != response[at]]

    async def read(until):
        found = []
        async for mismatch in reader.mismatches(prompt, response):
            found.append(mismatch)
            if len(found) == until:
                break
        return found

    assert asyncio.run(read(1)) == expected[:1]
    assert len(model.cached_ids) < len(prompt) + 40
    assert asyncio.run(read(None)) == expected


def test_an_eagle_reader_predicts_the_first_drafted_token_of_every_round():
    pair = load_pair(BUNDLED)
    head = pair.eagle_head(EagleSettings().source(pair.target_name))
    prompt = pair.tokenizer.encode(load_task("arithmetic").problems("test", 1)[0].prompt)
    decoder = pair.decoder("lossless", drafter="eagle3:top_k=1,depth=2,total_tokens=2", num_draft_tokens=2)
    made = decoder.generate(prompt, SamplingParams(max_new_tokens=40), trace=True)
    model = EagleModel(pair.target, head, vocab_size=pair.vocab_size)
    reader = DraftReader(model, Sampler(SamplingParams(), pair.device))
    reader.predict(prompt, [*made.token_ids[:9], 7, 8, 9])  # reads another response first, whose end is rolled back
    read, place, num_wrong = reader.predict(prompt, made.token_ids), 0, 0
    for one in made.trace:
        if one.drafted_ids:
            assert read[place] == one.drafted_ids[0]
            num_wrong += read[place] != made.token_ids[place]
        place += len(one.committed)
    assert place == len(made.token_ids) and num_wrong > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "ngram"}, "drafter must be one of draft, eagle3, got 'ngram'"),
        ({"drafter": "draft:x=1"}, "drafter must be draft, eagle3, or eagle3:path=FOLDER, got 'draft:x=1'"),
        ({"drafter": "eagle3:depth=3"}, "drafter must be draft, eagle3, or eagle3:path=FOLDER, got 'eagle3:depth=3'"),
        ({"drafter": "eagle3", "sampling": SamplingSettings(temperature=1.0)}, "or sampled, got 'eagle3'"),
        ({"drafter": "eagle3", "engine": EngineSettings("vllm")}, "on a server or sampled, got 'eagle3'"),
    ],
)
def test_drafters_that_cannot_be_mined_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        AutoJudgeMining(**OURS, **changes)


def test_labels_name_the_drafter_they_were_mined_from(tmp_path):
    options = [
        "--task",
        "arithmetic",
        "--target",
        BUNDLED,
        "--limit",
        "1",
        "--max-new-tokens",
        "8",
        "--num-threads",
        "1",
    ]
    assert main(["mine", "autojudge", *options, "--drafter", "eagle3", "--out", str(tmp_path)]) == 0
    manifest = LabelStore(tmp_path).manifest
    head = EagleSettings().source(BUNDLED)
    assert (
        manifest["drafter"] == "eagle3"
        and manifest["drafter_weights"] == load_pair(BUNDLED).eagle_head(head).fingerprint
    )


def test_waiting_texts_are_read_in_one_forward(monkeypatch):
    model = tiny_model(seed=4)
    alone = DraftReader(CachedModel(model), Sampler(SamplingParams(), torch.device("cpu")))
    texts = [([3, 1, 4], [1, 5, 9, 2]), ([2, 7], [1, 8, 2, 8, 1, 8]), ([5], [3]), ([6, 6], [])]

    async def read(draft):
        return await asyncio.gather(*(draft.predict(*text) for text in texts))

    num_forwards = 0

    class Counting(BatchedDraft):
        def _read(self, batch):
            nonlocal num_forwards
            num_forwards += 1
            return super()._read(batch)

    expected = [alone.predict(*text) for text in texts]
    assert asyncio.run(read(Counting(model, 64))) == expected
    assert num_forwards == 1
    monkeypatch.setattr("reprieve.mining.draft._MOST_LOGITS", 64 * 8)
    assert asyncio.run(read(Counting(model, 64))) == expected
    assert num_forwards == 1 + 3, "no more than fits into one forward"


def test_a_failed_forward_fails_its_texts_and_not_the_next(monkeypatch):
    model = tiny_model(seed=4)
    draft = BatchedDraft(model, 64)
    with pytest.raises(IndexError):
        asyncio.run(draft.predict([10**6], [1, 2]))
    assert len(asyncio.run(draft.predict([3], [1, 2]))) == 2


def noise_after(seed, prefix_ids, vocab_size):
    return _gumbel(torch.tensor(GumbelNoise(seed).keys(prefix_ids)), torch.arange(vocab_size).unsqueeze(0))[0]


def test_gumbel_noise_is_keyed_by_seed_and_prefix():
    noise = GumbelNoise(7)
    row = noise_after(7, [1, 2, 3], 50)
    assert torch.equal(row, noise_after(7, [1, 2, 3], 50))
    assert noise.keys([1, 2, 3, 4], 2) == [noise.keys([1, 2, 3, 4][:length])[0] for length in (2, 3, 4)]
    assert not torch.equal(row, noise_after(7, [1, 2, 4], 50))
    assert not torch.equal(row, noise_after(8, [1, 2, 3], 50))


def test_gumbel_and_inverse_cdf_draws_follow_the_distribution():
    from scipy.stats import chisquare

    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(0)
    uniform = UniformDraw(lambda: float(torch.rand((), generator=generator)))
    size = 4000
    for draws in ([GumbelNoise(n) for n in range(size)], [uniform] * size):
        drawn = choose(probs.log().expand(size, -1), draws, [[3, 4]] * size)
        counts = torch.bincount(torch.tensor(drawn), minlength=5)
        assert counts[1] == 0
        kept = probs > 0
        assert chisquare(counts[kept].tolist(), (size * probs[kept]).tolist()).pvalue > 1e-3


def test_noise_restricted_to_likely_tokens_is_the_same_noise():
    scores = torch.randn(6, 400, generator=torch.Generator().manual_seed(0))
    few = scores.masked_fill(scores < scores.topk(9).values[:, -1:], -torch.inf)
    keys = [GumbelNoise(3).keys([row])[0] for row in range(6)]
    noise = torch.stack([noise_after(3, [row], 400) for row in range(6)])
    assert gumbel_choice(few, keys).tolist() == (few + noise).argmax(-1).tolist()
    assert gumbel_choice(scores, keys).tolist() == (scores + noise).argmax(-1).tolist()
    mixed = choose(few, [None, GumbelNoise(3), *[None] * 4], [[row] for row in range(6)])
    assert mixed[0] == int(few[0].argmax()) and mixed[1] == gumbel_choice(few, keys).tolist()[1]


def test_gumbel_noise_follows_the_gumbel_distribution():
    from scipy.stats import kstest

    noise = noise_after(11, [5], 20000)
    assert kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def test_sampled_suffixes_with_the_same_prefix_are_the_same():
    model = tiny_model(seed=3, scale=1.5)
    params = SamplingParams(temperature=1.0)
    texts = []
    for _ in range(2):
        decoder = ContinuationDecoder(model, num_rows=2, params=params, eos_ids=frozenset())
        got = []
        draw = GumbelNoise(5)
        decoder.submit(TextRequest(Session(), [1, 2, 3], 12, draw, got.append))
        while not decoder.idle:
            decoder.step()
        decoder.submit(TextRequest(Session(), [1, 2, 3, *got[0][:5]], 7, draw, got.append))
        while not decoder.idle:
            decoder.step()
        assert got[1] == got[0][5:]
        texts.append(got[0])
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def bundled():
    """Three short problems, mined together; the second has no important token."""
    bench = build(AutoJudgeMining(limit=SHORT + 1, num_in_flight=3, **OURS))
    problems = [bench.problems[number] for number in (0, 7, SHORT)]

    async def mine_all():
        return await asyncio.gather(*(bench.miner.mine(item) for item in problems))

    return bench.miner.responses.task, problems, asyncio.run(mine_all())


@pytest.mark.slow
def test_a_draft_that_answers_differently_leaves_an_important_token(bundled, bundled_pair):
    task, problems, found = bundled
    draft = bundled_pair.decoder("draft_only")
    num_different = 0
    for item, problem_labels in zip(problems, found, strict=True):
        alone = draft.generate(item.prompt, SamplingParams(max_new_tokens=256))
        important = sum(bool(m.important) for m in problem_labels.mismatches)
        if not task.equivalent(task.extract_answer(alone.text), problem_labels.target_answer):
            num_different += 1
            assert important > 0
        if not important:
            assert alone.token_ids == list(problem_labels.response_ids)
    assert 0 < num_different < len(found)


@pytest.mark.slow
def test_labels_do_not_depend_on_how_many_problems_are_in_flight(bundled, short):
    assert labels(bundled[2][-1]) == labels(short[1])


class Agreeing:
    """A draft without mismatches: mining ends with the target's own text."""

    async def mismatches(self, prompt_ids, response_ids, start=0):
        return
        yield


@pytest.mark.slow
def test_sampled_mining_is_repeatable_and_depends_on_the_seed():
    sampling = SamplingSettings(temperature=0.8, top_p=0.95)

    def once(seed, number, **changes):
        prompt = PromptSettings(max_new_tokens=60)
        bench = build(AutoJudgeMining(limit=1, offset=number, sampling=sampling, seed=seed, prompt=prompt, **OURS))
        return asyncio.run(dataclasses.replace(bench.miner, **changes).mine(bench.problems[0]))

    first, again = once(1, 12), once(1, 12)
    assert (first.target_ids, labels(first)) == (again.target_ids, labels(again))
    assert len({once(seed, 0, make_draft=lambda noise: Agreeing()).target_ids for seed in (1, 2, 3, 4)}) > 1


def test_mining_configurations_out_of_range_are_refused():
    for options, says in (
        ({"variant": "magic"}, "variant must be one of search, naive"),
        ({"limit": 0}, r"limit must be in \[1, 10000000\]"),
        ({"num_in_flight": 0}, r"num_in_flight must be in \[1, 4096\], got 0"),
        ({"api_url": "http://x", "sampling": SamplingSettings(1.0), "pair": PairSettings(draft="d")}, "temperature 0"),
    ):
        with pytest.raises(SpecError, match=says):
            AutoJudgeMining(**options)
    with pytest.raises(SpecError, match="temperature must be above 0 for pivot mining"):
        PivotMining(sampling=SamplingSettings())
