"""Test of answer extraction: GSM8K's reference solutions, rewritten in the styles of instruct models.

Each solution is written in every style and read by the `number` and `math` graders. The extracted answer must be
equivalent to itself and to the reference, and not to the next problem's reference unless the two are equal.

    python benchmarks/answers.py gsm8k_test.jsonl
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from reprieve.tasks import GRADERS

_NOTE = re.compile(r"<<[^>]*>>")


def styles(solution: str) -> Iterator[tuple[str, str]]:
    """Yield (style, response): a reference solution in the answer format of each model family."""
    steps, _, reference = _NOTE.sub("", solution).rpartition("####")
    steps, bare = steps.strip(), reference.strip().replace(",", "")
    grouped = f"{int(bare):,}" if re.fullmatch(r"-?\d+", bare) else bare
    yield "gsm8k", solution
    yield "phrase", f"{steps}\nThe final answer is {bare}."
    boxed = grouped.replace(",", "{,}")
    yield "qwen", f"{steps}\n\nThe final answer is:\n\n$$\n\\boxed{{{boxed}}}\n$$"
    yield "llama", f"## Step 1: Solve\n{steps}\n\nThe final answer is: $\\boxed{{{grouped}}}$. I hope it is correct."
    thinking = f"<think>\nThe final answer is 12345, or 17?\n{steps}\n</think>\n\n{steps}\n\n"
    yield "deepseek", f"{thinking}**Final Answer**\n\n\\[\\boxed{{\\text{{{grouped} dollars}}}}\\]"
    yield "gemma", f"{steps}\n\n**Answer:** \\${grouped}"
    yield "bold", f"{steps}\n\nTherefore, the answer is **{grouped} units** in 7 days."


def reference_of(solution: str) -> str:
    return solution.rpartition("####")[2].strip().replace(",", "")


def misreadings(solutions: list[str]) -> Iterator[str]:
    """Yield a line for each response whose answer is extracted wrongly."""
    for solution, next_solution in zip(solutions, solutions[1:] + solutions[:1], strict=True):
        reference, other = reference_of(solution), reference_of(next_solution)
        for style, text in styles(solution):
            for name in ("number", "math"):
                grader = GRADERS.make(name)
                answer = grader.extract(text)
                right = grader.equivalent(answer, reference) and grader.equivalent(answer, answer)
                if not right or (other != reference and grader.equivalent(answer, other)):
                    yield f"{style}, {name}: read {answer!r} where {reference} is right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    solutions = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    wrong = list(misreadings(solutions))
    for line in wrong[:20]:
        print(line)
    print(f"{len(solutions)} solutions in {len(list(styles(solutions[0])))} styles, two graders: {len(wrong)} misread")


if __name__ == "__main__":
    main()
