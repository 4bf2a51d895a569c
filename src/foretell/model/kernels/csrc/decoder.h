// The forward pass through the layers of a decoder.

#pragma once

#include <array>

#include "attention.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "recurrent.h"
#include "sparse.h"
#include "units.h"

namespace {

// C: precision of keys and values.
template <class C>
class ForwardPass {
 public:
  ForwardPass(const Model& model, const Layer* layers, int first, int last, float* x, const float* attention_input,
              const Layout& layout, const Cache& cache, const Team& team)
      : m_(model),
        layers_(layers),
        first_(first),
        last_(last),
        x_(x),
        attention_input_(attention_input),
        tokens_(layout.count),
        qkv_width_((model.heads + 2 * model.cache_heads) * model.head_dim),
        ffn_(round_up(model.ffn, kLanes)),
        visibility_(layout, cache),
        attention_(model, visibility_, cache, team),
        experts_of_(first_experts(layers, first, last)),
        latent_of_(first_latent(layers, first, last)),
        state_width_(cache.states ? cache.states->width : 0),
        inner_width_(std::max({ffn_, model.heads * model.head_dim, input_width(layers, first, last),
                               cache.states ? StatePass::output_width(*cache.states) : 0})),
        operands_(layout.count,
                  std::max({reader(layers[first].qkv).inputs, inner_width_, model.hidden, model.heads * model.head_dim,
                            ffn_, experts_of_ ? round_up(experts_of_->shared_ffn, kLanes) : 0,
                            latent_of_ ? latent_of_->query_rank : 0, widest_predictor(layers, first, last)}),
                  team, largest_rank(layers, first, last), largest_update(layers, first, last)),
        qkv_(buffer<float>((size_t)layout.count * std::max(qkv_width_, state_width_))),
        inner_(buffer<float>((size_t)layout.count * inner_width_)),
        product_(buffer<float>((size_t)layout.count * model.hidden)),
        before_(model.parallel ? buffer<float>((size_t)layout.count * model.hidden) : Buffer<float>()) {
    if (experts_of_) experts_.emplace(model, *experts_of_, layout.count, team);
    for (int i = first; i < last && !sparse_; ++i)
      if (layers[i].sparse) sparse_.emplace(model, layout.count, widest_predictor(layers, first, last), ffn_);
    heads_ = units_of(&Layer::heads), neurons_ = units_of(&Layer::neurons);
    if (latent_of_) latent_.emplace(model, *latent_of_, layout.count, team);
    if (cache.states) states_.emplace(*cache.states, layout.count, team);
  }

  // Every thread of the team runs this. routes [last - first, tokens, active]: receives the experts of every token in
  // layers that have some; or null.
  void run(const HiddenLayers& hidden, int32_t* routes, const Team& team) const {
    if (m_.centered) center(team);
    for (int i = first_, recorded = 0; i < last_; ++i) {
      if (recorded < hidden.count && hidden.layer[recorded] == i)
        copy_hidden_state(hidden.out + (size_t)recorded++ * tokens_ * m_.hidden, team);
      choose_heads(i, team);
      if (m_.parallel) {
        copy_hidden_state(before_.get(), team);
        team.barrier();
      }
      if (layers_[i].attention == kKeysOnly)
        write_keys(i, team);
      else if (layers_[i].attention)
        layers_[i].state ? mix(i, team) : layers_[i].latent ? attend_latent(i, team) : attend(i, team);
      else
        take_shortcut(layers_[i].attention_shortcut, team);
      if (layers_[i].mlp) feed_forward(i, team);
      if (failed()) return;
      if (routes && layers_[i].mlp && layers_[i].experts && !team.thread)
        experts_->copy_routes(routes + (size_t)(i - first_) * experts_->entries());
      if (!layers_[i].mlp) take_shortcut(layers_[i].mlp_shortcut, team);
      finish(layers_[i], team);
    }
  }

  // Whether weights could not be read.
  bool failed() const { return experts_ && experts_->failed(); }

 private:
  // Copies the residual stream. No thread changes it before all have reached the next barrier.
  void copy_hidden_state(float* out, const Team& team) const {
    const auto [from, to] = team.share(tokens_);
    std::memcpy(out + (size_t)from * m_.hidden, x_ + (size_t)from * m_.hidden, 4 * (size_t)(to - from) * m_.hidden);
  }

  void attend(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    const bool given = attention_input_ && i == first_;
    const int width = layer.reads_keys ? m_.heads * m_.head_dim : qkv_width_;
    const uint8_t* panels = layer.heads ? heads_->panels(m_.head_dim) : nullptr;
    operands_.multiply(layer.qkv, given ? attention_input_ : x_, reader(layer.qkv).inputs,
                       given ? nullptr : layer.attention_norm, m_.eps,
                       {qkv_.get(), qkv_width_, width, Epilogue::kStore, 0, 0, panels}, &reader(layer.output), team);
    team.barrier();
    if (layer.heads) {
      heads_->clear(*layer.heads, qkv_.get(), (size_t)qkv_width_, m_.head_dim, team);
      team.barrier();
    }
    if (m_.qk_norm_over == kAllHeads) norm_all_heads(layer, true, team);
    attention_.rotate_and_store(layer, layer.store, qkv_.get(), team);
    team.barrier();
    attention_.pack(layer.store, team);
    attention_.note_pages(layer.store, team);
    attention_.select_pages(layer.store, team);
    const bool gated = layer.attention_gate.words;
    if (gated)
      attend_gated(layer, team);
    else
      attention_.attend(layer, layer.store, inner_.get(), team);
    team.barrier();
    if (layer.heads) {
      const bool pairs = !gated && layer.output.operand == kBfloat16Operand;
      heads_->clear(*layer.heads, inner_.get(), (size_t)(m_.heads * m_.head_dim),
                    pairs ? m_.head_dim / Bfloat16::kDepth : m_.head_dim, team);
      team.barrier();
    }
    take_shortcut(layer.attention_shortcut, team);
    add_to_residual(m_.heads * m_.head_dim, layer.output, layer.post_attention_norm, after_attention(i), team, !gated,
                    layer.heads ? heads_->runs() : nullptr);
  }

  // The units of the layers with a choice of a kind; none: nothing.
  std::unique_ptr<Units> units_of(const UnitChoice* Layer::* choice) const {
    int most = 0, rank = 0;
    for (int i = first_; i < last_; ++i)
      if (const UnitChoice* c = layers_[i].*choice)
        most = std::max(most, c->count), rank = std::max(rank, round_up(c->predict_in.outputs, kPanel));
    return most ? std::make_unique<Units>(tokens_, most, rank) : nullptr;
  }

  // Chooses the heads of a layer, and scores those of the next one where its predictor reads what this layer reads. The
  // first layer of a pass whose predictor reads what the layer before read, which is not known, reads all.
  void choose_heads(int i, const Team& team) const {
    const auto score = [&](const UnitChoice& c) {
      heads_->score(c, x_, m_.hidden, layers_[i].attention_norm, m_.eps, operands_, team);
    };
    if (const UnitChoice* c = layers_[i].heads) {
      if (!c->ahead) score(*c);
      heads_->choose(*c, c->ahead && i == first_, m_.head_dim / kPanel,
                     2 * m_.cache_heads * m_.head_dim / kPanel, team);
    }
    if (i + 1 < last_ && layers_[i + 1].heads && layers_[i + 1].heads->ahead) score(*layers_[i + 1].heads);
  }

  // The same for the neurons of a layer.
  void choose_neurons(int i, const Team& team) const {
    const auto score = [&](const UnitChoice& c) {
      neurons_->score(c, x_, m_.hidden, layers_[i].mlp_norm, m_.eps, operands_, team);
    };
    if (const UnitChoice* c = layers_[i].neurons) {
      if (!c->ahead) score(*c);
      neurons_->choose(*c, c->ahead && i == first_, 2 * c->unit / kPanel, 0, team);
    }
    if (i + 1 < last_ && layers_[i + 1].neurons && layers_[i + 1].neurons->ahead) score(*layers_[i + 1].neurons);
  }

  // Stores the keys and values of the stream, which stays as it is. Queries are left out where they are products of
  // their own.
  void write_keys(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    const int queries = m_.heads * m_.head_dim;
    const bool apart = layer.qkv.next && layer.qkv.outputs == queries && !layer.qkv.update;
    const Weight& keys = apart ? *layer.qkv.next : layer.qkv;
    const int width = apart ? qkv_width_ - queries : qkv_width_;
    const bool given = attention_input_ && i == first_;
    operands_.multiply(keys, given ? attention_input_ : x_, reader(keys).inputs,
                       given ? nullptr : layer.attention_norm, m_.eps,
                       {qkv_.get() + (apart ? queries : 0), qkv_width_, width, Epilogue::kStore, 0, 0}, nullptr, team);
    team.barrier();
    if (m_.qk_norm_over == kAllHeads) norm_all_heads(layer, false, team);
    attention_.rotate_and_store(layer, layer.store, qkv_.get(), team, m_.heads);
    team.barrier();
    attention_.pack(layer.store, team);
    attention_.note_pages(layer.store, team);
  }

  // The norms of all heads of the queries together, and of the keys; ends with a barrier.
  void norm_all_heads(const Layer& layer, bool queries, const Team& team) const {
    const int width = m_.heads * m_.head_dim, keys = m_.cache_heads * m_.head_dim;
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      float* row = qkv_.get() + (size_t)t * qkv_width_;
      if (queries && layer.q_norm) normalize(row, width, layer.q_norm, m_.eps, row);
      if (layer.k_norm) normalize(row + width, keys, layer.k_norm, m_.eps, row + width);
    }
    team.barrier();
  }

  // Attention, multiplied by the sigmoid of its gates.
  void attend_gated(const Layer& layer, const Team& team) const {
    const int width = m_.heads * m_.head_dim;
    Layer plain = layer;
    plain.output.operand = kFloat32Operand;
    attention_.attend(plain, layer.store, inner_.get(), team);
    team.barrier();
    operands_.multiply(layer.attention_gate, x_, m_.hidden, layer.attention_norm, m_.eps,
                       {qkv_.get(), width, width, Epilogue::kStore, 0, 0}, &layer.output, team);
    team.barrier();
    const auto [from, to] = team.share(tokens_ * m_.heads);
    const size_t end = (size_t)to * m_.head_dim;
    for (size_t i = (size_t)from * m_.head_dim; i < end; i += kLanes)
      store(inner_.get() + i, load<Float>(inner_.get() + i) * sigmoid(load<Float>(qkv_.get() + i)));
  }

  // Latent attention.
  void attend_latent(int i, const Team& team) const {
    Layer layer = layers_[i];
    latent_->project(layer, x_, operands_, qkv_.get(), team);
    team.barrier();
    attention_.rotate_and_store(layer, layer.store, qkv_.get(), team);
    team.barrier();
    layer.output.operand = kFloat32Operand;
    attention_.attend(layer, layer.store, qkv_.get(), team);
    team.barrier();
    latent_->expand(*layer.latent, qkv_.get(), inner_.get(), team);
    team.barrier();
    add_to_residual(layer.output.inputs, layers_[i].output, layer.post_attention_norm, after_attention(i), team, false);
  }

  // The recurrent state in place of attention.
  void mix(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    operands_.multiply(layer.qkv, x_, m_.hidden, layer.attention_norm, m_.eps,
                       {qkv_.get(), state_width_, state_width_, Epilogue::kStore, 0, 0}, &layer.output, team);
    team.barrier();
    states_->run(*layer.state, qkv_.get(), inner_.get(), layer.output.inputs, team);
    add_to_residual(layer.output.inputs, layer.output, layer.post_attention_norm, after_attention(i), team, false);
  }

  static const Weight* of_network(const Layer& layer) {
    return layer.experts && !layer.gate_up.words ? &layer.experts->router : &reader(layer.gate_up);
  }
  // The weight that is read next, which is prefetched; null: there is none.
  const Weight* after_layer(int i) const {
    if (i + 1 == last_) return nullptr;
    const Layer& next = layers_[i + 1];
    return next.qkv.words ? &reader(next.qkv) : of_network(next);
  }
  const Weight* after_attention(int i) const {
    const Weight* own = of_network(layers_[i]);
    return own->words ? own : after_layer(i);
  }

  static const Latent* first_latent(const Layer* layers, int first, int last) {
    for (int i = first; i < last; ++i)
      if (layers[i].latent) return layers[i].latent;
    return nullptr;
  }

  // Numbers of the largest latent vector of a predictor.
  static int widest_predictor(const Layer* layers, int first, int last) {
    int widest = 0;
    for (int i = first; i < last; ++i) {
      if (layers[i].sparse) widest = std::max(widest, layers[i].sparse->predict_in.outputs);
      for (const UnitChoice* c : {layers[i].heads, layers[i].neurons})
        if (c) widest = std::max(widest, c->predict_in.outputs);
    }
    return widest;
  }

  static int largest_rank(const Layer* layers, int first, int last) {
    int rank = 0;
    for (int i = first; i < last; ++i)
      for (const Weight* w : linears(layers[i])) {
        if (w->factor) rank = std::max(rank, w->factor->outputs);
        if (w->update) rank = std::max(rank, w->update->inputs);
      }
    return rank;
  }

  static int largest_update(const Layer* layers, int first, int last) {
    int outputs = 0;
    for (int i = first; i < last; ++i)
      for (const Weight* w : linears(layers[i]))
        if (w->update) outputs = std::max(outputs, w->update->outputs);
    return outputs;
  }

  static std::array<const Weight*, 5> linears(const Layer& layer) {
    return {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &layer.attention_gate};
  }

  static const Experts* first_experts(const Layer* layers, int first, int last) {
    for (int i = first; i < last; ++i)
      if (layers[i].experts) return layers[i].experts;
    return nullptr;
  }

  void feed_forward(int i, const Team& team) const {
    const Layer& layer = layers_[i];
    const Weight* following = after_layer(i);
    if (layer.experts && layer.down.words) return dense_and_experts(layer, following, team);
    if (layer.experts) return experts_->run(layer, x_, nullptr, operands_, following, team);
    if (layer.sparse) {
      sparse_->run(layer, x_, inner_.get(), operands_, team);
      add_to_residual(ffn_, layer.down, layer.post_mlp_norm, following, team);
      if (layer.sparse->places && !team.thread) give_back(*layer.sparse->places, m_.ffn);
      return;
    }
    const Weight& down = reader(layer.down);
    choose_neurons(i, team);
    const UnitChoice* chosen = layer.neurons;
    operands_.multiply(layer.gate_up, m_.parallel ? before_.get() : x_, m_.hidden, layer.mlp_norm, m_.eps,
                       {inner_.get(), ffn_, ffn_, inner_epilogue(m_.activation), m_.activation, down.operand,
                        chosen ? neurons_->panels(2 * chosen->unit) : nullptr},
                       &down, team);
    team.barrier();
    if (chosen) {
      const int depth = down.operand == kBfloat16Operand ? Bfloat16::kDepth : 1;
      neurons_->clear(*chosen, inner_.get(), (size_t)ffn_, chosen->unit / depth, team);
      team.barrier();
    }
    take_shortcut(layer.mlp_shortcut, team);
    add_to_residual(ffn_, layer.down, layer.post_mlp_norm, following, team, true, chosen ? neurons_->runs() : nullptr);
  }

  // A dense network and experts, each with its own norm, and the norm of their sum.
  void dense_and_experts(const Layer& layer, const Weight* following, const Team& team) const {
    const Experts& e = *layer.experts;
    operands_.multiply(layer.gate_up, x_, m_.hidden, layer.mlp_norm, m_.eps,
                       {inner_.get(), ffn_, ffn_, inner_epilogue(m_.activation), m_.activation, layer.down.operand},
                       &layer.down, team);
    team.barrier();
    multiply(layer.down, inner_operands(ffn_, layer.down, true, team), tokens_,
             {product_.get(), m_.hidden, m_.hidden, Epilogue::kStore, 0, 0}, &e.router, team);
    team.barrier();
    experts_->run(layer, x_, inner_.get(), operands_, following, team);
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      float *dense = product_.get() + (size_t)t * m_.hidden, *sum = inner_.get() + (size_t)t * m_.hidden;
      normalize(dense, m_.hidden, e.dense_norm, m_.eps, dense);
      normalize(sum, m_.hidden, e.output_norm, m_.eps, sum);
      for (int i = 0; i < m_.hidden; ++i) dense[i] += sum[i];
      if (layer.post_mlp_norm) normalize(dense, m_.hidden, layer.post_mlp_norm, m_.eps, dense);
      float* residual = x_ + (size_t)t * m_.hidden;
      for (int i = 0; i < m_.hidden; ++i) residual[i] += m_.residual_scale * dense[i];
    }
    team.barrier();
  }

  // What follows attention and feed-forward: per-layer inputs, and the factor on the residual stream.
  void finish(const Layer& layer, const Team& team) const {
    if (layer.input_gate.words) add_layer_input(layer, team);
    if (m_.centered) center(team);
    if (layer.scale == 0) return;
    const auto [from, to] = team.share(tokens_);
    for (size_t i = (size_t)from * m_.hidden; i < (size_t)to * m_.hidden; ++i) x_[i] *= layer.scale;
    team.barrier();
  }

  // Subtracts the mean of every row of the residual stream.
  void center(const Team& team) const {
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      float* row = x_ + (size_t)t * m_.hidden;
      Float total = {};
      for (int i = 0; i < m_.hidden; i += kLanes) total = total + load_part<Float>(row + i, m_.hidden - i);
      const float mean = sum(total) / (float)m_.hidden;
      for (int i = 0; i < m_.hidden; ++i) row[i] -= mean;
    }
    team.barrier();
  }

  void add_layer_input(const Layer& layer, const Team& team) const {
    const int width = layer.input_gate.outputs, stride = round_up(width, kLanes);
    operands_.multiply(layer.input_gate, x_, m_.hidden, nullptr, 0,
                       {inner_.get(), stride, width, Epilogue::kStore, 0, 0}, &layer.input_projection, team);
    team.barrier();
    const Layout& layout = visibility_.layout();
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      const float* input = layout.layer_inputs + (size_t)t * layout.input_width + layer.input_first;
      float* row = inner_.get() + (size_t)t * stride;
      for (int i = 0; i < width; i += kLanes)
        store_part(row + i, gated(load_part<Float>(row + i, width - i), load_part<Float>(input + i, width - i),
                                  m_.activation),
                   width - i);
    }
    team.barrier();
    add_to_residual(stride, layer.input_projection, layer.input_norm, nullptr, team, false);
  }

  static int input_width(const Layer* layers, int first, int last) {
    int width = 0;
    for (int i = first; i < last; ++i)
      width = std::max({width, round_up(layers[i].input_gate.outputs, kLanes),
                        layers[i].experts && layers[i].down.words ? layers[i].down.outputs : 0});
    return width;
  }

  // The output of attention or of the gate as operands, in rows of `stride` numbers. `rounded`: operands that round
  // each number by itself were written as such.
  Rows inner_operands(int stride, const Weight& w, bool rounded, const Team& team) const {
    if (!rounded || !rounds_each_number(w.operand))
      return operands_.prepare(w.operand, inner_.get(), w.inputs, stride, nullptr, 0, team);
    return {(const uint32_t*)inner_.get(), (size_t)stride};
  }

  // The product of the residual stream with a shortcut, where the layer has one, takes its place.
  void take_shortcut(const Weight& w, const Team& team) const {
    if (!w.words) return;
    operands_.multiply(w, x_, m_.hidden, nullptr, 0, {product_.get(), m_.hidden, m_.hidden, Epilogue::kStore, 0, 0},
                       nullptr, team);
    team.barrier();
    const auto [from, to] = team.share(tokens_);
    std::memcpy(x_ + (size_t)from * m_.hidden, product_.get() + (size_t)from * m_.hidden,
                4 * (size_t)(to - from) * m_.hidden);
    team.barrier();
  }

  // Adds the product of the inner operands with w, normed where the architecture asks for it, to the residual stream.
  void add_to_residual(int stride, const Weight& w, const float* norm, const Weight* next, const Team& team,
                       bool rounded = true, const Runs* runs = nullptr) const {
    const bool adds = !norm && m_.residual_scale == 1;
    float* y = adds ? x_ : product_.get();
    Output output = {y, m_.hidden, m_.hidden, adds ? Epilogue::kAdd : Epilogue::kStore, 0, 0, nullptr, runs};
    if (w.update) {
      const bool words = rounded && rounds_each_number(w.operand);  // of which its factor has the operand, too
      operands_.add_update(w, inner_operands(stride, *w.update->factor, words, team), output, team);
    }
    const Rows inner = inner_operands(stride, reader(w), rounded, team);
    multiply(w, w.factor ? operands_.through_factor(w, inner, team) : inner, tokens_, output, next, team);
    team.barrier();
    if (adds) return;
    const auto [from, to] = team.share(tokens_);
    for (int t = from; t < to; ++t) {
      float *row = y + (size_t)t * m_.hidden, *residual = x_ + (size_t)t * m_.hidden;
      if (norm) normalize(row, m_.hidden, norm, m_.eps, row);
      for (int i = 0; i < m_.hidden; ++i) residual[i] += m_.residual_scale * row[i];
    }
    team.barrier();
  }

  const Model& m_;
  const Layer* layers_;
  const int first_, last_;
  float* x_;
  const float* attention_input_;
  const int tokens_, qkv_width_, ffn_;
  const Visibility visibility_;
  const Attention<C> attention_;
  const Experts* const experts_of_;  // of the first layer that has some; all have the same sizes
  const Latent* const latent_of_;    // likewise
  const int state_width_, inner_width_;
  const Operands operands_;
  std::optional<ExpertPass> experts_;
  std::optional<LatentPass> latent_;
  std::optional<SparsePass> sparse_;
  std::optional<StatePass> states_;
  std::unique_ptr<Units> heads_, neurons_;
  const Buffer<float> qkv_, inner_, product_;
  const Buffer<float> before_;  // the residual stream before the attention of a parallel block
};

template <class C>
bool run_stack(const Model& m, const Layer* layers, int first, int last, float* x, const float* attention_input,
               const Layout& layout, const Cache& cache, const HiddenLayers& hidden, int32_t* routes,
               int threads) {
  const ForwardPass<C> pass(m, layers, first, last, x, attention_input, layout, cache, {0, threads});
  Barrier barrier_state;
#pragma omp parallel num_threads(threads)
  pass.run(hidden, routes, Team::current(barrier_state));
  return !pass.failed();
}

// The first token that points outside the cache or the rotary tables, or has no visible key; -1: there is none.
int first_invalid_token(const Model& m, const Layout& layout, const Cache& cache) {
  const auto within = [](int32_t x, int32_t end) { return x >= 0 && x < end; };
  for (int i = 0; i < layout.count; ++i) {
    if (!within(layout.row[i], cache.rows) || !within(layout.position[i], m.context)) return i;
    const int32_t* table = cache.table + (size_t)layout.row[i] * cache.row_blocks;
    const auto has = [&](int32_t slot) {
      return within(slot, cache.row_blocks * kCacheBlock) && within(table[slot / kCacheBlock], cache.blocks);
    };
    const VisibleKeys keys = visible_keys_of(layout, i);
    bool valid = has(layout.slot[i]) && keys.prefix >= 0 && keys.length > 0;
    const int packed = packed_slots_for(cache, layout.position[i], keys.prefix);
    valid = valid && packed <= cache.packed_row_blocks * kCacheBlock;
    for (int slot = 0; valid && slot < packed; slot += kCacheBlock)
      valid = within(cache.packed_table[(size_t)layout.row[i] * cache.packed_row_blocks + slot / kCacheBlock],
                     cache.packed_blocks);
    for (int slot = packed; valid && slot < keys.prefix; slot += kCacheBlock - slot % kCacheBlock) valid = has(slot);
    for (int j = keys.prefix; valid && j < keys.length; ++j) valid = has(keys.slot(j));
    if (!valid) return i;
  }
  return -1;
}

int32_t stack(const Model& m, const Layer* layers, int first, int last, float* x, const float* attention_input,
              const Layout& layout, const Cache& cache, const HiddenLayers& hidden, int threads,
              int32_t* routes = nullptr) {
  const int invalid = first_invalid_token(m, layout, cache);
  if (invalid >= 0 || !layout.count || first == last) return invalid;
  const auto run = m.cache_kind == kFloat32 ? run_stack<Float32> : run_stack<Bfloat16>;
  const bool complete = run(m, layers, first, last, x, attention_input, layout, cache, hidden, routes, threads);
  return complete ? -1 : kUnreadable;
}

}  // namespace
