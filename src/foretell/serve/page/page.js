"use strict";
const $ = (selector) => document.querySelector(selector);
const STORE = "foretell", PALETTE = 6, MOST_BYTES = 1 << 20;
const known = {
  "prompt-lookup": 0, suffix: 0, "token-recycling": 1, grammar: 2, prediction: 3, "draft-model": 4, eagle: 5,
};
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];
const classOf = (origin) => (origin === "target" ? "" : `o${colour(origin)}`);
const colour = (origin) => known[origin] ??= Object.keys(known).length % PALETTE;

// ---- state -----------------------------------------------------------------------------------------------------
const state = load();
let running = null, editing = -1, files = [];

function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE));
    if (found?.conversations?.length) return found;
  } catch { /* a new store */ }
  return { conversations: [fresh()], current: 0, settings: {}, mode: "on" };
}
function fresh() { return { title: "New conversation", messages: [] }; }
function save() {
  const strip = (key, value) => (key === "passes" ? undefined : value);
  const kept = { ...state, settings: { ...state.settings, key: undefined } };
  try { localStorage.setItem(STORE, JSON.stringify(kept, strip)); }
  catch { /* full or forbidden: the conversation stays in memory */ }
}
const talk = () => state.conversations[state.current];

// ---- small helpers ---------------------------------------------------------------------------------------------
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
const given = (value) => value !== undefined && value !== null && value !== "";
const number = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

// ---- requests --------------------------------------------------------------------------------------------------
function headers() {
  const key = state.settings.key;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}
function body(messages, seed, speculates) {
  const settings = state.settings, fields = {};
  for (const name of NUMBERS) if (given(settings[name])) fields[name] = Number(settings[name]);
  const speculative = {};
  if (!speculates) speculative.max_drafts = 0;
  else {
    if (settings.method) speculative.method = settings.method;
    if (given(settings.max_drafts)) speculative.max_drafts = Number(settings.max_drafts);
  }
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return { ...fields, seed, speculative, return_drafts: true, stream: true, stream_options: { include_usage: true },
    messages: [...system, ...messages.map(({ role, sent, content }) => ({ role, content: sent ?? content }))] };
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}
async function answer(messages, seed, speculates, into, update) {
  Object.assign(into, { content: "", passes: [], error: "", stats: null, started: performance.now() });
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify(body(messages, seed, speculates)) });
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? response.statusText);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      into.content += chunk.choices?.[0]?.delta?.content ?? "";
      into.passes.push(...(chunk.foretell?.passes ?? []));
      if (chunk.usage) into.stats = { tokens: chunk.usage.completion_tokens, method: chunk.foretell?.method,
        lossless: chunk.foretell?.lossless, seed: chunk.foretell?.seed, speed: chunk.metrics?.tokens_per_second,
        passes: into.passes.length };
      update();
    }
  } catch (error) { into.error = error.name === "AbortError" ? "stopped" : error.message; }
  into.spans = spans(into).map(({ text, origin }) => [text, origin]);
  update();
}

// ---- drafts in colour ------------------------------------------------------------------------------------------
function spans({ content, passes, spans: kept }) {
  if (!passes?.length) return (kept ?? [[content, "target"]]).map(([text, origin]) => ({ text, origin, pass: -1 }));
  const found = [], decoder = new TextDecoder();
  let at = 0;
  const push = (text, origin, pass) => { if (text) found.push({ text, origin, pass }); at += text.length; };
  passes.forEach(({ tokens }, pass) => tokens.forEach(({ token, bytes, origin }) => {
    const text = bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
    if (content.startsWith(text, at)) push(text, origin, pass);
    else if (text.startsWith(" ") && content.startsWith(text.slice(1), at)) push(text.slice(1), origin, pass);
    else if (text.startsWith(content.slice(at))) push(content.slice(at), origin, pass);
  }));
  push(content.slice(at), "target", passes.length - 1);
  return found;
}
function paint(target, message) {
  const coloured = state.settings.colours !== false;
  target.replaceChildren(...spans(message).map(({ text, origin, pass }) =>
    make("span", { className: coloured ? classOf(origin) : "", textContent: text, "data-pass": pass })));
  target.message = message;
}
function describe(pass) {
  const drafted = pass.drafted, refused = drafted.filter((d) => !d.accepted).length;
  const depth = (d) => { let n = 0; for (let p = d.parent; p >= 0; p = drafted[p].parent) n++; return n; };
  const children = (parent) => drafted.flatMap((d, i) => (d.parent === parent ? [d, ...children(i)] : []));
  const line = (d) => {
    const chance = d.score === undefined ? "" : `${number(100 * d.score, 0)} %`;
    const item = make("li", { className: d.accepted ? "" : "refused" },
      make("code", { className: `o${colour(d.origin)}`, textContent: JSON.stringify(d.token).slice(1, -1) }), " ",
      make("small", { textContent: [d.accepted ? "✓" : "✗", d.origin, chance].join(" ") }));
    item.style.setProperty("--depth", depth(d));
    return item;
  };
  const tokens = pass.tokens.length === 1 ? "1 token" : `${pass.tokens.length} tokens`;
  const times = `drafting ${number(pass.draft_ms, 2)} ms, target ${number(pass.verify_ms, 2)} ms`;
  return [make("p", {}, make("b", { textContent: `${tokens} from this pass` }),
    `, ${drafted.length} drafted, ${refused} refused; ${times}`),
    make("ul", {}, ...children(-1).map(line))];
}
function show(answerElement, pass, anchor) {
  const found = answerElement.message?.passes?.[pass], details = $("#details");
  unmark();
  details.hidden = !found;
  if (!found) return;
  answerElement.querySelectorAll(`[data-pass="${pass}"]`).forEach((e) => e.classList.add("chosen"));
  answerElement.pass = pass;
  details.replaceChildren(...describe(found));
  const box = anchor.getBoundingClientRect(), own = details.getBoundingClientRect();
  const below = box.bottom + 6 + own.height < innerHeight;
  details.style.left = `${Math.max(6, Math.min(box.left, innerWidth - own.width - 6))}px`;
  details.style.top = `${below ? box.bottom + 6 : Math.max(6, box.top - own.height - 6)}px`;
}
function unmark() { document.querySelectorAll(".chosen").forEach((e) => e.classList.remove("chosen")); }
function hide() { $("#details").hidden = true; unmark(); }
function over(event) {
  const span = event.target.closest("[data-pass]");
  if (span) show(span.parentElement, Number(span.dataset.pass), span);
}
function step(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], element = event.currentTarget;
  if (!move || !element.message?.passes?.length) return;
  event.preventDefault();
  const pass = Math.max(0, Math.min(element.message.passes.length - 1, (element.pass ?? -1) + move));
  const anchor = element.querySelector(`[data-pass="${pass}"]`) ?? element;
  anchor.scrollIntoView?.({ block: "nearest" });
  show(element, pass, anchor);
}

// ---- the strip -------------------------------------------------------------------------------------------------
function strip(message) {
  const canvas = $("#strip"), passes = message?.passes ?? [], scale = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = 44 * scale;
  const draw = canvas.getContext("2d"), style = getComputedStyle(document.body);
  const shown = passes.slice(-Math.max(1, Math.floor(canvas.clientWidth / 6)));
  const tallest = Math.max(2, ...shown.map((p) => p.tokens.length)), unit = canvas.height / tallest;
  shown.forEach((pass, i) => pass.tokens.forEach(({ origin }, j) => {
    draw.fillStyle = style.getPropertyValue(origin === "target" ? "--dim" : `--o${colour(origin)}`);
    draw.fillRect(i * 6 * scale, canvas.height - (j + 1) * unit, 5 * scale, Math.max(1, unit - scale));
  }));
  const total = passes.reduce((n, p) => n + p.tokens.length, 0);
  const mean = (key) => passes.reduce((n, p) => n + p[key], 0) / passes.length;
  $("#figures").textContent = passes.length
    ? `${number(total / passes.length, 2)} tokens per pass · ${passes.length} passes · ` +
    `draft ${number(mean("draft_ms"), 2)} ms · verify ${number(mean("verify_ms"), 2)} ms` +
    (message.stats?.speed ? ` · ${number(message.stats.speed, 0)} tokens/s` : "") : "";
  canvas.setAttribute("aria-label", $("#figures").textContent || "Tokens per pass");
  const origins = [...new Set(passes.flatMap((p) => [...p.tokens, ...p.drafted].map((t) => t.origin)))];
  $("#legend").replaceChildren(...origins.map((o) => make("li", { className: classOf(o), textContent: o })));
  $("#live").hidden = !passes.length;
}

// ---- drawing the conversation ----------------------------------------------------------------------------------
function answerBox(message, title) {
  const box = make("div", { className: "text answer", tabIndex: 0,
    "aria-label": title ?? "Answer; arrow keys show its passes",
    onmouseover: over, onclick: over, onkeydown: step, onmouseleave: hide, onblur: hide });
  paint(box, message);
  const speed = message.stats ? `${message.stats.tokens} tokens, ${message.stats.passes} passes` +
    (message.stats.speed ? `, ${number(message.stats.speed, 0)} tokens/s` : "") : "";
  return [...(title ? [make("h3", { textContent: title })] : []), box,
    make("small", { className: "who", textContent: speed }),
    ...(message.error ? [make("p", { className: "error", textContent: message.error })] : [])];
}
function verdict(first, second) {
  if (!first.stats || !second.stats || first.error || second.error) return [];
  const equal = first.content === second.content;
  const ratio = second.stats.speed ? second.stats.speed / first.stats.speed : NaN;
  const promise = second.stats.lossless ? "" : "; this method is lossy";
  return [make("p", { className: `verdict ${equal ? "equal" : "differs"}`, textContent: equal
    ? `Equal texts: ${first.content.length} characters, seed ${second.stats.seed}. ` +
      `${number(ratio, 2)}× the tokens per second.`
    : `The texts differ${promise}.` })];
}
function item(message, index) {
  const isUser = message.role === "user", last = index === talk().messages.length - 1;
  const buttons = isUser ? [make("button", { textContent: "Edit", onclick: () => edit(index) })]
    : [make("button", { textContent: "Copy", onclick: () => navigator.clipboard?.writeText(message.content) }),
      ...(last ? [make("button", { textContent: "Regenerate", onclick: () => regenerate(index) })] : [])];
  const method = message.stats?.method ? ` (${message.stats.method})` : "";
  const head = make("div", { className: "who" }, isUser ? "You" : `Foretell${method}`, ...buttons);
  if (isUser) return make("li", { className: "user" }, head,
    make("div", { className: "text", textContent: message.content }),
    ...(message.attached ?? []).map((name) => make("small", { className: "who", textContent: `attached: ${name}` })));
  const parts = message.plain ? [make("div", { className: "columns" },
    make("div", {}, ...answerBox(message.plain, "Speculation off")),
    make("div", {}, ...answerBox(message, "Speculation on"))), ...verdict(message.plain, message)] : answerBox(message);
  return make("li", { className: "assistant" }, head, ...parts);
}
function entry(conversation, index) {
  const { title } = conversation, current = index === state.current;
  return make("li", { className: current ? "current" : "" },
    make("button", { textContent: title, onclick: () => open(index), "aria-current": current }),
    make("button", { textContent: "×", title: `Delete ${title}`, "aria-label": `Delete ${title}`,
      onclick: () => remove(index) }));
}
function render() {
  const log = $("#log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  log.replaceChildren(...talk().messages.map(item));
  if (atEnd) log.scrollTop = log.scrollHeight;
  $("#conversations").replaceChildren(...state.conversations.map(entry));
  $("#send").textContent = running ? "Stop" : editing >= 0 ? "Send again" : "Send";
  $("#cancel").hidden = editing < 0;
  $("#attached").replaceChildren(...files.map((f, i) => make("li", {},
    make("button", { type: "button", textContent: `${f.name} ×`, "aria-label": `Remove ${f.name}`,
      onclick: () => { files.splice(i, 1); render(); } }))));
  strip(talk().messages.findLast((m) => m.role === "assistant"));
}
let drawn = false;
function soon(message) {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    const boxes = [...document.querySelectorAll("#log > li:last-child .answer")];
    if (boxes.length) boxes.forEach((box) => paint(box, box.message));
    strip(message);
    const log = $("#log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
  });
}

// ---- actions ---------------------------------------------------------------------------------------------------
function open(index) {
  state.current = index;
  editing = -1;
  hide(); save(); render();
  $("#side").classList.remove("open");
}
function remove(index) {
  running?.abort();
  state.conversations.splice(index, 1);
  if (!state.conversations.length) state.conversations.push(fresh());
  open(Math.min(state.current, state.conversations.length - 1));
}
function begin() { state.conversations.unshift(fresh()); open(0); $("#text").focus(); }
function edit(index) {
  editing = index;
  $("#text").value = talk().messages[index].content;
  render();
  $("#text").focus();
}
function regenerate(index) { talk().messages.length = index; generate(); }
function send() {
  if (running) { running.abort(); return; }
  const text = $("#text").value.trim();
  if (!text && !files.length) return;
  const conversation = talk();
  if (editing >= 0) conversation.messages.length = editing;
  const attachments = files.map((f) => `File ${f.name}:\n${f.text}\n\n`).join("");
  const attached = files.map((f) => f.name);
  conversation.messages.push({ role: "user", content: text, sent: attachments + text, attached });
  if (conversation.messages.length === 1) conversation.title = text.slice(0, 40) || files[0].name;
  editing = -1; files = []; $("#text").value = "";
  generate();
}
async function generate() {
  running = new AbortController();
  const conversation = talk(), messages = conversation.messages.slice();
  const seed = given(state.settings.seed) ? Number(state.settings.seed) : Math.floor(Math.random() * 2 ** 31);
  const message = { role: "assistant", content: "" };
  if (state.mode === "compare") message.plain = { content: "" };
  conversation.messages.push(message);
  render();
  if (message.plain) await answer(messages, seed, false, message.plain, () => soon(message.plain));
  if (!message.plain?.error) await answer(messages, seed, state.mode !== "off", message, () => soon(message));
  running = null;
  save();
  render();
}
async function attach(list) {
  for (const file of list) {
    if (file.size > MOST_BYTES) alert(`${file.name} has more than 1 MB`);
    else files.push({ name: file.name, text: await file.text() });
  }
  render();
}
async function greet() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) { $("#model").textContent = "an API key is needed: see the settings"; return; }
    const { data: [model] } = await response.json();
    $("#model").textContent = model.id;
    const select = $("#settings").elements.method;
    select.replaceChildren(make("option", { value: "", textContent: `${model.default_method} (default)` }),
      ...model.methods.map((name) => make("option", { value: name, textContent: name })));
    select.value = state.settings.method ?? "";
  } catch { $("#model").textContent = "the server does not answer yet"; setTimeout(greet, 2000); }
}

// ---- wiring ----------------------------------------------------------------------------------------------------
$("#composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("#text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!running) send(); }
});
$("#files").addEventListener("change", (event) => { attach(event.target.files); event.target.value = ""; });
$("#cancel").addEventListener("click", () => { editing = -1; $("#text").value = ""; render(); });
$("#new").addEventListener("click", begin);
$("#menu").addEventListener("click", () => {
  const opened = $("#side").classList.toggle("open");
  $("#menu").setAttribute("aria-expanded", opened);
});
$("#mode").addEventListener("change", (event) => { state.mode = event.target.value; save(); });
$("#settings").addEventListener("submit", (event) => event.preventDefault());
$("#settings").addEventListener("input", (event) => {
  const { name, type, checked, value } = event.target;
  state.settings[name] = type === "checkbox" ? checked : value;
  save();
  if (name === "colours") render();
  if (name === "key") greet();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { if (!$("#details").hidden) hide(); else running?.abort(); }
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); begin(); }
});
document.body.addEventListener("dragover", (event) => event.preventDefault());
document.body.addEventListener("drop", (event) => { event.preventDefault(); attach(event.dataTransfer.files); });
addEventListener("resize", () => strip(talk().messages.findLast((m) => m.role === "assistant")));
for (const [name, value] of Object.entries(state.settings)) {
  const field = $("#settings").elements[name];
  if (field) { if (field.type === "checkbox") field.checked = value; else field.value = value ?? ""; }
}
for (const input of document.querySelectorAll("[name=mode]")) input.checked = input.value === state.mode;
render();
greet();
