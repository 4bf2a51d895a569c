// ---- requests ------------------------------------------------------------------------------------------------------
const MOST_BYTES = 1 << 20, NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];
const EXAMPLES = [
  ["Code", "Write a Python class Stack with the methods push, pop, peek, is_empty and size, each with a docstring."],
  ["A list", "List the planets of the solar system, and then the same list again in reverse order."],
  ["A rewrite", "Repeat this text and correct its spelling: The quick brown fox jumps ofer the lasy dog, who sleeps."],
];
const WELCOME = "Foretell drafts several tokens at a time and lets the model verify them in one pass: the text is " +
  "the model's own, and comes sooner. Coloured words were drafted; a thin rule begins each pass.";
const COMPARE = "“compare” above answers twice with one seed, without drafts and with them, and sets both side by " +
  "side.";
const running = new Map();  // conversation's id -> AbortController
let editing = -1, files = [], model = null;

function headers() {
  const { key } = state.settings;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}
const withFiles = ({ content, files: attached = [] }) =>
  attached.map(({ name, text }) => `File ${name}:\n${text}\n\n`).join("") + content;
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
  const sent = messages.map((m) => ({ role: m.role, content: m.role === "user" ? withFiles(m) : m.content }));
  return { ...fields, seed, speculative, return_drafts: true, stream: true, stream_options: { include_usage: true },
    messages: [...system, ...sent] };
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}
/** Let the server answer; what comes is written into the message, of which `update` is told. */
async function answer(messages, seed, speculates, into, update, signal) {
  Object.assign(into, { content: "", reasoning: "", passes: [], error: "", note: "", stats: null });
  into.shown = new Origins();
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), signal,
      body: JSON.stringify(body(messages, seed, speculates)) });
    if (response.status === 401) askForKey();
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? response.statusText);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const { delta, finish_reason: reason } = chunk.choices?.[0] ?? {};
      into.content += delta?.content ?? "";
      into.reasoning += delta?.reasoning_content ?? "";
      into.passes.push(...(chunk.foretell?.passes ?? []));
      if (reason === "length") into.note = "Cut at the most new tokens.";
      if (chunk.usage) into.stats = { tokens: chunk.usage.completion_tokens, method: chunk.foretell?.method,
        lossless: chunk.foretell?.lossless, seed: chunk.foretell?.seed, speed: chunk.metrics?.tokens_per_second,
        passes: into.passes.length };
      into.shown.update(into);
      update();
    }
  } catch (error) {
    if (error.name === "AbortError") into.note = "Stopped.";
    else into.error = error.message === "Failed to fetch" ? "The server does not answer." : error.message;
  }
  into.shown.update(into, true);
  into.spans = { content: into.shown.kept("content"), reasoning: into.shown.kept("reasoning") };
  if (into.stats) into.stats.times = gain(into)?.times;
  update();
}

// ---- drawing the conversation --------------------------------------------------------------------------------------
/** The box of one answer: reasoning folded, text, what it gained. */
function answerBox(message, title, measured) {
  const label = title ?? "Answer; arrow keys show its passes";
  const box = make("div", { className: "answer", tabIndex: 0, "aria-label": label,
    onmouseover: over, onclick: over, onkeydown: step, onmouseleave: hide, onblur: hide });
  const thought = make("div", { className: "text" }), text = make("div", { className: "text" });
  const thinking = make("details", { className: "thinking" }, make("summary", { textContent: "Reasoning" }), thought);
  const canvas = make("canvas", { className: "strip", role: "img" }), words = make("ul", { className: "legend" });
  const figures = make("p", { className: "figures" }), notes = make("div", { role: "status" });
  box.append(thinking, text);
  box.message = message;
  box.update = () => {
    if (message.reasoning) paint(thought, message, "reasoning");
    thinking.hidden = !message.reasoning;
    paint(text, message);
    figures.textContent = gainText(message, measured);
    words.replaceChildren(...legend(message));
    canvas.hidden = !message.passes?.length;
    canvas.setAttribute("aria-label", figures.textContent || "Tokens per pass");
    drawStrip(canvas, message);
    notes.replaceChildren(...["note", "error"].filter((kind) => message[kind])
      .map((kind) => make("p", { className: kind, textContent: message[kind] })));
  };
  box.update();
  return [...(title ? [make("h3", { textContent: title })] : []), box,
    make("div", { className: "gain" }, figures, canvas), words, notes];
}
const speedOf = (message) => message.stats?.speed ?? NaN;
function verdict(plain, drafted) {
  if (!plain.stats || !drafted.stats || plain.error || drafted.error) return [];
  const equal = plain.content === drafted.content;
  const promise = drafted.stats.lossless ? "" : "; this method is lossy";
  return [make("p", { className: `verdict ${equal ? "equal" : "differs"}`, textContent: equal
    ? `Equal texts: ${plain.content.length} characters, seed ${drafted.stats.seed}. ` +
      `${number(speedOf(drafted) / speedOf(plain), 2)}× the tokens per second.`
    : `The texts differ${promise}.` })];
}
function copy(event, text) {
  const button = event.target, say = (word) => {
    button.textContent = word;
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  if (navigator.clipboard) {
    navigator.clipboard.writeText(text).then(() => say("Copied"), () => say("Not allowed"));
    return;
  }
  const area = make("textarea", { value: text });  // without https there is no clipboard
  document.body.append(area);
  area.select();
  say(document.execCommand("copy") ? "Copied" : "Not allowed");
  area.remove();
}
function item(message, index) {
  const isUser = message.role === "user", last = index === talk().messages.length - 1;
  const button = (textContent, onclick) => make("button", { textContent, onclick });
  const own = isUser ? button("Edit", () => edit(index)) : button("Copy", (event) => copy(event, message.content));
  const buttons = [own];
  if (!isUser && last) buttons.push(button("Regenerate", () => regenerate(index)));
  const method = message.stats?.method ? ` (${message.stats.method})` : "";
  const head = make("div", { className: "who" }, isUser ? "You" : `Foretell${method}`, ...buttons);
  if (isUser) return make("li", { className: "user" }, head,
    make("div", { className: "text plain", textContent: message.content }),
    ...(message.files ?? []).map(({ name }) => make("small", { className: "who", textContent: `attached: ${name}` })));
  const measured = message.plain ? speedOf(message) / speedOf(message.plain) : undefined;
  const parts = message.plain ? [make("div", { className: "columns" },
    make("div", {}, ...answerBox(message.plain, "Without drafts")),
    make("div", {}, ...answerBox(message, "With drafts", Number.isFinite(measured) ? measured : undefined))),
  ...verdict(message.plain, message)] : answerBox(message);
  return make("li", { className: "assistant" }, head, ...parts);
}
function entry({ id, title }) {
  const current = id === state.current;
  return make("li", { className: current ? "current" : "" },
    make("button", { textContent: title, onclick: () => open(id), "aria-current": current }),
    make("button", { textContent: "×", title: `Delete ${title}`, "aria-label": `Delete ${title}`,
      onclick: () => remove(id) }));
}
function welcome() {
  const ask = (prompt) => { $("#text").value = prompt; send(); };
  const example = ([title, prompt]) =>
    make("button", { onclick: () => ask(prompt) }, make("b", { textContent: title }), ` ${prompt}`);
  return make("li", { id: "welcome" }, make("p", { textContent: WELCOME }),
    make("div", { className: "examples" }, ...EXAMPLES.map(example)), make("p", { textContent: COMPARE }));
}
function isAtEnd(log) { return log.scrollHeight - log.scrollTop - log.clientHeight < 160; }
function render() {
  const log = $("#log"), atEnd = isAtEnd(log), { messages } = talk(), busy = running.has(state.current);
  log.replaceChildren(...(messages.length ? messages.map(item) : [welcome()]));
  log.querySelectorAll(".answer").forEach((box) => box.update());
  if (atEnd) log.scrollTop = log.scrollHeight;
  $("#conversations").replaceChildren(...state.conversations.map(entry));
  $("#send").textContent = busy ? "Stop" : editing >= 0 ? "Send again" : "Send";
  $("#cancel").hidden = editing < 0;
  $("#attached").replaceChildren(...files.map((f, i) => make("li", {},
    make("button", { type: "button", textContent: `${f.name} ×`, "aria-label": `Remove ${f.name}`,
      onclick: () => { files.splice(i, 1); render(); } }))));
}
let drawn = false;
/** Draw the growing answer in the next frame. */
function soon(message) {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    const log = $("#log"), atEnd = isAtEnd(log);
    const boxes = [...log.querySelectorAll(".answer")].filter((box) => box.message === message);
    boxes.forEach((box) => box.update());
    if (boxes.length && atEnd) log.scrollTop = log.scrollHeight;
  });
}
function notify(text) { $("#notice").textContent = text; }

// ---- actions -------------------------------------------------------------------------------------------------------
function openSide(isOpen) {
  $("#side").classList.toggle("open", isOpen);
  $("#backdrop").hidden = !isOpen;
  $("#menu").setAttribute("aria-expanded", isOpen);
}
function open(id) {
  Object.assign(state, { current: id });
  editing = -1;
  files = [];
  hide(); notify(""); render(); openSide(false);
  $("#log").scrollTop = $("#log").scrollHeight;
}
function remove(id) {
  running.get(id)?.abort();
  running.delete(id);
  localStorage.removeItem(TALK + id);
  forget(id);
  render();
}
function begin() {
  const empty = state.conversations.find((c) => !c.messages.length) ?? fresh();
  state.conversations = [empty, ...state.conversations.filter((c) => c !== empty)];
  open(empty.id);
  $("#text").focus();
}
function edit(index) {
  const { content, files: attached = [] } = talk().messages[index];
  editing = index;
  files = [...attached];
  $("#text").value = content;
  render();
  $("#text").focus();
}
function leaveEdit() {
  editing = -1;
  files = [];
  $("#text").value = "";
}
/** Whether this tab may answer in the conversation now; it says why not. */
function isFree(conversation) {
  if (isBusyElsewhere(conversation)) { notify("Another tab is answering in this conversation."); return false; }
  return true;
}
async function stop(conversation) {
  const controller = running.get(conversation.id);
  controller?.abort();
  await controller?.done;
}
async function regenerate(index) {
  const conversation = talk();
  if (!isFree(conversation)) return;
  await stop(conversation);
  conversation.messages.length = index;
  await generate(conversation);
}
async function send() {
  const conversation = talk(), text = $("#text").value.trim();
  if (running.has(conversation.id)) { running.get(conversation.id).abort(); return; }
  if ((!text && !files.length) || !isFree(conversation)) return;
  if (editing >= 0) conversation.messages.length = editing;
  conversation.messages.push({ role: "user", content: text, files });
  if (conversation.messages.length === 1) conversation.title = text.slice(0, 40) || files[0].name;
  leaveEdit();
  await generate(conversation);
}
async function generate(conversation) {
  const controller = new AbortController(), messages = conversation.messages.slice();
  controller.done = new Promise((resolve) => { controller.end = resolve; });
  running.set(conversation.id, controller);
  notify("");
  const seed = given(state.settings.seed) ? Number(state.settings.seed) : Math.floor(Math.random() * 2 ** 31);
  const message = { role: "assistant", content: "", unfinished: true }, { mode } = state;
  if (mode === "compare") message.plain = { content: "" };
  conversation.messages.push(message);
  save(conversation);
  render();
  const update = (part) => () => { soon(part); saveSometimes(conversation); };
  const ask = (speculates, into) => answer(messages, seed, speculates, into, update(into), controller.signal);
  if (message.plain) await ask(false, message.plain);
  if (!message.plain?.error && !controller.signal.aborted) await ask(mode !== "off", message);
  delete message.unfinished;
  if (running.get(conversation.id) === controller) running.delete(conversation.id);
  if (state.conversations.includes(conversation)) save(conversation);
  controller.end();
  render();
}
async function attach(list) {
  for (const file of list) {
    if (file.size > MOST_BYTES) notify(`${file.name} has more than 1 MB.`);
    else files.push({ name: file.name, text: await file.text() });
  }
  render();
}
function askForKey() {
  $("#unlock").hidden = false;
  $("#unlock").elements.key.focus();
}
async function greet() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) { askForKey(); return; }
    $("#unlock").hidden = true;
    ({ data: [model] } = await response.json());
    $("#model").textContent = model.id;
    const select = $("#settings").elements.method;
    select.replaceChildren(make("option", { value: "", textContent: `${model.default_method} (default)` }),
      ...model.methods.map((name) => make("option", { value: name, textContent: name })));
    select.value = state.settings.method ?? "";
  } catch { $("#model").textContent = "the server does not answer yet"; setTimeout(greet, 2000); }
}
function fillSettings() {
  for (const field of $("#settings").elements) {
    if (field.type === "checkbox") field.checked = state.settings[field.name] ?? field.defaultChecked;
    else if (field.name) field.value = state.settings[field.name] ?? "";
  }
  for (const input of document.querySelectorAll("[name=mode]")) input.checked = input.value === state.mode;
}

// ---- wiring --------------------------------------------------------------------------------------------------------
$("#composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("#text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running.has(state.current)) send();
  }
});
$("#files").addEventListener("change", (event) => { attach(event.target.files); event.target.value = ""; });
$("#cancel").addEventListener("click", () => { leaveEdit(); render(); });
$("#new").addEventListener("click", begin);
$("#menu").addEventListener("click", () => openSide(!$("#side").classList.contains("open")));
$("#backdrop").addEventListener("click", () => openSide(false));
$("#mode").addEventListener("change", (event) => { state.mode = event.target.value; saveSettings(); });
$("#settings").addEventListener("submit", (event) => event.preventDefault());
$("#settings").addEventListener("input", ({ target: { name, type, checked, value } }) => {
  state.settings[name] = type === "checkbox" ? checked : value;
  saveSettings();
  if (name === "colours") render();
});
$("#unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  state.settings.key = event.target.elements.key.value;
  greet();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (!$("#details").hidden) hide();
    else if ($("#side").classList.contains("open")) openSide(false);
    else running.get(state.current)?.abort();
  }
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); begin(); }
});
document.body.addEventListener("dragover", (event) => event.preventDefault());
document.body.addEventListener("drop", (event) => { event.preventDefault(); attach(event.dataTransfer.files); });
addEventListener("resize", () => document.querySelectorAll(".answer").forEach((box) => box.update()));
addEventListener("storage", follow);
addEventListener("pagehide", () => state.conversations.filter(({ id }) => running.has(id)).forEach(save));
load();
fillSettings();
render();
greet();
