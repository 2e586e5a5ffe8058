"""What mkdocs adds to the pages of this folder: the API reference, the benchmarks, and the navigation.

Pages are found, not listed: a guide that is not named in GUIDES comes at the end of its section. Links to files of the
repository that are not part of the site become their paths.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

from tilesmith.validate import api_pages

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GUIDES = {
    "Train": (
        "order-of-calls", "huggingface-trainer", "trl", "peft", "accelerate", "fsdp2", "torch-compile", "cuda-graphs",
        "integrations",
    ),
    "Understand": ("choosing-a-kernel", "memory", "profiling", "troubleshooting", "generation"),
    "Go further": (
        "long-context", "fp8-training", "adaptive-precision", "sparse-attention", "experts", "fusion", "hardware",
        "portable-kernels",
    ),
}  # fmt: skip
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/tour.ipynb": "tour.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "examples/webgpu/README.md": "examples/webgpu.md",
}
"""Files beside this folder -> their pages."""


def on_files(files, config):
    """Add the pages that are made and those that lie beside this folder, with the pictures they show."""
    for page in api_pages.pages():
        files.append(File.generated(config, f"api/{page.name}.md", content=page.text))
    for path, name in OUTSIDE.items():
        if path.endswith(".md") and (ROOT / path).exists():
            files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "tour.md", content=_notebook(ROOT / "examples" / "tour.ipynb")))
    for picture in sorted((ROOT / "benchmarks" / "plots").rglob("*.svg")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    config["nav"] = _navigation({file.src_uri for file in files if file.src_uri.endswith(".md")})
    return files


def _notebook(path: Path) -> str:
    """The text and the code of a notebook; what they show is for whoever runs it."""
    parts = [f"<!-- {path.name} -->"]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(parts) + "\n"


def _navigation(pages: set[str]) -> list:
    left = set(pages)

    def take(*names: str) -> list[str]:
        found = [name for name in names if name in left]
        left.difference_update(found)
        return found

    def below(folder: str, first: tuple[str, ...] = ()) -> list[str]:
        return take(*first, *sorted(name for name in left if posixpath.dirname(name) == folder))

    guides: list = []
    for title, names in GUIDES.items():
        guides.append({title: take(*(f"guides/{name}.md" for name in names))})
    guides[-1]["Go further"] += below("guides")
    start = [
        *take("index.md", "quickstart.md", "tour.md"),
        {"Overview": "overview.md"},
        *take("models.md", "faq.md", "terms.md"),
    ]
    left.discard("overview.md")
    reference = [
        {page: take(f"api/{name}.md")[0]} for page, name in api_pages.PACKAGES.items() if f"api/{name}.md" in left
    ]
    measured = below("benchmarks", ("benchmarks/index.md",)) + take(
        "seeds.md", "context-parallel-model.md", "tuning.md"
    )
    inside = [
        *take("architecture.md", "contributing.md", "names.md"),
        {"Decisions": below("adr")},
        {"Portable kernels": below("kernels", ("kernels/README.md",))},
        {"What was tried": below("log")},
    ]
    rest = [*take("changelog.md"), *sorted(left)]
    return [
        {"Start": start},
        {"Guides": guides},
        {"Reference": reference},
        {"Measured": measured},
        {"Inside": [*inside, {"More": rest}]},
    ]


def on_page_markdown(markdown, page, config, files):
    """Point links from where a page lies in the repository to where it lies in the site."""
    outside = {name: path for path, name in OUTSIDE.items()}
    here = outside.get(page.file.src_uri) or f"docs/{page.file.src_uri}"
    if page.file.src_uri.startswith(("api/", "tour.")):
        return markdown
    known = {file.src_uri for file in files}

    def pointed(match: re.Match) -> str:
        text, target = match[1], match[2]
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        path, _, anchor = target.partition("#")
        return _link(text, posixpath.normpath(posixpath.join(posixpath.dirname(here), path)), anchor, page, known)

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if p.startswith("```") else re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", pointed, p) for p in parts)


def _link(text: str, path: str, anchor: str, page, known: set[str]) -> str:
    """A link from `page` to a file of the repository, or its text and path where the site does not have it."""
    folder = path.removeprefix("docs/")
    candidates = [OUTSIDE.get(path), folder, path, f"{folder}/README.md", f"{folder}/index.md"]
    found = next((name for name in candidates if name and name in known), None)
    if found is None:
        pages = sorted(name for name in known if posixpath.dirname(name) == folder and name.endswith(".md"))
        found = pages[0] if pages else None
    if found is None:
        return f"{text[1:-1]} (`{path}`)" if not text.startswith("!") else ""
    relative = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
    return f"{text}({relative}{'#' + anchor if anchor else ''})"
