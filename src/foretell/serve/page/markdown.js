// ---- a safe subset of Markdown, by offsets into the text, so that its parts keep the colours of their tokens --------
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)/, HEADING = /^(#{1,6})[ \t]+/, QUOTE = /^ {0,3}>[ \t]?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+/, RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/, ROW = /^[ \t]*\|/;
const CODE = /(?<ticks>`+)(?:[^`]|[^`][^]*?[^`])\k<ticks>(?!`)/;
const LINK = /\[(?<label>[^\]\n]*)\]\((?<address>https?:\/\/[^\s)]+)\)/;
const STRONG = /(?<twice>\*\*|__)(?=\S)(?<bold>[^]*?\S)\k<twice>/;
const SLANTED = /(?<once>[*_])(?=\S)(?<slanted>[^*_]*?[^\s*_])\k<once>(?!\w)/;
const INLINE = new RegExp([CODE, STRONG, SLANTED, LINK].map(({ source }) => source).join("|"), "g");

/** Blocks of the text from an offset on: kind, and where each begins and ends. */
function* blocks(text, from) {
  const lineEnd = (at) => { const end = text.indexOf("\n", at); return end < 0 ? text.length : end; };
  const line = (at) => text.slice(at, lineEnd(at));
  const opens = (at) => [FENCE, HEADING, QUOTE, ITEM, RULE, ROW].some((mark) => mark.test(line(at)));
  for (let at = from; at < text.length;) {
    if (!line(at).trim()) { at = lineEnd(at) + 1; continue; }
    const start = at, first = line(at);
    let match, next = lineEnd(at) + 1;
    const take = (belongs) => {
      while (next < text.length && line(next).trim() && belongs(next)) next = lineEnd(next) + 1;
    };
    if ((match = FENCE.exec(first))) {
      const body = next;
      while (next < text.length && !line(next).trim().startsWith(match[1])) next = lineEnd(next) + 1;
      const end = Math.max(body, Math.min(next - 1, text.length));
      next = Math.min(text.length, lineEnd(next) + 1);
      yield { kind: "code", from: start, language: match[2], body, end };
    } else if ((match = HEADING.exec(first))) {
      const level = match[1].length;
      yield { kind: "heading", from: start, level, body: start + match[0].length, end: lineEnd(start) };
    } else if (RULE.test(first)) {
      yield { kind: "rule", from: start };
    } else if (ROW.test(first)) {
      take((i) => ROW.test(line(i)));
      yield { kind: "table", from: start, end: Math.min(next - 1, text.length) };
    } else if (QUOTE.test(first)) {
      take((i) => QUOTE.test(line(i)));
      yield { kind: "quote", from: start, end: Math.min(next - 1, text.length) };
    } else if ((match = ITEM.exec(first))) {
      take((i) => !opens(i));
      const marker = /\d/.test(match[2]) ? match[2] : "•", indent = match[1].replaceAll("\t", "    ").length;
      const body = start + match[0].length, end = Math.min(next - 1, text.length);
      yield { kind: "item", from: start, marker, depth: Math.floor(indent / 2), body, end };
    } else {
      take((i) => !opens(i));
      yield { kind: "paragraph", from: start, body: start, end: Math.min(next - 1, text.length) };
    }
    at = next;
  }
}
/** Elements of the text between two offsets; `leaf(from, to)` makes those of plain text. */
function inline(text, from, to, leaf) {
  const made = [];
  let at = from;
  for (const match of text.slice(from, to).matchAll(INLINE)) {
    const start = from + match.index, { ticks, bold, slanted, label, address } = match.groups;
    made.push(...leaf(at, start));
    at = start + match[0].length;
    const within = (mark, length) => inline(text, start + mark, start + mark + length, leaf);
    if (ticks) made.push(make("code", {}, ...leaf(start + ticks.length, at - ticks.length)));
    else if (bold) made.push(make("strong", {}, ...within(2, bold.length)));
    else if (address) {
      const link = { href: address, target: "_blank", rel: "noopener noreferrer" };
      made.push(make("a", link, ...within(1, label.length)));
    }
    else made.push(make("em", {}, ...within(1, slanted.length)));
  }
  return [...made, ...leaf(at, to)];
}
/** The element of a block. */
function blockElement(text, block, leaf) {
  const part = (from, to) => inline(text, from, to, leaf);
  const lines = (from, to) => {
    const ranges = [];
    for (let at = from; at < to;) {
      const end = Math.min(to, text.indexOf("\n", at) < 0 ? to : text.indexOf("\n", at));
      ranges.push([at, end]);
      at = end + 1;
    }
    return ranges;
  };
  switch (block.kind) {
    case "code": {
      const code = make("code", {}, ...leaf(block.body, block.end));
      return make("pre", { "data-language": block.language }, code);
    }
    case "heading": return make(`h${Math.min(6, block.level + 2)}`, {}, ...part(block.body, block.end));
    case "rule": return make("hr");
    case "item": {
      const item = make("div", { className: "item" }, make("span", { className: "marker", textContent: block.marker }),
        make("div", {}, ...part(block.body, block.end)));
      item.style.setProperty("--depth", block.depth);
      return item;
    }
    case "quote": return make("blockquote", {}, ...lines(block.from, block.end).map(([from, to]) =>
      make("div", {}, ...part(from + (QUOTE.exec(text.slice(from, to))?.[0].length ?? 0), to))));
    case "table": return make("table", {}, ...lines(block.from, block.end)
      .filter(([from, to]) => !/^[\s|:-]+$/.test(text.slice(from, to))).map(([from, to], row) => {
        const cells = [...text.slice(from, to).matchAll(/\|([^|]*)(?=\||$)/g)].filter(({ 1: cell }) => cell.trim());
        return make("tr", {}, ...cells.map(({ index, 1: cell }) =>
          make(row ? "td" : "th", {}, ...part(from + index + 1, from + index + 1 + cell.length))));
      }));
    default: return make("p", {}, ...part(block.body, block.end));
  }
}
