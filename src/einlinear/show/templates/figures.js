// Plotly figures in the colours of the page, light or dark: "--ink" in a figure is the page's --ink.
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const themed = value =>
  typeof value === "string" ? (value.startsWith("--") ? css(value) : value)
  : Array.isArray(value) ? value.map(themed)
  : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v)]))
  : value;
function show(id, data, layout) {
  const common = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    font: {family: "system-ui, sans-serif", color: "--soft", size: 13}};
  const draw = () => Plotly.react(id, themed(data), themed({...common, ...layout}), {responsive: true, displayModeBar: false});
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
