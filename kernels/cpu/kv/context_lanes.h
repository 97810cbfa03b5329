#pragma once
// Keys and values of an AttentionSlice where they lie: plain ones in place, quantised ones as numbers in
// scratch, so that whoever multiplies knows rows of numbers alone. Included after kv_lanes.h and
// gemm_lanes.h (Columns).

#include <cstdint>

#include "common/formats/kv_format.h"
#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// Two runs of memory, which are prefetched into L2 line by line.
struct Runs {
  const char* data[2];
  std::int64_t lines[2];

  static Runs of(const void* first, std::int64_t bytes) {
    return {{first_line(first), nullptr}, {lines_of(first, bytes), 0}};
  }
  static const char* first_line(const void* at) {
    return reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(at) / 64 * 64);
  }
  static std::int64_t lines_of(const void* first, std::int64_t bytes) {
    return (static_cast<const char*>(first) + bytes + 63 - first_line(first)) / 64;
  }
};

// Where keys and values come from. `keys` and `values` give those of a block's first `count` positions
// in one head of the slice: rows of head_dim, until the next call.
template <typename T>
class PlainContext {
 public:
  using Number = T;

  PlainContext(const AttentionSlice& slice, float*)
      : slice_(slice),
        op_(*slice.op),
        dim_(op_.head_dim),
        value_offset_(op_.kv_heads * dim_),
        token_stride_(2 * value_offset_) {}

  Columns<T> keys(std::int32_t head, std::int32_t block, std::int32_t) const {
    return {first_key(block) + head * dim_, token_stride_};
  }
  Columns<T> values(std::int32_t head, std::int32_t block, std::int32_t count) const {
    return {keys(head, block, count).data + value_offset_, token_stride_};
  }
  // The slice's keys (which = 0) or values (1) of one position.
  Runs runs(int which, std::int32_t block, std::int32_t token) const {
    return Runs::of(first_key(block) + token * token_stride_ + which * value_offset_,
                    slice_.kv_heads * dim_ * static_cast<std::int64_t>(sizeof(T)));
  }

 private:
  // The key of a block's first token in the slice's first head.
  const T* first_key(std::int32_t block) const {
    const ContextBlock& at = op_.blocks[slice_.sequence->first_block + block];
    const std::int64_t head = std::int64_t{at.slot} * kBlockTokens * 2 * op_.kv_heads;
    return static_cast<const T*>(op_.slots[at.buffer]) + (head + slice_.kv_head) * dim_;
  }

  const AttentionSlice& slice_;
  const Attention& op_;
  const std::int64_t dim_, value_offset_, token_stride_;
};

// T: what the codes stand for.
template <typename T>
class QuantizedContext {
 public:
  using Number = T;

  QuantizedContext(const AttentionSlice& slice, float* scratch)
      : slice_(slice),
        op_(*slice.op),
        layout_(kv_row_layout(op_.kv_heads, op_.head_dim, op_.dtype, op_.format)),
        rows_(reinterpret_cast<T*>(scratch)) {}

  Columns<T> keys(std::int32_t head, std::int32_t block, std::int32_t count) const {
    return numbers(0, head, block, count);
  }
  Columns<T> values(std::int32_t head, std::int32_t block, std::int32_t count) const {
    return numbers(1, head, block, count);
  }
  Runs runs(int which, std::int32_t block, std::int32_t token) const {
    const std::byte* row = row_of(block, token);
    const std::byte* codes = row + layout_.codes_of(which, slice_.kv_head, op_.kv_heads);
    const std::byte* groups =
        row + layout_.groups_of(which, slice_.kv_head, op_.kv_heads, op_.dtype);
    const std::int64_t groups_bytes = slice_.kv_heads * layout_.groups * 2 * size_of(op_.dtype).n;
    return {{Runs::first_line(codes), Runs::first_line(groups)},
            {Runs::lines_of(codes, slice_.kv_heads * layout_.codes),
             Runs::lines_of(groups, groups_bytes)}};
  }

 private:
  const std::byte* row_of(std::int32_t block, std::int32_t token) const {
    const ContextBlock& at = op_.blocks[slice_.sequence->first_block + block];
    return static_cast<const std::byte*>(op_.slots[at.buffer]) +
           (std::int64_t{at.slot} * kBlockTokens + token) * layout_.row;
  }

  Columns<T> numbers(std::int32_t which, std::int32_t slice_head, std::int32_t block,
                     std::int32_t count) const {
    const std::int32_t head = slice_.kv_head + slice_head;
    const std::int64_t codes = layout_.codes_of(which, head, op_.kv_heads);
    const std::int64_t groups = layout_.groups_of(which, head, op_.kv_heads, op_.dtype);
    const std::byte* row = row_of(block, 0);
    for (std::int32_t t = 0; t < count; ++t, row += layout_.row) {
      dequantize_head(rows_ + t * op_.head_dim, row + codes, row + groups, op_.head_dim,
                         op_.format);
    }
    return {rows_, op_.head_dim};
  }

  const AttentionSlice& slice_;
  const Attention& op_;
  const KvRowLayout layout_;
  T* const rows_;  // (block_tokens, head_dim)
};

// What will be read after the keys or values at work: positions of all heads of the slice, prefetched a
// few lines at a time while others are multiplied. A core drops prefetches that come in a burst.
template <typename Context>
class Ahead {
 public:
  explicit Ahead(const Context& context) : context_(context) {}

  void begin(int which, std::int32_t start, std::int32_t count) {
    which_ = which;
    position_ = start;
    end_ = start + count;
    begin_run();
  }
  // The next line; the last one again where there is none.
  const void* next() {
    if (runs_.lines[0] == 0) {
      begin_run();
    }
    if (runs_.lines[0] > 0) {
      --runs_.lines[0];
      runs_.data[0] += 64;
    }
    return runs_.data[0] - 64;
  }
  // Always in its caller: g++ takes a call of a function that only prefetches for one without effect.
  __attribute__((always_inline)) void prefetch(std::int64_t lines) {
    for (std::int64_t i = 0; i < lines; ++i) {
      __builtin_prefetch(next(), 0, 2);
    }
  }

 private:
  void begin_run() {
    if (runs_.lines[1] > 0) {
      runs_ = {{runs_.data[1], nullptr}, {runs_.lines[1], 0}};
    } else if (position_ < end_) {
      runs_ = context_.runs(which_, position_ / kBlockTokens, position_ % kBlockTokens);
      ++position_;
    }
  }

  const Context& context_;
  int which_ = 0;
  std::int32_t position_ = 0, end_ = 0;
  Runs runs_{};
};

// The same for multiply_panels: as many lines as it reads of such numbers, and one at least.
template <typename Context>
struct LinesAhead {
  Ahead<Context>* ahead;

  static constexpr int lines(int panels) {
    return (panels * static_cast<int>(sizeof(typename Context::Number)) + 3) / 4;
  }
  const void* at(std::int64_t, std::int64_t) const { return ahead->next(); }
};

}  // namespace
}  // namespace poise::cpu
