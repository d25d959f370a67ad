// A click on a head of a sortable table orders its rows by that column: numbers as numbers, empty cells last.
for (const table of document.querySelectorAll("table.sortable")) {
  const [heads, body] = [[...table.tHead.rows[0].cells], table.tBodies[0]];
  heads.forEach((head, column) => {
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    const sort = () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      body.append(...[...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
      }));
    };
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
  });
}
// A chart drawn while it was hidden has no width yet.
for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => {
    if (details.open) details.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.Plots.resize(chart));
  });
}
