"use strict";
/* Headline, totals, memory and the chosen operation. Ratios are always speeds relative to the compared setting. */
const Panels = (state) => {
  const { amount, duration } = Charts,
    $ = (selector) => document.querySelector(selector);

  const escaped = (text) =>
    String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const term = (name, text) => (name ? `<span data-term="${name}">${text}</span>` : text);
  /* Rows [text, term, f] of what `f` says of this and the compared answer. */
  function table(target, rows, mine, theirs) {
    const head = theirs ? '<dt></dt><dd class="head">this</dd><dd class="head other">compared</dd>' : "";
    target.classList.toggle("pair", Boolean(theirs));
    target.innerHTML =
      head +
      rows
        .map(
          ([text, name, f]) =>
            `<dt>${term(name, text)}</dt><dd>${escaped(f(mine))}</dd>` +
            (theirs ? `<dd class="other">${escaped(f(theirs))}</dd>` : ""),
        )
        .join("");
  }
  const whole = (v) => (v === null ? "–" : v.toLocaleString("en"));

  function headline(a) {
    const part = (value, unit) => `<span><b>${value}</b><small>${unit}</small></span>`,
      per = a.workload.stage === "chat" ? "per chat" : a.workload.stage === "chunked" ? "per prompt" : "per pass",
      unit = a.workload.stage === "prefill" ? "prompt tokens/s" : "tokens/s";
    $("#headline").innerHTML =
      part(duration(a.took), a.offload ? `${per}, offloaded` : per) +
      part(amount(a.tokens / a.took), unit) +
      part(amount(a.ops), "OPs") +
      part(amount(a.bytes, "B"), "moved");
  }

  function pair(a, other) {
    $("#pair").hidden = $("#versuskey").hidden = !state.compared;
    $("#keep").setAttribute("aria-pressed", String(Boolean(state.compared)));
    $("#keep").textContent = state.compared ? "Stop comparing" : "Compare";
    if (!state.compared) return;
    const [mine, theirs] = [state.describe(state.now), state.describe(state.compared)];
    const line = (one, two) =>
      one
        .flatMap(([, text], i) => {
          if (!text) return [];
          return [text === two[i][1] ? escaped(text) : `<b>${escaped(text)}</b>`];
        })
        .join(" · ");
    $("#mine").innerHTML = line(mine, theirs);
    $("#theirs").innerHTML = line(theirs, mine);
    const ratio = Number((other.took / a.took).toPrecision(3));
    $("#ratio").textContent = `This setting is ${ratio}× as fast as the compared one.`;
  }

  function totals(a, other) {
    const rows = [
      ["time", "", (x) => duration(x.took)],
      ["OPs", "ops", (x) => amount(x.ops)],
      ["weights read", "", (x) => amount(x.total[1], "B")],
      ["activations moved", "", (x) => amount(x.total[2] + x.total[3], "B")],
      ["cache moved", "cache", (x) => amount(x.total[4] + x.total[5], "B")],
    ];
    const either = (f) => f(a) || (other && f(other));
    if (either((x) => x.total[6])) rows.push(["between devices", "devices", (x) => amount(x.total[6], "B")]);
    if (either((x) => x.offload))
      rows.push(
        ["fetched", "offload", (x) => (x.offload ? amount(x.offload.fetched, "B") : "–")],
        ["bound by", "bound", (x) => (x.offload ? x.offload.bound : "–")],
      );
    rows.push(["largest batch", "largestBatch", (x) => whole(x.largestBatch)]);
    rows.push(["longest context", "context", (x) => whole(x.longestContext)]);
    table($("#totals dl"), rows, a, other);
  }

  function memory(a) {
    const m = a.memory,
      o = a.offload ? a.workload : { offloadWeights: 0, offloadKv: 0 },
      kept = [m.weights * (1 - o.offloadWeights), m.kv * (1 - o.offloadKv), m.activations],
      total = kept[0] + kept[1] + kept[2],
      cap = a.hardware.capacity,
      scale = Math.max(total, cap || 0) || 1,
      part = (v) => `${(100 * v) / scale}%`,
      key = (kind, text, v) => `<span><i class="${kind}"></i>${text} ${amount(v, "B")}</span>`;
    $("#memory").innerHTML =
      `<div class="membar" role="img" ` +
      `aria-label="memory ${amount(total, "B")}${cap ? ` of ${amount(cap, "B")}` : ""}">` +
      ["w", "k", "a"].map((kind, i) => `<i class="${kind}" style="width:${part(kept[i])}"></i>`).join("") +
      (cap ? `<span class="cap" style="left:calc(${part(cap)} - 2px)"></span>` : "") +
      `</div><div class="memkey">${key("w", "weights", kept[0])}${key("k", "cache", kept[1])}` +
      `${key("a", "activations", kept[2])}` +
      `<span>${cap ? `of ${amount(cap, "B")}` : "capacity not stated"}</span></div>`;
  }

  function operation(a, other) {
    const find = (x) => x && x.lines.find((l) => l.key === state.op),
      line = find(a);
    const rows = [
      ["shape", "", (l) => l.op[2]],
      ["OPs", "ops", (l) => amount(l.cost[0])],
      ["bytes", "", (l) => amount(l.bytes, "B")],
      ["weights", "", (l) => amount(l.cost[1], "B")],
      ["read", "", (l) => amount(l.cost[2], "B")],
      ["written", "", (l) => amount(l.cost[3], "B")],
      ["cache read", "cache", (l) => amount(l.cost[4], "B")],
      ["cache written", "cache", (l) => amount(l.cost[5], "B")],
      ["intensity", "intensity", (l) => `${Number(l.intensity.toPrecision(4))} OPs/B`],
      ["attainable", "attainable", (l) => amount(l.attainable, "OP/s")],
      ["time in one layer", "", (l) => duration(l.took)],
      ["bound by", "bound", (l) => l.limit],
    ];
    if (line.cost[6]) rows.splice(8, 0, ["between devices", "devices", (l) => amount(l.cost[6], "B")]);
    $("#operation h2").textContent = `${line.op[0]} · ${line.group} × ${Number(line.count.toPrecision(4))}`;
    table($("#operation dl"), rows, line, find(other));
  }

  function render(a, other) {
    headline(a);
    pair(a, other);
    totals(a, other);
    memory(a);
    operation(a, other);
  }

  return { render, escaped };
};
