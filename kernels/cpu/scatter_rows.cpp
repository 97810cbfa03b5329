#include <cstring>

#include "kernels/cpu/by_rows.h"
#include "kernels/cpu/kernels_cpu.h"

namespace poise::cpu {

void scatter_rows(const ScatterRows& op, Workers& workers) {
  by_rows(workers, op.count, op.row_bytes / 4, [&](std::int64_t i) {
    std::memcpy(op.out + op.moves[i].to * op.row_bytes, op.in + op.moves[i].from * op.row_bytes,
                static_cast<std::size_t>(op.row_bytes));
  });
}

}  // namespace poise::cpu
