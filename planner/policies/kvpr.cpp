#include <algorithm>
#include <cmath>

#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"
#include "planner/policies/split_point.h"

namespace poise {
namespace {

constexpr double kDefaultKvprShare = 0.5;

class Kvpr final : public Policy {
 public:
  explicit Kvpr(const PolicyOptions& options)
      : act_share_(checked_act_share(options)), profile_(options.profile) {}

  Allocation allocate(const AllocationInputs& inputs) const override {
    const std::int32_t blocks = std::max(inputs.largest_request, 1);
    return split_host(inputs, static_cast<double>(first_blocks(blocks)) / blocks);
  }
  BlockKind next_block(const Allocation&, const RequestSplit& request) const override {
    return request.act_blocks + request.kv_blocks < first_blocks(request.most_blocks)
               ? BlockKind::act
               : BlockKind::kv;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }

 private:
  // l, in blocks, of a request that comes to have `blocks` of them.
  std::int32_t first_blocks(std::int32_t blocks) const {
    if (act_share_ || !profile_) {
      return static_cast<std::int32_t>(
          std::llround(act_share_.value_or(kDefaultKvprShare) * blocks));
    }
    return split_point(profile_->load_act, profile_->kv_gen, profile_->load_kv, blocks);
  }

  std::optional<double> act_share_;
  std::shared_ptr<const Profile> profile_;
};

}  // namespace

PolicyEntry kvpr_entry() {
  return {.name = "kvpr",
          .description =
              "the first l tokens of each request from activations, the rest as KV; l "
              "by a profile, or at --act-share (default 0.5)",
          .source = "KVPR (2024), Eq. 11-12",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            return std::make_unique<Kvpr>(options);
          },
          .needs_profile = true};
}

}  // namespace poise
