// Products of a weight's panels with rows of tokens, tile by tile.

#pragma once

#include "linear.h"
#include "product.h"

namespace {

inline bool has_blocks(const Weight& w) { return w.kind > kInt8; }

inline bool is_by_input(const Weight& w) { return w.kind >= kFloat32ByInput; }

inline void apply_epilogue(const Output& output, const Weight& w, const Float* tile, int panel, int token) {
  Float v[2] = {tile[0], tile[1]};
  if (w.bias)
    for (int i = 0; i < 2; ++i) v[i] += load<Float>(w.bias + kPanel * panel + kLanes * i);
  if (output.added)
    for (int i = 0; i < 2; ++i)
      v[i] += load<Float>(output.added + (size_t)token * output.added_width + kPanel * panel + kLanes * i);
  float* row = output.y + (size_t)token * output.stride;
  if (output.epilogue == Epilogue::kGate) {
    store_operand(output.operand, row, kLanes * panel, gated(v[0], v[1], output.activation));
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const int first = kPanel * panel + kLanes * i, remaining = output.width - first;
    if (remaining <= 0) return;
    if (output.epilogue == Epilogue::kSquare) {
      const Float positive = larger(v[i], Float{});
      store_operand(output.operand, row, first, positive * positive);
      continue;
    }
    if (output.epilogue == Epilogue::kAdd) v[i] += load_part<Float>(row + first, remaining);
    store_part(row + first, v[i], remaining);
  }
}

using Tile = void (*)(const uint32_t*, const uint32_t*, size_t, int, const char*, Float*);

template <class P, Prefetch kPrefetch, size_t... T>
Tile tile_of(int tokens, std::index_sequence<T...>) {
  constexpr Tile all[] = {P::template tile<T + 1, kPrefetch>...};
  return all[tokens - 1];
}

template <class P, Prefetch kPrefetch>
Tile pick_tile(int tokens) {
  return tile_of<P, kPrefetch>(tokens, std::make_index_sequence<P::kMaxTokens>());
}

const uint32_t* first_panel(const Weight& w, const Team& team) {
  if (is_by_input(w)) return w.words;
  return w.words + team.share((w.outputs + kPanel - 1) / kPanel).first * panel_words(w);
}

// Tokens are multiplied with a panel in blocks of nearly equal size, at most `most` each: block b of them.
struct Blocks {
  int tokens, count;
  Blocks(int tokens, int most) : tokens(tokens), count((tokens + most - 1) / most) {}
  int size(int b, int first) const { return (tokens - first + count - b - 1) / (count - b); }
};

constexpr int kPageBytes = 4096;

// Whether units of a weight's inputs can be read apart: where they are not rotated together, and are whole blocks.
inline bool reads_runs(const Weight& w, int unit) {
  if (w.kind == kInt8 || w.kind == kTwoOfFour) return false;
  if (!has_blocks(w)) return unit % 2 == 0;
  bool whole = false;
  with_blocks(w.kind, [&](auto k) { whole = unit % decltype(k)::Type::kInputs == 0; });
  return whole;
}

// Adds the products of a panel with the inputs of some runs.
inline void multiply_runs(const Weight& w, const Runs& runs, const uint32_t* panel, const Rows& x, Tile tile,
                          Float* out) {
  const size_t panel_step = panel_words(w.kind, runs.unit), row_step = row_words(w.operand, runs.unit);
  for (int r = 0; r < runs.count; ++r) {
    const int first = runs.bounds[2 * r], last = runs.bounds[2 * r + 1];
    const int soon = r + 1 < runs.count ? runs.bounds[2 * r + 2] : first;
    tile(panel + first * panel_step, x.words + first * row_step, x.stride, (last - first) * runs.unit,
         (const char*)(panel + soon * panel_step), out);
  }
}

// y = x W^T for this thread's panels. A panel stays in the cache while all tokens are multiplied with it in blocks.
//
// With tiles of whole panels, two blocks prefetch half of the next panel's lines each (after the last panel: those of
// the next layer's first panel). With halves (AVX2) the first block prefetches all lines of a page ahead.
template <class P>
void multiply_tiles(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
                    const Team& team) {
  const size_t size = panel_words(w);
  const auto [from, to] = team.share((w.outputs + kPanel - 1) / kPanel);
  // Quantised panels are fetched sooner by two small blocks than by one large block.
  const bool halves = P::kSplitsTokens && tokens > 3 && tokens <= P::kMaxTokens;
  const Blocks blocks(tokens, halves ? (tokens + 1) / 2 : P::kMaxTokens);
  auto pick = pick_tile<P, kBoundByMemory>;
  if constexpr (kWholePanels && P::kPrefetchesAhead)
    if (tokens > P::kFewTokens)
      pick = blocks.count == 2 ? pick_tile<P, Prefetch::kNext> : pick_tile<P, Prefetch::kAhead>;
  Float out[2 * P::kMaxTokens];
  const Runs* runs = output.runs && reads_runs(w, output.runs->unit) ? output.runs : nullptr;
  for (int p = from; p < to; ++p) {
    if (output.skips(p)) continue;
    const uint32_t* panel = w.words + p * size;
    const uint32_t* next = p + 1 < to ? panel + size : following ? first_panel(*following, team) : panel;
    for (int b = 0, t = 0; b < blocks.count; ++b) {
      const int count = blocks.size(b, t);
      for (int i = 0; i < 2 * count; ++i) out[i] = Float{};
      const char* soon = (const char*)next + 64 * b;
      if constexpr (!P::kPrefetchesAhead) {
        if (blocks.count == 1 || !kWholePanels) soon = (const char*)panel + kPageBytes;
        if (b > 1) soon = (const char*)panel;
      }
      const Tile tile = kWholePanels || !b ? pick(count) : pick_tile<P, Prefetch::kNone>(count);
      if (runs)
        multiply_runs(w, *runs, panel, {x.words + t * x.stride, x.stride}, tile, out);
      else
        tile(panel, x.words + t * x.stride, x.stride, w.inputs, soon, out);
      for (int i = 0; i < count; ++i) apply_epilogue(output, w, out + 2 * i, p, t + i);
      t += count;
    }
  }
}

// How bfloat16 words of blocks are kept that are widened for a product.
using WidenedWords = std::conditional_t<kMultipliesBfloat16 || kWholePanels, Bfloat16, WidenedBfloat16>;

// Groups of K as words of P, for float products.
template <class P, class K>
struct Widened {
  using Product = FloatProduct<P>;
  static constexpr int kChunk = std::is_same_v<K, TwoOfFour> ? 6 : 2, kMostTokens = 5 * Product::kMaxTokens;
  static constexpr int kRowWords = kGroupInputs / P::kDepth, kWords = kRowWords * P::kWeightWords * kPanel;
  static void write(const uint32_t* block, int group, uint32_t* words) { widen_words<P, K>(block, group, words); }
};

// The same for blocks of kind K of which W writes a few groups of a panel at a time into scratch: kChunk of kWords
// words, for up to kMostTokens tokens with kRowWords words per group.
template <class W, class K>
void multiply_widened(const Weight& w, const Rows& x, int tokens, const Output& output, const Team& team) {
  using Product = typename W::Product;
  constexpr int kGroups = K::kInputs / kGroupInputs;  // per block
  alignas(64) uint32_t words[W::kChunk * W::kWords];
  Float out[2 * W::kMostTokens];
  const size_t size = panel_words(w);
  const auto [from, to] = team.share((w.outputs + kPanel - 1) / kPanel);
  const int groups = w.inputs / kGroupInputs;
  for (int p = from; p < to; ++p)
    for (int start = 0; start < tokens && !output.skips(p); start += W::kMostTokens) {
      const Blocks blocks(std::min(W::kMostTokens, tokens - start), Product::kMaxTokens);
      for (int i = 0; i < 2 * blocks.tokens; ++i) out[i] = Float{};
      for (int first = 0; first < groups; first += W::kChunk) {
        const int some = std::min(W::kChunk, groups - first);
        for (int g = first; g < first + some; ++g) {
          const uint32_t* block = w.words + p * size + g / kGroups * K::kWords;
          const int line = g % kGroups * (K::kWords / kGroups);
          prefetch_block<kBoundByMemory>((const char*)(block + 1024 + line), K::kWords / kGroups);
          W::write(block, g % kGroups, words + (g - first) * W::kWords);
        }
        const uint32_t* rows = x.words + start * x.stride + first * W::kRowWords;
        for (int b = 0, t = 0; b < blocks.count; ++b) {
          const int count = blocks.size(b, t);
          pick_tile<Product, Prefetch::kNone>(count)(words, rows + t * x.stride, x.stride, some * kGroupInputs,
                                                     (const char*)words, out + 2 * t);
          t += count;
        }
      }
      for (int i = 0; i < blocks.tokens; ++i) apply_epilogue(output, w, out + 2 * i, p, start + i);
    }
}

}  // namespace
