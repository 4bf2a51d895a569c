// Packs rows into panels, straight from where a checkpoint stores them.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear.h"

namespace {

enum RowType : int32_t { kRowsFloat32 = 0, kRowsFloat16 = 1, kRowsBfloat16 = 2 };

// Number i of a row of 16-bit numbers, which lies where the file has it: at any byte.
inline uint16_t load_short(const void* row, int i) {
  uint16_t number;
  std::memcpy(&number, (const char*)row + 2 * (size_t)i, 2);
  return number;
}

// One row as float32; null is a row of zeros.
inline void widen_row(int32_t type, const void* row, int in, float* out) {
  if (!row) {
    std::fill(out, out + in, 0.0f);
  } else if (type == kRowsFloat32) {
    std::memcpy(out, row, 4 * (size_t)in);
  } else if (type == kRowsBfloat16) {
    for (int i = 0; i < in; ++i) {
      const uint32_t bits = (uint32_t)load_short(row, i) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  } else {
    for (int i = 0; i < in; ++i) out[i] = half_to_float(load_short(row, i));
  }
}

inline void round_to_bfloat16(float* x, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = Bfloat16::round(x[i]) << 16;
    std::memcpy(x + i, &bits, 4);
  }
}

// 32 rows, `stride` apart and zero past their end, as a panel of Float32 or Bfloat16.
template <class P>
void pack_panel(const float* rows, size_t stride, int in, uint32_t* panel) {
  const int steps = (int)FloatProduct<P>::row_words(in);
  for (int k = 0; k < steps; ++k)
    for (int o = 0; o < kPanel; ++o) {
      const float* x = rows + o * stride + P::kDepth * k;
      uint32_t word;
      if constexpr (P::kDepth == 2)
        word = Bfloat16::round(x[0]) | Bfloat16::round(x[1]) << 16;
      else
        std::memcpy(&word, x, 4);
      panel[kPanel * k + o] = word;
    }
}

// The same as a panel of Int8; the rows are rotated in place.
inline void pack_int8(float* rows, size_t stride, int in, uint32_t* panel) {
  const int padded = Int8::padded(in);
  for (int o = 0; o < kPanel; ++o)
    for (int i = 0; i < padded; i += Int8::kBlock) Int8::rotate(rows + o * stride + i);
  for (int first = 0; first < padded; first += Int8::kGroup) {
    const int count = std::min(Int8::kGroup, padded - first), steps = count / 4;
    for (int o = 0; o < kPanel; ++o) {
      const float* x = rows + o * stride + first;
      float peak = 0;
      for (int i = 0; i < count; ++i) peak = std::max(peak, std::fabs(x[i]));
      const float scale = std::max(peak / 127, std::numeric_limits<float>::min());
      for (int k = 0; k < steps; ++k) {
        uint32_t word = 0;
        for (int i = 0; i < 4; ++i) {
          const float level = (x[4 * k + i] / scale + kRounder) - kRounder;
          word |= (uint32_t)((int)level + 128) << (8 * i);
        }
        panel[kPanel * k + o] = word;
      }
      std::memcpy(panel + kPanel * steps + o, &scale, 4);
    }
    panel += kPanel * (steps + 1);
  }
}

inline void pack_floats(int32_t kind, int32_t type, bool through_bfloat16, const void* const* rows, int panels, int in,
                        uint32_t* words) {
  // Rows lie at different places of the cache's sets.
  const size_t width = (size_t)Int8::padded(in), stride = width + kLanes;
  const Buffer<float> wide = buffer<float>(kPanel * stride);
  for (int p = 0; p < panels; ++p, words += panel_words(kind, in)) {
    for (int o = 0; o < kPanel; ++o) {
      float* row = wide.get() + o * stride;
      widen_row(type, rows[(size_t)p * kPanel + o], in, row);
      if (through_bfloat16) round_to_bfloat16(row, in);
      std::fill(row + in, row + width, 0.0f);  // the rotation wrote there
    }
    if (kind == kFloat32)
      pack_panel<Float32>(wide.get(), stride, in, words);
    else if (kind == kBfloat16)
      pack_panel<Bfloat16>(wide.get(), stride, in, words);
    else
      pack_int8(wide.get(), stride, in, words);
  }
}

inline void pack_blocks(int32_t kind, const uint8_t* const* rows, int panels, int in, uint32_t* words) {
  with_blocks(kind, [&](auto k) {
    using K = typename decltype(k)::Type;
    const size_t size = quantized_panel_words<K>(in);
    for (int p = 0; p < panels; ++p, words += size) {
      std::memset(words, 0, 4 * size);
      for (int b = 0; b < in / K::kInputs; ++b)
        for (int i = 0; i < kPanel; ++i)
          if (const uint8_t* row = rows[(size_t)p * kPanel + i])
            K::pack(row + b * K::kBytes, words + b * K::kWords, i);
    }
  });
}

inline uint16_t float_to_half(float x) {  // to nearest, ties to even; finite
  x = std::min(std::max(x, -65504.0f), 65504.0f);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size < 0x38800000) return (uint16_t)(sign | (uint32_t)std::nearbyint(std::fabs(x) * 0x1p24f));
  return (uint16_t)(sign | (size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13);
}

// A block of 32 numbers as a block of Q4_1 or Q8_0: scale and minimum as half-precision numbers, then every number
// rounded to the nearest level.
inline void round_block(int32_t kind, const float* x, uint8_t* block) {
  const float least = *std::min_element(x, x + 32), most = *std::max_element(x, x + 32);
  const bool four = kind == kQ4_1;
  const uint16_t half = float_to_half(four ? (most - least) / 15 : std::max(most, -least) / 127);
  const uint16_t offset_half = four ? float_to_half(least) : (uint16_t)0;
  const float scale = half_to_float(half), inverse = scale == 0 ? 0 : 1 / scale, offset = half_to_float(offset_half);
  std::memcpy(block, &half, 2);
  if (four) std::memcpy(block + 2, &offset_half, 2);
  for (int i = 0; i < 32; ++i) {
    const float limit = four ? 15.0f : 127.0f, level = std::nearbyint((x[i] - offset) * inverse);
    const int q = (int)std::min(std::max(level, four ? 0.0f : -limit), limit);
    if (!four)
      block[2 + i] = (uint8_t)q;
    else if (i < 16)
      block[4 + i] = (uint8_t)q;
    else
      block[4 + i - 16] = (uint8_t)(block[4 + i - 16] | q << 4);
  }
}

inline void round_rows(int32_t kind, int32_t type, const void* const* rows, int count, int in, uint8_t* out) {
  const Buffer<float> wide = buffer<float>((size_t)in);
  const size_t size = kind == kQ4_1 ? 20 : 34;
  for (int r = 0; r < count; ++r) {
    widen_row(type, rows[r], in, wide.get());
    for (int i = 0; i < in; i += 32, out += size) round_block(kind, wide.get() + i, out);
  }
}

// Rows of GGUF blocks as float32, [count, in]: the numbers that exact products multiply with.
inline void widen_blocks(int32_t kind, const uint8_t* const* rows, int count, int in, float* out) {
  with_blocks(kind, [&](auto k) {
    using K = typename decltype(k)::Type;
    const Buffer<uint32_t> panel = buffer<uint32_t>(K::kWords), wide = buffer<uint32_t>(kPanel * kGroupInputs);
    for (int first = 0; first < count; first += kPanel) {
      const int few = std::min(kPanel, count - first);
      for (int b = 0; b < in / K::kInputs; ++b) {
        std::memset(panel.get(), 0, 4 * (size_t)K::kWords);
        for (int r = 0; r < few; ++r) K::pack(rows[first + r] + b * K::kBytes, panel.get(), r);
        for (int g = 0; g < K::kInputs / kGroupInputs; ++g) {
          widen_words<Float32, K>(panel.get(), g, wide.get());
          for (int r = 0; r < few; ++r)
            for (int i = 0; i < kGroupInputs; ++i)
              std::memcpy(out + (size_t)(first + r) * in + b * K::kInputs + g * kGroupInputs + i,
                          wide.get() + kPanel * i + r, 4);
        }
      }
    }
  });
}

}  // namespace
