"use strict";
/* Variants of the model with cheaper passes, as in model_variants.py; their output differs. */
const Variants = (engine) => {
  const { data } = engine;
  const WEIGHTS = 6,
    WORK = 5,
    READ = 7,
    WRITE = 8,
    KVWRITE = 10;

  /* The graph with every group that has a cache replaced by what `change` makes of it: [[group, count]]. */
  const perLayer = (graph, change) => ({
    ...graph,
    groups: graph.groups.flatMap(([id, count]) => {
      const group = data.groups[id];
      return group.kvElements || group.stateElements ? change(group, count) : [[group, count]];
    }),
  });

  function earlyExit(graph, share, rows) {
    const a = share < 1 ? (share / (1 - share)) * rows : Infinity,
      depth = share < 1 ? a / (a + 1) : 1;
    return perLayer(graph, (group, count) => [
      [group, count * depth],
      [{ ...group, ops: group.ops.filter((op) => op[KVWRITE].length) }, count * (1 - depth)],
    ]);
  }

  const skipLayers = (graph, share) => perLayer(graph, (group, count) => [[group, count * share]]);

  function sparse(graph, predictor, density, rows) {
    const union = 1 - Math.pow(1 - density, rows),
      scaled = (cost) => cost.map((x) => x * density);
    const thin = (op) => {
      if (!data.sparseOps.includes(op[0])) return op;
      const copy = op.slice();
      copy[WORK] = scaled(op[WORK]);
      copy[WEIGHTS] = [(op[WEIGHTS][0] || 0) * union];
      if (op[0] === "mlp_act" || op[0] === "down_proj") copy[READ] = scaled(op[READ]);
      if (op[0] !== "down_proj") copy[WRITE] = scaled(op[WRITE]);
      return copy;
    };
    return perLayer(graph, (group, count) => [[{ ...group, ops: [...group.ops.map(thin), ...predictor] }, count]]);
  }

  /* Every variant at a workload's batch and context, fastest first: name, title, seconds, speedup. */
  function list(workload) {
    const s = { ...workload, stage: "decode" },
      part = (field, what) =>
        engine.numeric(field, s[field], `${what} must lie above 0 and at most at 1`, (v) => v > 0 && v <= 1),
      share = part("share", "share of layers"),
      density = part("density", "density"),
      model = engine.check(s),
      h = engine.hardware(s),
      base = engine.graphOf(model, s, {}),
      pass = { sequences: [[s.batch, 1, s.context]], logitRows: s.batch };
    const seconds = (graph, changed = {}) => {
      const q = { ...s, ...changed };
      return engine.totals(graph, pass, engine.rates(q, h, q.weights, q.kv), s.square)[9];
    };
    const rows = s.batch,
      exit = `Early exit, ${share} of the layers per token (CALM)`,
      skip = `Layer skipping, ${share} of the layers per position (SkipDecode)`,
      narrow = `Contextual sparsity, ${density} of the feed-forward (Deja Vu)`;
    const found = [
      ["early-exit", exit, earlyExit(base, share, rows)],
      ["skip-layers", skip, skipLayers(base, share)],
      ["nested", "Half the feed-forward (MatFormer)", model.nested[s.fusion]],
      ["weights-4", "Weights in 4 bits, groups of 128", base, { weights: "4g128" }],
      ["weights-8-activations-8", "Weights and activations in 8 bits", base, { weights: "8", activations: "8" }],
      ["kv-4", "Cache in 4 bits, groups of 128", base, { kv: "4g128" }],
    ];
    if (model.predictor) found.push(["sparse", narrow, sparse(base, model.predictor, density, rows)]);
    const plain = seconds(base);
    return found
      .map(([name, title, graph, changed]) => ({ name, title, seconds: seconds(graph, changed) }))
      .map((v) => ({ ...v, speedup: plain / v.seconds }))
      .sort((x, y) => x.seconds - y.seconds);
  }

  return { list };
};
