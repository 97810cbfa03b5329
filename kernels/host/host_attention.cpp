#include "kernels/host/host_attention.h"

#include "kernels/cpu/kernels_cpu.h"

namespace poise::host {

void host_attention(const HostAttention& op, cpu::Workers& workers) {
  cpu::scatter_rows(op.rows, workers);
  cpu::attention(op.attention, workers);
}

}  // namespace poise::host
