"""Let CoSpec's arbiter choose at mismatches, then follow the branch it did not take."""

import reprieve
from reprieve.evaluation.arbitration import diagnose
from reprieve.evaluation.arms import Arm, build_decoder
from reprieve.heads.loading import attach_heads
from reprieve.tasks import load_task

pair = reprieve.load_pair()
task = load_task("arithmetic")
problems = task.problems("test", 3)
params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)

rule = attach_heads(reprieve.parse_rule("arbiter"))
decoder = build_decoder(Arm(rule.spec, rule, rule.head.num_draft_tokens), pair)
made = [decoder.generate(problem.prompt, params) for problem in problems]
tokens, rounds = sum(len(one.tokens) for one in made), sum(one.num_rounds for one in made)
asking = sum(one.times.advise_s for one in made) / sum(one.seconds for one in made)
print(f"{rule.spec}: {tokens / rounds:.2f} tokens a round, {asking:.0%} of the time spent on asking the arbiter")

found = diagnose(decoder, pair, task, problems, params).summary()
print(f"{found['num_mismatches']} decisions, {found['all']['agreement'][0]:.0%} not worse than the other branch")
