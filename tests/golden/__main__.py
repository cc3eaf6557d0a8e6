"""`python -m tests.golden` writes the golden files again. `git diff` then shows which texts have changed."""

from tests.golden.files import FOLDER, NAMES, content

for name in NAMES:
    (FOLDER / name).write_text(content(name))
