// Matrix products with AMX's tile registers.
//
// The instructions are those of Intel's manual ("Intel 64 and IA-32 Architectures Software Developer's Manual", volume
// 2, TDPBF16PS and TDPBSUD). This code has not run on a processor with AMX yet: what it computes is tested with
// `TileModel`, which does what the manual says, number by number.
//
// A panel's words are B tiles as they lie in memory: a row of a tile holds one word of the input of 16 outputs. So are
// blocks of keys and groups of values (attention_products.h). Rows of activations are the rows of A tiles. A token's
// sums do not depend on the other rows of its tile, and bfloat16 products use tiles for every number of tokens, so that
// a token's numbers do not depend on its company. They differ from those of processors without AMX: a tile instruction
// sums 32 inputs, even and odd ones apart, before it adds them. Integer products are exact: those of few tokens use no
// tiles.

#pragma once

#include "precisions.h"
#include "quantized.h"
#include "threads.h"

namespace {

constexpr int kTileRows = 16;   // most rows of a tile
constexpr int kTileWords = 16;  // most words of a row

// The operand of LDTILECFG.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 rows of activations (A), 6 and 7 weights (B). Sum c adds products of A tile 4 + c / 2
// and B tile 6 + c % 2.
constexpr int kActivations = 4, kWeights = 6;

#if FORETELL_AMX
// The tile registers of this thread.
struct TileUnit {
  static void configure(const TileConfiguration& shape) {
    before_load();
    _tile_loadconfig(&shape);
  }
  static void release() { _tile_release(); }
  // The intrinsics want the number of a tile as a literal.
#define FORETELL_EACH_TILE(call) \
  if constexpr (kTile == 0) call(0); \
  if constexpr (kTile == 1) call(1); \
  if constexpr (kTile == 2) call(2); \
  if constexpr (kTile == 3) call(3); \
  if constexpr (kTile == 4) call(4); \
  if constexpr (kTile == 5) call(5); \
  if constexpr (kTile == 6) call(6); \
  if constexpr (kTile == 7) call(7);
  template <int kTile>
  static void zero() {
#define FORETELL_CALL(n) _tile_zero(n)
    FORETELL_EACH_TILE(FORETELL_CALL)
#undef FORETELL_CALL
  }
  template <int kTile>
  static void load(const void* p, size_t stride) {
    before_load();
#define FORETELL_CALL(n) _tile_loadd(n, p, stride)
    FORETELL_EACH_TILE(FORETELL_CALL)
#undef FORETELL_CALL
  }
  template <int kTile>
  static void store(void* p, size_t stride) {
#define FORETELL_CALL(n) _tile_stored(n, p, stride)
    FORETELL_EACH_TILE(FORETELL_CALL)
#undef FORETELL_CALL
  }
#undef FORETELL_EACH_TILE
  template <int kSum>
  static void add_bfloat16() {
    if constexpr (kSum == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kSum == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kSum == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kSum == 3) _tile_dpbf16ps(3, 5, 7);
  }
  template <int kSum>
  static void add_s8u8() {
    if constexpr (kSum == 0) _tile_dpbsud(0, 4, 6);
    if constexpr (kSum == 1) _tile_dpbsud(1, 4, 7);
    if constexpr (kSum == 2) _tile_dpbsud(2, 5, 6);
    if constexpr (kSum == 3) _tile_dpbsud(3, 5, 7);
  }

 private:
  // GCC's intrinsics do not tell it that these instructions read memory: what was written before must be there.
  static void before_load() { __asm__ volatile("" ::: "memory"); }
};
#else
// The same in plain C++: what the manual says that the instructions do.
struct TileModel {
  static void configure(const TileConfiguration& shape) { state() = {}, state().shape = shape; }
  static void release() { state() = {}; }
  template <int kTile>
  static void zero() {
    std::memset(state().word[kTile], 0, sizeof state().word[kTile]);
  }
  template <int kTile>
  static void load(const void* p, size_t stride) {
    zero<kTile>();
    for (int row = 0; row < rows(kTile); ++row)
      std::memcpy(state().word[kTile][row], (const char*)p + row * stride, row_bytes(kTile));
  }
  template <int kTile>
  static void store(void* p, size_t stride) {
    for (int row = 0; row < rows(kTile); ++row)
      std::memcpy((char*)p + row * stride, state().word[kTile][row], row_bytes(kTile));
  }
  template <int kSum>
  static void add_bfloat16() {
    constexpr int a = kActivations + kSum / 2, b = kWeights + kSum % 2;
    for (int row = 0; row < rows(kSum); ++row)
      for (int column = 0; column < row_bytes(kSum) / 4; ++column) {
        float even = 0, odd = 0;
        for (int k = 0; k < row_bytes(a) / 4; ++k) {
          const uint32_t x = state().word[a][row][k], w = state().word[b][k][column];
          even = flushed(even + number(x << 16) * number(w << 16));
          odd = flushed(odd + number(x & 0xFFFF0000u) * number(w & 0xFFFF0000u));
        }
        uint32_t& sum = state().word[kSum][row][column];
        const float total = flushed(number(sum) + flushed(even + odd));
        std::memcpy(&sum, &total, 4);
      }
  }
  template <int kSum>
  static void add_s8u8() {
    constexpr int a = kActivations + kSum / 2, b = kWeights + kSum % 2;
    for (int row = 0; row < rows(kSum); ++row)
      for (int column = 0; column < row_bytes(kSum) / 4; ++column)
        for (int k = 0; k < row_bytes(a) / 4; ++k)
          for (int byte = 0; byte < 32; byte += 8)
            state().word[kSum][row][column] += (uint32_t)((int8_t)(state().word[a][row][k] >> byte) *
                                                          (uint8_t)(state().word[b][k][column] >> byte));
  }

 private:
  struct State {
    TileConfiguration shape;
    uint32_t word[8][kTileRows][kTileWords];
  };
  static State& state() {
    static thread_local State tiles;
    return tiles;
  }
  static int rows(int tile) { return state().shape.rows[tile]; }
  static int row_bytes(int tile) { return state().shape.row_bytes[tile]; }
  // Denormal numbers are taken for zero. (The product of two bfloat16 numbers is exact: no fused instruction is
  // needed.)
  static float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
  static float number(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return flushed(x);
  }
};
using TileUnit = TileModel;
#endif

#if FORETELL_AMX || defined(FORETELL_AMX_MODEL)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Tokens from which on integer products use tiles.
constexpr int kTileTokens = 12;

// Tokens as rows of A tiles, all of the same number of rows: the last one overlaps the one before.
struct TileRows {
  int tokens, count, rows;
  explicit TileRows(int tokens)
      : tokens(tokens), count((tokens + kTileRows - 1) / kTileRows), rows((tokens + count - 1) / count) {}
  int first(int tile) const { return std::min(tile * rows, tokens - rows); }
};

// Shapes the tiles for A tiles of some rows of `words` words, as long as it lives.
class TileScope {
 public:
  TileScope(int rows, int words) {
    TileConfiguration shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.rows[tile] = (uint8_t)(tile < kWeights ? rows : words);
      shape.row_bytes[tile] = (uint16_t)(tile >= kActivations && tile < kWeights ? 4 * words : 4 * kTileWords);
    }
    TileUnit::configure(shape);
  }
  ~TileScope() { TileUnit::release(); }
};

constexpr size_t kPanelBytes = 4 * kPanel, kTileSums = kTileRows * kPanel;  // sums of an A tile: [row][32 outputs]

// Products use one or (kPair) two A tiles, and one or (kBoth) two B tiles, which lie side by side in the sums.

template <bool kPair, bool kBoth>
inline void zero_sums() {
  TileUnit::zero<0>();
  if constexpr (kBoth) TileUnit::zero<1>();
  if constexpr (kPair) TileUnit::zero<2>();
  if constexpr (kPair && kBoth) TileUnit::zero<3>();
}

// Sums of the first and the second A tile, rows `bytes` apart.
template <bool kPair, bool kBoth>
inline void load_sums(const void* sums0, const void* sums1, size_t bytes) {
  TileUnit::load<0>(sums0, bytes);
  if constexpr (kBoth) TileUnit::load<1>((const uint32_t*)sums0 + kLanes, bytes);
  if constexpr (kPair) TileUnit::load<2>(sums1, bytes);
  if constexpr (kPair && kBoth) TileUnit::load<3>((const uint32_t*)sums1 + kLanes, bytes);
}
template <bool kPair, bool kBoth>
inline void store_sums(void* sums0, void* sums1, size_t bytes) {
  TileUnit::store<0>(sums0, bytes);
  if constexpr (kBoth) TileUnit::store<1>((uint32_t*)sums0 + kLanes, bytes);
  if constexpr (kPair) TileUnit::store<2>(sums1, bytes);
  if constexpr (kPair && kBoth) TileUnit::store<3>((uint32_t*)sums1 + kLanes, bytes);
}

// Adds products of the A tiles at a0 and a1, rows `stride` words apart, with the B tiles at b0 and b1, rows `bytes`
// apart.
template <bool kPair, bool kBoth, bool kIntegers>
inline void add_tiles(const uint32_t* a0, const uint32_t* a1, size_t stride, const uint32_t* b0, const uint32_t* b1,
                      size_t bytes) {
  const auto add = [](auto sum) {
    if constexpr (kIntegers)
      TileUnit::add_s8u8<sum>();
    else
      TileUnit::add_bfloat16<sum>();
  };
  TileUnit::load<kWeights>(b0, bytes);
  TileUnit::load<kActivations>(a0, 4 * stride);
  add(std::integral_constant<int, 0>());
  if constexpr (kBoth) {
    TileUnit::load<kWeights + 1>(b1, bytes);
    add(std::integral_constant<int, 1>());
  }
  if constexpr (kPair) {
    TileUnit::load<kActivations + 1>(a1, 4 * stride);
    add(std::integral_constant<int, 2>());
    if constexpr (kBoth) add(std::integral_constant<int, 3>());
  }
}

// The same with 32 outputs of a panel.
template <bool kPair, bool kIntegers>
inline void add_panel(const uint32_t* a0, const uint32_t* a1, size_t stride, const uint32_t* panel) {
  add_tiles<kPair, true, kIntegers>(a0, a1, stride, panel, panel + kLanes, kPanelBytes);
}

// The last words of a row, fewer than a tile has, as a tile that ends with zeros.
struct PaddedTile {
  alignas(64) uint32_t words[kTileRows * kPanel] = {};
  PaddedTile(const uint32_t* from, int rows, size_t stride, int count, int width) {
    for (int row = 0; row < rows; ++row)
      std::memcpy(words + row * width, from + row * stride, 4 * (size_t)count);
  }
};

template <bool kPair>
inline void add_bfloat16_tiles(const uint32_t* a0, const uint32_t* a1, size_t stride, int rows, const uint32_t* weights,
                               int words, float* sums) {
  load_sums<kPair, true>(sums, sums + kTileSums, kPanelBytes);
  int k = 0;
  for (; k + kTileWords <= words; k += kTileWords) {
    for (int i = 0; i < kTileWords; ++i) prefetch_panel<Prefetch::kHalf>(weights, nullptr, k + i);
    add_panel<kPair, false>(a0 + k, a1 + k, stride, weights + kPanel * k);
  }
  if (k < words) {
    const PaddedTile last0(a0 + k, rows, stride, words - k, kTileWords),
        last1((kPair ? a1 : a0) + k, rows, stride, words - k, kTileWords),
        last(weights + kPanel * k, words - k, kPanel, kPanel, kPanel);
    add_panel<kPair, false>(last0.words, last1.words, kTileWords, last.words);
  }
  store_sums<kPair, true>(sums, sums + kTileSums, kPanelBytes);
}

// Calls run(pair, tile, a0, a1) for the A tiles from..to - 1, two at a time as long as there are two.
template <class Run>
inline void each_pair(const TileRows& tiles, int from, int to, const uint32_t* x, size_t stride, const Run& run) {
  for (int tile = from; tile < to; tile += 2) {
    const uint32_t* a0 = x + tiles.first(tile) * stride;
    if (tile + 1 < to)
      run(std::true_type(), tile, a0, x + tiles.first(tile + 1) * stride);
    else
      run(std::false_type(), tile, a0, a0);
  }
}

// Calls finish(token, out) for the tokens of A tiles from..to - 1 with their 32 sums as two vectors.
template <class Finish>
inline void finish_tiles(const TileRows& tiles, int from, int to, const float* sums, const Finish& finish) {
  for (int tile = from; tile < to; ++tile)
    for (int row = tile * tiles.rows - tiles.first(tile); row < tiles.rows; ++row) {
      const float* at = sums + (tile - from) * kTileSums + row * kPanel;
      const Float out[2] = {load<Float>(at), load<Float>(at + kLanes)};
      finish(tiles.first(tile) + row, out);
    }
}

constexpr int kTilesAtOnce = 16;      // A tiles whose sums are kept: 32 KiB
constexpr int kTileChunkWords = 256;  // words of a panel's inputs that are used for all of them: 32 KiB

// Products of one panel. `chunk(first, count)` returns the panel's words first .. first + count - 1 of the inputs.
template <class Chunk, class Finish>
void multiply_panel_bfloat16(int in, const uint32_t* x, size_t stride, const TileRows& tiles, float* sums,
                             const Chunk& chunk, const Finish& finish) {
  const int words = (int)FloatProduct<Bfloat16>::row_words(in);
  for (int from = 0; from < tiles.count; from += kTilesAtOnce) {
    const int to = std::min(from + kTilesAtOnce, tiles.count);
    std::memset(sums, 0, sizeof(float) * kTileSums * (size_t)(to - from));
    for (int first = 0; first < words; first += kTileChunkWords) {
      const int count = std::min(kTileChunkWords, words - first);
      const uint32_t* weights = chunk(first, count);
      each_pair(tiles, from, to, x + first, stride, [&](auto pair, int tile, const uint32_t* a0, const uint32_t* a1) {
        add_bfloat16_tiles<pair>(a0, a1, stride, tiles.rows, weights, count, sums + (tile - from) * kTileSums);
      });
    }
    finish_tiles(tiles, from, to, sums, finish);
  }
}

// Calls add(row of the activations, its integer sums, its sums) for the rows of one or two A tiles.
template <bool kPair, class Add>
inline void each_integer_row(const TileRows& tiles, const uint32_t* a0, const uint32_t* a1, size_t stride, float* sums,
                             const Add& add) {
  alignas(64) int32_t products[2 * kTileSums];
  store_sums<kPair, true>(products, products + kTileSums, kPanelBytes);
  for (int tile = 0; tile < (kPair ? 2 : 1); ++tile)
    for (int row = 0; row < tiles.rows; ++row)
      add((tile ? a1 : a0) + row * stride, products + tile * kTileSums + row * kPanel,
          sums + tile * kTileSums + row * kPanel);
}

// int8 weights: the steps of `Int8::tile`.
template <class Finish>
void multiply_panel_int8(const uint32_t* panel, int in, const uint32_t* x, size_t stride, const TileRows& tiles,
                         float* sums, const Finish& finish) {
  for (int from = 0; from < tiles.count; from += kTilesAtOnce) {
    const int to = std::min(from + kTilesAtOnce, tiles.count);
    std::memset(sums, 0, sizeof(float) * kTileSums * (size_t)(to - from));
    const uint32_t *weights = panel, *rows = x;
    for (int words = Int8::padded(in) / 4; words > 0; words -= Int8::kGroup / 4) {
      const int steps = std::min(Int8::kGroup / 4, words);
      const Float scale[2] = {load<Float>(weights + kPanel * steps), load<Float>(weights + kPanel * steps + kLanes)};
      each_pair(tiles, from, to, rows, stride, [&](auto pair, int tile, const uint32_t* a0, const uint32_t* a1) {
        zero_sums<pair, true>();
        for (int k = 0; k < steps; k += kTileWords)
          add_panel<pair, true>(a0 + k, a1 + k, stride, weights + kPanel * k);
        each_integer_row<pair>(tiles, a0, a1, stride, sums + (tile - from) * kTileSums,
                               [&](const uint32_t* row, const int32_t* products, float* out) {
                                 const Float factor = (Float)splat(row[steps]);
                                 const Int correction = splat((int32_t)row[steps + 1]);
                                 for (int half = 0; half < 2; ++half) {
                                   const Int number = load<Int>(products + kLanes * half) + correction;
                                   float* at = out + kLanes * half;
                                   store(at, fma(to_float(number), scale[half] * factor, load<Float>(at)));
                                 }
                               });
      });
      weights += kPanel * (steps + 1);
      rows += steps + 2;
    }
    finish_tiles(tiles, from, to, sums, finish);
  }
}

// A group of 32 inputs of a panel as B tiles, one per scale; the words of the other scale's inputs are zero.
template <class K>
struct GroupTiles {
  static constexpr int kParts = K::kTwoScales ? 2 : 1;
  alignas(64) uint32_t levels[kParts][kGroupWords * kPanel] = {};
  Float scale[kParts][2], offset[kParts][2];

  void read(const uint32_t* block, int group) {
    for (int half = 0; half < 2; ++half) {
      for (int part = 0; part < kParts; ++part) {
        scale[part][half] = K::scale(block, group, half, part);
        offset[part][half] = offset_of<K>(block, group, half, scale[part][half]);
        for (int k = part * kGroupWords / kParts; k < (part + 1) * kGroupWords / kParts; ++k)
          store(levels[part] + kPanel * k + kLanes * half, K::level(block, group, half, k));
      }
    }
  }
};

// Quantised weights and int8 activations: the steps of `QuantizedProduct<K>::tile`.
template <class K, class Finish>
void multiply_panel_quantized(const uint32_t* panel, int in, const uint32_t* x, size_t stride, const TileRows& tiles,
                              float* sums, const Finish& finish) {
  constexpr int kGroups = K::kInputs / kGroupInputs, kParts = GroupTiles<K>::kParts;  // groups per block
  GroupTiles<K> weights;
  for (int from = 0; from < tiles.count; from += kTilesAtOnce) {
    const int to = std::min(from + kTilesAtOnce, tiles.count);
    std::memset(sums, 0, sizeof(float) * kTileSums * (size_t)(to - from));
    for (int group = 0; group < in / kGroupInputs; ++group) {
      weights.read(panel + group / kGroups * K::kWords, group % kGroups);
      each_pair(tiles, from, to, x + group * Int8Blocks::kRowWords, stride,
                [&](auto pair, int tile, const uint32_t* a0, const uint32_t* a1) {
                  for (int part = 0; part < kParts; ++part) {
                    zero_sums<pair, true>();
                    add_panel<pair, true>(a0, a1, stride, weights.levels[part]);
                    const int number = kParts == 1 ? Int8Blocks::kSum : Int8Blocks::kFirstSum + part;
                    each_integer_row<pair>(tiles, a0, a1, stride, sums + (tile - from) * kTileSums,
                                           [&](const uint32_t* row, const int32_t* products, float* out) {
                                             for (int half = 0; half < 2; ++half) {
                                               Float acc = load<Float>(out + kLanes * half);
                                               QuantizedProduct<K>::finish(load<Int>(products + kLanes * half),
                                                                           weights.scale[part][half],
                                                                           weights.offset[part][half], row, number,
                                                                           acc);
                                               store(out + kLanes * half, acc);
                                             }
                                           });
                  }
                });
    }
    finish_tiles(tiles, from, to, sums, finish);
  }
}

}  // namespace
