// Attention: what each token sees, and what it makes of it.

#pragma once

#include "interface.h"
#include "linear.h"
#include "precisions.h"
#include "rows.h"
#include "threads.h"

namespace {

// A token's visible keys in the order of the text, `length` in all: slots 0 .. run - 1, then those listed in `extra`.
struct View {
  int32_t length, run;
  const int32_t* extra;
  int slot(int index) const { return index < run ? index : extra[index - run]; }
};

View view_of(const Tokens& tokens, int token) {
  const int32_t* extra = tokens.extra + (size_t)token * tokens.extras;
  int count = 0;
  while (count < tokens.extras && extra[count] >= 0) ++count;
  return {tokens.prefix[token] + count, tokens.prefix[token], extra};
}

class Sight {
 public:
  explicit Sight(const Tokens& tokens) : tokens_(tokens), views_(buffer<View>((size_t)tokens.count)) {
    for (int i = 0; i < tokens.count; ++i) views_[(size_t)i] = view_of(tokens, i);
  }
  const View& operator[](int token) const { return views_[(size_t)token]; }
  int longest() const {
    int length = 0;
    for (int i = 0; i < tokens_.count; ++i) length = std::max(length, (*this)[i].length);
    return length;
  }
  const Tokens& tokens() const { return tokens_; }

 private:
  const Tokens& tokens_;
  const Buffer<View> views_;
};

constexpr int kMostQueries = 12;  // in one tile of scores
constexpr int kMostShared = 16;   // tokens that share the reading of keys

// rows[i] = products of query i with the 16 keys whose transposed words are given. Written out by query, so that the sums stay in registers.
template <class C, size_t... Q>
void score(const Word* keys, int words, const uint32_t* const* queries, float* const* rows, std::index_sequence<Q...>) {
  Float sums[] = {((void)Q, Float{})...};
  const uint32_t* const query[] = {queries[Q]...};
  for (int w = 0; w < words; ++w) ((sums[Q] = C::step(sums[Q], keys[w], splat(query[Q][w]))), ...);
  (store(rows[Q], sums[Q]), ...);
}

template <class C, size_t... N>
void score_all(const Word* keys, int words, const uint32_t* const* queries, float* const* rows, int count, std::index_sequence<N...>) {
  for (int i = 0; i < count; i += kMostQueries) {
    const int some = std::min(kMostQueries, count - i);
    ((some == (int)N + 1 ? score<C>(keys, words, queries + i, rows + i, std::make_index_sequence<N + 1>()) : void()), ...);
  }
}

// One half of a decoder block: everything between the product with qkv and the product with the output matrix, in P's precision.
template <class P>
class Attention {
  using C = typename P::Cached;

 public:
  Attention(const Model& model, const Sight& sight, const Cache& cache, const Team& team)
      : m_(model),
        sight_(sight),
        cache_(cache),
        words_(model.head_dim / C::kDepth),
        group_(model.heads / model.kv_heads),
        span_((size_t)round_up(sight.longest(), kLanes)),
        together_(tokens_together()),
        queries_(buffer<uint32_t>((size_t)sight.tokens().count * model.heads * words_)),
        keys_size_((size_t)round_up(words_, kLanes)),
        keys_(buffer<Word>(team.threads * keys_size_)),
        scores_(buffer<float>((size_t)team.threads * together_ * group_ * span_)),
        head_(buffer<float>((size_t)team.threads * model.head_dim)) {}

  // Norms and rotates queries and keys; keys and values go to the cache, queries wait.
  void place(const Layer& layer, int index, const float* qkv, const Team& team) const {
    const int heads = m_.heads + 2 * m_.kv_heads;
    const auto [from, to] = team.share(sight_.tokens().count * heads);
    for (int i = from; i < to; ++i) place_head(layer, index, i / heads, i % heads, qkv + (size_t)i * m_.head_dim, team);
  }

  // out [tokens, heads * head_dim], left to the next product. A thread's share of a row is a run of (key-value head, token) pairs, so that few keys and values
  // are read by two threads; tokens weigh what they see.
  void attend(const Layer& layer, int index, float* out, const Team& team) const {
    const Tokens& tokens = sight_.tokens();
    for (int first = 0, end = 0; first < tokens.count; first = end) {
      int64_t seen = 0;
      for (; end < tokens.count && tokens.row[end] == tokens.row[first]; ++end) seen += sight_[end].length;
      const int64_t all = seen * m_.kv_heads, from = all * team.thread / team.threads, to = all * (team.thread + 1) / team.threads;
      for (int kv = 0; kv < m_.kv_heads; ++kv) {
        int t = after(first, end, from - kv * seen);
        for (const int last = after(first, end, to - kv * seen); t < last; t += together_)
          attend_some(layer, index, kv, t, std::min(t + together_, last), out, team);
      }
    }
  }

 private:
  // As many as share the reading of keys, and leave their scores in the second-level cache.
  int tokens_together() const { return std::max(1, std::min((int)(65536 / (group_ * span_)), kMostShared)); }

  // The first of some tokens before which `seen` keys or more are seen by the others.
  int after(int first, int end, int64_t seen) const {
    for (; first < end && seen > 0; ++first) seen -= sight_[first].length;
    return first;
  }

  size_t head_at(int index, int row, int kv) const {
    return (((size_t)index * cache_.rows + row) * m_.kv_heads + kv) * cache_.slots * words_;
  }

  void place_head(const Layer& layer, int index, int token, int head, const float* source, const Team& team) const {
    const Tokens& tokens = sight_.tokens();
    const int dim = m_.head_dim, half = dim / 2;
    float* x = head_.get() + (size_t)team.thread * dim;
    std::memcpy(x, source, 4 * (size_t)dim);
    if (head < m_.heads + m_.kv_heads) {
      const float* norm = head < m_.heads ? layer.q_norm : layer.k_norm;
      if (norm) normalize(x, dim, norm, m_.eps, x);
      const float *cos = layer.cos + (size_t)tokens.position[token] * half, *sin = layer.sin + (size_t)tokens.position[token] * half;
      for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
      }
    }
    if (head < m_.heads) {
      C::pack(x, dim, queries_.get() + ((size_t)token * m_.heads + head) * words_);
      return;
    }
    const int kv = (head - m_.heads) % m_.kv_heads;
    uint32_t* side = head < m_.heads + m_.kv_heads ? cache_.k : cache_.v;
    C::pack(x, dim, side + head_at(index, tokens.row[token], kv) + (size_t)tokens.slot[token] * words_);
  }

  int first_visible(const Layer& layer, int token) const {
    return layer.window ? std::max(0, sight_[token].length - layer.window) : 0;
  }

  float* scores_of(int i, const Team& team) const {
    return scores_.get() + ((size_t)team.thread * together_ * group_ + i) * span_;
  }

  // Tokens first .. last - 1, all of one row, and the query heads that read one key-value head.
  void attend_some(const Layer& layer, int index, int kv, int first, int last, float* out, const Team& team) const {
    const size_t at = head_at(index, sight_.tokens().row[first], kv);
    int most = 0;
    for (int t = first; t < last; ++t) most = std::max(most, shared_blocks(t));
    for (int block = 0; block < most; ++block) score_shared(layer, at, kv, first, last, block, team);
    for (int t = first; t < last; ++t)
      for (int block = shared_blocks(t); block * kLanes < sight_[t].length; ++block)
        score_alone(layer, at, kv, t, first, block, team);
    Query queries[kMostMixed];
    int count = 0;
    for (int t = first; t < last; ++t)
      for (int h = 0; h < group_; ++h) {
        float* scores = scores_of((t - first) * group_ + h, team);
        const float factor = soften(layer, t, scores);
        const Query query = {t, first_visible(layer, t), (const uint32_t*)scores, factor, out + (size_t)t * m_.heads * m_.head_dim, (kv * group_ + h) * m_.head_dim};
        if (count == kMostMixed || (count && query.from != queries[0].from)) mix_all(cache_.v + at, queries, std::exchange(count, 0));
        queries[count++] = query;
      }
    mix_all(cache_.v + at, queries, count);
  }

  // Blocks of 16 visible keys that lie in the cache in their own order, so that other tokens see the same ones there.
  int shared_blocks(int token) const {
    const View& view = sight_[token];
    return view.run == view.length ? (view.run + kLanes - 1) / kLanes : view.run / kLanes;
  }

  // Words of 16 keys, transposed: one vector per word. slots(i) says where key i lies.
  template <class Slots>
  const Word* fetch_keys(size_t at, const Slots& slots, const Team& team) const {
    Word* keys = keys_.get() + team.thread * keys_size_;
    for (int w = 0; w < words_; w += kLanes) {
      for (int i = 0; i < kLanes; ++i) keys[w + i] = load_part<Word>(cache_.k + at + (size_t)slots(i) * words_ + w, words_ - w);
      transpose(keys + w);
    }
    return keys;
  }

  // Brings the keys or values of a block into the second-level cache.
  void soon(const uint32_t* first, int block) const {
    const char* at = (const char*)(first + (size_t)block * kLanes * words_);
    for (int i = 0; i < kLanes * words_ * 4; i += 64) __builtin_prefetch(at + i, 0, 2);
  }

  void score_shared(const Layer& layer, size_t at, int kv, int first, int last, int block, const Team& team) const {
    int owners[kMostShared], count = 0;
    for (int t = first; t < last; ++t)
      if (block < shared_blocks(t) && (block + 1) * kLanes > first_visible(layer, t)) owners[count++] = t;
    if (!count) return;
    soon(cache_.k + at, block + 2), soon(cache_.v + at, block);
    // Slots past the end of the cache stand for keys that nobody sees.
    const Word* keys = fetch_keys(at, [&](int i) { return std::min(block * kLanes + i, cache_.slots - 1); }, team);
    score_block(layer, keys, kv, owners, count, first, block, team);
  }

  void score_alone(const Layer& layer, size_t at, int kv, int token, int first, int block, const Team& team) const {
    if ((block + 1) * kLanes <= first_visible(layer, token)) return;
    const int end = sight_[token].length - 1;
    const Word* keys = fetch_keys(at, [&](int i) { return sight_[token].slot(std::min(block * kLanes + i, end)); }, team);
    score_block(layer, keys, kv, &token, 1, first, block, team);
  }

  // Scores of 16 keys for some tokens; those of keys that a token does not see vanish.
  void score_block(const Layer& layer, const Word* keys, int kv, const int* owners, int count, int first, int block, const Team& team) const {
    const uint32_t* queries[kMostShared * kMostGroup];
    float* rows[kMostShared * kMostGroup];
    for (int o = 0, i = 0; o < count; ++o)
      for (int h = 0; h < group_; ++h, ++i)
        queries[i] = query(owners[o], kv, h), rows[i] = scores_of((owners[o] - first) * group_ + h, team) + block * kLanes;
    score_all<C>(keys, words_, queries, rows, count * group_, std::make_index_sequence<kMostQueries>());
    if (m_.softcap > 0)
      for (int i = 0; i < count * group_; ++i)
        store(rows[i], splat(m_.softcap) * tanh_of(load<Float>(rows[i]) * splat(m_.scale / m_.softcap)));
    const Int place = kIota + splat((int32_t)(block * kLanes));
    for (int o = 0; o < count; ++o) {
      const int from = first_visible(layer, owners[o]), to = sight_[owners[o]].length;
      if (block * kLanes >= from && (block + 1) * kLanes <= to) continue;
      const Int visible = (place >= splat((int32_t)from)) & (place < splat((int32_t)to));
      for (int h = 0; h < group_; ++h) {
        float* row = rows[o * group_ + h];
        store(row, visible ? load<Float>(row) : splat(-INFINITY));
      }
    }
  }

  const uint32_t* query(int token, int kv, int h) const {
    return queries_.get() + ((size_t)token * m_.heads + kv * group_ + h) * words_;
  }

  // Scores to words of e^(score - largest), in place; returns the reciprocal of their sum.
  float soften(const Layer& layer, int token, float* scores) const {
    const int from = first_visible(layer, token) / kLanes * kLanes, to = sight_[token].length;
    const Float scale = splat(m_.softcap > 0 ? 1 : m_.scale);  // capped scores are scaled already
    Float most = splat(-INFINITY), total = {};
    for (int i = from; i < to; i += kLanes) most = larger(most, load<Float>(scores + i));
    const Float top = splat(largest(most));
    for (int i = from; i < to; i += kLanes) {
      float e[kLanes];
      store(e, exponential((load<Float>(scores + i) - top) * scale));
      total += load<Float>(e);
      C::pack(e, kLanes, (uint32_t*)scores + i / C::kDepth);
    }
    return 1 / sum(total);
  }

  // Number `first` of `row` and those after it: the sum of a token's visible values from `from` on, weighted with the words of `weights`,
  // times `factor`.
  struct Query {
    int token, from;
    const uint32_t* weights;
    float factor;
    float* row;
    int first;
  };

  // Two vectors of a value's words, in turns the numbers of as many values as a word of weights holds.
  struct Columns {
    Word word[2][C::kDepth];
  };

  template <class Value>
  Columns columns(const Value& value, int w) const {
    Columns out;
    for (int half = 0; half < 2; ++half) {
      const int first = w + kLanes * half;
      Word rows[C::kDepth];
      for (int d = 0; d < C::kDepth; ++d) rows[d] = first < words_ ? load_part<Word>(value(d) + first, words_ - first) : Word{};
      C::zip(rows, out.word[half]);
    }
    return out;
  }

  struct Sums {  // over such columns
    Float of[2][C::kDepth];
    void add(const Columns& values, uint32_t weight) {
      for (int half = 0; half < 2; ++half)
        for (int d = 0; d < C::kDepth; ++d) of[half][d] = C::step(of[half][d], values.word[half][d], splat(weight));
    }
  };

  // Some queries that begin at the same key. They share the reading of values while these lie in the cache in their own order.
  // Written out by query, since sums stay in registers only where every index is a constant.
  template <size_t... Q>
  void mix(const uint32_t* values, const Query* queries, std::index_sequence<Q...>) const {
    constexpr int D = C::kDepth;
    const int shared = std::min({sight_[queries[Q].token].run...}) / D;
    for (int w = 0; w < words_; w += 2 * kLanes) {
      Sums sums[sizeof...(Q)] = {};
      int i = queries[0].from / D;
      for (const uint32_t* value = values + (size_t)i * D * words_; i < shared; ++i, value += D * words_) {
        const Columns read = columns([&](int d) { return value + d * words_; }, w);
        (sums[Q].add(read, queries[Q].weights[i]), ...);
      }
      (finish_mix(values, queries[Q], i, w, sums[Q]), ...);
    }
  }

  // Adds what a query sees from word i of its weights on; what lies past its view weighs nothing.
  void finish_mix(const uint32_t* values, const Query& query, int i, int w, Sums sums) const {
    constexpr int D = C::kDepth;
    const View view = sight_[query.token];
    for (; i * D < view.length; ++i) {
      const auto value = [&](int d) { return values + (size_t)view.slot(std::min(i * D + d, view.length - 1)) * words_; };
      sums.add(columns(value, w), query.weights[i]);
    }
    for (int half = 0; half < 2; ++half) {
      Float ordered[D];
      C::unravel(sums.of[half], ordered);
      for (int d = 0; d < D; ++d) {
        const int first = (w + kLanes * half) * D + kLanes * d;
        if (first < m_.head_dim) leave<P>(query.row, query.first + first, ordered[d] * splat(query.factor));
      }
    }
  }

  template <size_t... N>
  void mix_some(const uint32_t* values, const Query* queries, int count, std::index_sequence<N...>) const {
    ((count == (int)N + 1 ? mix(values, queries, std::make_index_sequence<N + 1>()) : void()), ...);
  }
  void mix_all(const uint32_t* values, const Query* queries, int count) const {
    mix_some(values, queries, count, std::make_index_sequence<kMostMixed>());
  }

  static constexpr int kMostMixed = 6;   // queries that share the reading of values: what the registers hold
  static constexpr int kMostGroup = 16;  // query heads per key-value head
  const Model& m_;
  const Sight& sight_;
  const Cache& cache_;
  const int words_, group_;
  const size_t span_;
  const int together_;
  const Buffer<uint32_t> queries_;
  const size_t keys_size_;
  const Buffer<Word> keys_;
  const Buffer<float> scores_;
  const Buffer<float> head_;
};

}  // namespace
