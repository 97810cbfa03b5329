// Attention on host cores: decoding sequences whose KV blocks lie in memory, beside the speed at which these cores
// read the same memory. Shapes are those of real models: OPT-6.7B's, and Llama-3-8B's with four query heads to a key.

#include <fmt/core.h>

#include <cstring>
#include <vector>

#include "bench/kernels/bench.h"
#include "common/formats/kv_format.h"
#include "kernels/cpu/kernels_cpu.h"
#include "kernels/host/host_attention.h"

namespace poise::bench {
namespace {

constexpr std::int32_t kHostHeads = 32, kHostDim = 128;

struct HostShape {
  std::int32_t sequences, kv_heads;
};

void bench_shape(HostShape shape, DType dtype, KvFormat format, cpu::Workers& workers) {
  constexpr std::int32_t kContext = 1023;
  const auto [sequence_count, kv_heads] = shape;
  const std::int64_t row = kv_row_layout(kv_heads, kHostDim, dtype, format).row;
  const auto blocks_each = static_cast<std::int32_t>(ceil_div(kContext + 1, kBlockTokens));
  const std::int64_t bytes = row * kBlockTokens * blocks_each * sequence_count;
  // More memory than caches hold, of which each run reads another part.
  const std::int64_t copies = std::max<std::int64_t>(1, (std::int64_t{256} << 20) / bytes);
  const LoadersMemory memory(bytes * copies);
  std::memset(memory.data(), 0x31, static_cast<std::size_t>(bytes * copies));
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> sequences;
  std::vector<RowMove> moves;
  for (std::int32_t s = 0; s < sequence_count; ++s) {
    sequences.push_back({s, 1, kContext, static_cast<std::int32_t>(blocks.size())});
    for (std::int32_t b = 0; b < blocks_each; ++b) {
      blocks.push_back({.slot = static_cast<std::uint32_t>(blocks.size())});
    }
    moves.push_back({.from = s, .to = std::int64_t{blocks.back().slot} * kBlockTokens + 15});
  }
  const std::vector<std::byte> fresh(static_cast<std::size_t>(row * sequence_count),
                                     std::byte{0x31});
  // Rows are of the type that a GPU keeps them in.
  const std::size_t rows = static_cast<std::size_t>(sequence_count) * kHostHeads * kHostDim;
  const std::vector<float> numbers(rows, 0.01f);
  std::vector<std::byte> q(rows * sizeof(float)), out(rows * sizeof(float));
  cpu::convert({.out = {.data = q.data(), .dtype = dtype, .stride = kHostHeads * kHostDim},
                .in = numbers.data(),
                .rows = sequence_count,
                .dim = kHostHeads * kHostDim},
               workers);
  std::int64_t copy = 0;
  const double seconds = best_seconds([&] {
    copy = (copy + 1) % copies;
    std::byte* const here = memory.data() + copy * bytes;
    host::host_attention({.rows = {.out = here,
                                   .in = fresh.data(),
                                   .moves = moves.data(),
                                   .row_bytes = row,
                                   .count = sequence_count},
                          .attention = {.out = out.data(),
                                        .q = q.data(),
                                        .slots = {here, nullptr, nullptr},
                                        .dtype = dtype,
                                        .format = format,
                                        .row_dtype = dtype,
                                        .blocks = blocks.data(),
                                        .sequences = sequences.data(),
                                        .sequence_count = sequence_count,
                                        .heads = kHostHeads,
                                        .kv_heads = kv_heads,
                                        .head_dim = kHostDim,
                                        .scale = 0.0884f},
                          .bytes = bytes},
                         workers);
  });
  print_bytes(
      fmt::format("host attention {} x {}, {} of {} keys, {}", sequence_count, kContext + 1,
                  kv_heads, kHostHeads, format == KvFormat::plain ? name_of(dtype) : name_of(format)),
      seconds, static_cast<double>(bytes), read_speed(memory.data(), bytes * copies, workers));
}

}  // namespace

void bench_host_attention(cpu::Workers& workers, const Ceilings&) {
  // Key heads by sequences are what is shared out among cores: a few of each, and as many as in a run.
  for (const HostShape shape : {HostShape{8, 32}, HostShape{8, 8}, HostShape{32, 8}}) {
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
      bench_shape(shape, dtype, KvFormat::plain, workers);
    }
    for (const KvFormat format : {KvFormat::int8, KvFormat::int4}) {
      bench_shape(shape, DType::float16, format, workers);
    }
  }
}

}  // namespace poise::bench
