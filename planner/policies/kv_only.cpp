#include "planner/policies/allocation.h"
#include "planner/policies/entries.h"
#include "planner/policies/packing.h"

namespace poise {
namespace {

class KvOnly final : public Policy {
 public:
  Allocation allocate(const AllocationInputs& inputs) const override {
    return split_host(inputs, 0);
  }
  BlockKind next_block(const Allocation&, const RequestSplit&) const override {
    return BlockKind::kv;
  }
  std::vector<MiniBatchItems> pack(const Allocation&, std::span<const PackItem> items,
                                   const PackLimits& limits) const override {
    return pack_plainly(items, limits);
  }
};

}  // namespace

PolicyEntry kv_only_entry() {
  return {.name = "kv-only",
          .description = "keys and values cross the link; nothing is made again",
          .source = "FlexGen's zig-zag (ICML 2023)",
          .make = [](const PolicyOptions& options) -> std::unique_ptr<Policy> {
            refuse_act_share("kv-only", options);
            return std::make_unique<KvOnly>();
          }};
}

}  // namespace poise
