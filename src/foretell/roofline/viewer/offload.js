"use strict";
/* Parts of weights and cache outside the device, as in offload.py: streamed to it, or computed on the host. */
const Offload = (() => {
  const KIND = 1;

  /* What is offloaded and over which link, or null. */
  function setting(data, s, h, numeric) {
    const part = (field, what) =>
      String(s[field] ?? "").trim() === ""
        ? 0
        : numeric(field, s[field], `offloaded part of ${what} must lie between 0 and 1`, (v) => v >= 0 && v <= 1);
    const weights = part("offloadWeights", "weights"),
      kv = part("offloadKv", "the cache");
    if (!weights && !kv) return null;
    const tier = data.tiers[s.tier],
      fail = (field, message) => {
        throw Object.assign(new Error(message), { field });
      };
    if (!tier) fail("tier", `There is no memory tier called “${s.tier}”.`);
    if (s.offloadCompute !== "host") {
      if (!h.hostBandwidth) fail("tier", `${h.title} states no link to host memory; compute on the host instead.`);
      return { weights, kv, tier, link: Math.min(h.hostBandwidth * h.runtime.host, tier.bandwidth) };
    }
    if (!tier.compute) fail("tier", `No processor is known beside ${tier.title}; compute on the device instead.`);
    const peaks = data.hardware[tier.compute].peaks;
    return { weights, kv, tier, rate: peaks.fp16 || Math.max(...Object.values(peaks)) };
  }

  /* [seconds, bytes fetched, bound] of an operation in one layer. */
  function place(line, o) {
    const c = line.cost,
      fetched = c[1] * o.weights + (c[4] + c[5]) * o.kv;
    if (o.link) {
      const times = { link: fetched / o.link, memory: c[8], compute: c[7] },
        bound = Object.keys(times).reduce((x, y) => (times[y] > times[x] ? y : x));
      return [Math.max(times[bound], c[9]), fetched, bound];
    }
    const part = { matmul: o.weights, attention: o.kv }[line.op[KIND]] || 0,
      device = c[9] * (1 - part),
      host = Math.max((part * c[0]) / o.rate, (part * (c[1] + c[2] + c[3] + c[4] + c[5])) / o.tier.bandwidth);
    return [device + host, fetched, host > device ? "host" : line.bound === "link" ? "memory" : line.bound];
  }

  /* Total time, bytes fetched and bound; every line gets the time it `took` and its `limit`. */
  function apply(lines, o) {
    const by = { compute: 0, memory: 0, link: 0, host: 0 };
    let seconds = 0,
      fetched = 0;
    for (const line of lines) {
      const [took, moved, limit] = place(line, o);
      Object.assign(line, { took, limit });
      seconds += took * line.count;
      fetched += moved * line.count;
      by[limit] += took * line.count;
    }
    return { seconds, fetched, bound: Object.keys(by).reduce((x, y) => (by[y] > by[x] ? y : x)) };
  }

  /* Bytes that stay on the device. */
  const resident = (m, o) => (o ? m.weights * (1 - o.weights) + m.kv * (1 - o.kv) + m.activations : m.total);

  return { setting, apply, resident };
})();
