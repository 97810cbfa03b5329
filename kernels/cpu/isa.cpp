#include "kernels/cpu/isa.h"

#include <algorithm>
#include <atomic>

#include "common/instruction_sets.h"
#include "common/trouble.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

bool has(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
    case Isa::avx512:
      return has(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

const LaneKernels* table(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx512:
      return &avx512_kernels();
    case Isa::avx2:
      return &avx2_kernels();
#endif
    default:
      return &portable_kernels();
  }
}

std::atomic<const LaneKernels*>& active() {
  static std::atomic<const LaneKernels*> kernels = table(available_isas().back());
  return kernels;
}

}  // namespace

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "portable";
  }
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (has(isa)) {
      isas.push_back(isa);
    }
  }
  return isas;
}

Isa active_isa() { return active_kernels().isa; }

void force_isa(std::optional<Isa> isa) {
  const std::vector<Isa> isas = available_isas();
  check(!isa || std::find(isas.begin(), isas.end(), *isa) != isas.end(),
        "a forced instruction set is one the machine has");
  active() = table(isa.value_or(isas.back()));
}

const LaneKernels& active_kernels() { return *active().load(std::memory_order_relaxed); }

}  // namespace poise::cpu
