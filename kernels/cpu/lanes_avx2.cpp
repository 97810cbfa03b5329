// The lane kernels for x86 with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/dtype.h"
#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"
#include "kernels/kernels.h"
// Whole headers above, generic code below: what follows is compiled for the newer set, and none of it
// may have a name that another file shares.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
// How wide vectors are passed between files does not matter here: none are.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC target("avx2,fma,f16c")
#endif
#if defined(__clang__)  // builds with sanitizers inline nothing else, and a call would go through memory
#pragma clang attribute push(__attribute__((always_inline)), apply_to = function)
#endif
#include "kernels/cpu/lanes_avx2.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
// The order matters: each builds on the ones before it.
#include "kernels/cpu/math_lanes.h"
// clang-format off
#include "kernels/cpu/rows_lanes.h"
#include "kernels/cpu/packed/unpack_lanes.h"
#include "kernels/cpu/gemm_lanes.h"
#include "kernels/cpu/attention/scores_lanes.h"
#include "kernels/cpu/kv/kv_lanes.h"
#include "kernels/cpu/attention/attention_rows_lanes.h"
#include "kernels/cpu/kv/context_lanes.h"
#include "kernels/cpu/attention/attention_lanes.h"
#include "kernels/cpu/attention/codes_lanes.h"
#include "kernels/cpu/absorbed/absorbed_lanes.h"
#include "kernels/cpu/logits_lanes.h"
#include "kernels/cpu/lanes_table.h"
// clang-format on

namespace poise::cpu {

const LaneKernels& avx2_kernels() {
  static constexpr LaneKernels table = table_of(Isa::avx2);
  return table;
}

}  // namespace poise::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
