#include <algorithm>

#include "common/trouble.h"
#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/host_placement.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

class Optimal final : public Policy {
 public:
  explicit Optimal(std::shared_ptr<const Profile> profile) : profile_(std::move(profile)) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    if (!profile_) {
      fail(
          "--policy optimal decides by what things cost: give it a profile of this machine "
          "(--profile) or name one (--machine), or use another policy");
    }
    const Allocation best = best_with_host(*profile_, inputs);
    // Nothing fits: the function that finds no room for these blocks names the memory.
    return best.all_act_blocks() + best.all_kv_blocks() > 0 ? best : split_host(inputs, 0);
  }
  bool chooses_concurrency() const override { return true; }
  BlockKind next_block(const Allocation& host, const RequestSplit& request) const override {
    return keep_ratio(host, request);
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    // Keys and values alone: nothing is computed beside the link that equal mini-batches would hide.
    const bool regenerates =
        std::ranges::any_of(items, [](const PackItem& item) { return item.act_slots > 0; });
    return regenerates ? pack_evenly(items, limits) : pack_plainly(items, limits);
  }

 private:
  std::shared_ptr<const Profile> profile_;
};

}  // namespace

PolicyEntry optimal_entry() {
  return {.name = "optimal",
          .description =
              "requests at a time, weights, ACT and KV blocks on device and host, and requests "
              "attended on host cores, so that the longest of link, computation and host cores is "
              "least, by a profile; ACT blocks and stores charged their way",
          .source = "the general program that CAPTURE's Algorithm 1 is a case of",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("optimal", options);
            return std::make_unique<Optimal>(options.profile);
          },
          .needs_profile = true};
}

}  // namespace poise
