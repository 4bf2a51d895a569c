"use strict";
/* Evaluates the price lists made in Python: extents of a pass, cost of an operation, memory, methods.
   What things cost is data; this file only multiplies, and a browser test holds it to Python's numbers. */
const Engine = (data) => {
  const ONE = 0, ROWS = 1, PAIRS = 2, SPAN = 3, TOUCHED = 4, OUTPUTS = 5;
  const KIND = 1, INPUTS = 3, SPLIT = 4, WORK = 5, WEIGHTS = 6, READ = 7, WRITE = 8, KVREAD = 9, KVWRITE = 10, STORED = 11;

  const at = (form, e) => { let s = 0; for (let i = 0; i < form.length; i++) s += form[i] * e[i]; return s; };

  function pairs(n, past, window, square) {
    if (square) return n * span(n, past, window);
    if (!window) return n * past + n * (n + 1) / 2;
    const short = Math.min(Math.max(window - past, 0), n);
    return short * past + short * (short + 1) / 2 + (n - short) * window;
  }
  const span = (n, past, window) => window ? Math.min(past + n, window + n - 1) : past + n;

  function extents(net, block, pass, square) {
    const e = [1, 0, 0, 0, 0, pass.outputs];
    for (const [b, n, past] of pass.groups) {
      e[ROWS] += b * n; e[PAIRS] += b * pairs(n, past, block.window, square); e[SPAN] += b * span(n, past, block.window);
    }
    if (net.experts) e[TOUCHED] = net.experts * (1 - Math.pow(1 - net.active / net.experts, e[ROWS]));
    return e;
  }

  function passes(s) {
    if (s.stage === "prefill") return [{ groups: [[s.batch, s.context, 0]], outputs: s.batch, prompt: true }];
    if (s.stage === "decode") return [{ groups: [[s.batch, 1, s.context]], outputs: s.batch }];
    if (s.stage === "verify") return [{ groups: [[s.batch, s.tokens, s.context]], outputs: s.batch * s.tokens }];
    const list = [];
    if (s.stage === "chat") {
      list.push({ groups: [[s.batch, s.context, 0]], outputs: s.batch, prompt: true });
      for (let i = 0; i < s.generate; i++) list.push({ groups: [[s.batch, 1, s.context + i]], outputs: s.batch });
      return list;
    }
    for (let start = 0; start < s.context; start += s.chunk) {
      const n = Math.min(s.chunk, s.context - start);
      const last = start + n >= s.context ? 1 : 0;
      list.push({ groups: [[1, n, start], [s.batch - 1, 1, s.context]], outputs: s.batch - 1 + last, prompt: true });
    }
    return list;
  }

  const need = (table, key, what) => {
    if (!(key in table)) throw new Error(`There is no ${what} called “${key}”.`);
    return table[key];
  };

  function peak(h, a, b) {
    const wanted = need(data.classes, `${a}|${b}`, "number format");
    const name = data.ladder[wanted].find((c) => c in h.peaks);
    if (!name) throw new Error(`${h.title} states no rate that can multiply ${wanted}.`);
    return [h.peaks[name], h.rates[name] || []];
  }

  function hardware(s) {
    const base = need(data.hardware, s.hardware, "hardware"), h = { ...base };
    for (const [key, unit, what] of [["bandwidth", 1e9, "bandwidth"], ["capacity", 1e9, "capacity"], ["peak", 1e12, "peak"]]) {
      if (s[key] === undefined || s[key] === "") continue;
      const value = Number(s[key]);
      if (!(value > 0) || !isFinite(value)) throw new Error(`The ${what} must be a positive number; “${s[key]}” is not.`);
      if (key !== "peak") { h[key] = value * unit; continue; }
      const top = base.peaks.fp16 || Math.max(...Object.values(base.peaks));
      h.peaks = Object.fromEntries(Object.entries(base.peaks).map(([k, v]) => [k, v * value * unit / top]));
      h.rates = {};
    }
    return h;
  }

  function rates(s, h, w, kv) {
    if (s.devices > 1 && !h.link) throw new Error(`${h.title} states no link between devices, so ${s.devices} cannot share a model.`);
    const [matmul, curve] = peak(h, w, s.activations), [attend] = peak(h, s.activations, kv);
    return {
      w: data.formats[w], a: data.formats[s.activations], kv: data.formats[kv], matmul, curve, attend, attendCurve: h.attend, start: h.start,
      vector: h.vector || h.peaks.fp16 || Math.max(...Object.values(h.peaks)), bandwidth: h.bandwidth, link: h.link,
      t: s.devices, overhead: h.overhead,
    };
  }

  function rateAt(c, peak, rows) {
    if (!c.length) return peak;
    if (rows <= c[0][0]) return c[0][1];
    for (let i = 1; i < c.length; i++) {
      if (rows <= c[i][0]) return c[i - 1][1] + (c[i][1] - c[i - 1][1]) * (rows - c[i - 1][0]) / (c[i][0] - c[i - 1][0]);
    }
    return c[c.length - 1][1];
  }

  const CUT = { column: [1, 1, 0, 1], row: [1, 1, 1, 0], heads: [1, 1, 1, 1], whole: [0, 0, 0, 0] };

  /* Adds the cost of an operation to `sum`: ops, weights, read, write, kv read, kv written, wire, compute s, memory s, s. */
  function price(op, e, r, kvHeads, sum) {
    const t = r.t, kind = op[KIND];
    if (kind === "reduce" || kind === "gather") {
      const moved = at(op[WRITE], e) * r.a * (t - 1) / t * (kind === "reduce" ? 2 : 1);
      sum[6] += moved; sum[9] += moved / (r.link > 0 ? r.link : 1);
      return;
    }
    const cut = CUT[op[SPLIT]], by = (i) => cut[i] ? t : 1;
    const kvBy = op[SPLIT] === "column" || op[SPLIT] === "heads" ? Math.min(t, kvHeads) : 1;
    const ops = at(op[WORK], e) / by(0), w = at(op[WEIGHTS], e) * r.w / by(1);
    const rd = at(op[READ], e) * r.a / by(2), wr = at(op[WRITE], e) * r.a / by(3);
    const kr = at(op[KVREAD], e) * r.kv / kvBy, kw = at(op[KVWRITE], e) * r.kv / kvBy;
    const rows = op[WORK][OUTPUTS] ? e[OUTPUTS] : e[ROWS];
    const rate = kind === "matmul" ? rateAt(r.curve, r.matmul, rows) : kind === "attend" ? rateAt(r.attendCurve, r.attend, rows) : r.vector;
    const compute = ops / rate, memory = (w + rd + wr + kr + kw) / r.bandwidth;
    sum[0] += ops; sum[1] += w; sum[2] += rd; sum[3] += wr; sum[4] += kr; sum[5] += kw;
    sum[7] += compute; sum[8] += memory; sum[9] += Math.max(compute, memory) + (kind === "lookup" ? r.start : r.overhead);
  }

  const zero = () => [0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
  const netOf = (model, s, pass) => { const both = model.net[s.fusion]; return both[pass.prompt ? both.length - 1 : 0]; };

  function totals(net, pass, r, square) {
    const sum = zero();
    for (const [id, count] of net.blocks) {
      const block = data.blocks[id], e = extents(net, block, pass, square), part = zero();
      for (const op of block.ops) price(op, e, r, block.kvHeads, part);
      for (let i = 0; i < 10; i++) sum[i] += part[i] * count;
    }
    return sum;
  }

  function memory(model, s, r, list) {
    let kv = 0, alive = 0, weights = 0;
    for (const pass of list) {
      const net = netOf(model, s, pass);
      let kept = 0;
      for (const [id, count] of net.blocks) {
        const block = data.blocks[id], e = extents(net, block, pass, s.square);
        if (block.kv) {
          let cached = 0;
          for (const [b, n, past] of pass.groups) cached += b * (block.window ? Math.min(past + n, block.window) : past + n);
          kept += count * block.kv / Math.min(r.t, block.kvHeads) * cached;
        }
        for (const [whole, cut] of block.live) alive = Math.max(alive, (at(whole, e) + at(cut, e) / r.t) * r.a);
      }
      kv = Math.max(kv, kept * r.kv);
    }
    for (const [id, count] of netOf(model, s, list[0]).blocks) {
      for (const op of data.blocks[id].ops) weights += count * op[STORED] / (op[SPLIT] === "whole" ? 1 : r.t) * r.w;
    }
    return { weights, kv, activations: alive, total: weights + kv + alive };
  }

  function check(s) {
    const model = need(data.models, s.model, "model");
    need(Object.fromEntries(data.stages.map((x) => [x, 1])), s.stage, "stage");
    need(Object.fromEntries(data.fusions.map((x) => [x, 1])), s.fusion, "fusion");
    for (const f of ["weights", "activations", "kv"]) need(data.formats, s[f], "number format");
    const used = { batch: 1, context: 1, devices: 1, tokens: s.stage === "verify", chunk: s.stage === "chunked", generate: s.stage === "chat" };
    for (const [name, most] of Object.entries(data.limits)) {
      const least = name === "context" && (s.stage === "decode" || s.stage === "verify") ? 0 : 1, v = s[name];
      if (used[name] && (!Number.isInteger(v) || v < least || v > most)) {
        throw new Error(`The ${name} must be a whole number between ${least} and ${most.toLocaleString("en")}; “${v}” is not.`);
      }
    }
    if (model.heads % s.devices) throw new Error(`${s.devices} devices cannot share the ${model.heads} heads of ${s.model} evenly.`);
    return model;
  }

  function largest(name, fits) {
    if (!fits(1)) return 0;
    let low = 1, high = 2;
    const most = data.limits[name];
    while (high < most && fits(high)) { low = high; high *= 2; }
    high = Math.min(high, most);
    if (fits(high)) return high;
    while (high - low > 1) { const m = Math.floor((low + high) / 2); if (fits(m)) low = m; else high = m; }
    return low;
  }

  function limit(name, model, s, r, h) {
    if (h.capacity === null) return null;
    return largest(name, (size) => {
      const q = { ...s, [name]: size };
      if (q.stage === "chat") {
        if (name === "context") q.generate = 1;
        const [first] = passes({ ...q, generate: 0 });
        const last = { groups: [[q.batch, 1, q.context + q.generate - 1]], outputs: q.batch };
        return memory(model, q, r, [first, last]).total <= h.capacity;
      }
      if (q.stage === "chunked") q.chunk = Math.max(q.chunk, Math.floor(q.context / 64));
      return memory(model, q, r, passes(q)).total <= h.capacity;
    });
  }

  const tokensOf = (s) => s.batch * (s.stage === "chat" ? s.generate : 1);

  function analyse(s) {
    const model = check(s), h = hardware(s), r = rates(s, h, s.weights, s.kv), list = passes(s), lines = new Map();
    for (const pass of list) {
      const net = netOf(model, s, pass);
      for (const [id, count] of net.blocks) {
        const block = data.blocks[id], e = extents(net, block, pass, s.square), stands = {};
        for (const op of block.ops) {
          const inputs = op[INPUTS].map((name) => stands[name] || name);
          if (s.devices === 1 && (op[KIND] === "reduce" || op[KIND] === "gather")) { stands[op[0]] = inputs[0]; continue; }
          const key = block.name + "/" + op[0];
          if (!lines.has(key)) lines.set(key, { key, block: block.name, id, count, op, inputs, cost: zero() });
          price(op, e, r, block.kvHeads, lines.get(key).cost);
        }
      }
    }
    const total = zero();
    for (const line of lines.values()) {
      const c = line.cost, moved = c[1] + c[2] + c[3] + c[4] + c[5];
      Object.assign(line, {
        bytes: moved, intensity: moved ? c[0] / moved : 0, attainable: c[9] ? c[0] / c[9] : 0, seconds: c[9],
        bound: ["reduce", "gather"].includes(line.op[KIND]) ? "link" : c[7] > c[8] ? "compute" : "memory",
      });
      for (let i = 0; i < 10; i++) total[i] += c[i] * line.count;
    }
    const held = memory(model, s, r, s.stage === "chat" ? [list[0], list[list.length - 1]] : list);
    return {
      model, hardware: h, setting: s, rates: r, lines: [...lines.values()], seconds: total[9], ops: total[0],
      bytes: total[1] + total[2] + total[3] + total[4] + total[5], total, memory: held, tokens: tokensOf(s),
      fits: h.capacity === null ? null : held.total <= h.capacity,
      largestBatch: limit("batch", model, s, r, h), longestContext: limit("context", model, s, r, h),
    };
  }

  /* Time and memory alone; long chats are summed over 64 lengths spread evenly, which is exact to rounding for straight lines. */
  function quick(s) {
    const model = check(s), h = hardware(s), r = rates(s, h, s.weights, s.kv);
    let list = passes(s), weight = 1, seconds = 0;
    const first = list[0], last = list[list.length - 1];
    if (s.stage === "chat" && s.generate > 64) {
      seconds += totals(netOf(model, s, first), first, r, s.square)[9];
      weight = s.generate / 64;
      list = Array.from({ length: 64 }, (_, i) => ({ groups: [[s.batch, 1, s.context + (i + 0.5) * weight - 0.5]], outputs: s.batch }));
    }
    for (const pass of list) seconds += weight * totals(netOf(model, s, pass), pass, r, s.square)[9];
    return { seconds, memory: memory(model, s, r, [first, last]).total, tokens: tokensOf(s), capacity: h.capacity };
  }

  return { data, analyse, quick, hardware, check, rates, totals, netOf };
};
