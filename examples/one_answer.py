"""One answer from the bundled pair, with where each token comes from."""

import reprieve
from reprieve.evaluation.arms import Arm, build_decoder

pair = reprieve.load_pair()
decoder = build_decoder(Arm("margin", reprieve.parse_rule("margin:delta=4"), 16), pair)
question = "Ben has 40 coins. He finds 13 more coins. How many coins does Ben have now?"
answer = decoder.generate(f"Question: {question}\nAnswer:")
print(answer.text)
print(f"{answer.tokens_per_round:.1f} tokens a round, {answer.num_rescued} rescued")
