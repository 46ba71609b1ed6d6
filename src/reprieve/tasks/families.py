"""The five kinds of word problem of the bundled tasks.

Each family is a function `(rng, num_steps, ranges) -> (question, steps)`. Every number stays a whole number from 0 to
9999, and every question can be answered from its text alone. `SMALL` numbers are within reach of the draft, `LARGE`
ones are hard even for the target, and `ROUND` ones are a draft's speciality.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

NAMES = {
    "Anna": "She", "Ben": "He", "Carla": "She", "David": "He", "Emma": "She", "Felix": "He", "Grace": "She",
    "Henry": "He", "Iris": "She", "Jack": "He", "Kate": "She", "Leo": "He", "Maria": "She", "Noah": "He",
    "Olivia": "She", "Peter": "He", "Rosa": "She", "Sam": "He", "Tina": "She", "Victor": "He",
}  # fmt: skip
ITEMS = (
    "apples", "marbles", "stickers", "coins", "books", "pencils", "shells", "cards", "stamps", "cookies",
    "flowers", "beads", "toys", "balloons", "buttons", "candles",
)  # fmt: skip
GROUPS = (("school", "students"), ("club", "members"), ("factory", "workers"), ("farm", "animals"))
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}


@dataclass(frozen=True)
class Ranges:
    """Sizes of a problem's numbers: pairs are (smallest, largest), single numbers the largest."""

    start: tuple[int, int]
    change: int
    factor: int
    grow_from: int  # largest value that is still multiplied
    boxes: tuple[int, int]
    box_size: tuple[int, int]
    count: tuple[int, int]
    price: tuple[int, int]
    hours: tuple[int, int]
    days: tuple[int, int]
    wage: tuple[int, int]
    group: tuple[int, int]  # in units of `group_unit`
    percents: tuple[int, ...]
    group_unit: int = 20


SMALL = Ranges(
    start=(6, 60), change=40, factor=4, grow_from=50, boxes=(2, 6), box_size=(3, 10), count=(2, 9), price=(2, 12),
    hours=(2, 8), days=(2, 7), wage=(3, 9), group=(1, 15), percents=(10, 20, 25, 30, 40, 60, 75, 80),
)  # fmt: skip
LARGE = Ranges(
    start=(20, 300), change=400, factor=9, grow_from=250, boxes=(3, 12), box_size=(11, 40), count=(2, 12),
    price=(6, 48), hours=(3, 8), days=(3, 9), wage=(11, 24), group=(6, 60),
    percents=tuple(p for p in range(5, 100, 5) if p != 50),
)  # fmt: skip
# Any percentage of round numbers: one multiplication for a model that has learned it.
ROUND = replace(LARGE, group=(1, 12), percents=tuple(range(1, 100)), group_unit=100)


@dataclass(frozen=True)
class ProblemStep:
    """One computed quantity: `left operator right = result`, and the words that say what it is."""

    left: int
    operator: str  # one of + - * /, or % (right percent of left)
    right: int
    subject: str
    verb: str
    unit: str
    tail: str = ""
    free: bool = False  # may be told in any order among the other free steps

    @property
    def result(self) -> int:
        return evaluate(self.left, self.operator, self.right)


def evaluate(left: int, operator: str, right: int) -> int:
    """The whole-number result of one operation; division and percentages must come out even."""
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/" if right and left % right == 0:
            return left // right
        case "%" if left * right % 100 == 0:
            return left * right // 100
    raise ValueError(f"no whole-number result for {left} {operator} {right}")


def chain(rng: random.Random, num_steps: int, ranges: Ranges) -> tuple[str, list[ProblemStep]]:
    """One person's collection goes up and down."""
    name, pronoun = rng.choice(list(NAMES.items()))
    item = rng.choice(ITEMS)
    value = rng.randint(*ranges.start)
    said = [f"{name} has {value} {item}."]
    steps: list[ProblemStep] = []
    while len(steps) < num_steps:
        room = num_steps - len(steps)
        divisors = [k for k in range(2, 10) if value % k == 0 and value // k >= 5]
        kinds = (
            ["buy"]
            + ["give"] * (value > 9)
            + ["grow"] * (value <= ranges.grow_from)
            + ["share"] * bool(divisors)
            + ["boxes"] * (room >= 2)
        )
        kind = rng.choice(kinds)
        if kind == "boxes":
            boxes, size = rng.randint(*ranges.boxes), rng.randint(*ranges.box_size)
            said.append(f"{pronoun} gets {boxes} boxes with {size} {item} in each box.")
            steps.append(ProblemStep(boxes, "*", size, "the boxes", "hold", item))
            steps.append(ProblemStep(value, "+", boxes * size, name, "has", item))
        elif kind == "buy":
            amount = rng.randint(2, ranges.change)
            said.append(f"{pronoun} {rng.choice(('buys', 'finds', 'wins'))} {amount} more {item}.")
            steps.append(ProblemStep(value, "+", amount, name, "has", item))
        elif kind == "give":
            amount = rng.randint(2, value - 5)
            said.append(f"{pronoun} {rng.choice(('gives away', 'loses', 'sells'))} {amount} {item}.")
            steps.append(ProblemStep(value, "-", amount, name, "has", item, " left"))
        elif kind == "grow":
            factor = rng.randint(2, ranges.factor)
            said.append(f"Then the collection grows to {factor} times its size.")
            steps.append(ProblemStep(value, "*", factor, name, "has", item))
        else:
            people = rng.choice(divisors)
            said.append(f"{pronoun} splits everything into {people} equal parts and keeps one part.")
            steps.append(ProblemStep(value, "/", people, name, "has", item, " left"))
        value = steps[-1].result
    return " ".join([*said, f"How many {item} does {name} have now?"]), steps


def compare(rng: random.Random, num_steps: int, ranges: Ranges) -> tuple[str, list[ProblemStep]]:
    """Several people, each compared with another one; the question asks for a sum or a difference of two of them."""
    people = rng.sample(list(NAMES), max(2, num_steps))
    item = rng.choice(ITEMS)
    owned = {people[0]: rng.randint(*ranges.start)}
    said = [f"{people[0]} has {owned[people[0]]} {item}."]
    steps = []
    if num_steps == 1:
        owned[people[1]] = rng.randint(*ranges.start)
        said.append(f"{people[1]} has {owned[people[1]]} {item}.")
    for name in people[len(owned) :]:
        other = rng.choice(list(owned))
        base = owned[other]
        kind = rng.choice(["more"] + ["fewer"] * (base >= 12) + ["times"] * (base <= ranges.grow_from))
        most = {"times": ranges.factor, "fewer": base - 5, "more": ranges.change}[kind]
        amount = rng.randint(2, most)
        relation = f"{amount} times as many {item} as" if kind == "times" else f"{amount} {kind} {item} than"
        said.append(f"{name} has {relation} {other}.")
        steps.append(ProblemStep(base, {"more": "+", "fewer": "-", "times": "*"}[kind], amount, name, "has", item))
        owned[name] = steps[-1].result
    one, two = rng.sample(people, 2)
    if rng.random() < 0.5 or owned[one] == owned[two]:
        steps.append(ProblemStep(owned[one], "+", owned[two], f"{one} and {two}", "have", item))
        ask = f"How many {item} do {one} and {two} have together?"
    else:
        one, two = (one, two) if owned[one] > owned[two] else (two, one)
        steps.append(ProblemStep(owned[one], "-", owned[two], one, "has", item, f" more than {two}"))
        ask = f"How many more {item} does {one} have than {two}?"
    return " ".join([*said, ask]), steps


def shop(rng: random.Random, num_steps: int, ranges: Ranges) -> tuple[str, list[ProblemStep]]:
    """Several things are bought at different prices; the question asks for the total or for the money left."""
    name, pronoun = rng.choice(list(NAMES.items()))
    num_goods, coupon, change = {
        1: (1, False, False), 2: (1, False, True), 3: (2, False, False), 4: (2, False, True), 5: (2, True, True),
        6: (3, False, True), 7: (3, True, True), 8: (4, False, True),
    }[num_steps]  # fmt: skip
    goods = [(item, rng.randint(*ranges.count), rng.randint(*ranges.price)) for item in rng.sample(ITEMS, num_goods)]
    said = [f"{name} buys {_listing([f'{count} {item} for {price} dollars each' for item, count, price in goods])}."]
    steps = [
        ProblemStep(count, "*", price, f"the {item}", "cost", "dollars", free=True) for item, count, price in goods
    ]
    total = steps[0].result
    for step in steps[1:num_goods]:
        words = ("all of this", "costs") if step is steps[num_goods - 1] else ("the first part", "costs")
        steps.append(ProblemStep(total, "+", step.result, *words, "dollars"))
        total = steps[-1].result
    if coupon:
        discount = rng.randint(2, min(ranges.change, total - 1))
        said.append(f"{pronoun} has a coupon for {discount} dollars off.")
        steps.append(ProblemStep(total, "-", discount, name, "pays", "dollars"))
        total -= discount
    if change:
        paid = total + rng.randint(2, ranges.change)
        said.append(f"{pronoun} had {paid} dollars before.")
        steps.append(ProblemStep(paid, "-", total, name, "has", "dollars", " left"))
        return " ".join([*said, f"How many dollars does {name} have left?"]), steps
    return " ".join([*said, f"How many dollars does {name} pay?"]), steps


def work(rng: random.Random, num_steps: int, ranges: Ranges) -> tuple[str, list[ProblemStep]]:
    """Hours, wages, expenses and savings."""
    name, pronoun = rng.choice(list(NAMES.items()))
    hours, days, wage = rng.randint(*ranges.hours), rng.randint(*ranges.days), rng.randint(*ranges.wage)
    if num_steps == 1:
        question = f"{name} works {hours} hours a day for {days} days. How many hours does {name} work?"
        return question, [ProblemStep(hours, "*", days, name, "works", "hours")]
    said = [f"{name} works {hours} hours a day for {days} days and earns {wage} dollars per hour."]
    steps = [ProblemStep(hours, "*", days, name, "works", "hours")]
    steps.append(ProblemStep(steps[0].result, "*", wage, name, "earns", "dollars"))
    value = steps[-1].result
    while len(steps) < num_steps:
        kind = rng.choice(["bonus"] + ["spend"] * (value >= 20) + ["parts"] * any(value % k == 0 for k in range(2, 10)))
        if kind == "parts":
            parts = rng.choice([k for k in range(2, 10) if value % k == 0])
            said.append(f"{pronoun} divides the money equally among {parts} people.")
            steps.append(ProblemStep(value, "/", parts, "each person", "gets", "dollars"))
            value = steps[-1].result
            break
        amount = rng.randint(2, min(2 * ranges.change, value - 5) if kind == "spend" else ranges.change)
        if kind == "spend":
            said.append(f"{pronoun} spends {amount} dollars on {rng.choice(('food', 'rent', 'a bike', 'a trip'))}.")
            steps.append(ProblemStep(value, "-", amount, name, "has", "dollars", " left"))
        else:
            said.append(f"{pronoun} also gets a bonus of {amount} dollars.")
            steps.append(ProblemStep(value, "+", amount, name, "has", "dollars"))
        value = steps[-1].result
    last = "each person get" if steps[-1].subject == "each person" else f"{name} have now"
    return " ".join([*said, f"How many dollars does {last}?"]), steps


def share(rng: random.Random, num_steps: int, ranges: Ranges) -> tuple[str, list[ProblemStep]]:
    """Percentages and fractions of a group, and what remains of it."""
    container, unit = rng.choice(GROUPS)
    value = ranges.group_unit * rng.randint(*ranges.group)
    said = [f"A {container} has {value} {unit}."]
    steps: list[ProblemStep] = []
    while len(steps) < num_steps:
        fractions = [k for k in FRACTIONS if value % k == 0]
        percents = [p for p in ranges.percents if value * p % 100 == 0]
        if (not fractions and not percents) or value < 12:
            amount = rng.randint(2, ranges.change)
            said.append(f"Then {amount} new {unit} join them.")
            steps.append(ProblemStep(value, "+", amount, "the group", "has", unit))
        elif percents and (not fractions or rng.random() < 0.6):
            percent = rng.choice(percents)
            said.append(f"{percent}% of them {rng.choice(('are young', 'are new', 'like music'))}; look only at these.")
            steps.append(ProblemStep(value, "%", percent, "the group", "has", unit))
        elif len(steps) + 2 <= num_steps and rng.random() < 0.6:
            parts = rng.choice(fractions)
            said.append(f"Of these, {FRACTIONS[parts]} leave and the rest stay.")
            steps.append(ProblemStep(value, "/", parts, "those who leave", "make", unit))
            steps.append(ProblemStep(value, "-", value // parts, "the group", "has", unit, " left"))
        elif fractions:
            parts = rng.choice(fractions)
            said.append(f"Only {FRACTIONS[parts]} of these stay.")
            steps.append(ProblemStep(value, "/", parts, "the group", "has", unit, " left"))
        value = steps[-1].result if steps else value
    return " ".join([*said, f"How many {unit} does the group have at the end?"]), steps


def _listing(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


Family = Callable[[random.Random, int, Ranges], tuple[str, list[ProblemStep]]]
FAMILIES: dict[str, Family] = {"chain": chain, "compare": compare, "shop": shop, "work": work, "share": share}
