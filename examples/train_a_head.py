"""Mine a handful of problems, fit a judge head in memory, decode with it. Real heads want hundreds of problems."""

import asyncio

import reprieve
from reprieve.evaluation.arms import Arm, build_decoder
from reprieve.labelling.recipes import MiningConfig, build
from reprieve.rules.judge import JudgeRule
from reprieve.training.features import collect
from reprieve.training.judge import train_judge


async def mine(bench):
    return await asyncio.gather(*(bench.miner.mine(problem) for problem in bench.problems))


bench = build(MiningConfig(miner="autojudge", target="reprieve/arithmetic-pair", limit=6, num_in_flight=6))
problems = asyncio.run(mine(bench))
pair = reprieve.load_pair()
head = train_judge(collect(pair, problems), pair.identity, "arithmetic", held_out=0.5)
made = head.training
print(f"{made['num_important']} of {made['num_tokens']} mismatches important, threshold {head.threshold}")
decoder = build_decoder(Arm("judge", JudgeRule.of(head), 16), pair)
answer = decoder.generate("Question: Sam has 12 toys. He sells 5 toys. How many toys does Sam have?\nAnswer:")
print(answer.text, f"({answer.num_rescued} rescued, {answer.tokens_per_round:.1f} tokens a round)")
