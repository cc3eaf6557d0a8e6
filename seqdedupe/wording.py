"""Counts in texts for people."""


def counted(count: int, one: str, many: str = "") -> str:
    """Return the count with its noun, such as "1 topic" or "1,024 topics". `many` is needed if the plural is not `one`
    with an s, or if a verb follows: `counted(n, "message is", "messages are")`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
