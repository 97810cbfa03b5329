#include <fmt/core.h>

#include <vector>

#include "bench/kernels/bench.h"

namespace poise::bench {
namespace {

void bench_one(std::int32_t sequences, std::int32_t context, std::int32_t fresh, DType dtype,
               cpu::Workers& workers, const Ceilings& ceilings) {
  constexpr std::int32_t kHeads = 12;
  constexpr std::int32_t kDim = 64;
  constexpr std::size_t kRow = kHeads * kDim;
  const std::int32_t blocks_each = static_cast<std::int32_t>(ceil_div(context + fresh, 16));
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> table;
  for (std::int32_t s = 0; s < sequences; ++s) {
    table.push_back({s * fresh, fresh, context, static_cast<std::int32_t>(blocks.size())});
    for (std::int32_t b = 0; b < blocks_each; ++b) {
      blocks.push_back({.slot = static_cast<std::uint32_t>(blocks.size())});
    }
  }
  const std::size_t bytes =
      blocks.size() * 16 * 2 * kRow * static_cast<std::size_t>(size_of(dtype).n);
  const std::size_t copies = std::max<std::size_t>(1, (std::size_t{128} << 20) / bytes);
  std::vector<std::byte> slots(bytes * copies, std::byte{0x31});
  std::vector<float> q(static_cast<std::size_t>(sequences * fresh) * kRow, 0.01f);
  std::vector<float> out(q.size());
  std::size_t copy = 0;
  const double seconds = best_seconds([&] {
    copy = (copy + 1) % copies;
    cpu::attention({.out = out.data(),
                    .q = q.data(),
                    .slots = {slots.data() + copy * bytes, nullptr, nullptr},
                    .dtype = dtype,
                    .blocks = blocks.data(),
                    .sequences = table.data(),
                    .sequence_count = sequences,
                    .heads = kHeads,
                    .kv_heads = kHeads,
                    .head_dim = kDim,
                    .scale = 0.125f},
                   workers);
  });
  const std::string name =
      fmt::format("attention {} x ({} + {}) {}", sequences, context, fresh, name_of(dtype));
  const double seen = static_cast<double>(fresh) * (context + (fresh + 1) / 2.0);
  const double flops = 4.0 * sequences * seen * kRow;
  if (flops / ceilings.flops > static_cast<double>(bytes) / ceilings.read_bytes) {
    print_flops(name, seconds, flops, ceilings);
  } else {
    print_bytes(name, seconds, static_cast<double>(bytes), ceilings.read_bytes);
  }
}

}  // namespace

void bench_attention(cpu::Workers& workers, const Ceilings& ceilings) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    bench_one(32, 160, 1, dtype, workers, ceilings);
    bench_one(4, 2000, 1, dtype, workers, ceilings);
    bench_one(32, 0, 128, dtype, workers, ceilings);
    bench_one(4, 0, 512, dtype, workers, ceilings);
    bench_one(1, 0, 2048, dtype, workers, ceilings);
    bench_one(1, 1792, 256, dtype, workers, ceilings);
  }
}

}  // namespace poise::bench
