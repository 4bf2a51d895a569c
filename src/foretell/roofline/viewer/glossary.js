"use strict";
/* Terms of the page: a list at its end, and an explanation beside the pointer or at the focused setting. */
const Glossary = (() => {
  const TERMS = {
    pass: ["pass", "One run of all layers over the new tokens of every sequence in the batch."],
    speculation: [
      "speculative decoding",
      "Cheap guesses of the next tokens, drafts, are checked by the model in one pass; the right ones are kept.",
    ],
    stage: [
      "stage",
      "prefill reads the prompt; decode writes one token; verify checks several drafted tokens; chunked reads a " +
        "prompt in pieces beside decoding sequences; chat is a prompt and its whole answer.",
    ],
    batch: ["batch", "Sequences that share a pass. They share the reading of the weights, too."],
    context: ["context", "Tokens of each sequence whose keys and values are in the cache already."],
    format: [
      "format",
      "Bits per number. 4g128: 4 bits and one scale for every 128 weights; z: a zero point, too.",
    ],
    cache: ["cache", "Keys and values of earlier tokens (KV cache), kept so that they are not computed again."],
    head: ["embedding and head", "The matrices that turn tokens into vectors and vectors into scores of tokens."],
    fusion: [
      "fusion",
      "Operations computed together, without writing what is between them to memory. FlashAttention fuses attention.",
    ],
    devices: ["devices", "Devices that share every layer (tensor parallelism) and exchange results over their link."],
    runtime: [
      "runtime",
      "The program that runs the model. It reaches a part of the data sheet's rates and adds fixed times.",
    ],
    offload: ["offloading", "A part of weights or cache is held outside the device and fetched for every pass."],
    roofline: [
      "roofline",
      "The rate that an operation can reach: bandwidth times its intensity, at most the peak of the device.",
    ],
    ops: ["OPs", "Arithmetic operations; a multiplication and an addition count as two."],
    intensity: ["intensity", "Arithmetic operations per byte moved. Low: memory sets the time; high: computing does."],
    attainable: ["attainable", "Operations per second that this operation reaches, after the runtime's own times."],
    bound: ["bound by", "What sets the time: memory, compute, or the link between devices or to the host."],
    largestBatch: ["largest batch", "The largest batch that fits into the memory of the device, at this context."],
    acceptance: [
      "acceptance",
      "Probability that the model confirms a drafted token. Each method uses a published or measured figure.",
    ],
    basis: [
      "basis",
      "What the acceptance of a method rests on: published, measured by this project, assumed, or given by you.",
    ],
    draft: ["draft model", "A smaller model with the same vocabulary that drafts for the large one."],
    chain: ["chain", "Drafts in a row, each after the one before."],
    tree: ["tree", "Several drafts for each position; a pass checks all of them."],
    tau: ["tokens per pass", "Tokens that one pass adds on average: one, and the drafts that it confirms."],
    largest: ["largest tree", "Most tokens per sequence that a pass may check, the first one included."],
    range: [
      "range",
      "Likely limits of a prediction, from the spread of acceptance over tasks and the error of the runtime.",
    ],
    variants: ["cheaper passes", "Changes of the model that make a pass faster and its output another one."],
    share: ["layers run", "Part of the layers that early exit and layer skipping run on average, 0 to 1."],
    density: ["density", "Part of the feed-forward that one token needs under contextual sparsity, 0 to 1."],
    load: [
      "arrivals",
      "A simulated server: requests come at random times, share passes while they run, and wait while it is full.",
    ],
    goodput: ["goodput", "Requests per second whose first and further tokens came within the limits."],
  };

  function list(target) {
    for (const [term, text] of Object.values(TERMS))
      target.append(
        Object.assign(document.createElement("dt"), { textContent: term }),
        Object.assign(document.createElement("dd"), { textContent: text }),
      );
  }

  /* Shows the explanation of what has data-term: on hover, and on focus by the keyboard; Escape hides it. */
  function start(tip) {
    for (const element of document.querySelectorAll("label[data-term], summary[data-term], legend[data-term]")) {
      const text = [...element.childNodes].find((n) => n.textContent.trim()),
        span = Object.assign(document.createElement("span"), { className: "term" });
      text.replaceWith(span);
      span.append(text);
    }
    const hide = () => {
      tip.hidden = true;
    };
    const show = (target) => {
      const element = target.closest && target.closest("[data-term]");
      if (!element) return hide();
      const [, text] = TERMS[element.dataset.term];
      tip.textContent = text;
      tip.hidden = false;
      const box = element.getBoundingClientRect(),
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

  return { TERMS, list, start };
})();
