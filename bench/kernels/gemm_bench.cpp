#include <fmt/core.h>

#include <vector>

#include "bench/kernels/bench.h"
#include "kernels/cpu/packed_matrix.h"

namespace poise::bench {
namespace {

struct Shape {
  const char* name;
  std::int32_t outputs, inputs;
};
// OPT-125m's products.
constexpr Shape kShapes[] = {{"K, V", 1536, 768},
                             {"Q or O", 768, 768},
                             {"fc1", 3072, 768},
                             {"fc2", 768, 3072},
                             {"head", 50272, 768}};

void bench_one(const Shape& shape, std::int64_t rows, DType dtype, cpu::Workers& workers,
               const Ceilings& ceilings) {
  const auto inputs = static_cast<std::size_t>(shape.inputs);
  const auto bytes =
      static_cast<std::size_t>(cpu::packed_bytes(shape.outputs, shape.inputs, dtype).n);
  // Several weights in turn, so that they come from memory, as a model's layers do.
  const std::size_t copies = std::max<std::size_t>(1, (std::size_t{192} << 20) / bytes);
  std::vector<std::byte> weights(bytes * copies, std::byte{0x3c});
  std::vector<float> in(static_cast<std::size_t>(rows) * inputs, 0.5f);
  std::vector<float> out(static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape.outputs));
  std::size_t copy = 0;
  const double seconds = best_seconds([&] {
    copy = (copy + 1) % copies;
    cpu::gemm({.out = {out.data(), DType::float32, shape.outputs},
               .in = {in.data(), DType::float32, shape.inputs},
               .weight = {weights.data() + copy * bytes, shape.outputs, shape.inputs, dtype},
               .rows = rows},
              workers);
  });
  const std::string name = fmt::format("gemm {:<6} {:<8} M={}", shape.name, name_of(dtype), rows);
  const double flops = 2.0 * static_cast<double>(rows) * shape.outputs * shape.inputs;
  // Whichever takes longer at its ceiling is what limits.
  if (flops / ceilings.flops > static_cast<double>(bytes) / ceilings.read_bytes) {
    print_flops(name, seconds, flops, ceilings);
  } else {
    print_bytes(name, seconds, static_cast<double>(bytes), ceilings.read_bytes);
  }
}

}  // namespace

void bench_gemm(cpu::Workers& workers, const Ceilings& ceilings) {
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const std::int64_t rows : {1, 4, 8, 32, 256, 4096}) {
      for (const Shape& shape : kShapes) {
        if (rows < 4096 || shape.outputs < 50000) {
          bench_one(shape, rows, dtype, workers, ceilings);
        }
      }
    }
  }
}

}  // namespace poise::bench
