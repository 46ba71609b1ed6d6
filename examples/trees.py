"""Draft trees from the target's own states, prune them, and accept under ARC-Decode's bound."""

import reprieve

pair = reprieve.load_pair()
problems = reprieve.load_task("word_problems").problems("test", 5)
params = reprieve.SamplingParams(temperature=1.0)
drafter = "eagle3:top_k=4,total_tokens=16,prune=entropy"

for rule in ("lossless", "lts:theta=0.9"):
    decoder = pair.decoder(rule, num_draft_tokens=6, drafter=drafter)
    made = [decoder.generate(problem.prompt, params) for problem in problems]
    tokens, rounds = sum(len(one.tokens) for one in made), sum(one.num_rounds for one in made)
    pruned = sum(one.num_pruned for one in made) / sum(one.num_pruned + one.num_drafted for one in made)
    print(f"{rule}: {tokens / rounds:.2f} tokens per round, {pruned:.0%} of the drafted nodes pruned")
