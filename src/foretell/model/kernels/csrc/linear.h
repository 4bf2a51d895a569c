// Linear layers: a product, and what becomes of it.

#pragma once

#include "interface.h"
#include "precisions.h"
#include "rows.h"
#include "threads.h"

namespace {

// What becomes of a product: stored, added to what is there, or gated: activation(first half) * second half, left to the next product.
enum class Then { kStore, kAdd, kGate };

struct Sink {
  float* y;
  int stride;
  int width;  // numbers per row that exist in y
  Then then;
  int32_t activation;
};

// Leaves 16 numbers, from number `first` of a row on, to the next product: as words where that is a matter of each number alone, so that
// nobody has to prepare them, else as they are.
template <class P>
void leave(float* row, int first, Float v) {
  if constexpr (P::kSingly) {
    float numbers[kLanes];
    store(numbers, v);
    P::quantize(numbers, kLanes, (uint32_t*)row + P::row_words(first));
  } else {
    store(row + first, v);
  }
}

template <class P>
void emit(const Sink& sink, const Weight& w, const Float* tile, int panel, int token) {
  Float v[2] = {tile[0], tile[1]};
  if (w.bias)
    for (int i = 0; i < 2; ++i) v[i] += load<Float>(w.bias + kPanel * panel + kLanes * i);
  float* row = sink.y + (size_t)token * sink.stride;
  if (sink.then == Then::kGate) {
    leave<P>(row, kLanes * panel, activate(v[0], sink.activation) * v[1]);
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const int first = kPanel * panel + kLanes * i, left = sink.width - first;
    if (left <= 0) return;
    if (sink.then == Then::kAdd) v[i] += load_part<Float>(row + first, left);
    store_part(row + first, v[i], left);
  }
}

using Tile = void (*)(const uint32_t*, const uint32_t*, size_t, int, const char*, Float*);

template <class P, Fetch kFetch, size_t... T>
Tile tile_of(int tokens, std::index_sequence<T...>) {
  constexpr Tile all[] = {P::template tile<T + 1, kFetch>...};
  return all[tokens - 1];
}

template <class P, Fetch kFetch>
Tile pick_tile(int tokens) {
  return tile_of<P, kFetch>(tokens, std::make_index_sequence<P::kMostTokens>());
}

const uint32_t* first_panel(const Weight& w, size_t panel_words, const Team& team) {
  return w.words + team.share((w.out + kPanel - 1) / kPanel).first * panel_words;
}

// Rows of words.
struct Rows {
  const uint32_t* words;
  size_t stride;
};

// y = x W^T for this thread's panels. A panel stays in the cache while all tokens pass by it in blocks. Two blocks fetch half of the
// next panel's lines each (at the end: of the first of the layer that follows).
template <class P>
void multiply(const Weight& w, const Rows& x, int tokens, const Sink& sink, const Weight* following, const Team& team) {
  const size_t panel_words = P::panel_words(w.in);
  const auto [from, to] = team.share((w.out + kPanel - 1) / kPanel);
  const int blocks = (tokens + P::kMostTokens - 1) / P::kMostTokens;
  const auto pick = tokens <= P::kFewTokens ? pick_tile<P, Fetch::kHalf>
                    : blocks == 2           ? pick_tile<P, Fetch::kNext>
                                            : pick_tile<P, Fetch::kAhead>;
  Float out[2 * P::kMostTokens];
  for (int p = from; p < to; ++p) {
    const uint32_t* panel = w.words + p * panel_words;
    const uint32_t* next = p + 1 < to ? panel + panel_words : following ? first_panel(*following, P::panel_words(following->in), team) : panel;
    for (int b = 0, t = 0; b < blocks; ++b) {
      const int count = (tokens - t + blocks - b - 1) / (blocks - b);
      pick(count)(panel, x.words + t * x.stride, x.stride, w.in, (const char*)next + 64 * b, out);
      for (int i = 0; i < count; ++i) emit<P>(sink, w, out + 2 * i, p, t + i);
      t += count;
    }
  }
}

// Rows as a product wants them: normed if asked, rounded to the precision.
template <class P>
class Operands {
 public:
  Operands(int tokens, int widest, const Team& team)
      : alone_(tokens <= kAlone),
        tokens_(tokens),
        words_(buffer<uint32_t>((size_t)tokens * (alone_ ? team.threads : 1) * P::row_words(widest))),
        row_size_((size_t)round_up(widest, 64)),
        rows_(buffer<float>(team.threads * row_size_)) {}

  // Every thread prepares its share and waits for the others, or, where that is quicker than waiting, all for itself.
  Rows prepare(const float* x, int in, int x_stride, const float* norm, float eps, const Team& team) const {
    const size_t stride = P::row_words(in);
    const auto [from, to] = alone_ ? std::pair(0, tokens_) : team.share(tokens_);
    uint32_t* words = words_.get() + (alone_ ? team.thread * tokens_ * stride : 0);
    float* row = rows_.get() + team.thread * row_size_;
    for (int i = in; i < round_up(in, 64); ++i) row[i] = 0;
    for (int t = from; t < to; ++t) {
      const float* source = x + (size_t)t * x_stride;
      if (norm)
        normalize(source, in, norm, eps, row);
      else
        std::memcpy(row, source, 4 * (size_t)in);
      P::quantize(row, in, words + t * stride);
      for (int i = in; i < round_up(in, 64); ++i) row[i] = 0;
    }
    if (!alone_) team.barrier();
    return {words, stride};
  }

 private:
  static constexpr int kAlone = 4;
  const bool alone_;
  const int tokens_;
  const Buffer<uint32_t> words_;
  const size_t row_size_;
  const Buffer<float> rows_;
};

template <class P>
void run_linear(const Weight& w, const float* x, float* y, int tokens, int width, int threads) {
  const Operands<P> operands(tokens, w.in, {0, threads});
  Gate gate;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(gate);
    multiply<P>(w, operands.prepare(x, w.in, w.in, nullptr, 0, team), tokens, {y, width, width, Then::kStore, 0}, nullptr, team);
  }
}

// Calls `run` with a Chosen of the product that a precision stands for.
template <class P>
struct Chosen {
  using Product = P;
};

template <class Run>
void in_precision(int32_t precision, const Run& run) {
  switch (precision) {
    case kFloat32: return run(Chosen<FloatProduct<Float32>>());
    case kBfloat16: return run(Chosen<FloatProduct<Bfloat16>>());
    case kInt8: return run(Chosen<Int8>());
  }
}

void linear(int32_t precision, const Weight& w, const float* x, float* y, int tokens, int width, int threads) {
  in_precision(precision, [&](auto p) { run_linear<typename decltype(p)::Product>(w, x, y, tokens, width, threads); });
}

}  // namespace
