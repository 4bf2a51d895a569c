// Layers with a recurrent state in place of attention: gated DeltaNet, Mamba-2 and gated short convolutions.
//
// A pass reads the states of the committed tokens and does not change them. It writes the states after the prefix of
// each tree beside them, and records of the drafted nodes, by which keep_states advances the states along an accepted
// path. A drafted node starts from its parent's state, so it sees the operations, in the order, of decoding one token
// at a time: the same bits. A value column of a head evolves independently of the others, and is one unit of work.

#pragma once

#include "experts.h"
#include "linear.h"

namespace {

constexpr int kChannelBlock = 256;  // channels of the convolution that a thread takes at once

// log(1 + e^x).
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

class StatePass {
 public:
  StatePass(const States& s, int tokens, const Team& team)
      : s_(s),
        tokens_(tokens),
        values_(s.heads * s.value_dim),
        keys_(s.groups * s.key_dim),
        channels_(round_up(s.channels, kLanes)),
        state_((size_t)s.key_dim * kLanes),
        mixed_(buffer<float>((size_t)tokens * channels_)),
        decay_(buffer<float>((size_t)tokens * s.heads)),
        rate_(buffer<float>((size_t)tokens * s.heads)),
        open_(buffer<float>((size_t)team.threads * (s.depth + 2) * state_)) {}

  // Width of the output, the input of the output projection.
  static int output_width(const States& s) { return s.heads ? s.heads * s.value_dim : s.channels; }

  // The output [tokens, stride] of a layer from its projected input [tokens, width]. Threads wait at the end.
  void run(const StateLayer& layer, float* projected, float* out, int stride, const Team& team) const {
    if (layer.kind == kShortConvolution) gate_input(projected, team);
    convolve(layer, projected, out, stride, team);
    team.barrier();
    if (layer.kind == kShortConvolution) return;
    prepare(layer, projected, team);
    team.barrier();
    recur(layer, out, stride, team);
    team.barrier();
    finish(layer, projected, out, stride, team);
    team.barrier();
  }

 private:
  static int blocks(int n, int size) { return (n + size - 1) / size; }
  size_t layer_rows(const StateLayer& layer) const { return (size_t)layer.index * s_.cache_rows; }
  float* inputs(const StateLayer& layer, int row, int side) const {
    return s_.inputs + ((layer_rows(layer) + row) * 2 + side) * (s_.taps - 1) * s_.channels;
  }
  float* states(const StateLayer& layer, int row, int side) const {
    return s_.state + ((layer_rows(layer) + row) * 2 + side) * s_.heads * s_.key_dim * s_.value_dim;
  }
  size_t record(const StateLayer& layer, int node) const { return layer_rows(layer) * s_.nodes + node; }

  // B * x in place of B.
  void gate_input(float* projected, const Team& team) const {
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      float* row = projected + (size_t)t * s_.width;
      for (int c = 0; c < s_.channels; ++c) row[c] *= row[2 * s_.channels + c];
    }
    team.barrier();
  }

  // An input of the convolution: of the tokens before the pass, of a recorded node, or of a token of the pass.
  const float* source(const StateLayer& layer, const float* projected, int index) const {
    const int before = s_.rows * (s_.taps - 1);
    if (index < before) {
      const int place = index / (s_.taps - 1);
      return inputs(layer, s_.row[place], s_.start[place]) + (size_t)(index % (s_.taps - 1)) * s_.channels;
    }
    index -= before;
    if (index < s_.recorded_count) return s_.node_inputs + record(layer, s_.recorded[index]) * s_.channels;
    return projected + (size_t)(index - s_.recorded_count) * s_.width;
  }

  void convolve(const StateLayer& layer, const float* projected, float* out, int stride, const Team& team) const {
    const int count = blocks(s_.channels, kChannelBlock);
    const auto [from, to] = team.share((tokens_ + s_.rows) * count);
    for (int item = from; item < to; ++item) {
      const int t = item / count, first = item % count * kChannelBlock;
      const int last = std::min(first + kChannelBlock, s_.channels);
      if (t < tokens_)
        convolve_token(layer, projected, out + (size_t)t * stride, t, first, last);
      else
        keep_inputs(layer, projected, t - tokens_, first, last);
    }
  }

  void convolve_token(const StateLayer& layer, const float* projected, float* out, int t, int first, int last) const {
    const float* tap[kMaxTaps];
    for (int j = 0; j < s_.taps; ++j) tap[j] = source(layer, projected, s_.windows[(size_t)t * s_.taps + j]);
    const float* own = projected + (size_t)t * s_.width;
    for (int c = first; c < last; c += kLanes) {
      const int n = last - c;
      Float y = {};
      for (int j = 0; j < s_.taps; ++j)
        y = fma(load_part<Float>(tap[j] + c, n),
                load_part<Float>(layer.convolution + (size_t)j * s_.channels + c, n), y);
      if (layer.convolution_bias) y = y + load_part<Float>(layer.convolution_bias + c, n);
      if (layer.kind == kShortConvolution)
        store_part(out + c, y * load_part<Float>(own + s_.channels + c, n), n);
      else
        store_part(mixed_.get() + (size_t)t * channels_ + c, activate(y, kSilu), n);
    }
    if (s_.node[t] >= 0)
      std::memcpy(s_.node_inputs + record(layer, s_.node[t]) * s_.channels + first, own + first,
                  4 * (size_t)(last - first));
  }

  // The last inputs of a row's prefix.
  void keep_inputs(const StateLayer& layer, const float* projected, int place, int first, int last) const {
    if (s_.chain_begin[place] == s_.chain_begin[place + 1]) return;
    float* ahead = inputs(layer, s_.row[place], 1 - s_.start[place]);
    for (int j = 0; j < s_.taps - 1; ++j)
      std::memcpy(ahead + (size_t)j * s_.channels + first,
                  source(layer, projected, s_.tails[(size_t)place * (s_.taps - 1) + j]) + first,
                  4 * (size_t)(last - first));
  }

  // Columns of keys and queries in the convolved numbers: DeltaNet's are queries, keys, values; Mamba-2's values, keys
  // (B), queries (C).
  float* query_of(const StateLayer& l, int t) const {
    return mixed_.get() + (size_t)t * channels_ + (l.kind == kDeltaNet ? 0 : values_ + keys_);
  }
  float* key_of(const StateLayer& l, int t) const {
    return mixed_.get() + (size_t)t * channels_ + (l.kind == kDeltaNet ? keys_ : values_);
  }
  float* value_of(const StateLayer& l, int t) const {
    return mixed_.get() + (size_t)t * channels_ + (l.kind == kDeltaNet ? 2 * keys_ : 0);
  }

  void prepare(const StateLayer& layer, const float* projected, const Team& team) const {
    const auto [from, to] = team.share(tokens_ * s_.groups);
    const int shared = s_.heads / s_.groups;
    for (int item = from; item < to; ++item) {
      const int t = item / s_.groups, g = item % s_.groups;
      const float* gates = projected + (size_t)t * s_.width + s_.channels + values_;
      for (int h = g * shared; h < (g + 1) * shared; ++h) {
        const float time = softplus((layer.kind == kDeltaNet ? gates[s_.heads + h] : gates[h]) + layer.time_bias[h]);
        decay_[(size_t)t * s_.heads + h] = std::exp(-time * layer.rate[h]);
        rate_[(size_t)t * s_.heads + h] = layer.kind == kDeltaNet ? 1 / (1 + std::exp(-gates[h])) : time;
      }
      if (layer.kind == kDeltaNet) {
        unit_length(query_of(layer, t) + g * s_.key_dim, 1 / std::sqrt((float)s_.key_dim));
        unit_length(key_of(layer, t) + g * s_.key_dim, 1);
      }
    }
  }

  void unit_length(float* x, float scale) const {
    Float squares = {};
    for (int i = 0; i < s_.key_dim; i += kLanes) {
      const Float v = load_part<Float>(x + i, s_.key_dim - i);
      squares = fma(v, v, squares);
    }
    const Float factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
    for (int i = 0; i < s_.key_dim; i += kLanes)
      store_part(x + i, load_part<Float>(x + i, s_.key_dim - i) * factor, s_.key_dim - i);
  }

  void recur(const StateLayer& layer, float* out, int stride, const Team& team) const {
    const int columns = blocks(s_.value_dim, kLanes);
    const auto [from, to] = team.share(s_.rows * s_.heads * columns);
    float* open = open_.get() + (size_t)team.thread * (s_.depth + 2) * state_;
    for (int item = from; item < to; ++item)
      walk(layer, item / (s_.heads * columns), item / columns % s_.heads, item % columns * kLanes, open, out, stride);
  }

  // One block of value columns of a head: the row's prefix, then its drafted nodes, depth first.
  void walk(const StateLayer& layer, int place, int head, int column, float* open, float* out, int stride) const {
    const int n = s_.value_dim - column, row = s_.row[place], begin = s_.chain_begin[place],
              end = s_.chain_begin[place + 1];
    const size_t block = (size_t)head * s_.key_dim * s_.value_dim + column;
    const float* before = states(layer, row, s_.start[place]) + block;
    for (int k = 0; k < s_.key_dim; ++k) store(open + k * kLanes, load_part<Float>(before + k * s_.value_dim, n));
    for (int i = begin; i < end; ++i) step(layer, s_.chain[i], head, column, open, open, out, stride);
    if (end > begin) {
      float* ahead = states(layer, row, 1 - s_.start[place]) + block;
      for (int k = 0; k < s_.key_dim; ++k) store_part(ahead + k * s_.value_dim, load<Float>(open + k * kLanes), n);
    }
    for (int i = s_.walk_begin[place]; i < s_.walk_begin[place + 1]; ++i) {
      float* own = open + (s_.walk_depth[i] + 1) * state_;
      if (s_.walk_token[i] >= 0)
        step(layer, s_.walk_token[i], head, column, own - state_, own, out, stride);
      else
        replay(record(layer, s_.walk_node[i]), head, column, own - state_, own);
    }
  }

  // Reads a token: the state after its parent's, and the token's output. The update is recorded for drafted nodes.
  void step(const StateLayer& layer, int t, int head, int column, const float* above, float* own, float* out,
            int stride) const {
    const int n = s_.value_dim - column, group = head / (s_.heads / s_.groups);
    const float *key = key_of(layer, t) + group * s_.key_dim, *query = query_of(layer, t) + group * s_.key_dim;
    const float decay = decay_[(size_t)t * s_.heads + head], rate = rate_[(size_t)t * s_.heads + head];
    Float value = load_part<Float>(value_of(layer, t) + head * s_.value_dim + column, n);
    if (layer.kind == kDeltaNet) {
      Float sums[4] = {};
      for (int k = 0; k < s_.key_dim; ++k)
        sums[k & 3] = fma(load<Float>(above + k * kLanes) * splat(decay), splat(key[k]), sums[k & 3]);
      value = value - ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    value = value * splat(rate);
    Float sums[4] = {};
    for (int k = 0; k < s_.key_dim; ++k) {
      const Float s = load<Float>(above + k * kLanes) * splat(decay) + splat(key[k]) * value;
      store(own + k * kLanes, s);
      sums[k & 3] = fma(s, splat(query[k]), sums[k & 3]);
    }
    store_part(out + (size_t)t * stride + head * s_.value_dim + column, (sums[0] + sums[1]) + (sums[2] + sums[3]), n);
    if (s_.node[t] < 0) return;
    const size_t node = record(layer, s_.node[t]);
    store_part(s_.node_values + node * values_ + head * s_.value_dim + column, value, n);
    if (column) return;
    s_.node_decay[node * s_.heads + head] = decay;
    if (head % (s_.heads / s_.groups) == 0)
      std::memcpy(s_.node_keys + node * keys_ + group * s_.key_dim, key, 4 * (size_t)s_.key_dim);
  }

  // The state after a node that an earlier pass over the same tree has read.
  void replay(size_t node, int head, int column, const float* above, float* own) const {
    const float* key = s_.node_keys + node * keys_ + head / (s_.heads / s_.groups) * s_.key_dim;
    const Float value = load_part<Float>(s_.node_values + node * values_ + head * s_.value_dim + column,
                                         s_.value_dim - column);
    const Float decay = splat(s_.node_decay[node * s_.heads + head]);
    for (int k = 0; k < s_.key_dim; ++k)
      store(own + k * kLanes, load<Float>(above + k * kLanes) * decay + splat(key[k]) * value);
  }

  // Norms and gates of the output.
  void finish(const StateLayer& layer, const float* projected, float* out, int stride, const Team& team) const {
    const bool per_head = layer.kind == kDeltaNet;
    const int parts = per_head ? s_.heads : s_.groups, width = values_ / parts;
    const auto [from, to] = team.share(tokens_ * parts);
    for (int item = from; item < to; ++item) {
      const int t = item / parts, first = item % parts * width;
      float* y = out + (size_t)t * stride + first;
      const float* z = projected + (size_t)t * s_.width + s_.channels + first;
      if (per_head) {
        normalize(y, width, layer.norm, layer.eps, y);
        gate(y, z, width);
        continue;
      }
      const float* value = value_of(layer, t) + first;
      for (int i = 0; i < width; ++i) y[i] += value[i] * layer.skip[(first + i) / s_.value_dim];
      gate(y, z, width);
      normalize(y, width, layer.norm + first, layer.eps, y);
    }
  }

  static void gate(float* y, const float* z, int width) {
    for (int i = 0; i < width; i += kLanes)
      store_part(y + i, load_part<Float>(y + i, width - i) * activate(load_part<Float>(z + i, width - i), kSilu),
                 width - i);
  }

  const States& s_;
  const int tokens_, values_, keys_, channels_;
  const size_t state_;
  const Buffer<float> mixed_, decay_, rate_, open_;
};

// Advances the states of a row in all layers along recorded nodes, in place.
void keep_states(const States& s, int layers, int row, int side, const int32_t* nodes, int count, int threads) {
  const int columns = (s.value_dim + kLanes - 1) / kLanes, shared = s.heads / std::max(s.groups, 1);
#pragma omp parallel for num_threads(threads) if (layers * s.heads > 16)
  for (int item = 0; item < layers * s.heads; ++item) {
    const size_t layer = (size_t)(item / s.heads), head = (size_t)(item % s.heads);
    float* state = s.state + (((layer * s.cache_rows + row) * 2 + side) * s.heads + head) * s.key_dim * s.value_dim;
    for (int k = 0; k < s.key_dim; ++k) {
      for (int c = 0; c < columns; ++c) {
        const int n = s.value_dim - c * kLanes;
        float* at = state + (size_t)k * s.value_dim + c * kLanes;
        Float x = load_part<Float>(at, n);
        for (int i = 0; i < count; ++i) {
          const size_t node = (layer * s.cache_rows + row) * s.nodes + nodes[i];
          const float* value = s.node_values + (node * s.heads + head) * s.value_dim + c * kLanes;
          const float key = s.node_keys[(node * s.groups + head / shared) * s.key_dim + k];
          x = x * splat(s.node_decay[node * s.heads + head]) + splat(key) * load_part<Float>(value, n);
        }
        store_part(at, x, n);
      }
    }
  }
}

}  // namespace
