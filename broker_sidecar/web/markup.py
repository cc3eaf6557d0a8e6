"""HTML and SVG, made of elements. The one place where text becomes markup: whatever is not made here is escaped."""

from html import escape

from seqdedupe.command import printable

_EMPTY = frozenset({"meta", "link", "input"})
"""Elements of HTML that have no end tag."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Content = Markup | str | int | None
"""None is nothing."""


def tag(name: str, /, *content: Content, **attributes: str | int | bool | None) -> Markup:
    """An element. Text is escaped, and what would turn the direction of writing is shown as an escape.

    A trailing underscore of an attribute's name is left out, others are hyphens; None and False leave the attribute
    out, and True gives it no value.
    """
    shown = "".join(
        f" {key.removesuffix('_').replace('_', '-')}" + ("" if value is True else f'="{_text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{shown}>" if name in _EMPTY else f"<{name}{shown}>{joined(*content)}</{name}>")


def joined(*content: Content) -> Markup:
    """One after the other."""
    return Markup("".join(part if isinstance(part, Markup) else _text(part) for part in content if part is not None))


def _text(value: str | int) -> str:
    return escape(printable(str(value)))
