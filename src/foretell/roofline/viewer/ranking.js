"use strict";
/* The methods ranked, what a prediction rests on, and the variants with cheaper passes. */
const Ranking = (engine, methods, variants, state, changed) => {
  const { duration, curves } = Charts,
    $ = (selector) => document.querySelector(selector),
    BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256];
  const make = (tag, className, text = "") =>
    Object.assign(document.createElement(tag), { className, textContent: text });

  const range = (g) => g.range.map((x) => x.toFixed(2)).join(" to "),
    times = (g) => `${g.speedup.toFixed(2)}× (${range(g)})`;
  function advice(top) {
    if (!top || top.unavailable) return "No method can be used at this setting.";
    if (top.depth === 0)
      return `Do not speculate: at batch ${state.now.batch} no method gains more tokens than it costs.`;
    if (top.speedup <= 1) return `Do not speculate: the best, ${top.name}, is predicted at ${times(top)}.`;
    if (top.range[0] > 1) return `Use ${top.name}: ${times(top)} predicted.`;
    return `Measure first: ${top.name} is predicted at ${times(top)}.`;
  }

  function bar(g, most, isChosen) {
    const button = make("button", ""),
      at = (v) => `${(100 * v) / most}%`;
    Object.assign(button, { type: "button", title: g.unavailable || g.title });
    button.dataset.method = g.name;
    button.setAttribute("aria-pressed", String(isChosen));
    button.append(make("span", g.unavailable ? "none" : "", g.name));
    if (g.unavailable) {
      button.append(make("span", "none", "cannot be used"), make("b", "", "–"), make("small", ""));
    } else {
      const track = make("span", "track"),
        used = g.depth > 0;
      const part = (tag, left, width) => {
        const piece = make(tag, "");
        Object.assign(piece.style, { left: at(left), width: at(width) });
        track.append(piece);
      };
      if (used) part("i", 0, g.speedup);
      if (used) part("s", g.range[0], g.range[1] - g.range[0]);
      part("u", 1, 0);
      button.append(
        track,
        make("b", used ? "" : "none", used ? `${g.speedup.toFixed(2)}×` : "no"),
        make("small", "", g.basis),
      );
    }
    button.onclick = () => {
      state.method = g.name;
      changed();
    };
    return button;
  }

  function explain(g) {
    const why = $("#methods .why");
    why.replaceChildren();
    if (!g) return;
    const say = (text) => why.append(make("p", "", text));
    if (g.unavailable) return say(`${g.name}: ${g.unavailable}.`);
    if (g.depth === 0) say(`${g.title}: drafting and the larger pass cost more than the tokens are worth here.`);
    else
      say(
        `${g.title}: ${times(g)}; ${g.nodes > 1 ? `${g.nodes - 1} drafted tokens, depth ${g.depth}; ` : ""}` +
          `${g.tokens.toFixed(2)} tokens ` +
          `per pass. Pass ${duration(g.pass)} (plain ${duration(g.plain)}), ` +
          `drafting ${g.draft ? duration(g.draft) : "free"}` +
          `${g.drafter && g.drafter.name ? ` with ${g.drafter.name}` : ""}.`,
      );
    const rests = make("p", "");
    rests.append(
      make("span", "", "Acceptance"),
      ` ${g.basis}: ${g.source}. The range assumes that it varies by ±${Math.round(100 * g.spread)} % between ` +
        `tasks, and the error of the runtime. `,
      make("code", "", `foretell methods ${g.name}`),
      " explains the method.",
    );
    rests.firstChild.dataset.term = "acceptance";
    why.append(rests);
  }

  /* The name of the method that is explained and drawn: the chosen one, else the fastest. */
  const nameOf = (list) => state.method || list[0].name;

  function render() {
    const list = methods.plan(state.now),
      usable = list.filter((g) => !g.unavailable),
      most = Math.max(...usable.map((g) => (g.depth > 0 ? g.range[1] : 1)), 1.5) * 1.02,
      name = nameOf(list);
    const outside = [state.now.offloadWeights, state.now.offloadKv].some((part) => Number(part) > 0);
    $("#methods .advice").textContent =
      advice(list[0]) + (outside ? " Methods, cheaper passes and arrivals are predicted without offloading." : "");
    const focused = document.activeElement.dataset.method;
    $(".bars").replaceChildren(...list.map((g) => bar(g, most, g.name === name)));
    if (focused) $(`[data-method="${focused}"]`).focus({ preventScroll: true });
    const chosen = list.find((g) => g.name === name);
    explain(chosen);
    drawVariants();
    $("#gaintitle").textContent = `Speed-up of ${name} by batch`;
    $("#gain").replaceChildren();
    if (!chosen.unavailable) drawGain(name, chosen);
    return name;
  }

  function drawGain(name, chosen) {
    const found = methods.curve(name, state.now, BATCHES);
    curves($("#gain"), {
      series: [{ points: found.map((p) => [p[0], p[1]]), band: found.map((p) => [p[0], p[2], p[3]]) }],
      here: state.now.batch <= 256 ? [state.now.batch, chosen.speedup] : null,
      even: 1,
      xlabel: "batch",
      ylabel: "×, shaded: likely range",
      format: (v) => Number(v.toPrecision(3)),
    });
  }

  function drawVariants() {
    const found = variants.list(state.now),
      most = Math.max(...found.map((v) => v.speedup), 1.5) * 1.02;
    $("#variants .table").replaceChildren(
      ...found.map((v) => {
        const row = make("div", "variant"),
          track = make("span", "track"),
          bar = make("i", ""),
          even = make("u", "");
        bar.style.width = `${(100 * v.speedup) / most}%`;
        even.style.left = `${100 / most}%`;
        track.append(bar, even);
        row.append(make("span", "", v.title), track, make("b", "", `${v.speedup.toFixed(2)}×`));
        return row;
      }),
    );
  }

  return { render };
};
