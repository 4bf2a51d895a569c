// Vectors of 16 lanes: arithmetic that gives the same bits whatever the width of the registers.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "interface.h"
#include "registers.h"

namespace {

constexpr int kPanel = 2 * kLanes;

// The first n lanes; the others are zero.
template <class V>
inline V load_part(const void* p, int n) {
  if (n >= kLanes) return load<V>(p);
#if FORETELL_AVX512
  return (V)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
#else
  uint32_t lane[kLanes] = {};
  std::memcpy(lane, p, 4 * (size_t)n);
  return load<V>(lane);
#endif
}

template <class V>
inline void store_part(void* p, V v, int n) {
  if (n >= kLanes) return store(p, v);
  uint32_t lane[kLanes];
  store(lane, v);
  std::memcpy(p, lane, 4 * (size_t)n);
}

__attribute__((always_inline)) inline Float larger(Float a, Float b) { return select(a > b, a, b); }
__attribute__((always_inline)) inline Float smaller(Float a, Float b) { return select(a < b, a, b); }

// Combines all lanes, neighbours at distance 8, 4, 2, 1: one fixed order.
template <class V, class Function>
inline auto reduce(V v, const Function& combine) {
#if FORETELL_AVX2
  const auto eight = combine(v.part[0], v.part[1]);
  const auto four = combine(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                            __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
  const auto two = combine(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return combine(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
#else
  std::remove_reference_t<decltype(v[0] + v[0])> lane[kLanes];
  store(lane, v);
  for (int s = kLanes / 2; s; s /= 2)
    for (int i = 0; i < s; ++i) lane[i] = combine(lane[i], lane[i + s]);
  return lane[0];
#endif
}

inline float sum(Float v) {
#if FORETELL_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#else
  return reduce(v, [](auto a, auto b) { return a + b; });
#endif
}

inline float largest(Float v) {
#if FORETELL_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  return reduce(v, [](auto a, auto b) { return a < b ? b : a; });
#endif
}

inline int32_t sum(Int v) {
#if FORETELL_AVX512
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  return reduce(v, [](auto a, auto b) { return a + b; });
#endif
}

// Whether any lane of a comparison holds.
inline bool any(Int holds) {
#if FORETELL_AVX512
  return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#elif FORETELL_AVX2
  const __m256i both = (__m256i)(holds.part[0] | holds.part[1]);
  return !_mm256_testz_si256(both, both);
#else
  int32_t lane[kLanes], found = 0;
  store(lane, holds);
  for (int i = 0; i < kLanes; ++i) found |= lane[i];
  return found != 0;
#endif
}

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds a float to the nearest integer

// The integer in a number to which kRounder was added.
__attribute__((always_inline)) inline Int rounded_integer(Float x) {
  constexpr int32_t kBits = 0x4B400000;  // of kRounder
  return (Int)x - splat(kBits);
}

// x * factor, rounded to the nearest integer.
__attribute__((always_inline)) inline Int round_product(Float x, float factor) {
  return rounded_integer(fma(x, splat(factor), splat(kRounder)));
}

// e^x to about 2 units in the last place; exactly 0 below -87, so that masked scores vanish.
__attribute__((always_inline)) inline Float exponential(Float x) {
  const Float clipped = smaller(larger(x, splat(-87.0f)), splat(88.0f));
  const Float rounded = fma(clipped, splat(1.44269504f), splat(kRounder));
  const Float n = rounded - splat(kRounder);
  Float r = fma(n, splat(-0.693359375f), clipped);  // ln 2 in two parts, the first exact in few bits
  r = fma(n, splat(2.12194440e-4f), r);
  Float p = splat(1.0f / 5040);  // Taylor series of e^r for |r| <= ln(2) / 2
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  const Int exponent = rounded_integer(rounded) << 23;
  return select(x < splat(-87.0f), Float{}, (Float)((Int)p + exponent));
}

// ln x of positive normal numbers, to about 2 units in the last place; `from_one`: 1 - x, which for an x near 1 may
// hold digits that x does not.
inline Float logarithm(Float x, Float from_one) {
  constexpr int32_t kHalfRoot = 0x3F3504F3;  // sqrt(1/2)
  const Int steps = ((Int)x - splat(kHalfRoot)) >> 23;  // x = m 2^steps with m in sqrt(1/2) to sqrt(2)
  const Float m = (Float)((Int)x - (steps << 23));
  const Float above = select(steps == Int{}, -from_one, m - splat(1.0f));
  const Float s = above / (above + splat(2.0f)), z = s * s;
  Float series = splat(1.0f / 9);  // of the inverse hyperbolic tangent
  for (float c : {1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) series = fma(series, z, splat(c));
  return fma(to_float(steps), splat(0.69314718f), splat(2.0f) * s * series);
}

inline Float logarithm(Float x) { return logarithm(x, splat(1.0f) - x); }

inline Float tanh_of(Float x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exponential(x + x)); }

inline Float activate(Float x, int32_t kind) {
  if (kind == kSilu) return x / (splat(1.0f) + exponential(-x));
  if (kind == kRelu) return larger(x, Float{});
  const Float cubic = fma(x * x * x, splat(0.044715f), x);
  return splat(0.5f) * x * (splat(1.0f) + tanh_of(splat(0.7978845608f) * cubic));
}

// activation(gate) * up, or what stands for it.
inline Float gated(Float gate, Float up, int32_t kind) {
  if (kind != kClampedSwiglu) return activate(gate, kind) * up;
  const Float limit = splat(7.0f), g = smaller(gate, limit), u = larger(smaller(up, limit), -limit);
  return (u + splat(1.0f)) * (g / (splat(1.0f) + exponential(splat(-1.702f) * g)));
}

// GELU with the error function itself, to about 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Float gelu(Float x) {
  const Float z = larger(x, -x) * splat(0.70710678f), t = splat(1.0f) / fma(z, splat(0.3275911f), splat(1.0f));
  Float p = splat(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, splat(c));
  const Float tail = splat(0.5f) * p * t * exponential(-z * z);
  return x * select(x < Float{}, tail, splat(1.0f) - tail);
}

}  // namespace
