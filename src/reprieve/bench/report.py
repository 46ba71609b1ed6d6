"""Self-contained HTML report of runs and certificates: all that is needed to check a number, and no network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reprieve.bench import figures
from reprieve.bench.arms import LOSSLESS
from reprieve.bench.records import ProblemRecord, read_answers
from reprieve.bench.results import ArmResults, Results
from reprieve.bench.summary import Rows, common_rows
from reprieve.errors import ReprieveError
from reprieve.files import read_json, replace_file
from reprieve.heads.certificates import Certificate, pathless_spec
from reprieve.rules import parse_rule

_NUM_EXAMPLES = 4  # answers shown side by side, of each run


def write_report(folders: Sequence[Path], path: Path, *, title: str = "") -> Path:
    """Write the page; returns its path.

    Raises:
        ReprieveError: a folder that holds neither a run nor certificates, or a file that cannot be read.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ReprieveError(f"a report needs different folders, got {', '.join(map(str, folders))}")
    runs: list[dict[str, Any]] = []
    certificates: list[Certificate] = []
    judged: list[dict[str, Any]] = []
    for folder in folders:
        results = Results.read(folder)
        runs += [] if results is None else [_run_view(results, read_answers(folder))]
        its_certificates = _certificates_in(folder)
        certificates += its_certificates
        if (folder / "judged.json").is_file():
            judged.append(read_json(folder / "judged.json", "the verdicts"))
            if not isinstance(judged[-1], dict) or judged[-1].get("schema") != 1:
                raise ReprieveError(f"{str(folder / 'judged.json')!r} must be an object of schema 1")
        if results is None and not its_certificates:
            raise ReprieveError(f"{str(folder)!r} holds neither a run (results.json) nor a certificate")
    if not folders:
        raise ReprieveError("a report needs at least one folder of a run or of certificates")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(percent=_percent, signed=_signed, number=_number, interval=_interval)
    template = environment.from_string((resources.files("reprieve.bench") / "report.html.j2").read_text())
    page = template.render(
        title=title or "Relaxed verification, measured",
        runs=runs,
        certificates=[(pathless_spec(parse_rule(certificate.rule)), certificate) for certificate in certificates],
        judged=judged,
    )
    replace_file(path, page)
    return path


def _certificates_in(folder: Path) -> list[Certificate]:
    found = []
    for path in sorted(folder.glob("*.json")):
        values = read_json(path, "the file")
        if isinstance(values, dict) and str(values.get("kind", "")).endswith("certificate"):
            found.append(Certificate.load(path))
    return found


def _run_view(results: Results, records: list[ProblemRecord]) -> dict[str, Any]:
    arms, load, names = results.arms, results.throughput, _names(results.arms)
    rows = common_rows([arm.spec for arm in arms], records, results.config.num_trials)
    strict = next((arm.spec for arm in arms if arm.rule == LOSSLESS), None)
    return {
        "results": results,
        "config": results.config,
        "frontier": _drawn(figures.frontier(results)) if results.graded else None,
        "load": _drawn(figures.throughput(load, names)) if load else None,
        "examples": _examples(arms, rows, strict) if strict else [],
    }


def _drawn(figure: Any) -> Markup:
    return Markup(figures.as_svg(figure))


def _names(arms: list[ArmResults]) -> dict[str, str]:
    """Names of arms by label: without the paths of heads, unless only those tell two arms apart."""
    short = [arm.short for arm in arms]
    return {arm.spec: arm.short if short.count(arm.short) == 1 else arm.spec for arm in arms}


def _examples(arms: list[ArmResults], rows: Rows, strict: str) -> list[dict[str, Any]]:
    """Choose answers that lossless solved: right ones with the most rescues, then wrong ones with the fewest."""
    kept: list[tuple[str, ProblemRecord, ProblemRecord]] = []
    regressed: list[tuple[str, ProblemRecord, ProblemRecord]] = []
    for arm in arms:
        if not arm.num_rescued or arm.spec == strict:
            continue
        for relaxed, lossless in zip(rows[arm.spec], rows[strict], strict=True):
            if relaxed[0].num_rescued and lossless[0].correct:
                (kept if relaxed[0].correct else regressed).append((arm.short, lossless[0], relaxed[0]))
    kept.sort(key=lambda item: (-item[2].num_rescued, item[2].problem_id))
    regressed.sort(key=lambda item: (item[2].num_rescued, item[2].problem_id))
    chosen: list[tuple[str, ProblemRecord, ProblemRecord]] = []
    for pool in (kept, regressed):
        seen: set[str] = set()
        for item in pool:  # one example an arm, so that one lenient arm does not fill the list
            if item[0] not in seen and len(seen) < _NUM_EXAMPLES // 2:
                seen.add(item[0])
                chosen.append(item)
    return [
        {
            "arm": name,
            "problem_id": relaxed.problem_id,
            "answers": [("lossless", lossless, _pieces(lossless)), (name, relaxed, _pieces(relaxed))],
        }
        for name, lossless, relaxed in chosen[:_NUM_EXAMPLES]
    ]


def _pieces(record: ProblemRecord) -> list[tuple[str, str]]:
    """The answer's text cut by provenance: text and code."""
    pieces, at = [], 0
    for length, code in record.spans:
        pieces.append((record.text[at : at + length], code))
        at += length
    if at < len(record.text):
        pieces.append((record.text[at:], "t"))
    return pieces


def _percent(value: float | None, digits: int = 1) -> str:
    return "\u2013" if value is None else f"{100 * value:.{digits}f}%"


def _signed(value: float | None, scale: float = 100, digits: int = 1) -> str:
    return "\u2013" if value is None else f"{scale * value:+.{digits}f}".replace("-", "\u2212")


def _number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "\u2013" if value is None else f"{value:.{digits}f}{suffix}"


def _interval(bounds: Sequence[float] | None, scale: float = 1, digits: int = 1) -> str:
    if bounds is None:
        return ""
    return "[" + ", ".join(f"{scale * bound:.{digits}f}".replace("-", "\u2212") for bound in bounds) + "]"
