"""On recorded blocks, vLLM's own sampler behind the plugin decides as the local engine did, position by position."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from vllm.v1.sample import rejection_sampler as module

from reprieve.engine import SamplingParams
from reprieve.policies.menu import Menu
from reprieve.vllm_plugin import v1 as sampler
from reprieve.vllm_plugin.rounds import WorkerRules
from reprieve.vllm_plugin.v1 import Hooks
from tests.kit.pairs import ARITHMETIC
from tests.vllm import cpu_kernels
from tests.vllm.conftest import K, local_decoder
from tests.vllm.recording import RULES, Recorder, embedding, num_answered
from tests.vllm.runner import V2

pytestmark = pytest.mark.skipif(V2, reason="of the V1 runner")

NUM_ANSWERS = 3
NUM_ROUNDS = 6


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    cpu_kernels.mend()
    sampler.patch_sampler()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("spec", RULES)
def test_decisions_equal_the_local_engines(spec, temperature, problems, monkeypatch):
    recorder = Recorder(monkeypatch)
    decoder = local_decoder(spec)
    for number, problem in enumerate(problems[:NUM_ANSWERS]):
        recorder.rounds.append([])
        decoder.generate(problem.prompt, SamplingParams(max_new_tokens=48, temperature=temperature, seed=number))
    menu = Menu.load(spec, target=ARITHMETIC.name)
    rules = WorkerRules(menu.map_policies(lambda policy: dataclasses.replace(policy, rule=decoder.rule)))
    rescued = decided = 0
    for number in range(NUM_ROUNDS):
        batch = {
            f"answer-{place}": rounds[number]
            for place, rounds in enumerate(recorder.rounds)
            if len(rounds) > number and rounds[number][0].num_tokens
        }
        outputs = verify(rules, batch, temperature, monkeypatch)
        for output, (block, _, _, outcome, _) in zip(outputs.tolist(), batch.values(), strict=True):
            kept = [token for token in output if token >= 0]
            assert len(kept) - 1 == len(outcome.path)
            assert kept[:-1] == block.token_ids[: len(outcome.path)].tolist()
            if temperature == 0:
                assert kept[-1] == outcome.next_token_id
            rescued += outcome.num_rescued
            decided += block.num_tokens
    rules.counter.take()
    assert rules.failures == 0 and rules.counter.num_rescued == rescued
    assert rescued > 0 and decided > 100


def verify(rules, batch, temperature, monkeypatch):
    """One round of several requests through vLLM's rejection sampler."""
    greedy = temperature == 0
    counts = [block.num_tokens for block, *_ in batch.values()]
    starts = [sum(counts[:place]) + place for place in range(len(counts))]
    judging = torch.tensor([start + node for start, count in zip(starts, counts, strict=True) for node in range(count)])
    logits = torch.cat([verification.logits for _, _, verification, _, _ in batch.values()])
    hidden = [verification.hidden for _, _, verification, _, _ in batch.values()]
    states = torch.cat([item[-1] for item in hidden]) if hidden[0] else torch.zeros(len(logits), 1)
    evidence = [item for _, item, _, _, _ in batch.values()]
    token_ids = torch.cat([block.token_ids for block, *_ in batch.values()]).int()
    scores = torch.cat([item.scores for item in evidence]).clone()
    probs = None
    if evidence[0].draft_scores is not None:
        probs = [item.draft_scores.softmax(-1) for item in evidence]
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=list(batch),
            greedy_reqs=set(batch) if greedy else set(),
            token_ids_cpu=pad_sequence([context for *_, context in batch.values()], batch_first=True).numpy(),
            num_tokens_no_spec=np.array([len(context) for *_, context in batch.values()]),
            num_prompt_tokens=np.array(
                [len(context) - num_answered(item) for _, item, _, _, context in batch.values()]
            ),
        ),
        requests={name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)) for name in batch},
        drafter=SimpleNamespace(_enable_probabilistic_draft_probs=True),
        get_model=lambda: SimpleNamespace(embed_input_ids=embedding()),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
    )
    for place, name in enumerate(batch):
        rules.note_drafts([name], None if probs is None else probs[place].unsqueeze(0))
    if evidence[0].noise is not None:
        monkeypatch.setattr(rules, "noise", lambda size, device: torch.cat([item.noise for item in evidence]))
    metadata = SimpleNamespace(draft_token_ids=token_ids, target_logits_indices=judging)
    state = SimpleNamespace(logits=logits, sample_hidden_states=states, spec_decode_metadata=metadata)
    hooks = Hooks(rules, runner)
    possible = logits[judging].gather(-1, token_ids.long().unsqueeze(-1)).squeeze(-1) > -torch.inf
    if not greedy:
        uniforms = torch.cat([item.uniforms for item in evidence]).double()
        fake = lambda *args: uniforms  # noqa: E731
        wrapper = functools.wraps(fake)(functools.partial(sampler._generate_uniform_probs, fake))
        monkeypatch.setattr(module, "generate_uniform_probs", wrapper)
    token = sampler.ROUND.set(sampler.V1Round(hooks, state, possible=possible))
    meta = SimpleNamespace(
        all_greedy=greedy,
        all_random=not greedy,
        temperature=None if greedy else torch.full((len(batch),), temperature),
        generators={},
        top_k=None,
        top_p=None,
    )
    before = scores.clone()
    proposals = None if probs is None or greedy else torch.cat(probs).contiguous()
    output = module.rejection_sample(
        token_ids, counts, max(counts), torch.tensor(counts).cumsum(0).int(), proposals, scores,
        logits[torch.tensor(starts) + torch.tensor(counts)].argmax(-1, keepdim=True), meta,
    )  # fmt: skip
    sampler.ROUND.reset(token)
    assert torch.equal(scores, before), "raised logits must be put back"
    return output
