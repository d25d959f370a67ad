"""The report's charts, as plotly figures inlined into the page; plotly's script comes once, with the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kda2.workbench import extras

if TYPE_CHECKING:
    from kda2.workbench.report.render import Row

_INK, _MUTED, _ACCENT, _PALE = "#1c2733", "#7b8794", "#2563eb", "#c7d4ea"
_FONT = {"family": "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 13, "color": _INK}
_SCALE = 3.0


def build(run: dict[str, Any], rows: Sequence[Row], choice: dict[str, Any]) -> dict[str, str]:
    """The charts that the ledger has data for, by name, as HTML."""
    figures = {"ranking": ranking(choice), "margins": margins(rows), "gate": gate(run)}
    io = extras.load("plotly.io", "the report's charts")
    html, script = {}, True
    for name, figure in figures.items():
        if figure is None:
            continue
        config = {"displayModeBar": False, "responsive": True}
        html[name] = io.to_html(figure, full_html=False, include_plotlyjs=script, config=config, div_id=f"chart-{name}")
        script = False
    return html


def ranking(choice: dict[str, Any]) -> Any:
    """Measured or modelled time of each candidate, the chosen one marked. Bars end at `_SCALE` times the fastest, so
    that a slow one does not hide how the others differ."""
    entries = choice.get("ranking")
    if not entries:
        return None
    go = extras.load("plotly.graph_objects", "the report's charts")
    limit = _SCALE * min(e["us"] for e in entries)
    entries = list(reversed(entries))
    colours = [_ACCENT if e["name"] == choice["chosen"] else _PALE for e in entries]
    bar = go.Bar(
        x=[min(e["us"], limit) for e in entries], y=[e["name"] for e in entries], orientation="h",
        marker_color=colours, text=[_time(e, limit) for e in entries], textposition="auto", cliponaxis=False,
        customdata=[e["us"] for e in entries], hovertemplate="%{y}: %{customdata:.2f} us<extra></extra>",
    )  # fmt: skip
    figure = go.Figure(bar)
    kind = "median device time" if choice["label"] == "measured" else "modelled time (ranks, does not tell times)"
    figure.update_xaxes(title=f"{kind}, us", rangemode="tozero", gridcolor="#e8ecf1")
    return _styled(figure, 60 + 34 * len(entries))


def _time(entry: dict[str, Any], limit: float) -> str:
    notes = [f"{entry['us']:,.1f}"]
    if entry["us"] > limit:
        notes.append("off the scale")
    if entry.get("host_paced"):
        notes.append("paced by the host")
    return ", ".join(notes)


def margins(rows: Sequence[Row]) -> Any:
    """The worst error over its limit, candidates down and families across: 1 is the limit."""
    judged = [row for row in rows if row.families]
    if not judged:
        return None
    go = extras.load("plotly.graph_objects", "the report's charts")
    families = list(dict.fromkeys(name for row in judged for name in row.families))
    cells = [[row.families.get(name, {}) for name in families] for row in judged]
    figure = go.Figure(
        go.Heatmap(
            x=[name.replace("_", " ") for name in families],
            y=[row.name for row in judged],
            z=[[_margin(cell) for cell in line] for line in cells],
            text=[[_number(cell) for cell in line] for line in cells],
            customdata=[[_words(cell) for cell in line] for line in cells],
            texttemplate="%{text}", textfont={"size": 11}, hovertemplate="%{y}, %{x}<br>%{customdata}<extra></extra>",
            colorscale=[[0, "#eef6f1"], [0.66, "#8fcfa8"], [0.6667, "#f3b1a8"], [1, "#c0392b"]],
            zmin=0, zmax=1.5, xgap=2, ygap=2, colorbar={"title": "error / limit", "thickness": 10, "outlinewidth": 0},
        )
    )  # fmt: skip
    figure.update_xaxes(tickangle=-40, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _styled(figure, 190 + 34 * len(judged))


def _margin(cell: dict[str, Any]) -> float | None:
    if not cell:
        return None
    return min(cell["margin"], 1.5) if cell["margin"] is not None else 1.5


def _number(cell: dict[str, Any]) -> str:
    if not cell:
        return ""
    return f"{cell['margin']:.2f}" if cell["margin"] is not None else "fail"


def _words(cell: dict[str, Any]) -> str:
    """The sentences of each quantity, broken for a tooltip."""
    says = [q["says"].replace("; ", "<br>&nbsp;&nbsp;") for q in cell.get("quantities", {}).values()]
    return "<br>".join(says)


def gate(run: dict[str, Any]) -> Any:
    """How long channels remember: the share of (token, channel) pairs by half-life."""
    histogram = run.get("capture", {}).get("regime", {}).get("histogram")
    if not histogram:
        return None
    go = extras.load("plotly.graph_objects", "the report's charts")
    edges, counts = histogram["log10_of_minus_log_decay"], histogram["count"]
    half_life = [math.log10(math.log(2)) - (a + b) / 2 for a, b in pairwise(edges)]
    total = sum(counts)
    figure = go.Figure(
        go.Bar(
            x=half_life, y=[100 * c / total for c in counts], marker_color=_ACCENT, width=edges[1] - edges[0],
            customdata=[10**h for h in half_life], hovertemplate="%{customdata:.3g} tokens: %{y:.1f} %<extra></extra>",
        )
    )  # fmt: skip
    low, high = math.floor(min(half_life)), math.ceil(max(half_life))
    ticks = list(range(low, high + 1))
    figure.update_xaxes(title="half-life, tokens", tickvals=ticks, ticktext=[f"{10.0**t:g}" for t in ticks])
    figure.update_yaxes(title="% of all decays", gridcolor="#e8ecf1")
    figure.update_layout(bargap=0.04)
    return _styled(figure, 280)


def _styled(figure: Any, height: int) -> Any:
    figure.update_layout(
        height=height, font=_FONT, margin={"l": 10, "r": 30, "t": 10, "b": 10}, showlegend=False,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"align": "left", "bgcolor": "white", "font": {"color": _INK}},
    )  # fmt: skip
    figure.update_xaxes(automargin=True, zeroline=False, linecolor=_MUTED)
    figure.update_yaxes(automargin=True, zeroline=False)
    return figure
