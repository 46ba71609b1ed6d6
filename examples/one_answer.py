"""One answer from the bundled pair, with its tokens per round and number of rescued tokens."""

import reprieve

pair = reprieve.load_pair()
decoder = pair.decoder("margin:delta=4", num_draft_tokens=16)
question = "Ben has 40 coins. He finds 13 more coins. He loses 5 coins. How many coins does Ben have now?"
answer = decoder.generate(f"Question: {question}\nAnswer:")
print(answer.text)
print(f"{answer.tokens_per_round:.1f} tokens per round, {answer.num_rescued} rescued")
