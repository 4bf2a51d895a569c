// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form: what is before and after the
// attention of many query heads to one key per token.
//
// A key is [rotated part, latent vector], and so is a query: the matrices that would expand latent vectors to keys and
// values per head are applied to queries and outputs. A head's products are one thread's.

#pragma once

#include "linear.h"

namespace {

class LatentPass {
 public:
  LatentPass(const Model& m, const Latent& l, int tokens, const Team& team)
      : m_(m),
        tokens_(tokens),
        query_width_(m.heads * (l.nope_dim + l.rope_dim)),
        width_((l.query_rank ? l.query_rank : query_width_) + l.kv_rank + l.rope_dim),
        head_stride_((m.heads + 2) * m.head_dim),
        row_size_((size_t)round_up(std::max(l.nope_dim, l.kv_rank), 2 * kPanel)),
        projected_(buffer<float>((size_t)tokens * width_)),
        queries_(buffer<float>(l.query_rank ? (size_t)tokens * query_width_ : 0)),
        words_(buffer<uint32_t>((size_t)team.threads * tokens * row_size_)),
        rows_(buffer<float>(team.threads * row_size_)) {}

  // Writes the absorbed queries, the key and the value of every token to heads [tokens, heads + 2, head_dim].
  void project(const Layer& layer, const float* x, const Operands& operands, float* heads, const Team& team) const {
    const Latent& l = *layer.latent;
    operands.multiply(layer.qkv, x, m_.hidden, layer.attention_norm, m_.eps,
                      {projected_.get(), width_, width_, Epilogue::kStore, 0, 0},
                      l.query_rank ? &l.query : nullptr, team);
    team.barrier();
    if (l.query_rank) {
      operands.multiply(l.query, projected_.get(), width_, l.query_norm, l.eps,
                        {queries_.get(), query_width_, query_width_, Epilogue::kStore, 0, 0}, nullptr, team);
      team.barrier();
    }
    absorb(l, heads, team);
    store_keys(l, heads, team);
  }

  // Values per head [tokens, heads * value_dim] from the output of attention [tokens, heads, head_dim].
  void expand(const Latent& l, const float* attended, float* out, const Team& team) const {
    const auto [from, to] = team.share(m_.heads);
    for (int h = from; h < to; ++h)
      multiply_head(l.value[h], attended + (size_t)h * m_.head_dim + l.rope_dim, m_.heads * m_.head_dim,
                    {out + h * l.value_dim, m_.heads * l.value_dim, l.value_dim, Epilogue::kStore, 0, 0}, team);
  }

 private:
  void absorb(const Latent& l, float* heads, const Team& team) const {
    const float* queries = l.query_rank ? queries_.get() : projected_.get();
    const int stride = l.query_rank ? query_width_ : width_, size = l.nope_dim + l.rope_dim;
    const auto [from, to] = team.share(m_.heads);
    for (int h = from; h < to; ++h) {
      float* out = heads + (size_t)h * m_.head_dim;
      multiply_head(l.key[h], queries + (size_t)h * size, stride,
                    {out + l.rope_dim, head_stride_, l.kv_rank, Epilogue::kStore, 0, 0}, team);
      for (int t = 0; t < tokens_; ++t)
        std::memcpy(out + (size_t)t * head_stride_, queries + (size_t)t * stride + h * size + l.nope_dim,
                    4 * (size_t)l.rope_dim);
    }
  }

  // The key, and the same again as the value: of that the rotated part is dropped.
  void store_keys(const Latent& l, float* heads, const Team& team) const {
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      const float* latent = projected_.get() + (size_t)(t + 1) * width_ - l.kv_rank - l.rope_dim;
      float* key = heads + (size_t)t * head_stride_ + (size_t)m_.heads * m_.head_dim;
      std::memcpy(key, latent + l.kv_rank, 4 * (size_t)l.rope_dim);
      normalize(latent, l.kv_rank, l.key_norm, l.eps, key + l.rope_dim);
      std::memcpy(key + m_.head_dim, key, 4 * (size_t)m_.head_dim);
    }
  }

  // The product of one head for all tokens, by this thread alone.
  void multiply_head(const Weight& w, const float* x, int x_stride, const Output& output, const Team& team) const {
    const size_t stride = row_words(w.operand, w.inputs);
    uint32_t* words = words_.get() + (size_t)team.thread * tokens_ * row_size_;
    float* row = rows_.get() + team.thread * row_size_;
    for (int i = w.inputs; i < round_up(w.inputs, 64); ++i) row[i] = 0;
    with_operand(w.operand, [&](auto o) {
      for (int t = 0; t < tokens_; ++t) {
        std::memcpy(row, x + (size_t)t * x_stride, 4 * (size_t)w.inputs);
        decltype(o)::Type::quantize(row, w.inputs, words + t * stride);
      }
    });
    multiply(w, {words, stride}, tokens_, output, nullptr, Team());
  }

  const Model& m_;
  const int tokens_, query_width_, width_, head_stride_;
  const size_t row_size_;
  const Buffer<float> projected_, queries_;
  const Buffer<uint32_t> words_;
  const Buffer<float> rows_;
};

}  // namespace
