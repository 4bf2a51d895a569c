// The inner products of attention: scores of keys, and sums of weighted values.
//
// Both multiply rows of words, of the queries or of their weights, with columns: the keys of a block, or the dimensions
// of a group of values. 16 columns lie side by side in a vector.

#pragma once

#include "amx.h"
#include "linear.h"
#include "precisions.h"

namespace {

// Word w of vector v is at words + w * step + v * apart.
struct Columns {
  const uint32_t* words;
  size_t step, apart;  // in words
};

// How rows are kept: as words, or, where the processor does not multiply bfloat16 numbers, as the float32 numbers that
// these are, so that they are widened once.
template <class C>
struct RowFormat {
  static constexpr bool kWidened = std::is_same_v<C, Bfloat16> && !kMultipliesBfloat16 && !kHasTiles;
  static constexpr int kWordSize = kWidened ? C::kDepth : 1;  // of 4 bytes each

  // n numbers, a multiple of 16, into a row.
  static void pack(const float* x, int n, uint32_t* row) {
    if constexpr (kWidened)
      for (int i = 0; i < n; i += kLanes) store(row + i, C::rounded(load<Float>(x + i)));
    else
      C::pack(x, n, row);
  }

  // sum + the products of a column's word with one of a row, the upper numbers first.
  static Float step(Float sum, Word column, const uint32_t* row) {
    if constexpr (kWidened) {
      sum = fma((Float)(column & splat(0xFFFF0000u)), (Float)splat(row[1]), sum);
      return fma((Float)(column << 16), (Float)splat(row[0]), sum);
    } else {
      return C::step(sum, column, splat(*row));
    }
  }
};

// Vectors of columns, and rows, whose sums fit in registers.
constexpr int kTileVectors = kAccumulators >= 24 ? 4 : 1;
constexpr int kTileQueries = kAccumulators / kTileVectors;

// Products of Q rows of some words with V vectors, summed from the first word to the last: out[q] receives 16 * V
// sums, where `adds` begins with the sums that are there. Meanwhile as many bytes from `ahead` on (null: none) are
// prefetched: for few queries attention is bound by memory.
template <class C, int Q, int V>
void multiply_columns(const Columns& columns, int words, const uint32_t* const* rows, bool adds, float* const* out,
                      const char* ahead) {
  using Format = RowFormat<C>;
  const size_t step = columns.step, apart = columns.apart;
  Float sums[Q][V];
  const uint32_t* row[Q];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) {
    row[q] = rows[q];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[q][v] = adds ? load<Float>(out[q] + v * kLanes) : Float{};
  }
  for (int w = 0; w < words; ++w) {
    if (ahead)
      for (int v = 0; v < V; ++v) __builtin_prefetch(ahead + 64 * ((size_t)w * V + v), 0, 2);
    Word column[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) column[v] = load<Word>(columns.words + (size_t)w * step + v * apart);
    if constexpr (Format::kWidened) {
#pragma GCC unroll 2
      for (int number = C::kDepth; number-- > 0;) {  // one after the other: registers hold one number of the columns
        Float numbers[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) numbers[v] = (Float)(number ? column[v] & splat(0xFFFF0000u) : column[v] << 16);
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
          const Float x = (Float)splat(row[q][(size_t)w * C::kDepth + number]);
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) sums[q][v] = fma(numbers[v], x, sums[q][v]);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) {
        const Word x = splat(row[q][w]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[q][v] = C::step(sums[q][v], column[v], x);
      }
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(out[q] + v * kLanes, sums[q][v]);
}

using ColumnProduct = void (*)(const Columns&, int, const uint32_t* const*, bool, float* const*, const char*);

template <class C, size_t... I>
ColumnProduct column_product_of(int rows, int vectors, std::index_sequence<I...>) {
  constexpr ColumnProduct all[] = {multiply_columns<C, I / kTileVectors + 1, I % kTileVectors + 1>...};
  return all[(rows - 1) * kTileVectors + vectors - 1];
}
template <class C>
ColumnProduct column_product(int rows, int vectors) {
  return column_product_of<C>(rows, vectors, std::make_index_sequence<kTileQueries * kTileVectors>());
}

// With AMX's tiles, which are used for bfloat16 words and every number of rows: a step is 16 words (8, where a head's
// words are no multiple of 16). Its lower numbers and its upper ones are summed apart, and both are added to the total.
// A step that adds zeros leaves a sum as it is, as long as all numbers are finite. Like all of amx.h, this has not run
// on a processor with AMX yet.

// Rows of sums, `stride` apart.
struct Sums {
  float* first;
  size_t stride;
};

// The products of one or two tiles of rows with one or two vectors of columns. `at(s)`: the columns of step s, of
// `width` words.
template <bool kPair, bool kBoth, class At>
void multiply_tile_columns(const At& at, int steps, int width, size_t step, size_t apart, const Rows& a0,
                           const Rows& a1, bool adds, const Sums& out0, const Sums& out1, const char* ahead) {
  if (adds)
    load_sums<kPair, kBoth>(out0.first, out1.first, 4 * out0.stride);
  else
    zero_sums<kPair, kBoth>();
  for (int s = 0; s < steps; ++s) {
    const uint32_t* columns = at(s);
    if (ahead)
      for (int line = 0; line < width * (kBoth ? 2 : 1); ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    add_tiles<kPair, kBoth, false>(a0.words + s * width, a1.words + s * width, a0.stride, columns, columns + apart,
                                   4 * step);
  }
  store_sums<kPair, kBoth>(out0.first, out1.first, 4 * out0.stride);
}

// Products of all rows with some vectors; `words(s)` returns where the columns of step s begin. `adds`: to what is in
// `out`; then the rows fit in one or two tiles. A TileScope for tiles.rows and `width` words must be alive.
template <class At>
void multiply_columns_in_tiles(const At& words, int steps, int width, size_t step, size_t apart, int vectors,
                               const TileRows& tiles, const Rows& rows, bool adds, const Sums& out,
                               const char* ahead) {
  for (int v = 0; v < vectors; v += 2) {
    const bool both = v + 1 < vectors;
    const auto at = [&](int s) { return words(s) + v * apart; };
    each_pair(tiles, 0, tiles.count, rows.words, rows.stride,
              [&](auto pair, int tile, const uint32_t* a0, const uint32_t* a1) {
                const Sums out0 = {out.first + tiles.first(tile) * out.stride + v * kLanes, out.stride},
                           out1 = {out.first + tiles.first(tile + pair) * out.stride + v * kLanes, out.stride};
                const auto run = both ? multiply_tile_columns<pair, true, decltype(at)>
                                      : multiply_tile_columns<pair, false, decltype(at)>;
                run(at, steps, width, step, apart, {a0, rows.stride}, {a1, rows.stride}, adds, out0, out1,
                    tile ? nullptr : ahead);
              });
    if (ahead) ahead += 64 * (size_t)steps * width * (both ? 2 : 1);
  }
}

}  // namespace
