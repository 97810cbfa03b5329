// The operations that take rows one at a time, and the packing of weights: all of them memory.

#include <fmt/core.h>

#include <cstring>
#include <vector>

#include "bench/kernels/bench.h"
#include "kernels/cpu/packed_matrix.h"

namespace poise::bench {
namespace {

constexpr std::int32_t kDim = 768;

void bench_layer_norm(std::int32_t rows, cpu::Workers& workers, const Ceilings& ceilings) {
  const std::size_t numbers = static_cast<std::size_t>(rows) * kDim;
  const std::vector<float> in(numbers, 0.5f);
  std::vector<float> out(numbers);
  const std::vector<float> parameters(kDim, 1.0f);
  const double seconds = best_seconds([&] {
    cpu::layer_norm({.out = {out.data(), DType::float32, kDim},
                     .in = in.data(),
                     .weight = parameters.data(),
                     .bias = parameters.data(),
                     .dtype = DType::float32,
                     .rows = rows,
                     .dim = kDim,
                     .epsilon = 1e-5f},
                    workers);
  });
  print_bytes(fmt::format("layer_norm {} x {}", rows, kDim), seconds,
              static_cast<double>(numbers) * 4, ceilings.copy_bytes);
}

void bench_embed(std::int32_t rows, DType dtype, cpu::Workers& workers, const Ceilings& ceilings) {
  constexpr std::int32_t kVocabulary = 50272;
  const std::vector<std::byte> table(
      static_cast<std::size_t>(cpu::packed_bytes(kVocabulary, kDim, dtype).n), std::byte{0x3c});
  std::vector<std::int32_t> tokens;
  for (std::int32_t r = 0; r < rows; ++r) {
    tokens.push_back(static_cast<std::int32_t>(r * 7919LL % kVocabulary));
  }
  std::vector<float> out(static_cast<std::size_t>(rows) * kDim);
  const double seconds = best_seconds([&] {
    cpu::embed_tokens({out.data(), tokens.data(), {table.data(), kVocabulary, kDim, dtype}, rows},
                      workers);
  });
  // A column of a panel touches every line of it: what is read is the whole panel.
  const double read = static_cast<double>(rows) * kDim * 16 * static_cast<double>(size_of(dtype).n);
  print_bytes(fmt::format("embed_tokens {} x {} {}", rows, kDim, name_of(dtype)), seconds, read,
              ceilings.read_bytes);
}

void bench_pack(std::int32_t rows, std::int32_t cols, DType dtype, cpu::Workers& workers,
                const Ceilings& ceilings) {
  const auto bytes = static_cast<std::size_t>(cpu::packed_bytes(rows, cols, dtype).n);
  const std::size_t copies = (std::size_t{256} << 20) / bytes;
  const std::vector<std::byte> from(bytes * copies, std::byte{0x3c});
  std::vector<std::byte> to(bytes * copies);
  std::size_t copy = 0;
  const double one = best_seconds([&] {
    copy = (copy + 1) % copies;
    cpu::pack_matrix(to.data() + copy * bytes, from.data() + copy * bytes, rows, cols, dtype);
  });
  print_bytes(fmt::format("pack {} x {} {}, one thread", rows, cols, name_of(dtype)), one,
              static_cast<double>(bytes), ceilings.copy_bytes);
  const double one_memcpy = best_seconds([&] {
    copy = (copy + 1) % copies;
    std::memcpy(to.data() + copy * bytes, from.data() + copy * bytes, bytes);
  });
  print_bytes("     memcpy of it, one thread", one_memcpy, static_cast<double>(bytes),
              ceilings.copy_bytes);
  const double all = best_seconds([&] {
    copy = (copy + 1) % copies;
    const std::int64_t panels = cpu::panel_count(rows);
    workers.parallel_for(panels / 4, [&](std::int64_t item, int) {
      cpu::pack_panels(to.data() + copy * bytes, from.data() + copy * bytes, rows, cols, dtype,
                       4 * item, std::min(panels, 4 * item + 4));
    });
  });
  print_bytes(fmt::format("pack {} x {} {}, all threads", rows, cols, name_of(dtype)), all,
              static_cast<double>(bytes), ceilings.copy_bytes);
}

// Packed weights to plain ones of bfloat16, several matrices in turn: bytes read and written.
void bench_unpack(Codes codes, cpu::Workers& workers, const Ceilings& ceilings) {
  constexpr std::int32_t kRows = 3072, kCols = 4096;
  const PackedFormat format{.codes = codes, .scale_dtype = DType::bfloat16, .group = 128};
  const auto bytes = static_cast<std::size_t>(packed_bytes(format, kRows, kCols).n);
  const std::size_t written = std::size_t{kRows} * kCols * 2;
  const std::size_t copies = (std::size_t{128} << 20) / bytes;
  const std::vector<std::byte> from(bytes * copies, std::byte{0x3c});
  std::vector<std::byte> to(written * copies);
  std::size_t copy = 0;
  const double seconds = best_seconds([&] {
    copy = (copy + 1) % copies;
    cpu::unpack({.out = to.data() + copy * written,
                 .weight = {.data = from.data() + copy * bytes,
                            .rows = kRows,
                            .cols = kCols,
                            .dtype = DType::bfloat16,
                            .packed = format}},
                workers);
  });
  print_bytes(fmt::format("unpack {} x {} of {}", kRows, kCols, name_of(codes)), seconds,
              static_cast<double>(bytes + written), ceilings.copy_bytes);
}

}  // namespace

void bench_rows(cpu::Workers& workers, const Ceilings& ceilings) {
  bench_layer_norm(32, workers, ceilings);
  bench_layer_norm(4096, workers, ceilings);
  for (const DType dtype : {DType::float32, DType::float16}) {
    bench_embed(32, dtype, workers, ceilings);
    bench_embed(4096, dtype, workers, ceilings);
    bench_pack(3072, 768, dtype, workers, ceilings);
    bench_pack(768, 3072, dtype, workers, ceilings);
  }
  for (const Codes codes : {Codes::int4, Codes::int8, Codes::bfloat12}) {
    bench_unpack(codes, workers, ceilings);
  }
}

}  // namespace poise::bench
