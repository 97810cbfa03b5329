#include <algorithm>
#include <optional>
#include <utility>

#include "planner/policies/allocation.h"
#include "planner/policies/best_placement.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

constexpr double kWorthKeeping = 0.99;  // of the time without it

// `all_act` with this number of KV blocks in place of ACT blocks and the layers unchanged, all of
// them on the device, and ACT blocks in what room they leave there; nothing where there is none.
std::optional<Allocation> with_kv_on_device(const AllocationInputs& inputs,
                                            const Allocation& all_act, std::int64_t kv) {
  const DeviceRoom& device = *inputs.device;
  const std::int64_t act = all_act.all_act_blocks() - kv;
  const std::int32_t layers = all_act.resident_layers.value_or(0);
  const Bytes free = device.left(act, kv, 0) - device.layer * layers +
                     (layers == inputs.layers ? device.streaming : Bytes{});
  const Bytes room = Bytes{free.n / inputs.layers} - inputs.sizes.block(BlockKind::kv) * kv;
  if (free.n < 0 || room.n < 0) {
    return std::nullopt;
  }
  // The host's pool has a block.
  const std::int64_t here = std::min(act - 1, room.n / inputs.sizes.block(BlockKind::act).n);
  Allocation blocks = all_act;
  blocks.act_blocks = static_cast<std::uint32_t>(act - here);
  blocks.gpu_act_blocks = static_cast<std::uint32_t>(here);
  blocks.gpu_kv_blocks = static_cast<std::uint32_t>(kv);
  return blocks;
}

// When all context that crosses the link is ACT and computation takes longer than the link, more ACT
// blocks on the device only make it busier; KV blocks there cost neither side. Chooses the number of KV
// blocks with the shortest iteration; `all_act` if there is no gain.
Allocation balanced_on_device(const Profile& profile, const AllocationInputs& inputs,
                              const Allocation& all_act) {
  const std::int64_t blocks = all_act.act_blocks;
  const auto first = best_placement(profile, inputs, blocks, 0);
  if (blocks < inputs.most_blocks || !first) {
    return all_act;  // if there are too few blocks, each should be of the smaller kind
  }
  const auto time = [&](const Allocation& placed) {
    return iteration_time(profile, inputs, placed).longest().n;
  };
  Allocation best = *first;
  std::int64_t low = 0, high = blocks;
  for (std::int64_t step = 0; step != 1;) {
    step = std::max<std::int64_t>(1, (high - low) / 32);
    for (std::int64_t kv = low; kv <= std::min(high, blocks - 1); kv += step) {
      const auto placed = with_kv_on_device(inputs, *first, kv);
      if (placed && time(*placed) < time(best)) {
        best = *placed;
      }
    }
    low = std::max<std::int64_t>(0, best.gpu_kv_blocks - step);
    high = std::min<std::int64_t>(blocks, best.gpu_kv_blocks + step);
  }
  return time(best) < kWorthKeeping * time(*first) ? best : all_act;
}

class ActOnly final : public Policy {
 public:
  explicit ActOnly(std::shared_ptr<const Profile> profile) : profile_(std::move(profile)) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    const Allocation all_act = split_host(inputs, 1);
    return profile_ && inputs.device && inputs.fixed.leaves_blocks_free()
               ? balanced_on_device(*profile_, inputs, all_act)
               : all_act;
  }
  BlockKind next_block(const Allocation& blocks, const RequestSplit& request) const override {
    return blocks.all_kv_blocks() > 0 ? keep_ratio(blocks, request) : BlockKind::act;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }

 private:
  std::shared_ptr<const Profile> profile_;
};

}  // namespace

PolicyEntry act_only_entry() {
  return {.name = "act-only",
          .description =
              "attention inputs cross the link, K and V are made again; where the device "
              "is the slower side by a profile, it keeps some KV blocks of its own",
          .source = "CAPTURE (ICCD 2025), Table III's Act-Cache",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("act-only", options);
            return std::make_unique<ActOnly>(options.profile);
          }};
}

}  // namespace poise
