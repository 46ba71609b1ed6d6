"""Targets placed by accelerate's device map."""

from reprieve.engine import SamplingParams, load_pair
from tests.kit.pairs import ARITHMETIC


def test_a_device_map_gives_the_same_answer_as_one_device():
    made = [
        load_pair(ARITHMETIC.name, dtype="float32", device="cpu", device_map=given)
        .decoder("lossless")
        .generate(
            "Question: Tom has 3 pens. He buys 4 more pens. How many pens does Tom have now?\nAnswer:",
            SamplingParams(max_new_tokens=12),
        )
        for given in (None, "cpu")
    ]
    assert made[0].token_ids == made[1].token_ids
