"""Build hook: PyPI's page and links, from the README and the repository that the package is built in."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def page_of(readme: str, repository: str) -> str:
    """Return the README with absolute links; without a repository to link to, links become their text.

    Args:
        readme: Markdown with links relative to the repository's root.
        repository: address of the repository on GitHub, or empty.
    """
    relative = r"\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)"
    if not repository:
        return re.sub(relative, r"\1", re.sub("!" + relative, "", readme))
    readme = re.sub("!" + relative, rf"![\1]({repository}/raw/main/\2)", readme)
    return re.sub(r"(?<!!)" + relative, rf"[\1]({repository}/blob/main/\2)", readme)


class CustomMetadataHook(MetadataHookInterface):
    """Fill in the description and, where GITHUB_REPOSITORY names a repository (as its workflows do), the URLs."""

    def update(self, metadata: dict) -> None:
        name = os.environ.get("GITHUB_REPOSITORY", "")
        repository = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else ""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": page_of(readme, repository)}
        metadata["urls"] = (
            {
                "Homepage": repository,
                "Documentation": f"{repository}/tree/main/docs",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
            if repository
            else {}
        )
