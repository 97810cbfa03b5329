// The lane kernels for any machine.

#include "kernels/cpu/lanes_portable.h"

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

const LaneKernels& portable_kernels() {
  static constexpr LaneKernels table = table_of(Isa::portable);
  return table;
}

}  // namespace poise::cpu
