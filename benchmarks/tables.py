"""Tables of the docs, from committed configurations: `make tables`, or `python benchmarks/tables.py run NAME ...`.

`benchmarks/tables.yaml` gives each table's commands (and their environment, if it is not this one), result file, format
and pages. `run` runs the commands under `runs/tables` (each resumes from its folder), stores the results in
`benchmarks/results` and writes the pages; `write` writes the pages from the stored results; `check` reports stored
results of other commands, pages that differ from the results, and decimals, shares and signed numbers on these pages
that no command produced. A table without pages may have no result yet. A handwritten page must name a command in each
section and list item that shows an interval and, under `docs/measured`, in each that has a table of numbers.

On a page, a table is between `<!-- table NAME -->` and `<!-- /table -->` (NAME.PART if a result has several), a single
number between `<!-- value NAME ; ARM ; FIELD -->` and `<!-- /value -->`. A number from another source is on a line that
names the source and contains `<!-- cited -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from reprieve.errors import ReprieveError
from reprieve.files import read_json, replace_file
from reprieve.settings import common_length

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RUNS = Path("runs/tables")
_BLOCK = re.compile(r"<!-- table ([\w.-]+) -->\n(?:(?!<!-- table ).)*?<!-- /table -->", re.DOTALL)
_VALUE = re.compile(r"<!-- value ([^>\n]+?) -->[^\n|]*?<!-- /value -->")
_CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)
# Numbers that look measured: decimals (not in names such as Apache-2.0), shares and signed integers.
_MEASURED = re.compile(r"(?<![\w.])(?<!\w-)[+-]?\d+\.\d+(?!\.?\d)|\b\d+(?:\.\d+)? ?%|(?<!\w)[+-]\d+\b")
_INTERVAL = re.compile(r"[\w%]\s+\[[-+]?\d[\d.]*, [-+]?\d[\d.]*\]")
_SECTION = re.compile(r"^(?=#+ |- \*\*)", re.MULTILINE)
_COMMAND = re.compile(r"`[^`]*\b(?:reprieve |benchmarks/|pytest )[^`]*`|^\$ ", re.MULTILINE)
_SHOWN_LOOSE = 5  # unsourced numbers to list per page
_KEPT = (
    *("command", "commit", "versions", "machine", "complete", "target", "draft", "drafter", "dtype", "engine"),
    *("task", "split", "offset", "num_problems", "num_trials", "num_draft_tokens", "sampling", "seed"),
)


@cache
def tables() -> dict[str, dict[str, Any]]:
    """Return the configurations in `tables.yaml`, by table."""
    return yaml.safe_load((ROOT / "benchmarks" / "tables.yaml").read_text())["tables"]


def on_pages() -> list[str]:
    """Return the names of the tables that a page shows."""
    return [name for name, table in tables().items() if table["pages"]]


def pages() -> list[Path]:
    """Return the pages that contain tables."""
    return [ROOT / name for name in dict.fromkeys(page for table in tables().values() for page in table["pages"])]


@cache
def kept(name: str) -> dict[str, Any]:
    """Return a table's stored results.

    Raises:
        ReprieveError: there is no such table, or its command was not run.
    """
    if name not in tables():
        raise ReprieveError(f"no table {name!r} in tables.yaml; there are {', '.join(tables())}")
    return read_json(RESULTS / f"{name}.json", f"the results of table {name}")


def interval(bounds: list[float], scale: float, digits: int) -> str:
    return f"[{scale * bounds[0]:.{digits}f}, {scale * bounds[1]:.{digits}f}]"


def _difference(values: list[float] | None, scale: float) -> str:
    return "-" if values is None else f"{scale * values[0]:+.1f} {interval(values[1:], scale, 1)}"


def _with_interval(arm: Mapping[str, Any], name: str, scale: float, digits: int) -> str:
    value = arm[name]
    return "-" if value is None else f"{scale * value:.{digits}f} {interval(arm[f'{name}_ci95'], scale, digits)}"


def _plain(digits: int, scale: float = 1, unit: str = "") -> Callable[[Mapping[str, Any], str], str]:
    def show(arm: Mapping[str, Any], name: str) -> str:
        return "-" if arm[name] is None else f"{scale * arm[name]:.{digits}f}{unit}"

    return show


def _tokens(arm: Mapping[str, Any], name: str) -> str:
    """Return the tokens per answer; `longer` if the answers are measurably longer than lossless decoding's."""
    return f"{_plain(0)(arm, name)}{', longer' if _is_longer(arm) else ''}"


def _is_longer(arm: Mapping[str, Any]) -> bool:
    difference = arm.get("tokens_vs_lossless")
    return bool(difference) and difference[1] > 0


# Column: heading and formatter.
COLUMNS: dict[str, tuple[str, Callable[[Mapping[str, Any], str], str]]] = {
    "spec": ("arm", lambda arm, _: f"`{arm['spec']}`".replace("|", "\\|")),
    "accuracy": ("solved, %", lambda arm, name: _with_interval(arm, name, 100, 1)),
    "accuracy_vs_lossless": ("against lossless, points", lambda arm, name: _difference(arm[name], 100)),
    "accuracy_vs_target": ("against the target, points", lambda arm, name: _difference(arm[name], 100)),
    "accuracy_vs_allocation": ("against random allocation, points", lambda arm, name: _difference(arm[name], 100)),
    "tokens_per_round": ("tokens per round", _plain(2)),
    "acceptance_rate": ("accepted", _plain(0, 100, "%")),
    "draft_share": ("drafted share", _plain(0, 100, "%")),
    "speedup_vs_target": ("speed over target", lambda arm, name: _with_interval(arm, name, 1, 2)),
    "speedup_vs_lossless": ("speed over lossless", lambda arm, name: _with_interval(arm, name, 1, 2)),
    "pruned_share": ("pruned", _plain(0, 100, "%")),
    "tokens_per_answer": ("tokens per answer", _tokens),
    "rounds_per_answer": ("rounds per answer", _plain(1)),
    "rounds_vs_lossless": ("against lossless, rounds", lambda arm, name: _difference(arm[name], 1)),
    "answers_vs_lossless": ("answers per second, over lossless", lambda arm, name: _with_interval(arm, name, 1, 2)),
    "num_truncated": ("unfinished", _plain(0)),
    "num_unread": ("no answer found", _plain(0)),
}
USUAL = ("spec", "accuracy", "accuracy_vs_lossless", "tokens_per_round", "speedup_vs_target", "speedup_vs_lossless")


def grid(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def arms_table(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Format the arms of `reprieve bench`, one per row."""
    columns = table.get("columns", USUAL)
    rows = [[COLUMNS[column][1](arm, column) for column in columns] for arm in document["arms"]]
    machine, length = document["machine"], document["num_draft_tokens"]
    times = f" x {document['num_trials']}" if document["num_trials"] > 1 else ""
    temperature = document["sampling"]["temperature"]
    sampled = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    gpus = machine.get("gpus")
    device = f"an {gpus[0]}" if gpus else f"{machine['num_threads']} thread(s) of an {machine['processor']}"
    parts = (
        f"{document['task']}, {document['split']} problems",
        f"n = {document['num_problems']}{times}",
        f"{sampled}, K = {length}, {table.get('weights', document['dtype'])}",
        *([] if document["engine"] == "local" else [f"engine {document['engine']}"]),
        f"{device}; brackets are 95% intervals.",
    )
    marked = "tokens_per_answer" in columns and any(map(_is_longer, document["arms"]))
    longer = " `longer`: measurably longer answers than lossless decoding's." if marked else ""
    note = f"{', '.join(parts)}{longer}\n`{document['command']}`"
    if "note" in table:  # a view has its own note; another page shows the command
        note = table["note"].format(n=document["num_problems"])
    return f"{grid([COLUMNS[column][0] for column in columns], rows)}\n\n{note}"


def rows_table(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Format `head` and `rows` of a benchmark's result, with its command."""
    foot = "\n".join(filter(None, (document.get("note"), f"`{document['command']}`")))
    return f"{grid(document['head'], document['rows'])}\n\n{foot}"


def parts_table(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Format all tables of a result that has several: its `parts`, each with `head`, `rows` and a note."""
    return "\n\n".join(rows_table(table, document | part) for part in document["parts"].values())


def certificate_table(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Format a certificate: the thresholds tested, in order, then the last one on the held-out problems."""
    held = document["held_out"]
    steps = [
        ("calibration", step["threshold"], step["tokens_per_round"], step["evidence"])
        for step in document["calibration"]["steps"]
    ]
    steps.append(("held out", document["threshold"], held["tokens_per_round"], held))
    rows = [
        [
            f"{threshold:g}",
            f"{evidence['num_problems']} ({split})",
            *(_bounded(risk) for risk in (evidence, *evidence["risks"])),
            f"{tokens:.2f}",
        ]
        for split, threshold, tokens, evidence in steps
    ]
    names = {"growth": "longer, %", "unfinished": "more unfinished, points"}
    risks = [names[risk["name"]] for risk in held["risks"]]
    head = ["threshold", "problems", "loss, points", *risks, "tokens per round"]
    return f"{grid(head, rows)}\n\n{document['statement']}\n`{document['command']}`"


def _bounded(risk: Mapping[str, Any]) -> str:
    return f"{100 * risk['observed']:+.1f}, at most {100 * risk['upper_bound']:.1f}"


def share_text(values: list[float] | None) -> str:
    return "-" if values is None else f"{100 * values[0]:.1f} {interval(values[1:], 100, 1)}"


def rejections_table(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Format the results of `benchmarks/arc_rejections.py`, one row per measure."""
    found = document["rejections"]
    rows = [
        [name, *(share_text(of[share]) for share in ("tokens", "places_any", "places_all"))]
        for name, of in found.items()
        if isinstance(of, dict)
    ]
    head = ["compared by", "harmless tokens, %", "positions with any, %", "positions with all, %"]
    note = (
        f"{found['num_refused']} refused tokens at {found['num_places']} positions of {found['num_problems']} "
        f"{document['task']} problems, {document['split']}; brackets are 95% intervals."
    )
    return f"{grid(head, rows)}\n\n{note}\n`{document['command']}`"


def branches_table(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Format the results of `benchmarks/cospec_branches.py`, one row per kind of mismatch (CoSpec, Table 3)."""
    found = document["diagnosis"]
    rows = [
        [
            name.replace("_", " "),
            str(of["num"]),
            *(share_text(of[one]) for one in ("share", "draft_chosen", "agreement")),
        ]
        for name, of in found.items()
        if isinstance(of, dict)
    ]
    note = (
        f"`{document['rule']}`, K = {document['num_draft_tokens']}: {found['num_mismatches']} mismatches reached in "
        f"{found['num_problems']} {document['task']} problems, {document['split']}; brackets are 95% intervals."
    )
    head = ["mismatches", "n", "share, %", "draft chosen, %", "agreement, %"]
    return f"{grid(head, rows)}\n\n{note}\n`{document['command']}`"


def audits_table(table: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Format the shift of the next step by accepted tokens, and how often a bound held (ARC-Decode, Table 5)."""
    rows = [
        [f"`{audit['arm']}`", group, str(of["num"]), *_shift(of)]
        for audit in document["audits"]
        for group, of in audit.items()
        if group in ("accepted", "swapped", "rescued")
    ]
    note = (
        f"{document['audits'][0]['num_problems']} {document['task']} problems, {document['split']}, K = "
        f"{document['num_draft_tokens']}, `{document['drafter']}`, "
        f"temperature {document['sampling']['temperature']:g}; "
        "brackets are 95% intervals that treat tokens as independent."
    )
    head = ["rule", "tokens", "n", "mean JS, nats", "95% quantile", "JS <= U, %", "JS <= tau, %"]
    return f"{grid(head, rows)}\n\n{note}\n`{document['command']}`"


def _shift(of: Mapping[str, Any]) -> list[str]:
    if not of["num"]:
        return ["-"] * 4
    held = (f"within_{name}" for name in ("bound", "tolerance"))
    return [f"{of['mean']:.4f}", f"{of['q95']:.4f}", *(_with_interval(of, name, 100, 1) for name in held)]


SHOWN: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]] = {
    "arms": arms_table,
    "rows": rows_table,
    "parts": parts_table,
    "rejections": rejections_table,
    "branches": branches_table,
    "audits": audits_table,
    "certificate": certificate_table,
}


def shown(marker: str) -> str:
    """Format a table for its pages: `NAME`, or `NAME.PART` for one table of a result that has several.

    Raises:
        ReprieveError: there is no such table or part.
    """
    name, _, part = marker.partition(".")
    document = kept(name)
    if not part:
        return SHOWN[tables()[name]["shown"]](tables()[name], document)
    if view := tables()[name].get("views", {}).get(part):  # some arms and columns of a table
        arms = [arm for arm in document["arms"] if arm["spec"] in view["arms"]]
        return arms_table({**tables()[name], **view}, {**document, "arms": arms})
    parts = document.get("parts", {})
    if part not in parts:
        raise ReprieveError(f"table {name} has no part {part!r}; it has {', '.join(parts) or 'none'}")
    return rows_table(tables()[name], document | parts[part])


def value(marker: str) -> str:
    """Format one number: `NAME ; ARM ; FIELD`."""
    parts = [part.strip() for part in marker.split(";")]
    if len(parts) != 3 or parts[2] not in COLUMNS:
        raise ReprieveError(f"a value must be NAME ; ARM ; FIELD, with a field of {', '.join(COLUMNS)}; got {marker!r}")
    name, spec, field = parts
    arms = {arm["spec"]: arm for arm in kept(name).get("arms", [])}
    if spec not in arms:
        raise ReprieveError(f"table {name} has no arm {spec!r}; it has {', '.join(arms)}")
    return COLUMNS[field][1](arms[spec], field)


def rendered(text: str) -> str:
    """Return a page with every table and number filled in from the stored results."""
    text = _BLOCK.sub(lambda match: f"<!-- table {match[1]} -->\n{shown(match[1])}\n<!-- /table -->", text)
    return _VALUE.sub(lambda match: f"<!-- value {match[1]} -->{value(match[1])}<!-- /value -->", text)


def loose_numbers(text: str) -> list[str]:
    """Return numbers that look measured and are outside tables, values, code and cited lines."""
    bare = "\n".join(line for line in _VALUE.sub("", _BLOCK.sub("", text)).split("\n") if "<!-- cited -->" not in line)
    return _MEASURED.findall(_CODE.sub("", bare))


def unsourced(text: str, *, measured: bool) -> list[str]:
    """Return the first lines of a handwritten page's sections that show an interval but name no command.

    On a page of measurements (`measured`) a table of numbers counts too.
    """
    found = []
    for section in _SECTION.split(text):
        bare = _CODE.sub("", section)
        rows = "\n".join(line for line in section.split("\n") if line.startswith("| "))
        shows = _INTERVAL.search(bare) or (measured and loose_numbers(rows))
        if shows and not _COMMAND.search(section):
            found.append(section.strip().split("\n")[0])
    return found


def trimmed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a result to store: what was run, and the fields of each arm that a page can show."""
    if "parts" in document:
        return {field: document[field] for field in (*_KEPT, "parts") if field in document}
    if "made_with" in document:  # a certificate
        parts = {name: {**document[name], "problems": None} for name in ("calibration", "held_out")}
        whole = {**document, **parts, "command": document["made_with"]["command"]}
        return {name: value for name, value in whole.items() if name not in ("kind", "sha256")}  # valid only whole
    if "arms" not in document:
        return dict(document)
    if "config" in document:  # of `reprieve bench`: one level is enough here
        config = document["config"]
        length = common_length(config["num_draft_tokens"])
        document = {**config, **document["environment"], **document, "num_draft_tokens": length}
    shown = [*COLUMNS, *(f"{name}_ci95" for name in COLUMNS), "tokens_vs_lossless"]
    fields = [*shown, "num_draft_tokens", "num_problems", "num_failed"]
    arms = [{field: arm[field] for field in fields if field in arm} for arm in document["arms"]]
    return {field: document[field] for field in _KEPT if field in document} | {"arms": arms}


def words_of(name: str, command: str) -> list[str]:
    """Split a table's command into words and insert its folder."""
    return [re.sub(r"\bOUT\b", str(RUNS / name), word) for word in shlex.split(command)]


def run(names: list[str]) -> None:
    """Run the tables' commands and store the results.

    Raises:
        ReprieveError: a command failed, or a result is not complete.
    """
    for name in names:
        table, folder = tables()[name], RUNS / name
        binaries = ROOT / table.get("environment", ".") / "bin"
        if not binaries.is_dir():  # fall back to this environment, which on a GPU has vLLM
            binaries = Path(sys.executable).parent
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # scripts import `recipes`
        for command in table["run"]:
            words = words_of(name, command)
            print(f"{name}: {shlex.join(words)}", flush=True)
            if status := subprocess.run(_program(words, binaries), cwd=ROOT, env=environment, check=False).returncode:
                raise ReprieveError(f"table {name}: {words[0]} ended with {status}; run again to resume")
        keep(name, read_json(ROOT / folder / table["result"], f"the result of table {name}"))
        for figure, shown_at in table.get("figures", {}).items():
            replace_file(ROOT / shown_at, (ROOT / folder / figure).read_bytes())


def _program(words: list[str], binaries: Path) -> list[str]:
    """Return a table's command as a process takes it: a verb, a script of `benchmarks/`, or a module of `recipes/`."""
    first, *rest = words
    if first.startswith("recipes/"):
        return [str(binaries / "python"), "-m", first.removesuffix(".py").replace("/", "."), *rest]
    return [str(binaries / ("python" if first.endswith(".py") else "reprieve")), *words]


def keep(name: str, document: Mapping[str, Any]) -> None:
    """Store a table's result.

    Raises:
        ReprieveError: it is not complete.
    """
    if not document.get("complete", True):
        raise ReprieveError(f"table {name} is not complete; run again to resume")
    replace_file(RESULTS / f"{name}.json", json.dumps(trimmed(document), indent=1) + "\n")
    kept.cache_clear()


def write() -> None:
    """Rewrite every page that contains tables."""
    for page in pages():
        before = page.read_text()
        if (after := rendered(before)) != before:
            replace_file(page, after)
            print(f"wrote {page.relative_to(ROOT)}")


def check() -> list[str]:
    """Return the errors in stored results and pages, one per line."""
    wrong = [
        f"{name}: kept is {kept(name)['command']!r}, tables.yaml has another command"
        for name, table in tables().items()
        if (table["pages"] or (RESULTS / f"{name}.json").is_file())
        and shlex.split(kept(name)["command"].removeprefix("reprieve ")) != words_of(name, table["run"][-1])
    ]
    for page in pages():
        text, name = page.read_text(), page.relative_to(ROOT)
        for kind, pattern in (("table", _BLOCK), ("value", _VALUE)):
            if {text.count(f"<!-- {kind}"), text.count(f"<!-- /{kind} -->")} != {len(pattern.findall(text))}:
                wrong.append(f"{name}: a {kind} lacks its opening or its closing marker")
        if rendered(text) != text:
            wrong.append(f"{name} differs from the kept results; `python benchmarks/tables.py write` fixes it")
        loose = [f"{name}: no command made {number!r}" for number in loose_numbers(text)]
        wrong += loose[:_SHOWN_LOOSE]
        if more := loose[_SHOWN_LOOSE:]:
            wrong.append(f"{name}: {len(more)} more numbers without a command")
    for page in sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - set(pages())):
        name = page.relative_to(ROOT)
        sections = unsourced(page.read_text(), measured=name.parts[:2] == ("docs", "measured"))
        wrong += [f"{name}: no command for the numbers under {section[:60]!r}" for section in sections]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "write", "check"))
    parser.add_argument("names", nargs="*", help="tables to run. Default: all that are on a page")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(tables()):
        parser.error(f"names must be among {', '.join(tables())}, got {', '.join(sorted(unknown))}")
    if arguments.names and arguments.action != "run":
        parser.error(f"{arguments.action} takes no names: it covers all pages, got {' '.join(arguments.names)}")
    try:
        if arguments.action == "run":
            run(arguments.names or on_pages())
        if arguments.action != "check":
            write()
        wrong = check()
    except ReprieveError as error:
        sys.exit(f"error: {error}")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(on_pages())} tables and the {len(pages())} pages that show them agree")


if __name__ == "__main__":
    main()
