"""Hooks of MkDocs (`mkdocs.yml`): pages are written for a checkout, and the site has only what is in `docs/`."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^]\n]+)\]\(((?:\.\./)+[^)\s]+)\)")
_FENCE = re.compile(r"^(```[\w-]+) [a-z]+$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Take the order and the titles of pages from `docs/index.md`, which lists all of them by their kind."""
    sections = re.split(r"^## ", (Path(config["docs_dir"]) / "index.md").read_text(), flags=re.MULTILINE)[1:]
    listed = [
        (part.partition("\n")[0], re.findall(r"^- \[([^]]+)\]\(([^)]+)\)", part, re.MULTILINE)) for part in sections
    ]
    config["nav"] = [
        {"All pages": "index.md"},
        *({kind: [{title: path} for title, path in pages]} for kind, pages in listed),
    ]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the files that a page links to outside of `docs/`, and drop the marks of blocks that tests do not run."""
    folder = PurePosixPath(page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = normpath((folder / link[2]).as_posix())
        if not target.startswith("../"):
            return link[0]
        path = target.removeprefix("../")
        return f"`{path}`" if link[1].strip("`") in path else f"{link[1]} (`{path}`)"

    return _FENCE.sub(r"\1", _LINK.sub(named, markdown))
