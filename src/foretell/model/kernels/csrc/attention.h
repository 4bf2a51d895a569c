// Attention of new tokens over the key-value cache.

#pragma once

#include "interface.h"
#include "linear.h"
#include "precisions.h"
#include "row_ops.h"
#include "threads.h"

namespace {

// The cache slots that a token attends to, in sequence order, `length` in all: slots 0 .. prefix - 1, then
// `extra_slots`.
struct VisibleKeys {
  int32_t length, prefix;
  const int32_t* extra_slots;
  int slot(int index) const { return index < prefix ? index : extra_slots[index - prefix]; }
};

VisibleKeys visible_keys_of(const Layout& layout, int token) {
  const int32_t* extra_slots = layout.extra_slots + (size_t)token * layout.max_extra_slots;
  int count = 0;
  while (count < layout.max_extra_slots && extra_slots[count] >= 0) ++count;
  return {layout.visible_prefix[token] + count, layout.visible_prefix[token], extra_slots};
}

// The visible keys of every new token.
class Visibility {
 public:
  explicit Visibility(const Layout& layout) : layout_(layout), keys_(buffer<VisibleKeys>((size_t)layout.count)) {
    for (int i = 0; i < layout.count; ++i) keys_[(size_t)i] = visible_keys_of(layout, i);
  }
  const VisibleKeys& operator[](int token) const { return keys_[(size_t)token]; }
  int longest() const {
    int length = 0;
    for (int i = 0; i < layout_.count; ++i) length = std::max(length, (*this)[i].length);
    return length;
  }
  const Layout& layout() const { return layout_; }

 private:
  const Layout& layout_;
  const Buffer<VisibleKeys> keys_;
};

constexpr int kMaxQueries = kAccumulators / 2;  // per tile of scores: sums stay in registers
constexpr int kMaxSharedTokens = 16;  // tokens that share one load of the keys

// rows[i] = products of query i with 16 keys, given as transposed words. Unrolled by query, so that the sums stay in
// registers.
template <class C, size_t... Q>
void score(const Word* keys, int words, const uint32_t* const* queries, float* const* rows, std::index_sequence<Q...>) {
  Float sums[] = {((void)Q, Float{})...};
  const uint32_t* const query[] = {queries[Q]...};
  for (int w = 0; w < words; ++w) ((sums[Q] = C::step(sums[Q], keys[w], splat(query[Q][w]))), ...);
  (store(rows[Q], sums[Q]), ...);
}

template <class C, size_t... N>
void score_all(const Word* keys, int words, const uint32_t* const* queries, float* const* rows, int count,
               std::index_sequence<N...>) {
  for (int i = 0; i < count; i += kMaxQueries) {
    const int some = std::min(kMaxQueries, count - i);
    ((some == (int)N + 1 ? score<C>(keys, words, queries + i, rows + i, std::make_index_sequence<N + 1>()) : void()),
     ...);
  }
}

// The attention of a decoder block between its qkv product and its output product. C: precision of keys and values.
template <class C>
class Attention {
 public:
  Attention(const Model& model, const Visibility& visibility, const Cache& cache, const Team& team)
      : m_(model),
        visibility_(visibility),
        cache_(cache),
        words_(model.head_dim / C::kDepth),
        group_(model.heads / model.kv_heads),
        score_stride_((size_t)round_up(visibility.longest(), kLanes)),
        tile_tokens_(tokens_per_tile()),
        queries_(buffer<uint32_t>((size_t)visibility.layout().count * model.heads * words_)),
        keys_size_((size_t)round_up(words_, kLanes)),
        keys_(buffer<Word>(team.threads * keys_size_)),
        scores_(buffer<float>((size_t)team.threads * tile_tokens_ * group_ * score_stride_)),
        head_(buffer<float>((size_t)team.threads * model.head_dim)) {}

  // Norms and rotates queries and keys, writes keys and values to the cache, and keeps the queries for `attend`.
  void rotate_and_store(const Layer& layer, int index, const float* qkv, const Team& team) const {
    const int heads = m_.heads + 2 * m_.kv_heads;
    const auto [from, to] = team.share(visibility_.layout().count * heads);
    for (int i = from; i < to; ++i)
      rotate_and_store_head(layer, index, i / heads, i % heads, qkv + (size_t)i * m_.head_dim, team);
  }

  // Writes out [tokens, heads * head_dim] as operands of the output product. A thread's share of a cache row is a
  // contiguous range of (key-value head, token) pairs, so that few keys and values are read by two threads. A token's
  // weight in the division is its number of visible keys.
  void attend(const Layer& layer, int index, float* out, const Team& team) const {
    const Layout& layout = visibility_.layout();
    for (int first = 0, end = 0; first < layout.count; first = end) {
      int64_t seen = 0;
      for (; end < layout.count && layout.row[end] == layout.row[first]; ++end) seen += visibility_[end].length;
      const int64_t all = seen * m_.kv_heads, from = all * team.thread / team.threads,
                    to = all * (team.thread + 1) / team.threads;
      for (int kv = 0; kv < m_.kv_heads; ++kv) {
        int t = skip_keys(first, end, from - kv * seen);
        for (const int last = skip_keys(first, end, to - kv * seen); t < last; t += tile_tokens_)
          attend_some(layer, index, kv, t, std::min(t + tile_tokens_, last), out, team);
      }
    }
  }

 private:
  // Tokens that share one load of the keys: as many as keep their scores within kScoresInCache.
  int tokens_per_tile() const {
    return std::max(1, std::min((int)(kScoresInCache / (group_ * score_stride_)), kMaxSharedTokens));
  }

  // The first token from `first` on before which the tokens have at least `seen` visible keys in all.
  int skip_keys(int first, int end, int64_t seen) const {
    for (; first < end && seen > 0; ++first) seen -= visibility_[first].length;
    return first;
  }

  size_t head_at(int index, int row, int kv) const {
    return (((size_t)index * cache_.rows + row) * m_.kv_heads + kv) * cache_.slots * words_;
  }

  void rotate_and_store_head(const Layer& layer, int index, int token, int head, const float* source,
                             const Team& team) const {
    const Layout& layout = visibility_.layout();
    const int dim = m_.head_dim, half = m_.rotary_dim / 2;
    float* x = head_.get() + (size_t)team.thread * dim;
    std::memcpy(x, source, 4 * (size_t)dim);
    if (head < m_.heads + m_.kv_heads) {
      const float* norm = head < m_.heads ? layer.q_norm : layer.k_norm;
      if (norm) normalize(x, dim, norm, m_.eps, x);
      const float *cos = layer.cos + (size_t)layout.position[token] * half,
                  *sin = layer.sin + (size_t)layout.position[token] * half;
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
    C::pack(x, dim, side + head_at(index, layout.row[token], kv) + (size_t)layout.slot[token] * words_);
  }

  int first_visible(const Layer& layer, int token) const {
    return layer.window ? std::max(0, visibility_[token].length - layer.window) : 0;
  }

  float* scores_of(int i, const Team& team) const {
    return scores_.get() + ((size_t)team.thread * tile_tokens_ * group_ + i) * score_stride_;
  }

  // Tokens first .. last - 1, all of one row, and the query heads that read one key-value head.
  void attend_some(const Layer& layer, int index, int kv, int first, int last, float* out, const Team& team) const {
    const size_t at = head_at(index, visibility_.layout().row[first], kv);
    int blocks = 0;
    for (int t = first; t < last; ++t) blocks = std::max(blocks, contiguous_blocks(t));
    for (int block = 0; block < blocks; ++block) score_contiguous(layer, at, kv, first, last, block, team);
    for (int t = first; t < last; ++t)
      for (int block = contiguous_blocks(t); block * kLanes < visibility_[t].length; ++block)
        score_gathered(layer, at, kv, t, first, block, team);
    Query queries[kMaxMixedQueries];
    int count = 0;
    for (int t = first; t < last; ++t)
      for (int h = 0; h < group_; ++h) {
        float* scores = scores_of((t - first) * group_ + h, team);
        const float factor = softmax(layer, t, scores);
        const Query query = {t,
                             layer.output.operand,
                             first_visible(layer, t),
                             (const uint32_t*)scores,
                             factor,
                             out + (size_t)t * m_.heads * m_.head_dim,
                             (kv * group_ + h) * m_.head_dim};
        if (count == kMaxMixedQueries || (count && query.from != queries[0].from))
          mix_values(cache_.v + at, queries, std::exchange(count, 0));
        queries[count++] = query;
      }
    mix_values(cache_.v + at, queries, count);
  }

  // Number of blocks of 16 visible keys that are contiguous in the cache, and so the same for other tokens of the row.
  int contiguous_blocks(int token) const {
    const VisibleKeys& keys = visibility_[token];
    return keys.prefix == keys.length ? (keys.prefix + kLanes - 1) / kLanes : keys.prefix / kLanes;
  }

  // Words of 16 keys, transposed: one vector per word. slots(i) is the slot of key i.
  template <class Slots>
  const Word* fetch_keys(size_t at, const Slots& slots, const Team& team) const {
    Word* keys = keys_.get() + team.thread * keys_size_;
    for (int w = 0; w < words_; w += kLanes) {
      for (int i = 0; i < kLanes; ++i)
        keys[w + i] = load_part<Word>(cache_.k + at + (size_t)slots(i) * words_ + w, words_ - w);
      transpose(keys + w);
    }
    return keys;
  }

  // Prefetches the keys or values of a block into the second-level cache.
  void prefetch(const uint32_t* first, int block) const {
    const char* at = (const char*)(first + (size_t)block * kLanes * words_);
    for (int i = 0; i < kLanes * words_ * 4; i += 64) __builtin_prefetch(at + i, 0, 2);
  }

  void score_contiguous(const Layer& layer, size_t at, int kv, int first, int last, int block, const Team& team) const {
    int tokens[kMaxSharedTokens], count = 0;
    for (int t = first; t < last; ++t)
      if (block < contiguous_blocks(t) && (block + 1) * kLanes > first_visible(layer, t)) tokens[count++] = t;
    if (!count) return;
    prefetch(cache_.k + at, block + 2), prefetch(cache_.v + at, block);
    // Indices past the end of the cache are clamped: no token sees those keys.
    const Word* keys = fetch_keys(at, [&](int i) { return std::min(block * kLanes + i, cache_.slots - 1); }, team);
    score_block(layer, keys, kv, tokens, count, first, block, team);
  }

  void score_gathered(const Layer& layer, size_t at, int kv, int token, int first, int block, const Team& team) const {
    if ((block + 1) * kLanes <= first_visible(layer, token)) return;
    const int end = visibility_[token].length - 1;
    const Word* keys =
        fetch_keys(at, [&](int i) { return visibility_[token].slot(std::min(block * kLanes + i, end)); }, team);
    score_block(layer, keys, kv, &token, 1, first, block, team);
  }

  // Scores of 16 keys for some tokens; -infinity for keys that a token does not see.
  void score_block(const Layer& layer, const Word* keys, int kv, const int* tokens, int count, int first, int block,
                   const Team& team) const {
    const uint32_t* queries[kMaxSharedTokens * kMaxGroup];
    float* rows[kMaxSharedTokens * kMaxGroup];
    for (int o = 0, i = 0; o < count; ++o)
      for (int h = 0; h < group_; ++h, ++i)
        queries[i] = query(tokens[o], kv, h),
        rows[i] = scores_of((tokens[o] - first) * group_ + h, team) + block * kLanes;
    score_all<C>(keys, words_, queries, rows, count * group_, std::make_index_sequence<kMaxQueries>());
    if (m_.softcap > 0)
      for (int i = 0; i < count * group_; ++i)
        store(rows[i], splat(m_.softcap) * tanh_of(load<Float>(rows[i]) * splat(m_.scale / m_.softcap)));
    const Int place = kIota + splat((int32_t)(block * kLanes));
    for (int o = 0; o < count; ++o) {
      const int from = first_visible(layer, tokens[o]), to = visibility_[tokens[o]].length;
      if (block * kLanes >= from && (block + 1) * kLanes <= to) continue;
      const Int visible = (place >= splat((int32_t)from)) & (place < splat((int32_t)to));
      for (int h = 0; h < group_; ++h) {
        float* row = rows[o * group_ + h];
        store(row, select(visible, load<Float>(row), splat(-INFINITY)));
      }
    }
  }

  const uint32_t* query(int token, int kv, int h) const {
    return queries_.get() + ((size_t)token * m_.heads + kv * group_ + h) * words_;
  }

  // Replaces scores by words of e^(score - largest); returns the reciprocal of their sum.
  float softmax(const Layer& layer, int token, float* scores) const {
    const int from = first_visible(layer, token) / kLanes * kLanes, to = visibility_[token].length;
    const Float scale = splat(m_.softcap > 0 ? 1 : m_.scale);  // capped scores are scaled already
    Float highest = splat(-INFINITY), total = {};
    for (int i = from; i < to; i += kLanes) highest = larger(highest, load<Float>(scores + i));
    const Float top = splat(largest(highest));
    for (int i = from; i < to; i += kLanes) {
      float e[kLanes];
      store(e, exponential((load<Float>(scores + i) - top) * scale));
      total += load<Float>(e);
      C::pack(e, kLanes, (uint32_t*)scores + i / C::kDepth);
    }
    return 1 / sum(total);
  }

  // One query head of a token: the sum of the values from visible key `from` on, weighted with the words of `weights`,
  // times `factor`, is written to `row` from element `first` on, as `operand`.
  struct Query {
    int token, operand, from;
    const uint32_t* weights;
    float factor;
    float* row;
    int first;
  };

  // Two vectors per value word; each interleaves the elements of kDepth values, as one word of weights covers kDepth
  // values.
  struct Columns {
    Word word[2][C::kDepth];
  };

  template <class Value>
  Columns columns(const Value& value, int w) const {
    Columns out;
    for (int half = 0; half < 2; ++half) {
      const int first = w + kLanes * half;
      Word rows[C::kDepth];
      for (int d = 0; d < C::kDepth; ++d)
        rows[d] = first < words_ ? load_part<Word>(value(d) + first, words_ - first) : Word{};
      C::interleave_rows(rows, out.word[half]);
    }
    return out;
  }

  struct Sums {  // weighted sums of Columns
    Float of[2][C::kDepth];
    void add(const Columns& values, uint32_t weight) {
      for (int half = 0; half < 2; ++half)
        for (int d = 0; d < C::kDepth; ++d) of[half][d] = C::step(of[half][d], values.word[half][d], splat(weight));
    }
  };

  // Weighted sums for queries that begin at the same key. They share the loads of the values that are contiguous in the
  // cache. Unrolled by query: sums stay in registers only where every index is a constant.
  template <size_t... Q>
  void mix_values_unrolled(const uint32_t* values, const Query* queries, std::index_sequence<Q...>) const {
    constexpr int D = C::kDepth;
    const int shared = std::min({visibility_[queries[Q].token].prefix...}) / D;
    for (int w = 0; w < words_; w += 2 * kLanes) {
      Sums sums[sizeof...(Q)] = {};
      int i = queries[0].from / D;
      for (const uint32_t* value = values + (size_t)i * D * words_; i < shared; ++i, value += D * words_) {
        const Columns read = columns([&](int d) { return value + d * words_; }, w);
        (sums[Q].add(read, queries[Q].weights[i]), ...);
      }
      (finish_values(values, queries[Q], i, w, sums[Q]), ...);
    }
  }

  // Adds a query's remaining values, from word i of its weights on; values past its visible keys have weight 0.
  void finish_values(const uint32_t* values, const Query& query, int i, int w, Sums sums) const {
    constexpr int D = C::kDepth;
    const VisibleKeys keys = visibility_[query.token];
    for (; i * D < keys.length; ++i) {
      const auto value = [&](int d) {
        return values + (size_t)keys.slot(std::min(i * D + d, keys.length - 1)) * words_;
      };
      sums.add(columns(value, w), query.weights[i]);
    }
    for (int half = 0; half < 2; ++half) {
      Float ordered[D];
      C::restore_order(sums.of[half], ordered);
      for (int d = 0; d < D; ++d) {
        const int first = (w + kLanes * half) * D + kLanes * d;
        if (first < m_.head_dim) store_operand(query.operand, query.row, query.first + first, ordered[d] * splat(query.factor));
      }
    }
  }

  template <size_t... N>
  void mix_values_dispatch(const uint32_t* values, const Query* queries, int count, std::index_sequence<N...>) const {
    ((count == (int)N + 1 ? mix_values_unrolled(values, queries, std::make_index_sequence<N + 1>()) : void()), ...);
  }
  void mix_values(const uint32_t* values, const Query* queries, int count) const {
    mix_values_dispatch(values, queries, count, std::make_index_sequence<kMaxMixedQueries>());
  }

  static constexpr int kMaxMixedQueries = std::max(1, kAccumulators / 4);  // that share the loads of values
  static constexpr int kMaxGroup = 16;          // query heads per key-value head
  static constexpr int kScoresInCache = 65536;  // floats per thread: 256 KiB, a part of the second-level cache
  const Model& m_;
  const Visibility& visibility_;
  const Cache& cache_;
  const int words_, group_;
  const size_t score_stride_;
  const int tile_tokens_;
  const Buffer<uint32_t> queries_;
  const size_t keys_size_;
  const Buffer<Word> keys_;
  const Buffer<float> scores_;
  const Buffer<float> head_;
};

}  // namespace
