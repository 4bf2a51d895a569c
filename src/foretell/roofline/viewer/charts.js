"use strict";
/* Small SVG charts: curves over a logarithmic axis, and the roofline. Python states values, grids and texts. */
const Charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const make = (name, attributes = {}, ...children) => {
    const node = document.createElementNS(NS, name);
    for (const [k, v] of Object.entries(attributes)) if (v !== undefined) node.setAttribute(k, v);
    node.append(...children);
    return node;
  };

  /* An empty drawing as wide as it is shown, so that its text has the size of the style sheet. */
  function clear(svg, H) {
    const W = Math.max(260, Math.round(svg.getBoundingClientRect().width) || 360);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    return W;
  }
  const label = (svg, x, y, text, anchor = "start", kind = "label") =>
    svg.append(make("text", { x, y, "text-anchor": anchor, class: kind }, text));
  const line = (svg, x1, x2, y1, y2, kind) => svg.append(make("line", { x1, x2, y1, y2, class: kind }));

  /* Curves over a logarithmic x axis, as `chart` in charts.py describes them. */
  function curves(svg, c) {
    const [H, L, R, T, B] = [230, 66, 12, 26, 40],
      W = clear(svg, H),
      xs = c.series.flatMap((s) => s.points.map((p) => Math.log2(p[0]))),
      [x0, x1] = [Math.min(...xs), Math.max(...xs)],
      height = c.logarithmic ? Math.log10 : (v) => v,
      [low, top] = [height(c.grid[0][0]), height(c.grid[c.grid.length - 1][0])],
      X = (v) => L + ((W - L - R) * (Math.log2(v) - x0)) / (x1 - x0 || 1),
      Y = (v) => H - B - ((H - B - T) * (height(v) - low)) / (top - low),
      path = (points) => points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
    for (const [v, text] of c.grid) {
      line(svg, L, W - R, Y(v), Y(v), "gridline");
      label(svg, L - 6, Y(v) + 4, text, "end", "tick");
    }
    for (const [v, text] of c.ticks) label(svg, X(v), H - B + 16, text, "middle", "tick");
    label(svg, W - R, H - 5, c.x, "end");
    label(svg, 2, 13, c.y);
    if (c.even !== null) line(svg, L, W - R, Y(c.even), Y(c.even), "even");
    let left = L;
    for (const s of c.series) {
      const cut = s.points.findIndex((p) => !p[2]),
        kind = s.other ? " other" : "",
        draw = (d, name) => svg.append(make("path", { d, class: name }));
      if (s.band.length) {
        const back = s.band.map((p) => [p[0], p[1]]).reverse();
        draw(path(s.band.map((p) => [p[0], p[2]])) + path(back).replace("M", "L") + "Z", "band");
      }
      if (cut) draw(path(cut < 0 ? s.points : s.points.slice(0, cut)), `curve${kind}`);
      if (cut >= 0) draw(path(s.points.slice(Math.max(0, cut - 1))), `curve${kind} misfit`);
      for (const [x, y] of c.dots ? s.points : [])
        svg.append(make("circle", { cx: X(x), cy: Y(y), r: 3, class: `mark${kind}` }));
      if (!s.label) continue;
      line(svg, left, left + 18, H - 9, H - 9, `curve${kind}`);
      label(svg, left + 22, H - 5, s.label);
      left += 34 + 7 * s.label.length;
    }
    if (c.here) svg.append(make("circle", { cx: X(c.here[0]), cy: Y(c.here[1]), r: 4.5, class: "here" }));
    read(svg, c.series[0].points, W, X, R);
  }

  /* The value beside the pointer. */
  function read(svg, points, W, X, R) {
    const readout = make("text", { x: W - R, y: 13, "text-anchor": "end", class: "readout" });
    svg.append(readout);
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect(),
        x = ((event.clientX - box.left) * W) / box.width;
      readout.textContent = points.reduce((a, p) => (Math.abs(X(p[0]) - x) < Math.abs(X(a[0]) - x) ? p : a))[3];
    };
    svg.onpointerleave = () => readout.replaceChildren();
  }

  /* The roof of each setting over shaded zones, and a dot per operation, both axes logarithmic; as in charts.py. */
  function roofline(svg, roof, chosen, choose) {
    const [H, L, R, T, B] = [250, 48, 14, 20, 38],
      W = clear(svg, H),
      [x0, x1] = roof.x,
      [y0, y1] = roof.y,
      across = (e) => L + ((W - L - R) * (e - x0)) / (x1 - x0),
      up = (e) => H - B - ((H - B - T) * (e - y0)) / (y1 - y0),
      X = (v) => across(Math.log10(v)),
      Y = (v) => up(Math.log10(v)),
      turn = X(roof.roofs[0][1] / roof.roofs[0][0]),
      zone = (x, width, kind) =>
        svg.append(make("rect", { x, y: T, width, height: H - B - T, class: `zone ${kind}` }));
    zone(L, turn - L, "memory");
    zone(turn, W - R - turn, "compute");
    for (const [e, text] of roof.xticks) {
      line(svg, across(e), across(e), T, H - B, "gridline");
      label(svg, across(e), H - B + 15, text, "middle", "tick");
    }
    for (const [e, text] of roof.yticks) {
      line(svg, L, W - R, up(e), up(e), "gridline");
      label(svg, L - 5, up(e) + 4, text, "end", "tick");
    }
    label(svg, W - R, H - 5, "OPs per byte", "end");
    label(svg, 2, 13, "OP/s");
    label(svg, L + 6, T + 15, "memory bound", "start", "zonename memory");
    const words = W - R - turn < 100 ? ["compute", "bound"] : ["compute bound"];
    words.forEach((text, i) =>
      label(svg, turn + 6, H - B - 8 - 15 * (words.length - 1 - i), text, "start", "zonename compute"),
    );
    roof.roofs.forEach(([bandwidth, peak], i) => {
      const d = `M${L} ${Y(bandwidth * 10 ** x0)}L${X(peak / bandwidth)} ${Y(peak)}L${W - R} ${Y(peak)}`;
      svg.append(make("path", { d, class: `roofline${i ? " other" : ""}` }));
    });
    const mine = roof.dots.filter((d) => !d.other),
      shown = mine.find((d) => d.key === chosen),
      draw = (d, kind, r) =>
        svg.append(
          make("circle", { cx: X(d.x), cy: Y(d.y), r, class: `dot ${d.bound} ${kind}` }, make("title", {}, d.title)),
        );
    for (const d of roof.dots) if (d.other) draw(d, "other", 3);
    for (const d of mine) if (d !== shown) draw(d, "", 4);
    if (shown) {
      draw(shown, "chosen", 6);
      const right = X(shown.x) > W * 0.55,
        y = Math.min(Y(shown.y) + 17, H - B - 4);
      label(svg, X(shown.x) + (right ? -10 : 10), y, shown.name, right ? "end" : "start", "readout");
    }
    // The whole drawing is one large target: the nearest dot is chosen.
    svg.onclick = (event) => {
      const box = svg.getBoundingClientRect(),
        [x, y] = [((event.clientX - box.left) * W) / box.width, ((event.clientY - box.top) * H) / box.height],
        far = (d) => Math.hypot(X(d.x) - x, Y(d.y) - y),
        near = mine.reduce((a, d) => (far(d) < far(a) ? d : a));
      if (far(near) < 44) choose(near.key);
    };
  }

  return { make, curves, roofline };
})();
