// Mixtures of experts: each token through a few gated feed-forward networks, summed by weights.
//
// Routes (a token and one of its experts) are sorted by expert, so that the tokens of each lie together, and every
// expert reads its matrices once. A product's outputs are cut into shares where there are fewer experts than keep all
// threads busy; within a share nothing is parallel.
#include "activations.h"
#include "linear_product.h"

namespace inferplane {

// As `_Experts` in native_experts.py.
struct Experts {
  const void *w13, *w2;            // [num_experts, 2 inner, hidden], gates first; [num_experts, hidden, inner]
  const void *w13_bias, *w2_bias;  // [num_experts, 2 inner], [num_experts, hidden], or null
  int64_t num_experts, first_expert, hidden, inner;
  int64_t dtype;
  int32_t activation;  // 0 silu, 1 gelu_tanh, 2 clamped_swiglu
  float swiglu_alpha, swiglu_limit;
};

// As `_Memory` there: where the call may write, for as many routes as there are.
struct ExpertsMemory {
  void *rows, *gate_up, *inner, *results;  // [num_routes, ...] of hidden, 2 inner (of silu none), inner, hidden
  int32_t *starts, *places;                // [num_experts + 1], [num_routes]
};

}  // namespace inferplane

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int kTasksPerThread = 4;

template <class T>
class Mixture {
 public:
  Mixture(const Experts& experts, const ExpertsMemory& memory, const T* x, const float* weights, const int32_t* ids,
          T* out, int64_t num_tokens, int64_t top_k)
      : experts_(experts), memory_(memory), x_(x), weights_(weights), ids_(ids), out_(out), num_tokens_(num_tokens),
        top_k_(top_k) {}

  void run() const {
    sort_routes();
    int64_t hidden = experts_.hidden, inner = experts_.inner;
    auto rows = static_cast<T*>(memory_.rows);
    for_ranges(num_tokens_ * top_k_, double(hidden) / 16, [&](int64_t route, int64_t end) {
      for (; route < end; ++route)
        if (memory_.places[route] >= 0)
          std::memcpy(rows + memory_.places[route] * hidden, x_ + route / top_k_ * hidden, size_t(hidden) * sizeof(T));
    });
    bool is_gated = experts_.activation == 0;
    void* product = is_gated ? memory_.inner : memory_.gate_up;
    multiply(experts_.w13, experts_.w13_bias, hidden, 2 * inner, rows, product, is_gated);
    if (!is_gated) activate();
    multiply(experts_.w2, experts_.w2_bias, inner, hidden, memory_.inner, memory_.results, false);
    add_up();
  }

 private:
  // Places of routes among those of all experts; -1 for an expert that another rank has.
  void sort_routes() const {
    int32_t* starts = memory_.starts;
    std::memset(starts, 0, size_t(experts_.num_experts + 1) * sizeof(int32_t));
    auto expert_of = [&](int64_t route) {
      int64_t expert = ids_[route] - experts_.first_expert;
      return expert < experts_.num_experts ? expert : -1;
    };
    int64_t num_routes = num_tokens_ * top_k_;
    for (int64_t route = 0; route < num_routes; ++route)
      if (int64_t expert = expert_of(route); expert >= 0) ++starts[expert + 1];
    for (int64_t expert = 0; expert < experts_.num_experts; ++expert) starts[expert + 1] += starts[expert];
    // each start moves on to the next expert's while its routes are placed
    for (int64_t route = 0; route < num_routes; ++route) {
      int64_t expert = expert_of(route);
      memory_.places[route] = expert < 0 ? -1 : starts[expert]++;
    }
    for (int64_t expert = experts_.num_experts; expert > 0; --expert) starts[expert] = starts[expert - 1];
    starts[0] = 0;
  }

  // Rows of every expert by its own matrix.
  void multiply(const void* weights, const void* biases, int64_t in_features, int64_t out_features, const void* x,
                void* out, bool is_gated) const {
    const int32_t* starts = memory_.starts;
    auto product = [&](int64_t expert) {
      const T* weight = static_cast<const T*>(weights) + expert * out_features * in_features;
      const T* bias = biases == nullptr ? nullptr : static_cast<const T*>(biases) + expert * out_features;
      return Product<T>({weight, bias, in_features, out_features, experts_.dtype}, nullptr,
                        static_cast<const T*>(x) + starts[expert] * in_features,
                        static_cast<T*>(out) + starts[expert] * (is_gated ? out_features / 2 : out_features),
                        starts[expert + 1] - starts[expert], is_gated);
    };
    int64_t num_used = 0;
    for (int64_t expert = 0; expert < experts_.num_experts; ++expert) num_used += starts[expert + 1] > starts[expert];
    if (num_used == 0) return;
    int64_t most = num_blocks(out_features, is_gated);
    int64_t shares = (kTasksPerThread * num_threads() + num_used - 1) / num_used;
    if (shares > most) shares = most;
    parallel(int(experts_.num_experts * shares), [&](int task, int) {
      int64_t expert = task / shares;
      if (starts[expert + 1] > starts[expert]) product(expert).run_share(task % shares, shares);
    });
  }

  void activate() const {
    int64_t inner = experts_.inner;
    for_ranges(memory_.starts[experts_.num_experts], double(inner), [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        const T *gate = static_cast<const T*>(memory_.gate_up) + 2 * row * inner, *value = gate + inner;
        T* to = static_cast<T*>(memory_.inner) + row * inner;
        for (int64_t at = 0; at < inner; at += 16) {
          int n = int(inner - at < 16 ? inner - at : 16);
          Vec g = load(gate + at, n), u = load(value + at, n);
          Vec result = experts_.activation == 1
                           ? gelu_tanh(g) * u
                           : clamped_swiglu(g, u, experts_.swiglu_alpha, experts_.swiglu_limit);
          store(to + at, result, n);
        }
      }
    });
  }

  void add_up() const {
    int64_t hidden = experts_.hidden;
    for_ranges(num_tokens_, double(hidden * top_k_) / 8, [&](int64_t token, int64_t end) {
      for (; token < end; ++token) {
        const int32_t* places = memory_.places + token * top_k_;
        for (int64_t at = 0; at < hidden; at += 16) {
          int n = int(hidden - at < 16 ? hidden - at : 16);
          Vec sum = all_of(0);
          for (int64_t k = 0; k < top_k_; ++k) {
            if (places[k] < 0) continue;
            const T* result = static_cast<const T*>(memory_.results) + places[k] * hidden + at;
            sum = fma(all_of(weights_[token * top_k_ + k]), load(result, n), sum);
          }
          store(out_ + token * hidden + at, sum, n);
        }
      }
    });
  }

  const Experts& experts_;
  const ExpertsMemory& memory_;
  const T* x_;
  const float* weights_;
  const int32_t* ids_;
  T* out_;
  int64_t num_tokens_, top_k_;
};

template <class T>
void mix(const Experts& experts, const ExpertsMemory& memory, const void* x, const float* weights, const int32_t* ids,
         void* out, int64_t num_tokens, int64_t top_k) {
  Mixture<T>(experts, memory, static_cast<const T*>(x), weights, ids, static_cast<T*>(out), num_tokens, top_k).run();
}

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// x, out: [num_tokens, hidden]; weights, ids: [num_tokens, top_k], an id of no expert here adds nothing. All contiguous.
EXPORT(void, fused_experts)
(inferplane::Experts experts, inferplane::ExpertsMemory memory, const void* x, const float* weights,
 const int32_t* ids, void* out, int64_t num_tokens, int64_t top_k) {
  using namespace inferplane::INFERPLANE_LEVEL;
  constexpr decltype(&mix<float>) kMix[] = {mix<float>, mix<bf16>, mix<half>};  // by DType
  kMix[experts.dtype](experts, memory, x, weights, ids, out, num_tokens, top_k);
}
RECORDABLE(fused_experts)
