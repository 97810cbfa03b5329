#pragma once
// A large range of memory, worked on by all cores in strides. The call returns when every stride is done.

#include <cstdint>
#include <functional>

#include "common/units.h"

namespace poise {

// `work` gets [begin, end) of each stride, in any thread; once it returns false, no other stride begins.
void for_each_stride(Bytes size,
                     const std::function<bool(std::uint64_t begin, std::uint64_t end)>& work);

}  // namespace poise
