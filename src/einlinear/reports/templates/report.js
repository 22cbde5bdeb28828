"use strict";
// Draws the figures from the data in the page. State: which structures are hidden, what colours mean, and which panel of a
// figure is selected. Figures are drawn when they come near the viewport, and redrawn when the state changes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  root.classList.add("js");
  const state = { hidden: new Set(), by: -1, panel: {} };
  const drawn = new Map(); // an element -> what draws it
  const scale = ["#2f7fd1", "#8a6fd6", "#b4559f", "#c7691a"].map(hex => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)));
  const greek = ["\u03c9", "\u03c8", "\u03bd"];
  const plain = text => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const css = name => getComputedStyle(root).getPropertyValue(name).trim();

  function limits() {
    const known = data.structures.filter(s => s.exponents).map(s => s.exponents[state.by]);
    return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  }

  // A panel may have colours of its own.
  function colour(k, panel) {
    const { colour, exponents } = data.structures[k];
    const isOwn = panel && panel.colour_by !== null;
    const by = isOwn ? panel.colour_by : state.by;
    if (by < 0) return colour;
    if (!exponents) return css("--soft");
    const [low, high] = isOwn ? panel.colour_range : limits();
    const at = high > low ? (exponents[by] - low) / (high - low) * (scale.length - 1) : 0;
    const first = Math.min(scale.length - 2, Math.floor(at));
    const mix = scale[first].map((v, i) => Math.round(v + (scale[first + 1][i] - v) * (at - first)));
    return `rgb(${mix.join(",")})`;
  }

  const at = (spent, panel) => `${plain(panel.x_title)} ${Number(spent.toPrecision(3))}`;

  function runsTrace(series, panel) {
    const x = [], y = [], text = [];
    for (const run of data.runs) {
      if (run.structure !== series.structure || run.open !== (series.role === "open") || !run[panel.measure]) continue;
      run.loss.forEach((loss, i) => {
        if (panel.is_counted && i < run.cold) return; // in the warm-up
        if (!(run[panel.measure][i] > 0) || !(loss > panel.linf)) return; // cannot be shown on a logarithmic axis
        x.push(run[panel.measure][i]); y.push(loss - panel.linf); text.push(`${plain(run.label)}<br>step ${run.step[i] ?? "?"}, loss ${loss}, ${at(run[panel.measure][i], panel)}`);
      });
      x.push(null); y.push(null); text.push("");
    }
    const isFew = data.runs.reduce((sum, run) => sum + run.loss.length, 0) < 3000;
    const c = colour(series.structure, panel);
    return { x, y, text, mode: isFew ? "lines+markers" : "lines", opacity: panel.is_counted ? 0.32 : 0.7,
      line: { width: 1, color: c, dash: series.role === "open" ? "dot" : "solid" }, marker: { size: 3, color: c } };
  }

  const ROLES = {
    runs: runsTrace,
    open: runsTrace,
    frontier: (s, panel) => ({ mode: "markers", marker: { size: innerWidth < 720 || panel.colour_by !== null ? 5 : 7, color: colour(s.structure, panel),
      symbol: panel.colour_by === null ? data.structures[s.structure].symbol : "circle",
      line: { width: panel.colour_by === null && data.structures[s.structure].symbol.endsWith("open") ? 2 : 0, color: colour(s.structure, panel) } },
      text: s.text.map((t, i) => `${plain(t)}<br>on the frontier, loss ${+(s.y[i] + panel.linf).toPrecision(5)}, ${at(s.x[i], panel)}`
        + (panel.colour_by === null ? "" : `<br>${greek[panel.colour_by]} = ${+data.structures[s.structure].exponents[panel.colour_by].toFixed(3)}`)) }),
    law: s => ({ mode: "lines", line: { width: 2.2, color: colour(s.structure) }, hoverinfo: "skip" }),
    beyond: s => ({ mode: "lines", line: { width: 1.6, color: colour(s.structure), dash: "dash" }, hoverinfo: "skip" }),
    residual: (s, panel) => ({ mode: "lines+markers", line: { width: 1.4, color: colour(s.structure) }, marker: { size: 7, color: colour(s.structure),
      symbol: data.structures[s.structure].symbol }, text: s.y.map((v, i) => `${plain(data.structures[s.structure].structure)}<br>${v > 0 ? "+" : ""}${v.toPrecision(2)} % relative to its law, ${at(s.x[i], panel)}`) }),
    band: s => ({ mode: "none", fill: "toself", fillcolor: colour(s.structure), opacity: 0.13, hoverinfo: "skip" }),
    value: s => ({ mode: "lines", line: { width: 2.4, color: colour(s.structure) }, text: hover(s) }),
    guess: s => ({ mode: "lines", line: { width: 1.6, color: colour(s.structure), dash: "dash" }, text: hover(s, ", extrapolated") }),
    dot: s => ({ mode: "markers", marker: { size: 12, color: colour(s.structure), symbol: data.structures[s.structure].symbol },
      error_x: { type: "data", symmetric: false, array: [s.high[0] - s.x[0]], arrayminus: [s.x[0] - s.low[0]], thickness: 2.5, width: 0,
        color: colour(s.structure) },
      text: [`${plain(s.text[0])}<br>${s.x[0].toPrecision(3)} (${s.low[0].toPrecision(3)} to ${s.high[0].toPrecision(3)})`] }),
    place: (s, panel) => ({ mode: "markers", cliponaxis: false, text: [panel.series.filter(o => o.x[0] === s.x[0] && o.y[0] === s.y[0]
      && !state.hidden.has(o.structure)).map(o => plain(o.text[0])).join("<br>")], marker: { size: [22, 15, 9, 5][Math.min(3, s.low[0])],
      color: colour(s.structure), symbol: data.structures[s.structure].symbol, line: { width: 1.5, color: css("--bg") } } }),
  };

  function hover(series, more = "") {
    const name = plain(data.structures[series.structure].structure);
    return series.y.map((v, i) => v === null ? "" : `${name}<br>${v.toPrecision(3)} at loss ${series.x[i].toPrecision(4)}${more}`);
  }

  function traces(panel) {
    return panel.series.map(series => ({
      type: "scatter", x: series.x, y: series.y, hoverinfo: "text", showlegend: false,
      meta: { structure: series.structure, role: series.role }, visible: !state.hidden.has(series.structure),
      ...ROLES[series.role](series, panel),
    }));
  }

  function axis(title, isLog, range, isReversed, isNumber) {
    const ends = range && (isLog ? range.map(Math.log10) : range);
    return { title: { text: title, font: { size: 13 }, standoff: 10 }, type: isLog ? "log" : "linear", zeroline: false,
      gridcolor: css("--line"), linecolor: css("--line"), tickfont: { size: 12 }, automargin: true,
      ...(ends ? { range: ends } : isReversed ? { autorange: "reversed" } : {}),
      ...(isLog && range ? ticks(range) : isNumber ? { tickformat: "~g" } : isLog ? { exponentformat: "power" } : { tickformat: "~s" }) };
  }

  function ticks([low, high]) { // for multipliers: few and round
    const steps = high / low > 12 ? [1, 2, 5] : high / low > 4 ? [1, 1.5, 2, 3, 5, 7] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9];
    const values = [-4, -3, -2, -1, 0, 1, 2, 3].flatMap(k => steps.map(step => +(step * 10 ** k).toPrecision(2)));
    return { tickvals: values, ticktext: values.map(String) };
  }

  // A logarithmic axis over two decades or more labels only powers of ten: small 2s and 5s are unreadable.
  function decades(shown, isNarrow) {
    let low = Infinity, high = 0;
    for (const trace of shown) for (const x of trace.x) if (x > 0) { low = Math.min(low, x); high = Math.max(high, x); }
    const minor = { dtick: "D1", ticks: "outside", ticklen: 3, tickcolor: css("--line"), showgrid: false };
    if (high < 100 * low) {
      const values = [], first = Math.floor(Math.log10(low));
      for (let k = first; k <= Math.log10(high) + 1; k++) for (const step of isNarrow ? [1, 3] : [1, 2, 5]) values.push([step, k]);
      return { tickvals: values.map(([step, k]) => step * 10 ** k), ticktext: values.map(([step, k]) => `${step > 1 ? step + "\u00d7" : ""}10<sup>${k}</sup>`), tickangle: 0 };
    }
    return { tickfont: { size: 10 }, // plotly enlarges powers of ten
      dtick: Math.ceil(Math.log10(high / low) / (isNarrow ? 5 : 12)), tickangle: 0, minor };
  }

  function layout(panel, height, drawn) {
    const line = (x, y) => ({ type: "line", line: { color: css("--soft"), width: 1, dash: "dot" }, layer: "below",
      ...(x === null ? { xref: "paper", x0: 0, x1: 1, y0: y, y1: y } : { yref: "paper", y0: 0, y1: 1, x0: x, x1: x }) });
    const shown = panel.series.filter(s => !state.hidden.has(s.structure));
    const dots = shown.filter(s => s.role === "dot");
    const y = axis(panel.y_title, panel.is_log_y, panel.y_range, false, true);
    const clip = text => plain(text.length > 24 ? text.slice(0, 23) + "\u2026" : text);
    if (dots.length) Object.assign(y, { tickvals: dots.map(s => s.y[0]), ticktext: dots.map(s => clip(s.text[0]) + " "), showgrid: false,
      title: undefined, fixedrange: true });
    const x = axis(panel.x_title, panel.is_log_x, panel.x_range, panel.is_reversed, panel.is_reversed || panel.line_x !== null);
    const isThird = panel.colour_by !== null; // of the width
    if (panel.measure) Object.assign(x, decades(drawn, isThird || innerWidth < 720));
    if (panel.measure) Object.assign(y, { tickvals: undefined, ticktext: undefined, tickformat: "~g", ...(isThird ? { dtick: "D2" } : {}) });
    return { ...base(height), xaxis: x, yaxis: y,
      shapes: [...(panel.line_x !== null ? [line(panel.line_x, null)] : []), ...(panel.line_y !== null ? [line(null, panel.line_y)] : [])],
      annotations: labels(shown.filter(s => s.role === "place")).map(([s, text, before]) => ({ x: s.x[0], y: s.y[0], text, showarrow: false,
        // Beside the marks at the sides, above those in the middle; lower in a narrow window, where they collide.
        ...(s.x[0] > 0.75 ? { xanchor: "right", xshift: -16 } : s.x[0] < 0.25 ? { xanchor: "left", xshift: 16 } : { xanchor: "center" }),
        yshift: (s.x[0] > 0.25 && s.x[0] < 0.75 ? 20 : innerWidth < 720 ? -20 : 0) - 16 * before, font: { size: 12.5 } })) };
  }

  function labels(shown) { // beside each place; more than three become a count, and hovering shows which
    const places = new Map();
    for (const s of shown) places.set(`${s.x[0]} ${s.y[0]}`, [...places.get(`${s.x[0]} ${s.y[0]}`) || [], s]);
    return [...places.values()].flatMap(here => here.length > 3 ? [[here[0], `${here.length} structures`, 0]]
      : here.map((s, k) => [s, plain(s.text[0]), k]));
  }

  function base(height) {
    return { height, margin: { l: 58, r: 14, t: 14, b: 54 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", color: css("--ink"), size: 13 }, hovermode: "closest", dragmode: "zoom",
      hoverlabel: { bgcolor: css("--surface"), bordercolor: css("--line"), font: { color: css("--ink"), size: 13 }, align: "left" } };
  }

  const config = { responsive: true, displayModeBar: false };

  function drawFigure(element, figure) {
    const isNarrow = innerWidth < 720;
    const panels = figure.is_choice ? [figure.panels[state.panel[figure.name] || 0]] : figure.panels;
    element.classList.add("ready");
    element.querySelectorAll(".live").forEach((place, k) => {
      const panel = panels[k];
      const isDots = panel.series.some(s => s.role === "dot");
      // The first figure, with its axis, ends above the fold in most windows.
      const first = Math.max(320, Math.min(540, innerHeight - (isNarrow ? 440 : 350)));
      const height = isDots ? 90 + 58 * panel.series.length : figure.name === "frontier" ? first
        : figure.is_choice ? (isNarrow ? 400 : 540) : (isNarrow ? 340 : 420);
      const drawn = traces(panel);
      const made = layout(panel, height, drawn);
      if (panel.title) Object.assign(made, { title: { text: panel.title, font: { size: 14 }, x: 0, xref: "paper", y: 0.98, yanchor: "top" }, margin: { ...made.margin, t: 38 } });
      Plotly.react(place, panel.colour_by === null ? drawn : [...drawn, legend(panel)], made, config);
    });
  }

  function legend(panel) { // nothing but its colour bar is drawn
    const [low, high] = panel.colour_range;
    return { type: "scatter", mode: "markers", x: [null], y: [null], showlegend: false, hoverinfo: "skip", marker: { size: 0, color: [low], cmin: low, cmax: high,
      colorscale: scale.map((rgb, k) => [k / (scale.length - 1), `rgb(${rgb.join(",")})`]), showscale: high > low,
      colorbar: { thickness: 9, outlinewidth: 0, len: 0.9, xpad: 6, ypad: 0, title: { text: greek[panel.colour_by], side: "top" }, tickfont: { size: 11 }, nticks: 5 } } };
  }

  // Every run of a search: a row for each candidate, runs in the order of the decisions.
  function drawLanes(element) {
    const { lanes, marks, colours, words } = data.search;
    const isNarrow = innerWidth < 720;
    element.classList.add("ready");
    const clip = text => plain(text.length > (isNarrow ? 14 : 32) ? text.slice(0, isNarrow ? 13 : 31) + "\u2026" : text);
    const common = { type: "scatter", hoverinfo: "text" };
    const shown = lanes.map((lane, k) => ({ ...common, mode: "lines", x: [lane.number[0], Math.max(lane.number.at(-1), lane.after ?? 0)], y: [k, k], hoverinfo: "skip", showlegend: false,
      opacity: 0.45, line: { width: 1.5, color: colours[lane.state] } }));
    for (const state of Object.keys(words)) {
      const here = lanes.map((lane, k) => [lane, k]).filter(([lane]) => lane.state === state);
      if (!here.length) continue;
      const flat = pick => here.flatMap(([lane, k]) => lane.number.map((_, i) => pick(lane, k, i)));
      shown.push({ ...common, mode: "markers", name: words[state], x: flat((lane, k, i) => lane.number[i]), y: flat((lane, k) => k),
        text: flat((lane, k, i) => [`<b>${clip(lane.name)}</b>`, ...lane.text[i].map(plain)].join("<br>")),
        marker: { size: flat((lane, k, i) => lane.size[i] * (isNarrow ? 0.65 : 1)), color: colours[state], opacity: 0.92, line: { width: 1, color: css("--bg") } } });
      if (state !== "leader" && state !== "open") shown.push({ ...common, mode: "markers", showlegend: false, y: here.map(([, k]) => k),
        x: here.map(([lane]) => lane.after + 0.5 + (lane.number.includes(lane.after) ? 0.012 * Math.max(...lanes.map(l => l.number.at(-1))) : 0)),
        text: here.map(([lane]) => `<b>${clip(lane.name)}</b><br>${plain(lane.ending).replace(/: |; /g, m => m.trim() + "<br>")}`),
        marker: { symbol: "x-thin", size: 9, line: { width: 2.2, color: colours[state] } } });
    }
    const row = Math.max(15, Math.min(30, 1100 / lanes.length));
    const few = isNarrow ? marks.filter((_, k) => k % 2 === 0) : marks;
    const made = { ...base(118 + row * lanes.length), showlegend: true,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", itemsizing: "constant", font: { size: 13 } },
      xaxis: { ...axis(isNarrow ? "run, and the FLOPs spent before it" : "run; below, the share of FLOPs spent before it", false, null), tickvals: few.map(([n]) => n), ticktext: few.map(([n, share]) => `${n}<br>${share}`) },
      yaxis: { tickvals: lanes.map((_, k) => k), ticktext: lanes.map(lane => clip(lane.name) + "  "), range: [lanes.length - 0.4, -0.6], automargin: true,
        showgrid: false, zeroline: false, fixedrange: true, tickfont: { size: row < 18 ? 10.5 : 12.5 } } };
    made.margin = { ...made.margin, t: 34, l: 20, b: 70 };
    Plotly.react(element.querySelector(".live"), shown, made, config);
  }

  function drawRouting(element) {
    const run = data.routing[+element.querySelector("select").value];
    element.classList.add("ready");
    const [left, right] = element.querySelectorAll(".live");
    const count = run.layers.length;
    const short = run.layers.map(name => plain(name.replace(/^blocks\./, "")));
    const lines = run.entropy.map((y, k) => ({ type: "scatter", mode: "lines", x: run.steps, y, name: short[k], showlegend: false,
      line: { width: 1.8, color: `hsl(${215 + 130 * k / Math.max(1, count - 1)} 45% 52%)` },
      hovertemplate: `${short[k]}<br>step %{x:,}, entropy %{y:.3f}<extra></extra>` }));
    Plotly.react(left, lines, { ...base(380), xaxis: axis("step", false, null), yaxis: axis("entropy of the load", false, null, false, true) }, config);
    const z = run.load.map(row => row.map(v => v > 0 ? Math.max(-2, Math.min(2, Math.log2(v * row.length))) : -2));
    const heat = [{ type: "heatmap", z, y: short, customdata: run.load, zmin: -2, zmax: 2,
      xgap: 1, ygap: 1, colorbar: { thickness: 10, outlinewidth: 0, tickvals: [-2, -1, 0, 1, 2], ticktext: ["\u00bc", "\u00bd", "even", "2 x", "4 x"] },
      hovertemplate: "%{y}, expert %{x}<br>%{customdata:.1%} of its tokens<extra></extra>" }];
    heat[0].colorscale = [[0, "#2f7fd1"], [0.5, css("--line")], [1, "#cf4a4a"]];
    Plotly.react(right, heat, { ...base(380), xaxis: { ...axis("expert", false, null), dtick: Math.ceil((run.load[0] || []).length / 8), showgrid: false },
      yaxis: { showgrid: false, automargin: true, tickfont: { size: 12 }, autorange: "reversed" } }, config);
  }

  function redraw() {
    for (const [element, draw] of drawn) draw(element);
    data.structures.forEach((_, k) => document.querySelectorAll(`.s${k}`).forEach(mark => { mark.style.color = colour(k); }));
  }

  const waiting = new Map();
  for (const element of document.querySelectorAll("figure[data-figure]")) {
    const name = element.dataset.figure;
    const figure = data.figures.find(f => f.name === name);
    const draw = figure ? e => drawFigure(e, figure) : name === "lanes" ? drawLanes : drawRouting;
    waiting.set(element, draw);
    element.querySelectorAll(".choice button").forEach(button => button.addEventListener("click", () => {
      press(button);
      state.panel[name] = +button.dataset.panel;
      show(element);
      draw(element);
    }));
    const select = element.querySelector("select");
    if (select) select.addEventListener("change", () => draw(element));
  }

  function show(element) {
    if (drawn.has(element)) return;
    drawn.set(element, waiting.get(element));
    waiting.get(element)(element);
  }

  function press(button) {
    for (const other of button.parentElement.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
  }

  const near = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); show(entry.target); }
  }, { rootMargin: "400px" });
  waiting.forEach((_, element) => near.observe(element));

  for (const chip of document.querySelectorAll(".chip")) chip.addEventListener("click", () => {
    const k = +chip.dataset.s;
    const isShown = state.hidden.has(k);
    if (isShown) state.hidden.delete(k); else state.hidden.add(k);
    chip.setAttribute("aria-pressed", String(isShown));
    redraw();
  });

  for (const button of document.querySelectorAll("#colour button")) button.addEventListener("click", () => {
    press(button);
    state.by = +button.dataset.by;
    document.getElementById("scale").hidden = state.by < 0;
    if (state.by >= 0) {
      const [low, high] = limits();
      document.getElementById("scale-low").textContent = `${greek[state.by]} ${+low.toFixed(2)}`;
      document.getElementById("scale-high").textContent = high > low ? String(+high.toFixed(2)) : "for all";
      document.querySelector("#scale i").hidden = high <= low;
    }
    redraw();
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  const table = document.querySelector(".runs");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const isDown = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const rows = [...body.rows].map(row => [key(row), row]);
    const isNumeric = rows.every(([v]) => v === "" || !Number.isNaN(+v));
    const sign = isDown ? -1 : 1;
    rows.sort(([a], [b]) => (a === "") - (b === "") || sign * (isNumeric ? a - b : a.localeCompare(b, "en", { numeric: true })));
    body.append(...rows.map(([, row]) => row));
  }));

  const box = document.getElementById("filter");
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
      shown += !row.hidden;
    }
    document.getElementById("filtered").textContent = words.length ? `${shown} of ${body.rows.length} runs` : "";
  });

  // Served live: a new version is loaded with everything as the reader left it.
  const sections = () => [...document.querySelectorAll("section")];

  function keep() {
    const names = k => data.structures[k].structure;
    const [top, section] = sections().map(e => [e.getBoundingClientRect().top, e.getAttribute("aria-labelledby")])
      .filter(([y]) => y <= innerHeight / 2).pop() || [0, null];
    sessionStorage.setItem("report", JSON.stringify({ top, section, hidden: [...state.hidden].map(names), by: state.by,
      panel: state.panel, filter: box.value, isTyping: document.activeElement === box,
      sort: heads.filter(h => h.hasAttribute("aria-sort")).map(h => [h.textContent, h.getAttribute("aria-sort") === "descending" ? 2 : 1]),
      run: document.querySelector("#figure-routing select")?.selectedOptions[0].textContent }));
  }

  function restore() {
    const left = JSON.parse(sessionStorage.getItem("report") || "null");
    sessionStorage.removeItem("report");
    if (!left) return;
    data.structures.forEach((s, k) => { if (left.hidden.includes(s.structure)) document.querySelector(`.chip[data-s="${k}"]`).click(); });
    if (left.by >= 0) document.querySelector(`#colour [data-by="${left.by}"]`).click();
    for (const [name, k] of Object.entries(left.panel)) document.querySelector(`#figure-${name} [data-panel="${k}"]`)?.click();
    box.value = left.filter;
    box.dispatchEvent(new Event("input"));
    if (left.isTyping) box.focus({ preventScroll: true });
    for (const [name, times] of left.sort) for (let k = 0; k < times; k++) heads.find(h => h.textContent === name)?.querySelector("button").click();
    const select = document.querySelector("#figure-routing select");
    const same = select && [...select.options].find(option => option.textContent === left.run);
    if (same) select.value = same.value;
    const here = sections().find(e => e.getAttribute("aria-labelledby") === left.section);
    if (!here) return;
    // Draw everything up to here first, so that later drawings do not move what is being read.
    waiting.forEach((_, e) => { if (here.compareDocumentPosition(e) & 2 || here.contains(e)) show(e); });
    scrollTo({ top: scrollY + here.getBoundingClientRect().top - left.top, behavior: "instant" });
  }

  async function follow(badge) {
    try {
      const now = await (await fetch("version")).json();
      if (now.version > +root.dataset.live) { keep(); location.reload(); return; }
      badge.classList.toggle("wrong", Boolean(now.error));
      badge.textContent = now.error ? `The report could not be updated: ${now.error}. This is the last good version.`
        : `live \u00b7 ${now.running} running${now.left ? ` \u00b7 ${now.left} left` : ""}`;
    } catch {
      badge.textContent = "the server has stopped";
    }
    setTimeout(() => follow(badge), 2000);
  }

  if (root.dataset.live) {
    const badge = document.body.appendChild(document.createElement("p"));
    badge.id = "live";
    badge.setAttribute("role", "status");
    history.scrollRestoration = "manual";
    restore();
    follow(badge);
  }

  window.report = { state, data, redraw, showAll: () => waiting.forEach((_, element) => show(element)) };
})();
