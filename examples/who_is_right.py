"""Let CoSpec's arbiter choose at every mismatch, and look at what it chose between."""

import reprieve

pair = reprieve.load_pair()
problem = reprieve.load_task("word_problems").problems("test", 7)[6]
decoder = pair.decoder("arbiter", num_draft_tokens=16)
answer = decoder.generate(problem.prompt, trace=True)
print(f"{answer.text.strip()}\n\n{answer.tokens_per_round:.2f} tokens per round; mismatches it was asked about:")

for made in answer.trace:
    for place, (drafted, own) in enumerate(zip(made.drafted_ids, made.target_ids, strict=True)):
        if place <= len(made.path) and drafted != own:
            taken = "draft" if place < len(made.path) else "target"
            words = [repr(pair.tokenizer.decode([token_id])) for token_id in (drafted, own)]
            print(f"  draft {words[0]:>10}, target {words[1]:>10}: pi {made.advice[place]:.2f}, the {taken}'s taken")
