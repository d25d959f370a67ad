"""`kda2 doctor`: what this machine can do."""

from __future__ import annotations

import json

from rich.markup import escape
from rich.table import Table

from kda2.cli.common import Json, command, out
from kda2.workbench import doctor as findings


@command
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which implementations run here, and which platforms are supported how."""
    found = findings.examine()
    if as_json:
        print(json.dumps(found))
        return
    for title, facts in found.items():
        table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name, value in facts.items():
            table.add_row(f"[bold]{escape(name)}[/bold]", escape(str(value)))
        out.print(table)
        out.print()
