#include "kernels/host/host_attention.h"

#include <algorithm>
#include <memory>

#include "common/dtype.h"
#include "kernels/cpu/kernels_cpu.h"

namespace poise::host {
namespace {

// Rows of queries, and of attention's output, of all sequences; they stand in any order.
std::int64_t rows_of(const Attention& op) {
  std::int64_t rows = 0;
  for (std::int32_t s = 0; s < op.sequence_count; ++s) {
    const AttentionSequence& one = op.sequences[s];
    rows = std::max<std::int64_t>(rows, std::int64_t{one.first_row} + one.new_tokens);
  }
  return rows;
}

// Attention between rows of T, which a GPU keeps, in float32 and rounded once.
template <typename T>
void attend_narrow(Attention op, cpu::Workers& workers) {
  const auto* q = static_cast<const T*>(op.q);
  auto* out = static_cast<T*>(op.out);
  const std::int64_t rows = rows_of(op), width = std::int64_t{op.heads} * op.head_dim;
  const auto numbers =
      std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(2 * rows * width));
  float* const wide_q = numbers.get();
  float* const wide_out = wide_q + rows * width;
  workers.parallel_for(rows, [&](std::int64_t row, int) {
    for (std::int64_t i = row * width; i < (row + 1) * width; ++i) {
      wide_q[i] = to_float(q[i]);
    }
  });
  op.q = wide_q;
  op.out = wide_out;
  if (op.format == KvFormat::plain) {
    cpu::attention(op, workers);
  } else {
    cpu::attention_from_codes(op, workers);
  }
  cpu::convert({.out = {.data = out, .dtype = op.row_dtype, .stride = width},
                .in = wide_out,
                .rows = static_cast<std::int32_t>(rows),
                .dim = static_cast<std::int32_t>(width)},
               workers);
}

}  // namespace

void host_attention(const HostAttention& op, cpu::Workers& workers) {
  cpu::scatter_rows(op.rows, workers);
  switch (op.attention.row_dtype) {
    case DType::float16:
      return attend_narrow<Half>(op.attention, workers);
    case DType::bfloat16:
      return attend_narrow<BFloat16>(op.attention, workers);
    default:
      return cpu::attention(op.attention, workers);
  }
}

}  // namespace poise::host
