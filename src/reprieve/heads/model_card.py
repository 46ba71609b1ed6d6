"""Model card of a head: purpose, certificates, training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_CARD = """---
library_name: reprieve
tags:
- reprieve
- speculative-decoding
- {kind}
{base_model}---

{promises}

# {title}

{purpose}

| | |
| --- | --- |
{facts}

```
pip install reprieve
reprieve bench --target {target} --draft {draft_or_yours} --arm {use}
```

Reprieve refuses to use it with weights or a tokenizer other than those it was made for. On another task, measure the
loss of accuracy first.
"""


def model_card(
    *,
    kind: str,
    purpose: str,
    target: str,
    draft: str | None,
    facts: Mapping[str, str],
    certificates: Sequence[str],
    use: str | None = None,
) -> str:
    """Return the card as Markdown, with the certified statements first.

    Args:
        draft: None if its weights do not matter.
        facts: rows of the card's table, by heading.
        certificates: contents of the certificate files.
        use: `--arm` of the example; None for the rule named after the head's kind.
    """
    rows = {"target": target, **({"draft": draft} if draft else {}), **facts}
    statements = [f"> **Certified.** {json.loads(text)['statement']}" for text in certificates]
    return _CARD.format(
        kind=kind,
        use=use or f"{kind}:path=THIS",
        title=f"{kind} head for {target}",
        purpose=purpose,
        target=target,
        draft_or_yours=draft or "DRAFT",
        base_model=f"base_model: {target}\n" if target.count("/") == 1 and not target.startswith((".", "/")) else "",
        promises="\n>\n".join(statements) or "> **Not certified.** `reprieve certify` bounds what it costs.",
        facts="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )
