// ---- drafts in colour, and what they gained ------------------------------------------------------------------------
const PALETTE = 6;
const known = {
  "prompt-lookup": 0, suffix: 0, "token-recycling": 1, grammar: 2, prediction: 3, "draft-model": 4, eagle: 5,
};
const WORDS = {
  target: "written by the model", "prompt-lookup": "copied from the text", suffix: "copied from the text",
  "token-recycling": "what followed before", grammar: "forced by the format", prediction: "from your prediction",
  "draft-model": "from the draft model", eagle: "from the speculator",
};
const colour = (origin) => known[origin] ??= Object.keys(known).length % PALETTE;
const classOf = (origin) => (origin === "target" ? "" : `o${colour(origin)}`);

/** Which characters of an answer come from which token; grows with its passes. */
class Origins {
  constructor() {
    this.parts = { reasoning: [], content: [] };
    this.at = { reasoning: 0, content: 0 };
    this.passes = 0;
    this.queue = [];
    this.decoder = new TextDecoder();
  }
  /** Take the passes that came since the last call; `ended`: no text follows. */
  update(message, ended) {
    for (; this.passes < message.passes.length; this.passes++)
      for (const { token, bytes, origin } of message.passes[this.passes].tokens) {
        // A token that is a part of a character has bytes; what a whole one finds unfinished is no character.
        const { decoder } = this;
        const part = bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : decoder.decode() + token;
        if (part) this.queue.push({ text: part, origin, pass: this.passes });
      }
    while (this.queue.length && this.place(message, this.queue[0], ended)) this.queue.shift();
  }
  /** Find a token in the text; false: its text may still come. Tokens that are no text, such as marks, are passed. */
  place(message, { text, origin, pass }, ended) {
    let waits = false;
    for (const name of ["reasoning", "content"]) {
      const whole = message[name] ?? "", at = this.at[name], rest = whole.slice(at, at + text.length);
      const fitting = [text, text.trimStart()].find((t) => t && rest.startsWith(t));
      if (fitting || (ended && rest && text.startsWith(rest))) {
        this.push(name, at, at + (fitting ?? rest).length, origin, pass);
        return true;
      }
      waits ||= text.startsWith(rest) && (name === "content" || !message.content);
    }
    return !waits || ended;
  }
  push(name, from, to, origin, pass) {
    this.parts[name].push({ from, to, origin, pass });
    this.at[name] = to;
  }
  /** For keeping: without passes. */
  kept(name) { return this.parts[name].map(({ from, to, origin }) => [from, to, origin]); }
}
/** Spans of a part of an answer, by offsets. */
function spansOf(message, name) {
  if (message.shown) return message.shown.parts[name];
  return (message.spans?.[name] ?? []).map(([from, to, origin]) => ({ from, to, origin, pass: -1 }));
}
/** A function that makes elements of the text between two offsets, one per token. */
function leaves(text, spans) {
  const coloured = state.settings.colours !== false;
  const element = (from, to, span) => make("span", {
    className: span && coloured ? `${classOf(span.origin)}${span.from === from && span.begins ? " begins" : ""}` : "",
    textContent: text.slice(from, to), ...(span && span.pass >= 0 ? { "data-pass": span.pass } : {}) });
  return (from, to) => {
    const made = [];
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].to <= from) low = middle + 1; else high = middle;
    }
    let at = from;
    for (let i = low; i < spans.length && spans[i].from < to; i++) {
      const span = spans[i], start = Math.max(from, span.from), end = Math.min(to, span.to);
      span.begins = span.pass >= 0 && spans[i - 1]?.pass !== span.pass;
      if (start > at) made.push(element(at, start));
      made.push(element(start, end, span));
      at = end;
    }
    if (at < to) made.push(element(at, to));
    return made;
  };
}
/** Draw a part of an answer; of one that grows only the last block, and of code only the last line. */
function paint(target, message, name = "content") {
  const text = message[name] ?? "", leaf = leaves(text, spansOf(message, name));
  const drawn = target.drawn ??= [];
  const last = drawn.at(-1), list = [...blocks(text, last?.from ?? 0)];
  for (const block of list) {
    const old = drawn.at(-1);
    if (old && old.from === block.from) {
      if (grow(old, block, text, leaf)) continue;
      drawn.pop().element.remove();
    }
    const element = blockElement(text, block, leaf);
    target.append(element);
    drawn.push({ ...block, element, lineAt: block.kind === "code" ? block.body : 0 });
  }
  target.message = message;
}
/** Append to a block of code what came since; whether that was possible. */
function grow(old, block, text, leaf) {
  if (old.kind !== "code" || block.kind !== "code" || old.language !== block.language) return false;
  const code = old.element.firstChild;
  // The last line is drawn again: its last token may have grown.
  const lineAt = Math.max(block.body, text.lastIndexOf("\n", block.end - 1) + 1), from = old.lineAt;
  let length = code.textContent.length, wanted = from - block.body;
  while (length > wanted && code.lastChild) { length -= code.lastChild.textContent.length; code.lastChild.remove(); }
  if (length < wanted) code.append(...leaf(block.body + length, from));
  code.append(...leaf(from, block.end));
  Object.assign(old, block, { lineAt });
  return true;
}
const sum = (values) => values.reduce((a, b) => a + b, 0);
/** Tokens per pass, and the speed beside plain decoding where passes without drafts tell it. */
function gain(message) {
  const passes = message.passes ?? [];
  if (!passes.length) return null;
  const tokens = sum(passes.map((p) => p.tokens.length));
  const plain = passes.slice(1).filter((p) => !p.drafted.length).map((p) => p.verify_ms).sort((a, b) => a - b);
  const spent = sum(passes.map((p) => p.draft_ms + p.verify_ms));
  const drafts = passes.some((p) => p.drafted.length);
  const times = drafts && plain.length >= 3 && spent > 0 ? tokens * plain[plain.length >> 1] / spent : NaN;
  return { tokens, passes: passes.length, rate: tokens / passes.length, times };
}
function gainText(message, measured) {
  const { stats } = message, own = gain(message) ?? stats;
  if (!own) return "";
  const times = measured ?? own.times;
  return [`${number(own.rate ?? own.tokens / own.passes, 1)} tokens a pass`,
    Number.isFinite(times) ? `${measured ? "" : "about "}${number(times, 1)} times plain` : "",
    stats?.speed ? `${number(stats.speed, 0)} tokens/s` : ""].filter(Boolean).join(", ");
}
/** A bar per pass, as high as its tokens. */
function drawStrip(canvas, message) {
  const passes = message.passes ?? [], scale = devicePixelRatio || 1, width = canvas.clientWidth;
  if (!width) return;
  canvas.width = width * scale;
  canvas.height = canvas.clientHeight * scale;
  const draw = canvas.getContext("2d"), style = getComputedStyle(document.body);
  const shown = passes.slice(-Math.max(1, Math.floor(width / 6)));
  const unit = canvas.height / Math.max(2, ...shown.map((p) => p.tokens.length));
  shown.forEach((pass, i) => pass.tokens.forEach(({ origin }, j) => {
    draw.fillStyle = style.getPropertyValue(origin === "target" ? "--dim" : `--o${colour(origin)}`);
    draw.fillRect(i * 6 * scale, canvas.height - (j + 1) * unit, 5 * scale, Math.max(1, unit - scale));
  }));
}
function legend(message) {
  const parts = message.shown ? ["content", "reasoning"] : [];
  const origins = new Set(parts.flatMap((name) => spansOf(message, name).map((span) => span.origin)));
  const words = new Map([...origins].map((origin) => [WORDS[origin] ?? origin, classOf(origin)]));
  return [...words].map(([textContent, className]) => make("li", { className, textContent }));
}
function describe(pass) {
  const drafted = pass.drafted, refused = drafted.filter((d) => !d.accepted).length;
  const depth = (d) => { let n = 0; for (let p = d.parent; p >= 0; p = drafted[p].parent) n++; return n; };
  const children = (parent) => drafted.flatMap((d, i) => (d.parent === parent ? [d, ...children(i)] : []));
  const line = (d) => {
    const chance = d.score === undefined ? "" : `${number(100 * d.score, 0)} %`;
    const item = make("li", { className: d.accepted ? "" : "refused" },
      make("code", { className: `o${colour(d.origin)}`, textContent: JSON.stringify(d.token).slice(1, -1) }), " ",
      make("small", { textContent: [d.accepted ? "✓" : "✗", WORDS[d.origin] ?? d.origin, chance].join(" ") }));
    item.style.setProperty("--depth", depth(d));
    return item;
  };
  const tokens = pass.tokens.length === 1 ? "1 token" : `${pass.tokens.length} tokens`;
  const times = `drafting ${number(pass.draft_ms, 2)} ms, target ${number(pass.verify_ms, 2)} ms`;
  return [make("p", {}, make("b", { textContent: `${tokens} from this pass` }),
    `, ${drafted.length} drafted, ${refused} refused; ${times}`),
    make("ul", {}, ...children(-1).map(line))];
}
function show(box, pass, anchor) {
  const chosen = box.message?.passes?.[pass], details = $("#details");
  unmark();
  details.hidden = !chosen;
  if (!chosen) return;
  box.querySelectorAll(`[data-pass="${pass}"]`).forEach((e) => e.classList.add("chosen"));
  box.pass = pass;
  details.replaceChildren(...describe(chosen));
  const place = anchor.getBoundingClientRect(), own = details.getBoundingClientRect();
  const below = place.bottom + 6 + own.height < innerHeight;
  details.style.left = `${Math.max(6, Math.min(place.left, innerWidth - own.width - 6))}px`;
  details.style.top = `${below ? place.bottom + 6 : Math.max(6, place.top - own.height - 6)}px`;
}
function unmark() { document.querySelectorAll(".chosen").forEach((e) => e.classList.remove("chosen")); }
function hide() { $("#details").hidden = true; unmark(); }
function over(event) {
  const span = event.target.closest("[data-pass]");
  if (span) show(span.closest(".answer"), Number(span.dataset.pass), span);
}
function step(event) {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key], box = event.currentTarget;
  if (!move || !box.message?.passes?.length) return;
  event.preventDefault();
  const pass = Math.max(0, Math.min(box.message.passes.length - 1, (box.pass ?? -1) + move));
  const anchor = box.querySelector(`[data-pass="${pass}"]`) ?? box;
  anchor.scrollIntoView?.({ block: "nearest" });
  show(box, pass, anchor);
}
