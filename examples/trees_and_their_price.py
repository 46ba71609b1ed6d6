"""Draft trees from the target's own states, accept under ARC-Decode's bound, and audit what was accepted."""

import reprieve
from reprieve.evaluation.arms import Arm, build_decoder
from reprieve.evaluation.auditing import audit
from reprieve.heads.loading import attach_heads
from reprieve.tasks import load_task

pair = reprieve.load_pair()
task = load_task("arithmetic")
problems = task.problems("test", 5)
params = reprieve.SamplingParams(temperature=1.0)
drafter = "eagle3:top_k=4,total_tokens=16,prune=entropy"

for spec in ("lossless", "lts:theta=0.97"):
    rule = attach_heads(reprieve.parse_rule(spec))
    decoder = build_decoder(Arm(spec, rule, 6), pair, drafter=drafter)
    made = [decoder.generate(problem.prompt, params) for problem in problems]
    tokens, rounds = sum(len(one.tokens) for one in made), sum(one.num_rounds for one in made)
    pruned = sum(one.num_pruned for one in made) / sum(one.num_pruned + one.num_drafted for one in made)
    print(f"{spec}: {tokens / rounds:.2f} tokens a round, {pruned:.0%} of the drafted nodes pruned")

found = audit(spec, decoder, pair, task, problems, params).summary(rule.head)
for group in ("accepted", "swapped"):
    seen = found[group]
    print(f"{group}: {seen['num']} tokens, next step within the bound at {seen['within_bound']:.1%}")
