// Attention of new tokens over the key-value cache.
//
// Keys of a token are numbered in sequence order, and numbers are cut into chunks of kChunk keys. A chunk gives a
// partial result per query: the largest score, the sum of e^(score - largest), and the values weighted with these.
// Partial results are merged in the order of the chunks (online softmax: Milakov and Gimelshein, arXiv 1805.02867), by
// one thread or, for few tokens over long texts, after several threads have computed them (Flash-Decoding, Dao et al.
// 2023). The arithmetic is the same in both cases, so a token's result depends on its own keys only.

#pragma once

#include <vector>

#include "cache.h"
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

// New tokens first .. last - 1, all of one cache row, which read the keys and values together.
struct TokenTile {
  int first, last;
  std::vector<int> extra_blocks;  // blocks of the cache that hold the tokens' extra slots
};

// The tokens of a pass in tiles, and the place of every extra slot among the blocks of its tile.
class TokenTiles {
 public:
  TokenTiles(const Visibility& visibility, int tokens_per_tile)
      : width_(visibility.layout().max_extra_slots), places_((size_t)visibility.layout().count * width_) {
    const Layout& layout = visibility.layout();
    for (int t = 0; t < layout.count; ++t) {
      if (tiles_.empty() || layout.row[t] != layout.row[t - 1] || t - tiles_.back().first == tokens_per_tile)
        tiles_.push_back({t, t, {}});
      tiles_.back().last = t + 1;
      for (int i = 0; i < visibility[t].length - visibility[t].prefix; ++i)
        places_[(size_t)t * width_ + i] = place(tiles_.back().extra_blocks, visibility[t].extra_slots[i]);
    }
    for (const TokenTile& tile : tiles_) most_blocks_ = std::max(most_blocks_, (int)tile.extra_blocks.size());
  }
  const std::vector<TokenTile>& all() const { return tiles_; }
  int most_extra_blocks() const { return most_blocks_; }
  // The number of a token's extra slot among those of its tile's blocks.
  int place_of(int token, int extra) const { return places_[(size_t)token * width_ + extra]; }

 private:
  static int place(std::vector<int>& blocks, int slot) {
    size_t i = 0;
    while (i < blocks.size() && blocks[i] != slot / kLanes) ++i;
    if (i == blocks.size()) blocks.push_back(slot / kLanes);
    return (int)i * kLanes + slot % kLanes;
  }
  const int width_;
  std::vector<int> places_;
  std::vector<TokenTile> tiles_;
  int most_blocks_ = 0;
};

// Key blocks, or value vectors, of a tile, and its queries: their sums fit in registers.
constexpr int kTileBlocks = kAccumulators >= 24 ? 4 : kAccumulators >= 6 ? 2 : 1;
constexpr int kTileQueries = kAccumulators / kTileBlocks;

// Products of Q queries with K blocks of 16 keys, `words` words each: out[q] receives 16 * K scores. Meanwhile as many
// bytes from `ahead` on (null: none) are prefetched: for few queries attention is bound by memory.
template <class C, int Q, int K>
void score_tile(const uint32_t* keys, int words, const uint32_t* const* queries, float* const* out, const char* ahead) {
  Float sums[Q][K] = {};
  for (int w = 0; w < words; ++w) {
    Word key[K];
    if (ahead)
      for (int k = 0; k < K; ++k) __builtin_prefetch(ahead + 64 * ((size_t)w * K + k), 0, 2);
#pragma GCC unroll 8
    for (int k = 0; k < K; ++k) key[k] = load<Word>(keys + ((size_t)k * words + w) * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const Word x = splat(queries[q][w]);
#pragma GCC unroll 8
      for (int k = 0; k < K; ++k) sums[q][k] = C::step(sums[q][k], key[k], x);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int k = 0; k < K; ++k) store(out[q] + k * kLanes, sums[q][k]);
}

// Sums of value words from .. to - 1, each a row of `stride` words, weighted with the words of Q queries: out[q]
// receives V vectors. Every sum begins at 0. Meanwhile as many bytes from `ahead` on (null: none) are prefetched.
template <class C, int Q, int V>
void mix_tile(const uint32_t* values, int stride, int from, int to, const uint32_t* const* weights, float* const* out,
              const char* ahead) {
  Float sums[Q][V] = {};
  for (int i = from; i < to; ++i) {
    Word value[V];
    if (ahead)
      for (int v = 0; v < V; ++v) __builtin_prefetch(ahead + 64 * ((size_t)(i - from) * V + v), 0, 2);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) value[v] = load<Word>(values + (size_t)i * stride + v * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      const Word weight = splat(weights[q][i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[q][v] = C::step(sums[q][v], value[v], weight);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) store(out[q] + v * kLanes, sums[q][v]);
}

using ScoreTile = void (*)(const uint32_t*, int, const uint32_t* const*, float* const*, const char*);
using MixTile = void (*)(const uint32_t*, int, int, int, const uint32_t* const*, float* const*, const char*);

template <class C, size_t... I>
ScoreTile score_tile_of(int queries, int blocks, std::index_sequence<I...>) {
  constexpr ScoreTile all[] = {score_tile<C, I / kTileBlocks + 1, I % kTileBlocks + 1>...};
  return all[(queries - 1) * kTileBlocks + blocks - 1];
}
template <class C, size_t... I>
MixTile mix_tile_of(int queries, int vectors, std::index_sequence<I...>) {
  constexpr MixTile all[] = {mix_tile<C, I / kTileBlocks + 1, I % kTileBlocks + 1>...};
  return all[(queries - 1) * kTileBlocks + vectors - 1];
}
constexpr auto kTileSizes = std::make_index_sequence<kTileQueries * kTileBlocks>();

// The result of a query over some of its keys.
struct Partial {
  float* mixed;    // [head_dim]: values weighted with e^(score - highest)
  float* highest;  // the largest score
  float* total;    // sum of e^(score - highest); 0: the query sees none of these keys
};

// The attention of a decoder block between its qkv product and its output product. C: precision of keys and values.
template <class C>
class Attention {
 public:
  Attention(const Model& model, const Visibility& visibility, const Cache& cache, const Team& team)
      : m_(model),
        visibility_(visibility),
        cache_(cache, model.cache_heads, model.head_dim),
        words_(model.head_dim / C::kDepth),
        group_(model.heads / model.kv_heads),
        tile_tokens_(kMaxQueries / group_),
        tile_queries_(tile_tokens_ * group_),
        tiles_(visibility, tile_tokens_),
        chunks_((visibility.longest() + kChunk - 1) / kChunk),
        splits_text_(chunks_ > 1 && team.threads > 1 &&
                     (int)tiles_.all().size() * model.kv_heads < kUnitsPerThread * team.threads),
        queries_(buffer<uint32_t>((size_t)visibility.layout().count * model.heads * words_)),
        scratch_size_(scratch_size()),
        scratch_(buffer<float>(team.threads * scratch_size_)),
        partials_(buffer<float>(splits_text_ ? (size_t)visibility.layout().count * model.heads * chunks_ *
                                                   partial_size()
                                             : 0)) {}

  // Norms and rotates queries and keys, writes keys and values to the cache, and keeps the queries for `attend`.
  void rotate_and_store(const Layer& layer, int index, const float* qkv, const Team& team) const {
    if (team.thread == 0) next_unit_.store(0, std::memory_order_relaxed);
    const int heads = m_.heads + 2 * m_.cache_heads;
    const auto [from, to] = team.share(visibility_.layout().count * heads);
    for (int i = from; i < to; ++i)
      rotate_and_store_head(layer, index, i / heads, i % heads, qkv + (size_t)i * m_.head_dim, team);
  }

  // Writes out [tokens, heads * head_dim] as operands of the output product. Threads take units of work one by one: a
  // tile of tokens, a key-value head and, where the text is split, a chunk.
  void attend(const Layer& layer, int index, float* out, const Team& team) const {
    const int tiles = (int)tiles_.all().size(), parts = splits_text_ ? chunks_ : 1, units = tiles * m_.kv_heads * parts;
    for (;;) {
      const int unit = next_unit_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units) break;
      const TokenTile& tile = tiles_.all()[(size_t)(unit / parts / m_.kv_heads)];
      const int kv = unit / parts % m_.kv_heads;
      if (splits_text_)
        attend_chunk(layer, index, tile, kv, unit % parts, team,
                     [&](int i) { return partial(tile, kv, i, unit % parts); });
      else
        attend_tile(layer, index, tile, kv, out, team);
    }
    if (!splits_text_) return;
    team.barrier();
    const auto [from, to] = team.share(visibility_.layout().count * m_.heads);
    for (int i = from; i < to; ++i) merge_chunks(layer, i, out);
  }

 private:
  static constexpr int kChunk = 256;        // keys: a multiple of 16 * kTileBlocks
  static constexpr int kMaxQueries = 48;    // queries of a tile of tokens: their scores stay in the first-level cache
  static_assert(kMaxGroup <= kMaxQueries && kChunk % (kTileBlocks * kLanes) == 0);
  static constexpr int kUnitsPerThread = 3; // tiles and heads that keep the threads equally busy

  size_t partial_size() const { return (size_t)m_.head_dim + kLanes; }

  // Memory of a thread: scores of a chunk and of the extra blocks, partial results of a chunk and merged ones, a head,
  // and keys and values of a chunk that are not stored as words.
  size_t scratch_size() const {
    const size_t per_query = kChunk + (size_t)tiles_.most_extra_blocks() * kLanes + 2 * partial_size();
    return tile_queries_ * per_query + (size_t)round_up(m_.head_dim, kPanel) + cache_.scratch_words(kChunk);
  }
  float* scratch(const Team& team) const { return scratch_.get() + team.thread * scratch_size_; }
  float* scores_of(int i, const Team& team) const { return scratch(team) + (size_t)i * kChunk; }
  int extra_stride() const { return tiles_.most_extra_blocks() * kLanes; }
  float* extra_scores_of(int i, const Team& team) const {
    return scratch(team) + (size_t)tile_queries_ * kChunk + (size_t)i * extra_stride();
  }
  Partial partial_at(float* at) const { return {at, at + m_.head_dim, at + m_.head_dim + 1}; }
  // Of query i of a tile: of one chunk (which = 0), and merged (which = 1).
  Partial own_partial(int i, int which, const Team& team) const {
    float* first = scratch(team) + (size_t)tile_queries_ * (kChunk + extra_stride());
    return partial_at(first + (size_t)(which * tile_queries_ + i) * partial_size());
  }
  float* head_of(const Team& team) const {
    return scratch(team) + (size_t)tile_queries_ * (kChunk + extra_stride() + 2 * partial_size());
  }
  uint32_t* words_of(const Team& team) const { return (uint32_t*)head_of(team) + round_up(m_.head_dim, kPanel); }

  // Of query i of a tile over a chunk, where the text is split.
  Partial partial(const TokenTile& tile, int kv, int i, int chunk) const {
    const int token = tile.first + i / group_, head = kv * group_ + i % group_;
    return stored_partial(token * m_.heads + head, chunk);
  }
  Partial stored_partial(int token_head, int chunk) const {
    return partial_at(partials_.get() + ((size_t)token_head * chunks_ + chunk) * partial_size());
  }

  void rotate_and_store_head(const Layer& layer, int index, int token, int head, const float* source,
                             const Team& team) const {
    const Layout& layout = visibility_.layout();
    const int dim = m_.head_dim, half = m_.rotary_dim / 2;
    float* x = head_of(team);
    std::memcpy(x, source, 4 * (size_t)dim);
    if (head < m_.heads + m_.cache_heads) {
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
    cache_.rotate(x);
    if (head < m_.heads) {
      C::pack(x, dim, queries_.get() + ((size_t)token * m_.heads + head) * words_);
      return;
    }
    const auto at = cache_.head(index, layout.row[token], (head - m_.heads) % m_.cache_heads);
    if (head < m_.heads + m_.cache_heads)
      cache_.store_key(at, layout.slot[token], x);
    else
      cache_.store_value(at, layout.slot[token], x);
  }

  int first_visible(const Layer& layer, int token) const {
    return layer.window ? std::max(0, visibility_[token].length - layer.window) : 0;
  }

  const uint32_t* query(const TokenTile& tile, int kv, int i) const {
    return queries_.get() + ((size_t)(tile.first + i / group_) * m_.heads + kv * group_ + i % group_) * words_;
  }

  // All chunks of a tile's text, one after the other.
  void attend_tile(const Layer& layer, int index, const TokenTile& tile, int kv, float* out, const Team& team) const {
    const int queries = (tile.last - tile.first) * group_;
    for (int i = 0; i < queries; ++i) *own_partial(i, 1, team).total = 0;
    int begin = visibility_[tile.first].length, end = 0;
    for (int t = tile.first; t < tile.last; ++t)
      begin = std::min(begin, first_visible(layer, t)), end = std::max(end, visibility_[t].length);
    for (int chunk = begin / kChunk; chunk * kChunk < end; ++chunk) {
      attend_chunk(layer, index, tile, kv, chunk, team, [&](int i) { return own_partial(i, 0, team); });
      for (int i = 0; i < queries; ++i) merge(own_partial(i, 0, team), own_partial(i, 1, team));
    }
    for (int i = 0; i < queries; ++i)
      finish(layer, tile.first + i / group_, kv * group_ + i % group_, own_partial(i, 1, team), out);
  }

  // A token's head, number i of all, from the partial results of all chunks.
  void merge_chunks(const Layer& layer, int i, float* out) const {
    const Partial merged = stored_partial(i, 0);
    const int chunks = (visibility_[i / m_.heads].length + kChunk - 1) / kChunk;
    for (int chunk = 1; chunk < chunks; ++chunk) merge(stored_partial(i, chunk), merged);
    finish(layer, i / m_.heads, i % m_.heads, merged, out);
  }

  // Adds the result over later keys to that over earlier ones.
  void merge(const Partial& later, const Partial& earlier) const {
    if (*later.total == 0) return;
    const bool first = *earlier.total == 0;
    const float scale = m_.softcap > 0 ? 1 : m_.scale,
                highest = first ? *later.highest : std::max(*earlier.highest, *later.highest);
    const Float a = first ? Float{} : exponential(splat((*earlier.highest - highest) * scale)),
                b = exponential(splat((*later.highest - highest) * scale));
    for (int i = 0; i < m_.head_dim; i += kLanes) {
      const Float old = first ? Float{} : load<Float>(earlier.mixed + i) * a;
      store(earlier.mixed + i, fma(load<Float>(later.mixed + i), b, old));
    }
    const float total = first ? 0 : *earlier.total * a[0];
    *earlier.total = total + *later.total * b[0];
    *earlier.highest = highest;
  }

  // Divides by the sum of e^score, which a sink joins.
  void finish(const Layer& layer, int token, int head, const Partial& result, float* out) const {
    float divisor = *result.total, scale = 1;
    if (layer.sinks) {
      const float unit = m_.softcap > 0 ? 1 : m_.scale, sink = layer.sinks[head] / unit,
                  highest = std::max(*result.highest, sink);
      scale = exponential(splat((*result.highest - highest) * unit))[0];
      divisor = divisor * scale + exponential(splat((sink - highest) * unit))[0];
    }
    const Float factor = splat(scale / divisor);
    cache_.rotate(result.mixed);
    for (int i = 0; i < m_.head_dim; i += kLanes)
      store_operand(layer.output.operand, out + (size_t)token * m_.heads * m_.head_dim, head * m_.head_dim + i,
                    load<Float>(result.mixed + i) * factor);
  }

  // Keys of a chunk that a token sees, counted from the chunk's first key; `shared` of them, from the first on, are
  // contiguous in the cache.
  struct Range {
    int from, to, shared;
    bool empty() const { return from >= to; }
  };
  Range range_of(const Layer& layer, int token, int chunk) const {
    const int first = chunk * kChunk;
    const auto within = [&](int key) { return std::min(std::max(key - first, 0), kChunk); };
    return {within(first_visible(layer, token)), within(visibility_[token].length), within(visibility_[token].prefix)};
  }

  // Partial results of a tile's queries over one chunk of their keys; partial_of(i) is that of query i.
  template <class PartialOf>
  void attend_chunk(const Layer& layer, int index, const TokenTile& tile, int kv, int chunk, const Team& team,
                    const PartialOf& partial_of) const {
    const auto at = cache_.head(index, visibility_.layout().row[tile.first], kv % m_.cache_heads);
    int from = kChunk, shared = 0;
    bool has_extra = false;
    for (int t = tile.first; t < tile.last; ++t) {
      const Range range = range_of(layer, t, chunk);
      if (range.empty()) continue;
      from = std::min(from, range.from / kLanes * kLanes), shared = std::max(shared, range.shared);
      has_extra = has_extra || range.shared < range.to;
    }
    score_contiguous(at, tile, kv, chunk, from, shared, team);
    if (has_extra) score_extra(layer, at, tile, kv, chunk, team);
    Query queries[kMaxQueries];
    int count = 0;
    for (int t = tile.first; t < tile.last; ++t) {
      const Range range = range_of(layer, t, chunk);
      for (int h = 0; h < group_; ++h) {
        const int i = (t - tile.first) * group_ + h;
        const Partial partial = partial_of(i);
        if (range.empty()) {
          *partial.total = 0;
          continue;
        }
        softmax(at, t, chunk, range, from, scores_of(i, team), partial);
        queries[count++] = {t, range, (const uint32_t*)scores_of(i, team), partial.mixed};
      }
    }
    if (count) mix(at, chunk, from, queries, count, team);
  }

  // Scores of keys from .. shared - 1 of a chunk, rounded up to whole blocks.
  void score_contiguous(const CacheHead& at, const TokenTile& tile, int kv, int chunk, int from, int shared,
                        const Team& team) const {
    const int queries = (tile.last - tile.first) * group_;
    for (int key = from; key < shared; key += kTileBlocks * kLanes) {
      const int blocks = std::min(kTileBlocks, (shared - key + kLanes - 1) / kLanes), slot = chunk * kChunk + key;
      score_blocks(at, slot / kLanes, blocks, tile, kv, queries, team,
                   [&](int i) { return scores_of(i, team) + key; });
    }
  }

  // Scores of a tile's queries for blocks of the cache.
  template <class Row>
  void score_blocks(const CacheHead& at, int block, int blocks, const TokenTile& tile, int kv, int queries,
                    const Team& team, const Row& row) const {
    const char* ahead = cache_.values_at(at, block * kLanes);
    const uint32_t* keys = cache_.key_words(at, block, blocks, words_of(team), ahead);
    for (int i = 0; i < queries; i += kTileQueries) {
      const int count = std::min(kTileQueries, queries - i);
      const uint32_t* some[kTileQueries];
      float* rows[kTileQueries];
      for (int q = 0; q < count; ++q) some[q] = query(tile, kv, i + q), rows[q] = row(i + q);
      score_tile_of<C>(count, blocks, kTileSizes)(keys, words_, some, rows,
                                               i || cache_.scales_values() ? nullptr : ahead);
      for (int q = 0; q < count; ++q) cache_.scale_scores(at, block, blocks, rows[q]);
    }
  }

  // Scores of the extra slots that tokens see in a chunk: of all slots of the tile's extra blocks, from which every
  // token takes its own.
  void score_extra(const Layer& layer, const CacheHead& at, const TokenTile& tile, int kv, int chunk,
                   const Team& team) const {
    const int queries = (tile.last - tile.first) * group_;
    for (size_t b = 0; b < tile.extra_blocks.size(); ++b)
      score_blocks(at, tile.extra_blocks[b], 1, tile, kv, queries, team,
                   [&](int i) { return extra_scores_of(i, team) + b * kLanes; });
    for (int t = tile.first; t < tile.last; ++t) {
      const Range range = range_of(layer, t, chunk);
      for (int key = range.shared; key < range.to; ++key) {
        const int place = tiles_.place_of(t, chunk * kChunk + key - visibility_[t].prefix);
        for (int i = (t - tile.first) * group_; i < (t - tile.first + 1) * group_; ++i)
          scores_of(i, team)[key] = extra_scores_of(i, team)[place];
      }
    }
  }

  // Replaces scores by words of weights, e^(score - highest) times what the values must be multiplied with; 0 from key
  // `begin` on for keys that the token does not see.
  void softmax(const CacheHead& at, int token, int chunk, const Range& range, int begin, float* scores,
               const Partial& partial) const {
    const int from = range.from / kLanes * kLanes;
    const Float scale = splat(m_.softcap > 0 ? 1 : m_.scale);  // capped scores are scaled already
    Float highest = splat(-INFINITY), total = {};
    for (int i = from; i < range.to; i += kLanes) {
      Float score = load<Float>(scores + i);
      if (m_.softcap > 0) score = splat(m_.softcap) * tanh_of(score * splat(m_.scale / m_.softcap));
      if (i < range.from || i + kLanes > range.to) {
        const Int place = kIota + splat(i);
        score = select((place >= splat(range.from)) & (place < splat(range.to)), score, splat(-INFINITY));
      }
      if (m_.softcap > 0 || i < range.from || i + kLanes > range.to) store(scores + i, score);
      highest = larger(highest, score);
    }
    *partial.highest = largest(highest);
    const Float top = splat(*partial.highest);
    std::memset((uint32_t*)scores + begin / C::kDepth, 0, 4 * (size_t)(from - begin) / C::kDepth);
    for (int i = from; i < range.to; i += kLanes) {
      float e[kLanes];
      const Float weight = exponential((load<Float>(scores + i) - top) * scale);
      total += weight;
      store(e, cache_.scales_values() ? weight * value_scales(at, token, chunk * kChunk + i) : weight);
      C::pack(e, kLanes, (uint32_t*)scores + i / C::kDepth);
    }
    *partial.total = sum(total);
  }

  // Scales of the values of 16 keys; 0 past the last one that the token sees.
  Float value_scales(const CacheHead& at, int token, int key) const {
    const VisibleKeys& keys = visibility_[token];
    if (key + kLanes <= keys.prefix) return load<Float>(cache_.value_scales(at) + key);
    float scales[kLanes];
    for (int i = 0; i < kLanes; ++i)
      scales[i] = key + i < keys.length ? cache_.value_scales(at)[keys.slot(key + i)] : 0;
    return load<Float>(scales);
  }

  // One query head of a token, and its weighted sum of a chunk's values.
  struct Query {
    int token;
    Range range;
    const uint32_t* weights;
    float* mixed;
  };

  // Queries that share the loads of values: as many whole groups as fit in a tile, or an equal part of a group.
  int queries_per_mix() const {
    if (group_ <= kTileQueries) return kTileQueries / group_ * group_;
    const int parts = (group_ + kTileQueries - 1) / kTileQueries;
    return (group_ + parts - 1) / parts;
  }

  // Weighted sums over values from .. of a chunk.
  void mix(const CacheHead& at, int chunk, int from, const Query* queries, int count, const Team& team) const {
    int most = 0;
    for (int i = 0; i < count; ++i) most = std::max(most, queries[i].range.shared);
    const int slot = chunk * kChunk + from;
    const char* ahead = cache_.keys_at(at, slot / kChunk * kChunk + kChunk);
    const uint32_t* values = cache_.value_words(at, slot, most - from, words_of(team), ahead);
    values -= (size_t)from / C::kDepth * m_.head_dim;
    for (int i = 0; i < count; i += queries_per_mix())
      mix_some(at, values, chunk, from, queries + i, std::min(queries_per_mix(), count - i),
               i || cache_.scales_values() ? nullptr : ahead);
  }

  void mix_some(const CacheHead& at, const uint32_t* values, int chunk, int from, const Query* queries, int count,
                const char* ahead) const {
    int shared = kChunk;
    const uint32_t* weights[kTileQueries];
    for (int q = 0; q < count; ++q)
      shared = std::min(shared, queries[q].range.shared), weights[q] = queries[q].weights;
    const int begin = from / C::kDepth, end = std::max(begin, shared / C::kDepth);
    for (int first = 0; first < m_.head_dim; first += kTileBlocks * kLanes) {
      const int vectors = std::min(kTileBlocks, (m_.head_dim - first) / kLanes);
      float* mixed[kTileQueries];
      for (int q = 0; q < count; ++q) mixed[q] = queries[q].mixed + first;
      mix_tile_of<C>(count, vectors, kTileSizes)(values + first, m_.head_dim, begin, end, weights, mixed,
                                             first ? nullptr : ahead);
    }
    for (int q = 0; q < count;) {  // what the queries do not share: their last contiguous values and their extra slots
      const int same = q;
      while (q < count && queries[q].token == queries[same].token) ++q;
      for (int i = end; i * C::kDepth < queries[same].range.to; ++i) mix_word(at, chunk, i, queries + same, q - same);
    }
  }

  // Adds word i of a chunk's values to the sums of some heads of one token.
  void mix_word(const CacheHead& at, int chunk, int i, const Query* queries, int count) const {
    const VisibleKeys& keys = visibility_[queries[0].token];
    int slots[C::kDepth];
    for (int d = 0; d < C::kDepth; ++d) {
      const int key = chunk * kChunk + i * C::kDepth + d;
      slots[d] = key < keys.length ? keys.slot(key) : -1;
    }
    for (int first = 0; first < m_.head_dim; first += kLanes) {
      const Word value = cache_.value_word(at, slots, first);
      for (int q = 0; q < count; ++q) {
        float* sum = queries[q].mixed + first;
        store(sum, C::step(load<Float>(sum), value, splat(queries[q].weights[i])));
      }
    }
  }

  const Model& m_;
  const Visibility& visibility_;
  const CacheLayout<C> cache_;
  const int words_, group_, tile_tokens_, tile_queries_;
  const TokenTiles tiles_;
  const int chunks_;
  const bool splits_text_;  // whether chunks of one text are shared among threads
  const Buffer<uint32_t> queries_;
  const size_t scratch_size_;
  const Buffer<float> scratch_;
  const Buffer<float> partials_;  // [token, head, chunk], where the text is split
  mutable std::atomic<int> next_unit_{0};
};

}  // namespace
