"""A task on which an arbiter can be trained in seconds: is the sum of the tokens even?"""

import asyncio

import torch

from recipes.arbiter.reinforce import Reinforcement, reinforce, untrained
from recipes.arbiter.rollouts import RolloutSettings
from reprieve.engine.batched import BatchedSpeculativeDecoder
from reprieve.engine.continuations import ContinuationDecoder
from reprieve.heads.settings import ArbiterShape
from reprieve.mining.draft import BlockReader, local_reader
from reprieve.mining.settings import TraceMining
from reprieve.mining.target import LocalTarget, ResponseFormat
from reprieve.mining.traces import ArbitrationMiner, BatchedTracer, BlockTracer
from reprieve.models.sampling import Sampler
from reprieve.settings import PairSettings, SamplingSettings
from reprieve.tasks import TaskProblem
from tests.kit.mining import LastWordTask

CPU = torch.device("cpu")


class ParityTask(LastWordTask):
    """An answer is right if its tokens add up to an even number, so any token may change it."""

    name = "parity"
    splits = ("train", "validation")
    max_new_tokens = 24

    def problems(self, split, limit, *, offset=0):
        first = 0 if split == "train" else 20
        numbers = range(offset, min(offset + limit, 12))
        return [TaskProblem(f"{split}-{n}", f"{first + n} 7 3", "even") for n in numbers]

    def extract_answer(self, text):
        return "odd" if sum(map(int, text.split())) % 2 else "even"


def miner_of(pair, *, temperature=0.0, judge=None, num_rollouts=1, batched=False, **settings):
    settings = TraceMining(
        num_draft_tokens=4, num_rollouts=num_rollouts, sampling=SamplingSettings(temperature), seed=5, **settings
    )
    responses = ResponseFormat(pair.tokenizer, ParityTask(), frozenset(), 24)
    target = LocalTarget(ContinuationDecoder(pair.target, num_rows=8, params=settings.params, eos_ids=frozenset()))

    def make_blocks(params):
        read = local_reader(pair.cached_target())
        return BlockReader(pair.cached_draft(), read, target.run_blocking, Sampler(params, CPU))

    trace = BlockTracer(make_blocks, responses, 4)
    if batched:
        trace = BatchedTracer(BatchedSpeculativeDecoder(pair, num_rows=3, num_draft_tokens=4, params=settings.params))
    return ArbitrationMiner(settings, target, trace, responses, judge)


def mine(pair, count=6, **settings):
    miner = miner_of(pair, **settings)
    return [asyncio.run(miner.mine(problem)) for problem in ParityTask().problems("train", count)]


CLIMB = Reinforcement(
    num_problems=6,
    group_size=4,
    prompts_per_update=3,
    num_updates=3,
    num_epochs=2,
    steps_per_epoch=2,
    learning_rate=3e-3,
    num_validation=4,
    validate_every=2,
)


class ShortParity(ParityTask):
    max_new_tokens = 12


def climb(pair, folder, *, start=None, settings=CLIMB, num_workers=1, progress=lambda done, total: None):
    start = start or untrained(pair, ArbiterShape(), "parity", 4)
    rollouts = RolloutSettings("parity", 4, pair=PairSettings("tiny/target", "tiny/draft"))
    return reinforce(
        pair, ShortParity(), start, rollouts, folder, settings=settings, num_workers=num_workers, progress=progress
    )
