#include "common/trouble.h"
#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/host_placement.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

class ThreeWay final : public Policy {
 public:
  explicit ThreeWay(std::shared_ptr<const Profile> profile) : profile_(std::move(profile)) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    if (!profile_ || !profile_->knows_host()) {
      fail(
          "--policy three-way decides by what host cores cost beside link and device: give it a "
          "profile that was measured with them (--profile), or a machine with host_gbps "
          "(--machine), or use another policy");
    }
    const Allocation best = best_three_way(*profile_, inputs);
    return best.all_act_blocks() + best.all_kv_blocks() > 0 ? best : split_host(inputs, 0);
  }
  BlockKind next_block(const Allocation& host, const RequestSplit& request) const override {
    return keep_ratio(host, request);
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_evenly(items, limits);
  }

 private:
  std::shared_ptr<const Profile> profile_;
};

}  // namespace

PolicyEntry three_way_entry() {
  return {.name = "three-way",
          .description =
              "link, GPU and host cores in balance: some requests attended on host cores, the "
              "others' blocks ACT or KV, so that the longest of the three is least, by a profile",
          .source = "NEO's load balance (MLSys 2025), with activations",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("three-way", options);
            return std::make_unique<ThreeWay>(options.profile);
          },
          .needs_profile = true,
          .attends_on_host = true};
}

}  // namespace poise
