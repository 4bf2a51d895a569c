// Drafting with trained speculators: stages of an MLP speculator, EAGLE-3, and EAGLE-2's dynamic trees.

#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "output_head.h"
#include "row_ops.h"
#include "sampler.h"

namespace {

// One stage of an MLP speculator: next [tokens, inner] = gelu(norm(project state + token embedded)), logits [tokens,
// width] = head(output next).
void run_stage(const Stage& s, const float* state, const float* embedded, float* next, float* logits, int tokens,
               int threads) {
  const int inner = s.project.outputs, head_width = s.output.outputs;
  const Team all = {0, threads};
  const Operands first(tokens, s.project.inputs, all), second(tokens, s.token.inputs, all), third(tokens, inner, all),
      last(tokens, head_width, all);
  const Buffer<float> head_input = buffer<float>((size_t)tokens * head_width);
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(barrier);
    const auto product = [&](const Operands& operands, const float* x, const Weight& w, float* y, Epilogue epilogue,
                             const Weight* following) {
      operands.multiply(w, x, w.inputs, nullptr, 0, {y, w.outputs, w.outputs, epilogue, 0, 0}, following, team);
    };
    product(first, state, s.project, next, Epilogue::kStore, &s.token);
    // No barrier is needed: both products have the same panels, so every thread adds to what it stored itself.
    product(second, embedded, s.token, next, Epilogue::kAdd, &s.output);
    team.barrier();
    const auto [from, to] = team.share(tokens);
    for (int t = from; t < to; ++t) {
      float* row = next + (size_t)t * inner;
      normalize(row, inner, s.norm_weight, s.eps, row);
      for (int i = 0; i < inner; i += kLanes)
        store_part(row + i, gelu(load_part<Float>(row + i, inner - i) + load_part<Float>(s.norm_bias + i, inner - i)),
                   inner - i);
    }
    team.barrier();
    product(third, next, s.output, head_input.get(), Epilogue::kStore, &s.head);
    team.barrier();
    product(last, head_input.get(), s.head, logits, Epilogue::kStore, nullptr);
  }
}

// The embedding of a token, float32 [d].
void embed(const Embedding& e, int64_t token, int d, float* out) {
  const size_t at = (size_t)token * (size_t)d;
  for (int i = 0; i < d; ++i) {
    const uint32_t bits =
        e.is_bfloat16 ? (uint32_t)((const uint16_t*)e.table)[at + i] << 16 : ((const uint32_t*)e.table)[at + i];
    std::memcpy(out + i, &bits, 4);
    out[i] *= e.scale;
  }
}

// EAGLE-3's input for tokens that follow features: x [tokens, hidden] the residual stream, attention_input [tokens, 2
// hidden] the normed embeddings and features, concatenated. Feature `parent[t]` belongs to token t; null: feature t.
// Token -1 is a mask.
void prepare_eagle_input(const Model& m, const EagleInput& e, const int64_t* token, const float* features,
                         const int64_t* parent, int tokens, float* x, float* attention_input, int threads) {
  const int d = m.hidden;
#pragma omp parallel for num_threads(threads) if (tokens > 16)
  for (int t = 0; t < tokens; ++t) {
    const bool mask = token[t] < 0;
    const float* feature = mask ? e.mask_feature : features + (size_t)(parent ? parent[t] : t) * d;
    float *embedded = attention_input + (size_t)t * 2 * d, *normed = embedded + d;
    if (mask)
      std::memcpy(embedded, e.mask, 4 * (size_t)d);
    else
      embed(e.embedding, token[t], d, embedded);
    normalize(embedded, d, e.embedding_norm, m.eps, embedded);
    normalize(feature, d, e.feature_norm, m.eps, normed);
    std::memcpy(x + (size_t)t * d, e.norm_before_residual ? normed : feature, 4 * (size_t)d);
  }
}

// Features [count, hidden] from hidden states of the target: feature i from row place[i] of every states[j].
Buffer<float> fuse_states(const Model& m, const Fusion& f, const float* const* states, const int64_t* place, int count,
                          int threads) {
  const size_t d = (size_t)m.hidden, state_count = (size_t)f.count;
  Buffer<float> rows = buffer<float>((size_t)count * state_count * d), out = buffer<float>((size_t)count * d);
#pragma omp parallel for num_threads(threads) if (count > 16)
  for (int i = 0; i < count; ++i)
    for (size_t j = 0; j < state_count; ++j) {
      const float* state = states[j] + (size_t)place[i] * d;
      float* row = rows.get() + ((size_t)i * state_count + j) * d;
      if (f.norms)
        normalize(state, m.hidden, f.norms + j * d, m.eps, row);
      else
        std::memcpy(row, state, 4 * d);
    }
  linear(f.fuse, rows.get(), out.get(), count, m.hidden, threads);
  return out;
}

int32_t eagle_forward(const Model& m, const Layer* layers, int count, const EagleInput& e, const int64_t* token,
                      const float* features, const int64_t* parent, float* x, const Layout& layout, const Cache& cache,
                      int threads) {
  const Buffer<float> attention_input = buffer<float>((size_t)layout.count * 2 * m.hidden);
  prepare_eagle_input(m, e, token, features, parent, layout.count, x, attention_input.get(), threads);
  const int32_t invalid =
      stack(m, layers, 0, count, x, attention_input.get(), layout, cache, {nullptr, 0, nullptr}, threads);
  if (invalid < 0 && e.output_norm) norm_rows(x, e.output_norm, m.eps, x, layout.count, m.hidden, threads);
  return invalid;
}

// One dynamic tree (EAGLE-2, arXiv 2406.16858); shape/dynamic_tree.py does the same for any drafter.
class TreeBuilder {
 public:
  struct Node {
    int64_t token;
    int parent, depth;
    double score, confidence;
    int64_t number;  // of its output among those of all nodes that were run
    int32_t slot;    // of its keys and values
  };

  TreeBuilder(const DynamicTree& options, int request, int64_t root)
      : options_(options), request_(request), nodes_{{root, -1, 0, 1.0, 1.0, request, 0}} {}

  const Node& operator[](int i) const { return nodes_[(size_t)i]; }
  int length() const { return options_.length ? (int)options_.length[request_] : 0; }
  int row() const { return (int)options_.row[request_]; }
  // Nodes to be expanded at this level, the best first.
  const std::vector<int>& frontier() const { return frontier_; }
  bool expands(int level) const { return level < options_.max_depth[request_] && !frontier_.empty(); }

  // Records that a node is run: its output gets this number, its keys and values the next slot.
  void assign(int i, int64_t number) {
    nodes_[(size_t)i].number = number, nodes_[(size_t)i].slot = length() + drafted_++;
  }

  // Slots of the nodes from below the root down to a node, both included.
  void path_slots(int i, int32_t* slots) const {
    for (; i; i = (*this)[i].parent) slots[(*this)[i].depth - 1] = (*this)[i].slot;
  }

  // Adds the children of the frontier, the first `width` of `count` per node with their probabilities; the best of them
  // are the next frontier.
  void add_children(const float* probabilities, const int64_t* tokens, int count) {
    struct Child {
      int64_t token;
      int parent;
      double score, confidence;
    };
    std::vector<Child> children;
    for (const int i : frontier_)
      for (int j = 0; j < count; ++j, ++probabilities, ++tokens) {
        if (j >= options_.width) continue;
        const double score = (*this)[i].score * (double)*probabilities;
        const double confidence = options_.margin && count > 1 ? (double)(probabilities[0] - probabilities[1])
                                                               : (double)*probabilities;
        if (score > 0 && score >= options_.min_score && confidence >= options_.min_confidence)
          children.push_back({*tokens, i, score, confidence});
      }
    std::stable_sort(children.begin(), children.end(),
                     [](const Child& a, const Child& b) { return a.score > b.score; });
    if ((int)children.size() > options_.budget) children.resize((size_t)options_.budget);
    frontier_.clear();
    for (const Child& child : children) {
      if ((int)frontier_.size() < options_.width && child.score >= options_.min_expand_score &&
          child.confidence >= options_.min_expand_confidence)
        frontier_.push_back((int)nodes_.size());
      const int depth = (*this)[child.parent].depth + 1;
      nodes_.push_back({child.token, child.parent, depth, child.score, child.confidence, -1, 0});
    }
    // A child scores at most what its parent does: below a node that as many as are kept equal or exceed, none is kept.
    frontier_.erase(std::remove_if(frontier_.begin(), frontier_.end(), [&](int i) { return !may_have_kept(i); }),
                    frontier_.end());
  }

  // Writes the root and the best `budget` nodes below it in order of creation (of equals the earlier ones); returns how
  // many there are below the root.
  int write(int64_t* token, int64_t* parent, double* score, int64_t* output_row, double* confidence) const {
    std::vector<int> order(nodes_.size() - 1), place(nodes_.size(), 0);
    std::iota(order.begin(), order.end(), 1);
    if ((int)order.size() > options_.budget) {
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return (*this)[a].score > (*this)[b].score; });
      order.resize((size_t)options_.budget);
      std::sort(order.begin(), order.end());
    }
    parent[0] = -1, score[0] = 1;
    for (size_t i = 0; i < order.size(); ++i) {
      const Node& node = (*this)[order[i]];
      place[(size_t)order[i]] = (int)i + 1;
      token[i + 1] = node.token, parent[i + 1] = place[(size_t)node.parent], score[i + 1] = node.score;
    }
    for (int i = (int)order.size() + 1; i <= options_.budget; ++i) token[i] = 0, parent[i] = -1, score[i] = 0;
    for (int i = 0; output_row && i <= options_.budget; ++i) {
      const Node* node = i == 0 ? &nodes_[0] : i <= (int)order.size() ? &nodes_[(size_t)order[(size_t)i - 1]] : nullptr;
      output_row[i] = node ? node->number : -1, confidence[i] = node ? node->confidence : 0;
    }
    return (int)order.size();
  }

 private:
  // Whether a child of a node may be among the best `budget` nodes.
  bool may_have_kept(int i) const {
    const double score = (*this)[i].score;
    return std::count_if(nodes_.begin() + 1, nodes_.end(), [&](const Node& n) { return n.score >= score; }) <
           options_.budget;
  }

  const DynamicTree& options_;
  const int request_;
  std::vector<Node> nodes_;
  std::vector<int> frontier_{0};
  int drafted_ = 0;
};

struct NodeRef {  // a node that is run next
  int request, node;
};

// Ranks the children of nodes by the drafter's distribution. Where the target samples, the Gumbel noise that it samples
// with is added to their scores, after the same truncation: a drafter without error would rank its choice first.
class ChildRanking {
 public:
  // Scores of `outputs` tokens, those of token_of; null: an output's number is its token.
  ChildRanking(const DynamicTree& options, int outputs, const int64_t* token_of, int threads)
      : options_(options), outputs_(outputs), token_of_(token_of), threads_(threads),
        noise_(buffer<float>(options.sampling ? (size_t)options.requests * (size_t)outputs : 1)) {}

  const int64_t* token_of() const { return token_of_; }
  // Children that are ranked.
  int count() const { return std::min(std::max(options_.width, options_.margin ? 2 : 1), outputs_); }

  // Prepares the nodes of a level.
  void begin(int level, const std::vector<NodeRef>& nodes) {
    std::vector<int> requests;
    for (const NodeRef& node : nodes)
      if (samples(node.request) && (requests.empty() || requests.back() != node.request))
        requests.push_back(node.request);
    const int parts = (outputs_ + kPart - 1) / kPart, items = (int)requests.size() * parts;
#pragma omp parallel for num_threads(threads_) if (items > 1)
    for (int item = 0; item < items; ++item) {
      const int request = requests[(size_t)(item / parts)], first = item % parts * kPart;
      const uint64_t key = options_.noise[(size_t)request * (size_t)options_.depth + (size_t)level];
      const float temperature = (float)(1 / options_.sampling[request].inverse_temperature);
      float* out = noise_of(request) + first;
      gumbel_noise(key, temperature, token_of_, first, std::min(kPart, outputs_ - first), out);
    }
  }

  // The best children of a node, [count], with their probabilities, descending; changes the scores.
  void rank(int request, float* scores, float* probabilities, int64_t* found) const {
    if (samples(request)) {
      truncate_row(scores, options_.sampling[request], outputs_);
      const float* noise = noise_of(request);
      for (int i = 0; i < outputs_; i += kLanes) {
        const int lanes = std::min(kLanes, outputs_ - i);
        store_part(scores + i, load_part<Float>(scores + i, lanes) + load_part<Float>(noise + i, lanes), lanes);
      }
    }
    topk_softmax_row(scores, outputs_, count(), probabilities, found);
  }

 private:
  static constexpr int kPart = 2048;  // tokens that a thread takes at a time

  bool samples(int request) const {
    return options_.sampling && options_.sampling[request].inverse_temperature > 0;
  }
  float* noise_of(int request) const { return noise_.get() + (size_t)request * (size_t)outputs_; }

  const DynamicTree& options_;
  const int outputs_;
  const int64_t* token_of_;
  const int threads_;
  const Buffer<float> noise_;
};

// Grows the trees level by level. `run(level, nodes, probabilities, outputs)` runs nodes and writes the best children
// of each, as `ranking` ranks them; it returns -1, or the invalid token. Then writes the trees.
template <class Run>
int32_t grow_trees(const DynamicTree& b, std::vector<TreeBuilder>& trees, ChildRanking& ranking, const Run& run) {
  const int k = ranking.count();
  for (int level = 0; level < b.depth; ++level) {
    std::vector<NodeRef> nodes;
    for (int i = 0; i < b.requests; ++i) {
      const TreeBuilder& tree = trees[(size_t)i];
      if (tree.expands(level))
        for (const int node : tree.frontier()) nodes.push_back({i, node});
    }
    if (nodes.empty()) break;
    std::vector<float> probabilities(nodes.size() * (size_t)k);
    std::vector<int64_t> found(probabilities.size());
    ranking.begin(level, nodes);
    const int invalid = run(level, nodes, probabilities.data(), found.data());
    if (invalid >= 0) return invalid;
    if (const int64_t* token_of = ranking.token_of())
      for (int64_t& each : found) each = token_of[each];
    for (size_t i = 0; i < nodes.size();) {
      TreeBuilder& tree = trees[(size_t)nodes[i].request];
      const size_t mine = tree.frontier().size();
      tree.add_children(probabilities.data() + i * (size_t)k, found.data() + i * (size_t)k, k);
      i += mine;
    }
  }
  for (int i = 0; i < b.requests; ++i) {
    const size_t first = (size_t)i * (size_t)(1 + b.budget);
    b.sizes[i] = trees[(size_t)i].write(b.token + first, b.parent + first, b.score + first,
                                        b.output_row ? b.output_row + first : nullptr,
                                        b.output_row ? b.confidence + first : nullptr);
  }
  return -1;
}

// Runs some nodes at one level below the roots; `count_before` nodes were run earlier. `layers(layout, token, parent)`
// runs them, each token after the output with number `parent`. Returns -1, or the invalid token.
template <class Layers>
int32_t forward_level(std::vector<TreeBuilder>& trees, const std::vector<NodeRef>& nodes, int level,
                      int64_t count_before, const Layers& layers) {
  const size_t n = nodes.size();
  std::vector<int32_t> row(n), slot(n), position(n), visible_prefix(n), extra_slots(n * (size_t)level);
  std::vector<int64_t> token(n), parent(n);
  for (size_t i = 0; i < n; ++i) {
    TreeBuilder& tree = trees[(size_t)nodes[i].request];
    tree.assign(nodes[i].node, count_before + (int64_t)i);
    const TreeBuilder::Node& node = tree[nodes[i].node];
    row[i] = tree.row(), slot[i] = node.slot, visible_prefix[i] = tree.length(),
    position[i] = tree.length() - 1 + level;
    tree.path_slots(nodes[i].node, extra_slots.data() + i * (size_t)level);
    token[i] = node.token, parent[i] = tree[node.parent].number;
  }
  return layers(
      Layout{(int32_t)n, level, row.data(), slot.data(), position.data(), visible_prefix.data(), extra_slots.data()},
      token.data(), parent.data());
}

// From a layer output to tokens: the final norm, the head, and the token of every row of the head (null: the row's
// number).
struct OutputHead {
  const float* norm;
  const Weight* head;
  const int64_t* token_of;
};

// Dynamic trees from layers with a key-value cache, below roots whose outputs [requests, hidden] are given.
// `layers(layout, token, parent, outputs, next)` runs tokens that follow some of the outputs so far and writes their
// own to `next`.
template <class Layers>
int32_t grow_trees_with_cache(const Model& m, const OutputHead& output, const float* roots, const DynamicTree& b,
                              const Layers& layers, int threads) {
  std::vector<TreeBuilder> trees;
  for (int i = 0; i < b.requests; ++i) trees.emplace_back(b, i, 0);
  ChildRanking ranking(b, output.head->outputs, output.token_of, threads);
  const size_t k = (size_t)ranking.count(), width = (size_t)output.head->outputs;
  const size_t rows = (size_t)b.requests * (1 + (size_t)b.width * b.depth);
  const Buffer<float> own = buffer<float>(b.outputs ? 0 : rows * m.hidden);
  float* outputs = b.outputs ? b.outputs : own.get();
  std::memcpy(outputs, roots, 4 * (size_t)b.requests * m.hidden);
  int64_t count = 0;
  const auto run = [&](int level, const std::vector<NodeRef>& nodes, float* probabilities, int64_t* found) {
    float* next = outputs + (size_t)count * m.hidden;
    const auto run_layers = [&](const Layout& layout, const int64_t* tokens, const int64_t* parents) {
      return layers(layout, tokens, parents, outputs, next);
    };
    const int invalid = level ? forward_level(trees, nodes, level, count, run_layers) : -1;
    if (invalid >= 0) return invalid;
    const Buffer<float> scores = buffer<float>(nodes.size() * width);
    score_outputs(*output.head, next, output.norm, m.eps, scores.get(), (int)nodes.size(), threads, [&](int t) {
      const size_t i = (size_t)t;
      ranking.rank(nodes[i].request, scores.get() + i * width, probabilities + i * k, found + i * k);
    });
    count += (int64_t)nodes.size();
    return -1;
  };
  return grow_trees(b, trees, ranking, run);
}

}  // namespace
