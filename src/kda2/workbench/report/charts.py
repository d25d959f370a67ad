"""The report's charts, as plotly figures inlined into the page, which holds plotly's script once."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kda2.workbench import extras

if TYPE_CHECKING:
    from kda2.workbench.growth import Growth
    from kda2.workbench.report.story import Row, Story

INK, MUTED, ACCENT, PALE, GRID = "#1c2733", "#7b8794", "#2563eb", "#c7d4ea", "#e8ecf1"
_FLOOR = "#0f766e"
_LINES = (ACCENT, "#d97706", _FLOOR, "#be185d", "#6d28d9", "#65a30d", INK, MUTED)
_FONT = {"family": "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 13, "color": INK}
_SCALE = 3.0
# Candidates that the ranking shows; the table has them all.
RANKED = 15
# Rows up to which a chart of all candidates is not set tightly.
_ROOMY = 12
_LABEL = 44
_BAR = {"title": {"text": "error / limit", "font": {"size": 12}}, "thickness": 10, "outlinewidth": 0}
_PURPOSE = "the report's charts"


def build(story: Story) -> dict[str, str]:
    """The charts that the ledger has data for, by name, as HTML without plotly's script."""
    rows = list(story.rows.values())
    figures = {
        "ranking": ranking(story.choice), **_of_plan(story), "stages": stage_times(story),
        "rounds": rounds(story.rounds), "margins": margins(rows), "gate": gate(story.run),
        "growth": growth(story.curves),
    }  # fmt: skip
    io = extras.load("plotly.io", _PURPOSE)
    config = {"displayModeBar": False, "responsive": True}
    return {
        name: io.to_html(figure, full_html=False, include_plotlyjs=False, config=config, div_id=f"chart-{name}")
        for name, figure in figures.items()
        if figure is not None
    }


def script() -> str:
    """Plotly's script."""
    text: str = extras.load("plotly.offline", _PURPOSE).get_plotlyjs()
    return text


def _of_plan(story: Story) -> dict[str, Any]:
    """The planner's own figures of the ledger's plan."""
    from kda2.workbench.planner.figures import figures  # which draws in this module's style

    return {} if story.book is None else {f"plan-{name}": figure for name, figure in figures(story.book).items()}


def plain(text: str) -> str:
    """Text that plotly shows as it is, not as its markup."""
    return html.escape(text, quote=False)


def wrapped(name: str) -> str:
    """A long name over several lines."""
    return "<br>".join(plain(part) for part in textwrap.wrap(name, _LABEL, break_on_hyphens=False)) or plain(name)


def ranking(choice: dict[str, Any]) -> Any:
    """Measured or modelled time of the first candidates, the chosen one marked. Bars end at `_SCALE` times the fastest,
    so that a slow one does not hide how the others differ."""
    entries = choice.get("ranking")
    if not entries:
        return None
    go = extras.load("plotly.graph_objects", _PURPOSE)
    limit = _SCALE * min(e["us"] for e in entries)
    entries = [e for i, e in enumerate(entries) if i < RANKED or e["name"] == choice["chosen"]][::-1]
    bar = go.Bar(
        x=[min(e["us"], limit) for e in entries], y=[wrapped(e["name"]) for e in entries], orientation="h",
        marker_color=[ACCENT if e["name"] == choice["chosen"] else PALE for e in entries],
        text=[_time(e, limit) for e in entries], textposition="auto", cliponaxis=False,
        customdata=[e["us"] for e in entries], hovertemplate="%{y}: %{customdata:.2f} us<extra></extra>",
    )  # fmt: skip
    figure = go.Figure(bar)
    kind = "median device time" if choice["label"] == "measured" else "modelled time (ranks, does not tell times)"
    figure.update_xaxes(title=f"{kind}, us", rangemode="tozero", gridcolor=GRID)
    return styled(figure, 60 + 34 * len(entries))


def stage_times(story: Story) -> Any:
    """The floor of each kernel stage beside the time that the best candidate and what ships take for it."""
    floors: dict[str, float] = story.plan.get("floors_us", {})
    timed = [row for row in _distinct(story.best, story.shipped) if story.stages_us(row)]
    if not floors or not timed:
        return None
    go = extras.load("plotly.graph_objects", _PURPOSE)
    figure, stages = go.Figure(), list(floors)[::-1]
    colours = [ACCENT, PALE] if timed[0] is story.best else [PALE]
    for row, colour in reversed(list(zip(timed, colours, strict=False))):
        us = story.stages_us(row)
        figure.add_bar(
            y=stages, x=[us.get(s) for s in stages], name=_whose(story, row), orientation="h", marker_color=colour,
            text=[_beside_floor(us.get(s), floors[s]) for s in stages], textposition="outside", cliponaxis=False,
            hovertemplate="%{y}: %{x:.2f} us<extra></extra>",
        )  # fmt: skip
    figure.add_bar(
        y=stages, x=[floors[s] for s in stages], name="floor", orientation="h", marker_color=_FLOOR,
        text=[f"{floors[s]:.2f}" for s in stages], textposition="outside", cliponaxis=False,
        hovertemplate="%{y}: at least %{x:.2f} us<extra></extra>",
    )  # fmt: skip
    longest = max(x for bar in figure.data for x in bar.x if x is not None)
    figure.update_xaxes(title=f"{story.label} time, us", range=[0, 1.2 * longest], gridcolor=GRID)  # room for words
    figure = styled(figure, 130 + 28 * len(stages) * (1 + len(timed)))
    legend = {"orientation": "h", "traceorder": "reversed", "y": 1.0, "yanchor": "bottom", "x": 0}
    return figure.update_layout(barmode="group", bargap=0.3, showlegend=True, legend=legend)


def _distinct(*rows: Row | None) -> list[Row]:
    return list({id(row): row for row in rows if row is not None}.values())


def _whose(story: Story, row: Row) -> str:
    role = "what ships" if row is story.shipped else "chosen" if story.choice else "best so far"
    return f"{plain(row.name)} ({role})"


def _beside_floor(us: float | None, floor: float) -> str:
    if us is None:
        return ""
    return f"{us:.2f}, {us / floor:.1f} times its floor" if floor > 0 else f"{us:.2f}"


def rounds(told: Sequence[dict[str, Any]]) -> Any:
    """The best time after each round, and what the round cost."""
    if not told:
        return None
    go = extras.load("plotly.graph_objects", _PURPOSE)
    names = [f"round {r['round']}" for r in told]
    first = told[0]["best_us"] / (1 - told[0]["gain_percent"] / 100)
    best = [first, *(r["best_us"] for r in told)]
    line = go.Scatter(
        x=["before", *names], y=best, mode="lines+markers+text", text=[f"{us:,.2f}" for us in best],
        textposition="top right", cliponaxis=False, line={"color": ACCENT, "shape": "hv"}, marker={"size": 8},
        customdata=["", *(wrapped(r["best"]) for r in told)],
        hovertemplate="%{y:.2f} us<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    bar = go.Bar(
        x=names, y=[r["seconds"] for r in told], marker_color=PALE, text=[_cost(r) for r in told], cliponaxis=False,
        textposition="outside", xaxis="x2", yaxis="y2", hovertemplate="%{x}: %{y:.1f} s<extra></extra>",
    )  # fmt: skip
    figure = go.Figure([line, bar])
    low, high = min(best), max(best)
    room = 0.25 * (high - low) or 0.1 * high
    figure.update_layout(
        xaxis={"domain": [0, 0.46]}, xaxis2={"domain": [0.54, 1], "anchor": "y2"},
        yaxis={"title": f"best, us ({told[-1]['label']})", "range": [low - room, high + room], "gridcolor": GRID},
        yaxis2={"anchor": "x2", "title": "cost, seconds", "rangemode": "tozero", "gridcolor": GRID},
    )  # fmt: skip
    return styled(figure, 260).update_layout(margin={"t": 24})


def _cost(round_: dict[str, Any]) -> str:
    per_percent = round_.get("seconds_per_percent")
    return f"{round_['seconds']:g} s" + ("" if per_percent is None else f"<br>{per_percent:.1f} s a per cent")


def _time(entry: dict[str, Any], limit: float) -> str:
    notes = [f"{entry['us']:,.1f}"]
    if entry["us"] > limit:
        notes.append("off the scale")
    if entry.get("host_paced"):
        notes.append("paced by the host")
    if entry.get("earlier"):
        notes.append("in an earlier heat")
    return ", ".join(notes)


def margins(rows: Sequence[Row]) -> Any:
    """The worst error over its limit, candidates down and families across: 1 is the limit."""
    judged = [row for row in rows if row.families]
    if not judged:
        return None
    go = extras.load("plotly.graph_objects", _PURPOSE)
    families = list(dict.fromkeys(name for row in judged for name in row.families))
    cells = [[row.families.get(name, {}) for name in families] for row in judged]
    figure = go.Figure(
        go.Heatmap(
            x=[plain(name.replace("_", " ")) for name in families],
            y=[wrapped(row.name) for row in judged],
            z=[[_margin(cell) for cell in line] for line in cells],
            text=[[_number(cell) for cell in line] for line in cells],
            customdata=[[_words(cell) for cell in line] for line in cells],
            texttemplate="%{text}", textfont={"size": 11}, hovertemplate="%{y}, %{x}<br>%{customdata}<extra></extra>",
            colorscale=[[0, "#eef6f1"], [2 / 3, "#8fcfa8"], [2 / 3, "#f3b1a8"], [1, "#c0392b"]],
            zmin=0, zmax=1.5, xgap=2, ygap=2, colorbar=_BAR,
        )
    )  # fmt: skip
    figure.update_xaxes(tickangle=-40, showgrid=False)
    roomy = len(judged) <= _ROOMY
    figure.update_yaxes(autorange="reversed", showgrid=False, tickfont_size=13 if roomy else 9)
    return styled(figure, 190 + (34 if roomy else 26) * len(judged))


def _margin(cell: dict[str, Any]) -> float | None:
    if not cell:
        return None
    return min(cell["margin"], 1.5) if cell["margin"] is not None else 1.5


def _number(cell: dict[str, Any]) -> str:
    if not cell:
        return ""
    if cell["margin"] is None:
        return plain(str(cell.get("ended", "fail")))
    margin = cell["margin"]
    return f"{margin:.2f}" if margin < 10 else f"{margin:.0f}" if margin < 10_000 else f"{margin:.0e}"


def _words(cell: dict[str, Any]) -> str:
    """The sentences of each quantity, broken for a tooltip."""
    return "<br>".join(_broken(said) for said in _said(cell))


def _said(cell: dict[str, Any]) -> Iterator[str]:
    quantities = cell.get("quantities", {}).values()
    yield from (q["says"] for q in quantities)
    if cell and not quantities:
        yield str(cell.get("says", ""))


def _broken(text: str) -> str:
    """Text over several lines of a tooltip."""
    return "<br>&nbsp;&nbsp;".join(plain(line) for part in text.split("; ") for line in textwrap.wrap(part, 110))


def gate(run: dict[str, Any]) -> Any:
    """How long channels remember: the share of (token, channel) pairs by half-life."""
    histogram = (run.get("capture") or {}).get("regime", {}).get("histogram")
    if not histogram:
        return None
    go = extras.load("plotly.graph_objects", _PURPOSE)
    edges, counts = histogram["log10_of_minus_log_decay"], histogram["count"]
    half_life = [math.log10(math.log(2)) - (a + b) / 2 for a, b in pairwise(edges)]
    total = sum(counts)
    figure = go.Figure(
        go.Bar(
            x=half_life, y=[100 * c / total for c in counts], marker_color=ACCENT, width=edges[1] - edges[0],
            customdata=[10**h for h in half_life], hovertemplate="%{customdata:.3g} tokens: %{y:.1f} %<extra></extra>",
        )
    )  # fmt: skip
    low, high = math.floor(min(half_life)), math.ceil(max(half_life))
    ticks = list(range(low, high + 1))
    figure.update_xaxes(title="half-life, tokens", tickvals=ticks, ticktext=[f"{10.0**t:g}" for t in ticks])
    figure.update_yaxes(title="% of all decays", gridcolor=GRID)
    figure.update_layout(bargap=0.04)
    return styled(figure, 280)


def growth(told: Sequence[Growth]) -> Any:
    """Relative error against T on logarithmic axes: a panel for each quantity, a line for each kernel and gate."""
    curves = [(growth, curve) for growth in told for curve in growth.curves if curve.fits]
    if not curves:
        return None
    go = extras.load("plotly.graph_objects", _PURPOSE)
    figure, panels = go.Figure(), list(dict.fromkeys(name for _, curve in curves for name in curve.fits))
    for i, (growth, curve) in enumerate(curves):
        for panel, quantity in enumerate(panels, 1):
            fit, name = curve.fits.get(quantity), f"{plain(growth.name)}, {growth.dtype}, {curve.gate}"
            figure.add_scatter(
                x=[p.tokens for p in curve.points], y=[p.errors.get(quantity) for p in curve.points], name=name,
                mode="lines+markers", line={"color": _LINES[i % len(_LINES)]}, legendgroup=name, showlegend=panel == 1,
                xaxis=f"x{panel}", yaxis=f"y{panel}",
                hovertemplate=f"{name}, T=%{{x}}: %{{y:.2e}}<br>{plain(fit.law) if fit else ''}<extra></extra>",
            )  # fmt: skip
    figure = styled(figure, 330 + 20 * len(curves))
    width = 1 / len(panels)
    for panel, quantity in enumerate(panels, 1):
        figure.layout[f"xaxis{panel}"] = {
            "type": "log", "title": "T", "domain": [(panel - 1) * width, (panel - 0.2) * width], "gridcolor": GRID,
            "anchor": f"y{panel}", "dtick": 1,
        }  # fmt: skip
        figure.layout[f"yaxis{panel}"] = {
            "type": "log", "title": f"relative error of {quantity}", "anchor": f"x{panel}", "gridcolor": GRID,
            "exponentformat": "power", "title_font_size": 13, "automargin": True,
        }  # fmt: skip
    return figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.25, "x": 0})


def styled(figure: Any, height: int) -> Any:
    figure.update_layout(
        height=height, font=_FONT, margin={"l": 10, "r": 30, "t": 10, "b": 10}, showlegend=False,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"align": "left", "bgcolor": "white", "font": {"color": INK}},
    )  # fmt: skip
    figure.update_xaxes(automargin=True, zeroline=False, linecolor=MUTED, title_font_size=13)
    figure.update_yaxes(automargin=True, zeroline=False, title_font_size=13)
    return figure
