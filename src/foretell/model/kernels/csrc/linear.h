// Linear layers: activations are prepared as operands, and multiplied with a weight.

#pragma once

#include "interface.h"
#include "precisions.h"
#include "product.h"
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
    case kNVFP4:
      return run(TypeTag<NVFP4>());
    case kIQ4_NL:
      return run(TypeTag<IQ4_NL>());
    case kIQ4_XS:
      return run(TypeTag<IQ4_XS>());
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

// The weight that reads the inputs of a layer: the factor where it has one.
inline const Weight& reader(const Weight& w) { return w.factor ? *w.factor : w; }

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

// Of the first product of a feed-forward network.
inline Epilogue inner_epilogue(int32_t activation) {
  return activation == kRelu2 ? Epilogue::kSquare : Epilogue::kGate;
}

// Stores 16 numbers, from number `first` of a row on, as operands of the next product: as words where every number is
// rounded by itself, so that `Operands::prepare` is not needed; else as float32.
inline void store_operand(int32_t operand, float* row, int first, Float v) {
  if (operand != kBfloat16Operand) return store(row + first, v);
  float numbers[kLanes];
  store(numbers, v);
  Bfloat16::pack(numbers, kLanes, (uint32_t*)row + first / Bfloat16::kDepth);
}

// The activations of a product: normed where asked for, and rounded to the operand. rank: outputs of the largest
// factor; updated: of the largest update.
class Operands {
 public:
  Operands(int tokens, int widest, const Team& team, int rank = 0, int updated = 0)
      : every_thread_prepares_all_(tokens <= kFewTokens),
        tokens_(tokens),
        row_size_((size_t)round_up(std::max(widest, rank), 64)),
        words_(buffer<uint32_t>((size_t)tokens * (every_thread_prepares_all_ ? team.threads : 1) * row_size_)),
        rows_(buffer<float>(team.threads * row_size_)),
        latent_(buffer<float>((size_t)tokens * rank)),
        added_(buffer<float>((size_t)tokens * updated + (updated ? kPanel : 0))) {}

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

  // Lets the products of w have its update, of which x are the inputs, as its factor needs them.
  void add_update(const Weight& w, const Rows& x, Output& output, const Team& team) const {
    const Weight& update = *w.update;
    multiply_factor(update, x, team);
    const Rows latent = prepare(update.operand, latent_.get(), update.inputs, update.inputs, nullptr, 0, team);
    output.added = added_.get(), output.added_width = update.outputs;
    ::multiply(update, latent, tokens_, {added_.get(), update.outputs, update.outputs, Epilogue::kStore, 0, 0}, &w,
               team);
    team.barrier();
  }

  // Products with all parts of w, which write their outputs side by side. A part with another operand than the one
  // before prepares the activations again. Threads do not wait at the end.
  void multiply(const Weight& w, const float* x, int x_stride, const float* norm, float eps, Output output,
                const Weight* following, const Team& team) const {
    Rows rows = {};
    int32_t prepared = -1;
    if (w.update) {
      const Weight& f = *w.update->factor;
      add_update(w, prepare(f.operand, x, f.inputs, x_stride, norm, eps, team), output, team);
    }
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
      if (output.added) output.added += part->outputs;
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
  const Buffer<float> rows_, latent_, added_;
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
