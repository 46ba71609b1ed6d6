"""A task of numbers, for tests that need no trained weights."""

from __future__ import annotations

from reprieve.tasks import Task, TaskProblem


class ToyTask(Task):
    """The answer is the parity of the last token, so models are sometimes right and sometimes wrong."""

    name = "toy"
    splits = ("test",)
    max_new_tokens = 12
    stop = ()

    def problems(self, split, limit, *, offset=0):
        return [TaskProblem(f"p{i}", f"{i % 40} 3 5 7", str(i % 2)) for i in range(offset, offset + limit)]

    def wrap(self, question):
        return question

    def extract_answer(self, text):
        return str(int(text.split()[-1]) % 2)

    def equivalent(self, answer, other):
        return answer is not None and answer == other
