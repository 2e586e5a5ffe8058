"""The package's description: the README as it reads away from the repository.

Links to files lead to the `Source` of [project.urls]. While there is none, as long as the repository has no public
address, they become paths, which the source archive has, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]]|`[^`]*`)*)\]\(([^)\s]+)\)")


class Metadata(MetadataHookInterface):
    """Sets `readme`."""

    def update(self, metadata: dict) -> None:
        address = metadata.get("urls", {}).get("Source", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text, address)}


def description(readme: str, address: str = "") -> str:
    """`readme` without relative links: absolute ones below `address`, or the paths alone."""

    def pointed(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        if address:
            return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/main/{target})"
        path = target.partition("#")[0]
        return "" if picture else f"{text} (`{path}`)" if text.strip("`") != path else text

    return LINK.sub(pointed, readme)
