"use strict";
/* The form: its options, what typing changes, and what it shows of the state. */
const Form = (data, state, changed) => {
  const form = document.getElementById("settings"),
    controls = () => [...form.elements].filter((e) => e.name && e.tagName !== "FIELDSET"),
    named = (name) => controls().filter((e) => e.name === name),
    FIGURES = ["bandwidth", "peak", "capacity"],
    isPrompt = (s) => ["prefill", "chunked", "chat"].includes(s.stage);
  const options = (texts) => Object.entries(texts).map(([value, text]) => element("option", { value }, text)),
    plain = (names) => options(Object.fromEntries(names.map((x) => [x, x]))),
    titles = (table) => Object.fromEntries(Object.entries(table).map(([k, entry]) => [k, entry.title]));

  function build() {
    const add = (name, ...nodes) => named(name)[0].append(...nodes),
      family = ([label, names]) => element("optgroup", { label }, ...plain(names)),
      families = () => Object.entries(data.models).map(family);
    add("model", ...families());
    add("draft", ...options({ "": "the smallest of the family" }), ...families());
    add("hardware", ...options(titles(data.hardware)));
    add("runtime", ...plain(Object.keys(data.runtimes)));
    add("tier", ...options(data.tiers));
    add("head", ...options({ "": "as the weights" }));
    for (const field of ["weights", "activations", "kv", "head"]) add(field, ...options(data.formats));
    add("method", ...options({ "": "the fastest" }), ...plain(data.methods));
    for (const value of data.stages)
      $(".stages").append(
        element("label", {}, element("input", { type: "radio", name: "stage", value }), element("span", {}, value)),
      );
    for (const input of form.querySelectorAll("input[type=range]")) {
      const label = input.closest("label").textContent.trim();
      input.setAttribute("aria-label", `${label}, slider`);
      Object.assign(input, { min: 0, max: Math.log2(Number(input.dataset.most)), step: 0.25 });
    }
    // Programs fire `change` alone, people both: the second one finds nothing to do.
    document.addEventListener("input", (event) => take(event.target));
    document.addEventListener("change", (event) => take(event.target));
    form.onsubmit = (event) => event.preventDefault();
    if (data.saved) for (const input of controls()) input.disabled = input.name !== "method";
    for (const note of document.querySelectorAll(".saved")) note.hidden = !data.saved;
  }

  function take(input) {
    const { name, type, value, checked } = input;
    if (input.form !== form || !name) return;
    const next = type === "checkbox" ? checked : type === "range" ? Math.round(2 ** Number(value)) : value.trim(),
      place = name === "method" ? state : state.now;
    if (String(place[name]) === String(next)) return;
    place[name] = next;
    if (name === "hardware") for (const k of FIGURES) state.now[k] = "";
    changed(input);
  }

  /* Sets every control to the state, except the one that is being typed into. */
  function show(except) {
    const s = state.now;
    for (const name of ["model", "draft"]) {
      const pasted = [...named(name)[0].options].find((o) => o.value === "pasted");
      if (s.config && !pasted) named(name)[0].append(...plain(["pasted"]));
    }
    for (const input of controls()) {
      if (input === except) continue;
      if (input.name === "method") input.value = state.method;
      else if (input.type === "radio") input.checked = input.value === s.stage;
      else if (input.type === "checkbox") input.checked = String(s[input.name]) === "true";
      else if (input.type === "range") input.value = Math.log2(Math.max(1, Number(s[input.name]) || 1));
      else input.value = s[input.name];
    }
    for (const label of form.querySelectorAll("[data-stage]")) label.hidden = label.dataset.stage !== s.stage;
    $("#length").textContent = isPrompt(s) ? "Prompt, tokens" : "Context, tokens";
    const h = Object.hasOwn(data.hardware, s.hardware) ? data.hardware[s.hardware] : null;
    $("#program").textContent = h ? (h.usesRuntimes ? data.runtimes[s.runtime] || "" : "applies to GPUs only") : "";
    $("#source").textContent = h ? `Hardware figures: ${h.source}` : "";
    for (const k of FIGURES) named(k)[0].placeholder = h ? h.figures[k] : "";
    if (FIGURES.some((k) => s[k])) $("#own").open = true;
    if (s.offloadWeights || s.offloadKv) $("#outside").open = true;
    if (["accept", "draft", "chain", "tree", "tau", "nodes"].some((k) => s[k])) $("#drafts").open = true;
  }

  /* Marks the control that an error is about; none clears the mark. */
  function mark(field) {
    for (const input of controls())
      input.ariaInvalid = input.name === field && input.type !== "range" ? "true" : null;
  }

  return { build, show, mark };
};
