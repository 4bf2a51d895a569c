"use strict";
/* Headline, tables, memory, the methods ranked, and the variants: what Python says, as elements. */
const Panels = (state, set) => {
  const make = (tag, className, ...children) => element(tag, { className }, ...children);
  const percent = (part) => `${100 * part}%`;

  /* Rows [label, term, figure] or with the figure of the compared setting, too. */
  function table(target, rows) {
    const isPair = rows.some((row) => row.length > 3);
    target.classList.toggle("pair", isPair);
    target.replaceChildren(
      ...(isPair ? [make("dt", ""), make("dd", "head", "this"), make("dd", "head other", "compared")] : []),
      ...rows.flatMap(([text, term, mine, ...theirs]) => {
        const words = term ? make("span", "", text) : text;
        if (term) words.dataset.term = term;
        return [make("dt", "", words), make("dd", "", mine), ...theirs.map((x) => make("dd", "other", x))];
      }),
    );
  }

  function pair(pair) {
    $("#pair").hidden = $("#versuskey").hidden = !pair;
    $("#keep").setAttribute("aria-pressed", String(Boolean(pair)));
    $("#keep").textContent = pair ? "Stop comparing" : "Compare";
    if (!pair) return;
    for (const side of ["mine", "theirs"])
      $(`#${side}`).replaceChildren(
        ...pair[side].flatMap(([text, differs], i) => [i ? " · " : "", differs ? make("b", "", text) : text]),
      );
    $("#ratio").textContent = pair.ratio;
  }

  function memory(m) {
    const bar = make("div", "membar");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", m.label);
    const add = (tag, className, style) => bar.append(element(tag, { className, style }));
    m.parts.forEach(([, , part], i) => add("i", "wka"[i], `width:${percent(part)}`));
    if (m.capacity !== null) add("span", "cap", `left:calc(${percent(m.capacity)} - 2px)`);
    const keys = m.parts.map(([name, size], i) => make("span", "", make("i", "wka"[i]), `${name} ${size}`));
    $("#memory").replaceChildren(bar, make("div", "memkey", ...keys, make("span", "", m.note)));
  }

  function pass(answer) {
    $("#headline").replaceChildren(
      ...answer.headline.map(([figure, unit]) => make("span", "", make("b", "", figure), make("small", "", unit))),
    );
    pair(answer.pair);
    table($("#totals dl"), answer.totals);
    memory(answer.memory);
    const line = answer.lines.find((l) => l.key === state.op);
    $("#operation h2").textContent = line.title;
    table($("#operation dl"), line.rows);
  }

  /* A bar with a mark at 1: `parts` are [element, from, to]. */
  function track(most, ...parts) {
    const bar = make("span", "track");
    const style = (from, to) => `left:${percent(from / most)};width:${percent((to - from) / most)}`;
    for (const [tag, from, to] of [...parts, ["u", 1, 1]]) bar.append(element(tag, { style: style(from, to) }));
    return bar;
  }

  function bar(m, most, isChosen) {
    const button = element("button", { type: "button", title: m.title });
    button.dataset.method = m.name;
    button.setAttribute("aria-pressed", String(isChosen));
    button.append(make("span", m.usable ? "" : "none", m.name));
    if (m.usable) {
      const parts = m.used ? [["i", 0, m.speedup], ["s", m.low, m.high]] : [];
      button.append(track(most, ...parts), make("b", m.used ? "" : "none", m.text), make("small", "", m.basis));
    } else button.append(make("span", "none", "cannot be used"), make("b", "", "–"), make("small", ""));
    button.onclick = () => set({ method: m.name });
    return button;
  }

  function why([figures, term, basis, command]) {
    $("#methods .why").replaceChildren(make("p", "", figures));
    if (!term) return;
    const words = make("span", "", term);
    words.dataset.term = "acceptance";
    $("#methods .why").append(make("p", "", words, basis, make("code", "", command), " explains the method."));
  }

  function methods(answer, chosen) {
    $("#methods .advice").textContent = answer.advice;
    const focused = document.activeElement.dataset.method;
    $(".bars").replaceChildren(...answer.methods.map((m) => bar(m, answer.most, m === chosen)));
    if (focused) $(`[data-method="${focused}"]`).focus({ preventScroll: true });
    why(chosen.why);
    $("#gaintitle").textContent = `Speed-up of ${chosen.name} by batch`;
    const variant = (v) => [v.title, track(answer.mostVariant, ["i", 0, v.speedup]), make("b", "", v.text)];
    $("#variants .table").replaceChildren(
      ...answer.variants.map(variant).map(([title, ...bar]) => make("div", "variant", make("span", "", title), ...bar)),
    );
  }

  return { pass, methods };
};
