"""Readable labelled problems: in the terminal and as HTML, after AutoJudge's Figure 2."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from reprieve.mining.records import Mismatch, ProblemLabels

_STYLES = {True: "bold red", False: "green", None: "yellow"}
_CLASSES = {True: "important", False: "harmless", None: "unlabelled"}
_CONTINUATION = 60  # maximum number of characters shown


@dataclass(frozen=True)
class LabelPiece:
    """One token of the final response and, at a mismatch, the other model's token and its outcome."""

    text: str
    mismatch: Mismatch | None = None
    alternative: str = ""
    continuation: str = ""


def pieces_of(problem: ProblemLabels, tokenizer: Any) -> list[LabelPiece]:
    """Return the response token by token."""
    by_position = {mismatch.position: mismatch for mismatch in problem.mismatches}
    pieces, before = [], ""
    for position, token_id in enumerate(problem.response_ids):
        upto = tokenizer.decode(problem.response_ids[: position + 1])  # a character can span several tokens
        text, before = upto[len(before) :], upto
        mismatch = by_position.get(position)
        if mismatch is None:
            pieces.append(LabelPiece(text))
            continue
        other = mismatch.target_id if token_id == mismatch.draft_id else mismatch.draft_id
        continuation = tokenizer.decode(list(mismatch.continuation_ids), skip_special_tokens=True)
        pieces.append(LabelPiece(text, mismatch, tokenizer.decode([other]), continuation))
    return pieces


def terminal_text(problem: ProblemLabels, tokenizer: Any) -> Text:
    """Return text with important tokens red, unimportant ones green, the other token in brackets, then all outcomes."""
    shown = Text()
    shown.append(f"{problem.problem_id} ({problem.status})\n", style="bold")
    shown.append(tokenizer.decode(list(problem.prompt_ids)), style="dim")
    swaps = Text()
    for piece in pieces_of(problem, tokenizer):
        if piece.mismatch is None:
            shown.append(piece.text)
            continue
        style = _STYLES[piece.mismatch.important]
        shown.append(piece.text, style=style)
        shown.append(f"[{piece.alternative.strip() or repr(piece.alternative)}]", style="dim")
        swaps.append(f"\n{piece.mismatch.position:>4} ", style="dim")
        swaps.append_text(_swap_line(piece, tokenizer, style))
    return shown + Text("\n") + swaps


def _swap_line(piece: LabelPiece, tokenizer: Any, style: str) -> Text:
    """Return a line with the draft's token, the target's token and the target's continuation."""
    mismatch = piece.mismatch
    assert mismatch is not None
    line = Text()
    target_text, draft_text = (
        tokenizer.decode([token_id]).strip() for token_id in (mismatch.target_id, mismatch.draft_id)
    )
    line.append(f"{target_text!r} -> {draft_text!r} ", style=style)
    line.append(f"...{_shortened(piece.continuation)} ", style="dim")
    line.append(outcome(mismatch), style=style)
    return line


def outcome(mismatch: Mismatch) -> str:
    """Return the outcome of trying the token, in a word or two."""
    mark = {True: "✗", False: "✓", None: "?"}[mismatch.important]
    if mismatch.base_utility is not None:
        mark += f" {mismatch.candidate_utility:.2f} of {mismatch.base_utility:.2f}"
    elif mismatch.answer is not None:
        mark += f" {mismatch.answer[:40]}"
    return f"{mark} ({mismatch.reason})" if mismatch.reason else mark


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CONTINUATION else line[: _CONTINUATION // 2] + " ... " + line[-_CONTINUATION // 2 :]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
.response {{ white-space: pre-wrap; }}
.prompt, .other {{ color: #777; }}
.important {{ background: #fbd5d5; }} .harmless {{ background: #d4f0d8; }} .unlabelled {{ background: #faeec2; }}
summary {{ cursor: pointer; }}
</style></head><body>
<p>Tokens where draft and target differ: <span class="important">important</span>,
<span class="harmless">unimportant</span>, <span class="unlabelled">undecided</span>; the other model's token
in [brackets]. Hover over one to see the continuation after the swap.</p>
{body}</body></html>
"""


def html_page(problems: Sequence[ProblemLabels], tokenizer: Any, *, title: str) -> str:
    """Return one page with every problem."""
    return _PAGE.format(title=html.escape(title), body="\n".join(_section(p, tokenizer) for p in problems))


def _section(problem: ProblemLabels, tokenizer: Any) -> str:
    prompt = html.escape(tokenizer.decode(list(problem.prompt_ids)))
    body = "".join(map(_span, pieces_of(problem, tokenizer)))
    return (
        f"<h2>{html.escape(problem.problem_id)}</h2>\n"
        f'<div class="response"><span class="prompt">{prompt}</span>{body}</div>\n'
    )


def _span(piece: LabelPiece) -> str:
    if piece.mismatch is None:
        return html.escape(piece.text)
    note = html.escape(f"...{_shortened(piece.continuation)} {outcome(piece.mismatch)}", quote=True)
    return (
        f'<span class="{_CLASSES[piece.mismatch.important]}" title="{note}">{html.escape(piece.text)}</span>'
        f'<span class="other">[{html.escape(piece.alternative.strip())}]</span>'
    )
