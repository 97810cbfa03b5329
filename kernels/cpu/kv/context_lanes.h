#pragma once
// Keys and values of an AttentionSlice where they lie: plain ones in place, quantised ones as float32 in
// scratch, so that whoever multiplies knows rows of numbers alone. Included after kv_lanes.h and
// gemm_lanes.h (Columns).

#include <cstdint>

#include "common/formats/kv_format.h"
#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// Where keys and values come from. `keys` and `values` give those of a block's first `count` positions
// in one head of the slice: rows of head_dim, until the next call.
template <typename T>
class PlainContext {
 public:
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
  // Touches every cache line of the slice's keys and values of one position. The hardware prefetches
  // the one long run of memory that positions are; it would not prefetch one head's rows.
  void touch(std::int32_t block, std::int32_t token) const {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    const T* row = first_key(block) + token * token_stride_;
    for (const T* of : {row, row + value_offset_}) {
      for (std::int64_t d = 0; d < slice_.kv_heads * dim_; d += kLine) {
        static_cast<void>(*reinterpret_cast<const volatile char*>(of + d));
      }
    }
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
  QuantizedContext(const AttentionSlice& slice, float* scratch)
      : slice_(slice),
        op_(*slice.op),
        layout_(kv_row_layout(op_.kv_heads, op_.head_dim, op_.dtype, op_.format)),
        rows_(scratch) {}

  Columns<float> keys(std::int32_t head, std::int32_t block, std::int32_t count) const {
    return numbers(0, head, block, count);
  }
  Columns<float> values(std::int32_t head, std::int32_t block, std::int32_t count) const {
    return numbers(1, head, block, count);
  }
  void touch(std::int32_t block, std::int32_t token) const {
    const std::byte* row = row_of(block, token);
    const std::int64_t codes = slice_.kv_heads * layout_.codes;
    for (const std::int32_t which : {0, 1}) {
      const std::int64_t first = layout_.codes_of(which, slice_.kv_head, op_.kv_heads);
      for (std::int64_t at = 0; at < codes; at += 64) {
        static_cast<void>(*reinterpret_cast<const volatile char*>(row + first + at));
      }
    }
  }

 private:
  const std::byte* row_of(std::int32_t block, std::int32_t token) const {
    const ContextBlock& at = op_.blocks[slice_.sequence->first_block + block];
    return static_cast<const std::byte*>(op_.slots[at.buffer]) +
           (std::int64_t{at.slot} * kBlockTokens + token) * layout_.row;
  }

  Columns<float> numbers(std::int32_t which, std::int32_t slice_head, std::int32_t block,
                         std::int32_t count) const {
    const std::int32_t head = slice_.kv_head + slice_head;
    const std::int64_t codes = layout_.codes_of(which, head, op_.kv_heads);
    const std::int64_t groups = layout_.groups_of(which, head, op_.kv_heads, op_.dtype);
    const std::byte* row = row_of(block, 0);
    for (std::int32_t t = 0; t < count; ++t, row += layout_.row) {
      dequantize_head<T>(rows_ + t * op_.head_dim, row + codes, row + groups, op_.head_dim,
                         op_.format);
    }
    return {rows_, op_.head_dim};
  }

  const AttentionSlice& slice_;
  const Attention& op_;
  const KvRowLayout layout_;
  float* const rows_;  // (block_tokens, head_dim)
};

}  // namespace
}  // namespace poise::cpu
