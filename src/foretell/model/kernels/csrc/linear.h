// Linear layers: a matrix product and its epilogue.

#pragma once

#include "interface.h"
#include "precisions.h"
#include "row_ops.h"
#include "threads.h"

namespace {

// What is done with a product: it is stored, added to what is there, or gated: activation(gate) * up becomes an operand
// of the next product.
enum class Epilogue { kStore, kAdd, kGate };

struct Output {
  float* y;
  int stride;
  int width;  // numbers per row of y
  Epilogue epilogue;
  int32_t activation;
};

// Stores 16 numbers, from number `first` of a row on, as operands of the next product: as words where every number is
// rounded by itself, so that `Operands::prepare` is not needed; else as float32.
template <class P>
void store_operand(float* row, int first, Float v) {
  if constexpr (P::kRoundsEachNumber) {
    float numbers[kLanes];
    store(numbers, v);
    P::quantize(numbers, kLanes, (uint32_t*)row + P::row_words(first));
  } else {
    store(row + first, v);
  }
}

template <class P>
void apply_epilogue(const Output& output, const Weight& w, const Float* tile, int panel, int token) {
  Float v[2] = {tile[0], tile[1]};
  if (w.bias)
    for (int i = 0; i < 2; ++i) v[i] += load<Float>(w.bias + kPanel * panel + kLanes * i);
  float* row = output.y + (size_t)token * output.stride;
  if (output.epilogue == Epilogue::kGate) {
    store_operand<P>(row, kLanes * panel, activate(v[0], output.activation) * v[1]);
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const int first = kPanel * panel + kLanes * i, remaining = output.width - first;
    if (remaining <= 0) return;
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

const uint32_t* first_panel(const Weight& w, size_t panel_words, const Team& team) {
  return w.words + team.share((w.out + kPanel - 1) / kPanel).first * panel_words;
}

// Rows of words.
struct Rows {
  const uint32_t* words;
  size_t stride;
};

// y = x W^T for this thread's panels. A panel stays in the cache while all tokens are multiplied with it in blocks. Two
// blocks prefetch half of the next panel's lines each (after the last panel: those of the next layer's first panel).
template <class P>
void multiply(const Weight& w, const Rows& x, int tokens, const Output& output, const Weight* following,
              const Team& team) {
  const size_t panel_words = P::panel_words(w.in);
  const auto [from, to] = team.share((w.out + kPanel - 1) / kPanel);
  const int blocks = (tokens + P::kMaxTokens - 1) / P::kMaxTokens;
  const auto pick = tokens <= P::kFewTokens ? pick_tile<P, Prefetch::kHalf>
                    : blocks == 2           ? pick_tile<P, Prefetch::kNext>
                                            : pick_tile<P, Prefetch::kAhead>;
  Float out[2 * P::kMaxTokens];
  for (int p = from; p < to; ++p) {
    const uint32_t* panel = w.words + p * panel_words;
    const uint32_t* next = p + 1 < to  ? panel + panel_words
                           : following ? first_panel(*following, P::panel_words(following->in), team)
                                       : panel;
    for (int b = 0, t = 0; b < blocks; ++b) {
      const int count = (tokens - t + blocks - b - 1) / (blocks - b);
      pick(count)(panel, x.words + t * x.stride, x.stride, w.in, (const char*)next + 64 * b, out);
      for (int i = 0; i < count; ++i) apply_epilogue<P>(output, w, out + 2 * i, p, t + i);
      t += count;
    }
  }
}

// The activations of a product: normed where asked for, and rounded to the precision.
template <class P>
class Operands {
 public:
  Operands(int tokens, int widest, const Team& team)
      : every_thread_prepares_all_(tokens <= kFewTokens),
        tokens_(tokens),
        words_(
            buffer<uint32_t>((size_t)tokens * (every_thread_prepares_all_ ? team.threads : 1) * P::row_words(widest))),
        row_size_((size_t)round_up(widest, 64)),
        rows_(buffer<float>(team.threads * row_size_)) {}

  // Every thread prepares its share and waits for the others; for few tokens every thread prepares all of them, which
  // is quicker than waiting.
  Rows prepare(const float* x, int in, int x_stride, const float* norm, float eps, const Team& team) const {
    const size_t stride = P::row_words(in);
    const auto [from, to] = every_thread_prepares_all_ ? std::pair(0, tokens_) : team.share(tokens_);
    uint32_t* words = words_.get() + (every_thread_prepares_all_ ? team.thread * tokens_ * stride : 0);
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
    if (!every_thread_prepares_all_) team.barrier();
    return {words, stride};
  }

 private:
  static constexpr int kFewTokens = 4;
  const bool every_thread_prepares_all_;
  const int tokens_;
  const Buffer<uint32_t> words_;
  const size_t row_size_;
  const Buffer<float> rows_;
};

template <class P>
void run_linear(const Weight& w, const float* x, float* y, int tokens, int width, int threads) {
  const Operands<P> operands(tokens, w.in, {0, threads});
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const Team team = Team::current(barrier);
    multiply<P>(w, operands.prepare(x, w.in, w.in, nullptr, 0, team), tokens, {y, width, width, Epilogue::kStore, 0},
                nullptr, team);
  }
}

// Calls `run` with the TypeTag of a precision's product.
template <class P>
struct TypeTag {
  using Product = P;
};

template <class Run>
void dispatch_precision(int32_t precision, const Run& run) {
  switch (precision) {
    case kFloat32:
      return run(TypeTag<FloatProduct<Float32>>());
    case kBfloat16:
      return run(TypeTag<FloatProduct<Bfloat16>>());
    case kInt8:
      return run(TypeTag<Int8>());
  }
}

void linear(int32_t precision, const Weight& w, const float* x, float* y, int tokens, int width, int threads) {
  dispatch_precision(precision,
                     [&](auto p) { run_linear<typename decltype(p)::Product>(w, x, y, tokens, width, threads); });
}

}  // namespace
