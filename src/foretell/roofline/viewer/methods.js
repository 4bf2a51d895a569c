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

  /* Cost of a pass over n tokens per sequence, as a function of n that keeps what it computed. */
  function passCosts(graph, h, s, w, kv, square) {
    const r = engine.rates(s, h, w, kv),
      kept = [];
    return (n) =>
      (kept[n] ||= engine.totals(graph, { sequences: [[s.batch, n, s.context]], logitRows: s.batch * n }, r, square));
  }

  const bytes = (c) => c[1] + c[2] + c[3] + c[4] + c[5];

  /* Acceptance `first` for rank 0, then a geometric series; as geometric_acceptance. */
  function geometric(first, isChain) {
    const [covered, decay, count] = data.geometric,
      ranks = [first];
    for (let r = 1; r < count && !isChain; r++) ranks.push(Math.min(first, covered * (1 - first) * Math.pow(decay, r)));
    return ranks;
  }

  /* The chain or tree that the settings give in place of the best one, or null. */
  function givenShape(s) {
    const given = (field) => String(s[field] ?? "").trim(),
      whole = (most) => (v) => Number.isInteger(v) && v >= 1 && v <= most;
    let shape = null;
    if (given("chain") && given("tree")) throw engine.wrong("tree", "Give a chain or a tree, not both.");
    if (given("chain")) {
      const must = "drafted tokens of a chain must be a whole number between 1 and 1,000",
        depth = engine.numeric("chain", s.chain, must, whole(1000));
      shape = { nodes: depth + 1, depth };
    }
    if (given("tree")) {
      const found = /^(\d{1,4})\s*[x×]\s*(\d{1,4})$/i.exec(given("tree"));
      if (!found) throw engine.wrong("tree", `A tree is drafted nodes x depth, as 60x6; “${s.tree}” is not.`);
      shape = { nodes: Number(found[1]) + 1, depth: Number(found[2]) };
      if (!(shape.depth >= 1 && shape.depth < shape.nodes && shape.nodes <= 1001))
        throw engine.wrong("tree", `A tree of depth ${found[2]} needs ${found[2]} to 1,000 nodes and depth 1 or more.`);
    }
    if (!given("tau")) return shape;
    if (!shape) throw engine.wrong("tau", "Tokens per pass are those of a chain or tree: give one of them, too.");
    const must = `tokens per pass must lie between 1 and ${shape.depth + 1}`;
    return { ...shape, tokens: engine.numeric("tau", s.tau, must, (v) => v >= 1 && v <= shape.depth + 1) };
  }

  /* Nodes that the drafter expands per level of a given tree, equally wide at every level. */
  const widths = (shape) => [1, ...new Array(shape.depth - 1).fill(Math.ceil((shape.nodes - 1) / shape.depth))];

  /* The drafter of a method; with `unavailable`: the reason why there is none. */
  function drafterOf(name, model, s) {
    const kind = data.methods[name].draft;
    if (kind !== "model" && kind !== "block") return model.drafts[name];
    const small = s.draft || model.draft;
    if (!small)
      return { unavailable: `no smaller built-in model shares the vocabulary of ${s.model}; choose a draft model` };
    const draft = engine.need(data.models, small, "draft model", "draft");
    if (Math.abs(draft.vocab - model.vocab) > data.maxPadding)
      return {
        unavailable:
          `${small} has ${draft.vocab} tokens and ${s.model} ${model.vocab}: ` +
          "a draft model must share the vocabulary",
      };
    return { graph: draft.graphs.flash[0], per: kind === "model" ? "level" : "step", name: small };
  }

  /* A method with the acceptance that applies: given, of the draft model, of the target's family, or its own. */
  function profileOf(name, model, drafter, s) {
    const m = data.methods[name];
    if (String(s.accept ?? "").trim()) {
      const must = "acceptance must lie between 0 and 1",
        first = engine.numeric("accept", s.accept, must, (v) => v >= 0 && v <= 1),
        given = { ...m, basis: "given", source: "your setting", largest: null };
      if (m.shape === "fixed") return { ...given, tokens: 1 + first };
      return { ...given, ranks: geometric(first, m.shape === "chain"), decay: 1 };
    }
    return { ...m, ...model.acceptance[name], ...(drafter && drafter.name && m.byDraft[drafter.name]) };
  }

  function draftSeconds(draft, expanded, cost) {
    if (!draft) return 0;
    if (draft.per === "step") return expanded.some((x) => x) ? cost(1)[9] : 0;
    let sum = 0;
    for (const w of expanded) if (w) sum += cost(w)[9];
    return sum;
  }

  /* What a given shape comes to: nodes, depth, tokens, draft seconds; or the reason why it cannot be drafted. */
  function estimateGiven(name, m, shape, draft, cost, step) {
    if (m.maxDepth && shape.depth > m.maxDepth)
      return { unavailable: `${name} has ${m.maxDepth} heads and cannot draft a tree of depth ${shape.depth}` };
    if (shape.tokens === undefined && m.shape === "fixed")
      return { unavailable: `${name} has no acceptance by node: give the tokens per pass of the tree` };
    const tokens = shape.tokens ?? bestTrees(m.ranks, m.decay, shape.nodes, shape.depth).tokens.at(-1);
    let seconds = 0;
    if (draft) for (const width of draft.per === "level" ? widths(shape) : [1]) seconds += cost(width)[9];
    return { nodes: shape.nodes, depth: shape.depth, tokens, draft: seconds + step };
  }

  /* The fastest shape of up to the largest tree. */
  function fastest(m, s, draft, target, cost, step) {
    const must = `largest tree must be a whole number between 1 and ${data.maxNodes.toLocaleString("en")}`,
      isSize = (v) => Number.isInteger(v) && v >= 1 && v <= data.maxNodes,
      budget = String(s.nodes ?? "").trim() ? engine.numeric("nodes", s.nodes, must, isSize) : data.maxNodes,
      maxNodes = Math.min(budget, m.largest ? m.largest[0] : budget);
    let chosen = { nodes: 1, depth: 0, tokens: 1, draft: 0 },
      best = 1 / target(1)[9];
    const consider = (c) => {
      const rate = c.tokens / (target(c.nodes)[9] + c.draft);
      if (rate > best) [chosen, best] = [c, rate];
    };
    if (m.shape === "fixed") consider({ nodes: m.nodes, depth: 1, tokens: m.tokens, draft: step });
    const deepest = m.shape === "chain" ? Math.min(budget, 4 * data.maxDepth) : data.maxDepth,
      maxDepth = Math.min(deepest, m.maxDepth || deepest, m.largest ? m.largest[1] : deepest);
    for (let depth = 1; m.shape !== "fixed" && depth <= maxDepth; depth++) {
      const tree = bestTrees(m.ranks, m.decay, maxNodes, depth);
      for (let i = 1; i < tree.tokens.length; i++) {
        const seconds = draftSeconds(draft, tree.nodesExpanded[i], cost) + step;
        consider({ nodes: i + 1, depth, tokens: tree.tokens[i], draft: seconds });
      }
    }
    return chosen;
  }

  function estimate(name, { model, h, table }, s, shape) {
    const draft = drafterOf(name, model, s);
    if (draft && draft.unavailable) return { name, unavailable: draft.unavailable };
    const m = profileOf(name, model, draft, s),
      step = h.runtime.step_overhead,
      asked = { ...s, fusion: "flash" },
      cost = draft && passCosts(draft.graph, h, asked, draft.weights || s.weights, draft.kv || s.kv, false),
      chosen = shape ? estimateGiven(name, m, shape, draft, cost, step) : fastest(m, s, draft, table, cost, step);
    if (chosen.unavailable) return { name, unavailable: chosen.unavailable };
    const plain = table(1)[9],
      pass = table(chosen.nodes)[9],
      speedup = (chosen.tokens * plain) / (pass + chosen.draft),
      spread = shape && shape.tokens !== undefined ? 0 : m.spread,
      ofTokens = (spread * (chosen.tokens - 1)) / chosen.tokens,
      relative = chosen.depth === 0 ? 0 : Math.hypot(ofTokens, h.runtime.error);
    return {
      ...chosen,
      name,
      pass,
      plain,
      speedup,
      range: [speedup * (1 - relative), speedup * (1 + relative)],
      goodput: (s.batch * chosen.tokens) / (pass + chosen.draft),
      bytes: bytes(table(chosen.nodes)) / chosen.tokens / s.batch,
      spread: m.spread,
      basis: m.basis,
      source: m.source,
      title: m.title,
      drafter: draft,
    };
  }

  function target(s) {
    const model = engine.check(s),
      h = engine.hardware(s);
    return { model, h, table: passCosts(engine.graphOf(model, s, {}), h, s, s.weights, s.kv, s.square) };
  }

  /* Every method at a workload, best first; methods that cannot be used last. */
  function plan(workload) {
    const s = { ...workload, stage: "decode" },
      found = target(s),
      shape = givenShape(s),
      all = Object.keys(data.methods).map((name) => estimate(name, found, s, shape));
    return all.sort((x, y) => (y.speedup || 0) - (x.speedup || 0));
  }

  function one(name, workload) {
    const s = { ...workload, stage: "decode" };
    engine.need(data.methods, name, "method");
    return estimate(name, target(s), s, givenShape(s));
  }

  /* [batch, speed-up, lower, upper] of a method at every batch. */
  const curve = (name, workload, batches) =>
    batches.map((batch) => {
      const found = one(name, { ...workload, batch });
      return [batch, found.speedup || 1, ...(found.range || [1, 1])];
    });

  return { plan, one, curve, bestTrees, widths };
};
