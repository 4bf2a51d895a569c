// A pass of the decoder over token trees, from tokens to logits.

#pragma once

#include <algorithm>
#include <vector>

#include "decoder.h"
#include "sampler.h"
#include "speculators.h"

namespace {

// The layout of the active nodes of trees, node j in slot `length + j`; model/cache/layout.py does the same in Python.
// A node extends the visible prefix of its parent where its slot is the next one. Decided nodes of a chunk read all
// pages.
class TreeLayout {
 public:
  explicit TreeLayout(const TreePass& pass) {
    for (int i = 0; i < pass.requests; ++i) add_request(pass, i);
    size_t width = 0;
    for (const auto& slots : extra_) width = std::max(width, slots.size());
    padded_.assign(extra_.size() * width, -1);
    for (size_t t = 0; t < extra_.size(); ++t)
      std::copy(extra_[t].begin(), extra_[t].end(), padded_.begin() + (ptrdiff_t)(t * width));
    layout_ = {(int32_t)row_.size(), (int32_t)width,         row_.data(),   slot_.data(),
               position_.data(),     visible_prefix_.data(), padded_.data(), nullptr,    0,
               nullptr,              in_pages_.data()};
  }

  const Layout& layout() const { return layout_; }

 private:
  void add_request(const TreePass& pass, int i) {
    const size_t first = (size_t)i * (size_t)pass.nodes, n = (size_t)pass.nodes;
    const int32_t base = (int32_t)pass.length[i], prefix_length = (int32_t)pass.prefix_length[i];
    std::vector<int32_t> depth(n, 0), prefix(n, 0);
    std::vector<std::vector<int32_t>> extra(n);
    for (size_t node = 0; node < n; ++node) {
      const int64_t parent = pass.parent[first + node];
      const int32_t slot = base + (int32_t)node;
      const bool has_parent = parent >= 0 && parent < (int64_t)node;
      const size_t above = has_parent ? (size_t)parent : 0;
      if (node && has_parent) depth[node] = depth[above] + 1;
      if ((int32_t)node < prefix_length || (has_parent && extra[above].empty() && prefix[above] == slot)) {
        prefix[node] = slot + 1;
      } else {
        if (has_parent) prefix[node] = prefix[above], extra[node] = extra[above];
        extra[node].push_back(slot);
      }
      if (!pass.active[first + node]) continue;
      row_.push_back((int32_t)pass.row[i]), slot_.push_back(slot), position_.push_back(base + depth[node]);
      visible_prefix_.push_back(prefix[node]), extra_.push_back(extra[node]);
      in_pages_.push_back(prefix_length == 1 || (int32_t)node >= prefix_length);
    }
  }

  std::vector<int32_t> row_, slot_, position_, visible_prefix_, padded_, in_pages_;
  std::vector<std::vector<int32_t>> extra_;
  Layout layout_;
};

// Numbers the marked nodes of a pass consecutively, the others -1; returns how many are marked.
template <class Marked>
int number_nodes(const TreePass& pass, const Marked& marked, int64_t* index) {
  int count = 0;
  for (int i = 0; i < pass.requests * pass.nodes; ++i) index[i] = marked(i) ? count++ : -1;
  return count;
}

// Calls run(number among the tokens read, number among the scored ones) for every scored node.
template <class Run>
void each_scored(const TreePass& pass, const Run& run) {
  for (int i = 0; i < pass.requests * pass.nodes; ++i)
    if (pass.logit_index[i] >= 0) run((size_t)pass.hidden_index[i], (size_t)pass.logit_index[i]);
}

// Samples the token after the root of every request that samples, then after the draft that is this token, and so on;
// -1 where no token may follow. After the other nodes nothing is sampled: kNotSampled.
constexpr int64_t kNotSampled = -2;
void sample_paths(const TreePass& pass, const float* logits, int width, int threads) {
  const int nodes = pass.nodes;
  std::fill_n(pass.sampled, pass.requests * nodes, kNotSampled);
  std::vector<int> at;  // nodes of all trees that are sampled after
  for (int i = 0; i < pass.requests; ++i) {
    const int root = i * nodes + (int)pass.prefix_length[i] - 1;
    if (pass.sampling[i].inverse_temperature > 0 && pass.logit_index[root] >= 0) at.push_back(root);
  }
  for (int depth = 0; !at.empty(); ++depth) {
    std::vector<int64_t> place, token(at.size());
    std::vector<Sampling> sampling;
    for (const int node : at) {
      const int i = node / nodes;
      place.push_back(pass.logit_index[node]);
      sampling.push_back(pass.sampling[i]);
      sampling.back().noise = noise_key(sampling.back().noise, pass.length[i] + pass.prefix_length[i] + depth);
    }
    sample_rows(logits, place.data(), sampling.data(), (int)at.size(), width, token.data(), threads);
    std::vector<int> below;
    for (size_t k = 0; k < at.size(); ++k) {
      const int first = at[k] / nodes * nodes;
      pass.sampled[at[k]] = token[k];
      for (int node = at[k] + 1; node < first + nodes; ++node)
        if (pass.logit_index[node] >= 0 && pass.parent[node] == at[k] - first && pass.token[node] == token[k]) {
          below.push_back(node);
          break;
        }
    }
    at = below;
  }
}

}  // namespace
