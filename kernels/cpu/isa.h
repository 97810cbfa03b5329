#pragma once
// Which instruction set the CPU kernels run on. All of them give the same bits (kernels.h): each
// algorithm is written once, over 16 lanes of float32 (lanes_*.h), and compiled once for each set.
// The first use chooses the best one the machine has; tests and benches may force another. Do not
// force one while kernels run; any thread may call the other functions.

#include <optional>
#include <string_view>
#include <vector>

namespace poise::cpu {

enum class Isa { portable, avx2, avx512 };

std::string_view name_of(Isa isa);
// The sets this machine can run, the fastest last; portable is always among them.
std::vector<Isa> available_isas();
Isa active_isa();
// Nothing: the best one again. REQUIRES: `isa` is available.
void force_isa(std::optional<Isa> isa);

}  // namespace poise::cpu
