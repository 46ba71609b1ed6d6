"""Results as Markdown, for the README and docs: `python benchmarks/tables.py runs/frontier/results.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEADER = (
    "| arm | solved, % | against lossless, points | tokens a round | accepted | speedup over target | over lossless | "
    "tokens an answer |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def interval(bounds: list[float], scale: float, digits: int) -> str:
    return f"[{scale * bounds[0]:.{digits}f}, {scale * bounds[1]:.{digits}f}]"


def row(arm: dict[str, Any]) -> str:
    rounds, accepted = arm["tokens_per_round"], arm["acceptance_rate"]
    cells = [
        f"`{arm['spec']}`".replace("|", "\\|"),
        f"{100 * arm['accuracy']:.1f} {interval(arm['accuracy_ci95'], 100, 1)}",
        f"{100 * arm['accuracy_vs_lossless'][0]:+.1f} {interval(arm['accuracy_vs_lossless'][1:], 100, 1)}",
        "-" if rounds is None else f"{rounds:.2f}",
        "-" if accepted is None else f"{accepted:.0%}",
        f"{arm['speedup_vs_target']:.2f} {interval(arm['speedup_vs_target_ci95'], 1, 2)}",
        f"{arm['speedup_vs_lossless']:.2f} {interval(arm['speedup_vs_lossless_ci95'], 1, 2)}",
        f"{arm['tokens_per_answer']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    print(HEADER)
    for arm in document["arms"]:
        print(row(arm))
    machine = document["machine"]
    print(
        f"\n{document['task']}, {document['split']} split, n = {document['num_problems']}, K = "
        f"{document['num_draft_tokens']}, {document['dtype']}, {machine['processor']}, {machine['num_threads']} "
        f"thread(s), commit {document['commit']}; brackets are 95% intervals.\n`{document['command']}`"
    )


if __name__ == "__main__":
    main()
