// Attention over a paged KV cache: stores a step's keys and values, then attends, for any mix of prompts and single
// tokens.
//
// The query heads that share a KV head are rows of one matrix, so that each key and value is read once for all of them:
// row i of a request is token i / group, head i % group. A request with many rows is cut into tiles of 32 of them, one
// with few into pieces of its keys, which are put together at the end. Either is cut at fixed places, so that a
// request's result does not depend on what else is in the step, or on the number of threads.
//
// With AMX, many rows by keys and values of float16 are multiplied in halves, a high and a low bfloat16 number each: high
// by high, low by high and high by low are one product of three times the depth.
#include <type_traits>

#include "heads.h"
#include "panel_product.h"

namespace inferplane::INFERPLANE_LEVEL {

// As `LayerShape` in native_attention.py.
struct LayerShape {
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  int32_t window, chunk;  // 0 where there is none
  float scale, soft_cap;  // soft_cap 0 where there is none
  int32_t is_latent;      // keys are values, too
};

// As `_Step` in native_attention.py. What lies at the addresses is read at every call.
struct Step {
  const int32_t* block_table;  // [num_reqs, table_stride]
  const int32_t* seq_lens;     // [num_reqs]
  const int32_t* query_start;  // [num_reqs + 1]
  const int64_t* slots;        // [num_tokens]
  int64_t table_stride;
  int32_t num_reqs, num_tokens;
};

namespace {

constexpr int kChunk = 256;  // keys whose scores are computed at a time; a piece is one chunk
constexpr int kTilesPerChunk = kChunk / kTile;
constexpr int kFewestSplitRows = 8;  // that are multiplied in halves: fewer are done sooner as they are
// A step that reads so little is computed by its caller: to wake another thread takes longer.
constexpr int64_t kBytesWorthThreads = 48 << 10;

// Rows and keys of one task, for each KV head.
struct Item {
  int32_t req, first_row, num_rows;
  int32_t first_key, end_key;  // the first is a multiple of kTile
  int32_t first_seen;          // by any of the rows
  int32_t piece, num_pieces;
  int64_t partial;  // where the request's pieces lie, in floats
};

// Results of one piece: what is not yet divided by the softmax's denominator.
struct Softmax {
  float* sums;     // [num_rows, padded_dim]
  float* highest;  // [num_rows]: the highest exponent of 2 among the scores
  float* weights;  // [num_rows]: the denominator
};

// Where the weights of a row go.
template <class T>
struct PlainWeights {
  Left<T>* row;
  void put(int at, Vec values) const { store(row + at, values); }
  void put_both(int at, Vec first, Vec second) const { store_both(row + at, first, second); }
};

#if INFERPLANE_HAS_AMX
// Two sections of num_keys: high halves, and low ones.
struct SplitWeights {
  bf16* row;
  int num_keys;
  void put(int at, Vec values) const {
    Halves halves = halves_of(values);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + at), halves.high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + num_keys + at), halves.low);
  }
  void put_both(int at, Vec first, Vec second) const {
    put(at, first);
    put(at + 16, second);
  }
};
#endif

// T: of keys and values as they are stored. X: of queries and results.
template <class T, class X>
class Attention {
 public:
  Attention(const LayerShape& layer, const Step& step, const KV<T>& kv, const X* q, int64_t q_stride,
            const Rotation* rotation, const float* sinks, X* out)
      : layer_(layer), step_(step), kv_(kv), q_(q), q_stride_(q_stride), rotation_(rotation), sinks_(sinks), out_(out) {
    group_ = layer.num_heads / layer.num_kv_heads;
    padded_dim_ = round_up(layer.head_dim, 16);
    left_stride_ = round_up(layer.head_dim, 32);
  }

  void run() {
    int num_items = 0;
    int64_t num_partials = 0, num_keys = 0;
    for_each_item([&](const Item& item) {
      ++num_items;
      num_keys += item.end_key - item.first_key;
      if (item.num_pieces > 1 && item.piece == 0)
        num_partials += int64_t(item.num_pieces) * item.num_rows * (padded_dim_ + 2) * layer_.num_kv_heads;
    });
    size_t items_bytes = align(num_items * sizeof(Item));
    size_t counters_bytes = align(size_t(step_.num_reqs) * layer_.num_kv_heads * sizeof(int));
    size_t partials_bytes = align(num_partials * sizeof(float));
    size_t thread_bytes = workspace_bytes();
    char* memory = static_cast<char*>(
        thread_scratch(items_bytes + counters_bytes + partials_bytes + num_threads() * thread_bytes));
    items_ = reinterpret_cast<Item*>(memory);
    counters_ = reinterpret_cast<int*>(memory + items_bytes);
    std::memset(counters_, 0, counters_bytes);
    partials_ = reinterpret_cast<float*>(memory + items_bytes + counters_bytes);
    char* workspaces = memory + items_bytes + counters_bytes + partials_bytes;
    Item* next = items_;
    for_each_item([&](const Item& item) { *next++ = item; });
    int num_tasks = num_items * layer_.num_kv_heads;
    int next_task = 0;
    auto work = [&](int thread) {
#if INFERPLANE_HAS_AMX
      Tiles tiles;
#endif
      for (int index; (index = __atomic_fetch_add(&next_task, 1, __ATOMIC_RELAXED)) < num_tasks;)
        attend(items_[index % num_items], index / num_items, workspaces + thread * thread_bytes);
    };
    if (num_keys * layer_.num_kv_heads * layer_.head_dim * 2 * int64_t(sizeof(T)) < kBytesWorthThreads)
      work(0);
    else  // a task for each thread, which configures its tiles once
      parallel(num_threads(), [&](int, int thread) { work(thread); });
  }

 private:
  static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

  int first_visible(int position) const {
    if (layer_.window > 0) return position < layer_.window ? 0 : position - layer_.window + 1;
    return layer_.chunk > 0 ? position / layer_.chunk * layer_.chunk : 0;
  }

  template <class Fn>
  void for_each_item(const Fn& fn) const {
    int64_t partial = 0;
    for (int req = 0; req < step_.num_reqs; ++req) {
      int num_queries = step_.query_start[req + 1] - step_.query_start[req], seq_len = step_.seq_lens[req];
      int past = seq_len - num_queries, num_rows = num_queries * group_;
      if (num_rows <= kMostRows<T>) {
        if (num_rows == 0) continue;
        int first_seen = first_visible(past), first = first_seen / kTile * kTile;
        int num_pieces = (seq_len - 1) / kChunk - first / kChunk + 1;
        for (int piece = 0; piece < num_pieces; ++piece) {
          int begin = piece == 0 ? first : (first / kChunk + piece) * kChunk;
          int end = (first / kChunk + piece + 1) * kChunk;
          fn(Item{req, 0, num_rows, begin, end < seq_len ? end : seq_len, first_seen, piece, num_pieces, partial});
        }
        if (num_pieces > 1) partial += int64_t(num_pieces) * num_rows * (padded_dim_ + 2) * layer_.num_kv_heads;
        continue;
      }
      // the longest first, so that the last task of the step is a short one
      for (int row = (num_rows - 1) / kMostRows<T> * kMostRows<T>; row >= 0; row -= kMostRows<T>) {
        int last = row + kMostRows<T> < num_rows ? row + kMostRows<T> : num_rows;
        int first_seen = first_visible(past + row / group_), end = past + (last - 1) / group_ + 1;
        fn(Item{req, row, last - row, first_seen / kTile * kTile, end, first_seen, 0, 1, 0});
      }
    }
  }

  struct Workspace {
    Left<T> *queries, *weights;
    float* scores;
    Softmax softmax;
    T* tiles;
    bf16* halves;  // of a tile's keys, and of the values of all tiles of a chunk: high, then low
  };

  size_t workspace_bytes() const {
    Workspace none;
    return align(lay_out(nullptr, none));
  }

  // Returns the bytes that it takes.
  size_t lay_out(char* memory, Workspace& space) const {
    size_t at = 0;
    auto take = [&](auto*& pointer, size_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + at);
      at += align(count * sizeof(*pointer));
    };
    take(space.queries, kMostRows<T> * left_stride_ * (kSplits<T> ? 2 : 1));
    take(space.weights, kMostRows<T> * kChunk * (kSplits<T> ? 2 : 1));
    take(space.scores, kMostRows<T> * kChunk);
    take(space.softmax.sums, kMostRows<T> * padded_dim_);
    take(space.softmax.highest, kMostRows<T>);
    take(space.softmax.weights, kMostRows<T>);
    take(space.tiles, (kv_.is_tiled() ? 1 : kTilesPerChunk) * 2 * kv_.tile_size());
    if (kSplits<T>) take(space.halves, (kTilesPerChunk + 1) * 2 * kv_.tile_size());
    return at;
  }

  void attend(const Item& item, int head, char* memory) const {
    Workspace space;
    lay_out(memory, space);
    Softmax& softmax = space.softmax;
    bool splits = kSplits<T> && item.num_rows >= kFewestSplitRows;
    if constexpr (kSplits<T>) {
      if (splits) this->split_queries(item, head, space);
    }
    if (!splits) load_queries(item, head, space.queries);
    for (int row = 0; row < kMostRows<T>; ++row) {
      softmax.highest[row] = -__builtin_inff();
      softmax.weights[row] = 0;
    }
    for (int first = item.first_key; first < item.end_key;) {
      int end = first / kChunk * kChunk + kChunk;
      if (end > item.end_key) end = item.end_key;
      bool is_first = first == item.first_key;
      if constexpr (kSplits<T>) {
        if (splits) this->attend_split_chunk(item, head, first, end, is_first, space);
      }
      if (!splits) attend_chunk(item, head, first, end, is_first, space);
      first = end;
    }
    if (item.num_pieces == 1)
      write(item, head, softmax);
    else
      keep(item, head, softmax);
  }

  void load_queries(const Item& item, int head, Left<T>* queries) const {
    int head_dim = layer_.head_dim;
    X room[kMostHeadDim];
    for (int row = 0; row < item.num_rows; ++row) {
      const X* from = query(item, head, row, room);
      Left<T>* to = queries + row * left_stride_;
      for (int at = 0; at < left_stride_; at += 16) {
        int n = head_dim - at;
        store(to + at, n >= 16 ? load(from + at) : load(from + at, n > 0 ? n : 0));
      }
    }
  }

#if INFERPLANE_HAS_AMX
  // Two sections of padded_dim each, as `SplitWeights` has them, and 0 behind.
  void split_queries(const Item& item, int head, const Workspace& space) const {
    X room[kMostHeadDim];
    for (int row = 0; row < item.num_rows; ++row) {
      const X* from = query(item, head, row, room);
      bf16* to = reinterpret_cast<bf16*>(space.queries) + row * split_stride();
      for (int at = 0; at < padded_dim_; at += 16) {
        int n = layer_.head_dim - at;
        SplitWeights{to, padded_dim_}.put(at, n >= 16 ? load(from + at) : load(from + at, n));
      }
      std::memset(to + 2 * padded_dim_, 0, 16 * sizeof(bf16));
    }
  }

  int split_stride() const { return round_up(2 * padded_dim_ + 16, 32); }
#endif

  // One row where it lies or, if there is a rotation, turned in `room`.
  const X* query(const Item& item, int head, int row, X* room) const {
    int at = item.first_row + row;
    int64_t token = step_.query_start[item.req] + at / group_;
    const X* given = q_ + token * q_stride_ + (head * group_ + at % group_) * layer_.head_dim;
    if (rotation_ == nullptr) return given;
    turn_head_of(*rotation_, token, given, room, layer_.head_dim, rotation_->q_norm);
    return room;
  }

  // Scores, softmax and sums of values for keys first to end, which are of one chunk.
  void attend_chunk(const Item& item, int head, int first, int end, bool is_first, const Workspace& space) const {
    const int32_t* blocks = step_.block_table + item.req * step_.table_stride;
    int num_tiles = (end - first + kTile - 1) / kTile;
    const void* values[kTilesPerChunk];
    for (int tile = 0; tile < num_tiles; ++tile) {
      int key = first + tile * kTile;
      T* scratch = space.tiles + (kv_.is_tiled() ? 0 : tile * 2 * kv_.tile_size());
      if (item.num_rows <= 16 && key + kTile < end) kv_.prefetch(blocks, head, key + kTile);
      Tile found = kv_.tile(blocks, head, key, item.first_seen, end, scratch);
      values[tile] = found.values;
      Right keys{&found.keys, 1, padded_dim_, 2, 16 * padded_dim_, 1};
      multiply<T>(item.num_rows, space.queries, left_stride_, keys, space.scores + tile * kTile, kChunk, false);
    }
    weigh(item, first, num_tiles * kTile, is_first, space,
          [&](int row) { return PlainWeights<T>{space.weights + row * kChunk}; });
    Right columns{values, num_tiles, kTile, padded_dim_ / 16, 16 * kTile, num_tiles};
    multiply<T>(item.num_rows, space.weights, kChunk, columns, space.softmax.sums, padded_dim_, !is_first);
  }

#if INFERPLANE_HAS_AMX
  // The same of halves.
  void attend_split_chunk(const Item& item, int head, int first, int end, bool is_first, const Workspace& space) const {
    const int32_t* blocks = step_.block_table + item.req * step_.table_stride;
    int num_tiles = (end - first + kTile - 1) / kTile, size = kv_.tile_size();
    const void* values[3 * kTilesPerChunk];
    for (int tile = 0; tile < num_tiles; ++tile) {
      int key = first + tile * kTile;
      Tile found = kv_.tile(blocks, head, key, item.first_seen, end, space.tiles);
      bf16 *key_halves = space.halves, *value_halves = space.halves + (tile + 1) * 2 * size;
      split_panels(static_cast<const T*>(found.keys), size, key_halves, key_halves + size);
      split_panels(static_cast<const T*>(found.values), size, value_halves, value_halves + size);
      const void* keys[3] = {key_halves, key_halves, key_halves + size};
      values[tile] = values[num_tiles + tile] = value_halves;
      values[2 * num_tiles + tile] = value_halves + size;
      multiply<bf16>(item.num_rows, reinterpret_cast<bf16*>(space.queries), split_stride(),
                     {keys, 3, padded_dim_, 2, 16 * padded_dim_, 2}, space.scores + tile * kTile, kChunk, false);
    }
    auto weights = reinterpret_cast<bf16*>(space.weights);
    weigh(item, first, num_tiles * kTile, is_first, space,
          [&](int row) { return SplitWeights{weights + row * 2 * kChunk, num_tiles * kTile}; });
    multiply<bf16>(item.num_rows, weights, 2 * kChunk,
                   {values, 3 * num_tiles, kTile, padded_dim_ / 16, 16 * kTile, 2 * num_tiles}, space.softmax.sums, padded_dim_, !is_first);
  }
#endif

  // Turns the scores of `num_keys` keys from `first` on into weights, and scales what was summed before.
  // `weights_of(row)` takes the weights of a row.
  template <class WeightsOf>
  void weigh(const Item& item, int first, int num_keys, bool is_first, const Workspace& space,
             const WeightsOf& weights_of) const {
    for (int row = 0; row < item.num_rows; row += 16)
      weigh_rows(item, row, first, num_keys, is_first, space, weights_of);
  }

  // Of up to 16 rows, whose numbers are lanes of one vector.
  template <class WeightsOf>
  void weigh_rows(const Item& item, int first_row, int first, int num_keys, bool is_first, const Workspace& space,
                  const WeightsOf& weights_of) const {
    float factor = layer_.soft_cap > 0 ? kLog2E : layer_.scale * kLog2E;
    int num_queries = step_.query_start[item.req + 1] - step_.query_start[item.req];
    int past = step_.seq_lens[item.req] - num_queries;
    int num_rows = item.num_rows - first_row < 16 ? item.num_rows - first_row : 16;
    float* scores = space.scores + first_row * kChunk;
    Vec lanes[16];
    int from[16], to[16];  // keys that a row sees, to whole vectors
    for (int row = 0; row < num_rows; ++row) {
      int position = past + (item.first_row + first_row + row) / group_;
      int low = first_visible(position) - first, high = position + 1 - first;
      if (low < 0) low = 0;
      if (high > num_keys) high = num_keys;
      from[row] = low / 16 * 16;
      to[row] = high > low ? round_up(high, 16) : from[row];
      lanes[row] = all_of(-__builtin_inff());
      if (to[row] == from[row]) continue;
      float* own = scores + row * kChunk;
      if (layer_.soft_cap > 0) cap(own, from[row], to[row]);
      for (int at = from[row]; at < low; ++at) own[at] = -__builtin_inff();
      for (int at = high; at < to[row]; ++at) own[at] = -__builtin_inff();
      lanes[row] = highest_of(own, from[row], to[row]);
    }
    for (int row = num_rows; row < 16; ++row) lanes[row] = all_of(0);
    float *highest = space.softmax.highest + first_row, *sums = space.softmax.weights + first_row;
    Vec before = load(highest), now = max(before, max_of_each(lanes) * all_of(factor));
    // a row that has seen nothing yet has minus infinity, from which nothing can be subtracted
    Vec shift = all_of(0) - max(now, all_of(-__FLT_MAX__)), scaled = exp2(before + shift);
    store(highest, now);
    float shifts[16], scales[16], befores[16];
    store(shifts, shift);
    store(scales, scaled);
    store(befores, before);
    for (int row = 0; row < num_rows; ++row) {
      auto own = weights_of(first_row + row);
      for (int at = 0; at < from[row]; at += 16) own.put(at, all_of(0));
      for (int at = to[row]; at < num_keys; at += 16) own.put(at, all_of(0));
      lanes[row] = raise(scores + row * kChunk, own, from[row], to[row], factor, shifts[row]);
      if (is_first || befores[row] == highest[row]) continue;
      float* summed = space.softmax.sums + (first_row + row) * padded_dim_;
      for (int at = 0; at < padded_dim_; at += 16) store(summed + at, load(summed + at) * all_of(scales[row]));
    }
    store(sums, fma(load(sums), scaled, sum_of_each(lanes)));
  }

  static Vec highest_of(const float* scores, int from, int to) {
    Vec even = load(scores + from), odd = even;
    int at = from + 16;
    for (; at + 32 <= to; at += 32) {
      even = max(even, load(scores + at));
      odd = max(odd, load(scores + at + 16));
    }
    return max(odd, at < to ? max(even, load(scores + at)) : even);
  }

  // Writes 2 ** (scores * factor + shift), and returns lanes of its sum.
  template <class Weights>
  static Vec raise(const float* scores, const Weights& weights, int from, int to, float factor, float shift) {
    Vec factors = all_of(factor), shifts = all_of(shift), even = all_of(0), odd = all_of(0);
    int at = from;
    for (; at + 32 <= to; at += 32) {
      Vec first = power(fma(load(scores + at), factors, shifts)), second = power(fma(load(scores + at + 16), factors, shifts));
      even += first;
      odd += second;
      weights.put_both(at, first, second);
    }
    if (at < to) {
      Vec last = power(fma(load(scores + at), factors, shifts));
      even += last;
      weights.put(at, last);
    }
    return even + odd;
  }

  static Vec power(Vec exponent) {
    if constexpr (kPair<T> == 2)
      return coarse_exp2(exponent);  // for bfloat16
    else
      return exp2(exponent);
  }

  void cap(float* scores, int from, int to) const {
    Vec inner = all_of(layer_.scale / layer_.soft_cap), outer = all_of(layer_.soft_cap);
    for (int at = from; at < to; at += 16) store(scores + at, tanh(load(scores + at) * inner) * outer);
  }

  // Divides and writes rows of the result.
  void write(const Item& item, int head, const Softmax& softmax) const {
    for (int row = 0; row < item.num_rows; ++row) {
      int at_row = item.first_row + row, query_head = head * group_ + at_row % group_;
      float weight = softmax.weights[row], factor = 1;
      if (sinks_ != nullptr) {
        float sink = sinks_[query_head] * kLog2E, highest = softmax.highest[row];
        float joint = sink > highest ? sink : highest;
        factor = exp2(highest - joint);
        weight = weight * factor + exp2(sink - joint);
      }
      Vec inverse = all_of(factor / weight);
      const float* sums = softmax.sums + row * padded_dim_;
      int64_t token = step_.query_start[item.req] + at_row / group_;
      X* out = out_ + (token * layer_.num_heads + query_head) * layer_.head_dim;
      for (int at = 0; at < layer_.head_dim; at += 16) {
        int n = layer_.head_dim - at;
        n >= 16 ? store(out + at, load(sums + at) * inverse) : store(out + at, load(sums + at) * inverse, n);
      }
    }
  }

  Softmax partial(const Item& item, int head, int piece) const {
    float* memory =
        partials_ + item.partial + (int64_t(head) * item.num_pieces + piece) * item.num_rows * (padded_dim_ + 2);
    return {memory, memory + item.num_rows * padded_dim_, memory + item.num_rows * (padded_dim_ + 1)};
  }

  // Keeps the result of a piece; that of the last one to come joins them all.
  void keep(const Item& item, int head, const Softmax& softmax) const {
    Softmax kept = partial(item, head, item.piece);
    std::memcpy(kept.sums, softmax.sums, item.num_rows * padded_dim_ * sizeof(float));
    std::memcpy(kept.highest, softmax.highest, item.num_rows * sizeof(float));
    std::memcpy(kept.weights, softmax.weights, item.num_rows * sizeof(float));
    int* counter = counters_ + item.req * layer_.num_kv_heads + head;
    if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) == item.num_pieces) join(item, head, softmax);
  }

  void join(const Item& item, int head, const Softmax& joint) const {
    for (int row = 0; row < item.num_rows; ++row) {
      float highest = -__builtin_inff(), weight = 0;
      for (int piece = 0; piece < item.num_pieces; ++piece) {
        float other = partial(item, head, piece).highest[row];
        if (!(other <= highest)) highest = other;
      }
      float* sums = joint.sums + row * padded_dim_;
      std::memset(sums, 0, padded_dim_ * sizeof(float));
      for (int piece = 0; piece < item.num_pieces; ++piece) {
        Softmax one = partial(item, head, piece);
        float scaled = exp2(one.highest[row] - highest);
        if (one.weights[row] == 0) continue;  // it saw no key
        weight += one.weights[row] * scaled;
        const float* from = one.sums + row * padded_dim_;
        for (int at = 0; at < padded_dim_; at += 16)
          store(sums + at, fma(load(from + at), all_of(scaled), load(sums + at)));
      }
      joint.highest[row] = highest;
      joint.weights[row] = weight;
    }
    write(item, head, joint);
  }

  const LayerShape& layer_;
  const Step& step_;
  const KV<T> kv_;
  const X* q_;
  int64_t q_stride_;
  const Rotation* rotation_;
  const float* sinks_;
  X* out_;
  int group_, padded_dim_, left_stride_;
  Item* items_ = nullptr;
  int* counters_ = nullptr;  // [num_reqs, num_kv_heads]: pieces that are done
  float* partials_ = nullptr;
};

struct Heads {
  const void *q, *k, *v;
  int64_t q_stride, kv_stride;
};

template <class T, class X = T>
void attend(const LayerShape& layer, const Step& step, const Heads& heads, void* memory, const Rotation* rotation,
            const float* sinks, void* out) {
  KV<T> kv{static_cast<T*>(memory), layer.num_kv_heads, layer.block_size, layer.head_dim, layer.is_latent != 0};
  NewTokens<X> tokens{static_cast<const X*>(heads.k), static_cast<const X*>(heads.v), heads.kv_stride, step.num_tokens};
  place_tokens(tokens, kv, step.slots, rotation);
  auto q = static_cast<const X*>(heads.q);
  Attention<T, X>(layer, step, kv, q, heads.q_stride, rotation, sinks, static_cast<X*>(out)).run();
}

using Attend = void (*)(const LayerShape&, const Step&, const Heads&, void*, const Rotation*, const float*, void*);

// By the number of `DTYPES` in native_attention.py.
constexpr Attend kAttend[] = {attend<float>, attend<bf16>, attend<half>, attend<half, float>};
constexpr int64_t kQueryBytes[] = {4, 2, 2, 4};

}  // namespace
}  // namespace inferplane::INFERPLANE_LEVEL

// q: [num_tokens, num_heads, head_dim], k and v: [num_tokens, num_kv_heads, head_dim]; strides are those of tokens, in
// elements. kv: kv_tiles.h. sinks: [num_heads] or null. out: like q, contiguous. dtype: 0 float32, 1 bfloat16, 2 float16,
// 3 float32 with keys and values stored as float16.
EXPORT(void, paged_attention)
(const inferplane::INFERPLANE_LEVEL::LayerShape* layer, const inferplane::INFERPLANE_LEVEL::Step* step, int32_t dtype,
 const void* q, int64_t q_stride, const void* k, const void* v, int64_t kv_stride, void* kv, const float* sinks,
 void* out) {
  using namespace inferplane::INFERPLANE_LEVEL;
  kAttend[dtype](*layer, *step, {q, k, v, q_stride, kv_stride}, kv, nullptr, sinks, out);
}
RECORDABLE(paged_attention)

// The same behind a rotation (heads.h). qkv: [num_tokens, (num_heads + 2 num_kv_heads) head_dim].
EXPORT(void, rotary_paged_attention)
(const inferplane::INFERPLANE_LEVEL::LayerShape* layer, const inferplane::INFERPLANE_LEVEL::Step* step, int32_t dtype,
 const void* qkv, int64_t stride, const int64_t* positions, const float* cos_sin, int32_t rotary_dim, const void* q_norm,
 const void* k_norm, float eps, void* kv, const float* sinks, void* out) {
  using namespace inferplane::INFERPLANE_LEVEL;
  int64_t size = kQueryBytes[dtype];
  const char* k = static_cast<const char*>(qkv) + layer->num_heads * layer->head_dim * size;
  const char* v = k + layer->num_kv_heads * layer->head_dim * size;
  Rotation rotation{positions, cos_sin, q_norm, k_norm, rotary_dim, eps};
  kAttend[dtype](*layer, *step, {qkv, k, v, stride, stride}, kv, &rotation, sinks, out);
}
RECORDABLE(rotary_paged_attention)
