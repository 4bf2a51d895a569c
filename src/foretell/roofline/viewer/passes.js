"use strict";
/* The passes of a stage, and their sizes as the layers of one group see them; as in workload.py. */
const Passes = (data) => {
  const ROWS = 1,
    PAIRS = 2,
    KV_POSITIONS = 3,
    ACTIVE_EXPERTS = 4,
    SEQUENCES = 6;

  function pairs(n, cached, window, square) {
    if (square) return n * kvPositions(n, cached, window);
    if (!window) return n * cached + (n * (n + 1)) / 2;
    const short = Math.min(Math.max(window - cached, 0), n);
    return short * cached + (short * (short + 1)) / 2 + (n - short) * window;
  }
  const kvPositions = (n, cached, window) => (window ? Math.min(cached + n, window + n - 1) : cached + n);

  function extents(graph, group, pass, square) {
    const e = [1, 0, 0, 0, 0, pass.logitRows, 0];
    let routed = 0;
    for (const [b, n, cached] of pass.sequences) {
      e[ROWS] += b * n;
      e[SEQUENCES] += n > 0 ? b : 0;
      routed += n > 0 ? b * (1 + (n - 1) * (1 - data.sharedRouting)) : 0;
      e[PAIRS] += b * pairs(n, cached, group.window, square);
      e[KV_POSITIONS] += b * kvPositions(n, cached, group.window);
    }
    const experts = graph.expertCount;
    if (experts) e[ACTIVE_EXPERTS] = experts * (1 - Math.pow(1 - graph.expertsPerToken / experts, routed));
    return e;
  }

  function passes(s) {
    if (s.stage === "prefill") return [{ sequences: [[s.batch, s.context, 0]], logitRows: s.batch, isPrefill: true }];
    if (s.stage === "decode") return [{ sequences: [[s.batch, 1, s.context]], logitRows: s.batch }];
    if (s.stage === "verify") return [{ sequences: [[s.batch, s.tokens, s.context]], logitRows: s.batch * s.tokens }];
    const list = [];
    if (s.stage === "chat") {
      list.push({ sequences: [[s.batch, s.context, 0]], logitRows: s.batch, isPrefill: true });
      for (let i = 0; i < s.generate; i++) list.push({ sequences: [[s.batch, 1, s.context + i]], logitRows: s.batch });
      return list;
    }
    for (let start = 0; start < s.context; start += s.chunk) {
      const n = Math.min(s.chunk, s.context - start);
      const last = start + n >= s.context ? 1 : 0;
      list.push({
        sequences: [
          [1, n, start],
          [s.batch - 1, 1, s.context],
        ],
        logitRows: s.batch - 1 + last,
        isPrefill: true,
      });
    }
    return list;
  }

  return { extents, passes };
};
