// Mixture-of-experts feed-forward networks.
//
// A pass routes all tokens, sorts (token, expert) pairs by expert, and multiplies every expert that has a token with
// its tokens. Each product goes to a place of its own, and a token's products are added in order of expert index, so
// that its numbers do not depend on the other tokens. Experts without tokens are not read. Where experts lie in a file,
// they are brought into memory and multiplied in rounds, as many at a time as there is room for.

#pragma once

#include <optional>

#include "linear.h"

namespace {

inline Float sigmoid(Float x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }

// Chooses the experts of a token from the router's logits.
class Router {
 public:
  Router(const Experts& experts, int threads)
      : size_((size_t)round_up(experts.count, kLanes)),
        numbers_(buffer<float>(threads * 4 * size_)),
        indices_(buffer<int64_t>(threads * size_)) {}

  // Writes the token's experts, ascending, and their weights. Of equals the lower index comes first.
  void route(const Experts& e, const float* logits, int32_t* expert, float* weight, int thread) const {
    float *score = numbers_.get() + thread * 4 * size_, *choice = score + size_, *best = choice + size_,
          *group = best + size_;
    int64_t* index = indices_.get() + thread * size_;
    score_experts(e, logits, score);
    for (int i = 0; i < e.count; ++i)
      // Large logits have equal sigmoids, so that logits decide where nothing is added to the scores.
      choice[i] = e.selection_bias ? (e.scoring == kSigmoid ? score[i] : logits[i]) + e.selection_bias[i] : logits[i];
    if (e.active_groups < e.groups) exclude_groups(e, choice, best, group, index);
    topk_row(choice, e.count, e.active, best, index);
    std::sort(index, index + e.active);
    float total = 1e-20f;
    for (int j = 0; j < e.active; ++j) {
      expert[j] = (int32_t)index[j];
      weight[j] = score[index[j]];
      total += weight[j];
    }
    for (int j = 0; j < e.active; ++j) weight[j] = (e.renormalize ? weight[j] / total : weight[j]) * e.scale;
    if (e.expert_scale)
      for (int j = 0; j < e.active; ++j) weight[j] *= e.expert_scale[expert[j]];
  }

 private:
  static void score_experts(const Experts& e, const float* logits, float* score) {
    float most = 0;
    if (e.scoring == kSoftmax) most = *std::max_element(logits, logits + e.count);
    Float total = {};
    for (int i = 0; i < e.count; i += kLanes) {
      const Float x = load_part<Float>(logits + i, e.count - i);
      const Float y = e.scoring == kSigmoid ? sigmoid(x) : exponential(x - splat(most));
      total += select(kIota < splat((int32_t)(e.count - i)), y, Float{});
      store(score + i, y);
    }
    if (e.scoring == kSigmoid) return;
    const float all = sum(total);
    for (int i = 0; i < e.count; ++i) score[i] /= all;
  }

  // Sets the choices outside the best groups to -infinity: those with the largest sum of their best choices.
  static void exclude_groups(const Experts& e, float* choice, float* best, float* group, int64_t* index) {
    const int size = e.count / e.groups;
    for (int g = 0; g < e.groups; ++g) {
      topk_row(choice + g * size, size, e.ranked_by, best, index);
      group[g] = 0;
      for (int i = 0; i < e.ranked_by; ++i) group[g] += best[i];
    }
    topk_row(group, e.groups, e.active_groups, best, index);
    std::sort(index, index + e.active_groups);
    for (int g = 0, kept = 0; g < e.groups; ++g) {
      if (kept < e.active_groups && index[kept] == g)
        ++kept;
      else
        std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
    }
  }

  const size_t size_;
  const Buffer<float> numbers_;
  const Buffer<int64_t> indices_;
};

// The mixture-of-experts layers of a pass over some tokens. All layers of a model have experts of the same sizes.
class ExpertPass {
 public:
  ExpertPass(const Model& model, const Experts& e, int tokens, const Team& team)
      : m_(model),
        tokens_(tokens),
        entries_(tokens * e.active),
        count_(e.count),
        ffn_(round_up(e.ffn, kLanes)),
        shared_ffn_(round_up(e.shared_ffn, kLanes)),
        every_thread_routes_all_(tokens <= kFewTokens),
        row_size_((size_t)round_up(model.hidden, 64)),
        router_(e, team.threads),
        inner_operands_(entries_, ffn_, team),
        logits_(buffer<float>((size_t)tokens * e.router.outputs)),
        weight_(buffer<float>((size_t)entries_ * team.threads)),
        expert_(buffer<int32_t>((size_t)entries_ * team.threads)),
        place_(buffer<int32_t>((size_t)entries_ * team.threads)),
        first_(buffer<int32_t>((size_t)(e.count + 1) * team.threads)),
        gathered_(buffer<uint32_t>(tokens == 1 || e.weighs_inputs ? 0 : entries_ * row_size_ * copies(team))),
        weighted_(buffer<float>(e.weighs_inputs ? (size_t)entries_ * model.hidden : 0)),
        inner_(buffer<float>((size_t)entries_ * ffn_)),
        parts_(buffer<float>((size_t)entries_ * model.hidden)),
        used_(buffer<int32_t>((size_t)e.count)),
        loaded_(buffer<int32_t>(1)),
        shared_inner_(buffer<float>((size_t)tokens * shared_ffn_)),
        shared_(buffer<float>(e.shared_ffn ? (size_t)tokens * model.hidden : 0)) {
    if (e.weighs_inputs) weighted_operands_.emplace(entries_, model.hidden, team);
    loaded_[0] = 1;
  }

  // Adds a layer's network to the residual stream x, or where `out` is not null writes its output there. `operands` are
  // large enough for hidden and shared_ffn inputs.
  void run(const Layer& layer, float* x, float* out, const Operands& operands, const Weight* following,
          const Team& team) const {
    const Experts& e = *layer.experts;
    const float *router_norm = e.router_norm ? e.router_norm : layer.mlp_norm,
                *input_norm = e.input_norm ? e.input_norm : layer.mlp_norm;
    operands.multiply(e.router, x, m_.hidden, router_norm, m_.eps,
                      {logits_.get(), e.router.outputs, e.router.outputs, Epilogue::kStore, 0, 0}, nullptr, team);
    team.barrier();
    const Routes routes = route(e, team);
    if (e.shared_ffn) {
      operands.multiply(e.shared_gate_up, x, m_.hidden, layer.mlp_norm, m_.eps,
                        {shared_inner_.get(), shared_ffn_, shared_ffn_, inner_epilogue(m_.activation), m_.activation,
                         e.shared_down.operand},
                        nullptr, team);
      team.barrier();
    }
    const Rows rows =
        e.weighs_inputs
            ? weigh_inputs(e, routes, x, input_norm, team)
            : gather(routes, operands.prepare(e.gate_up->operand, x, m_.hidden, m_.hidden, input_norm, m_.eps, team),
                     team);
    for (int first = 0; first < count_;) {
      const int last = load_experts(e, routes, first, x, team);
      if (failed()) return;
      multiply_experts(e, routes, rows, first, last, last < count_ ? nullptr : following, team);
      first = last;
    }
    if (e.shared_ffn) {
      const Weight& w = e.shared_down;
      const float* inner = shared_inner_.get();
      const Rows prepared = rounds_each_number(w.operand)
                                ? Rows{(const uint32_t*)inner, (size_t)shared_ffn_}
                                : operands.prepare(w.operand, inner, w.inputs, shared_ffn_, nullptr, 0, team);
      multiply(w, prepared, tokens_, {shared_.get(), m_.hidden, m_.hidden, Epilogue::kStore, 0, 0}, following, team);
    }
    team.barrier();
    add_parts(e, routes, x, out, team);
    team.barrier();
  }

  // Whether experts could not be read; the pass is to end.
  bool failed() const { return loaded_[0] <= 0; }

  // (token, expert) pairs of a layer.
  size_t entries() const { return (size_t)entries_; }

  // Copies the experts of the tokens of the last layer, [tokens, active]; for the first thread of the team.
  void copy_routes(int32_t* out) const { std::copy_n(expert_.get(), entries_, out); }

 private:
  // The experts of the tokens, [tokens, active], ascending per token, with their weights, and the place of every pair
  // in the order by expert; expert e has places first[e] .. first[e + 1] - 1.
  struct Routes {
    const int32_t* expert;
    const float* weight;
    const int32_t *place, *first;
  };

  size_t copies(const Team& team) const { return every_thread_routes_all_ ? (size_t)team.threads : 1; }

  // Every thread routes its share and waits for the others, or routes all where there are few tokens.
  Routes route(const Experts& e, const Team& team) const {
    const size_t mine = (size_t)team.thread * entries_, chosen = every_thread_routes_all_ ? mine : 0;
    int32_t *expert = expert_.get() + chosen, *place = place_.get() + mine,
            *first = first_.get() + (size_t)team.thread * (count_ + 1);
    float* weight = weight_.get() + chosen;
    const auto [from, to] = every_thread_routes_all_ ? std::pair(0, tokens_) : team.share(tokens_);
    for (int t = from; t < to; ++t)
      router_.route(e, logits_.get() + (size_t)t * e.router.outputs, expert + t * e.active, weight + t * e.active,
                    team.thread);
    if (!every_thread_routes_all_) team.barrier();
    std::fill(first, first + count_ + 1, 0);
    for (int i = 0; i < entries_; ++i) ++first[expert[i] + 1];
    for (int i = 0; i < count_; ++i) first[i + 1] += first[i];
    for (int i = 0; i < entries_; ++i) place[i] = first[expert[i]]++;
    for (int i = count_; i > 0; --i) first[i] = first[i - 1];
    first[0] = 0;
    return {expert, weight, place, first};
  }

  // The rows of the tokens in the order by expert; of a single token its only row.
  Rows gather(const Routes& routes, const Rows& rows, const Team& team) const {
    if (tokens_ == 1) return rows;
    const auto [from, to] = every_thread_routes_all_ ? std::pair(0, entries_) : team.share(entries_);
    uint32_t* out = gathered_.get() + (every_thread_routes_all_ ? team.thread * entries_ * row_size_ : 0);
    const int active = entries_ / tokens_;
    for (int i = from; i < to; ++i)
      std::memcpy(out + routes.place[i] * rows.stride, rows.words + i / active * rows.stride, 4 * rows.stride);
    if (!every_thread_routes_all_) team.barrier();
    return {out, rows.stride};
  }

  // The normed inputs of every (token, expert) pair times the expert's weight, in the order by expert.
  Rows weigh_inputs(const Experts& e, const Routes& routes, const float* x, const float* norm, const Team& team) const {
    const auto [from, to] = team.share(entries_);
    const int active = entries_ / tokens_;
    for (int i = from; i < to; ++i) {
      float* row = weighted_.get() + (size_t)routes.place[i] * m_.hidden;
      normalize(x + (size_t)(i / active) * m_.hidden, m_.hidden, norm, m_.eps, row);
      for (int j = 0; j < m_.hidden; ++j) row[j] *= routes.weight[i];
    }
    team.barrier();
    return weighted_operands_->prepare(e.gate_up->operand, weighted_.get(), m_.hidden, m_.hidden, nullptr, 0, team);
  }

  // Brings experts from number `first` on into memory; returns the number after the last one that may be multiplied.
  int load_experts(const Experts& e, const Routes& routes, int first, const float* x, const Team& team) const {
    if (!e.load) return count_;
    int32_t* used = used_.get();
    team.barrier();
    if (!team.thread) {
      int count = 0;
      for (int i = first; i < count_; ++i)
        if (routes.first[i] < routes.first[i + 1]) used[count++] = i;
      loaded_[0] = count ? e.load(e.layer, used, count, x, tokens_) : 1;
      used[0] = loaded_[0] < count ? used[std::max(loaded_[0], 0)] : count_;
    }
    team.barrier();
    return used[0];
  }

  // The networks of experts first .. last - 1.
  void multiply_experts(const Experts& e, const Routes& routes, const Rows& rows, int first, int last,
                        const Weight* following, const Team& team) const {
    const int32_t down = e.down->operand;
    multiply_each(e.gate_up, routes, rows, tokens_ > 1 || e.weighs_inputs, first, last,
                  {inner_.get(), ffn_, ffn_, inner_epilogue(m_.activation), m_.activation, down}, nullptr, team);
    team.barrier();
    const Rows inner = rounds_each_number(down)
                           ? Rows{(const uint32_t*)inner_.get(), (size_t)ffn_}
                           : inner_operands_.prepare(down, inner_.get(), e.ffn, ffn_, nullptr, 0, team,
                                                     routes.first[first], routes.first[last]);
    multiply_each(e.down, routes, inner, true, first, last,
                  {parts_.get(), m_.hidden, m_.hidden, Epilogue::kStore, 0, 0}, following, team);
  }

  // Products of those of experts first .. last - 1 that have tokens; an expert's rows are those of its places, or row
  // 0 for all.
  void multiply_each(const Weight* weights, const Routes& routes, const Rows& rows, bool by_place, int first,
                     int last, Output output, const Weight* following, const Team& team) const {
    const auto next_used = [&](int e) {
      while (e < last && routes.first[e] == routes.first[e + 1]) ++e;
      return e;
    };
    float* const y = output.y;
    for (int e = next_used(first); e < last;) {
      const int place = routes.first[e], next = next_used(e + 1);
      output.y = y + (size_t)place * output.stride;
      multiply(weights[e], {rows.words + (by_place ? place * rows.stride : 0), rows.stride},
               routes.first[e + 1] - place, output, next < last ? weights + next : following, team);
      e = next;
    }
  }

  // Adds each token's weighted products, in order of expert index, and then those of its shared expert, to x or, where
  // `out` is not null, to nothing.
  void add_parts(const Experts& e, const Routes& routes, float* x, float* out, const Team& team) const {
    const int columns = (m_.hidden + kLanes - 1) / kLanes;
    const auto [from, to] = team.share(tokens_ * columns);
    for (int i = from; i < to; ++i) {
      const int t = i / columns, first = i % columns * kLanes, remaining = m_.hidden - first;
      const auto part = [&](const float* rows, int row) {
        return load_part<Float>(rows + (size_t)row * m_.hidden + first, remaining);
      };
      Float total = {};
      for (int j = t * e.active; j < (t + 1) * e.active; ++j)
        total = fma(part(parts_.get(), routes.place[j]), splat(e.weighs_inputs ? 1.0f : routes.weight[j]), total);
      if (e.shared_ffn) {
        const Float gate =
            e.shared_gate ? sigmoid(splat(logits_[(size_t)t * e.router.outputs + e.count])) : splat(1.0f);
        total = fma(part(shared_.get(), t), gate, total);
      }
      float* row = (out ? out : x) + (size_t)t * m_.hidden + first;
      store_part(row, out ? total : fma(total, splat(m_.residual_scale), load_part<Float>(row, remaining)), remaining);
    }
  }

  static constexpr int kFewTokens = 4;  // so many tokens are routed by every thread, which is quicker than waiting
  const Model& m_;
  const int tokens_, entries_, count_, ffn_, shared_ffn_;
  const bool every_thread_routes_all_;
  const size_t row_size_;
  const Router router_;
  const Operands inner_operands_;
  const Buffer<float> logits_, weight_;
  const Buffer<int32_t> expert_, place_, first_;
  const Buffer<uint32_t> gathered_;
  const Buffer<float> weighted_;
  std::optional<Operands> weighted_operands_;
  const Buffer<float> inner_, parts_;
  const Buffer<int32_t> used_, loaded_;
  const Buffer<float> shared_inner_, shared_;
};

}  // namespace
