"""Text whose pieces carry the provenance of their tokens, for terminals, notebooks and plain files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Piece = tuple[str, str]  # text, and the provenance of its token: "target", "matched" or "rescued"
STYLES = {"target": "default", "matched": "green", "rescued": "bold yellow"}  # rich's
_HTML = {"matched": "background:#cdeccf", "rescued": "background:#ffd24d;text-decoration:underline"}
LEGEND = "plain: the target's token; green: drafted, matched; yellow: drafted, rescued"


def print_pieces(pieces: Sequence[Piece], summary: str) -> None:
    """Print a text and a summary: coloured on a terminal, elsewhere with each rescued token in double brackets."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if console.is_terminal and not console.no_color:
        text = Text.assemble(*((piece, STYLES[kind]) for piece, kind in pieces))
        legend = LEGEND
    else:
        text = Text("".join(f"[[{piece}]]" if kind == "rescued" and piece else piece for piece, kind in pieces))
        legend = "[[double brackets]]: drafted, rescued"
    console.print(text, soft_wrap=True)
    console.print(f"{summary}\n{legend}", soft_wrap=True, markup=False)


def html_of(pieces: Sequence[Piece], summary: str) -> str:
    """HTML of a text with matched tokens green and rescued tokens yellow and underlined; the text is escaped."""
    marked = "".join(
        f'<span style="{_HTML[kind]};color:#1d2129" title="{kind}">{escape(piece)}</span>'
        if kind in _HTML and piece
        else escape(piece)
        for piece, kind in pieces
    )
    return (
        f'<div style="white-space:pre-wrap">{marked}</div><small>{escape(summary)}. '
        '<span style="background:#cdeccf;color:#1d2129">drafted, matched</span> '
        '<span style="background:#ffd24d;color:#1d2129;text-decoration:underline">drafted, rescued</span></small>'
    )
