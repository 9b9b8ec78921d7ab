"""Reading pages: their text, their tags, and that they need nothing but themselves."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """`text` between the tags; `tags` with their attributes. AssertionError for a tag that closes none."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.tags, self.open = "", list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    @property
    def references(self) -> set[str]:
        """What the page points to, except places in itself."""
        found = {attributes.get(name) for _, attributes in self.tags for name in ("href", "src", "xlink:href", "data")}
        return {address for address in found if address and not address.startswith(("#", "data:"))}
