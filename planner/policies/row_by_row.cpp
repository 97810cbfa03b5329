#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

// No more blocks than one mini-batch holds: so all requests under way form one, and a layer's
// weights cross the link for them alone. (Prompts still come in several, by their rows.)
class RowByRow final : public Policy {
 public:
  Allocation allocate(const AllocationInputs& inputs) const override {
    Allocation blocks = split_host(one_mini_batch(inputs), 0);
    blocks.placed = true;  // no more of them on the device
    return blocks;
  }
  bool fills_the_device() const override { return true; }
  BlockKind next_block(const Allocation&, const RequestSplit&) const override {
    return BlockKind::kv;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }
};

}  // namespace

PolicyEntry row_by_row_entry() {
  return {.name = "row-by-row",
          .description =
              "no mini-batches: as many requests at a time as the device has buffers for, or as "
              "--mini-batch-tokens says",
          .source = "DeepSpeed-Inference (SC 2022), as CAPTURE compares with it",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("row-by-row", options);
            return std::make_unique<RowByRow>();
          }};
}

}  // namespace poise
