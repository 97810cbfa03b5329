#include "planner/policies/algorithm1.h"
#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

constexpr double kDefaultActShare = 0.5;

class Hybrid final : public Policy {
 public:
  explicit Hybrid(const PolicyOptions& options)
      : act_share_(checked_act_share(options)), profile_(options.profile) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    if (act_share_ || !profile_) {
      return split_host(inputs, act_share_.value_or(kDefaultActShare));
    }
    // `inputs.host` is what M_Host has left beside S_weight. ACT blocks that later find a place on
    // the device (planner/memory/sizes.h) are taken from the host's: as far as Algorithm 1 counts, that
    // moves nothing, since computation has them all and the link is not charged for them.
    const HostBlocksSplit split =
        algorithm1_filled({.load_w = profile_->load_w(1),
                           .kv_gen = profile_->kv_gen,
                           .load_kv = profile_->load_kv,
                           .host = inputs.host,
                           .kv_block = inputs.sizes.block(BlockKind::kv) * inputs.layers,
                           .act_block = inputs.sizes.block(BlockKind::act) * inputs.layers},
                          static_cast<double>(inputs.most_blocks));
    return split_host(inputs, split.act_share());
  }
  BlockKind next_block(const Allocation& host, const RequestSplit& request) const override {
    return keep_ratio(host, request);
  }
  std::vector<MiniBatchItems> pack(const Allocation& host, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_balanced(host, items, limits);
  }

 private:
  std::optional<double> act_share_;  // of the blocks
  std::shared_ptr<const Profile> profile_;
};

}  // namespace

PolicyEntry hybrid_entry() {
  return {.name = "hybrid",
          .description =
              "ACT and KV blocks so that link and computation take as long, by a "
              "profile, or at --act-share (default 0.5); mini-batches balanced",
          .source = "CAPTURE (ICCD 2025), Algorithm 1, Eq. 5-7; HybridServe, Eq. 11-13",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            return std::make_unique<Hybrid>(options);
          },
          .needs_profile = true};
}

}  // namespace poise
