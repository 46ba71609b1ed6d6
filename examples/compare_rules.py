"""Three rules on five problems: problems solved and tokens per round. `reprieve bench` adds intervals and speed."""

import reprieve

pair = reprieve.load_pair()
task = reprieve.load_task("word_problems")
problems = task.problems("test", 5)
params = reprieve.SamplingParams(max_new_tokens=task.max_new_tokens)

for rule in ("lossless", "margin:delta=3", "judge:threshold=0.1"):
    decoder = pair.decoder(rule, num_draft_tokens=8)
    answers = [decoder.generate(problem.prompt, params) for problem in problems]
    pairs = zip(answers, problems, strict=True)
    solved = sum(task.equivalent(task.extract_answer(a.text), problem.reference) for a, problem in pairs)
    per_round = sum(len(a.tokens) for a in answers) / sum(a.num_rounds for a in answers)
    print(f"{rule}: {solved} of {len(problems)} solved, {per_round:.2f} tokens per round")
