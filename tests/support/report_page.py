"""Reading a report's page: its text, its tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser


def markup(page: str) -> str:
    """The page without its scripts."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def words(page: str) -> str:
    """The page's text, every run of spaces one."""
    text = re.sub(r"<style.*?</style>|<[^>]+>", " ", markup(page), flags=re.DOTALL)
    return " ".join(text.replace("&#39;", "'").replace("&times;", "x").split())


class Tables(HTMLParser):
    """The tables of a page: per table the classes of each row and its cells (data-sort or None, text)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[tuple[str, list[tuple[str | None, str]]]]] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append((dict(attrs).get("class") or "", []))
        elif tag in ("td", "th"):
            self.tables[-1][-1][1].append((dict(attrs).get("data-sort"), ""))
            self._inside = True

            self._wide = int(dict(attrs).get("colspan") or 1)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._inside = False
            self.tables[-1][-1][1].extend([(None, "")] * (self._wide - 1))

    def handle_data(self, data: str) -> None:
        if self._inside:
            sort, text = self.tables[-1][-1][1].pop()
            text = " ".join(f"{text} {data}".split()).replace("\N{MULTIPLICATION SIGN}", "x")
            self.tables[-1][-1][1].append((sort, text))


def table(page: str, *heads: str) -> list[tuple[str, dict[str, tuple[str | None, str]]]]:
    """The rows of the first table that has these heads: their class, and their cells by head."""
    for rows in Tables(page).tables:
        names = [text for _, text in rows[0][1]]
        if set(heads) <= set(names):
            return [(kind, dict(zip(names, cells, strict=True))) for kind, cells in rows[1:]]
    raise AssertionError(f"no table has {heads}")
