#pragma once
// Attention on host cores over KV blocks in place. It is memory's
// speed that counts: each key and value is read once for all query heads of its group, and neighbouring
// heads together, in long runs. The arithmetic is that of cpu::attention, for every format of KV blocks
// and every instruction set, so on the CPU device bits do not depend on where a sequence is attended. Beside a GPU, where they
// do, quantised blocks are attended from their codes (cpu::attention_from_codes): up to twice as fast.

#include <cstdint>

#include "kernels/kernels.h"

namespace poise {

// First the new rows are put into their blocks, then sequences are attended, the new rows among what
// they see. All of it is host memory.
struct HostAttention {
  ScatterRows rows;     // new rows, into the blocks
  Attention attention;  // slots[0]: the blocks
  std::int64_t bytes;   // of the rows of blocks that attention reads
};

namespace cpu {
class Workers;
}

namespace host {

// As the operations of kernels/cpu/kernels_cpu.h: splits the work over `workers`, and returns when it
// is done. Queries and outputs of 16 bits, which a GPU keeps, are float32 meanwhile, in memory that it takes
// for them; the output is rounded once.
void host_attention(const HostAttention& op, cpu::Workers& workers);

}  // namespace host
}  // namespace poise
