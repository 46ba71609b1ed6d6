"""The V2 runner's processor and vLLM's own V2 rejection sampler on constructed blocks: no engine, real kernels.

On recorded blocks they decide as the local engine did, position by position; sampled tokens have the right
distribution; chunks, mixed batches and several rules change nothing.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reprieve.engine import SamplingParams
from reprieve.policies.menu import Menu
from reprieve.vllm_plugin.rounds import WorkerRules
from tests.kit.pairs import ARITHMETIC
from tests.vllm import cpu_kernels
from tests.vllm.conftest import K, local_decoder
from tests.vllm.recording import RULES, Recorder, embedding, num_answered
from tests.vllm.runner import V2

pytestmark = pytest.mark.skipif(not V2, reason="of the V2 runner: RUNNER=v2")

NUM_ANSWERS = 4
NUM_ROUNDS = 5


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    cpu_kernels.mend_interpreter()


def hooks_of(rules, *, contexts=(), slots=64, size=None):
    """A rule processor on a fake runner that holds only request state; each request has a slot."""
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    from reprieve.vllm_plugin.v2_processor import RuleProcessor

    size = size or V
    longest = max([len(context) for context in contexts], default=1)
    texts = torch.zeros(slots, longest, dtype=torch.long)
    lengths = torch.zeros(slots, dtype=torch.long)
    for slot, context in enumerate(contexts):
        texts[slot, : len(context)] = context
        lengths[slot] = len(context)
    states = SimpleNamespace(
        index_to_req_id={slot: f"request {slot}" for slot in range(slots)},
        all_token_ids=SimpleNamespace(gpu=texts),
        total_len=SimpleNamespace(gpu=lengths),
    )
    model = SimpleNamespace(embed_input_ids=lambda ids: embedding()(ids))
    sampler = SimpleNamespace(sampling_states=SamplingStates(slots, size))
    runner = SimpleNamespace(req_states=states, model=model, sampler=sampler, num_speculative_steps=K)
    return RuleProcessor(rules, runner)


def admit(processor, slot, params):
    """Add a request as vLLM's sampler does; return whether the rule may apply to it."""
    states = processor.runner.sampler.sampling_states
    states.add_request(slot, params)
    states.apply_staged_writes()
    return processor.add_request(slot, params)


def params_of(temperature=0.0, asked=None, **more):
    from vllm import SamplingParams as Params

    return Params(temperature=temperature, extra_args=asked, **more)


class Batch:
    """A batch as vLLM lays it out: K + 1 rows per request, one after another."""

    def __init__(self, blocks, logits, *, seeds=None):
        self.blocks = blocks
        self.logits = torch.cat(logits).float()  # [rows, V]
        counts = [len(block) + 1 for block in blocks]
        self.num_rows = np.array(counts)
        self.ends = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        self.slots = torch.arange(len(blocks), dtype=torch.int32)
        self.row_slots = self.slots.repeat_interleave(torch.tensor(counts))
        self.places = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts])
        self.fed = torch.cat([torch.tensor([0, *block], dtype=torch.int32) for block in blocks])
        self.positions = 100 + self.places.long()
        self.seeds = torch.arange(len(blocks)) * 7 + 1 if seeds is None else seeds

    def context(self, requests=slice(None)):
        from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

        numbers = range(len(self.blocks))[requests]
        rows = slice(int(self.ends[numbers[0]]), int(self.ends[numbers[-1] + 1]))
        return rows, LogitsContext(
            expanded_idx_mapping=self.row_slots[rows],
            idx_mapping=self.slots[requests],
            idx_mapping_np=self.slots[requests].numpy(),
            expanded_local_pos=self.places[rows],
            input_ids=self.fed[rows],
            pos=self.positions[rows],
            seq_lens_upper_bound_np=np.full(len(numbers), 200),
        )

    def verify(
        self, processor, *, temperatures, draft_logits=None, chunks=(slice(None),), states=None, raw=None, forced=None,
        names=None,
    ):  # fmt: skip
        """Run the processor and vLLM's rejection sampler chunk by chunk; return the tokens of each request."""
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

        from reprieve.vllm_plugin.v2 import patch_rejection
        from reprieve.vllm_plugin.v2_processor import V2Round

        patch_rejection(processor)
        names = names or [f"request {slot}" for slot in range(len(self.blocks))]
        processor.round = V2Round(names, self.num_rows, states, draft_logits, self.seeds)
        outputs = []
        for requests in chunks:
            rows, context = self.context(requests)
            processor.begin_chunk((self.logits if raw is None else raw)[rows], len(context.idx_mapping_np))
            logits = self.logits[rows].clone()
            slots = context.idx_mapping_np.tolist()
            if any(slot in processor._slots and not processor._slots[slot].strict for slot in slots):
                logits = processor.apply(logits, context)  # otherwise vLLM does not call it
            if forced is not None:
                logits[:, forced] = 1e9
            heat = temperatures[self.row_slots[rows].long()].unsqueeze(-1)
            logits = logits / torch.where(heat == 0, 1.0, heat)
            logits = processor._states.apply_top_k_top_p(logits, context.expanded_idx_mapping, context.idx_mapping_np)
            first = range(len(self.blocks))[requests][0]
            sampled, num = module.rejection_sample(
                logits,
                draft_logits,
                self.fed[rows],
                self.ends[first : first + len(context.idx_mapping_np) + 1] - self.ends[first],
                self.positions[rows],
                context.idx_mapping,
                context.expanded_idx_mapping,
                context.expanded_local_pos,
                temperatures,
                self.seeds,
                int(self.num_rows.max()) - 1,
            )
            outputs += [row[:count].tolist() for row, count in zip(sampled, num.tolist(), strict=True)]
        self.decided = processor.chunk
        processor.round = processor.chunk = None
        return outputs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("spec", RULES)
def test_decisions_equal_the_local_engines(spec, temperature, problems, monkeypatch):
    from reprieve.vllm_plugin.v2_processor import V2Round

    recorder = Recorder(monkeypatch)
    decoder = local_decoder(spec)
    for number, problem in enumerate(problems[:NUM_ANSWERS]):
        recorder.rounds.append([])
        decoder.generate(problem.prompt, SamplingParams(max_new_tokens=40, temperature=temperature, seed=number))
    menu = Menu.load(spec, target=ARITHMETIC.name)
    rules = WorkerRules(menu.map_policies(lambda policy: dataclasses.replace(policy, rule=decoder.rule)))
    rescued = 0
    for number in range(NUM_ROUNDS):
        answers = [
            place
            for place, rounds in enumerate(recorder.rounds)
            if len(rounds) > number and rounds[number][0].num_tokens
        ]
        made = [recorder.rounds[place][number] for place in answers]
        evidence = [item for _, item, _, _, _ in made]
        batch = Batch([block.token_ids.tolist() for block, *_ in made], [v.logits for _, _, v, _, _ in made])
        size = batch.logits.shape[-1]
        processor = hooks_of(rules, contexts=[context for *_, context in made], size=size)
        # The batch's rows begin at position 100.
        prompts = torch.tensor([101 - num_answered(item) for item in evidence])
        processor.runner.req_states.prompt_len = SimpleNamespace(gpu=prompts)
        draft_logits = None
        if evidence[0].draft_scores is not None:
            draft_logits = torch.zeros(len(made), int(batch.num_rows.max()) - 1, batch.logits.shape[-1])
            for slot, item in enumerate(evidence):
                draft_logits[slot, : len(item.draft_scores)] = item.draft_scores * (temperature or 1.0)
        rules.forget([f"request {slot}" for slot in range(64)])
        for slot in range(len(made)):
            admit(processor, slot, params_of(temperature))
        if number:  # budgets go on from round to round
            for slot, place in enumerate(answers):
                processor._slots[slot].budget.spent = recorder.budgets[place][number - 1]
        hidden = [v.hidden for _, _, v, _, _ in made]
        states = torch.cat([item[-1] for item in hidden]) if hidden[0] else None

        def spread_rows(name, evidence=evidence, fill=0.0):
            """One value a row: those of the drafted tokens, and one for each bonus row."""
            return torch.cat([torch.cat([getattr(item, name).float(), torch.tensor([fill])]) for item in evidence])

        if evidence[0].noise is not None:
            monkeypatch.setattr(V2Round, "noise", lambda self, ctx: spread_rows("noise", fill=2.0))
        if temperature:
            monkeypatch.setattr(V2Round, "uniforms", lambda self, ctx: spread_rows("uniforms").double())
        heat = torch.full((64,), temperature)
        outputs = batch.verify(processor, temperatures=heat, draft_logits=draft_logits, states=states)
        decisions = batch.decided.decisions
        for slot, (output, (block, _, _, outcome, _)) in enumerate(zip(outputs, made, strict=True)):
            rows = slice(int(batch.ends[slot]), int(batch.ends[slot + 1]) - 1)
            if decoder.rule.traits.replaces:
                passes = decisions.accept[rows]
            elif decisions.scores is not None:
                passes = None  # verified against another distribution: vLLM's kernel decides
            else:
                passes = decisions.accept[rows] | decisions.lossless[rows]
            if passes is not None:
                assert int(passes.long().cumprod(0).sum()) == len(outcome.path)
            if temperature == 0:
                assert output == [*block.token_ids[: len(outcome.path)].tolist(), outcome.next_token_id]
            rescued += outcome.num_rescued
    rules.counter.take()
    assert rules.failures == 0 and (rescued > 0 or decoder.rule.traits.replaces)
    if temperature == 0:
        assert rules.counter.num_rescued == rescued


V = 8
SEED = 5
SPAN = 'top_k:k=8,start="<think>",end="</think>"'


class Tokens:
    """A tokenizer of two markers."""

    def encode(self, text, add_special_tokens=False):
        return {"<think>": [6], "</think>": [7]}[text]


def random_batch(num, k=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, V, (num, k), generator=draw).tolist()
    logits = [2 * torch.randn(k + 1, V, generator=draw) for _ in range(num)]
    return Batch(blocks, logits)


def test_several_rules_and_thresholds_in_one_batch_each_equal_their_pure_run():
    rules = {"rules": ["margin:delta=1", "top_k:k=2", "fly:theta=0,window=1", "asd:regret=3,budget=4"]}
    wishes = [
        {}, {"reprieve_rule": "off"}, {"reprieve_rule": "top_k"}, {"reprieve_threshold": 4.0},
        {"reprieve_rule": "top_k", "reprieve_threshold": 5}, {"reprieve_rule": "fly"}, {"reprieve_rule": "asd"},
        {"reprieve_rule": "margin", "reprieve_threshold": 0.0},
    ]  # fmt: skip
    batch = random_batch(8)
    processor = hooks_of(WorkerRules(Menu.load(rules)))
    for slot, asked in enumerate(wishes):
        admit(processor, slot, params_of(asked=asked))
    mixed = batch.verify(processor, temperatures=torch.zeros(8))
    chunks = [slice(0, 3), slice(3, 4), slice(4, 8)]
    for slot in range(8):
        processor._slots[slot].budget.spent = 0.0
    assert batch.verify(processor, temperatures=torch.zeros(8), chunks=chunks) == mixed, "in chunks"
    for slot, asked in enumerate(wishes):
        alone = hooks_of(WorkerRules(Menu.load(rules)))
        for place in range(8):
            admit(alone, place, params_of(asked=asked if place == slot else {"reprieve_rule": "off"}))
        assert batch.verify(alone, temperatures=torch.zeros(8))[slot] == mixed[slot], asked
    assert len({tuple(output) for output in mixed}) > 4 and processor.rules.failures == 0


def test_greedy_and_sampling_requests_of_one_rule_share_a_batch():
    batch = random_batch(6, seed=3)
    heat = torch.tensor([0.0, 0.9, 0.0, 0.9, 0.9, 0.0])
    processor = hooks_of(WorkerRules(Menu.load("margin:delta=1.5")))
    for slot in range(6):
        admit(processor, slot, params_of(float(heat[slot]), top_k=5 if slot == 3 else 0))
    mixed = batch.verify(processor, temperatures=heat)
    for slot in range(6):
        alone = hooks_of(WorkerRules(Menu.load("margin:delta=1.5")))
        for place in range(6):
            off = None if place == slot else {"reprieve_rule": "off"}
            admit(alone, place, params_of(float(heat[place]), off, top_k=5 if place == 3 else 0))
        assert batch.verify(alone, temperatures=heat)[slot] == mixed[slot]


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_the_lossless_check_is_vllms_own(truncation):
    """vLLM draws and judges drafts without top-k and top-p, also where another rule reads truncated ones."""
    num, heat = 40, 0.9
    draw = torch.Generator().manual_seed(SEED)
    target, draft = 1.5 * torch.randn(num, V, generator=draw), 1.5 * torch.randn(num, V, generator=draw)
    ids = torch.multinomial((draft / heat).softmax(-1), 1, generator=draw).tolist()
    batch = Batch(ids, [row.expand(2, V) for row in target], seeds=torch.randint(2**40, (num,), generator=draw))
    numbers = {}
    for rule in ("off", "margin"):
        processor = hooks_of(WorkerRules(Menu.load({"rules": ["margin:delta=0", "fuzzy:threshold=0.1"]})), slots=num)
        for slot in range(num):
            admit(processor, slot, params_of(heat, {"reprieve_rule": rule}, **truncation))
        heats = torch.full((num,), heat)
        outputs = batch.verify(processor, temperatures=heats, draft_logits=draft[:, None].contiguous())
        numbers[rule] = [len(output) for output in outputs]
        assert processor.rules.failures == 0
    assert numbers["margin"] == numbers["off"]
    assert [1 + int(flag) for flag in batch.decided.decisions.lossless[::2]] == numbers["off"]


@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
@pytest.mark.parametrize("spec", ["margin:delta=9", "cascade:kind=tok,alpha=0.95"])
def test_a_token_that_vllm_forces_stays_forced(spec, temperature):
    """As when a thinking budget is spent: vLLM sets its logit to 1e9 after all processors, before the temperature."""
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).expand(2, V)
    processor = hooks_of(WorkerRules(Menu.load(spec)))
    for slot in range(5):
        admit(processor, slot, params_of(temperature))
    draft_logits = logits[:1].expand(64, 1, V).contiguous()
    batch = Batch([[1]] * 5, [logits] * 5)
    outputs = batch.verify(processor, temperatures=torch.full((64,), temperature), draft_logits=draft_logits, forced=6)
    assert [output[0] for output in outputs] == [6] * 5 and processor.rules.failures == 0


def test_rounds_of_vllms_warm_up_are_not_counted():
    batch = random_batch(3)
    processor = hooks_of(WorkerRules(Menu.load("margin:delta=9")))
    for slot in range(3):
        admit(processor, slot, params_of())
    names = ["_warmup_0_", "_v2_mixed_warmup_1_", "request 2"]
    batch.verify(processor, temperatures=torch.zeros(3), names=names)
    taken = processor.rules.counter.take()
    assert taken.keys() == {"request 2"}
    mark, rounds = taken["request 2"]
    assert mark is not None and len(rounds) == 1


def test_a_span_is_followed_on_the_device():
    """Marker 6 opens, 7 closes: in the committed text, and inside the block."""
    from reprieve.rules import parse_rule

    rule = parse_rule(SPAN).bind(Tokens())
    menu = Menu.load("top_k:k=8").map_policies(lambda policy: dataclasses.replace(policy, rule=rule))
    logits = torch.zeros(4, V)
    logits[:, 0] = 1.0
    blocks = [[3, 4, 5], [3, 4, 5], [3, 7, 5], [0, 6, 5]]
    contexts = [torch.tensor(text) for text in ([1, 6, 2], [1, 6, 7], [6], [1, 2])]
    processor = hooks_of(WorkerRules(menu), contexts=contexts)
    for slot in range(4):
        admit(processor, slot, params_of())
    outputs = Batch(blocks, [logits] * 4).verify(processor, temperatures=torch.zeros(4))
    # Inside; outside; up to the end marker, which no rule may rescue; a match, then a start marker that is rejected.
    assert outputs == [[3, 4, 5, 0], [0], [3, 0], [0, 0]]


@pytest.mark.parametrize("drafted", ["sampled", "certain"])
def test_sampled_tokens_have_the_right_distribution(drafted):
    """200 draws of the first token; rules always accept the one or two likeliest tokens."""
    num, heat = 200, 0.7
    draw = torch.Generator().manual_seed(SEED)
    target, draft = torch.randn(V, generator=draw), torch.randn(V, generator=draw)
    p, q = (target / heat).softmax(-1), (draft / heat).softmax(-1)
    ids = torch.multinomial(q, num, replacement=True, generator=draw)
    batch = Batch(
        [[int(token)] for token in ids], [target.expand(2, V)] * num, seeds=torch.randint(2**40, (num,), generator=draw)
    )
    draft_logits = draft.expand(num, 1, V).contiguous() if drafted == "sampled" else None
    proposal = q if drafted == "sampled" else torch.ones(V)
    for spec, delta, num_close in (("margin:delta=0", 0.0, 1), ("margin:delta=3", 3.0, 2)):
        processor = hooks_of(WorkerRules(Menu.load(spec)), slots=num)
        for slot in range(num):
            admit(processor, slot, params_of(heat))
        outputs = batch.verify(processor, temperatures=torch.full((num,), heat), draft_logits=draft_logits)
        scores = target / heat
        rescued = scores.amax() - scores <= delta
        assert int(rescued.sum()) == num_close
        passes = torch.where(rescued, 1.0, (p / proposal).clamp_max(1.0))
        residual = (p - q).clamp_min(0).expand(V, V) if drafted == "sampled" else p * (1 - torch.eye(V))
        residual = residual / residual.sum(-1, keepdim=True).clamp_min(1e-12)  # [refused token, what follows]
        expected = num * torch.cat([q * passes, (q * (1 - passes)) @ residual])  # accepted, then after a refusal
        seen = torch.tensor([output[0] + V * (len(output) == 1) for output in outputs])
        counts, rare = torch.bincount(seen, minlength=2 * V), expected < 5
        pooled = [torch.cat([cells[~rare], cells[rare].sum()[None]]) for cells in (counts, expected)]
        statistic = ((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum()
        chance = 1 - torch.special.gammainc((~rare).sum() / 2, statistic / 2)  # chi-square
        assert chance > 0.001, (spec, float(statistic))


def test_a_masked_or_padded_token_is_never_accepted():
    logits = torch.zeros(4, V)
    logits[:, 0] = 1.0
    logits[1, 4] = -torch.inf
    batch = Batch([[3, 4, 5], [3, -1, 5]], [logits, logits.clamp_min(-9)])
    processor = hooks_of(WorkerRules(Menu.load("top_k:k=8")))
    for slot in range(2):
        admit(processor, slot, params_of())
    assert batch.verify(processor, temperatures=torch.zeros(2)) == [[3, 0], [3, 0]]


def test_a_rule_that_raises_leaves_the_lossless_answer(monkeypatch):
    batch = random_batch(3)
    rules = WorkerRules(Menu.load("margin:delta=9"))
    monkeypatch.setattr(type(rules.menu.rules[0]), "risk", lambda rule, evidence: 1 / 0)
    made = []
    for asked in (None, {"reprieve_rule": "off"}):
        processor = hooks_of(rules)
        rules.forget([f"request {slot}" for slot in range(64)])
        for slot in range(3):
            admit(processor, slot, params_of(asked=asked))
        made.append(batch.verify(processor, temperatures=torch.zeros(3)))
    assert made[0] == made[1] and rules.failures == 1


def test_leniency_follows_the_load():
    """One request names a threshold; the threshold of the others follows the size of the batch."""
    logits = torch.zeros(2, V)
    logits[:, 0], logits[:, 1] = 2.0, 0.5
    rules = WorkerRules(Menu.load({"rule": "margin:delta=1", "by_load": {"3": 2.0}}))
    for num, expected in ((2, [0]), (3, [1, 0])):
        processor = hooks_of(rules)
        rules.forget([f"request {slot}" for slot in range(64)])
        for slot in range(num):
            admit(processor, slot, params_of(asked={"reprieve_threshold": 1.0} if slot == 1 else None))
        outputs = Batch([[1]] * num, [logits] * num).verify(processor, temperatures=torch.zeros(num))
        assert outputs[0] == expected and outputs[1] == [0]
    labels = {rule for _, rounds in rules.counter.take().values() for rule, *_ in rounds}
    assert labels == {"margin@1", "margin@2"}


@pytest.mark.parametrize(
    "spec",
    [
        "margin:delta=3",
        "top_k:k=3",
        "typical",
        "fuzzy:threshold=0.4",
        "asd:regret=4",
        "fly:theta=0.1,window=1",
        "cascade:kind=tok,alpha=0.9",
        "margin:delta=3,strict_first=2",
        SPAN,
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_round_never_waits_for_the_device(spec, temperature):
    """The processor's work on a chunk, after the inputs have been set up."""
    from reprieve.vllm_plugin.v2_processor import V2Round
    from tests.kit.waits import HostWaits

    batch = random_batch(4)
    menu = Menu.load(spec).map_policies(lambda policy: dataclasses.replace(policy, rule=policy.rule.bind(Tokens())))
    processor = hooks_of(WorkerRules(menu), contexts=[torch.tensor([1, 6, 2])] * 4)
    processor.runner.req_states.prompt_len = SimpleNamespace(gpu=torch.full((64,), 99))
    for slot in range(4):
        admit(processor, slot, params_of(temperature))
    draft_logits = torch.randn(64, 3, V)
    uniforms = torch.rand(16)
    for _ in range(2):  # the first round uploads what requests asked for
        processor.round = V2Round([str(slot) for slot in range(4)], batch.num_rows, None, draft_logits, batch.seeds)
        processor.round.uniforms = lambda ctx: uniforms  # a kernel of vLLM's, which the interpreter reads on the host
        _, context = batch.context()
        logits = batch.logits.clone()
        processor.begin_chunk(batch.logits, 4)
        with HostWaits() as waits:
            processor.apply(logits, context)
    assert processor.rules.failures == 0
    assert waits.num == 0, waits.where


def test_chunks_without_a_rule_do_not_affect_the_next():
    """vLLM skips the processor if no request of a chunk needs it."""
    batch = random_batch(5, seed=2)
    processor = hooks_of(WorkerRules(Menu.load({"rules": ["margin:delta=2", "fuzzy:threshold=0.5"]})))
    wishes = [{"reprieve_rule": "fuzzy"}, {"reprieve_rule": "off"}, None, {"reprieve_rule": "off"}, None]
    for slot, asked in enumerate(wishes):
        admit(processor, slot, params_of(asked=asked))
    draft_logits = torch.randn(64, 3, V, generator=torch.Generator().manual_seed(1))
    whole = batch.verify(processor, temperatures=torch.zeros(5), draft_logits=draft_logits)
    rounds = {name: rounds for name, (_, rounds) in processor.rules.counter.take().items()}
    each = [slice(slot, slot + 1) for slot in range(5)]
    assert batch.verify(processor, temperatures=torch.zeros(5), draft_logits=draft_logits, chunks=each) == whole
    assert {name: rounds for name, (_, rounds) in processor.rules.counter.take().items()} == rounds
    relaxed = {"request 0": ["fuzzy@0.5"], "request 2": ["margin@2"], "request 4": ["margin@2"]}
    assert {name: [rule for rule, *_ in found] for name, found in rounds.items()} == relaxed
    assert processor.rules.failures == 0


def test_a_rule_with_its_own_distribution_does_not_affect_other_requests():
    batch = random_batch(3, seed=4)
    heat = torch.tensor([0.0, 0.9, 0.0])
    draft_logits = torch.randn(64, 3, V, generator=torch.Generator().manual_seed(1))
    made = []
    for second in ("cascade", "off"):
        processor = hooks_of(WorkerRules(Menu.load({"rules": ["margin:delta=2", "cascade:kind=tok,alpha=0.9"]})))
        for slot, asked in enumerate((None, {"reprieve_rule": second}, {"reprieve_threshold": 9.0})):
            admit(processor, slot, params_of(float(heat[slot]), asked))
        made.append(batch.verify(processor, temperatures=heat, draft_logits=draft_logits))
        assert processor.rules.failures == 0
    assert made[0][0] == made[1][0] and made[0][2] == made[1][2] and len(made[0][2]) == 4


def test_strict_by_default_and_lenient_under_load():
    logits = torch.zeros(2, V)
    logits[:, 0], logits[:, 1] = 2.0, 0.5
    rules = WorkerRules(Menu.load({"rule": "margin:delta=1", "default": "strict", "by_load": {"3": 2.0}}))
    for num, expected in ((2, [0]), (3, [1, 0])):
        processor = hooks_of(rules)
        for slot in range(num):
            assert admit(processor, slot, params_of())
        outputs = Batch([[1]] * num, [logits] * num).verify(processor, temperatures=torch.zeros(num))
        assert outputs == [expected] * num
