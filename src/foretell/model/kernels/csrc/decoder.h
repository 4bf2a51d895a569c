// A pass through the layers of a decoder.

#pragma once

#include "attention.h"
#include "linear.h"

namespace {

template <class P>
class Pass {
 public:
  Pass(const Model& model, const Layer* layers, int first, int last, float* x, const float* entry, const Tokens& tokens,
       const Cache& cache, const Team& team)
      : m_(model),
        layers_(layers),
        first_(first),
        last_(last),
        x_(x),
        entry_(entry),
        tokens_(tokens.count),
        qkv_width_((model.heads + 2 * model.kv_heads) * model.head_dim),
        ffn_(round_up(model.ffn, kLanes)),
        sight_(tokens),
        attention_(model, sight_, cache, team),
        operands_(tokens.count, std::max({layers[first].qkv.in, model.hidden, model.heads * model.head_dim, ffn_}), team),
        qkv_(buffer<float>((size_t)tokens.count * qkv_width_)),
        inner_(buffer<float>((size_t)tokens.count * std::max(ffn_, model.heads * model.head_dim))),
        product_(buffer<float>((size_t)tokens.count * model.hidden)) {}

  // What every thread runs.
  void run(const Taps& taps, const Team& team) const {
    for (int i = first_, tap = 0; i < last_; ++i) {
      if (tap < taps.count && taps.layer[tap] == i) note(taps.out + (size_t)tap++ * tokens_ * m_.hidden, team);
      if (layers_[i].attention) attend(i, team);
      if (layers_[i].mlp) feed_forward(i, team);
    }
  }

 private:
  // Copies the stream. Nobody changes it before all threads have come to the next barrier.
  void note(float* out, const Team& team) const {
    const auto [from, to] = team.share(tokens_);
    std::memcpy(out + (size_t)from * m_.hidden, x_ + (size_t)from * m_.hidden, 4 * (size_t)(to - from) * m_.hidden);
  }

  void attend(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    const bool entering = entry_ && i == first_;
    const Rows rows = operands_.prepare(entering ? entry_ : x_, layer.qkv.in, layer.qkv.in, entering ? nullptr : layer.attention_norm, m_.eps, team);
    linear(rows, layer.qkv, {qkv_.get(), qkv_width_, qkv_width_, Then::kStore, 0}, &layer.output, team);
    attention_.place(layer, i, qkv_.get(), team);
    team.barrier();
    attention_.attend(layer, i, inner_.get(), team);
    team.barrier();
    join(m_.heads * m_.head_dim, layer.output, layer.post_attention_norm, &layer.gate_up, team);
  }

  void feed_forward(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    const Rows rows = operands_.prepare(x_, m_.hidden, m_.hidden, layer.mlp_norm, m_.eps, team);
    linear(rows, layer.gate_up, {inner_.get(), ffn_, ffn_, Then::kGate, m_.activation}, &layer.down, team);
    join(ffn_, layer.down, layer.post_mlp_norm, i + 1 < last_ ? &layers_[i + 1].qkv : nullptr, team);
  }

  void linear(const Rows& rows, const Weight& w, const Sink& sink, const Weight* next, const Team& team) const {
    multiply<P>(w, rows, tokens_, sink, next, team);
    team.barrier();
  }

  // What the inner part left, in rows of so many numbers.
  Rows left(int stride, const Weight& w, const Team& team) const {
    if constexpr (P::kSingly) return {(const uint32_t*)inner_.get(), (size_t)stride};
    return operands_.prepare(inner_.get(), w.in, stride, nullptr, 0, team);
  }

  // Adds a product of what the inner part left, normed if asked, to the residual stream.
  void join(int stride, const Weight& w, const float* norm, const Weight* next, const Team& team) const {
    float* y = norm ? product_.get() : x_;
    linear(left(stride, w, team), w, {y, m_.hidden, m_.hidden, norm ? Then::kStore : Then::kAdd, 0}, next, team);
    if (!norm) return;
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      float *row = y + (size_t)t * m_.hidden, *residual = x_ + (size_t)t * m_.hidden;
      normalize(row, m_.hidden, norm, m_.eps, row);
      for (int i = 0; i < m_.hidden; ++i) residual[i] += row[i];
    }
    team.barrier();
  }

  const Model& m_;
  const Layer* layers_;
  const int first_, last_;
  float* x_;
  const float* entry_;
  const int tokens_, qkv_width_, ffn_;
  const Sight sight_;
  const Attention<P> attention_;
  const Operands<P> operands_;
  const Buffer<float> qkv_, inner_, product_;
};

template <class P>
void run_stack(const Model& m, const Layer* layers, int first, int last, float* x, const float* entry, const Tokens& tokens,
               const Cache& cache, const Taps& taps, int threads) {
  const Pass<P> pass(m, layers, first, last, x, entry, tokens, cache, {0, threads});
  Gate gate;
#pragma omp parallel num_threads(threads)
  pass.run(taps, Team::current(gate));
}

// The first token that points outside the cache or the rotary tables, or sees nothing; -1: all are well.
int first_bad_token(const Model& m, const Tokens& tokens, const Cache& cache) {
  const auto within = [](int32_t x, int32_t end) { return x >= 0 && x < end; };
  for (int i = 0; i < tokens.count; ++i) {
    const View view = view_of(tokens, i);
    bool good = within(tokens.row[i], cache.rows) && within(tokens.slot[i], cache.slots) &&
                within(tokens.position[i], m.context) && within(view.run, cache.slots + 1) && view.length > 0;
    for (int j = view.run; j < view.length; ++j) good = good && within(view.slot(j), cache.slots);
    if (!good) return i;
  }
  return -1;
}

int32_t stack(const Model& m, const Layer* layers, int first, int last, float* x, const float* entry, const Tokens& tokens, const Cache& cache,
              const Taps& taps, int threads) {
  const int bad = first_bad_token(m, tokens, cache);
  if (bad >= 0 || !tokens.count || first == last) return bad;
  in_precision(m.precision, [&](auto p) { run_stack<typename decltype(p)::Product>(m, layers, first, last, x, entry, tokens, cache, taps, threads); });
  return -1;
}

}  // namespace
