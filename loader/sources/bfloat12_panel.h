#pragma once
// One panel of bfloat12 (common/formats/bfloat12.h) from 16 rows of bfloat16 weights.

#include <cstddef>
#include <span>

namespace poise {

// False where the weights have more escapes than a panel has room for; then the panel is not whole. The same
// weights always give the same bytes. `rows`: (16, cols) bfloat16; `panel`: of bfloat12_panel(cols).
bool pack_bfloat12(std::span<const std::byte> rows, std::span<std::byte> panel);

}  // namespace poise
