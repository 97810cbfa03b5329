#pragma once
// Numbers from the type a checkpoint stores them in to the type they are kept in, rounded to
// nearest even as PyTorch does. Uses the processor's wide instructions where it has them; the
// results are those of the scalar conversions of common/dtype.h, bit for bit (but for the payload
// of a NaN). Pure; any thread may call it.

#include <cstddef>
#include <span>

#include "common/dtype.h"

namespace poise {

// REQUIRES: both spans hold the same number of elements, and do not overlap. `in` need not be
// aligned.
void convert(DType from, std::span<const std::byte> in, DType to, std::span<std::byte> out);

namespace detail {
// The definition, one element at a time.
void convert_scalar(DType from, std::span<const std::byte> in, DType to, std::span<std::byte> out);
}  // namespace detail

}  // namespace poise
