#include "planner/allocation.h"
#include "planner/packing.h"
#include "planner/policies/entries.h"

namespace poise {
namespace {

class ActOnly final : public Policy {
 public:
  Allocation allocate(const AllocationInputs& inputs) const override {
    return split_host(inputs, 1);
  }
  BlockKind next_block(const Allocation&, const RequestSplit&) const override {
    return BlockKind::act;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }
};

}  // namespace

PolicyEntry act_only_entry() {
  return {.name = "act-only",
          .description = "attention inputs cross the link; all keys and values are made again",
          .source = "CAPTURE (ICCD 2025), Table III's Act-Cache",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("act-only", options);
            return std::make_unique<ActOnly>();
          }};
}

}  // namespace poise
