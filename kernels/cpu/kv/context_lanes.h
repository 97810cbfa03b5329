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

// Where the keys (0) or values (1) of a slice's heads lie in the row of a position: one run of numbers, or a run of codes and
// one of their groups. In bytes.
struct RowRuns {
  std::int64_t row;          // from one position to the next
  std::int64_t begin[2][2];  // of each run of the keys, of the values
  std::int64_t length[2];    // of each run; 0: there is no second one
};

// Where keys and values come from. `keys` and `values` give those of a block's first `count` positions
// in one head of the slice: rows of head_dim, until the next call. `runs` says where those of all its heads lie, for Ahead.
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
  RowRuns runs() const {
    const auto size = static_cast<std::int64_t>(sizeof(T));
    const std::int64_t first = slice_.kv_head * dim_;
    return {.row = token_stride_ * size,
            .begin = {{first * size, 0}, {(first + value_offset_) * size, 0}},
            .length = {slice_.kv_heads * dim_ * size, 0}};
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
  // What the numbers are made of. Codes of a block's first position in one head of the slice; groups of that position in
  // all of them; the next position is layout().row further.
  const KvRowLayout& layout() const { return layout_; }
  const std::uint8_t* codes(std::int32_t which, std::int32_t head, std::int32_t block) const {
    return reinterpret_cast<const std::uint8_t*>(
        row_of(block, 0) + layout_.codes_of(which, slice_.kv_head + head, op_.kv_heads));
  }
  const std::byte* groups(std::int32_t which, std::int32_t block) const {
    return row_of(block, 0) +
           layout_.groups_of(which, slice_.kv_head, op_.kv_heads, op_.dtype);
  }
  RowRuns runs() const {
    const auto begin = [&](int which, int run) {
      return run == 0 ? layout_.codes_of(which, slice_.kv_head, op_.kv_heads)
                      : layout_.groups_of(which, slice_.kv_head, op_.kv_heads, op_.dtype);
    };
    return {.row = layout_.row,
            .begin = {{begin(0, 0), begin(0, 1)}, {begin(1, 0), begin(1, 1)}},
            .length = {slice_.kv_heads * layout_.codes,
                       slice_.kv_heads * layout_.groups * 2 * size_of(op_.dtype).n}};
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
// few lines at a time while others are multiplied. A core drops prefetches that come in a burst. It calls nothing, so that its
// callers keep their numbers in registers, and knows no type, so that they are compiled once for all contexts of a type.
class Ahead {
 public:
  Ahead(const AttentionSlice& slice, const RowRuns& runs)
      : op_(*slice.op), blocks_(op_.blocks + slice.sequence->first_block), row_runs_(runs) {}

  // `start` is a block's first position.
  void begin(int which, std::int32_t start, std::int32_t count) {
    which_ = which;
    run_ = 0;
    position_ = start;
    end_ = start + count;
    begin_run();
  }
  // The next line; the last one again where there is none.
  const void* next() {
    if (lines_ == 0) {
      begin_run();
    }
    if (lines_ > 0) {
      --lines_;
      line_ += 64;
    }
    return line_ - 64;
  }
  // Always in its caller: g++ takes a call of a function that only prefetches for one without effect.
  __attribute__((always_inline)) void prefetch(std::int64_t lines) {
    for (std::int64_t i = 0; i < lines; ++i) {
      __builtin_prefetch(next(), 0, 2);
    }
  }

 private:
  void begin_run() {
    if (run_ == 0 || row_runs_.length[1] == 0) {
      if (position_ >= end_) {
        return;
      }
      if (position_ % kBlockTokens == 0) {
        const ContextBlock& at = blocks_[position_ / kBlockTokens];
        row_ = static_cast<const char*>(op_.slots[at.buffer]) +
               std::int64_t{at.slot} * kBlockTokens * row_runs_.row;
      } else {
        row_ += row_runs_.row;
      }
      ++position_;
      run_ = 1;
      take_lines(0);
    } else {
      run_ = 0;
      take_lines(1);
    }
  }
  void take_lines(int run) {
    const char* const first = row_ + row_runs_.begin[which_][run];
    line_ = reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(first) / 64 * 64);
    lines_ = (first + row_runs_.length[run] + 63 - line_) / 64;
  }

  const Attention& op_;
  const ContextBlock* const blocks_;
  const RowRuns row_runs_;
  int which_ = 0;
  int run_ = 0;  // of the row at `row_`, the next one; 0: the first of another position
  std::int32_t position_ = 0, end_ = 0;
  const char* row_ = nullptr;
  const char* line_ = nullptr;
  std::int64_t lines_ = 0;
};

// Passes over positions start + [begin, count) of a chunk, `rest` positions before what the slice sees ends: keys(first, end) for
// some blocks of it at a time, then between(), then values(first, end). What is read next is prefetched meanwhile; behind the
// values come the next chunk's keys.
template <typename Keys, typename Between, typename Values>
inline void pass_chunk(Ahead& ahead, std::int32_t start, std::int32_t begin, std::int32_t count,
                       std::int32_t rest, Keys keys, Between between, Values values) {
  static constexpr std::int32_t kAtOnce = 4 * kBlockTokens;
  const auto at_most = [](std::int32_t positions) {
    return positions < kAtOnce ? positions : kAtOnce;
  };
  const auto pass = [&](int which, std::int32_t next, std::int32_t next_count, auto work) {
    for (std::int32_t t = begin; t < count; t += kAtOnce) {
      const std::int32_t end = t + at_most(count - t);
      if (end < count) {
        ahead.begin(which, start + end, at_most(count - end));
      } else {
        ahead.begin(1 - which, next, at_most(next_count));
      }
      work(t, end);
    }
  };
  pass(0, start + begin, count - begin, keys);
  between();
  pass(1, start + count, rest, values);
}

// The same for score_in_place: as many lines as sixteen numbers of so many keys fill, where `part` parts of them came before.
template <typename Number>
struct PartsAhead {
  Ahead* ahead;

  void operator()(int keys, std::int64_t part) const {
    const std::int64_t quarters = keys * static_cast<std::int64_t>(sizeof(Number));
    ahead->prefetch((part + 1) * quarters / 4 - part * quarters / 4);
  }
};

// The same for multiply_panels: as many lines as it reads of such numbers, and one at least.
template <typename Number>
struct LinesAhead {
  Ahead* ahead;

  static constexpr int lines(int panels) {
    return (panels * static_cast<int>(sizeof(Number)) + 3) / 4;
  }
  const void* at(std::int64_t, std::int64_t) const { return ahead->next(); }
};

}  // namespace
}  // namespace poise::cpu
