"use strict";
/* Terms of the glossary, explained beside the pointer or at the focused setting; Escape hides the explanation. */
const Tips = (() => {
  const terms = Object.fromEntries(
    [...document.querySelectorAll("#glossary dt")].map((dt) => [dt.dataset.name, dt.nextElementSibling.textContent]),
  );

  function start(tip) {
    for (const named of document.querySelectorAll("label[data-term], summary[data-term], legend[data-term]")) {
      const text = [...named.childNodes].find((n) => n.textContent.trim()),
        span = element("span", { className: "term" });
      text.replaceWith(span);
      span.append(text);
    }
    const hide = () => (tip.hidden = true);
    const show = (target) => {
      const named = target.closest && target.closest("[data-term]");
      if (!named) return hide();
      tip.textContent = terms[named.dataset.term];
      tip.hidden = false;
      const box = named.getBoundingClientRect(),
        top = box.bottom + 6 + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6;
      tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${Math.max(8, top)}px`;
    };
    document.addEventListener("pointerover", (event) => event.pointerType === "mouse" && show(event.target));
    // A tap on the words explains them; a tap on a control beside them does not.
    document.addEventListener("pointerdown", (event) => {
      const isTouch = event.pointerType !== "mouse",
        words = isTouch && event.target.closest(".term, dfn, dt [data-term], p [data-term], h2");
      if (words) show(words);
      else hide();
    });
    document.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && show(event.target));
    document.addEventListener("focusout", hide);
    document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
    addEventListener("scroll", hide, { passive: true, capture: true });
  }

  return { terms, start };
})();
