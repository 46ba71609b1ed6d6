"""Let CoSpec's arbiter choose at every mismatch, and print both tokens of each choice."""

import reprieve

pair = reprieve.load_pair()
problem = reprieve.load_task("word_problems").problems("test", 7)[6]
decoder = pair.decoder("arbiter", num_draft_tokens=16)
answer = decoder.generate(problem.prompt, trace=True)
print(f"{answer.text.strip()}\n\n{answer.tokens_per_round:.2f} tokens per round; mismatches that it decided:")

for traced in answer.trace:
    for position, (draft_id, target_id) in enumerate(zip(traced.drafted_ids, traced.target_ids, strict=True)):
        if position <= len(traced.path) and draft_id != target_id:
            taken = "draft" if position < len(traced.path) else "target"
            words = [repr(pair.tokenizer.decode([token_id])) for token_id in (draft_id, target_id)]
            print(f"  draft {words[0]:>10}, target {words[1]:>10}: pi {traced.advice[position]:.2f}, {taken} taken")
