// Decoding rows that attend activations as they are, beside the same rows whose keys and values are made first (KV
// Gen, then attention). Shapes are those of real models: OPT-125m's and OPT-1.3B's.

#include <fmt/core.h>

#include <vector>

#include "bench/kernels/bench.h"

namespace poise::bench {
namespace {

void bench_shape(std::int32_t heads, std::int32_t dim, DType dtype, cpu::Workers& workers,
                 const Ceilings& ceilings) {
  constexpr std::int32_t kRows = 4, kContext = 511;
  const std::int32_t hidden = heads * dim;
  const auto blocks_each = static_cast<std::int32_t>(ceil_div(kContext + 1, kBlockTokens));
  const auto bytes = [&](std::int64_t numbers) {
    return std::vector<std::byte>(static_cast<std::size_t>(numbers * size_of(dtype).n),
                                  std::byte{0x31});
  };
  const std::int64_t tokens = std::int64_t{kRows} * blocks_each * kBlockTokens;
  const std::vector<std::byte> act = bytes(tokens * hidden);
  const std::vector<std::byte> weight = bytes(std::int64_t{2} * hidden * hidden);
  std::vector<std::byte> made = bytes(tokens * 2 * hidden);
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> sequences;
  for (std::int32_t s = 0; s < kRows; ++s) {
    sequences.push_back({s, 1, kContext, static_cast<std::int32_t>(blocks.size())});
    for (std::int32_t b = 0; b < blocks_each; ++b) {
      blocks.push_back({.slot = static_cast<std::uint32_t>(blocks.size()), .buffer = 3});
    }
  }
  const std::vector<float> q(std::size_t{kRows} * static_cast<std::size_t>(hidden), 0.01f);
  std::vector<float> out(q.size());
  std::vector<float> scratch(
      static_cast<std::size_t>(kRows * heads * absorbed_row_floats(hidden, dim, kContext + 1)));
  Attention attention{.out = out.data(),
                      .q = q.data(),
                      .slots = {},
                      .dtype = dtype,
                      .blocks = blocks.data(),
                      .sequences = sequences.data(),
                      .sequence_count = kRows,
                      .heads = heads,
                      .kv_heads = heads,
                      .head_dim = dim,
                      .scale = 0.125f,
                      .max_context = kContext + 1};
  const Matrix w_kv{weight.data(), 2 * hidden, hidden, dtype};
  const double absorbed = best_seconds([&] {
    cpu::absorbed_attention({.attention = attention,
                             .act = act.data(),
                             .w_kv = w_kv,
                             .b_kv = nullptr,
                             .scratch = scratch.data(),
                             .scratch_rows = kRows},
                            workers);
  });
  for (ContextBlock& block : blocks) {
    block.buffer = 0;
  }
  attention.slots[0] = made.data();
  const double regenerated = best_seconds([&] {
    cpu::gemm({.out = {.data = made.data(), .dtype = dtype, .stride = 2 * hidden},
               .in = {.data = const_cast<std::byte*>(act.data()), .dtype = dtype, .stride = hidden},
               .weight = w_kv,
               .bias = nullptr,
               .residual = nullptr,
               .rows = tokens,
               .epilogue = Epilogue::none},
              workers);
    cpu::attention(attention, workers);
  });
  const double operations = 4.0 * hidden * (std::int64_t{kRows} * hidden + double(tokens) * heads);
  print_flops(
      fmt::format("absorbed attention {} x {}, {} heads of {}, {}: {:.1f} x as fast as with KV Gen",
                  kRows, kContext + 1, heads, dim, name_of(dtype), regenerated / absorbed),
      absorbed, operations, ceilings);
}

}  // namespace

void bench_absorbed_attention(cpu::Workers& workers, const Ceilings& ceilings) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    bench_shape(12, 64, dtype, workers, ceilings);
    bench_shape(32, 64, dtype, workers, ceilings);
  }
}

}  // namespace poise::bench
