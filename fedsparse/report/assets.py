"""Style and script of the report page."""

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c2024; --soft: #5b6470; --line: #d9dde2; --panel: #f6f7f9;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --text: #e6e8eb; --soft: #9aa4b0; --line: #333a43;
  --panel: #1c2026; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.2rem 1.4rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .4rem; }
p { margin: .4rem 0; max-width: 75ch; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.findings { border-left: 4px solid var(--accent); background: var(--panel); padding: .7rem 1.1rem; margin: 1.2rem 0 0; }
.findings p:first-child { font-size: 1.12rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; }
td:first-child { white-space: normal; min-width: 13rem; }
td code { color: var(--soft); font-size: .85em; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
figure { margin: 0; min-width: 0; }
.plot { min-height: 420px; }
.plot.low { min-height: 340px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1.2rem; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 4px; padding: .8rem 1rem;
  overflow-x: auto; font-size: .84rem; line-height: 1.45; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .93rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--accent); }
@media (max-width: 800px) { .pair { grid-template-columns: 1fr; } }
@media print { :root { --page: #fff; --text: #000; --soft: #444; --line: #bbb; --panel: #fff; --accent: #0072b2; }
  main { max-width: none; padding: 0; } figure, table { break-inside: avoid; } details > summary { display: none; } }
"""

SCRIPT = """
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
function themed(layout, printing) {
  const style = getComputedStyle(document.documentElement);
  const pick = (name, paper) => printing ? paper : style.getPropertyValue(name).trim();
  const text = pick("--text", "#000000"), grid = pick("--line", "#cccccc");
  const axis = { gridcolor: grid, zeroline: false, linecolor: grid, automargin: true, title: { standoff: 8 } };
  const merge = (own) => ({ ...axis, ...own, title: { ...axis.title, ...(own || {}).title },
    ...((own || {}).minor ? { minor: { ...own.minor, gridcolor: grid, griddash: "dot" } } : {}) });
  return { ...layout, xaxis: merge(layout.xaxis), yaxis: merge(layout.yaxis), autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, size: 13, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 60, r: 40, t: 20, b: 50 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: text },
    hoverlabel: { bgcolor: pick("--panel", "#ffffff"), font: { color: text } },
    shapes: (layout.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: text } })) };
}
function shades(printing) {
  const dark = !printing && matchMedia("(prefers-color-scheme: dark)").matches;
  return dark ? [[0, "#1c2026"], [0.5, "#0072b2"], [1, "#d6efff"]] : [[0, "#f3f5f7"], [0.5, "#56a5d6"], [1, "#08306b"]];
}
function draw(printing) {
  for (const [id, figure] of Object.entries(figures)) {
    const data = figure.data.map((t) => t.type === "heatmap" ? { ...t, colorscale: shades(printing) } : t);
    Plotly.react(id, data, themed(figure.layout, printing),
      { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
        toImageButtonOptions: { format: "svg", filename: id } });
  }
}
draw(false);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(false));
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  draw(true);
});
addEventListener("afterprint", () => draw(false));
"""
