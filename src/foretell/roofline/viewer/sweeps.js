"use strict";
/* Curves over batch and length, and the simulated load, drawn after the first paint. */
const Sweeps = (engine, arrivals, state) => {
  const { amount, duration, curves } = Charts,
    $ = (selector) => document.querySelector(selector);
  let run = 0;

  const powers = (low, high, step) => {
    const list = [];
    for (let e = low; e <= high; e += step) list.push(Math.round(2 ** e));
    return [...new Set(list)];
  };

  function render(a) {
    const s = a.workload;
    const both = (name, values, y) =>
      [s, state.compared].filter(Boolean).map((workload, i) => ({
        other: i > 0,
        label: state.compared ? (i ? "compared" : "this") : "",
        points: values.map((v) => {
          const q = engine.quick({ ...workload, [name]: v });
          return [v, y(q), q.capacity === null || q.memory <= q.capacity];
        }),
      }));
    const inside = s.context <= 131072 && s.context > 15;
    curves($("#bybatch"), {
      series: both("batch", powers(0, 8, 0.25), (q) => q.tokens / q.seconds),
      here: s.batch <= 256 ? [s.batch, a.tokens / a.took] : null,
      xlabel: "batch",
      ylabel: s.stage === "prefill" ? "prompt tokens/s" : "tokens/s",
      format: (v) => amount(v),
    });
    curves($("#bylength"), {
      series: both("context", powers(4, 17, s.stage === "chat" ? 1 : 0.5), (q) => q.seconds),
      here: inside ? [s.context, a.took] : null,
      xlabel: "tokens",
      ylabel: s.stage === "chat" ? "time per chat" : "time",
      format: (v) => (v ? duration(v) : "0"),
    });
    curves($("#memorybylength"), {
      series: both("context", powers(4, 17, 0.5), (q) => q.memory),
      here: inside ? [s.context, a.offload ? a.offload.resident : a.memory.total] : null,
      even: a.hardware.capacity || undefined,
      xlabel: "tokens",
      ylabel: a.hardware.capacity ? "memory, capacity dashed" : "memory",
      format: (v) => amount(v, "B"),
    });
  }

  /* Simulates one rate after the other, so that the page stays responsive; `method` drafts. */
  function load(method) {
    const mine = ++run,
      say = (text) => {
        $("#load .advice").textContent = text;
      };
    const clear = () => ["#latency", "#goodput"].forEach((id) => $(id).replaceChildren());
    const prepared = arrivals.prepare(state.now, method);
    if (prepared.unavailable) {
      clear();
      return say(`${method}: ${prepared.unavailable}.`);
    }
    const compared = [];
    const step = () => {
      if (mine !== run) return;
      if (compared.length < prepared.rates.length) {
        say(`${method}: simulating ${compared.length + 1} of ${prepared.rates.length} rates …`);
        setTimeout(() => {
          if (mine !== run) return;
          compared.push(prepared.at(prepared.rates[compared.length]));
          step();
        }, 0);
        return;
      }
      const { nodes, tokens } = prepared.shape;
      say(`${arrivals.advice(compared)} ${method}, ${nodes - 1} drafted, ${tokens.toFixed(2)} tokens per pass.`);
      const sorted = compared.slice().sort((x, y) => x.plain.rate - y.plain.rate);
      const pair = (f) =>
        ["drafted", "plain"].map((kind) => ({
          other: kind === "plain",
          label: kind === "plain" ? "plain" : "drafts",
          points: sorted.map((c) => [c.plain.rate, f(c[kind])]),
        }));
      const axes = { xlabel: "requests/s", dots: true };
      curves($("#latency"), {
        ...axes,
        series: pair((r) => r.meanLatency),
        ylabel: "mean time of an answer",
        logarithmic: true,
        format: duration,
      });
      curves($("#goodput"), {
        ...axes,
        series: pair((r) => r.goodput),
        ylabel: "goodput, requests/s",
        format: (v) => amount(v),
      });
    };
    step();
  }

  return { render, load, stop: () => run++ };
};
