"use strict";
/* Downloads, the link, the compared setting and a pasted model. */
const Actions = (data, state, answer, changed, fillModels) => {
  const $ = (selector) => document.querySelector(selector);

  function save(name, type, content) {
    const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  const HEAD =
    "group,count,operation,shape,kind,ops,weights,read,write,kv_read,kv_write,link,intensity,attainable,bound,seconds";
  function table() {
    const row = (l) => [l.group, l.count, l.op[0], l.op[2], l.op[1], ...l.cost.slice(0, 7), l.intensity, l.attainable];
    const rows = answer().lines.map((l) => [...row(l), l.bound, l.seconds].join(","));
    return [HEAD, ...rows].join("\n") + "\n";
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
    return new Promise((done, fail) => {
      image.onload = () => {
        const canvas = Object.assign(document.createElement("canvas"), { width: w * 2, height: h * 2 }),
          context = canvas.getContext("2d");
        context.fillStyle = style.getPropertyValue("--card");
        context.fillRect(0, 0, canvas.width, canvas.height);
        context.drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob(done, "image/png");
      };
      image.onerror = () => fail(new Error("The picture could not be drawn."));
      image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(svg));
    });
  }

  /* Asks the server for the graphs of a config.json and adds them as the model `pasted`. */
  async function paste(text) {
    if (!location.protocol.startsWith("http"))
      throw new Error("A page on disk has the built-in models only: run `foretell roofline view` to paste one.");
    const headers = { "Content-Type": "application/json" },
      reply = await fetch("model", { method: "POST", headers, body: text }),
      found = await reply.json();
    if (!reply.ok) throw new Error(found.error);
    const first = data.groups.length;
    const renumber = (part) => {
      if (!part || typeof part !== "object") return;
      if (Array.isArray(part.groups)) part.groups.forEach((group) => (group[0] += first));
      else Object.values(part).forEach(renumber);
    };
    renumber(found.model);
    data.groups.push(...found.groups);
    data.models.pasted = found.model;
    fillModels();
  }
  async function use(text) {
    try {
      await paste(text);
      state.now.config = JSON.stringify(JSON.parse(text));
      state.now.model = "pasted";
      $("#pasted").textContent = "In use as “pasted”.";
    } catch (error) {
      $("#pasted").textContent = error.message;
    }
    changed();
  }

  async function copy() {
    state.write();
    try {
      await navigator.clipboard.writeText(location.href);
      $("#link").textContent = "Copied";
    } catch {
      prompt("This link restores the setting:", location.href);
    }
    setTimeout(() => {
      $("#link").textContent = "Copy link";
    }, 1500);
  }

  function start() {
    $("#keep").onclick = () => {
      state.compared = state.compared ? null : { ...state.now };
      changed();
    };
    $("#swap").onclick = () => {
      [state.now, state.compared] = [state.compared, state.now];
      changed();
    };
    $("#link").onclick = copy;
    $("#use").onclick = () => use($("#config").value);
    $("#table").onclick = () => save(`${state.now.model}-${state.now.stage}.csv`, "text/csv", table());
    $("#picture").onclick = async () => save(`${state.now.model}-${state.now.stage}.png`, "image/png", await picture());
  }

  return { start, table, picture, use };
};
