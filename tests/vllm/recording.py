"""Recording of the local engine's rounds, for comparison with vLLM."""

from functools import cache

import torch

import reprieve.engine.decoder as engine
from reprieve.engine import SpeculativeDecoder, load_pair
from tests.kit.pairs import ARITHMETIC

RULES = [
    "judge:path=reprieve/arithmetic-judge,threshold=0.15",
    "pivot:path=reprieve/arithmetic-pivot,threshold=0.6",
    "lts:theta=0.5",
    "margin:delta=3",
    "top_k:k=6",
    "typical:epsilon=0.02",
    "lenience:lenience=0.05",
    "fuzzy:threshold=0.35",
    "random:rate=0.7",
    "asd:regret=5,budget=9",
    "fly:theta=0.1,window=2",
    "cascade:kind=opt,alpha=0.6",
    "cascade:kind=tok,alpha=0.99",
    "margin:delta=3,strict_first=9",
    'margin:delta=9,start=" ",end="\n"',
]


def num_answered(evidence):
    """Number of answer tokens before the block; 0 if the rule does not read it."""
    return 0 if evidence.answer_positions is None else int(evidence.answer_positions[0])


class Recorder:
    """Record rounds of the local engine: the evidence of the rule and its outcome."""

    def __init__(self, monkeypatch):
        self.rounds = []
        self.budgets = []  # what was spent of each answer's risk budget after each round
        self.blocks = []
        evidence_of, accept = SpeculativeDecoder._evidence, engine.accept
        monkeypatch.setattr(SpeculativeDecoder, "_evidence", self.evidence(evidence_of))
        monkeypatch.setattr(engine, "accept", self.accept(accept))

    def evidence(self, original):
        def wrapped(decoder, answer, block, verification):
            made = original(decoder, answer, block, verification)
            self.blocks.append((answer, verification))
            return made

        return wrapped

    def accept(self, original):
        def wrapped(rule, block, evidence, checked, **more):
            outcome = original(rule, block, evidence, checked, **more)
            answer, verification = self.blocks[-1]
            context = answer.context(torch.device("cpu")).token_ids[0]
            self.rounds[-1].append((block, evidence, verification, outcome, context))
            del self.budgets[len(self.rounds) :]
            self.budgets += [[] for _ in range(len(self.rounds) - len(self.budgets))]
            self.budgets[-1].append(more["budget"].spent if more.get("budget") else None)
            return outcome

        return wrapped


@cache
def embedding():
    return load_pair(ARITHMETIC.name).target.get_input_embeddings()
