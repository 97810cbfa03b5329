#pragma once
// Which instruction set the CPU kernels run on. All of them give the same bits (kernels.h): each
// algorithm is written once, over 16 lanes of float32 (lanes_*.h), and compiled once for each set.
// The best one the machine has is chosen at the first use; tests and benches may force another.
// Forcing is not for use while kernels run; everything else may be called from any thread.

#include <optional>
#include <string_view>
#include <vector>

namespace poise::cpu {

enum class Isa { portable, avx2, avx512 };

std::string_view name_of(Isa isa);
// What this machine can run, the fastest last; portable is always there.
std::vector<Isa> available_isas();
Isa active_isa();
// Nothing: back to the best. REQUIRES: `isa` is available.
void force_isa(std::optional<Isa> isa);

}  // namespace poise::cpu
