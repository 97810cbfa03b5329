#include "common/trouble.h"
#include "planner/allocation.h"
#include "planner/packing.h"
#include "planner/policies/entries.h"

namespace poise {
namespace {

constexpr double kDefaultActShare = 0.5;

class Hybrid final : public Policy {
 public:
  explicit Hybrid(double act_share) : act_share_(act_share) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    return split_host(inputs, act_share_);
  }
  BlockKind next_block(const Allocation& host, const RequestSplit& request) const override {
    return keep_ratio(host, request);
  }
  std::vector<MiniBatchItems> pack(const Allocation& host, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_balanced(host, items, limits);
  }

 private:
  double act_share_;  // of the blocks
};

}  // namespace

PolicyEntry hybrid_entry() {
  return {
      .name = "hybrid",
      .description =
          "ACT and KV blocks at the ratio --act-share gives (default 0.5), mini-batches balanced",
      .source = "CAPTURE (ICCD 2025), Eq. 5-7; HybridServe, Eq. 11-13",
      .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
        const double share = options.act_share.value_or(kDefaultActShare);
        if (!(share >= 0 && share <= 1)) {
          fail("--act-share {}: the share of ACT blocks lies between 0 and 1", share);
        }
        return std::make_unique<Hybrid>(share);
      }};
}

}  // namespace poise
