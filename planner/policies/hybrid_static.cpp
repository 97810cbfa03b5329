#include <algorithm>
#include <cmath>

#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

// Equal bytes of the host for both kinds. "Activation cache is filled first, followed by KV cache"
// is taken within each request: were it taken over all requests, the first ones would be all ACT and
// the last ones all KV, and no mini-batch could overlap anything.
class HybridStatic final : public Policy {
 public:
  Allocation allocate(const AllocationInputs& inputs) const override {
    const auto act = static_cast<double>(inputs.sizes.block(BlockKind::act).n);
    const auto kv = static_cast<double>(inputs.sizes.block(BlockKind::kv).n);
    return split_host(inputs, kv / (act + kv));
  }
  BlockKind next_block(const Allocation& host, const RequestSplit& request) const override {
    const double act = static_cast<double>(host.all_act_blocks());
    const double share = act / std::max(act + static_cast<double>(host.all_kv_blocks()), 1.0);
    return request.act_blocks < std::llround(share * request.most_blocks) ? BlockKind::act
                                                                          : BlockKind::kv;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }
};

}  // namespace

PolicyEntry hybrid_static_entry() {
  return {.name = "hybrid-static",
          .description = "host memory split 1:1, a request's ACT blocks first; plain mini-batches",
          .source = "CAPTURE (ICCD 2025), section V-E, Table III's \"+ Hybrid\"",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("hybrid-static", options);
            return std::make_unique<HybridStatic>();
          }};
}

}  // namespace poise
