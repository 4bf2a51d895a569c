// Attention of new tokens over the key-value cache.
//
// Keys of a token are numbered in sequence order, and numbers are cut into chunks of kChunk keys. A chunk gives a
// partial result per query: the largest score, the sum of e^(score - largest), and the values weighted with these.
// Partial results are merged in the order of the chunks (online softmax: Milakov and Gimelshein, arXiv 1805.02867), by
// one thread or, for few tokens over long texts, after several threads have computed them (Flash-Decoding, Dao et al.
// 2023). The arithmetic is the same in both cases, so a token's result depends on its own keys only.

#pragma once

#include <vector>

#include "attention_products.h"
#include "cache.h"
#include "interface.h"
#include "linear.h"
#include "pages.h"
#include "precisions.h"
#include "row_ops.h"
#include "threads.h"

namespace {

// The cache slots that a token attends to, in sequence order, `length` in all: slots 0 .. prefix - 1, then
// `extra_slots`. Where the token leaves pages out, slots are numbered without these, as in `CacheHead`: the first
// `selected` are those of selected pages, and `hidden` slots are left out.
struct VisibleKeys {
  int32_t length, prefix;
  const int32_t* extra_slots;
  int32_t selected = 0, hidden = 0;
  int slot(int index) const { return index < prefix ? index : extra_slots[index - prefix] - hidden; }
};

VisibleKeys visible_keys_of(const Layout& layout, int token) {
  const int32_t* extra_slots = layout.extra_slots + (size_t)token * layout.max_extra_slots;
  int count = 0;
  while (count < layout.max_extra_slots && extra_slots[count] >= 0) ++count;
  return {layout.visible_prefix[token] + count, layout.visible_prefix[token], extra_slots};
}

// The same without the pages that the token leaves out.
VisibleKeys selected_keys_of(const Layout& layout, int token, const Cache& cache) {
  VisibleKeys keys = visible_keys_of(layout, token);
  if (!layout.in_pages || !layout.in_pages[token]) return keys;
  const int position = layout.position[token], optional = optional_slots(cache, position, keys.prefix),
            selected = kept_pages(cache, position, optional) * kPage;
  if (selected >= optional) return keys;
  keys.selected = selected, keys.hidden = optional - selected;
  keys.length -= keys.hidden, keys.prefix -= keys.hidden;
  return keys;
}

// The visible keys of every new token.
class Visibility {
 public:
  Visibility(const Layout& layout, const Cache& cache)
      : layout_(layout), keys_(buffer<VisibleKeys>((size_t)layout.count)) {
    for (int i = 0; i < layout.count; ++i) keys_[(size_t)i] = selected_keys_of(layout, i, cache);
  }
  const VisibleKeys& operator[](int token) const { return keys_[(size_t)token]; }
  int longest() const {
    int length = 0;
    for (int i = 0; i < layout_.count; ++i) length = std::max(length, (*this)[i].length);
    return length;
  }
  // Most slots that a token leaves out; 0: none leaves any out.
  int most_hidden() const {
    int most = 0;
    for (int i = 0; i < layout_.count; ++i) most = std::max(most, (*this)[i].hidden);
    return most;
  }
  const Layout& layout() const { return layout_; }

 private:
  const Layout& layout_;
  const Buffer<VisibleKeys> keys_;
};

// New tokens first .. last - 1, all of one cache row, which read the keys and values together.
struct TokenTile {
  int first, last;
  int packed;                     // first slots that all of them read from packed groups
  std::vector<int> extra_groups;  // groups of 16 slots that hold the tokens' extra slots
};

// The tokens of a pass in tiles, and the place of every extra slot among the groups of its tile.
class TokenTiles {
 public:
  // packed(t): first slots that token t reads from packed groups.
  template <class Packed>
  TokenTiles(const Visibility& visibility, int tokens_per_tile, const Packed& packed)
      : width_(visibility.layout().max_extra_slots), places_((size_t)visibility.layout().count * width_) {
    const Layout& layout = visibility.layout();
    for (int t = 0; t < layout.count; ++t) {
      const bool hides = visibility[t].hidden || (t && visibility[t - 1].hidden);
      if (tiles_.empty() || layout.row[t] != layout.row[t - 1] || t - tiles_.back().first == tokens_per_tile ||
          packed(t) != tiles_.back().packed || hides)
        tiles_.push_back({t, t, packed(t), {}});
      tiles_.back().last = t + 1;
      const VisibleKeys& keys = visibility[t];
      for (int i = 0; i < keys.length - keys.prefix; ++i)
        places_[(size_t)t * width_ + i] = place(tiles_.back().extra_groups, keys.slot(keys.prefix + i));
    }
    for (const TokenTile& tile : tiles_) most_groups_ = std::max(most_groups_, (int)tile.extra_groups.size());
  }
  const std::vector<TokenTile>& all() const { return tiles_; }
  int most_extra_groups() const { return most_groups_; }
  // The number of a token's extra slot among those of its tile's groups.
  int place_of(int token, int extra) const { return places_[(size_t)token * width_ + extra]; }

 private:
  static int place(std::vector<int>& groups, int slot) {
    size_t i = 0;
    while (i < groups.size() && groups[i] != slot / kLanes) ++i;
    if (i == groups.size()) groups.push_back(slot / kLanes);
    return (int)i * kLanes + slot % kLanes;
  }
  const int width_;
  std::vector<int> places_;
  std::vector<TokenTile> tiles_;
  int most_groups_ = 0;
};

// The result of a query over some of its keys.
struct Partial {
  float* mixed;    // [head_dim]: values weighted with e^(score - highest)
  float* highest;  // the largest score
  float* total;    // sum of e^(score - highest); 0: the query sees none of these keys
};

// The results of the queries of a tile.
struct Partials {
  float* first;
  size_t stride;
  int head_dim;
  Partial operator[](int i) const {
    float* at = first + i * stride;
    return {at, at + head_dim, at + head_dim + 1};
  }
};

// The attention of a decoder block between its qkv product and its output product. C: precision of keys and values.
template <class C>
class Attention {
 public:
  Attention(const Model& model, const Visibility& visibility, const Cache& cache, const Team& team)
      : m_(model),
        visibility_(visibility),
        cache_(cache, model.cache_heads, model.head_dim),
        pages_(cache, cache_, model.head_dim),
        words_(model.head_dim / C::kDepth),
        row_size_(row_place(model.head_dim)),
        group_(model.heads / model.kv_heads),
        tile_tokens_(tokens_of_tile(visibility.layout(), team)),
        tile_queries_(tile_tokens_ * group_),
        step_words_(words_ % kTileWords ? kTileWords / 2 : kTileWords),
        tiles_(visibility, tile_tokens_, [this](int t) { return packed_for(t); }),
        chunks_((visibility.longest() + kChunk - 1) / kChunk),
        splits_text_(chunks_ > 1 && team.threads > 1 &&
                     (int)tiles_.all().size() * model.kv_heads < kUnitsPerThread * team.threads),
        most_hidden_(visibility.most_hidden()),
        queries_(buffer<uint32_t>((size_t)visibility.layout().count * model.heads * row_size_)),
        parts_(buffer<uint32_t>(most_hidden_ ? (size_t)visibility.layout().count * model.heads * row_size_ * 2 : 0)),
        selected_(buffer<int32_t>(most_hidden_ ? (size_t)visibility.layout().count * model.kv_heads * pages_.budget()
                                               : 0)),
        scratch_size_(scratch_size()),
        scratch_(buffer<float>(team.threads * scratch_size_)),
        partials_(buffer<float>(splits_text_ ? (size_t)visibility.layout().count * model.heads * chunks_ *
                                                   partial_size()
                                             : 0)) {}

  // Norms and rotates queries and keys, writes keys and values to the cache, and keeps the queries for `attend`.
  void rotate_and_store(const Layer& layer, int index, const float* qkv, const Team& team, int first_head = 0) const {
    if (team.thread == 0) next_unit_.store(0, std::memory_order_relaxed);
    const int all = m_.heads + 2 * m_.cache_heads, heads = (layer.reads_keys ? m_.heads : all) - first_head;
    const auto [from, to] = team.share(visibility_.layout().count * heads);
    for (int i = from; i < to; ++i) {
      const int token = i / heads, head = first_head + i % heads;
      rotate_and_store_head(layer, index, token, head, qkv + ((size_t)token * all + head) * m_.head_dim, team);
    }
  }

  // Packs the groups of keys and values that the pass is the first to read packed; ends with a barrier.
  void pack(int index, const Team& team) const {
    if (!cache_.packed().any()) return;
    const Layout& layout = visibility_.layout();
    for (int first = 0, last = 0, to = 0; first < layout.count; first = last, to = 0) {
      for (last = first; last < layout.count && layout.row[last] == layout.row[first]; ++last)
        to = std::max(to, packed_for(last));
      const int row = layout.row[first], from = cache_.packed().packed_slots(row),
                groups = std::max(0, to - from) / kGroupSlots;
      const auto [begin, end] = team.share(groups * m_.cache_heads);
      for (int i = begin; i < end; ++i)
        cache_.pack(cache_.head(index, row, i % m_.cache_heads), from + i / m_.cache_heads * kGroupSlots);
    }
    team.barrier();
  }

  // Notes the bounds of the pages of keys that no earlier pass has noted.
  void note_pages(int index, const Team& team) const {
    if (!pages_.any()) return;
    const Layout& layout = visibility_.layout();
    for (int first = 0, last = 0, to = 0; first < layout.count; first = last, to = 0) {
      for (last = first; last < layout.count && layout.row[last] == layout.row[first]; ++last)
        to = std::max(to, optional_for(last));
      const int row = layout.row[first], known = pages_.known_slots(row), count = std::max(0, to - known) / kPage;
      const auto [begin, end] = team.share(count * m_.cache_heads);
      for (int i = begin; i < end; ++i)
        pages_.note(cache_.head(index, row, i % m_.cache_heads), known + i / m_.cache_heads * kPage, words_of(team));
    }
  }

  // Chooses the pages of every token that leaves some out; ends with a barrier where there are such tokens.
  void select_pages(int index, const Team& team) const {
    if (!most_hidden_) return;
    team.barrier();
    const Layout& layout = visibility_.layout();
    const auto [from, to] = team.share(layout.count * m_.kv_heads);
    for (int i = from; i < to; ++i) {
      const int token = i / m_.kv_heads, kv = i % m_.kv_heads;
      const VisibleKeys& keys = visibility_[token];
      if (!keys.hidden) continue;
      const Rows parts = {parts_.get() + 2 * place(token, kv) * row_size_, row_size_};
      pages_.select(cache_.head(index, layout.row[token], kv % m_.cache_heads), (keys.selected + keys.hidden) / kPage,
                    keys.selected / kPage, parts, group_, words_of(team), selected_of(token, kv));
    }
    team.barrier();
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
      const auto run = [&] {
        if (splits_text_)
          attend_chunk(layer, index, tile, kv, unit % parts, team, chunk_partials(place(tile.first, kv), unit % parts));
        else
          attend_tile(layer, index, tile, kv, out, team);
      };
      if constexpr (kInTiles) {
        const TileScope scope(TileRows(queries_of(tile)).rows, step_words_);
        run();
      } else {
        run();
      }
    }
    if (!splits_text_) return;
    team.barrier();
    const auto [from, to] = team.share(visibility_.layout().count * m_.heads);
    for (int i = from; i < to; ++i) merge_chunks(layer, i / m_.heads, i % m_.heads, out);
  }

 private:
  using Format = RowFormat<C>;
  // Where number i of a row of queries or weights lies, in words of 4 bytes.
  static size_t row_place(int i) { return (size_t)(i / C::kDepth) * Format::kWordSize; }

  static constexpr bool kInTiles = kHasTiles && std::is_same_v<C, Bfloat16>;  // with AMX's tiles
  static constexpr int kAligned = (kInTiles ? kTileWords : kLanes / C::kDepth) * C::kDepth;  // keys
  static constexpr int kChunk = 256;        // keys
  static constexpr int kMaxQueries = 48;    // queries of a tile of tokens: their scores stay in the first-level cache
  static_assert(kMaxGroup <= kMaxQueries && kChunk % kCacheBlock == 0 && kCacheBlock % kAligned == 0);
  static constexpr int kUnitsPerThread = 3; // tiles and heads that keep the threads equally busy

  // Tokens of a tile: as many as it has room for, or fewer where the threads would be unequally busy.
  int tokens_of_tile(const Layout& layout, const Team& team) const {
    int longest = 1;
    std::vector<int> runs;  // tokens of every row
    for (int t = 0; t < layout.count; ++t) {
      if (!t || layout.row[t] != layout.row[t - 1]) runs.push_back(0);
      longest = std::max(longest, ++runs.back());
    }
    int tokens = std::min(longest, kMaxQueries / group_);
    for (; tokens > 2; tokens = (tokens + 1) / 2) {
      int units = 0;
      for (int run : runs) units += (run + tokens - 1) / tokens * m_.kv_heads;
      if (units % team.threads == 0 || units >= kUnitsPerThread * team.threads) break;
    }
    return tokens;
  }

  int packed_for(int token) const {
    return cache_.packed().slots_for(visibility_.layout().position[token], visibility_[token].prefix);
  }

  int optional_for(int token) const {
    const VisibleKeys& keys = visibility_[token];
    return pages_.optional_for(visibility_.layout().position[token], keys.prefix + keys.hidden);
  }
  int32_t* selected_of(int token, int kv) const {
    return selected_.get() + ((size_t)token * m_.kv_heads + kv) * pages_.budget();
  }
  // A key-value head as the tokens of a tile see it.
  CacheHead head_of(const TokenTile& tile, int index, int kv) const {
    CacheHead at = cache_.head(index, visibility_.layout().row[tile.first], kv % m_.cache_heads);
    const VisibleKeys& keys = visibility_[tile.first];
    if (keys.hidden)
      at.pages = selected_of(tile.first, kv), at.selected = keys.selected, at.hidden = keys.hidden;
    return at;
  }

  size_t partial_size() const { return (size_t)m_.head_dim + kLanes; }

  // Memory of a thread: scores of a chunk and of the extra groups, partial results of a chunk and merged ones, a head,
  // keys and values of a chunk that are not stored as words, and the gathered values of a step.
  size_t scratch_size() const {
    const size_t per_query = kChunk + (size_t)tiles_.most_extra_groups() * kLanes + 2 * partial_size();
    return tile_queries_ * per_query + (size_t)round_up(m_.head_dim, kPanel) +
           std::max(cache_.scratch_words(kChunk), pages_.scratch_words(most_slots())) +
           (kInTiles ? (size_t)(kTileWords * m_.head_dim) : 0);
  }
  int most_slots() const { return visibility_.longest() + most_hidden_; }
  float* scratch(const Team& team) const { return scratch_.get() + team.thread * scratch_size_; }
  float* scores_of(int i, const Team& team) const { return scratch(team) + (size_t)i * kChunk; }
  int extra_stride() const { return tiles_.most_extra_groups() * kLanes; }
  float* extra_scores_of(int i, const Team& team) const {
    return scratch(team) + (size_t)tile_queries_ * kChunk + (size_t)i * extra_stride();
  }
  // Of a tile's queries: of one chunk (which = 0), and merged (which = 1).
  Partials own_partials(int which, const Team& team) const {
    float* first = scratch(team) + (size_t)tile_queries_ * (kChunk + extra_stride());
    return {first + (size_t)(which * tile_queries_) * partial_size(), partial_size(), m_.head_dim};
  }
  float* head_of(const Team& team) const {
    return scratch(team) + (size_t)tile_queries_ * (kChunk + extra_stride() + 2 * partial_size());
  }
  uint32_t* words_of(const Team& team) const { return (uint32_t*)head_of(team) + round_up(m_.head_dim, kPanel); }
  uint32_t* values_of(const Team& team) const { return words_of(team) + cache_.scratch_words(kChunk); }

  // Where queries and their partial results lie: [key-value head][token][head of the group], so that those of a tile
  // are contiguous.
  size_t place(int token, int kv) const { return ((size_t)kv * visibility_.layout().count + token) * group_; }
  int queries_of(const TokenTile& tile) const { return (tile.last - tile.first) * group_; }
  const uint32_t* queries_at(size_t place) const { return queries_.get() + place * row_size_; }

  // Of the queries from a place on, over a chunk, where the text is split.
  Partials chunk_partials(size_t place, int chunk) const {
    return {partials_.get() + (place * chunks_ + chunk) * partial_size(), chunks_ * partial_size(), m_.head_dim};
  }

  void rotate_and_store_head(const Layer& layer, int index, int token, int head, const float* source,
                             const Team& team) const {
    const Layout& layout = visibility_.layout();
    const int dim = m_.head_dim, half = m_.rotary_dim / 2;
    float* x = head_of(team);
    std::memcpy(x, source, 4 * (size_t)dim);
    if (head < m_.heads + m_.cache_heads) {
      const float* norm = head < m_.heads ? layer.q_norm : layer.k_norm;
      if (norm && m_.qk_norm_over == kOneHead) normalize(x, dim, norm, m_.eps, x);
      const float *cos = layer.cos + (size_t)layout.position[token] * half,
                  *sin = layer.sin + (size_t)layout.position[token] * half;
      for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
      }
      if (norm && m_.qk_norm_over == kRotatedHead) normalize(x, dim, norm, m_.eps, x);
    } else if (layer.v_norm) {
      normalize(x, dim, layer.v_norm, m_.eps, x);
    }
    if (head < m_.heads && layer.query_scale)
      for (int i = 0; i < dim; ++i) x[i] *= layer.query_scale[layout.position[token]];
    if (head < m_.heads && layout.queries)
      std::memcpy(layout.queries + (((size_t)index * layout.count + token) * m_.heads + head) * dim, x,
                  4 * (size_t)dim);
    cache_.rotate(x);
    if (head < m_.heads) {
      const size_t query = place(token, head / group_) + head % group_;
      Format::pack(x, dim, queries_.get() + query * row_size_);
      if (visibility_[token].hidden) store_parts(x, parts_.get() + 2 * query * row_size_);
      return;
    }
    const auto at = cache_.head(index, layout.row[token], (head - m_.heads) % m_.cache_heads);
    if (head < m_.heads + m_.cache_heads)
      cache_.store_key(at, layout.slot[token], x);
    else
      cache_.store_value(at, layout.slot[token], x);
  }

  // The positive numbers of a query, then its negative ones, each with zeros in place of the others.
  void store_parts(const float* x, uint32_t* out) const {
    float part[kMaxHeadDim];
    for (int i = 0; i < m_.head_dim; ++i) part[i] = std::max(x[i], 0.0f);
    Format::pack(part, m_.head_dim, out);
    for (int i = 0; i < m_.head_dim; ++i) part[i] = std::min(x[i], 0.0f);
    Format::pack(part, m_.head_dim, out + row_size_);
  }

  int first_visible(const Layer& layer, int token) const {
    const int length = visibility_[token].length;
    if (layer.chunked && layer.window) return (length - 1) / layer.window * layer.window;
    const int32_t* ends = visibility_.layout().window_end;
    return layer.window ? std::max(0, (ends ? ends[token] : length) - layer.window) : 0;
  }

  // All chunks of a tile's text, one after the other.
  void attend_tile(const Layer& layer, int index, const TokenTile& tile, int kv, float* out, const Team& team) const {
    const int queries = queries_of(tile);
    const Partials later = own_partials(0, team), merged = own_partials(1, team);
    for (int i = 0; i < queries; ++i) *merged[i].total = 0;
    int begin = visibility_[tile.first].length, end = 0;
    for (int t = tile.first; t < tile.last; ++t)
      begin = std::min(begin, first_visible(layer, t)), end = std::max(end, visibility_[t].length);
    for (int chunk = begin / kChunk; chunk * kChunk < end; ++chunk) {
      attend_chunk(layer, index, tile, kv, chunk, team, later);
      for (int i = 0; i < queries; ++i) merge(later[i], merged[i]);
    }
    for (int i = 0; i < queries; ++i)
      finish(layer, tile.first + i / group_, kv * group_ + i % group_, merged[i], out);
  }

  // A token's head from the partial results of all chunks.
  void merge_chunks(const Layer& layer, int token, int head, float* out) const {
    const size_t first = place(token, head / group_) + head % group_;
    const Partial merged = chunk_partials(first, 0)[0];
    const int chunks = (visibility_[token].length + kChunk - 1) / kChunk;
    for (int chunk = 1; chunk < chunks; ++chunk) merge(chunk_partials(first, chunk)[0], merged);
    finish(layer, token, head, merged, out);
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
      store_operand(reader(layer.output).operand, out + (size_t)token * m_.heads * m_.head_dim, head * m_.head_dim + i,
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

  // Partial results of a tile's queries over one chunk of their keys.
  void attend_chunk(const Layer& layer, int index, const TokenTile& tile, int kv, int chunk, const Team& team,
                    const Partials& partials) const {
    const CacheHead at = head_of(tile, index, kv);
    int from = kChunk, shared = 0;
    bool has_extra = false;
    for (int t = tile.first; t < tile.last; ++t) {
      const Range range = range_of(layer, t, chunk);
      if (range.empty()) continue;
      from = std::min(from, range.from / kAligned * kAligned), shared = std::max(shared, range.shared);
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
        const Partial partial = partials[i];
        if (range.empty()) {
          *partial.total = 0;
          if (kInTiles) clear_weights(scores_of(i, team), 0, kChunk);
          continue;
        }
        softmax(at, t, chunk, range, from, scores_of(i, team), partial);
        queries[count++] = {t, range, (const uint32_t*)scores_of(i, team), partial.mixed};
      }
    }
    if (!count) return;
    if constexpr (kInTiles)
      if (!at.pages) return mix_in_tiles(layer, at, tile, chunk, from, partials, team);
    mix(at, tile.packed, chunk, from, queries, count, team);
  }

  // Scores of keys from .. shared - 1 of a chunk, rounded up to whole groups of 16.
  void score_contiguous(const CacheHead& at, const TokenTile& tile, int kv, int chunk, int from, int shared,
                        const Team& team) const {
    for (int key = from, groups; key < shared; key += groups * kLanes) {
      const int slot = chunk * kChunk + key, end = slot < tile.packed ? tile.packed - slot : kChunk;
      groups = std::min({kTileVectors, (std::min(shared - key, end) + kLanes - 1) / kLanes,
                         at.pages ? kTileVectors : rest_of_run(at, key) / kLanes});
      score_groups(at, chunk * kChunk + key, groups, tile, kv, team, {scores_of(0, team) + key, kChunk});
    }
  }

  // Keys from one of a chunk to the end of those that follow one another in the cache.
  static int rest_of_run(const CacheHead& at, int key) { return at.run() - key % at.run(); }

  // The words of groups of 16 keys from a slot on: those of pages are copied, so that they follow one another.
  const uint32_t* key_words(const CacheHead& at, int slot, int groups, int packed, const Team& team,
                            const char* ahead) const {
    uint32_t* scratch = words_of(team);
    if (!at.pages) return cache_.key_words(at, slot, groups, packed, scratch, ahead);
    const size_t size = (size_t)words_ * kLanes;
    for (int g = 0; g < groups; ++g) {
      uint32_t* out = scratch + g * size;
      const uint32_t* words = cache_.key_words(at, slot + g * kLanes, 1, packed, out, ahead);
      const char* values = cache_.values_at(at, slot + g * kLanes);
      for (size_t i = 0; words != out && i < size; i += kLanes) {
        __builtin_prefetch(values + 4 * i, 0, 2);
        store(out + i, load<Word>(words + i));
      }
    }
    return scratch;
  }

  // Scores of a tile's queries for groups of 16 keys from a slot on, all in one run of the cache or in pages.
  void score_groups(const CacheHead& at, int slot, int groups, const TokenTile& tile, int kv, const Team& team,
                    const Sums& out) const {
    const int queries = queries_of(tile);
    const char* ahead = cache_.values_at(at, slot);
    const uint32_t* keys = key_words(at, slot, groups, tile.packed, team, ahead);
    const Rows rows = {queries_at(place(tile.first, kv)), row_size_};
    const size_t apart = (size_t)words_ * kLanes;
    if (cache_.widens() || at.pages) ahead = nullptr;
    if constexpr (kInTiles) {
      multiply_columns_in_tiles([&](int s) { return keys + s * step_words_ * kLanes; }, words_ / step_words_,
                                step_words_, kLanes, apart, groups, TileRows(queries), rows, false, out, ahead);
    } else {
      for (int i = 0; i < queries; i += kTileQueries, ahead = nullptr) {
        const int count = std::min(kTileQueries, queries - i);
        const uint32_t* some[kTileQueries];
        float* sums[kTileQueries];
        for (int q = 0; q < count; ++q)
          some[q] = rows.words + (i + q) * rows.stride, sums[q] = out.first + (i + q) * out.stride;
        column_product<C>(count, groups)({keys, kLanes, apart}, words_, some, false, sums, ahead);
      }
    }
    const int run = at.pages ? 1 : groups;
    for (int i = 0; i < queries * groups; i += run) {
      const int first = i % groups * kLanes;
      cache_.scale_scores(at, slot + first, run, out.first + i / groups * out.stride + first);
    }
  }

  // Scores of the extra slots that tokens see in a chunk: of all slots of the tile's extra groups, from which every
  // token takes its own.
  void score_extra(const Layer& layer, const CacheHead& at, const TokenTile& tile, int kv, int chunk,
                   const Team& team) const {
    for (size_t g = 0; g < tile.extra_groups.size(); ++g)
      score_groups(at, tile.extra_groups[g] * kLanes, 1, tile, kv, team,
                   {extra_scores_of(0, team) + g * kLanes, (size_t)extra_stride()});
    for (int t = tile.first; t < tile.last; ++t) {
      const Range range = range_of(layer, t, chunk);
      for (int key = range.shared; key < range.to; ++key) {
        const int place = tiles_.place_of(t, chunk * kChunk + key - visibility_[t].prefix);
        for (int i = (t - tile.first) * group_; i < (t - tile.first + 1) * group_; ++i)
          scores_of(i, team)[key] = extra_scores_of(i, team)[place];
      }
    }
  }

  // Sets words of weights of keys from .. to - 1 to 0.
  static void clear_weights(float* weights, int from, int to) {
    std::memset((uint32_t*)weights + row_place(from), 0, 4 * (row_place(to) - row_place(from)));
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
    clear_weights(scores, begin, from);
    for (int i = from; i < range.to; i += kLanes) {
      float e[kLanes];
      const Float weight = exponential((load<Float>(scores + i) - top) * scale);
      total += weight;
      store(e, cache_.scales_values() ? weight * value_scales(at, token, chunk * kChunk + i) : weight);
      Format::pack(e, kLanes, (uint32_t*)scores + row_place(i));
    }
    if (kInTiles) clear_weights(scores, round_up(range.to, kLanes), kChunk);
    *partial.total = sum(total);
  }

  // Scales of the values of 16 keys; 0 past the last one that the token sees.
  Float value_scales(const CacheHead& at, int token, int key) const {
    const VisibleKeys& keys = visibility_[token];
    const Float factor = splat(cache_.scale_factor());
    if (key + kLanes <= keys.prefix) return load<Float>(cache_.value_scales(at, key)) * factor;
    float scales[kLanes];
    for (int i = 0; i < kLanes; ++i)
      scales[i] = key + i < keys.length ? *cache_.value_scales(at, keys.slot(key + i)) : 0;
    return load<Float>(scales) * factor;
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
  void mix(const CacheHead& at, int packed, int chunk, int from, const Query* queries, int count,
           const Team& team) const {
    int most = 0;
    for (int i = 0; i < count; ++i) most = std::max(most, queries[i].range.shared);
    const ChunkValues values = chunk_values(at, packed, chunk, from, most, team);
    for (int i = 0; i < count; i += queries_per_mix())
      mix_some(at, values, chunk, from, queries + i, std::min(queries_per_mix(), count - i),
               !i && !cache_.widens());
  }

  // The values of a chunk, by runs of so many keys: the words of each, and bytes to prefetch while they are read.
  struct ChunkValues {
    int run;
    const uint32_t* words[kChunk / kPage];
    const char* ahead[kChunk / kPage];
  };

  // The values of keys from .. to - 1 of a chunk; the keys of the next chunk, if there is one, are prefetched
  // meanwhile. packed: first slots that are read from packed groups.
  ChunkValues chunk_values(const CacheHead& at, int packed, int chunk, int from, int to, const Team& team) const {
    ChunkValues out = {at.run(), {}, {}};
    for (int i = from / out.run; i * out.run < to; ++i) {
      const int begin = i * out.run, slot = chunk * kChunk + begin;
      out.ahead[i] = cache_.keys_at(at, cache_.has(at, slot + kChunk) ? slot + kChunk : slot);
      uint32_t* scratch = words_of(team) + (size_t)begin * words_;
      out.words[i] = cache_.value_words(at, slot, std::min(out.run, to - begin), packed, scratch, out.ahead[i]);
    }
    return out;
  }

  // The words of the values from a key of a chunk on, to the end of its run.
  const uint32_t* words_from(const ChunkValues& values, int key) const {
    return values.words[key / values.run] + (size_t)(key % values.run / C::kDepth) * m_.head_dim;
  }

  // Keys from one of a chunk to `end`, or to where the memory of their runs ends.
  int contiguous_keys(const ChunkValues& values, int key, int end) const {
    int stop = key + values.run - key % values.run;
    while (stop < end && values.words[stop / values.run] ==
                             values.words[stop / values.run - 1] + (size_t)(values.run / C::kDepth) * m_.head_dim)
      stop += values.run;
    return std::min(stop, end) - key;
  }

  void mix_some(const CacheHead& at, const ChunkValues& values, int chunk, int from, const Query* queries, int count,
                bool prefetch) const {
    int shared = kChunk;
    const uint32_t* weights[kTileQueries];
    for (int q = 0; q < count; ++q)
      shared = std::min(shared, queries[q].range.shared);
    const int end = std::max(from, shared / C::kDepth * C::kDepth);  // keys in whole words that all queries share
    int key = from;
    do {
      const int keys = contiguous_keys(values, key, end);
      for (int q = 0; q < count; ++q) weights[q] = queries[q].weights + row_place(key);
      for (int first = 0; first < m_.head_dim; first += kTileVectors * kLanes) {
        const int vectors = std::min(kTileVectors, (m_.head_dim - first) / kLanes);
        float* mixed[kTileQueries];
        for (int q = 0; q < count; ++q) mixed[q] = queries[q].mixed + first;
        const Columns columns = {words_from(values, key) + first, (size_t)m_.head_dim, kLanes};
        const int words = keys / C::kDepth;
        const char* ahead = prefetch ? values.ahead[key / values.run] + (size_t)4 * first * words : nullptr;
        column_product<C>(count, vectors)(columns, words, weights, key > from, mixed, ahead);
      }
      key += keys;
    } while (key < end);
    for (int q = 0; q < count;) {  // what the queries do not share: their last contiguous values and their extra slots
      const int same = q;
      while (q < count && queries[q].token == queries[same].token) ++q;
      for (int i = end / C::kDepth; i * C::kDepth < queries[same].range.to; ++i)
        mix_word(at, chunk, i, queries + same, q - same);
    }
  }

  // Adds word i of a chunk's values to the sums of some heads of one token.
  void mix_word(const CacheHead& at, int chunk, int i, const Query* queries, int count) const {
    const VisibleKeys& keys = visibility_[queries[0].token];
    int slots[C::kDepth];
    slots_of_word(keys, chunk, i, slots);
    for (int first = 0; first < m_.head_dim; first += kLanes) {
      const Word value = cache_.value_word(at, slots, first);
      for (int q = 0; q < count; ++q) {
        float* sum = queries[q].mixed + first;
        store(sum, Format::step(load<Float>(sum), value, queries[q].weights + row_place(i * C::kDepth)));
      }
    }
  }

  // Weighted sums over values from .. of a chunk, with AMX's tiles. A step's values are read from the cache for all
  // queries together where no token has extra slots in it, else gathered for each token.
  void mix_in_tiles(const Layer& layer, const CacheHead& at, const TokenTile& tile, int chunk, int from,
                    const Partials& partials, const Team& team) const {
    const int queries = queries_of(tile), step = step_words_ * C::kDepth;  // keys
    int written = 0, together = kChunk;  // keys that lie in the cache; keys of steps for all queries
    for (int t = tile.first; t < tile.last; ++t) {
      const Range range = range_of(layer, t, chunk);
      if (range.empty()) continue;
      written = std::max(written, range.shared);
      if (range.shared < range.to) together = std::min(together, range.shared / step * step);
    }
    together = std::max(from, std::min(together, round_up(written, step)));
    const int whole = std::min(together, std::max(from, written / step * step));
    const ChunkValues values = chunk_values(at, tile.packed, chunk, from, whole, team);
    uint32_t* own = values_of(team);
    if (together > whole) gather(at, {chunk * kChunk + written, chunk * kChunk + written, nullptr}, chunk, whole, own);
    const auto values_at = [&](int s) { return from + s * step < whole ? words_from(values, from + s * step) : own; };
    const Rows weights = {(const uint32_t*)scores_of(0, team), kChunk};
    multiply_columns_in_tiles(values_at, (together - from) / step, step_words_, (size_t)m_.head_dim, kLanes,
                              m_.head_dim / kLanes, TileRows(queries), {weights.words + from / C::kDepth, kChunk},
                              false, {partials.first, partials.stride}, nullptr);
    for (int t = tile.first; t < tile.last; ++t) {
      const Range range = range_of(layer, t, chunk);
      for (int key = together; key < range.to; key += step) {
        gather(at, visibility_[t], chunk, key, own);
        add_own_values((t - tile.first) * group_, queries, weights.words + key / C::kDepth, own, partials);
      }
    }
  }

  // Adds a step's gathered values to the sums of the heads of one token, from query `first` of a tile on. The tile of
  // rows has other queries too, which add zeros.
  void add_own_values(int first, int queries, const uint32_t* weights, const uint32_t* values,
                      const Partials& partials) const {
    const int rows = TileRows(queries).rows, begin = std::min(first, queries - rows);
    alignas(64) uint32_t own[kTileRows * kTileWords] = {};
    for (int h = 0; h < group_; ++h)
      std::memcpy(own + (first - begin + h) * step_words_, weights + (size_t)(first + h) * kChunk,
                  4 * (size_t)step_words_);
    multiply_columns_in_tiles([&](int) { return values; }, 1, step_words_, (size_t)m_.head_dim, kLanes,
                              m_.head_dim / kLanes, TileRows(rows), {own, (size_t)step_words_}, true,
                              {partials.first + begin * partials.stride, partials.stride}, nullptr);
  }

  // The values of a step from a key of a chunk on as words [step_words][head_dim]; 0 for keys that are not visible.
  void gather(const CacheHead& at, const VisibleKeys& keys, int chunk, int key, uint32_t* out) const {
    for (int w = 0; w < step_words_; ++w, out += m_.head_dim) {
      int slots[C::kDepth];
      slots_of_word(keys, chunk, key / C::kDepth + w, slots);
      for (int i = 0; i < m_.head_dim; i += kLanes) store(out + i, cache_.value_word(at, slots, i));
    }
  }

  // The slots of word i of a chunk's values; -1 for keys that are not visible.
  static void slots_of_word(const VisibleKeys& keys, int chunk, int i, int* slots) {
    for (int d = 0; d < C::kDepth; ++d) {
      const int key = chunk * kChunk + i * C::kDepth + d;
      slots[d] = key < keys.length ? keys.slot(key) : -1;
    }
  }

  const Model& m_;
  const Visibility& visibility_;
  const CacheLayout<C> cache_;
  const Pages<C> pages_;
  const int words_;
  const size_t row_size_;  // of a query, in words of 4 bytes
  const int group_, tile_tokens_, tile_queries_;
  const int step_words_;  // words that one of AMX's instructions sums
  const TokenTiles tiles_;
  const int chunks_;
  const bool splits_text_;  // whether chunks of one text are shared among threads
  const int most_hidden_;  // slots that a token leaves out
  const Buffer<uint32_t> queries_;
  const Buffer<uint32_t> parts_;     // of the queries by sign, where tokens leave pages out
  const Buffer<int32_t> selected_;   // [token, head, page], likewise
  const size_t scratch_size_;
  const Buffer<float> scratch_;
  const Buffer<float> partials_;  // [token, head, chunk], where the text is split
  mutable std::atomic<int> next_unit_{0};
};

}  // namespace
