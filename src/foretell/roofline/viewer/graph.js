"use strict";
/* The operation graph as a picture: every layer group in order, its rows of operations, coloured by their bound. */
const Graph = (() => {
  const { make } = Charts,
    GX = 10,
    GY = 12;
  /* Sizes of a node and of the space beside the nodes: on a narrow screen the figures take two lines. */
  const WIDE = { W: 150, H: 41, lines: 1, beside: 46, pad: 10 },
    NARROW = { W: 86, H: 56, lines: 2, beside: 20, pad: 8 };

  function node(line, x, y, size, chosen, choose) {
    const { W, H, pad } = size,
      ratio = line.versus,
      figures = [line.took, line.moved];
    const g = make("g", {
      class: `op ${line.bound}${line.key === chosen ? " chosen" : ""}${size === WIDE ? "" : " narrow"}`,
      tabindex: line.key === chosen ? 0 : -1,
      role: "button",
      "data-key": line.key,
      "aria-pressed": String(line.key === chosen),
      "aria-label": line.label,
    });
    g.append(
      make("rect", { class: "box", x, y, width: W, height: H, rx: 7 }),
      make("rect", { class: "edge", x, y: y + 5, width: 3.5, height: H - 10, rx: 1.7 }),
    );
    const isWide = size.lines === 1,
      // Of letters 7.2 wide on average, those of a long name are set narrower where the node is narrow.
      squeezed = !isWide && line.name.length * 7.2 > W - pad - 4 ? { textLength: W - pad - 5 } : {},
      fitted = { ...squeezed, lengthAdjust: "spacingAndGlyphs" };
    g.append(make("text", { class: "name", x: x + pad, y: y + 15, ...fitted }, line.name));
    const texts = isWide ? [figures.join(" · ")] : ratio ? [figures[0]] : figures;
    texts.forEach((text, i) => g.append(make("text", { class: "figures", x: x + pad, y: y + 29.5 + 14 * i }, text)));
    const width = Math.max(1, (W - 2 * pad) * line.share);
    g.append(make("rect", { class: "share", x: x + pad, y: y + H - 6, width, height: 3, rx: 1.5 }));
    // A narrow node has no space for both: the ratio takes the line of the bytes.
    const place = isWide ? { x: x + W - 7, y: y + 15, "text-anchor": "end" } : { x: x + pad, y: y + 43.5 };
    if (ratio) g.append(make("text", { class: "versus", ...place }, ratio));
    g.onclick = () => choose(line.key);
    return g;
  }

  /* Draws the answer into the SVG, for a frame of that width; arrow keys walk through the operations in order. */
  function draw(svg, answer, chosen, choose, frameWidth) {
    const lines = new Map(answer.lines.map((l) => [l.key, l])),
      most = Math.max(...answer.groups.flatMap((group) => group.rows.map((r) => r.length))),
      size = frameWidth < 480 ? { ...NARROW } : WIDE;
    if (size !== WIDE) size.W = Math.max(size.W, Math.min(150, (frameWidth - 2 * size.beside) / most - GX));
    const { W, H } = size,
      width = most * (W + GX) + 2 * size.beside,
      middle = width / 2,
      [edges, frames, nodes] = [make("g"), make("g"), make("g")],
      lanes = [middle - (most * (W + GX)) / 2 - 6, middle + (most * (W + GX)) / 2 + 6];
    let y = 10,
      out = null;
    for (const group of answer.groups) {
      const top = y,
        where = new Map();
      if (group.title) y += 24;
      const first = group.title ? middle : middle - ((group.rows[0].length - 1) * (W + GX)) / 2,
        entry = [first, y - 6];
      if (out) edges.append(make("path", { d: `M${out[0]} ${out[1]}L${entry[0]} ${entry[1]}`, class: "flow" }));
      where.set("x", { x: entry[0], y: entry[1], row: -1 });
      group.rows.forEach((row, depth) => {
        row.forEach((name, i) => {
          const x = middle + (i - row.length / 2) * (W + GX) + GX / 2,
            inputs = group.inputs[name];
          nodes.append(node(lines.get(`${group.name}/${name}`), x, y, size, chosen, choose));
          const beside = `M${x - GX} ${y + H / 2}L${x} ${y + H / 2}`;
          if (!group.title && i) edges.append(make("path", { d: beside, class: "flow" }));
          else
            for (const source of inputs.length ? inputs : ["x"])
              link(edges, where.get(source) || where.get("x"), name, { x, y, depth }, size, lanes);
          where.set(name, { x: x + W / 2, y: y + H, row: depth, left: x });
        });
        y += H + GY;
      });
      const last = where.get(group.rows.at(-1).at(-1));
      out = [last.x, last.y];
      if (group.title) {
        const left = lanes[0] - 8;
        frames.append(
          make("rect", { class: "frame", x: left, y: top, width: lanes[1] - left + 8, height: y - top - 6, rx: 14 }),
          make("text", { class: "frametitle", x: left + 12, y: top + 17 }, group.title),
        );
        y += 8;
      }
    }
    svg.replaceChildren(edges, frames, nodes);
    svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
    svg.onkeydown = (event) => walk(event, answer, chosen, choose);
  }

  /* An edge from an operation to a later one. Residuals run dashed on the left, other long edges on the right. */
  function link(edges, from, name, { x, y, depth }, { W, H }, lanes) {
    if (!from) return;
    const to = [x + W / 2, y];
    if (depth - from.row > 2) {
      const isResidual = name.endsWith("_add"),
        lane = lanes[isResidual ? 0 : 1],
        side = isResidual ? 0 : W,
        start = from.left === undefined ? [from.x, from.y] : [from.left + side, from.y - H / 2],
        end = [x + side, y + H / 2];
      edges.append(
        make("path", {
          d:
            `M${start[0]} ${start[1]}C${lane} ${start[1]} ${lane} ${start[1]} ${lane} ${start[1] + 16}` +
            `L${lane} ${end[1] - 16}C${lane} ${end[1]} ${lane} ${end[1]} ${end[0]} ${end[1]}`,
          class: isResidual ? "flow skip" : "flow",
        }),
      );
      return;
    }
    // Past a whole row the edge first runs straight down beside it.
    const bend = Math.max(from.y, to[1] - GY);
    edges.append(
      make("path", {
        d:
          `M${from.x} ${from.y}L${from.x} ${bend}` +
          `C${from.x} ${(bend + to[1]) / 2} ${to[0]} ${(bend + to[1]) / 2} ${to[0]} ${to[1]}`,
        class: "flow",
      }),
    );
  }

  function walk(event, answer, chosen, choose) {
    const keys = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 },
      at = answer.lines.findIndex((l) => l.key === chosen);
    let next = null;
    if (event.key in keys) next = Math.min(Math.max(at + keys[event.key], 0), answer.lines.length - 1);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = answer.lines.length - 1;
    if (next === null || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    choose(answer.lines[next].key, true);
  }

  return { draw };
})();
