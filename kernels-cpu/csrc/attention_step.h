// What attention is asked for: a layer, the requests of a step, and where their heads lie.
#pragma once

#include "kernel.h"

namespace inferplane::INFERPLANE_LEVEL {

// As `LayerShape` in native_attention.py.
struct LayerShape {
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  int32_t window, chunk;  // 0 where there is none
  float scale, soft_cap;  // soft_cap 0 where there is none
  int32_t is_latent;      // keys are values, too
  int32_t code;           // of keys and values, as `Code`
  const float *k_scales, *v_scales;  // [num_kv_heads] of 8-bit floats, or null

  // The first key that a query at this position sees.
  int first_visible(int position) const {
    if (window > 0) return position < window ? 0 : position - window + 1;
    return chunk > 0 ? position / chunk * chunk : 0;
  }
};

// As `_Step` in native_attention.py. What lies at the addresses is read at every call.
struct Step {
  const int32_t* block_table;  // [num_reqs, table_stride]
  const int32_t* seq_lens;     // [num_reqs]
  const int32_t* query_start;  // [num_reqs + 1]
  const int64_t* slots;        // [num_tokens]
  int64_t table_stride;
  int32_t num_reqs, num_tokens;

  int num_queries(int req) const { return query_start[req + 1] - query_start[req]; }
  // Tokens of a request before those of this step.
  int past(int req) const { return seq_lens[req] - num_queries(req); }
};

// Of a step's tokens, at the first one's; strides are those of tokens, in elements.
struct Heads {
  const void *q, *k, *v;
  int64_t q_stride, kv_stride;
};

}  // namespace inferplane::INFERPLANE_LEVEL
