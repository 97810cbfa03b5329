#include "planner/policies/allocation.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 31;  // of a kind; ids have 32 bits

Allocation at_share(std::int64_t blocks, double act_share) {
  const auto act = static_cast<std::int64_t>(std::llround(act_share * static_cast<double>(blocks)));
  return {.act_blocks = static_cast<std::uint32_t>(act),
          .kv_blocks = static_cast<std::uint32_t>(blocks - act)};
}

}  // namespace

Allocation split_host(const AllocationInputs& inputs, double act_share) {
  check(act_share >= 0 && act_share <= 1 && inputs.layers > 0, "a share lies between 0 and 1");
  const std::int64_t region = inputs.host.n / inputs.layers / kRegionAlignment * kRegionAlignment;
  const auto act = static_cast<double>(inputs.sizes.block(BlockKind::act).n);
  const auto kv = static_cast<double>(inputs.sizes.block(BlockKind::kv).n);
  const auto fit = static_cast<std::int64_t>(static_cast<double>(region) /
                                             (act_share * act + (1 - act_share) * kv));
  std::int64_t blocks =
      std::clamp<std::int64_t>(fit + 1, 0, std::min(inputs.most_blocks, kMaxBlocks));
  const auto fits = [&](const Allocation& split) {
    return PoolPartition{
        .region_bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(region, 0)),
        .act_blocks = split.act_blocks,
        .kv_blocks = split.kv_blocks}
        .fits(inputs.sizes);
  };
  while (blocks > 0 && !fits(at_share(blocks, act_share))) {
    --blocks;
  }
  return at_share(blocks, act_share);
}

FixedPlacement FixedPlacement::for_blocks(std::int64_t act_blocks, std::int64_t kv_blocks) const {
  FixedPlacement fixed = *this;
  if (gpu_share && !fixes_blocks()) {
    const auto part = [&](std::int64_t blocks) {
      return static_cast<std::uint32_t>(std::llround(*gpu_share * static_cast<double>(blocks)));
    };
    fixed.gpu_act_blocks = part(act_blocks);
    fixed.gpu_kv_blocks = part(kv_blocks);
  }
  return fixed;
}

bool attended_on_host(const Allocation& blocks, RequestId request) {
  const auto before = [&](std::int64_t n) {
    return std::floor(blocks.host_share * static_cast<double>(n));
  };
  return before(std::int64_t{request.n} + 1) > before(request.n);
}

std::int64_t blocks_of_mini_batch(const AllocationInputs& inputs) {
  const std::int64_t most = std::max<std::int64_t>(inputs.most_blocks, 1);
  return inputs.mini_batch > 0
             ? std::min<std::int64_t>(most, std::max(inputs.mini_batch, inputs.largest_request))
             : most;
}

AllocationInputs one_mini_batch(const AllocationInputs& inputs) {
  AllocationInputs one = inputs;
  one.most_blocks = std::min(inputs.most_blocks, blocks_of_mini_batch(inputs));
  return one;
}

BlockKind keep_ratio(const Allocation& host, const RequestSplit& request) {
  // |act / kv - ACT / KV| compared crosswise, in whole numbers.
  const std::int64_t act = host.all_act_blocks(), kv = host.device_kv_blocks();
  const std::int64_t with_act = std::abs((request.act_blocks + 1) * kv - request.kv_blocks * act);
  const std::int64_t with_kv = std::abs(request.act_blocks * kv - (request.kv_blocks + 1) * act);
  return with_act <= with_kv ? BlockKind::act : BlockKind::kv;
}

}  // namespace poise
