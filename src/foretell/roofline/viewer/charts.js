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

  /* Curves over a logarithmic x axis. series: [{points: [[x, y, fits]], other}]; here: [x, y], drawn as a dot; even: a
     value of y, drawn as a dashed line. */
  function curves(svg, { series, here, even, xlabel, ylabel, format }) {
    const W = 360,
      H = 220,
      L = 52,
      R = 10,
      T = 22,
      B = 36;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    const xs = series.flatMap((s) => s.points.map((p) => p[0])),
      ys = series.flatMap((s) => s.points.map((p) => p[1]));
    const x0 = Math.log2(Math.max(1, Math.min(...xs))),
      x1 = Math.log2(Math.max(...xs)),
      top = niceTop(Math.max(...ys, even || 0) * 1.02);
    const X = (v) => L + ((W - L - R) * (Math.log2(Math.max(1, v)) - x0)) / (x1 - x0 || 1),
      Y = (v) => H - B - ((H - B - T) * v) / top;
    for (let i = 0; i <= 4; i++) {
      const y = Y((top * i) / 4);
      svg.append(make("line", { x1: L, x2: W - R, y1: y, y2: y, class: "gridline" }));
      svg.append(make("text", { x: L - 6, y: y + 3.5, "text-anchor": "end", class: "tick" }, format((top * i) / 4)));
    }
    const step = Math.ceil((x1 - x0) / 6);
    for (let e = Math.ceil(x0); e <= x1; e += step) {
      svg.append(
        make(
          "text",
          { x: X(2 ** e), y: H - B + 14, "text-anchor": "middle", class: "tick" },
          e < 10 ? String(2 ** e) : `${2 ** (e - 10)}k`,
        ),
      );
    }
    svg.append(
      make("text", { x: W - R, y: H - 4, "text-anchor": "end", class: "label" }, xlabel),
      make("text", { x: 4, y: 12, class: "label" }, ylabel),
    );
    if (even !== undefined) svg.append(make("line", { x1: L, x2: W - R, y1: Y(even), y2: Y(even), class: "even" }));
    for (const s of series) {
      const path = (points) =>
        points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
      const cut = s.points.findIndex((p) => p[2] === false),
        good = cut < 0 ? s.points : s.points.slice(0, cut);
      const kind = "curve" + (s.other ? " other" : "");
      if (good.length) svg.append(make("path", { d: path(good), class: kind }));
      if (cut >= 0)
        svg.append(make("path", { d: path(s.points.slice(Math.max(0, cut - 1))), class: kind + " misfit" }));
    }
    if (here) svg.append(make("circle", { cx: X(here[0]), cy: Y(here[1]), r: 4.5, class: "here" }));
    const readout = make("text", { x: W - R, y: 12, "text-anchor": "end", class: "readout" });
    svg.append(readout);
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect(),
        x = ((event.clientX - box.left) * W) / box.width;
      const near = series[0].points.reduce((a, p) => (Math.abs(X(p[0]) - x) < Math.abs(X(a[0]) - x) ? p : a));
      const note = near[2] === false ? " (does not fit)" : "";
      readout.textContent = `${near[0].toLocaleString("en")}: ${format(near[1])}${note}`;
    };
    svg.onpointerleave = () => {
      readout.textContent = "";
    };
  }

  /* The roof of each answer and a dot per operation, both axes logarithmic. */
  function roofline(svg, answer, other, chosen, choose) {
    const W = 360,
      H = 236,
      L = 40,
      R = 12,
      T = 14,
      B = 34;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    const lists = [answer, other].filter(Boolean),
      dots = lists.flatMap((a) => a.lines).filter((l) => l.cost[0] > 0 && l.bytes > 0);
    const peaks = lists.map((a) => Math.max(a.rates.matmul, a.rates.attention)),
      turns = lists.map((a, i) => peaks[i] / a.rates.bandwidth);
    const x0 = Math.floor(Math.log10(Math.min(...dots.map((d) => d.intensity), 0.5))),
      x1 = Math.ceil(Math.log10(Math.max(...dots.map((d) => d.intensity), ...turns.map((t) => t * 3))));
    const lows = lists.map((a) => a.rates.bandwidth * 10 ** x0),
      y0 = Math.floor(Math.log10(Math.min(...lows, ...dots.map((d) => d.attainable)))),
      y1 = Math.log10(Math.max(...peaks)) + 0.35;
    const X = (v) => L + ((W - L - R) * (Math.log10(v) - x0)) / (x1 - x0),
      Y = (v) => H - B - ((H - B - T) * (Math.log10(v) - y0)) / (y1 - y0);
    for (let e = x0; e <= x1; e++) {
      svg.append(make("line", { x1: X(10 ** e), x2: X(10 ** e), y1: T, y2: H - B, class: "gridline" }));
      svg.append(
        make(
          "text",
          { x: X(10 ** e), y: H - B + 13, "text-anchor": "middle", class: "tick" },
          e < 0 ? String(10 ** e).slice(0, 5) : amount(10 ** e).replace(" ", ""),
        ),
      );
    }
    for (let e = Math.ceil(y0); e <= y1; e++) {
      svg.append(make("line", { x1: L, x2: W - R, y1: Y(10 ** e), y2: Y(10 ** e), class: "gridline" }));
      svg.append(
        make(
          "text",
          { x: L - 5, y: Y(10 ** e) + 3.5, "text-anchor": "end", class: "tick" },
          amount(10 ** e).replace(" ", ""),
        ),
      );
    }
    svg.append(
      make("text", { x: W - R, y: H - 5, "text-anchor": "end", class: "label" }, "OPs per byte"),
      make("text", { x: 2, y: 10, class: "label" }, "OP/s"),
    );
    lists.forEach((a, i) => {
      const [left, right] = [10 ** x0, 10 ** x1];
      const d =
        `M${X(left)} ${Y(a.rates.bandwidth * left)}L${X(turns[i])} ${Y(peaks[i])}` + `L${X(right)} ${Y(peaks[i])}`;
      svg.append(make("path", { d, class: "roofline" + (a === other ? " other" : "") }));
    });
    const draw = (line, kind, r) => {
      const dot = make("circle", {
        cx: X(line.intensity),
        cy: Y(line.attainable),
        r,
        class: `dot ${line.bound} ${kind}`,
      });
      dot.append(
        make(
          "title",
          {},
          `${line.op[0]}: ${Number(line.intensity.toPrecision(3))} OPs/byte, ${amount(line.attainable, "OP/s")}`,
        ),
      );
      if (kind !== "other") dot.onclick = () => choose(line.key);
      svg.append(dot);
    };
    const shown = (l) => l.cost[0] > 0 && l.bytes > 0;
    if (other) other.lines.filter(shown).forEach((l) => draw(l, "other", 3));
    answer.lines.filter((l) => shown(l) && l.key !== chosen).forEach((l) => draw(l, "", 4));
    const mine = answer.lines.find((l) => l.key === chosen);
    if (mine && shown(mine)) {
      draw(mine, "chosen", 6);
      const right = X(mine.intensity) > W * 0.62;
      svg.append(
        make(
          "text",
          {
            x: X(mine.intensity) + (right ? -10 : 10),
            y: Y(mine.attainable) + 14,
            "text-anchor": right ? "end" : "start",
            class: "readout",
          },
          mine.op[0],
        ),
      );
    }
  }

  return { make, amount, duration, curves, roofline };
})();
