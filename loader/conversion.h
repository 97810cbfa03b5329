#pragma once
// Converts numbers from a checkpoint's type to the kept type, rounded to nearest even as PyTorch does.
// It uses the processor's vector instructions if it has them; the results have the bits of the scalar
// conversions in common/dtype.h (except the payload of a NaN). Pure; any thread may call
// it.

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
