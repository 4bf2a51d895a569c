"use strict";
/* The operation graph as a picture: every layer group in order, its operations by depth, coloured by their bound. */
const Graph = (() => {
  const { make, amount, duration } = Charts,
    W = 150,
    H = 48,
    GX = 12,
    GY = 22;

  /* Rows of operations: each one below the last of its inputs. */
  function rows(lines) {
    const depth = new Map();
    for (const line of lines) {
      const inputs = line.inputs.filter((n) => depth.has(n));
      depth.set(line.op[0], inputs.length ? 1 + Math.max(...inputs.map((n) => depth.get(n))) : 0);
    }
    const list = [];
    for (const line of lines) (list[depth.get(line.op[0])] ||= []).push(line);
    return list.filter(Boolean);
  }

  function node(line, x, y, answer, other, chosen, choose) {
    const share = (line.seconds * line.count) / answer.seconds,
      versus = other && other.lines.find((l) => l.key === line.key);
    const g = make("g", {
      class: `op ${line.bound}${line.key === chosen ? " chosen" : ""}`,
      tabindex: line.key === chosen ? 0 : -1,
      role: "button",
      "data-key": line.key,
    });
    const moved = line.bound === "link" ? line.cost[6] : line.bytes;
    g.setAttribute(
      "aria-label",
      `${line.op[0]}, ${line.bound} bound, ${duration(line.seconds)}, ` +
        `${amount(line.cost[0])} OPs, ${amount(moved, "B")}`,
    );
    g.setAttribute("aria-pressed", String(line.key === chosen));
    g.append(
      make("rect", { class: "box", x, y, width: W, height: H, rx: 7 }),
      make("rect", { class: "edge", x, y: y + 6, width: 3.5, height: H - 12, rx: 1.7 }),
      make("text", { class: "name", x: x + 11, y: y + 19 }, line.op[0]),
      make("text", { class: "figures", x: x + 11, y: y + 34 }, `${duration(line.seconds)} · ${amount(moved, "B")}`),
      make("rect", {
        class: "share",
        x: x + 11,
        y: y + H - 7,
        width: Math.max(1, (W - 22) * share),
        height: 3,
        rx: 1.5,
      }),
    );
    if (versus && versus.seconds)
      g.append(
        make(
          "text",
          { class: "versus", x: x + W - 8, y: y + 19, "text-anchor": "end" },
          `×${Number((line.seconds / versus.seconds).toPrecision(3))}`,
        ),
      );
    g.onclick = () => choose(line.key);
    return g;
  }

  /* Draws the answer into the SVG; arrow keys walk through the operations in order. */
  function draw(svg, answer, other, chosen, choose) {
    const groups = [];
    for (const line of answer.lines) {
      if (!groups.length || groups[groups.length - 1].name !== line.group)
        groups.push({ name: line.group, count: line.count, lines: [] });
      groups[groups.length - 1].lines.push(line);
    }
    const most = Math.max(...groups.flatMap((b) => rows(b.lines).map((r) => r.length))),
      width = most * (W + GX) + 76,
      middle = width / 2 + 10;
    const edges = make("g"),
      frames = make("g"),
      nodes = make("g"),
      where = new Map();
    let y = 14,
      out = null;
    for (const group of groups) {
      const framed = group.count !== 1 || group.lines.some((l) => l.op[0] === "attn_norm");
      const top = y;
      if (framed) y += 30;
      const entry = [middle, y - 6],
        seen = new Set();
      if (out) edges.append(make("path", { d: `M${out[0]} ${out[1]}L${entry[0]} ${entry[1]}`, class: "flow" }));
      where.set("x", { x: entry[0], y: entry[1], row: -1 });
      rows(group.lines).forEach((row, depth) => {
        row.forEach((line, i) => {
          const x = middle + (i - row.length / 2) * (W + GX) + GX / 2;
          nodes.append(node(line, x, y, answer, other, chosen, choose));
          for (const name of line.inputs.length ? line.inputs : ["x"])
            link(edges, where.get(name) || where.get("x"), x, y, depth, middle - (most * (W + GX)) / 2 - 8);
          where.set(line.op[0], { x: x + W / 2, y: y + H, row: depth, left: x });
          seen.add(line.op[0]);
        });
        y += H + GY;
      });
      const last = where.get(group.lines[group.lines.length - 1].op[0]);
      out = [last.x, last.y];
      for (const name of seen) where.delete(name);
      if (framed) {
        const left = middle - (most * (W + GX)) / 2 - 26;
        frames.append(
          make("rect", { class: "frame", x: left, y: top, width: most * (W + GX) + 40, height: y - top - 6, rx: 14 }),
        );
        frames.append(
          make(
            "text",
            { class: "frametitle", x: left + 14, y: top + 19 },
            `${group.name} × ${Number(group.count.toPrecision(4))}`,
          ),
        );
        y += 12;
      }
    }
    svg.replaceChildren(edges, frames, nodes);
    svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", y);
    svg.onkeydown = (event) => walk(event, answer, chosen, choose);
  }

  function link(edges, from, x, y, depth, lane) {
    if (!from) return;
    const to = [x + W / 2, y];
    if (depth - from.row > 2) {
      const start = from.left === undefined ? [from.x, from.y] : [from.left, from.y - H / 2],
        end = [x, y + H / 2];
      edges.append(
        make("path", {
          d:
            `M${start[0]} ${start[1]}C${lane} ${start[1]} ${lane} ${start[1]} ${lane} ${start[1] + 16}` +
            `L${lane} ${end[1] - 16}C${lane} ${end[1]} ${lane} ${end[1]} ${end[0]} ${end[1]}`,
          class: "flow skip",
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
    if (next === null) return;
    event.preventDefault();
    choose(answer.lines[next].key, true);
  }

  return { draw };
})();
