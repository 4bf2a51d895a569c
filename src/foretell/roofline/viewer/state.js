"use strict";
/* What is shown: two settings, the chosen operation and method. The address holds all of it. */
const State = (data) => {
  const DEFAULTS = {
    model: data.first,
    hardware: "a6000" in data.hardware ? "a6000" : Object.keys(data.hardware)[0],
    stage: "decode",
    batch: 1,
    context: 1024,
    tokens: 8,
    chunk: 512,
    generate: 256,
    weights: "16",
    activations: "16",
    kv: "16",
    head: "",
    fusion: "flash",
    devices: 1,
    runtime: data.firstRuntime,
    square: false,
    bandwidth: "",
    peak: "",
    capacity: "",
    offloadWeights: "",
    offloadKv: "",
    tier: Object.keys(data.tiers)[0],
    offloadCompute: "device",
    accept: "",
    draft: "",
    chain: "",
    tree: "",
    tau: "",
    nodes: "",
    share: 0.5,
    density: 0.2,
    rates: "1,2,4,8,16",
    requests: 300,
    prompt: 512,
    output: 200,
    running: 256,
    ttft: 1,
    tpot: 0.05,
    config: "",
  };
  const now = { now: { ...DEFAULTS }, compared: null, op: "", method: "" };

  /* A typed value: a number where the setting is one and the text says one, else the text as it is. */
  function parse(name, text) {
    const plain = text.trim();
    if (typeof DEFAULTS[name] === "boolean") return plain === "true";
    if (typeof DEFAULTS[name] !== "number" || plain === "" || !Number.isFinite(Number(plain))) return plain;
    return Number(plain);
  }

  function write() {
    const q = new URLSearchParams();
    const put = (workload, prefix) =>
      Object.keys(DEFAULTS).forEach((k) => {
        if (String(workload[k]) !== String(DEFAULTS[k])) q.set(prefix + k, workload[k]);
      });
    put(now.now, "");
    if (now.compared) {
      q.set("compare", "1");
      put(now.compared, "compare.");
    }
    if (now.op) q.set("op", now.op);
    if (now.method) q.set("method", now.method);
    history.replaceState(null, "", "#" + q.toString());
  }

  function read() {
    const q = new URLSearchParams(location.hash.slice(1));
    const get = (prefix) =>
      Object.fromEntries(
        Object.entries(DEFAULTS).map(([k, v]) => [k, q.has(prefix + k) ? parse(k, q.get(prefix + k)) : v]),
      );
    now.now = get("");
    now.compared = q.has("compare") ? get("compare.") : null;
    now.op = q.get("op") || "";
    now.method = Object.hasOwn(data.methods, q.get("method") || "") ? q.get("method") : "";
  }

  /* A setting in words: [what, text] for everything that the figures of a pass depend on. */
  function describe(s) {
    const h = data.hardware[s.hardware],
      prompt = ["prefill", "chunked", "chat"].includes(s.stage),
      size = {
        verify: `${s.tokens} tokens verified`,
        chunked: `chunks of ${s.chunk}`,
        chat: `${s.generate} generated`,
      };
    const own = [
      ["bandwidth", "GB/s"],
      ["peak", "TOP/s"],
      ["capacity", "GB"],
    ].flatMap(([k, unit]) => (s[k] === "" ? [] : [`${s[k]} ${unit}`]));
    const outside = [
      [s.offloadWeights, "weights"],
      [s.offloadKv, "cache"],
    ].flatMap(([part, what]) => (Number(part) ? [`${part} of ${what}`] : []));
    return [
      ["model", s.model],
      ["hardware", [h ? h.title : s.hardware, ...own].join(", ")],
      ["stage", s.stage],
      ["batch", `batch ${s.batch}`],
      ["context", `${prompt ? "prompt" : "context"} ${s.context}`],
      ["size", size[s.stage] || ""],
      ["weights", `weights ${s.weights}`],
      ["activations", `activations ${s.activations}`],
      ["kv", `cache ${s.kv}`],
      ["head", s.head ? `head ${s.head}` : ""],
      ["fusion", `fusion ${s.fusion}`],
      ["devices", Number(s.devices) === 1 ? "1 device" : `${s.devices} devices`],
      ["runtime", `runtime ${s.runtime}`],
      ["offload", outside.length ? `offloaded: ${outside.join(", ")} in ${s.tier}, ${s.offloadCompute} computes` : ""],
      ["square", s.square ? "full square" : ""],
    ];
  }

  return Object.assign(now, { DEFAULTS, parse, write, read, describe });
};
