"use strict";
/* The page: form, results and charts. The address holds the whole state. */
const Roofline = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const engine = Engine(data),
    methods = Methods(engine),
    { amount, duration } = Charts;
  const $ = (selector) => document.querySelector(selector);
  const DEFAULTS = {
    model: data.first,
    hardware: "a6000" in data.hardware ? "a6000" : Object.keys(data.hardware)[0],
    stage: "decode",
    batch: 1,
    context: 1024,
    tokens: 8,
    chunk: 512,
    generate: 256,
    weights: "16",
    activations: "16",
    kv: "16",
    head: "",
    fusion: "flash",
    devices: 1,
    runtime: data.firstRuntime,
    square: false,
    bandwidth: "",
    peak: "",
    capacity: "",
  };
  const NUMBERS = ["batch", "context", "tokens", "chunk", "generate", "devices"];
  const state = { now: { ...DEFAULTS }, compared: null, op: "", method: "" };
  let answer = null,
    other = null,
    timer = 0;

  /* ---- the address ---- */
  function write() {
    const q = new URLSearchParams();
    const put = (workload, prefix) =>
      Object.keys(DEFAULTS).forEach((k) => {
        if (String(workload[k]) !== String(DEFAULTS[k])) q.set(prefix + k, workload[k]);
      });
    put(state.now, "");
    if (state.compared) {
      q.set("compare", "1");
      put(state.compared, "compare.");
    }
    if (state.op) q.set("op", state.op);
    if (state.method) q.set("method", state.method);
    history.replaceState(null, "", "#" + q.toString());
  }
  function read() {
    const q = new URLSearchParams(location.hash.slice(1));
    const get = (prefix) =>
      Object.fromEntries(
        Object.entries(DEFAULTS).map(([k, v]) => {
          const text = q.get(prefix + k);
          if (text === null) return [k, v];
          return [k, NUMBERS.includes(k) ? Number(text) : k === "square" ? text === "true" : text];
        }),
      );
    state.now = get("");
    state.compared = q.has("compare") ? get("compare.") : null;
    state.op = q.get("op") || "";
    state.method = q.get("method") || "";
  }

  /* ---- the form ---- */
  const option = (value, text) =>
    Object.assign(document.createElement("option"), { value, textContent: text || value });
  function build() {
    const form = $("#settings");
    const families = new Map();
    for (const [name, m] of Object.entries(data.models)) {
      const family = m.source === "yours" ? "yours" : m.source.split("/")[0];
      if (!families.has(family))
        families.set(family, Object.assign(document.createElement("optgroup"), { label: family }));
      families.get(family).append(option(name));
    }
    form.model.append(...families.values());
    for (const [name, h] of Object.entries(data.hardware)) form.hardware.append(option(name, h.title));
    for (const [name, r] of Object.entries(data.runtimes)) form.runtime.append(option(name, `${name}: ${r.title}`));
    form.head.append(option("", "as the weights"));
    for (const field of ["weights", "activations", "kv", "head"]) {
      for (const f of Object.keys(data.formats))
        form[field].append(option(f, f.startsWith("fp") ? f.toUpperCase() : f.replace("g", " / ")));
    }
    for (const stage of data.stages) {
      const label = document.createElement("label"),
        input = Object.assign(document.createElement("input"), { type: "radio", name: "stage", value: stage });
      label.append(input, Object.assign(document.createElement("span"), { textContent: stage }));
      $(".stages").append(label);
    }
    form.method.append(option("", "the fastest"), ...Object.keys(data.methods).map((m) => option(m)));
    for (const input of form.querySelectorAll("input[type=range]")) {
      const name = input.name,
        label = input.closest("label").textContent.trim();
      input.setAttribute("aria-label", `${label}, slider`);
      Object.assign(input, { min: 0, max: Math.log2(Number(input.dataset.most)), step: 0.25 });
      input.oninput = () => {
        state.now[name] = Math.round(2 ** Number(input.value));
        changed();
      };
    }
    form.oninput = (event) => {
      const { name, type, value, checked } = event.target;
      if (!name || type === "range") return;
      if (name === "method") {
        state.method = value;
      } else {
        state.now[name] =
          type === "checkbox"
            ? checked
            : NUMBERS.includes(name)
              ? value.trim() === ""
                ? NaN
                : Number(value)
              : value.trim();
      }
      if (name === "hardware") for (const k of ["bandwidth", "peak", "capacity"]) state.now[k] = "";
      changed(event.target);
    };
    form.onsubmit = (event) => event.preventDefault();
  }
  function show(except) {
    const form = $("#settings"),
      s = state.now;
    for (const input of form.querySelectorAll("[name]")) {
      if (input === except || input.name === "method") continue;
      if (input.type === "radio") input.checked = input.value === s.stage;
      else if (input.type === "checkbox") input.checked = s[input.name];
      else if (input.type === "range") input.value = Math.log2(Math.max(1, s[input.name] || 1));
      else input.value = Number.isNaN(s[input.name]) ? "" : s[input.name];
    }
    form.method.value = state.method;
    for (const label of form.querySelectorAll("[data-stage]")) label.hidden = label.dataset.stage !== s.stage;
    $("#length").textContent = ["prefill", "chunked", "chat"].includes(s.stage) ? "Prompt, tokens" : "Context, tokens";
    const h = data.hardware[s.hardware];
    if (h) {
      $("#source").textContent = `Hardware figures: ${h.source}`;
      form.bandwidth.placeholder = h.bandwidth / 1e9;
      form.capacity.placeholder = h.capacity === null ? "not stated" : h.capacity / 1e9;
      form.peak.placeholder = (h.peaks.fp16 || Math.max(...Object.values(h.peaks))) / 1e12;
    }
    if (s.bandwidth || s.peak || s.capacity) $("#own").open = true;
  }

  /* ---- the answer ---- */
  function memoryWarning(a) {
    if (a.fits !== false) return "";
    const cure = a.largestBatch
      ? `the largest batch that fits is ${a.largestBatch}`
      : "not even a batch of 1 fits: use fewer bits, more devices or other hardware";
    const need = `${amount(a.memory.total, "B")}${a.workload.devices > 1 ? " on each device" : ""}`;
    const capacity = `${a.hardware.title} has ${amount(a.hardware.capacity, "B")}`;
    return `${a.workload.model} does not fit: it needs ${need} and ${capacity}; ${cure}.`;
  }
  function changed(except) {
    show(except);
    write();
    let message = "";
    try {
      answer = engine.analyse(state.now);
      other = state.compared ? engine.analyse(state.compared) : null;
      message = memoryWarning(answer);
      $("main").classList.remove("stale");
    } catch (error) {
      message = error.message;
      $("main").classList.add("stale");
    }
    $("#alert").textContent = message;
    $("#alert").hidden = !message;
    if ($("main").classList.contains("stale")) return;
    if (!answer.lines.some((l) => l.key === state.op))
      state.op = answer.lines.reduce((x, y) => (y.seconds * y.count > x.seconds * x.count ? y : x)).key;
    render();
    clearTimeout(timer);
    timer = setTimeout(renderCharts, 60);
  }
  function figure(name, mine, theirs) {
    return `<dt>${name}</dt><dd>${mine}</dd><dd class="other">${theirs === undefined ? "" : theirs}</dd>`;
  }
  const against = (f) => (other ? f(other) : undefined);

  function render() {
    const a = answer,
      speedup = other && Number((other.seconds / a.seconds).toPrecision(3)),
      ratio = other ? ` <em>${speedup}× as fast as the compared setting</em>` : "";
    $("#headline").innerHTML =
      `<span><b>${duration(a.seconds)}</b><small>${a.workload.stage === "chat" ? "per chat" : "per pass"}</small>` +
      `${ratio}</span><span><b>${amount(a.tokens / a.seconds)}</b><small>tokens/s</small></span>` +
      `<span><b>${amount(a.ops)}</b><small>OPs</small></span>` +
      `<span><b>${amount(a.bytes, "B")}</b><small>moved</small></span>`;
    $("#keep").setAttribute("aria-pressed", String(Boolean(state.compared)));
    $("#keep").textContent = state.compared ? "Stop comparing" : "Compare";
    $("#totals dl").innerHTML =
      figure(
        "time",
        duration(a.seconds),
        against((o) => duration(o.seconds)),
      ) +
      figure(
        "OPs",
        amount(a.ops),
        against((o) => amount(o.ops)),
      ) +
      figure(
        "weights read",
        amount(a.total[1], "B"),
        against((o) => amount(o.total[1], "B")),
      ) +
      figure(
        "activations moved",
        amount(a.total[2] + a.total[3], "B"),
        against((o) => amount(o.total[2] + o.total[3], "B")),
      ) +
      figure(
        "cache moved",
        amount(a.total[4] + a.total[5], "B"),
        against((o) => amount(o.total[4] + o.total[5], "B")),
      ) +
      (a.total[6]
        ? figure(
            "between devices",
            amount(a.total[6], "B"),
            against((o) => amount(o.total[6], "B")),
          )
        : "") +
      figure(
        "largest batch",
        a.largestBatch === null ? "–" : a.largestBatch.toLocaleString("en"),
        against((o) => (o.largestBatch === null ? "–" : o.largestBatch.toLocaleString("en"))),
      ) +
      figure(
        "longest context",
        a.longestContext === null ? "–" : a.longestContext.toLocaleString("en"),
        against((o) => (o.longestContext === null ? "–" : o.longestContext.toLocaleString("en"))),
      );
    memory(a);
    Charts.roofline($("#roof"), a, other, state.op, choose);
    Graph.draw($("#graph"), a, other, state.op, choose);
    operation();
  }
  function memory(a) {
    const m = a.memory,
      cap = a.hardware.capacity,
      scale = Math.max(m.total, cap || 0) || 1,
      part = (v) => `${(100 * v) / scale}%`;
    $("#memory").innerHTML =
      `<div class="membar" role="img" ` +
      `aria-label="memory ${amount(m.total, "B")}${cap ? ` of ${amount(cap, "B")}` : ""}">` +
      `<i class="w" style="width:${part(m.weights)}"></i><i class="k" style="width:${part(m.kv)}"></i>` +
      `<i class="a" style="width:${part(m.activations)}"></i>` +
      (cap ? `<span class="cap" style="left:calc(${part(cap)} - 2px)"></span>` : "") +
      "</div>" +
      `<div class="memkey"><span><i class="w"></i>weights ${amount(m.weights, "B")}</span>` +
      `<span><i class="k"></i>cache ${amount(m.kv, "B")}</span>` +
      `<span><i class="a"></i>activations ${amount(m.activations, "B")}</span>` +
      `<span>${cap ? `of ${amount(cap, "B")}` : "capacity not stated"}</span></div>`;
  }
  function operation() {
    const find = (a) => a && a.lines.find((l) => l.key === state.op),
      line = find(answer),
      old = find(other);
    const row = (name, f) => figure(name, f(line), old ? f(old) : undefined);
    $("#operation h2").textContent = `${line.op[0]} · ${line.group} × ${Number(line.count.toPrecision(4))}`;
    $("#operation dl").innerHTML =
      row("shape", (l) => l.op[2]) +
      row("OPs", (l) => amount(l.cost[0])) +
      row("bytes", (l) => amount(l.bytes, "B")) +
      row("weights", (l) => amount(l.cost[1], "B")) +
      row("read", (l) => amount(l.cost[2], "B")) +
      row("written", (l) => amount(l.cost[3], "B")) +
      row("cache read", (l) => amount(l.cost[4], "B")) +
      row("cache written", (l) => amount(l.cost[5], "B")) +
      (line.cost[6] ? row("between devices", (l) => amount(l.cost[6], "B")) : "") +
      row("intensity", (l) => `${Number(l.intensity.toPrecision(4))} OPs/B`) +
      row("attainable", (l) => amount(l.attainable, "OP/s")) +
      row("time in one layer", (l) => duration(l.seconds)) +
      row("bound by", (l) => l.bound);
  }
  function choose(key, focus) {
    state.op = key;
    write();
    render();
    if (focus) $(`[data-key="${CSS.escape(key)}"]`).focus();
  }

  /* ---- sweeps and methods, after the first paint ---- */
  function renderCharts() {
    const s = answer.workload,
      a = answer,
      seriesFor = (workload, name, values, y, isOther) => ({
        other: isOther,
        points: values.map((v) => {
          const q = engine.quick({ ...workload, [name]: v });
          return [v, y(q), q.capacity === null || q.memory <= q.capacity];
        }),
      });
    const both = (name, values, y) => [
      seriesFor(s, name, values, y, false),
      ...(state.compared ? [seriesFor(state.compared, name, values, y, true)] : []),
    ];
    const powers = (low, high, step) => {
      const list = [];
      for (let e = low; e <= high; e += step) list.push(Math.round(2 ** e));
      return [...new Set(list)];
    };
    Charts.curves($("#bybatch"), {
      series: both("batch", powers(0, 8, 0.25), (q) => q.tokens / q.seconds),
      here: s.batch <= 256 ? [s.batch, a.tokens / a.seconds] : null,
      xlabel: "batch",
      ylabel: "tokens/s",
      format: (v) => amount(v),
    });
    Charts.curves($("#bylength"), {
      series: both("context", powers(4, 17, s.stage === "chat" ? 1 : 0.5), (q) => q.seconds),
      here: s.context <= 131072 && s.context > 15 ? [s.context, a.seconds] : null,
      xlabel: "tokens",
      ylabel: s.stage === "chat" ? "time per chat" : "time",
      format: (v) => (v ? duration(v) : "0"),
    });
    Charts.curves($("#memorybylength"), {
      series: both("context", powers(4, 17, 0.5), (q) => q.memory),
      here: s.context <= 131072 && s.context > 15 ? [s.context, a.memory.total] : null,
      even: a.hardware.capacity || undefined,
      xlabel: "tokens",
      ylabel: a.hardware.capacity ? "memory, capacity dashed" : "memory",
      format: (v) => amount(v, "B"),
    });
    plan();
  }
  const times = (g) => `${g.speedup.toFixed(2)}× (${g.range.map((x) => x.toFixed(2)).join(" to ")})`;
  function plan() {
    const list = methods.plan(state.now),
      usable = list.filter((g) => !g.unavailable),
      top = usable[0];
    const most = Math.max(...usable.map((g) => g.speedup), 1.5),
      name = state.method || (top.nodes > 1 ? top.name : usable[0].name);
    $(".advice").textContent =
      top.nodes > 1
        ? top.range[0] > 1
          ? `Use ${top.name}: ${times(top)} predicted.`
          : `Measure first: ${top.name} is predicted at ${times(top)}.`
        : `Do not speculate: at batch ${state.now.batch} no method gains more tokens than it costs.`;
    $(".bars").replaceChildren(
      ...list.map((g) => {
        const title = g.unavailable || g.title;
        const button = Object.assign(document.createElement("button"), { type: "button", title });
        button.dataset.method = g.name;
        button.setAttribute("aria-pressed", String(g.name === name));
        button.innerHTML = g.unavailable
          ? `<span class="none">${g.name}</span><span class="none">cannot be used</span><b>–</b>`
          : `<span>${g.name}</span><span class="track">` +
            `<i style="width:${(100 * (g.nodes > 1 ? g.speedup : 0)) / most}%"></i>` +
            `<u style="left:${100 / most}%"></u>` +
            `</span><b class="${g.nodes > 1 ? "" : "none"}">${g.nodes > 1 ? g.speedup.toFixed(2) + "×" : "no"}</b>`;
        button.onclick = () => {
          state.method = g.name;
          changed();
        };
        return button;
      }),
    );
    explain(list.find((g) => g.name === name));
    const batches = [1, 2, 4, 8, 16, 32, 64, 128, 256],
      chosen = list.find((g) => g.name === name);
    $("#gaintitle").textContent = `Speed-up of ${name} by batch`;
    $("#gain").replaceChildren();
    if (!chosen || chosen.unavailable) return;
    setTimeout(
      () =>
        Charts.curves($("#gain"), {
          series: [{ points: methods.curve(name, state.now, batches) }],
          here: state.now.batch <= 256 ? [state.now.batch, chosen.speedup] : null,
          even: 1,
          xlabel: "batch",
          ylabel: "×",
          format: (v) => Number(v.toPrecision(3)),
        }),
      0,
    );
  }
  function explain(g) {
    const p = Object.assign(document.createElement("p"), { className: "why" });
    if (!g) p.textContent = "";
    else if (g.unavailable) p.textContent = `${g.name}: ${g.unavailable}.`;
    else if (g.nodes === 1)
      p.textContent = `${g.title}: drafting and the larger pass cost more than the tokens are worth here. ${g.source}.`;
    else
      p.textContent =
        `${g.title}: ${times(g)}; ${g.nodes - 1} drafted tokens, depth ${g.depth}; ` +
        `${g.tokens.toFixed(2)} tokens per pass. ` +
        `Pass ${duration(g.pass)} (plain ${duration(g.plain)}), drafting ${g.draft ? duration(g.draft) : "free"}. ` +
        `Acceptance ${g.basis}: ${g.source}.`;
    $(".bars").append(p);
  }

  /* ---- actions ---- */
  function save(name, type, content) {
    const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
  function table() {
    const head = [
      "group",
      "count",
      "operation",
      "shape",
      "kind",
      "ops",
      "weights",
      "read",
      "write",
      "kv_read",
      "kv_write",
      "link",
      "intensity",
      "attainable",
      "bound",
      "seconds",
    ];
    const rows = answer.lines.map((l) => [
      l.group,
      l.count,
      l.op[0],
      l.op[2],
      l.op[1],
      ...l.cost.slice(0, 7),
      l.intensity,
      l.attainable,
      l.bound,
      l.seconds,
    ]);
    return [head, ...rows].map((r) => r.join(",")).join("\n") + "\n";
  }
  function picture() {
    const svg = $("#graph").cloneNode(true),
      style = getComputedStyle(document.documentElement),
      scale = 2;
    const variables = [
      "paper",
      "card",
      "ink",
      "soft",
      "line",
      "memory",
      "compute",
      "linkc",
      "memory-tint",
      "compute-tint",
      "link-tint",
    ];
    const values = variables.map((v) => `--${v}:${style.getPropertyValue("--" + v)}`).join(";");
    const css = `:root{${values}}${$("#drawing").textContent}`;
    svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    svg.prepend(Charts.make("style", {}, css));
    const [, , w, h] = svg.getAttribute("viewBox").split(" ").map(Number),
      image = new Image();
    return new Promise((done, fail) => {
      image.onload = () => {
        const canvas = Object.assign(document.createElement("canvas"), { width: w * scale, height: h * scale }),
          context = canvas.getContext("2d");
        context.fillStyle = style.getPropertyValue("--card");
        context.fillRect(0, 0, canvas.width, canvas.height);
        context.drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob(done, "image/png");
      };
      image.onerror = () => fail(new Error("The picture could not be drawn."));
      image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(svg));
    });
  }
  function start() {
    build();
    read();
    $("#keep").onclick = () => {
      state.compared = state.compared ? null : { ...state.now };
      changed();
    };
    $("#link").onclick = async () => {
      write();
      try {
        await navigator.clipboard.writeText(location.href);
        $("#link").textContent = "Copied";
      } catch {
        prompt("This link restores the setting:", location.href);
      }
      setTimeout(() => {
        $("#link").textContent = "Copy link";
      }, 1500);
    };
    $("#table").onclick = () => save(`${state.now.model}-${state.now.stage}.csv`, "text/csv", table());
    $("#picture").onclick = async () => save(`${state.now.model}-${state.now.stage}.png`, "image/png", await picture());
    addEventListener("hashchange", () => {
      read();
      changed();
    });
    changed();
  }
  start();
  return {
    data,
    engine,
    methods,
    state,
    table,
    picture,
    answer: () => answer,
    set: (change) => {
      Object.assign(state.now, change);
      changed();
    },
  };
})();
