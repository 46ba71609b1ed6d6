"""The recipe of the bundled pair's draft length heads names the heads that the pair has."""

from recipes.pair.lengths import DIALS, command
from reprieve.bundles import DEFAULT
from reprieve.heads.length import LengthHead
from reprieve.rules import parse_rule
from reprieve.training.length import require_thresholds


def test_the_recipe_makes_the_bundled_heads(tmp_path):
    assert {f"length-{rule}" for rule in DIALS} == {head for head in DEFAULT.heads if head.startswith("length-")}
    for rule, dials in DIALS.items():
        one = command(rule, tmp_path, limit=2)
        require_thresholds(parse_rule(rule), one.settings)
        head = LengthHead.from_pretrained(DEFAULT.heads[f"length-{rule}"])
        assert (head.rule, head.most) == (rule, one.settings.num_draft_tokens)
        assert (head.lowest, head.highest) == (min(dials, default=0), max(dials, default=0))
