"use strict";
/* Decoding methods: the best tree of every size, its tokens per pass, and the fastest shape, as in speculation.py. */
const Methods = (engine) => {
  const { data } = engine,
    cache = new Map();

  function bestTrees(ranks, decay, nodes, depth) {
    const key = `${ranks}|${decay}|${nodes}|${depth}`;
    if (cache.has(key)) return cache.get(key);
    const p = ranks.filter((x) => x > 0),
      width = new Array(depth).fill(0),
      tokens = [1],
      nodesExpanded = [width.slice()],
      heap = [];
    const before = (x, y) => x[0] > y[0] || (x[0] === y[0] && x[1] < y[1]);
    let made = 0;
    const push = (path, level, rank) => {
      if (level > depth || rank >= p.length) return;
      heap.push([path * p[rank] * Math.pow(decay, level - 1), ++made, level, rank, path]);
      for (let i = heap.length - 1; i > 0;) {
        const up = (i - 1) >> 1;
        if (!before(heap[i], heap[up])) break;
        [heap[i], heap[up]] = [heap[up], heap[i]];
        i = up;
      }
    };
    const pop = () => {
      const first = heap[0],
        last = heap.pop();
      if (heap.length) {
        heap[0] = last;
        for (let i = 0; ;) {
          let next = i;
          for (const c of [2 * i + 1, 2 * i + 2]) if (c < heap.length && before(heap[c], heap[next])) next = c;
          if (next === i) break;
          [heap[i], heap[next]] = [heap[next], heap[i]];
          i = next;
        }
      }
      return first;
    };
    push(1, 1, 0);
    while (heap.length && tokens.length < nodes) {
      const [reach, , level, rank, path] = pop();
      if (rank === 0) width[level - 1]++;
      tokens.push(tokens[tokens.length - 1] + reach);
      nodesExpanded.push(width.slice());
      push(path, level, rank + 1);
      push(reach, level + 1, 0);
    }
    cache.set(key, { tokens, nodesExpanded });
    return cache.get(key);
  }

  function verificationCosts(graph, h, s, w, kv, maxNodes) {
    const r = engine.rates(s, h, w, kv),
      list = [null];
    for (let n = 1; n <= maxNodes; n++)
      list.push(engine.totals(graph, { sequences: [[s.batch, n, s.context]], logitRows: s.batch * n }, r, s.square));
    return list;
  }

  const bytes = (c) => c[1] + c[2] + c[3] + c[4] + c[5];

  function draftSeconds(draft, widths, table) {
    if (!draft) return 0;
    if (draft.per === "step") return widths.some((x) => x) ? table[1][9] : 0;
    let sum = 0;
    for (const w of widths) if (w) sum += table[w][9];
    return sum;
  }

  function best(name, model, h, s, target) {
    const draft = model.drafts[name],
      m = { ...data.methods[name], ...model.acceptance[name] },
      maxNodes = Math.min(data.maxNodes, m.largest ? m.largest[0] : data.maxNodes),
      step = h.runtime.step_overhead;
    if (draft && draft.unavailable) return { name, unavailable: draft.unavailable };
    const asked = { ...s, fusion: "flash", context: Math.min(s.context, draft?.cached ?? s.context) };
    const widest = draft && draft.per === "step" ? 1 : maxNodes;
    const table =
      draft && verificationCosts(draft.graph, h, asked, draft.weights || s.weights, draft.kv || s.kv, widest);
    let chosen = { nodes: 1, depth: 0, tokens: 1, draft: 0, widths: [] };
    const rate = (c) => c.tokens / (target[c.nodes][9] + c.draft);
    const consider = (c) => {
      if (rate(c) > rate(chosen)) chosen = c;
    };
    if (m.shape === "fixed") consider({ nodes: m.nodes, depth: 1, tokens: m.tokens, draft: step, widths: [] });
    const deepest = m.shape === "chain" ? Math.min(maxNodes, 4 * data.maxDepth) : data.maxDepth,
      maxDepth = Math.min(deepest, m.maxDepth || deepest, m.largest ? m.largest[1] : deepest);
    for (let depth = 1; m.shape !== "fixed" && depth <= maxDepth; depth++) {
      const tree = bestTrees(m.ranks, m.decay, maxNodes, depth);
      for (let i = 1; i < tree.tokens.length; i++) {
        consider({
          nodes: i + 1,
          depth,
          tokens: tree.tokens[i],
          draft: draftSeconds(draft, tree.nodesExpanded[i], table) + step,
          widths: tree.nodesExpanded[i],
        });
      }
    }
    const plain = target[1][9],
      pass = target[chosen.nodes][9],
      speedup = (chosen.tokens * plain) / (pass + chosen.draft),
      ofTokens = (m.spread * (chosen.tokens - 1)) / chosen.tokens,
      relative = chosen.nodes === 1 ? 0 : Math.hypot(ofTokens, h.runtime.error);
    return {
      name,
      nodes: chosen.nodes,
      depth: chosen.depth,
      tokens: chosen.tokens,
      pass,
      draft: chosen.draft,
      plain,
      speedup,
      range: [speedup * (1 - relative), speedup * (1 + relative)],
      goodput: (s.batch * chosen.tokens) / (pass + chosen.draft),
      bytes: bytes(target[chosen.nodes]) / chosen.tokens / s.batch,
      basis: m.basis,
      source: m.source,
      title: m.title,
    };
  }

  function target(s) {
    const model = engine.check(s),
      h = engine.hardware(s);
    const graph = engine.graphOf(model, s, {});
    return { model, h, table: verificationCosts(graph, h, s, s.weights, s.kv, data.maxNodes) };
  }

  /* Every method at a workload, best first; methods that cannot be used last. */
  function plan(workload) {
    const s = { ...workload, stage: "decode" },
      { model, h, table } = target(s);
    const all = Object.keys(data.methods).map((name) => best(name, model, h, s, table));
    return all.sort((x, y) => (y.speedup || 0) - (x.speedup || 0));
  }

  function curve(name, workload, batches) {
    return batches.map((batch) => {
      const s = { ...workload, stage: "decode", batch },
        { model, h, table } = target(s);
      return [batch, best(name, model, h, s, table).speedup || 1];
    });
  }

  return { plan, curve, bestTrees };
};
