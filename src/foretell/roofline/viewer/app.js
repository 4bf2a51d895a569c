"use strict";
/* The page: every change writes the address, computes the answer and draws it; charts follow the first paint. */
const Roofline = (() => {
  const data = JSON.parse(document.getElementById("data").textContent),
    engine = Engine(data),
    methods = Methods(engine),
    variants = Variants(engine),
    arrivals = Arrivals(engine, methods),
    state = State(data),
    $ = (selector) => document.querySelector(selector);
  let answer = null,
    other = null,
    timer = 0;
  const form = Form(data, state, changed),
    panels = Panels(state),
    navigation = Navigation(choose),
    ranking = Ranking(engine, methods, variants, state, changed),
    sweeps = Sweeps(engine, arrivals, state),
    actions = Actions(data, state, () => answer, changed, form.fillModels);

  function memoryWarning(a) {
    if (a.fits !== false) return "";
    const { amount } = Charts,
      cure = a.largestBatch
        ? `the largest batch that fits is ${a.largestBatch}`
        : "not even a batch of 1 fits: use fewer bits, more devices, other hardware or offloading",
      bytes = a.offload ? a.offload.resident : a.memory.total,
      need = `${amount(bytes, "B")}${a.workload.devices > 1 ? " on each device" : ""}`;
    return `${a.workload.model} does not fit: it needs ${need} and ${a.hardware.title} has ${amount(
      a.hardware.capacity,
      "B",
    )}; ${cure}.`;
  }

  /* Shows a sentence, and whether what is drawn belongs to the settings. */
  function report(message, error) {
    $("#alert").textContent = message;
    $("#alert").hidden = !message;
    $("main").classList.toggle("stale", Boolean(error));
    form.mark(error ? error.field : null);
  }

  function changed(except) {
    clearTimeout(timer);
    sweeps.stop();
    form.show(except);
    state.write();
    try {
      answer = engine.analyse(state.now);
      other = state.compared ? engine.analyse(state.compared) : null;
    } catch (error) {
      return report(error.message, error);
    }
    report(memoryWarning(answer));
    if (!answer.lines.some((l) => l.key === state.op))
      state.op = answer.lines.reduce((x, y) => (y.took * y.count > x.took * x.count ? y : x)).key;
    render();
    timer = setTimeout(renderCharts, 60);
  }

  function render() {
    panels.render(answer, other);
    Charts.roofline($("#roof"), answer, other, state.op, choose);
    Graph.draw($("#graph"), answer, other, state.op, choose, navigation.width());
    navigation.update();
  }

  function choose(key, focus) {
    state.op = key;
    state.write();
    render();
    navigation.keepInView(key);
    if (focus) $(`[data-key="${CSS.escape(key)}"]`).focus({ preventScroll: true });
  }

  function renderCharts() {
    try {
      sweeps.render(answer);
      sweeps.load(ranking.render());
    } catch (error) {
      if (!error.field) throw error;
      report(error.message, error);
    }
  }

  async function restore() {
    state.read();
    if (state.now.config && !Object.hasOwn(data.models, "pasted")) {
      $("#paste").open = true;
      $("#config").value = state.now.config;
      await actions.use(state.now.config);
    } else changed();
  }

  function start() {
    form.build();
    Glossary.list($("#glossary dl"));
    Glossary.start($("#tip"));
    navigation.start();
    actions.start();
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
  return {
    data,
    engine,
    methods,
    variants,
    arrivals,
    state,
    table: actions.table,
    picture: actions.picture,
    answer: () => answer,
    set: (change) => {
      Object.assign(state.now, change);
      changed();
    },
  };
})();
