"""Draft trees from the target's own states, prune them, and accept under ARC-Decode's bound."""

import reprieve

pair = reprieve.load_pair()
problems = reprieve.load_task("word_problems").problems("test", 3)
params = reprieve.SamplingParams(temperature=1.0)
drafter = "eagle3:top_k=4,total_tokens=16,prune=entropy"

for rule in ("lossless", "lts:theta=0.9"):
    decoder = pair.decoder(rule, num_draft_tokens=6, drafter=drafter)
    answers = [decoder.generate(problem.prompt, params) for problem in problems]
    tokens, rounds = sum(len(a.tokens) for a in answers), sum(a.num_rounds for a in answers)
    pruned = sum(a.num_pruned for a in answers) / sum(a.num_pruned + a.num_drafted for a in answers)
    print(f"{rule}: {tokens / rounds:.2f} tokens per round, {pruned:.0%} of the drafted nodes pruned")
