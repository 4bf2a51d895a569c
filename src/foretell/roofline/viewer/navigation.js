"use strict";
/* Zoom, pan and search of the graph. The frame scrolls; zooming changes the size of the drawing in it. */
const Navigation = (choose) => {
  const canvas = $("#canvas"),
    svg = $("#graph"),
    search = $("#search"),
    [LOWEST, HIGHEST, READABLE] = [0.2, 4, 0.88];
  let scale = null,
    matches = [],
    at = -1;

  const size = () => svg.getAttribute("viewBox").split(" ").slice(2).map(Number),
    /* Shares of the drawing's size at which it is as wide and as high as the frame. */
    shares = () => {
      canvas.style.maxHeight = "";
      return [canvas.clientWidth / size()[0], canvas.clientHeight / size()[1]];
    };
  /* The scale of the start: all of the graph where its text stays readable, else the size at which it is drawn. */
  function natural() {
    const [across, down] = shares();
    if (canvas.clientWidth < 480) return 1;
    return down >= READABLE && across >= READABLE ? Math.min(1, across, down) : Math.max(READABLE, Math.min(1, across));
  }

  function update() {
    const [w, h] = size(),
      now = scale || natural();
    svg.setAttribute("width", Math.round(w * now));
    svg.setAttribute("height", Math.round(h * now));
    canvas.style.maxHeight = `${Math.round(h * now) + 18}px`;
    find(false);
    hint();
  }

  /* Zooms by a factor and keeps the point (x, y) of the frame where it is. */
  function zoom(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
    const before = scale || natural(),
      now = Math.min(HIGHEST, Math.max(LOWEST, before * factor)),
      [left, top] = [canvas.scrollLeft + x, canvas.scrollTop + y];
    scale = now;
    update();
    canvas.scrollLeft = (left * now) / before - x;
    canvas.scrollTop = (top * now) / before - y;
  }
  function fit() {
    scale = Math.min(...shares(), 1.5);
    update();
  }

  /* How many operations lie below the frame. */
  function hint() {
    const bottom = canvas.getBoundingClientRect().bottom,
      below = [...svg.querySelectorAll(".op")].filter((op) => op.getBoundingClientRect().top > bottom - 12).length;
    $("#below").textContent = below ? `↓ ${below} more operation${below > 1 ? "s" : ""}` : "";
  }

  function find(moves = true) {
    const text = search.value.trim().toLowerCase(),
      all = [...svg.querySelectorAll(".op")];
    matches = text ? all.filter((op) => op.dataset.key.toLowerCase().includes(text)) : [];
    for (const op of all) {
      op.classList.toggle("match", matches.includes(op));
      op.classList.toggle("dim", Boolean(text) && !matches.includes(op));
    }
    $("#found").textContent = text ? `${matches.length} of ${all.length}` : "";
    if (moves) {
      at = -1;
      if (matches.length) reveal(matches[0]);
    }
  }
  function reveal(op) {
    const box = op.getBoundingClientRect(),
      frame = canvas.getBoundingClientRect();
    canvas.scrollTop += box.top + box.height / 2 - frame.top - frame.height / 2;
    canvas.scrollLeft += box.left + box.width / 2 - frame.left - frame.width / 2;
  }

  /* Keeps the chosen operation inside the frame, without moving the page. */
  function keepInView(key) {
    const op = svg.querySelector(`[data-key="${CSS.escape(key)}"]`);
    if (!op) return;
    const box = op.getBoundingClientRect(),
      frame = canvas.getBoundingClientRect();
    const isHigh = box.top < frame.top || box.bottom > frame.bottom;
    if (isHigh || box.left < frame.left || box.right > frame.right) reveal(op);
  }

  function pan() {
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0)
        from = [event.clientX + canvas.scrollLeft, event.clientY + canvas.scrollTop, false];
    });
    addEventListener("pointermove", (event) => {
      if (!from) return;
      const [dx, dy] = [from[0] - event.clientX - canvas.scrollLeft, from[1] - event.clientY - canvas.scrollTop];
      if (!from[2] && Math.hypot(dx, dy) < 4) return;
      from[2] = true;
      canvas.classList.add("panning");
      canvas.scrollLeft += dx;
      canvas.scrollTop += dy;
    });
    addEventListener("pointerup", () => {
      // A drag is no click on the operation under the pointer.
      if (from && from[2]) addEventListener("click", (event) => event.stopPropagation(), { capture: true, once: true });
      if (from && from[2]) setTimeout(() => canvas.classList.remove("panning"), 0);
      from = null;
    });
  }

  function start() {
    $("#in").onclick = () => zoom(1.25);
    $("#out").onclick = () => zoom(0.8);
    $("#fit").onclick = fit;
    search.oninput = () => find();
    search.onkeydown = (event) => {
      if (event.key === "Escape" && search.value) {
        search.value = "";
        find();
      }
      if (event.key !== "Enter" || !matches.length) return;
      event.preventDefault();
      at = (at + (event.shiftKey ? matches.length - 1 : 1)) % matches.length;
      choose(matches[at].dataset.key);
    };
    canvas.onwheel = (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
    };
    canvas.onscroll = hint;
    addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
      event.preventDefault();
      search.focus();
    });
    pan();
  }

  return { start, update, keepInView, width: () => canvas.clientWidth };
};
