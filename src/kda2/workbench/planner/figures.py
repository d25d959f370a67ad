"""The plan's pictures, as plotly figures in the style of the run report's charts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kda2.workbench import extras
from kda2.workbench.blockplan import BlockPlan, PlannedBlock, PlannedTensor
from kda2.workbench.planner.amounts import human
from kda2.workbench.report.charts import ACCENT, GRID, INK, MUTED, PALE, plain, styled

_PURPOSE = "the plan's figures"
_COLOURS = {
    "memory": "#2563eb", "memory on chip": "#93b4f5", "tensor": "#0f766e", "fp32": "#65a30d", "special": "#d97706",
    "issue": "#be185d", "chain": "#6d28d9",
}  # fmt: skip
# The diagram: blocks stand a step apart, this wide and high.
_STEP, _HALF, _HIGH = 3.2, 0.95, 0.55


def figures(plan: BlockPlan) -> dict[str, Any]:
    """The figures by name: `blocks` (the data flow), `floors` (by block and resource), `chunks` (by C)."""
    return {"blocks": flow(plan), "floors": floors(plan), "chunks": chunk_lengths(plan)}


def figures_html(plan: BlockPlan) -> dict[str, str]:
    """The figures as HTML; plotly's script comes inlined with the first."""
    io, html, script = extras.load("plotly.io", _PURPOSE), {}, True
    for name, figure in figures(plan).items():
        config = {"displayModeBar": False, "responsive": True}
        html[name] = io.to_html(figure, full_html=False, include_plotlyjs=script, config=config, div_id=f"plan-{name}")
        script = False
    return html


def floors(plan: BlockPlan) -> Any:
    """Each block's floors side by side: the longest bar binds."""
    go = extras.load("plotly.graph_objects", _PURPOSE)
    blocks = list(reversed(plan.blocks))
    figure = go.Figure()
    for resource in reversed(_COLOURS):
        found = [(b, f) for b in blocks for f in b.floors if f.resource == resource]
        figure.add_bar(
            x=[f.us for _, f in found], y=[_label(b) for b, _ in found], name=resource, orientation="h",
            marker_color=_COLOURS[resource], customdata=[_broken(f.counted) for _, f in found],
            text=[_short(f.us) for _, f in found], textposition="outside", textfont={"size": 10}, cliponaxis=False,
            hovertemplate=f"%{{y}}, {resource}<br>%{{customdata}}<extra></extra>",
        )  # fmt: skip
    whole = plan.totals.floor.us
    figure.add_vline(x=whole, line={"color": MUTED, "dash": "dot"})
    figure.add_annotation(
        x=whole, y=1, yref="paper", text=f"the whole call: {_short(whole)} us", showarrow=False, xanchor="left",
        yanchor="bottom", font={"size": 11, "color": MUTED},
    )  # fmt: skip
    figure.update_layout(
        barmode="group", bargap=0.25, legend={"traceorder": "reversed", "orientation": "h", "y": -0.14}
    )
    figure.update_xaxes(title="floor, us", rangemode="tozero", gridcolor=GRID)
    figure.update_yaxes(categoryorder="array", categoryarray=[_label(b) for b in blocks])
    return _shown(figure, 620)


def chunk_lengths(plan: BlockPlan) -> Any:
    """What the length of a chunk costs: the staged floor, with the workspace through memory and on chip."""
    go = extras.load("plotly.graph_objects", _PURPOSE)
    names = [f"C = {c.C}" for c in plan.chunks]
    words = [
        f"workspace {human(c.workspace_bytes, 'B')}<br>tensor {human(c.tensor_flops, 'flop')}"
        f"<br>{c.serial_steps} serial steps"
        for c in plan.chunks
    ]
    figure = go.Figure()
    for title, values, colour in (
        ("workspace through memory", [c.staged_us for c in plan.chunks], ACCENT),
        ("workspace on chip", [c.on_chip_us for c in plan.chunks], PALE),
    ):
        figure.add_bar(
            x=names, y=values, name=title, marker_color=colour, customdata=words, text=[_short(v) for v in values],
            textposition="outside", cliponaxis=False,
            hovertemplate=f"%{{x}}, {title}: %{{y:.1f}} us<br>%{{customdata}}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="group", legend={"orientation": "h", "y": -0.14})
    figure.update_yaxes(title="sum of the blocks' floors, us", rangemode="tozero", gridcolor=GRID)
    return _shown(figure, 320)


def _shown(figure: Any, height: int) -> Any:
    """The report's style, with a legend and room above for what outlies the bars."""
    figure = styled(figure, height)
    return figure.update_layout(showlegend=True, margin={"t": 28})


def _short(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.0f}"


def _label(block: PlannedBlock) -> str:
    return plain(f"{block.letter} {block.stage}")


def _broken(text: str) -> str:
    return plain(text).replace("; ", "<br>").replace(", ", ",<br>")


# --- the data flow ---


@dataclass
class _Drawing:
    """What a figure is drawn from: plotly takes all of it at once much faster than piece by piece."""

    annotations: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)

    def annotate(self, **annotation: Any) -> None:
        self.annotations.append(annotation)

    def shape(self, **shape: Any) -> None:
        self.shapes.append(shape)


def flow(plan: BlockPlan) -> Any:
    """The blocks from left to right; the call's own tensors come from above and leave below, workspace runs between."""
    go = extras.load("plotly.graph_objects", _PURPOSE)
    drawing = _Drawing()
    for i, block in enumerate(plan.blocks):
        _box(drawing, i, block)
        _own(drawing, i, block.inputs, above=True)
        _own(drawing, i, block.outputs, above=False)
    for (source, target), tensors in _between(plan).items():
        (_beside if target == source + 1 else _around)(drawing, source, target, tensors)
    figure = go.Figure(layout={"annotations": drawing.annotations, "shapes": drawing.shapes})
    figure.update_xaxes(visible=False, range=[-1.5, _STEP * (len(plan.blocks) - 1) + 1.5], fixedrange=True)
    figure.update_yaxes(visible=False, range=[-3.0, 2.3], fixedrange=True)
    return styled(figure, 460)


def _between(plan: BlockPlan) -> dict[tuple[int, int], list[PlannedTensor]]:
    """The workspace tensors from the block that writes them to each that reads them, by their places."""
    made = {t.name: i for i, b in enumerate(plan.blocks) for t in b.outputs if t.owner == "workspace"}
    between: dict[tuple[int, int], list[PlannedTensor]] = {}
    for i, block in enumerate(plan.blocks):
        for t in (t for t in block.inputs if t.owner == "workspace"):
            between.setdefault((made[t.name], i), []).append(t)
    return between


def _box(drawing: _Drawing, i: int, block: PlannedBlock) -> None:
    x = i * _STEP
    drawing.shape(
        type="rect", x0=x - _HALF, x1=x + _HALF, y0=-_HIGH, y1=_HIGH, fillcolor="#eff5ff",
        line={"color": ACCENT, "width": 1.5}, layer="below",
    )  # fmt: skip
    text = (
        f"<b>{block.letter}&nbsp; {plain(block.stage)}</b><br>{block.floor_us:.1f} us, {plain(block.binds)}"
        f"<br><span style='color:{MUTED}'>{block.on_chip_us:.1f} us on chip</span>"
    )
    hover = "<br>".join(map(plain, (block.title, *block.computes)))
    drawing.annotate(x=x, y=0, text=text, showarrow=False, font={"size": 12}, hovertext=hover)


def _own(drawing: _Drawing, i: int, tensors: tuple[PlannedTensor, ...], above: bool) -> None:
    """The call's own tensors of a block, with one arrow from above or to below."""
    own = [t for t in tensors if t.owner == "call"]
    if not own:
        return
    x, side = i * _STEP, 1 if above else -1
    outer, inner = (x, side * (_HIGH + 0.55)), (x, side * (_HIGH + 0.04))
    _line(drawing, *((outer, inner) if above else (inner, outer)))
    _words(drawing, x, outer[1] + 0.06 * side, own, "bottom" if above else "top")


def _beside(drawing: _Drawing, source: int, target: int, tensors: list[PlannedTensor]) -> None:
    """Between neighbours: a straight arrow with its tensors over it."""
    x0, x1 = source * _STEP + _HALF, target * _STEP - _HALF
    _line(drawing, (x0, 0), (x1 - 0.04, 0))
    _words(drawing, (x0 + x1) / 2, 0.08, tensors, "bottom")


def _around(drawing: _Drawing, source: int, target: int, tensors: list[PlannedTensor]) -> None:
    """Past a block: down, along and up again, deeper the farther it goes."""
    x0, x1 = source * _STEP + 0.8, target * _STEP - 0.8
    depth = -0.9 - 0.75 * (target - source - 1)
    path = f"M {x0} {-_HIGH} L {x0} {depth} L {x1} {depth}"
    drawing.shape(type="path", path=path, line={"color": MUTED, "width": 1.5}, layer="below")
    _line(drawing, (x1, depth), (x1, -_HIGH - 0.04))
    _words(drawing, (x0 + x1) / 2, depth - 0.05, tensors, "top")


def _line(drawing: _Drawing, tail: tuple[float, float], head: tuple[float, float]) -> None:
    """An arrow."""
    drawing.annotate(
        x=head[0], y=head[1], ax=tail[0], ay=tail[1], xref="x", yref="y", axref="x", ayref="y", text="",
        showarrow=True, arrowhead=2, arrowsize=1.1, arrowwidth=1.5, arrowcolor=MUTED,
    )  # fmt: skip


def _words(drawing: _Drawing, x: float, y: float, tensors: list[PlannedTensor], anchor: str) -> None:
    """Tensors with their sizes; shapes and products on hovering."""
    text = "<br>".join(f"<b>{plain(t.name)}</b> {human(t.size.amount, 'B')}" for t in tensors)
    hover = "<br>".join(map(_described, tensors))
    drawing.annotate(
        x=x, y=y, text=text, showarrow=False, yanchor=anchor, align="left", font={"size": 11, "color": INK},
        hovertext=hover,
    )  # fmt: skip


def _described(tensor: PlannedTensor) -> str:
    meaning = f"{tensor.name} [{', '.join(tensor.axes)}] {tensor.dtype}: {tensor.meaning}"
    return f"{plain(meaning)}<br>&nbsp;&nbsp;{plain(tensor.size.counted)}"
