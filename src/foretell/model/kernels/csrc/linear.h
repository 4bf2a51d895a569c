// Linear layers: a matrix product and its epilogue.

#pragma once

#include "amx.h"
#include "by_input.h"
#include "interface.h"
#include "precisions.h"
#include "quantized.h"
#include "row_ops.h"
#include "threads.h"
#include "two_of_four.h"

namespace {

template <class T>
struct TypeTag {
  using Type = T;
};

// Calls `run` with the TypeTag of what prepares an operand.
template <class Run>
auto with_operand(int32_t operand, const Run& run) {
  switch (operand) {
    case kFloat32Operand:
      return run(TypeTag<FloatProduct<Float32>>());
    case kBfloat16Operand:
      return run(TypeTag<FloatProduct<Bfloat16>>());
    case kInt8Operand:
      return run(TypeTag<Int8>());
    default:
      return run(TypeTag<Int8Blocks>());
  }
}

// Calls `run` with the TypeTag of a kind of blocks.
template <class Run>
auto with_blocks(int32_t kind, const Run& run) {
  switch (kind) {
    case kQ4_0:
      return run(TypeTag<Q4_0>());
    case kQ4_1:
      return run(TypeTag<Q4_1>());
    case kQ5_0:
      return run(TypeTag<Q5_0>());
    case kQ5_1:
      return run(TypeTag<Q5_1>());
    case kQ8_0:
      return run(TypeTag<Q8_0>());
    case kQ4_K:
      return run(TypeTag<Q4_K>());
    case kQ5_K:
      return run(TypeTag<Q5_K>());
    case kQ6_K:
      return run(TypeTag<Q6_K>());
    case kMXFP4:
      return run(TypeTag<MXFP4>());
    case kTwoOfFour:
      return run(TypeTag<TwoOfFour>());
    default:
      return run(TypeTag<Q4_Z>());
  }
}

// Group `group` of a block as words of P, [word of the input][32 outputs], as a panel of P has them.
template <class P, class K>
void widen_words(const uint32_t* block, int group, uint32_t* words) {
  if constexpr (std::is_same_v<K, TwoOfFour>)
    widen_two_of_four<P>(block, words);
  else
    widen_group<P, K>(block, group, words);
}

inline bool has_blocks(const Weight& w) { return w.kind > kInt8; }

// The weight that reads the inputs of a layer: the factor where it has one.
inline const Weight& reader(const Weight& w) { return w.factor ? *w.factor : w; }

inline bool is_by_input(const Weight& w) { return w.kind >= kFloat32ByInput; }

inline size_t row_words(int32_t operand, int in) {
  return with_operand(operand, [&](auto o) { return decltype(o)::Type::row_words(in); });
}

inline bool rounds_each_number(int32_t operand) { return operand <= kBfloat16Operand; }

inline size_t panel_words(int32_t kind, int in) {
  if (kind > kInt8)
    return with_blocks(kind, [&](auto k) { return quantized_panel_words<typename decltype(k)::Type>(in); });
  if (kind == kInt8) return Int8::panel_words(in);
  return kind == kFloat32 ? FloatProduct<Float32>::panel_words(in) : FloatProduct<Bfloat16>::panel_words(in);
}

inline size_t panel_words(const Weight& w) { return panel_words(w.kind, w.stored_inputs ? w.stored_inputs : w.inputs); }

// What is done with a product: it is stored, added to what is there, or becomes an operand of the next product: gated,
// activation(gate) * up, or squared, relu(up)^2.
enum class Epilogue { kStore, kAdd, kGate, kSquare };

// Of the first product of a feed-forward network.
inline Epilogue inner_epilogue(int32_t activation) {
  return activation == kRelu2 ? Epilogue::kSquare : Epilogue::kGate;
}

// Units of a product's inputs that are read, in runs of consecutive ones; the other inputs are zero.
struct Runs {
  int unit, count;
  const int32_t* bounds;  // [count, 2]: first unit, and the one after the last
};

struct Output {
  float* y;
  int stride;
  int width;  // numbers per row of y
  Epilogue epilogue;
  int32_t activation;
  int32_t operand;  // kGate, kSquare: of the next product
  const uint8_t* panels = nullptr;  // 0: this panel is not read, and its outputs are not written; null: all are
  const Runs* runs = nullptr;       // null: all inputs are read
  bool skips(int panel) const { return panels && !panels[panel]; }
};

// Stores 16 numbers, from number `first` of a row on, as operands of the next product: as words where every number is
// rounded by itself, so that `Operands::prepare` is not needed; else as float32.
inline void store_operand(int32_t operand, float* row, int first, Float v) {
  if (operand != kBfloat16Operand) return store(row + first, v);
  float numbers[kLanes];
  store(numbers, v);
  Bfloat16::pack(numbers, kLanes, (uint32_t*)row + first / Bfloat16::kDepth);
}

inline void apply_epilogue(const Output& output, const Weight& w, const Float* tile, int panel, int token) {
  Float v[2] = {tile[0], tile[1]};
  if (w.bias)
    for (int i = 0; i < 2; ++i) v[i] += load<Float>(w.bias + kPanel * panel + kLanes * i);
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

// Rows of words.
struct Rows {
  const uint32_t* words;
  size_t stride;
};

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

// y = x W^T for this thread's panels. A panel stays in the cache while all tokens are multiplied with it in blocks. Two
// blocks prefetch half of the next panel's lines each (after the last panel: those of the next layer's first panel).
template <class P>
void multiply_tiles(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
                    const Team& team) {
  const size_t size = panel_words(w);
  const auto [from, to] = team.share((w.outputs + kPanel - 1) / kPanel);
  // Quantised panels are fetched sooner by two small blocks than by one large block.
  const bool halves = P::kSplitsTokens && tokens > 3 && tokens <= P::kMaxTokens;
  const Blocks blocks(tokens, halves ? (tokens + 1) / 2 : P::kMaxTokens);
  auto pick = pick_tile<P, Prefetch::kHalf>;
  int pages = 1;  // ahead
  if constexpr (P::kPrefetchesAhead) {
    if (tokens > P::kFewTokens)
      pick = blocks.count == 2 ? pick_tile<P, Prefetch::kNext> : pick_tile<P, Prefetch::kAhead>;
  } else if constexpr (P::kFewTokens < P::kMaxTokens) {
    if (tokens > P::kFewTokens && blocks.count == 1) pick = pick_tile<P, Prefetch::kAhead>, pages = 2;
  }
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
      if constexpr (!P::kPrefetchesAhead) {  // lines of a page ahead, or half of those of the next panel
        if (blocks.count == 1) soon = (const char*)panel + pages * kPageBytes;
        if (b > 1) soon = (const char*)panel;
      }
      if (runs)
        multiply_runs(w, *runs, panel, {x.words + t * x.stride, x.stride}, pick(count), out);
      else
        pick(count)(panel, x.words + t * x.stride, x.stride, w.inputs, soon, out);
      for (int i = 0; i < count; ++i) apply_epilogue(output, w, out + 2 * i, p, t + i);
      t += count;
    }
  }
}

// How bfloat16 words of blocks are kept that are widened for a product.
using WidenedWords = std::conditional_t<kMultipliesBfloat16 || kWholePanels, Bfloat16, WidenedBfloat16>;

// The same for blocks of kind K whose numbers are widened to words of P, a few groups of a panel at a time.
template <class P, class K>
void multiply_widened(const Weight& w, const Rows& x, int tokens, const Output& output, const Team& team) {
  constexpr int kChunk = std::is_same_v<K, TwoOfFour> ? 6 : 2;
  constexpr int kMostTokens = 5 * FloatProduct<P>::kMaxTokens, kDepth = P::kDepth;
  constexpr int kGroups = K::kInputs / kGroupInputs;  // per block
  constexpr int kGroupWidened = kGroupInputs / kDepth * P::kWeightWords * kPanel;
  alignas(64) uint32_t words[kChunk * kGroupWidened];
  Float out[2 * kMostTokens];
  const size_t size = panel_words(w);
  const auto [from, to] = team.share((w.outputs + kPanel - 1) / kPanel);
  const int groups = w.inputs / kGroupInputs;
  for (int p = from; p < to; ++p)
    for (int start = 0; start < tokens && !output.skips(p); start += kMostTokens) {
      const Blocks blocks(std::min(kMostTokens, tokens - start), FloatProduct<P>::kMaxTokens);
      for (int i = 0; i < 2 * blocks.tokens; ++i) out[i] = Float{};
      for (int first = 0; first < groups; first += kChunk) {
        const int some = std::min(kChunk, groups - first);
        for (int g = first; g < first + some; ++g) {
          const uint32_t* block = w.words + p * size + g / kGroups * K::kWords;
          const int line = g % kGroups * (K::kWords / kGroups);
          for (int i = 0; i < K::kWords / kGroups; i += 2 * kLanes) __builtin_prefetch(block + 1024 + line + i, 0, 2);
          widen_words<P, K>(block, g % kGroups, words + (g - first) * kGroupWidened);
        }
        const uint32_t* rows = x.words + start * x.stride + first * (kGroupInputs / kDepth);
        for (int b = 0, t = 0; b < blocks.count; ++b) {
          const int count = blocks.size(b, t);
          pick_tile<FloatProduct<P>, Prefetch::kNone>(count)(words, rows + t * x.stride, x.stride, some * kGroupInputs,
                                                             nullptr, out + 2 * t);
          t += count;
        }
      }
      for (int i = 0; i < blocks.tokens; ++i) apply_epilogue(output, w, out + 2 * i, p, start + i);
    }
}

inline bool uses_tiles(const Weight& w, int tokens) {
  if (!kHasTiles || w.operand == kFloat32Operand) return false;
  return w.operand == kBfloat16Operand || tokens >= kTileTokens;
}

// y = x W^T for this thread's panels, with AMX's tiles.
inline void multiply_in_tiles(const Weight& w, const Rows& x, int tokens, const Output& output, const Team& team) {
  const size_t size = panel_words(w);
  const auto [from, to] = team.share((w.outputs + kPanel - 1) / kPanel);
  const TileRows tiles(tokens);
  const TileScope scope(tiles.rows, w.operand == kInt8BlocksOperand ? kGroupWords : kTileWords);
  alignas(64) float sums[kTilesAtOnce * kTileSums];
  alignas(64) uint32_t widened[kTileChunkWords * kPanel];
  for (int p = from; p < to; ++p) {
    if (output.skips(p)) continue;
    const uint32_t* panel = w.words + p * size;
    const auto finish = [&](int token, const Float* out) { apply_epilogue(output, w, out, p, token); };
    if (w.operand == kInt8Operand) {
      multiply_panel_int8(panel, w.inputs, x.words, x.stride, tiles, sums, finish);
    } else if (!has_blocks(w)) {
      const auto words = [&](int first, int) { return panel + kPanel * first; };
      multiply_panel_bfloat16(w.inputs, x.words, x.stride, tiles, sums, words, finish);
    } else {
      with_blocks(w.kind, [&](auto k) {
        using K = typename decltype(k)::Type;
        if constexpr (!std::is_same_v<K, TwoOfFour>)
          if (w.operand == kInt8BlocksOperand)
            return multiply_panel_quantized<K>(panel, w.inputs, x.words, x.stride, tiles, sums, finish);
        constexpr int kWords = kGroupInputs / Bfloat16::kDepth, kGroups = K::kInputs / kGroupInputs;
        const auto words = [&](int first, int count) {
          for (int group = first / kWords; group < (first + count) / kWords; ++group)
            widen_words<Bfloat16, K>(panel + group / kGroups * K::kWords, group % kGroups,
                                     widened + (group * kWords - first) * kPanel);
          return (const uint32_t*)widened;
        };
        multiply_panel_bfloat16(w.inputs, x.words, x.stride, tiles, sums, words, finish);
      });
    }
  }
}

// y = x W^T for this thread's panels of a weight that is stored by input; inputs that are zero, or count as zero, are
// not read.
template <class R>
void multiply_by_input(const Weight& w, const Rows& x, int tokens, const Output& output, const Team& team) {
  const int panels = (w.outputs + kPanel - 1) / kPanel;
  const auto [from, to] = team.share(panels);
  InputSums<R> sums(w.words, w.places, (size_t)panels * R::kPanelWords, w.inputs, tokens);
  for (int start = 0; start < tokens; start += sums.block) {
    const int some = std::min(sums.block, tokens - start);
    sums.choose((const float*)x.words + (size_t)start * x.stride, x.stride, some, w.threshold);
    for (int first = from; first < to; first += sums.width) {
      const int last = std::min(first + sums.width, to);
      sums.add(first, last);
      for (int p = first; p < last; ++p)
        for (int t = 0; t < some; ++t) apply_epilogue(output, w, sums.tile(p - first, t), p, start + t);
    }
  }
}

// y = x W^T for this thread's panels of one weight; its `next` is not read.
inline void multiply(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
                     const Team& team) {
  if (w.kind == kFloat32ByInput) return multiply_by_input<Float32Rows>(w, x, tokens, output, team);
  if (w.kind == kBfloat16ByInput) return multiply_by_input<Bfloat16Rows>(w, x, tokens, output, team);
  if (uses_tiles(w, tokens)) return multiply_in_tiles(w, x, tokens, output, team);
  if (!has_blocks(w))
    return with_operand(w.operand, [&](auto o) {
      using P = typename decltype(o)::Type;
      if constexpr (!std::is_same_v<P, Int8Blocks>) multiply_tiles<P>(w, x, tokens, output, following, team);
    });
  with_blocks(w.kind, [&](auto k) {
    using K = typename decltype(k)::Type;
    if (w.operand == kFloat32Operand)
      multiply_widened<Float32, K>(w, x, tokens, output, team);
    else if (std::is_same_v<K, TwoOfFour> && tokens <= TwoOfFourProduct::kMaxTokens)
      multiply_tiles<TwoOfFourProduct>(w, x, tokens, output, following, team);
    else if constexpr (std::is_same_v<K, TwoOfFour>)
      multiply_widened<Bfloat16, K>(w, x, tokens, output, team);
    else if (w.operand == kBfloat16Operand)
      multiply_widened<WidenedWords, K>(w, x, tokens, output, team);
    else
      multiply_tiles<QuantizedProduct<K>>(w, x, tokens, output, following, team);
  });
}

// The activations of a product: normed where asked for, and rounded to the operand. rank: outputs of the largest
// factor.
class Operands {
 public:
  Operands(int tokens, int widest, const Team& team, int rank = 0)
      : every_thread_prepares_all_(tokens <= kFewTokens),
        tokens_(tokens),
        row_size_((size_t)round_up(widest, 64)),
        words_(buffer<uint32_t>((size_t)tokens * (every_thread_prepares_all_ ? team.threads : 1) * row_size_)),
        rows_(buffer<float>(team.threads * row_size_)),
        latent_(buffer<float>((size_t)tokens * rank)) {}

  // Every thread prepares its share and waits for the others; for few tokens every thread prepares all of them, which
  // is quicker than waiting. Rows first .. last - 1; last -1: all.
  Rows prepare(int32_t operand, const float* x, int in, int x_stride, const float* norm, float eps,
               const Team& team, int first = 0, int last = -1) const {
    const size_t stride = row_words(operand, in);
    if (last < 0) last = tokens_;
    const auto [begin, end] = every_thread_prepares_all_ ? std::pair(0, last - first) : team.share(last - first);
    const int from = first + begin, to = first + end;
    uint32_t* words = words_.get() + (every_thread_prepares_all_ ? team.thread * tokens_ * stride : 0);
    float* row = rows_.get() + team.thread * row_size_;
    for (int i = in; i < round_up(in, 64); ++i) row[i] = 0;
    with_operand(operand, [&](auto o) {
      for (int t = from; t < to; ++t) {
        const float* source = x + (size_t)t * x_stride;
        if (norm)
          normalize(source, in, norm, eps, row);
        else
          std::memcpy(row, source, 4 * (size_t)in);
        decltype(o)::Type::quantize(row, in, words + t * stride);
        for (int i = in; i < round_up(in, 64); ++i) row[i] = 0;
      }
    });
    if (!every_thread_prepares_all_) team.barrier();
    return {words, stride};
  }

  // The activations of w, where it has a factor, from those of the factor.
  Rows through_factor(const Weight& w, const Rows& x, const Team& team) const {
    multiply_factor(w, x, team);
    return prepare(w.operand, latent_.get(), w.inputs, w.inputs, nullptr, 0, team);
  }

  // Products with all parts of w, which write their outputs side by side. A part with another operand than the one
  // before prepares the activations again. Threads do not wait at the end.
  void multiply(const Weight& w, const float* x, int x_stride, const float* norm, float eps, Output output,
                const Weight* following, const Team& team) const {
    Rows rows = {};
    int32_t prepared = -1;
    if (const Weight* f = w.factor) {
      multiply_factor(w, prepare(f->operand, x, f->inputs, x_stride, norm, eps, team), team);
      x = latent_.get(), x_stride = w.inputs, norm = nullptr;
    }
    for (const Weight* part = &w; part; part = part->next) {
      if (part->operand != prepared) {
        if (prepared >= 0) team.barrier();
        rows = prepare(part->operand, x, part->inputs, x_stride, norm, eps, team);
        prepared = part->operand;
      }
      if (w.next) output.width = part->outputs;
      ::multiply(*part, rows, tokens_, output, part->next ? part->next : following, team);
      output.y += part->outputs;
      if (output.panels) output.panels += (part->outputs + kPanel - 1) / kPanel;
    }
  }

 private:
  void multiply_factor(const Weight& w, const Rows& x, const Team& team) const {
    const int rank = w.factor->outputs;
    ::multiply(*w.factor, x, tokens_, {latent_.get(), rank, rank, Epilogue::kStore, 0, 0}, &w, team);
    team.barrier();
  }

  static constexpr int kFewTokens = 4;
  const bool every_thread_prepares_all_;
  const int tokens_;
  const size_t row_size_;
  const Buffer<uint32_t> words_;
  const Buffer<float> rows_, latent_;
};

inline void linear(const Weight& w, const float* x, float* y, int tokens, int width, int threads) {
  const Operands operands(tokens, w.inputs, {0, threads});
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(barrier);
    operands.multiply(w, x, w.inputs, nullptr, 0, {y, width, width, Epilogue::kStore, 0, 0}, nullptr, team);
  }
}

}  // namespace
