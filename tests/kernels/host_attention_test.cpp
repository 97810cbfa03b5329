#include "kernels/host/host_attention.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "kernels/cpu/kernels_cpu.h"

namespace poise {
namespace {

constexpr std::int32_t kHeads = 6, kKvHeads = 3, kHeadDim = 32;
constexpr std::int32_t kWidth = kHeads * kHeadDim;

Half of(float x, Half*) { return to_half(x); }
BFloat16 of(float x, BFloat16*) { return to_bfloat16(x); }

// Queries of T and blocks of T. The numbers are those of `seed`.
template <typename T>
struct HostCase {
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> sequences;
  std::vector<T> memory, fresh, q;
  std::vector<RowMove> moves;

  explicit HostCase(std::uint32_t seed) {
    std::mt19937 random(seed);
    std::int32_t row = 0;
    for (const std::int32_t context : {0, 15, 70, 300}) {
      sequences.push_back({row, 1, context, static_cast<std::int32_t>(blocks.size())});
      for (std::int32_t t = 0; t <= context; t += kBlockTokens) {
        blocks.push_back({.slot = static_cast<std::uint32_t>(blocks.size())});
      }
      moves.push_back({.from = row, .to = std::int64_t{blocks.back().slot} * kBlockTokens +
                                          context % kBlockTokens});
      ++row;
    }
    const auto fill = [&](std::vector<T>& numbers, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i) {
        numbers.push_back(of(static_cast<float>(random() % 2001) / 1000 - 1,
                             static_cast<T*>(nullptr)));
      }
    };
    fill(memory, blocks.size() * kBlockTokens * 2 * kKvHeads * kHeadDim);
    fill(fresh, sequences.size() * 2 * kKvHeads * kHeadDim);
    fill(q, sequences.size() * kWidth);
  }

  HostAttention op(void* out, const void* queries, DType blocks_type, DType rows_type) {
    return {.rows = {.out = reinterpret_cast<std::byte*>(memory.data()),
                     .in = reinterpret_cast<const std::byte*>(fresh.data()),
                     .moves = moves.data(),
                     .row_bytes = static_cast<std::int64_t>(sizeof(T)) * 2 * kKvHeads * kHeadDim,
                     .count = static_cast<std::int32_t>(moves.size())},
            .attention = {.out = out,
                          .q = queries,
                          .slots = {memory.data(), nullptr, nullptr},
                          .dtype = blocks_type,
                          .row_dtype = rows_type,
                          .blocks = blocks.data(),
                          .sequences = sequences.data(),
                          .sequence_count = static_cast<std::int32_t>(sequences.size()),
                          .heads = kHeads,
                          .kv_heads = kKvHeads,
                          .head_dim = kHeadDim,
                          .scale = 0.2F},
            .bytes = 0};
  }
};

// Queries and outputs as a GPU keeps them: the bits are those of float32 rows, rounded once.
template <typename T>
void expect_rounded_once(DType dtype) {
  HostCase<T> one(7);
  cpu::Workers workers(2);
  std::vector<float> wide_q, wide_out(one.q.size());
  for (const T x : one.q) {
    wide_q.push_back(to_float(x));
  }
  host::host_attention(one.op(wide_out.data(), wide_q.data(), dtype, DType::float32), workers);
  std::vector<T> out(one.q.size());
  host::host_attention(one.op(out.data(), one.q.data(), dtype, dtype), workers);
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_EQ(out[i].bits, of(wide_out[i], static_cast<T*>(nullptr)).bits) << i;
  }
}

TEST(HostAttention, RowsOf16BitsAreRoundedOnce) {
  expect_rounded_once<Half>(DType::float16);
  expect_rounded_once<BFloat16>(DType::bfloat16);
}

TEST(HostAttention, NewRowsAreInTheirBlocksBeforeTheyAreRead) {
  HostCase<Half> one(8);
  cpu::Workers workers(2);
  std::vector<Half> out(one.q.size());
  host::host_attention(one.op(out.data(), one.q.data(), DType::float16, DType::float16), workers);
  const std::int64_t row = 2 * kKvHeads * kHeadDim;
  for (std::size_t s = 0; s < one.moves.size(); ++s) {
    EXPECT_EQ(std::memcmp(one.memory.data() + one.moves[s].to * row,
                          one.fresh.data() + static_cast<std::int64_t>(s) * row,
                          static_cast<std::size_t>(row) * sizeof(Half)),
              0);
  }
  // A sequence of the new token alone attends its value.
  for (std::int32_t d = 0; d < kWidth; ++d) {
    const std::int32_t kv_head = d / kHeadDim / (kHeads / kKvHeads);
    const std::int32_t value = (kKvHeads + kv_head) * kHeadDim + d % kHeadDim;
    EXPECT_EQ(out[static_cast<std::size_t>(d)].bits,
              one.fresh[static_cast<std::size_t>(value)].bits);
  }
}

}  // namespace
}  // namespace poise
