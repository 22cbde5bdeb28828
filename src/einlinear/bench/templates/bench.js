const ticks = [-3, -2, -1, 0, 1, 2, 3, 4, 5].flatMap(k => [1, 2, 5].map(n => n * 10 ** k));
const logarithmic = {type: "log", tickvals: ticks, ticktext: ticks.map(t => +t.toPrecision(1)), zeroline: false};
const grid = {gridcolor: "--line"};
const symbols = {mixture: "circle", active: "square", masked: "diamond"};
// The speeds of one series with their intervals: bars, or points on a logarithmic axis.
function speedSeries({name, kind, color, x, y, low, high, ms, place, isFaint}, isLog) {
  const bars = {type: "bar", marker: {color, opacity: isFaint.map(faint => faint ? 0.35 : 1),
    pattern: {shape: kind === "peer" ? "/" : "", size: 6, solidity: 0.25}}};
  const points = {type: "scatter", mode: "markers+text", marker: {color, size: 11, symbol: symbols[kind]},
    text: y.map(speed => speed < 10 ? `${+speed.toPrecision(2)}` : speed.toFixed(0)),
    textposition: "middle right", textfont: {color, size: 12}, cliponaxis: false};
  return {name, x, y, customdata: y.map((_, i) => [place[i], low[i], high[i], ms[i]]),
    hovertemplate: "%{customdata[0]}<br><b>%{y:.2f}</b> (%{customdata[1]:.2f} to %{customdata[2]:.2f}), %{customdata[3]:.2f} ms",
    error_y: {type: "data", symmetric: false, array: y.map((speed, i) => high[i] - speed),
      arrayminus: y.map((speed, i) => speed - low[i]), color: "--ink", thickness: 1.2, width: 3},
    ...(isLog ? points : bars)};
}
// A line above each place, and its value at the right end.
function limitSeries(limits) {
  const color = "#0f9d58", hoverinfo = "skip";
  return [
    {type: "scatter", mode: "lines", name: "limit: FLOPs saved", line: {color, width: 2.5}, hoverinfo,
      x: limits.flatMap(([place]) => [place - 0.44, place + 0.44, null]), y: limits.flatMap(([, limit]) => [limit, limit, null])},
    {type: "scatter", mode: "text", x: limits.map(([place]) => place + 0.44), y: limits.map(([, limit]) => limit),
      text: limits.map(([, limit]) => `limit ${+limit.toPrecision(3)}`), textposition: "top left",
      textfont: {color, size: 12}, cliponaxis: false, showlegend: false, hoverinfo},
  ];
}
function speeds(id, {data, limits, labels, isLog}) {
  show(id, [...data.map(series => speedSeries(series, isLog)), ...limitSeries(limits)], {
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
  const hovertemplate = `%{x} experts<br><b>%{y:.4g}</b> ${unit}`;
  show(id, data.map(({name, x, y, color, dash}) => ({name, x, y, hovertemplate, type: "scatter", mode: "lines+markers",
    line: {color, width: 2.5, dash}, marker: {size: 7}})), {
    height: 380, margin: {t: 10, r: 8, b: 50, l: 64},
    legend: {orientation: "h", x: 0, y: -0.26, yanchor: "top", font: {size: 11}},
    xaxis: {type: "log", title: {text: "experts", standoff: 8}, tickvals: experts, ticktext: experts, ...grid},
    yaxis: {...logarithmic, title: {text: unit}, ...grid},
  });
}
for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent)))
  (figure.labels ? speeds : growth)(id, figure);
