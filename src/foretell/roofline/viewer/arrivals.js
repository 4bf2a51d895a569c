"use strict";
/* Requests that arrive over time at a server, simulated as in arrivals.py, with the same random numbers. */
const Arrivals = (engine, methods) => {
  const { data } = engine;

  /* MT19937 (Matsumoto and Nishimura, 1998) seeded with one small integer, and 53-bit fractions of it. */
  function mersenneTwister(seed) {
    const N = 624,
      x = new Uint32Array(N);
    let at = N;
    x[0] = 19650218;
    for (let i = 1; i < N; i++) x[i] = Math.imul(1812433253, x[i - 1] ^ (x[i - 1] >>> 30)) + i;
    let i = 1;
    const next = () => {
      if (++i < N) return;
      x[0] = x[N - 1];
      i = 1;
    };
    for (let k = 0; k < N; k++, next()) x[i] = (x[i] ^ Math.imul(x[i - 1] ^ (x[i - 1] >>> 30), 1664525)) + seed;
    for (let k = 1; k < N; k++, next()) x[i] = (x[i] ^ Math.imul(x[i - 1] ^ (x[i - 1] >>> 30), 1566083941)) - i;
    x[0] = 0x80000000;
    const word = () => {
      if (at === N) {
        for (let k = 0; k < N; k++) {
          const y = (x[k] & 0x80000000) | (x[(k + 1) % N] & 0x7fffffff);
          x[k] = x[(k + 397) % N] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
        }
        at = 0;
      }
      let y = x[at++];
      y ^= y >>> 11;
      y ^= (y << 7) & 0x9d2c5680;
      y ^= (y << 15) & 0xefc60000;
      return (y ^ (y >>> 18)) >>> 0;
    };
    return () => ((word() >>> 5) * 67108864 + (word() >>> 6)) / 9007199254740992;
  }

  /* Requests with exponential gaps, `rate` a second, and random outputs of mean length `output`. */
  function poisson(rate, count, prompt, output) {
    const draw = mersenneTwister(0),
      exponential = (rate) => -Math.log(1 - draw()) / rate;
    let arrival = 0;
    return Array.from({ length: count }, () => {
      arrival += exponential(rate);
      return { arrival, prompt, output: 1 + Math.floor(exponential(1 / output)) };
    });
  }

  /* Seconds of a step over `running` requests of a mean context with `prompt` tokens of a prompt, kept by size. */
  function stepCosts(s, shape, draft) {
    const kept = new Map(),
      model = engine.check(s),
      h = engine.hardware(s);
    const pass = (graph, r, running, tokens, context, prompt, square) => {
      const sequences = [[running, tokens, context], ...(prompt ? [[1, prompt, 0]] : [])];
      return engine.totals(graph, { sequences, logitRows: running * tokens + (prompt ? 1 : 0) }, r, square)[9];
    };
    const graph = engine.graphOf(model, s, {}),
      r = engine.rates(s, h, s.weights, s.kv),
      draftRates = draft && engine.rates(s, h, draft.weights || s.weights, draft.kv || s.kv);
    const step = (running, context, prompt) => {
      let took = pass(graph, r, running, shape ? shape.nodes : 1, context, prompt, s.square);
      if (!shape || !running) return took;
      took += h.runtime.step_overhead;
      if (!draft) return took;
      for (const width of draft.per === "level" ? methods.widths(shape) : [1])
        took += pass(draft.graph, draftRates, running, width, context, 0, false);
      return took;
    };
    return (running, mean, prompt) => {
      const context = Math.ceil(mean / data.contextStep) * data.contextStep,
        key = `${running}|${context}|${prompt}`;
      if (!kept.has(key)) kept.set(key, step(running, context, prompt));
      return kept.get(key);
    };
  }

  function quantile(sorted, q) {
    const at = (sorted.length - 1) * q,
      low = Math.floor(at);
    return sorted[low] + (at - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
  }

  /* What requests saw when served in order: percentiles in seconds, mean latency, tokens and requests a second. */
  function simulate(requests, costs, tau, limits) {
    const draw = mersenneTwister(0),
      done = [];
    let running = [],
      head = 0,
      now = 0,
      promptLeft = 0;
    while (head < requests.length || running.length) {
      if (!running.length && requests[head].arrival > now) now = requests[head].arrival;
      const arrived = head < requests.length && requests[head].arrival <= now && running.length < limits.running;
      let piece = 0,
        held = 0;
      if (arrived) {
        promptLeft ||= requests[head].prompt;
        piece = Math.min(promptLeft, 2048);
      }
      for (const x of running) held += x.request.prompt + x.request.output - x.left;
      now += costs(running.length, running.length ? Math.floor(held / running.length) : 0, piece);
      for (const x of running) x.left -= Math.floor(tau) + (draw() < tau - Math.floor(tau) ? 1 : 0);
      if (arrived) {
        promptLeft -= piece;
        if (!promptLeft) {
          const request = requests[head++];
          running.push({ request, left: request.output - 1, first: now });
        }
      }
      for (const x of running) if (x.left <= 0) done.push({ ...x.request, first: x.first, end: now });
      running = running.filter((x) => x.left > 0);
    }
    const both = (f) => {
      const sorted = done.map(f).sort((x, y) => x - y);
      return [quantile(sorted, 0.5), quantile(sorted, 0.99)];
    };
    const first = (x) => x.first - x.arrival,
      perToken = (x) => (x.end - x.first) / Math.max(1, x.output - 1),
      whole = (x) => x.end - x.arrival,
      start = requests[0].arrival,
      within = done.filter((x) => first(x) <= limits.ttft && perToken(x) <= limits.tpot).length;
    return {
      rate: (requests.length - 1) / (requests[requests.length - 1].arrival - start || 0),
      ttft: both(first),
      tpot: both(perToken),
      latency: both(whole),
      meanLatency: done.reduce((sum, x) => sum + whole(x), 0) / done.length,
      goodput: within / (now - start),
      tokensPerSecond: done.reduce((sum, x) => sum + x.output, 0) / (now - start),
    };
  }

  const LIMITS = { requests: 2000, prompt: 100000, output: 4000, running: 1024 };

  /* A simulation ready to run: method, shape, the rates, and `at(rate)` with the results of one rate. */
  function prepare(workload, method) {
    const count = {};
    for (const [name, highest] of Object.entries(LIMITS))
      count[name] = engine.numeric(
        name,
        workload[name],
        `${name} must be a whole number between 1 and ${highest.toLocaleString("en")}`,
        (v) => Number.isInteger(v) && v >= 1 && v <= highest,
      );
    const positive = (name, what) => engine.numeric(name, workload[name], `${what} must be positive`, (v) => v > 0);
    const limits = { running: count.running, ttft: positive("ttft", "limit"), tpot: positive("tpot", "limit") };
    const rates = String(workload.rates)
      .split(",")
      .filter((x) => x.trim())
      .map((x) => engine.numeric("rates", x, "rates must be requests a second, as 1,4,16", (v) => v > 0 && v < 1e6));
    if (!rates.length || rates.length > 12) throw engine.wrong("rates", "Give 1 to 12 rates, as 1,4,16.");
    const s = { ...workload, stage: "decode", batch: 1, context: count.prompt };
    if (!s.chain && !s.tree) s.chain = "3";
    const drafted = methods.one(method, s);
    if (drafted.unavailable) return { method, unavailable: drafted.unavailable, rates: [] };
    const [plain, fast] = [stepCosts(s), stepCosts(s, drafted, drafted.drafter)];
    const at = (rate) => {
      const requests = poisson(rate, count.requests, count.prompt, count.output),
        results = [simulate(requests, plain, 1, limits), simulate(requests, fast, drafted.tokens, limits)];
      return { plain: results[0], drafted: results[1], speedup: results[0].meanLatency / results[1].meanLatency };
    };
    return { method, shape: drafted, rates, at };
  }

  /* One sentence: up to which of the rates drafts shorten the answers. */
  function advice(compared) {
    const helped = compared.filter((c) => c.speedup > 1).map((c) => c.plain.rate),
      text = (v) => Number(v.toPrecision(3));
    if (!helped.length) return "Do not speculate: at every rate answers take longer with drafts.";
    const range = `${text(Math.min(...helped))} to ${text(Math.max(...helped))} requests a second`;
    if (helped.length === compared.length) return `Speculate: answers take less time at every rate, ${range}.`;
    const top = text(Math.max(...helped));
    return `Speculate up to ${top} requests a second; at higher rates answers take longer with drafts.`;
  }

  return { prepare, advice, poisson };
};
