"""Parts of the docs that are made from the code and from the README.

mkdocs fills in `<!-- readme -->`, `<!-- security -->` and `<!-- commands -->`. `python docs/hooks.py` writes the tables
between `<!-- rules -->`, `<!-- origins -->`, `<!-- verbs -->` and their end markers. Those are committed, so that they
can be read without the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_config(config: Any) -> Any:
    """Every page of a rule stands under "Rules", by name."""
    pages = sorted(path.name for path in (ROOT / "docs" / "rules").glob("*.md") if path.name != "index.md")
    for entry in config["nav"]:
        if isinstance(entry, dict) and "Rules" in entry:
            entry["Rules"] = ["rules/index.md", *(f"rules/{name}" for name in pages)]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what only the site shows."""
    made = {"readme": _readme, "security": _security, "commands": _commands}
    return re.sub(rf"^<!-- ({'|'.join(made)}) -->$", lambda found: made[found[1]](), markdown, flags=re.M)


def with_tables(markdown: str) -> str:
    """A page with its committed tables made anew."""
    made = {"rules": _rules, "origins": _origins, "verbs": _verbs}
    marked = re.compile(rf"^(<!-- ({'|'.join(made)}) -->\n).*?^(<!-- /\2 -->)$", re.M | re.S)
    return marked.sub(lambda found: f"{found[1]}{made[found[2]]()}\n{found[3]}", markdown)


def _readme() -> str:
    """The README, with its links as they are from the site's first page; files that are not on the site lose theirs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing/index.md)")
    text = text.replace("](SECURITY.md)", "](reference/security.md)")
    return re.sub(r"\[(\w+)\]\(\1\)", r"\1", text)


def _security() -> str:
    return (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def _rules() -> str:
    from reprieve.rules import RULES

    rows = ["| rule | what it does | dial |", "| --- | --- | --- |"]
    for kind in RULES:
        dial = f"`{kind.own_dial.name}`" if kind.own_dial else "none"
        rows.append(f"| [`{kind.name}`]({kind.name}.md) | {_summary(kind)} | {dial} |")
    return "\n".join(rows)


def _origins() -> str:
    from reprieve.rules import RULES

    rows = ["| rule | paper or origin | file |", "| --- | --- | --- |"]
    for kind in RULES:
        file = "/".join(kind.__module__.split(".")[1:]) + ".py"
        rows.append(f"| [`{kind.name}`](../rules/{kind.name}.md) | {kind.origin} | `{file}` |")
    return "\n".join(rows)


def _verbs() -> str:
    from reprieve.cli.main import COMMANDS

    rows = ["| command | what it does |", "| --- | --- |"]
    return "\n".join(rows + [f"| `{name}` | {text} |" for name, (_, text) in COMMANDS.items()])


def _commands() -> str:
    """Every command's help, as it prints it."""
    from reprieve.cli.flags import parser_of
    from reprieve.cli.main import COMMANDS, command_of

    parts = []
    for name in COMMANDS:
        text = parser_of(command_of(name), prog=f"reprieve {name}").format_help()
        parts.append(f"## `reprieve {name}`\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(parts)


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")


if __name__ == "__main__":
    for path in (ROOT / "docs").rglob("*.md"):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
