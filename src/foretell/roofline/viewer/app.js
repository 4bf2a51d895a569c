"use strict";
/* The page: every change writes the address, asks Python for the figures, and draws them; a saved page holds them. */
const Roofline = (() => {
  const data = JSON.parse(document.getElementById("data").textContent),
    saved = data.saved,
    state = { now: { ...data.defaults }, compared: null, op: "", method: "" };
  let answer = null,
    run = 0,
    waiting = null;
  const form = Form(data, state, changed),
    panels = Panels(state, set),
    navigation = Navigation(choose);

  /* The address holds all of the state. */
  function write() {
    const q = new URLSearchParams();
    const put = (setting, prefix) =>
      Object.entries(setting).forEach(([k, v]) => String(v) === String(data.defaults[k]) || q.set(prefix + k, v));
    put(state.now, "");
    put(state.compared || {}, "compare.");
    if (state.compared) q.set("compare", "1");
    for (const k of ["op", "method"]) if (state[k]) q.set(k, state[k]);
    history.replaceState(null, "", "#" + q.toString());
  }

  function restore() {
    const q = new URLSearchParams(location.hash.slice(1)),
      get = (prefix) => Object.fromEntries(Object.entries(data.defaults).map(([k, v]) => [k, q.get(prefix + k) ?? v]));
    state.now = saved ? { ...saved.now } : get("");
    state.compared = saved ? saved.compared && { ...saved.compared } : q.has("compare") ? get("compare.") : null;
    state.op = q.get("op") || "";
    const method = q.get("method") || (saved ? saved.method : "");
    state.method = data.methods.includes(method) ? method : "";
    if (state.now.config) {
      $("#paste").open = true;
      $("#config").value = state.now.config;
    }
    changed();
  }

  const fail = (message, field) => {
    throw Object.assign(new Error(message), { field });
  };
  async function post(topic, more) {
    const body = JSON.stringify({ now: state.now, compared: state.compared, ...more }),
      headers = { "Content-Type": "application/json" };
    const reply = await fetch(topic, { method: "POST", headers, body }).catch(() =>
      fail("The server of this page does not answer: run `foretell roofline view` again."),
    );
    if (reply.ok) return reply;
    const { error, field } = await reply.json();
    return fail(`${error[0].toUpperCase()}${error.slice(1)}.`, field);
  }
  /* The figures of a topic; `more`: the method and the count of rates that it is about, or another setting. */
  async function ask(topic, more = {}) {
    if (!saved) return (await post(topic, more)).json();
    const figures = saved.figures[topic][more.method || ""];
    return figures || { unavailable: "this page was saved without its figures; `foretell roofline view` has them" };
  }

  /* Shows a sentence, and whether what is drawn belongs to the settings. */
  function report(message, error) {
    $("#alert").textContent = message;
    $("#alert").hidden = !message;
    $("main").classList.toggle("stale", Boolean(error));
    form.mark(error ? error.field : null);
  }

  function set(change) {
    Object.assign(state, change);
    changed();
  }

  function changed(except) {
    form.show(except);
    write();
    $("main").setAttribute("aria-busy", "true");
    clearTimeout(waiting);
    const mine = ++run;
    // While somebody types, the last text alone is asked about.
    waiting = setTimeout(() => update(() => mine !== run), except ? 50 : 0);
  }

  async function update(isOld) {
    try {
      const next = await ask("pass");
      if (isOld()) return;
      answer = next;
      report(answer.warning);
      if (!answer.lines.some((l) => l.key === state.op))
        state.op = answer.lines.reduce((x, y) => (y.share > x.share ? y : x)).key;
      render();
      await Promise.all([drawSweeps(isOld), drawMethods(isOld)]);
    } catch (error) {
      if (!isOld()) report(error.message, error);
    }
    if (!isOld()) $("main").setAttribute("aria-busy", "false");
  }

  function render() {
    panels.pass(answer);
    Charts.roofline($("#roof"), answer.roof, state.op, choose);
    Graph.draw($("#graph"), answer, state.op, choose, navigation.width());
    navigation.update();
  }

  const draw = (charts) => {
    for (const [id, chart] of Object.entries(charts)) Charts.curves($(`#${id}`), chart);
  };
  async function drawSweeps(isOld) {
    const charts = await ask("sweeps");
    if (!isOld()) draw(charts);
  }
  async function drawMethods(isOld) {
    const ranking = await ask("methods");
    if (isOld()) return;
    const chosen = ranking.methods.find((m) => m.name === state.method) || ranking.methods[0];
    panels.methods(ranking, chosen);
    $("#gain").replaceChildren();
    if (chosen.usable) {
      const charts = await ask("gain", { method: chosen.name });
      if (!isOld()) draw(charts);
    }
    await drawLoad(chosen.name, isOld);
  }

  /* Simulates one rate after the other, and says how far it is. */
  async function drawLoad(method, isOld) {
    const say = (text) => ($("#load .advice").textContent = text);
    for (let count = 1; !isOld(); count++) {
      const { left, of, advice, unavailable, ...charts } = await ask("load", { method, count });
      if (isOld()) return;
      if (unavailable) for (const id of ["#latency", "#goodput"]) $(id).replaceChildren();
      const progress = left ? `${method}: ${of - left} of ${of} rates are simulated …` : advice;
      say(unavailable ? `${method}: ${unavailable}.` : progress);
      if (!left) return draw(charts);
    }
  }

  function choose(key, focus) {
    state.op = key;
    write();
    render();
    navigation.keepInView(key);
    if (focus) $(`[data-key="${CSS.escape(key)}"]`).focus({ preventScroll: true });
  }

  /* Takes the model of a config.json, if Python can read it. */
  async function use(config) {
    try {
      if (saved) fail("This page was saved with its figures: run `foretell roofline view` to paste a model.");
      await ask("pass", { now: { ...state.now, model: "pasted", config } });
      $("#pasted").textContent = "In use as “pasted”.";
      set({ now: { ...state.now, model: "pasted", config: JSON.stringify(JSON.parse(config)) } });
    } catch (error) {
      $("#pasted").textContent = error.message;
    }
  }

  function download(name, content) {
    const url = URL.createObjectURL(content);
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /* The whole graph as PNG, twice as large as drawn. */
  function picture() {
    const svg = $("#graph").cloneNode(true),
      style = getComputedStyle(document.documentElement),
      names = [...$("#drawing").textContent.matchAll(/var\(--([\w-]+)\)/g)].map((m) => m[1]),
      values = [...new Set(names)].map((v) => `--${v}:${style.getPropertyValue("--" + v)}`).join(";"),
      [, , w, h] = svg.getAttribute("viewBox").split(" ").map(Number),
      image = new Image();
    svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    svg.setAttribute("width", w);
    svg.setAttribute("height", h);
    svg.prepend(Charts.make("style", {}, `:root{${values}}${$("#drawing").textContent}`));
    return new Promise((done, broken) => {
      image.onload = () => {
        const canvas = Object.assign(document.createElement("canvas"), { width: w * 2, height: h * 2 }),
          context = canvas.getContext("2d");
        context.fillStyle = style.getPropertyValue("--card");
        context.fillRect(0, 0, canvas.width, canvas.height);
        context.drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob(done, "image/png");
      };
      image.onerror = () => broken(new Error("The picture could not be drawn."));
      image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(svg));
    });
  }

  async function copy() {
    write();
    try {
      await navigator.clipboard.writeText(location.href);
      $("#link").textContent = "Copied";
    } catch {
      prompt("This link restores the setting:", location.href);
    }
    setTimeout(() => ($("#link").textContent = "Copy link"), 1500);
  }

  function start() {
    form.build();
    Tips.start($("#tip"));
    navigation.start();
    const actions = {
      keep: () => set({ compared: state.compared ? null : { ...state.now } }),
      swap: () => set({ now: state.compared, compared: state.now }),
      link: copy,
      use: () => use($("#config").value),
      table: () => download(`${answer.name}.csv`, new Blob([answer.csv], { type: "text/csv" })),
      picture: async () => download(`${answer.name}.png`, await picture()),
      save: async () => {
        const reply = await post("saved", { method: state.method }).catch((error) => report(error.message, error));
        if (reply) download(`${answer.name}.html`, await reply.blob());
      },
    };
    for (const [id, act] of Object.entries(actions)) $(`#${id}`).onclick = act;
    for (const id of ["keep", "swap", "save"]) $(`#${id}`).disabled = Boolean(saved);
    addEventListener("hashchange", restore);
    let width = innerWidth;
    addEventListener("resize", () => {
      if (!answer) return;
      if (innerWidth === width) return navigation.update();
      width = innerWidth;
      changed();
    });
    restore();
  }
  start();
  return { data, state, picture, answer: () => answer, set: (change) => set({ now: { ...state.now, ...change } }) };
})();
