"use strict";
/* Evaluates the operation graphs made in Python: extents of a pass, cost of an operation, memory.
   All coefficients are data; a browser test compares the results with Python's. */
const Engine = (data) => {
  const { extents, passes } = Passes(data),
    LOGIT_ROWS = 5,
    ROWS = 1,
    PAIRS = 2,
    KV_POSITIONS = 3,
    SEQUENCES = 6;
  const KIND = 1,
    INPUTS = 3,
    SPLIT = 4,
    WORK = 5,
    WEIGHTS = 6,
    READ = 7,
    WRITE = 8,
    KVREAD = 9,
    KVWRITE = 10,
    STORED = 11;

  const groupOf = (group) => (typeof group === "number" ? data.groups[group] : group);

  /* An error that names the field of the form that it is about. */
  const wrong = (field, message) => Object.assign(new Error(message), { field });

  const at = (coefficients, e) => {
    let s = 0;
    for (let i = 0; i < coefficients.length; i++) s += coefficients[i] * e[i];
    return s;
  };

  const need = (table, key, what, field) => {
    if (!Object.hasOwn(table, key)) throw wrong(field || what, `There is no ${what} called “${key}”.`);
    return table[key];
  };
  /* A number that was typed: what `fits` accepts, else an error that says what it `must` be. */
  function numeric(field, value, must, fits) {
    const text = String(value).trim(),
      number = text === "" ? NaN : Number(text);
    if (Number.isFinite(number) && fits(number)) return number;
    throw wrong(field, `The ${must}; ${text === "" ? "it is empty" : `“${value}” is not`}.`);
  }
  const isNamed = (list, name, what) => need(Object.fromEntries(list.map((x) => [x, 1])), name, what);

  function peak(h, a, b) {
    const wanted = need(data.computeClasses, `${a}|${b}`, "number format");
    const name = data.widerClasses[wanted].find((c) => c in h.peaks);
    if (!name) throw wrong("activations", `${h.title} states no rate that can multiply ${wanted}.`);
    return [h.peaks[name], h.matmulRates[name] || []];
  }

  function hardware(s) {
    const base = need(data.hardware, s.hardware, "hardware"),
      h = { ...base };
    for (const [key, unit, what] of [
      ["bandwidth", 1e9, "bandwidth"],
      ["capacity", 1e9, "capacity"],
      ["peak", 1e12, "peak"],
    ]) {
      if (s[key] === undefined || s[key] === "") continue;
      const value = numeric(key, s[key], `${what} must be a positive number`, (v) => v > 0);
      if (key !== "peak") {
        h[key] = value * unit;
        continue;
      }
      const top = base.peaks.fp16 || Math.max(...Object.values(base.peaks));
      h.peaks = Object.fromEntries(Object.entries(base.peaks).map(([k, v]) => [k, (v * value * unit) / top]));
      h.matmulRates = {};
    }
    const runtime = need(data.runtimes, s.runtime, "runtime");
    if (h.usesRuntimes) h.runtime = runtime;
    return h;
  }

  function rates(s, h, w, kv) {
    if (s.devices > 1 && !h.linkBandwidth)
      throw wrong("devices", `${h.title} states no link between devices, so ${s.devices} cannot share a model.`);
    const [matmul, curve] = peak(h, w, s.activations),
      [attention] = peak(h, s.activations, kv),
      runtime = h.runtime;
    return {
      w: data.formats[w],
      a: data.formats[s.activations],
      kv: data.formats[kv],
      matmul: matmul * runtime.peak,
      curve,
      attention: attention * runtime.peak,
      attentionCurve: h.attentionRates,
      runtime,
      head: data.formats[s.head || w],
      headConvert: data.converted[`${s.head || w}|${s.activations}`] ? runtime.convert : 0,
      headMatmul: peak(h, s.head || w, s.activations)[0] * runtime.peak,
      convert: data.converted[`${w}|${s.activations}`] ? runtime.convert : 0,
      elementwise: h.vectorRate || h.peaks.fp16 || Math.max(...Object.values(h.peaks)),
      bandwidth: h.bandwidth * runtime.bandwidth,
      link: h.linkBandwidth,
      t: s.devices,
    };
  }

  function rateAt(c, peak, rows) {
    if (!c.length) return peak;
    if (rows <= c[0][0]) return c[0][1];
    for (let i = 1; i < c.length; i++) {
      if (rows <= c[i][0])
        return c[i - 1][1] + ((c[i][1] - c[i - 1][1]) * (rows - c[i - 1][0])) / (c[i][0] - c[i - 1][0]);
    }
    return c[c.length - 1][1];
  }

  const isCollective = (op) => op[KIND] === "all_reduce" || op[KIND] === "all_gather";
  const DIVIDED = { column: [1, 1, 0, 1], row: [1, 1, 1, 0], heads: [1, 1, 1, 1], replicated: [0, 0, 0, 0] };

  /* Adds the cost of an operation to `sum`: [ops, weights, read, write, kv_read, kv_write, link (all bytes),
     compute seconds, memory seconds, seconds]. */
  function addOpCost(op, e, r, kvHeads, sum) {
    const t = r.t,
      kind = op[KIND];
    if (isCollective(op)) {
      const moved = ((at(op[WRITE], e) * r.a * (t - 1)) / t) * (kind === "all_reduce" ? 2 : 1);
      sum[6] += moved;
      sum[9] += moved / (r.link > 0 ? r.link : 1) + (t > 1 ? r.runtime.collective_latency : 0);
      return;
    }
    const divided = DIVIDED[op[SPLIT]],
      by = (i) => (divided[i] ? t : 1);
    const kvBy = op[SPLIT] === "column" || op[SPLIT] === "heads" ? Math.min(t, kvHeads) : 1;
    const isVocabulary = op[0] === "embedding" || op[0] === "lm_head",
      weightBytes = isVocabulary ? r.head : r.w,
      convert = isVocabulary ? r.headConvert : r.convert;
    const ops = at(op[WORK], e) / by(0),
      w = (at(op[WEIGHTS], e) * weightBytes) / by(1);
    const rd = (at(op[READ], e) * r.a) / by(2),
      wr = (at(op[WRITE], e) * r.a) / by(3);
    const kr = (at(op[KVREAD], e) * r.kv) / kvBy,
      kw = (at(op[KVWRITE], e) * r.kv) / kvBy;
    const rows =
      kind === "attention"
        ? e[PAIRS] / Math.max(e[KV_POSITIONS], 1)
        : op[WORK][LOGIT_ROWS]
          ? e[LOGIT_ROWS]
          : e[ROWS];
    const rate =
      kind === "matmul"
        ? isVocabulary && r.head !== r.w
          ? r.headMatmul
          : rateAt(r.curve, r.matmul, rows)
        : kind === "attention"
          ? rateAt(r.attentionCurve, r.attention, rows)
          : r.elementwise;
    let compute = ops / rate;
    if (kind === "matmul" && convert) compute += ((w / weightBytes) * convert) / r.elementwise;
    const memory = (w + rd + wr + kr + kw) / r.bandwidth,
      run = r.runtime;
    let exposed = Math.max(compute, memory) + (1 - run.overlap) * Math.min(compute, memory);
    if (kind === "attention" && run.cache_read) exposed = compute + (kr + kw) * run.cache_read;
    if (isVocabulary && kind === "matmul") exposed += (at(op[WRITE], e) / by(3)) * run.logit_time;
    sum[0] += ops;
    sum[1] += w;
    sum[2] += rd;
    sum[3] += wr;
    sum[4] += kr;
    sum[5] += kw;
    sum[7] += compute;
    sum[8] += memory;
    sum[9] += Math.max(exposed, run.launch) + (kind === "lookup" ? run.pass_overhead : run.op_overhead);
  }

  const zero = () => [0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
  const graphOf = (model, s, pass) => {
    const both = model.graphs[s.fusion];
    return both[pass.isPrefill ? both.length - 1 : 0];
  };

  function totals(graph, pass, r, square) {
    const sum = zero();
    for (const [id, count] of graph.groups) {
      const group = groupOf(id),
        e = extents(graph, group, pass, square),
        part = zero();
      for (const op of group.ops) addOpCost(op, e, r, group.kvHeads, part);
      for (let i = 0; i < 10; i++) sum[i] += part[i] * count;
    }
    return sum;
  }

  function memory(model, s, r, list) {
    let kv = 0,
      alive = 0,
      weights = 0;
    for (const pass of list) {
      const graph = graphOf(model, s, pass);
      let kvElements = 0;
      for (const [id, count] of graph.groups) {
        const group = data.groups[id],
          e = extents(graph, group, pass, s.square);
        if (group.kvElements) {
          let positions = 0;
          for (const [b, n, cached] of pass.sequences)
            positions += b * (group.window ? Math.min(cached + n, group.window) : cached + n);
          kvElements += ((count * group.kvElements) / Math.min(r.t, group.kvHeads)) * positions;
        }
        if (group.stateElements)
          kvElements += ((count * group.stateElements) / Math.min(r.t, group.kvHeads)) * e[SEQUENCES];
        for (const [replicated, divided] of group.liveActivations) {
          alive = Math.max(alive, (at(replicated, e) + at(divided, e) / r.t) * r.a);
        }
      }
      kv = Math.max(kv, kvElements * r.kv);
    }
    for (const [id, count] of graphOf(model, s, list[0]).groups) {
      for (const op of data.groups[id].ops) {
        const bytes = op[0] === "embedding" || op[0] === "lm_head" ? r.head : r.w;
        weights += ((count * op[STORED]) / (op[SPLIT] === "replicated" ? 1 : r.t)) * bytes;
      }
    }
    return { weights, kv, activations: alive, total: weights + kv + alive };
  }

  function check(s) {
    const model = need(data.models, s.model, "model");
    isNamed(data.stages, s.stage, "stage");
    isNamed(data.fusions, s.fusion, "fusion");
    for (const f of ["weights", "activations", "kv"]) need(data.formats, s[f], "number format", f);
    if (s.head) need(data.formats, s.head, "number format", "head");
    const used = {
      batch: 1,
      context: 1,
      devices: 1,
      tokens: s.stage === "verify",
      chunk: s.stage === "chunked",
      generate: s.stage === "chat",
    };
    for (const [name, highest] of Object.entries(data.limits)) {
      if (!used[name]) continue;
      const lowest = name === "context" && (s.stage === "decode" || s.stage === "verify") ? 0 : 1,
        must = `${name} must be a whole number between ${lowest} and ${highest.toLocaleString("en")}`;
      numeric(name, s[name], must, (v) => Number.isInteger(v) && v >= lowest && v <= highest);
    }
    if (model.heads % s.devices)
      throw wrong("devices", `${s.devices} devices cannot share the ${model.heads} heads of ${s.model} evenly.`);
    return model;
  }

  function largestFitting(name, fits) {
    if (!fits(1)) return 0;
    let low = 1,
      high = 2;
    const highest = data.limits[name];
    while (high < highest && fits(high)) {
      low = high;
      high *= 2;
    }
    high = Math.min(high, highest);
    if (fits(high)) return high;
    while (high - low > 1) {
      const m = Math.floor((low + high) / 2);
      if (fits(m)) low = m;
      else high = m;
    }
    return low;
  }

  function limit(name, model, s, r, h, outside) {
    if (h.capacity === null) return null;
    const held = (list, q) => Offload.resident(memory(model, q, r, list), outside);
    return largestFitting(name, (size) => {
      const q = { ...s, [name]: size };
      if (q.stage === "chat") {
        if (name === "context") q.generate = 1;
        const [first] = passes({ ...q, generate: 0 });
        const last = { sequences: [[q.batch, 1, q.context + q.generate - 1]], logitRows: q.batch };
        return held([first, last], q) <= h.capacity;
      }
      if (q.stage === "chunked") q.chunk = Math.max(q.chunk, Math.floor(q.context / 64));
      return held(passes(q), q) <= h.capacity;
    });
  }

  const tokensOf = (s) =>
    s.stage === "prefill"
      ? s.batch * s.context
      : s.stage === "chunked"
        ? s.context + (s.batch - 1) * Math.ceil(s.context / s.chunk)
        : s.batch * (s.stage === "chat" ? s.generate : 1);

  function analyse(s) {
    const model = check(s),
      h = hardware(s),
      r = rates(s, h, s.weights, s.kv),
      list = passes(s),
      outside = Offload.setting(data, s, h, numeric),
      lines = new Map();
    for (const pass of list) {
      const graph = graphOf(model, s, pass);
      for (const [id, count] of graph.groups) {
        const group = data.groups[id],
          e = extents(graph, group, pass, s.square),
          aliases = {};
        for (const op of group.ops) {
          const inputs = op[INPUTS].map((name) => aliases[name] || name);
          if (s.devices === 1 && isCollective(op)) {
            aliases[op[0]] = inputs[0];
            continue;
          }
          const key = group.name + "/" + op[0];
          if (!lines.has(key)) lines.set(key, { key, group: group.name, id, count, op, inputs, cost: zero() });
          addOpCost(op, e, r, group.kvHeads, lines.get(key).cost);
        }
      }
    }
    const total = zero();
    for (const line of lines.values()) {
      const c = line.cost,
        moved = c[1] + c[2] + c[3] + c[4] + c[5];
      Object.assign(line, {
        bytes: moved,
        intensity: moved ? c[0] / moved : 0,
        attainable: c[9] ? c[0] / c[9] : 0,
        seconds: c[9],
        took: c[9],
        bound: isCollective(line.op) ? "link" : c[7] > c[8] ? "compute" : "memory",
      });
      line.limit = line.bound;
      for (let i = 0; i < 10; i++) total[i] += c[i] * line.count;
    }
    const offload = outside && Offload.apply([...lines.values()], outside);
    const used = memory(model, s, r, s.stage === "chat" ? [list[0], list[list.length - 1]] : list);
    return {
      model,
      hardware: h,
      workload: s,
      rates: r,
      lines: [...lines.values()],
      seconds: total[9],
      took: offload ? offload.seconds : total[9],
      offload: offload && { ...offload, resident: Offload.resident(used, outside) },
      ops: total[0],
      bytes: total[1] + total[2] + total[3] + total[4] + total[5],
      total,
      memory: used,
      tokens: tokensOf(s),
      fits: h.capacity === null ? null : Offload.resident(used, outside) <= h.capacity,
      largestBatch: limit("batch", model, s, r, h, outside),
      longestContext: limit("context", model, s, r, h, outside),
    };
  }

  /* Time and memory alone. A long chat is sampled at 64 evenly spaced lengths, which is exact where time is linear. */
  function quick(s) {
    const model = check(s),
      h = hardware(s),
      r = rates(s, h, s.weights, s.kv);
    const all = passes(s),
      outside = Offload.setting(data, s, h, numeric),
      first = all[0],
      last = all[all.length - 1];
    let list = all,
      weight = 1;
    if (s.stage === "chat" && s.generate > 64) {
      weight = s.generate / 64;
      list = Array.from({ length: 64 }, (_, i) => ({
        sequences: [[s.batch, 1, s.context + (i + 0.5) * weight - 0.5]],
        logitRows: s.batch,
      }));
    }
    const weighted = list.map((pass) => [pass, weight]);
    if (list !== all) weighted.unshift([first, 1]);
    return {
      seconds: secondsOf(model, s, r, weighted, outside),
      memory: Offload.resident(memory(model, s, r, [first, last]), outside),
      tokens: tokensOf(s),
      capacity: h.capacity,
    };
  }

  /* Time of weighted passes, offloaded or not. */
  function secondsOf(model, s, r, weighted, outside) {
    if (!outside)
      return weighted.reduce((sum, [p, w]) => sum + w * totals(graphOf(model, s, p), p, r, s.square)[9], 0);
    const lines = new Map();
    for (const [pass, weight] of weighted) {
      const graph = graphOf(model, s, pass);
      for (const [id, count] of graph.groups) {
        const e = extents(graph, groupOf(id), pass, s.square);
        for (const op of groupOf(id).ops) {
          if (r.t === 1 && isCollective(op)) continue;
          const key = `${groupOf(id).name}/${op[0]}`,
            cost = zero();
          if (!lines.has(key)) lines.set(key, { op, count, cost: zero(), bound: isCollective(op) ? "link" : "" });
          addOpCost(op, e, r, groupOf(id).kvHeads, cost);
          cost.forEach((x, i) => (lines.get(key).cost[i] += weight * x));
        }
      }
    }
    for (const line of lines.values()) line.bound ||= line.cost[7] > line.cost[8] ? "compute" : "memory";
    return Offload.apply([...lines.values()], outside).seconds;
  }

  return { data, analyse, quick, hardware, check, rates, totals, graphOf, numeric, wrong, need };
};
