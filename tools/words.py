"""Count what makes prose hard to read, per 10,000 words: in comments, docstrings, messages and pages.

    python -m tools.words [--list] [PATH ...]

With `--list` each occurrence is printed with its place. A count is a place to look, not a verdict. Code blocks, block
quotes, and quotations of old texts (`*was* "…"`) do not count.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_SENTENCE_WORDS = 40
MAX_CELL_WORDS = 25
"""Of a cell in a table."""

LONG_SENTENCE = f"sentence over {MAX_SENTENCE_WORDS} words"
LONG_CELL = f"table cell over {MAX_CELL_WORDS} words"
PHRASES = {
    "so many / so long / so often / so much": r"(?i)\bso (many|long|often|much)\b(?! (that|as)\b)",
    "whoever / whatever / whichever": r"(?i)\b(who|what|which)ever\b",
    "is told / are told": r"(?i)\b(is|are|was|were|be|been) told\b",
    "left out": r"(?i)\bleft out\b",
    "anew": r"(?i)\banew\b",
    "lets go of / let go": r"(?i)\blet(s|ting)? go\b",
    "gives back / given away": r"(?i)\bg(ives?|ave|iven) (back|away)\b",
    "of its own / of one's own": r"(?i)\bof (one's|its|their) own\b",
    "sentence that begins with Of": r"(?:(?<=[.!?] )|^\s*(?:#|\"\"\"|[-*])?\s*)Of (?!course)",
    "beside": r"(?i)\bbeside\b",
}
SUFFIXES = {".md", ".proto", ".py", ".toml", ".yaml", ".yml"}
_GENERATED = re.compile(r"_pb2|\.lock$|seqdedupe/v1/.*\.pyi?$")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"^ *>.*$|\*was\* \"[^\"]*\"", re.MULTILINE)
_ITEM = re.compile(r"^ *(?:[-*+]|\d+\.) ")


class Finding(NamedTuple):
    """What was found, in which line, and the text there."""

    line: int
    what: str
    text: str


def findings(text: str, *, is_page: bool) -> Iterator[Finding]:
    """Yield all that counts in a file. Only pages have sentences and tables."""
    text = _blanked(_QUOTED, _blanked(_FENCED, text) if is_page else text)
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in PHRASES.items():
            yield from (Finding(number, what, line.strip()) for _ in re.finditer(pattern, line))
        if is_page:
            cells = re.split(r"(?<!\\)\|", line.strip())[1:-1] if line.startswith("|") else ()
            yield from (Finding(number, LONG_CELL, c.strip()) for c in cells if len(c.split()) > MAX_CELL_WORDS)
    if is_page:
        for number, sentence in _sentences(text):
            if len(sentence.split()) > MAX_SENTENCE_WORDS:
                yield Finding(number, LONG_SENTENCE, sentence)


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    """The text without what fits, in as many lines."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


def _sentences(page: str) -> Iterator[tuple[int, str]]:
    """Each sentence with its first line. An item of a list ends one, as an empty line, a heading and a table do."""
    begun, words = 0, ""
    for number, line in enumerate([*page.splitlines(), ""], 1):
        is_prose = line.strip() != "" and not line.startswith(("|", "#"))
        if words and (not is_prose or _ITEM.match(line)):
            yield begun, words
            words = ""
        if is_prose:
            begun, words = (begun, f"{words} {line.strip()}") if words else (number, _ITEM.sub("", line).strip())
            *ended, words = re.split(r"(?<=[.!?:]) +(?=\S)", words)
            yield from ((begun, sentence) for sentence in ended)
            begun = number if ended else begun


def main(arguments: list[str]) -> None:
    wanted = [argument for argument in arguments if not argument.startswith("--")]
    listed = subprocess.check_output(["git", "ls-files", *wanted], text=True)
    files = [
        Path(name) for name in listed.splitlines() if Path(name).suffix in SUFFIXES and not _GENERATED.search(name)
    ]
    words, counts = 0, Counter[str]()
    for path in filter(Path.is_file, files):
        text = path.read_text(errors="replace")
        words += len(re.findall(r"[A-Za-z']+", text))
        for found in findings(text, is_page=path.suffix == ".md"):
            counts[found.what] += 1
            if "--list" in arguments:
                print(f"{path}:{found.line}: {found.what}: {found.text[:140]}")
    print(f"{len(files)} files, {words} words; per 10,000 words:")
    for what in (*PHRASES, LONG_SENTENCE, LONG_CELL):
        print(f"{10_000 * counts[what] / max(1, words):7.2f}  {what} ({counts[what]})")


if __name__ == "__main__":
    main(sys.argv[1:])
