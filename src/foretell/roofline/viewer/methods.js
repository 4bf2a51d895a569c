"use strict";
/* Decoding methods: the best tree of every size, its tokens per pass, and the shape that gains most. Mirrors speculate.py. */
const Methods = (engine) => {
  const { data } = engine, grown = new Map();

  function grow(ranks, decay, nodes, depth) {
    const key = `${ranks}|${decay}|${nodes}|${depth}`;
    if (grown.has(key)) return grown.get(key);
    const p = ranks.filter((x) => x > 0), width = new Array(depth).fill(0), tokens = [1], expanded = [width.slice()], heap = [];
    const before = (x, y) => x[0] > y[0] || (x[0] === y[0] && x[1] < y[1]);
    let made = 0;
    const push = (path, level, rank) => {
      if (level > depth || rank >= p.length) return;
      heap.push([path * p[rank] * Math.pow(decay, level - 1), ++made, level, rank, path]);
      for (let i = heap.length - 1; i > 0;) {
        const up = (i - 1) >> 1;
        if (!before(heap[i], heap[up])) break;
        [heap[i], heap[up]] = [heap[up], heap[i]]; i = up;
      }
    };
    const pop = () => {
      const top = heap[0], last = heap.pop();
      if (heap.length) {
        heap[0] = last;
        for (let i = 0; ;) {
          let next = i;
          for (const c of [2 * i + 1, 2 * i + 2]) if (c < heap.length && before(heap[c], heap[next])) next = c;
          if (next === i) break;
          [heap[i], heap[next]] = [heap[next], heap[i]]; i = next;
        }
      }
      return top;
    };
    push(1, 1, 0);
    while (heap.length && tokens.length < nodes) {
      const [reach, , level, rank, path] = pop();
      if (rank === 0) width[level - 1]++;
      tokens.push(tokens[tokens.length - 1] + reach);
      expanded.push(width.slice());
      push(path, level, rank + 1);
      push(reach, level + 1, 0);
    }
    grown.set(key, { tokens, expanded });
    return grown.get(key);
  }

  function verification(net, h, s, w, kv, most) {
    const r = engine.rates(s, h, w, kv), list = [null];
    for (let n = 1; n <= most; n++) list.push(engine.totals(net, { groups: [[s.batch, n, s.context]], outputs: s.batch * n }, r, s.square));
    return list;
  }

  const bytes = (c) => c[1] + c[2] + c[3] + c[4] + c[5];

  function drafting(draft, widths, table) {
    if (!draft) return 0;
    if (draft.per === "step") return widths.some((x) => x) ? table[1][9] : 0;
    let sum = 0;
    for (const w of widths) if (w) sum += table[w][9];
    return sum;
  }

  function best(name, model, h, s, target) {
    const m = data.methods[name], draft = model.drafts[name], most = data.mostNodes;
    if (draft && draft.refused) return { name, refused: draft.refused };
    const asked = { ...s, fusion: "flash" };
    const table = draft && verification(draft.net, h, asked, draft.weights || s.weights, draft.kv || s.kv, draft.per === "step" ? 1 : most);
    let top = { nodes: 1, depth: 0, tokens: 1, draft: 0, widths: [] };
    const worth = (c) => c.tokens / (target[c.nodes][9] + c.draft);
    const consider = (c) => { if (worth(c) > worth(top)) top = c; };
    if (m.shape === "fixed") consider({ nodes: m.nodes, depth: 1, tokens: m.tokens, draft: 0, widths: [] });
    const deepest = m.shape === "chain" ? Math.min(most, 4 * data.deepest) : data.deepest;
    for (let depth = 1; m.shape !== "fixed" && depth <= deepest; depth++) {
      const tree = grow(m.ranks, m.decay, most, depth);
      for (let i = 1; i < tree.tokens.length; i++) {
        consider({ nodes: i + 1, depth, tokens: tree.tokens[i], draft: drafting(draft, tree.expanded[i], table), widths: tree.expanded[i] });
      }
    }
    const plain = target[1][9], pass = target[top.nodes][9];
    return {
      name, nodes: top.nodes, depth: top.depth, tokens: top.tokens, pass, draft: top.draft, plain,
      speedup: top.tokens * plain / (pass + top.draft), goodput: s.batch * top.tokens / (pass + top.draft),
      bytes: bytes(target[top.nodes]) / top.tokens / s.batch, basis: m.basis, source: m.source, title: m.title,
    };
  }

  function target(s) {
    const model = engine.check(s), h = engine.hardware(s);
    const net = engine.netOf(model, s, {});
    return { model, h, table: verification(net, h, s, s.weights, s.kv, data.mostNodes) };
  }

  /* Every method at a setting, best first; methods that cannot be used last. */
  function plan(setting) {
    const s = { ...setting, stage: "decode" }, { model, h, table } = target(s);
    const all = Object.keys(data.methods).map((name) => best(name, model, h, s, table));
    return all.sort((x, y) => (y.speedup || 0) - (x.speedup || 0));
  }

  function curve(name, setting, batches) {
    return batches.map((batch) => {
      const s = { ...setting, stage: "decode", batch }, { model, h, table } = target(s);
      return [batch, best(name, model, h, s, table).speedup || 1];
    });
  }

  return { plan, curve, grow };
};
