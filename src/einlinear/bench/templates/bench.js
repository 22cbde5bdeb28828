const ticks = [-3, -2, -1, 0, 1, 2, 3, 4, 5].flatMap(k => [1, 2, 5].map(n => n * 10 ** k));
const logarithmic = {type: "log", tickvals: ticks, ticktext: ticks.map(t => +t.toPrecision(1)), zeroline: false};
const grid = {gridcolor: "--line"};
function speeds(id, {data, labels, isLog}) {
  for (const series of data) if (series.customdata) series.hovertemplate =
    "%{customdata[0]}<br><b>%{y:.2f}</b> (%{customdata[1]:.2f} to %{customdata[2]:.2f}), %{customdata[3]:.2f} ms";
  show(id, data, {
    barmode: "group", bargap: 0.12, height: 420,
    margin: {t: 46, r: isLog ? 48 : 8, b: 60, l: 56},
    legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom"},
    xaxis: {tickvals: labels.map((_, i) => i), ticktext: labels, automargin: true, zeroline: false, showgrid: false,
      tickangle: labels.length > (isLog ? 12 : 7) ? -35 : 0, range: [-0.5, labels.length - 0.5]},
    yaxis: {title: {text: "times faster than nn.Linear"}, ...grid, ...(isLog ? logarithmic : {rangemode: "tozero"})},
    shapes: [{type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: {color: "--soft", dash: "dot", width: 1.5}}],
  });
}
function growth(id, {data, unit}) {
  const experts = [...new Set(data.flatMap(line => line.x))].sort((a, b) => a - b);
  for (const line of data) line.hovertemplate = `%{x} experts<br><b>%{y:.4g}</b> ${unit}`;
  show(id, data, {
    height: 380, margin: {t: 10, r: 8, b: 50, l: 64},
    legend: {orientation: "h", x: 0, y: -0.26, yanchor: "top", font: {size: 11}},
    xaxis: {type: "log", title: {text: "experts", standoff: 8}, tickvals: experts, ticktext: experts, ...grid},
    yaxis: {...logarithmic, title: {text: unit}, ...grid},
  });
}
for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent)))
  (figure.labels ? speeds : growth)(id, figure);
