"use strict";
/* The form: its options, what typing changes, and what it shows of the state. */
const Form = (data, state, changed) => {
  const form = document.getElementById("settings"),
    $ = (selector) => document.querySelector(selector),
    controls = () => [...form.elements].filter((e) => e.name && e.tagName !== "FIELDSET"),
    named = (name) => controls().filter((e) => e.name === name),
    OWN = ["bandwidth", "peak", "capacity"];
  const option = (value, text) =>
    Object.assign(document.createElement("option"), { value, textContent: text || value });

  function models(select, first) {
    const families = new Map();
    for (const [name, m] of Object.entries(data.models)) {
      const family = m.source === "yours" ? "yours" : m.source.split("/")[0];
      if (!families.has(family))
        families.set(family, Object.assign(document.createElement("optgroup"), { label: family }));
      families.get(family).append(option(name));
    }
    select.replaceChildren(...first, ...families.values());
  }
  /* The lists of models, which grow by those that are pasted. */
  function fillModels() {
    models(named("model")[0], []);
    models(named("draft")[0], [option("", "the smallest of the family")]);
  }

  function build() {
    fillModels();
    const add = (name, options) => named(name)[0].append(...options);
    add(
      "hardware",
      Object.entries(data.hardware).map(([k, h]) => option(k, h.title)),
    );
    add(
      "runtime",
      Object.keys(data.runtimes).map((k) => option(k)),
    );
    add(
      "tier",
      Object.entries(data.tiers).map(([k, t]) => option(k, t.title)),
    );
    add("head", [option("", "as the weights")]);
    for (const field of ["weights", "activations", "kv", "head"])
      add(
        field,
        Object.keys(data.formats).map((f) => option(f, f.startsWith("fp") ? f.toUpperCase() : f.replace("g", " / "))),
      );
    add("method", [option("", "the fastest"), ...Object.keys(data.methods).map((m) => option(m))]);
    for (const stage of data.stages) {
      const label = document.createElement("label"),
        input = Object.assign(document.createElement("input"), { type: "radio", name: "stage", value: stage });
      label.append(input, Object.assign(document.createElement("span"), { textContent: stage }));
      $(".stages").append(label);
    }
    for (const input of form.querySelectorAll("input[type=range]")) {
      const label = input.closest("label").textContent.trim();
      input.setAttribute("aria-label", `${label}, slider`);
      Object.assign(input, { min: 0, max: Math.log2(Number(input.dataset.most)), step: 0.25 });
    }
    // Programs fire `change` alone, people both: the second one finds nothing to do.
    document.addEventListener("input", (event) => take(event.target));
    document.addEventListener("change", (event) => take(event.target));
    form.onsubmit = (event) => event.preventDefault();
  }

  function take(input) {
    const { name, type, value, checked } = input;
    if (input.form !== form || !name) return;
    if (name === "method") {
      if (state.method === value) return;
      state.method = value;
      return changed(input);
    }
    const range = () => Math.round(2 ** Number(value)),
      next = type === "checkbox" ? checked : type === "range" ? range() : state.parse(name, value);
    if (state.now[name] === next) return;
    state.now[name] = next;
    if (name === "hardware") for (const k of OWN) state.now[k] = "";
    changed(input);
  }

  /* Sets every control to the state, except the one that is being typed into. */
  function show(except) {
    const s = state.now;
    for (const input of controls()) {
      if (input === except) continue;
      if (input.name === "method") input.value = state.method;
      else if (input.type === "radio") input.checked = input.value === s.stage;
      else if (input.type === "checkbox") input.checked = s[input.name];
      else if (input.type === "range") input.value = Math.log2(Math.max(1, Number(s[input.name]) || 1));
      else input.value = s[input.name];
    }
    for (const label of form.querySelectorAll("[data-stage]")) label.hidden = label.dataset.stage !== s.stage;
    $("#length").textContent = ["prefill", "chunked", "chat"].includes(s.stage) ? "Prompt, tokens" : "Context, tokens";
    const h = data.hardware[s.hardware],
      runtime = data.runtimes[s.runtime];
    $("#program").textContent = runtime && h ? (h.usesRuntimes ? runtime.title : "applies to GPUs only") : "";
    if (h) {
      $("#source").textContent = `Hardware figures: ${h.source}`;
      named("bandwidth")[0].placeholder = h.bandwidth / 1e9;
      named("capacity")[0].placeholder = h.capacity === null ? "not stated" : h.capacity / 1e9;
      named("peak")[0].placeholder = (h.peaks.fp16 || Math.max(...Object.values(h.peaks))) / 1e12;
    }
    if (OWN.some((k) => s[k])) $("#own").open = true;
    if (s.offloadWeights || s.offloadKv) $("#outside").open = true;
    if (["accept", "draft", "chain", "tree", "tau", "nodes"].some((k) => s[k])) $("#drafts").open = true;
  }

  /* Marks the control that an error is about; none clears the mark. */
  function mark(field) {
    for (const input of controls()) {
      if (input.name === field && input.type !== "range") input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
  }

  return { build, show, mark, fillModels };
};
