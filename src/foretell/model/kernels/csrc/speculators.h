// What trained speculators draft with: stages of an MLP speculator, EAGLE-3, and trees by confidence of either.

#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "rows.h"

namespace {

// One stage: next [tokens, e] = gelu(norm(project state + token embedded)), logits [tokens, width] = head (output next).
template <class P>
void run_stage(const Stage& s, const float* state, const float* embedded, float* next, float* logits, int tokens, int threads) {
  const int inner = s.project.out, reading = s.output.out;
  const Team all = {0, threads};
  const Operands<P> first(tokens, s.project.in, all), second(tokens, s.token.in, all), third(tokens, inner, all), last(tokens, reading, all);
  const Buffer<float> read = buffer<float>((size_t)tokens * reading);
  Gate gate;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(gate);
    const auto product = [&](const Operands<P>& operands, const float* x, const Weight& w, float* y, Then then, const Weight* coming) {
      multiply<P>(w, operands.prepare(x, w.in, w.in, nullptr, 0, team), tokens, {y, w.out, w.out, then, 0}, coming, team);
    };
    product(first, state, s.project, next, Then::kStore, &s.token);
    // A thread adds to what it stored itself: both products have the same panels.
    product(second, embedded, s.token, next, Then::kAdd, &s.output);
    team.barrier();
    const auto [from, to] = team.share(tokens);
    for (int t = from; t < to; ++t) {
      float* row = next + (size_t)t * inner;
      normalize(row, inner, s.norm_weight, s.eps, row);
      for (int i = 0; i < inner; i += kLanes)
        store_part(row + i, gelu(load_part<Float>(row + i, inner - i) + load_part<Float>(s.norm_bias + i, inner - i)), inner - i);
    }
    team.barrier();
    product(third, next, s.output, read.get(), Then::kStore, &s.head);
    team.barrier();
    product(last, read.get(), s.head, logits, Then::kStore, nullptr);
  }
}

// The embedding of a token, float32 [d].
void embed(const Embedding& e, int64_t token, int d, float* out) {
  const size_t at = (size_t)token * (size_t)d;
  for (int i = 0; i < d; ++i) {
    const uint32_t bits = e.halves ? (uint32_t)((const uint16_t*)e.table)[at + i] << 16 : ((const uint32_t*)e.table)[at + i];
    std::memcpy(out + i, &bits, 4);
    out[i] *= e.scale;
  }
}

// What the layers see of tokens that follow features: x [tokens, hidden] the residual stream, entry [tokens, 2 hidden] the normed
// embeddings and features side by side. Feature `parent[t]` belongs to token t; null: feature t.
void enter(const Model& m, const Entry& e, const int64_t* token, const float* features, const int64_t* parent, int tokens, float* x, float* entry,
           int threads) {
  const int d = m.hidden;
#pragma omp parallel for num_threads(threads) if (tokens > 16)
  for (int t = 0; t < tokens; ++t) {
    const float* feature = features + (size_t)(parent ? parent[t] : t) * d;
    float *embedded = entry + (size_t)t * 2 * d, *normed = embedded + d;
    embed(e.embedding, token[t], d, embedded);
    normalize(embedded, d, e.embedding_norm, m.eps, embedded);
    normalize(feature, d, e.feature_norm, m.eps, normed);
    std::memcpy(x + (size_t)t * d, e.normed ? normed : feature, 4 * (size_t)d);
  }
}

// The k likeliest outputs of a linear layer for each row of x [tokens, in], which is normed first unless `norm` is null.
template <class P>
void run_guess(const Weight& w, const float* x, const float* norm, float eps, float* chances, int64_t* indices, int tokens, int k, int threads) {
  const Operands<P> operands(tokens, w.in, {0, threads});
  const Buffer<float> scores = buffer<float>((size_t)tokens * w.out);
  Gate gate;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(gate);
    multiply<P>(w, operands.prepare(x, w.in, w.in, norm, eps, team), tokens, {scores.get(), w.out, w.out, Then::kStore, 0}, nullptr, team);
    team.barrier();
    const auto [from, to] = team.share(tokens);
    for (int t = from; t < to; ++t)
      likeliest_row(scores.get() + (size_t)t * w.out, w.out, k, chances + (size_t)t * k, indices + (size_t)t * k);
  }
}

void guess(int32_t precision, const Weight& w, const float* x, const float* norm, float eps, float* chances, int64_t* indices, int tokens, int k,
           int threads) {
  in_precision(precision, [&](auto p) { run_guess<typename decltype(p)::Product>(w, x, norm, eps, chances, indices, tokens, k, threads); });
}

// Features [count, hidden] from the states at `place[i]` of each kind.
Buffer<float> fused(const Model& m, const Entry& e, const float* const* states, const int64_t* place, int count, int threads) {
  const size_t d = (size_t)m.hidden, kinds = (size_t)e.kinds;
  Buffer<float> rows = buffer<float>((size_t)count * kinds * d), out = buffer<float>((size_t)count * d);
#pragma omp parallel for num_threads(threads) if (count > 16)
  for (int i = 0; i < count; ++i)
    for (size_t kind = 0; kind < kinds; ++kind) {
      const float* state = states[kind] + (size_t)place[i] * d;
      float* row = rows.get() + ((size_t)i * kinds + kind) * d;
      if (e.state_norms)
        normalize(state, m.hidden, e.state_norms + kind * d, m.eps, row);
      else
        std::memcpy(row, state, 4 * d);
    }
  linear(m.precision, e.fuse, rows.get(), out.get(), count, m.hidden, threads);
  return out;
}

int32_t eagle(const Model& m, const Layer* layers, int count, const Entry& e, const int64_t* token, const float* features, const int64_t* parent,
              float* x, const Tokens& tokens, const Cache& cache, int threads) {
  const Buffer<float> entry = buffer<float>((size_t)tokens.count * 2 * m.hidden);
  enter(m, e, token, features, parent, tokens.count, x, entry.get(), threads);
  return stack(m, layers, 0, count, x, entry.get(), tokens, cache, {nullptr, 0, nullptr}, threads);
}

// A tree that grows where the layers are confident; see shape/beam.py, which says the same for any drafter.
class Growth {
 public:
  struct Node {
    int64_t token;
    int parent, depth;
    double score;
    int64_t number;  // of its output among those of all nodes that were read
    int32_t slot;    // of its keys
  };

  Growth(const Beam& beam, int text, int64_t root) : beam_(beam), text_(text), nodes_{{root, -1, 0, 1.0, text, 0}} {}

  const Node& operator[](int i) const { return nodes_[(size_t)i]; }
  int length() const { return beam_.length ? (int)beam_.length[text_] : 0; }
  int row() const { return (int)beam_.row[text_]; }
  // Nodes to be gone on from at this level, the best first.
  const std::vector<int>& frontier() const { return frontier_; }
  bool grows(int level) const { return level < beam_.room[text_] && !frontier_.empty(); }

  // The node was read: its output has this number, its keys stand behind those of others.
  void read(int i, int64_t number) { nodes_[(size_t)i].number = number, nodes_[(size_t)i].slot = length() + drafted_++; }

  // Slots of a node and those above it, up to the root, which is part of the text.
  void path(int i, int32_t* slots) const {
    for (; i; i = (*this)[i].parent) slots[(*this)[i].depth - 1] = (*this)[i].slot;
  }

  // Children of the frontier, `count` for each node with their chances; the best of them are gone on from next.
  void add(const float* chances, const int64_t* tokens, int count) {
    struct Child {
      int64_t token;
      int parent;
      double score;
    };
    std::vector<Child> children;
    for (const int i : frontier_)
      for (int j = 0; j < count; ++j, ++chances, ++tokens) {
        const double score = (*this)[i].score * (double)*chances;
        if (score > 0 && score >= beam_.least) children.push_back({*tokens, i, score});
      }
    std::stable_sort(children.begin(), children.end(), [](const Child& a, const Child& b) { return a.score > b.score; });
    if ((int)children.size() > beam_.budget) children.resize((size_t)beam_.budget);
    frontier_.clear();
    for (const Child& child : children) {
      if ((int)frontier_.size() < beam_.width && child.score >= beam_.stop) frontier_.push_back((int)nodes_.size());
      nodes_.push_back({child.token, child.parent, (*this)[child.parent].depth + 1, child.score, -1, 0});
    }
  }

  // The best `budget` nodes below the root in the order in which they came, of equals the earlier; parents by their place among them
  // from 1 on, 0 the root. How many there are.
  int write(int64_t* token, int64_t* parent) const {
    std::vector<int> order(nodes_.size() - 1), place(nodes_.size(), 0);
    std::iota(order.begin(), order.end(), 1);
    if ((int)order.size() > beam_.budget) {
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return (*this)[a].score > (*this)[b].score; });
      order.resize((size_t)beam_.budget);
      std::sort(order.begin(), order.end());
    }
    for (size_t i = 0; i < order.size(); ++i) {
      place[(size_t)order[i]] = (int)i + 1;
      token[i] = (*this)[order[i]].token, parent[i] = place[(size_t)(*this)[order[i]].parent];
    }
    return (int)order.size();
  }

 private:
  const Beam& beam_;
  const int text_;
  std::vector<Node> nodes_;
  std::vector<int> frontier_{0};
  int drafted_ = 0;
};

struct Place {  // of a node that is read next
  int text, node;
};

// Grows the trees level by level. `read(level, places, chances, tokens)` reads nodes and gives the `k` likeliest children of each: -1, or
// what is wrong. Then writes per text at most `budget` tokens and the places of their parents, [texts, budget] each, and how many.
template <class Read>
int32_t grow(const Beam& b, std::vector<Growth>& trees, int k, const int64_t* token_of, const Read& read, int64_t* token, int64_t* parent, int64_t* sizes) {
  for (int level = 0; level < b.depth; ++level) {
    std::vector<Place> places;
    for (int i = 0; i < b.texts; ++i) {
      const Growth& tree = trees[(size_t)i];
      if (tree.grows(level))
        for (const int node : tree.frontier()) places.push_back({i, node});
    }
    if (places.empty()) break;
    std::vector<float> chances(places.size() * (size_t)k);
    std::vector<int64_t> found(chances.size());
    const int bad = read(level, places, chances.data(), found.data());
    if (bad >= 0) return bad;
    if (token_of)
      for (int64_t& each : found) each = token_of[each];
    for (size_t i = 0; i < places.size();) {
      Growth& tree = trees[(size_t)places[i].text];
      const size_t mine = tree.frontier().size();
      tree.add(chances.data() + i * (size_t)k, found.data() + i * (size_t)k, k);
      i += mine;
    }
  }
  for (int i = 0; i < b.texts; ++i) sizes[i] = trees[(size_t)i].write(token + (size_t)i * b.budget, parent + (size_t)i * b.budget);
  return -1;
}

// Reads some nodes at one level below the roots, after `known` that were read before: `layers(tokens, token, parent)` runs them where they
// stand, each token after the output of this number; -1, or what is wrong.
template <class Layers>
int32_t read_level(std::vector<Growth>& trees, const std::vector<Place>& places, int level, int64_t known, const Layers& layers) {
  const size_t n = places.size();
  std::vector<int32_t> row(n), slot(n), position(n), prefix(n), extra(n * (size_t)level);
  std::vector<int64_t> token(n), parent(n);
  for (size_t i = 0; i < n; ++i) {
    Growth& tree = trees[(size_t)places[i].text];
    tree.read(places[i].node, known + (int64_t)i);
    const Growth::Node& node = tree[places[i].node];
    row[i] = tree.row(), slot[i] = node.slot, prefix[i] = tree.length(), position[i] = tree.length() - 1 + level;
    tree.path(places[i].node, extra.data() + i * (size_t)level);
    token[i] = node.token, parent[i] = tree[node.parent].number;
  }
  return layers(Tokens{(int32_t)n, level, row.data(), slot.data(), position.data(), prefix.data(), extra.data()}, token.data(), parent.data());
}

// What gives an output its tokens: the norm before the head, the head, and the token of every row of it (null: its number).
struct Exit {
  const float* norm;
  const Weight* head;
  const int64_t* token_of;
};

// Trees by confidence from layers with keys and values, below roots whose outputs [texts, hidden] are given.
// `layers(tokens, token, parent, outputs, next)` runs tokens after some of the outputs so far and writes theirs.
template <class Layers>
int32_t grow_by_layers(const Model& m, const Exit& exit, const float* roots, const Beam& b, const Layers& layers, int64_t* token, int64_t* parent,
                       int64_t* sizes, int threads) {
  std::vector<Growth> trees;
  for (int i = 0; i < b.texts; ++i) trees.emplace_back(b, i, 0);
  const int k = std::min(b.width, exit.head->out);
  const Buffer<float> outputs = buffer<float>((size_t)b.texts * (1 + (size_t)b.width * b.depth) * m.hidden);
  std::memcpy(outputs.get(), roots, 4 * (size_t)b.texts * m.hidden);
  int64_t known = 0;
  const auto read = [&](int level, const std::vector<Place>& places, float* chances, int64_t* found) {
    float* next = outputs.get() + (size_t)known * m.hidden;
    const auto run = [&](const Tokens& at, const int64_t* tokens, const int64_t* parents) { return layers(at, tokens, parents, outputs.get(), next); };
    const int bad = level ? read_level(trees, places, level, known, run) : -1;
    if (bad >= 0) return bad;
    guess(m.precision, *exit.head, next, exit.norm, m.eps, chances, found, (int)places.size(), k, threads);
    known += (int64_t)places.size();
    return -1;
  };
  return grow(b, trees, k, exit.token_of, read, token, parent, sizes);
}

}  // namespace
