"use strict";
/* Small SVG charts: curves over a logarithmic axis, and the roofline. */
const Charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const make = (name, attributes = {}, ...children) => {
    const node = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) if (v !== undefined) node.setAttribute(k, v);
    for (const child of children) node.append(child);
    return node;
  };

  const PREFIX = ["", "k", "M", "G", "T", "P", "E"];
  function amount(x, unit = "") {
    if (!isFinite(x)) return "–";
    let i = 0;
    while (Math.abs(x) >= 999.5 && i < PREFIX.length - 1) {
      x /= 1000;
      i++;
    }
    return `${Number(x.toPrecision(3))} ${PREFIX[i]}${unit}`.trim();
  }
  function duration(s) {
    for (const [f, u] of [
      [1, "s"],
      [1e3, "ms"],
      [1e6, "µs"],
    ])
      if (s * f >= 1) return `${Number((s * f).toPrecision(4))} ${u}`;
    return `${Number((s * 1e9).toPrecision(4))} ns`;
  }

  function niceTop(v) {
    const p = Math.pow(10, Math.floor(Math.log10(v || 1)));
    return [1, 2, 4, 6, 8, 10].map((k) => k * p).find((k) => k >= v) || v;
  }

  /* An empty drawing as wide as it is shown, so that its text has the size of the style sheet. */
  function clear(svg, H) {
    const W = Math.max(260, Math.round(svg.getBoundingClientRect().width) || 360);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    return W;
  }
  const label = (svg, x, y, text, anchor = "start", kind = "label") =>
    svg.append(make("text", { x, y, "text-anchor": anchor, class: kind }, text));

  /* Values from 0 to a round top, or from decade to decade: [position 0..1 of a value, values of the grid]. */
  function scaleOf(values, logarithmic) {
    if (!logarithmic) {
      const top = niceTop(Math.max(...values) * 1.02);
      return [(v) => v / top, [0, 1, 2, 3, 4].map((i) => (top * i) / 4)];
    }
    const low = Math.floor(Math.log10(Math.min(...values))),
      high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values)))),
      grid = Array.from({ length: high - low + 1 }, (_, i) => 10 ** (low + i));
    return [(v) => (Math.log10(v) - low) / (high - low), grid];
  }

  /* Curves over a logarithmic x axis. series: [{points: [[x, y, fits]], band: [[x, low, high]], other, label}]; here:
     [x, y], drawn as a dot; even: a value of y, drawn as a dashed line; dots: mark every point. */
  function curves(svg, { series, here, even, xlabel, ylabel, format, logarithmic, dots }) {
    const H = 230,
      L = 66,
      R = 12,
      T = 26,
      B = 40,
      W = clear(svg, H);
    const xs = series.flatMap((s) => s.points.map((p) => p[0])),
      ys = series.flatMap((s) => [...s.points.map((p) => p[1]), ...(s.band || []).map((p) => p[2])]);
    const x0 = Math.log2(Math.min(...xs)),
      x1 = Math.log2(Math.max(...xs));
    const [at, grid] = scaleOf(even === undefined ? ys : [...ys, even], logarithmic);
    const X = (v) => L + ((W - L - R) * (Math.log2(v) - x0)) / (x1 - x0 || 1),
      Y = (v) => H - B - (H - B - T) * at(v),
      place = (x, y) => `${X(x).toFixed(1)} ${Y(y).toFixed(1)}`,
      path = (points) => points.map((p, i) => `${i ? "L" : "M"}${place(p[0], p[1])}`).join("");
    for (const v of grid) {
      svg.append(make("line", { x1: L, x2: W - R, y1: Y(v), y2: Y(v), class: "gridline" }));
      label(svg, L - 6, Y(v) + 4, format(v), "end", "tick");
    }
    const step = Math.max(1, Math.ceil((x1 - x0) / 6));
    for (let e = Math.ceil(x0 - 1e-9); e <= x1 + 1e-9; e += step)
      label(svg, X(2 ** e), H - B + 16, e < 10 ? String(2 ** e) : `${2 ** (e - 10)}k`, "middle", "tick");
    label(svg, W - R, H - 5, xlabel, "end");
    label(svg, 2, 13, ylabel);
    if (even !== undefined) svg.append(make("line", { x1: L, x2: W - R, y1: Y(even), y2: Y(even), class: "even" }));
    for (const s of series) {
      const cut = s.points.findIndex((p) => p[2] === false),
        good = cut < 0 ? s.points : s.points.slice(0, cut),
        kind = "curve" + (s.other ? " other" : "");
      if (s.band) {
        const back = s.band.slice().reverse(),
          lower = back.map((p) => `L${place(p[0], Math.max(0, p[1]))}`).join("");
        svg.append(make("path", { d: path(s.band.map((p) => [p[0], p[2]])) + lower + "Z", class: "band" }));
      }
      if (good.length) svg.append(make("path", { d: path(good), class: kind }));
      if (cut >= 0)
        svg.append(make("path", { d: path(s.points.slice(Math.max(0, cut - 1))), class: kind + " misfit" }));
      for (const p of dots ? s.points : [])
        svg.append(make("circle", { cx: X(p[0]), cy: Y(p[1]), r: 3, class: s.other ? "mark other" : "mark" }));
    }
    let left = L;
    for (const s of series.filter((x) => x.label)) {
      const kind = s.other ? "curve other" : "curve";
      svg.append(make("line", { x1: left, x2: left + 18, y1: H - 9, y2: H - 9, class: kind }));
      label(svg, left + 22, H - 5, s.label);
      left += 34 + 7 * s.label.length;
    }
    if (here) svg.append(make("circle", { cx: X(here[0]), cy: Y(here[1]), r: 4.5, class: "here" }));
    read(svg, series[0].points, W, X, R, format);
  }

  /* The value beside the pointer. */
  function read(svg, points, W, X, R, format) {
    const readout = make("text", { x: W - R, y: 13, "text-anchor": "end", class: "readout" });
    svg.append(readout);
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect(),
        x = ((event.clientX - box.left) * W) / box.width,
        near = points.reduce((a, p) => (Math.abs(X(p[0]) - x) < Math.abs(X(a[0]) - x) ? p : a)),
        note = near[2] === false ? " (does not fit)" : "";
      readout.textContent = `${Number(near[0].toPrecision(3)).toLocaleString("en")}: ${format(near[1])}${note}`;
    };
    svg.onpointerleave = () => {
      readout.textContent = "";
    };
  }

  /* The roof of each answer over shaded zones, and a dot per operation, both axes logarithmic. */
  function roofline(svg, answer, other, chosen, choose) {
    const H = 250,
      L = 48,
      R = 14,
      T = 20,
      B = 38,
      W = clear(svg, H);
    const shown = (l) => l.cost[0] > 0 && l.bytes > 0,
      lists = [answer, other].filter(Boolean),
      dots = lists.flatMap((a) => a.lines).filter(shown);
    const peaks = lists.map((a) => Math.max(a.rates.matmul, a.rates.attention)),
      turns = lists.map((a, i) => peaks[i] / a.rates.bandwidth);
    const x0 = Math.floor(Math.log10(Math.min(...dots.map((d) => d.intensity), 0.5))),
      x1 = Math.ceil(Math.log10(Math.max(...dots.map((d) => d.intensity), ...turns.map((t) => t * 12))));
    const lows = lists.map((a) => a.rates.bandwidth * 10 ** x0),
      y0 = Math.floor(Math.log10(Math.min(...lows, ...dots.map((d) => d.attainable)))),
      y1 = Math.log10(Math.max(...peaks)) + 0.5;
    const X = (v) => L + ((W - L - R) * (Math.log10(v) - x0)) / (x1 - x0),
      Y = (v) => H - B - ((H - B - T) * (Math.log10(v) - y0)) / (y1 - y0),
      tick = (v) => (v < 1 ? String(v).slice(0, 5) : amount(v).replace(" ", "")),
      turn = X(turns[0]);
    const zone = (x, width, kind) =>
      svg.append(make("rect", { x, y: T, width, height: H - B - T, class: `zone ${kind}` }));
    zone(L, turn - L, "memory");
    zone(turn, W - R - turn, "compute");
    for (let e = x0; e <= x1; e++) {
      svg.append(make("line", { x1: X(10 ** e), x2: X(10 ** e), y1: T, y2: H - B, class: "gridline" }));
      label(svg, X(10 ** e), H - B + 15, tick(10 ** e), "middle", "tick");
    }
    for (let e = Math.ceil(y0); e <= y1; e++) {
      svg.append(make("line", { x1: L, x2: W - R, y1: Y(10 ** e), y2: Y(10 ** e), class: "gridline" }));
      label(svg, L - 5, Y(10 ** e) + 4, tick(10 ** e), "end", "tick");
    }
    label(svg, W - R, H - 5, "OPs per byte", "end");
    label(svg, 2, 13, "OP/s");
    label(svg, L + 6, T + 15, "memory bound", "start", "zonename memory");
    const lines = W - R - turn < 100 ? ["compute", "bound"] : ["compute bound"];
    lines.forEach((text, i) =>
      label(svg, turn + 6, H - B - 8 - 15 * (lines.length - 1 - i), text, "start", "zonename compute"),
    );
    lists.forEach((a, i) => {
      const [left, right] = [10 ** x0, 10 ** x1];
      const d = `M${X(left)} ${Y(a.rates.bandwidth * left)}L${X(turns[i])} ${Y(peaks[i])}L${X(right)} ${Y(peaks[i])}`;
      svg.append(make("path", { d, class: "roofline" + (a === other ? " other" : "") }));
    });
    const draw = (line, kind, r) => {
      const at = { cx: X(line.intensity), cy: Y(line.attainable), r },
        dot = make("circle", { ...at, class: `dot ${line.bound} ${kind}` }),
        intensity = `${Number(line.intensity.toPrecision(3))} OPs/byte`;
      dot.append(make("title", {}, `${line.op[0]}: ${intensity}, ${amount(line.attainable, "OP/s")}`));
      svg.append(dot);
    };
    if (other) other.lines.filter(shown).forEach((l) => draw(l, "other", 3));
    answer.lines.filter((l) => shown(l) && l.key !== chosen).forEach((l) => draw(l, "", 4));
    const mine = answer.lines.find((l) => l.key === chosen);
    if (mine && shown(mine)) {
      draw(mine, "chosen", 6);
      const right = X(mine.intensity) > W * 0.55,
        y = Math.min(Y(mine.attainable) + 17, H - B - 4);
      label(svg, X(mine.intensity) + (right ? -10 : 10), y, mine.op[0], right ? "end" : "start", "readout");
    }
    // The whole drawing is one large target: the nearest dot is chosen.
    svg.onclick = (event) => {
      const box = svg.getBoundingClientRect(),
        [x, y] = [((event.clientX - box.left) * W) / box.width, ((event.clientY - box.top) * H) / box.height],
        far = (l) => Math.hypot(X(l.intensity) - x, Y(l.attainable) - y),
        near = answer.lines.filter(shown).reduce((a, l) => (far(l) < far(a) ? l : a));
      if (far(near) < 44) choose(near.key);
    };
  }

  return { make, amount, duration, curves, roofline };
})();
