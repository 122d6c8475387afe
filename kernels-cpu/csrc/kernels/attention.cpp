// Attention over a paged KV cache: stores a step's keys and values, then attends, for any mix of prompts and single
// tokens.
//
// The query heads that share a KV head are rows of one matrix, so that each key and value is read once for all of them:
// row i of a request is token i / group, head i % group. A request with many rows is cut into parts of kMostRows of
// them, one with few into pieces of its keys, which are put together at the end. Either is cut at fixed places, so that a
// request's result does not depend on what else is in the step, or on the number of threads.
//
// With AMX, many rows by keys and values of bfloat16 have a way of their own (attention_tiles.h). By those of float16 they
// are multiplied in halves, a high and a low bfloat16 number each: high by high, low by high and high by low are one
// product of three times the depth. Without instructions for what is stored, many rows are multiplied by keys and values
// as floats, two tiles at a time, which a core's cache keeps for all rows.
#include <type_traits>

#include "attention_step.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "heads.h"
#include "panel_product.h"

namespace inferplane::INFERPLANE_LEVEL {
namespace {

constexpr int kTilesPerChunk = kChunk / kTile;
constexpr int kFewestSplitRows = 8;  // that are multiplied in halves: fewer are done sooner as they are
// That are multiplied by widened keys and values: those of single tokens wait for memory, which that does not fetch ahead.
constexpr int kFewestWidenedRows = 17;
constexpr int kWidenedTiles = 2;  // at a time
constexpr int kFewestTileRows = 17;  // for attention_tiles.h
constexpr int kMostFetchingRows = 16;  // with more, products take longer than memory
constexpr int kTilesAhead = 4;         // that are fetched: heads of 64 in bfloat16 are 32 KB then, larger ones spill over
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

// What the same thread does then, if the item is not null.
struct Next {
  const Item* item;
  int head;
};

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
    int64_t num_bytes = num_keys * layer_.num_kv_heads * layer_.head_dim * 2 * int64_t(sizeof(T));
    int num_takers = num_bytes < kBytesWorthThreads ? 1 : num_threads();
    Queue tasks(int64_t(num_items) * layer_.num_kv_heads, num_takers);
    auto work = [&](int thread) {
#if INFERPLANE_HAS_AMX
      Tiles tiles;
#endif
      tasks.work_off([&](int64_t task, int64_t next) {
        auto item_of = [&](int64_t index) { return index < 0 ? nullptr : items_ + index % num_items; };
        Next then{item_of(next), int(next / num_items)};
        attend(*item_of(task), int(task / num_items), then, workspaces + thread * thread_bytes);
      });
    };
    if (num_takers == 1)
      work(0);
    else  // a task for each thread, which configures its tiles once
      parallel(num_takers, [&](int, int thread) { work(thread); });
  }

 private:
  static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

  template <class Fn>
  void for_each_item(const Fn& fn) const {
    int64_t partial = 0;
    for (int req = 0; req < step_.num_reqs; ++req) {
      int seq_len = step_.seq_lens[req], past = step_.past(req), num_rows = step_.num_queries(req) * group_;
      if (num_rows <= kMostRows<T>) {
        if (num_rows == 0) continue;
        int first_seen = layer_.first_visible(past), first = first_seen / kTile * kTile;
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
        int first_seen = layer_.first_visible(past + row / group_), end = past + (last - 1) / group_ + 1;
        fn(Item{req, row, last - row, first_seen / kTile * kTile, end, first_seen, 0, 1, 0});
      }
    }
  }

  struct Workspace {
    Left<T> *queries, *weights;
    float* scores;
    Softmax softmax;
    T* tiles;
    bf16* halves;    // of a tile's keys, and of the values of all tiles of a chunk: high, then low
    float* widened;  // keys, or values, of kWidenedTiles
    TileRoom tile_room;
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
    if (kWidens<T>) take(space.widened, kWidenedTiles * kv_.tile_size());
    if (kAttendsByTiles<T>) {
      take(space.tile_room.scores, 2 * kTileRows * kKeysAtOnce);
      take(space.tile_room.weights, kTileRows * kWeightStride);
      take(space.tile_room.weighed, 16 * kTileRows);
    }
    return at;
  }

  void attend(const Item& item, int head, const Next& next, char* memory) const {
    Workspace space;
    lay_out(memory, space);
    Softmax& softmax = space.softmax;
    bool splits = kSplits<T> && item.num_rows >= kFewestSplitRows;
    bool widens = kWidens<T> && item.num_rows >= kFewestWidenedRows;
    if constexpr (kSplits<T>) {
      if (splits) this->split_queries(item, head, space);
    }
    if (!splits) load_queries(item, head, space.queries);
#if INFERPLANE_HAS_AMX
    if constexpr (kAttendsByTiles<T>)
      if (item.num_rows >= kFewestTileRows && TileAttention::can(layer_, kv_) && attend_by_tiles(item, head, space))
        return write(item, head, softmax);
#endif
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
      if constexpr (kWidens<T>) {
        if (widens) this->attend_widened_chunk(item, head, first, end, is_first, space);
      }
      if (!splits && !widens) attend_chunk(item, head, next, first, end, is_first, space);
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
    for (int row = 0; row < item.num_rows; ++row) {  // as the projection wrote them, maybe in another core's cache
      auto lines = reinterpret_cast<const char*>(given_query(item, head, row));
      for (size_t at = 0; at < head_dim * sizeof(X); at += 64) _mm_prefetch(lines + at, _MM_HINT_T0);
    }
    for (int row = 0; row < item.num_rows; ++row) {
      Left<T>* to = queries + row * left_stride_;
      if constexpr (std::is_same_v<X, Left<T>>) {
        const X* from = query(item, head, row, to);
        if (from != to) std::memcpy(to, from, head_dim * sizeof(X));
        std::memset(to + head_dim, 0, (left_stride_ - head_dim) * sizeof(X));
        continue;
      }
      const X* from = query(item, head, row, room);
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

  int64_t token_of(const Item& item, int row) const {
    return step_.query_start[item.req] + (item.first_row + row) / group_;
  }

  const X* given_query(const Item& item, int head, int row) const {
    int query_head = head * group_ + (item.first_row + row) % group_;
    return q_ + token_of(item, row) * q_stride_ + query_head * layer_.head_dim;
  }

  // One row where it lies or, if there is a rotation, turned in `room`.
  const X* query(const Item& item, int head, int row, X* room) const {
    const X* given = given_query(item, head, row);
    if (rotation_ == nullptr) return given;
    turn_head_of(*rotation_, token_of(item, row), given, room, layer_.head_dim, rotation_->q_norm);
    return room;
  }

#if INFERPLANE_HAS_AMX
  bool attend_by_tiles(const Item& item, int head, const Workspace& space) const {
    TileAttention::Shape shape{step_.past(item.req), group_,         item.first_row, item.num_rows,
                               item.first_key,       item.end_key, item.first_seen};
    const int32_t* blocks = blocks_of(item);
    return TileAttention(layer_, kv_, blocks, head, shape, space.queries, space.tile_room, space.tiles, space.softmax)
        .run();
  }
#endif

  // Fetches the tile that comes kTilesAhead behind that of `key`, be it of this task or of the next one: what few rows take
  // time for is memory, also while their softmax is computed.
  void fetch_ahead(const Item& item, int head, const Next& next, int key) const {
    int size = round_up(item.end_key - item.first_key, kTile);
    int ahead = key + (size < kTilesAhead * kTile ? size : kTilesAhead * kTile), beyond = ahead - item.first_key - size;
    if (beyond < 0)
      kv_.prefetch(blocks_of(item), head, ahead);
    else if (next.item != nullptr && next.item->first_key + beyond < next.item->end_key)
      kv_.prefetch(blocks_of(*next.item), next.head, next.item->first_key + beyond);
  }

  const int32_t* blocks_of(const Item& item) const { return step_.block_table + item.req * step_.table_stride; }

  // Scores, softmax and sums of values for keys first to end, which are of one chunk.
  void attend_chunk(const Item& item, int head, const Next& next, int first, int end, bool is_first,
                    const Workspace& space) const {
    const int32_t* blocks = blocks_of(item);
    int num_tiles = (end - first + kTile - 1) / kTile;
    const void* values[kTilesPerChunk];
    for (int tile = 0; tile < num_tiles; ++tile) {
      int key = first + tile * kTile;
      T* scratch = space.tiles + (kv_.is_tiled() ? 0 : tile * 2 * kv_.tile_size());
      if (item.num_rows <= kMostFetchingRows) fetch_ahead(item, head, next, key);
      Tile found = kv_.tile(blocks, head, key, item.first_seen, end, scratch);
      values[tile] = found.values;
      Right keys{&found.keys, 1, padded_dim_, 2, 16 * padded_dim_, 1};
      multiply<T>(item.num_rows, space.queries, left_stride_, keys, space.scores + tile * kTile, kChunk, false);
    }
    scores(item, first, num_tiles * kTile, space)
        .weigh(space.softmax, is_first, [&](int row) { return PlainWeights<T>{space.weights + row * kChunk}; });
    Right columns{values, num_tiles, kTile, padded_dim_ / 16, 16 * kTile, num_tiles};
    multiply<T>(item.num_rows, space.weights, kChunk, columns, space.softmax.sums, padded_dim_, !is_first);
  }

  // The same of keys and values as floats.
  void attend_widened_chunk(const Item& item, int head, int first, int end, bool is_first,
                            const Workspace& space) const {
    const int32_t* blocks = blocks_of(item);
    int num_tiles = (end - first + kTile - 1) / kTile, size = kv_.tile_size();
    const void *values[kTilesPerChunk], *wide[kWidenedTiles];
    for (int i = 0; i < kWidenedTiles; ++i) wide[i] = space.widened + i * size;
    for (int tile = 0; tile < num_tiles; tile += kWidenedTiles) {
      int taken = num_tiles - tile < kWidenedTiles ? num_tiles - tile : kWidenedTiles;
      for (int i = 0; i < taken; ++i) {
        T* scratch = space.tiles + (kv_.is_tiled() ? 0 : (tile + i) * 2 * size);
        Tile found = kv_.tile(blocks, head, first + (tile + i) * kTile, item.first_seen, end, scratch);
        values[tile + i] = found.values;
        widen_panels(static_cast<const T*>(found.keys), size, space.widened + i * size);
      }
      multiply<float>(item.num_rows, space.queries, left_stride_, {wide, 1, padded_dim_, 2 * taken, 16 * padded_dim_, 1},
                      space.scores + tile * kTile, kChunk, false);
    }
    scores(item, first, num_tiles * kTile, space)
        .weigh(space.softmax, is_first, [&](int row) { return PlainWeights<T>{space.weights + row * kChunk}; });
    for (int tile = 0; tile < num_tiles; tile += kWidenedTiles) {
      int taken = num_tiles - tile < kWidenedTiles ? num_tiles - tile : kWidenedTiles;
      for (int i = 0; i < taken; ++i)
        widen_panels(static_cast<const T*>(values[tile + i]), size, space.widened + i * size);
      multiply<float>(item.num_rows, space.weights + tile * kTile, kChunk,
                      {wide, taken, kTile, padded_dim_ / 16, 16 * kTile, taken}, space.softmax.sums, padded_dim_,
                      tile > 0 || !is_first);
    }
  }

#if INFERPLANE_HAS_AMX
  // The same of halves.
  void attend_split_chunk(const Item& item, int head, int first, int end, bool is_first, const Workspace& space) const {
    const int32_t* blocks = blocks_of(item);
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
    scores(item, first, num_tiles * kTile, space).weigh(space.softmax, is_first, [&](int row) {
      return SplitWeights{weights + row * 2 * kChunk, num_tiles * kTile};
    });
    multiply<bf16>(item.num_rows, weights, 2 * kChunk,
                   {values, 3 * num_tiles, kTile, padded_dim_ / 16, 16 * kTile, 2 * num_tiles}, space.softmax.sums, padded_dim_, !is_first);
  }
#endif

  Scores<T> scores(const Item& item, int first_key, int num_keys, const Workspace& space) const {
    return {layer_,         space.scores,  step_.past(item.req), group_,
            item.first_row, item.num_rows, first_key,            num_keys};
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

template <class T, class X = T>
void attend(const LayerShape& layer, const Step& step, const Heads& heads, void* memory, const Rotation* rotation,
            const float* sinks, void* out) {
  KV<T> kv{static_cast<T*>(memory), layer.num_kv_heads,  layer.block_size, layer.head_dim,
           layer.is_latent != 0,    Code(layer.code), layer.k_scales,   layer.v_scales};
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
