// Drafting several tokens in one pass over features of the target's hidden states: DFlash's blocks, P-EAGLE's masks.

#pragma once

#include <cmath>
#include <vector>

#include "speculators.h"

namespace {

// New tokens of several requests, each attending to a prefix of its row, in layers with a window to its last slots
// before `window_end`.
struct PrefixTokens {
  std::vector<int32_t> row, slot, visible_prefix, window_end;

  void add(int64_t of_row, int64_t at, int64_t sees) { add(of_row, at, sees, sees); }
  void add(int64_t of_row, int64_t at, int64_t sees, int64_t ends) {
    row.push_back((int32_t)of_row), slot.push_back((int32_t)at), visible_prefix.push_back((int32_t)sees);
    window_end.push_back((int32_t)ends);
  }
  Layout layout() const {
    return {.count = (int32_t)row.size(), .row = row.data(), .slot = slot.data(), .position = slot.data(),
            .visible_prefix = visible_prefix.data(), .window_end = window_end.data()};
  }
};

// What a block predicts: the normed states of its predicting slots, and their scores, without the Markov head.
class BlockScores {
 public:
  BlockScores(const BlockInput& input, const OutputHead& output, int hidden, Buffer<float> states,
              Buffer<float> scores)
      : e_(input), output_(output), d_((size_t)hidden), states_(std::move(states)), scores_(std::move(scores)) {}

  // The best tokens after nodes at a level, with their probabilities; tokens [nodes] are those of the nodes, request
  // [nodes] their requests.
  void top(int level, const std::vector<int>& request, const std::vector<int64_t>& token, const ChildRanking& ranking,
           float* probabilities, int64_t* found, int threads) const {
    const size_t n = token.size(), width = (size_t)output_.head->outputs, rank = (size_t)e_.markov_out.inputs,
                 k = (size_t)ranking.count();
    const bool biased = e_.markov.table, weighted = e_.confidence.words;
    const Buffer<float> before = buffer<float>(biased ? n * rank : 1), scores = buffer<float>(n * width);
    for (size_t i = 0; biased && i < n; ++i) embed(e_.markov, token[i], (int)rank, before.get() + i * rank);
    if (biased) linear(e_.markov_out, before.get(), scores.get(), (int)n, (int)width, threads);
#pragma omp parallel for num_threads(threads) if (n > 1)
    for (size_t i = 0; i < n; ++i) {
      const float* own = scores_.get() + place(request[i], level) * width;
      float* row = scores.get() + i * width;
      for (size_t j = 0; j < width; ++j) row[j] = biased ? own[j] + row[j] : own[j];
      ranking.rank(request[i], row, probabilities + i * k, found + i * k);
    }
    if (weighted)
      multiply_with_confidence(level, request, before.get(), biased ? rank : 0, (int)k, probabilities, threads);
  }

 private:
  size_t place(int request, int level) const { return (size_t)request * (size_t)e_.depth + (size_t)level; }

  void multiply_with_confidence(int level, const std::vector<int>& request, const float* before, size_t rank, int k,
                                float* probabilities, int threads) const {
    const size_t n = request.size(), width = d_ + rank;
    const Buffer<float> inputs = buffer<float>(n * width), out = buffer<float>(n);
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(inputs.get() + i * width, states_.get() + place(request[i], level) * d_, 4 * d_);
      if (rank) std::memcpy(inputs.get() + i * width + d_, before + i * rank, 4 * rank);
    }
    linear(e_.confidence, inputs.get(), out.get(), (int)n, 1, threads);
    for (size_t i = 0; i < n; ++i) {
      const double shared = 1 / (1 + std::exp(-(double)out[i]));
      for (int j = 0; j < k; ++j) {
        float& p = probabilities[i * (size_t)k + (size_t)j];
        p = (float)(p * shared);
      }
    }
  }

  const BlockInput& e_;
  const OutputHead& output_;
  const size_t d_;
  const Buffer<float> states_, scores_;
};

// Stores the keys and values of the positions of `read`. Returns as `stack`, or -2: a place does not exist.
int32_t read_positions(const Model& m, const Layer* injecting, int count, const BlockInput& e, const StatesRead& read,
                       const DynamicTree& b, const Cache& cache, int threads) {
  PrefixTokens tokens;
  for (int i = 0; i < b.requests; ++i)
    for (int64_t position = b.length[i] - read.count[i]; position < b.length[i]; ++position)
      tokens.add(b.row[i], position, position + 1);
  const int n = (int)tokens.row.size();
  for (int t = 0; t < n; ++t)
    if (read.place[t] < 0 || read.place[t] >= read.state_rows) return -2;
  const Buffer<float> features = fuse_states(m, e.fusion, read.states, read.place, n, threads);
  norm_rows(features.get(), e.feature_norm, m.eps, features.get(), n, m.hidden, threads);
  return stack(m, injecting, 0, count, features.get(), nullptr, tokens.layout(), cache, {nullptr, 0, nullptr},
               threads);
}

// Runs a block below every root and returns the normed states of the predicting slots, [requests, depth, hidden];
// `invalid` receives the result of `stack`.
Buffer<float> run_blocks(const Model& m, const Layer* layers, int count, const BlockInput& e, const float* norm,
                         const int64_t* root, const DynamicTree& b, const Cache& cache, int threads, int32_t& invalid) {
  const size_t d = (size_t)m.hidden, slots = (size_t)e.slots, depth = (size_t)e.depth;
  const Buffer<float> x = buffer<float>((size_t)b.requests * slots * d);
  Buffer<float> states = buffer<float>((size_t)b.requests * depth * d);
  PrefixTokens tokens, windowed;  // in layers without and with a window
  for (int i = 0; i < b.requests; ++i)
    for (int64_t j = 0; j < e.slots; ++j) {
      float* row = x.get() + ((size_t)i * slots + (size_t)j) * d;
      const int64_t slot = b.length[i] + j, end = b.length[i] + e.slots;
      tokens.add(b.row[i], slot, end);
      windowed.add(b.row[i], slot, e.window_causal ? slot + 1 : end, e.window_from_anchor ? b.length[i] : slot + 1);
      if (j)
        std::memcpy(row, e.mask, 4 * d);
      else
        embed(e.embedding, root[i], m.hidden, row);
    }
  for (int first = 0, last = 0; first < count; first = last) {
    const bool window = layers[first].window;
    while (last < count && (layers[last].window > 0) == window) ++last;
    const Layout layout = (window ? windowed : tokens).layout();
    invalid = stack(m, layers, first, last, x.get(), nullptr, layout, cache, {nullptr, 0, nullptr}, threads);
    if (invalid >= 0) return states;
  }
  for (size_t i = 0; i < (size_t)b.requests; ++i)
    norm_rows(x.get() + (i * slots + slots - depth) * d, norm, m.eps, states.get() + i * depth * d, (int)depth,
              m.hidden, threads);
  return states;
}

// Dynamic trees from the normed states of the predicting places, [requests, depth, hidden].
int32_t grow_block_trees(const Model& m, const BlockInput& e, const OutputHead& output, Buffer<float> states,
                         const int64_t* root, const DynamicTree& b, int threads) {
  const int width = output.head->outputs, rows = b.requests * e.depth;
  ChildRanking ranking(b, width, output.token_of, threads);
  Buffer<float> scores = buffer<float>((size_t)rows * (size_t)width);
  linear(*output.head, states.get(), scores.get(), rows, width, threads);
  const BlockScores block(e, output, m.hidden, std::move(states), std::move(scores));
  std::vector<TreeBuilder> trees;
  for (int i = 0; i < b.requests; ++i) trees.emplace_back(b, i, root[i]);
  const auto run = [&](int level, const std::vector<NodeRef>& nodes, float* probabilities, int64_t* found) {
    std::vector<int> request;
    std::vector<int64_t> token;
    for (const NodeRef& node : nodes)
      request.push_back(node.request), token.push_back(trees[(size_t)node.request][node.node].token);
    block.top(level, request, token, ranking, probabilities, found, threads);
    return -1;
  };
  return grow_trees(b, trees, ranking, run);
}

int32_t block_trees(const Model& m, const Layer* layers, const Layer* injecting, int count, const BlockInput& e,
                    const OutputHead& output, const StatesRead& read, const int64_t* root, const DynamicTree& b,
                    const Cache& cache, int threads) {
  for (int i = 0; i < b.requests; ++i)
    if (root[i] < 0 || root[i] >= e.embedding.vocab) return -2;
  int32_t invalid = read_positions(m, injecting, count, e, read, b, cache, threads);
  if (invalid != -1) return invalid;
  Buffer<float> states = run_blocks(m, layers, count, e, output.norm, root, b, cache, threads, invalid);
  if (invalid >= 0) return invalid;
  return grow_block_trees(m, e, output, std::move(states), root, b, threads);
}

// Trees of P-EAGLE: the positions of `read` and, after those of each request, `masks` masks in one pass. Returns as
// `stack`, or -2: a token or a place does not exist.
int32_t mask_trees(const Model& m, const Layer* layers, int count, const EagleInput& e, int masks,
                   const OutputHead& output, const StatesRead& read, const DynamicTree& b, const Cache& cache,
                   int threads) {
  PrefixTokens tokens;
  std::vector<int64_t> token, parent, root;
  int64_t t = 0;
  for (int i = 0; i < b.requests; ++i) {
    for (int64_t j = 0; j < read.count[i] + masks; ++j) {
      const int64_t position = b.length[i] - read.count[i] + j;
      const bool mask = j >= read.count[i];
      tokens.add(b.row[i], position, position + 1);
      token.push_back(mask ? -1 : read.token[t]), parent.push_back(mask ? -1 : t);
      if (mask) continue;
      if (token.back() < 0 || token.back() >= e.embedding.vocab) return -2;
      if (read.place[t] < 0 || read.place[t] >= read.state_rows) return -2;
      ++t;
    }
    root.push_back(read.token[t - 1]);
  }
  const size_t d = (size_t)m.hidden, depth = (size_t)masks + 1;
  const Buffer<float> features = fuse_states(m, e.fusion, read.states, read.place, (int)t, threads),
                      x = buffer<float>(token.size() * d);
  const int32_t invalid = eagle_forward(m, layers, count, e, token.data(), features.get(), parent.data(), x.get(),
                                        tokens.layout(), cache, threads);
  if (invalid >= 0) return invalid;
  Buffer<float> states = buffer<float>((size_t)b.requests * depth * d);
  size_t end = 0;
  for (size_t i = 0; i < (size_t)b.requests; ++i) {
    end += (size_t)read.count[i] + (size_t)masks;
    const float* last = x.get() + (end - depth) * d;
    if (e.output_norm)  // the outputs are normed already
      std::memcpy(states.get() + i * depth * d, last, 4 * depth * d);
    else
      norm_rows(last, output.norm, m.eps, states.get() + i * depth * d, (int)depth, m.hidden, threads);
  }
  const BlockInput plain = {.depth = masks + 1};
  return grow_block_trees(m, plain, output, std::move(states), root.data(), b, threads);
}

}  // namespace
